"""Linear layers fused with LoRA, the RMSNorm before them, SwiGLU, bias and residual."""

from pallas_kernels.finished_linear.api import (
    PreparedBranches,
    finished_linear,
    linear,
    prepare_branches,
)

__all__ = ["PreparedBranches", "finished_linear", "linear", "prepare_branches"]
