"""The kernel of `last_adds`: each phase is a method of a block's work as one of its warpgroups sees it."""

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
from pallas_kernels.finished_linear.last_adds import TILE_COUNTERS
from pallas_kernels.mosaic import collectives, fragments
from pallas_kernels.mosaic import launch as mosaic
from pallas_kernels.nvfp4_matmul import decode_kernel
from pallas_kernels.nvfp4_matmul.layout import TILE

# Indices in `counters`: the number of stored sums of A, and the number of tiles that have seen all of them.
_READY, _READERS = 0, 1


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static description of a problem.

    Attributes:
      product: the product.
      result: the operations after the product.
    """

    product: decode_kernel.Problem
    result: epilogue_kernel.Problem

    @property
    def interpret(self) -> bool:
        """Whether this runs on a CPU."""
        return self.product.interpret


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
      around: what `epilogue.operands_around` returns, and `counters`, int32, zeros: TILE_COUNTERS and one for each 64
        rows of W.
      problem: the description of the problem.
      name: the kernel's name.

    Returns:
      As `epilogue_kernel.launch`.
    """
    product, m, interpret = problem.product, len(operands["x"]), problem.interpret
    run = functools.partial(mosaic.launch, name=name, interpret=interpret, waits=False)
    run = functools.partial(run, num_threads=product.config.warpgroups, thread_name="warpgroup")
    run = functools.partial(run, grid_names=("block",))
    operands = {**operands, "following": product.following and product.following.words}
    sums, of_block = decode_kernel.results(product, m), decode_kernel.scratch(product, m)
    finished, of_tile = epilogue_kernel.results(problem.result, m), _scratch(problem)
    kernel = functools.partial(_kernel, problem=problem)
    if interpret:
        # Interpreted blocks cannot count each other, so sums and result take a launch each.
        given = run(kernel, operands, sums, of_block, grid=(product.blocks,))
        given = {"sums": given["sums"], "xa": given.get("xa"), **around, "counters": None}
        kernel = functools.partial(_finish, problem=problem)
        found = run(kernel, given, finished, of_tile, grid=(product.plan.tiles,))
    else:
        scratch = {**of_block, **of_tile}
        found = run(
            kernel, {**operands, **around}, {**finished, **sums}, scratch, grid=(product.blocks,)
        )
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
        "arrived": plgpu.Barrier(num_barriers=(groups, 1)) if result.ranks else None,
        "added": plgpu.SMEM((groups, collectives.SCRATCH), jnp.float32) if adds_rows else None,
        "flags": plgpu.SMEM((groups,), jnp.int32),
    }


def _kernel(refs: types.SimpleNamespace, *, problem: Problem) -> None:
    # The first blocks of the grid multiply by A: they always run, and wait for nobody, so others may wait for them.
    product, first = problem.product, lax.axis_index("block")
    number = lax.rem(first + product.plan.blocks, product.blocks) if product.a else first
    _Block(product, refs, number, lax.axis_index("warpgroup"), problem.result).run()


def _finish(refs: types.SimpleNamespace, *, problem: Problem) -> None:
    tile, group = lax.axis_index("block"), lax.axis_index("warpgroup")
    block = _Block(problem.product, refs, tile, group, problem.result)
    block.finish(block.row_tile(tile))


@dataclasses.dataclass(frozen=True)
class _Block(decode_kernel.Block):
    """A block whose warpgroups finish the tiles to which they add the last part.

    Attributes:
      result: the operations after the product.
    """

    result: epilogue_kernel.Problem

    def leave_of_a(self, total: jax.Array, part: jax.Array, tile: jax.Array) -> None:
        """Stores this warpgroup's part of the sums of a tile of A, and signals."""
        super().leave_of_a(total, part, tile)
        if not self.problem.interpret:
            collectives.publish(self.refs.counters.at[_READY])

    def leave(self, total: jax.Array, tile: jax.Array) -> None:
        """Stores this warpgroup's part of the sums of a tile, and finishes the tile if it was the last part."""
        super().leave(total, tile)
        if self.problem.interpret:
            return
        plan, own = self.problem.plan, self.row_tile(tile)
        if plan.most_parts == 1:
            self.finish(own)
            return
        flag = self.refs.flags.at[pl.ds(self.group, 1)]
        counter = self.refs.counters.at[TILE_COUNTERS + own]
        collectives.count(counter, plan.parts(tile) - 1, flag)
        pl.when(self.refs.flags[self.group] != 0)(lambda: self.finish(own))

    def finish(self, row_tile: jax.Array) -> None:
        """Adds up the sums of 64 rows of W, and writes their results, `columns` rows of x at a time."""
        refs, result, size = self.refs, self.result, self.result.columns
        m = refs.sums.shape[2] * fragments.COLUMNS
        tile = functools.partial(self._tile, row_tile)
        if result.ranks:
            # All warps must have used the last tile's B.
            collectives.sync(interpret=result.interpret)
            tile(jnp.int32(0)).ask_for_b()
            self._await_a()
        if m == size:
            tile(jnp.int32(0)).run_but_for_b()
            return

        @pl.loop(0, m // size)
        def _(window):
            if result.ranks:
                # All warps must have used the last window's U.
                collectives.sync(interpret=result.interpret)
            tile(window).run_but_for_b()

    def _await_a(self) -> None:
        """Waits until all sums of A are stored."""
        if self.refs.counters is None:
            return
        a, plan, counters = self.problem.a, self.problem.plan, self.refs.counters
        readers = plan.tiles * self.problem.config.warpgroups
        published = a.tiles * a.parts
        collectives.await_published(counters.at[_READY], counters.at[_READERS], published, readers)

    def _tile(self, row_tile: jax.Array, window: jax.Array) -> "_Tile":
        refs = types.SimpleNamespace(**vars(self.refs))
        refs.partials, refs.u = refs.sums, refs.xa
        if self.result.ranks:
            refs.b_tiles, refs.u_tiles = (
                tiles.at[self.group] for tiles in (refs.b_tiles, refs.u_tiles)
            )
        size = self.result.columns
        rows, pieces = (pl.ds(window * each, each) for each in (size, size // fragments.COLUMNS))
        own = [pl.ds(row_tile * TILE, TILE)]
        return _Tile(self.result, refs, row_tile, rows, pieces, own, self.group, window)


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
        return self.refs.arrived.at[self.group, half]

    def await_b(self, half: int) -> None:
        """Waits until B has arrived; all windows of a tile use the same."""
        pl.when(self.number == 0)(lambda: super(_Tile, self).await_b(half))

    def sum_rows(self, values: jax.Array) -> jax.Array:
        """The sum over the 64 rows of values, in memory of this warpgroup's own."""
        scratch = self.refs.added.at[self.group]
        return collectives.sum_rows(values, scratch, interpret=self.problem.interpret)
