"""Writes the results of the study to docs/results.md, with figures: `python -m scripts.study_results`.

It reads docs/measured/study, with a file for each run of `scripts/study.py`. Where runs are missing, the page says that
they were not measured. All numbers in its tables come from these files; the sentences that sum them up are in
`study_page.md`, with their date. Intervals are Student's 95 % intervals over seeds. Two
arms are compared by the differences between runs with the same seed, which had the same problems in the same order.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from scripts import study
from scripts.study import ARMS, FIRST_SEEDS, MORE_SEEDS, RATES, RUNS, Piece

ROOT = pathlib.Path(__file__).parents[1]
RESULTS, PAGE, FIGURES = (
    ROOT / "docs/measured/study",
    ROOT / "docs/results.md",
    ROOT / "docs/figures",
)
BASE = ROOT / "docs/measured/warm_up.json"
START = ROOT / "docs/measured/study_start.jsonl"
# The fixed texts of the page.
TEMPLATE = pathlib.Path(__file__).with_name("study_page.md")
MISSING = "not measured yet"
# Two arms count as equal if the interval of their difference in accuracy is within this.
MARGIN = 0.03

type Results = Mapping[str, Mapping[str, Any]]
type Measure = Callable[[Mapping[str, Any]], float]


def entropy_at_start(run: Mapping[str, Any]) -> float:
    """Entropy of the sampler in the first rollout, in nats per token, before anything is learned and without noise."""
    return run["steps"]["entropy"][0]


def mean_reward(run: Mapping[str, Any]) -> float:
    """Mean training reward over all steps. It is higher if the reward grows faster."""
    return float(np.mean(run["steps"]["reward"]))


def accuracy(run: Mapping[str, Any]) -> float:
    """Held-out accuracy at the end, the mean over 8 samples."""
    return run["end"]["accuracy"]


def gain(run: Mapping[str, Any]) -> float:
    """Held-out accuracy at the end minus that at the start."""
    return run["end"]["accuracy"] - run["start"]["accuracy"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of the paper, as a difference between two arms.

    Attributes:
        text: The claim.
        paper: The paper's numbers, if it gives some.
        ours: The arm that should be higher.
        theirs: The arm that it is compared with.
        measure: The compared quantity of a run.
        equal: Whether the claim is that they do not differ.
        rate: Index of the learning rate of both arms; None means the best rate of each.
    """

    text: str
    paper: str
    ours: str
    theirs: str
    measure: Measure
    equal: bool = False
    rate: int | None = None


