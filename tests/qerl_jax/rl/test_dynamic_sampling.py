"""Tests sampling in rounds until enough groups have a signal, and the position in the data."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from qerl_jax.checkpoint import hf_folder
from qerl_jax.data import tokenizer
from qerl_jax.data.datasets import Problem
from qerl_jax.generation.prompts import encode
from qerl_jax.rl import dynamic_sampling
from qerl_jax.rl.dynamic_sampling import Supply
from qerl_jax.rl.rollouts import Rollout, Scored
from qerl_jax.tools.conversations import Conversation

GROUP = 2
PROBLEMS = [Problem("1+2=", {"answer": "3"}), Problem("12 + 30 = ?", {}), Problem("7*8=", {})]


@functools.cache
def tokens():
    return tokenizer.load(hf_folder.TINY)


def sampled():
    """Makes a rollout of rows of different lengths, whose texts are those of its tokens."""
    rng = np.random.default_rng(1)
    ids = tuple(rng.integers(3, 300, length).astype(np.int32) for length in (1, 6, 3, 2, 5, 4))
    return Rollout(
        problems=tuple(PROBLEMS),
        prompt_ids=encode(PROBLEMS, tokens()),
        texts=tuple(map(tokens().decode, ids)),
        completion_ids=ids,
        behaviour_logps=tuple(rng.normal(size=len(row)).astype(np.float32) for row in ids),
        stopped=(True, False, True, True, False, True),
        entropies=tuple(rng.uniform(size=6).tolist()),
    )


def scripted(*informative):
    """Makes a sample() that gives rounds of two groups; True means that its completions differ in reward."""
    rounds = iter(informative)

    def sample(supply):
        drawn, differ = supply.drawn, next(rounds)
        places = [drawn, drawn + 1]
        texts = [f"{place}{row}" for place in places for row in "ab"]
        each = [[1.0, 0.0] if differ[i] else [0.5, 0.5] for i in range(2)]
        rewards_ = np.array(each, np.float32)
        problems = [Problem(str(place), {}) for place in places]
        rollout = Rollout(
            problems=tuple(problems),
            prompt_ids=tuple(np.array([place], np.int32) for place in places),
            texts=tuple(texts),
            completion_ids=tuple(10 * row + np.arange(4, dtype=np.int32) for row in range(4)),
            behaviour_logps=(np.zeros(4, np.float32),) * 4,
            stopped=(True,) * 4,
        )
        scored = Scored(rollout, np.array(places, np.int32), rewards_, rewards_.reshape(4, 1))
        return scored, dataclasses.replace(supply, drawn=drawn + 2)

    return sample


def places(scored):
    """Returns the positions, and checks that everything else moved along with them."""
    if scored is None:
        return []
    found = scored.positions.tolist()
    assert scored.rollout.texts == tuple(f"{place}{row}" for place in found for row in "ab")
    assert [problem.prompt for problem in scored.rollout.problems] == [str(p) for p in found]
    assert scored.rewards.shape == (len(found), 2)
    np.testing.assert_array_equal(scored.rewards.reshape(-1, 1), scored.per_function)
    firsts = [ids[0] for ids in scored.rollout.completion_ids]
    assert firsts == [10 * (2 * (place % 2) + row) for place in found for row in range(2)]
    assert [ids.tolist() for ids in scored.rollout.prompt_ids] == [[place] for place in found]
    return found


YES, NO = True, False


@pytest.mark.parametrize(
    ("rounds", "max_rounds", "batch", "surplus", "used", "discarded", "filled"),
    [
        ([(YES, YES)], 9, [0, 1], [], 1, 0, 0),
        ([(YES, NO), (NO, YES)], 9, [0, 3], [], 2, 2, 0),
        ([(NO, YES), (YES, YES)], 9, [1, 2], [3], 2, 1, 0),
        # At the cap what is missing is filled up from the front.
        ([(NO, NO), (NO, YES)], 2, [3, 0], [], 2, 2, 1),
        ([(NO, NO)], 1, [0, 1], [], 1, 0, 2),
    ],
)
def test_groups_of_equal_rewards_are_replaced_until_the_cap(
    rounds, max_rounds, batch, surplus, used, discarded, filled
):
    sample = scripted(*rounds)
    got, fresh, supply, metrics = dynamic_sampling.gather(sample, Supply(), max_rounds=max_rounds)
    assert places(got) == batch
    assert places(fresh) == list(range(2 * used))
    assert (supply.drawn, places(supply.surplus)) == (2 * used, surplus)
    counts = {"rounds": used, "groups_discarded": discarded, "groups_filled": filled}
    counts["groups_carried_over"] = len(surplus)
    assert metrics == {f"dynamic_sampling/{name}": count for name, count in counts.items()}


def test_what_was_left_over_comes_first_in_the_next_rollout():
    first, second = scripted((NO, YES), (YES, YES)), scripted((NO, YES))
    *_, supply, _ = dynamic_sampling.gather(first, Supply(), max_rounds=9)
    batch, fresh, supply, metrics = dynamic_sampling.gather(second, supply, max_rounds=9)
    assert (places(batch), places(fresh)) == ([3, 5], [4, 5])
    assert (supply.drawn, supply.surplus) == (6, None)
    assert metrics["dynamic_sampling/groups_discarded"] == 1


def test_a_surplus_that_is_not_carried_over_is_discarded():
    first, second = scripted((NO, YES), (YES, YES)), scripted((YES, YES))
    options = {"max_rounds": 9, "carries_over": False}
    batch, _, supply, metrics = dynamic_sampling.gather(first, Supply(), **options)
    assert (places(batch), supply.surplus) == ([1, 2], None)
    names = ("groups_discarded", "groups_carried_over")
    assert [metrics[f"dynamic_sampling/{name}"] for name in names] == [2, 0]  # groups 0 and 3
    assert places(dynamic_sampling.gather(second, supply, **options)[0]) == [4, 5]


def shaped(accuracy, punishment):
    """Makes a sample() for one round of groups whose rewards are the sum of two functions."""
    per_function = np.stack([np.ravel(accuracy), np.ravel(punishment)], axis=1).astype(np.float32)

    def sample(supply):
        scored, supply = scripted((YES, YES))(supply)
        rewards_ = np.nansum(per_function, axis=1).reshape(scored.rewards.shape)
        return dataclasses.replace(scored, rewards=rewards_, per_function=per_function), supply

    return sample


def test_wrong_answers_of_unlike_length_are_no_group_to_learn_from():
    sample = shaped(accuracy=[[0, 0], [1, 0]], punishment=[[0, -1], [0, -1]])
    by_accuracy = {"max_rounds": 1, "informative": dynamic_sampling.by_functions({0: 1.0})}
    batch, *_, metrics = dynamic_sampling.gather(sample, Supply(), **by_accuracy)
    assert batch.positions.tolist() == [1, 0]
    assert metrics["dynamic_sampling/groups_filled"] == 1
    *_, metrics = dynamic_sampling.gather(sample, Supply(), max_rounds=1)
    assert metrics["dynamic_sampling/groups_filled"] == 0


def test_groups_are_compared_by_a_weighted_sum_without_rows_on_which_all_abstain():
    nan = np.nan
    informative = dynamic_sampling.by_functions({1: 2.0, 0: 1.0})
    for accuracy, punishment, expected in (
        ([[2, 0], [1, 1]], [[0, 1], [0, 1]], [False, True]),
        ([[1, nan], [nan, nan]], [[nan, nan], [nan, nan]], [False, False]),
        ([[1, nan], [0, 1]], [[nan, 1], [0, nan]], [True, True]),
    ):
        assert informative(shaped(accuracy, punishment)(Supply())[0]).tolist() == expected


def test_without_dynamic_sampling_a_round_is_taken_as_it_comes():
    sample = scripted((NO, NO))
    batch, fresh, supply, metrics = dynamic_sampling.gather(sample, Supply(4), max_rounds=None)
    assert batch is fresh and places(batch) == [4, 5]
    assert (supply, metrics) == (Supply(6), {})
    # A supply without a surplus is its place in the data.
    assert supply.to_table() == {"drawn": 6}
    assert Supply.from_table({"drawn": 6}, PROBLEMS.__getitem__, tokens()) == supply


def with_tools(rollout):
    """Makes rows of two turns, with prompts that have an environment's first words."""
    talks = tuple(
        Conversation(({"role": "tool", "name": "a", "content": str(i)},) * 2, i, 1, True, 0.5, {})
        for i in range(6)
    )
    return dataclasses.replace(
        rollout,
        prompt_ids=tuple(np.append(ids, 9).astype(np.int32) for ids in rollout.prompt_ids),
        texts=tuple(talk.messages[-1]["content"] for talk in talks),
        observation_mask=tuple(np.arange(len(ids)) % 2 == 1 for ids in rollout.completion_ids),
        conversations=talks,
    )


