"""GPU operations on 4-bit weights, usable without the rest of the project.

Formats are defined in plain jnp (`formats`); each kernel family has a folder with a reference that runs anywhere.
The package imports only jax, numpy and ml_dtypes; the portable kernels import triton and jax-triton when they are
launched.
"""

from pallas_kernels.formats import nvfp4
from pallas_kernels.formats.number_format import NumberFormat, PackedTensor
from pallas_kernels.formats.nvfp4 import NVFP4Tensor, dequantize, quantize
from pallas_kernels.formats.registry import FORMATS
from pallas_kernels.formats.rounding import rounded
from pallas_kernels.nvfp4_matmul import nvfp4_matmul, prepare, unprepare
from pallas_kernels.packed_matmul import PackedWeight, packed_matmul

__all__ = [
    "FORMATS",
    "NVFP4Tensor",
    "NumberFormat",
    "PackedTensor",
    "PackedWeight",
    "dequantize",
    "nvfp4",
    "nvfp4_matmul",
    "packed_matmul",
    "prepare",
    "quantize",
    "rounded",
    "unprepare",
]
