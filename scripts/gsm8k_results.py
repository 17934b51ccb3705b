"""Judges the study on Qwen2.5 by its registered rules: `python -m scripts.gsm8k_results [--add RESULTS]`.

docs/results.md has the rules. docs/measured/gsm8k_study.jsonl has a line for each record of `scripts/gsm8k_study.py`; `--add`
takes those of a folder, with what the page needs, and `python -m scripts.study_results` writes the page. Accuracies are in
points, of 100.
"""

from __future__ import annotations

import argparse
import dataclasses
import fractions
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.evaluation import intervals
from scripts import gsm8k_arms as arms
from scripts.gsm8k_arms import ARMS, SEEDS, Piece
from scripts.two_way import Interval, contrast, holm, interval

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "docs/measured/gsm8k_study.jsonl"
MISSING = "not measured yet"
# Points within which arms are equal, and the probability of an error among the primary comparisons.
MARGIN, ALPHA = 2.0, 0.05
# The share of seeds in which an arm has to be earlier for C2: 5 of 6, 7 of 8.
EARLIER = fractions.Fraction(5, 6)
# Points that C may lose by rounding, before training.
LOSS = 5.0
# The arms whose residuals are pooled, beside those that a comparison is about.
POOLED = tuple(name for name, arm in ARMS.items() if arm.stage < 4)
_FIELDS = {"arm", "rate", "seed", "steps", "eval_steps", "accuracies", "time", "wall", "sigma", "temperature", "made"}  # fmt: skip
_TESTS = {"right", "samples", "strict", "flexible", "greedy_strict", "greedy_flexible", "mean_length", "truncated", "made"}  # fmt: skip
_ABOUT = {"base", "what", "commit", "device", "jax", "date"}

type Records = arms.Records


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of an arm with its test.

    Attributes:
        record: What training measured.
        test: What the final test measured; None where there is none.
    """

    record: Mapping[str, Any]
    test: Mapping[str, Any] | None


type Measure = Callable[[Run], float]


def end(run: Run) -> float:
    """Accuracy on the test set after training, by the strict parser."""
    return math.nan if run.test is None else 100 * run.test["strict"]


def last_number(run: Run) -> float:
    """The same by the parser that takes the last number."""
    return math.nan if run.test is None else 100 * run.test["flexible"]


def area(run: Run) -> float:
    """Mean over the steps of the accuracy on the validation problems, without noise: the area under that curve."""
    steps, accuracies = run.record["eval_steps"], run.record["accuracies"]
    return float(100 * np.trapezoid(accuracies, steps) / (steps[-1] - steps[0]))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A difference between arms.

    Attributes:
        name: Its name in the rules.
        text: What is compared.
        weights: The weight of each arm.
        measure: The quantity of a run that is compared.
        of_equality: Whether the claim is that there is no difference, instead of one above 0.
    """

    name: str
    text: str
    weights: Mapping[str, float]
    measure: Measure = end
    of_equality: bool = False


def _of(name: str, text: str, ours: str, theirs: str, measure: Measure = end) -> Comparison:
    return Comparison(name, text, {ours: 1, theirs: -1}, measure)


