"""A packed weight written out as bfloat16 on Hopper, and the products of many rows that read it.

For many rows a pass over the weight is small beside the arithmetic, and cuBLAS is hard to beat. The
bfloat16 copy lives from its kernel to the product; nothing else refers to it.

The kernel, in Pallas Mosaic GPU, should take as long as its bytes take to move: N * K * (9 / 16 +
2). A unit of work is 64 rows by `step` columns. A block is one warpgroup, and several share a
multiprocessor. Block b takes units b, b + blocks, ..., so that at any time the units in work are
neighbours and whole rows are written at about the same time.

    slots of packed tiles     filled by bulk copies, `stages` units ahead
    two slots of results      one emptied by a bulk copy while the other is being filled
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4
from pallas_kernels.runtime import Device


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
      step: columns per unit; 64, 128 or 256.
      stages: units that are loaded ahead, 2 or more.
      blocks: number of blocks that share the units; None for the best number on this device.
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
    """Why this kernel cannot unpack an [N, K] weight with this configuration, or None."""
    if layout.tiles(k) * TILE % config.step:
        return f"needs K of whole steps of {config.step}; got K = {k}"
    return None


def pick_config(k: int) -> Config:
    """The widest step up to 128 that divides K. One configuration serves all shapes otherwise."""
    return Config(step=64 * (2 - layout.tiles(k) % 2))


def dequantize(
    w: HopperNVFP4,
    config: Config | None = None,
    *,
    device: Device | None = None,
    interpret: bool = False,
) -> jax.Array:
    """code * scale, without the global scale: bfloat16 [N, K], exact as `nvfp4.scaled_codes`.

    Args:
      w: an [N, K] weight without stacked axes.
      config: by default that of `pick_config`.
      device: the device that runs it; None for the current one.
      interpret: run on a CPU, and report data races.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    n, k = w.shape
    config = config or pick_config(k)
    if reason := supports(n, k, config):
        raise NotImplementedError(reason)
    # Four for each processor, measured on an H200.
    blocks = config.blocks or 4 * (device or runtime.device()).processors
    return _unpack(w.words, config, blocks, interpret)[:n, :k]


def forward(x: jax.Array, w: HopperNVFP4) -> jax.Array:
    """x [M, K] -> x @ dequantize(w)^T [M, N], both bfloat16.

    cuBLAS returns the product as bfloat16. It is then multiplied by 1 / global_scale in float32, in the fusion that
    reads it, where that costs nothing. So a result is rounded twice instead of once (a scaled code, the result for
    a one-hot x, is already a bfloat16). A float32 product would
    be rounded once but costs a pass over [M, N], 108 us after 673 us for 2048 x 37888 x 3584, and scaled weights
    would be rounded before the sum, which is no better than after it.
    """
    return _scaled(_dot(x, dequantize(w), contract=1), w)


def backward(dy: jax.Array, w: HopperNVFP4) -> jax.Array:
    """dy [M, N] -> dy @ dequantize(w) [M, K], both bfloat16, rounded as `forward` does."""
    if w.global_scale.shape[-1] == 1:
        return _scaled(_dot(dy, dequantize(w), contract=0), w)
    # The sum is over rows with different global scales, so the multiplier must come first here.
    return _dot(_scaled(dy, w), dequantize(w), contract=0)


def _scaled(y: jax.Array, w: HopperNVFP4) -> jax.Array:
    return (y.astype(jnp.float32) * w.multiplier).astype(y.dtype)


def _dot(x: jax.Array, codes: jax.Array, *, contract: int) -> jax.Array:
    return jax.lax.dot_general(x, codes, (((1,), (contract,)), ((), ())))


def _unpack(words: jax.Array, config: Config, blocks: int, interpret: bool) -> jax.Array:
    # This import takes half a second, so it is made only when needed.
    from pallas_kernels.nvfp4_matmul import dequantize_kernel

    steps = words.shape[1] // (config.step // TILE)
    blocks = min(blocks, len(words) * steps)
    return dequantize_kernel.launch(words, config.step, config.stages, blocks, interpret=interpret)
