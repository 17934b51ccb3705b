"""Writes the keys and values of new tokens into the cache, in jnp.

Attention's kernels do that themselves, each row for its own token. This comes before them where one row reads what
another one writes.
"""

import jax
import jax.numpy as jnp


def append(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    ends: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Rotates each row's new key, and writes it and the new value to the slot at the row's end.

    Arguments are those of `api.decode_attention`. Of rows that end at the same slot the last one's are kept.

    Returns:
      The new keys and the new values.
    """
    layers, pages, key_heads, slots, _ = keys.shape
    rows, width = tables.shape
    heads = qkv.shape[1] - 2 * key_heads
    layer = jnp.clip(layer, 0, layers - 1)
    ends = jnp.clip(ends, 0, width * slots - 1)
    page, slot = jnp.clip(tables[jnp.arange(rows), ends // slots], 0, pages - 1), ends % slots
    # XLA writes 16-bit values to places that may be equal by compare-and-swap, which is slower than to store them. So
    # no two rows write to the same place: what is behind the last page is dropped.
    place = page * slots + slot
    is_overwritten = jnp.any(jnp.triu(place == place[:, None], 1), axis=1)
    page = jnp.where(is_overwritten, pages + jnp.arange(rows), page)
    put = lambda cache, new: cache.at[layer, page, :, slot].set(
        new.astype(cache.dtype), mode="drop", unique_indices=True
    )
    key, value = jnp.split(qkv[:, heads:], 2, axis=1)
    return put(keys, rotated(key, cos, sin)), put(values, value)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (c, c + C / 2) of x [B, heads, C] by cos and sin [B, C / 2]; returns float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
