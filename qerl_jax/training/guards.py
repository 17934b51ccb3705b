"""Checks for silent failures: rollouts sampled without the adapter, and weights that are not finite."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import runtime
from qerl_jax.aqn.draw import RowNoise
from qerl_jax.checkpoint import checksum
from qerl_jax.compilation.early_programs import EarlyPrograms
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.planning import memory
from qerl_jax.rl import adapter_check, dynamic_sampling, open_groups, update
from qerl_jax.rl.experience import Experience, make_experience
from qerl_jax.rl.open_groups import OpenGroup
from qerl_jax.system.checked import NOT_FINITE, NotFinite
from qerl_jax.training.groups import Groups, to_experience
from qerl_jax.training.load import PreparedRun
from qerl_jax.training.position import Position

# Number of groups that must fail the check before a run ends.
_CHECKED_GROUPS = 3


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
            for name in ("loss", "grad_norm", "update/entropy")
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


class MemoryCheck:
    """Compares the memory plan with what a run uses; it does nothing if the device does not report its memory.

    Args:
        plan: The plan.
        early: What compiles the programs of the run. XLA times products in memory of its own, which no plan has.
        earlier_peak: Peak memory from before the run, in bytes. A peak that is not higher was not caused by the run.
    """

    def __init__(self, plan: memory.Plan, early: EarlyPrograms, earlier_peak: int):
        self._plan, self._early, self._earlier_peak = plan, early, earlier_peak
        self._was_shown, self._was_checked = False, plan.limit is None

    def __call__(self, note: Callable[[str], None]) -> None:
        """Called after each step: shows the plan once, and checks once that there is only one copy of the base.

        It checks after the first step that ends without a program that compiles. The peak tells nothing if others did.

        Args:
            note: Called with each line of the comparison.

        Raises:
            RuntimeError: If more memory is or was in use than one copy of the base explains.
        """
        if self._was_checked:
            return
        peak, is_first = memory.peak_memory(), not self._was_shown
        self._was_shown = True
        for line in self._plan.lines(peak) if is_first else ():
            note(line)
        compiled, listed = self._early.counts
        if compiled == listed:
            self._was_checked = True
            in_use = runtime.memory_stats()["bytes_in_use"]
            is_known = is_first and peak > self._earlier_peak
            self._plan.require_one_base(in_use, peak if is_known else 0)


def is_due(step: int, updates_per_rollout: int) -> bool:
    """Whether to check the rollout that follows `step` optimizer steps: the second, third, fifth, ninth ... rollout.

    The check is repeated because at first an adapter may have too little effect.
    """
    rollout = step // updates_per_rollout
    return rollout > 0 and rollout & (rollout - 1) == 0


def check_sampler(
    run: PreparedRun, position: Position, groups: Groups, noise: Any
) -> dict[str, float]:
    """Runs `adapter_check.check_adapter` on groups that a step sampled with `noise`.

    Returns no metrics if no check is due, or if there is no adapter.
    """
    cfg, sampled = run.cfg, groups.sampled
    if not run.task.model.lora or not is_due(position.step, cfg.updates_per_rollout):
        return {}
    # The trainer's rows cannot have noise per token, nor noise per row if rows share a prompt.
    without = ("token", "sequence") if cfg.optim.share_prompts else ("token",)
    if isinstance(noise, RowNoise) and noise.per in without:
        return {}
    count = min(_CHECKED_GROUPS, len(sampled.rewards))
    chosen = (dynamic_sampling.choose(sampled, [number]) for number in range(count))
    rows = (to_experience(cfg, group, np.zeros_like(group.rewards), noise) for group in chosen)
    if newest := groups.supply.open_groups[-_CHECKED_GROUPS:]:
        rows = (_sampled_now(run, position, group) for group in reversed(newest))
    return adapter_check.check_adapter(run.updater, position.state.params, run.frozen, noise, rows)


def _sampled_now(run: PreparedRun, position: Position, group: OpenGroup) -> Experience:
    """Returns a group whose mask has only the tokens that this step's policy has sampled."""
    rollout = open_groups.to_rollout([group], run.task.tokenizer)
    advantages = np.zeros((1, rollout.num_generations))
    rows = make_experience(rollout, advantages, share_prompts=run.cfg.optim.share_prompts)
    return dataclasses.replace(rows, mask=rows.versions == position.step)


def require_finite(state: update.TrainState) -> None:
    """Checks that weights and optimizer state are finite, before they are saved.

    No update should break this, because updates whose loss or gradient is not finite are skipped.

    Raises:
        ValueError: For the first array with a number that is not finite.
    """
    learned = {"params": state.params, "opt_state": state.opt_state}
    if (name := _not_finite(learned)) is not None:
        raise ValueError(
            f"weights: {name} is not finite after step {state.step}, which no update with a finite gradient explains: "
            "memory may be broken. Nothing of it was saved; start the same command again, and it goes on from the last "
            "checkpoint. If that happens again, lower optim.learning_rate, and test the memory of this machine"
        )


def require_finite_base(frozen: Any) -> None:
    """Checks that the base, which was finite when it was read, still is.

    Raises:
        NotFinite: For the first array with a number that is not finite.
    """
    if (name := _not_finite(frozen)) is not None:
        raise NotFinite(
            f"base: {name} is not finite, though all numbers were when they were read: the device computes wrongly, or "
            "its memory was overwritten. Start the same command again, and it goes on from the last checkpoint"
        )


def require_unchanged_base(frozen: Any, first: jax.Array) -> None:
    """Checks before something is saved that the base is what it was when the run began, with the checksum `first`.

    Raises:
        RuntimeError: If it is not.
    """
    if (now := int(checksum.of_tree(frozen))) != int(first):
        raise RuntimeError(
            f"base: its checksum is {now:08x}, and was {int(first):08x} when the run began: its memory was overwritten, or "
            "the device computes wrongly. Nothing was saved since; start the same command again, and it goes on from the "
            "last checkpoint"
        )


def require_same(hosts: Hosts, params: Any, step: int) -> None:
    """Checks that all processes of a run have the same parameters: each computes the optimizer's step itself.

    Raises:
        RuntimeError: If the parameters differ; all processes raise it.
    """
    if hosts.count > 1 and len(set(hosts.gathered(int(checksum.of_tree(params))))) > 1:
        raise RuntimeError(
            f"the {hosts.count} processes of this run have different weights after step {step}: are their devices and "
            "drivers alike? Nothing of that step was saved; start all of them again, and they go on from the last "
            "checkpoint"
        )


def _not_finite(tree: Any) -> str | None:
    """Returns the name of the first array with a number that is not finite; None if there is none."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(_finite(tree)))
    return next((jax.tree_util.keystr(path) for path, is_finite in leaves if not is_finite), None)


@jax.jit
def _finite(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), tree)
