"""Rewards that tests import by path: a control that teaches nothing, and typical mistakes of users."""

import random

from qerl_jax.rewards import stock


def shuffled(completions, answer, **_):
    """Gives the right rewards in an order that has nothing to do with the completions."""
    values = stock.correct_and_well_formed_reward(completions, answer)
    random.Random(str(completions)).shuffle(values)
    return values


def raising(completions, **_):
    """Fails as a user's own code does."""
    raise KeyError("difficulty")


def one_short(completions, **_):
    """Forgets a row."""
    return [0.0] * (len(completions) - 1)


def talkative(completions, trainer_state, log_extra, log_metric, **_):
    """Logs a column and a number beside its rewards."""
    log_extra("letters", [len(stock.completion_text(each)) for each in completions])
    log_metric("steps_to_go", trainer_state.max_steps - trainer_state.global_step)
    return [0.0] * len(completions)
