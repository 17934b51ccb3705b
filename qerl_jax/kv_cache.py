"""Keys and values of the tokens seen so far, in pages that rows can share.

A page holds S slots of one layer's keys or values. A row is a list of pages, so rows of any length
share one pool, and the completions of a prompt share the pages that hold it. All layers live in one
array each, so that a decode loop carries two buffers and XLA updates them in place. Page 0 is
scratch: rows that have ended write there, and nobody reads it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from qerl_jax import layers
from qerl_jax.architecture import Architecture

# What the decode kernel reads in one piece.
PAGE_SIZE = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """B rows over a pool of N pages: slot s of row b is page tables[b, s // S] at offset s % S.

    Attributes:
        keys: [L, N, J, S, C], already rotated.
        values: [L, N, J, S, C].
        tables: int32 [B, W], the pages of each row; 0 where it has none.
        ends: int32 [B], the slot that the next token of each row takes.
    """

    keys: jax.Array
    values: jax.Array
    tables: jax.Array
    ends: jax.Array

    def fill(self, layer: jax.Array, keys: jax.Array, values: jax.Array) -> KVCache:
        """Puts [B, T, J, C] into a layer from slot 0 on; `ends` stays."""
        pages = self.tables[:, : -(-keys.shape[1] // self.keys.shape[3])]

        def put(pool, new):
            batch, length, heads, size = new.shape
            slots = pool.shape[3]
            new = jnp.pad(new, ((0, 0), (0, -length % slots), (0, 0), (0, 0)))
            new = new.reshape(batch, -1, slots, heads, size).swapaxes(2, 3)
            return pool.at[layer, pages].set(new.astype(pool.dtype))

        return dataclasses.replace(self, keys=put(self.keys, keys), values=put(self.values, values))


def create(
    arch: Architecture, rows: int, num_slots: int, dtype, page_size: int = PAGE_SIZE
) -> KVCache:
    """An empty cache whose rows have `num_slots` slots each and share nothing."""
    width = -(-num_slots // page_size)
    keys, values = pool(arch, 1 + rows * width, dtype, page_size)
    tables = 1 + jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width)
    return KVCache(keys, values, tables, jnp.zeros(rows, jnp.int32))


def pool(
    arch: Architecture, num_pages: int, dtype, page_size: int = PAGE_SIZE
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [L, N, J, S, C] of N empty pages."""
    shape = (arch.num_layers, num_pages, arch.num_kv_heads, page_size, arch.head_size)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


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
    """One decode step of a layer's attention: rotates, writes at `ends`, attends to slots 0 ... ends.

        out = softmax(q k^T / sqrt(C)) v,   softmax in float32

    Args:
        qkv: [B, H + 2 J, C]: query heads, key heads, value heads, not yet rotated.
        cos: float32 [B, C/2], see `layers.rope_tables`.
        sin: float32 [B, C/2].
        keys: [L, N, J, S, C].
        values: [L, N, J, S, C].
        layer: int32 scalar.
        tables: int32 [B, W]; a row of zeros is dead, and gets finite junk.
        ends: int32 [B].

    Returns:
        [B, H, C] in qkv's dtype, and keys and values with the new slot in them.
    """
    batch, _, size = qkv.shape
    groups, page_size = keys.shape[2:4]
    heads = qkv.shape[1] - 2 * groups
    angles = cos[:, None, None], sin[:, None, None]
    rotated = layers.rotate(qkv[:, None, : heads + groups], angles)[:, 0]
    page = jnp.take_along_axis(tables, ends[:, None] // page_size, axis=1)[:, 0]
    at = (layer, page, slice(None), ends % page_size)
    keys = keys.at[at].set(rotated[:, heads:].astype(keys.dtype))
    values = values.at[at].set(qkv[:, heads + groups :].astype(values.dtype))

    # Page by page, as they lie: putting a row's pages together costs XLA:CPU more than the
    # products.
    def product(x, pages, axis):
        contract = (((2,), (axis,)), ((0,), (0,)))
        return jax.lax.dot_general(
            x.reshape(-1, *x.shape[-2:]),
            pages.reshape(-1, page_size, size),
            contract,
            # float32 means float32, also on cards whose default is TF32.
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        ).reshape(*x.shape[:-1], -1)

    grouped = rotated[:, None, :heads].reshape(batch, 1, groups, heads // groups, size)
    grouped = jnp.broadcast_to(grouped, (batch, tables.shape[1], *grouped.shape[2:]))
    scores = product(grouped, keys[layer, tables].astype(qkv.dtype), 2) * size**-0.5
    slots = jnp.arange(tables.shape[1] * page_size).reshape(-1, 1, 1, page_size)
    visible = slots <= ends[:, None, None, None, None]
    # A page of a row is [J, H/J, S]; the softmax runs over pages and slots.
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=(1, 4)).astype(qkv.dtype)
    mixed = product(weights, values[layer, tables].astype(qkv.dtype), 1).sum(axis=1)
    return mixed.reshape(batch, heads, size).astype(qkv.dtype), keys, values
