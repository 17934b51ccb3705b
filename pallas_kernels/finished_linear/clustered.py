"""qkv, o or down of a decoding step in one kernel, whose sums along K are exchanged inside clusters of blocks.

The blocks of a cluster share a tile of W's rows, and each multiplies its part of K. Each sends its sums to the blocks
that finish them, by distributed shared memory. These add them up in the order of K, and apply what `epilogue` applies:
norm, LoRA's B, bias and residual. `decode` with `epilogue` writes all sums to device memory in float32 and reads them
again in a second kernel.

    block of W   wait full | decode, wgmma | ... | send sums | wait for U and for the sums of the others | finish, store
    block of A   wait full | wgmma | ... | store its part of U, signal              U = x A

What is finished is divided by rows of x: each block of a cluster takes a window of them, and each of its warpgroups takes
the same 64 columns as in the product. With fewer windows than blocks, each block takes only some of the columns.

The first clusters of the grid multiply x by A. They store float32 parts of U in device memory and signal that; blocks
of W wait for the signal at their end. There is no deadlock: blocks of A wait for no others.

Every row of x is summed in the same order, whatever the other rows are. The order is that of `decode` with a
configuration of `cluster` blocks for each tile, so the results of both are the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from pallas_kernels.finished_linear import epilogue
from pallas_kernels.finished_linear.epilogue import Stream
from pallas_kernels.finished_linear.gated import COUNTERS
from pallas_kernels.finished_linear.lora import Branch
from pallas_kernels.nvfp4_matmul import config as configs
from pallas_kernels.nvfp4_matmul import dense_tile, layout
from pallas_kernels.nvfp4_matmul.config import MAX_M, most_shared_bytes
from pallas_kernels.nvfp4_matmul.decode import Beside, Plan, Sums, Upcoming
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4
from pallas_kernels.runtime import Device

# The most blocks of a cluster that every Hopper card supports.
MOST_BLOCKS = 8
# The most parts of a tile of U: a warpgroup that finishes a window reads all of them.
_MOST_SHARES = 16
# Multiprocessors of a graphics processing cluster (GPC), whose multiprocessors a cluster's blocks must share. Cards
# leave out some, and JAX does not report how many: this assumes as few as possible in each.
_OF_GPC = 16
# Bytes in which a warpgroup adds up rows, for the norm before and for the next one; see `collectives.sum_rows`.
_ADDED_BYTES = 2 * 512 * 4
# Bytes that a processor's share of the memory's bandwidth brings while a warpgroup decodes and multiplies one tile of
# 64 x 64: 290 cycles, measured on an H200 with three blocks on a processor (lab notes, "Inside a product").
_BYTES_OF_TILE = 4800
# Arrays in shared memory begin at multiples of this.
_ALIGNMENT = 1024


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is divided among blocks.

    Attributes:
      warpgroups: warpgroups per block, each with 64 rows of W; 1 to 4.
      step: columns of x and W per slot; 64, 128 or 256.
      stages: number of slots in shared memory; 2 or more.
      cluster: blocks that share K; 2 to 8.
      shares: blocks that share each tile of 64 ranks of LoRA's A; used only with a branch.
      reuses_slots: whether sums arrive in the memory of the slots. Then there is room for more slots, but no block may
        send before all blocks of its cluster have multiplied everything.
    """

    warpgroups: int
    step: int
    stages: int
    cluster: int
    shares: int = 1
    reuses_slots: bool = False

    def __post_init__(self):
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups must be 1 to 4; got {self.warpgroups}")
        if self.step not in (64, 128, 256):
            raise ValueError(f"step must be 64, 128 or 256; got {self.step}")
        if self.stages < 2:
            raise ValueError(f"stages must be 2 or more; got {self.stages}")
        if not 2 <= self.cluster <= MOST_BLOCKS:
            raise ValueError(f"cluster must be 2 to {MOST_BLOCKS}; got {self.cluster}")
        if self.shares < 1:
            raise ValueError(f"shares must be 1 or more; got {self.shares}")


def columns(m: int, cluster: int) -> int:
    """Rows of x in a window: M in the most equal windows of whole eights that have a block each."""
    return m // max(count for count in range(1, cluster + 1) if m // 8 % count == 0)


