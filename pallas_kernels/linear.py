"""Defines the operations after a linear's product. Every implementation follows this definition."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.formats.rounding import rounded

# LoRA for one part of N: x A [M, R], and B [R, N_i] times alpha / R.
LoraTerm = tuple[jax.Array, jax.Array]


def finish(
    product: jax.Array,
    branches: Sequence[LoraTerm],
    *,
    unit: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    over: str | None = None,
    dtype: DTypeLike,
) -> jax.Array:
    """Computes rounded((product + [the products of the branches]) * unit + bias + residual).

    Rounding is part of the definition: values in brackets and the result are rounded to `dtype`
    (docs/design/model.md, "Where rounding happens"). Everything else is in float32.

    Args:
      product: float32 [M, N].
      branches: LoRA for the parts of N (the linears that are joined along N), in order; empty without LoRA.
      unit: float32 [M, 1], 1 / RMS from the norm before the linear.
      bias: [N], of any float dtype.
      residual: [M, N], of any float dtype.
      over: mesh axis along whose devices K is divided. The product plus branches is then summed over these devices;
        each device's term is rounded to dtype, and so is the sum.
      dtype: dtype of the result and of the branches.

    Returns:
      [M, N] in `dtype`.
    """
    y = product
    if branches:
        y = y + joined(branches)
    if over is not None:
        y = jax.lax.psum(rounded(y, dtype), over).astype(jnp.float32)
    if unit is not None:
        y = y * unit
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    if residual is not None:
        y = y + residual.astype(jnp.float32)
    return rounded(y, dtype)


def joined(branches: Sequence[LoraTerm]) -> jax.Array:
    """Computes the products of the branches, rounded to their dtype, and joins them along N: float32 [M, N]."""
    # By default a GPU multiplies float32 in TF32.
    exact = jax.lax.Precision.HIGHEST if branches[0][0].dtype == jnp.float32 else None
    products = [jnp.dot(down, up, precision=exact) for down, up in branches]
    # On a CPU XLA omits the rounding of a product with a small rank.
    parts = [rounded(part.astype(jnp.float32), part.dtype) for part in products]
    return jnp.concatenate(parts, axis=-1).astype(jnp.float32)