@pytest.mark.parametrize("has_tools", [False, True])
def test_a_supply_survives_being_written_as_json_bit_for_bit(has_tools):
    rng = np.random.default_rng(0)
    per_function = rng.normal(size=(6, 2)).astype(np.float32)
    per_function[1, 0] = np.nan
    combined = rng.normal(size=(3, GROUP)).astype(np.float32)
    combined[2, 1] = np.nan
    rollout = with_tools(sampled()) if has_tools else sampled()
    scored = Scored(rollout, np.array([7, 4, 9], np.int32), combined, per_function)
    supply = Supply(12, dynamic_sampling.choose(scored, [2, 0]))

    table = json.loads(json.dumps(supply.to_table(), allow_nan=False))
    problem_at = dict(zip((7, 4, 9), PROBLEMS, strict=True)).__getitem__
    restored = Supply.from_table(table, problem_at, tokens())
    assert restored.drawn == 12
    ours, theirs = restored.surplus, supply.surplus
    for name in ("positions", "rewards", "per_function"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
    for field in dataclasses.fields(Rollout):
        pair = [getattr(scored.rollout, field.name) for scored in (ours, theirs)]
        if None in pair:
            assert pair == [None, None]
            continue
        for a, b in zip(*pair, strict=True):
            assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, field.name
            assert type(a) is type(b) and getattr(a, "dtype", None) == getattr(b, "dtype", None)
