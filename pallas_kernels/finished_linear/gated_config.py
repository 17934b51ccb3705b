"""The configuration of the kernel `gated`: how it divides its work, and which problems it supports."""

import dataclasses
import functools
import itertools

import jax

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.decode_config import (
    most_shared_bytes,
    rows_of_tile,
    unless_rows,
    x_tiles,
)
from pallas_kernels.nvfp4_matmul.decode_plan import NextProduct
from pallas_kernels.nvfp4_matmul.layout import TILE

# The most ranks of each of gate and up. Both together take four tiles of A, and U and B as many slots.
MOST_RANKS = 2 * TILE
# Counters of a tile of x: finished shares of each tile of A (four) for each part of the rows (four), then finished
# parts of U, and blocks that have seen all parts. The rest is unused.
COUNTERS_OF_TILE = 32
_TILE_BYTES = 4 * (layout.CODE_WORDS + layout.SCALE_WORDS)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is divided among blocks.

    Attributes:
      warpgroups: warpgroups per block, each with 64 rows of W; 1 to 5.
      step: columns of x and W per pipeline stage; 64, 128 or 256.
      stages: pipeline stages, that is, slots in shared memory; 2 or more.
      blocks: number of blocks that share W, for each tile of x.
      is_shared: whether a block has one more tile, which each warpgroup multiplies by its part of the rows of x.
    """

    warpgroups: int
    step: int
    stages: int
    blocks: int
    is_shared: bool = False

    @property
    def high(self) -> int:
        """Number of tiles that a block sums at a time."""
        return self.warpgroups + self.is_shared


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Describes which block does what.

    Attributes:
      tiles: number of tiles of 64 rows of W.
      steps: number of steps of `config.step` columns.
      turns: number of rounds in which a block processes its tiles, up to `config.high` in each.
      tiles_of_a: number of tiles of 64 ranks of A, those of gate and up together; 0 without A.
      shares: number of blocks that share the columns of each tile of A; 0 without A.
      windows: number of parts of a tile's rows of x. In a block of A each warpgroup multiplies one part by A.
      x_tiles: number of tiles of x. Each has blocks of W and of A of its own, and all of them run at the same time.
    """

    tiles: int
    steps: int
    turns: int
    tiles_of_a: int
    shares: int
    windows: int
    x_tiles: int = 1

    @property
    def blocks_of_a(self) -> int:
        """Number of blocks that multiply a tile of x by A."""
        return self.tiles_of_a * self.shares


