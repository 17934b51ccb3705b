"""Transposed stores from a warpgroup's registers. Pallas does not offer them for these layouts."""

from collections.abc import Callable

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.mosaic.registers import llvm


def store(values: jax.Array, ref: jax.Ref) -> None:
    """Stores the transpose of values in device memory: ref[:, :] = values.T.

    Args:
      values: bfloat16 [64, M] in the layout `WGMMA`.
      ref: bfloat16 [M, 64] in device memory.
    """

    def offset_of(ref: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        return arith.addi(arith.muli(column, _index(stride)), row)

    _store(values, ref, offset_of, plgpu.RefType())


def store_swizzled(values: jax.Array, ref: jax.Ref, first: int) -> None:
    """Stores ref[:, first : first + 64] = values.T in the shared memory layout that `wgmma` reads.

    Args:
      values: bfloat16 [64, M] in the layout `WGMMA`.
      ref: bfloat16 [M, K] in shared memory, tiled by (8, 64) and swizzled by 128 bytes.
      first: a multiple of 64.
    """
    row_tiles = ref.shape[1] // 64

    def offset_of(_: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
        # A row of a tile has 128 bytes. In row c, the i-th 16 bytes are stored at position i XOR c % 8.
        eight = _index(8)
        tile = arith.addi(
            arith.muli(arith.divui(column, eight), _index(row_tiles)), _index(first // 64)
        )
        line = arith.remui(column, eight)
        piece = arith.xori(arith.divui(row, eight), line)
        in_tile = arith.addi(arith.muli(line, _index(64)), arith.muli(piece, eight))
        start = arith.addi(arith.muli(tile, _index(512)), in_tile)
        return arith.addi(start, arith.remui(row, eight))

    kind = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
    _store(values, ref, offset_of, kind)


def _store(
    values: jax.Array, ref: jax.Ref, offset_of: Callable[..., ir.Value], kind: plgpu.RefType
) -> None:
    transposable = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)

    def emit(_: mgpu.LaunchContext, values: mgpu.FragmentedArray, ref: ir.Value) -> None:
        i64 = ir.IntegerType.get_signless(64)
        base = mgpu.utils.memref_ptr(ref)
        places = values.layout.thread_idxs(values.shape)
        # A register holds two values that are adjacent along the rows of `values`, so they are contiguous in `ref`.
        for (row, column), pair in zip(places, values.registers.flat, strict=True):
            offset = arith.index_cast(i64, offset_of(ref, row, column))
            llvm.store(pair, mgpu.utils.getelementptr(base, [offset], ir.BF16Type.get()))

    arg_types = (plgpu.Layout.WGMMA_TRANSPOSED, kind)
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(transposable, ref)


def _index(value: int) -> ir.Value:
    return mgpu.c(value, ir.IndexType.get())
