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
    cfg = NoiseConfig(unit="relative", final_norm=True)
    scales = exploration.norm_scales(cfg, *policy(full))
    means = jax.tree.map(lambda x: float(np.abs(x).mean()), scales)
    layers = {"input_layernorm": {"scale": 2.0}, "post_attention_layernorm": {"scale": 0.5}}
    assert means == {"layers": layers, "norm": {"scale": 4.0}}
    assert exploration.norm_scales(NoiseConfig(), *policy(full)).keys() == {"layers"}
    # Each layer has its root mean square: of 3 and 4 it is 5 / sqrt(2).
    sizes = exploration.sizes_of(cfg, {"scale": np.array([[2.0, 2.0], [3.0, -4.0]])})
    np.testing.assert_allclose(sizes["scale"], [[2.0], [5 / 2**0.5]], rtol=1e-6)
    assert exploration.sizes_of(NoiseConfig(), scales) is None


def told(cfg, dtype=jnp.bfloat16):
    scales = exploration.norm_scales(cfg, *policy())
    return exploration.describe(cfg, dtype, exploration.median_fraction(cfg, scales))


def test_a_run_says_once_what_sigma_means_and_where_rounding_drowns_it():
    lines = told(NoiseConfig())
    assert len(lines) == 2
    # Half of the channels have the scale 2, half 1/2: the median of 1/2 and 2 is 1.25.
    assert "sigma from 0.01 to 0.0001 is 1.25% to 0.013% of a scale of the norms" in lines[0]
    assert "below sigma = 0.0018 (0.22% of a scale)" in lines[1]
    assert lines[1].endswith("at sigma_end rounding adds 6 times as much noise as AQN")
    # All scales of a norm are equal here, so a relative sigma is the fraction itself.
    relative = NoiseConfig(unit="relative")
    assert "0.0001 times the root mean square of each norm's scale is 1.00% to" in told(relative)[0]
    # Rounding is named only where it drowns noise.
    assert len(told(NoiseConfig(sigma_start=1e-2, sigma_end=5e-3))) == 1
    assert len(told(NoiseConfig(), jnp.float32)) == 1
    follows = "follows entropy: up by a factor of 2 after a rollout below 0.5"
    assert follows in told(ADAPTIVE)[1]


def make(cfg, total_steps=10):
    noise = exploration.make_exploration(cfg, policy()[0], KEY, total_steps)
    if cfg is None:
        return noise
    return noise.on_norms(exploration.norm_scales(cfg, *policy()))


@pytest.mark.parametrize("per", ["rollout", "group"])
def test_a_relative_sigma_is_multiplied_by_the_size_of_each_norm(per):
    cfg = NoiseConfig(num_stages=5, per=per)
    absolute, relative = (
        make(dataclasses.replace(cfg, unit=unit))(7, 7, None) for unit in ("absolute", "relative")
    )
    assert relative.metrics == absolute.metrics
    pair = [noise.vectors for noise in (absolute, relative)]
    if per == "group":
        pair = [rows.draw(jnp.array([2, 5])) for rows in pair]
    absolute, relative = (noise["layers"] for noise in pair)
    for name, size in (("input_layernorm", 2.0), ("post_attention_layernorm", 0.5)):
        expected = size * np.asarray(absolute[name]["scale"])
        np.testing.assert_allclose(relative[name]["scale"], expected, rtol=1e-6)
    # Programs are compiled for these shapes before the base is loaded.
    abstract = exploration.abstract_noise(dataclasses.replace(cfg, unit="relative"), policy()[0])
    drawn = make(dataclasses.replace(cfg, unit="relative"))(7, 7, None).vectors
    jax.tree.map(
        lambda x, y: np.testing.assert_equal((x.shape, x.dtype), (y.shape, y.dtype)),
        drawn,
        abstract,
    )


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
    [("entropy", "entropy"), ("kl", "sampling/kl_k3"), ("reward", "reward")],
)
def test_an_adaptive_sigma_is_silent_first_and_then_follows_its_metric(signal, metric):
    adaptive = dataclasses.replace(ADAPTIVE.adaptive, metric=signal)
    noise = make(dataclasses.replace(ADAPTIVE, adaptive=adaptive))
    low, high = ({metric: value} for value in (0.1, 0.9))
    # The first sigma of one that follows a divergence is found in the silent stage (`training.dose`).
    assert noise.first == (None if signal == "kl" else 1e-2) and noise.seeks == (signal == "kl")
    sigma = noise.first or 1e-2
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