PRIMARY = (
    _of("C1", "NVFP4 ends higher than 16 bits: C - A", "C", "A"),
    _of("C2", "NVFP4 learns faster: area of C - A", "C", "A", area),
    Comparison("C3", "AQN adds: (B + D - A - C) / 2", {"B": 0.5, "D": 0.5, "A": -0.5, "C": -0.5}),
    _of("C4a", "noise without a grid explores: E - A", "E", "A"),
    _of("C4b", "with less rounding, less is learned: C - G", "C", "G"),
    Comparison(
        "C6", "QeRL equals training all weights: D - J", {"D": 1, "J": -1}, of_equality=True
    ),
)
# Those two where G takes C's place: NVFP4 that loses less.
WITH_GPTQ = (
    _of("C1", "NVFP4 by GPTQ ends higher than 16 bits: G - A", "G", "A"),
    _of("C2", "NVFP4 by GPTQ learns faster: area of G - A", "G", "A", area),
)
SECONDARY = (
    _of("AQN on NVFP4", "D - C", "D", "C"),
    _of("AQN on 16 bits", "B - A", "B", "A"),
    Comparison("interaction", "(D - C - B + A) / 2", {"D": 0.5, "C": -0.5, "B": -0.5, "A": 0.5}),
    _of("matched temperature", "F - A", "F", "A"),
    _of("temperature 1.2", "F2 - A", "F2", "A"),
    _of("format against noise of its size", "E - C", "E", "C"),
    _of("GPTQ against 16 bits", "G - A", "G", "A"),
    _of("C5", "C - H", "C", "H"),
    _of("C5", "C - I", "C", "I"),
    _of("all weights against LoRA", "J - A", "J", "A"),
    _of("QeRL against full training of its weights", "D - K", "D", "K"),
    _of("corrected estimator, 16 bits", "L - B", "L", "B"),
    _of("corrected estimator, NVFP4", "L4 - D", "L4", "D"),
    _of("published dose, 16 bits", "B1 - A", "B1", "A"),
    _of("published dose, NVFP4", "D1 - C", "D1", "C"),
    _of("NVFP4's kernels against its weights in 16 bits", "C - C16", "C", "C16"),
    _of("reward for a box", "M - A", "M", "A"),
    _of("random reward", "N - A", "N", "A"),
    _of("C1 by the last number", "C - A", "C", "A", last_number),
)
# Predictions, registered with the rules: a comparison's text, and the points between which it was expected.
PREDICTED = {
    "C - A": (-2.5, 0.5),
    "B - A": (-1, 1),
    "D - C": (-1, 1),
    "G - A": (-1, 1),
    "E - C": (-1, 1),
    "F - A": (-0.5, 1),
    "J - A": (-1.5, 1.5),
    "C - H": (-1, 1),
    "C - I": (0.5, 2.5),
}


def add(folder: pathlib.Path, path: pathlib.Path = RESULTS) -> None:
    """Adds the records of a folder to a file, in place of those of the same name, with what the page needs."""
    from scripts.gsm8k_study import read as read_folder

    records = dict(read(path))
    for name, record in read_folder(folder).items():
        fields = _ABOUT | (_TESTS if name.endswith(".test") else _FIELDS)
        selected = {k: v for k, v in record.items() if name == "start" or k in fields}
        if "rollouts" in record:
            short = lambda values: [float(f"{x:.3g}") for x in values]
            series = {key: short(record["rollouts"][key]) for key in ("reward", "entropy")}
            selected["rollouts"] = series
        records[name] = selected
    lines = (
        json.dumps({"name": name, **records[name]}, separators=(",", ":"))
        for name in sorted(records)
    )
    path.write_text("".join(line + "\n" for line in lines))


