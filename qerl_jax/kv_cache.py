"""Keys and values of the tokens seen so far, as one frozen tree.

All layers live in one array each, so that a decode loop carries two buffers and XLA updates them in
place; a layer's part is read by its index.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from qerl_jax.architecture import Architecture


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """A cache of S slots per row.

    Attributes:
        keys: [L, B, S, J, C], already rotated.
        values: [L, B, S, J, C].
        ends: int32 [B], the slot that the next token of each row takes.
        starts: int32 [B], the first live slot of each row, or None when it is 0 for every row.
    """

    keys: jax.Array
    values: jax.Array
    ends: jax.Array
    starts: jax.Array | None = None

    @property
    def num_slots(self) -> int:
        """S."""
        return self.keys.shape[2]

    def layer(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one layer, [B, S, J, C] each."""
        return self.keys[index], self.values[index]

    def write(self, index: jax.Array, keys: jax.Array, values: jax.Array) -> KVCache:
        """Puts [B, T, J, C] into layer `index` at slots ends ... ends + T - 1; `ends` stays (see `advance`)."""
        rows = jnp.arange(keys.shape[0])[:, None]
        slots = self.ends[:, None] + jnp.arange(keys.shape[1])
        return dataclasses.replace(
            self,
            keys=self.keys.at[index, rows, slots].set(keys.astype(self.keys.dtype)),
            values=self.values.at[index, rows, slots].set(values.astype(self.values.dtype)),
        )

    def advance(self, lengths: jax.Array) -> KVCache:
        """Moves the ends of the rows by int32 [B] slots; what was written beyond them counts as never written."""
        return dataclasses.replace(self, ends=self.ends + lengths)

    def repeat(self, times: int, num_slots: int) -> KVCache:
        """Every row `times` times in a row, with room for `num_slots` slots: one prefill serves a whole group."""

        def grow(buffer):
            padding = [(0, 0)] * buffer.ndim
            padding[2] = (0, num_slots - buffer.shape[2])
            return jnp.pad(jnp.repeat(buffer, times, axis=1), padding)

        starts = None if self.starts is None else jnp.repeat(self.starts, times)
        return KVCache(grow(self.keys), grow(self.values), jnp.repeat(self.ends, times), starts)


def create(
    arch: Architecture, rows: int, num_slots: int, dtype, starts: jax.Array | None = None
) -> KVCache:
    """An empty cache for `rows` rows of `num_slots` slots."""
    shape = (arch.num_layers, rows, num_slots, arch.num_kv_heads, arch.head_size)
    return KVCache(
        jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(rows, jnp.int32), starts
    )
