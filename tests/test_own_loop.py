"""Tests that the loop in examples/own_loop.py, made of parts of `qerl_jax.rl`, runs and learns."""

import jax
import numpy as np
import pytest

from examples import own_loop


@pytest.mark.slow
def test_a_loop_of_ones_own_takes_steps_and_gives_a_policy(capsys):
    policy, rewards = own_loop.train(steps=2, prompts=4)
    assert len(rewards) == 2 and np.isfinite(rewards).all()
    assert capsys.readouterr().out.count("reward") == 2
    learned = jax.tree.leaves(policy.variables["params"])
    assert all(np.isfinite(leaf).all() for leaf in learned)
    assert policy.unsaved and policy.generate("1+1", max_tokens=8)[0].text


@pytest.mark.slow
def test_a_loop_of_ones_own_learns():
    _, rewards = own_loop.train()
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15
