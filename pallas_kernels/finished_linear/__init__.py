"""Linears with what LoRA, a norm, SwiGLU, a bias and a residual make of their products."""

from pallas_kernels.finished_linear.api import (
    PreparedBranches,
    finished_linear,
    linear,
    prepare_branches,
)

__all__ = ["PreparedBranches", "finished_linear", "linear", "prepare_branches"]
