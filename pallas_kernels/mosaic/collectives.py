"""Joint operations of the threads of a warpgroup, or of several blocks, that Pallas does not offer."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.mosaic import registers
from pallas_kernels.mosaic.registers import i32, llvm

utils = mgpu.utils

WARPS = 4


def sync(*, interpret: bool) -> None:
    """Waits for all threads of this warpgroup."""
    if interpret:  # the interpreter needs a fence between a read and the next bulk copy
        plgpu.commit_smem()
    else:
        plgpu.inline_mgpu()(lambda _: utils.warpgroup_barrier())()


def load_rows(ref: jax.Ref, *, is_quarter: bool = False, interpret: bool) -> jax.Array:
    """Loads [8, n] or [16, n] as [64, n] in the layout `WGMMA`: all rows eight times, or four times.

    So a few rows fill an instruction that takes 64, and each warp has all of them.

    Args:
      ref: in shared or device memory, not tiled.
      is_quarter: whether each warp loads its own n / 4 columns, warp 0 the first ones. The result
        is [64, n / 4], and only `store_rows` can use it.
      interpret: whether this runs on a CPU, where there are no quarters.
    """
    rows, columns = ref.shape
    if interpret:
        return jnp.concatenate([ref[...]] * (64 // rows))
    width = columns // WARPS if is_quarter else columns
    kind = plgpu.ShapeDtypeStruct((64, width), ref.dtype, layout=plgpu.Layout.WGMMA)

    def emit(_: mgpu.LaunchContext, ref: ir.Value) -> mgpu.FragmentedArray:
        warp, row, column = _place()
        pair = ir.VectorType.get((2,), ir.MemRefType(ref.type).element_type)
        begin = arith.muli(warp, i32(width if is_quarter else 0))
        layout = kind.layout.to_mgpu()
        registers = np.empty(layout.registers_shape((64, width)), object)
        for at in range(width // 8):
            where = arith.addi(arith.addi(begin, column), i32(8 * at))
            loaded = [
                vector.load(pair, ref, [_index(of_half), _index(where)])
                for of_half in _rows_of_halves(row, rows)
            ]
            # Where there are 8, rows 8 and more of a warp's 16 are those before.
            registers.flat[2 * at], registers.flat[2 * at + 1] = loaded[0], loaded[-1]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=kind)(emit)(ref)


def store_rows(
    values: jax.Array, ref: jax.Ref, *, is_quarter: bool = False, interpret: bool
) -> None:
    """Stores the first rows of what `load_rows` made, or of what came of it; each warp a quarter of the columns.

    Args:
      values: [64, n], every 8 or 16 rows the same; or of quarters, [64, n / 4].
      ref: [rows, n] in device memory, at most so many rows.
      is_quarter: whether `values` are of quarters.
      interpret: whether this runs on a CPU, where there are no quarters.
    """
    rows, columns = ref.shape
    if interpret:
        ref[...] = values[:rows]
        return
    width = columns // WARPS

    def emit(_: mgpu.LaunchContext, values: mgpu.FragmentedArray, ref: ir.Value) -> None:
        warp, row, column = _place()
        halves = [
            (half, of_half, arith.cmpi(arith.CmpIPredicate.ult, of_half, i32(rows)))
            for half, of_half in enumerate(_rows_of_halves(row, rows))
        ]

        def store(half: int, of_half: ir.Value, begin: ir.Value, first: int) -> None:
            for at in range(width // 8):
                where = arith.addi(arith.addi(begin, column), i32(8 * at))
                pair = values.registers.flat[2 * (first + at) + half]
                vector.store(pair, ref, [_index(of_half), _index(where)])

        for half, of_half, is_row in halves:
            if is_quarter:
                with utils.when(is_row):
                    store(half, of_half, arith.muli(warp, i32(width)), 0)
                continue
            for own in range(WARPS):
                is_own = arith.cmpi(arith.CmpIPredicate.eq, warp, i32(own))
                with utils.when(arith.andi(is_row, is_own)):
                    store(half, of_half, i32(own * width), own * width // 8)

    arg_types = (plgpu.Layout.WGMMA, plgpu.RefType())
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(values, ref)


def load_row_values(ref: jax.Ref) -> jax.Array:
    """Loads [8] or [16] as [64], a value for each row of what `load_rows` makes."""
    (rows,) = ref.shape
    kind = plgpu.ShapeDtypeStruct((64,), ref.dtype, layout=plgpu.Layout.WGMMA.reduce(1))

    def emit(_: mgpu.LaunchContext, ref: ir.Value) -> mgpu.FragmentedArray:
        _, row, _ = _place()
        single = ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type)
        layout = kind.layout.to_mgpu()
        registers = np.empty(layout.registers_shape((64,)), object)
        loaded = [
            vector.load(single, ref, [_index(of_half)]) for of_half in _rows_of_halves(row, rows)
        ]
        registers.flat[0], registers.flat[1] = loaded[0], loaded[-1]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=kind)(emit)(ref)


def store_row_values(values: jax.Array, ref: jax.Ref, *, interpret: bool) -> None:
    """Stores the first 8 or 16 of [64], a value for each row, every so many the same."""
    (rows,) = ref.shape
    if interpret:
        ref[...] = values[:rows]
        return

    def emit(_: mgpu.LaunchContext, values: mgpu.FragmentedArray, ref: ir.Value) -> None:
        warp, row, column = _place()
        is_first = arith.cmpi(arith.CmpIPredicate.eq, arith.ori(warp, column), i32(0))
        with utils.when(is_first):
            for half, of_half in enumerate(_rows_of_halves(row, rows)):
                vector.store(values.registers.flat[half], ref, [_index(of_half)])

    arg_types = (plgpu.Layout.WGMMA.reduce(1), plgpu.RefType())
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(values, ref)


def _place() -> tuple[ir.Value, ir.Value, ir.Value]:
    """A thread's warp, and its row of 8 and first column of 8 in the layout `WGMMA`."""
    thread = registers.thread()
    lane = arith.remui(thread, i32(32))
    column = arith.muli(arith.remui(lane, i32(4)), i32(2))
    return arith.divui(thread, i32(32)), arith.divui(lane, i32(4)), column