def read(path: pathlib.Path = RESULTS) -> Records:
    """The records of a file by name; none if there is no file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {line.pop("name"): line for line in map(json.loads, lines)}


def runs_of(records: Records, arm: str) -> dict[int, Run]:
    """The runs of an arm at its rate by seed, without those of the sweep."""
    rate, steps = arms.best_rate(records, arm), ARMS[arm].steps
    names = {seed: Piece(arm, rate or 0, seed, steps).name for seed in SEEDS}
    return {
        seed: Run(records[name], records.get(f"{name}.test"))
        for seed, name in names.items()
        if rate and name in records
    }


def compared(records: Records, comparison: Comparison) -> Interval | None:
    """The difference of a comparison by the registered model; None if an arm has no run that was measured."""
    names = [*comparison.weights, *(arm for arm in POOLED if arm not in comparison.weights)]
    runs = [runs_of(records, arm) for arm in names]
    values = np.array(
        [
            [comparison.measure(of[seed]) if seed in of else math.nan for seed in SEEDS]
            for of in runs
        ]
    )
    if np.isnan(values[: len(comparison.weights)]).all(axis=1).any():
        return None
    return contrast(values, np.array([comparison.weights.get(name, 0.0) for name in names]))


def over_problems(records: Records, comparison: Comparison) -> Interval | None:
    """The same difference with Student's interval over problems, at the seeds that all its arms have.

    A check: it knows how problems differ, and nothing of how runs do.
    """
    runs = {arm: runs_of(records, arm) for arm in comparison.weights}
    seeds = set.intersection(*({s for s, run in of.items() if run.test} for of in runs.values()))
    if not seeds or comparison.measure is not end:
        return None
    of_problem = sum(
        weight * np.mean([_rights(runs[arm][seed]) for seed in sorted(seeds)], axis=0)
        for arm, weight in comparison.weights.items()
    )
    return interval(of_problem)


def _rights(run: Run) -> np.ndarray:
    """The share of right samples of each problem, in points."""
    test: Any = run.test
    return 100 * np.array([int(digit) for digit in test["right"]]) / test["samples"]


def half_way(records: Records, arm: str) -> dict[int, float]:
    """By seed, the steps until an arm's validation accuracy is where arm A has half of its gain; infinite if never.

    Between two evaluations the accuracy is taken as a straight line.
    """
    ours, control = runs_of(records, arm), runs_of(records, "A")
    steps_of = {}
    for seed in sorted(ours.keys() & control.keys()):
        ends = control[seed].record["accuracies"]
        level = (ends[0] + ends[-1]) / 2
        steps, accuracies = (ours[seed].record[name] for name in ("eval_steps", "accuracies"))
        steps_of[seed] = _first_at(level, steps, accuracies)
    return steps_of


def _first_at(level: float, steps: Sequence[float], values: Sequence[float]) -> float:
    if values[0] >= level:
        return steps[0]
    for at in range(1, len(steps)):
        if values[at] >= level:
            share = (level - values[at - 1]) / (values[at] - values[at - 1])
            return steps[at - 1] + share * (steps[at] - steps[at - 1])
    return math.inf


@dataclasses.dataclass(frozen=True)
class Judged:
    """A primary comparison and what the rules say.

    Attributes:
        comparison: The comparison.
        difference: Its estimate with the interval that Holm's method gives it; None if it was not measured.
        p: The p-value that allows for all primary comparisons.
        verdict: "confirmed", "opposite", "equal", "undecided" or "not measured yet".
    """

    comparison: Comparison
    difference: Interval | None
    p: float
    verdict: str


def primary(records: Records) -> tuple[Comparison, ...]:
    """The primary comparisons: C1 and C2 are about G if stage 0 has found that C loses more than `LOSS`."""
    loss = start_accuracy(records, "16") - start_accuracy(records, "nvfp4")
    return (*WITH_GPTQ, *PRIMARY[2:]) if loss > LOSS else PRIMARY


def judged(records: Records) -> list[Judged]:
    """The primary comparisons, by the registered rules. One that was not measured counts as one with p = 1."""
    comparisons = primary(records)
    differences = [compared(records, comparison) for comparison in comparisons]
    values = [1.0 if one is None else one.p for one in differences]
    adjusted, ranks = holm(values), np.argsort(np.argsort(values, kind="stable"))
    results = []
    for comparison, one, p, rank in zip(comparisons, differences, adjusted, ranks, strict=True):
        # The smallest p-value counts as many times as there are comparisons, and so does its interval's error.
        shown = one and one.at(1 - ALPHA / (len(comparisons) - int(rank)))
        results.append(Judged(comparison, shown, p, _verdict(records, comparison, one, p)))
    return results


def _verdict(records: Records, comparison: Comparison, one: Interval | None, p: float) -> str:
    if one is None:
        return MISSING
    is_equal = one.is_within(MARGIN)
    if comparison.of_equality:
        return "confirmed" if is_equal else "opposite" if p < ALPHA else "undecided"
    if p < ALPHA and one.mean < 0:
        return "opposite"
    is_higher = p < ALPHA
    if comparison.name == "C2" and is_higher:
        ours, control = (half_way(records, arm) for arm in comparison.weights)
        earlier = sum(ours[seed] < control[seed] for seed in ours)
        is_higher = earlier >= EARLIER * ARMS["A"].seeds
    if is_higher:
        return "confirmed"
    return "equal" if is_equal else "undecided"


def exploration(records: Records) -> list[str]:
    """What the rules for C4 say, a sentence for each that applies."""
    verdicts = {one.comparison.name: one.verdict for one in judged(records)}
    if primary(records) is not PRIMARY:  # then C - A is none of the six
        first = compared(records, PRIMARY[0])
        verdicts["C1"] = _verdict(records, PRIMARY[0], first, first.p if first else 1.0)
    others = {
        text: compared(records, _of("", "", *text.split(" - "))) for text in ("F - A", "E - C")
    }
    not_lower = lambda name: verdicts[name] in ("confirmed", "equal")
    matched, format_ = others["F - A"], others["E - C"]
    if MISSING in (verdicts["C1"], verdicts["C4a"], verdicts["C4b"]) or None in (matched, format_):
        return [f"Whether noise explores (C4): {MISSING}."]
    is_at_least = matched.is_within(MARGIN) or matched.low > 0
    lines = []
    if not_lower("C1") and verdicts["C4b"] == "confirmed" and (is_at_least or not_lower("C4a")):
        lines.append("All three conditions of C4 hold: the noise of rounding explores.")
    else:
        lines.append(
            "Not all conditions of C4 hold: that the noise of rounding explores is not confirmed."
        )
    if verdicts["C4b"] in ("opposite", "equal"):
        lines.append(
            "GPTQ, with less rounding, learns no less: for this model, rounding is damage."
        )
    if format_.is_within(MARGIN):
        lines.append("Static noise equals NVFP4: the format does not matter.")
    if matched.low > 0:
        lines.append("A matched temperature ends above 16 bits: one number in the config does it.")
    return lines


def halved_rate(records: Records, arm: str) -> float | None:
    """The rate above its best at which an arm's reward at the end of the sweep is half of the best one's (C7).

    Rewards are those of the last fifth of the rollouts with the first seed of the sweep. Between two rates, the reward is
    taken as a straight line over the logarithm of the rate. None if rewards are missing; infinite if it does not fall so far.
    """
    rewards = {}
    for piece in arms.sweep(records, arm):
        if piece.seed == arms.SWEEP_SEEDS[0]:
            if piece.name not in records:
                return None
            series = records[piece.name]["rollouts"]["reward"]
            rewards[piece.rate] = statistics.mean(series[-max(1, len(series) // 5) :])
    if not rewards:
        return None
    best = max(rewards, key=rewards.__getitem__)
    rates = [rate for rate in sorted(rewards) if rate >= best]
    falls = [-rewards[rate] for rate in rates]
    return math.exp(_first_at(-rewards[best] / 2, [math.log(rate) for rate in rates], falls))


# The page ------------------------------------------------------------------------------------------


def filled(records: Records) -> dict[str, str]:
    """The texts of the page that come from the records."""
    return {
        "qwen_state": state(records),
        "qwen_start": start_table(records),
        "qwen_primary": primary_table(records) + deviation(records),
        "qwen_exploration": "\n".join(f"- {line}" for line in exploration(records)),
        "qwen_secondary": secondary_table(records),
        "qwen_arms": arms_table(records),
        "qwen_rates": rates_table(records),
        "qwen_figures": figures(records),
    }


def state(records: Records) -> str:
    """Describes how much is done, and with what. All records must be of the same weights."""
    if not records:
        return "**No run of this study was made yet.** The tables say what will be measured."
    about = {key: sorted({str(one[key]) for one in records.values()}) for key in _ABOUT}
    done = sum(len(runs_of(records, arm)) for arm in ARMS)
    text = (
        f"{done} of {sum(arm.seeds for arm in ARMS.values())} runs, on {', '.join(about['device'])}, {about['date'][0]} to "
        f'{about["date"][-1]}, jax {", ".join(about["jax"])}, commit {", ".join(about["commit"])}. "16 bit" is the '
        f"{', '.join(about['what'])}; the SHA-256 of its file begins with {', '.join(about['base'])}."
    )
    if len(about["base"]) > 1:
        text += " **These are several bases: do not compare their runs.**"
    names = [name.split()[0] for name in {one["made"] for one in records.values() if "made" in one}]
    if differ := sorted({name for name in names if names.count(name) > 1}):
        text += f" **Made more than once, with different weights: {', '.join(differ)}.**"
    return text


def primary_table(records: Records) -> str:
    """The primary comparisons with their verdicts."""
    rows = [["claim", "comparison", "seeds", "points", "p, Holm", "by problems", "verdict"]]
    for one in judged(records):
        about, problems = one.comparison, over_problems(records, one.comparison)
        shown = "" if one.difference is None else f"{one.difference:+.1f}"
        p = "" if one.difference is None else "< 0.0001" if one.p < 1e-4 else f"{one.p:.2g}"
        beside = f"{problems:+.1f}" if problems else ""
        planned = min(ARMS[arm].seeds for arm in about.weights)
        seeds = f"{one.difference.count if one.difference else 0} of {planned}"
        rows.append([about.name, about.text, seeds, shown, p, beside, one.verdict])
    return _table(rows)


def deviation(records: Records) -> str:
    """A sentence about the standard deviation of the model's residuals; nothing while C1 is not measured."""
    first = compared(records, PRIMARY[0])
    if first is None or not first.freedom:
        return ""
    # Both arms of C1 have all seeds, so the variance of their difference is twice that of a run, over the seeds.
    points = first.error * math.sqrt(first.count / 2)
    return f"\n\nThe residual's standard deviation is {points:.2f} points ({first.freedom} degrees of freedom)."


