"""gate_up of a decoding step in one kernel: the product, LoRA, the norm before, and SwiGLU.

    y = ([W x] / global scale + [B U]) * unit       U = [x A]; the ranks of the gate, then those of up
    result = silu([gate]) * [up]                    values in brackets are rounded to bfloat16

The rows of W are in pairs (`layout.paired_rows`): of the 64 rows that a warpgroup multiplies, each thread holds the
same rows of gate and up. So gate and up never leave the registers, and only the result is written. Two kernels
(`decode` and `epilogue`) write every sum in float32 and read it again: 38 MB per layer for 64 rows of a 7B model.

Each block sums whole tiles over all of K. Each of its warpgroups takes 64 rows of W at a time, and all share x:

    block      wait full | decode, wgmma | leave the slot, refill own W | ... | branch, norm, SwiGLU, store
    slot       a pipeline stage: `step` columns of x [M, step] and of W [tiles, step / 64, 3, 192 words]. After the
               last columns of a tile, B of its rows and U [M, 64]; with ranks above 32 several slots of these, each
               with 64 columns of U

A block may have one tile more than it has warpgroups. It is shared: each warpgroup multiplies it by its own part of
the rows of x. This helps if x has many rows, whose sums leave no registers for another warpgroup.

Every block of W takes about the same number of tiles, and there are only as many blocks of W as that needs. On the
remaining multiprocessors, the first blocks of the grid multiply x by A. Each takes a share of K for one tile of 64
ranks. The last one to finish adds up the shares of the tile, in a fixed order, and signals that this part of U is
ready. Blocks of W wait for all parts of U after they have multiplied all of x, so in practice U is ready by then.
There is no deadlock, because blocks of A wait for no others.

The order of summation in a row of x does not depend on the other rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from pallas_kernels.finished_linear.epilogue import Stream
from pallas_kernels.finished_linear.lora import Branch
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.config import MAX_M, most_shared_bytes
from pallas_kernels.nvfp4_matmul.decode import Upcoming
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4
from pallas_kernels.runtime import Device

# The most ranks of each of gate and up. Both together take four tiles of A, and U and B as many slots.
MOST_RANKS = 2 * TILE
# Counters in device memory, one word each: finished shares of each tile of A (four) for each part of the rows of x
# (four), then finished parts of U, and blocks that have seen all parts. The rest is unused.
COUNTERS = 32
_TILE_BYTES = 4 * (layout.CODE_WORDS + layout.SCALE_WORDS)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is divided among blocks.

    Attributes:
      warpgroups: warpgroups per block, each with 64 rows of W; 1 to 5.
      step: columns of x and W per pipeline stage; 64, 128 or 256.
      stages: pipeline stages, that is, slots in shared memory; 2 or more.
      blocks: number of blocks that share W.
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
class Cut:
    """Describes which block does what.

    Attributes:
      tiles: number of tiles of 64 rows of W.
      steps: number of steps of `config.step` columns.
      turns: number of rounds in which a block processes its tiles, up to `config.high` in each.
      tiles_of_a: number of tiles of 64 ranks of A, those of gate and up together; 0 without A.
      shares: number of blocks that share the columns of each tile of A; 0 without A.
      windows: number of parts of the rows of x. In a block of A each warpgroup multiplies one part by A.
    """

    tiles: int
    steps: int
    turns: int
    tiles_of_a: int
    shares: int
    windows: int

    @property
    def blocks_of_a(self) -> int:
        """Number of blocks that multiply x by A."""
        return self.tiles_of_a * self.shares


def cut(m: int, n: int, k: int, config: Config, *, rank: int, device: Device | None = None) -> Cut:
    """Divides a problem according to a configuration; arguments as for `supports`."""
    tiles, steps = layout.tiles(n), layout.whole(k) // config.step
    most = -(-tiles // config.blocks)
    turns = -(-most // config.high)
    free = (device or runtime.device()).processors - config.blocks
    tiles_of_a = layout.tiles(2 * rank)
    shares = max(0, min(free // tiles_of_a, steps)) if rank else 0
    most = min(config.warpgroups, 4)
    windows = next(w for w in range(most, 0, -1) if m // 8 % w == 0)
    return Cut(tiles, steps, turns, tiles_of_a, shares, windows)


def supports(
    m: int,
    n: int,
    k: int,
    config: Config | None = None,
    *,
    rank: int = 0,
    device: Device | None = None,
) -> str | None:
    """Returns why this kernel cannot run a problem, or None if it can.

    Args:
      m: rows of x.
      n: rows of W, gate and up together.
      k: columns of x and W.
      config: the configuration; None for that of `pick_config`.
      rank: padded rank of one part of LoRA's branch (`lora.filled_rank`); 0 without LoRA.
      device: the device that runs it; None for the current one.
    """
    if not 1 <= m <= MAX_M or m % 8:
        return f"needs M a multiple of 8 up to {MAX_M}; got M = {m}"
    if not layout.can_pair(n):
        return f"needs N of whole tiles of 64 rows; got N = {n}"
    if rank > MOST_RANKS:
        return f"needs LoRA of rank {MOST_RANKS} at most; got {rank}"
    config = config or pick_config(m, n, k, rank=rank, device=device)
    if config is None:
        return f"has no configuration for [{m}, {k}] x [{n}, {k}]"
    return _misfit(m, n, k, config, rank=rank, device=device)


def _misfit(
    m: int, n: int, k: int, config: Config, *, rank: int, device: Device | None
) -> str | None:
    if layout.whole(k) % config.step:
        return f"needs K of whole steps of {config.step}; got K = {k}"
    if config.is_shared and m % (8 * config.warpgroups):
        return f"needs M of whole {8 * config.warpgroups}s for a shared tile; got M = {m}"
    of_blocks = cut(m, n, k, config, rank=rank, device=device)
    tiles_of_a, shares = of_blocks.tiles_of_a, of_blocks.shares
    if tiles_of_a > config.stages:
        return f"needs {tiles_of_a} slots for LoRA of rank {rank}; got {config.stages}"
    # With more steps per share, U would not be ready when the first tiles of W are. With several tiles of A, a share
    # may also have up to half of the steps.
    is_ready = of_blocks.steps <= 2 * config.stages * shares or (tiles_of_a > 1 and shares > 1)
    if rank and not is_ready:
        there = of_blocks.blocks_of_a
        return f"needs more than {there} processors beside {config.blocks} for LoRA's A"
    used = shared_bytes(m, config)
    if used > (most := most_shared_bytes(device)):
        return f"needs {used} bytes of shared memory of {most}"
    return None


def depth(config: Config) -> int:
    """Returns the blocks of words [3, 192] in a slot for each tile of rows: enough for W, for B, and for A."""
    chunks = config.step // TILE
    return max(chunks, 2, -(-4 * chunks // config.high))


def shared_bytes(m: int, config: Config) -> int:
    """Returns the bytes of shared memory that a block takes."""
    slot = config.step * m * 2 + config.high * depth(config) * _TILE_BYTES
    return config.stages * slot + 4 * m


def pick_config(
    m: int, n: int, k: int, *, rank: int, device: Device | None = None
) -> Config | None:
    """Picks the configuration for a problem: the first of `candidates`; None if none fits."""
    return next(iter(candidates(m, n, k, rank=rank, device=device)), None)


@functools.cache
def _candidates(m: int, n: int, k: int, rank: int, card: Device) -> tuple[Config, ...]:
    tiles, found = layout.tiles(n), []
    # Sums of more than 64 rows leave no registers for a fifth warpgroup.
    groups = [(w, False) for w in ((5, 4, 3, 2, 1) if m <= 64 else (4, 3, 2, 1))]
    groups += [(4, True), (3, True)] if m > 32 else []
    least = -(-tiles // card.processors)
    for (warpgroups, is_shared), count in itertools.product(groups, range(least, least + 3)):
        high = warpgroups + is_shared
        turns, blocks = -(-count // high), -(-tiles // count)
        for step in (256, 128, 64) if m <= 32 else (128, 64):
            for stages in (4, 3, 2):
                config = Config(warpgroups, step, stages, blocks, is_shared)
                if _misfit(m, n, k, config, rank=rank, device=card) is None:
                    # Prefer the fewest tiles per block, then the fewest passes over x, then the fewest idle
                    # warpgroups. With more than 64 rows a second pass is faster than a shared tile (7B, 128 rows:
                    # 59.0 us instead of 63.4 us).
                    avoided = m > 64 and is_shared
                    costs = count, avoided, turns, turns * high - count, is_shared, -step, -stages
                    found.append((costs, config))
                    break
    found = [choice for choice in found if choice[1].warpgroups >= 3] or found
    return tuple(config for _, config in sorted(found, key=lambda choice: choice[0]))


def candidates(
    m: int, n: int, k: int, *, rank: int, device: Device | None = None
) -> tuple[Config, ...]:
    """Returns the configurations that fit a problem, the fastest first, as estimated from the tiles per block."""
    return _candidates(m, n, k, rank, device or runtime.device())


@dataclasses.dataclass(frozen=True)
class Following:
    """Describes a product of this kernel for the product before it, which prefetches; see `decode.Upcoming`.

    Attributes:
      words: its packed weight, int32 [N / 64, K / 64, 3, 192].
      config: its configuration.
    """

    words: jax.Array
    config: Config

    @property
    def blocks(self) -> int:
        """Number of blocks that multiply W."""
        return self.config.blocks

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the words that a block reads first, in tiles of 64 x 64."""
        return self.config.high, self.config.step // TILE

    def first(self, block: jax.Array) -> tuple[jax.Array, int]:
        """Returns the row and column where a block's first words begin, in tiles of 64 x 64."""
        return first_tile(block, len(self.words), self.config.blocks), 0