def tiling_of(m: int, n: int, k: int, config: Config, *, rank: int) -> Tiling:
    """Divides a problem according to a configuration; arguments as for `supports`."""
    tiles, steps = layout.tiles(n), layout.whole(k) // config.step
    most = -(-tiles // config.blocks)
    turns = -(-most // config.high)
    free = runtime.device().processors // x_tiles(m) - config.blocks
    tiles_of_a = layout.tiles(2 * rank)
    shares = max(0, min(free // tiles_of_a, steps)) if rank else 0
    most = min(config.warpgroups, 4)
    windows = next(w for w in range(most, 0, -1) if rows_of_tile(m) // 8 % w == 0)
    return Tiling(tiles, steps, turns, tiles_of_a, shares, windows, x_tiles(m))


def supports(m: int, n: int, k: int, config: Config | None = None, *, rank: int = 0) -> str | None:
    """Returns why this kernel cannot run a problem, or None if it can.

    Args:
      m: rows of x.
      n: rows of W, gate and up together.
      k: columns of x and W.
      config: the configuration; None for that of `pick_config`.
      rank: padded rank of one part of LoRA's branch (`lora.filled_rank`); 0 without LoRA.
    """
    if m % 8:
        return f"needs M a multiple of 8; got M = {m}"
    if reason := unless_rows(m):
        return reason
    if not layout.can_pair(n):
        return f"needs N of whole tiles of 64 rows; got N = {n}"
    if rank > MOST_RANKS:
        return f"needs LoRA of rank {MOST_RANKS} at most; got {rank}"
    config = config or pick_config(m, n, k, rank=rank)
    if config is None:
        return f"has no configuration for [{m}, {k}] x [{n}, {k}]"
    return _misfit(m, n, k, config, rank=rank)


def _misfit(m: int, n: int, k: int, config: Config, *, rank: int) -> str | None:
    if layout.whole(k) % config.step:
        return f"needs K of whole steps of {config.step}; got K = {k}"
    if config.is_shared and rows_of_tile(m) % (8 * config.warpgroups):
        return f"needs M of whole {8 * config.warpgroups}s for a shared tile; got M = {m}"
    tiling = tiling_of(m, n, k, config, rank=rank)
    tiles_of_a, shares = tiling.tiles_of_a, tiling.shares
    if tiles_of_a > config.stages:
        return f"needs {tiles_of_a} slots for LoRA of rank {rank}; got {config.stages}"
    # With more steps per share, U would not be ready when the first tiles of W are. With several tiles of A, a share
    # may also have up to half of the steps.
    # A unit of A takes a fraction of the time of a unit of W if there are as many rows as in one of several tiles.
    is_ready = tiling.steps <= 2 * config.stages * shares or (tiles_of_a > 1 and shares > 1)
    is_ready |= tiling.x_tiles > 1 and shares > 0 and config.warpgroups > 1
    if rank and not is_ready:
        there = tiling.blocks_of_a
        return f"needs more than {there} processors beside {config.blocks} for LoRA's A"
    used = shared_bytes(m, config)
    if used > (most := most_shared_bytes()):
        return f"needs {used} bytes of shared memory of {most}"
    return None


def depth(config: Config) -> int:
    """Returns the blocks of words [3, 192] in a slot for each tile of rows: enough for W, for B, and for A."""
    chunks = config.step // TILE
    return max(chunks, 2, -(-4 * chunks // config.high))


def shared_bytes(m: int, config: Config) -> int:
    """Returns the bytes of shared memory that a block takes."""
    rows = rows_of_tile(m)
    slot = config.step * rows * 2 + config.high * depth(config) * _TILE_BYTES
    return config.stages * slot + 4 * rows


def pick_config(m: int, n: int, k: int, *, rank: int) -> Config | None:
    """Picks the configuration for a problem: the first of `candidates`; None if none fits."""
    return next(iter(candidates(m, n, k, rank=rank)), None)


@functools.cache
def _candidates(m: int, n: int, k: int, rank: int, card: runtime.Device) -> tuple[Config, ...]:
    tiles, choices, rows = layout.tiles(n), [], rows_of_tile(m)
    # Sums of more than 64 rows leave no registers for a fifth warpgroup.
    groups = [(w, False) for w in ((5, 4, 3, 2, 1) if rows <= 64 else (4, 3, 2, 1))]
    groups += [(4, True), (3, True)] if rows > 32 else []
    least = -(-tiles // (card.processors // x_tiles(m)))
    for (warpgroups, is_shared), count in itertools.product(groups, range(least, least + 3)):
        high = warpgroups + is_shared
        turns, blocks = -(-count // high), -(-tiles // count)
        for step in (256, 128, 64) if rows <= 32 else (128, 64):
            for stages in (4, 3, 2):
                config = Config(warpgroups, step, stages, blocks, is_shared)
                if _misfit(m, n, k, config, rank=rank) is None:
                    # Prefer the fewest tiles per block, then the fewest passes over x, then the fewest idle
                    # warpgroups. With more than 64 rows a second pass is faster than a shared tile (7B, 128 rows:
                    # 59.0 us instead of 63.4 us).
                    avoided = rows > 64 and is_shared
                    costs = count, avoided, turns, turns * high - count, is_shared, -step, -stages
                    choices.append((costs, config))
                    break
    choices = [choice for choice in choices if choice[1].warpgroups >= 3] or choices
    return tuple(config for _, config in sorted(choices, key=lambda choice: choice[0]))


def candidates(m: int, n: int, k: int, *, rank: int) -> tuple[Config, ...]:
    """Returns the configurations that fit a problem, the fastest first, as estimated from the tiles per block."""
    return _candidates(m, n, k, rank, runtime.device())


def next_product(words: jax.Array, config: Config) -> NextProduct:
    """Returns the `NextProduct` that describes a call of this kernel with a weight's words."""
    first = lambda block: (first_tile(block, len(words), config.blocks), 0)
    return NextProduct(words, config.blocks, (config.high, config.step // TILE), first)


def first_tile(block: jax.Array, tiles: int, blocks: int) -> jax.Array:
    """Returns the first tile of a block. Its last tile is the one before the first tile of the next block."""
    return jax.lax.div(block * tiles, blocks)
