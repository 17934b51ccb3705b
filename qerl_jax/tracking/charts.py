"""Draws line charts of metrics over steps with matplotlib: as SVG for a page, as PNG files, and as one figure."""

import dataclasses
import html
import io
import itertools
import operator
import pathlib
import re
import statistics
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl_jax.system.files import writing

# Okabe and Ito's colours, distinct for colour-blind readers; the page has lighter ones for dark mode.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a8508c", "#8a6d00", "#3a8fc4")
# Lines also differ in their dashes, because colours may look alike in print.
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3), (4, 2), (1, 4))
_TEXT, _GRID = "#57606a", "#d5dae0"
_VARIABLES = {_TEXT: "var(--quiet)", _GRID: "var(--rule)"} | {
    colour: f"var(--c{index})" for index, colour in enumerate(COLOURS)
}
_STYLE = {
    "axes.edgecolor": _GRID,
    "axes.formatter.limits": (-4, 5),
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.labelcolor": _TEXT,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "grid.color": _GRID,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "svg.hashsalt": "qerl",  # makes the files of equal charts equal
    "text.parse_math": False,  # a run may have a $ in its name
    "xtick.color": _TEXT,
    "xtick.major.size": 0,
    "ytick.color": _TEXT,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
_SVG_INCHES = (4.6, 2.6)  # at 72 pixels per inch about a phone's width, so text can be read
_POINTS = 500  # most points of a line; more cannot be seen
_SMOOTHED_FROM = 60  # points


@dataclasses.dataclass(frozen=True)
class Line:
    """Values over steps, with a band from `low` to `high` if their spread is known."""

    label: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines that share a unit.

    Attributes:
        title: Heading of the chart.
        unit: Unit of the values; "" for none.
        lines: At least one line, each of at least one point.
        log: Whether the axis is logarithmic if values differ much (see `is_log`); values that are not positive
            are then left out.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    log: bool = False

    @property
    def is_log(self) -> bool:
        """Whether the axis is logarithmic: over less than 1.5 decades, a logarithmic axis would be hard to read."""
        positive = [v for line in self.lines for v in line.values if v > 0]
        return self.log and bool(positive) and max(positive) > 30 * min(positive)

    @property
    def slug(self) -> str:
        """The title as a file name."""
        return re.sub(r"[\W_]+", "-", self.title.lower()).strip("-")

    @property
    def summary(self) -> str:
        """The chart as a sentence, for screen readers."""
        ends = (
            f"{line.label} from {number(line.values[0])} at step {line.steps[0]} "
            f"to {number(line.values[-1])} at step {line.steps[-1]}"
            for line in self.lines
        )
        return f"{self.title}: {'; '.join(ends)}"


def number(value: float) -> str:
    """Formats a number with about three significant digits, without an exponent if that is short."""
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-4:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    # From 999.5 on three digits would round to 1e+03.
    return f"{value:,.0f}" if size >= 999.5 else f"{value:.3g}"


def smooth(values: Sequence[float]) -> list[float]:
    """Returns moving means over a window of about a tenth of all values, narrower at the ends."""
    reach = max(2, len(values) // 20)
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def extremes(steps: Sequence[int], values: Sequence[float]) -> dict[str, tuple[int, float]]:
    """Returns the (step, value) pairs "first", "lowest", "highest" and "last"."""
    points = list(zip(steps, values, strict=True))
    lowest, highest = (pick(points, key=operator.itemgetter(1)) for pick in (min, max))
    return {"first": points[0], "lowest": lowest, "highest": highest, "last": points[-1]}


def svg(chart: Chart, prefix: str) -> str:
    """Draws a chart, without title and legend, as an <svg> element for an HTML page, without references to other files.

    All ids begin with `prefix`, which must differ for each drawing of the page. Colours are the page's variables:
    `--c0` ... `--c5` for lines, `--quiet` for text and `--rule` for the grid.
    """
    file = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SVG_INCHES)
        _draw(figure.add_axes((0.155, 0.175, 0.83, 0.755)), chart)
        # Metadata is left out, because it has the date and URLs.
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    # The prolog has a URL, and the style would apply to the whole page.
    drawing = re.sub(r"^.*?<svg[^>]*>\s*<defs>\s*<style.*?</defs>", "", file.getvalue(), flags=re.S)
    drawing = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}", drawing)
    for colour, variable in _VARIABLES.items():
        drawing = drawing.replace(colour, variable)
    return (
        f'<svg viewBox="0 0 {72 * _SVG_INCHES[0]:g} {72 * _SVG_INCHES[1]:g}" role="img" '
        f'aria-label="{html.escape(chart.summary)}">{drawing.strip()}'
    )


def png(chart: Chart, path: str | pathlib.Path) -> None:
    """Draws a chart into a PNG file."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6, 3.6))
        # Axes have a fixed position, because a layout engine would take most of the time.
        _draw_whole(figure.add_axes((0.11, 0.13, 0.86, 0.78)), chart)
        with writing(path):
            figure.savefig(path, dpi=150)


def grid(charts: Sequence[Chart], columns: int = 3) -> Figure:
    """Draws charts side by side into one figure."""
    rows = -(-len(charts) // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5 * columns, 3 * rows), layout="constrained")
        places = figure.subplots(rows, columns, squeeze=False).flat
        for axes, chart in zip(places, charts, strict=False):
            _draw_whole(axes, chart)
        for axes in places[len(charts) :]:
            axes.remove()
    return figure


def _draw_whole(axes: Axes, chart: Chart) -> None:
    """Draws a chart with its title and, for several lines, a legend."""
    drawn = _draw(axes, chart)
    axes.set_title(", ".join(filter(None, (chart.title, chart.unit))), fontsize=10)
    if len(drawn) > 1:
        axes.legend(drawn, [line.label for line in chart.lines], fontsize=8)


def _draw(axes: Axes, chart: Chart) -> list:
    """Draws the lines, bands and axes of a chart; returns the lines as drawn."""
    drawn = [_draw_line(axes, line, index) for index, line in enumerate(chart.lines)]
    axes.set_xlabel("step", loc="right", labelpad=0)
    axes.locator_params(axis="x", integer=True, nbins=6)
    if chart.is_log:
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_formatter(lambda value, _: number(value))
        axes.yaxis.set_minor_formatter("")
    else:
        axes.locator_params(axis="y", nbins=5)
        # The axis starts at 0 if that is near, so that a share of about 1 % looks small.
        if 0 <= axes.dataLim.y0 < 0.35 * axes.dataLim.y1:
            axes.set_ylim(bottom=0)
    return drawn


def _draw_line(axes: Axes, line: Line, index: int):
    """Draws a line and its band; a long line is thinned, and one with many points is also drawn smoothed."""
    colour, dashes = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
    steps, values = _thinned(line.steps), _thinned(line.values)
    if len(values) >= _SMOOTHED_FROM:
        axes.plot(steps, values, color=colour, lw=0.6, alpha=0.35)
        values = smooth(values)
    style = {"color": colour, "dashes": [length / 2 for length in dashes] or (None, None)}
    (drawn,) = axes.plot(steps, values, lw=1.6, marker="o" * (len(values) < 15), **style)
    if line.low is not None:
        low, high = _thinned(line.low), _thinned(line.high)
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, lw=0)
    return drawn


def _thinned(values: Sequence[float]) -> tuple[float, ...]:
    """Reduces values to at most `_POINTS` means of neighbours."""
    width = -(-len(values) // _POINTS)
    return tuple(map(statistics.fmean, itertools.batched(values, width)))
