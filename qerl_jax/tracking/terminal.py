"""A run in the terminal: a live view if the terminal can be redrawn, else a line per step."""

import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich import live, panel, progress, table, text
from rich.console import Console, Group

# What is shown of each step: label, metric, format. The first ones make up the line.
_LINE = (
    ("reward", "reward", "{:.3f}"),
    ("len", "completions/mean_length", "{:.0f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("tok/s", "perf/rollout_tokens_per_second", "{:,.0f}"),
    ("sigma", "aqn/sigma", "{:.1e}"),
    ("cut", "completions/clipped_ratio", "{:.0%}"),
    ("s", "step_time", "{:.1f}"),
    ("accuracy", "eval/accuracy", "{:.3f}"),
)
_TABLE = (
    *_LINE,
    ("reward std", "reward_std", "{:.3f}"),
    ("no signal", "frac_reward_zero_std", "{:.0%}"),
    ("clipped", "clip_ratio/region_mean", "{:.2%}"),
    ("sampler's entropy", "sampling/entropy", "{:.3f}"),
    ("mismatch", "sampling/sampling_logp_difference/mean", "{:.1e}"),
    ("KL", "kl", "{:.1e}"),
    ("grad norm", "grad_norm", "{:.2e}"),
    ("rollout s", "perf/rollout_time", "{:.2f}"),
    ("update s", "perf/update_time", "{:.2f}"),
    ("memory GB", "perf/peak_memory_gb", "{:.1f}"),
)
_BARS = " ▁▂▃▄▅▆▇█"
_CURVE = 24  # columns
_EXPECTED_BY = 8  # steps before, by which the time of the next is told
_TEXT = 600  # characters of a prompt or a completion


def curve(values: Sequence[float], width: int = 60) -> str:
    """One line of block characters from the smallest value to the largest, at most `width` columns.

    A column with a value that is not finite stays blank.
    """
    per_column = -(-len(values) // width)
    columns = [values[i : i + per_column] for i in range(0, len(values), per_column)]
    means = [sum(column) / len(column) for column in columns]
    finite = [mean for mean in means if math.isfinite(mean)] or [0.0]
    low, span = min(finite), max(finite) - min(finite) or 1.0
    levels = [
        1 + round((mean - low) / span * (len(_BARS) - 2)) if math.isfinite(mean) else 0
        for mean in means
    ]
    return "".join(_BARS[level] for level in levels)


@contextlib.contextmanager
def job(
    name: str, console: Console | None = None
) -> Iterator[tuple[Callable[[str], None], Callable[[float], None]]]:
    """Shows how far a job is and how long it will take, where the terminal can be redrawn; else its lines only.

    Args:
        name: Stands before the bar.
        console: Where it is shown; absent means the standard output.

    Yields:
        A function that shows a line, and one that is told which share of the job is done, from 0 to 1.
    """
    console = console or Console()
    if not console.is_terminal:
        yield (
            functools.partial(console.print, highlight=False, markup=False, soft_wrap=True),
            lambda share: None,
        )
        return
    columns = (
        progress.TextColumn(name),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        # Layers take minutes, so the last few are enough to estimate the rest.
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, speed_estimate_period=3600) as bar:
        task = bar.add_task(name, total=1.0)
        log = functools.partial(bar.console.print, highlight=False, markup=False, soft_wrap=True)
        yield log, lambda share: bar.update(task, completed=share)


class Display:
    """Shows the steps of a run."""

    def __init__(self, total_steps: int, step: int, console: Console):
        """Begins at `step` of `total_steps` on a console."""
        self._console = console
        self._total = total_steps
        self._history: dict[str, list[float]] = {}
        self._completion: Mapping[str, Any] | None = None
        self._live = None
        if console.is_terminal and not console.quiet:
            self._bar = progress.Progress(
                progress.TextColumn("step {task.completed}/{task.total}"),
                progress.BarColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("left"),
                progress.TimeRemainingColumn(),
            )
            self._task = self._bar.add_task("", total=total_steps, completed=step)
            self._step_bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TextColumn("{task.completed}/{task.total} rows"),
                progress.TimeElapsedColumn(),
                progress.TextColumn("{task.fields[expected]}"),
            )
            self._step_task = self._step_bar.add_task("rollout", total=None, expected="")
            self._live = live.Live(console=console, get_renderable=self._view)
            self._live.start()

    def begin_step(self, rows: int) -> None:
        """Begins a step of so many rows; estimates its time from earlier steps."""
        if self._live is None:
            return
        usual = self._usual_time()
        expected = "" if usual is None else f"of about {usual:.0f} s"
        self._step_bar.reset(self._step_task, total=rows, description="rollout", expected=expected)

    def row_ended(self) -> None:
        """One more row of the step has ended."""
        if self._live is not None:
            self._step_bar.advance(self._step_task)

    def phase(self, name: str) -> None:
        """What the step does now."""
        if self._live is not None:
            self._step_bar.update(self._step_task, description=name)

    def show(self, step: int, row: Mapping[str, Any]) -> None:
        """Shows the metrics of a step."""
        for name, value in row.items():
            self._history.setdefault(name, []).append(value)
        if self._live is not None:
            self._bar.update(self._task, completed=step)
            return
        shown = [f"{label} {form.format(row[name])}" for label, name, form in _LINE if name in row]
        if skipped := row.get("updates/skipped"):
            shown.append(f"skipped {skipped}")
        if step < self._total and (each := self._usual_time()) is not None:
            shown.append(f"left {_duration(each * (self._total - step))}")
        line = "  ".join((f"step {step}/{self._total}", *shown))
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def show_completion(self, row: Mapping[str, Any]) -> None:
        """Shows a sample (`prompt`, `completion`, `reward`, `length`, `stopped`) until the next one."""
        self._completion = row

    def note(self, text: str) -> None:
        """Shows a line that is no metric."""
        # A file has no width to wrap at, and what models write may hold brackets.
        whole = not self._console.is_terminal
        self._console.print(text, highlight=False, markup=False, soft_wrap=whole)

    def close(self) -> None:
        """Leaves the last view standing."""
        if self._live is not None:
            self._live.stop()

    def _usual_time(self) -> float | None:
        """Seconds of a step, from earlier ones; the first of this process compiles, and is left out."""
        times = self._history.get("step_time", [])[1:][-_EXPECTED_BY:]
        return statistics.median(times) if times else None

    def _view(self) -> Group:
        parts = [self._bar, self._step_bar]
        parts += [self._table()] if self._history else []
        parts += [self._sample()] if self._completion else []
        return Group(*parts)

    def _table(self) -> table.Table:
        """Two metrics a line: name, last value, and the course of the last steps."""
        grid = table.Table(box=None, padding=(0, 1), show_header=False)
        for style, justify in 2 * (("bold", "left"), (None, "right"), ("cyan", "left")):
            grid.add_column(style=style, justify=justify, no_wrap=True)
        cells = [
            (label, form.format(values[-1]), curve(values[-_CURVE:], _CURVE))
            for label, name, form in _TABLE
            if (values := self._history.get(name))
        ]
        for left, right in itertools.zip_longest(cells[::2], cells[1::2], fillvalue=()):
            grid.add_row(*left, *right)
        return grid

    def _sample(self) -> panel.Panel:
        row = self._completion
        # Text, not markup: a policy may write brackets.
        body = text.Text.assemble(
            (_shortened(asked(row["prompt"])), "dim"),
            "\n",
            _shortened(row["completion"]),
            overflow="fold",
        )
        end = "" if row["stopped"] else ", truncated"
        reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.2f}"
        title = f"{reward}, {row['length']} tokens{end}"
        return panel.Panel(body, title=title, title_align="left")


def asked(prompt: str | Sequence[Mapping[str, str]]) -> str:
    """The question of a prompt: its text, or the last message of a chat."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def _duration(seconds: float) -> str:
    """A time as hours, minutes and seconds: 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT else text[: _TEXT // 2] + " … " + text[-_TEXT // 2 :]
