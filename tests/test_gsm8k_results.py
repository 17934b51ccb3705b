"""Tests how the study on Qwen2.5 is judged: its measures, its verdicts by the registered rules, and its tables."""

import json
import math

import numpy as np
import pytest
import scipy.stats

from scripts import gsm8k_arms as arms
from scripts import gsm8k_results as results
from scripts.gsm8k_arms import ARMS, SEEDS, Piece
from tests.test_gsm8k_study import all_swept

ABOUT = dict.fromkeys(("base", "what", "commit", "device", "jax", "date"), "x")
# Deviations of runs and seeds that no arm shares, as in the study: 0.5 and 1 points.
NOISE = np.random.default_rng(5).normal(size=(len(ARMS), len(SEEDS))) / 2
OF_SEED = np.random.default_rng(6).normal(size=len(SEEDS))


def study_of(ends, curves=None, problems=200):
    """Returns the records of a study in which arms end at some accuracies in points, with noise of runs and seeds."""
    records = {name: record | ABOUT for name, record in all_swept().items()}
    for number, (arm, goal) in enumerate(ends.items()):
        for seed, shift in zip(SEEDS[: ARMS[arm].seeds], OF_SEED, strict=False):
            value = goal + shift + NOISE[number, seed - SEEDS[0]]
            rate = arms.best_rate(records, arm)
            name = Piece(arm, rate, seed, ARMS[arm].steps).name
            half = (curves or {}).get(arm, (50 + goal) / 2)
            curve = {"eval_steps": [0, 80, 160], "accuracies": [0.5, half / 100, value / 100]}
            records[name] = curve | ABOUT | {"wall": 400.0}
            right = np.full(problems, 2)
            right[: round(problems * (4 * value / 100 - 2))] = 3
            shares = {"strict": value / 100, "flexible": value / 100 + 0.01, "greedy_strict": 0.7}
            test = shares | {"right": "".join(map(str, right)), "samples": 4}
            records[f"{name}.test"] = test | ABOUT
    return records


FOUR = {"A": 70, "B": 70.2, "C": 69.9, "D": 70.1}
MORE = {"E": 70, "F": 70.3, "G": 70.1, "H": 69, "I": 68, "J": 72, "K": 71}


def verdicts(records):
    return {one.comparison.name: one.verdict for one in results.judged(records)}


def test_the_area_is_the_mean_of_the_curve_over_steps():
    curve = {"eval_steps": [0, 40, 120], "accuracies": [0.5, 0.6, 0.8]}
    # Means 0.55 over 40 steps, 0.7 over 80.
    assert results.area(results.Run(curve, None)) == pytest.approx(100 * (0.55 + 2 * 0.7) / 3)
    assert math.isnan(results.end(results.Run(curve, None)))


def test_a_level_is_met_on_the_line_between_two_evaluations():
    assert results._first_at(0.55, [0, 40, 80], [0.5, 0.6, 0.8]) == pytest.approx(20)
    assert results._first_at(0.5, [0, 40], [0.5, 0.6]) == 0
    assert results._first_at(0.9, [0, 40], [0.5, 0.6]) == math.inf
    records = study_of(FOUR, curves={"A": 55, "C": 65})
    ours, control = results.half_way(records, "C"), results.half_way(records, "A")
    assert len(ours) == 6 and all(ours[seed] < 80 < control[seed] for seed in ours)


def test_what_was_not_measured_gets_no_verdict_and_the_others_allow_for_it():
    assert {*verdicts({}).values()} == {results.MISSING}
    judged = results.judged(study_of(FOUR | {"C": 60}))
    assert [one.verdict for one in judged[3:]] == [results.MISSING] * 3
    first = judged[0]
    alone = results.compared(study_of(FOUR | {"C": 60}), first.comparison)
    assert first.verdict == "opposite" and first.p >= 5 * alone.p
    assert first.difference.low < alone.low


def test_verdicts_follow_the_rules():
    equal = verdicts(study_of(FOUR | MORE))
    assert equal["C1"] == equal["C3"] == equal["C4a"] == equal["C4b"] == "equal"
    assert equal["C6"] == "undecided" or equal["C6"] == "opposite"
    higher = verdicts(study_of(FOUR | MORE | {"B": 74, "D": 74, "G": 65}))
    assert higher["C3"] == higher["C4b"] == "confirmed" and higher["C6"] != "confirmed"
    # 74.1 and 74: nearer than 2 points, which is what C6 claims.
    assert verdicts(study_of(FOUR | MORE | {"D": 74.1, "J": 74}))["C6"] == "confirmed"
    assert verdicts(study_of(FOUR | MORE | {"D": 78}))["C6"] == "opposite"
    few = study_of({"A": 70, "C": 72})
    for name in [name for name in few if name.startswith(("A_", "C_"))]:
        if not Piece.named(name.removesuffix(".test")).is_swept and name.split("_")[2] not in "23":
            del few[name]
    assert verdicts(few)["C1"] == "undecided" and "| 2 of 6 |" in results.primary_table(few)


