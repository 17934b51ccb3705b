"""Unpacks a weight to bfloat16 on Hopper, and multiplies many rows by the copy with cuBLAS.

The bfloat16 copy exists only until the product has read it. docs/design/kernels.md, "Unpacking for cuBLAS", describes
the kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided among blocks.

    Attributes:
      step: columns per unit; 64, 128 or 256.
      stages: pipeline stages, that is, units that are loaded ahead; 2 or more.
      blocks: number of blocks that share the units; None for four per multiprocessor.
    """

    step: int = 128
    stages: int = 3
    blocks: int | None = None

    def __post_init__(self):
        if self.step not in (64, 128, 256):
            raise ValueError(f"step must be 64, 128 or 256; got {self.step}")
        if self.stages < 2:
            raise ValueError(f"stages must be 2 or more; got {self.stages}")
        if self.blocks is not None and self.blocks < 1:
            raise ValueError(f"blocks must be 1 or more; got {self.blocks}")


def supports(n: int, k: int, config: Config) -> str | None:
    """Returns why this kernel cannot unpack an [N, K] weight with this configuration, or None if it can."""
    if layout.tiles(k) * TILE % config.step:
        return f"needs K of whole steps of {config.step}; got K = {k}"
    return None


def pick_config(k: int) -> Config:
    """Picks a configuration: the step is 128 if it divides K (padded to 64), otherwise 64; the rest is fixed."""
    return Config(step=64 * (2 - layout.tiles(k) % 2))


def dequantize(
    w: HopperNVFP4, config: Config | None = None, *, interpret: bool = False
) -> jax.Array:
    """Computes code * scale, without the global scale, with the same bits as `nvfp4.scaled_codes`.

    Rows that are stored in pairs are written in their original order.

    Args:
      w: one [N, K] weight.
      config: the configuration; None for that of `pick_config`.
      interpret: whether to run on a CPU and report data races.

    Returns:
      bfloat16 [N, K].

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    n, k = w.shape
    config = config or pick_config(k)
    if reason := supports(n, k, config):
        raise NotImplementedError(reason)
    # Four blocks per multiprocessor were fastest on an H200.
    blocks = config.blocks or 4 * runtime.device().processors
    return _unpack(w, config, blocks, interpret)[:n, :k]


def forward(x: jax.Array, w: HopperNVFP4) -> jax.Array:
    """Computes x @ dequantize(w)^T, bfloat16 [M, N], for x bfloat16 [M, K].

    cuBLAS returns the product as bfloat16. It is then multiplied by 1 / global_scale in float32; XLA fuses this into
    the operation that reads the product, so it costs nothing. A result is therefore rounded twice. (For a one-hot x
    it is rounded once, because the product is a scaled code, which is exact in bfloat16.) A float32 product would be
    rounded once, but would need one more pass over [M, N]: 108 us in addition to 673 us for M, N, K = 2048, 37888,
    3584. Scaling the weights instead would round before the sum, which is no more accurate.
    """
    return _scaled(_dot(x, dequantize(w), contract=1), w)


def backward(dy: jax.Array, w: HopperNVFP4) -> jax.Array:
    """Computes dy @ dequantize(w), bfloat16 [M, K], for dy bfloat16 [M, N]. It rounds as `forward` does.

    If each row of the weight has its own global scale, dy is scaled and rounded before the product instead.
    """
    if w.global_scale.shape[-1] == 1:
        return _scaled(_dot(dy, dequantize(w), contract=0), w)
    # The sum is over rows with different global scales, so the multiplier must be applied before it.
    return _dot(_scaled(dy, w), dequantize(w), contract=0)


def _scaled(y: jax.Array, w: HopperNVFP4) -> jax.Array:
    return (y.astype(jnp.float32) * w.multiplier).astype(y.dtype)


def _dot(x: jax.Array, codes: jax.Array, *, contract: int) -> jax.Array:
    return jax.lax.dot_general(x, codes, (((1,), (contract,)), ((), ())))


def _unpack(w: HopperNVFP4, config: Config, blocks: int, interpret: bool) -> jax.Array:
    # Imported here because the import takes half a second.
    from pallas_kernels.nvfp4_matmul import dequantize_kernel

    steps = w.words.shape[1] // (config.step // TILE)
    blocks = min(blocks, len(w.words) * steps)
    how = {"is_paired": w.is_paired, "interpret": interpret}
    return dequantize_kernel.launch(w.words, config.step, config.stages, blocks, **how)
