"""qkv or o of a decoding step of at most 16 rows in one kernel: the product, LoRA, and all operations around it.

The result is that of `decode.linear` with product and epilogue. Each block computes one tile of 64 columns of it over
all of K, and its warpgroups divide K among them:

    warpgroup 0    copy own slots | decode, wgmma | ... | add up, wait for U, branch, norm, bias or residual, store
    warpgroup 1    copy own slots | decode, wgmma | ... | leave its sums in shared memory
    ...

    slot           `step` columns of x [M, step] and of W [step / 64, 3, 192 words]; each warpgroup has `stages` slots

So no sum over a part of K goes through device memory, and there is no second kernel. A warpgroup multiplies other
columns of x than the others, so they wait for each other only once. In most problems all slots together hold all
that a block reads, and every copy starts at once.

The first blocks of the grid multiply x by A, in the same way: a block adds up a share of K of a tile of 64 ranks and
signals. Warpgroup 0 of a block of W waits for all signals and adds up the shares in order. There is no deadlock: blocks
of A wait for no others.

Every row of x is summed in the same order, whatever the other rows are.

One processor decodes a tile over all of K, some 90 cycles for each 64 columns. So K has an upper limit: for down the
two kernels, which use all processors, are faster.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from pallas_kernels.finished_linear import epilogue
from pallas_kernels.finished_linear.epilogue import Stream
from pallas_kernels.finished_linear.lora import Branch
from pallas_kernels.mosaic import fragments
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.config import most_shared_bytes
from pallas_kernels.nvfp4_matmul.decode import Plan, Sums, Upcoming
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4
from pallas_kernels.runtime import Device

# The most rows of x, and the most columns.
MAX_M, MAX_K = 16, 8192
# Shared memory that Pallas takes to add up the rows of a tile.
_REDUCTION_BYTES = 2048
_TILE_BYTES = 4 * (layout.CODE_WORDS + layout.SCALE_WORDS)
# A tile of A of 64 columns takes the place of this many tiles of W.
PIECES_OF_A = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is divided.

    Attributes:
      warpgroups: warpgroups per block, which divide K among them; 2 to 4.
      step: columns of x and W per slot; 64, 128 or 256.
      stages: number of slots of each warpgroup.
      shares: number of blocks that share the columns of each tile of A; 0 without A.
    """

    warpgroups: int
    step: int
    stages: int
    shares: int = 0

    @property
    def chunks(self) -> int:
        """Number of tiles of 64 columns in a slot."""
        return self.step // TILE

    @property
    def stages_of_a(self) -> int:
        """Number of slots of each warpgroup in a block of A; each holds 64 columns."""
        return self.stages * self.chunks // PIECES_OF_A


def tiles_of_a(sizes: Sequence[int], rank: int) -> int:
    """Number of tiles of 64 ranks of A.

    Args:
      sizes: rows of W of each joined linear.
      rank: padded rank of one of them (`lora.filled_rank`); 0 without LoRA.
    """
    return layout.tiles(len(sizes) * rank)


def supports(
    m: int,
    sizes: Sequence[int],
    k: int,
    config: Config | None = None,
    *,
    rank: int = 0,
    device: Device | None = None,
) -> str | None:
    """Why this kernel cannot run a linear, or None.

    Args:
      m: rows of x.
      sizes: rows of W of each joined linear.
      k: columns of x and W.
      config: None for that of `pick_config`.
      rank: padded rank of one linear's branch (`lora.filled_rank`); 0 without LoRA.
      device: the device that runs it; None for the current one.
    """
    if m not in (8, MAX_M):
        return f"needs M = 8 or {MAX_M}; got M = {m}"
    if any(size % TILE for size in sizes):
        return f"needs parts of whole tiles of 64 rows; got N = {tuple(sizes)}"
    if layout.whole(k) > MAX_K:
        return f"needs K of {MAX_K} at most; got K = {k}"
    config = config or pick_config(m, sizes, k, rank=rank, device=device)
    if config is None:
        return f"has no configuration for [{m}, {k}] x [{sum(sizes)}, {k}] with LoRA of rank {rank}"
    return _misfit(m, sizes, k, config, rank=rank, device=device)


