"""The kernel that `prefill` describes. Each phase is a method of `_Block`, which runs in one warpgroup of a block."""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import launch as mosaic
from pallas_kernels.mosaic import paired, registers
from pallas_kernels.mosaic.ring import Ring
from pallas_kernels.nvfp4_matmul import layout, packed_tile
from pallas_kernels.nvfp4_matmul.layout import TILE
from pallas_kernels.nvfp4_matmul.prefill_config import Config, Tiling
from pallas_kernels.nvfp4_matmul.prefill_epilogue import Epilogue

# The most rows of x whose epilogue fits into registers at once, even if there is a producer.
_MOST_AT_ONCE = 96


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static parameters of a launch.

    Attributes:
      config: sizes of tiles and pipeline stages.
      tiling: which block does which tiles.
      backward: whether the product is dX.
      epilogue: the operations after the product; or None.
      is_paired: whether the rows of W are in pairs. The columns of the product are not: the results of 64 rows of W
        are 32 columns in the first half of N and 32 columns in the second half.
      interpret: whether this runs on a CPU.
    """

    config: Config
    tiling: Tiling
    backward: bool
    epilogue: Epilogue | None
    is_paired: bool
    interpret: bool

    @property
    def units_of_tile(self) -> int:
        """Units of a tile that one block sums over all of K; an epilogue adds one, which multiplies B and x A."""
        return self.tiling.steps + (self.epilogue is not None)

    @property
    def in_memory(self) -> bool:
        """Whether `wgmma` takes W from shared memory: for dX, and in the interpreter, which supports nothing else."""
        return self.backward or self.interpret

    @property
    def halves(self) -> int:
        """Number of parts in which a result is copied out: two for dX, whose shared memory buffer is half a tile."""
        return 2 if self.backward else 1


def launch(
    x: jax.Array, words: jax.Array, divisor: jax.Array, problem: Problem
) -> tuple[jax.Array | None, jax.Array | None]:
    """Launches the kernel.

    Args:
      x: bfloat16 [M, K], padded; for dX it is dY [M, N].
      words: int32 [N / 64, K / 64, 3, 192].
      divisor: the global scale, float32 [1] or [N].
      problem: the static parameters.

    Returns:
      Two arrays. The first is the product, bfloat16 [M, N] (for dX [M, K]), in which the columns of split tiles are
      not written; None if all tiles are split. The second is the partial sums of split tiles, float32
      [split, columns, M padded to whole tiles]; None if no tiles are split.
    """
    config, tiling, epilogue = problem.config, problem.tiling, problem.epilogue
    rows, warpgroups, stages = config.rows, config.warpgroups, config.stages
    w_rows = words.shape[1 if problem.backward else 0]
    shared_rows = (w_rows - tiling.whole_w_tiles * warpgroups * config.cluster) * TILE
    sums = (tiling.split, shared_rows, tiling.x_tiles * rows)
    empty = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    if config.cluster > 1 and not problem.interpret:
        empty = plgpu.ClusterBarrier(
            collective_axes=("rank",), num_arrivals=warpgroups, num_barriers=stages
        )

    def tiles_of_x(*shape: int) -> plgpu.SMEM:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=mosaic.SWIZZLED)

    results = mosaic.launch(
        functools.partial(_kernel, problem=problem),
        {
            "x": x,
            "w": words,
            "divisor": divisor,
            "u": epilogue and epilogue.u,
            "b": epilogue and epilogue.b.reshape(w_rows, TILE, TILE),
            "unit": epilogue and epilogue.unit,
            "bias": epilogue and epilogue.bias,
        },
        {
            "out": jax.ShapeDtypeStruct((len(x), w_rows * TILE), jnp.bfloat16)
            if tiling.whole
            else None,
            "sums": jax.ShapeDtypeStruct(sums, jnp.float32) if tiling.shared else None,
        },
        {
            "x_slots": tiles_of_x(stages, rows, TILE),
            "w_slots": plgpu.SMEM((stages, warpgroups, *layout.TILE_SHAPE), jnp.int32),
            "result": plgpu.SMEM(
                (warpgroups, 2, rows, TILE // 2), jnp.bfloat16, transforms=mosaic.NARROW
            )
            if problem.is_paired
            else tiles_of_x(warpgroups, rows // problem.halves, TILE),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "empty": empty,
            "decoded": tiles_of_x(2, warpgroups, TILE, TILE) if problem.in_memory else None,
            "b_slot": tiles_of_x(warpgroups, TILE, TILE) if epilogue else None,
        },
        name="nvfp4_wide_dx_sm90" if problem.backward else "nvfp4_wide_matmul_sm90",
        interpret=problem.interpret,
        grid=(tiling.blocks,),
        grid_names=("block",),
        cluster=(config.cluster,),
        cluster_names=("rank",),
        num_threads=warpgroups + config.producer,
        thread_name="warpgroup",
    )
    return results.get("out"), results.get("sums")


def _kernel(refs: types.SimpleNamespace, *, problem: Problem) -> None:
    config = problem.config
    number, group = lax.axis_index("block"), lax.axis_index("warpgroup")
    work = _Work.of(problem, number, lax.axis_index("rank"))
    block = _Block(problem, refs, work, group)
    if config.producer:
        pl.when(group == config.warpgroups)(block.fetch_all)
        pl.when(group < config.warpgroups)(block.multiply_all)
    else:
        pl.when(group == 0)(block.ring.fill)
        block.multiply_all()


def _divide(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(a, b), lax.rem(a, b)


@dataclasses.dataclass(frozen=True)
class _Work:
    """Lists the tiles of one block, first whole tiles and then shares of split tiles, and their units of 64 columns.

    Attributes:
      problem: the static parameters, the same for all blocks.
      number: index of the block's cluster.
      rank: index of the block in its cluster.
      turns: number of tiles and shares; each is processed in one turn.
      whole_turns: number of tiles that this block sums over all columns.
      whole_units: number of units of those tiles.
      units: number of units of all tiles and shares.
    """

    problem: Problem
    number: jax.Array
    rank: jax.Array
    turns: jax.Array
    whole_turns: jax.Array
    whole_units: jax.Array
    units: jax.Array

    @classmethod
    def of(cls, problem: Problem, number: jax.Array, rank: jax.Array) -> "_Work":
        """Returns the work of block `rank` of cluster `number`."""
        tiling = problem.tiling
        blocks, whole = tiling.blocks, tiling.whole
        turns = lax.div(whole + tiling.shared * tiling.split - number + blocks - 1, blocks)
        whole_turns = lax.div(whole - number + blocks - 1, blocks)
        whole_units = whole_turns * problem.units_of_tile
        units = whole_units + (turns - whole_turns) * tiling.run
        return cls(problem, number, rank, turns, whole_turns, whole_units, units)

    def tiles_of(self, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the tiles of x and W of a turn. Turns first go along a band of x, then to the next rows of W."""
        tiling = self.problem.tiling
        w_tile, at = _divide(self.number + turn * tiling.blocks, tiling.band)
        bands, w_tile = _divide(w_tile, tiling.whole_w_tiles)
        return bands * tiling.band + at, w_tile * self.problem.config.cluster + self.rank

    def share_of(self, turn: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the tiles of x and W of a turn, and the index of its share of K."""
        tiling = self.problem.tiling
        share, tile = _divide(self.number + turn * tiling.blocks - tiling.whole, tiling.shared)
        w_tile, x_tile = _divide(tile, tiling.x_tiles)
        w_tile = (tiling.whole_w_tiles + w_tile) * self.problem.config.cluster + self.rank
        return x_tile, w_tile, share

    def locate(self, unit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the tiles of x and W of a unit, and its step along K."""
        tiling, located = self.problem.tiling, []
        if tiling.whole:
            turn, at = _divide(unit, self.problem.units_of_tile)
            located.append((*self.tiles_of(turn), at))
        if tiling.shared:
            turn, at = _divide(unit - self.whole_units, tiling.run)
            x_tile, w_tile, share = self.share_of(self.whole_turns + turn)
            located.append((x_tile, w_tile, share * tiling.run + at))
        if len(located) == 1:
            return located[0]
        is_whole = unit < self.whole_units
        return tuple(jnp.where(is_whole, a, b) for a, b in zip(*located, strict=True))


@dataclasses.dataclass(frozen=True)
class _Block:
    """The program of one warpgroup of a block.

    Attributes:
      problem: the static parameters, the same for all blocks.
      refs: operands, results and scratch of `launch`.
      work: the tiles of this block.
      group: index of the warpgroup in the block.
    """

    problem: Problem
    refs: types.SimpleNamespace
    work: _Work
    group: jax.Array

    @functools.cached_property
    def ring(self) -> Ring:
        """The ring buffer of slots. A slot holds a unit of x and W, or x A; B has a buffer of its own."""
        stages, refs = self.problem.config.stages, self.refs
        return Ring(stages, self._copy_unit, refs.full, refs.empty, end=self.work.units)

    # Copies --------------------------------------------------------------------------------------
    def fetch_all(self) -> None:
        """Runs the producer warpgroup, which loads all units."""
        ring = self.ring
        ring.fill()

        @pl.loop(ring.stages, lax.max(ring.end, ring.stages))
        def _refill(unit):
            ring.refill(ring.slot(unit), unit)

    def _copy_unit(self, unit: jax.Array, slot: jax.Array) -> None:
        """Starts the bulk copies of a unit into a slot."""
        refs, steps = self.refs, self.problem.tiling.steps
        x_tile, w_tile, at = self.work.locate(unit)
        of_group = pl.ds(w_tile * self.problem.config.warpgroups, self.problem.config.warpgroups)

        def columns():
            source = refs.w.at[at, of_group] if self.problem.backward else refs.w.at[of_group, at]
            self._copy(source, refs.w_slots.at[slot], refs.x, x_tile, at, slot)

        def branch():
            row = w_tile * self.problem.config.warpgroups * TILE
            ends = itertools.accumulate(self.problem.epilogue.sizes[:-1])
            part = sum((row >= end).astype(jnp.int32) for end in ends)
            self._copy(refs.b.at[of_group], refs.b_slot, refs.u, x_tile, part, slot)

        if self.problem.epilogue is None:
            columns()
        else:
            pl.when(at < steps)(columns)
            # B of the previous tile is no longer read: this slot held its unit or a later one, and is empty again.
            pl.when(at == steps)(branch)

    def _copy(
        self,
        source: jax.Ref,
        w_slot: jax.Ref,
        common: jax.Ref,
        x_tile: jax.Array,
        column: jax.Array,
        slot: jax.Array,
    ) -> None:
        """Starts the copies of the rows of W (or B) of the block, and of the cluster's 64 columns of x (or U)."""
        config, refs = self.problem.config, self.refs
        plgpu.copy_gmem_to_smem(source, w_slot, refs.full.at[slot])
        plgpu.copy_gmem_to_smem(
            common.at[pl.ds(x_tile * config.rows, config.rows), pl.ds(column * TILE, TILE)],
            refs.x_slots.at[slot],
            refs.full.at[slot],
            collective_axes=None if self.problem.interpret or config.cluster == 1 else "rank",
        )

    def _refill_last(self, unit: jax.Array) -> None:
        """Without a producer, refills the slot of the unit before this one."""
        if self.problem.config.producer:
            return
        ring = self.ring
        ahead = unit - 1 + ring.stages

        @pl.when((self.group == 0) & (unit > 0) & (ahead < ring.end))
        def _refill():
            ring.refill(ring.slot(ahead), ahead)

    def _leave(self, unit: jax.Array) -> None:
        ring = self.ring
        slot = ring.slot(unit)
        pl.when(unit + ring.stages < ring.end)(lambda: ring.leave(slot))

    # Sums ----------------------------------------------------------------------------------------
    def multiply_all(self) -> None:
        """Runs a warpgroup that multiplies: all tiles and shares."""
        work, tiling = self.work, self.problem.tiling
        if tiling.whole:
            pl.loop(0, work.whole_turns)(self._one_tile)
        if tiling.shared:
            pl.loop(work.whole_turns, work.turns)(self._one_share)
        plgpu.wait_smem_to_gmem(0)

    def _sum_of(self, first: jax.Array, count: int) -> jax.Array:
        """Sums the products of `count` units; returns unscaled sums, float32 [64, rows]."""

        def sum_over_columns(acc):
            last = first + count - 1
            step = lambda unit, w: self._multiply(unit, acc, w, lambda: self._decoded(unit + 1))
            # The loop is unrolled by two, so that a decoded tile need not be moved to other registers.
            two = lambda i, w: step(first + 2 * i + 1, step(first + 2 * i, w))
            w = lax.fori_loop(0, (count - 1) // 2, two, self._decoded(first))
            if count % 2 == 0:
                w = step(last - 1, w)
            self._multiply(last, acc, w, lambda: None)
            return acc[...]

        shape = (TILE, self.problem.config.rows)
        return pl.run_scoped(sum_over_columns, plgpu.ACC(shape, jnp.float32))

    def _decoded(self, unit: jax.Array) -> jax.Array | None:
        """Waits for a unit's tile and decodes it to registers, or to shared memory (then the result is None)."""
        slot, interpret = self.ring.slot(unit), self.problem.interpret
        with jax.named_scope("load"):
            self.ring.wait(slot)
        with jax.named_scope("decode"):
            tile = self.refs.w_slots.at[slot, self.group]
            w = packed_tile.decode_words(tile[...]) if interpret else packed_tile.decode(tile)
            if not self.problem.in_memory:
                return w
            # All warps wait here, so the product that last read this buffer is done.
            plgpu.commit_smem()
            self.refs.decoded[lax.rem(unit, 2), self.group] = w
            plgpu.commit_smem()
            return None

    def _operand(self, unit: jax.Array, w: jax.Array | None) -> jax.Array | jax.Ref:
        """Returns a decoded tile as the first operand of `wgmma`."""
        if not self.problem.in_memory:
            return w
        ref = self.refs.decoded.at[lax.rem(unit, 2), self.group]
        return ref.T if self.problem.backward else ref

    def _multiply(
        self, unit: jax.Array, acc: jax.Ref, w: jax.Array | None, meanwhile: Callable
    ) -> jax.Array | None:
        """Adds the product of a unit to the accumulator. Calls `meanwhile` while it runs, and returns its result."""
        with jax.named_scope("mma"):
            plgpu.wgmma(acc, self._operand(unit, w), self.refs.x_slots.at[self.ring.slot(unit)].T)
        result = meanwhile()
        self._refill_last(unit)
        plgpu.wgmma_wait(0)
        if not self.problem.in_memory:
            registers.keep_until_here(w)
        self._leave(unit)
        return result

    # Results -------------------------------------------------------------------------------------
    def _one_tile(self, turn: jax.Array) -> None:
        """Sums a tile over all columns, and writes the result."""
        steps = self.problem.tiling.steps
        x_tile, w_tile = self.work.tiles_of(turn)
        first_unit = turn * self.problem.units_of_tile
        w_row = (w_tile * self.problem.config.warpgroups + self.group) * TILE
        total = self._sum_of(first_unit, steps)
        with jax.named_scope("store"):
            if self.problem.epilogue is None:
                self._write_scaled(total, x_tile, w_row)
            else:
                self._write_finished(total, first_unit + steps, x_tile, w_row)

    def _one_share(self, turn: jax.Array) -> None:
        """Sums a tile over a share of the columns, and writes the partial sums."""
        work, tiling, config = self.work, self.problem.tiling, self.problem.config
        x_tile, w_tile, share = work.share_of(turn)
        total = self._sum_of(work.whole_units + (turn - work.whole_turns) * tiling.run, tiling.run)
        with jax.named_scope("store"):
            w_tile -= tiling.whole_w_tiles * config.cluster
            w_row = (w_tile * config.warpgroups + self.group) * TILE
            x_row = x_tile * config.rows
            rows, columns = pl.ds(w_row, TILE), pl.ds(x_row, config.rows)
            registers.store(total, self.refs.sums.at[share, rows, columns])

    def _write_scaled(self, total: jax.Array, x_tile: jax.Array, w_row: jax.Array) -> None:
        halves, rows = self.problem.halves, self.problem.config.rows
        total *= registers.spread(self._multiplier(w_row), 0, total.shape)
        total = total.astype(jnp.bfloat16)
        for half in range(halves):
            first, count = half * (rows // halves), rows // halves
            # Wait until the previous copy has read the buffer.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._store(0, total[:, first : first + count] if halves > 1 else total)
            self._copy_out(x_tile, first, count, w_row)

    def _write_finished(
        self, total: jax.Array, branch_unit: jax.Array, x_tile: jax.Array, w_row: jax.Array
    ) -> None:
        """Applies the epilogue to a tile and writes the result."""
        rows, refs, slot = self.problem.config.rows, self.refs, self.ring.slot(branch_unit)
        # Process so few rows of x at a time that a second float32 tile fits into registers. With a producer, paired
        # rows are processed in three parts, because their two stores take more registers.
        many = 3 if self.problem.is_paired and self.problem.config.producer else 2
        pieces = 1 if rows <= _MOST_AT_ONCE else many
        cuts = (*(rows // (8 * pieces) * 8 * piece for piece in range(pieces)), rows)
        # Rounding before or after the division by DECODED_SCALE is the same, because that is a power of two.
        base = registers.to_bfloat16(total, interpret=self.problem.interpret)
        scale = self._multiplier(w_row)
        bias = (
            None
            if refs.bias is None
            else registers.load_vector(0, refs.bias.at[pl.ds(w_row, TILE)])
        )
        self.ring.wait(slot)
        for first, last in itertools.pairwise(cuts):
            count = last - first
            unit_of_x = registers.load_vector(1, refs.unit.at[pl.ds(x_tile * rows + first, count)])
            added = self._branch(refs.x_slots.at[slot, pl.ds(first, count)], count)
            y = base[:, first:last] if count < rows else base
            y = y.astype(jnp.float32) * registers.spread(scale, 0, y.shape)
            y += registers.rounded_to_bfloat16(added, interpret=self.problem.interpret)
            y *= registers.spread(unit_of_x, 1, y.shape)
            if bias is not None:
                y += registers.spread(bias, 0, y.shape)
            if not first:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._store(first, y.astype(jnp.bfloat16))
        self._refill_last(branch_unit)
        self._leave(branch_unit)
        self._copy_out(x_tile, 0, rows, w_row)

    def _branch(self, u: jax.Ref, count: int) -> jax.Array:
        """Returns the product of B and x A, float32 [64, count]."""

        def multiply(acc):
            plgpu.wgmma(acc, self.refs.b_slot.at[self.group], u.T)
            plgpu.wgmma_wait(0)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((TILE, count), jnp.float32))

    def _store(self, first: int, values: jax.Array) -> None:
        """Stores bfloat16 [64, count], transposed, in the result's buffer in shared memory, from row `first` on."""
        result, rows = self.refs.result.at[self.group], pl.ds(first, values.shape[1])
        if not self.problem.is_paired:
            result.at[rows].T[...] = values
            return
        for half, part in enumerate(paired.halves(values, interpret=self.problem.interpret)):
            result.at[half, rows].T[...] = part

    def _copy_out(self, x_tile: jax.Array, first: int, count: int, w_row: jax.Array) -> None:
        """Starts the copy of a result to rows `first` ... `first + count - 1` of a tile of x."""
        plgpu.commit_smem()
        rows = pl.ds(x_tile * self.problem.config.rows + first, count)
        result, out = self.refs.result.at[self.group], self.refs.out
        if not self.problem.is_paired:
            plgpu.copy_smem_to_gmem(result, out.at[rows, pl.ds(w_row, TILE)])
            return
        column = lax.div(w_row, 2)
        for half, start in enumerate((0, out.shape[1] // 2)):
            to = out.at[rows, pl.ds(start + column, TILE // 2)]
            plgpu.copy_smem_to_gmem(result.at[half], to, commit_group=half == 1)

    def _multiplier(self, w_row: jax.Array) -> jax.Array:
        """Returns the factor for the sums of 64 rows of W from `w_row` on: a scalar, or [64]."""
        divisor = self.refs.divisor
        if divisor.shape == (1,):
            return (1 / layout.DECODED_SCALE) * (1 / divisor[0])
        return (1 / layout.DECODED_SCALE) * (
            1 / registers.load_vector(0, divisor.at[pl.ds(w_row, TILE)])
        )