def test_faster_also_needs_the_level_in_five_of_six_seeds():
    faster = study_of(FOUR, curves={"A": 62, "C": 70})
    assert verdicts(faster)["C2"] == "confirmed"
    for seed in SEEDS[:2]:  # above A in the mean, but late
        name = Piece("C", 3e-4, seed, 160).name
        faster[name] = faster[name] | {"accuracies": [0.5, 0.59, 0.9]}
    assert results.compared(faster, results.PRIMARY[1]).low > 0
    assert verdicts(faster)["C2"] != "confirmed"


def test_gptq_takes_the_place_of_rounding_that_costs_more_than_5_points():
    before = lambda rounded: {
        f"base_{base}.test": {"strict": value} for base, value in (("16", 0.6), ("nvfp4", rounded))
    }
    records = study_of(FOUR | MORE | {"C": 60, "G": 74}, curves={"A": 62, "C": 50, "G": 70})
    usual, replaced = records | before(0.551), records | before(0.549)
    assert verdicts(records)["C1"] == verdicts(usual)["C1"] == "opposite"
    by_gptq = verdicts(replaced)
    assert by_gptq["C1"] == by_gptq["C2"] == "confirmed" and "G - A" in results.primary_table(
        replaced
    )
    # Whether noise explores is still about C, which is below A.
    assert results.exploration(replaced)[0].startswith("Not all")


def test_the_factorial_is_the_mean_of_both_effects_by_least_squares():
    records = study_of(FOUR)
    factorial = results.PRIMARY[2]
    difference = results.compared(records, factorial)
    of = {
        arm: [results.end(run) for run in results.runs_of(records, arm).values()] for arm in "ABCD"
    }
    values = np.array([of[arm] for arm in "ABCD"])
    np.testing.assert_allclose(
        difference.mean, (values[1] + values[3] - values[0] - values[2]).mean() / 2
    )
    # Tukey's additive table: the residuals of rows and columns, with 15 degrees of freedom.
    residual = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    error = np.sqrt((residual**2).sum() / 15 / 6)
    np.testing.assert_allclose(difference.error, error)
    assert f"is {error * 6**0.5:.2f} points (15 degrees" in results.deviation(records)
    np.testing.assert_allclose(difference.p, 2 * scipy.stats.t(15).sf(abs(difference.mean) / error))


def test_an_interval_over_problems_knows_nothing_of_runs():
    records = study_of({"A": 70, "C": 72})
    comparison = results.PRIMARY[0]
    found = results.over_problems(records, comparison)
    seeds = [
        [results._rights(run) for run in results.runs_of(records, arm).values()] for arm in "CA"
    ]
    per_problem = np.mean(seeds[0], axis=0) - np.mean(seeds[1], axis=0)
    assert found.mean == pytest.approx(per_problem.mean())
    half = 1.96 * per_problem.std() / len(per_problem) ** 0.5
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.1)
    assert results.over_problems(records, results.PRIMARY[1]) is None
    assert results.over_problems(records, results.PRIMARY[3]) is None


def test_exploration_needs_all_three_conditions():
    lines = " ".join(results.exploration(study_of(FOUR | MORE)))
    assert (
        "Not all" in lines and "rounding is damage" in lines and "format does not matter" in lines
    )
    explored = study_of(FOUR | MORE | {"C": 72, "E": 72, "G": 60})
    (line, *others) = results.exploration(explored)
    assert line.startswith("All three") and not any("damage" in other for other in others)
    assert "matched temperature" in " ".join(results.exploration(study_of(FOUR | MORE | {"F": 75})))
    assert results.MISSING in results.exploration(study_of(FOUR))[0]