def plan(n: int, k: int, config: Config) -> Plan:
    """Which block multiplies which part of W [n, k]."""
    tiles = layout.tiles(n) // config.warpgroups
    return Plan(tiles, layout.whole(k) // config.step, tiles * config.cluster)


def supports(
    m: int,
    sizes: Sequence[int],
    k: int,
    config: Config | None = None,
    *,
    rank: int = 0,
    device: Device | None = None,
) -> str | None:
    """Why this kernel cannot run a problem, or None.

    Args:
      m: rows of x.
      sizes: rows of W of each joined linear.
      k: columns of x and W.
      config: None for that of `pick_config`.
      rank: padded rank of one part of LoRA's branch (`lora.filled_rank`); 0 without LoRA.
      device: the device that runs it; None for the current one.
    """
    if not 1 <= m <= MAX_M or m % 8:
        return f"needs M a multiple of 8 up to {MAX_M}; got M = {m}"
    if any(size % TILE for size in sizes[:-1]):
        return f"needs parts of whole tiles of 64 rows, except the last; got {tuple(sizes)}"
    config = config or pick_config(m, sizes, k, rank=rank, device=device)
    if config is None:
        return f"has no configuration for [{m}, {k}] x [{sum(sizes)}, {k}]"
    return _misfit(m, sum(sizes), k, config, rank=rank, device=device)


def _misfit(
    m: int, n: int, k: int, config: Config, *, rank: int, device: Device | None
) -> str | None:
    if layout.tiles(n) % config.warpgroups:
        return f"needs N of whole {TILE * config.warpgroups}-row tiles; got N = {n}"
    if layout.whole(k) % config.step:
        return f"needs K of whole steps of {config.step}; got K = {k}"
    if (steps := layout.whole(k) // config.step) < config.cluster:
        return f"has {steps} steps along K for {config.cluster} blocks"
    if rank and (reason := dense_tile.supports(k, config.warpgroups, config.step)):
        return reason
    if rank and config.shares > (units := _units_of_a(k, config)):
        return f"has {units} units of A for {config.shares} blocks"
    used = shared_bytes(m, k, config, rank=rank)
    if used > (most := most_shared_bytes(device)):
        return f"needs {used} bytes of shared memory of {most}"
    return None


def _units_of_a(k: int, config: Config) -> int:
    return layout.whole(k) // dense_tile.width(k, config.warpgroups, config.step)


def shared_bytes(m: int, k: int, config: Config, *, rank: int) -> int:
    """Bytes of shared memory that a block takes; `rank` as in `supports`."""
    window, groups, ranks = columns(m, config.cluster), config.warpgroups, max(rank, TILE)
    as_product = configs.Config(groups, config.step, config.stages, 1)
    adapter_k, received = (k if rank else None), config.cluster * groups * TILE * window * 4
    columns_of_slot = config.step
    if rank:
        columns_of_slot = max(config.step, dense_tile.width(k, groups, config.step))
    x_slots = config.stages * columns_of_slot * m * 2
    slots = configs.shared_bytes(m, as_product, adapter_k=adapter_k)
    arrays = [slots - x_slots, x_slots, received, groups * _ADDED_BYTES, _ALIGNMENT]
    if config.reuses_slots:
        arrays[1:3] = [max(x_slots, received)]
    if rank:
        arrays += [groups * TILE * ranks * 2, groups * window * ranks * 2]
    return sum(size + -size % _ALIGNMENT for size in arrays)


def clusters(n: int, config: Config, *, ranks: int) -> int:
    """Number of clusters in the grid; `ranks` are those of all parts of LoRA's branch together."""
    of_a = -(-layout.tiles(ranks) * config.shares // config.cluster)
    return layout.tiles(n) // config.warpgroups + of_a


def resident(m: int, k: int, config: Config, *, rank: int, device: Device | None = None) -> int:
    """Number of clusters that run at the same time.

    The blocks of a cluster run on one GPC. An H200 is counted as six GPCs of 16 processors and two of 18; then 66
    clusters of 2 blocks run at once, 42 of 3, 32 of 4, 18 of 6 or 16 of 8, if a processor has room for one block.
    """
    card = device or runtime.device()
    # The card reserves 1 KiB of a multiprocessor's shared memory for each block, and barriers take some.
    used = shared_bytes(m, k, config, rank=rank) + 2048
    registers = 128 if m <= 32 else 256  # of a thread, rounded up; seen in compiled kernels
    each = min(
        (card.shared_bytes + 1024) // used, (1 << 16) // (128 * config.warpgroups * registers)
    )
    each = max(1, each)
    gpcs = max(1, card.processors // _OF_GPC)
    more = (card.processors - gpcs * _OF_GPC) // 2
    sizes = [_OF_GPC + 2 * (more // gpcs + (gpc < more % gpcs)) for gpc in range(gpcs)]
    return sum(size * each // config.cluster for size in sizes)


def pick_config(
    m: int, sizes: Sequence[int], k: int, *, rank: int = 0, device: Device | None = None
) -> Config | None:
    """The configuration for a problem: the first of `candidates`; None if none fits."""
    return next(iter(candidates(m, sizes, k, rank=rank, device=device)), None)


def candidates(
    m: int, sizes: Sequence[int], k: int, *, rank: int = 0, device: Device | None = None
) -> tuple[Config, ...]:
    """Configurations that fit a problem, the fastest first, as estimated from bytes.

    Args:
      m: rows of x.
      sizes: rows of W of each joined linear.
      k: columns of x and W.
      rank: padded rank of one part of LoRA's branch; 0 without LoRA.
      device: the device that runs it; None for the current one.
    """
    return _candidates(m, tuple(sizes), k, rank, device or runtime.device())


@functools.cache
def _candidates(
    m: int, sizes: tuple[int, ...], k: int, rank: int, card: Device
) -> tuple[Config, ...]:
    n, found = sum(sizes), []
    ranks = layout.whole(rank * len(sizes))
    for groups, step, cluster in itertools.product((1, 2, 3, 4), (64, 128, 256), range(2, 9)):
        # A slot for W should be large enough for whole tiles of A.
        if layout.tiles(n) % groups or (rank and not dense_tile.is_as_wide(groups, step)):
            continue
        start = Config(groups, step, 2, cluster)
        if rank and dense_tile.supports(k, groups, step) is None:
            start = dataclasses.replace(start, shares=_shares(k, ranks, start))
        steps = -(-(layout.whole(k) // step) // cluster)
        deepest = 0
        for reuses in (False, True):
            asked = dataclasses.replace(start, reuses_slots=reuses)
            config = _deepest(m, sizes, k, asked, steps, rank, card)
            # Where reusing memory gains no slots, it only makes blocks wait for each other.
            if config is None or config.stages <= deepest:
                continue
            deepest = config.stages
            # 512 columns on their way are enough, if they are in three slots or more.
            depth = min(step * (deepest if deepest > 2 else 1), 512, steps * step)
            fits = clusters(n, config, ranks=ranks) <= resident(
                m, k, config, rank=rank, device=card
            )
            cost = _cost(m, n, k, config, ranks, card)
            found.append(((not fits, cost, -depth, reuses, -step), config))
    ordered = [config for _, config in sorted(found, key=lambda choice: choice[0])]
    # The best of each size of blocks and clusters comes first, so that the first few differ.
    firsts = {(config.warpgroups, config.cluster): config for config in reversed(ordered)}
    return tuple(sorted(ordered, key=lambda config: config not in firsts.values()))


def _deepest(
    m: int, sizes: tuple[int, ...], k: int, config: Config, steps: int, rank: int, card: Device
) -> Config | None:
    """A configuration with the most slots with which all clusters run at once, or with two; None if that is too many."""
    n, ranks = sum(sizes), layout.whole(rank * len(sizes))
    for stages in (*range(min(8, max(2, steps)), 2, -1), 2):
        config = dataclasses.replace(config, stages=stages)
        if _misfit(m, n, k, config, rank=rank, device=card) is not None:
            continue
        grid = clusters(n, config, ranks=ranks)
        if stages == 2 or grid <= resident(m, k, config, rank=rank, device=card):
            return config
    return None


def _shares(k: int, ranks: int, config: Config) -> int:
    """Blocks that share each tile of A: each loads about as many bytes of A as a block of W loads of W."""
    # A tile of A has as many bytes as four tiles of W.
    shares = min(-(-4 * config.cluster // config.warpgroups), _MOST_SHARES, _units_of_a(k, config))
    whole = config.cluster // math.gcd(config.cluster, ranks // TILE)
    return shares - shares % whole or shares


def _cost(m: int, n: int, k: int, config: Config, ranks: int, card: Device) -> float:
    """Bytes that the busiest processor moves, or could move while a warpgroup multiplies its tiles if that is more.

    A byte that a processor sends to another one counts twice, which was not measured.
    """
    blocks, part = (
        clusters(n, config, ranks=ranks) * config.cluster,
        layout.whole(k) / config.cluster,
    )
    window = columns(m, config.cluster)
    rows = config.warpgroups * TILE
    moved = part * (rows * 9 / 16 + 2 * m)
    moved += 2 * rows * m * 4 * (config.cluster - 1) / config.cluster
    moved += rows * window * 4 * config.shares if ranks else 0
    return max(-(-blocks // card.processors) * moved, part / TILE * _BYTES_OF_TILE)


def upcoming(w: HopperNVFP4, config: Config) -> Upcoming:
    """Describes this product for the one before it."""
    return Upcoming(w.words, config, plan(*w.shape, config))


def linear(
    x: jax.Array | Stream,
    w: HopperNVFP4,
    divisor: jax.Array,
    *,
    config: Config,
    bias: jax.Array | None = None,
    branch: Branch | None = None,
    eps: float | None = None,
    residual: tuple[Stream, jax.Array] | None = None,
    following: Upcoming | None = None,
    counters: jax.Array | None = None,
    device: Device | None = None,
    interpret: bool = False,
) -> jax.Array | Stream:
    """y = x W^T + bias + LoRA's branches, with the norm before and the residual after; see `decode.linear`.

    Args:
      x: bfloat16 [M, K], or a residual stream, which is normalized first. M is a multiple of 8; K is plain or padded
        with zeros to whole tiles.
      w: one [N, K] weight.
      divisor: w's global scale, float32 [N] padded to whole tiles; or of any other size, whose first value is used for
        all.
      config: see `pick_config`.
      bias: [N], padded to whole tiles.
      branch: from `lora.pack_branch`; None without LoRA.
      eps: epsilon of the norm, if x is a stream.
      residual: a stream to which y is added, and the scale of the next norm, float32 [N].
      following: the next product, whose first words are prefetched.
      counters: zeros, int32 [gated.COUNTERS]; the kernel sets them back to 0. None makes a new one.
      device: the device that runs it; None for the current one.
      interpret: run on a CPU, and report data races.

    Returns:
      bfloat16 [M, N] with N padded to whole tiles; or the new stream.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    # Imported here because the import takes half a second.
    from pallas_kernels.finished_linear import clustered_kernel, epilogue_kernel
    from pallas_kernels.nvfp4_matmul import decode_kernel

    values = x.scaled if isinstance(x, Stream) else x
    (n, k), m, rank = w.shape, len(values), 0 if branch is None else branch.rank
    sizes = (n,) if branch is None else branch.sizes
    if reason := supports(m, sizes, k, config, rank=rank, device=device):
        raise NotImplementedError(reason)
    values = jnp.pad(values, ((0, 0), (0, layout.whole(k) - values.shape[1])))
    of_w, a, a_words = plan(n, k, config), None, None
    if branch is not None:
        a_words = dense_tile.in_units(branch.a, config.warpgroups, config.step)
        tiles, units, _, pieces = a_words.shape[:4]
        width = dense_tile.width(k, config.warpgroups, config.step)
        a = Beside(tiles, units, config.shares, width, pieces)
    norm = (x, eps) if isinstance(x, Stream) else None
    to = None if residual is None else (residual[0].values, residual[1])
    problem = clustered_kernel.Problem(
        product=decode_kernel.Problem(config, of_w, a, following, interpret),
        result=epilogue_kernel.Problem(
            mode="plain" if residual is None else "residual",
            sums=_sums(m, w, of_w, config),
            columns=columns(m, config.cluster),
            branch=branch,
            norm=norm,
            square_rows=epilogue.square_rows(layout.whole(n)),
            interpret=interpret,
        ),
        cluster=config.cluster,
    )
    counters = jnp.zeros((COUNTERS,), jnp.int32) if counters is None else counters
    around = epilogue.operands_around(
        layout.whole(n), divisor, bias=bias, branch=branch, norm=norm, residual=to
    )
    results = clustered_kernel.launch(
        {"x": values, "w": w.words, "a": a_words, "counters": counters, **around},
        problem,
        name=f"nvfp4_clustered_sm90_{layout.whole(n)}x{k}",
    )
    return results[0] if residual is None else Stream(*results, n)


def _sums(m: int, w: HopperNVFP4, of_w: Plan, config: Config) -> Sums:
    """The sums as the epilogue would see them: only their shape and plan are used."""
    from pallas_kernels.mosaic import fragments

    shape = (config.cluster, *fragments.shape(len(w.words) * TILE, m))
    return Sums(jax.ShapeDtypeStruct(shape, jnp.float32), of_w, TILE * config.warpgroups, None)
