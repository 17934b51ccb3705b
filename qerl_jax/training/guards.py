"""What a run checks of itself while it goes: faults that no metric shows unless someone knows to look.

Trainers have sampled without the adapter that they trained, silently: rewards then vary and nothing is
learned. And where sampler and trainer compute differently, ratios drift.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.config import RunConfig
from qerl_jax.rl import update
from qerl_jax.rl.experience import Experience

# Rows that are scored once more.
_ROWS = 8
# A share is known when its standard error is below this.
_KNOWN = 0.1
# Mean difference of log-probabilities, in nats, above which sampler and trainer are said to disagree.
_BOUNDS = {"bfloat16": 0.05, "float32": 1e-3}


@dataclasses.dataclass(frozen=True)
class AdapterShare:
    """How much of what the adapter changes the sampler saw.

    Attributes:
        share: 1 where the adapter sampled, 0 where the bare base did.
        error: Its standard error; infinite while the adapter changes nothing.
    """

    share: float
    error: float

    @property
    def known(self) -> bool:
        """Whether the error is small enough to tell the two apart."""
        return self.error < _KNOWN


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
        return AdapterShare(0.0, np.inf)
    share = np.sum(effect * seen) / power
    residual = seen - share * effect
    return AdapterShare(float(share), float(np.sqrt(np.mean(residual**2) / power)))


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@functools.partial(jax.jit, static_argnames="objective")
def _score_twice(objective, params, frozen, noise, part):
    score = functools.partial(update.score, objective, params, frozen, noise, part)
    return score(True), score(False)


@dataclasses.dataclass
class Guards:
    """Watches one run.

    Attributes:
        cfg: The run.
        updater: Of the run.
        warn: Is told each finding, once.
    """

    cfg: RunConfig
    updater: update.Updater
    warn: Callable[[str], None]
    _warned: bool = False

    def adapter(
        self, step: int, params: Any, frozen: Any, noise: Any, experience: Experience
    ) -> dict[str, float]:
        """From the second rollout on, whether the sampler has the adapter that is trained.

        Costs two forward passes of at most eight rows at the second rollout, the third, the fifth, the ninth and so
        on: at first an adapter may change too little to tell.

        Args:
            step: Optimizer steps done before the rollout.
            params: The adapter that the rollout was sampled with.
            frozen: The base.
            noise: The noise under which it was sampled, or None.
            experience: One group of it.

        Returns:
            `sampling/adapter_share`; nothing where nothing was checked, or where it is not sure.

        Raises:
            RuntimeError: The rollout was sampled without the adapter.
        """
        rollout = step // self.cfg.updates_per_rollout
        if self.updater.objective.model.lora is None or not _is_power_of_two(rollout):
            return {}
        rows = experience.rows.reshape(-1)[:_ROWS]
        batch = update.cut_rows(self.updater, experience, rows)[0]
        part = experience.pack(batch, {})
        scored = _score_twice(self.updater.objective, params, frozen, noise, part)
        found = adapter_share(*map(np.asarray, scored), part.behaviour_logps, part.mask)
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

    def mismatch(self, row: dict[str, Any]) -> None:
        """Warns once where sampler and trainer disagree by more than rounding explains."""
        acts_alone = self.cfg.noise is not None and self.cfg.noise.scope == "rollout"
        found = row.get("sampling/sampling_logp_difference/mean")
        if self._warned or acts_alone or found is None:
            return
        dtype = jnp.dtype(self.cfg.model.dtype).name
        if found > (bound := _BOUNDS[dtype]):
            self._warned = True
            self.warn(
                f"warning: sampler and trainer disagree: log-probabilities of a token differ by "
                f"{found:.3g} on average, {bound} is usual at most in {dtype}. Likely causes: a kernel "
                "that computes wrongly on this card (python -m scripts.check_device finds it), or a "
                "head in float32 on one side only. grpo.importance_sampling_correction limits the harm"
            )
