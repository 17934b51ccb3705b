"""LoRA's A and B as the decode kernels read them: A in the tiles of `dense_tile`, B by rows of the base."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.nvfp4_matmul import dense_tile, layout
from pallas_kernels.nvfp4_matmul.layout import TILE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Branch:
    """The branches of linears that share an input; arrays, so new values need no recompilation.

    The ranks of part i are rows rank * i ... of A^T, padded with zeros to a `rank` that divides 64 or is a multiple
    of it. A row of the base needs only the ranks of its own part, or the group of 64 that contains them.

    Attributes:
      a: for a packed base, int32 [..., tiles, K / 64, 4, 3, 192] from `dense_tile.pack`; for a dense one, bfloat16
        [..., 64 * tiles, K].
      b: bfloat16 [..., N, max(rank, 64)], scaled; zero in the columns of other parts. Each part of N is padded with
        zeros to whole tiles of 64 rows.
      sizes: rows of the base in each part, not necessarily whole tiles.
      rank: padded rank of one part.
    """

    a: jax.Array
    b: jax.Array
    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    rank: int = dataclasses.field(metadata={"static": True})

    @property
    def firsts(self) -> tuple[int, ...]:
        """By part, the row of (x A)^T that meets column 0 of `b`."""
        return tuple(self.rank * part // TILE * TILE for part in range(len(self.sizes)))

    def first(self, row: jax.Array) -> jax.Array | int:
        """The one of `firsts` for a row of the base whose parts are filled up."""
        first, end = self.firsts[0], 0
        for size, following in zip(self.sizes, self.firsts[1:], strict=False):
            end += layout.whole(size)
            first = jnp.where(row >= end, following, first)
        return first


def filled_rank(rank: int) -> int:
    """The padded rank of a part of a `Branch`: the next number that divides 64 or is a multiple of it."""
    return rank + -rank % TILE if rank > TILE // 2 else 1 << max(3, (rank - 1).bit_length())


def pack_branch(
    parts: Sequence[tuple[jax.Array, jax.Array]], scaling: float, *, is_packed: bool
) -> Branch:
    """Joins the branches of linears that share an input.

    Args:
      parts: A [..., K, R] and B [..., R, N_i] of each, in the order of the base's rows.
      scaling: alpha / R, multiplied into B.
      is_packed: whether the base is packed.
    """
    rank = parts[0][0].shape[-1]
    filled = filled_rank(rank)
    width = max(filled, TILE)
    pad_last = lambda x, low, high: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(low, high)])
    pad_rows = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % TILE), (0, 0)])
    a = jnp.concatenate([pad_last(a, 0, filled - rank) for a, _ in parts], axis=-1)
    b = []
    for part, (_, matrix) in enumerate(parts):
        start = filled * part % TILE
        b.append(pad_rows(pad_last(scaling * matrix.mT, start, width - rank - start)))
    return Branch(
        a=dense_tile.pack(a)
        if is_packed
        else pad_last(a, 0, -a.shape[-1] % TILE).astype(jnp.bfloat16).mT,
        b=jnp.concatenate(b, axis=-2).astype(jnp.bfloat16),
        sizes=tuple(matrix.shape[-1] for _, matrix in parts),
        rank=filled,
    )
