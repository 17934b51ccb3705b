"""GPTQ (arXiv 2210.17323): columns are rounded one after another, and later ones compensate errors of earlier ones.

With H = X^T X of a linear's inputs and its Cholesky factor, H = L L^T, the columns of the weight W [N, K] are rounded
from the last to the first. Before column k is rounded, the errors of the columns already rounded are compensated,

    w_k + sum over j > k of (w_j - rounded w_j) L_jk / L_kk

which is the least-squares correction of these errors on these inputs. This is GPTQ in the form of LDLQ (QuIP,
arXiv 2307.13304, theorem 6), which needs no inverse of H.

Block scales are fixed before, by a search on the original weight: an error of column k costs its square times L_kk^2.
So columns can be rounded in descending order of H_kk ("static groups" of act-order), the most important ones first.
Errors within a group of 128 columns are passed on one by one; those of earlier groups in one product for all 128. The
best on these inputs of the result, rounding to nearest and AWQ's packing is used (docs/design/checkpoints.md).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import NumberFormat
from qerl_jax.config import BlockScales
from qerl_jax.quantization.awq import output_error

# Number of columns in a group, to which the errors of earlier groups are passed on in one product.
BLOCK = 128
# Added to the diagonal of H, as a fraction of its mean; ten times as much after each failed factorization.
DAMPING = 0.01

_HIGHEST = jax.lax.Precision.HIGHEST


def pack(
    form: NumberFormat,
    scales: BlockScales,
    weights: list[jax.Array],
    gram: jax.Array,
    before: list[Any] | None = None,
) -> tuple[list[Any], jax.Array]:
    """Packs weights that read the same input with GPTQ.

    Args:
        form: Format of the packed weights.
        scales: How block scales are chosen.
        weights: [N_i, K] each, float32 or a 16-bit dtype.
        gram: float32 [K, K], X^T X of the inputs.
        before: The weights as packed by another method, which are returned if they are better; or None.

    Returns:
        The packed weights, and the relative errors of the outputs on these inputs, float32 [2]: of rounding to
        nearest with scales from the largest entries, and of the returned weights.
    """
    # From the least to the most important column, because the last is rounded first.
    order = jnp.argsort(jnp.diag(gram), stable=True)
    # Factored in a separate call, whose memory is free before the rest runs.
    lower = factor(gram, order)
    start = _start(form, scales, weights, order, lower)
    return _rounded(form, weights, start, before, gram, order, lower)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(form, scales, weights, order, lower):
    """Rounds the weights to nearest, with the scales that GPTQ will keep."""
    costs = jnp.zeros(len(order)).at[order].set(jnp.diag(lower) ** 2)
    return form.pack(weights, scales, form.moments(costs))


@functools.partial(jax.jit, static_argnums=0)
def _rounded(form, weights, start, before, gram, order, lower):
    """Computes the result of `pack` from the Cholesky factor `lower` of the Gram matrix in the given order."""
    ends = np.cumsum([len(weight) for weight in weights])[:-1]
    weight = jnp.concatenate([weight.astype(jnp.float32) for weight in weights])
    steps = jnp.concatenate([form.steps(part) for part in start])
    moved = jnp.split(compensated(weight, steps, order, lower, form.grid), ends)
    rounded_parts = [form.recode(matrix, part) for matrix, part in zip(moved, start, strict=True)]

    def error(packed):
        rounded = jnp.concatenate([form.unpack(part, jnp.float32) for part in packed])
        return output_error(rounded - weight, gram)

    choices = [form.pack(weights), *([] if before is None else [list(before)]), rounded_parts]
    errors = jnp.stack([error(choice) for choice in choices])
    # A NaN, from a failed factorization, must not be the smallest.
    errors = jnp.where(jnp.isnan(errors), jnp.inf, errors)
    best = jnp.argmin(errors)
    is_best = [best == i for i in range(len(choices))]
    chosen = jax.tree.map(lambda *leaves: jnp.select(is_best, leaves), *choices)
    errors = jnp.stack([errors[0], errors.min()])
    whole = jnp.maximum(output_error(weight, gram), 1e-30)
    return chosen, jnp.sqrt(jnp.maximum(errors / whole, 0))


def compensated(
    weight: jax.Array, steps: jax.Array, order: jax.Array, lower: jax.Array, grid: np.ndarray
) -> jax.Array:
    """Returns the weight after compensation; rounding it to nearest gives GPTQ's result.

    Args:
        weight: float32 [N, K].
        steps: float32 [N, K], the value of one grid unit at each entry.
        order: int32 [K], the columns; the last is rounded first.
        lower: float32 [K, K], the Cholesky factor of the Gram matrix in that order.
        grid: Values of the codes, in ascending order.

    Returns:
        float32 [N, K]; not finite if `lower` is not.
    """
    n, k = weight.shape
    # The first group, which is rounded last, is padded with columns that neither receive nor pass on errors.
    more = -k % BLOCK
    rows = lambda x: jnp.pad(x[:, order].T, ((more, 0), (0, 0)))
    columns, worth = rows(weight), rows(steps)
    if more:
        lower = jnp.pad(lower, ((more, 0), (more, 0)))
    diagonal = jnp.where(jnp.arange(k + more) < more, 1, jnp.diag(lower))

    def one_block(b, carry):
        moved, errors = carry
        first = k + more - (b + 1) * BLOCK
        group = lambda x: jax.lax.dynamic_slice_in_dim(x, first, BLOCK)
        shares = jax.lax.dynamic_slice_in_dim(lower, first, BLOCK, axis=1) / group(diagonal)
        # Errors of columns that are not rounded yet are still 0.
        due = group(columns) + jnp.dot(shares.T, errors, precision=_HIGHEST)
        square, original, step = group(shares), group(columns), group(worth)

        def one(i, carry):
            due, off = carry
            j = BLOCK - 1 - i
            error = original[j] - _nearest(due[j], step[j], grid)
            before = jnp.where(jnp.arange(BLOCK) < j, square[j], 0)
            return due + before[:, None] * error, off.at[j].set(error)

        due, off = jax.lax.fori_loop(0, BLOCK, one, (due, jnp.zeros((BLOCK, n), jnp.float32)))
        put = lambda x, block: jax.lax.dynamic_update_slice_in_dim(x, block, first, 0)
        return put(moved, due), put(errors, off)

    start = columns, jnp.zeros_like(columns)
    moved, _ = jax.lax.fori_loop(0, (k + more) // BLOCK, one_block, start)
    return moved[more:].T[:, jnp.argsort(order)]


def _nearest(x: jax.Array, step: jax.Array, grid: np.ndarray) -> jax.Array:
    """Rounds x to the nearest product of a grid value and the step."""
    ratio, nearest = x / jnp.where(step == 0, 1, step), jnp.full_like(x, grid[0])
    for below, above in zip(grid[:-1], grid[1:], strict=True):
        nearest = jnp.where(ratio > (below + above) / 2, above, nearest)
    return nearest * step


def factor(gram: jax.Array, order: jax.Array) -> jax.Array:
    """Computes the Cholesky factor, float32 [K, K], of a damped Gram matrix [K, K] with reordered rows and columns.

    The damping is multiplied by ten until the factorization succeeds; if it never does, the result is not finite.
    """
    damping = DAMPING
    while True:
        lower = _factored(gram, order, damping)
        if damping > 1e3 or bool(jnp.isfinite(jnp.diag(lower)).all()):
            return lower
        damping *= 10


@jax.jit
def _factored(gram, order, damping):
    size = jnp.maximum(jnp.diag(gram).mean(), 1e-30)
    ordered = gram[order[:, None], order]
    # An input that is always 0 would make the matrix singular; its column passes on no error.
    diagonal = jnp.diag(ordered)
    more = damping * size + jnp.where(diagonal == 0, size, 0)
    at = jnp.arange(len(gram))
    return jnp.linalg.cholesky(ordered.at[at, at].add(more), symmetrize_input=False)