def _misfit(
    m: int, sizes: Sequence[int], k: int, config: Config, *, rank: int, device: Device | None
) -> str | None:
    if layout.whole(k) % config.step:
        return f"needs K of whole steps of {config.step}; got K = {k}"
    # A slot is filled again while the next unit is multiplied.
    if config.stages < 2 and layout.whole(k) // config.step > config.warpgroups:
        return f"needs 2 slots for each warpgroup; got {config.stages}"
    if rank and not config.shares:
        return "needs blocks for LoRA's A"
    if rank and not config.stages_of_a:
        return (
            f"needs slots of {PIECES_OF_A} tiles for LoRA's A; got {config.stages * config.chunks}"
        )
    blocks = layout.tiles(sum(sizes)) + tiles_of_a(sizes, rank) * config.shares
    processors = (device or runtime.device()).processors
    # Otherwise the last blocks would start when the first ones end.
    if blocks > processors:
        return f"needs {blocks} processors of {processors}"
    used = shared_bytes(m, config, rank=rank)
    if used > (most := most_shared_bytes(device)):
        return f"needs {used} bytes of shared memory of {most}"
    return None


def shared_bytes(m: int, config: Config, *, rank: int) -> int:
    """Bytes of shared memory that a block takes."""
    slots = config.warpgroups * config.stages * (config.step * m * 2 + config.chunks * _TILE_BYTES)
    sums = (config.warpgroups - 1) * m * TILE * 4
    of_branch = epilogue.shared_bytes(m, rank, is_swiglu=False) if rank else 0
    # B and U are not in windows of 8 rows here.
    of_branch += 2 * max(rank, TILE) * (m - 8) if rank else 0
    return slots + sums + of_branch + _REDUCTION_BYTES


def pick_config(
    m: int, sizes: Sequence[int], k: int, *, rank: int, device: Device | None = None
) -> Config | None:
    """The first of `candidates`; None if none fits."""
    return next(iter(candidates(m, sizes, k, rank=rank, device=device)), None)


def candidates(
    m: int, sizes: Sequence[int], k: int, *, rank: int, device: Device | None = None
) -> tuple[Config, ...]:
    """Configurations that fit a linear: those that have the most columns in flight first, then with large slots."""
    return _candidates(m, tuple(sizes), k, rank, device or runtime.device())