_HIGHER = "entropy is higher at the start"
_FASTER = "reward grows faster"
_BETTER = "final accuracy is higher"
# The paper's GSM8K table for 3B and 7B.
CLAIMS = (
    Claim(_HIGHER, "a figure, 7B", "nvfp4", "bf16", entropy_at_start),
    Claim(_HIGHER, "a figure, 7B", "mxfp4", "bf16", entropy_at_start),
    Claim(_HIGHER, "a figure, 7B", "nf4", "bf16", entropy_at_start),
    Claim("(ours) less quantization noise, less entropy", "-", "nvfp4", "nvfp4-gptq", entropy_at_start),
    Claim(_FASTER, "figures", "nvfp4", "bf16", mean_reward),
    Claim(_FASTER, "figures", "nvfp4-aqn", "bf16", mean_reward),
    Claim("(ours) less quantization noise, slower reward", "-", "nvfp4", "nvfp4-gptq", mean_reward),
    Claim(_BETTER, "83.3 - 76.1, 88.5 - 88.1", "nvfp4", "bf16", accuracy),
    Claim(_BETTER, "83.7 - 76.1, 90.8 - 88.1", "nvfp4-aqn", "bf16", accuracy),
    Claim(_BETTER, "83.3 - 76.1, 88.5 - 85.0", "nvfp4", "nf4", accuracy),
    Claim(_BETTER, "83.3 - 73.4, 88.5 - 86.4", "nvfp4", "mxfp4", accuracy),
    Claim("(ours) less quantization noise, lower accuracy", "-", "nvfp4", "nvfp4-gptq", accuracy),
    Claim("AQN adds to it", "83.7 - 83.3, 90.8 - 88.5", "nvfp4-aqn", "nvfp4", accuracy),
    Claim("(the missing control) AQN adds to 16 bits", "-", "bf16-aqn", "bf16", accuracy),
    Claim("(the missing control) 4 bits and AQN beat 16 bits and AQN", "-", "nvfp4-aqn", "bf16-aqn", accuracy),
    Claim("equal to full fine-tuning", "83.7 - 84.4, 90.8 - 91.2", "nvfp4-aqn", "full", accuracy, True),
    Claim("the highest rate is tolerated", "a figure, 3e-5", "nvfp4", "bf16", gain, rate=2),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over seeds, the ends of its 95 % interval, and the number of seeds."""

    mean: float
    low: float
    high: float
    count: int

    def shown(self, digits: int = 3, sign: str = "") -> str:
        """The interval as text for a table."""
        form = f"{sign}.{digits}f"
        if self.count < 2:
            return f"{self.mean:{form}} (one seed)"
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


def interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Student's interval of a mean. For a single value it is infinite."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return Interval(mean, -math.inf, math.inf, count)
    reach = stdtrit(count - 1, (1 + level) / 2) * np.std(values, ddof=1) / math.sqrt(count)
    return Interval(mean, float(mean - reach), float(mean + reach), count)


def runs_of(results: Results, arm: str, rate: float | None) -> dict[int, Mapping[str, Any]]:
    """The runs of an arm at a rate, by seed; none if the rate is None."""
    names = {seed: Piece(arm, rate or 0, seed).name for seed in (*FIRST_SEEDS, *MORE_SEEDS)}
    return {seed: results[name] for seed, name in names.items() if rate and name in results}


def compared(results: Results, claim: Claim, level: float = 0.95) -> Interval | None:
    """The difference of a claim, over the seeds that both arms have; None if there are none."""
    sides = []
    for arm in (claim.ours, claim.theirs):
        rates = ARMS[arm].rates
        rate = study.best_rate(results, arm) if claim.rate is None else rates[claim.rate]
        sides.append(runs_of(results, arm, rate))
    ours, theirs = sides
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None
    measure = claim.measure
    return interval([measure(ours[seed]) - measure(theirs[seed]) for seed in shared], level)


def verdict(claim: Claim, found: Interval | None) -> str:
    """What a difference says about a claim: confirmed, opposite, or not confirmed."""
    if found is None:
        return MISSING
    if claim.equal:
        if -MARGIN < found.low and found.high < MARGIN:
            return "confirmed"
        return "opposite" if found.low > 0 or found.high < 0 else "not confirmed"
    if found.low > 0:
        return "confirmed"
    return "opposite" if found.high < 0 else "not confirmed"


def claims_table(results: Results) -> str:
    """The table of claims and measurements."""
    rows = [
        ["claim", "the paper", "here: difference", "measured", "verdict", "among all comparisons"]
    ]
    for claim in CLAIMS:
        found = compared(results, claim)
        strict = verdict(claim, compared(results, claim, 1 - 0.05 / len(CLAIMS)))
        at = "" if claim.rate is None else f" at {RATES[claim.rate]:g}"
        unit = (claim.measure.__name__).replace("_", " ")
        rows.append(
            [
                claim.text,
                claim.paper,
                f"{unit}: {ARMS[claim.ours].title} - {ARMS[claim.theirs].title}{at}",
                MISSING if found is None else found.shown(sign="+"),
                verdict(claim, found),
                "" if found is None else strict,
            ]
        )
    return table(rows)


def arms_table(results: Results, timings: Results) -> str:
    """The table of arms, each at its best rate: means over seeds."""
    measures: dict[str, Measure] = {
        "accuracy before": lambda run: run["start"]["accuracy"],
        "accuracy after": accuracy,
        "pass@8 before": lambda run: run["start"]["pass@8"],
        "pass@8 after": lambda run: run["end"]["pass@8"],
        "mean reward": mean_reward,
        "entropy, first step": entropy_at_start,
        "entropy, last step": lambda run: run["steps"]["entropy"][-1],
        "KL to the base, last step": lambda run: run["steps"]["kl"][-1],
        "sampler - trainer, nats": lambda run: float(np.mean(run["steps"]["mismatch"])),
    }
    rows = [["arm", "best rate", "seeds", *measures, "s per step, alone"]]
    for arm, about in ARMS.items():
        best = study.best_rate(results, arm)
        found = runs_of(results, arm, best)
        cells = [
            interval([f(run) for run in found.values()]).shown() for f in measures.values() if found
        ]
        cells = cells or [MISSING] + [""] * (len(measures) - 1)
        seconds = timings.get(f"timing_{arm}", {}).get("step", "")
        rate = "" if best is None else f"{best:g}"
        rows.append([about.title, rate, str(len(found) or ""), *cells, str(seconds)])
    return table(rows)


def rates_table(results: Results) -> str:
    """The gain of each arm at each of its rates, over the first two seeds."""
    heads = ("lowest", "middle", "highest")
    rows = [["arm", *(f"{head} rate" for head in heads)]]
    for arm, about in ARMS.items():
        cells = []
        for rate in about.rates:
            found = runs_of(results, arm, rate)
            gains = [gain(run) for seed, run in found.items() if seed in FIRST_SEEDS]
            shown = ", ".join(f"{each:+.3f}" for each in gains) or MISSING
            cells.append(f"{rate:g}: {shown}")
        rows.append([about.title, *cells])
    return table(rows)


def base_text(found: Mapping[str, Any] | None) -> str:
    """Describes the base after the warm-up: accuracies by kind, and how much the packaged grid favours a format."""
    if found is None:
        return f"The share of right samples before and after: {MISSING}."
    kinds = ["all", *sorted(found["after"].keys() - {"all"})]
    rows = [["samples that are right", *kinds]]
    rows += [
        [when, *(f"{found[when][kind]:.3f}" for kind in kinds)] for when in ("before", "after")
    ]
    errors = found["rounding error"]
    rounded = [["relative error of rounding a linear to nearest", *map(str.upper, errors["after"])]]
    rounded += [[when, *map(str, each.values())] for when, each in errors.items()]
    return (
        f"{found['steps']} steps of {found['batch']} answers at a rate of {found['rate']:g}, on the device "
        f"{found['device']}, in {found['seconds']:.0f} s, gave the base {found['sha256']}. On held-out problems, one sample each at "
        f"temperature 1:\n\n{table(rows)}\n\nThe linears changed by {found['relative change of the linears']:.2%} "
        "(root of the mean square), less than a step of the packaged 4 bits. If the packaged 4-bit grid favoured a format, that format's "
        "error would be below its error for normal random numbers:\n\n"
        f"{table(rounded)}"
    )


def start_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """The tables of policies before learning, one for each base, the last measured first."""
    if not lines:
        return f"{MISSING[0].upper()}{MISSING[1:]}."
    bases = reversed(dict.fromkeys(line["base"] for line in lines))
    return "\n\n".join(
        start_table([each for each in lines if each["base"] == base]) for base in bases
    )


def start_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The table of one base's policies on the same texts, averaged over draws of noise."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(line["policy"].split(", draw")[0], []).append(line)
    rows = [["policy", "KL(BF16, it)", "entropy", "change of entropy"]]
    for name, found in groups.items():
        kl, entropy, change = (
            np.mean([line[field] for line in found], axis=0)
            for field in ("kl", "entropy", "entropy_change")
        )
        draws = f", mean of {len(found)} draws" if len(found) > 1 else ""
        ends = f"{change[0]:+.4f} [{change[1]:+.4f}, {change[2]:+.4f}]"
        rows.append([name + draws, f"{kl[0]:.4f}", f"{entropy[0]:.4f}", ends])
    one = lines[0]
    return (
        f"Of the base {one['base']}: {one['tokens']} tokens of {one['rows']} answers to held-out problems, on the "
        f"device {one['device']}, in float32 activations. Nats per token; intervals from resampled rows.\n\n"
        f"{table(rows)}"
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows as a Markdown table; the first row is the head."""
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def read_start() -> list[dict[str, Any]]:
    """Reads the lines about policies before learning; none if they were not measured."""
    return [json.loads(line) for line in START.read_text().splitlines()] if START.is_file() else []


def read_base() -> dict[str, Any] | None:
    """Reads the report of the warm-up; None if there is none."""
    return json.loads(BASE.read_text()) if BASE.is_file() else None


def state(results: Results) -> str:
    """Describes how much of the study is done. All its runs must have one base and one kind of card."""
    if not results:
        return (
            "**Not measured yet.** No run of the study was made on a GPU. This page says what the paper claims, what will be "
            "compared and what we expect. It was written before the first run; the runs will fill in the tables."
        )
    bases = sorted({run["base"] for run in results.values()})
    devices = sorted({run["device"] for run in results.values()})
    dates = sorted({run["date"] for run in results.values()})
    days = " to ".join(sorted({dates[0], dates[-1]}))
    text = (
        f"{len(results)} of {len(ARMS) * RUNS} runs, on {', '.join(devices)}, {days}, with the base "
        f"{', '.join(bases)}."
    )
    counts = {arm: sum(Piece.named(name).arm == arm for name in results) for arm in ARMS}
    if short := [f"{ARMS[arm].title} ({RUNS - n})" for arm, n in counts.items() if n < RUNS]:
        text += f" Runs that are left: {', '.join(short)}."
    if len(bases) > 1:
        text += " **They are of different bases, so do not compare them: remove those of one.**"
    return text


def page(
    results: Results,
    timings: Results,
    start: Sequence[Mapping[str, Any]] = (),
    base: Mapping[str, Any] | None = None,
) -> str:
    """Returns docs/results.md.

    Args:
        results: The result of `study.read`.
        timings: The result of `study.read_timings`.
        start: The lines that `scripts/study_start.py` wrote.
        base: The report that `scripts/warm_up.py` wrote.
    """
    figures = "Figures follow with the first runs."
    if results:
        shown = {k: v for k, v in FIGURE_TEXTS.items() if timings or k != _OVER_SECONDS}
        figures = "\n\n".join(f"![{alt}](figures/{name}.svg)" for name, alt in shown.items())
    filled = {
        "state": state(results),
        "comparisons": str(len(CLAIMS)),
        "by_chance": f"{len(CLAIMS) * 0.05:.1f}",
        "strict": f"{100 * (1 - 0.05 / len(CLAIMS)):.1f}",
        "margin": f"{100 * MARGIN:g}",
        "claims": claims_table(results),
        "arms": arms_table(results, timings),
        "rates": rates_table(results),
        "start": start_text(start),
        "base": base_text(base),
        "figures": figures,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], TEMPLATE.read_text())


