"""Draws the pictures of README and docs into docs/assets: `python -m scripts.draw_docs`.

Curves come from docs/measured/courses.jsonl, bars from docs/measured/benchmarks.jsonl, the block and the schedules from
the library itself. `--record NAME RUN_FOLDER` adds the metrics of a run to courses.jsonl under a name. The same data
gives the same files.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from pallas_kernels.formats import nvfp4
from qerl_jax.aqn import schedule as aqn

DOCS = pathlib.Path(__file__).parents[1] / "docs"
COURSES = DOCS / "measured" / "courses.jsonl"
METRICS = (
    "reward",
    "sampling/entropy",
    "completions/mean_length",
    "completions/clipped_ratio",
    "frac_reward_zero_std",
    "aqn/sigma",
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
    kept = [line for line in lines if json.loads(line)["run"] != name]
    rows = map(json.loads, (pathlib.Path(run_folder) / "metrics.jsonl").read_text().splitlines())
    for row in rows:
        if "reward" in row:
            values = {metric: float(f"{row[metric]:.4g}") for metric in METRICS}
            kept.append(json.dumps({"run": name, "step": row["step"], **values}))
    COURSES.write_text("\n".join(kept) + "\n")


def course(name: str, metric: str) -> tuple[list[int], list[float]]:
    """Returns the steps of a recorded run, and a metric at each of them."""
    rows = [json.loads(line) for line in COURSES.read_text().splitlines()]
    own = [row for row in rows if row["run"] == name]
    return [row["step"] for row in own], [row[metric] for row in own]


def readme() -> Figure:
    """Draws the reward of the quickstart, and tokens per second of this library and of vLLM."""
    figure = Figure(figsize=(8.6, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    left.plot(*course("healthy", "reward"), color=BLUE, lw=2)
    left.set(
        ylim=(0, 1),
        xlabel="step",
        ylabel="mean reward",
        title="The quickstart, on two cores of a CPU",
    )
    lines = [
        json.loads(line) for line in (DOCS / "measured/benchmarks.jsonl").read_text().splitlines()
    ]
    sizes = (
        "7B, 8 rows",
        "7B, 64 rows",
        "14B, 8 rows",
        "14B, 64 rows",
        "32B, 8 rows",
        "32B, 64 rows",
    )
    found = {
        line["name"]: line
        for line in lines
        if line["table"] == "decoding" and line["device"] == "NVIDIA H200"
    }
    places = np.arange(len(sizes))
    ours = [found[size]["value"] for size in sizes]
    theirs = [found[size]["baseline_value"] for size in sizes]
    right.bar(places - 0.2, ours, 0.38, color=BLUE, label="QeRL-JAX, with LoRA")
    right.bar(places + 0.2, theirs, 0.38, color=GREY, label="vLLM 0.26, with LoRA only at 7B")
    for place, own, other in zip(places, ours, theirs, strict=True):
        right.annotate(f"{own / other:.1f}x", (place - 0.2, own), ha="center", va="bottom", size=8)
    right.set_xticks(places, [size.replace(", ", "\n") for size in sizes])
    right.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    right.set(ylabel="tokens per second", ylim=(0, 1.08 * max(ours)))
    right.set_title("Decoding with NVFP4 weights on one H200")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.title.set_fontsize(10)
    return figure


def block() -> Figure:
    """Draws one block of NVFP4: weights, codes, the scale of the block, and the decoded values."""
    weights = 0.02 * np.random.default_rng(7).standard_normal((64, 64)).astype(np.float32)
    packed = nvfp4.quantize(weights)
    own = weights[0, :16]
    codes = nvfp4.CODE_VALUES[np.asarray(nvfp4.unpack_codes(packed.codes))[0, :16]]
    scale, whole = float(packed.scales[0, 0]), float(packed.global_scale[0])
    figure = Figure(figsize=(9.6, 3.3))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 19.4), ylim=(0, 6.4))
    axes.axis("off")

    def row(y: float, texts: list[str], colour: str, label: str) -> None:
        axes.text(0.2, y + 0.4, label, va="center", size=9)
        for index, text in enumerate(texts):
            box = FancyBboxPatch(
                (3.3 + index, y), 0.86, 0.8, boxstyle="round,pad=0.02,rounding_size=0.1"
            )
            box.set(facecolor=colour, edgecolor="white")
            axes.add_patch(box)
            axes.text(3.73 + index, y + 0.4, text, ha="center", va="center", size=7.5)

    short = lambda values: [
        f"{each:.3f}".replace("0.", ".").replace("-.000", ".000") for each in values
    ]
    row(5.2, short(own), "#f0f1f3", "16 weights\n16 bits each")
    row(
        3.6,
        [f"{each:g}".replace("-0", "0") if each == 0 else f"{each:g}" for each in codes],
        PALE,
        "16 codes\n4 bits each (E2M1)",
    )
    scales = (
        (3.3, f"scale of the block: {scale:g}", "8 bits in E4M3, for 16 weights", "#ffe7cc"),
        (11.4, f"scale of the matrix: {whole:,.0f}", "32 bits, for all its weights", "#ffe7cc"),
    )
    for x, text, below, colour in scales:
        box = FancyBboxPatch((x, 2.05), 7.76, 0.8, boxstyle="round,pad=0.02,rounding_size=0.1")
        box.set(facecolor=colour, edgecolor="white")
        axes.add_patch(box)
        axes.text(x + 3.88, 2.45, f"{text}   ({below})", ha="center", va="center", size=8)
    axes.text(0.2, 2.45, "scales", va="center", size=9)
    back = codes * (scale / whole)
    row(0.6, short(back), "#f0f1f3", "16 decoded weights\ncode x block scale\n/ matrix scale")
    axes.text(
        3.3,
        0.2,
        "16 x 4 bits + 8 bits = 72 bits for 16 weights: 4.5 bits for each, instead of 16. "
        "A code is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign.",
        va="center",
        size=8.5,
    )
    return figure


def schedules() -> Figure:
    """Draws sigma over a run of 1,000 steps, for each schedule."""
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1000)
    for kind, colour in zip(
        ("exponential", "linear", "cosine", "logarithmic"),
        (BLUE, ORANGE, GREY, "#009e73"),
        strict=True,
    ):
        sigma = aqn.sigma_schedule(
            kind, sigma_start=1e-2, sigma_end=1e-4, num_stages=10, total_steps=1000
        )
        axes.plot(steps, [float(sigma(step)) for step in steps], color=colour, lw=1.6, label=kind)
    axes.set(xlabel="step", ylabel="sigma of the noise")
    axes.set_title(
        "noise.sigma_start = 1e-2, noise.sigma_end = 1e-4, noise.num_stages = 10", fontsize=10
    )
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
        "sampling/entropy": ("sampling/\nentropy", (0, 2.4)),
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
    "nvfp4-block.svg": block,
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
