"""Operations that all threads of a warpgroup, or several blocks, perform together, and that Pallas lacks."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.mosaic import registers
from pallas_kernels.mosaic.registers import i32, index, llvm, position

utils = mgpu.utils

WARPS = 4


def sync(*, interpret: bool) -> None:
    """Waits for all threads of this warpgroup."""
    if interpret:  # the interpreter reports a race if a bulk copy follows a read without a fence
        plgpu.commit_smem()
    else:
        plgpu.inline_mgpu()(lambda _: utils.warpgroup_barrier())()


def load_rows(ref: jax.Ref, *, is_quarter: bool = False, interpret: bool) -> jax.Array:
    """Loads [8, n] or [16, n] as [64, n] in the layout `WGMMA`, with the rows repeated eight or four times.

    So `wgmma`, which needs 64 rows, can be used, and every warp holds all rows.

    Args:
      ref: [8, n] or [16, n] in shared or device memory, not tiled.
      is_quarter: whether each warp loads only its own n / 4 columns, warp 0 the first ones. The result is then
        [64, n / 4], which is in no standard layout: use it for elementwise operations and `store_rows` only.
      interpret: whether this runs on a CPU, where `is_quarter` has no effect.
    """
    rows, columns = ref.shape
    if interpret:
        return jnp.concatenate([ref[...]] * (64 // rows))
    width = columns // WARPS if is_quarter else columns
    kind = plgpu.ShapeDtypeStruct((64, width), ref.dtype, layout=plgpu.Layout.WGMMA)

    def emit(_: mgpu.LaunchContext, ref: ir.Value) -> mgpu.FragmentedArray:
        warp, row, column = position()
        pair = ir.VectorType.get((2,), ir.MemRefType(ref.type).element_type)
        begin = arith.muli(warp, i32(width if is_quarter else 0))
        pairs = []
        for at in range(width // 8):
            where = arith.addi(arith.addi(begin, column), i32(8 * at))
            loaded = [
                vector.load(pair, ref, [index(of_half), index(where)])
                for of_half in _rows_of_halves(row, rows)
            ]
            # A warp holds 16 rows. If there are only 8, its last 8 repeat the first 8.
            pairs += [loaded[0], loaded[-1]]
        return registers.fragment(kind, pairs)

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=kind)(emit)(ref)


def store_rows(
    values: jax.Array, ref: jax.Ref, *, is_quarter: bool = False, interpret: bool
) -> None:
    """Stores the first rows of values that have the form of `load_rows`. Each warp stores n / 4 of the columns.

    Args:
      values: [64, n], in which the rows repeat every 8 or 16; with `is_quarter`, [64, n / 4].
      ref: [rows, n] in device memory, with at most 8 or 16 rows.
      is_quarter: whether `values` were loaded with `is_quarter`.
      interpret: whether this runs on a CPU, where `is_quarter` has no effect.
    """
    rows, columns = ref.shape
    if interpret:
        ref[...] = values[:rows]
        return
    width = columns // WARPS

    def emit(_: mgpu.LaunchContext, values: mgpu.FragmentedArray, ref: ir.Value) -> None:
        warp, row, column = position()
        halves = [
            (half, of_half, arith.cmpi(arith.CmpIPredicate.ult, of_half, i32(rows)))
            for half, of_half in enumerate(_rows_of_halves(row, rows))
        ]

        def store(half: int, of_half: ir.Value, begin: ir.Value, first: int) -> None:
            for at in range(width // 8):
                where = arith.addi(arith.addi(begin, column), i32(8 * at))
                pair = values.registers.flat[2 * (first + at) + half]
                vector.store(pair, ref, [index(of_half), index(where)])

        for half, of_half, is_row in halves:
            if is_quarter:
                with utils.when(is_row):
                    store(half, of_half, arith.muli(warp, i32(width)), 0)
                continue
            for number in range(WARPS):
                is_warp = arith.cmpi(arith.CmpIPredicate.eq, warp, i32(number))
                with utils.when(arith.andi(is_row, is_warp)):
                    store(half, of_half, i32(number * width), number * width // 8)

    arg_types = (plgpu.Layout.WGMMA, plgpu.RefType())
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(values, ref)


def load_row_values(ref: jax.Ref) -> jax.Array:
    """Loads [8] or [16] as [64]: one value for each row that `load_rows` returns."""
    (rows,) = ref.shape
    kind = plgpu.ShapeDtypeStruct((64,), ref.dtype, layout=plgpu.Layout.WGMMA.reduce(1))

    def emit(_: mgpu.LaunchContext, ref: ir.Value) -> mgpu.FragmentedArray:
        _, row, _ = position()
        single = ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type)
        loaded = [
            vector.load(single, ref, [index(of_half)]) for of_half in _rows_of_halves(row, rows)
        ]
        return registers.fragment(kind, [loaded[0], loaded[-1]])

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=kind)(emit)(ref)


def store_row_values(values: jax.Array, ref: jax.Ref, *, interpret: bool) -> None:
    """Stores the first 8 or 16 of values [64] in the form that `load_row_values` returns."""
    (rows,) = ref.shape
    if interpret:
        ref[...] = values[:rows]
        return

    def emit(_: mgpu.LaunchContext, values: mgpu.FragmentedArray, ref: ir.Value) -> None:
        warp, row, column = position()
        is_first = arith.cmpi(arith.CmpIPredicate.eq, arith.ori(warp, column), i32(0))
        with utils.when(is_first):
            for half, of_half in enumerate(_rows_of_halves(row, rows)):
                vector.store(values.registers.flat[half], ref, [index(of_half)])

    arg_types = (plgpu.Layout.WGMMA.reduce(1), plgpu.RefType())
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(values, ref)


def _rows_of_halves(row: ir.Value, rows: int) -> list[ir.Value]:
    """Returns the rows of a thread: `row`, as `position` returns it, and `row` + 8 if there are more than 8 rows."""
    return [row] if rows <= 8 else [row, arith.addi(row, i32(8))]


def put_row(
    row: jax.Array, tile: jax.Ref, slot: jax.Array, chunk: int, *, clear: bool, interpret: bool
) -> None:
    """Writes 64 columns of one row of a tile, without reading the rest of the tile.

    Args:
      row: [64] of a 16-bit type, in the layout `WGMMA.reduce(0)`.
      tile: [64, C] of the same type in shared memory, tiled by (8, 64) and swizzled by 128 bytes.
      slot: int32, index of the row.
      chunk: which 64 columns: 64 * chunk, ....
      clear: whether to set these columns of all later rows to 0.
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
            """Returns the address of a row's columns: a swizzle atom of 1024 bytes holds 8 rows of 128 bytes."""
            of_tile = arith.muli(arith.divui(of_row, i32(8)), i32(chunks))
            at = arith.muli(arith.addi(of_tile, chunk), i32(1024))
            in_tile = arith.muli(arith.remui(of_row, i32(8)), i32(128))
            return arith.addi(base, arith.addi(at, in_tile))

        if clear:  # two threads clear one row
            number = arith.divui(thread, i32(2))
            after = arith.cmpi(arith.CmpIPredicate.ugt, number, slot)
            half = arith.muli(arith.remui(thread, i32(2)), i32(64))
            at = arith.addi(begin(number), half)
            for sixteen in range(0, 64, 16):
                to = arith.addi(at, i32(sixteen))
                store = "st.shared.v4.b32 [$0], {$1, $1, $1, $1};"
                utils.inline_ptx(store, to, i32(0), predicate=after)
        # Thread t < 4 has columns 8 * i + 2 * t and 8 * i + 2 * t + 1. The swizzle moves 16 bytes, eight columns.
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
    """Increments an atomic counter for this warpgroup, and finds out whether the warpgroup is the last to do so.

    The last warpgroup sees everything that the others wrote to device memory before they incremented the counter. Its
    own increment sets the counter back to 0.

    Args:
      counter: int32 in device memory, 0 before the first warpgroup.
      last: int32, the number of warpgroups to count, minus one.
      flag: int32 [1] in this warpgroup's shared memory. It becomes 1 for the last warpgroup, otherwise 0.
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


def put_units(
    squares: jax.Ref, count: int, width: int, eps: float, out: jax.Ref, *, interpret: bool
) -> None:
    """Computes RMSNorm's factor 1 / RMS from partial sums of squares: out = 1 / sqrt(sum / width + eps).

    `sum` is over the first `count` rows of `squares`. Each thread of this warpgroup computes one column.

    Args:
      squares: float32 [R, M] in device memory, M at most 128; it may be some columns of a wider array.
      count: number of rows to add up.
      width: number of values that were squared for each column.
      eps: epsilon of the norm.
      out: float32 [M] in shared memory.
      interpret: whether this runs on a CPU.
    """
    if interpret:
        out[...] = lax.rsqrt(jnp.sum(squares[...][:count], axis=0) / width + eps)
        return

    def emit(_: mgpu.LaunchContext, squares: ir.Value, out: ir.Value) -> None:
        kind, f32 = ir.MemRefType(squares.type), ir.F32Type.get()
        columns, ((stride, _), _) = kind.shape[1], kind.get_strides_and_offset()
        base, number = utils.memref_ptr(squares), registers.thread()
        at = lambda begin, offset: utils.getelementptr(begin, [offset], f32)
        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, number, i32(columns))):
            rows = [
                llvm.load(f32, at(base, arith.addi(number, i32(row * stride))))
                for row in range(count)
            ]
            mean = arith.divf(functools.reduce(arith.addf, rows), utils.c(width, f32))
            mean = arith.addf(mean, utils.c(eps, f32))
            unit = llvm.inline_asm(f32, [mean], "rsqrt.approx.f32 $0, $1;", "=f,f")
            llvm.store(unit, at(utils.memref_ptr(out), number))

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2)(emit)(squares, out)


def publish(counter: jax.Ref) -> None:
    """Increments a counter to signal that everything this warpgroup wrote to device memory is complete.

    A block that sees the new count in `await_published` also sees these writes.

    Args:
      counter: int32 in device memory.
    """

    def emit(_: mgpu.LaunchContext, counter: ir.Value) -> None:
        # Bulk copies will read what was written. They use the async proxy, so a proxy fence is needed.
        utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
        utils.warpgroup_barrier()
        predicate = utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)
        code = "@$1 red.release.gpu.global.add.u32 [$0], 1;"
        utils.inline_ptx(code, utils.memref_ptr(counter), predicate, has_side_effects=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(emit)(counter)


def await_published(counter: jax.Ref, readers: jax.Ref, count: int, blocks: int) -> None:
    """Waits until `count` warpgroups have called `publish`.

    One warpgroup of each block calls this. The last of these blocks to finish waiting sets both counters back to 0.

    Args:
      counter: int32 in device memory, 0 before the first count.
      readers: int32 in device memory, 0 before the first block waits.
      count: number of warpgroups to wait for.
      blocks: number of blocks that wait.
    """

    def emit(_: mgpu.LaunchContext, counter: ir.Value, readers: ir.Value) -> None:
        counter, readers = map(utils.memref_ptr, (counter, readers))
        predicate = utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)
        # Only one thread polls: the requests of all threads would delay the increments that they wait for.
        with utils.when(predicate):
            utils.inline_ptx(
                "{ .reg .b32 seen; .reg .pred is_early;\n"
                "again: ld.acquire.gpu.global.b32 seen, [$0];\n"
                "setp.lt.u32 is_early, seen, $1;\n"
                "@is_early bra again; }",
                counter,
                i32(count),
                has_side_effects=True,
            )
        utils.warpgroup_barrier()
        utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
        utils.inline_ptx(
            "{ .reg .b32 before; .reg .pred is_last;\n"
            "setp.ne.u32 is_last, 0, 0;\n"
            "@$3 atom.relaxed.gpu.global.inc.u32 before, [$1], $2;\n"
            "@$3 setp.eq.u32 is_last, before, $2;\n"
            "@is_last st.relaxed.gpu.global.b32 [$0], 0; }",
            counter,
            readers,
            i32(blocks - 1),
            predicate,
            has_side_effects=True,
        )

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2)(emit)(counter, readers)
