"""A narrow bfloat16 matrix, LoRA's A, in tiles that lie in memory as packed ones do.

A tile of 64 x 64 values is four pieces of 16 columns, and each piece is as many words as a packed
tile of 64 x 64 weights: 512 words of two values, and 64 unused ones where a packed tile has its
scales. So A travels through the slots that the kernel has for W. In a warpgroup, thread
32 w + 4 g + t reads words 4 thread ... of a piece: rows 16 w + g and + 8 of columns 2 t, 2 t + 1, then
both rows of columns 2 t + 8, 2 t + 9.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.layout import TILE

# Of A, brought by one block within the time of the smallest products.
_LEAST_BYTES = 112 * 1024


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


def shares(units: jax.Array, *, m: int, base_bytes: int, most: int, processors: int) -> int:
    """Among how many blocks each tile of `in_units`'s result is divided, no more than `most` in all.

    A block brings about as much of A as each of the `processors` brings of the base's `base_bytes`. More
    blocks would be done sooner, but leave more sums, which cost more than that where M is large; for
    a small M twice as many are best (on an H200, for a 7B layer).
    """
    tiles, steps = units.shape[:2]
    a_block = max(_LEAST_BYTES, base_bytes // processors) // (2 if m <= 32 else 1)
    return max(1, min(-(-units.nbytes // (tiles * a_block)), steps, most // tiles))
