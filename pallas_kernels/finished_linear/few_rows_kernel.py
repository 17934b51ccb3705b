"""The kernel of `few_rows`: each phase is a method of a block's work as one of its warpgroups sees it."""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.finished_linear import epilogue_kernel, few_rows
from pallas_kernels.finished_linear.few_rows import PIECES_OF_A, Config
from pallas_kernels.mosaic import collectives, fragments
from pallas_kernels.mosaic import launch as mosaic
from pallas_kernels.mosaic.ring import Ring
from pallas_kernels.nvfp4_matmul import dense_tile, layout, packed_tile
from pallas_kernels.nvfp4_matmul.decode import Upcoming
from pallas_kernels.nvfp4_matmul.decode_kernel import ask_for
from pallas_kernels.nvfp4_matmul.layout import TILE

# Indices in `counters`: the number of finished shares of A, and the number of blocks that have seen all of them.
_READY, _READERS = 0, 1


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static description of a problem.

    Attributes:
      config: how the work is divided.
      result: the operations after the product, for all rows of x.
      tiles_of_a: number of tiles of 64 ranks of A; 0 without A.
      following: the product whose first words are prefetched; or None.
    """

    config: Config
    result: epilogue_kernel.Problem
    tiles_of_a: int
    following: Upcoming | few_rows.Following | None

    @property
    def interpret(self) -> bool:
        """Whether this runs on a CPU."""
        return self.result.interpret

    @property
    def blocks_of_a(self) -> int:
        """Number of blocks that multiply x by A."""
        return self.tiles_of_a * self.config.shares


def launch(
    operands: Mapping[str, jax.Array | None], problem: Problem, *, name: str
) -> list[jax.Array]:
    """Starts the kernel.

    Args:
      operands: `x` bfloat16 [M, K], `w` int32 [N / 64, K / 64, 3, 192], `a` int32 [tiles * K / 16, 3, 192] or None,
        `counters` int32 [2 or more], zeros, and what `epilogue.operands_around` returns.
      problem: the description of the problem.
      name: the kernel's name.

    Returns:
      As `epilogue_kernel.launch`.
    """
    run = functools.partial(_launch, problem=problem, name=name)
    if problem.interpret and problem.tiles_of_a:
        # Interpreted blocks cannot signal to each other, so A and W take a launch each.
        u = run(operands, blocks_of_a=problem.blocks_of_a, blocks_of_w=0)["xa"]
        operands = {**operands, "a": None, "u": u}
        found = run(operands, blocks_of_a=0, blocks_of_w=problem.result.tiles)
    else:
        blocks = {"blocks_of_a": problem.blocks_of_a, "blocks_of_w": problem.result.tiles}
        found = run({**operands, "u": None}, **blocks)
    return [found[key] for key in ("stream", "out", "new_squares") if key in found]


def _launch(
    operands: Mapping[str, jax.Array | None],
    *,
    problem: Problem,
    blocks_of_a: int,
    blocks_of_w: int,
    name: str,
) -> dict[str, jax.Array]:
    config, result, m = problem.config, problem.result, len(operands["x"])
    groups, stages, interpret = config.warpgroups, config.stages, problem.interpret
    signals = blocks_of_a > 0 and not interpret
    shares = (config.shares, *fragments.shape(problem.tiles_of_a * TILE, m))

    def in_tiles(*shape: int) -> plgpu.SMEM:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=mosaic.SWIZZLED)

    x_slots = in_tiles(groups, stages, m, config.step)
    of_a = in_tiles(groups, config.stages_of_a, m, TILE) if problem.tiles_of_a else None
    in_union = of_a is not None and not interpret
    return mosaic.launch(
        functools.partial(_kernel, problem=problem, blocks_of_a=blocks_of_a),
        {
            "u": None,
            **operands,
            "counters": operands["counters"] if signals else None,
            "following": problem.following and problem.following.words,
        },
        {
            **(epilogue_kernel.results(result, m) if blocks_of_w else {"out": None}),
            "xa": jax.ShapeDtypeStruct(shares, jnp.float32) if blocks_of_a else None,
        },
        {
            # x for A uses the same memory. The interpreter does not know such unions, so it gets two arrays.
            "slots": plgpu.RefUnion(x_slots, of_a) if in_union else None,
            "x_slots": None if in_union else x_slots,
            "x_slots_of_a": None if in_union else of_a,
            "w_slots": plgpu.SMEM((groups, stages * config.chunks, *layout.TILE_SHAPE), jnp.int32),
            "sums": plgpu.SMEM((groups - 1, *fragments.shape(TILE, m)[1:]), jnp.float32),
            "b_tiles": in_tiles(1, TILE, result.ranks) if result.ranks else None,
            "u_tiles": in_tiles(1, m, result.ranks) if result.ranks else None,
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=(groups, stages)),
            "added": plgpu.Barrier(num_arrivals=groups - 1),
            "arrived": plgpu.Barrier(num_barriers=1) if result.ranks else None,
            "decoded": in_tiles(groups, TILE, TILE) if interpret else None,
        },
        name=name,
        interpret=interpret,
        grid=(blocks_of_a + blocks_of_w,),
        grid_names=("block",),
        num_threads=groups,
        thread_name="warpgroup",
    )


def _kernel(refs: types.SimpleNamespace, *, problem: Problem, blocks_of_a: int) -> None:
    number, group = lax.axis_index("block"), lax.axis_index("warpgroup")
    of_a = _BlockOfA(problem, refs, number, group)
    of_w = _BlockOfW(problem, refs, number - blocks_of_a, group)
    if refs.out is None:
        of_a.run()
    elif not blocks_of_a:
        of_w.run()
    else:
        pl.when(number < blocks_of_a)(of_a.run)
        pl.when(number >= blocks_of_a)(of_w.run)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block's work as one of its warpgroups sees it.

    Attributes:
      problem: the description of the problem.
      refs: operands, results and scratch of `launch`.
      number: the block's number among the blocks of its kind.
      group: the warpgroup's number in the block.
    """

    problem: Problem
    refs: types.SimpleNamespace
    number: jax.Array
    group: jax.Array

    @property
    def _rows(self) -> int:
        """Rows of x: M."""
        return self.refs.x.shape[0]

    @property
    def _is_first(self) -> jax.Array:
        return self.group == 0

    def _own(self, start: jax.Array | int, stop: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """This warpgroup's part of a range."""
        groups = self.problem.config.warpgroups
        first, last = (few_rows.first_unit(self.group + i, stop - start, groups) for i in range(2))
        return start + first, start + last

    def _ring(self, stages: int, copy: Callable, first: jax.Array, end: jax.Array) -> Ring:
        """This warpgroup's ring of slots."""
        return Ring(stages, copy, self.refs.full, first=first, end=end, which=(self.group,))

    def _copy(self, words: jax.Ref, own: pl.Slice, slot: jax.Array) -> None:
        """Starts the copy of words to a warpgroup's own part of `w_slots`."""
        # A contiguous copy that is promised to be in bounds needs no tensor map.
        plgpu.copy_gmem_to_smem(
            words,
            self.refs.w_slots.at[self.group, own],
            self.refs.full.at[self.group, slot],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )

    def _copy_x(self, columns: pl.Slice, slots: jax.Ref, slot: jax.Array) -> None:
        to, full = slots.at[self.group, slot], self.refs.full.at[self.group, slot]
        plgpu.copy_gmem_to_smem(self.refs.x.at[:, columns], to, full)

    def _refill(self, ring: Ring, unit: jax.Array, ahead: jax.Array) -> None:
        """Starts the copy of a unit `ahead` if there is one and this is not before the ring's first."""

        @pl.when((unit >= ring.first) & (ahead < ring.end))
        def _():
            # The copy may start when all threads of this warpgroup have read what is in the slot.
            collectives.sync(interpret=self.problem.interpret)
            ring.fetch(ahead)

    def _total(self, ring: Ring, add_unit: Callable[[jax.Array, jax.Ref], None]) -> jax.Array:
        """The sums [64, M] of this warpgroup's units."""

        def run(acc):
            pl.loop(ring.first, ring.end)(lambda unit: add_unit(unit, acc))
            return acc[...]

        return pl.run_scoped(run, plgpu.ACC((TILE, self._rows), jnp.float32))

    def _leave(self, total: jax.Array) -> None:
        """Leaves the sums of a warpgroup for warpgroup 0, except if it is that one."""

        @pl.when(~self._is_first)
        def _():
            own = self.refs.sums.at[lax.max(self.group - 1, 0)]
            fragments.store(total, own, interpret=self.problem.interpret)
            plgpu.barrier_arrive(self.refs.added)

    def _parts(self, total: jax.Array) -> list[jax.Array]:
        """The sums of all warpgroups in the order of K, for warpgroup 0."""
        plgpu.barrier_wait(self.refs.added)
        others = range(self.problem.config.warpgroups - 1)
        interpret = self.problem.interpret
        return [total, *(fragments.load(self.refs.sums.at[i], interpret=interpret) for i in others)]

    def _in_memory(self, tile: jax.Array) -> jax.Ref:
        """Copies a tile to shared memory, since interpreted `wgmma` takes no operand from registers."""
        ref = self.refs.decoded.at[self.group]
        ref[...] = tile
        plgpu.commit_smem()
        return ref


class _BlockOfA(_Block):
    """A block that multiplies x by its share of a tile of A, and signals."""

    def run(self) -> None:
        """Multiplies, adds up and signals."""
        config, columns = self.problem.config, self.refs.x.shape[1] // TILE
        tile, share = (of(self.number, config.shares) for of in (lax.div, lax.rem))
        start, stop = (lax.div((share + i) * columns, config.shares) for i in range(2))

        def copy(unit: jax.Array, slot: jax.Array) -> None:
            words = self.refs.a.at[pl.ds((tile * columns + unit) * PIECES_OF_A, PIECES_OF_A)]
            self._copy(words, pl.ds(slot * PIECES_OF_A, PIECES_OF_A), slot)
            self._copy_x(pl.ds(unit * TILE, TILE), self._x_slots, slot)

        ring = self._ring(config.stages_of_a, copy, *self._own(start, stop))
        ring.fill()
        total = self._total(ring, functools.partial(self._multiply_unit, ring))
        self._leave(total)

        @pl.when(self._is_first)
        def _():
            added = functools.reduce(jnp.add, self._parts(total))
            fragments.store(added, self.refs.xa.at[share, tile], interpret=self.problem.interpret)
            if not self.problem.interpret:
                collectives.publish(self.refs.counters.at[_READY])

    @property
    def _x_slots(self) -> jax.Ref:
        return self.refs.x_slots_of_a if self.problem.interpret else self.refs.slots[1]

    def _multiply_unit(self, ring: Ring, unit: jax.Array, acc: jax.Ref) -> None:
        slot = ring.slot(unit)
        ring.wait(slot)
        pieces = [
            self.refs.w_slots.at[self.group, slot * PIECES_OF_A + i] for i in range(PIECES_OF_A)
        ]
        if self.problem.interpret:
            of_a = self._in_memory(dense_tile.unpack_tile([piece[...] for piece in pieces]))
        else:
            of_a = packed_tile.load_plain(*pieces)
        plgpu.wgmma(acc, of_a, self._x_slots.at[self.group, slot].T)
        plgpu.wgmma_wait(0)
        self._refill(ring, unit, unit + ring.stages)


class _BlockOfW(_Block):
    """A block that computes a tile of the result."""

    def run(self) -> None:
        """Multiplies; warpgroup 0 finishes the tile."""
        config, units = self.problem.config, self.refs.x.shape[1] // self.problem.config.step
        ring = self._ring(config.stages, self._copy_unit, *self._own(0, units))
        ring.fill()
        if self.problem.result.ranks:
            pl.when(self._is_first)(self._tile.ask_for_b)
        total = self._total(ring, functools.partial(self._multiply_unit, ring))
        if self.problem.following is not None:
            ask = functools.partial(
                ask_for,
                self.problem.following,
                self.refs.following,
                self.number,
                self.problem.result.tiles,
            )
            pl.when(self.group == config.warpgroups - 1)(ask)
        self._leave(total)
        pl.when(self._is_first)(lambda: self._finish(total))

    @property
    def _x_slots(self) -> jax.Ref:
        return self.refs.x_slots if self.refs.slots is None else self.refs.slots[0]

    def _copy_unit(self, unit: jax.Array, slot: jax.Array) -> None:
        """Starts the copies of a unit of W and x."""
        chunks, step = self.problem.config.chunks, self.problem.config.step
        words = self.refs.w.at[self.number, pl.ds(unit * chunks, chunks)]
        self._copy(words, pl.ds(slot * chunks, chunks), slot)
        self._copy_x(pl.ds(unit * step, step), self._x_slots, slot)

    def _multiply_unit(self, ring: Ring, unit: jax.Array, acc: jax.Ref) -> None:
        """Adds the product of a unit, and refills the slot of the unit before it."""
        slot, chunks, interpret = (
            ring.slot(unit),
            self.problem.config.chunks,
            self.problem.interpret,
        )
        tiles = [self.refs.w_slots.at[self.group, slot * chunks + i] for i in range(chunks)]
        load = (lambda tile: None) if interpret else packed_tile.load
        ring.wait(slot)
        loaded = load(tiles[0])
        for chunk, tile in enumerate(tiles):
            # The next tile is loaded while this one is decoded.
            following = load(tiles[chunk + 1]) if chunk + 1 < chunks else None
            if interpret:
                w = self._in_memory(packed_tile.decode_words(tile[...]))
            else:
                w = packed_tile.convert(*loaded)
            x = self._x_slots.at[self.group, slot, :, pl.ds(chunk * TILE, TILE)]
            plgpu.wgmma(acc, w, x.T)
            # One product runs while the next tile is decoded.
            plgpu.wgmma_wait(0 if interpret else 1)
            loaded = following
            if chunk == 0:
                self._refill(ring, unit - 1, unit - 1 + ring.stages)
        # ptxas does not see across the loop's edge that `wgmma` still reads registers.
        plgpu.wgmma_wait(0)

    @property
    def _tile(self) -> "_Tile":
        """What warpgroup 0 finishes."""
        refs = types.SimpleNamespace(**vars(self.refs))
        refs.u = refs.u if refs.xa is None else refs.xa
        pieces = pl.ds(0, self._rows // fragments.COLUMNS)
        rows = [pl.ds(self.number * TILE, TILE)]
        return _Tile(self.problem.result, refs, self.number, pl.ds(0, self._rows), pieces, rows)

    def _finish(self, total: jax.Array) -> None:
        """Adds up the sums of all warpgroups, and writes the result."""
        tile, refs = self._tile, self.refs
        around = tile.load_around()
        if refs.counters is not None:
            counters = refs.counters.at[_READY], refs.counters.at[_READERS]
            parts, readers = self.problem.blocks_of_a, self.problem.result.tiles
            collectives.await_published(*counters, parts, readers)
        tile.put_u(tile.load_us())
        tile.finish([self._parts(total)], around)


class _Tile(epilogue_kernel.Tile):
    """A tile of the result, whose sums are the warpgroups'."""

    def added_up(self, parts: list[jax.Array], half: int) -> jax.Array:
        """The sum of all parts, in order."""
        del half
        return functools.reduce(jnp.add, parts)
