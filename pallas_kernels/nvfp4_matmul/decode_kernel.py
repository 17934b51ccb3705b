"""The kernel that `decode` describes. Each phase is a method of `_Block`, which runs in one warpgroup of a block."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import fragments
from pallas_kernels.mosaic import launch as mosaic
from pallas_kernels.mosaic.ring import Ring
from pallas_kernels.nvfp4_matmul import dense_tile, layout, packed_tile
from pallas_kernels.nvfp4_matmul.decode_config import Config
from pallas_kernels.nvfp4_matmul.decode_plan import AdapterPlan, NextProduct, Plan
from pallas_kernels.nvfp4_matmul.layout import TILE


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static parameters of a launch.

    Attributes:
      config: how the work is divided.
      plan: the assignment of the units of W to the first blocks of the grid.
      a: the work of the other blocks, which multiply x by A; None without A.
      following: the product whose first words are prefetched; or None.
      interpret: whether this runs on a CPU.
    """

    config: Config
    plan: Plan
    a: AdapterPlan | None
    following: NextProduct | None
    interpret: bool

    @property
    def blocks(self) -> int:
        """Number of blocks in the grid."""
        of_a = self.a.tiles * self.a.shares if self.a else 0
        return self.plan.blocks + self.plan.x_tiles * of_a

    @property
    def chunks(self) -> int:
        """Tiles of W in a slot for each warpgroup."""
        return self.config.step // TILE

    @property
    def depth(self) -> int:
        """Tiles of words that a slot holds for each warpgroup: tiles of W, or pieces of A."""
        return max(self.chunks, self.a.pieces) if self.a else self.chunks


