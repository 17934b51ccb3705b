"""Tests bases of every packed format against the model with unpacked weights, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import FORMATS
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.config import ConfigError, LoraConfig, ModelConfig
from qerl_jax.model import layers
from qerl_jax.model.transformer import abstract_base, head, init_params, random_base

TOKENS = np.random.default_rng(0).integers(0, 400, (2, 12))


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradient(model, params, frozen):
    def loss(params):
        hidden, _ = model.apply({"params": params, "frozen": frozen}, jnp.asarray(TOKENS))
        return jnp.mean(jax.nn.logsumexp(layers.logits(hidden, head(frozen)), axis=-1))

    return jax.value_and_grad(loss)(params)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["mxfp4", "nf4"])
def test_a_packed_base_learns_as_its_unpacked_self(weights):
    cfg = ModelConfig("qerl-tiny", weights=weights, dtype="float32")
    model, frozen, _ = load_base(cfg, LoraConfig(4, 8.0))
    params = init_params(model, frozen, jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.02, params)
    unpack, dense = jax.jit(jax.vmap(FORMATS[weights].dequantize)), dict(frozen["layers"])
    for linear in model.arch.linears():
        dense[linear] = dense[linear] | {"weight": unpack(dense[linear]["weight"])}
    other = model.clone(weights="float32")
    loss, gradient = loss_and_gradient(model, params, frozen)
    expected, slopes = loss_and_gradient(other, params, frozen | {"layers": dense})
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for actual, slope in zip(jax.tree.leaves(gradient), jax.tree.leaves(slopes), strict=True):
        size = np.abs(slope).max()
        assert size > 0
        np.testing.assert_allclose(actual, slope, atol=1e-4 * size)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["mxfp4", "nf4"])
def test_a_random_base_has_the_form_of_a_loaded_one(weights):
    cfg = ModelConfig("qerl-tiny", weights=weights, dtype="bfloat16")
    model, loaded, _ = load_base(cfg, None)
    made = random_base(model, jax.random.key(0))
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_base(model))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == shapes
    # NF4's fused parts do not fill groups of 256 blocks in so small a model; their scales are decoded.
    linears = [name for name in model.arch.linears() if weights == "mxfp4" or name in ("o", "down")]
    for linear in linears:
        a, b = (base["layers"][linear]["weight"] for base in (made, loaded))
        assert jax.eval_shape(lambda x: x, a) == jax.eval_shape(lambda x: x, b)


@pytest.mark.parametrize("weights", ["mxfp4", "nf4"])
def test_packed_weights_do_not_train_themselves(weights):
    with pytest.raises(ConfigError, match="packed weights have no gradient"):
        ModelConfig("qerl-tiny", weights=weights, trainable="full")
