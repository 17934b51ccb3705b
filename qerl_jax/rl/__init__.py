"""Reinforcement learning: noise, rollouts, advantages, losses, the optimizer and the update.

This package has the parts of a training loop as functions without hidden state: a sampler is given the variables
that it samples from, and an update returns the new state.

    rollout = rl.collect(sampler, variables, problems, key)               # sample
    rewards, per_function = rl.score(rollout, functions, None)            # judge
    advantages = rl.group_advantages(rewards)                             # compare
    experience = rl.make_experience(rollout, advantages)                  # join
    state, metrics = updater(state, frozen, experience, None, key)        # learn

`examples/own_loop.py` is a complete loop. This package may import `generation`, `rewards` and what those import.
"""

from typing import TYPE_CHECKING

from qerl_jax.system import lazy_names

if TYPE_CHECKING:
    from qerl_jax.aqn.dose import equal_entropy_temperature
    from qerl_jax.aqn.draw import row_noise
    from qerl_jax.aqn.schedule import adapted_sigma, norm_noise, sigma_schedule, step_key
    from qerl_jax.generation.prompts import admit
    from qerl_jax.generation.sampler import Sampler
    from qerl_jax.model.transformer import as_computed, noise_shapes
    from qerl_jax.rewards.scoring import resolve
    from qerl_jax.rl.dynamic_sampling import Supply, by_functions, gather
    from qerl_jax.rl.entropy import EntropyControl
    from qerl_jax.rl.experience import Experience, make_experience
    from qerl_jax.rl.grpo import (
        BatchTotals,
        LossInputs,
        decoupled_advantages,
        group_advantages,
        informative,
        policy_loss,
    )
    from qerl_jax.rl.objective import Objective, token_logps
    from qerl_jax.rl.rollouts import Rollout, Scored, collect, make_sampler, score
    from qerl_jax.rl.update import TrainState, Updater, init_state

__getattr__, __dir__, __all__ = lazy_names.attach(__name__, __file__)
