"""Tests that the loop in examples/own_loop.py, made of parts of `qerl_jax.rl`, runs and learns."""

import jax
import numpy as np
import pytest

from examples import own_loop


@pytest.mark.slow
def test_a_loop_of_ones_own_learns_and_gives_a_policy(capsys):
    policy, rewards = own_loop.train()
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15
    assert len(rewards) == capsys.readouterr().out.count("reward") == 20
    learned = jax.tree.leaves(policy.variables["params"])
    assert all(np.isfinite(leaf).all() for leaf in learned)
    assert policy.unsaved and policy.generate("1+1", max_tokens=8)[0].text
