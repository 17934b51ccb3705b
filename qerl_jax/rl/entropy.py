"""Uses of entropy in the update: an adaptive coefficient of the entropy bonus, and a mask of high-entropy tokens."""

import dataclasses
from typing import Self

import jax
import numpy as np

from qerl_jax.config import EntropyConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EntropyControl:
    """An adaptive coefficient of the entropy bonus (Skywork-OR1, arXiv:2505.22312), as in TRL.

    Attributes:
        coef: float32, the coefficient.
        last: float32, the mean entropy of the last optimizer step in nats per token; infinity before the
            first step, which therefore has no bonus.
    """

    coef: np.floating | np.ndarray | jax.Array
    last: np.floating | np.ndarray | jax.Array

    @classmethod
    def begin(cls, cfg: EntropyConfig) -> Self:
        """Returns the control at the start of a run."""
        return cls(np.float32(cfg.coef), np.float32(np.inf))

    def applied(self, cfg: EntropyConfig) -> float:
        """Returns the coefficient for the next step: 0 if the last entropy is above its target."""
        return float(self.coef) if self.last <= cfg.target else 0.0

    def after(self, cfg: EntropyConfig, entropy: float) -> Self:
        """Returns the control after a step with a mean entropy in nats; a non-finite entropy changes nothing.

        The coefficient rises by `coef_delta` if the entropy is at most its target, else it falls by as much.
        """
        if not np.isfinite(entropy):
            return self
        change = cfg.coef_delta * (1 if entropy <= cfg.target else -1)
        coef = np.clip(float(self.coef) + change, cfg.coef_min, cfg.coef_max)
        return type(self)(np.float32(coef), np.float32(entropy))


def high_entropy(entropies: np.ndarray, mask: np.ndarray, quantile: float) -> np.ndarray:
    """Marks the tokens with the highest entropies (arXiv:2506.01939), as TRL's `top_entropy_quantile` does.

    Args:
        entropies: float32, in nats, of any shape.
        mask: bool of the same shape, the tokens that count.
        quantile: Share of the counted tokens that is marked; tokens equal to the threshold are marked, too.

    Returns:
        float32 of the same shape, 1 or 0.
    """
    counted = entropies[mask]
    if not counted.size:
        return np.zeros(mask.shape, np.float32)
    threshold = np.quantile(counted, 1 - quantile)
    return (mask & (entropies >= threshold)).astype(np.float32)
