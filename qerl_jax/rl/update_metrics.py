"""Metrics of an update: the difference between policy and sampler, and reductions over micro-batches and steps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.rl import grpo, masked
from qerl_jax.rl.experience import PackedRows

# Tokens of policies that are this many rollouts old, or older, have one ratio in the metrics.
_OLDEST = 3


def drift(logps: jax.Array, batch: PackedRows) -> dict[str, jax.Array]:
    """Measures how far the policy is from the sampler on a micro-batch: sums and extremes over its T tokens.

    Args:
        logps: float32 [T], the policy's log-probabilities in nats.
        batch: The micro-batch, with those of the sampler.
    """
    mask = batch.mask
    difference = jnp.where(mask, logps - batch.behaviour_logps, 0.0)
    ratio = jnp.exp(difference)
    by_age = {}
    if "ages" in batch.fixed:
        ages = jnp.minimum(batch.fixed["ages"], _OLDEST)
        of_age = mask & (ages == jnp.arange(_OLDEST + 1)[:, None])
        by_age = {"age_tokens": jnp.sum(of_age, axis=1)[None]}
        by_age["age_ratio_sum"] = jnp.sum(jnp.where(of_age, ratio, 0.0), axis=1)[None]
    return by_age | {
        "tokens": jnp.sum(mask),
        # One value per token, for quantiles; -1 at masked-out tokens.
        "differences": jnp.where(mask, jnp.abs(difference), -1.0),
        "difference_sum": jnp.sum(jnp.abs(difference)),
        "difference_max": jnp.max(jnp.abs(difference)),
        # Both estimate KL(sampler || policy), because the sampler drew the tokens; k3 is never negative.
        "kl_sum": -jnp.sum(difference),
        "kl_k3_sum": masked.sum(grpo.token_kl(batch.behaviour_logps, logps, "k3"), mask),
        "ratio_sum": masked.sum(ratio, mask),
        "ratio_min": jnp.min(jnp.where(mask, ratio, jnp.inf)),
        "ratio_max": masked.max(ratio, mask),
    }


def joined(
    counts: list[Any], num_rows: int
) -> tuple[grpo.RowMetrics, dict[str, np.ndarray], float]:
    """Joins the counts of one optimizer step's micro-batches.

    Args:
        counts: For each micro-batch the auxiliary values of `objective.loss`.
        num_rows: Number of rows of the optimizer batch.

    Returns:
        Counts by row: rows with tokens first, padded with zeros to `num_rows`, so that all steps have one shape.
        The values of `drift`, concatenated. The sum of the entropies.
    """
    rows, drifts, entropies = zip(*counts, strict=True)
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *rows)
    real = joined.tokens > 0
    padded = jax.tree.map(lambda x: np.pad(x[real], (0, num_rows - real.sum())), joined)
    # They have one number per micro-batch, one per token, or a row of numbers per micro-batch.
    together = lambda *parts: np.concatenate([np.atleast_1d(x) for x in parts])
    return padded, jax.tree.map(together, *drifts), sum(entropies)


def of_sampling(drift: dict[str, np.ndarray]) -> dict[str, Any]:
    """Computes TRL's sampling metrics and KL estimates, for the first optimizer step of a rollout.

    Args:
        drift: The results of `drift` for all micro-batches of the step, joined by `joined`.
    """
    count, lowest = drift["tokens"].sum(), drift["ratio_min"].min()
    tokens, differences = max(count, 1), drift["differences"]
    # Without tokens the list is a single 0. NaN is kept: the step is skipped, and the metrics show it.
    differences = np.append(differences[~(differences < 0)], np.zeros(int(count == 0)))
    with np.errstate(invalid="ignore"):  # between two infinite values
        p99 = np.quantile(differences, 0.99)
    return {
        "sampling/sampling_logp_difference/mean": drift["difference_sum"].sum() / tokens,
        "sampling/sampling_logp_difference/max": drift["difference_max"].max(),
        "sampling/sampling_logp_difference/p99": p99,
        "sampling/kl": drift["kl_sum"].sum() / tokens,
        "sampling/kl_k3": drift["kl_k3_sum"].sum() / tokens,
        "sampling/importance_sampling_ratio/mean": drift["ratio_sum"].sum() / tokens,
        "sampling/importance_sampling_ratio/min": lowest if np.isfinite(lowest) else 0.0,
        "sampling/importance_sampling_ratio/max": drift["ratio_max"].max(),
        **_by_age(drift),
    }


def _by_age(drift: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the mean ratio of the tokens of each age that occurs; empty if one policy sampled all tokens."""
    if "age_tokens" not in drift:
        return {}
    counts, sums = drift["age_tokens"].sum(axis=0), drift["age_ratio_sum"].sum(axis=0)
    ages = np.flatnonzero(counts).tolist()
    return {f"sampling/importance_sampling_ratio/age_{n}": sums[n] / counts[n] for n in ages}


_summarize = jax.jit(grpo.summarize)


def reduced(records: list[Any]) -> dict[str, Any]:
    """Reduces the metrics of several optimizer steps to one number each; most are means.

    Args:
        records: For each step its metrics, and the three results of `joined`.
    """
    steps = [
        metrics
        | {"update/entropy": entropies / max(drift["tokens"].sum(), 1)}
        | jax.device_get(_summarize(counts))
        for metrics, counts, drift, entropies in records
    ]
    how: dict[str, Callable[..., Any]] = {
        "updates/empty": np.sum,
        "updates/non_finite": np.sum,
        "clip_ratio/low_min": np.min,
        "clip_ratio/high_max": np.max,
        "learning_rate": lambda x: x[-1],
        "entropy_coef": lambda x: x[-1],
    }
    return {
        name: how.get(name, np.mean)(np.array([step[name] for step in steps])) for name in steps[0]
    }
