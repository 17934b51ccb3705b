"""Tests of the arms of `scripts/bench_layer.py` whose layers have arrays of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.config import LoraConfig
from qerl_jax.model import architecture, fused_decode
from qerl_jax.model.transformer import Transformer, init_params, random_base
from scripts import bench_layer, compile_decode


@pytest.mark.parametrize("weights", [pytest.param("nvfp4", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.slow
def test_layers_that_were_put_apart_are_the_same_when_put_together(weights):
    shape = {"width": 128, "ffn_width": 192, "num_layers": 3, "vocab_size": 64}
    arch = dataclasses.replace(architecture.KNOWN["qwen2.5-0.5b"], **shape)
    model = Transformer(arch, weights, LoraConfig(8, 8.0), jnp.bfloat16)
    with compile_decode.as_on("H200"):
        frozen = jax.jit(functools.partial(random_base, model))(jax.random.key(0))
        params = init_params(model, frozen, jax.random.key(1))
        policy = fused_decode.policy(model, {"frozen": frozen, "params": params})
    rest, layers = bench_layer.apart(policy)
    assert len(layers) == arch.num_layers
    jax.tree.map(np.testing.assert_array_equal, bench_layer.together(rest, layers), policy)
