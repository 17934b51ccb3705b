"""Checks that the sampler uses the adapter that is trained.

This fault has occurred in other trainers: rewards vary, nothing is learned, and no metric shows why.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from qerl_jax.aqn.draw import RowNoise
from qerl_jax.compilation.early_programs import Listed
from qerl_jax.compilation.jitted import jitted
from qerl_jax.rl import microbatches, update
from qerl_jax.rl.experience import Experience, empty_experience
from qerl_jax.rl.objective import score

# Number of rows that are scored again.
_ROWS = 8
# The check is conclusive if rounding noise per token is below this fraction of the adapter's effect (root mean
# squares). Otherwise rounding affects both sides of the regression, and the share of a correct sampler falls below 1.
_CLEAR = 1 / 8
# The number of tokens with the largest effects that are left out. Rounding changes most tokens by little and one in a
# hundred by a lot: one such token can look like a large effect that is missing in the sampler.
_OUTLIERS = 3


@dataclasses.dataclass(frozen=True)
class AdapterShare:
    """The share of the adapter's effect that is in the sampler's log-probabilities.

    Attributes:
        share: About 1 if the sampler used the adapter, about 0 if it used only the base.
        error: Standard error of the share; infinite if the adapter has no effect.
        noise: Noise per token, relative to the adapter's effect (root mean squares); infinite if it has no effect.
    """

    share: float
    error: float
    noise: float

    @property
    def known(self) -> bool:
        """Whether the noise is small enough to tell the two cases apart."""
        return self.noise < _CLEAR


def adapter_share(
    with_adapter: np.ndarray, without: np.ndarray, sampled: np.ndarray, mask: np.ndarray
) -> AdapterShare:
    """Regresses the sampler's log-probabilities on the adapter's effect.

        sampled - without = share * (with_adapter - without) + noise of rounding

    The few tokens with the largest effects are left out.

    Args:
        with_adapter: The trainer's log-probabilities of tokens with the adapter: float32 of any shape, in nats.
        without: Those without the adapter, in the same shape.
        sampled: The sampler's log-probabilities, in the same shape.
        mask: bool in the same shape, the tokens that count.
    """
    base = np.asarray(without, np.float64)[mask]
    effect = np.asarray(with_adapter, np.float64)[mask] - base
    chosen = np.argsort(-np.abs(effect), kind="stable")[_OUTLIERS:]
    effect, seen = effect[chosen], (np.asarray(sampled, np.float64)[mask] - base)[chosen]
    power = np.sum(effect**2)
    if effect.size < 2 or power == 0:  # too few tokens are left, or the adapter has no effect
        return AdapterShare(0.0, np.inf, np.inf)
    share = np.sum(effect * seen) / power
    noise = np.sqrt(np.sum((seen - share * effect) ** 2) / power)
    return AdapterShare(float(share), float(noise / np.sqrt(effect.size)), float(noise))


def check_adapter(
    updater: update.Updater, params: Any, frozen: Any, noise: Any, groups: Iterable[Experience]
) -> dict[str, float]:
    """Checks that the sampler uses the trained adapter, by two forward passes over at most eight rows of a group.

    Further groups are checked only if the first one fails, and the check fails only if all do, because a false alarm
    would end the run.

    Args:
        updater: The run's updater.
        params: The adapter that the groups were sampled with.
        frozen: The base.
        noise: The noise that they were sampled with, or None.
        groups: At least one group, each with the completions of one prompt.

    Returns:
        `sampling/adapter_share` of the last group that was checked; empty if its result is inconclusive.

    Raises:
        RuntimeError: If all groups were sampled without the adapter.
    """
    for group in groups:
        result = _share_of(updater, params, frozen, noise, group)
        if not result.known:
            return {}
        if result.share + 3 * result.error >= 0.5:
            return {"sampling/adapter_share": result.share}
    raise RuntimeError(
        "rollouts are sampled without the adapter that is trained: of what it changes in the "
        f"log-probabilities of sampled tokens the sampler shows {result.share:.2f} +- "
        f"{result.error:.2f}, where 1 is expected. This is a fault of the library: please "
        "report it with the output of `qerl env`"
    )


def _share_of(
    updater: update.Updater, params: Any, frozen: Any, noise: Any, group: Experience
) -> AdapterShare:
    """Computes `adapter_share` for the first rows of a group."""
    # The shape is always the same, so that one program is compiled per run.
    batch = update.divide_rows(updater, group, group.rows.reshape(-1)[:_ROWS], largest=True)[0]
    part, replicas = group.pack(batch, {}), updater.replicas
    policy = replicas.each((params, frozen, noise))[0]
    parts = replicas.apart([part] * replicas.group, 0)
    function = functools.partial(_score_twice, updater.objective)
    scored = jax.device_get(updater.early.call(("check",), function, *policy, parts))
    with_adapter, without = [logps[0] for logps in scored] if replicas.group > 1 else scored
    sampled, mask = np.asarray(part.behaviour_logps), np.asarray(part.mask)
    return adapter_share(with_adapter, without, sampled, mask)


def programs(
    updater: update.Updater, params: Any, frozen: Any, noise: Any, group: int
) -> list[Listed]:
    """Lists the program of `check_adapter` on one device; shapes instead of arrays are enough.

    The arguments are those of `check_adapter`, and the number of completions that share a prompt.
    """
    shape = updater.shapes(group)[0]
    batch = microbatches.MicroBatch(shape, microbatches.empty_rows(shape.num_rows))
    part = empty_experience(has_noise=isinstance(noise, RowNoise)).pack(batch, {})
    function = functools.partial(_score_twice, updater.objective)
    return [Listed("check", ("check",), function, (params, frozen, noise, part))]


@jitted(static_argnames="objective")
def _score_twice(objective, params, frozen, noise, part):
    scored = functools.partial(score, objective, params, frozen, noise, part)
    return scored(True), scored(False)
