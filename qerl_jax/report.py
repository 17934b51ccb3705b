"""What a run folder shows: curves in the terminal and as a plot, and one sentence of accuracy."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from qerl_jax import log
from qerl_jax.display import curve


_PANELS = (
    ("reward", "reward"),
    ("eval/accuracy", "held-out accuracy"),
    ("entropy", "entropy, nats per token"),
    ("completions/mean_length", "completion length, tokens"),
    ("aqn/sigma", "AQN sigma"),
)


def lines(run_folder: str | pathlib.Path) -> list[str]:
    """The curves of a run as text, a line per metric with its first and last value; accuracy comes last.

    Raises:
        FileNotFoundError: When the folder holds no metrics.
    """
    shown = []
    series = _series(run_folder)
    for name, label in _PANELS:
        values = [value for _, value in series.get(name, [])]
        if name != "eval/accuracy" and values:
            shown.append(f"{label:28} {values[0]:8.4g} {curve(values)} {values[-1]:.4g}")
    if accuracy := series.get("eval/accuracy"):
        shown.append(f"held-out accuracy {accuracy[0][1]:.3f} -> {accuracy[-1][1]:.3f}")
    return shown


def plot(run_folder: str | pathlib.Path) -> pathlib.Path:
    """Draws the same curves into `curves.png` of the run folder and returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = _series(run_folder)
    panels = [(label, series[name]) for name, label in _PANELS if name in series]
    figure = Figure(figsize=(7, 2.2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (label, points) in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, index + 1)
        axes.plot(
            *zip(*points, strict=True), marker="o" if len(points) < 10 else None, color="#2a6f97"
        )
        axes.set_ylabel(label, fontsize=8)
        axes.grid(alpha=0.3)
    axes.set_xlabel("optimizer step")
    path = pathlib.Path(run_folder) / "curves.png"
    figure.savefig(path, dpi=120)
    return path


def _series(run_folder: str | pathlib.Path) -> dict[str, list[tuple[int, Any]]]:
    rows = log.read_metrics(run_folder)
    if not rows:
        raise FileNotFoundError(
            f"no metrics.jsonl with rows in {run_folder}: not a run folder, or nothing logged yet"
        )
    series: dict[str, list[tuple[int, Any]]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float):
                series.setdefault(name, []).append((row["step"], value))
    return series
