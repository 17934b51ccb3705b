"""Tests the metrics of a rollout."""

import types

import numpy as np
import pytest

from qerl_jax.training import metrics


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
