"""gate_up of a decoding step in one kernel: the product, LoRA, the norm before, and SwiGLU.

    y = ([W x] / global scale + [B U]) * unit       U = [x A], the ranks of the gate beside those of up
    result = silu([gate]) * [up]                    what stands in brackets is rounded to bfloat16

The rows of W lie in pairs (`layout.paired_rows`): of the 64 rows that a warpgroup multiplies, a thread holds the
same columns of the gate and of what it lets through. So neither sums nor gates leave the registers, and what is
written is the result. `decode` with `epilogue` writes every sum in float32 and reads it again: at 64 rows of 7B
that is 38 MB a layer.

Each block sums whole tiles over all of K, some 64 rows of W for each of its warpgroups at a time, which share x:

    block      wait full | decode, wgmma | leave the slot, refill own W | ... | branch, norm, SwiGLU, store
    slot       `step` columns of x [M, step] and of W [tiles, step / 64, 3, 192 words]; after the last columns of a
               tile B of its rows and U [M, 64], as in `nvfp4_matmul.prefill`

A tile more than there are warpgroups may be shared: each then multiplies its own part of the rows of x by it. That
is for many rows, whose sums leave no registers for another warpgroup.

Blocks that would have less to do than others do not take part. On the processors that this leaves free, the first
blocks of the grid multiply x by A: each its share of K, and whoever is the last adds up the shares, in order, and
signals that U is there. The others ask for U when they have multiplied all of x; they never wait in practice,
and those that they wait for wait for nobody.

Every row of x is summed in the same order whatever the others are.
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

# Of both parts beside each other: what one tile of A holds.
MOST_RANKS = TILE // 2
# Words of counters in device memory: of the shares of A by part of the rows of x, of the parts that are there, and
# of the blocks that have seen that.
COUNTERS = 8
_TILE_BYTES = 4 * (layout.CODE_WORDS + layout.SCALE_WORDS)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a problem is divided.

    Attributes:
      warpgroups: warpgroups per block, 64 rows of W each; 1 to 5.
      step: columns per slot; 64, 128 or 256.
      stages: number of slots, 2 or more.
      blocks: number of blocks that share W.
      is_shared: whether a block has one tile more, of which each warpgroup multiplies a part of the rows of x.
    """

    warpgroups: int
    step: int
    stages: int
    blocks: int
    is_shared: bool = False

    @property
    def high(self) -> int:
        """Tiles that a block sums at a time."""
        return self.warpgroups + self.is_shared


@dataclasses.dataclass(frozen=True)
class Cut:
    """Which block does what.

    Attributes:
      tiles: of 64 rows of W.
      steps: of columns.
      turns: how many times a block takes up to `high` tiles.
      shares: blocks among which the columns of A are divided; 0 without A.
      windows: parts of the rows of x, each of which a warpgroup multiplies by A.
    """

    tiles: int
    steps: int
    turns: int
    shares: int
    windows: int


