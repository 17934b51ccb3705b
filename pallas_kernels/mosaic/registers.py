"""Operations on registers: on the values of a warpgroup's array that one thread holds (its fragment)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jax.typing import DTypeLike

from pallas_kernels.formats.rounding import rounded

llvm = mgpu.utils.llvm  # jax.extend.mlir does not have it


def to_bfloat16(values: jax.Array, *, interpret: bool) -> jax.Array:
    """Converts values to bfloat16, two per instruction.

    With `astype` and a conversion back to float32, LLVM would convert one value at a time, at a quarter of the speed.

    Args:
      values: float32 [64, M] in the layout `WGMMA`.
      interpret: whether this runs on a CPU.
    """
    if interpret:
        return rounded(values, jnp.bfloat16)
    return _map_words(values, jnp.bfloat16, as_pair)


def rounded_to_bfloat16(values: jax.Array, *, interpret: bool) -> jax.Array:
    """Rounds values to bfloat16 as `to_bfloat16` does, and returns them in float32."""
    if interpret:
        return rounded(values, jnp.bfloat16).astype(jnp.float32)
    return _map_words(values, jnp.float32, _unpacked)


def _map_words(values: jax.Array, dtype: DTypeLike, unpack: Callable) -> jax.Array:
    """Packs every two adjacent values as bfloat16 in a word, the first in the low half, and applies `unpack`."""
    kind = plgpu.ShapeDtypeStruct(values.shape, dtype, layout=plgpu.Layout.WGMMA)

    def emit(_: mgpu.LaunchContext, values: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        word, code = ir.IntegerType.get_signless(32), "cvt.rn.bf16x2.f32 $0, $1, $2;"
        pairs = [elements(pair)[::-1] for pair in values.registers.flat]
        words = [llvm.inline_asm(word, pair, code, "=r,f,f") for pair in pairs]
        return fragment(kind, [unpack(word) for word in words])

    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=kind)(emit)(values)


def opaque(value: jax.Array, *, interpret: bool) -> jax.Array:
    """Returns an int32 scalar unchanged, but hides its value, so that the compiler precomputes nothing from it."""
    if interpret:
        return value
    scalar = plgpu.Layout.WG_SPLAT(())
    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)

    def emit(_: mgpu.LaunchContext, value: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        word, register = ir.IntegerType.get_signless(32), value.registers.item()
        register = llvm.inline_asm(
            word, [register], "mov.b32 $0, $1;", "=r,r", has_side_effects=True
        )
        return fragment(kind, [register])

    return plgpu.inline_mgpu(arg_types=(scalar,), return_type=kind)(emit)(value)


def store(values: jax.Array, ref: jax.Ref) -> None:
    """Stores an array of any register layout in device memory.

    JAX 0.12 rejects an assignment to `ref` that does not write whole cache lines. JAX 0.11 does not check it.

    Args:
      values: an array.
      ref: device memory of the same shape and dtype.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values


def load_vector(axis: int, ref: jax.Ref) -> jax.Array:
    """Loads a vector along the rows (axis 0) or the columns (axis 1) of a tile in the layout `WGMMA`."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)


def spread(values: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts a vector along `axis` of a tile to `shape`; a scalar stays as it is."""
    return lax.broadcast_in_dim(values, shape, (axis,)) if jnp.ndim(values) else values


def as_pair(word: ir.Value) -> ir.Value:
    """Reinterprets a 32-bit word as two bfloat16 values, the low half first."""
    return llvm.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), word)


def _unpacked(word: ir.Value) -> ir.Value:
    halves = arith.shli(word, i32(16)), arith.andi(word, i32(-(1 << 16)))
    (pair,) = vectors([llvm.bitcast(ir.F32Type.get(), half) for half in halves], 2)
    return pair


def keep_until_here(values: jax.Array) -> None:
    """Keeps a warpgroup's registers unchanged up to this point in the program.

    LLVM considers registers free once a `wgmma` that reads them is issued, and may overwrite them before it is done.

    Args:
      values: an array of a 16-bit type in the layout `WGMMA`.
    """

    def emit(_: mgpu.LaunchContext, values: mgpu.FragmentedArray) -> None:
        word, void = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void")
        words = [llvm.bitcast(word, register) for register in values.registers.flat]
        constraints = ",".join("r" * len(words))
        llvm.inline_asm(void, words, "", constraints, has_side_effects=True)

    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,))(emit)(values)


def elements(vector: ir.Value) -> list[ir.Value]:
    """Splits a vector into its elements."""
    (count,) = ir.VectorType(vector.type).shape
    return [llvm.extractelement(vector, i32(i)) for i in range(count)]


def vectors(values: list[ir.Value], width: int) -> list[ir.Value]:
    """Joins values of one type into vectors of `width` elements."""
    joined = []
    for start in range(0, len(values), width):
        vector = llvm.mlir_undef(ir.VectorType.get((width,), values[0].type))
        for i in range(width):
            vector = llvm.insertelement(vector, values[start + i], i32(i))
        joined.append(vector)
    return joined


def fragment(kind: plgpu.ShapeDtypeStruct, registers: list[ir.Value]) -> mgpu.FragmentedArray:
    """Makes an array with the shape, dtype and layout of `kind` from the registers of a thread."""
    of_layout = kind.layout.to_mgpu()
    array = np.empty(len(registers), dtype=object)
    array[:] = registers
    return mgpu.FragmentedArray(
        _registers=array.reshape(of_layout.registers_shape(kind.shape)),
        _layout=of_layout,
        _is_signed=False if np.issubdtype(kind.dtype, np.integer) else None,
    )


def pointer(ref: ir.Value) -> ir.Value:
    """Returns the address of the start of an array in memory."""
    return mgpu.utils.memref_ptr(ref)


def load_words(base: ir.Value, first: ir.Value, count: int) -> ir.Value:
    """Loads `count` 32-bit words, from index `first` after `base`, in one load that is aligned to 4 * count bytes."""
    word = ir.IntegerType.get_signless(32)
    address = mgpu.utils.getelementptr(base, [first], word)
    return llvm.load(ir.VectorType.get((count,), word), address, alignment=4 * count)


def assembly(text: str, results: int, operands: list[ir.Value]) -> list[ir.Value]:
    """Runs PTX on 32-bit words. In the text, $0 ... are the results, followed by the operands."""
    word = ir.IntegerType.get_signless(32)
    # `&`: a result may be written before the last operand is read, so they must not share a register.
    constraints = ",".join(["=&r"] * results + ["r"] * len(operands))
    struct = llvm.StructType.get_literal([word] * results)
    result = llvm.inline_asm(struct, operands, text, constraints)
    return [llvm.extractvalue(word, result, [i]) for i in range(results)]


def thread() -> ir.Value:
    """Returns the index of this thread in its warpgroup, 0 to 127."""
    return arith.remui(mgpu.utils.thread_idx(), i32(128))


def position() -> tuple[ir.Value, ir.Value, ir.Value]:
    """Returns a thread's warp (0 to 3), and its row (0 to 7) and first column (0, 2, 4, 6) in [8, 8] of `WGMMA`."""
    number = thread()
    lane = arith.remui(number, i32(32))
    column = arith.muli(arith.remui(lane, i32(4)), i32(2))
    return arith.divui(number, i32(32)), arith.divui(lane, i32(4)), column


def index(value: ir.Value) -> ir.Value:
    """Converts an integer to MLIR's type of array indices."""
    return arith.index_cast(ir.IndexType.get(), value)


def i32(value: int) -> ir.Value:
    """Makes a 32-bit integer constant."""
    return mgpu.c(value, ir.IntegerType.get_signless(32))
