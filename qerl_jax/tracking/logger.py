"""Writes metrics and completions of a run to its folder, shows them in the terminal, and sends them to trackers."""

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from qerl_jax.system.files import parse_json, to_line, write_whole, writing
from qerl_jax.tracking import terminal, trackers


class Logger:
    """Writes the metrics of a run, and shows them.

    `metrics.jsonl` has one object per logged step, with its `step`. A resumed run first drops the rows after its
    checkpoint, so that the file is the same as if the run had never stopped. `compiling`, `begin_step`, `row_ended`,
    `phase` and `note` are those of `terminal.Display`.
    """

    def __init__(
        self,
        run_folder: str | pathlib.Path,
        *,
        total_steps: int,
        step: int = 0,
        quiet: bool = False,
        log_completions: bool = True,
        report_to: Sequence[str] = (),
        run_name: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        """Opens the files of a run that has done `step` of `total_steps` optimizer steps; 0 drops all earlier rows.

        The folder is made if it does not exist. `quiet` shows nothing in the terminal. `report_to`, `run_name` and
        `settings` are those of `trackers.start`.

        Raises:
            DiskError: If a file cannot be written.
        """
        self._folder = pathlib.Path(run_folder)
        self._path = self._folder / "metrics.jsonl"
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        stored, damaged = _read(self._path)
        warning = _set_aside(self._path, damaged)
        rows = [row for row in stored if row["step"] <= step and step > 0]
        write_whole(self._path, "".join(json.dumps(row) + "\n" for row in rows))
        for saved_step, path in completion_files(self._folder).items():
            if saved_step > step:
                path.unlink()
        with writing(self._path):
            # Unbuffered, so that a failed write raises at once.
            self._file = self._path.open("ab", buffering=0)
        self._log_completions = log_completions
        self._trackers = trackers.start(
            report_to, self._folder, step=step, run_name=run_name, settings=settings or {}
        )
        self._display = display = terminal.Display(total_steps, step, Console(quiet=quiet))
        self.begin_step, self.row_ended = display.begin_step, display.row_ended
        self.phase, self.note, self.compiling = display.phase, display.note, display.compiling
        if warning:
            self.note(warning)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one row, and shows it; values are converted to plain numbers.

        Raises:
            DiskError: If the row cannot be written; then no part of it is in the file.
        """
        # "step" comes first, and a metric of that name, which a reward may log, does not replace it.
        row = {"step": step} | {k: plain(v) for k, v in metrics.items() if k != "step"}
        with writing(self._path):
            self._append(json.dumps(row).encode() + b"\n")
        for tracker in self._trackers:
            tracker.write(step, row)
        self._display.show(step, row)

    def write_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows the first completion, and writes `completions/step_<step>.jsonl` with one object per completion."""
        self._display.show_completion(rows[0])
        if not self._log_completions:
            return
        folder = self._folder / "completions"
        with writing(folder):
            folder.mkdir(exist_ok=True)
        text = "".join(to_line(row, default=plain) for row in rows)
        write_whole(folder / f"step_{step:06d}.jsonl", text)

    def _append(self, line: bytes) -> None:
        """Writes a line completely or not at all."""
        size = self._path.stat().st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self._path, size)
            raise

    def close(self) -> None:
        """Ends the display and the trackers, and closes the file."""
        self._file.close()
        self._display.close()
        for tracker in self._trackers:  # some print a last line, which a live view would hide
            tracker.close()


class Unheard:
    """Replaces `Logger` in processes that write and show nothing, because the first process does."""

    def _nothing(self, *_) -> None:
        """Does nothing."""

    write = compiling = begin_step = row_ended = phase = write_completions = note = close = _nothing


def read_metrics(run_folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl in order; none if there is no such file.

    An incomplete last line is left out, and so are lines that are not rows of metrics: a resumed run moves these to
    another file, and says so.
    """
    return _read(pathlib.Path(run_folder) / "metrics.jsonl")[0]


def completion_files(run_folder: str | pathlib.Path) -> dict[int, pathlib.Path]:
    """Returns the files in `completions/` by step, in ascending order; files with other names are left out."""
    paths = pathlib.Path(run_folder).glob("completions/step_*.jsonl")
    by_step = {path.stem.removeprefix("step_"): path for path in paths}
    return {int(step): by_step[step] for step in sorted(by_step, key=_number) if _number(step) >= 0}


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else -1


def _read(path: pathlib.Path) -> tuple[list[dict[str, Any]], dict[int, bytes]]:
    """Returns the rows of a log, and the lines that are not rows by their numbers from 1 on."""
    *lines, rest = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    rows = list(map(_row, lines))
    damaged = {number: lines[number - 1] for number, row in enumerate(rows, 1) if row is None}
    rows.append(_row(rest))  # complete, but without a newline, if the process was killed in between
    return [row for row in rows if row is not None], damaged


def _row(line: bytes) -> dict[str, Any] | None:
    """Parses a line as a row of metrics; returns None if it is not one."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    holds = isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0
    return row if holds and type(row.get("num_tokens", 0)) is int else None


def _set_aside(path: pathlib.Path, damaged: Mapping[int, bytes]) -> str | None:
    """Appends lines that are not rows to a file beside the log, and returns the warning about them."""
    if not damaged:
        return None
    aside = path.with_name("metrics.damaged.jsonl")
    with writing(aside), aside.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in damaged.values()))
    named = ", ".join(map(str, list(damaged)[:5])) + (", ..." if len(damaged) > 5 else "")
    return (
        f"warning: {path}: {len(damaged)} of its lines are no rows of metrics (line {named}); they were moved "
        f"to {aside.name}, and all other rows are kept"
    )


def plain(value: Any) -> Any:
    """Converts a metric to a JSON value: arrays become numbers or lists, other objects become texts."""
    if isinstance(value, str | bool | int | float | None | list | dict):
        return value
    return value.tolist() if hasattr(value, "tolist") else str(value)
