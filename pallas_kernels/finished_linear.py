"""Linears of any weight with what LoRA, a norm and a bias make of their products, by the kernel that fits."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.linear import Branch, finish
from pallas_kernels.nvfp4_matmul import fused_wide
from pallas_kernels.nvfp4_matmul.layout import HopperNVFP4
from pallas_kernels.packed_matmul import PackedWeight, packed_matmul


def linear(x: jax.Array, weight: PackedWeight | jax.Array) -> jax.Array:
    """Multiplies y = x W^T for a packed or a dense weight, as the product meets branch and bias.

    Args:
      x: [..., K], float32 or bfloat16.
      weight: packed, in any format and layout, of shape (N, K); or a dense [N, K].

    Returns:
      float32 [..., N]. Sums are rounded to x's dtype; a global scale is multiplied on after that.
    """
    if isinstance(weight, PackedWeight):
        return packed_matmul(x, weight, out_dtype=jnp.float32)
    # Two dimensions: XLA:CPU's backward pass of a [B, T, K] product is three times slower than that
    # of [B*T, K].
    flat = x.reshape(-1, x.shape[-1])
    # float32 means float32, also on cards whose default is TF32.
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jnp.einsum("mk,nk->mn", flat, weight.astype(x.dtype), precision=exact)
    return y.reshape(*x.shape[:-1], -1).astype(jnp.float32)


def finished_linear(
    x: jax.Array,
    weight: PackedWeight | jax.Array,
    branches: Sequence[Branch],
    *,
    unit: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """rounded((x W^T + [the products of the branches]) * unit + bias + residual), as `finish` defines it.

    One kernel computes all of it where there is one for these operands.

    Args:
      x: [..., K], float32 or bfloat16.
      weight: as `linear` takes it.
      branches: LoRA's, of the parts of N in their order; none without LoRA.
      unit: float32 [..., 1], of the norm before, which is constant to a derivative.
      bias: [N].
      residual: [..., N].

    Returns:
      [..., N] in x's dtype.
    """
    flat = lambda of_rows: None if of_rows is None else of_rows.reshape(-1, of_rows.shape[-1])
    rows, unit, residual = flat(x), flat(unit), flat(residual)
    if residual is None and _has_kernel(rows, weight, branches, unit):
        y = fused_wide.linear(rows, weight, list(branches), unit, bias)
    else:
        y = linear(rows, weight)
        y = finish(y, branches, unit=unit, bias=bias, residual=residual, dtype=x.dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _has_kernel(
    rows: jax.Array, weight: object, branches: Sequence[Branch], unit: jax.Array | None
) -> bool:
    """Whether the kernel of many rows takes these operands."""
    if unit is None or not branches or not isinstance(weight, HopperNVFP4):
        return False
    sizes, rank = [up.shape[1] for _, up in branches], branches[0][1].shape[0]
    return fused_wide.supports(len(rows), sizes, rows.shape[1], rank, rows.dtype) is None
