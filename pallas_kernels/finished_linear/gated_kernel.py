"""The kernel that `gated` describes. Each phase is a method of `_Block` or `_BlockOfA`, run by one warpgroup."""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.finished_linear import gated_config, lora
from pallas_kernels.finished_linear.gated_config import Config, Tiling
from pallas_kernels.mosaic import collectives, fragments, paired, registers, transposed
from pallas_kernels.mosaic import launch as mosaic
from pallas_kernels.mosaic.ring import Ring
from pallas_kernels.nvfp4_matmul import decode_plan, dense_tile, layout, packed_tile
from pallas_kernels.nvfp4_matmul.decode_kernel import ask_for
from pallas_kernels.nvfp4_matmul.layout import TILE

# Rows of x whose epilogue is computed at a time: few, because LoRA's product needs registers beside the sums.
_AT_ONCE = 32
# Number of partial sums of x A that are loaded and added up at a time.
_SHARES_AT_ONCE = 4
# Number of counters for each tile of A: one for each window (part) of the rows of x.
_WINDOWS = 4
# Indices in `counters`: the number of finished parts of U, and the number of blocks that have seen all of them.
_READY, _READERS = 16, 17


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static parameters of a launch.

    Attributes:
      config: how the work is divided.
      tiling: which block does what.
      rank: padded rank R of one part of LoRA's branch; 0 without LoRA.
      norm: width of the stream whose unit the product is multiplied by, and the epsilon of its norm; or None.
      following: the product whose first words are prefetched; or None.
      interpret: whether this runs on a CPU.
    """

    config: Config
    tiling: Tiling
    rank: int
    norm: tuple[int, float] | None
    following: decode_plan.NextProduct | None
    interpret: bool

    @property
    def chunks(self) -> int:
        """Number of tiles of 64 columns in a slot."""
        return self.config.step // TILE

    @property
    def units_of_turn(self) -> int:
        """Number of units in a turn: those of the columns, and one for each tile of A if there is a branch."""
        return self.tiling.steps + self.tiling.tiles_of_a


def launch(operands: Mapping[str, jax.Array | None], problem: Problem, *, name: str) -> jax.Array:
    """Launches the kernel.

    Args:
      operands: `x` bfloat16 [M, K], `w` int32 [N / 64, K / 64, 3, 192], `divisor` float32 [N] or of any other size,
        `counters` int32 [gated.COUNTERS], zeros. The others may be None: `squares` float32, whose first D / 64 rows
        [D / 64, M] are used; `a` int32 [tiles of A * K / 16, 3, 192]; `b` int32 [N / 64, max(1, R / 16), 3, 192].
      problem: the static parameters.
      name: the kernel's name in profiles.

    Returns:
      bfloat16 [M, N / 2].
    """
    if problem.interpret and problem.rank:
        # Interpreted blocks cannot signal each other, so A and W take one launch each.
        shares = _launch(operands, problem, problem.tiling.blocks_of_a, 0, name=name)["shares"]
        u = fragments.to_rows(shares).sum(0).astype(jnp.bfloat16).T
        operands = {**operands, "a": None, "u": u}
        return _launch(operands, problem, 0, problem.config.blocks, name=name)["out"]
    blocks = problem.tiling.blocks_of_a, problem.config.blocks
    return _launch({**operands, "u": None}, problem, *blocks, name=name)["out"]


def _launch(
    operands: Mapping[str, jax.Array | None],
    problem: Problem,
    blocks_of_a: int,
    blocks_of_w: int,
    *,
    name: str,
) -> dict[str, jax.Array]:
    config, m, tiles = problem.config, len(operands["x"]), problem.tiling.tiles
    rows = m // problem.tiling.x_tiles
    warpgroups, stages, interpret = config.warpgroups, config.stages, problem.interpret
    adds_up = bool(blocks_of_a) and not interpret
    counters = operands["counters"] if adds_up else None
    ranks = problem.tiling.tiles_of_a * TILE
    shares = (problem.tiling.shares, *fragments.shape(ranks, m))

    def tiles_of_x(*shape: int) -> plgpu.SMEM:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=mosaic.SWIZZLED)

    x_slots = tiles_of_x(stages, rows, config.step)
    u_slots = tiles_of_x(stages * problem.chunks, rows, TILE)
    return mosaic.launch(
        functools.partial(_kernel, problem=problem, blocks_of_a=blocks_of_a),
        {
            **{"u": None, **operands},
            "counters": counters,
            "following": problem.following and problem.following.words,
        },
        {
            "out": jax.ShapeDtypeStruct((m, tiles * TILE // 2), jnp.bfloat16)
            if blocks_of_w
            else None,
            "shares": jax.ShapeDtypeStruct(shares, jnp.float32) if blocks_of_a else None,
            "new_u": jax.ShapeDtypeStruct((m, ranks), jnp.bfloat16) if adds_up else None,
        },
        {
            # U uses the same memory as x. The interpreter does not support such unions, so it gets two arrays.
            "slots": None if interpret else plgpu.RefUnion(x_slots, u_slots),
            "x_slots": x_slots if interpret else None,
            "u_slots": u_slots if interpret else None,
            "w_slots": plgpu.SMEM(
                (stages, config.high * gated_config.depth(config), *layout.TILE_SHAPE), jnp.int32
            ),
            "unit": plgpu.SMEM((rows,), jnp.float32) if problem.norm else None,
            "flags": plgpu.SMEM((warpgroups,), jnp.int32) if adds_up else None,
            "full": plgpu.Barrier(num_arrivals=config.high + 1, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=stages) if blocks_of_a else None,
            "left": plgpu.Barrier(num_arrivals=problem.tiling.windows, num_barriers=stages)
            if blocks_of_a
            else None,
            "has_unit": plgpu.Barrier() if problem.norm else None,
            "decoded": tiles_of_x(warpgroups, TILE, TILE) if interpret else None,
        },
        name=name,
        interpret=interpret,
        grid=(problem.tiling.x_tiles * (blocks_of_a + blocks_of_w),),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
    )


def _kernel(refs: types.SimpleNamespace, *, problem: Problem, blocks_of_a: int) -> None:
    number, group = lax.axis_index("block"), lax.axis_index("warpgroup")
    x_tiles = problem.tiling.x_tiles

    def worker(kind: type, number: jax.Array, blocks: int) -> "_Worker":
        if x_tiles == 1:
            return kind(problem, refs, jnp.int32(0), number, group)
        return kind(problem, refs, lax.div(number, blocks), lax.rem(number, blocks), group)

    # The blocks of A come first, those of all tiles of x: a block that waits for them can only start after them.
    all_of_a = x_tiles * blocks_of_a
    if refs.out is None:
        worker(_BlockOfA, number, blocks_of_a).run()
        return
    of_w = worker(_Block, number - all_of_a, problem.config.blocks)
    if not blocks_of_a:
        of_w.run()
    else:
        pl.when(number < all_of_a)(worker(_BlockOfA, number, blocks_of_a).run)
        pl.when(number >= all_of_a)(of_w.run)


@dataclasses.dataclass(frozen=True)
class _Worker:
    """The program of one warpgroup of a block.

    Attributes:
      problem: the static parameters, the same for all blocks.
      refs: operands, results and scratch of `launch`.
      x_tile: index of the block's tile of x.
      number: index of the block among the blocks of its kind for the same tile of x.
      group: index of the warpgroup in the block.
    """

    problem: Problem
    refs: types.SimpleNamespace
    x_tile: jax.Array
    number: jax.Array
    group: jax.Array

    @property
    def rows(self) -> int:
        """Rows of a tile of x."""
        return self.refs.x.shape[0] // self.problem.tiling.x_tiles

    def _of_tile(self, first: jax.Array | int, count: int, *, unit: int = 1) -> pl.Slice:
        """Returns the slice of an array of all rows of x, or of `unit` rows each, with `count` of this tile's items."""
        if self.problem.tiling.x_tiles == 1:
            return pl.ds(first, count)
        return pl.ds(self.x_tile * (self.rows // unit) + first, count)

    def _counter(self, at: jax.Array | int) -> jax.Ref:
        """Returns a counter of this tile of x."""
        if self.problem.tiling.x_tiles == 1:
            return self.refs.counters.at[at]
        return self.refs.counters.at[self.x_tile * gated_config.COUNTERS_OF_TILE + at]

    @property
    def _x_slots(self) -> jax.Ref:
        return self.refs.x_slots if self.problem.interpret else self.refs.slots[0]

    def _u_slot(self, slot: jax.Array) -> jax.Ref:
        """Returns the part of a slot that holds 64 columns of U [M, 64]."""
        slots = self.refs.u_slots if self.problem.interpret else self.refs.slots[1]
        return slots.at[slot * self.problem.chunks]

    def _copy_x(self, at: jax.Array, slot: jax.Array, barriers: jax.Ref) -> None:
        columns = pl.ds(at * self.problem.config.step, self.problem.config.step)
        plgpu.copy_gmem_to_smem(
            self.refs.x.at[self._of_tile(0, self.rows), columns],
            self._x_slots.at[slot],
            barriers.at[slot],
        )

    def _summed(self, rows: int, add_products: Callable) -> jax.Array:
        """Runs `add_products` on a new accumulator and returns its sums, float32 [64, rows]."""

        def run(acc):
            add_products(acc)
            return acc[...]

        return pl.run_scoped(run, plgpu.ACC((TILE, rows), jnp.float32))

    def _multiply(self, acc: jax.Ref, tile: jax.Array, x: jax.Ref, *, wait: int = 0) -> None:
        """Adds the product of a tile [64, 64] in registers and x [rows, 64]."""
        if self.problem.interpret:  # interpreted `wgmma` takes no operand from registers
            ref = self.refs.decoded.at[self.group]
            ref[...] = tile
            plgpu.commit_smem()
            tile, wait = ref, 0
        plgpu.wgmma(acc, tile, x.T)
        plgpu.wgmma_wait(wait)


@dataclasses.dataclass(frozen=True)
class _BlockOfA(_Worker):
    """A block that computes one tile of x A over a share of K. Each warpgroup has its own window of the rows of x."""

    @property
    def _tile(self) -> jax.Array | int:
        """Index of this block's tile of A."""
        tiling = self.problem.tiling
        return 0 if tiling.tiles_of_a == 1 else lax.div(self.number, tiling.shares)

    @property
    def _share(self) -> jax.Array:
        """Index of this block among those of its tile."""
        tiling = self.problem.tiling
        return self.number if tiling.tiles_of_a == 1 else lax.rem(self.number, tiling.shares)

    def run(self) -> None:
        """Multiplies. The last block to finish a window of a tile also adds up the shares."""
        tiling = self.problem.tiling
        start, stop = (lax.div((self._share + i) * tiling.steps, tiling.shares) for i in range(2))

        refs, stages = self.refs, self.problem.config.stages
        ring = Ring(stages, self._copy, refs.arrived, refs.left, start, stop)
        pl.when(self.group == 0)(ring.fill)
        pl.when(self.group < tiling.windows)(lambda: self._multiply_window(ring))

    def _copy(self, unit: jax.Array, slot: jax.Array) -> None:
        refs, chunks = self.refs, self.problem.chunks
        first = (self._tile * self.problem.tiling.steps + unit) * chunks * 4
        plgpu.copy_gmem_to_smem(
            refs.a.at[pl.ds(first, chunks * 4)],
            refs.w_slots.at[slot, pl.ds(0, chunks * 4)],
            refs.arrived.at[slot],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )
        self._copy_x(unit, slot, refs.arrived)

    def _multiply_window(self, ring: Ring) -> None:
        refs, size = self.refs, self.rows // self.problem.tiling.windows
        window = pl.ds(self.group * size, size)

        def one_unit(unit, acc):
            slot, ahead = ring.slot(unit), unit + ring.stages
            ring.wait(slot)
            for chunk in range(self.problem.chunks):
                pieces = [refs.w_slots.at[slot, 4 * chunk + i] for i in range(4)]
                if self.problem.interpret:
                    tile = dense_tile.unpack_tile([piece[...] for piece in pieces])
                else:
                    tile = packed_tile.load_plain(*pieces)
                self._multiply(acc, tile, self._x_slots.at[slot, window, pl.ds(chunk * TILE, TILE)])

            @pl.when(ahead < ring.end)
            def _refill():
                ring.leave(slot)
                pl.when(self.group == 0)(lambda: ring.refill(slot, ahead))

        add_up = lambda acc: pl.loop(ring.first, ring.end)(lambda unit: one_unit(unit, acc))
        total = self._summed(size, add_up)
        count = size // fragments.COLUMNS
        pieces = self._of_tile(self.group * count, count, unit=fragments.COLUMNS)
        share_ref = refs.shares.at[self._share, self._tile, pieces]
        fragments.store(total, share_ref, interpret=self.problem.interpret)
        if self.problem.interpret:
            return
        last = jnp.int32(self.problem.tiling.shares - 1)
        flag = refs.flags.at[pl.ds(self.group, 1)]
        counter = self._tile * _WINDOWS + self.group
        collectives.count(self._counter(counter), last, flag)

        @pl.when(refs.flags[self.group] != 0)
        def _add_up():
            u = self._added_up(pieces).astype(jnp.bfloat16)
            rows = self._of_tile(self.group * size, size)
            transposed.store(u, refs.new_u.at[rows, pl.ds(self._tile * TILE, TILE)])
            collectives.publish(self._counter(_READY))

    def _added_up(self, pieces: pl.Slice) -> jax.Array:
        """Adds up all shares of this window, in order."""
        shares, ref = self.problem.tiling.shares, self.refs.shares
        load = lambda share: fragments.load(ref.at[share, self._tile, pieces], interpret=False)

        def some(turn, total):
            first = 1 + turn * _SHARES_AT_ONCE
            loaded = [load(lax.min(first + i, shares - 1)) for i in range(_SHARES_AT_ONCE)]
            for i, more in enumerate(loaded):
                total += jnp.where(first + i < shares, more, jnp.zeros_like(more))
            return total

        return lax.fori_loop(0, -(-(shares - 1) // _SHARES_AT_ONCE), some, load(0))


@dataclasses.dataclass(frozen=True)
class _Block(_Worker):
    """A block that computes whole tiles of the result from W."""

    @property
    def turns(self) -> int:
        """Number of turns; in each the block sums up to `config.high` tiles."""
        return self.problem.tiling.turns

    @functools.cached_property
    def units(self) -> int:
        """Number of units in all turns."""
        return self.turns * self.problem.units_of_turn

    @functools.cached_property
    def ring(self) -> Ring:
        """The ring buffer of slots. Its `fetch` only starts the copies that warpgroup 0 makes for all warpgroups."""
        refs = self.refs
        stages = self.problem.config.stages
        return Ring(stages, self._copy_common, refs.full, refs.empty, end=self.units)

    def run(self) -> None:
        """Starts filling the slots, and runs all turns."""
        for stage in range(min(self.problem.config.stages, self.units)):
            unit = jnp.int32(stage)
            self._copy_own(unit, stage)
            pl.when(self.group == 0)(lambda unit=unit: self.ring.fetch(unit))
        if self.problem.norm is not None:
            pl.when(self.group == self.problem.config.warpgroups - 1)(self._put_unit)
        pl.loop(0, self.turns)(self._one_turn)

    # Copies --------------------------------------------------------------------------------------
    def _tile(self, turn: jax.Array, at: jax.Array | int) -> jax.Array:
        """Returns the index of the tile at a place of a turn. It may be after the block's last tile; see `_end`."""
        tiles, config = self.problem.tiling.tiles, self.problem.config
        first = gated_config.first_tile(self.number, tiles, config.blocks)
        return first + turn * config.high + at

    @property
    def _end(self) -> jax.Array:
        """Index of the tile after this block's last tile."""
        tiles, blocks = self.problem.tiling.tiles, self.problem.config.blocks
        return gated_config.first_tile(self.number + 1, tiles, blocks)

    def _turn_and_step(self, unit: jax.Array) -> tuple[jax.Array | int, jax.Array]:
        """Returns the turn and the step of a unit."""
        if self.turns == 1:
            return 0, unit
        units = self.problem.units_of_turn
        return lax.div(unit, units), lax.rem(unit, units)

    def _copy_words(self, unit: jax.Array, slot: jax.Array, tile_index: jax.Array | int) -> None:
        """Starts the bulk copies of W, or of B, for one tile."""
        problem, refs = self.problem, self.refs
        turn, at = self._turn_and_step(unit)
        # If there is no such tile, copy the block's last tile again, which another warpgroup has just requested.
        tile = lax.min(self._tile(turn, tile_index), self._end - 1)
        first = tile_index * gated_config.depth(problem.config)

        def copy(source: jax.Ref, count: int) -> None:
            plgpu.copy_gmem_to_smem(
                source,
                refs.w_slots.at[slot, pl.ds(first, count)],
                refs.full.at[slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        def columns():
            copy(refs.w.at[tile, pl.ds(at * problem.chunks, problem.chunks)], problem.chunks)

        if not problem.rank:
            columns()
            return

        def ranks():
            pieces = refs.b.shape[1] // problem.tiling.tiles_of_a
            copy(refs.b.at[tile, pl.ds((at - problem.tiling.steps) * pieces, pieces)], pieces)

        pl.when(at < problem.tiling.steps)(columns)
        pl.when(at >= problem.tiling.steps)(ranks)

    def _copy_own(self, unit: jax.Array, slot: jax.Array | int) -> None:
        """Starts the bulk copies of this warpgroup's own rows of W, or of B."""
        self._copy_words(unit, slot, self.group)

    def _copy_common(self, unit: jax.Array, slot: jax.Array) -> None:
        """Starts the bulk copies of x, or of U, and of a shared tile."""
        problem, refs = self.problem, self.refs
        if problem.config.is_shared:
            self._copy_words(unit, slot, problem.config.warpgroups)
        _, at = self._turn_and_step(unit)
        if not problem.rank:
            self._copy_x(at, slot, refs.full)
            return
        pl.when(at < problem.tiling.steps)(lambda: self._copy_x(at, slot, refs.full))
        pl.when(at >= problem.tiling.steps)(lambda: self._copy_u(unit, at, slot))

    def _copy_u(self, unit: jax.Array, at: jax.Array, slot: jax.Array) -> None:
        refs, tiling = self.refs, self.problem.tiling
        if not self.problem.interpret:

            @pl.when(unit == tiling.steps)
            def _wait():
                counters = self._counter(_READY), self._counter(_READERS)
                parts = tiling.tiles_of_a * tiling.windows
                collectives.await_published(*counters, parts, self.problem.config.blocks)

        u = refs.u if refs.new_u is None else refs.new_u
        ranks = pl.ds((at - tiling.steps) * TILE, TILE)
        source = u.at[self._of_tile(0, self.rows), ranks]
        plgpu.copy_gmem_to_smem(source, self._u_slot(slot), refs.full.at[slot])

    def _renew(self, unit: jax.Array) -> None:
        """Leaves the slot of the unit before this one, and refills this warpgroup's own part of it."""
        ring = self.ring
        ahead = unit - 1 + ring.stages
        slot = ring.slot(ahead)

        @pl.when((unit > 0) & (ahead < ring.end))
        def _():
            ring.leave(slot)
            # The copy may start only when all threads of this warpgroup have read their words.
            collectives.sync(interpret=self.problem.interpret)
            self._copy_own(ahead, slot)

    def _renew_common(self, unit: jax.Array) -> None:
        """Refills the common part of the slot of the unit before this one, once all warpgroups have left it."""
        ring = self.ring
        ahead = unit - 1 + ring.stages
        is_first = self.group == 0
        pl.when(is_first & (unit > 0) & (ahead < ring.end))(
            lambda: ring.refill(ring.slot(ahead), ahead)
        )

    # Sums ----------------------------------------------------------------------------------------
    def _one_turn(self, turn: jax.Array) -> None:
        tiling, config = self.problem.tiling, self.problem.config
        if tiling.tiles == config.blocks * config.high * tiling.turns:
            self._sum_tile(turn)
            return
        is_there = self._tile(turn, self.group) < self._end
        pl.when(is_there)(lambda: self._sum_tile(turn))
        pl.when(~is_there)(lambda: self._pass_turn(turn))

    def _pass_turn(self, turn: jax.Array) -> None:
        """Runs a turn of a warpgroup that has no tile: it only leaves and refills slots for the other warpgroups."""
        first = turn * self.problem.units_of_turn

        @pl.loop(first, first + self.problem.units_of_turn)
        def _(unit):
            self.ring.wait(self.ring.slot(unit))
            self._renew(unit)
            self._renew_common(unit)

    def _sum_tile(self, turn: jax.Array) -> None:
        """Sums this warpgroup's tile and its part of a shared tile, and writes the results."""
        config, first = self.problem.config, turn * self.problem.units_of_turn
        last = first + self.problem.tiling.steps
        scales = [self._scale(self._tile(turn, self.group))]
        places = [(self.group, 0, self.rows)]
        if config.is_shared:
            scales.append(self._scale(self._tile(turn, config.warpgroups)))
            size = self.rows // config.warpgroups
            places.append((config.warpgroups, self.group * size, size))

        def sum_over_columns(*accs):
            pl.loop(first, last)(lambda unit: self._multiply_unit(unit, accs, places))
            return [acc[...] for acc in accs]

        accs = [plgpu.ACC((TILE, rows), jnp.float32) for _, _, rows in places]
        totals = pl.run_scoped(sum_over_columns, *accs)
        if self.problem.following is not None:
            ask = functools.partial(
                ask_for, self.problem.following, self.refs.following, self.number, config.blocks
            )
            is_last = (self.group == 0) & (turn == self.turns - 1)
            several = self.problem.tiling.x_tiles > 1
            pl.when(is_last & (self.x_tile == 0) if several else is_last)(ask)
        units_of_branch = [last + tile for tile in range(self.problem.tiling.tiles_of_a)]
        # If a turn takes a multiple of `stages` units, these slots are the same in all turns. Then the compiler would
        # compute all addresses in them before the first turn, and keep them in registers that the sums need.
        interpret = self.problem.interpret
        slots = [
            registers.opaque(self.ring.slot(unit), interpret=interpret) for unit in units_of_branch
        ]
        if self.problem.rank:
            self._renew(last)
            self._renew_common(last)
            for slot in slots:
                self.ring.wait(slot)
        if self.problem.norm is not None:
            pl.when(turn == 0)(lambda: plgpu.barrier_wait(self.refs.has_unit))
        # The shared tile is finished first: it has few sums, and this frees their registers.
        finished = reversed(list(zip(places, scales, totals, strict=True)))
        for (tile_index, row, _), scale, total in finished:
            base = registers.to_bfloat16(total, interpret=interpret)
            # The sums of many rows leave registers for only a few more.
            is_crowded = total is not totals[0] and self.rows > 96
            at_once = _AT_ONCE // 4 if is_crowded else _AT_ONCE
            self._finish(base, scale, self._tile(turn, tile_index), slots, tile_index, row, at_once)
        # All slots of the branch were in use until now. Leave all but the last one, which the next turn leaves.
        for unit in units_of_branch[1:]:
            self._renew(unit)
            self._renew_common(unit)

    def _multiply_unit(
        self, unit: jax.Array, accs: tuple[jax.Ref, ...], places: list[tuple]
    ) -> None:
        """Adds the products of a unit to the accumulators, and refills the slot of the unit before it."""
        problem, slot = self.problem, self.ring.slot(unit)
        load = (lambda tile: None) if problem.interpret else packed_tile.load
        high = gated_config.depth(problem.config)
        work = [
            (acc, self.refs.w_slots.at[slot, tile_index * high + chunk], row, rows, chunk)
            for chunk in range(problem.chunks)
            for acc, (tile_index, row, rows) in zip(accs, places, strict=True)
        ]
        self.ring.wait(slot)
        # One product runs while the next tile is decoded. But with a shared tile and more than 96 rows, there are no
        # registers for two decoded tiles. Then this warpgroup waits, and another one decodes meanwhile.
        overlaps = len(accs) == 1 or self.rows <= 96
        loaded = load(work[0][1])
        for i, (acc, tile, row, rows, chunk) in enumerate(work):
            # The next tile is loaded while this one is decoded.
            following = load(work[i + 1][1]) if i + 1 < len(work) else None
            if problem.interpret:
                w = packed_tile.decode_words(tile[...])
            else:
                w = packed_tile.convert(*loaded)
            columns = pl.ds(chunk * TILE, TILE)
            window = slice(None) if rows == self.rows else pl.ds(row, rows)
            x = self._x_slots.at[slot, window, columns]
            self._multiply(acc, w, x, wait=int(overlaps))
            loaded = following
            if i == 0:
                self._renew(unit)
        self._renew_common(unit)
        # ptxas does not see across loop iterations that `wgmma` still reads registers.
        plgpu.wgmma_wait(0)

    # Results -------------------------------------------------------------------------------------
    def _scale(self, tile: jax.Array) -> jax.Array:
        """Returns the factor for the sums of a tile: a scalar, or [64]."""
        divisor, n = self.refs.divisor, self.problem.tiling.tiles * TILE
        if divisor.shape[0] != n:
            return (1 / layout.DECODED_SCALE) * (1 / divisor[0])
        rows = pl.ds(lax.min(tile, self._end - 1) * TILE, TILE)
        return (1 / layout.DECODED_SCALE) * (1 / registers.load_vector(0, divisor.at[rows]))

    def _put_unit(self) -> None:
        """Writes the norm's unit, 1 / RMS of all rows of x, to shared memory for all warpgroups."""
        (width, eps), refs = self.problem.norm, self.refs
        how = {"interpret": self.problem.interpret}
        squares = refs.squares.at[:, self._of_tile(0, self.rows)]
        collectives.put_units(squares, layout.tiles(width), width, eps, refs.unit, **how)
        plgpu.barrier_arrive(refs.has_unit)

    def _finish(
        self,
        base: jax.Array,
        scale: jax.Array,
        tile: jax.Array,
        slots: list[jax.Array],
        tile_index: jax.Array | int,
        row: jax.Array | int,
        at_once: int,
    ) -> None:
        """Computes LoRA, norm and SwiGLU of a tile, `at_once` rows of x at a time from `row` on, and writes the result.

        The rounded sums `base` are bfloat16 [64, rows], and `scale` is from `_scale`. The slots hold B and U, one for
        each tile of A; `tile_index` counts the tiles of the block's turn.
        """
        problem, refs, interpret = self.problem, self.refs, self.problem.interpret
        rounded = functools.partial(registers.rounded_to_bfloat16, interpret=interpret)
        for part in _windows(base.shape[1], at_once):
            window = pl.ds(row + part.start, part.size)
            if problem.rank:
                added = self._branch(slots, tile_index, window)
            is_all = part.size == base.shape[1]
            y = base if is_all else base[:, part.start : part.start + part.size]
            y = y.astype(jnp.float32)
            y *= registers.spread(scale, 0, y.shape)
            if problem.rank:
                y += rounded(added)
            if problem.norm is not None:
                y *= registers.spread(registers.load_vector(1, refs.unit.at[window]), 1, y.shape)
            result = paired.gate(rounded(y), interpret=interpret)

            @pl.when(tile < self._end)
            def _store(result=result, part=part):
                rows = self._of_tile(row + part.start, part.size)
                to = refs.out.at[rows, pl.ds(tile * (TILE // 2), TILE // 2)]
                paired.store(result, to, interpret=interpret)

    def _load_b(self, tile_of_a: int, slot: jax.Array, tile_index: jax.Array | int) -> jax.Array:
        """Loads B for a tile's rows and the ranks of one tile of A to registers, bfloat16 [64, 64]."""
        first, rank = tile_index * gated_config.depth(self.problem.config), self.problem.rank
        count = self.refs.b.shape[1] // self.problem.tiling.tiles_of_a
        pieces = [self.refs.w_slots.at[slot, first + i] for i in range(count)]
        owners = lora.owners(rank, tile_of_a)
        if self.problem.interpret:
            return lora.unpack_pairs(jnp.stack([piece[...] for piece in pieces]), owners)
        return paired.load_diagonal(pieces, owners)

    def _branch(
        self, slots: list[jax.Array], tile_index: jax.Array | int, window: pl.Slice
    ) -> jax.Array:
        """Returns the product of B and U, float32 [64, rows], summed over the tiles of A in order."""

        def add_products(acc):
            for tile_of_a, slot in enumerate(slots):
                b = self._load_b(tile_of_a, slot, tile_index)
                self._multiply(acc, b, self._u_slot(slot).at[window])

        return self._summed(window.size, add_products)


def _windows(rows: int, at_once: int = _AT_ONCE) -> list[pl.Slice]:
    """Cuts `rows` rows of x into slices of up to `at_once` rows."""
    cuts = [*range(0, rows, at_once), rows]
    return [pl.ds(first, last - first) for first, last in itertools.pairwise(cuts)]
