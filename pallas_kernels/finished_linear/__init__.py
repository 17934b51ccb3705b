"""Linear layers fused with LoRA, the RMSNorm before them, SwiGLU, bias and residual."""

from pallas_kernels.finished_linear.api import (
    PreparedLora,
    finished_linear,
    linear,
    prepare_lora,
)

__all__ = ["PreparedLora", "finished_linear", "linear", "prepare_lora"]
