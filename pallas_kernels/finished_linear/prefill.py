"""A linear for many rows in one kernel: the product, and an epilogue with LoRA, the norm before it and the bias.

XLA alone would write LoRA's x A B, bfloat16 [M, N], to memory and read it again. If N is large, that takes a tenth of
the product's time.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.scipy.linalg import block_diag
from jax.typing import DTypeLike

from pallas_kernels import runtime
from pallas_kernels.linear import LoraTerm
from pallas_kernels.nvfp4_matmul import api, decode_config, layout, prefill, prefill_config
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4
from pallas_kernels.nvfp4_matmul.prefill_epilogue import Epilogue


def supports(
    m: int,
    sizes: Sequence[int],
    k: int,
    rank: int,
    dtype: DTypeLike,
    *,
    is_paired: bool = False,
) -> str | None:
    """Returns why this kernel cannot run a linear on this device, or None if it can.

    Args:
      m: rows of x.
      sizes: rows of W in each part, that is, in each of the joined linears.
      k: columns of x and W.
      rank: LoRA's rank.
      dtype: dtype of x.
      is_paired: whether the rows of W are in pairs.
    """
    if reason := runtime.unless_hopper():
        return reason
    if dtype != jnp.bfloat16:
        return f"needs x in bfloat16; got {dtype}"
    if m <= decode_config.MAX_M:
        return f"needs M > {decode_config.MAX_M}, else another kernel is faster; got M = {m}"
    if not 1 <= rank <= TILE:
        return f"needs a rank of 1 to {TILE}; got {rank}"
    if is_paired and len(sizes) * rank > TILE:
        return f"needs {TILE} ranks or fewer in all parts if rows are in pairs; got {len(sizes)} parts of {rank}"
    n, sizes = sum(sizes), kernel_sizes(sizes, rank, is_paired=is_paired)
    picked = prefill_config.pick_config(m, n, k, sizes=sizes)
    return prefill_config.supports(n, k, picked, sizes=sizes)


@jax.custom_vjp
def linear(
    x: jax.Array,
    w: HopperNVFP4,
    branches: list[LoraTerm],
    unit: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    """Computes `pallas_kernels.linear.finish` of x W^T. The derivative reads the packed weight too.

    Weight and bias are frozen: their cotangents are zero. The cotangent of `unit` is zero too: the norm that computes
    `unit` must derive its share from the cotangent of x (as `split_norm` of the model does).

    Args:
      x: bfloat16 [M, K].
      w: one [N, K] weight.
      branches: (x A, alpha / R * B) of each part of N, in bfloat16.
      unit: float32 [M, 1], 1 / RMS from the norm before.
      bias: [N], or None.

    Returns:
      bfloat16 [M, N].

    Raises:
      ValueError: x or the branches do not fit w.
      NotImplementedError: the reason `supports` gives.
    """
    sizes = tuple(up.shape[1] for _, up in branches)
    if (sum(sizes), x.shape[1]) != w.shape or w.words.ndim != 4:
        raise ValueError(
            f"w must be one [N, K] matrix with K of x {x.shape} and N of the branches, {sizes}; got "
            f"shape {w.shape}, words {w.words.shape}"
        )
    rank = branches[0][1].shape[0]
    reason = supports(len(x), sizes, x.shape[1], rank, x.dtype, is_paired=w.is_paired)
    if reason is not None:
        raise NotImplementedError(reason)
    more = epilogue(branches, unit, bias, is_paired=w.is_paired)
    return prefill.matmul(x, w, epilogue=more)


def _linear_fwd(x, w, branches, unit, bias):
    return linear(x, w, branches, unit, bias), (w, branches, unit, bias)


def _linear_bwd(residuals, dy):
    w, branches, unit, bias = residuals
    slope = (dy.astype(jnp.float32) * unit).astype(dy.dtype)
    dx, dbranches = api.backward(slope, w), _branch_cotangents(branches, slope)
    return dx, None, dbranches, jnp.zeros_like(unit), bias if bias is None else jnp.zeros_like(bias)


def _branch_cotangents(branches: list[LoraTerm], slope: jax.Array) -> list[LoraTerm]:
    """Returns the cotangents of all branches.

    It takes two products with the whole slope [M, N], because XLA would copy the slope's parts for separate products.
    """
    down = jnp.concatenate([down for down, _ in branches], axis=1)
    up = block_diag(*(up for _, up in branches))
    ddown, dup = jnp.dot(slope, up.T), jnp.dot(down.T, slope)
    cotangents, row, column = [], 0, 0
    for _, part in branches:
        rows, columns = slice(row, row + part.shape[0]), slice(column, column + part.shape[1])
        cotangents.append((ddown[:, rows], dup[rows, columns]))
        row, column = rows.stop, columns.stop
    return jax.tree.unflatten(jax.tree.structure(branches), jax.tree.leaves(cotangents))


linear.defvjp(_linear_fwd, _linear_bwd)


def epilogue(
    branches: list[LoraTerm], unit: jax.Array, bias: jax.Array | None, *, is_paired: bool = False
) -> Epilogue:
    """Returns the operations after the product in the form that the kernel reads.

    Arguments are as for `linear`; `is_paired` says whether the rows of W are in pairs.
    """
    downs, ups = zip(*branches, strict=True)
    sizes = kernel_sizes([up.shape[1] for up in ups], ups[0].shape[0], is_paired=is_paired)
    u = side_by_side(downs, ups, is_paired=is_paired)
    b = below_each_other(ups, is_paired=is_paired)
    bias = None if bias is None else bias_of_kernel(bias, is_paired=is_paired)
    return _of_kernel(u, b, sizes, unit, bias)


def side_by_side(
    downs: Sequence[jax.Array], ups: Sequence[jax.Array], *, is_paired: bool = False
) -> jax.Array:
    """Joins x A [M, R] of all parts to the kernel's [M, 64 * parts], or A [K, R] of all parts to [K, 64 * parts].

    If the kernel treats all parts as one (`kernel_sizes`), the result has 64 columns.

    Args:
      downs: x A, or A, of each part of N.
      ups: alpha / R * B [R, N_i] of each part.
      is_paired: whether the rows of W are in pairs.
    """
    if _is_one_part(ups, is_paired):
        return _fill(jnp.concatenate(downs, axis=1))
    return jnp.concatenate([_fill(down) for down in downs], axis=1)


def below_each_other(ups: Sequence[jax.Array], *, is_paired: bool = False) -> jax.Array:
    """Joins alpha / R * B [R, N_i] of all parts to the kernel's [N, 64]: each row has its part's ranks, then zeros.

    With `is_paired` the rows of the result are in pairs too.
    """
    if not _is_one_part(ups, is_paired):
        return jnp.concatenate([_fill(up.T) for up in ups])
    joined = block_diag(*ups)
    return _fill((layout.paired_rows(joined, -1) if is_paired else joined).T)


def bias_of_kernel(bias: jax.Array, *, is_paired: bool) -> jax.Array:
    """Returns the bias [N] as float32, in the order of the rows of W."""
    bias = bias.astype(jnp.float32)
    return layout.paired_rows(bias, -1) if is_paired else bias


def prepared_linear(
    x: jax.Array,
    w: HopperNVFP4,
    a: jax.Array,
    b: jax.Array,
    sizes: Sequence[int],
    unit: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    """Computes `linear` with LoRA's matrices that were prepared once for many calls. It has no derivative.

    `a` is bfloat16 [K, 64 * parts] from `side_by_side`, `b` bfloat16 [N, 64] from `below_each_other`, `sizes` from
    `kernel_sizes`, and the bias, if there is one, float32 [N] from `bias_of_kernel`.
    """
    return prefill.matmul(x, w, epilogue=_of_kernel(jnp.dot(x, a), b, sizes, unit, bias))


def kernel_sizes(sizes: Sequence[int], rank: int, *, is_paired: bool = False) -> tuple[int, ...]:
    """Returns the sizes of the parts of N for the kernel: those of the branches, or one part with all ranks.

    If a part does not begin at a multiple of 64 rows, and the ranks of all parts fit into 64, the kernel treats them
    as one part. A row of B then has zeros for the ranks of other parts, which add nothing. If rows are in pairs,
    every 64 rows contain rows of both parts, so the two are one part if their ranks fit into 64.
    """
    is_aligned = all(size % TILE == 0 for size in sizes[:-1]) and not is_paired
    return (sum(sizes),) if not is_aligned and len(sizes) * rank <= TILE else tuple(sizes)


def _is_one_part(ups: Sequence[jax.Array], is_paired: bool) -> bool:
    sizes = [up.shape[1] for up in ups]
    return len(kernel_sizes(sizes, ups[0].shape[0], is_paired=is_paired)) < len(sizes)


def _fill(matrix: jax.Array) -> jax.Array:
    return jnp.pad(matrix, ((0, 0), (0, TILE - matrix.shape[1])))


def _of_kernel(u, b, sizes, unit, bias) -> Epilogue:
    return Epilogue(u=u, b=b, unit=unit[:, 0], bias=bias, sizes=tuple(sizes))
