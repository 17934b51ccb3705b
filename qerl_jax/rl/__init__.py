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

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# The module of each name. The imports above list the same names for editors and type checkers.
_MODULES = {
    "qerl_jax.aqn.draw": ("row_noise",),
    "qerl_jax.generation.prompts": ("admit",),
    "qerl_jax.generation.sampler": ("Sampler",),
    "qerl_jax.model.transformer": ("as_computed", "noise_shapes"),
    "qerl_jax.rewards.scoring": ("resolve",),
    "qerl_jax.aqn.schedule": ("adapted_sigma", "norm_noise", "sigma_schedule", "step_key"),
    "qerl_jax.rl.dynamic_sampling": ("Supply", "by_functions", "gather"),
    "qerl_jax.rl.experience": ("Experience", "make_experience"),
    "qerl_jax.rl.entropy": ("EntropyControl",),
    "qerl_jax.rl.grpo": (
        "BatchTotals",
        "LossInputs",
        "decoupled_advantages",
        "group_advantages",
        "informative",
        "policy_loss",
    ),
    "qerl_jax.rl.rollouts": (
        "Rollout",
        "Scored",
        "collect",
        "make_sampler",
        "score",
    ),
    "qerl_jax.rl.objective": ("Objective", "token_logps"),
    "qerl_jax.rl.update": ("TrainState", "Updater", "init_state"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    """Imports a name when it is first asked for."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names."""
    return list(__all__)