def secondary_table(records: Records) -> str:
    """The secondary comparisons that were measured, with the predictions about them."""
    rows = [
        ["about", "comparison", "points [95 %]", "within 2 points", "predicted", "as predicted"]
    ]
    for one in (_of("C1", "C - A", "C", "A"), *SECONDARY):
        if (difference := compared(records, one)) is None:
            continue
        cells = [f"{difference:+.1f}", _yes(difference.is_within(MARGIN)), "", ""]
        if one.measure is end and one.text in PREDICTED:
            low, high = PREDICTED[one.text]
            cells[2:] = f"{low:+g} to {high:+g}", _yes(low <= difference.mean <= high)
        rows.append([one.name, one.text, *cells])
    return _table(rows)


def arms_table(records: Records) -> str:
    """What each arm reached: means over seeds."""
    heads = ["before", "after", "last number", "greedy", "recovery", "area", "steps to A's half"]
    rows = [["arm", "", "rate", "seeds", *heads]]
    control = runs_of(records, "A").values()
    goal = _mean([end(run) for run in control])
    for name, arm in ARMS.items():
        runs = [run for run in runs_of(records, name).values() if run.test]
        rate = arms.best_rate(records, name)
        if not runs:
            continue
        before, after = start_accuracy(records, arm.base), _mean(map(end, runs))
        greedy = _mean(100 * run.test["greedy_strict"] for run in runs)
        steps = half_way(records, name).values()
        cells = [f"{x:.1f}" for x in (before, after, _mean(map(last_number, runs)), greedy)]
        cells += [f"{(after - before) / (goal - before):.2f}", f"{_mean(map(area, runs)):.1f}"]
        cells.append(f"{statistics.median(steps):.0f}" if steps else "")
        rows.append([name, arm.title, f"{rate:g}", str(len(runs)), *cells])
    return _table(rows)


