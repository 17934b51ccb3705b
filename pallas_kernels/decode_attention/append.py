"""Writes the keys and values of new tokens into the cache, in jnp.

An attention kernel normally writes each row's new token itself. If rows read each other's new tokens (`sequence` of
`api.decode_attention`), all tokens must be in the cache before attention starts. Then this runs first, or on Hopper
`append_kernel.py`.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention import plans


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

    Arguments are those of `api.decode_attention`. If several rows write to the same slot, the last row wins.

    Returns:
      The new keys and the new values, with the shape and dtype of the old ones.
    """
    layers, pages, key_heads, slots, _ = keys.shape
    # `places` are unique. Unless XLA knows that, it writes 16-bit values by compare-and-swap, which is slower.
    page, slot = plans.places(tables, ends, pages, slots)
    put = lambda cache, new: cache.at[jnp.clip(layer, 0, layers - 1), page, :, slot].set(
        new.astype(cache.dtype), mode="drop", unique_indices=True
    )
    key, value = jnp.split(qkv[:, -2 * key_heads :], 2, axis=1)
    return put(keys, rotated(key, cos, sin)), put(values, value)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Applies RoPE to the pairs (c, c + C / 2) of x [B, heads, C], with cos and sin [B, C / 2]; returns float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