def cut(
    m: int, n: int, k: int, config: Config, *, has_branch: bool, device: Device | None = None
) -> Cut:
    """How a problem is divided with a configuration."""
    tiles, steps = layout.tiles(n), layout.whole(k) // config.step
    most = -(-tiles // config.blocks)
    turns = -(-most // config.high)
    free = (device or runtime.device()).processors - config.blocks
    shares = max(0, min(free, steps)) if has_branch else 0
    most = min(config.warpgroups, 4)
    windows = next(w for w in range(most, 0, -1) if m // 8 % w == 0)
    return Cut(tiles, steps, turns, shares, windows)


def supports(
    m: int,
    n: int,
    k: int,
    config: Config | None = None,
    *,
    rank: int = 0,
    device: Device | None = None,
) -> str | None:
    """Why this kernel cannot run a problem, or None.

    Args:
      m: rows of x.
      n: rows of W: of the gate and of what it lets through.
      k: columns of both.
      config: by default that of `pick_config`.
      rank: of one part of the branch of LoRA, as `lora.filled_rank` makes it; 0 without one.
      device: the device that runs it; None for the current one.
    """
    if not 1 <= m <= MAX_M or m % 8:
        return f"needs M in eights up to {MAX_M}; got M = {m}"
    if not layout.can_pair(n):
        return f"needs N of whole tiles of 64 rows; got N = {n}"
    if rank > MOST_RANKS:
        return f"needs LoRA of rank {MOST_RANKS} at most; got {rank}"
    config = config or pick_config(m, n, k, has_branch=rank > 0, device=device)
    if config is None:
        return f"has no configuration for [{m}, {k}] x [{n}, {k}]"
    return _misfit(m, n, k, config, has_branch=rank > 0, device=device)


def _misfit(
    m: int, n: int, k: int, config: Config, *, has_branch: bool, device: Device | None
) -> str | None:
    if layout.whole(k) % config.step:
        return f"needs K of whole steps of {config.step}; got K = {k}"
    if config.is_shared and m % (8 * config.warpgroups):
        return f"needs M of whole {8 * config.warpgroups}s for a shared tile; got M = {m}"
    of_blocks = cut(m, n, k, config, has_branch=has_branch, device=device)
    # More would not be done when the first tiles are.
    if has_branch and of_blocks.steps > 2 * config.stages * of_blocks.shares:
        return f"needs more than {of_blocks.shares} processors beside {config.blocks} for LoRA's A"
    used = shared_bytes(m, config)
    if used > (most := most_shared_bytes(device)):
        return f"needs {used} bytes of shared memory of {most}"
    return None


def depth(config: Config) -> int:
    """Tiles of words in a slot for each tile of rows: of W, of B of rank 32, and all of A's among them."""
    chunks = config.step // TILE
    return max(chunks, 2, -(-4 * chunks // config.high))


def shared_bytes(m: int, config: Config) -> int:
    """Bytes of shared memory that a block takes."""
    slot = config.step * m * 2 + config.high * depth(config) * _TILE_BYTES
    return config.stages * slot + 4 * m


def pick_config(
    m: int, n: int, k: int, *, has_branch: bool, device: Device | None = None
) -> Config | None:
    """The configuration for a problem, or None where there is none: the first of `candidates`."""
    return next(iter(candidates(m, n, k, has_branch=has_branch, device=device)), None)


@functools.cache
def _candidates(m: int, n: int, k: int, has_branch: bool, card: Device) -> tuple[Config, ...]:
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
                if _misfit(m, n, k, config, has_branch=has_branch, device=card) is None:
                    # Least tiles a block, then fewest passes over x and idle warpgroups.
                    costs = count, turns, turns * high - count, is_shared, -step, -stages
                    found.append((costs, config))
                    break
    found = [choice for choice in found if choice[1].warpgroups >= 3] or found
    return tuple(config for _, config in sorted(found, key=lambda choice: choice[0]))


def candidates(
    m: int, n: int, k: int, *, has_branch: bool, device: Device | None = None
) -> tuple[Config, ...]:
    """Configurations that fit a problem, what takes least time by their count of tiles first."""
    return _candidates(m, n, k, has_branch, device or runtime.device())


@dataclasses.dataclass(frozen=True)
class Following:
    """This product, for the one before it, as `decode.Upcoming` is.

    Attributes:
      words: the words of its weight.
      config: how its work is divided.
    """

    words: jax.Array
    config: Config

    @property
    def blocks(self) -> int:
        """Those that multiply W."""
        return self.config.blocks

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, in tiles, of what a block reads first."""
        return self.config.high, self.config.step // TILE

    def first(self, block: jax.Array) -> tuple[jax.Array, int]:
        """Where that begins, in tiles."""
        return first_tile(block, len(self.words), self.config.blocks), 0


def first_tile(block: jax.Array, tiles: int, blocks: int) -> jax.Array:
    """The first one of a block, which has all up to the first one of the next."""
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
    """silu(gate) * up of the two halves of x W^T, with LoRA and the norm before; see the module.

    Args:
      x: bfloat16 [M, K], or a residual stream, which is normalized first; M in eights, K as it is or padded.
      w: an [N, K] weight in pairs of rows, without stacked axes.
      divisor: w's global scale after `decode.sliceable`; None uses the global scale itself.
      branch: from `lora.pack_branch`, in pairs.
      eps: epsilon of the norm, if x is a stream.
      config: by default that of `pick_config`.
      following: the next product, some of whose words are prefetched.
      counters: int32 [COUNTERS], zeros, in which blocks count, and which are zeros again after that; made once for
        all layers, they cost no kernel. None makes them.
      device: the device that runs it; None for the current one.
      interpret: run on a CPU, and report data races.

    Returns:
      bfloat16 [M, N / 2].

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    # This import takes half a second, so it is made only when needed.
    from pallas_kernels.finished_linear import gated_kernel

    values = x.scaled if isinstance(x, Stream) else x
    (n, k), m, rank = w.shape, len(values), 0 if branch is None else branch.rank
    config = config or pick_config(m, n, k, has_branch=rank > 0, device=device)
    if reason := supports(m, n, k, config, rank=rank, device=device):
        raise NotImplementedError(reason)
    values = jnp.pad(values, ((0, 0), (0, layout.whole(k) - values.shape[1])))
    divisor = w.global_scale if divisor is None else divisor
    problem = gated_kernel.Problem(
        config=config,
        cut=cut(m, n, k, config, has_branch=rank > 0, device=device),
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
