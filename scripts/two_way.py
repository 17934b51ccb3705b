"""Statistics over seeds that the studies share: intervals, arms compared by "value = arm + seed", equality, Holm's method."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtr, stdtrit

from qerl_jax.evaluation import intervals


@dataclasses.dataclass(frozen=True)
class Interval(intervals.Interval):
    """An estimate and the ends of its interval.

    Attributes:
        count: Number of seeds.
        p: The p-value of "it is 0".
        error: Its standard error; infinite if one seed gives none.
        freedom: Degrees of freedom of the standard error.
    """

    count: int
    p: float = 1.0
    error: float = math.inf
    freedom: int = 0

    def shown(self, sign: str = "") -> str:
        """The interval as text for a table."""
        form = f"{sign}.3f"
        return f"{self.mean:{form}} (one seed)" if self.count < 2 else f"{self:{form}}"

    def at(self, level: float) -> Interval:
        """The same estimate with an interval of another level."""
        reach = self.error and self.error * _quantile(self.freedom, level)
        return dataclasses.replace(self, low=self.mean - reach, high=self.mean + reach)

    def is_within(self, margin: float) -> bool:
        """Whether two one-sided tests, of 5 % each, say that it is nearer to 0 than a margin (TOST)."""
        inner = self.at(0.9)
        return -margin < inner.low and inner.high < margin


def _quantile(freedom: int, level: float) -> float:
    return float(stdtrit(freedom, (1 + level) / 2)) if freedom else math.inf


def interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Student's interval of a mean. For a single value it is infinite."""
    mean, count = float(np.mean(values)), len(values)
    error = float(np.std(values, ddof=1) / math.sqrt(count)) if count > 1 else math.inf
    return Interval(mean, mean, mean, count, error=error, freedom=count - 1).at(level)


def contrast(values: np.ndarray, weights: np.ndarray) -> Interval:
    """Returns a weighted sum of the means of arms, by the model "value = arm + seed + residual".

    The model is fitted by least squares to the values that are there. The interval, of 95 %, and the p-value are Student's.
    For two arms with the same seeds this is the paired test.

    Args:
        values: float [arms, seeds]; NaN where an arm has no run of a seed.
        weights: float [arms], with the sum 0. An arm with weight 0 only helps to estimate the residuals' deviation.
    """
    is_there = ~np.isnan(values)
    arm, seed = np.nonzero(is_there)
    columns = np.hstack([np.eye(len(values))[arm], np.eye(values.shape[1])[seed]])
    inverse = np.linalg.pinv(columns.T @ columns)
    fitted = inverse @ columns.T @ values[is_there]
    wide = np.concatenate([weights, np.zeros(values.shape[1])])
    mean, freedom = float(wide @ fitted), len(arm) - int(np.linalg.matrix_rank(columns))
    count = int(is_there[np.asarray(weights) != 0].all(axis=0).sum())
    if not freedom:
        return Interval(mean, -math.inf, math.inf, count)
    residuals = values[is_there] - columns @ fitted
    error = math.sqrt(residuals @ residuals / freedom * (wide @ inverse @ wide))
    is_exact = error < 1e-12 * max(1.0, abs(mean))
    p = float(abs(mean) < 1e-12) if is_exact else float(2 * stdtr(freedom, -abs(mean) / error))
    return Interval(mean, mean, mean, count, p, error, freedom).at(0.95)


def holm(values: Sequence[float]) -> list[float]:
    """Returns p-values that allow for all of them (Holm 1979): the smallest times n, the next times n - 1, ..."""
    order = np.argsort(values, kind="stable")
    factors = np.arange(len(values), 0, -1)
    steps = np.maximum.accumulate(np.asarray(values)[order] * factors)
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(steps, 1)
    return adjusted.tolist()
