"""The groups of completions of a step, and how they become the input of the updater."""

import dataclasses
from typing import Any

import numpy as np

from qerl_jax import config
from qerl_jax.aqn.draw import RowNoise
from qerl_jax.rl import dynamic_sampling, rollouts
from qerl_jax.rl.experience import Experience, make_experience


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of completions of a step.

    Attributes:
        sampled: All groups that were scored in this step.
        chosen: The P groups to learn from; without dynamic sampling those that were sampled.
        advantages: The advantage of each completion of the chosen groups, float32 [P, G].
        supply: The position in the data after the step, and left-over groups.
        metrics: Metrics under `dynamic_sampling/` and `carry/`.
    """

    sampled: rollouts.Scored
    chosen: rollouts.Scored
    advantages: np.ndarray
    supply: dynamic_sampling.Supply
    metrics: dict[str, float]

    def experience(self, cfg: config.RunConfig, noise: Any) -> Experience:
        """Returns the chosen groups as the input of the updater; `noise` is that of sampling, or None."""
        return to_experience(cfg, self.chosen, self.advantages, noise)


def to_experience(
    cfg: config.RunConfig, scored: rollouts.Scored, advantages: np.ndarray, noise: Any
) -> Experience:
    """Returns groups with advantages [P, G] as the input of the updater; `noise` is that of sampling, or None."""
    numbers = None
    if isinstance(noise, RowNoise):
        numbers = noise.numbers(scored.positions, scored.rollout.num_generations)
    return make_experience(
        scored.rollout,
        advantages,
        mask_truncated_completions=cfg.grpo.mask_truncated_completions,
        share_prompts=cfg.optim.share_prompts,
        judged=~np.isnan(scored.rewards),
        noise=numbers,
    )
