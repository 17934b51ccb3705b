"""LoRA's A and B as the decode kernels read them. A is bfloat16 in tiles that lie in memory as packed ones do.

A tile of 64 x 64 values is four pieces of 16 columns, and each piece is as many words as a packed
tile of 64 x 64 weights: 512 words of two values, and 64 unused ones where a packed tile has its
scales. So A travels through the slots that the kernel has for W. In a warpgroup, thread
32 w + 4 g + t reads words 4 thread ... of a piece: rows 16 w + g and + 8 of columns 2 t, 2 t + 1, then
both rows of columns 2 t + 8, 2 t + 9.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.layout import TILE

# Of A, brought by one block within the time of the smallest products.
_LEAST_BYTES = 112 * 1024


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Branch:
    """The branches of linears that share an input; values, so that new ones need no recompile.

    The ranks of part i are rows rank * i ... of A^T, filled up with zeros to a `rank` that divides 64
    or is a multiple of it. A row of the base needs those of its own part alone, or the 64 they are among.

    Attributes:
      a: for a packed base, int32 [..., tiles, K / 64, 4, 3, 192] from `pack`; for a dense one, bfloat16
        [..., 64 * tiles, K].
      b: bfloat16 [..., N, max(rank, 64)], scaled; zero in the columns of other parts. Each part of N is filled up
        with zeros to whole tiles of 64 rows.
      sizes: rows of the base that belong to each part, which need not be whole tiles.
      rank: of one part.
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
    """The rank that a part of a `Branch` has: the next one that divides 64 or is a multiple of it."""
    return rank + -rank % TILE if rank > TILE // 2 else 1 << max(3, (rank - 1).bit_length())


def pack_branch(
    parts: Sequence[tuple[jax.Array, jax.Array]], scaling: float, *, is_packed: bool
) -> Branch:
    """Joins the branches of linears that share an input.

    Args:
      parts: A [..., K, R] and B [..., R, N_i] of each, in the order of the base's rows.
      scaling: alpha / R, which goes into B.
      is_packed: whether the base is.
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
        a=pack(a) if is_packed else pad_last(a, 0, -a.shape[-1] % TILE).astype(jnp.bfloat16).mT,
        b=jnp.concatenate(b, axis=-2).astype(jnp.bfloat16),
        sizes=tuple(matrix.shape[-1] for _, matrix in parts),
        rank=filled,
    )


def supports(k: int, warpgroups: int, step: int) -> str | None:
    """Why the kernel cannot bring A through its slots, or None."""
    if width(k, warpgroups, step) is None:
        return f"needs K of whole {3 * TILE}s for A and 3 warpgroups; got K = {k}"
    return None


def is_as_wide(warpgroups: int, step: int) -> bool:
    """Whether a slot for W has room for tiles of A, whatever K is, and need not be made larger for them."""
    return warpgroups * step % (4 * TILE) == 0


def width(k: int, warpgroups: int, step: int) -> int | None:
    """Columns of A, 64 rows high, in one slot; None if there is no such number.

    They divide K, and their pieces are equally many for each warpgroup: as many as there is room for
    where a slot has `step` columns of W, but at least a tile, for which smaller slots are made larger.
    """
    least = 3 * TILE if warpgroups == 3 else TILE
    most = max(least, warpgroups * step // 4)
    return next(
        (w for w in range(most // least * least, 0, -least) if layout.whole(k) % w == 0), None
    )


def pieces(k: int, warpgroups: int, step: int) -> int:
    """Pieces of A in one slot for each warpgroup; of W it has step / 64."""
    return width(k, warpgroups, step) // (TILE // 4) // warpgroups


def pack(a: jax.Array) -> jax.Array:
    """Puts A, or a stack of them, into the kernel's order.

    Args:
      a: [..., K, R], any float; its R columns may be those of several adapters side by side.

    Returns:
      int32 [..., ceil(R / 64), ceil(K / 64), 4, 3, 192], of bfloat16 pairs; padding is zeros.
    """
    *stack, k, rank = a.shape
    widths = [(0, 0)] * len(stack) + [(0, -k % TILE), (0, -rank % TILE)]
    a = jnp.pad(a.astype(jnp.bfloat16), widths)
    a = a.reshape(*stack, -1, 4, 2, 4, 2, layout.tiles(rank), 4, 2, 8)
    # Axes of one matrix: k, i, b, t, a (columns of A^T), n, w, h, g (its rows).
    order = [5, 0, 1, 6, 8, 3, 2, 7, 4]
    a = a.transpose(*range(len(stack)), *(len(stack) + axis for axis in order))
    words = jax.lax.bitcast_convert_type(a, jnp.int32)
    words = words.reshape(*words.shape[: len(stack) + 3], layout.CODE_WORDS)
    words = jnp.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, layout.SCALE_WORDS)])
    return words.reshape(*words.shape[:-1], *layout.TILE_SHAPE)


def unpack_tile(pieces: list[jax.Array]) -> jax.Array:
    """Inverse of `pack` for one tile: four int32 [3, 192] -> bfloat16 [64 (R), 64 (K)]."""
    words = jnp.stack(pieces).reshape(4, -1)[:, : layout.CODE_WORDS]
    values = jax.lax.bitcast_convert_type(words, jnp.bfloat16).reshape(4, 4, 8, 4, 2, 2, 2)
    # Axes: i, w, g, t, b, h, a -> w, h, g, i, b, t, a.
    return values.transpose(1, 5, 2, 0, 4, 3, 6).reshape(TILE, TILE)


def in_units(words: jax.Array, warpgroups: int, step: int) -> jax.Array:
    """What fills a slot together: [tiles, K / 64, 4, 3, 192] -> [tiles, units, warpgroups, pieces, 3, 192]."""
    each = pieces(words.shape[1] * TILE, warpgroups, step)
    return words.reshape(len(words), -1, warpgroups, each, *layout.TILE_SHAPE)


def shares(units: jax.Array, *, m: int, base_bytes: int, most: int) -> int:
    """Among how many blocks each tile of `in_units`'s result is divided, no more than `most` in all.

    A block brings about as much of A as a multiprocessor brings of the base's `base_bytes`. More
    blocks would be done sooner, but leave more sums, which cost more than that where M is large; for
    a small M twice as many are best (on an H200, for a 7B layer).
    """
    tiles, steps = units.shape[:2]
    a_block = max(_LEAST_BYTES, base_bytes // runtime.device().processors) // (2 if m <= 32 else 1)
    return max(1, min(-(-units.nbytes // (tiles * a_block)), steps, most // tiles))
