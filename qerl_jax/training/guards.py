"""Checks for silent failures: rollouts sampled without the adapter, and weights that are not finite.

The first fault has occurred in other trainers: rewards vary, nothing is learned, and no metric shows why.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import runtime
from qerl_jax.aqn.draw import RowNoise
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.generation.scheduler import NOT_FINITE, NotFinite
from qerl_jax.planning import memory
from qerl_jax.rl import dynamic_sampling, microbatches, rollouts, update
from qerl_jax.rl.experience import Experience, empty_experience
from qerl_jax.rl.objective import score
from qerl_jax.system.early_programs import Listed
from qerl_jax.training.groups import to_experience
from qerl_jax.training.load import PreparedRun
from qerl_jax.training.position import Position

# Number of rows that are scored again, and of groups that must fail the check before a run ends.
_ROWS, _CHECKED_GROUPS = 8, 3
# The check is conclusive if rounding noise per token is below this fraction of the adapter's effect (root mean
# squares). Otherwise rounding affects both sides of the regression, and the share of a correct sampler falls below 1.
_CLEAR = 1 / 8
# The number of tokens with the largest effects that are left out. Rounding changes most tokens by little and one in a
# hundred by a lot: one such token can look like a large effect that is missing in the sampler.
_OUTLIERS = 3


def check(
    run: PreparedRun,
    state: update.TrainState,
    experience: Experience,
    learned: Mapping[str, Any],
) -> None:
    """Checks the state after a step, with metrics `learned`: finite, and the same in all processes.

    Raises:
        ValueError: If weights or the optimizer's state are not finite, or no update of the run was so far.
        RuntimeError: If the processes have different weights.
    """
    if learned["updates/non_finite"] and int(state.skipped) == int(state.step):
        seen = ", ".join(
            f"{name} {float(learned[name]):.4g}"
            for name in ("loss", "grad_norm", "entropy")
            if name in learned
        )
        raise NotFinite(
            f"update: {seen}: the first update is not finite, and so would be all others. {NOT_FINITE}; "
            "non_finite/ has the step for qerl replay"
        )
    logps = experience.behaviour_logps[experience.mask]
    if learned["updates/non_finite"] or not np.isfinite(logps).all():
        require_finite(state)
    require_same(run.hosts, state.params, int(state.step))


def compare_memory(plan: memory.Plan, earlier_peak: int, note: Callable[[str], None]) -> None:
    """Shows the memory plan beside the measured peak, and checks that there is only one copy of the base.

    Args:
        plan: The plan; there is nothing to compare if the device does not report its memory.
        earlier_peak: Peak memory from before the run, in bytes. A peak that is not higher was not caused by the run.
        note: Called with each line of the comparison.

    Raises:
        RuntimeError: If more memory is or was in use than one copy of the base explains.
    """
    if plan.limit is None:
        return
    peak = memory.peak_memory()
    for line in plan.lines(peak):
        note(line)
    plan.require_one_base(
        runtime.memory_stats()["bytes_in_use"], peak if peak > earlier_peak else 0
    )


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


def is_due(step: int, updates_per_rollout: int) -> bool:
    """Whether to check the rollout that follows `step` optimizer steps: the second, third, fifth, ninth ... rollout.

    The check is repeated because at first an adapter may have too little effect.
    """
    rollout = step // updates_per_rollout
    return rollout > 0 and rollout & (rollout - 1) == 0


def check_sampler(
    run: PreparedRun, position: Position, sampled: rollouts.Scored, noise: Any
) -> dict[str, float]:
    """Runs `check_adapter` on groups that a step sampled with `noise`, if a check is due and there is an adapter."""
    cfg = run.cfg
    if not run.task.model.lora or not is_due(position.step, cfg.updates_per_rollout):
        return {}
    # The trainer's rows cannot have noise per token, nor noise per row if rows share a prompt.
    without = ("token", "sequence") if cfg.optim.share_prompts else ("token",)
    if isinstance(noise, RowNoise) and noise.per in without:
        return {}
    count = min(_CHECKED_GROUPS, len(sampled.rewards))
    groups = (dynamic_sampling.choose(sampled, [number]) for number in range(count))
    rows = (to_experience(cfg, group, np.zeros_like(group.rewards), noise) for group in groups)
    return check_adapter(run.updater, position.state.params, run.frozen, noise, rows)


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
    updater.early.wait("check")
    scored = jax.device_get(_score_twice(updater.objective, *policy, parts))
    if replicas.group > 1:
        scored = [logps[0] for logps in scored]
    return adapter_share(*scored, part.behaviour_logps, part.mask)


def programs(
    updater: update.Updater, params: Any, frozen: Any, noise: Any, group: int
) -> list[Listed]:
    """Lists the program of `check_adapter` on one device; shapes instead of arrays are enough.

    The arguments are those of `check_adapter`, and the number of completions that share a prompt.
    """
    shape = updater.shapes(group)[0]
    batch = microbatches.MicroBatch(shape, microbatches.empty_rows(shape.num_rows))
    part = empty_experience(has_noise=isinstance(noise, RowNoise)).pack(batch, {})
    lower = functools.partial(_score_twice.lower, updater.objective, params, frozen, noise, part)
    return [Listed("check", ("check",), lower)]


def require_finite(state: update.TrainState) -> None:
    """Checks that weights and optimizer state are finite, before they are saved.

    No update should break this, because updates whose loss or gradient is not finite are skipped.

    Raises:
        ValueError: For the first array with a number that is not finite.
    """
    learned = {"params": state.params, "opt_state": state.opt_state}
    for path, is_finite in jax.tree_util.tree_leaves_with_path(jax.device_get(_finite(learned))):
        if not is_finite:
            raise ValueError(
                f"weights: {jax.tree_util.keystr(path)} is not finite after step {state.step}, which no update with a "
                "finite gradient explains: memory may be broken. Nothing of it was saved; start the same command "
                "again, and it goes on from the last checkpoint. If that happens again, lower "
                "optim.learning_rate, and test the memory of this machine"
            )


def require_same(hosts: Hosts, params: Any, step: int) -> None:
    """Checks that all processes of a run have the same parameters: each computes the optimizer's step itself.

    Raises:
        RuntimeError: If the parameters differ; all processes raise it.
    """
    if hosts.count > 1 and len(set(hosts.gathered(int(_fingerprint(params))))) > 1:
        raise RuntimeError(
            f"the {hosts.count} processes of this run have different weights after step {step}: are their devices and "
            "drivers alike? Nothing of that step was saved; start all of them again, and they go on from the last "
            "checkpoint"
        )


@jax.jit
def _fingerprint(tree: Any) -> jax.Array:
    """Returns the sum of the bits of all numbers, uint32."""
    of_bits = lambda x: jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return sum(jnp.sum(of_bits(leaf), dtype=jnp.uint32) for leaf in jax.tree.leaves(tree))


@jax.jit
def _finite(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), tree)


@functools.partial(jax.jit, static_argnames="objective")
def _score_twice(objective, params, frozen, noise, part):
    scored = functools.partial(score, objective, params, frozen, noise, part)
    return scored(True), scored(False)
