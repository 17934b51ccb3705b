"""A linear of many rows in one kernel: the product, and an epilogue of LoRA, the norm before and the bias.

XLA alone would write LoRA's x A B, [M, N] in bfloat16, and read it again. For a wide linear that costs a tenth of
its product.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.scipy.linalg import block_diag
from jax.typing import DTypeLike

from pallas_kernels import runtime
from pallas_kernels.linear import Branch
from pallas_kernels.nvfp4_matmul import api, config, prefill, prefill_config
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4


def supports(
    m: int,
    sizes: Sequence[int],
    k: int,
    rank: int,
    dtype: DTypeLike,
) -> str | None:
    """Why this kernel cannot run a linear on this device, or None.

    Args:
      m: rows of x.
      sizes: rows of W of each of the joined parts.
      k: columns of both.
      rank: LoRA's rank.
      dtype: dtype of x.
    """
    if reason := runtime.unless_hopper():
        return reason
    if dtype != jnp.bfloat16:
        return f"needs x in bfloat16; got {dtype}"
    if m <= config.MAX_M:
        return f"needs M > {config.MAX_M}, else another kernel is faster; got M = {m}"
    if not 1 <= rank <= TILE:
        return f"needs a rank of 1 to {TILE}; got {rank}"
    n, sizes = sum(sizes), kernel_sizes(sizes, rank)
    picked = prefill_config.pick_config(m, n, k, sizes=sizes)
    return prefill_config.supports(n, k, picked, sizes=sizes)


@jax.custom_vjp
def linear(
    x: jax.Array,
    w: HopperNVFP4,
    branches: list[Branch],
    unit: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    """`finish` (pallas_kernels/linear.py) of x W^T, and its derivative, from the packed weight.

    Weight and bias are frozen: their cotangents are zero. The unit's cotangent is zero too: `split_norm` includes
    its share in the cotangent of x.

    Args:
      x: bfloat16 [M, K].
      w: an [N, K] weight without stacked axes.
      branches: the branches of all parts of N, in bfloat16.
      unit: float32 [M, 1].
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
    reason = supports(len(x), sizes, x.shape[1], branches[0][1].shape[0], x.dtype)
    if reason is not None:
        raise NotImplementedError(reason)
    return prefill.matmul(x, w, epilogue=epilogue(branches, unit, bias))


def _linear_fwd(x, w, branches, unit, bias):
    return linear(x, w, branches, unit, bias), (w, branches, unit, bias)


def _linear_bwd(kept, dy):
    w, branches, unit, bias = kept
    slope = (dy.astype(jnp.float32) * unit).astype(dy.dtype)
    dx, dbranches = api.backward(slope, w), _branch_cotangents(branches, slope)
    return dx, None, dbranches, jnp.zeros_like(unit), bias if bias is None else jnp.zeros_like(bias)


def _branch_cotangents(branches: list[Branch], slope: jax.Array) -> list[Branch]:
    """Those of all branches in two passes over the slope [M, N], of whose parts XLA would make copies."""
    down = jnp.concatenate([down for down, _ in branches], axis=1)
    up = block_diag(*(up for _, up in branches))
    ddown, dup = jnp.dot(slope, up.T), jnp.dot(down.T, slope)
    found, row, column = [], 0, 0
    for _, part in branches:
        rows, columns = slice(row, row + part.shape[0]), slice(column, column + part.shape[1])
        found.append((ddown[:, rows], dup[rows, columns]))
        row, column = rows.stop, columns.stop
    return jax.tree.unflatten(jax.tree.structure(branches), jax.tree.leaves(found))


linear.defvjp(_linear_fwd, _linear_bwd)


def epilogue(branches: list[Branch], unit: jax.Array, bias: jax.Array | None) -> prefill.Epilogue:
    """What is made of the product, as the kernel reads it."""
    downs, ups = zip(*branches, strict=True)
    sizes = kernel_sizes([up.shape[1] for up in ups], ups[0].shape[0])
    return _of_kernel(side_by_side(downs, ups), below_each_other(ups), sizes, unit, bias)


def side_by_side(downs: Sequence[jax.Array], ups: Sequence[jax.Array]) -> jax.Array:
    """Columns [M, R] of all parts as the kernel reads x A [M, 64 * parts]; those of A [K, R] make it by one product.

    Args:
      downs: of the parts of N.
      ups: scaled B [R, N_i] of each.
    """
    if _is_one_part(ups):
        return _fill(jnp.concatenate(downs, axis=1))
    return jnp.concatenate([_fill(down) for down in downs], axis=1)


def below_each_other(ups: Sequence[jax.Array]) -> jax.Array:
    """Scaled B [R, N_i] of all parts as the kernel reads them, [N, 64]: each row's ranks, and zeros."""
    if _is_one_part(ups):
        return _fill(block_diag(*ups).T)
    return jnp.concatenate([_fill(up.T) for up in ups])


def prepared_linear(
    x: jax.Array,
    w: HopperNVFP4,
    a: jax.Array,
    b: jax.Array,
    sizes: Sequence[int],
    unit: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    """`linear` with matrices prepared once for many calls; without a derivative.

    Args:
      x: bfloat16 [M, K].
      w: an [N, K] weight without stacked axes.
      a: bfloat16 [K, 64 * parts], of `side_by_side`.
      b: bfloat16 [N, 64], of `below_each_other`.
      sizes: of the parts of N, as `kernel_sizes` has them.
      unit: float32 [M, 1].
      bias: [N], or None.
    """
    return prefill.matmul(x, w, epilogue=_of_kernel(jnp.dot(x, a), b, sizes, unit, bias))


def kernel_sizes(sizes: Sequence[int], rank: int) -> tuple[int, ...]:
    """The parts of N that the kernel knows: those of the branches, or one part with the ranks of all.

    Parts that do not begin with a tile of 64 rows are one to the kernel if their ranks find room beside each
    other. A row of B then has zeros for the ranks of other parts, which add nothing.
    """
    is_aligned = all(size % TILE == 0 for size in sizes[:-1])
    return (sum(sizes),) if not is_aligned and len(sizes) * rank <= TILE else tuple(sizes)


def _is_one_part(ups: Sequence[jax.Array]) -> bool:
    sizes = [up.shape[1] for up in ups]
    return len(kernel_sizes(sizes, ups[0].shape[0])) < len(sizes)


def _fill(matrix: jax.Array) -> jax.Array:
    return jnp.pad(matrix, ((0, 0), (0, TILE - matrix.shape[1])))


def _of_kernel(u, b, sizes, unit, bias) -> prefill.Epilogue:
    bias = None if bias is None else bias.astype(jnp.float32)
    return prefill.Epilogue(u=u, b=b, unit=unit[:, 0], bias=bias, sizes=tuple(sizes))
