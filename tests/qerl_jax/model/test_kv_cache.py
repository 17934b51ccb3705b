"""Tests the paged cache: what is written where, and a decoding step against causal attention over all tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_attention import decode_attention
from qerl_jax.model import architecture, kv_cache, layers
from tests.qerl_jax.model import caches

ARCH = architecture.Architecture("qwen2", 4, 2, 16, 2, 4, 2, 8)
SLOTS = 4


def scattered(rows, width, seed=0):
    """Makes a cache of junk whose rows have pages in any order, with spare pages between them."""
    draw = np.random.default_rng(seed)
    num_pages = 1 + rows * width + 3
    shape = (2, num_pages, 2, SLOTS, 8)
    keys, values = (jnp.asarray(draw.normal(size=shape, scale=9), jnp.float32) for _ in range(2))
    tables = draw.permutation(np.arange(1, num_pages))[: rows * width].reshape(rows, width)
    return kv_cache.KVCache(
        keys, values, jnp.asarray(tables, jnp.int32), jnp.zeros(rows, jnp.int32)
    )


def slots(cache, layer):
    """Returns keys and values [B, W * S, J, C] of a layer in the order of the tables."""
    together = lambda pool: np.asarray(pool[layer, cache.tables].swapaxes(2, 3)).reshape(
        *cache.ends.shape, -1, 2, 8
    )
    return together(cache.keys), together(cache.values)


def test_a_prompt_fills_the_pages_of_its_rows_in_one_layer():
    cache = scattered(2, 3)
    keys = jnp.asarray(np.random.default_rng(1).normal(size=(2, 6, 2, 8)), jnp.float32)
    filled = jax.jit(kv_cache.KVCache.fill)(cache, 1, keys, -keys)
    new_keys, new_values = slots(filled, 1)
    np.testing.assert_array_equal(new_keys[:, :6], keys)
    np.testing.assert_array_equal(new_values[:, :6], -keys)
    # What is behind the prompt's last page, and the other layer, stay.
    np.testing.assert_array_equal(new_keys[:, 8:], slots(cache, 1)[0][:, 8:])
    np.testing.assert_array_equal(filled.keys[0], cache.keys[0])
    np.testing.assert_array_equal(filled.ends, 0)


def test_steps_through_scattered_pages_equal_causal_attention():
    """Each of three rows starts at its own end; what lies behind the ends is junk."""
    draw, steps, begins, heads = np.random.default_rng(2), 6, np.array([0, 3, 5]), 4
    length = steps + begins.max()
    qkv = jnp.asarray(draw.normal(size=(3, length, heads + 4, 8)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (3, length))
    frequencies = layers.rope_frequencies(ARCH)
    tables = layers.rope_tables(positions, frequencies)
    rotated = layers.rotate(qkv[:, :, : heads + 2], tables)
    query, key, value = rotated[:, :, :heads], rotated[:, :, heads:], qkv[:, :, heads + 2 :]
    expected = np.asarray(layers.attention(query, key, value))

    cache = scattered(3, 3)
    keys, values = slots(cache, 1)
    keys, values = keys.copy(), values.copy()
    for row, end in enumerate(begins):
        keys[row, :end], values[row, :end] = key[row, :end], value[row, :end]
    cache = cache.fill(1, jnp.asarray(keys), jnp.asarray(values))
    attend = jax.jit(decode_attention)
    for step in range(steps):
        ends = jnp.asarray(begins + step, jnp.int32)
        cos, sin = (t[:, 0, 0] for t in layers.rope_tables(ends[:, None], frequencies))
        token = qkv[jnp.arange(3), ends]
        out, new_keys, new_values = attend(
            token, cos, sin, cache.keys, cache.values, jnp.int32(1), cache.tables, ends
        )
        cache = dataclasses.replace(cache, keys=new_keys, values=new_values)
        np.testing.assert_allclose(out, expected[np.arange(3), ends], atol=2e-5)
    for row, end in enumerate(begins + steps):
        np.testing.assert_allclose(slots(cache, 1)[0][row, :end], key[row, :end], atol=1e-6)
        np.testing.assert_array_equal(slots(cache, 1)[1][row, :end], value[row, :end])


def test_a_new_cache_gives_every_row_pages_of_its_own():
    cache = caches.create(ARCH, 3, 9, jnp.float32, page_size=SLOTS)
    assert cache.tables.shape == (3, 3) and cache.keys.shape == (2, 10, 2, SLOTS, 8)
    assert sorted(cache.tables.reshape(-1).tolist()) == list(range(1, 10))
