"""Writes the results of the study to docs/results.md, with figures: `python -m scripts.study_results`.

It reads docs/measured/study.jsonl, with a line for each run of `scripts/study.py`; `--add FOLDER` adds those of a
folder, with what the page needs of them. Where runs are missing, the page says that they were not measured. All numbers
in its tables come from these files. The sentences that sum them up are in `study_page.md`, with their date; their
{{names}} are filled with numbers from the files. Intervals are Student's 95 % intervals over seeds. Arms are compared by
the model "arm + seed": runs with the same seed had the same problems in the same order. Its residuals are pooled over the
arms, and Holm's method allows for all comparisons.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qerl_jax.evaluation import intervals
from scripts import gsm8k_results, study
from scripts.study import ARMS, FIRST_SEEDS, MORE_SEEDS, RATES, RUNS, Piece
from scripts.two_way import Interval, contrast, holm, interval

ROOT = pathlib.Path(__file__).parents[1]
RESULTS, PAGE, FIGURES = (
    ROOT / "docs" / name for name in ("measured/study.jsonl", "results.md", "figures")
)
# The fixed texts of the page.
TEMPLATE = pathlib.Path(__file__).with_name("study_page.md")
MISSING = "not measured yet"
# Two arms count as equal if the interval of their difference in accuracy is within this.
MARGIN = 0.03
# Probability of an error among all comparisons.
ALPHA = 0.05
# The reward that `steps_to_level` looks for.
LEVEL = 0.4

if TYPE_CHECKING:
    from matplotlib.figure import Figure

type Results = Mapping[str, Mapping[str, Any]]
type Measure = Callable[[Mapping[str, Any]], float]


def entropy_at_start(run: Mapping[str, Any]) -> float:
    """Entropy of the sampler in the first rollout, in nats per token, before anything is learned and without noise."""
    return run["steps"]["entropy"][0]


def mean_reward(run: Mapping[str, Any]) -> float:
    """Mean training reward over all steps: its level, whether it grows or not."""
    return float(np.mean(run["steps"]["reward"]))


def steps_to_level(run: Mapping[str, Any]) -> float:
    """The first step whose training reward, smoothed as in the figures, is at least `LEVEL`; infinite if none is."""
    from qerl_jax.tracking.charts import smooth

    rewards = enumerate(smooth(run["steps"]["reward"]), 1)
    return next((step for step, reward in rewards if reward >= LEVEL), math.inf)


def accuracy(run: Mapping[str, Any]) -> float:
    """Held-out accuracy at the end, the mean over 8 samples."""
    return run["end"]["accuracy"]


def gain(run: Mapping[str, Any]) -> float:
    """Held-out accuracy at the end minus that at the start."""
    return run["end"]["accuracy"] - run["start"]["accuracy"]


def late_kl(run: Mapping[str, Any]) -> float:
    """Median divergence from the base in the last fifth of the steps: that of one batch may be ten times as much."""
    return run["late_kl"]


def record(run: Mapping[str, Any]) -> dict[str, Any]:
    """What the page needs of the result of a run: two series, and the others summed up."""
    steps, ends = run["steps"], ("start", "end")
    late = steps["kl"][-max(1, len(steps["kl"]) // 5) :]
    ends = {when: {name: run[when][name] for name in ("accuracy", "pass@8")} for when in ends}
    sums = {"late_kl": float(np.median(late)), "mismatch": float(np.mean(steps["mismatch"]))}
    series = {"steps": {name: steps[name] for name in ("reward", "entropy")}}
    return {name: run[name] for name in ("base", "device", "date")} | ends | sums | series


def read(path: pathlib.Path = RESULTS) -> tuple[Results, Results]:
    """Reads the runs of a file, and what `--timing` measured, by name."""
    lines = map(json.loads, path.read_text().splitlines())
    runs = {line.pop("name"): line for line in lines}
    timings = {name: run for name, run in runs.items() if name.startswith("timing_")}
    return {name: run for name, run in runs.items() if name not in timings}, timings


def add(folder: pathlib.Path, path: pathlib.Path = RESULTS) -> None:
    """Adds the runs of a folder to a file, in place of those of the same name."""
    results, timings = read(path) if path.is_file() else ({}, {})
    new = {name: record(run) for name, run in study.read(folder).items()}
    runs = dict(sorted({**results, **timings, **new, **study.read(folder, timings=True)}.items()))
    lines = (json.dumps({"name": name, **run}, separators=(",", ":")) for name, run in runs.items())
    path.write_text("".join(line + "\n" for line in lines))


type Side = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of the paper, as a difference between two arms, or between means of arms.

    Attributes:
        text: The claim.
        paper: The paper's numbers, if it gives some.
        ours: The arm that should be higher, or several.
        theirs: The arm that it is compared with, or several.
        measure: The compared quantity of a run.
        equal: Whether the claim is that they do not differ.
        rate: Index of the learning rate of both arms; None means the best rate of each.
        added: Whether it was added when the results were known, and not planned before.
    """

    text: str
    paper: str
    ours: Side
    theirs: Side
    measure: Measure
    equal: bool = False
    rate: int | None = None
    added: bool = False

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each arm in the difference."""
        sides = ((_arms(self.ours), 1), (_arms(self.theirs), -1))
        return {arm: sign / len(side) for side, sign in sides for arm in side}


def _arms(side: Side) -> tuple[str, ...]:
    return (side,) if isinstance(side, str) else side


_ENTROPY = "entropy is higher at the start"
_FASTER = "reward grows faster"
_BETTER = "final accuracy is higher"
# The paper's numbers are from its GSM8K table for 3B and 7B. Every comparison that the text of the page draws a
# conclusion from is here, so that it is counted.
CLAIMS = (
    Claim(_ENTROPY, "a figure, 7B", "nvfp4", "bf16", entropy_at_start),
    Claim(_ENTROPY, "a figure, 7B", "mxfp4", "bf16", entropy_at_start),
    Claim(_ENTROPY, "a figure, 7B", "nf4", "bf16", entropy_at_start),
    Claim("(ours) rounding to nearest has more entropy than GPTQ", "-", "nvfp4", "nvfp4-gptq", entropy_at_start),
    Claim("(ours) GPTQ has more entropy than 16 bits", "-", "nvfp4-gptq", "bf16", entropy_at_start, added=True),
    Claim(_FASTER, "figures", "nvfp4", "bf16", mean_reward),
    Claim(_FASTER, "figures", "nvfp4-aqn", "bf16", mean_reward),
    Claim("(ours) GPTQ has more reward", "-", "nvfp4-gptq", "nvfp4", mean_reward),
    Claim("AQN has more reward", "figures", "nvfp4-aqn", "nvfp4", mean_reward, added=True),
    Claim("(the missing control) AQN has more reward in 16 bits", "-", "bf16-aqn", "bf16", mean_reward, added=True),
    Claim(_BETTER, "83.3 - 76.1, 88.5 - 88.1", "nvfp4", "bf16", accuracy),
    Claim(_BETTER, "83.7 - 76.1, 90.8 - 88.1", "nvfp4-aqn", "bf16", accuracy),
    Claim(_BETTER, "83.3 - 76.1, 88.5 - 85.0", "nvfp4", "nf4", accuracy),
    Claim("QeRL is better than QLoRA", "83.7 - 76.1, 90.8 - 85.0", "nvfp4-aqn", "nf4", accuracy, added=True),
    Claim(_BETTER, "83.3 - 73.4, 88.5 - 86.4", "nvfp4", "mxfp4", accuracy),
    Claim("(ours) GPTQ ends higher", "-", "nvfp4-gptq", "nvfp4", accuracy),
    Claim("(ours) 16 bits end above GPTQ", "-", "bf16", "nvfp4-gptq", accuracy, added=True),
    Claim("AQN adds to it", "83.7 - 83.3, 90.8 - 88.5", "nvfp4-aqn", "nvfp4", accuracy),
    Claim("(the missing control) AQN adds to 16 bits", "-", "bf16-aqn", "bf16", accuracy),
    Claim("AQN adds, on the mean of both bases", "-", ("nvfp4-aqn", "bf16-aqn"), ("nvfp4", "bf16"), accuracy, added=True),
    Claim("AQN adds more in 4 bits than in 16", "-", ("nvfp4-aqn", "bf16"), ("nvfp4", "bf16-aqn"), accuracy, added=True),
    Claim("(the missing control) 4 bits and AQN beat 16 bits and AQN", "-", "nvfp4-aqn", "bf16-aqn", accuracy),
    Claim("equal to full fine-tuning", "83.7 - 84.4, 90.8 - 91.2", "nvfp4-aqn", "full", accuracy, True),
    Claim("full fine-tuning is better than 16-bit LoRA", "84.4 - 76.1, 91.2 - 88.1", "full", "bf16", accuracy, added=True),
    Claim("the highest rate is tolerated", "a figure, 3e-5", "nvfp4", "bf16", accuracy, rate=2),
)  # fmt: skip
# Claims of the paper that no run tests: not among the comparisons.
UNTESTED = (("the exponential schedule is the best of several", "a figure"),)


def runs_of(results: Results, arm: str, rate: float | None) -> dict[int, Mapping[str, Any]]:
    """The runs of an arm at a rate, by seed; none if the rate is None."""
    names = {seed: Piece(arm, rate or 0, seed).name for seed in (*FIRST_SEEDS, *MORE_SEEDS)}
    return {seed: results[name] for seed, name in names.items() if rate and name in results}


def compared(results: Results, claim: Claim) -> Interval | None:
    """The difference of a claim, over the seeds that all its arms have; None if there are none.

    Other arms with these seeds are part of the model, too. But not for the entropy at the start: there several arms have
    the same values, and the deviations differ by far.
    """
    runs = {}
    for arm, about in ARMS.items():
        best = study.best_rate(results, arm)
        runs[arm] = runs_of(results, arm, best if claim.rate is None else about.rates[claim.rate])
    weights = claim.weights
    seeds = sorted(set.intersection(*(set(runs[arm]) for arm in weights)))
    if not seeds:
        return None
    others = () if claim.measure is entropy_at_start else ARMS
    pooled = [*weights, *(arm for arm in others if arm not in weights and {*seeds} <= {*runs[arm]})]
    values = np.array([[claim.measure(runs[arm][seed]) for seed in seeds] for arm in pooled])
    return contrast(values, np.array([weights.get(arm, 0) for arm in pooled]))


def judged(results: Results) -> list[tuple[Claim, Interval | None, float]]:
    """The claims, with their differences and with p-values that allow for all of them."""
    differences = [compared(results, claim) for claim in CLAIMS]
    adjusted = holm([1.0 if each is None else each.p for each in differences])
    return list(zip(CLAIMS, differences, adjusted, strict=True))


def verdict(claim: Claim, difference: Interval | None, p: float) -> str:
    """What a difference, and its p-value among all comparisons, say about a claim: confirmed, opposite, or not confirmed."""
    if difference is None:
        return MISSING
    is_confirmed = p < ALPHA and difference.mean > 0
    if claim.equal:
        is_confirmed = -MARGIN < difference.low and difference.high < MARGIN
    return "confirmed" if is_confirmed else "opposite" if p < ALPHA else "not confirmed"


def claims_table(results: Results) -> str:
    """The table of claims and measurements."""
    rows = [["claim", "the paper", "here: difference", "measured", "p, Holm", "verdict"]]
    for claim, difference, p in judged(results):
        at = "" if claim.rate is None else f" at {RATES[claim.rate]:g}"
        sides = [[ARMS[arm].title for arm in _arms(side)] for side in (claim.ours, claim.theirs)]
        shown = [side[0] if len(side) == 1 else f"mean of ({'; '.join(side)})" for side in sides]
        row = [claim.text + " (added)" * claim.added, claim.paper]
        row += [f"{claim.measure.__name__.replace('_', ' ')}: {' - '.join(shown)}{at}"]
        if difference is None:
            row += [MISSING, ""]
        else:
            row += [difference.shown(sign="+") + few(difference)]
            row += ["< 0.0001" if p < 1e-4 else f"{p:.2g}"]
        rows.append([*row, verdict(claim, difference, p)])
    rows += [[text, paper, "no runs", MISSING, "", MISSING] for text, paper in UNTESTED]
    return table(rows)


def few(matches: Interval) -> str:
    """Says over how many seeds a difference was taken, if over some but not over all."""
    whole = len(FIRST_SEEDS) + len(MORE_SEEDS)
    return f" ({matches.count} seeds)" if 1 < matches.count < whole else ""


def numbers(results: Results) -> dict[str, str]:
    """The numbers that the text of the page names.

    `accuracy_nvfp4_bf16` is the size of a claim's difference in hundredths, which are points of an accuracy or a reward,
    and `accuracy_nvfp4_bf16_shown` the same with its interval, and with its sign. `start_nvfp4` and `end_nvfp4` are
    accuracies, `level_nvfp4` the steps to a reward. `line`, `line_r`: accuracy at the end by that at the start, over arms.
    """
    texts = {}
    for claim in CLAIMS:
        difference = compared(results, claim)
        at = "" if claim.rate is None else f"_{claim.rate}"
        arms = "_".join((*_arms(claim.ours), *_arms(claim.theirs)))
        name = f"{claim.measure.__name__}_{arms}{at}".replace("-", "_")
        texts[name] = texts[f"{name}_shown"] = MISSING
        if difference is not None:
            texts[name] = f"{abs(100 * difference.mean):.1f}"
            points = intervals.Interval(*(100 * x for x in dataclasses.astuple(difference)[:3]))
            texts[f"{name}_shown"] = f"{points:+.1f}"
    means = []
    for arm in ARMS:
        names = [f"{kind}_{arm}".replace("-", "_") for kind in ("start", "end", "level")]
        runs = runs_of(results, arm, study.best_rate(results, arm)).values()
        shown = [MISSING] * 3
        if runs:
            ends = [np.mean([run[when]["accuracy"] for run in runs]) for when in ("start", "end")]
            means.append(ends)
            shown = [f"{mean:.3f}".lstrip("0") for mean in ends]
            shown.append(middle([*map(steps_to_level, runs)], "g"))
        texts |= dict(zip(names, shown, strict=True))
    texts |= {"line": MISSING, "line_r": MISSING}
    if np.ptp([start for start, _ in means] or [0]):
        start, end = np.transpose(means)
        slope, height = np.polyfit(start, end, 1)
        texts |= {
            "line": f"{height:.3f} + {slope:.3f}",
            "line_r": f"{np.corrcoef(start, end)[0, 1]:.2f}",
        }
    return texts


def arms_table(results: Results, timings: Results) -> str:
    """The table of arms, each at its best rate: means over seeds."""
    kl = "KL to the base, last fifth of the steps"
    level = f"steps until the reward is {LEVEL:g}"
    measures: dict[str, Measure] = {
        "accuracy before": lambda run: run["start"]["accuracy"],
        "accuracy after": accuracy,
        "pass@8 before": lambda run: run["start"]["pass@8"],
        "pass@8 after": lambda run: run["end"]["pass@8"],
        "mean reward": mean_reward,
        level: steps_to_level,
        "entropy, first step": entropy_at_start,
        "entropy, last step": lambda run: run["steps"]["entropy"][-1],
        kl: late_kl,
        "sampler - trainer, nats": lambda run: run["mismatch"],
    }
    rows = [["arm", "best rate", "seeds", *measures, "s per step, alone"]]
    for arm, about in ARMS.items():
        best = study.best_rate(results, arm)
        matches = runs_of(results, arm, best)
        cells = []
        for name, measure in measures.items() if matches else ():
            values = [measure(run) for run in matches.values()]
            forms = {kl: ".3f", level: "g"}
            middles = middle(values, forms[name]) if name in forms else None
            cells.append(middles or interval(values).shown())
        cells = cells or [MISSING] + [""] * (len(measures) - 1)
        seconds = timings.get(f"timing_{arm}", {}).get("step", "")
        rate = "" if best is None else f"{best:g}"
        rows.append([about.title, rate, str(len(matches) or ""), *cells, str(seconds)])
    return table(rows)


def middle(values: Sequence[float], form: str = ".3f") -> str:
    """The median of some values with the lowest and the highest."""
    return f"{np.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def rates_table(results: Results) -> str:
    """The gain of each arm at each of its rates, over the first two seeds."""
    rows = [["arm", "lowest rate", "middle rate", "highest rate"]]
    for arm, about in ARMS.items():
        cells = []
        for rate in about.rates:
            matches = runs_of(results, arm, rate)
            gains = [gain(run) for seed, run in matches.items() if seed in FIRST_SEEDS]
            shown = ", ".join(f"{item:+.3f}" for item in gains) or MISSING
            cells.append(f"{rate:g}: {shown}")
        rows.append([about.title, *cells])
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows as a Markdown table; the first row is the head."""
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def state(results: Results) -> str:
    """Describes how much of the study is done. All its runs must have one base and one kind of card."""
    if not results:
        return (
            "**Not measured yet.** No run of the study was made on a GPU. This page says what the paper claims, what will be "
            "compared and what we expect. It was written before the first run; the runs will fill in the tables."
        )
    names = ("base", "device", "date")
    bases, devices, dates = (sorted({run[name] for run in results.values()}) for name in names)
    days = " to ".join(sorted({dates[0], dates[-1]}))
    runs = f"{len(results)} of {len(ARMS) * RUNS} runs, on {', '.join(devices)}"
    text = f"{runs}, {days}, with the base {', '.join(bases)}."
    counts = {arm: sum(Piece.named(name).arm == arm for name in results) for arm in ARMS}
    if short := [f"{ARMS[arm].title} ({RUNS - n})" for arm, n in counts.items() if n < RUNS]:
        text += f" Runs that are left: {', '.join(short)}."
    if len(bases) > 1:
        text += " **They are of different bases, so do not compare them: remove those of one.**"
    return text


