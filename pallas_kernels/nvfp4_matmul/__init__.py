"""Products of activations with NVFP4 weights that stay packed."""

from pallas_kernels.nvfp4_matmul.api import PackedWeight, nvfp4_matmul, prepare, unprepare

__all__ = ["PackedWeight", "nvfp4_matmul", "prepare", "unprepare"]