def start_accuracy(records: Records, base: str) -> float:
    """Accuracy of a base on the test set before training, in points; NaN if it was not measured."""
    names = {"noise-": ("noise-0", "noise-1"), "nvfp4-16": ("nvfp4",)}.get(base, (base,))
    tests = [records.get(f"base_{name}.test") for name in names]
    return math.nan if None in tests else 100 * _mean(test["strict"] for test in tests)


def start_table(records: Records) -> str:
    """Stage 0: the bases before training, and what noise and temperature do."""
    heads = ["before", "last number", "greedy", "KL", "entropy", "change of entropy"]
    rows = [["policy", *heads]]
    start = records.get("start")
    for base in arms.MEASURED:
        test = records.get(f"base_{base}.test")
        names = ("strict", "flexible", "greedy_strict")
        policy = start and start["policies"].get(base)
        if test or policy:
            cells = [f"{100 * test[name]:.1f}" if test else "" for name in names]
            rows.append([base, *cells, *(_triples(policy) if policy else [""] * 3)])
    if start is None:
        return _table(rows)
    for temperature, one in start["temperatures"].items():
        rows.append([f"16, temperature {temperature}", "", "", "", *_triples(one)])
    for sigma, one in start["doses"].items():
        draws = f"{one['kl']:.2g} ({min(one['kl_of_draws']):.2g} to {max(one['kl_of_draws']):.2g})"
        share = f"16, AQN {sigma}, {100 * one['share_of_a_scale']:.2g} % of a scale"
        rows.append([share, "", "", "", draws, "", f"{one['change']:+.4f}"])
    text = (
        f"Answers have {start['mean_length']:g} tokens on average, 95 % of them at most {start['longest']}; "
        f"{start['tokens']} tokens are compared. Chosen: sigma {start['sigma']:g}, temperature {start['temperature']:g}."
    )
    return f"{_table(rows)}\n\n{text}"


def _triples(one: Mapping[str, Sequence[float]]) -> list[str]:
    forms = {"kl": ".4f", "entropy": ".4f", "change": "+.4f"}
    return [f"{intervals.Interval(*one[name]):{form}}" for name, form in forms.items()]


