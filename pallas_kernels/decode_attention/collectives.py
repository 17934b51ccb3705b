"""What the threads of a warpgroup, or of several blocks, do together and Pallas has no words for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

utils = mgpu.utils
llvm = utils.llvm  # which jax.extend.mlir leaves out

# Float32 values of shared memory that one warpgroup's `reduce_rows` needs: 8 of each warp, for each operation.
SCRATCH = 64


def reduce_rows(values: jax.Array, operation: str, scratch: jax.Ref) -> jax.Array:
    """Reduces float32 [64, 8] in the layout `WGMMA` to [8].

    Pallas' own reduction across warps has one scratch for all warpgroups of a block, which would overwrite
    each other's, and waits twice. This one waits once, so that the two operations must take turns.

    Args:
      values: of one warpgroup.
      operation: "max" or "add".
      scratch: float32 [SCRATCH] in shared memory, this warpgroup's.
    """
    kind = plgpu.ShapeDtypeStruct((8,), jnp.float32, layout=plgpu.Layout.WGMMA.reduce(0))
    combine = {"max": arith.maximumf, "add": arith.addf}[operation]
    half = {"max": 0, "add": SCRATCH // 2}[operation]

    def emit(
        _: mgpu.LaunchContext, values: mgpu.FragmentedArray, scratch: ir.Value
    ) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        # A thread has columns 2 * (lane % 4) and the next, of rows lane // 4 and 8 more.
        own = functools.reduce(combine, values.registers.flat)
        for distance in (4, 8, 16):
            own = combine(own, utils.shfl_bfly(own, distance))
        thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
        warp = arith.divui(thread, utils.c(32, i32))
        lane = arith.remui(thread, utils.c(32, i32))
        pair = arith.muli(arith.remui(lane, utils.c(4, i32)), utils.c(2, i32))

        def place(of_warp: ir.Value) -> ir.Value:
            at = arith.addi(arith.muli(of_warp, utils.c(8, i32)), pair)
            at = arith.addi(at, utils.c(half, i32))
            return arith.index_cast(ir.IndexType.get(), at)

        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, lane, utils.c(4, i32))):
            vector.store(own, scratch, [place(warp)])
        utils.warpgroup_barrier()
        of_warps = [
            vector.load(own.type, scratch, [place(utils.c(warp, i32))]) for warp in range(4)
        ]
        layout = kind.layout.to_mgpu()
        registers = np.empty(layout.registers_shape((8,)), object)
        registers[...] = combine(combine(*of_warps[:2]), combine(*of_warps[2:]))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    arg_types = (plgpu.Layout.WGMMA, plgpu.RefType())
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=kind)(emit)(values, scratch)


def put_row(
    row: jax.Array, tile: jax.Ref, slot: jax.Array, chunk: jax.Array, *, clear: bool
) -> None:
    """Puts 64 columns of a row into a tile, without reading the rest of it.

    Args:
      row: 16-bit [64], in the layout that `WGMMA` reduces to along rows.
      tile: the same type [64, C] in shared memory, in tiles of (8, 64) and swizzled by 128 bytes.
      slot: int32, which row.
      chunk: int32, which 64 columns.
      clear: whether the rows after it become 0, in these columns.
    """
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def emit(
        _: mgpu.LaunchContext,
        row: mgpu.FragmentedArray,
        tile: ir.Value,
        slot: mgpu.FragmentedArray,
        chunk: mgpu.FragmentedArray,
    ) -> None:
        i32 = ir.IntegerType.get_signless(32)
        const = lambda value: utils.c(value, i32)
        chunks = ir.MemRefType(tile.type).shape[1]
        slot, chunk = slot.registers.item(), chunk.registers.item()
        thread = arith.remui(utils.thread_idx(), const(128))
        base = llvm.ptrtoint(i32, utils.memref_ptr(tile))

        def begin(of_row: ir.Value) -> ir.Value:
            """Where the columns of a row begin: tiles of 1024 bytes hold 8 rows of 128."""
            of_tile = arith.muli(arith.divui(of_row, const(8)), const(chunks))
            at = arith.muli(arith.addi(of_tile, chunk), const(1024))
            in_tile = arith.muli(arith.remui(of_row, const(8)), const(128))
            return arith.addi(base, arith.addi(at, in_tile))

        if clear:  # a row by two threads
            own = arith.divui(thread, const(2))
            after = arith.cmpi(arith.CmpIPredicate.ugt, own, slot)
            half = arith.muli(arith.remui(thread, const(2)), const(64))
            at = arith.addi(begin(own), half)
            for sixteen in range(0, 64, 16):
                to = arith.addi(at, const(sixteen))
                store = "st.shared.v4.b32 [$0], {$1, $1, $1, $1};"
                utils.inline_ptx(store, to, const(0), predicate=after)
        # Thread t < 4 has columns 8 * i + 2 * t and the next; eight columns are 16 bytes.
        at = arith.addi(begin(slot), arith.muli(thread, const(4)))
        is_first = arith.cmpi(arith.CmpIPredicate.ult, thread, const(4))
        for i, pair in enumerate(row.registers.flat):
            moved = arith.xori(const(i), arith.remui(slot, const(8)))
            to = arith.addi(at, arith.muli(moved, const(16)))
            value = utils.bitcast(pair, i32)
            utils.inline_ptx("st.shared.b32 [$0], $1;", to, value, predicate=is_first)

    scalar = plgpu.Layout.WG_SPLAT(())
    arg_types = (plgpu.Layout.WGMMA.reduce(0), plgpu.RefType(transforms), scalar, scalar)
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(row, tile, slot, chunk)


def count(counter: jax.Ref, last: jax.Array, flag: jax.Ref) -> None:
    """Counts this warpgroup, and tells it whether it is the last.

    What all counted warpgroups wrote to device memory before is seen by the last one after. The last one sets
    the counter to 0 again.

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
