"""LoRA's A as the decode kernel reads it: bfloat16 tiles that lie in memory as packed tiles do.

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

# Bytes of A that one block brings while others bring W; more are shared out.
_BYTES_A_BLOCK = 128 * 1024


def supports(k: int, warpgroups: int, step: int) -> str | None:
    """Why a slot of the kernel cannot hold A, or None."""
    if warpgroups * step % (4 * TILE):
        return f"needs warpgroups * step of whole {4 * TILE} for A; got {warpgroups} * {step}"
    if layout.tiles(k) * TILE % width(warpgroups, step):
        return f"needs K of whole steps of {width(warpgroups, step)} for A; got K = {k}"
    return None


def width(warpgroups: int, step: int) -> int:
    """Columns of A, 64 rows high, that fit where a slot has `step` columns of W."""
    return warpgroups * step // 4


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
    """What fills a slot together: [tiles, K / 64, 4, 3, 192] -> [tiles, units, warpgroups, step / 64, 3, 192]."""
    return words.reshape(len(words), -1, warpgroups, step // TILE, *layout.TILE_SHAPE)


def shares(units: jax.Array, *, most: int) -> int:
    """Among how many blocks each tile of `in_units`'s result is divided, no more than `most` in all."""
    tiles, steps = units.shape[:2]
    wanted = -(-units.nbytes // (tiles * _BYTES_A_BLOCK))
    return max(1, min(wanted, steps, most // tiles))
