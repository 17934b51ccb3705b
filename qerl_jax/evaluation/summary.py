"""Computes estimates with confidence intervals from the records of one set, and formats them as text."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qerl_jax.data import answers
from qerl_jax.evaluation import intervals


def summarize(records: Sequence[dict[str, Any]], ks: Sequence[int] | None = None) -> dict[str, Any]:
    """Computes estimates from the records of one set.

    Args:
        records: P records of N samples each, from `Evaluator.records`.
        ks: Values of k for pass@k and maj@k; None means the powers of two below N, and N.

    Returns:
        A dict with `problems` (P), `samples` (N), `mean_length` (tokens), `clipped_ratio` (the fraction of truncated
        completions), `unjudged` (the number of completions for which the reward is None), and `estimates`: mean@N
        first, then pass@k and maj@k for each k > 1. Each estimate has `name`, `value`, `over_problems` and
        `over_samples` (95 % intervals as [low, high]; None if there are too few problems or samples).
    """
    samples = len(records[0]["right"])
    return {
        "problems": len(records),
        "samples": samples,
        "mean_length": float(np.mean([record["lengths"] for record in records])),
        "clipped_ratio": 1 - float(np.mean([record["stopped"] for record in records])),
        "unjudged": int(np.sum([record["unjudged"] for record in records])),
        "estimates": [
            _estimate(f"{kind}@{samples if kind == 'mean' else k}", statistic, samples, k)
            for (kind, k), statistic in statistics(records, ks).items()
        ],
    }


def statistics(
    records: Sequence[dict[str, Any]], ks: Sequence[int] | None = None
) -> dict[tuple[str, int], Callable[[np.ndarray], np.ndarray]]:
    """Returns the statistics of a set: functions from indices of samples to estimates [P]; see `summarize`.

    Their names are (kind, k); the kind is "mean" (with k = 1), "pass" or "maj".
    """
    right = np.array([record["right"] for record in records], bool)
    votes = np.array([_votes(record) for record in records], object)
    samples = right.shape[1]
    ks = ks or sorted({*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples})

    several = {
        "pass": lambda columns, k: intervals.pass_at_k(right[:, columns], k),
        "maj": lambda columns, k: intervals.maj_at_k(right[:, columns], votes[:, columns], k),
    }
    return {("mean", 1): lambda columns: right[:, columns].mean(axis=1)} | {
        (kind, k): functools.partial(at, k=k) for kind, at in several.items() for k in ks if k > 1
    }


def _votes(record: dict[str, Any]) -> list[str | None]:
    """Returns the votes of a record, or without them the canonical texts of its answers."""
    by_text = (text if text is None else answers.canonical(text) for text in record["answers"])
    return record.get("votes") or list(by_text)


def _estimate(name: str, statistic: Callable, samples: int, k: int) -> dict[str, Any]:
    values = statistic(np.arange(samples))
    over_problems = intervals.over_problems(values, samples) if len(values) > 1 else None
    return {
        "name": name,
        "value": float(values.mean()),
        "over_problems": _ends(over_problems),
        "over_samples": _ends(intervals.over_samples(statistic, samples, k)),
    }


def _ends(interval: intervals.Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def lines(summary: dict[str, Any]) -> list[str]:
    """Formats a summary of `benchmark.run` as lines: one for the settings, then one for each estimate.

    It must have the keys `name` and `protocol` besides those of `summarize`.
    """
    protocol = summary["protocol"]
    tools = ", with tools" if protocol.get("tools") else ""
    shown = [
        f"{summary['name']}: {summary['problems']} problems, {summary['samples']} samples each at temperature "
        f"{protocol['temperature']:g} and top-p {protocol['top_p']:g}{tools}, judged by {protocol['reward']}; "
        f"{summary['mean_length']:.0f} tokens on average, {summary['clipped_ratio']:.1%} truncated"
    ]
    if summary["unjudged"]:
        shown.append(
            f"  {summary['unjudged']} completions could not be judged and count as wrong: their problems "
            "have no answer, or none that the reward can read"
        )
    for estimate in summary["estimates"]:
        text = f"  {estimate['name']:8} {estimate['value']:.3f}"
        for kind in ("over_problems", "over_samples"):
            if estimate[kind] is not None:
                low, high = estimate[kind]
                text += f"   [{low:.3f}, {high:.3f}] {kind.replace('_', ' ')}"
        shown.append(text)
    return shown
