"""The layout of LoRA's A and B for the decode kernels: A in tiles of `dense_tile`, B by rows of the base weight."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.nvfp4_matmul import dense_tile, layout
from pallas_kernels.nvfp4_matmul.layout import TILE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedLora:
    """The LoRA matrices of linears that share an input and are joined along N, each of them called a part.

    They are arrays, so new values need no recompilation. The ranks of part i are rows rank * i ... rank * (i + 1) - 1
    of A^T. Each part is padded with zeros to `rank`, which divides 64 or is a multiple of it. A row of the base
    weight reads only the ranks of its own part, or the tile of A that contains them.

    Attributes:
      a: for a packed base, int32 [..., tiles, K / 64, 4 or 2, 3, 192] from `dense_tile.pack`; for a dense one,
        bfloat16 [..., 64 * tiles, K].
      b: bfloat16 [..., N, max(rank, 64)], scaled; zero in the columns of other parts. Each part of N is padded with
        zeros to whole tiles of 64 rows. If `is_paired`: int32 [..., N / 64, max(1, R / 16), 3, 192] from
        `pack_pairs`.
      sizes: rows of the base weight in each part, not necessarily whole tiles.
      rank: padded rank R of one part.
      is_paired: whether `b` is for a base weight whose rows are in the order of `layout.paired_rows`.
    """

    a: jax.Array
    b: jax.Array
    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    rank: int = dataclasses.field(metadata={"static": True})
    is_paired: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def height(self) -> int:
        """Ranks in a tile of A: 64, or 32 if its tiles are low."""
        return dense_tile.height_of(self.a) if self.a.dtype == jnp.int32 else TILE

    @property
    def firsts(self) -> tuple[int, ...]:
        """For each part, the row of (x A)^T that column 0 of `b` is multiplied by; each tile of A has 64 of them."""
        return tuple(self.rank * part // self.height * TILE for part in range(len(self.sizes)))

    def first(self, row: jax.Array) -> jax.Array | int:
        """Returns the value of `firsts` for a row of the base weight; `row` counts the padding of the parts."""
        first, end = self.firsts[0], 0
        for size, following in zip(self.sizes, self.firsts[1:], strict=False):
            end += layout.whole(size)
            first = jnp.where(row >= end, following, first)
        return first


def filled_rank(rank: int) -> int:
    """Returns the padded rank of a part of a `PackedLora`: the next of 8, 16, 32, and the multiples of 64."""
    return rank + -rank % TILE if rank > TILE // 2 else 1 << max(3, (rank - 1).bit_length())


def pack_lora(
    parts: Sequence[tuple[jax.Array, jax.Array]],
    scaling: float,
    *,
    is_packed: bool,
    is_paired: bool = False,
) -> PackedLora:
    """Joins the LoRA matrices of linears that share an input.

    Args:
      parts: A [..., K, R] and B [..., R, N_i] of each linear, in the order of the base weight's rows.
      scaling: alpha / R, multiplied into B.
      is_packed: whether the base weight is packed.
      is_paired: whether the base weight's rows, gate and up, are in pairs.
    """
    rank = parts[0][0].shape[-1]
    filled = filled_rank(rank)
    width = max(filled, TILE)
    may_be_low = is_packed and not is_paired
    height = dense_tile.height(parts[0][0].shape[-2], filled * len(parts)) if may_be_low else TILE
    pad_last = lambda x, low, high: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(low, high)])
    pad_rows = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % TILE), (0, 0)])
    a = jnp.concatenate([pad_last(a, 0, filled - rank) for a, _ in parts], axis=-1)
    b = []
    for part, (_, matrix) in enumerate(parts):
        start = filled * part % height
        b.append(pad_rows(pad_last(scaling * matrix.mT, start, width - rank - start)))
    return PackedLora(
        a=dense_tile.pack(a, height)
        if is_packed
        else pad_last(a, 0, -a.shape[-1] % TILE).astype(jnp.bfloat16).mT,
        b=pack_pairs(*(pad_last(scaling * matrix.mT, 0, filled - rank) for _, matrix in parts))
        if is_paired
        else jnp.concatenate(b, axis=-2).astype(jnp.bfloat16),
        sizes=tuple(matrix.shape[-1] for _, matrix in parts),
        rank=filled,
        is_paired=is_paired,
    )


def pack_pairs(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Packs B of gate and up in the order of a thread's `wgmma` fragment, without the zeros between them.

    For every eight ranks, thread 32 w + 4 g + t has one word with ranks 2 t and 2 t + 1: first those of the gate's
    row 8 w + g of 32 rows, then those of the same row of up. Up to four words of a thread are contiguous. With 64
    ranks or more, two blocks [3, 192] hold what is multiplied by one tile of A's ranks.

    Args:
      gate: B^T of the gate times alpha / R, [..., N / 2, R]; R is from `filled_rank`.
      up: B^T of up, in the same form.

    Returns:
      int32 [..., N / 64, max(1, R / 16), 3, 192], pairs of bfloat16.
    """
    *stack, n, rank = gate.shape
    both = jnp.stack([gate, up], axis=-3).astype(jnp.bfloat16)
    both = both.reshape(*stack, 2, n // 32, 4, 8, rank // 8, 4, 2)
    # Axes: half, tile, w, g, eight, t, pair.
    both = layout.transposed(both, "hnwgetp", "nhewgtp")
    words = jax.lax.bitcast_convert_type(both, jnp.int32)
    words = words.reshape(*stack, n // 32, max(1, rank // 16), min(4, rank // 4), 128)
    words = words.swapaxes(-1, -2).reshape(*words.shape[:-2], -1)
    whole_piece = layout.CODE_WORDS + layout.SCALE_WORDS
    words = jnp.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, whole_piece - words.shape[-1])])
    return words.reshape(*words.shape[:-1], *layout.TILE_SHAPE)


def owners(rank: int, tile: int) -> tuple[int, ...]:
    """Returns, for each eight ranks in one tile of A's ranks, whose they are: 0 for the gate, 1 for up.

    Args:
      rank: padded rank of each part. If it is below 64, the ranks of both parts are in one tile.
      tile: index of the tile.
    """
    if rank < TILE:
        return (0,) * (rank // 8) + (1,) * (rank // 8)
    return (tile * TILE // rank,) * (TILE // 8)


def unpack_pairs(pieces: jax.Array, owners: tuple[int, ...]) -> jax.Array:
    """Unpacks B for one tile of W's rows and one tile of A's ranks, and adds the zeros.

    Args:
      pieces: int32 [1 or 2, 3, 192], from `pack_pairs`.
      owners: the result of `owners`.

    Returns:
      bfloat16 [64 (rows), 64 (ranks)].
    """
    width = min(4, len(owners))
    words = pieces.reshape(len(pieces), -1)[:, : 128 * width].reshape(len(pieces), 128, width)
    values = jax.lax.bitcast_convert_type(words.swapaxes(1, 2), jnp.bfloat16)
    # Axes: eight, w, g, (t, pair).
    values = values.reshape(len(owners), 4, 8, 8)
    of = lambda half: [
        v if o == half else jnp.zeros_like(v) for v, o in zip(values, owners, strict=True)
    ]
    halves = [jnp.stack(of(half)) for half in (0, 1)]
    # Axes: half, eight, w, g, column -> w, half, g, (eight, column).
    rows = jnp.stack(halves).transpose(2, 0, 3, 1, 4).reshape(TILE, -1)
    return jnp.pad(rows, ((0, 0), (0, TILE - rows.shape[1])))
