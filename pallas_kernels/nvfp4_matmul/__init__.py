"""Products of activations and packed weights, without an unpacked copy of the model."""

from pallas_kernels.nvfp4_matmul.api import PackedWeight, nvfp4_matmul, prepare, unprepare

__all__ = ["PackedWeight", "nvfp4_matmul", "prepare", "unprepare"]
