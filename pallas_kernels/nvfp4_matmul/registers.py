"""What a thread of a warpgroup holds of an array, in Mosaic GPU's terms."""

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

llvm = mgpu.utils.llvm  # which jax.extend.mlir leaves out


def elements(vector: ir.Value) -> list[ir.Value]:
    """The elements of a vector."""
    (count,) = ir.VectorType(vector.type).shape
    return [llvm.extractelement(vector, i32(i)) for i in range(count)]


def vectors(values: list[ir.Value], width: int) -> list[ir.Value]:
    """Values of one type as vectors of so many each."""
    made = []
    for start in range(0, len(values), width):
        vector = llvm.mlir_undef(ir.VectorType.get((width,), values[0].type))
        for i in range(width):
            vector = llvm.insertelement(vector, values[start + i], i32(i))
        made.append(vector)
    return made


def fragment(kind: plgpu.ShapeDtypeStruct, registers: list[ir.Value]) -> mgpu.FragmentedArray:
    """An array of that shape, type and layout, of which a thread has these vectors."""
    of_layout = kind.layout.to_mgpu()
    array = np.empty(len(registers), dtype=object)
    array[:] = registers
    return mgpu.FragmentedArray(
        _registers=array.reshape(of_layout.registers_shape(kind.shape)),
        _layout=of_layout,
        _is_signed=False if np.issubdtype(kind.dtype, np.integer) else None,
    )


def i32(value: int) -> ir.Value:
    """A constant."""
    return mgpu.c(value, ir.IntegerType.get_signless(32))
