"""Tests that a base computes the same bits in the Hopper layout, which is forced here on any device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NVFP4Tensor, runtime, unprepare
from pallas_kernels.nvfp4_matmul import api
from pallas_kernels.nvfp4_matmul.layout import HopperNVFP4
from qerl_jax.checkpoint import base_model
from qerl_jax.config import LoraConfig
from qerl_jax.model import architecture, layers
from qerl_jax.model.transformer import Transformer, abstract_base, head, random_base
from tests.model_folders import DENSE, PACKED, assert_trees_equal

FOLDERS = {"packed": PACKED, "16 bits": DENSE}
unprepared = jax.jit(lambda weights: [unprepare(weight) for weight in weights])


def hopper_layout(monkeypatch):
    """Turns the Hopper layout on, and its kernels off."""
    # Not an assumed H200: its attention is cuDNN's, which no CPU can run.
    monkeypatch.setattr(runtime, "is_hopper", lambda: True)
    table = {"reference": api._HOPPER_IMPLEMENTATIONS["reference"]}
    monkeypatch.setattr(api, "_HOPPER_IMPLEMENTATIONS", table)


def bare_model(folder, dtype=jnp.bfloat16):
    return Transformer(architecture.load(folder), "nvfp4", LoraConfig(4, 8.0), jnp.dtype(dtype))


def linears(frozen):
    is_packed = lambda x: isinstance(x, NVFP4Tensor | HopperNVFP4)
    return [leaf for leaf in jax.tree.leaves(frozen, is_leaf=is_packed) if is_packed(leaf)]


@functools.partial(jax.jit, static_argnums=0)
def logits(model, frozen, tokens):
    hidden, _ = model.apply({"frozen": frozen}, tokens, adapter=False)
    return layers.logits(hidden, head(frozen))


@pytest.mark.slow
@pytest.mark.parametrize("source", FOLDERS)
def test_a_loaded_base_computes_the_same_bits_in_either_layout(monkeypatch, source):
    model = bare_model(FOLDERS[source])
    tokens = np.random.default_rng(0).integers(0, model.arch.vocab_size, (2, 9))
    plain = base_model.read_base(FOLDERS[source], model)
    expected = logits(model, plain, tokens)
    hopper_layout(monkeypatch)
    prepared = base_model.read_base(FOLDERS[source], model)
    assert [type(weight) for weight in linears(prepared)] == [HopperNVFP4] * 4
    np.testing.assert_array_equal(logits(model, prepared, tokens), expected)
    assert_trees_equal(unprepared(linears(prepared)), linears(plain))


@pytest.mark.slow
def test_a_random_base_is_the_same_base_in_either_layout_and_of_its_abstract_form(monkeypatch):
    model = bare_model(DENSE)
    plain = random_base(model, jax.random.key(1))
    hopper_layout(monkeypatch)
    prepared = random_base(model, jax.random.key(1))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), prepared)
    assert shapes == abstract_base(model)
    assert_trees_equal(unprepared(linears(prepared)), linears(plain))


def test_weights_that_meet_float32_activations_keep_their_layout(monkeypatch):
    hopper_layout(monkeypatch)
    model = bare_model(DENSE, jnp.float32)
    for frozen in (abstract_base(model), base_model.read_base(DENSE, model)):
        assert {type(weight) for weight in linears(frozen)} == {NVFP4Tensor}
