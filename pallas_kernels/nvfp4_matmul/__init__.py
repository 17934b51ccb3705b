"""Products of activations with NVFP4 weights that stay packed."""

from pallas_kernels.nvfp4_matmul.api import nvfp4_matmul

__all__ = ["nvfp4_matmul"]
