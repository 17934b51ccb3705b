"""Operations on pairs of rows of [64, M], 16 w + g and 16 w + 8 + g. In the layout `WGMMA` one thread holds both."""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.mosaic import registers
from pallas_kernels.mosaic.registers import elements, fragment, i32, llvm, thread

_COLUMNS = 8


# A layout of 32 rows. Each warp has eight of them, and a thread has two adjacent values of a row, as in `WGMMA`.
_HALF = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def halves(values: jax.Array, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Splits pairs of rows. No value leaves its thread.

    Args:
      values: bfloat16 [64, M] in the layout `WGMMA`.
      interpret: whether this runs on a CPU.

    Returns:
      The first rows of all pairs, and the second rows: bfloat16 [32, M] each, in the order of the pairs.
    """
    rows, columns = values.shape
    if interpret:
        first, second = jnp.moveaxis(values.reshape(rows // 16, 2, 8, columns), 1, 0)
        return first.reshape(rows // 2, columns), second.reshape(rows // 2, columns)
    kind = plgpu.ShapeDtypeStruct((rows // 2, columns), values.dtype, layout=_HALF)

    def emit(_: mgpu.LaunchContext, values: mgpu.FragmentedArray) -> tuple:
        return tuple(fragment(kind, list(values.registers.flat[half::2])) for half in range(2))

    arg_types = (plgpu.Layout.WGMMA,)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=(kind, kind))(emit)(values)


def gate(values: jax.Array, *, interpret: bool) -> jax.Array:
    """Computes SwiGLU, silu(first row) * second row, for all pairs of rows; `store` stores the result.

    Args:
      values: float32 [64, M] in the layout `WGMMA`.
      interpret: whether this runs on a CPU.

    Returns:
      bfloat16 [32, M]. On the device its shape is [64, M / 2], with M rounded up to a multiple of 16, in an order
      that only `store` knows.
    """
    rows, columns = values.shape
    if interpret:
        first, second = jnp.moveaxis(values.reshape(rows // 16, 2, 8, columns), 1, 0)
        result = first / (1 + jnp.exp(-first)) * second
        return result.astype(jnp.bfloat16).reshape(rows // 2, columns)
    odd = columns // _COLUMNS % 2
    shape = (rows, (columns // _COLUMNS + odd) // 2 * _COLUMNS)
    kind = plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    def emit(_: mgpu.LaunchContext, values: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        firsts, seconds = (values.registers.flat[half::2] for half in range(2))
        pairs = [
            registers.as_pair(_gated(elements(first), elements(second)))
            for first, second in zip(firsts, seconds, strict=True)
        ]
        return fragment(kind, pairs + pairs[-1:] * odd)

    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=kind)(emit)(values)


# Computes silu($1) * $3 and silu($2) * $4. The approximations of exp2 and 1 / x have errors of at most two units in
# the last place of float32.
_GATE = """{
.reg .f32 a, b;
mul.f32 a, $1, 0fBFB8AA3B;
mul.f32 b, $2, 0fBFB8AA3B;
ex2.approx.ftz.f32 a, a;
ex2.approx.ftz.f32 b, b;
add.f32 a, a, 0f3F800000;
add.f32 b, b, 0f3F800000;
rcp.approx.ftz.f32 a, a;
rcp.approx.ftz.f32 b, b;
mul.f32 a, a, $1;
mul.f32 b, b, $2;
mul.f32 a, a, $3;
mul.f32 b, b, $4;
cvt.rn.bf16x2.f32 $0, b, a;
}"""


def _gated(first: list[ir.Value], second: list[ir.Value]) -> ir.Value:
    """Computes silu(first) * second for two values each; returns two bfloat16 in one word."""
    word = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(word, [*first, *second], _GATE, "=&r,f,f,f,f")


def store(values: jax.Array, ref: jax.Ref, *, interpret: bool) -> None:
    """Stores the transpose of the result of `gate`.

    Args:
      values: bfloat16 [32, M], from `gate`.
      ref: [M, 32] in device memory.
      interpret: whether this runs on a CPU.
    """
    if interpret:
        ref[...] = values.T
        return

    def emit(_: mgpu.LaunchContext, values: mgpu.FragmentedArray, ref: ir.Value) -> None:
        word, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        kind = ir.MemRefType(ref.type)
        (stride, _), _ = kind.get_strides_and_offset()
        base, lane = mgpu.utils.memref_ptr(ref), arith.remui(thread(), i32(32))
        column = arith.addi(
            arith.muli(arith.divui(thread(), i32(32)), i32(8)),
            arith.muli(arith.remui(lane, i32(4)), i32(2)),
        )
        for at in range(kind.shape[0] // _COLUMNS):
            pair = llvm.bitcast(word, values.registers.flat[at])
            # Transpose 8 pairs x 8 columns, so that a thread has two values that are contiguous in memory.
            code = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
            turned = llvm.inline_asm(word, [pair], code, "=r,r", has_side_effects=True)
            row = arith.addi(arith.divui(lane, i32(4)), i32(_COLUMNS * at))
            offset = arith.addi(
                arith.muli(arith.extui(i64, row), mgpu.c(stride, i64)), arith.extui(i64, column)
            )
            to = mgpu.utils.getelementptr(base, [offset], ir.BF16Type.get())
            llvm.store(turned, to, alignment=4)

    arg_types = (plgpu.Layout.WGMMA, plgpu.RefType())
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(values, ref)


def load_diagonal(pieces: list[jax.Ref], owners: tuple[int, ...]) -> jax.Array:
    """Loads a [64, 64] operand of `wgmma`, in which the first and the second rows of pairs share no columns.

    In each group of eight columns, only the first or only the second rows have values. All other entries are zeros,
    also in the groups after those of `owners`. Zeros are not stored in memory.

    Args:
      pieces: int32 [3, 192] each, in shared memory. They hold one word, two adjacent columns, for each thread and
        each group of eight columns. Up to four words of a thread are contiguous.
      owners: for each group of eight columns, which row of a pair has values: 0 or 1. At most eight groups.

    Returns:
      bfloat16 [64, 64] in the layout `WGMMA`.
    """
    of_piece = min(len(owners), 4)
    kind = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    def emit(_: mgpu.LaunchContext, *pieces: ir.Value) -> mgpu.FragmentedArray:
        first, values = arith.muli(thread(), i32(of_piece)), []
        for piece in pieces:
            values += elements(registers.load_words(registers.pointer(piece), first, of_piece))
        words = [i32(0)] * 16
        for eight, (owner, value) in enumerate(zip(owners, values, strict=True)):
            words[2 * eight + owner] = value
        return fragment(kind, [registers.as_pair(value) for value in words])

    arg_types = (plgpu.RefType(),) * len(pieces)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=kind)(emit)(*pieces)
