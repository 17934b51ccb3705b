"""Tests what a prompt writes into the paged cache; steps through it are compared with transformers in test_transformer."""

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.model import kv_cache


def test_a_prompt_fills_the_pages_of_its_rows_in_one_layer():
    """The pages of the rows are in any order, with spare ones between them, and hold junk before."""
    draw, slots = np.random.default_rng(0), 4
    junk = (jnp.asarray(draw.normal(size=(2, 10, 2, slots, 8)), jnp.float32) for _ in range(2))
    tables = jnp.asarray(draw.permutation(np.arange(1, 10))[:6].reshape(2, 3), jnp.int32)
    cache = kv_cache.KVCache(*junk, tables, jnp.zeros(2, jnp.int32))
    keys = jnp.asarray(draw.normal(size=(2, 6, 2, 8)), jnp.float32)
    filled = jax.jit(kv_cache.KVCache.fill)(cache, 1, keys, -keys)
    by_slot = lambda pool: np.array(pool[1, tables].swapaxes(2, 3)).reshape(2, 3 * slots, 2, 8)
    np.testing.assert_array_equal(by_slot(filled.keys)[:, :6], keys)
    np.testing.assert_array_equal(by_slot(filled.values)[:, :6], -keys)
    # What is behind the prompt's last page, and the other layer, stay.
    np.testing.assert_array_equal(by_slot(filled.keys)[:, 8:], by_slot(cache.keys)[:, 8:])
    np.testing.assert_array_equal(filled.keys[0], cache.keys[0])
    np.testing.assert_array_equal(filled.ends, 0)