def first_tile(block: jax.Array, tiles: int, blocks: int) -> jax.Array:
    """Returns the first tile of a block. Its last tile is the one before the first tile of the next block."""
    return jax.lax.div(block * tiles, blocks)


def linear(
    x: jax.Array | Stream,
    w: HopperNVFP4,
    *,
    divisor: jax.Array | None = None,
    branch: Branch | None = None,
    eps: float | None = None,
    config: Config | None = None,
    following: Upcoming | Following | None = None,
    counters: jax.Array | None = None,
    device: Device | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes silu(gate) * up; gate and up are the halves of x W^T with LoRA and the norm before (see the module).

    Args:
      x: bfloat16 [M, K], or a residual stream, which is normalized first. M is a multiple of 8; K is plain or padded
        with zeros to whole tiles.
      w: one [N, K] weight whose rows are in pairs.
      divisor: w's global scale after `decode.sliceable`; None for `w.global_scale`.
      branch: from `lora.pack_branch` with `is_paired`; None without LoRA.
      eps: epsilon of the norm, if x is a stream.
      config: the configuration; None for that of `pick_config`.
      following: the next product, whose first words are prefetched; None for none.
      counters: zeros, int32 [COUNTERS]; the kernel sets them back to 0. Pass the same array for all layers to save
        a kernel per layer; None makes a new one.
      device: the device that runs it; None for the current one.
      interpret: whether to run on a CPU and report data races.

    Returns:
      bfloat16 [M, N / 2].

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    # Imported here because the import takes half a second.
    from pallas_kernels.finished_linear import gated_kernel

    values = x.scaled if isinstance(x, Stream) else x
    (n, k), m, rank = w.shape, len(values), 0 if branch is None else branch.rank
    config = config or pick_config(m, n, k, rank=rank, device=device)
    if reason := supports(m, n, k, config, rank=rank, device=device):
        raise NotImplementedError(reason)
    values = jnp.pad(values, ((0, 0), (0, layout.whole(k) - values.shape[1])))
    divisor = w.global_scale if divisor is None else divisor
    problem = gated_kernel.Problem(
        config=config,
        cut=cut(m, n, k, config, rank=rank, device=device),
        rank=rank,
        norm=(x.width, eps) if isinstance(x, Stream) else None,
        following=following,
        interpret=interpret,
    )
    operands = {
        "x": values,
        "w": w.words,
        "divisor": divisor,
        "squares": x.squares if isinstance(x, Stream) else None,
        "a": None if branch is None else branch.a.reshape(-1, *layout.TILE_SHAPE),
        "b": None if branch is None else branch.b,
        "counters": jnp.zeros((COUNTERS,), jnp.int32) if counters is None else counters,
    }
    return gated_kernel.launch(operands, problem, name=f"nvfp4_gated_sm90_{n}x{k}")
