"""Metrics and completions of a run: written to its folder, shown in the terminal, sent to trackers."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from qerl_jax.files import whole_lines, write_whole
from qerl_jax.tracking import terminal, trackers


class Logger:
    """Writes the metrics of a run, and shows them.

    `metrics.jsonl` has one object per logged step with its `step`. A resumed run first drops what
    lies beyond its checkpoint, so that the file reads as if the run had never stopped.
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
        """Opens the files of a run that stands at `step`.

        Args:
            run_folder: Folder of the run; made if it does not exist.
            total_steps: Number of optimizer steps of the whole run.
            step: Number of optimizer steps done.
            quiet: Whether nothing is shown.
            log_completions: Whether completions are written, too.
            report_to: Names of trackers, see `trackers.start`.
            run_name: Name of the run in the trackers.
            settings: Config of the run that trackers keep.
        """
        self._folder = pathlib.Path(run_folder)
        self._path = self._folder / "metrics.jsonl"
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = [row for row in read_metrics(self._folder) if row["step"] <= step and step > 0]
        write_whole(self._path, "".join(json.dumps(row) + "\n" for row in rows))
        for path in self._folder.glob("completions/step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()
        self.num_tokens = max((row.get("num_tokens", 0) for row in rows), default=0)
        self._file = self._path.open("a")
        self._log_completions = log_completions
        self._trackers = trackers.start(
            report_to, self._folder, step=step, run_name=run_name, settings=settings or {}
        )
        self._display = terminal.Display(total_steps, step, Console(quiet=quiet))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one row; values become plain numbers."""
        row = {"step": step} | {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for tracker in self._trackers:
            tracker.write(step, row)
        self._display.show(step, row)

    def write_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows one completion, and writes `completions/step_<step>.jsonl`, an object per completion."""
        self._display.show_completion(rows[0])
        if not self._log_completions:
            return
        folder = self._folder / "completions"
        folder.mkdir(exist_ok=True)
        text = "".join(json.dumps(row, ensure_ascii=False, default=_plain) + "\n" for row in rows)
        write_whole(folder / f"step_{step:06d}.jsonl", text)

    def note(self, text: str) -> None:
        """Shows a line that is no metric."""
        self._display.note(text)

    def close(self) -> None:
        """Ends the display and the trackers, and closes the file."""
        self._file.close()
        self._display.close()
        for tracker in self._trackers:  # some print a farewell, which a live view would swallow
            tracker.close()


def read_metrics(run_folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl in order; a last line that a kill cut short is left out.

    Raises:
        ValueError: For another line that is no JSON.
    """
    return whole_lines(pathlib.Path(run_folder) / "metrics.jsonl")


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | int | float | None | list | dict):
        return value
    return value.tolist() if hasattr(value, "tolist") else str(value)
