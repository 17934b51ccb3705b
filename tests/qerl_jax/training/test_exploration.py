"""Noise over a run: what its sigma means on the norms that it acts on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from qerl_jax.config import LoraConfig, NoiseConfig
from qerl_jax.model.architecture import Architecture
from qerl_jax.model.transformer import Transformer, random_base, trainable
from qerl_jax.training import exploration

ARCH = Architecture("qwen2", 64, 32, 48, 2, 4, 2, 8)


@functools.cache
def policy(full=False, dtype=jnp.bfloat16):
    """A policy whose norms have the mean |scale| 2, 1/2 and 4."""
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
    assert lines[1].endswith("7 times the signal")


def test_rounding_is_named_only_where_it_drowns_noise():
    loud = NoiseConfig(sigma_start=1e-2, sigma_end=5e-3)
    assert len(exploration.describe(loud, *policy())) == 1
    assert len(exploration.describe(NoiseConfig(), *policy(dtype=jnp.float32))) == 1
