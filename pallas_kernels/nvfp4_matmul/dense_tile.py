"""The layout of LoRA's A, in bfloat16. It lets A use the kernel's shared memory slots for packed tiles.

A tile of 64 x 64 values is stored as four pieces of 16 columns, each of as many 32-bit words as a packed tile. A low
tile stores only 32 rows, in two pieces of 32 columns, and its product has each row twice. docs/design/kernels.md,
"LoRA's A in tiles", says where each word is.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.layout import TILE

# Rows that a low tile stores.
LOW = 32

# Bytes of A that one block can load in the time of the smallest products, those of SmolLM2.
_LEAST_BYTES = 24 * 1024


def supports(k: int, warpgroups: int, step: int) -> str | None:
    """Returns why the kernel cannot load A into its slots, or None if it can."""
    if width(k, warpgroups, step) is None:
        return f"needs K of whole {3 * TILE}s for A and 3 warpgroups; got K = {k}"
    return None


def is_as_wide(warpgroups: int, step: int) -> bool:
    """Returns whether a slot for W holds a whole number of tiles of A."""
    return warpgroups * step % (4 * TILE) == 0


def width(k: int, warpgroups: int, step: int, height: int = TILE) -> int | None:
    """Returns how many columns of A's tiles a slot holds, or None if no number fits.

    The number divides K (padded to whole tiles) and gives each warpgroup the same number of pieces, also of low tiles
    if K allows them (`height`). It is the largest that fits into a slot with `step` columns of W, but at least one
    tile (three with three warpgroups, two with four if tiles may be low). A slot that is too small for that is made
    larger. Of low tiles, a slot holds twice as many columns if these are no more than `step`, and not more tiles than
    there are warpgroups.
    """
    least = 3 * TILE if warpgroups == 3 else TILE
    if warpgroups == 4 and _may_be_low(k):
        least = 2 * TILE
    fitting = warpgroups * step // 4
    if height == LOW:
        fitting = max(fitting, min(2 * fitting, step, warpgroups * TILE))
    most = max(least, fitting)
    return next(
        (w for w in range(most // least * least, 0, -least) if layout.whole(k) % w == 0), None
    )


def pieces(k: int, warpgroups: int, step: int, height: int = TILE) -> int:
    """Returns the pieces of A in one slot for each warpgroup, in the place of step / 64 tiles of W."""
    return width(k, warpgroups, step, height) * height // TILE // (TILE // 4) // warpgroups


def height(k: int, ranks: int) -> int:
    """Returns how many rows the tiles of an A with K columns store: 32 if that takes fewer bytes, otherwise 64.

    Args:
      k: columns.
      ranks: rows, of all adapters together.
    """
    return LOW if 0 < ranks % TILE <= LOW and _may_be_low(k) else TILE


def tiles(k: int, ranks: int) -> int:
    """Returns how many tiles `pack` makes of an A with K columns and so many ranks."""
    return -(-ranks // height(k, ranks))


def height_of(words: jax.Array) -> int:
    """Returns how many rows the tiles of `pack`'s result store."""
    return words.shape[-3] * (TILE // 4)


def _may_be_low(k: int) -> bool:
    # Four warpgroups share the four pieces of two low tiles.
    return layout.tiles(k) % 2 == 0


def pack(a: jax.Array, height: int = TILE) -> jax.Array:
    """Converts A, or a stack of As, to the kernel's layout.

    Args:
      a: [..., K, R] of any float dtype; the R columns may belong to several adapters side by side.
      height: rows that a tile stores, 64 or 32.

    Returns:
      int32 [..., ceil(R / height), ceil(K / 64), height / 16, 3, 192], pairs of bfloat16, padded with zeros.
    """
    *stack, k, rank = a.shape
    widths = [(0, 0)] * len(stack) + [(0, -k % TILE), (0, -rank % height)]
    a = jnp.pad(a.astype(jnp.bfloat16), widths)
    a = a.reshape(*stack, -1, 4, 2, 4, 2, -(-rank // height), height // 16, 2, 8)
    # Axes of one matrix: k, i, b, t, a (columns of A^T), n, w, h, g (its rows).
    a = layout.transposed(a, "kibtanwhg", "nkiwgtbha")
    words = jax.lax.bitcast_convert_type(a, jnp.int32)
    words = words.reshape(*words.shape[: len(stack) + 2], height // 16, layout.CODE_WORDS)
    words = jnp.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, layout.SCALE_WORDS)])
    return words.reshape(*words.shape[:-1], *layout.TILE_SHAPE)


def unpack_tile(pieces: list[jax.Array]) -> jax.Array:
    """Returns a tile as `wgmma` reads it: four int32 [3, 192], or two of a low tile -> bfloat16 [64 (R), 64 (K)]."""
    words = jnp.stack(pieces).reshape(len(pieces), -1)[:, : layout.CODE_WORDS]
    values = jax.lax.bitcast_convert_type(words, jnp.bfloat16)
    values = values.reshape(4, len(pieces), 8, 4, 2, 2, 2)
    # Axes: i, w, g, t, b, h, a -> w, h, g, i, b, t, a.
    rows = values.transpose(1, 5, 2, 0, 4, 3, 6).reshape(-1, TILE)
    return jnp.tile(rows, (TILE // len(rows), 1))


def in_units(words: jax.Array, warpgroups: int, step: int) -> jax.Array:
    """Groups pieces by slot: [tiles, K / 64, 4 or 2, 3, 192] -> [tiles, units, warpgroups, pieces, 3, 192]."""
    count = pieces(words.shape[1] * TILE, warpgroups, step, height_of(words))
    return words.reshape(len(words), -1, warpgroups, count, *layout.TILE_SHAPE)


def shares(
    units: jax.Array,
    *,
    height: int,
    m: int,
    base_bytes: int,
    most: int,
    processors: int,
    longest: int | None = None,
) -> int:
    """Returns the number of blocks that share each tile of A. All tiles together take at most `most` blocks.

    A block loads about as many bytes of A as each multiprocessor loads of the base weight. With more blocks A would
    be finished sooner, but there would be more partial sums. For a small M the time of a block is that of its loads,
    one after the other, so twice as many blocks are fastest up to 32 rows (measured on an H200 with a 7B layer). A
    load of a low tile brings half the bytes: up to 16 rows, three times as many blocks (on an H100). And a unit of
    few bytes takes as long as one of many: none of the blocks multiplies more than `longest` units of low tiles.

    Args:
      units: A, as returned by `in_units`.
      height: rows that a tile of A stores.
      m: rows of x.
      base_bytes: bytes of the packed base.
      most: most blocks for all tiles together; each tile gets at least one block even if that exceeds it.
      processors: multiprocessors of the device.
      longest: most units of low tiles for each block; None means any number.
    """
    tiles, steps = units.shape[:2]
    more = 1 if m > 32 else 3 if height == LOW and m <= 16 else 2
    a_block = max(_LEAST_BYTES, base_bytes // processors) // more
    wanted = -(-units.nbytes // (tiles * a_block))
    if height == LOW and longest is not None:
        wanted = max(wanted, -(-steps // longest))
    return max(1, min(wanted, steps, most // tiles))
