"""Rows in pairs: of a [64, M] in the layout `WGMMA` a thread has rows 16 w + g and 16 w + 8 + g, which belong together."""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.mosaic import registers
from pallas_kernels.mosaic.registers import elements, fragment, i32, llvm, thread

_COLUMNS = 8


def split(values: jax.Array, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The first and the second rows of all pairs, in the same order, for arithmetic and `store`.

    Args:
      values: float32 [64, M] in the layout `WGMMA`.
      interpret: whether this runs on a CPU.

    Returns:
      Two arrays [32, M], on the device as [64, M / 2] in an order of its own, filled up where M / 8 is odd.
    """
    rows, columns = values.shape
    if interpret:
        pairs = values.reshape(rows // 16, 2, 8, columns)
        return pairs[:, 0].reshape(rows // 2, columns), pairs[:, 1].reshape(rows // 2, columns)
    odd = columns // _COLUMNS % 2
    shape = (rows, (columns // _COLUMNS + odd) // 2 * _COLUMNS)
    kind = plgpu.ShapeDtypeStruct(shape, values.dtype, layout=plgpu.Layout.WGMMA)

    def emit(_: mgpu.LaunchContext, values: mgpu.FragmentedArray) -> tuple:
        halves = [list(values.registers.flat[half::2]) for half in range(2)]
        return tuple(fragment(kind, half + half[-1:] * odd) for half in halves)

    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=(kind, kind))(emit)(
        values
    )


def store(values: jax.Array, ref: jax.Ref, *, interpret: bool) -> None:
    """ref[:, :] = the transpose of what came of `split`'s results.

    Args:
      values: bfloat16 [32, M], as `split` orders it.
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
            own = llvm.bitcast(word, values.registers.flat[at])
            # Eight columns of pairs by eight of M; a thread then has two neighbours in memory.
            code = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
            turned = llvm.inline_asm(word, [own], code, "=r,r", has_side_effects=True)
            row = arith.addi(arith.divui(lane, i32(4)), i32(_COLUMNS * at))
            offset = arith.addi(
                arith.muli(arith.extui(i64, row), mgpu.c(stride, i64)), arith.extui(i64, column)
            )
            to = mgpu.utils.getelementptr(base, [offset], ir.BF16Type.get())
            llvm.store(turned, to, alignment=4)

    arg_types = (plgpu.Layout.WGMMA, plgpu.RefType())
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(values, ref)


def load_diagonal(pieces: list[jax.Ref], words: int) -> jax.Array:
    """[64, 64] for `wgmma` whose first rows of pairs have columns that the second rows lack, and the other way.

    Args:
      pieces: int32 [3, 192] in shared memory. They hold words of two neighbouring columns, `words` for each thread,
        at most four of them beside each other: of eight columns each, first those of the first rows, 0 and on, and
        then as many of the second rows, which come after those.
      words: even.
    """
    of_piece = min(words, 4)
    kind = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    def emit(_: mgpu.LaunchContext, *pieces: ir.Value) -> mgpu.FragmentedArray:
        first, own = arith.muli(thread(), i32(of_piece)), []
        for piece in pieces:
            own += elements(registers.load_words(registers.pointer(piece), first, of_piece))
        made = [i32(0)] * 16
        for eight, value in enumerate(own):
            made[2 * eight + eight // (words // 2)] = value
        return fragment(kind, [registers.as_pair(value) for value in made])

    arg_types = (plgpu.RefType(),) * len(pieces)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=kind)(emit)(*pieces)
