"""Line charts of metrics over steps: as inline SVG for a page, and as PNG files."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import pathlib
from collections.abc import Sequence

# Okabe and Ito's colours, distinct to the colour-blind; the page has lighter ones for the dark.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a8508c", "#8a6d00", "#3a8fc4")
# Colour alone does not tell lines apart in print.
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 4")
# Units of the drawing: about pixels on a phone, so that its text can be read there.
_WIDTH, _HEIGHT = 400, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 10, 34
_SMOOTHED_FROM = 60  # points


@dataclasses.dataclass(frozen=True)
class Line:
    """Values over steps, with a band from `low` to `high` where something is known about their spread."""

    label: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines of one unit.

    Attributes:
        title: A heading.
        unit: Of the values; "" for none.
        lines: At least one, each of at least one point.
        log: Whether the axis is logarithmic, if values differ much; then those that are not positive
            are left out.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    log: bool = False

    @property
    def is_log(self) -> bool:
        """Whether the axis is logarithmic indeed: over less than a decade and a half nobody could read it."""
        positive = [v for line in self.lines for v in line.values if v > 0]
        return self.log and bool(positive) and max(positive) > 30 * min(positive)

    @property
    def slug(self) -> str:
        """The title as a file name."""
        letters = (c if c.isalnum() else " " for c in self.title.lower())
        return "-".join("".join(letters).split())

    @property
    def summary(self) -> str:
        """The chart in a sentence, for those who do not see it."""
        ends = (
            f"{line.label} from {number(line.values[0])} at step {line.steps[0]} "
            f"to {number(line.values[-1])} at step {line.steps[-1]}"
            for line in self.lines
        )
        return f"{self.title}: {'; '.join(ends)}"


def number(value: float, digits: int = 3) -> str:
    """So many significant digits, without an exponent where that is short."""
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-4:
        return f"{value:.{digits - 1}g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.0f}" if size >= 1000 else f"{value:.{digits}g}"


def tick_texts(values: Sequence[float]) -> list[str]:
    """Numbers with as many digits as tell them apart."""
    texts = ([number(value, digits) for value in values] for digits in range(3, 13))
    return next((each for each in texts if len(set(each)) == len(each)), list(map(str, values)))


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within [low, high], about `count` of them."""
    span = high - low
    step = 10.0 ** math.floor(math.log10(span / count))
    step *= next(m for m in (1, 2, 5, 10) if span / (m * step) <= count)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def smooth(values: Sequence[float]) -> list[float]:
    """Means over a window of a tenth of all values, narrower at the ends."""
    reach = max(2, len(values) // 20)
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def svg(chart: Chart) -> str:
    """The chart as one <svg>, coloured by the page's variables --c0 ... and drawn in its text's colour."""
    at, marks = _axes(chart)
    parts = []
    for text, x, y in marks["y"]:
        parts.append(
            f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text x="{x:.0f}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    for text, x, y in marks["x"]:
        parts.append(f'<text x="{x:.1f}" y="{y:.0f}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">step</text>')
    for index, line in enumerate(chart.lines):
        parts += _drawn(line, index, at, chart.is_log)
    parts.append(f'<path class="cursor" d="M0 {_TOP}V{_HEIGHT - _BOTTOM}" visibility="hidden"/>')
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{html.escape(chart.summary)}">{"".join(parts)}</svg>'
    )


def data(chart: Chart) -> str:
    """What the page's script needs to read values off the chart, as JSON that can stand in a <script>."""
    low, high = _span([step for line in chart.lines for step in line.steps])
    table = {
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "low": low,
        "high": high,
        "unit": chart.unit,
        "lines": [
            {
                "label": line.label,
                "steps": line.steps,
                "values": [number(value) for value in line.values],
            }
            for line in chart.lines
        ],
    }
    return json.dumps(table, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def swatch(index: int) -> str:
    """A piece of line `index`, for a legend."""
    return (
        f'<svg class="swatch" viewBox="0 0 26 8" aria-hidden="true">'
        f'<path class="line" style="stroke:var(--c{index % len(COLOURS)})" '
        f'stroke-dasharray="{_DASHES[index % len(_DASHES)]}" d="M1 4H25"/></svg>'
    )


def png(chart: Chart, path: str | pathlib.Path) -> None:
    """Draws the chart into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.11, 0.13, 0.86, 0.78))  # a layout engine takes most of the time
    for index, line in enumerate(chart.lines):
        style = {"color": COLOURS[index % len(COLOURS)], "lw": 1.6}
        if dash := _DASHES[index % len(_DASHES)]:
            style["dashes"] = [float(each) / 2 for each in dash.split()]
        many = len(line.values) >= _SMOOTHED_FROM
        if many:
            axes.plot(line.steps, line.values, color=style["color"], lw=0.6, alpha=0.35)
        shown = smooth(line.values) if many else line.values
        marker = "o" if len(shown) < 10 else None
        axes.plot(line.steps, shown, label=line.label, marker=marker, ms=4, **style)
        if line.low is not None:
            axes.fill_between(
                line.steps, line.low, line.high, color=style["color"], alpha=0.18, lw=0
            )
    if chart.is_log:
        axes.set_yscale("log", nonpositive="mask")
    axes.set_title(", ".join(filter(None, (chart.title, chart.unit))), fontsize=10)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if len(chart.lines) > 1:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The least and the largest value, a little apart at least."""
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(1.0, abs(low)):
        return low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    return low, high


def _axes(chart: Chart):
    """The function from (step, value) to a place in the drawing, and the marks of both axes."""
    steps = [step for line in chart.lines for step in line.steps]
    values = [
        v for line in chart.lines for vs in (line.values, line.low, line.high) for v in vs or ()
    ]
    log = chart.is_log
    scale = math.log10 if log else float
    low, high = _span([scale(v) for v in values if v > 0 or not log])
    left, right = _span(steps)
    if log:
        low, high = math.floor(low + 0.01), math.ceil(high - 0.01)
        marked = [10.0**e for e in range(low, high + 1)]
    else:
        margin = 0.04 * (high - low)
        # Where zero is near, it is the floor: a share that hovers around 1 % should look small.
        low = 0.0 if 0 <= low < 0.35 * high else low - margin
        high += margin
        marked = ticks(low, high)

    def at(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + (step - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)
        share = (scale(value) - low) / (high - low)
        return x, _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    whole = [t for t in ticks(left, right) if t == int(t)]
    marks = {
        "y": [
            (text, _LEFT - 5, at(left, value)[1])
            for text, value in zip(tick_texts(marked), marked, strict=True)
        ],
        "x": [(f"{step:,.0f}", at(step, marked[0])[0], _HEIGHT - _BOTTOM + 15) for step in whole],
    }
    return at, marks


def _drawn(line: Line, index: int, at, log: bool) -> list[str]:
    colour = f'style="stroke:var(--c{index % len(COLOURS)});fill:var(--c{index % len(COLOURS)})"'
    usable = lambda *values: not log or all(value > 0 for value in values)
    points = [at(s, v) for s, v in zip(line.steps, line.values, strict=True) if usable(v)]
    if not points:
        return []
    parts = []
    if line.low is not None:
        band = [b for b in zip(line.steps, line.low, line.high, strict=True) if usable(*b[1:])]
        edge = [at(s, high) for s, _, high in band] + [at(s, low) for s, low, _ in band[::-1]]
        parts.append(f'<path class="band" {colour} d="{_path(edge)}Z"/>' if edge else "")
    dash = _DASHES[index % len(_DASHES)]
    if len(points) >= _SMOOTHED_FROM:
        parts.append(f'<path class="raw" {colour} d="{_path(points)}"/>')
        heights = smooth([y for _, y in points])
        points = [(x, y) for (x, _), y in zip(points, heights, strict=True)]
    parts.append(f'<path class="line" {colour} stroke-dasharray="{dash}" d="{_path(points)}"/>')
    if len(points) < 15:
        parts += [f'<circle {colour} cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points]
    return parts


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
