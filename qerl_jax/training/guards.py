"""What would make a run useless in silence: rollouts sampled without the adapter, and weights that are no numbers.

Trainers have sampled without the adapter: rewards then vary, nothing is learned, and no metric shows why.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.hosts import Hosts
from qerl_jax.rl import update
from qerl_jax.rl.experience import Experience

# Rows that are scored once more.
_ROWS = 8
# What the adapter changes stands out of rounding where a token's noise is below this part of it. Where it does
# not, rounding is in both sides of the regression, which makes the share of a good sampler smaller than 1.
_CLEAR = 1 / 8


@dataclasses.dataclass(frozen=True)
class AdapterShare:
    """How much of what the adapter changes the sampler saw.

    Attributes:
        share: 1 where the adapter sampled, 0 where the bare base did.
        error: Its standard error; infinite while the adapter changes nothing.
        noise: Of a token, in units of what the adapter changes (root mean squares); infinite likewise.
    """

    share: float
    error: float
    noise: float

    @property
    def known(self) -> bool:
        """Whether the noise is small enough to tell the two apart."""
        return self.noise < _CLEAR


def adapter_share(
    with_adapter: np.ndarray, without: np.ndarray, sampled: np.ndarray, mask: np.ndarray
) -> AdapterShare:
    """Regresses what the sampler did on what the adapter does.

        sampled - without = share * (with_adapter - without) + noise of rounding

    Args:
        with_adapter: float32, the trainer's log-probabilities of tokens, adapter on.
        without: The same with the adapter off.
        sampled: The sampler's.
        mask: bool, the tokens that count.
    """
    base = np.asarray(without, np.float64)[mask]
    effect = np.asarray(with_adapter, np.float64)[mask] - base
    seen = np.asarray(sampled, np.float64)[mask] - base
    power = np.sum(effect**2)
    if effect.size < 2 or power == 0:
        return AdapterShare(0.0, np.inf, np.inf)
    share = np.sum(effect * seen) / power
    noise = np.sqrt(np.sum((seen - share * effect) ** 2) / power)
    return AdapterShare(float(share), float(noise / np.sqrt(effect.size)), float(noise))


def is_due(step: int, updates_per_rollout: int) -> bool:
    """Whether the rollout after so many optimizer steps is checked: the second, the third, the fifth, the ninth ...

    At first an adapter may change too little to tell.
    """
    rollout = step // updates_per_rollout
    return rollout > 0 and rollout & (rollout - 1) == 0


def check_adapter(
    updater: update.Updater, params: Any, frozen: Any, noise: Any, group: Experience
) -> dict[str, float]:
    """Whether the sampler has the adapter that is trained; costs two forward passes of at most eight rows.

    Args:
        updater: Of the run.
        params: The adapter that the group was sampled with.
        frozen: The base.
        noise: The noise under which it was sampled, or None.
        group: Completions of one prompt.

    Returns:
        `sampling/adapter_share`; nothing where it is not sure.

    Raises:
        RuntimeError: The group was sampled without the adapter.
    """
    # One shape, so that it is compiled once for a run.
    batch = update.cut_rows(updater, group, group.rows.reshape(-1)[:_ROWS], largest=True)[0]
    part, replicas = group.pack(batch, {}), updater.replicas
    policy = replicas.each((params, frozen, noise))[0]
    parts = replicas.apart([part] * replicas.fsdp, 0)
    scored = jax.device_get(_score_twice(updater.objective, *policy, parts))
    if replicas.fsdp > 1:
        scored = [each[0] for each in scored]
    found = adapter_share(*scored, part.behaviour_logps, part.mask)
    if not found.known:
        return {}
    if found.share + 3 * found.error < 0.5:
        raise RuntimeError(
            "rollouts are sampled without the adapter that is trained: of what it changes in the "
            f"log-probabilities of sampled tokens the sampler shows {found.share:.2f} +- "
            f"{found.error:.2f}, where 1 is expected. This is a fault of the library: please "
            "report it with the output of `qerl env`"
        )
    return {"sampling/adapter_share": found.share}


def require_finite(tree: Any, step: int) -> None:
    """Refuses weights, or an optimizer's state, of which a number is not finite: they must not be saved.

    No update should make them so, for one whose loss or gradient is not finite is skipped.

    Args:
        tree: What is learned, and the optimizer's state.
        step: Optimizer steps done, for the error.

    Raises:
        ValueError: Naming the first array with such a number.
    """
    for path, is_finite in jax.tree_util.tree_leaves_with_path(jax.device_get(_finite(tree))):
        if not is_finite:
            raise ValueError(
                f"weights: {jax.tree_util.keystr(path)} is not finite after step {step}, which no update with a "
                "finite gradient explains: memory may be broken. Nothing of it was saved; start the same command "
                "again, and it goes on from the last checkpoint. If that happens again, lower "
                "optim.learning_rate, and test the memory of this machine"
            )


def require_same(hosts: Hosts, params: Any, step: int) -> None:
    """Refuses to go on where the processes of a run have not learned the same: each computes every step itself.

    Raises:
        RuntimeError: They have not, on which all agree.
    """
    if hosts.count == 1:
        return
    found = hosts.gathered(int(_fingerprint(params)))
    if len(set(found)) > 1:
        raise RuntimeError(
            f"the {hosts.count} processes of this run have different weights after step {step}: are their devices and "
            "drivers alike? Nothing of that step was saved; start all of them again, and they go on from the last "
            "checkpoint"
        )


@jax.jit
def _fingerprint(tree: Any) -> jax.Array:
    """uint32, the sum of the bits of all numbers."""
    of_bits = lambda x: jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return sum(jnp.sum(of_bits(leaf), dtype=jnp.uint32) for leaf in jax.tree.leaves(tree))


@jax.jit
def _finite(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), tree)


@functools.partial(jax.jit, static_argnames="objective")
def _score_twice(objective, params, frozen, noise, part):
    score = functools.partial(update.score, objective, params, frozen, noise, part)
    return score(True), score(False)
