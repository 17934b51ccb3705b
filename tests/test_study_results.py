"""Tests tables, verdicts and figures of the study, and that the committed pages are up to date."""

import json

import numpy as np
import pytest
import scipy.stats

from scripts import study_results, two_way
from scripts.study import ARMS, FIRST_SEEDS, MORE_SEEDS, Piece
from scripts.study_results import CLAIMS, MISSING, UNTESTED, Claim, accuracy, compared, verdict


def run(reward=0.5, end=0.6, start=0.3, entropy=0.2, **more):
    ends = {"start": start, "end": end}.items()
    ends = {name: {"accuracy": value, "pass@8": value + 0.2} for name, value in ends}
    about = {"base": "b", "device": "H100", "date": "2026-11-23", "late_kl": 0.01, "mismatch": 0.02}
    return ends | about | {"steps": {"reward": [reward] * 10, "entropy": [entropy] * 10}} | more


def whole(**ends):
    """Makes all runs of all arms; the middle rate is best, and `ends` gives accuracies by arm and seed."""
    results = {}
    for arm, about in ARMS.items():
        best = about.rates[1]
        for rate in about.rates:
            for seed in FIRST_SEEDS + (MORE_SEEDS if rate == best else ()):
                end = ends.get(arm.replace("-", "_"), lambda seed: 0.6)(seed)
                reward = 0.6 if rate == best else 0.5
                results[Piece(arm, rate, seed).name] = run(reward=reward, end=end)
    return results


def test_runs_of_a_folder_are_added_with_what_the_page_needs(tmp_path):
    names = ("reward", "entropy", "kl", "mismatch", "seconds")
    steps = {name: [0.1 * step for step in range(10)] for name in names}
    result = run(jobs=8) | {"steps": steps}
    (tmp_path / "bf16_0.0003_0.json").write_text(json.dumps(result))
    (tmp_path / "timing_bf16.json").write_text('{"step": 0.5}')
    path = tmp_path / "study.jsonl"
    for _ in range(2):
        study_results.add(tmp_path, path)
    results, timings = study_results.read(path)
    assert timings == {"timing_bf16": {"step": 0.5}} and list(results) == ["bf16_0.0003_0"]
    added = results["bf16_0.0003_0"]
    assert set(added) == set(run()) and added["end"] == result["end"]
    assert added["steps"] == {name: steps[name] for name in names[:2]}
    np.testing.assert_allclose((added["late_kl"], added["mismatch"]), (0.85, 0.45))


def test_an_interval_is_student_s():
    interval = two_way.interval
    found = interval([1.0, 2.0, 3.0, 4.0])
    # t of 3 degrees of freedom is 3.182 at 97.5 %; the standard error is 1.291 / 2.
    np.testing.assert_allclose((found.low, found.high), (0.4457, 4.5543), atol=1e-3)
    assert interval([2.0]).low == -np.inf and "one seed" in interval([2.0]).shown()


def test_two_arms_are_compared_by_the_paired_test():
    values = np.random.default_rng(0).normal(size=(2, 5))
    found = two_way.contrast(values, np.array([1, -1]))
    expected = scipy.stats.ttest_rel(*values)
    ends = expected.confidence_interval()
    np.testing.assert_allclose((found.p, found.low, found.high), (expected.pvalue, *ends))


def test_several_arms_are_compared_by_least_squares_with_a_column_for_each_arm_and_seed():
    rng = np.random.default_rng(1)
    arms, seeds, weights = 4, 5, np.array([0.5, 0.5, -1, 0])
    values = rng.normal(size=(arms, seeds)) + 3 * rng.normal(size=seeds)
    of_arm, of_seed = (index.ravel() for index in np.indices(values.shape))
    columns = np.hstack([np.eye(arms)[of_arm], np.eye(seeds)[of_seed][:, 1:]])
    inverse = np.linalg.inv(columns.T @ columns)
    fitted = inverse @ columns.T @ values.ravel()
    freedom = values.size - columns.shape[1]
    deviation = np.sum((values.ravel() - columns @ fitted) ** 2) / freedom
    wide = np.concatenate([weights, np.zeros(seeds - 1)])
    mean, error = wide @ fitted, np.sqrt(deviation * (wide @ inverse @ wide))
    found = two_way.contrast(values, weights)
    expected = scipy.stats.t(freedom, mean, error).interval(0.95)
    np.testing.assert_allclose((found.mean, found.low, found.high), (mean, *expected))
    np.testing.assert_allclose(found.p, 2 * scipy.stats.t(freedom).sf(abs(mean) / error))


