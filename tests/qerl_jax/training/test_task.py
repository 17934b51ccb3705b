"""Tests what a run makes of its config before it starts."""

import pathlib
import re

import numpy as np
import pytest

from qerl_jax import config
from qerl_jax.api import settings
from qerl_jax.data.datasets import Problem
from qerl_jax.rewards import stock
from qerl_jax.rl.rollouts import Scored
from qerl_jax.training.task import about_data, informative_by

QUICKSTART = pathlib.Path(__file__).parents[3] / "configs" / "quickstart.toml"
NAMES = ("accuracy_reward", "soft_format_reward", "own_reward", "soft_overlong_punishment_reward")
# Four groups of two completions; in group i only the reward i differs.
DIFFERENCES = np.repeat(np.eye(4, dtype=np.float32), 2, axis=0) * np.tile([[0], [1]], (4, 1))


def kept(weights=(1.0, 0.2, 0.5, 0.5), shaping=None, metric=None):
    """Returns the places of the groups that dynamic sampling keeps, and the notes about it."""
    grpo = {"dynamic_sampling": {} if metric is None else {"metric": metric}}
    cfg = settings.run_config(QUICKSTART, {"rewards": {"shaping": shaping}, "grpo": grpo})
    lines = []
    informative = informative_by(cfg, [(name, None) for name in NAMES], weights, lines.append)
    rewards = (DIFFERENCES * np.array(weights, np.float32)).sum(axis=1).reshape(4, 2)
    scored = Scored(None, np.arange(4), rewards, DIFFERENCES)
    return np.flatnonzero(informative(scored)).tolist(), lines


@pytest.mark.parametrize(
    ("options", "groups", "words"),
    [
        ({}, [0, 2], "differ in accuracy_reward, own_reward"),
        ({"shaping": ("own_reward",)}, [0, 1, 3], "in accuracy_reward, soft_format_reward, soft_"),
        ({"shaping": ()}, [0, 1, 2, 3], "own_reward, soft_overlong_punishment_reward"),
        ({"metric": "soft_format_reward"}, [1], "differ in soft_format_reward"),
        ({"metric": "own_reward", "weights": (1.0, 1.0, 0.0, 1.0)}, [2], "differ in own_reward"),
        ({"weights": (1.0, 1.0, 0.0, 1.0)}, [0], "differ in accuracy_reward"),
    ],
)
def test_dynamic_sampling_compares_by_what_does_not_shape_or_by_the_named_reward(
    options, groups, words
):
    found, (said,) = kept(**options)
    assert found == groups and words in said


def test_the_whole_sum_is_compared_where_that_is_asked_for():
    assert kept(metric="reward") == ([0, 1, 2, 3], [])


def test_all_that_the_stock_calls_shaping_is_a_reward_that_a_run_can_have():
    made = {stock.get_repetition_penalty_reward().__name__, "soft_overlong_punishment_reward"}
    assert stock.SHAPING <= {*stock.STOCK, *made}


def test_the_help_of_shaping_names_what_the_stock_calls_shaping():
    text = config.RewardConfig.__doc__.partition("shaping:")[2]
    # The punishment of long completions is named in words.
    named = {*re.findall(r"\w+_reward\b", text)}
    assert named == stock.SHAPING - {"soft_overlong_punishment_reward"}


CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("problems", "words"),
    [
        (40 * [Problem(CHAT, {"answer": "2"})], []),
        (40 * [Problem(CHAT, {})], []),
        (40 * [Problem("1+1=", {"answer": 2})], []),
        ([Problem(CHAT, {"answer": "2"})], ["there is 1 problem, and a rollout asks 32"]),
        (
            [*39 * [Problem(CHAT, {"answer": 0})], Problem(CHAT, {"answer": None})],
            ["1 of 40 problems have no answer (problem 39, from 0 on)"],
        ),
        (
            40 * [Problem(CHAT, {"answer": ""})],
            ["40 of 40 problems have no answer (problem 0, 1, 2, 3, 4, ..., from 0 on)"],
        ),
        (
            [*39 * [Problem(CHAT, {"answer": 2.5})], Problem(CHAT, {"answer": 2.0**53})],
            ["1 of 40 problems have a float of 2**53 or more as answer (problem 39, from 0 on)"],
        ),
    ],
)
def test_data_that_may_teach_nothing_is_told(problems, words):
    cfg = settings.run_config(QUICKSTART, {"data": {"dataset": "mine.jsonl"}})
    lines = about_data(cfg, problems)
    assert all(word in line for word, line in zip(words, lines, strict=True))
