"""Linears with any weight, together with LoRA, a norm and a bias, by the best kernel for the operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.scipy.linalg import block_diag
from jax.typing import DTypeLike

from pallas_kernels.finished_linear import prefill
from pallas_kernels.formats.rounding import rounded
from pallas_kernels.linear import Branch, finish
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.layout import HopperNVFP4
from pallas_kernels.packed_matmul import PackedWeight, packed_matmul


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedBranches:
    """LoRA's matrices in the form that a linear's product reads; made once for many calls, without a derivative.

    Attributes:
      a: [..., K, ranks], A of all parts side by side, in the activations' dtype.
      ups: alpha / R * B [..., R, N_i] of each part in that dtype, or one matrix for all parts, [..., ranks, N],
        with zeros where the rank belongs to another part; empty where `b` replaces them.
      b: [..., N, 64] of all parts, for the kernel for many rows; or None.
      bias: float32 [..., N], for that kernel; or None.
      sizes: sizes of the parts, for that kernel.
      is_paired: whether `ups`, `b` and `bias` are in the order of `layout.paired_rows`.
    """

    a: jax.Array
    ups: tuple[jax.Array, ...]
    b: jax.Array | None
    bias: jax.Array | None
    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    is_paired: bool = dataclasses.field(default=False, metadata={"static": True})


def prepare_branches(
    matrices: Sequence[tuple[jax.Array, jax.Array]],
    bias: jax.Array | None,
    scaling: float,
    weight: PackedWeight | jax.Array | None,
    dtype: DTypeLike,
    *,
    rows: int,
    has_unit: bool,
) -> PreparedBranches:
    """Puts LoRA's matrices into the form that `finished_linear` reads for x with `rows` rows.

    Args:
      matrices: A [K, R] and B [R, N_i] in float32, of the parts of N.
      bias: [N], or None.
      scaling: alpha / R.
      weight: the linear's weight, or a stack of weights; None makes a form that works with any weight.
      dtype: dtype of the activations.
      rows: rows of x.
      has_unit: whether `finished_linear` will get a norm's unit and no residual.
    """
    if isinstance(weight, HopperNVFP4) and weight.is_paired:
        matrices, scaling = _paired_branches([(a, scaling * b) for a, b in matrices], dtype), 1.0
        bias = None if bias is None else layout.paired_rows(bias, -1)
        as_it_lies = dataclasses.replace(weight, is_paired=False)
        found = prepare_branches(
            matrices, bias, scaling, as_it_lies, dtype, rows=rows, has_unit=has_unit
        )
        return dataclasses.replace(found, is_paired=True)
    down = [a.astype(dtype) for a, _ in matrices]
    ups = [(scaling * b).astype(dtype) for _, b in matrices]
    sizes, (k, rank) = [up.shape[1] for up in ups], down[0].shape
    if not has_unit or not _fits_kernel(rows, k, weight, sizes, rank, dtype):
        # One product in place of several small ones saves launches and has the same bits in bfloat16. With packed
        # weights unpacking dominates, and the zeros would only take memory.
        if dtype == jnp.bfloat16 and isinstance(weight, jax.Array):
            ups = [block_diag(*ups)]
        return PreparedBranches(jnp.concatenate(down, axis=1), tuple(ups), None, None, ())
    return PreparedBranches(
        prefill.side_by_side(down, ups),
        (),
        prefill.below_each_other(ups),
        None if bias is None else rounded(bias, dtype).astype(jnp.float32),
        prefill.kernel_sizes(sizes, rank),
    )


def linear(x: jax.Array, weight: PackedWeight | jax.Array) -> jax.Array:
    """Computes y = x W^T for a packed or a dense weight, before branches and bias are added.

    Args:
      x: [..., K], float32 or bfloat16.
      weight: packed, in any format and layout, of shape (N, K); or a dense [N, K].

    Returns:
      float32 [..., N]. Sums are rounded to x's dtype, and then multiplied by a global scale.
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
    branches: Sequence[Branch] | PreparedBranches,
    *,
    unit: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    over: str | None = None,
) -> jax.Array:
    """rounded((x W^T + [the products of the branches]) * unit + bias + residual), as `finish` defines it.

    One kernel computes all of it, if there is one for these operands.

    Args:
      x: [..., K], float32 or bfloat16.
      weight: as for `linear`.
      branches: LoRA's branches of the parts of N, in order; empty without LoRA. Or the result of `prepare_branches`
        for the same number of rows.
      unit: float32 [..., 1], the unit of the norm before; no gradient flows through it.
      bias: [N].
      residual: [..., N].
      over: mesh axis whose devices each have some of K; see `finish`.

    Returns:
      [..., N] in x's dtype.
    """
    if isinstance(weight, HopperNVFP4) and weight.is_paired and residual is None:
        return layout.joined_rows(_as_it_lies(x, weight, branches, unit=unit, bias=bias), -1)
    flat = lambda of_rows: None if of_rows is None else of_rows.reshape(-1, of_rows.shape[-1])
    rows, unit, residual = flat(x), flat(unit), flat(residual)
    if isinstance(branches, PreparedBranches) and branches.b is not None:
        y = prefill.prepared_linear(
            rows, weight, branches.a, branches.b, branches.sizes, unit, branches.bias
        )
        return y.reshape(*x.shape[:-1], y.shape[-1])
    if isinstance(branches, PreparedBranches):
        downs = jnp.split(_exact_dot(rows, branches.a), len(branches.ups), axis=1)
        branches = list(zip(downs, branches.ups, strict=True))
    if residual is None and over is None and _has_kernel(rows, weight, branches, unit):
        y = prefill.linear(rows, weight, list(branches), unit, bias)
    else:
        y = linear(rows, weight)
        y = finish(y, branches, unit=unit, bias=bias, residual=residual, over=over, dtype=x.dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _paired_branches(
    parts: Sequence[tuple[jax.Array, jax.Array]], dtype: DTypeLike
) -> list[tuple[jax.Array, jax.Array]]:
    """One branch for all rows in pairs, of those for the gate and for up: [rows, R] and [R, N / 2] of each."""
    down = jnp.concatenate([down for down, _ in parts], axis=-1)
    up = block_diag(*(up.astype(dtype) for _, up in parts))
    return [(down, layout.paired_rows(up, -1))]


def _as_it_lies(
    x: jax.Array,
    weight: HopperNVFP4,
    branches: Sequence[Branch] | PreparedBranches,
    *,
    unit: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """`finished_linear` of a weight whose rows are in pairs, as is the result."""
    if isinstance(branches, PreparedBranches):
        if not branches.is_paired:
            ups = (layout.paired_rows(block_diag(*branches.ups), -1),)
            branches = dataclasses.replace(branches, ups=ups)
    elif branches:
        branches = _paired_branches(branches, x.dtype)
    bias = None if bias is None else layout.paired_rows(bias, -1)
    weight = dataclasses.replace(weight, is_paired=False)
    return finished_linear(x, weight, branches, unit=unit, bias=bias)


def _exact_dot(x: jax.Array, matrix: jax.Array) -> jax.Array:
    # float32 means float32, also on cards whose default is TF32.
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, matrix, precision=exact)


def _has_kernel(
    rows: jax.Array, weight: object, branches: Sequence[Branch], unit: jax.Array | None
) -> bool:
    """Whether the kernel for many rows takes these operands."""
    if unit is None or not branches:
        return False
    sizes, rank = [up.shape[1] for _, up in branches], branches[0][1].shape[0]
    return _fits_kernel(*rows.shape, weight, sizes, rank, rows.dtype)


def _fits_kernel(
    rows: int, k: int, weight: object, sizes: Sequence[int], rank: int, dtype: DTypeLike
) -> bool:
    if not isinstance(weight, HopperNVFP4):
        return False
    return prefill.supports(rows, sizes, k, rank, dtype) is None
