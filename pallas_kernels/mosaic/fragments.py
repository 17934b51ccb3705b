"""Stores and loads float32 [64, M] sums in device memory, in the order of a warpgroup's registers.

Eight columns of [64, M] form a chunk of 512 values (`PIECE`). In it, thread 32 w + 4 g + t has four contiguous
values: columns 2 t and 2 t + 1 of row 16 w + g, then the same columns of row 16 w + g + 8. So a thread moves 16 bytes
with one instruction, and a warp moves 512 contiguous bytes. For a matrix stored by rows, twice as many instructions
are needed, and each touches eight cache lines.
"""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.mosaic.registers import elements, fragment, i32, llvm, thread, vectors

# Number of rows that a warpgroup holds.
TILE = 64
COLUMNS, PIECE = 8, TILE * 8


def shape(n: int, m: int) -> tuple[int, int, int]:
    """Returns the shape of [N, M] stored as chunks. N must be a multiple of 64, and M of 8."""
    return n // TILE, m // COLUMNS, PIECE


def to_rows(pieces: jax.Array) -> jax.Array:
    """Converts chunks [..., N / 64, M / 8, 512] to [..., N, M]."""
    *stack, tiles, columns, _ = pieces.shape
    pieces = pieces.reshape(*stack, tiles, columns, 4, 8, 4, 2, 2)
    # Axes: tile, c, w, g, t, half, pair -> tile, w, half, g, c, t, pair.
    order = [0, 2, 5, 3, 1, 4, 6]
    pieces = pieces.transpose(*range(len(stack)), *(len(stack) + axis for axis in order))
    return pieces.reshape(*stack, tiles * TILE, columns * COLUMNS)


def from_rows(values: jax.Array) -> jax.Array:
    """Converts [N, M] to chunks [N / 64, M / 8, 512]."""
    n, m = values.shape
    values = values.reshape(n // TILE, 4, 2, 8, m // COLUMNS, 4, 2)
    return values.transpose(0, 4, 1, 3, 5, 2, 6).reshape(shape(n, m))


def store(values: jax.Array, ref: jax.Ref, *, interpret: bool) -> None:
    """Stores values as chunks.

    Args:
      values: float32 [64, M] in the layout `WGMMA`.
      ref: float32 [M / 8, 512] in device memory.
      interpret: run on a CPU.
    """
    if interpret:
        ref[...] = from_rows(values)[0]
        return
    arg_types = (plgpu.Layout.WGMMA, plgpu.RefType())
    plgpu.inline_mgpu(arg_types=arg_types)(_emit_store)(values, ref)


def load(ref: jax.Ref, *, interpret: bool) -> jax.Array:
    """Loads chunks [M / 8, 512] from device memory as float32 [64, M] in the layout `WGMMA`."""
    if interpret:
        return to_rows(ref[...][None])
    size = (TILE, ref.shape[0] * COLUMNS)
    kind = plgpu.ShapeDtypeStruct(size, jnp.float32, layout=plgpu.Layout.WGMMA)
    emit = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=kind)
    return emit(lambda _, ref: _emit_load(ref, kind))(ref)


def _emit_store(_: mgpu.LaunchContext, values: mgpu.FragmentedArray, ref: ir.Value) -> None:
    # Registers are ordered by eight columns, then by half (rows g and g + 8).
    flat = [value for pair in values.registers.flat for value in elements(pair)]
    for column, four in enumerate(vectors(flat, 4)):
        llvm.store(four, _address(ref, column), alignment=16)


def _emit_load(ref: ir.Value, kind: plgpu.ShapeDtypeStruct) -> mgpu.FragmentedArray:
    four = ir.VectorType.get((4,), ir.F32Type.get())
    columns = range(kind.shape[1] // COLUMNS)
    loaded = [llvm.load(four, _address(ref, column), alignment=16) for column in columns]
    flat = [value for vector in loaded for value in elements(vector)]
    return fragment(kind, vectors(flat, 2))


def _address(ref: ir.Value, column: int) -> ir.Value:
    """Returns the address of this thread's four values in chunk `column`."""
    first = arith.addi(arith.muli(thread(), i32(4)), i32(PIECE * column))
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [first], ir.F32Type.get())
