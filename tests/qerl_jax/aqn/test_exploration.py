"""Tests noise over a run: what acts at each step, adaptive sigma, and the effect of sigma on the norms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.aqn import exploration
from qerl_jax.aqn import schedule as aqn
from qerl_jax.aqn.draw import RowNoise
from qerl_jax.config import AdaptiveNoiseConfig, LoraConfig, NoiseConfig
from qerl_jax.model.architecture import Architecture
from qerl_jax.model.transformer import Transformer, noise_shapes, random_base, trainable

ARCH = Architecture("qwen2", 64, 32, 48, 2, 4, 2, 8)
KEY = jax.random.key(3)
ADAPTIVE = NoiseConfig(
    num_stages=5, sigma_end=1e-3, adaptive=AdaptiveNoiseConfig(target=0.5, rate=2.0)
)


@functools.cache
def policy(full=False, dtype=jnp.bfloat16):
    """Makes a policy whose norms have the mean |scale| 2, 1/2 and 4."""
    model = Transformer(ARCH, "bfloat16", None if full else LoraConfig(2, 4.0), dtype)
    frozen = random_base(model, jax.random.key(0))
    model = dataclasses.replace(model, full=full)
    layers = frozen["layers"]
    sign = jnp.where(jnp.arange(32) % 2, 1, -1).astype(jnp.bfloat16)
    for name, mean in (("input_layernorm", 2.0), ("post_attention_layernorm", 0.5)):
        layers = layers | {name: {"scale": jnp.broadcast_to(mean * sign, (2, 32))}}
    frozen = frozen | {"layers": layers, "norm": {"scale": 4 * sign}}
    params, frozen = trainable(model, frozen, jax.random.key(1))
    return model, params, frozen


@pytest.mark.parametrize("full", [False, True])
def test_scales_are_those_of_the_norms_that_noise_acts_on(full):
    means = exploration.mean_scales(*policy(full))
    assert means == {"input_layernorm": 2.0, "post_attention_layernorm": 0.5}
    assert exploration.mean_scales(*policy(full), final_norm=True) == means | {"norm": 4.0}


def test_a_run_says_once_what_sigma_means_and_where_rounding_drowns_it():
    lines = exploration.describe(NoiseConfig(), *policy())
    assert len(lines) == 2
    assert "mean |scale| of the norms is 1.25" in lines[0]
    assert "sigma from 0.01 to 0.0001 is 0.80% to 0.008% of a scale" in lines[0]
    assert "below sigma = 0.0028 (0.22% of a scale)" in lines[1]
    assert lines[1].endswith("at sigma_end rounding adds 7 times as much noise as AQN")
    # Rounding is named only where it drowns noise.
    loud = NoiseConfig(sigma_start=1e-2, sigma_end=5e-3)
    assert len(exploration.describe(loud, *policy())) == 1
    assert len(exploration.describe(NoiseConfig(), *policy(dtype=jnp.float32))) == 1
    follows = "follows sampling/entropy: up by a factor of 2 after a rollout below 0.5"
    assert follows in exploration.describe(ADAPTIVE, *policy())[1]


def make(cfg, total_steps=10):
    return exploration.make_exploration(cfg, policy()[0], KEY, total_steps)


def test_noise_of_a_rollout_is_what_step_and_schedule_say():
    cfg = NoiseConfig(num_stages=5)
    noise = make(cfg)(7, 7, None)
    sigma = aqn.sigma_schedule(sigma_start=1e-2, sigma_end=1e-4, num_stages=5, total_steps=10)(7)
    expected = aqn.norm_noise(aqn.step_key(KEY, 7), sigma, noise_shapes(ARCH))
    jax.tree.map(np.testing.assert_array_equal, noise.variables["noise"], expected)
    assert noise.metrics == {"aqn/sigma": float(sigma), "aqn/stage": 3}
    assert noise.of_updates is None
    assert make(dataclasses.replace(cfg, scope="both"))(7, 7, None).of_updates is not None
    assert make(cfg).first is None and make(cfg).adapted(None, 7, {}) is None
    # Without the section nothing acts.
    none = make(None)
    noise = none(3, 3, None)
    assert noise.variables == noise.metrics == {} and noise.of_updates is None
    assert none.first is None and none.adapted(None, 3, {}) is None


@pytest.mark.parametrize("per", ["group", "sequence", "token"])
def test_noise_of_rows_is_of_the_steps_key_and_the_schedules_sigma(per):
    noise = make(NoiseConfig(per=per, num_stages=5))(7, 7, None)
    vectors = noise.vectors
    assert isinstance(vectors, RowNoise) and vectors.per == per
    assert float(vectors.sigma) == noise.metrics["aqn/sigma"]
    np.testing.assert_array_equal(vectors.key, jax.random.key_data(aqn.step_key(KEY, 7)))
    drawn = vectors.draw(jnp.array([2]), jnp.array([0]))
    shapes = jax.tree.map(lambda leaf: (leaf.shape[0], leaf.shape[2]), drawn)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, noise_shapes(ARCH))


@pytest.mark.parametrize(
    ("signal", "metric"),
    [("entropy", "sampling/entropy"), ("kl", "sampling/kl_k3"), ("reward", "reward")],
)
def test_an_adaptive_sigma_is_silent_first_and_then_follows_its_metric(signal, metric):
    adaptive = dataclasses.replace(ADAPTIVE.adaptive, metric=signal)
    noise = make(dataclasses.replace(ADAPTIVE, adaptive=adaptive))
    low, high = ({metric: value} for value in (0.1, 0.9))
    sigma = noise.first
    assert sigma == 1e-2
    # Two of ten steps are silent, and what they measure changes nothing.
    for step in range(2):
        silent = noise(step, step, sigma)
        assert silent.metrics["aqn/sigma"] == 0
        assert not any(leaf.any() for leaf in jax.tree.leaves(silent.vectors))
        sigma = noise.adapted(sigma, step, high)
    assert sigma == 1e-2
    assert noise(2, 2, sigma).metrics == {"aqn/sigma": pytest.approx(1e-2), "aqn/stage": 1}
    for seen, expected in ((high, 5e-3), (high, 2.5e-3), (low, 5e-3), (low, 1e-2), (low, 1e-2)):
        assert (sigma := noise.adapted(sigma, 2, seen)) == expected
