"""Rewards that tests import by path: a control that teaches nothing, and mistakes a user may make."""

import random

from qerl_jax import rewards


def shuffled(completions, answer, **_):
    """The right rewards in an order that has nothing to do with the completions."""
    values = rewards.correct_and_well_formed_reward(completions, answer)
    random.Random(str(completions)).shuffle(values)
    return values


def raising(completions, **_):
    """Fails as a user's own code does."""
    raise KeyError("difficulty")


def one_short(completions, **_):
    """Forgets a row."""
    return [0.0] * (len(completions) - 1)
