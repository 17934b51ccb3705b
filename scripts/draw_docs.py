"""Draws the pictures of README and docs into docs/assets: `python -m scripts.draw_docs`.

Curves come from docs/measured/courses.jsonl, bars from docs/measured/benchmarks.jsonl, the schedules from the library
itself. (The block of NVFP4 does not change: this script drew it at commit 8aab746.) `--record NAME RUN_FOLDER` adds the
metrics of a run to courses.jsonl under a name. The same data gives the same files.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from qerl_jax.aqn import schedule as aqn

DOCS = pathlib.Path(__file__).parents[1] / "docs"
COURSES = DOCS / "measured" / "courses.jsonl"
METRICS = (
    *("reward", "entropy", "completions/mean_length", "completions/clipped_ratio"),
    *("frac_reward_zero_std", "aqn/sigma"),
)
BLUE, ORANGE, GREY, PALE, INK = "#3f51b5", "#e07b00", "#9aa1ab", "#e8eaf6", "#24292f"
STYLE = {
    "axes.edgecolor": "#d0d7de",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "savefig.facecolor": "white",  # readable on a dark page too
    "svg.fonttype": "path",
    "svg.hashsalt": "qerl",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def record(name: str, run_folder: str) -> None:
    """Writes the metrics of a run to courses.jsonl and replaces those of the same name."""
    lines = COURSES.read_text().splitlines() if COURSES.is_file() else []
    remaining = [line for line in lines if json.loads(line)["run"] != name]
    rows = map(json.loads, (pathlib.Path(run_folder) / "metrics.jsonl").read_text().splitlines())
    for row in rows:
        if "reward" in row:
            values = {metric: float(f"{row[metric]:.4g}") for metric in METRICS}
            remaining.append(json.dumps({"run": name, "step": row["step"], **values}))
    COURSES.write_text("\n".join(remaining) + "\n")


def course(name: str, metric: str) -> tuple[list[int], list[float]]:
    """Returns the steps of a recorded run, and a metric at each of them."""
    rows = [json.loads(line) for line in COURSES.read_text().splitlines()]
    rows_of_run = [row for row in rows if row["run"] == name]
    return [row["step"] for row in rows_of_run], [row[metric] for row in rows_of_run]


def readme() -> Figure:
    """Draws the reward of the quickstart, and tokens per second of this library and of vLLM."""
    figure = Figure(figsize=(8.6, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    left.plot(*course("healthy", "reward"), color=BLUE, lw=2)
    left.set(ylim=(0, 1), xlabel="step", ylabel="mean reward")
    left.set_title("The quickstart, on two cores of a CPU")
    lines = map(json.loads, (DOCS / "measured/benchmarks.jsonl").read_text().splitlines())
    sizes = [f"{size}B, {rows} rows" for size in (7, 14, 32) for rows in (8, 64)]
    is_shown = lambda line: (line["table"], line["device"]) == ("decoding", "NVIDIA H200")
    results = {line["name"]: line for line in filter(is_shown, lines)}
    places = np.arange(len(sizes))
    ours = [results[size]["value"] for size in sizes]
    theirs = [results[size]["baseline_value"] for size in sizes]
    right.bar(places - 0.2, ours, 0.38, color=BLUE, label="QeRL-JAX, with LoRA")
    right.bar(places + 0.2, theirs, 0.38, color=GREY, label="vLLM 0.26, with LoRA only at 7B")
    style = {"ha": "center", "va": "bottom", "size": 8}
    for position, mine, other in zip(places, ours, theirs, strict=True):
        right.annotate(f"{mine / other:.1f}x", (position - 0.2, mine), **style)
    right.set_xticks(places, [size.replace(", ", "\n") for size in sizes])
    right.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    right.set(ylabel="tokens per second", ylim=(0, 1.08 * max(ours)))
    right.set_title("Decoding with NVFP4 weights on one H200")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.title.set_fontsize(10)
    return figure


def schedules() -> Figure:
    """Draws sigma over a run of 1,000 steps, for each schedule."""
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1000)
    ends = {"sigma_start": 1e-2, "sigma_end": 1e-4, "num_stages": 10, "total_steps": 1000}
    colours = {"exponential": BLUE, "linear": ORANGE, "cosine": GREY, "logarithmic": "#009e73"}
    for kind, colour in colours.items():
        sigma = aqn.sigma_schedule(kind, **ends)
        axes.plot(steps, [float(sigma(step)) for step in steps], color=colour, lw=1.6, label=kind)
    axes.set(xlabel="step", ylabel="sigma of the noise")
    title = "noise.sigma_start = 1e-2, noise.sigma_end = 1e-4, noise.num_stages = 10"
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    return figure


def sick_runs() -> Figure:
    """Draws a healthy run and unhealthy ones, a column each."""
    runs = {
        "healthy": "Healthy\nthe quickstart",
        "broken": "Learning rate too high\noptim.learning_rate = 1e-1",
        "cut": "Completions cut off\nrollout.max_completion_length = 20",
        "loud": "Noise too strong\nnoise.sigma_start = 0.5",
        "silent": "Nothing to learn\na reward that is always 0",
    }
    shown = {
        "reward": ("reward", (-0.03, 1.03)),
        "frac_reward_zero_std": ("frac_reward_\nzero_std", (-0.03, 1.03)),
        "entropy": ("entropy", (0, 2.4)),
        "completions/clipped_ratio": ("completions/\nclipped_ratio", (-0.03, 1.03)),
    }
    figure = Figure(figsize=(11.5, 6), layout="constrained")
    places = figure.subplots(len(shown), len(runs), sharex=True)
    for column, (name, title) in enumerate(runs.items()):
        for axes, (metric, (label, limits)) in zip(places[:, column], shown.items(), strict=True):
            axes.plot(*course(name, metric), color=BLUE if name == "healthy" else ORANGE, lw=1.5)
            axes.set(ylim=limits, xlim=(0, 51))
            axes.grid(color="#eaeef2")
            if column == 0:
                axes.set_ylabel(label)
        places[0, column].set_title(title, fontsize=9)
        places[-1, column].set_xlabel("step")
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "readme.svg": readme,
    "aqn-schedules.svg": schedules,
    "runs.svg": sick_runs,
}


def main(argv: list[str] | None = None) -> None:
    """Draws all pictures; with --record it first records a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", nargs=2, metavar=("NAME", "RUN_FOLDER"))
    options = parser.parse_args(argv)
    if options.record:
        record(*options.record)
    (DOCS / "assets").mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in PICTURES.items():
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            draw().savefig(DOCS / "assets" / name, metadata=nothing)


if __name__ == "__main__":
    main()
