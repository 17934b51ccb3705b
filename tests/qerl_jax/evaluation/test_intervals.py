"""Tests estimators against enumeration of all subsets, closed forms, and simulation."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from qerl_jax.evaluation import intervals


@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    right = np.array([[1, 0, 0, 1, 0, 0], [0] * 6, [1] * 6, [0, 0, 0, 0, 0, 1]], bool)
    subsets = list(itertools.combinations(range(6), k))
    expected = [np.mean([row[list(s)].any() for s in subsets]) for row in right]
    np.testing.assert_allclose(intervals.pass_at_k(right, k), expected, atol=1e-15)


def vote(answers, worth):
    """Computes the value of the most common answer, shared among equally common ones."""
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return 0.0
    leaders = [a for a, count in counts.items() if count == max(counts.values())]
    return sum(worth[a] for a in leaders) / len(leaders)


@pytest.mark.parametrize("k", range(1, 8))
def test_maj_at_k_is_the_mean_over_all_subsets(k):
    # Of the last row the judge called one "5" wrong: it looks at more than the answer.
    answers = [["5", "5", "7", "7", "7", None, "9"], [None] * 7, [*"1234567"]]
    answers += [[*"55555", None, None], [*"5557777"]]
    right = np.array([[a == "5" for a in row] for row in answers])
    right[4, 2] = False
    worths = [{"5": 1.0}] * 4 + [{"5": 2 / 3}]
    expected = [
        np.mean([vote(texts, Counter(worth)) for texts in itertools.combinations(row, k)])
        for row, worth in zip(answers, worths, strict=True)
    ]
    np.testing.assert_allclose(intervals.maj_at_k(right, answers, k), expected, atol=1e-14)


def test_more_samples_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="k: got 3; must be between 1 and the 2 samples"):
        intervals.pass_at_k(np.zeros((1, 2), bool), 3)
    with pytest.raises(ValueError, match="k: got 0"):
        intervals.maj_at_k(np.zeros((1, 2), bool), [["1", "2"]], 0)


def wilson(right, count, z=1.959963984540054):
    share = right / count
    centre = share + z**2 / (2 * count)
    reach = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return (centre - reach) / (1 + z**2 / count), (centre + reach) / (1 + z**2 / count)


@pytest.mark.parametrize("right, count", [(3, 30), (0, 30), (30, 30), (700, 1319)])
def test_one_sample_per_problem_gives_wilsons_interval_and_more_that_agree_the_same(right, count):
    for samples in (1, 32):
        interval = intervals.over_problems(np.arange(count) < right, samples)
        assert interval.mean == right / count
        np.testing.assert_allclose((interval.low, interval.high), wilson(right, count), atol=1e-12)


def test_the_jackknife_of_a_mean_is_the_textbook_variance():
    right = np.random.default_rng(1).random((50, 6)) < 0.4
    interval = intervals.over_samples(mean_of(right), 6)
    variance = (right.var(axis=1, ddof=1) / 6).sum() / 50**2
    mean = right.mean()
    expected = wilson(mean * (n := mean * (1 - mean) / variance), n)
    np.testing.assert_allclose((interval.low, interval.high), expected, atol=1e-12)


def test_samples_that_agree_leave_no_doubt_but_one_verdict():
    right = np.repeat([[True], [True], [False], [False]], 8, axis=1)
    interval = intervals.over_samples(mean_of(right), 8)
    np.testing.assert_allclose((interval.low, interval.high), wilson(128, 256), atol=1e-12)
    nothing = intervals.over_samples(mean_of(np.zeros((4, 8), bool)), 8)
    np.testing.assert_allclose((nothing.low, nothing.high), wilson(0, 32), atol=1e-12)
    # Eight samples are two verdicts on whether one of four is right.
    nothing = intervals.over_samples(pass_at_4(np.zeros((4, 8), bool)), 8, k=4)
    np.testing.assert_allclose((nothing.low, nothing.high), wilson(0, 8), atol=1e-12)


def test_without_a_second_sample_nothing_is_known_about_samples():
    right = np.array([[True], [False]])
    assert intervals.over_samples(mean_of(right), 1) is None
    # All samples are needed for this one, so none can be left out.
    pairs = np.array([[True, False], [False, False]])
    assert intervals.over_samples(lambda c: intervals.pass_at_k(pairs[:, c], 2), 2, k=2) is None


@pytest.mark.parametrize("won, lost", [(0, 0), (5, 1), (0, 9)])
def test_paired_shares_have_agresti_and_mins_interval(won, lost):
    problems = 100
    ours, theirs = np.zeros((2, problems))
    ours[:won], theirs[won : won + lost] = 1, 1
    b, c, n = won + 0.5, lost + 0.5, problems + 2
    t = 1.983731002  # Student's, 101 degrees of freedom
    reach = t * math.sqrt((b + c) - (b - c) ** 2 / n) / n
    interval = intervals.paired_difference(ours, theirs)
    assert interval.mean == pytest.approx((won - lost) / problems)
    ends = (b - c) / n - reach, (b - c) / n + reach
    np.testing.assert_allclose((interval.low, interval.high), ends, atol=1e-8)


def test_a_comparison_needs_the_same_problems():
    with pytest.raises(ValueError, match="needs the same problems, at least 2; got 3 and 2"):
        intervals.paired_difference(np.zeros(3), np.zeros(2))
    with pytest.raises(ValueError, match="at least 2"):
        intervals.over_problems(np.zeros(1), samples=1)


def mean_of(right):
    return lambda columns: right[:, columns].mean(axis=1)


def pass_at_4(right):
    return lambda columns: intervals.pass_at_k(right[:, columns], 4)


def coverage(hits):
    """Three standard errors of 2000 trials are 0.015; an interval may be slightly too wide."""
    return 0.935 <= np.mean(hits) <= 0.975


@pytest.mark.parametrize(
    ("problems", "samples"),
    [
        (30, 8),
        (500, 1),
        *(pytest.param(n, s, marks=pytest.mark.slow) for n, s in ((30, 1), (500, 8))),
    ],
)
def test_intervals_hold_the_truth_as_often_as_they_say(problems, samples):
    """Problems have Beta(0.4, 1.2) difficulty: many are hopeless, as AIME is for a small model."""
    rng = np.random.default_rng(problems + samples)
    over_problems, over_samples = [], []
    for _ in range(2000):
        chances = rng.beta(0.4, 1.2, problems)
        right = rng.random((problems, samples)) < chances[:, None]
        interval = intervals.over_problems(right.mean(axis=1), samples)
        over_problems.append(interval.low <= 0.25 <= interval.high)
        if samples > 1 and problems == 30:
            interval = intervals.over_samples(mean_of(right), samples)
            over_samples.append(interval.low <= chances.mean() <= interval.high)
    assert coverage(over_problems)
    assert not over_samples or coverage(over_samples)


def test_the_interval_of_pass_at_k_over_samples_holds_the_truth():
    rng = np.random.default_rng(5)
    chances = rng.beta(0.4, 1.2, 30)
    truth, hits = (1 - (1 - chances) ** 4).mean(), []
    for _ in range(500):
        right = rng.random((30, 16)) < chances[:, None]
        interval = intervals.over_samples(pass_at_4(right), 16, k=4)
        hits.append(interval.low <= truth <= interval.high)
    # Three standard errors of 500 trials are 0.03; the jackknife is on the safe side.
    assert 0.92 <= np.mean(hits) <= 0.998


@pytest.mark.parametrize("samples", [1, 8])
def test_paired_intervals_hold_the_truth_as_often_as_they_say(samples):
    """One policy is a little better on every problem, and is sampled independently."""
    rng = np.random.default_rng(samples)
    hits, widths = [], []
    for _ in range(2000):
        theirs = rng.beta(0.4, 1.2, 100)
        ours = theirs + 0.2 * (1 - theirs)
        pair = ((rng.random((100, samples)) < p[:, None]).mean(axis=1) for p in (ours, theirs))
        interval = intervals.paired_difference(*pair, samples)
        hits.append(interval.low <= 0.2 * 0.75 <= interval.high)
        widths.append(interval.high - interval.low)
    assert coverage(hits)
    if samples == 8:  # pairing is what makes this narrow: two separate intervals are 0.13 wide each
        assert np.mean(widths) < 0.1