def page(results: Results, timings: Results) -> str:
    """Returns docs/results.md, from the results and the timings that `read` returns."""
    figures = "Figures follow with the first runs."
    if results:
        shown = {k: v for k, v in FIGURE_TEXTS.items() if timings or k != _OVER_SECONDS}
        length = max(len(run["steps"]["reward"]) for run in results.values())
        figures = "\n\n".join(
            f"![{alt}](figures/{name}.svg)\n\n*{caption.format(window=window(length))}*"
            for name, (alt, caption) in shown.items()
        )
    filled = (
        numbers(results)
        | gsm8k_results.filled(gsm8k_results.read())
        | {
            "state": state(results),
            "comparisons": str(len(CLAIMS)),
            "alpha": f"{ALPHA:g}",
            "margin": f"{100 * MARGIN:g}",
            "claims": claims_table(results),
            "arms": arms_table(results, timings),
            "rates": rates_table(results),
            "figures": figures,
        }
    )
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], TEMPLATE.read_text())


_CURVES = (
    "Left: the formats. Right: BF16 and NVFP4, with and without AQN. Each arm has its best rate. A line is the mean over the "
    "arm's seeds; the shade goes from the lowest to the highest of them. Both are smoothed: a point is the mean of {window} steps, of fewer "
    "at the ends."
)
# File names of figures: what they show in short, and the line below them.
_OVER_SECONDS = "study-reward-seconds"  # needs timings
FIGURE_TEXTS = {
    "study-reward": ("Training reward over steps", f"Training reward over steps. {_CURVES}"),
    _OVER_SECONDS: (
        "Training reward over seconds",
        "The same lines over seconds: steps times the seconds of a step of this arm, alone on the card. No comparison above judges them.",
    ),
    "study-entropy": (
        "Entropy of the sampler over steps",
        "Entropy of the sampler over steps, in nats per token, on a logarithmic axis. Panels, lines and shades as above.",
    ),
    "study-accuracy": (
        "Held-out accuracy after training",
        "Held-out accuracy after training, each arm at its best rate. A point is a seed; the black tick is their mean.",
    ),
}
# Okabe and Ito's colours, distinct for colour-blind readers, with a brown for their yellow, which is too pale for a
# line; and dashes. Arms with AQN have a lighter shade of the colour of the same arm without it.
STYLES: dict[str, tuple[str, tuple[float, ...]]] = {
    "bf16": ("#0072b2", ()),
    "bf16-aqn": ("#56b4e9", (5, 2)),
    "nf4": ("#7a5c00", (6, 2, 1, 2)),
    "mxfp4": ("#cc79a7", (3, 1.5)),
    "nvfp4": ("#d55e00", ()),
    "nvfp4-aqn": ("#e69f00", (5, 2)),
    "nvfp4-gptq": ("#009e73", (8, 2)),
    "full": ("#000000", (1, 1.5)),
}
# The arms of the two panels of a figure.
PANELS = (
    ("bf16", "nf4", "mxfp4", "nvfp4", "nvfp4-gptq", "full"),
    ("bf16", "bf16-aqn", "nvfp4", "nvfp4-aqn"),
)


