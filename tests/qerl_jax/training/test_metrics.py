"""Tests the metrics of a rollout."""

import types

import numpy as np
import pytest

from qerl_jax.rewards import scoring
from qerl_jax.training import metrics
from qerl_jax.training.trace import Trace


@pytest.mark.parametrize(("is_masked", "signal"), [(False, 0.25), (True, 0.0)])
def test_truncated_completions_have_a_cost_and_a_share_of_the_signal(is_masked, signal):
    rollout = types.SimpleNamespace(
        sampled_lengths=np.array([10, 60, 10, 20]), stopped=(True, False, True, True)
    )
    learned = types.SimpleNamespace(rollout=rollout)
    found = metrics.truncation(learned, np.array([[1.5, -1.0], [-0.5, 1.0]]), is_masked)
    assert found == {
        "completions/truncated_tokens": 0.6,
        "completions/truncated_signal": signal,
    }


def test_what_rewards_log_is_averaged_and_is_not_taken_for_an_evaluation():
    record = scoring.Record(2)
    for name, value in (("share", 1), ("share", 2), ("eval/accuracy", 1)):
        record.log_metric(name, value)
    trace = Trace(0, 1, [record], laps={"rollout": 1.0, "update": 1.0})
    found = trace.metrics(types.SimpleNamespace(num_tokens=4))
    assert found["share"] == 1.5 and "eval/accuracy" not in found


def test_ends_that_were_missed_are_counted_in_truncated_completions_without_what_tools_wrote():
    ids = tuple(np.array(row) for row in ([9, 1, 5], [9, 2, 9], [2, 1, 1], [3, 4, 4], [1, 1, 1]))
    mask = np.zeros((5, 3), bool)
    mask[4] = True
    rollout = types.SimpleNamespace(
        completion_ids=ids, stopped=(False, False, True, False, False), observation_mask=tuple(mask)
    )
    found = metrics.missed_ends(rollout, {1: "<a>", 9: "<b>"})
    assert found == {"completions/missed_end_ratio": 0.5, "completions/missed_end": 9}
    assert metrics.missed_ends(rollout, {7: "<c>"}) == {}


def test_entropy_is_the_mean_of_all_sampled_tokens_also_of_groups_from_which_nothing_is_learned():
    rollout = types.SimpleNamespace(
        sampled_lengths=np.array([10, 5, 5, 4]), stopped=(True,) * 4, entropies=(3.0, 1.0, 0.5, 1.5)
    )
    rewards = np.array([[1.0, 0.0], [1.0, 1.0]])
    scored = types.SimpleNamespace(
        rollout=rollout, rewards=rewards, per_function=rewards.reshape(4, 1)
    )
    assert metrics.of_rollout(scored, [("right", None)])["entropy"] == 6 / 24
