"""GPU operations on 4-bit weights, usable without the rest of the project.

Formats are defined in plain jnp (`nvfp4`); each kernel family has a folder with a reference that
runs anywhere. Imports nothing but jax, numpy and ml_dtypes.
"""

from pallas_kernels.nvfp4 import NVFP4Tensor, dequantize, quantize
from pallas_kernels.nvfp4_matmul import PackedWeight, nvfp4_matmul, prepare, unprepare

__all__ = [
    "NVFP4Tensor",
    "PackedWeight",
    "dequantize",
    "nvfp4_matmul",
    "prepare",
    "quantize",
    "unprepare",
]
