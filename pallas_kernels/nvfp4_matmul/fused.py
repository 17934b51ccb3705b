"""A linear of a decoding step with all that surrounds it, in two kernels: product and epilogue.

The base may be packed, or dense in bfloat16: then the product is XLA's, and the epilogue the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import adapter, epilogue, hopper, layout, tuning
from pallas_kernels.nvfp4_matmul.adapter import Branch
from pallas_kernels.nvfp4_matmul.epilogue import Stream
from pallas_kernels.nvfp4_matmul.hopper import Config, Plan, Sums
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4

MAX_M = hopper.MAX_M


def padded(m: int) -> int:
    """Rows that the kernels take for M: the next of 8, 16, 24, 32, 64, 96, 128."""
    return m + -m % (8 if m <= 32 else 32)


def supports(
    m: int, sizes: Sequence[int], k: int, *, is_packed: bool, rank: int, is_swiglu: bool = False
) -> str | None:
    """Why these kernels cannot run a linear on this device, or None.

    Args:
      m: rows of x.
      sizes: rows of W that belong to each of the linears that it joins.
      k: columns of both.
      is_packed: whether W is.
      rank: of LoRA; 0 without it.
      is_swiglu: whether the two parts are a gate and what it lets through, of which one is made.
    """
    if reason := runtime.unless_hopper():
        return reason
    if not 1 <= m <= MAX_M:
        return f"needs 1 <= M <= {MAX_M}; got M = {m}"
    # A tile of rows belongs to one part: it meets the ranks of that part, or is a whole gate's.
    if k % TILE or any(size % TILE for size in sizes):
        return f"needs K and all parts of N in whole tiles of {TILE}; got {k} and {tuple(sizes)}"
    m, n = padded(m), sum(sizes)
    ranks = adapter.filled_rank(rank) if rank else 0
    if reason := epilogue.supports(m, n, rank=ranks, is_swiglu=is_swiglu):
        return reason
    if not is_packed:
        return None
    return hopper.supports(m, n, k, _config(m, n, k, rank > 0), with_adapter=rank > 0)


def linear(
    x: jax.Array | Stream,
    w: HopperNVFP4 | jax.Array,
    *,
    divisor: jax.Array | None = None,
    bias: jax.Array | None = None,
    branch: Branch | None = None,
    eps: float | None = None,
    residual: tuple[Stream, jax.Array] | None = None,
    is_swiglu: bool = False,
    config: Config | None = None,
    following: tuple[HopperNVFP4 | jax.Array, Branch | None] | None = None,
    interpret: bool = False,
) -> jax.Array | Stream:
    """y = x W^T + bias + the branches of LoRA, and what comes before and after it.

    Args:
      x: bfloat16 [M, K], M as `padded` makes it; or a residual stream, which is normalized first.
      w: [N, K], packed for Hopper or dense in bfloat16.
      divisor: what `sliceable` made of a packed w's global scale; None for that itself.
      bias: [N].
      branch: from `adapter.pack_branch`.
      eps: of the norm, if x is a stream.
      residual: a stream to which y is added, and the float32 [N] scale of the norm after it.
      is_swiglu: whether y is gate and up, of which silu(gate) * up is wanted.
      config: of the packed product; None for the tuned one.
      following: weight and branch of the linear after this one, for `hopper.Upcoming`.
      interpret: run on a CPU, and report data races.

    Returns:
      bfloat16 [M, N], or [M, N / 2] of a `swiglu`; or the new stream.
    """
    values = x.scaled if isinstance(x, Stream) else x
    if isinstance(w, HopperNVFP4):
        a = None if branch is None else branch.a
        config = config or _config(len(values), *w.shape, branch is not None)
        upcoming = None if following is None else _upcoming(len(values), *following)
        sums = hopper.product(values, w, config, a, upcoming, interpret=interpret)
        divisor = w.global_scale if divisor is None else divisor
    else:
        sums = _dense_product(values, w, branch)
        divisor = jnp.full((1,), 1 / layout.DECODED_SCALE)
    return epilogue.finish(
        sums,
        divisor,
        bias=bias,
        branch=branch,
        norm=(x, eps) if isinstance(x, Stream) else None,
        residual=None if residual is None else (residual[0].values, residual[1]),
        is_swiglu=is_swiglu,
        interpret=interpret,
    )


def sliceable(global_scale: jax.Array) -> jax.Array:
    """Copies of [L, 1] scales, [L, 64]: XLA lets a kernel read a slice in place where it starts at 256 bytes."""
    wanted = (len(global_scale), 64)
    return global_scale if global_scale.shape[1] > 1 else jnp.broadcast_to(global_scale, wanted)


def _dense_product(x: jax.Array, w: jax.Array, branch: Branch | None) -> Sums:
    def times(matrix):
        return jnp.dot(matrix, x.T, preferred_element_type=jnp.float32)[None]

    tiles = len(w) // TILE
    u = None if branch is None else times(branch.a)
    return Sums(times(w), Plan(tiles, 1, tiles), TILE, u)


def _upcoming(m: int, w: HopperNVFP4 | jax.Array, branch: Branch | None) -> hopper.Upcoming | None:
    if not isinstance(w, HopperNVFP4):
        return None
    config = _config(m, *w.shape, branch is not None)
    return hopper.upcoming(m, w, config, None if branch is None else branch.a)


def _config(m: int, n: int, k: int, with_branch: bool) -> Config:
    config = tuning.pick_config(m, n, k)
    if not with_branch or hopper.supports(m, n, k, config, with_adapter=True) is None:
        return config
    # Where one warpgroup's slot is too narrow for A, two share a block.
    return dataclasses.replace(config, warpgroups=2, blocks=-(-config.blocks // 2))