@functools.cache
def _candidates(
    m: int, sizes: tuple[int, ...], k: int, rank: int, card: Device
) -> tuple[Config, ...]:
    found, columns = [], layout.tiles(k)
    free = card.processors - layout.tiles(sum(sizes))
    for warpgroups, step in itertools.product((4, 2), (256, 128, 64)):
        each = -(-layout.whole(k) // step // warpgroups)
        # A warpgroup multiplies two tiles of A, whose copies arrive together.
        wanted = -(-columns // (2 * warpgroups))
        shares = max(0, min(free // tiles_of_a(sizes, rank), wanted)) if rank else 0
        least = -(-PIECES_OF_A * TILE // step) if rank else 1
        for stages in range(min(8, max(each, least)), 0, -1):
            config = Config(warpgroups, step, stages, shares)
            if _misfit(m, sizes, k, config, rank=rank, device=card) is None:
                in_flight = min(warpgroups * step * stages, layout.whole(k))
                found.append(((-warpgroups, -in_flight, -step), config))
                break
    return tuple(config for _, config in sorted(found, key=lambda choice: choice[0]))


@dataclasses.dataclass(frozen=True)
class Following:
    """A product of this kernel, described for the product before it; see `decode.Upcoming`.

    Attributes:
      words: words of its weight, int32 [N / 64, K / 64, 3, 192].
      config: its configuration.
    """

    words: jax.Array
    config: Config

    @property
    def blocks(self) -> int:
        """Number of warpgroups that multiply W, since each begins elsewhere."""
        return self.words.shape[0] * self.config.warpgroups

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the words that a warpgroup reads first, in tiles of 64 x 64."""
        return 1, self.config.chunks

    def first(self, reader: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Row and column where a warpgroup's first words begin, in tiles of 64 x 64."""
        groups, chunks = self.config.warpgroups, self.config.chunks
        tile, group = jax.lax.div(reader, groups), jax.lax.rem(reader, groups)
        return tile, first_unit(group, self.words.shape[1] // chunks, groups) * chunks


def first_unit(group: jax.Array, units: int, groups: int) -> jax.Array:
    """The first of `units` that one of `groups` warpgroups takes; it ends where the next one begins."""
    return jax.lax.div(group * units, groups)


def linear(
    x: jax.Array | Stream,
    w: HopperNVFP4,
    *,
    config: Config,
    divisor: jax.Array | None = None,
    bias: jax.Array | None = None,
    branch: Branch | None = None,
    eps: float | None = None,
    residual: tuple[Stream, jax.Array] | None = None,
    following: Upcoming | Following | None = None,
    counters: jax.Array | None = None,
    device: Device | None = None,
    interpret: bool = False,
) -> jax.Array | Stream:
    """y = x W^T + bias + LoRA's branches, with the norm before and the residual after; see `decode.linear`.

    Args:
      x: bfloat16 [M, K], or a residual stream, which is normalized first. K is plain or padded with zeros to whole
        tiles.
      w: [N, K].
      config: how to divide the product.
      divisor: w's global scale, float32 [N], or of any other size, whose first value is used for all; None for
        `w.global_scale`.
      bias: [N]; or None.
      branch: from `lora.pack_branch`; None without LoRA.
      eps: epsilon of the norm, if x is a stream.
      residual: a stream to which y is added, and the scale of the next norm, float32 [N]; or None.
      following: the next product, whose first words are prefetched.
      counters: zeros, int32 [2 or more]; the kernel sets them back to 0. Pass the same array for all layers to save a
        kernel per layer; None makes a new one.
      device: the device that runs it; None for the current one.
      interpret: run on a CPU, and report data races.

    Returns:
      bfloat16 [M, N], or the new stream.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    # Imported here because the import takes half a second.
    from pallas_kernels.finished_linear import epilogue_kernel, few_rows_kernel

    values = x.scaled if isinstance(x, Stream) else x
    (n, k), m, rank = w.shape, len(values), 0 if branch is None else branch.rank
    sizes = (n,) if branch is None else branch.sizes
    if reason := supports(m, sizes, k, config, rank=rank, device=device):
        raise NotImplementedError(reason)
    norm = (x, eps) if isinstance(x, Stream) else None
    values_of = None if residual is None else (residual[0].values, residual[1])
    sums = jax.ShapeDtypeStruct((config.warpgroups, *fragments.shape(n, m)), jnp.float32)
    tiles = layout.tiles(n)
    result = epilogue_kernel.Problem(
        mode="plain" if residual is None else "residual",
        sums=Sums(sums, Plan(tiles, 1, tiles), TILE, None),
        columns=m,
        branch=branch,
        norm=norm,
        square_rows=epilogue.square_rows(n),
        interpret=interpret,
    )
    divisor = w.global_scale if divisor is None else divisor
    around = epilogue.operands_around(
        n, divisor, bias=bias, branch=branch, norm=norm, residual=values_of
    )
    operands = {
        "x": jnp.pad(values, ((0, 0), (0, layout.whole(k) - values.shape[1]))),
        "w": w.words,
        "a": None if branch is None else branch.a.reshape(-1, *layout.TILE_SHAPE),
        "counters": jnp.zeros((2,), jnp.int32) if counters is None else counters,
        **around,
    }
    problem = few_rows_kernel.Problem(config, result, tiles_of_a(sizes, rank), following)
    found = few_rows_kernel.launch(operands, problem, name=f"nvfp4_few_rows_sm90_{n}x{k}")
    return found[0] if residual is None else Stream(*found, len(residual[1]))
