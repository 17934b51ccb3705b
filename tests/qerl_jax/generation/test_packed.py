"""Tests of trees of small arrays that travel as one."""

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.generation.packed import Packed

TREE = {
    "live": np.array([True, False, True]),
    "keys": np.array([[1, 2**32 - 1], [2**31, 0]], np.uint32),
    "logps": np.array([-0.0, np.nan, -np.inf, 1e-45], np.float32),
    "none": None,
    "empty": np.zeros((2, 0), np.int32),
    "span": np.int32(-7),
}


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == b.tobytes()


def test_the_host_finds_what_it_packed():
    packed = Packed.of(TREE)
    assert isinstance(packed.words, np.ndarray) and packed.words.dtype == np.int32
    assert_same_bits(packed.tree(), TREE)


def test_a_program_unpacks_and_packs_as_the_host_does():
    traced = []

    @jax.jit
    def again(packed):
        traced.append(packed.form)
        tree = packed.tree()
        return tree, Packed.of(tree)

    tree, packed = again(Packed.of(TREE))
    assert_same_bits(tree, TREE)
    assert packed.form == Packed.of(TREE).form
    assert_same_bits(jax.device_get(packed).tree(), TREE)
    again(packed)
    assert len(traced) == 1, "what a program packed is to the next program what the host packed"


def test_other_shapes_are_another_program():
    form = lambda *shape: Packed.of({"x": jnp.zeros(shape, jnp.int32)}).form
    assert form(2, 3) == form(2, 3) and form(2, 3) != form(3, 2)