def rates_table(records: Records) -> str:
    """The sweep: validation accuracy at the end by rate, and C7."""
    rows = [["arm", "rate: points at the end, by seed", "chosen", "half of the reward is lost at"]]
    for arm in arms.SWEPT:
        ends: dict[float, list[str]] = {}
        for piece in arms.sweep(records, arm):
            if piece.name in records:
                value = f"{100 * arms.last_accuracy(records[piece.name]):.1f}"
                ends.setdefault(piece.rate, []).append(value)
        shown = "; ".join(f"{rate:g}: {', '.join(values)}" for rate, values in ends.items())
        if not ends:
            continue
        rate, half = arms.best_rate(records, arm), halved_rate(records, arm)
        fall = "" if half is None else "no rate of the sweep" if half == math.inf else f"{half:.2g}"
        rows.append([arm, shown, "" if rate is None else f"{rate:g}", fall])
    return _table(rows)


# File names of figures, what they show in short, and the line below them.
_CURVES, _ENDS = "qwen-validation", "qwen-accuracy"
_FIGURES = {
    _CURVES: "Accuracy on the validation problems over steps, without noise. A line is the mean over the seeds of an arm; the shade goes "
    "from the lowest to the highest.",
    _ENDS: "Accuracy on the test set after training. A point is a seed; the tick is their mean, the bar its 95 % interval by Student's t.",
}


def figures(records: Records) -> str:
    """The figures and their captions; a sentence if there is nothing to draw."""
    if not any(run.test for run in runs_of(records, "A").values()):
        return "Figures follow with the first runs."
    return "\n\n".join(
        f"![{text.partition('.')[0]}](figures/{name}.svg)\n\n*{text}*"
        for name, text in _FIGURES.items()
    )


def draw(records: Records, folder: pathlib.Path) -> None:
    """Draws the figures, narrow enough for a phone."""
    from scripts.study_results import save_figure

    colours = {"A": "#0072b2", "B": "#56b4e9", "C": "#d55e00", "D": "#e69f00"}

    def curves(figure: Any) -> None:
        axes = figure.add_subplot(xlabel="step", ylabel="validation accuracy, points")
        for arm, colour in colours.items():
            rows = [run.record for run in runs_of(records, arm).values()]
            if rows:
                lines = 100 * np.array([row["accuracies"] for row in rows])
                steps, dashes = rows[0]["eval_steps"], "--" if ARMS[arm].noise else "-"
                axes.plot(steps, lines.mean(axis=0), dashes, color=colour, label=ARMS[arm].title)
                axes.fill_between(
                    steps, lines.min(axis=0), lines.max(axis=0), color=colour, alpha=0.1
                )
        axes.legend(fontsize=8, loc="lower right")

    def ends(figure: Any) -> None:
        axes = figure.add_subplot(xlabel="test accuracy, points")
        values = {
            arm: [end(run) for run in runs_of(records, arm).values() if run.test] for arm in ARMS
        }
        shown = [arm for arm, of in values.items() if of]
        for position, arm in enumerate(shown):
            colour, mean = colours.get(arm, "#555555"), interval(values[arm])
            axes.plot(values[arm], [position] * mean.count, "o", color=colour, alpha=0.5)
            axes.plot([mean.mean], [position], "|", color="black", markersize=14)
            if mean.count > 1:
                axes.plot([mean.low, mean.high], [position] * 2, color="black", linewidth=1)
        axes.set_yticks(
            range(len(shown)), [f"{ARMS[arm].title} ({arm})" for arm in shown], fontsize=7
        )
        axes.invert_yaxis()

    if any(run.test for run in runs_of(records, "A").values()):
        save_figure(folder, _CURVES, curves, 5.5)
        save_figure(folder, _ENDS, ends, 5.5)


def _table(rows: Sequence[Sequence[str]]) -> str:
    from scripts.study_results import table

    return table(rows) if len(rows) > 1 else f"{MISSING.capitalize()}."


def _mean(values: Any) -> float:
    listed = list(values)
    return float(np.mean(listed)) if listed else math.nan


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def main() -> None:
    """Adds records, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--add", type=pathlib.Path, metavar="FOLDER", help="of scripts.gsm8k_study")
    args = parser.parse_args()
    if args.add:
        add(args.add, args.results)
    print("\n\n".join(filled(read(args.results)).values()))


if __name__ == "__main__":
    main()
