"""How warpgroups of different blocks pass sums on through device memory, and a transposed store.

A sum lies there as registers lie in threads, four to a load: element i of a thread is at
(i // 4 * 128 + thread) * 4 + i % 4. Pallas has semaphores, but orders them for the whole system; the
next block is nearer.
"""

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

llvm = mgpu.utils.llvm  # which jax.extend.mlir leaves out


def leave(values: jax.Array, ref: jax.Ref, semaphore: jax.Ref) -> None:
    """Stores this warpgroup's float32 values, then raises the semaphore.

    Args:
      values: [64, M] in the layout `WGMMA`.
      ref: [64 * M] in device memory.
      semaphore: one of another block's `join`.
    """

    def emit(
        _: mgpu.LaunchContext, values: mgpu.FragmentedArray, ref: ir.Value, semaphore: ir.Value
    ) -> None:
        registers = [element for pair in values.registers.flat for element in _elements(pair)]
        four = ir.VectorType.get((4,), ir.F32Type.get())
        for i, address in enumerate(_addresses(ref, len(registers))):
            vector = llvm.mlir_undef(four)
            for j in range(4):
                vector = llvm.insertelement(vector, registers[4 * i + j], mgpu.c(j, _i32()))
            llvm.store(vector, address, alignment=16)
        mgpu.utils.warpgroup_barrier()
        mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(semaphore)).signal(1, memory_scope="gpu")

    arg_types = (plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType())
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(values, ref, semaphore)


def join(values: jax.Array, ref: jax.Ref, semaphore: jax.Ref) -> jax.Array:
    """Waits for a `leave`, lowers its semaphore again, and returns the sum of both values."""
    kind = plgpu.ShapeDtypeStruct(values.shape, values.dtype, layout=plgpu.Layout.WGMMA)

    def emit(
        _: mgpu.LaunchContext, values: mgpu.FragmentedArray, ref: ir.Value, semaphore: ir.Value
    ) -> mgpu.FragmentedArray:
        mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(semaphore)).wait(1, memory_scope="gpu")
        four = ir.VectorType.get((4,), ir.F32Type.get())
        addresses = _addresses(ref, 2 * values.registers.size)
        others = [llvm.load(four, address, alignment=16) for address in addresses]
        others = [element for vector in others for element in _elements(vector)]
        sums = values.registers.copy()
        for i, pair in enumerate(values.registers.flat):
            for j, element in enumerate(_elements(pair)):
                total = arith.addf(element, others[2 * i + j])
                pair = llvm.insertelement(pair, total, mgpu.c(j, _i32()))
            sums.flat[i] = pair
        return mgpu.FragmentedArray(_registers=sums, _layout=values.layout, _is_signed=None)

    arg_types = (kind.layout, plgpu.RefType(), plgpu.RefType())
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=kind)(emit)(values, ref, semaphore)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _elements(vector: ir.Value) -> list[ir.Value]:
    places = range(ir.VectorType(vector.type).shape[0])
    return [llvm.extractelement(vector, mgpu.c(i, _i32())) for i in places]


def _addresses(ref: ir.Value, elements: int) -> list[ir.Value]:
    """Where a thread's fours are in what `leave` stores."""
    base = mgpu.utils.memref_ptr(ref)
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, _i32()))
    first = arith.muli(thread, mgpu.c(4, _i32()))
    places = [arith.addi(first, mgpu.c(512 * i, _i32())) for i in range(elements // 4)]
    return [mgpu.utils.getelementptr(base, [place], ir.F32Type.get()) for place in places]


def store_transposed(values: jax.Array, ref: jax.Ref) -> None:
    """ref[:, :] = values.T for bfloat16 values in the registers of a warpgroup.

    Args:
      values: [64, M] in the layout `WGMMA`.
      ref: [M, 64] in device memory.
    """
    transposable = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)

    def emit(_: mgpu.LaunchContext, values: mgpu.FragmentedArray, ref: ir.Value) -> None:
        index, i64 = ir.IndexType.get(), ir.IntegerType.get_signless(64)
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        base = mgpu.utils.memref_ptr(ref)
        places = values.layout.thread_idxs(values.shape)
        # A register has two neighbours along the rows of `values`.
        for (row, column), pair in zip(places, values.registers.flat, strict=True):
            offset = arith.addi(arith.muli(column, mgpu.c(stride, index)), row)
            offset = arith.index_cast(i64, offset)
            llvm.store(pair, mgpu.utils.getelementptr(base, [offset], ir.BF16Type.get()))

    arg_types = (plgpu.Layout.WGMMA_TRANSPOSED, plgpu.RefType())
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(transposable, ref)
