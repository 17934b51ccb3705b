"""Tests how the arrays of a policy are sharded. Computations: tests/test_several_devices.py."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from qerl_jax.config import LoraConfig
from qerl_jax.distributed import sharding
from qerl_jax.model.architecture import Architecture
from qerl_jax.model.transformer import Transformer, abstract_base, trainable
from tests.pallas_kernels.common import slow

ARCH = Architecture("qwen2", 64, 32, 64, 2, 4, 2, 8)


def policy(weights):
    model = Transformer(ARCH, weights, LoraConfig(2))
    base = abstract_base(model)
    return jax.eval_shape(lambda f: trainable(model, f, jax.random.key(0)), base)


@pytest.mark.parametrize("weights", ["nvfp4", *map(slow, ("mxfp4", "nf4", "bfloat16"))])
def test_of_a_policy_only_the_weights_of_layers_are_parted(weights):
    params, frozen = policy(weights)
    assert set(jax.tree.leaves(sharding.specs(params, 2))) == {P()}
    placed = sharding.specs(frozen, 2)
    for name, found in placed.items():
        if name != "layers":
            assert set(jax.tree.leaves(found)) == {P()}
    for name, layer in placed["layers"].items():
        assert {at for part, at in layer.items() if part != "weight"} <= {P()}
        if "weight" in layer:
            # Codes and scales by rows, or by what stands for rows; a global scale is one number.
            assert any("group" in at for at in jax.tree.leaves(layer["weight"])), name
            shapes = jax.tree.leaves(frozen["layers"][name]["weight"])
            for at, leaf in zip(jax.tree.leaves(layer["weight"]), shapes, strict=True):
                assert ("group" in at) == (leaf.ndim > 1 and leaf.shape[1] % 2 == 0)


def test_an_axis_that_does_not_divide_evenly_stays_whole():
    _, frozen = policy("nvfp4")
    is_parted = lambda layer: any("group" in at for at in jax.tree.leaves(layer))
    for count, parted in ((3, ""), (64, "qkv gate_up"), (16, "qkv o gate_up down")):
        placed = sharding.specs(frozen, count)["layers"]
        assert {name for name in placed if is_parted(placed[name])} == set(parted.split())
    assert sharding.part(frozen, 3) == sharding.part(frozen, 1)
    # Alone a function stays as it is.
    assert sharding.in_group(1, jnp.add) is jnp.add
