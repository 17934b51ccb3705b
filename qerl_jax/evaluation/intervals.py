"""Accuracies under k samples from verdicts on samples, with confidence intervals.

There are P problems with N samples each. An estimate is a number per problem; its mean is reported.
Two things are random: which problems were asked, and what was sampled for them. `over_problems`
counts both (another set of this kind); `over_samples` only the second (the same set, sampled again).
Numpy on the host.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import ndtri, stdtrit

from qerl_jax.checked import require

# Intervals contain the true value in 95 % of cases.
_QUANTILE = 0.975


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and the two ends between which it lies, in 95 % of cases."""

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        spec = spec or ".3f"
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def pass_at_k(right: np.ndarray, k: int) -> np.ndarray:
    """Probability that at least one of k samples is right, without bias.

        1 - C(N - c, k) / C(N, k),   c of the problem's N samples are right

    Args:
        right: bool [P, N].
        k: 1 to N; for 1 this is the mean.

    Returns:
        float64 [P].

    Raises:
        ValueError: If k is not in [1, N].

    Source: Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    n = _checked_samples(right, k)
    missed = [math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)]
    return 1.0 - np.array(missed)[np.asarray(right).sum(axis=1, dtype=int)]


def maj_at_k(right: np.ndarray, answers: Sequence[Sequence[str | None]], k: int) -> np.ndarray:
    """Probability that the commonest answer of k samples is right, without bias.

    The mean over all subsets of k of the problem's N samples. Leaders of equal count share the
    vote, None does not vote, and nobody's vote is wrong. An answer's worth is the share of its
    samples that were judged right: 0 or 1, unless the judge looks at more than the answer.

    Args:
        right: bool [P, N].
        answers: [P][N], in a form in which equal answers are equal texts.
        k: 1 to N.

    Returns:
        float64 [P].

    Raises:
        ValueError: If k is not in [1, N].

    Source: self-consistency, Wang et al. 2023 (arXiv:2203.11171); the subsets are counted, not sampled.
    """
    _checked_samples(right, k)
    values = []
    for verdicts, texts in zip(np.asarray(right), answers, strict=True):
        counts = Counter(text for text in texts if text is not None)
        rights = Counter(text for text, is_right in zip(texts, verdicts, strict=True) if is_right)
        # Sorted, for problems whose answers are distributed alike share the counting.
        classes = sorted((count, rights[text] / count) for text, count in counts.items())
        values.append(_majority(tuple(classes), len(texts) - counts.total(), k))
    return np.array(values)


def over_problems(values: np.ndarray, samples: int) -> Interval:
    """The mean of estimates in [0, 1], as far as the choice of problems and the samples leave it open.

    Wilson's interval for a share, at the number of independent verdicts n that would scatter
    as much: n = m (1 - m) / (s^2 / P), with the mean m and standard deviation s of the P estimates. With
    one sample each n is about P, and the interval Wilson's own; unlike m +- z s / sqrt(P) it
    stays within [0, 1], and where all are right or all are wrong it does not shrink to a point.

    Args:
        values: [P], at least 2.
        samples: N; the P * N verdicts are the most that n can be.

    Raises:
        ValueError: For fewer than two problems.

    Source: Wilson 1927; problems as clusters: Miller 2024 (arXiv:2411.00640), section 2.2.
    """
    values = np.asarray(values, float)
    require(len(values) >= 2, "problems", len(values), "an interval needs at least 2 of them")
    count, mean = len(values), values.mean()
    # The divisor P gives n = P exactly for one sample each.
    variance = max(values.var() / count, mean * (1 - mean) / (count * samples))
    return _wilson(mean, variance, count)


def over_samples(
    statistic: Callable[[np.ndarray], np.ndarray],
    samples: int,
    k: int = 1,
) -> Interval | None:
    """The mean of estimates in [0, 1], as far as the samples of these very problems leave it open.

    The variance of each problem's estimate is the jackknife's, (N - 1) / N sum_j (e_-j - mean e_-j)^2 with
    e_-j from all samples but j: for the mean that is the textbook's s^2 / N; the nearer k is to N, the
    wider than needed. Then Wilson's interval, as in `over_problems`.

    Args:
        statistic: statistic(columns) -> estimates [P] from those samples; columns is int [<= N].
        samples: N.
        k: Samples that the statistic needs.

    Returns:
        The interval; None where k = N, for then no sample can be left out.
    """
    if k >= samples:
        return None
    everything = np.arange(samples)
    without = np.stack([statistic(np.delete(everything, j)) for j in everything])
    values = np.asarray(statistic(everything), float)
    verdicts = len(values) * (samples // k)
    scatter = (samples - 1) * without.var(axis=0).sum() / len(values) ** 2
    # Where every problem's samples agree, one verdict may still have come out otherwise.
    return _wilson(values.mean(), max(scatter, 1 / verdicts**2), verdicts)


def paired_difference(ours: np.ndarray, theirs: np.ndarray, samples: int = 1) -> Interval:
    """The mean of ours - theirs over the same P problems, whose differing difficulty cancels.

    Student's interval of the differences d, after half a sample has been added to each side:

        sum d / (P + 2) +- t_{P + 1} sqrt((sum d^2 + 1 / N^2) / (P + 2) - (sum d / (P + 2))^2) / sqrt(P + 2)

    For one sample each this is Agresti and Min's interval of paired shares (which has z for t): it covers
    better than the plain one where few problems differ, and is no point where none does. The mean
    is the plain one.

    Args:
        ours: [P] estimates in [0, 1].
        theirs: [P], of the same problems in the same order.
        samples: N, the verdicts behind each estimate; one that needs k samples makes N / k of them.

    Raises:
        ValueError: If the two differ in length, or hold fewer than two problems.

    Source: Agresti and Min 2005, Statistics in Medicine 24:729; pairing: Miller 2024
    (arXiv:2411.00640), section 4.2.
    """
    ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
    if ours.shape != theirs.shape or len(ours) < 2:
        raise ValueError(
            f"needs the same problems, at least 2; got {len(ours)} and {len(theirs)} of them"
        )
    differences, count = ours - theirs, len(ours) + 2
    centre = differences.sum() / count
    variance = (np.square(differences).sum() + 1 / samples**2) / count - centre**2
    reach = stdtrit(count - 1, _QUANTILE) * math.sqrt(variance / count)
    return Interval(float(differences.mean()), float(centre - reach), float(centre + reach))


def _checked_samples(right: np.ndarray, k: int) -> int:
    samples = np.asarray(right).shape[1]
    require(1 <= k <= samples, "k", k, f"must be between 1 and the {samples} samples of a problem")
    return samples


def _wilson(mean: float, variance: float, at_zero: int) -> Interval:
    """Wilson's interval for a share whose estimate has that variance.

    Where all are right or all wrong, nothing scatters: there it is taken for `at_zero` verdicts.
    """
    spread = mean * (1 - mean)
    size = spread / variance if spread > 0 else at_zero
    z = float(ndtri(_QUANTILE))
    centre = (mean + z * z / (2 * size)) / (1 + z * z / size)
    reach = z / (1 + z * z / size) * math.sqrt(spread / size + (z / (2 * size)) ** 2)
    return Interval(float(mean), max(0.0, float(centre - reach)), min(1.0, float(centre + reach)))


@functools.lru_cache(maxsize=4096)
def _majority(classes: tuple[tuple[int, float], ...], silent: int, k: int) -> float:
    """Expected worth of the commonest answer in a random subset of k.

    A leader with t votes: C(its count, t) ways for itself, times the ways in which the other k - t
    samples fall on answers with at most t votes each, sorted by how many of those tie with it.
    """
    total = math.comb(silent + sum(count for count, _ in classes), k)
    value = 0.0
    for index, (count, worth) in enumerate(classes):
        for votes in range(1, min(count, k) + 1) if worth else ():
            rest = k - votes
            # ways[s, j]: subsets of s samples among those seen so far, j answers having `votes`.
            ways = {(s, 0): math.comb(silent, s) for s in range(min(silent, rest) + 1)}
            for other, _ in classes[:index] + classes[index + 1 :]:
                grown = Counter()
                for (taken, ties), number in ways.items():
                    for more in range(min(other, votes, rest - taken) + 1):
                        at = taken + more, ties + (more == votes)
                        grown[at] += number * math.comb(other, more)
                ways = grown
            shared = sum(n / (1 + ties) for (taken, ties), n in ways.items() if taken == rest)
            value += worth * math.comb(count, votes) * shared / total
    return value
