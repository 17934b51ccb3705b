"""GPU operations on 4-bit weights, usable without the rest of the project.

Formats are defined in plain jnp (`nvfp4`, `mxfp4`, `nf4`); each kernel family has a folder with a
reference that runs anywhere. Imports nothing but jax, numpy and ml_dtypes; the portable kernels import triton
and jax-triton when they are started.
"""

from pallas_kernels.mxfp4 import MXFP4Tensor
from pallas_kernels.nf4 import NF4Tensor
from pallas_kernels.nvfp4 import NVFP4Tensor, dequantize, quantize
from pallas_kernels.nvfp4_matmul import nvfp4_matmul, prepare, unprepare
from pallas_kernels.packed_matmul import PackedWeight, packed_matmul
from pallas_kernels.rounding import rounded

__all__ = [
    "MXFP4Tensor",
    "NF4Tensor",
    "NVFP4Tensor",
    "PackedWeight",
    "dequantize",
    "nvfp4_matmul",
    "packed_matmul",
    "prepare",
    "quantize",
    "rounded",
    "unprepare",
]
