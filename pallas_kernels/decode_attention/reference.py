"""Decode attention in jnp. Kernels are tested against it, and it runs where no kernel can.

    out[h] = softmax(q[h] . k[0 ... end] / sqrt(C)) @ v[0 ... end],   in float32

It is not optimized: it gathers every page of a row's page table, including pages after the row's end.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention.append import append, rotated


def decode_attention(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    ends: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `api.decode_attention`, which describes arguments and results."""
    layers, pages, key_heads, slots, head_size = keys.shape
    rows, width = tables.shape
    heads = qkv.shape[1] - 2 * key_heads
    keys, values = append(qkv, cos, sin, keys, values, layer, tables, ends)
    layer = jnp.clip(layer, 0, layers - 1)
    tables = jnp.clip(tables, 0, pages - 1)
    ends = jnp.clip(ends, 0, width * slots - 1)
    q = rotated(qkv[:, :heads], cos, sin).astype(keys.dtype)

    live = jnp.arange(width * slots) <= ends[:, None]
    # [B, J, W * S, C]. Slots after the end become 0, because they may hold infinities or NaN.
    is_read = live[:, None, :, None]
    k, v = (
        jnp.where(
            is_read,
            jnp.moveaxis(cache[layer, tables], 2, 1).reshape(rows, key_heads, -1, head_size),
            0,
        ).astype(jnp.float32)
        for cache in (keys, values)
    )
    q = q.astype(jnp.float32).reshape(rows, key_heads, -1, head_size)
    # By default a GPU multiplies float32 in TF32.
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bjgc,bjsc->bjgs", q, k, precision=highest) * head_size**-0.5
    weights = jax.nn.softmax(jnp.where(live[:, None, None], scores, -jnp.inf))
    out = jnp.einsum("bjgs,bjsc->bjgc", weights, v, precision=highest)
    return out.reshape(rows, heads, head_size).astype(qkv.dtype), keys, values