def test_the_rate_that_halves_the_reward_is_between_two_of_the_sweep():
    records = all_swept()
    rewards = {1e-5: 0.6, 3e-5: 0.7, 1e-4: 0.8, 3e-4: 0.6, 1e-3: 0.2}
    for piece in arms.sweep(records, "A"):
        records[piece.name]["rollouts"] = {"reward": [0.1] * 16 + [rewards[piece.rate]] * 4}
    # From .6 at 3e-4 to .2 at 1e-3, half of .8 is in the middle of the logarithms.
    assert results.halved_rate(records, "A") == pytest.approx((3e-4 * 1e-3) ** 0.5)
    rewards |= {1e-3: 0.5}
    for piece in arms.sweep(records, "A"):
        records[piece.name]["rollouts"] = {"reward": [rewards[piece.rate]] * 20}
    assert results.halved_rate(records, "A") == math.inf
    assert results.halved_rate({}, "A") is None and results.halved_rate({}, "D") is None


def test_records_of_a_folder_are_added_with_what_the_page_needs(tmp_path):
    folder = tmp_path / "records"
    folder.mkdir()
    rollouts = dict.fromkeys(("reward", "entropy", "kl"), [0.12345])
    record = {"accuracies": [0.5], "rollouts": rollouts, "python": "3", "wall": 3.0} | ABOUT
    (folder / "A_0.0001_0_80.json").write_text(json.dumps(record))
    (folder / "base_16.test.json").write_text(json.dumps({"strict": 0.5, "seconds": 1.0} | ABOUT))
    path = tmp_path / "study.jsonl"
    for _ in range(2):
        results.add(folder, path)
    records = results.read(path)
    assert records["base_16.test"] == {"strict": 0.5} | ABOUT
    short = {"reward": [0.123], "entropy": [0.123]}
    assert records["A_0.0001_0_80"] == {"accuracies": [0.5], "wall": 3.0, "rollouts": short} | ABOUT


def test_the_page_has_a_row_for_what_was_measured_and_says_what_was_not():
    empty = results.filled({})
    assert empty["qwen_arms"] == empty["qwen_start"] == "Not measured yet."
    records = study_of(FOUR) | {
        f"base_{base}.test": {"strict": 0.6, "flexible": 0.65, "greedy_strict": 0.62} | ABOUT
        for base in ("16", "nvfp4")
    }
    three = {"kl": [0.02, 0.01, 0.03], "entropy": [0.3, 0.2, 0.4], "change": [0.01, 0.0, 0.02]}
    draws = {"kl": 0.001, "kl_of_draws": [0.001, 0.002], "change": 0.001, "share_of_a_scale": 0.03}
    records["start"] = ABOUT | {
        "policies": dict.fromkeys(arms.MEASURED, three),
        "temperatures": {"1.03": three},
        "doses": {"0.05": draws},
        "sigma": 0.05,
        "temperature": 1.03,
        **{"mean_length": 250.0, "longest": 500, "tokens": 3200},
    }
    page = results.filled(records)
    assert (
        page["qwen_arms"].count("\n") == 1 + 4
        and "| A | 16 bit | 0.0001 | 6 | 60.0 |" in page["qwen_arms"]
    )
    assert "24 of 80 runs" in page["qwen_state"] and "several bases" not in page["qwen_state"]
    assert "| D - C | " in page["qwen_secondary"] and "J - A" not in page["qwen_secondary"]
    assert (
        "0.0200 [0.0100, 0.0300]" in page["qwen_start"] and "3 % of a scale" in page["qwen_start"]
    )
    first, second = [name for name in records if name.startswith("A_")][:2]
    records[first] = records[first] | {"made": "gptq 1"}
    assert "more than once" not in results.state(records)
    records[second] = records[second] | {"made": "gptq 2"}
    assert "with different weights: gptq." in results.state(records)
    records["start"] = records["start"] | {"base": "another"}
    assert "several bases" in results.filled(records)["qwen_state"]


def test_figures_show_the_arms_that_were_run(tmp_path):
    results.draw({}, tmp_path)
    assert not [*tmp_path.iterdir()] and "follow" in results.figures({})
    records = study_of(FOUR)
    results.draw(records, tmp_path)
    drawn = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    assert {*drawn} == {name for name in results._FIGURES if name in results.figures(records)}
    for text in drawn.values():
        assert "NVFP4 + AQN (QeRL)" in text and "GPTQ" not in text


def test_the_registered_predictions_are_about_comparisons_that_are_made():
    texts = {"C - A", *(one.text for one in results.SECONDARY)}
    assert {*results.PREDICTED} <= texts
    for one in (*results.PRIMARY, *results.SECONDARY):
        assert sum(one.weights.values()) == 0 and {*one.weights} <= {*ARMS}
    assert len(results.PRIMARY) == 6