def window(length: int) -> int:
    """The number of steps that `smooth` takes the mean of, where it does not meet an end."""
    return 2 * max(2, length // 20) + 1


def save_figure(
    folder: pathlib.Path, name: str, fill: Callable[[Figure], None], width: float
) -> None:
    """Writes a figure that a function fills, as an SVG file of the same bytes each time."""
    import matplotlib
    from matplotlib import figure

    folder.mkdir(parents=True, exist_ok=True)
    style = {"svg.hashsalt": "qerl", "svg.fonttype": "none", "grid.alpha": 0.4, "axes.grid": True}
    with matplotlib.rc_context(style):
        drawn = figure.Figure(figsize=(width, 4), layout="constrained")
        fill(drawn)
        drawn.savefig(folder / f"{name}.svg", metadata={"Date": None})


def draw(results: Results, timings: Results, folder: pathlib.Path) -> None:
    """Draws the figures. Lines are smoothed over a tenth of the steps."""
    from qerl_jax.tracking.charts import smooth

    best = {arm: runs_of(results, arm, study.best_rate(results, arm)) for arm in ARMS}
    save = functools.partial(save_figure, folder)

    def curves(name: str, label: str, seconds: bool = False) -> Callable[[Figure], None]:
        def fill(figure: Figure) -> None:
            panels = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
            for axes, arms in zip(panels, PANELS, strict=True):
                for arm in arms:
                    pace = timings.get(f"timing_{arm}", {}).get("step") if seconds else 1.0
                    if not best[arm] or pace is None:
                        continue
                    lines = np.array([smooth(run["steps"][name]) for run in best[arm].values()])
                    steps = pace * np.arange(1, lines.shape[1] + 1)
                    colour, dashes = STYLES[arm]
                    style = {"color": colour, "dashes": dashes or (None, None), "linewidth": 1.5}
                    axes.plot(steps, lines.mean(axis=0), label=ARMS[arm].title, **style)
                    ends = lines.min(axis=0), lines.max(axis=0)
                    axes.fill_between(steps, *ends, color=colour, alpha=0.1, linewidth=0)
                axes.set_xlabel("seconds" if seconds else "step")
                if name == "entropy":
                    axes.set_yscale("log")
                    ticks = (0.05, 0.1, 0.2, 0.4)
                    axes.set_yticks(ticks, map(str, ticks))
                    axes.minorticks_off()
                if axes.lines:
                    position = "upper right" if name == "entropy" else "lower right"
                    axes.legend(fontsize=7, handlelength=3.5, loc=position)
            panels[0].set_ylabel(label)

        return fill

    def points(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="held-out accuracy")
        shown = [arm for arm, runs in best.items() if runs]
        for position, arm in enumerate(shown):
            values = [accuracy(run) for run in best[arm].values()]
            axes.plot(values, [position] * len(values), "o", color=STYLES[arm][0], alpha=0.6)
            axes.plot([np.mean(values)], [position], "|", color="black", markersize=18)
        axes.set_yticks(range(len(shown)), [ARMS[arm].title for arm in shown])
        axes.invert_yaxis()

    save("study-reward", curves("reward", "reward"), 10)
    if timings:
        save(_OVER_SECONDS, curves("reward", "reward", seconds=True), 10)
    save("study-entropy", curves("entropy", "entropy, nats per token"), 10)
    save("study-accuracy", points, 7)


def main() -> None:
    """Writes the page and the figures, or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--add", type=pathlib.Path, metavar="FOLDER", help="of scripts.study")
    parser.add_argument("--page", type=pathlib.Path, default=PAGE)
    parser.add_argument("--figures", type=pathlib.Path, default=FIGURES)
    text = "write nothing; fail if the page is out of date"
    parser.add_argument("--check", action="store_true", help=text)
    args = parser.parse_args()
    if args.add:
        add(args.add, args.results)
    results, timings = read(args.results)
    text = page(results, timings)
    if args.check:
        if text != args.page.read_text():
            sys.exit(f"{args.page} is out of date: run python -m scripts.study_results")
        return
    args.page.write_text(text)
    if records := gsm8k_results.read():
        gsm8k_results.draw(records, args.figures)
    if results:
        draw(results, timings, args.figures)


if __name__ == "__main__":
    main()
