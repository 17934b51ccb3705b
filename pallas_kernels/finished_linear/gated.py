"""gate_up of a decoding step in one kernel: the product, LoRA, the norm before, and SwiGLU.

    y = ([W x] / global scale + [B U]) * unit       U = [x A]; the ranks of the gate, then those of up
    result = silu([gate]) * [up]                    values in brackets are rounded to bfloat16

The rows of W are in pairs (`layout.paired_rows`), so gate and up never leave the registers. The order of summation in
a row of x does not depend on the other rows. docs/design/kernels.md, "gate_up in one kernel", describes the blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.finished_linear import gated_config
from pallas_kernels.finished_linear.gated_config import Config
from pallas_kernels.finished_linear.lora import PackedLora
from pallas_kernels.finished_linear.residual_stream import Stream
from pallas_kernels.nvfp4_matmul import decode_config, decode_plan, layout
from pallas_kernels.nvfp4_matmul.layout import HopperNVFP4

# Counters in device memory, one word each.
COUNTERS = decode_config.MOST_TILES * gated_config.COUNTERS_OF_TILE


def linear(
    x: jax.Array | Stream,
    w: HopperNVFP4,
    *,
    divisor: jax.Array | None = None,
    branch: PackedLora | None = None,
    eps: float | None = None,
    config: Config | None = None,
    following: decode_plan.NextProduct | None = None,
    counters: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes silu(gate) * up; gate and up are the halves of x W^T with LoRA and the norm before (see the module).

    The arguments are those of `decode.linear`, for a weight whose rows are in pairs and a branch from `lora.pack_lora`
    with `is_paired`; but `following` is a `NextProduct`. `counters` are zeros, int32 [COUNTERS]; the kernel sets them
    back to 0. Pass the same array for all layers to save a kernel per layer; None makes a new one.

    Returns:
      bfloat16 [M, N / 2].

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    # Imported here because the import takes half a second.
    from pallas_kernels.finished_linear import gated_kernel

    values = x.scaled if isinstance(x, Stream) else x
    (n, k), m, rank = w.shape, len(values), 0 if branch is None else branch.rank
    config = config or gated_config.pick_config(m, n, k, rank=rank)
    if reason := gated_config.supports(m, n, k, config, rank=rank):
        raise NotImplementedError(reason)
    values = jnp.pad(values, ((0, 0), (0, layout.whole(k) - values.shape[1])))
    divisor = w.global_scale if divisor is None else divisor
    problem = gated_kernel.Problem(
        config=config,
        tiling=gated_config.tiling_of(m, n, k, config, rank=rank),
        rank=rank,
        norm=(x.width, eps) if isinstance(x, Stream) else None,
        following=following,
        interpret=interpret,
    )
    operands = {
        "x": values,
        "w": w.words,
        "divisor": divisor,
        "squares": x.squares if isinstance(x, Stream) else None,
        "a": None if branch is None else branch.a.reshape(-1, *layout.TILE_SHAPE),
        "b": None if branch is None else branch.b,
        "counters": jnp.zeros((COUNTERS,), jnp.int32) if counters is None else counters,
    }
    return gated_kernel.launch(operands, problem, name=f"nvfp4_gated_sm90_{n}x{k}")
