"""Tests tables, verdicts and figures of the study, and that the committed pages are up to date."""

import numpy as np
import pytest

from scripts import make_benchmarks, paper_tables, study, study_results
from scripts.study import ARMS, FIRST_SEEDS, MORE_SEEDS, Piece
from scripts.study_results import CLAIMS, Claim, Interval, accuracy, compared, interval, verdict


def run(reward=0.5, end=0.6, start=0.3, entropy=0.2, **more):
    columns = {"reward": reward, "entropy": entropy, "kl": 0.01, "mismatch": 0.02}
    ends = {
        "start": {"accuracy": start, "pass@8": start + 0.2},
        "end": {"accuracy": end, "pass@8": end + 0.2},
    }
    about = {"base": "b", "device": "H100", "date": "2026-11-23"}
    return ends | about | {"steps": {name: [value] * 10 for name, value in columns.items()}} | more


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


def test_an_interval_is_student_s():
    found = interval([1.0, 2.0, 3.0, 4.0])
    # t of 3 degrees of freedom is 3.182 at 97.5 %; the standard error is 1.291 / 2.
    np.testing.assert_allclose((found.low, found.high), (0.4457, 4.5543), atol=1e-3)
    assert interval([2.0]).low == -np.inf and "one seed" in interval([2.0]).shown()


def test_arms_are_compared_by_the_seeds_that_both_have():
    # Seeds differ by far more than the arms do: only pairing shows the difference.
    results = whole(nvfp4=lambda seed: 0.11 + 0.1 * seed, bf16=lambda seed: 0.1 + 0.1 * seed)
    claim = Claim("", "", "nvfp4", "bf16", accuracy)
    found = compared(results, claim)
    np.testing.assert_allclose((found.mean, found.low), (0.01, 0.01), atol=1e-9)
    assert found.count == 5 and verdict(claim, found) == "confirmed"
    other = Claim("", "", "bf16", "nvfp4", accuracy)
    assert verdict(other, compared(results, other)) == "opposite"
    del results["bf16_0.0003_4"]
    assert compared(results, claim).count == 4
    lowest = Claim("", "", "nvfp4", "bf16", accuracy, rate=0)
    assert compared(results, lowest).count == 2


@pytest.mark.parametrize(
    ("ends", "equal", "expected"),
    [
        ((-0.01, 0.02), False, "not confirmed"),
        ((0.001, 0.02), False, "confirmed"),
        ((-0.02, -0.001), False, "opposite"),
        ((-0.02, 0.02), True, "confirmed"),
        ((-0.02, 0.04), True, "not confirmed"),
        ((0.04, 0.06), True, "opposite"),
    ],
)
def test_verdicts(ends, equal, expected):
    claim = Claim("", "", "nvfp4", "bf16", accuracy, equal)
    assert verdict(claim, Interval(0, *ends, 5)) == expected


def test_without_runs_the_page_says_so_and_has_no_number_of_ours():
    text = study_results.page({}, {})
    assert "**Not measured yet.**" in text and "{{" not in text
    rows = study_results.claims_table({}).splitlines()[2:]
    assert len(rows) == len(CLAIMS)
    assert all(row.endswith("| not measured yet | not measured yet |  |") for row in rows)


def test_the_committed_pages_are_what_the_scripts_make():
    results = study.read(study_results.RESULTS)
    timings = study.read_timings(study_results.RESULTS)
    made = study_results.page(
        results, timings, study_results.read_start(), study_results.read_base()
    )
    assert made == study_results.PAGE.read_text()
    lines = paper_tables.Lines(make_benchmarks.read(make_benchmarks.SOURCE))
    assert paper_tables.page(lines) == paper_tables.PAGE.read_text()


@pytest.mark.slow
def test_tables_and_figures_of_a_whole_study(tmp_path):
    results, timings = whole(), {f"timing_{arm}": {"step": 0.5} for arm in ARMS}
    text = study_results.page(results, timings)
    assert (
        "72 of 72 runs, on H100" in text
        and study_results.MISSING not in study_results.claims_table(results)
    )
    assert "| NVFP4 LoRA | 0.0003 | 5 | 0.300 [0.300, 0.300] | 0.600 [0.600, 0.600] |" in text
    assert "0.003: +0.300, +0.300" in text
    study_results.draw(results, timings, tmp_path)
    made = {file.stem: file.read_text() for file in tmp_path.iterdir()}
    assert set(made) == set(study_results.FIGURE_TEXTS)
    assert all(ARMS["nvfp4-aqn"].title in each for each in made.values())
    study_results.draw(results, timings, tmp_path / "again")
    assert (tmp_path / "again/study-reward.svg").read_text() == made["study-reward"]


def test_draws_of_noise_are_averaged_before_learning():
    def line(policy, value):
        fields = ("kl", "entropy", "entropy_change")
        about = {"base": "b", "device": "cpu", "rows": 4, "tokens": 50}
        return {"policy": policy} | {name: [value] * 3 for name in fields} | about

    lines = [line("NVFP4", 0.5), line("BF16, sigma 1, draw 0", 1), line("BF16, sigma 1, draw 1", 2)]
    *_, packed, noisy = study_results.start_table(lines).splitlines()
    assert packed == "| NVFP4 | 0.5000 | 0.5000 | +0.5000 [+0.5000, +0.5000] |"
    assert noisy.startswith("| BF16, sigma 1, mean of 2 draws | 1.5000 |")
    assert study_results.start_text([]) == "Not measured yet."
    # Each base has a table of its own, the last one first.
    other = [each | {"base": "c"} for each in lines]
    tables = study_results.start_text(lines + other)
    assert tables == study_results.start_text(other) + "\n\n" + study_results.start_text(lines)


def test_runs_of_different_bases_are_not_hidden():
    results = whole()
    assert "left" not in study_results.state(results)
    del results["full_3e-06_1"]
    assert study_results.state(results).endswith("Runs that are left: BF16 full (1).")
    results["bf16_0.0003_0"]["base"] = "another"
    assert "different bases" in study_results.state(results)


def test_what_the_papers_tables_say_of_ours_are_lines_of_the_benchmarks():
    lines = paper_tables.Lines(make_benchmarks.read(make_benchmarks.SOURCE))
    text = paper_tables.page(lines)
    assert (
        "| 7B | 8 | 3,644 | 3,081 | 1,381 | 1,111 | 553 | 567 | BF16 1641.1, NVFP4 2091.8" in text
    )
    assert "| 7B | NVFP4 | 1.5, 1.4, 1.2 | 1.2, 1.1 | 1.2, 1.1 | 1.90, 1.37 | 2.17, 1.59 |" in text
    assert "| 5.15 | 6.1" in text
    # Within 1 % of the sizes that the paper reports.
    for model, weights in (("7B", "nvfp4"), ("14B", "nvfp4"), ("32B", "nvfp4"), ("7B", "bfloat16")):
        theirs = paper_tables.PAPER_SIZES[model][weights]
        assert paper_tables.size(model, weights) == pytest.approx(theirs, rel=0.01)
