"""Writes the keys and values of new tokens into the cache, in jnp.

Attention's kernels do that themselves, each row for its own token. This comes before them where one row reads what
another one writes; `append_kernel.py` does the same on Hopper.
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

    Arguments are those of `api.decode_attention`. Of rows that end at the same slot the last one's are kept.

    Returns:
      The new keys and the new values.
    """
    layers, pages, key_heads, slots, _ = keys.shape
    # Without equal places XLA need not write 16-bit values by compare-and-swap, which is slower than to store them.
    page, slot = plans.places(tables, ends, pages, slots)
    put = lambda cache, new: cache.at[jnp.clip(layer, 0, layers - 1), page, :, slot].set(
        new.astype(cache.dtype), mode="drop", unique_indices=True
    )
    key, value = jnp.split(qkv[:, -2 * key_heads :], 2, axis=1)
    return put(keys, rotated(key, cos, sin)), put(values, value)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (c, c + C / 2) of x [B, heads, C] by cos and sin [B, C / 2]; returns float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
