"""Estimates mean, pass@k and maj@k from verdicts on samples, with confidence intervals; NumPy on the host.

There are P problems with N samples each. An estimate is a number per problem, and its mean is reported. It depends on
two random choices: of the problems, and of the samples. `over_problems` covers both (for another set of this kind),
`over_samples` only the second (for the same set, sampled again).
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from qerl_jax.system.checked import require

# Intervals contain the true value in 95 % of cases.
_QUANTILE = 0.975


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean, and the ends of its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        spec = spec or ".3f"
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def pass_at_k(right: np.ndarray, k: int) -> np.ndarray:
    """Estimates without bias the probability that at least one of k samples is right (pass@k).

        1 - C(N - c, k) / C(N, k)   if c of a problem's N samples are right

    Args:
        right: bool [P, N], whether each sample is right.
        k: Number of samples, 1 to N; for 1 this is the mean.

    Returns:
        float64 [P], an estimate per problem.

    Raises:
        ValueError: If k is not in [1, N].

    Source: Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    n = _checked_samples(right, k)
    missed = [math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)]
    return 1.0 - np.array(missed)[np.asarray(right).sum(axis=1, dtype=int)]


def maj_at_k(right: np.ndarray, answers: Sequence[Sequence[str | None]], k: int) -> np.ndarray:
    """Estimates without bias the probability that the most frequent answer of k samples is right (maj@k).

    This is the mean over all subsets of k of a problem's N samples. If several answers are most frequent, their mean
    counts. None does not vote; a subset without a vote is wrong. The value of an answer is the fraction of its
    samples that were judged right: 0 or 1, unless the judge looks at more than the answer.

    Args:
        right: bool [P, N], whether each sample is right.
        answers: [P][N], in a form in which equal answers are equal texts; None for no answer.
        k: Number of samples, 1 to N.

    Returns:
        float64 [P], an estimate per problem.

    Raises:
        ValueError: If k is not in [1, N].

    Source: self-consistency, Wang et al. 2023 (arXiv:2203.11171); the subsets are counted, not sampled.
    """
    _checked_samples(right, k)
    values = []
    for verdicts, texts in zip(np.asarray(right), answers, strict=True):
        counts = Counter(text for text in texts if text is not None)
        rights = Counter(text for text, is_right in zip(texts, verdicts, strict=True) if is_right)
        # Sorted, so that problems with the same counts share a cached result.
        classes = sorted((count, rights[text] / count) for text, count in counts.items())
        values.append(_majority(tuple(classes), len(texts) - counts.total(), k))
    return np.array(values)


def over_problems(values: np.ndarray, samples: int) -> Interval:
    """Returns the mean of estimates in [0, 1] with its interval, for the choice of problems and of samples.

    This is Wilson's interval for a proportion, with the number n of independent verdicts that have the same variance:
    n = m (1 - m) / (s^2 / P), with the mean m and standard deviation s of the P estimates. With one sample per
    problem, n = P, and it is exactly Wilson's interval. Unlike m +- z s / sqrt(P) it stays within [0, 1], and does
    not shrink to a point if all are right or all are wrong.

    Args:
        values: [P] estimates, of at least 2 problems.
        samples: N; n is at most P * N.

    Raises:
        ValueError: If there are fewer than two problems.

    Source: Wilson 1927; problems as clusters: Miller 2024 (arXiv:2411.00640), section 2.2.
    """
    values = np.asarray(values, float)
    require(len(values) >= 2, "problems", len(values), "an interval needs at least 2 of them")
    count, mean = len(values), values.mean()
    # Variance with the divisor P, not P - 1, gives n = P exactly for one sample per problem.
    variance = max(values.var() / count, mean * (1 - mean) / (count * samples))
    return _wilson(mean, variance, count)


def over_samples(
    statistic: Callable[[np.ndarray], np.ndarray], samples: int, k: int = 1
) -> Interval | None:
    """Returns the mean of estimates in [0, 1] with its interval, for the samples of the same problems.

    The variance of each problem's estimate is the jackknife's, (N - 1) / N sum_j (e_-j - mean e_-j)^2 with e_-j from
    all samples but j. For the mean this is the usual s^2 / N. For pass@k and maj@k it is larger than needed, the more
    so the nearer k is to N. From it follows Wilson's interval, as in `over_problems`.

    Args:
        statistic: statistic(columns) -> estimates [P] from the samples with these indices, int [at most N].
        samples: N.
        k: Number of samples that the statistic needs.

    Returns:
        The interval; None if k = N, because then no sample can be left out.
    """
    if k >= samples:
        return None
    everything = np.arange(samples)
    without = np.stack([statistic(np.delete(everything, j)) for j in everything])
    values = np.asarray(statistic(everything), float)
    verdicts = len(values) * (samples // k)
    scatter = (samples - 1) * without.var(axis=0).sum() / len(values) ** 2
    # If all samples of every problem agree, the variance is 0; at least one verdict could have been different.
    return _wilson(values.mean(), max(scatter, 1 / verdicts**2), verdicts)


def paired_difference(ours: np.ndarray, theirs: np.ndarray, samples: int = 1) -> Interval:
    """Returns the mean of ours - theirs over the same P problems with its interval; common difficulty cancels.

    This is Student's interval of the differences d, with pseudo-observations:

        sum d / (P + 2) +- t_{P + 1} sqrt((sum d^2 + 1 / N^2) / (P + 2) - (sum d / (P + 2))^2) / sqrt(P + 2)

    For one sample per problem this is Agresti and Min's interval for paired proportions (which has z for t), which
    adds half a pair to each of the four outcomes. Its coverage is better than the plain interval's if few problems
    differ, and it is not a point if none differs. The reported mean is the plain one.

    Args:
        ours: [P] estimates in [0, 1].
        theirs: [P] estimates of the same problems in the same order.
        samples: N, the verdicts per estimate: the number of samples, divided by k for a statistic of k samples.

    Raises:
        ValueError: If the two differ in length, or have fewer than two problems.

    Source: Agresti and Min 2005, Statistics in Medicine 24:729; pairing: Miller 2024
    (arXiv:2411.00640), section 4.2.
    """
    from scipy.special import stdtrit  # slow to import, here and below: training does not need it

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
    """Computes Wilson's interval for a proportion whose estimate has this variance.

    If the mean is 0 or 1, it is the interval for `at_zero` verdicts.
    """
    from scipy.special import ndtri

    spread = mean * (1 - mean)
    size = spread / variance if spread > 0 else at_zero
    z = float(ndtri(_QUANTILE))
    centre = (mean + z * z / (2 * size)) / (1 + z * z / size)
    reach = z / (1 + z * z / size) * math.sqrt(spread / size + (z / (2 * size)) ** 2)
    return Interval(float(mean), max(0.0, float(centre - reach)), min(1.0, float(centre + reach)))


@functools.lru_cache(maxsize=4096)
def _majority(classes: tuple[tuple[int, float], ...], silent: int, k: int) -> float:
    """Computes the expected value of the most frequent answer in a random subset of k samples.

    An answer leads with t votes in C(its count, t) ways, times the number of ways to choose the other k - t samples
    so that no answer has more than t votes. The latter are counted separately by the number of ties with the leader.
    """
    total = math.comb(silent + sum(count for count, _ in classes), k)
    value = 0.0
    for index, (count, worth) in enumerate(classes):
        for votes in range(1, min(count, k) + 1) if worth else ():
            rest = k - votes
            # ways[s, j]: number of subsets of s samples of the answers so far in which j answers have `votes` votes.
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
