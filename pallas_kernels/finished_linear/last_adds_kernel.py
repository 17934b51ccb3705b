"""The kernel of `last_adds`: each phase is a method of a block's work as one of its warpgroups sees it."""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.finished_linear import epilogue_kernel
from pallas_kernels.finished_linear.last_adds import TILE_COUNTERS
from pallas_kernels.mosaic import collectives, fragments, registers, transposed
from pallas_kernels.mosaic import launch as mosaic
from pallas_kernels.nvfp4_matmul import decode_kernel
from pallas_kernels.nvfp4_matmul.layout import TILE

# Indices in `counters`: the number of tiles of x A that are added up, and the number of tiles of W that have seen all.
_READY, _READERS = 0, 1
# Barriers of a warpgroup.
_OF_B, _OF_U = 0, 1
# Flags of a warpgroup: whether it is the last one to store a part, and the value of `_READY` then.
_FLAGS = 2


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static description of a problem.

    Attributes:
      product: the product.
      result: the operations after the product.
      at_once: number of sums of A that are loaded together.
    """

    product: decode_kernel.Problem
    result: epilogue_kernel.Problem
    at_once: int

    @property
    def interpret(self) -> bool:
        """Whether this runs on a CPU."""
        return self.product.interpret

    @property
    def tiles_of_a(self) -> int:
        """Number of tiles of 64 ranks of A; 0 without A."""
        return self.product.a.tiles if self.product.a else 0


def launch(
    operands: Mapping[str, jax.Array | None],
    around: Mapping[str, jax.Array | None],
    problem: Problem,
    *,
    name: str,
) -> list[jax.Array]:
    """Starts the kernel.

    Args:
      operands: those of `decode_kernel.launch`.
      around: what `epilogue.operands_around` returns, and `counters`, int32 [`last_adds.counters_for`], zeros.
      problem: the description of the problem.
      name: the kernel's name.

    Returns:
      As `epilogue_kernel.launch`.
    """
    product, m, interpret = problem.product, len(operands["x"]), problem.interpret
    mesh = {"grid_names": ("block",), "thread_name": "warpgroup"}
    mesh |= {"num_threads": product.config.warpgroups}
    launch = functools.partial(mosaic.launch, name=name, interpret=interpret, waits=False, **mesh)
    operands = {**operands, "following": product.following and product.following.words}
    sums, of_block = decode_kernel.results(product, m), decode_kernel.scratch(product, m)
    finished, of_tile = epilogue_kernel.results(problem.result, m), _scratch(problem)
    size = (m, problem.tiles_of_a * TILE)
    u = {"u": jax.ShapeDtypeStruct(size, jnp.bfloat16) if product.a else None}

    def run(phase, *parts, blocks):
        return launch(functools.partial(phase, problem=problem), *parts, grid=(blocks,))

    if interpret:
        # Interpreted blocks cannot count each other, so the sums, x A and the result take a launch each.
        given = run(_run, operands, sums, of_block, blocks=product.blocks)
        of_a = run(_add_up_a, given, u, {}, blocks=problem.tiles_of_a) if product.a else {"u": None}
        found = run(
            _finish, {**given, **of_a, **around}, finished, of_tile, blocks=product.plan.tiles
        )
    else:
        parts = {**operands, **around}, {**finished, **u, **sums}, {**of_block, **of_tile}
        found = run(_run, *parts, blocks=product.blocks)
    return [found[key] for key in finished if key in found]


def _scratch(problem: Problem) -> dict[str, Any]:
    """What each warpgroup has for finishing a tile."""
    result, groups = problem.result, problem.product.config.warpgroups

    def in_tiles(rows: int) -> plgpu.SMEM:
        shape = (groups, 1, rows, result.ranks)
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=mosaic.SWIZZLED)

    adds_rows = result.norm is not None or result.mode == "residual"
    return {
        "b_tiles": in_tiles(TILE) if result.ranks else None,
        "u_tiles": in_tiles(result.columns) if result.ranks else None,
        "arrived": plgpu.Barrier(num_barriers=(groups, 2)) if result.ranks else None,
        "added": plgpu.SMEM((groups, collectives.SCRATCH), jnp.float32) if adds_rows else None,
        "flags": plgpu.SMEM((groups * _FLAGS,), jnp.int32),
    }


def _run(refs: types.SimpleNamespace, *, problem: Problem) -> None:
    # The first blocks of the grid multiply by A: they surely run, and wait for nobody, so others may wait for them.
    product, first = problem.product, lax.axis_index("block")
    number = lax.rem(first + product.plan.blocks, product.blocks) if product.a else first
    _block(refs, problem, number).run()


def _add_up_a(refs: types.SimpleNamespace, *, problem: Problem) -> None:
    block = _block(refs, problem, lax.axis_index("block"))
    pl.when(block.group == 0)(lambda: block.add_up_a(block.number))


def _finish(refs: types.SimpleNamespace, *, problem: Problem) -> None:
    block = _block(refs, problem, lax.axis_index("block"))
    block.finish(block.row_tile(block.number), jnp.int32(problem.tiles_of_a))


def _block(refs: types.SimpleNamespace, problem: Problem, number: jax.Array) -> "_Block":
    group = lax.axis_index("warpgroup")
    return _Block(problem.product, refs, number, group, problem.result, problem.at_once)


@dataclasses.dataclass(frozen=True)
class _Block(decode_kernel.Block):
    """A block whose warpgroups finish the tiles to which they add the last part.

    Attributes:
      result: the operations after the product.
      at_once: number of sums of A that are loaded together.
    """

    result: epilogue_kernel.Problem
    at_once: int

    def leave_of_a(self, total: jax.Array, part: jax.Array, tile: jax.Array) -> None:
        """Stores this warpgroup's part of the sums of a tile of A; whoever stores the last one adds them up."""
        super().leave_of_a(total, part, tile)
        if not self.problem.interpret:
            self._count(TILE_COUNTERS + tile, self.problem.a.parts, lambda: self.add_up_a(tile))

    def leave(self, total: jax.Array, tile: jax.Array) -> None:
        """Stores this warpgroup's part of the sums of a tile; whoever stores the last one finishes the tile."""
        super().leave(total, tile)
        if self.problem.interpret:
            return
        plan, own = self.problem.plan, self.row_tile(tile)
        if plan.most_parts == 1:
            self.finish(own, jnp.int32(0))
            return
        of_a = self.problem.a.tiles if self.problem.a else 0
        finish = lambda: self.finish(own, self.refs.flags[self.group * _FLAGS + 1])
        self._count(TILE_COUNTERS + of_a + own, plan.parts(tile), finish)

    def _count(self, counter: jax.Array, parts: jax.Array | int, then: Callable[[], None]) -> None:
        """Counts this warpgroup. If it is the last one of `parts`, it sees what all have stored, and goes on."""
        first = self.group * _FLAGS
        flags, watched = self.refs.flags.at[pl.ds(first, _FLAGS)], self.refs.counters.at[_READY]
        last = jnp.asarray(parts - 1, jnp.int32)
        collectives.count(self.refs.counters.at[counter], last, flags, watched)
        pl.when(self.refs.flags[first] != 0)(then)

    def add_up_a(self, tile: jax.Array) -> None:
        """Adds up the sums of a tile of A, and signals."""
        interpret = self.result.interpret

        def one_window(window: jax.Array) -> None:
            rows, pieces = self._window(window)
            own = lambda part: self.refs.xa.at[part, tile, pieces]
            load = lambda part: fragments.load(own(part), interpret=interpret)
            parts = self.refs.xa.shape[0]
            at_once = max(1, min(self.at_once, parts - 1))
            u = fragments.added_up(load, parts, at_once).astype(jnp.bfloat16)
            transposed.store(u, self.refs.u.at[rows, pl.ds(tile * TILE, TILE)], interpret=interpret)

        self._each_window(one_window)
        if not interpret:
            collectives.publish(self.refs.counters.at[_READY])

    def finish(self, row_tile: jax.Array, ready: jax.Array) -> None:
        """Adds up the sums of 64 rows of W, and writes their results.

        Args:
          row_tile: number of the 64 rows.
          ready: how many tiles of x A are known to be added up.
        """
        waits = self.result.ranks > 0 and not self.result.interpret
        # Otherwise addresses in memory of this warpgroup's own stay in registers while it multiplies.
        group = registers.opaque(self.group, interpret=self.result.interpret)
        tile = functools.partial(self._tile, row_tile, group)
        if self.result.ranks:
            # All warps must have used the last tile's B.
            collectives.sync(interpret=self.result.interpret)
            tile(jnp.int32(0)).ask_for_b()
        if waits:
            collectives.await_count(self.refs.counters.at[_READY], self.problem.a.tiles, ready)

        def one_window(window: jax.Array) -> None:
            if self.result.ranks and self._windows > 1:
                # All warps must have used the last window's U.
                collectives.sync(interpret=self.result.interpret)
            tile(window).run_but_for_b()

        self._each_window(one_window)
        if waits:
            # Not before, because the answer takes as long as reading the parts.
            readers = self.problem.plan.tiles * self.problem.config.warpgroups
            counters = (self.refs.counters.at[i] for i in (_READY, _READERS))
            collectives.count_reader(*counters, readers)

    @property
    def _windows(self) -> int:
        return self.refs.sums.shape[2] * fragments.COLUMNS // self.result.columns

    def _each_window(self, run: Callable[[jax.Array], None]) -> None:
        """Runs something for each `columns` rows of x."""
        if self._windows == 1:
            run(jnp.int32(0))
        else:
            pl.loop(0, self._windows)(run)

    def _window(self, window: jax.Array) -> tuple[pl.Slice, pl.Slice]:
        """The rows of x of a window, and the same counted in pieces of fragments."""
        size = self.result.columns
        return tuple(pl.ds(window * each, each) for each in (size, size // fragments.COLUMNS))

    def _tile(self, row_tile: jax.Array, group: jax.Array, window: jax.Array) -> "_Tile":
        refs = types.SimpleNamespace(**vars(self.refs))
        refs.partials = refs.sums
        if self.result.ranks:
            refs.b_tiles, refs.u_tiles = (tiles.at[group] for tiles in (refs.b_tiles, refs.u_tiles))
        own = [pl.ds(row_tile * TILE, TILE)]
        at = *self._window(window), own, group, window
        return _Tile(self.result, refs, row_tile, *at)


@dataclasses.dataclass(frozen=True)
class _Tile(epilogue_kernel.Tile):
    """A window of a tile of the result, which one of several warpgroups of a block finishes.

    Attributes:
      group: the warpgroup's number in the block.
      number: number of the window.
    """

    group: jax.Array
    number: jax.Array

    def arrived(self, half: int) -> jax.Ref:
        """The barrier at which B arrives."""
        del half
        return self.refs.arrived.at[self.group, _OF_B]

    def await_b(self, half: int) -> None:
        """Waits until B has arrived, which all windows of a tile use."""
        pl.when(self.number == 0)(lambda: super(_Tile, self).await_b(half))

    def load_us(self) -> list:
        """Starts the copy of x A, which is added up already, to shared memory."""
        if self.problem.ranks:
            first = self.problem.branch.first(self.tile * TILE)
            u = self.refs.u.at[self.window, pl.ds(first, self.problem.ranks)]
            plgpu.copy_gmem_to_smem(u, self.refs.u_tiles.at[0], self._u_arrived)
        return []

    def put_u(self, us: list) -> None:
        """Waits for the copy."""
        del us
        if self.problem.ranks:
            plgpu.barrier_wait(self._u_arrived)

    @property
    def _u_arrived(self) -> jax.Ref:
        return self.refs.arrived.at[self.group, _OF_U]

    def sum_rows(self, values: jax.Array) -> jax.Array:
        """The sum over the 64 rows of values, in memory of this warpgroup's own."""
        scratch = self.refs.added.at[self.group]
        return collectives.sum_rows(values, scratch, interpret=self.problem.interpret)