def launch(
    x: jax.Array, words: jax.Array, a_words: jax.Array | None, problem: Problem, *, name: str
) -> tuple[jax.Array, jax.Array | None]:
    """Launches the kernel.

    Args:
      x: bfloat16 [M, K], padded: M to a multiple of 8, K to whole tiles.
      words: words of W, int32 [N / 64, K / 64, 3, 192].
      a_words: words of A, from `dense_tile.in_units`; or None.
      problem: the description of the product.
      name: the kernel's name.

    Returns:
      `partials` and `adapter` of `decode.Sums`.
    """
    config, a, m = problem.config, problem.a, len(x)
    rows = m // problem.plan.x_tiles
    warpgroups, stages = config.warpgroups, config.stages

    def sums(parts: int, n: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((parts, *fragments.shape(n, m)), jnp.float32)

    def slots_of_x(columns: int) -> plgpu.SMEM:
        return plgpu.SMEM((stages, rows, columns), jnp.bfloat16, transforms=mosaic.SWIZZLED)

    x_slots = slots_of_x(config.step)
    decoded = plgpu.SMEM((warpgroups, TILE, TILE), jnp.bfloat16, transforms=mosaic.SWIZZLED)
    results = mosaic.launch(
        functools.partial(_kernel, problem=problem),
        {
            "x": x,
            "w": words,
            "a": a_words,
            "following": problem.following and problem.following.words,
        },
        {
            "sums": sums(problem.plan.most_parts, len(words) * TILE),
            "xa": a and sums(a.shares * a.width // TILE, a.tiles * TILE),
        },
        {
            "x_slots": plgpu.RefUnion(x_slots, slots_of_x(a.width)) if a else x_slots,
            "w_slots": plgpu.SMEM(
                (stages, warpgroups, problem.depth, *layout.TILE_SHAPE), jnp.int32
            ),
            "full": plgpu.Barrier(num_arrivals=warpgroups + 1, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            "decoded": decoded if problem.interpret else None,
        },
        name=name,
        interpret=problem.interpret,
        grid=(problem.blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
    )
    return results["sums"], results.get("xa")


def _kernel(refs: types.SimpleNamespace, *, problem: Problem) -> None:
    block = _Block(problem, refs, lax.axis_index("block"), lax.axis_index("warpgroup"))
    if problem.a is None:
        block.multiply_w()
        return
    pl.when(block.number < problem.plan.blocks)(block.multiply_w)
    pl.when(block.number >= problem.plan.blocks)(block.multiply_a)


@dataclasses.dataclass(frozen=True)
class _Block:
    """The program of one warpgroup of a block.

    Attributes:
      problem: the description of the product, the same for all blocks.
      refs: operands, results and scratch of `launch`.
      number: the block's number.
      group: the warpgroup's number in the block.
    """

    problem: Problem
    refs: types.SimpleNamespace
    number: jax.Array
    group: jax.Array

    @property
    def rows(self) -> int:
        """Rows of a tile of x."""
        return self.refs.x.shape[0] // self.problem.plan.x_tiles

    def _rows(self, x_tile: jax.Array) -> pl.Slice | slice:
        """Returns the rows of a tile of x."""
        if self.problem.plan.x_tiles == 1:
            return slice(None)
        return pl.ds(x_tile * self.rows, self.rows)

    def multiply_w(self) -> None:
        """Multiplies a block's run of units of W, tile by tile."""
        plan = self.problem.plan
        start, stop = plan.start(self.number), plan.start(self.number + 1)
        empty = self.refs.empty
        ring = Ring(self.problem.config.stages, self._copy_unit, self.refs.full, empty, start, stop)
        pl.when(self.group == 0)(ring.fill)
        first_tile, last_tile = lax.div(start, plan.steps), lax.div(stop - 1, plan.steps)

        @pl.loop(first_tile, last_tile + 1)
        def _tiles(tile):
            first = lax.max(start, tile * plan.steps)
            last = lax.min(stop, (tile + 1) * plan.steps)

            def sum_over_columns(acc):
                pl.loop(first, last)(lambda unit: self._multiply_unit(ring, unit, acc))
                return acc[...]

            total = self._summed(sum_over_columns)
            if self.problem.following is not None:
                ask = functools.partial(
                    ask_for, self.problem.following, self.refs.following, self.number, plan.blocks
                )
                pl.when((self.group == 0) & (tile == last_tile))(ask)
            with jax.named_scope("store"):
                part, (w_tile, x_tile) = self.number - plan.first_block(tile), plan.split_tile(tile)
                row_tile = w_tile * self.problem.config.warpgroups + self.group
                self._store(total, self.refs.sums.at[part, row_tile], x_tile)

    def _copy_unit(self, unit: jax.Array, slot: jax.Array) -> None:
        """Starts the bulk copies of a unit of W and x into a slot."""
        self._copy_w(unit, slot)
        self._copy_x(unit, slot)

    def _copy_w(self, unit: jax.Array, slot: jax.Array) -> None:
        tile, at = self.problem.plan.tile_and_step(unit)
        tile, _ = self.problem.plan.split_tile(tile)
        chunks, warpgroups = self.problem.chunks, self.problem.config.warpgroups
        columns, w = pl.ds(at * chunks, chunks), self.refs.w
        self._copy_words(lambda i: w.at[tile * warpgroups + i, columns], slot, chunks)

    def _copy_x(self, unit: jax.Array, slot: jax.Array) -> None:
        tile, at = self.problem.plan.tile_and_step(unit)
        rows = self._rows(self.problem.plan.split_tile(tile)[1])
        refs, columns = self.refs, pl.ds(at * self.problem.config.step, self.problem.config.step)
        source = refs.x.at[rows, columns]
        plgpu.copy_gmem_to_smem(source, self._x_slots.at[slot], refs.full.at[slot])

    def _multiply_unit(self, ring: Ring, unit: jax.Array, acc: jax.Ref) -> None:
        """Adds the product of a unit to the accumulator, and refills the slot of the unit before it."""
        slot, chunks = ring.slot(unit), self.problem.chunks
        # The unit that will be loaded into the slot of the unit before this one.
        ahead = unit - 1 + ring.stages
        previous = ring.slot(ahead)
        is_refilled = (unit > ring.first) & (ahead < ring.end)
        tiles = [self.refs.w_slots.at[slot, self.group, chunk] for chunk in range(chunks)]
        load = (lambda tile: None) if self.problem.interpret else packed_tile.load
        with jax.named_scope("load"):
            ring.wait(slot)
            loaded = load(tiles[0])
        for chunk, tile in enumerate(tiles):
            # The next tile is loaded while this one is decoded.
            following = load(tiles[chunk + 1]) if chunk + 1 < chunks else None
            with jax.named_scope("decode"):
                w = self._decoded(tile, loaded)
            with jax.named_scope("mma"):
                x = self._x_slots.at[slot, :, pl.ds(chunk * TILE, TILE)]
                plgpu.wgmma(acc, w, x.T)
                # Leave one product running while the next tile is decoded.
                plgpu.wgmma_wait(0 if self.problem.interpret else 1)
            loaded = following
            if chunk == 0:
                pl.when(is_refilled)(lambda: ring.leave(previous))
        pl.when((self.group == 0) & is_refilled)(lambda: ring.refill(previous, ahead))
        # ptxas does not see across loop iterations that `wgmma` still reads registers. Without this wait the next
        # tile overwrites them (seen with steps of 64).
        plgpu.wgmma_wait(0)

    def _decoded(self, tile: jax.Ref, loaded: tuple[jax.Array, ...] | None) -> jax.Array | jax.Ref:
        """Returns a decoded tile, the first operand of `wgmma`: in registers, or in shared memory if interpreted."""
        if not self.problem.interpret:
            return packed_tile.convert(*loaded)
        return self._in_memory(packed_tile.decode_words(tile[...]))

    def multiply_a(self) -> None:
        """Multiplies a block's share of a tile of A."""
        a = self.problem.a
        number = self.number - self.problem.plan.blocks
        tile, share = lax.div(number, a.shares), lax.rem(number, a.shares)
        x_tile = jnp.int32(0)
        if self.problem.plan.x_tiles > 1:
            x_tile, tile = lax.div(tile, a.tiles), lax.rem(tile, a.tiles)
        start, stop = (lax.div((share + i) * a.units, a.shares) for i in range(2))
        # If a unit has fewer tiles of A than there are warpgroups, some warpgroups compute the same tile. Only the
        # first ones store it.
        mine = lax.rem(self.group, a.width // TILE)
        of_tile = a.pieces * self.problem.config.warpgroups * TILE // a.width
        places = [of_tile * mine + i for i in range(of_tile)]
        copy = functools.partial(self._copy_unit_of_a, tile, x_tile)
        empty = self.refs.empty
        ring = Ring(self.problem.config.stages, copy, self.refs.full, empty, start, stop)

        pl.when(self.group == 0)(ring.fill)

        def sum_over_columns(acc):
            pl.loop(start, stop)(
                lambda unit: self._multiply_unit_of_a(ring, unit, mine, places, acc)
            )
            return acc[...]

        total = self._summed(sum_over_columns)

        @pl.when(self.group < a.width // TILE)
        def _():
            part = share * (a.width // TILE) + self.group
            self._store(total, self.refs.xa.at[part, tile], x_tile)

    def _copy_unit_of_a(
        self, tile: jax.Array, x_tile: jax.Array, unit: jax.Array, slot: jax.Array
    ) -> None:
        """Starts the copies of a unit of A and x."""
        a, refs = self.problem.a, self.refs
        self._copy_words(lambda i: refs.a.at[tile, unit, i], slot, a.pieces)
        columns = pl.ds(unit * a.width, a.width)
        source = refs.x.at[self._rows(x_tile), columns]
        plgpu.copy_gmem_to_smem(source, self._x_slots_of_a.at[slot], refs.full.at[slot])

    def _multiply_unit_of_a(
        self, ring: Ring, unit: jax.Array, tile: jax.Array, places: list[jax.Array], acc: jax.Ref
    ) -> None:
        """Adds the product of one tile of 64 columns of a unit of A to the accumulator, and refills the slot.

        `places` are the indices of the tile's pieces among all pieces of the unit.
        """
        slot, pieces = ring.slot(unit), self.problem.a.pieces
        ring.wait(slot)
        words = [self.refs.w_slots.at[slot, lax.div(i, pieces), lax.rem(i, pieces)] for i in places]
        if self.problem.interpret:
            of_a = self._in_memory(dense_tile.unpack_tile([ref[...] for ref in words]))
        else:
            of_a = packed_tile.load_plain(*words)
        x = self._x_slots_of_a.at[slot, :, pl.ds(tile * TILE, TILE)]
        plgpu.wgmma(acc, of_a, x.T)
        plgpu.wgmma_wait(0)

        @pl.when(unit + ring.stages < ring.end)
        def _refill():
            ring.leave(slot)
            pl.when(self.group == 0)(lambda: ring.refill(slot, unit + ring.stages))

    @property
    def _x_slots(self) -> jax.Ref:
        return self.refs.x_slots if self.problem.a is None else self.refs.x_slots[0]

    @property
    def _x_slots_of_a(self) -> jax.Ref:
        return self.refs.x_slots[1]

    def _copy_words(self, words, slot: jax.Array, count: int) -> None:
        """Starts the copies of `count` tiles for each warpgroup; words(i) is the source for warpgroup i."""
        # A contiguous copy that is promised to be in bounds needs no tensor map (TMA descriptor), which would have to
        # be loaded first.
        for i in range(self.problem.config.warpgroups):
            of_group = self.refs.w_slots.at[slot, i]
            plgpu.copy_gmem_to_smem(
                words(i),
                of_group if count == self.problem.depth else of_group.at[pl.ds(0, count)],
                self.refs.full.at[slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    def _summed(self, add_products) -> jax.Array:
        """Runs `add_products` on a new accumulator and returns its sums, float32 [64, rows]."""
        return pl.run_scoped(add_products, plgpu.ACC((TILE, self.rows), jnp.float32))

    def _store(self, total: jax.Array, ref: jax.Ref, x_tile: jax.Array) -> None:
        if self.problem.plan.x_tiles > 1:
            pieces = self.rows // fragments.COLUMNS
            ref = ref.at[pl.ds(x_tile * pieces, pieces)]
        fragments.store(total, ref, interpret=self.problem.interpret)

    def _in_memory(self, tile: jax.Array) -> jax.Ref:
        """Copies a tile to shared memory, because interpreted `wgmma` takes no operand from registers."""
        ref = self.refs.decoded.at[self.group]
        ref[...] = tile
        plgpu.commit_smem()
        return ref


def ask_for(following: NextProduct, words: jax.Ref, number: jax.Array, blocks: int) -> None:
    """Prefetches into the L2 cache what the blocks of the next product read first.

    Args:
      following: the next product.
      words: its packed weight.
      number: index of the block that prefetches.
      blocks: number of blocks that prefetch; each does it for every `blocks`-th block of the next product.
    """
    high, wide = following.shape

    @pl.loop(number, following.blocks, step=blocks)
    def _(reader):
        row, column = following.first(reader)
        plgpu.async_prefetch(words.at[pl.ds(row, high), pl.ds(column, wide)])