def test_an_arm_without_some_seeds_is_compared_by_the_whole_model():
    rng = np.random.default_rng(2)
    values = rng.normal(size=(4, 6)) + 3 * rng.normal(size=6)
    values[1, 4:] = np.nan
    difference = two_way.contrast(values, np.array([1, -1, 0, 0]))
    # Weighted normal equations of the same model, with the first seed's effect set to 0, and Cholesky's factor.
    arm, seed = np.nonzero(~np.isnan(values))
    columns = np.hstack([np.eye(4)[arm], np.eye(6)[seed][:, 1:]])
    factor = np.linalg.cholesky(columns.T @ columns)
    fitted = np.linalg.solve(factor.T, np.linalg.solve(factor, columns.T @ values[arm, seed]))
    half = np.linalg.solve(factor, np.array([1, -1, 0, 0, 0, 0, 0, 0, 0]))
    freedom = 22 - 9
    deviation = np.sum((values[arm, seed] - columns @ fitted) ** 2) / freedom
    mean, error = fitted[0] - fitted[1], np.sqrt(deviation * (half @ half))
    expected = scipy.stats.t(freedom, mean, error).interval(0.95)
    np.testing.assert_allclose(
        (difference.mean, difference.low, difference.high), (mean, *expected)
    )
    assert (difference.freedom, difference.count) == (freedom, 4)


def test_arms_are_equal_if_both_one_sided_tests_reject_a_difference_of_the_margin():
    first, second = np.random.default_rng(3).normal(size=(2, 8))
    difference = two_way.contrast(np.array([first, second]), np.array([1, -1]))
    sides = [
        scipy.stats.ttest_rel(first, second + shift, alternative=side).pvalue
        for shift, side in ((-1.0, "greater"), (1.0, "less"))
    ]
    smallest = next(m for m in np.arange(0.01, 9, 0.01) if difference.is_within(m))
    below, above = (
        max(
            scipy.stats.ttest_rel(first, second - m, alternative="greater").pvalue,
            scipy.stats.ttest_rel(first, second + m, alternative="less").pvalue,
        )
        for m in (smallest - 0.01, smallest)
    )
    assert above < 0.05 < below and difference.is_within(1.0) == (max(sides) < 0.05)


def test_one_seed_decides_nothing_and_arms_without_any_noise_decide():
    found = two_way.contrast(np.array([[0.3], [0.1]]), np.array([1, -1]))
    assert (found.low, found.high, found.p) == (-np.inf, np.inf, 1)
    exact = two_way.contrast(np.array([[2.0, 3.0], [1.0, 2.0]]), np.array([1, -1]))
    np.testing.assert_allclose((exact.mean, exact.low, exact.p), (1, 1, 0), atol=1e-12)


