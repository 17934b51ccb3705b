"""Makes caches for tests of the model, in which no row shares a page."""

import jax.numpy as jnp

from qerl_jax.model import kv_cache


def create(arch, rows, num_slots, dtype, page_size=kv_cache.PAGE_SIZE):
    """Makes an empty cache whose rows have `num_slots` slots each and share nothing."""
    width = -(-num_slots // page_size)
    keys, values = kv_cache.pool(arch, 1 + rows * width, dtype, page_size)
    tables = 1 + jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width)
    return kv_cache.KVCache(keys, values, tables, jnp.zeros(rows, jnp.int32))
