"""The public functions: a linear layer with any weight, LoRA, norm, bias and residual, run by the best kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.scipy.linalg import block_diag
from jax.typing import DTypeLike

from pallas_kernels.finished_linear import prefill
from pallas_kernels.formats.rounding import rounded
from pallas_kernels.linear import LoraTerm, finish
from pallas_kernels.nvfp4_matmul.layout import HopperNVFP4
from pallas_kernels.packed_matmul import PackedWeight, packed_matmul


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedLora:
    """LoRA's matrices in the form that `finished_linear` reads, made once for many calls that need no derivative.

    A part is one of the linears that are joined along N, such as q, k and v. Leading axes stack layers.

    Attributes:
      a: [..., K, ranks] in the activations' dtype, A of all parts side by side.
      ups: alpha / R * B in the activations' dtype: [..., R, N_i] of each part, or one matrix [..., ranks, N] with
        zeros where a rank belongs to another part; empty if `b` is set.
      b: [..., N, 64], alpha / R * B^T of all parts for the Hopper kernel for many rows, in the order of the weight's
        rows; None if that kernel is not used.
      bias: float32 [..., N] for that kernel, in the same order; or None.
      sizes: rows of W in each part, for that kernel; empty without it.
    """

    a: jax.Array
    ups: tuple[jax.Array, ...]
    b: jax.Array | None
    bias: jax.Array | None
    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def prepare_lora(
    matrices: Sequence[tuple[jax.Array, jax.Array]],
    bias: jax.Array | None,
    scaling: float,
    weight: PackedWeight | jax.Array | None,
    dtype: DTypeLike,
    *,
    rows: int,
    has_unit: bool,
) -> PreparedLora:
    """Converts LoRA's matrices to the form that `finished_linear` reads for x with `rows` rows.

    Args:
      matrices: A [K, R] and B [R, N_i] of each part of N, in float32. All parts have the same R.
      bias: [N], or None.
      scaling: alpha / R.
      weight: the linear's weight, or a stack of weights; with None the result works with any weight.
      dtype: dtype of the activations.
      rows: rows of x.
      has_unit: whether `finished_linear` will be given `unit`, and no residual.
    """
    down = [a.astype(dtype) for a, _ in matrices]
    ups = [(scaling * b).astype(dtype) for _, b in matrices]
    sizes, (k, rank) = [up.shape[1] for up in ups], down[0].shape
    if not has_unit or not _fits_kernel(rows, k, weight, sizes, rank, dtype):
        # One product instead of several small ones saves launches, and gives the same bits in bfloat16. With packed
        # weights, unpacking takes most of the time, so the zeros would cost memory and save little.
        if dtype == jnp.bfloat16 and isinstance(weight, jax.Array):
            ups = [block_diag(*ups)]
        return PreparedLora(jnp.concatenate(down, axis=1), tuple(ups), None, None, ())
    lies = {"is_paired": weight.is_paired}
    return PreparedLora(
        prefill.side_by_side(down, ups, **lies),
        (),
        prefill.below_each_other(ups, **lies),
        None if bias is None else prefill.bias_of_kernel(rounded(bias, dtype), **lies),
        prefill.kernel_sizes(sizes, rank, **lies),
    )


def linear(x: jax.Array, weight: PackedWeight | jax.Array) -> jax.Array:
    """Computes y = x W^T for a packed or a dense weight, without LoRA and bias.

    Args:
      x: [..., K], float32 or bfloat16.
      weight: packed, in any format and layout, of shape (N, K); or a dense [N, K].

    Returns:
      float32 [..., N]. Sums are rounded to x's dtype, and then divided by the global scale if there is one.

    Raises:
      ValueError: x does not fit a packed weight.
    """
    if isinstance(weight, PackedWeight):
        return packed_matmul(x, weight, out_dtype=jnp.float32)
    # Flatten x to a matrix: XLA:CPU's backward pass is three times slower for [B, T, K] than for [B*T, K].
    flat = x.reshape(-1, x.shape[-1])
    # By default a GPU multiplies float32 in TF32.
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jnp.einsum("mk,nk->mn", flat, weight.astype(x.dtype), precision=exact)
    return y.reshape(*x.shape[:-1], -1).astype(jnp.float32)


def finished_linear(
    x: jax.Array,
    weight: PackedWeight | jax.Array,
    branches: Sequence[LoraTerm] | PreparedLora,
    *,
    unit: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    over: str | None = None,
) -> jax.Array:
    """Computes a linear with LoRA and the operations after it, as `pallas_kernels.linear.finish` defines them.

        y = rounded((x W^T + [the products of the branches]) * unit + bias + residual)

    If a kernel supports these operands, it computes everything at once. x, the branches and the residual get
    gradients, a packed weight gets zeros. With a kernel, `unit` and the bias get zeros too: the norm must include the
    share of `unit` in the gradient of x, and the bias is frozen. Prepared branches have no derivative.

    Args:
      x: [..., K], float32 or bfloat16.
      weight: as for `linear`.
      branches: (x A [..., R_i], alpha / R * B [R_i, N_i]) of each part of N, in x's dtype, in order; empty without
        LoRA. Or the result of `prepare_lora` for the same number of rows.
      unit: float32 [..., 1], 1 / RMS from the norm before.
      bias: [N], of any float dtype. If `PreparedLora.b` is set, the bias prepared with it is used instead.
      residual: [..., N], in x's dtype.
      over: mesh axis along which K is divided among devices; see `finish`.

    Returns:
      [..., N] in x's dtype.

    Raises:
      ValueError: x or the branches do not fit the weight, or the branches were prepared for a call without a residual.
    """
    flat = lambda of_rows: None if of_rows is None else of_rows.reshape(-1, of_rows.shape[-1])
    rows, unit, residual = flat(x), flat(unit), flat(residual)
    if isinstance(branches, PreparedLora) and branches.b is not None:
        if residual is not None or over is not None:
            raise ValueError("these branches were prepared for a kernel that adds no residual")
        y = prefill.prepared_linear(
            rows, weight, branches.a, branches.b, branches.sizes, unit, branches.bias
        )
        return y.reshape(*x.shape[:-1], y.shape[-1])
    if isinstance(branches, PreparedLora):
        downs = jnp.split(_exact_dot(rows, branches.a), len(branches.ups), axis=1)
        branches = list(zip(downs, branches.ups, strict=True))
    if residual is None and over is None and _has_kernel(rows, weight, branches, unit):
        y = prefill.linear(rows, weight, list(branches), unit, bias)
    else:
        y = linear(rows, weight)
        y = finish(y, branches, unit=unit, bias=bias, residual=residual, over=over, dtype=x.dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _exact_dot(x: jax.Array, matrix: jax.Array) -> jax.Array:
    # By default a GPU multiplies float32 in TF32.
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, matrix, precision=exact)


def _has_kernel(
    rows: jax.Array, weight: object, branches: Sequence[LoraTerm], unit: jax.Array | None
) -> bool:
    """Returns whether the Hopper kernel for many rows supports these operands."""
    if unit is None or not branches:
        return False
    sizes, rank = [up.shape[1] for _, up in branches], branches[0][1].shape[0]
    return _fits_kernel(*rows.shape, weight, sizes, rank, rows.dtype)


def _fits_kernel(
    rows: int, k: int, weight: object, sizes: Sequence[int], rank: int, dtype: DTypeLike
) -> bool:
    if not isinstance(weight, HopperNVFP4):
        return False
    return prefill.supports(rows, sizes, k, rank, dtype, is_paired=weight.is_paired) is None