def test_holm_s_values_allow_for_all_comparisons():
    # The smallest counts 4 times, the next 3 times, then 2 and 1; none falls below one before it, or exceeds 1.
    np.testing.assert_allclose(two_way.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert two_way.holm([0.9, 0.8]) == [1, 1]


def test_arms_are_compared_by_the_seeds_that_they_have():
    # Seeds differ by far more than the arms do: only a model of both shows the difference.
    ends = {arm.replace("-", "_"): lambda seed: 0.1 + 0.1 * seed for arm in ARMS}
    results = whole(**ends | {"nvfp4": lambda seed: 0.11 + 0.1 * seed})
    claim = Claim("", "", "nvfp4", "bf16", accuracy)
    found = compared(results, claim)
    np.testing.assert_allclose((found.mean, found.low), (0.01, 0.01), atol=1e-9)
    assert found.count == 5 and found.p < 1e-9
    turned = compared(results, Claim("", "", "bf16", "nvfp4", accuracy))
    np.testing.assert_allclose(turned.mean, -found.mean)
    both = compared(results, Claim("", "", ("nvfp4", "nf4"), ("bf16", "full"), accuracy))
    np.testing.assert_allclose(both.mean, 0.005)
    lowest = Claim("", "", "nvfp4", "bf16", accuracy, rate=0)
    assert compared(results, lowest).count == 2
    # An arm without one of the seeds leaves the model, if the claim is not about it.
    results["mxfp4_0.0003_4"]["end"]["accuracy"] = 0.9
    assert compared(results, claim).p > 1e-9
    del results["mxfp4_0.0003_4"]
    assert compared(results, claim).p < 1e-9
    del results["bf16_0.0003_4"]
    assert compared(results, claim).count == 4


@pytest.mark.parametrize(
    ("expected", "mean", "ends", "p"),
    [
        ("not confirmed", 0.01, (-0.02, 0.04), 0.06),
        ("confirmed", 0.01, (-0.02, 0.02), 0.04),
        ("opposite", -0.05, (-0.06, -0.04), 0.04),
    ],
)
def test_verdicts(expected, mean, ends, p):
    for equal in (False, True):
        claim = Claim("", "", "nvfp4", "bf16", accuracy, equal)
        assert verdict(claim, study_results.Interval(mean, *ends, 5), p) == expected
    # Within the margin, but p is above the limit: equal, and not shown to be higher.
    near = study_results.Interval(0.01, -0.01, 0.02, 5)
    assert verdict(Claim("", "", "nvfp4", "bf16", accuracy), near, 0.9) == "not confirmed"
    assert verdict(Claim("", "", "nvfp4", "bf16", accuracy, True), near, 0.9) == "confirmed"


def test_without_runs_the_page_says_so_and_has_no_number_of_ours():
    text = study_results.page({}, {})
    assert "**Not measured yet.**" in text and "{{" not in text
    rows = study_results.claims_table({}).splitlines()[2:]
    assert len(rows) == len(CLAIMS) + len(UNTESTED)
    assert all(row.endswith("| not measured yet |  | not measured yet |") for row in rows)


def test_the_steps_to_a_level_are_of_the_smoothed_reward():
    # A window of 11 steps around step 46 has six of the later ones: 6 / 11 * 0.8 is above 0.4, and 5 / 11 * 0.8 is not.
    rising, alone = [0.0] * 45 + [0.8] * 55, [0.0] * 50 + [1.0] + [0.0] * 49
    assert study_results.steps_to_level({"steps": {"reward": rising}}) == 46
    assert study_results.steps_to_level({"steps": {"reward": alone}}) == np.inf


def test_one_batch_does_not_decide_the_divergence():
    steps = run()["steps"] | {"kl": [5.0] * 80 + [0.2] * 19 + [9.0], "mismatch": [0.0]}
    assert study_results.late_kl(study_results.record(run() | {"steps": steps})) == 0.2
    assert study_results.middle([0.1, 0.4, 0.2]) == "0.200 (0.100 to 0.400)"


def test_the_text_names_numbers_of_the_runs():
    results = whole(nvfp4=lambda seed: 0.5, bf16=lambda seed: 0.6)
    found = study_results.numbers(results)
    assert found["accuracy_nvfp4_bf16"] == "10.0" and found["end_nvfp4"] == ".500"
    assert found["accuracy_nvfp4_bf16_shown"].startswith("-10.0 [")
    assert found["level_nvfp4"] == "1 (1 to 1)" and found["line"] == MISSING
    ends = zip(ARMS, np.linspace(0.1, 0.8, len(ARMS)), strict=True)
    for arm, start in ends:
        for seed in FIRST_SEEDS + MORE_SEEDS:
            about = results[Piece(arm, ARMS[arm].rates[1], seed).name]
            about["start"]["accuracy"], about["end"]["accuracy"] = start, 0.3 + start / 2
    found = study_results.numbers(results)
    assert (found["line"], found["line_r"]) == ("0.300 + 0.500", "1.00")
    assert set(study_results.numbers({})) == set(found)
    assert set(study_results.numbers({}).values()) == {MISSING}


def test_a_row_says_that_it_has_fewer_seeds_or_was_added():
    (last,) = [claim for claim in CLAIMS if claim.rate is not None]
    rows = study_results.claims_table(whole()).splitlines()
    (row,) = [row for row in rows if row.startswith(f"| {last.text} |")]
    assert "(2 seeds)" in row and sum("(2 seeds)" in each for each in rows) == 1
    assert sum("(added)" in each for each in rows) == sum(claim.added for claim in CLAIMS)


def test_the_committed_page_is_what_the_script_makes():
    assert study_results.page(*study_results.read()) == study_results.PAGE.read_text()


@pytest.mark.slow
def test_tables_and_figures_of_a_whole_study(tmp_path):
    results, timings = whole(), {f"timing_{arm}": {"step": 0.5} for arm in ARMS}
    text = study_results.page(results, timings)
    assert "72 of 72 runs, on H100" in text
    assert study_results.claims_table(results).count(MISSING) == 2 * len(UNTESTED)
    assert "| NVFP4 LoRA | 0.0003 | 5 | 0.300 [0.300, 0.300] | 0.600 [0.600, 0.600] |" in text
    assert "0.003: +0.300, +0.300" in text
    study_results.draw(results, timings, tmp_path)
    made = {file.stem: file.read_text() for file in tmp_path.iterdir()}
    assert set(made) == set(study_results.FIGURE_TEXTS)
    assert all(ARMS["nvfp4-aqn"].title in each for each in made.values())
    assert all(colour in made["study-reward"] for colour, _ in study_results.STYLES.values())
    assert len(set(study_results.STYLES.values())) == len({*study_results.STYLES}) == len(ARMS)
    assert "a point is the mean of 5 steps" in text
    study_results.draw(results, timings, tmp_path / "again")
    assert (tmp_path / "again/study-reward.svg").read_text() == made["study-reward"]


def test_runs_of_different_bases_are_not_hidden():
    results = whole()
    assert "left" not in study_results.state(results)
    del results["full_3e-06_1"]
    assert study_results.state(results).endswith("Runs that are left: BF16 full (1).")
    results["bf16_0.0003_0"]["base"] = "another"
    assert "different bases" in study_results.state(results)
