"""Shows a run in a terminal or a notebook: a live view if output can be redrawn, else a line per step."""

import contextlib
import functools
import itertools
import math
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich import live, panel, progress, table, text
from rich.console import Console, Group, RenderableType
from rich.jupyter import JupyterMixin

from qerl_jax.config import ModelConfig

# Values that are shown of each step: label, metric, format. Those of `_LINE` are shown where there is no live view.
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
    ("update's entropy", "update/entropy", "{:.3f}"),
    ("mismatch", "sampling/sampling_logp_difference/mean", "{:.1e}"),
    ("KL", "kl", "{:.1e}"),
    ("grad norm", "grad_norm", "{:.2e}"),
    ("rollout s", "perf/rollout_time", "{:.2f}"),
    ("update s", "perf/update_time", "{:.2f}"),
    ("memory GB", "perf/peak_memory_gb", "{:.1f}"),
)
# Means that are logged as 0 if they are of nothing, with the metric that is then 0.
_MEANS_OF = {
    "reward": "completions/judged_ratio",
    "reward_std": "completions/judged_ratio",
    "update/entropy": "update/rows",
}
_BARS = " ▁▂▃▄▅▆▇█"
_CURVE = 24  # columns
_EXPECTED_BY = 8  # latest steps from which the time of the next one is estimated
_TEXT = 600  # characters of a prompt or a completion
_BETWEEN_VIEWS = 0.5  # seconds from one view in a notebook to the next


def measured(row: Mapping[str, Any], name: str) -> Any | None:
    """Returns a metric of a step; None if it is absent, or the mean of nothing."""
    return None if row.get(_MEANS_OF.get(name)) == 0 else row.get(name)