def _rows_of_halves(row: ir.Value, rows: int) -> list[ir.Value]:
    """Which rows a thread has: the one that `_place` says, and if there are more than 8 the 8th after it."""
    return [row] if rows <= 8 else [row, arith.addi(row, i32(8))]


def _index(value: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), value)


def put_row(
    row: jax.Array, tile: jax.Ref, slot: jax.Array, chunk: int, *, clear: bool, interpret: bool
) -> None:
    """Puts 64 columns of a row into a tile, without reading the rest of it.

    Args:
      row: 16-bit [64], in the layout that `WGMMA` reduces to along rows.
      tile: the same type [64, C] in shared memory, in tiles of (8, 64) and swizzled by 128 bytes.
      slot: int32, which row.
      chunk: which 64 columns.
      clear: whether the rows after it become 0, in these columns.
      interpret: whether this runs on a CPU.
    """
    if interpret:
        _put_row_interpreted(row, tile.at[:, pl.ds(64 * chunk, 64)], slot, clear=clear)
        return
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def emit(
        _: mgpu.LaunchContext,
        row: mgpu.FragmentedArray,
        tile: ir.Value,
        slot: mgpu.FragmentedArray,
        chunk: mgpu.FragmentedArray,
    ) -> None:
        word = ir.IntegerType.get_signless(32)
        chunks = ir.MemRefType(tile.type).shape[1]
        slot, chunk = slot.registers.item(), chunk.registers.item()
        thread = registers.thread()
        base = llvm.ptrtoint(word, utils.memref_ptr(tile))

        def begin(of_row: ir.Value) -> ir.Value:
            """Where the columns of a row begin: tiles of 1024 bytes hold 8 rows of 128."""
            of_tile = arith.muli(arith.divui(of_row, i32(8)), i32(chunks))
            at = arith.muli(arith.addi(of_tile, chunk), i32(1024))
            in_tile = arith.muli(arith.remui(of_row, i32(8)), i32(128))
            return arith.addi(base, arith.addi(at, in_tile))

        if clear:  # a row by two threads
            own = arith.divui(thread, i32(2))
            after = arith.cmpi(arith.CmpIPredicate.ugt, own, slot)
            half = arith.muli(arith.remui(thread, i32(2)), i32(64))
            at = arith.addi(begin(own), half)
            for sixteen in range(0, 64, 16):
                to = arith.addi(at, i32(sixteen))
                store = "st.shared.v4.b32 [$0], {$1, $1, $1, $1};"
                utils.inline_ptx(store, to, i32(0), predicate=after)
        # Thread t < 4 has columns 8 * i + 2 * t and the next; eight columns are 16 bytes.
        at = arith.addi(begin(slot), arith.muli(thread, i32(4)))
        is_first = arith.cmpi(arith.CmpIPredicate.ult, thread, i32(4))
        for i, pair in enumerate(row.registers.flat):
            moved = arith.xori(i32(i), arith.remui(slot, i32(8)))
            to = arith.addi(at, arith.muli(moved, i32(16)))
            value = utils.bitcast(pair, word)
            utils.inline_ptx("st.shared.b32 [$0], $1;", to, value, predicate=is_first)

    scalar = plgpu.Layout.WG_SPLAT(())
    arg_types = (plgpu.Layout.WGMMA.reduce(0), plgpu.RefType(transforms), scalar, scalar)
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(row, tile, slot, chunk)


def _put_row_interpreted(row: jax.Array, tile: jax.Ref, slot: jax.Array, *, clear: bool) -> None:
    old = tile[...]
    slots = plgpu.broadcasted_iota(jnp.int32, old.shape, 0, layout=plgpu.Layout.WGMMA)
    rest = jnp.where(slots > slot, jnp.zeros_like(old), old) if clear else old
    tile[...] = jnp.where(slots == slot, lax.broadcast_in_dim(row, old.shape, (1,)), rest)


def count(counter: jax.Ref, last: jax.Array, flag: jax.Ref) -> None:
    """Counts this warpgroup, and finds out whether it is the last.

    The last warpgroup sees everything that the counted warpgroups wrote to device memory before. It resets the
    counter to 0.

    Args:
      counter: int32 in device memory, 0 before the first.
      last: int32, how many others are counted.
      flag: int32 [1] in shared memory, this warpgroup's; becomes 1 for the last, otherwise 0.
    """

    def emit(
        _: mgpu.LaunchContext, counter: ir.Value, last: mgpu.FragmentedArray, flag: ir.Value
    ) -> None:
        utils.warpgroup_barrier()
        predicate = utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)
        utils.inline_ptx(
            "{ .reg .b32 before, is_last; .reg .pred is_equal;\n"
            "@$3 atom.acq_rel.gpu.global.inc.u32 before, [$0], $1;\n"
            "@$3 setp.eq.u32 is_equal, before, $1;\n"
            "@$3 selp.b32 is_last, 1, 0, is_equal;\n"
            "@$3 st.shared.b32 [$2], is_last; }",
            utils.memref_ptr(counter),
            last.registers.item(),
            utils.memref_ptr(flag),
            predicate,
            has_side_effects=True,
        )
        utils.warpgroup_barrier()

    arg_types = (plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), plgpu.RefType())
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(counter, last, flag)
