"""The kernel of `clustered`: each phase is a method of a block's work as one of its warpgroups sees it."""

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.finished_linear import epilogue_kernel
from pallas_kernels.mosaic import clusters, collectives, fragments
from pallas_kernels.mosaic import launch as mosaic
from pallas_kernels.mosaic.ring import Ring
from pallas_kernels.nvfp4_matmul import decode_kernel, dense_tile, packed_tile
from pallas_kernels.nvfp4_matmul.layout import TILE

# Indices in `counters`: the number of finished parts of x A, and the number of warpgroups that have seen all of them.
_READY, _READERS = 6, 7


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static description of a problem.

    Attributes:
      product: which block multiplies what; blocks of one tile of W are neighbours and form a cluster.
      result: the operations after the product, for one window of the rows of x.
      cluster: number of blocks in a cluster.
    """

    product: decode_kernel.Problem
    result: epilogue_kernel.Problem
    cluster: int

    @property
    def interpret(self) -> bool:
        """Whether this runs on a CPU."""
        return self.product.interpret

    @property
    def reuses_slots(self) -> bool:
        """Whether sums arrive in the memory of the slots; not if interpreted, since then nothing is sent."""
        return self.product.config.reuses_slots and not self.interpret

    @property
    def warpgroups(self) -> int:
        """Number of warpgroups of a block."""
        return self.product.config.warpgroups

    @property
    def windows(self) -> int:
        """Number of windows of the rows of x. A warpgroup finishes one window of one tile of 64 columns."""
        return self.result.sums.size[2] // self.result.columns

    @property
    def blocks_of_a(self) -> int:
        """Number of blocks that multiply x by A."""
        a = self.product.a
        return a.tiles * a.shares if a else 0

    @property
    def clusters_of_a(self) -> int:
        """Number of clusters of these blocks; the last one may have idle blocks."""
        return -(-self.blocks_of_a // self.cluster)


def launch(
    operands: Mapping[str, jax.Array | None], problem: Problem, *, name: str
) -> list[jax.Array]:
    """Starts the kernel.

    Args:
      operands: `x` bfloat16 [M, K], `w` int32 [N / 64, K / 64, 3, 192], `a` from `dense_tile.in_units` or None,
        `counters` int32 [clustered.COUNTERS], zeros, and what `epilogue.operands_around` returns.
      problem: the description of the problem.
      name: the kernel's name.

    Returns:
      As `epilogue_kernel.launch`.
    """
    run = functools.partial(_launch, problem=problem, name=name)
    if problem.interpret and problem.product.a is not None:
        # Interpreted clusters cannot signal to each other, so A and W take a launch each.
        u = run({**operands, "w": None}, clusters_of_a=problem.clusters_of_a)["xa"]
        operands = {**operands, "a": None, "u": u}
        found = run(operands, clusters_of_a=0)
    else:
        found = run(operands, clusters_of_a=problem.clusters_of_a)
    return [found[key] for key in ("stream", "out", "new_squares") if key in found]


def _launch(
    operands: Mapping[str, jax.Array | None], *, problem: Problem, clusters_of_a: int, name: str
) -> dict[str, jax.Array]:
    product, result, m = problem.product, problem.result, len(operands["x"])
    has_w, signals = operands["w"] is not None, clusters_of_a > 0 and not problem.interpret
    counters = operands["counters"] if signals else None
    exchanged = (result.tiles, problem.cluster, *fragments.shape(TILE, m)[1:])
    following, a = product.following and product.following.words, product.a
    of_a = (a.shares, *fragments.shape(a.tiles * TILE, m)) if a else ()
    return mosaic.launch(
        functools.partial(_kernel, problem=problem, clusters_of_a=clusters_of_a),
        {"u": None, **operands, "counters": counters, "following": following},
        {
            **(epilogue_kernel.results(result, m) if has_w else {"out": None}),
            "xa": jax.ShapeDtypeStruct(of_a, jnp.float32) if clusters_of_a else None,
            # The interpreter does not know other blocks' shared memory.
            "exchange": jax.ShapeDtypeStruct(exchanged, jnp.float32)
            if has_w and problem.interpret
            else None,
        },
        _scratch(problem, m),
        name=name,
        interpret=problem.interpret,
        grid=(clusters_of_a + (product.plan.tiles if has_w else 0),),
        grid_names=("cluster",),
        cluster=(problem.cluster,),
        cluster_names=("rank",),
        num_threads=problem.warpgroups,
        thread_name="warpgroup",
    )


def _scratch(problem: Problem, m: int) -> dict[str, Any]:
    """Shared memory of a block; see `clustered.shared_bytes`."""
    result, groups, interpret = problem.result, problem.warpgroups, problem.interpret
    columns, ranks = result.columns, result.ranks
    received = (problem.cluster, groups, *fragments.shape(TILE, columns)[1:])
    received, slots = plgpu.SMEM(received, jnp.float32), decode_kernel.slots(problem.product, m)
    if problem.reuses_slots:
        x_slots = slots["x_slots"]
        kinds = x_slots.refs if isinstance(x_slots, plgpu.RefUnion) else (x_slots,)
        slots["x_slots"] = plgpu.RefUnion(*kinds, received)

    def in_tiles(*shape: int) -> plgpu.SMEM:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=mosaic.SWIZZLED)

    return {
        **slots,
        "received": None if interpret or problem.reuses_slots else received,
        "landed": None if interpret else plgpu.SMEM((groups, clusters.BARRIER_WORDS), jnp.int32),
        "sent": plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=groups)
        if interpret
        else None,
        "added": plgpu.SMEM((groups, 2, collectives.SCRATCH), jnp.float32),
        "b_tiles": in_tiles(groups, 1, TILE, ranks) if ranks else None,
        "u_tiles": in_tiles(groups, 1, columns, ranks) if ranks else None,
        "has_b": plgpu.Barrier(num_barriers=groups) if ranks else None,
    }


def _kernel(refs: types.SimpleNamespace, *, problem: Problem, clusters_of_a: int) -> None:
    number, rank = lax.axis_index("cluster"), lax.axis_index("rank")
    group, size, plan = lax.axis_index("warpgroup"), problem.cluster, problem.product.plan
    if problem.reuses_slots:
        kinds = refs.x_slots
        of_x = (kinds[0], kinds[1]) if problem.product.a else kinds[0]
        received = kinds[2 if problem.product.a else 1]
        refs = types.SimpleNamespace(**{**vars(refs), "x_slots": of_x, "received": received})
    of_a = number * size + rank

    def multiply_a() -> None:
        block = _BlockOfA(problem.product, refs, plan.blocks + of_a, group)
        pl.when(of_a < problem.blocks_of_a)(block.multiply_a)

    def multiply_w() -> None:
        of_w = (number - clusters_of_a) * size + rank
        _BlockOfW(problem.product, refs, of_w, group, problem, rank).run()

    if refs.w is None:
        multiply_a()
    elif not clusters_of_a:
        multiply_w()
    else:
        pl.when(number < clusters_of_a)(multiply_a)
        pl.when(number >= clusters_of_a)(multiply_w)


class _BlockOfA(decode_kernel.Block):
    """A block that multiplies x by its share of A, and signals when that is in device memory.

    Warpgroups take windows of the rows of x, not different columns: so a block stores one part of x A.
    """

    def multiply_a(self) -> None:
        """Multiplies a block's share of a tile of A."""
        a, refs = self.problem.a, self.refs
        number, windows = (
            self.number - self.problem.plan.blocks,
            _windows_of_a(self.problem, self.rows),
        )
        tile, share = lax.div(number, a.shares), lax.rem(number, a.shares)
        start, stop = (lax.div((share + i) * a.units, a.shares) for i in range(2))
        copy = functools.partial(self._copy_unit_of_a, tile)
        ring = Ring(self.problem.config.stages, copy, refs.full, refs.empty, start, stop)
        pl.when(self.group == 0)(ring.fill)
        # With fewer windows than warpgroups some compute the same, and only the first store it.
        mine, size = lax.rem(self.group, windows), self.rows // windows
        window = pl.ds(mine * size, size)

        def sum_over_columns(acc):
            pl.loop(start, stop)(lambda unit: self._multiply_window(ring, unit, window, acc))
            return acc[...]

        total = pl.run_scoped(sum_over_columns, plgpu.ACC((TILE, size), jnp.float32))

        @pl.when(self.group < windows)
        def _():
            pieces = pl.ds(mine * (size // fragments.COLUMNS), size // fragments.COLUMNS)
            self._store(total, refs.xa.at[share, tile, pieces])
            if not self.problem.interpret:
                collectives.publish(refs.counters.at[_READY])

    def _multiply_window(self, ring: Ring, unit: jax.Array, window: pl.Slice, acc: jax.Ref) -> None:
        """Adds the product of a unit of A and a window of the rows of x, and has the slot refilled."""
        slot, each = ring.slot(unit), self.problem.a.pieces
        ring.wait(slot)
        for tile in range(self.problem.a.width // TILE):
            places = [divmod(4 * tile + i, each) for i in range(4)]
            words = [self.refs.w_slots.at[slot, group, at] for group, at in places]
            if self.problem.interpret:
                of_a = self._in_memory(dense_tile.unpack_tile([ref[...] for ref in words]))
            else:
                of_a = packed_tile.load_plain(*words)
            x = self._x_slots_of_a.at[slot, window, pl.ds(tile * TILE, TILE)]
            plgpu.wgmma(acc, of_a, x.T)
            plgpu.wgmma_wait(0)

        @pl.when(unit + ring.stages < ring.end)
        def _refill():
            ring.leave(slot)
            pl.when(self.group == 0)(lambda: ring.refill(slot, unit + ring.stages))


def _windows_of_a(product: decode_kernel.Problem, m: int) -> int:
    """Number of windows of M rows of x that the warpgroups of a block of A multiply."""
    return max(w for w in range(1, product.config.warpgroups + 1) if m // 8 % w == 0)


@dataclasses.dataclass(frozen=True)
class _BlockOfW(decode_kernel.Block):
    """A block that multiplies x by its part of K of a tile of W, and finishes a window of the rows of x.

    Attributes:
      whole: the description of the problem.
      rank: the block's number in its cluster.
    """

    whole: Problem
    rank: jax.Array

    def run(self) -> None:
        """Multiplies; `keep` does the rest."""
        if not self.whole.interpret:
            clusters.prepare(self.refs.landed)
            if not self.whole.reuses_slots:
                clusters.arrive()
        if self.whole.result.ranks:
            pl.when(self._finishes)(self._tile.ask_for_b)
        self.multiply_w()

    @property
    def _window(self) -> jax.Array:
        """The window that this warpgroup finishes; none if this is not less than the number of windows."""
        whole = self.whole
        places = (
            whole.warpgroups * whole.cluster - self.group
        )  # is congruent to -group, and not negative
        return lax.rem(self.rank + places * whole.windows, whole.cluster)

    @property
    def _finishes(self) -> jax.Array:
        return self._window < self.whole.windows

    def _receiver(self, window: int) -> jax.Array:
        """The block that finishes a window of this warpgroup's tile.

        With fewer windows than blocks, other blocks finish other tiles.
        """
        return lax.rem(window + self.group * self.whole.windows, self.whole.cluster)

    @functools.cached_property
    def _tile(self) -> "_Tile":
        whole, refs, group = self.whole, self.refs, self.group
        tile = lax.div(self.number, whole.cluster) * whole.warpgroups + group
        columns, window = whole.result.columns, lax.min(self._window, whole.windows - 1)
        rows, pieces = (
            pl.ds(window * size, size) for size in (columns, columns // fragments.COLUMNS)
        )
        has_branch = whole.result.ranks > 0
        of_tile = types.SimpleNamespace(
            **{
                **vars(refs),
                "u": refs.u if refs.xa is None else refs.xa,
                "b_tiles": refs.b_tiles.at[group] if has_branch else None,
                "u_tiles": refs.u_tiles.at[group] if has_branch else None,
            }
        )
        of_w = [pl.ds(tile * TILE, TILE)]
        return _Tile(whole.result, of_tile, tile, rows, pieces, of_w, whole, group)

    def keep(self, total: jax.Array, tile: jax.Array) -> None:
        """Sends the sums to the blocks that finish them, and finishes a window."""
        whole, refs, columns = self.whole, self.refs, self.whole.result.columns
        if whole.interpret:
            row_tile = tile * whole.warpgroups + self.group
            fragments.store(total, refs.exchange.at[row_tile, self.rank], interpret=True)
            plgpu.barrier_arrive(refs.sent.at[self.group])
            plgpu.barrier_wait(refs.sent.at[self.group])
        else:
            if whole.reuses_slots:
                clusters.arrive()
            clusters.await_all()
            landed, received = refs.landed.at[self.group], refs.received.at[self.rank, self.group]
            for window in range(whole.windows):
                first = window * columns
                part = total if whole.windows == 1 else total[:, first : first + columns]
                clusters.send(part, received, landed, self._receiver(window))
        pl.when(self._finishes)(self._tile.run)


@dataclasses.dataclass(frozen=True)
class _Tile(epilogue_kernel.Tile):
    """A window of the rows of x, of a tile of 64 columns, whose sums arrive from all blocks of the cluster.

    Attributes:
      whole: the description of the problem.
      group: the warpgroup's number in the block.
    """

    whole: Problem
    group: jax.Array

    def run(self) -> None:
        """Reads what is there, waits for x A and the sums, computes, and writes."""
        around = self.load_around()
        if self.refs.counters is not None:
            self._await_u()
        self.put_u(self.load_us())
        if not self.whole.interpret:
            count = self.whole.cluster * TILE * self.problem.columns * 4
            clusters.await_sent(self.refs.landed.at[self.group], count)
        self.finish(self.load_parts(), around)

    def _await_u(self) -> None:
        """Waits until all parts of x A are in device memory."""
        counters = self.refs.counters
        parts = self.whole.blocks_of_a * _windows_of_a(self.whole.product, self.refs.x.shape[0])
        readers = self.problem.tiles * self.whole.windows
        collectives.await_published(counters.at[_READY], counters.at[_READERS], parts, readers)

    def arrived(self, half: int) -> jax.Ref:
        """The barrier of B; there is one half."""
        return self.refs.has_b.at[self.group]

    def load_parts(self) -> list[list[jax.Array]]:
        """Loads the sums of all blocks, in the order of K."""
        interpret = self.whole.interpret
        if interpret:
            parts = [self.refs.exchange.at[self.tile, i, self.pieces] for i in self._blocks]
        else:
            parts = [self.refs.received.at[i, self.group] for i in self._blocks]
        return [[fragments.load(part, interpret=interpret) for part in parts]]

    @property
    def _blocks(self) -> range:
        return range(self.whole.cluster)

    def sum_rows(self, values: jax.Array, use: int) -> jax.Array:
        """The sum of [64, columns] over its rows."""
        scratch = self.refs.added.at[self.group, use]
        return collectives.sum_rows(values, scratch, interpret=self.whole.interpret)