def curve(values: Sequence[float], width: int = 60) -> str:
    """Draws values as one line of block characters, at most `width` columns, scaled from smallest to largest.

    A column with a value that is not finite is blank.
    """
    columns = itertools.batched(values, -(-len(values) // width))
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
    """Shows the progress and the remaining time of a job if output can be redrawn; else only its lines.

    Args:
        name: Label of the progress bar.
        console: Where it is shown; None means the standard output.

    Yields:
        A function that shows a line, and one that takes the share of the job that is done, from 0 to 1.
    """
    console = console or Console()
    bars = (progress.BarColumn(), progress.TaskProgressColumn(), progress.TimeElapsedColumn())
    columns = (name, *bars, "left", progress.TimeRemainingColumn())
    # Layers take minutes, so the last few are enough to estimate the rest.
    bar = progress.Progress(*columns, console=console, speed_estimate_period=3600)
    task = bar.add_task(name, total=1.0)
    with _live(console, lambda: bar) or contextlib.nullcontext():
        yield functools.partial(_print, console), lambda share: bar.update(task, completed=share)


def _print(console: Console, line: str) -> None:
    """Prints a line as it is: not wrapped, and brackets are not read as markup."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def say(lines: Sequence[str], *, quiet: bool) -> None:
    """Shows lines where there is no display yet."""
    for line in lines:
        _print(Console(quiet=quiet), line)


@contextlib.contextmanager
def loading(
    base: ModelConfig, *, quiet: bool, stderr: bool = False
) -> Iterator[Callable[[float], None] | None]:
    """Shows which base is loaded, and the progress.

    Args:
        base: The base.
        quiet: Whether to show nothing.
        stderr: Whether to write to the standard error, so that the lines are not among a command's results.

    Yields:
        A function that takes the share that is loaded, from 0 to 1; None if nothing is shown.
    """
    if quiet:
        yield None
        return
    console = Console(stderr=stderr)
    source = "random weights in the shape of " if base.random_base else ""
    # Printed before the bar starts: in a notebook the line would otherwise appear below the bar.
    _print(console, f"base: {source}{base.model_name_or_path}, held in {base.weights}")
    with job("reading the base", console) as (_, move):
        yield move
        move(1.0)  # random weights come all at once


class Display:
    """Shows the steps of a run."""

    def __init__(self, total_steps: int, step: int, console: Console):
        """Starts the display at `step` of `total_steps` on a console."""
        self._console = console
        self._total = total_steps
        self._history: dict[str, list[float]] = {}
        self._row: Mapping[str, Any] = {}
        self._completions: tuple[Mapping[str, Any], ...] = ()  # at most one
        bars = (progress.BarColumn(), progress.TimeElapsedColumn())
        self._bar = progress.Progress(
            "step {task.completed}/{task.total}", *bars, "left", progress.TimeRemainingColumn()
        )
        self._task = self._bar.add_task("", total=total_steps, completed=step)
        self._step_bar = progress.Progress(
            "{task.description}",
            progress.BarColumn(),
            "{task.completed}/{task.total} rows",
            progress.TimeElapsedColumn(),
            "{task.fields[expected]}",
        )
        # The bar is hidden until a step begins, when its number of rows is known.
        self._step_task = self._step_bar.add_task("", visible=False, expected="")
        self._counts = lambda: (0, 0)
        self._programs = progress.Progress(
            "compiled {task.completed}/{task.total} programs",
            progress.BarColumn(),
            progress.TimeElapsedColumn(),
        )
        self._programs_task = self._programs.add_task("", total=0)
        self._live = _live(console, self._view)
        if self._live is not None:
            self._live.start()

    def compiling(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Shows how many programs are compiled, and of how many, until all are.

        Without a live view, or if all programs compile when they are first called, it shows a line.
        """
        self._counts, (_, total) = counts, counts()
        what = f" {total} programs" if total else ""
        if self._live is None or not total:
            slow = "the first evaluation and the first step take longer than others"
            self.note(f"compiling{what}: {slow}")

    def begin_step(self, rows: int, name: str = "rollout") -> None:
        """Begins a step of `rows` rows, and estimates its time from earlier steps; or an "evaluation" of so many."""
        usual = self._usual_time() if name == "rollout" else None
        expected = "" if usual is None else f"of about {usual:.0f} s"
        shown = {"description": name, "expected": expected, "visible": True}
        self._step_bar.reset(self._step_task, total=rows, **shown)

    def row_ended(self) -> None:
        """Counts one more ended row."""
        self._step_bar.advance(self._step_task)

    def phase(self, name: str) -> None:
        """Shows the current phase of the step."""
        self._step_bar.update(self._step_task, description=name)

    def show(self, step: int, row: Mapping[str, Any]) -> None:
        """Shows the metrics of a step."""
        self._row = row
        for name in row:
            if (value := measured(row, name)) is not None:
                self._history.setdefault(name, []).append(value)
        self._bar.update(self._task, completed=step)
        if self._live is not None:
            return
        shown = [
            f"{label} {_formatted(row, name, form)}" for label, name, form in _LINE if name in row
        ]
        if skipped := row.get("updates/skipped"):
            shown.append(f"skipped {skipped}")
        if step < self._total and (step_time := self._usual_time()) is not None:
            shown.append(f"left {_duration(step_time * (self._total - step))}")
        _print(self._console, "  ".join((f"step {step}/{self._total}", *shown)))

    def show_completion(self, row: Mapping[str, Any]) -> None:
        """Shows a sample (`prompt`, `completion`, `reward`, `length`, `stopped`) until the next one."""
        self._completions = (row,)

    def note(self, text: str) -> None:
        """Shows a line of text."""
        # Text is not wrapped in a file, and brackets in a model's text are not markup.
        whole = not self._console.is_terminal
        self._console.print(text, highlight=False, markup=False, soft_wrap=whole)

    def close(self) -> None:
        """Ends the live view; the last one stays visible, without the bar of a step."""
        if self._live is not None:
            self._step_bar.update(self._step_task, visible=False)
            self._live.stop()

    def _usual_time(self) -> float | None:
        """Returns the median seconds of the latest steps, without the first of this process, which compiles."""
        times = self._history.get("step_time", [])[1:][-_EXPECTED_BY:]
        return statistics.median(times) if times else None

    def _view(self) -> Group:
        table = [self._table()] if self._history else []
        compiled, total = self._counts()
        self._programs.update(self._programs_task, completed=compiled, total=total)
        bars = [self._bar, self._step_bar, *[self._programs] * (compiled < total)]
        return Group(*bars, *table, *map(_sample, self._completions))

    def _table(self) -> table.Table:
        """Returns a table with two metrics per line: name, last value, and the curve of the last steps."""
        grid = table.Table(box=None, padding=(0, 1), show_header=False)
        for style, justify in 2 * (("bold", "left"), (None, "right"), ("cyan", "left")):
            grid.add_column(style=style, justify=justify, no_wrap=True)
        last = {name: values[-1] for name, values in self._history.items()} | self._row
        cells = [
            (label, _formatted(last, name, form), curve(values[-_CURVE:], _CURVE))
            for label, name, form in _TABLE
            if (values := self._history.get(name))
        ]
        for left, right in itertools.zip_longest(cells[::2], cells[1::2], fillvalue=()):
            grid.add_row(*left, *right)
        return grid


def _sample(row: Mapping[str, Any]) -> panel.Panel:
    prompt, completion = _shortened(asked(row["prompt"])), _shortened(row["completion"])
    # Text, not markup: a policy may write brackets.
    body = text.Text.assemble((prompt, "dim"), "\n", completion, overflow="fold")
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.2f}"
    title = f"{reward}, {row['length']} tokens{'' if row['stopped'] else ', truncated'}"
    return panel.Panel(body, title=title, title_align="left")


class _NotebookView(JupyterMixin):
    """A live view in a notebook, as rich's `Live` in a terminal: one output of a cell that is redrawn in place.

    `Live` itself needs ipywidgets in a notebook, and its output is not saved with the notebook.
    """

    def __init__(self, view: Callable[[], RenderableType]):
        """Shows nothing until `start`."""
        self._view = view
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._redraw, daemon=True)

    def __rich__(self) -> RenderableType:
        """Returns the current view."""
        return self._view()

    def start(self) -> None:
        """Shows the first view."""
        from IPython.display import display  # installed, because this is a notebook

        self._output = display(self, display_id=True)
        self._thread.start()

    def stop(self, *_: object) -> None:
        """Ends redrawing; the last view stays visible."""
        self._ended.set()
        self._thread.join()
        self._output.update(self)

    __enter__, __exit__ = start, stop

    def _redraw(self) -> None:
        while not self._ended.wait(_BETWEEN_VIEWS):
            self._output.update(self)


def _live(console: Console, view: Callable[[], RenderableType]) -> live.Live | _NotebookView | None:
    """Returns a display that redraws a view between its `start` and `stop`; None if output cannot be redrawn."""
    if console.quiet:
        return None
    if console.is_jupyter:
        return _NotebookView(view)
    return live.Live(console=console, get_renderable=view) if console.is_terminal else None


def asked(prompt: str | Sequence[Mapping[str, str]]) -> str:
    """Returns the question of a prompt: its text, or the last message of a chat."""
    return prompt if isinstance(prompt, str) else prompt[-1].get("content", "")


def _formatted(row: Mapping[str, Any], name: str, form: str) -> str:
    value = measured(row, name)
    return "none" if value is None else form.format(value)


def _duration(seconds: float) -> str:
    """Formats seconds as hours, minutes and seconds: 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT else text[: _TEXT // 2] + " … " + text[-_TEXT // 2 :]