# File names of figures, and what they show.
_OVER_SECONDS = "study-reward-seconds"  # needs timings
FIGURE_TEXTS = {
    "study-reward": "Training reward over steps, each arm at its best rate, mean over seeds",
    _OVER_SECONDS: "The same over seconds, from the time of a step of each arm alone on the card",
    "study-entropy": "Entropy of the sampler over steps, nats per token, mean over seeds",
    "study-accuracy": "Held-out accuracy after training, a point per seed",
}


def draw(results: Results, timings: Results, folder: pathlib.Path) -> None:
    """Draws the figures. Lines are smoothed over a tenth of the steps."""
    import matplotlib
    from matplotlib.figure import Figure

    from qerl_jax.tracking.charts import COLOURS, DASHES, smooth

    best = {arm: runs_of(results, arm, study.best_rate(results, arm)) for arm in ARMS}
    folder.mkdir(parents=True, exist_ok=True)

    def figure(name: str, xlabel: str, ylabel: str, fill: Callable[[Any], None]) -> None:
        with matplotlib.rc_context(
            {"svg.hashsalt": "qerl", "svg.fonttype": "none", "axes.grid": True}
        ):
            made = Figure(figsize=(7, 4), layout="constrained")
            axes = made.add_subplot(xlabel=xlabel, ylabel=ylabel)
            fill(axes)
            made.savefig(folder / f"{name}.svg", metadata={"Date": None})

    def curves(axes: Any, name: str, seconds: bool = False) -> None:
        for number, (arm, runs) in enumerate(best.items()):
            pace = timings.get(f"timing_{arm}", {}).get("step") if seconds else 1.0
            if not runs or pace is None:
                continue
            mean = smooth(np.mean([run["steps"][name] for run in runs.values()], axis=0).tolist())
            style = {"color": COLOURS[number % 6], "dashes": DASHES[number % 6] or (None, None)}
            width = 1.2 + number // 6
            steps = pace * np.arange(1, len(mean) + 1)
            axes.plot(steps, mean, label=ARMS[arm].title, linewidth=width, **style)
        if axes.lines:
            axes.legend(fontsize=7)

    def points(axes: Any) -> None:
        shown = [arm for arm, runs in best.items() if runs]
        for place, arm in enumerate(shown):
            values = [accuracy(run) for run in best[arm].values()]
            axes.plot(values, [place] * len(values), "o", color=COLOURS[0], alpha=0.6)
            axes.plot([np.mean(values)], [place], "|", color=COLOURS[1], markersize=18)
        axes.set_yticks(range(len(shown)), [ARMS[arm].title for arm in shown])

    figure("study-reward", "step", "reward", lambda axes: curves(axes, "reward"))
    if timings:
        figure(_OVER_SECONDS, "seconds", "reward", lambda axes: curves(axes, "reward", True))
    figure("study-entropy", "step", "entropy, nats per token", lambda axes: curves(axes, "entropy"))
    figure("study-accuracy", "held-out accuracy", "", points)


def main() -> None:
    """Writes the page and the figures, or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--page", type=pathlib.Path, default=PAGE)
    parser.add_argument("--figures", type=pathlib.Path, default=FIGURES)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the page is out of date"
    )
    args = parser.parse_args()
    results, timings = study.read(args.results), study.read_timings(args.results)
    made = page(results, timings, read_start(), read_base())
    if args.check:
        if made != args.page.read_text():
            sys.exit(f"{args.page} is out of date: run python -m scripts.study_results")
        return
    args.page.write_text(made)
    if results:
        draw(results, timings, args.figures)


if __name__ == "__main__":
    main()
