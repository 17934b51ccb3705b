"""A paged KV cache: keys and values of the tokens so far, in pages that rows can share.

A page holds S slots of one layer's keys or values. A row is a list of pages, so rows of any length share one pool,
and the completions of a prompt share the pages of that prompt. The keys of all layers are one array, and so are the
values, so that a decode loop carries two buffers and XLA updates them in place. Page 0 is a scratch page: rows that
have ended write there, and no result depends on it.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from qerl_jax.model.architecture import Architecture

# Slots of a page, the number that the decode kernel reads at a time.
PAGE_SIZE = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """B rows over a pool of N pages: slot s of row b is page tables[b, s // S] at offset s % S.

    Attributes:
        keys: [L, N, J, S, C], already rotated by RoPE.
        values: [L, N, J, S, C].
        tables: int32 [B, W], the block table: the pages of each row, padded with 0.
        ends: int32 [B], the slot of each row's next token.
        shared: int32 [B], how many of a row's first pages other rows may share, for a kernel that reads them only
            once; or None.
        sequence: int32 [B], the sequence that each row is a token of, if a step runs several tokens of a sequence; or
            None. See `decode_attention`.
    """

    keys: jax.Array
    values: jax.Array
    tables: jax.Array
    ends: jax.Array
    shared: jax.Array | None = None
    sequence: jax.Array | None = None

    def fill(self, layer: jax.Array, keys: jax.Array, values: jax.Array) -> Self:
        """Writes keys and values [B, T, J, C] into a layer, from slot 0 on; `ends` does not change."""
        pages = self.tables[:, : -(-keys.shape[1] // self.keys.shape[3])]

        def put(pool, new):
            batch, length, heads, size = new.shape
            slots = pool.shape[3]
            new = jnp.pad(new, ((0, 0), (0, -length % slots), (0, 0), (0, 0)))
            new = new.reshape(batch, -1, slots, heads, size).swapaxes(2, 3)
            return pool.at[layer, pages].set(new.astype(pool.dtype))

        return dataclasses.replace(self, keys=put(self.keys, keys), values=put(self.values, values))


def pool(
    arch: Architecture, num_pages: int, dtype, page_size: int = PAGE_SIZE
) -> tuple[jax.Array, jax.Array]:
    """Makes zero keys and values, [L, N, J, S, C] each, for N pages."""
    shape = pool_shape(arch, num_pages, page_size)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def pool_shape(arch: Architecture, num_pages: int, page_size: int) -> tuple[int, ...]:
    """Returns the shape of keys, or values, of N pages: [L, N, J, S, C]."""
    return arch.num_layers, num_pages, arch.num_kv_heads, page_size, arch.head_size
