"""GPTQ (arXiv 2210.17323): columns are rounded one after another, and those to come make up for the error.

With H = X^T X of a linear's inputs and U the upper triangular matrix of H^-1 = U^T U, column j of the
weight W [N, K] is rounded, e = (w_j - rounded w_j) / U_jj is its error, and e U_jk is subtracted from
every later column k: the least squares answer to the error on these inputs.

Scales of blocks are fixed before, searched on the original weight, as other readers need them: 16
neighbours have one scale whatever the order in which they are rounded. So columns go in the order of
falling H_jj ("static groups" of act-order): what matters most is rounded while most columns are left
that can make up for it. Errors within 128 columns are passed on at once, those to later columns in one
product for all 128.

Of the result, what it started from, and rounding to nearest, the one with the smallest error on these
inputs is kept.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.checkpoint.packed_formats import Format
from qerl_jax.config import BlockScales
from qerl_jax.quantization.awq import output_error

# Columns whose errors are passed on together.
BLOCK = 128
# Added to the diagonal of H, as a share of its mean; ten times as much for each failure to factor it.
DAMPING = 0.01

_HIGHEST = jax.lax.Precision.HIGHEST


@functools.partial(jax.jit, static_argnums=(0, 1))
def pack(
    form: Format,
    scales: BlockScales,
    weights: list[jax.Array],
    start: list[Any] | None,
    gram: jax.Array,
) -> tuple[list[Any], jax.Array]:
    """Packs weights that read one input so that the error of their outputs is small.

    Args:
        form: What they are packed to.
        scales: How scales of blocks are chosen.
        weights: [N_i, K] each, float32 or narrower.
        start: The weights packed already, such as AWQ has them; their block scales are kept. None
            packs them to nearest.
        gram: float32 [K, K], X^T X of the inputs.

    Returns:
        The packed weights, and float32 [2], the relative error of their outputs on these inputs:
        rounded to nearest by the largest entries, and of what is returned.
    """
    if start is None:
        start = form.packed(weights, scales, form.moments(gram))
    ends = np.cumsum([len(weight) for weight in weights])[:-1]
    weight = jnp.concatenate([weight.astype(jnp.float32) for weight in weights])
    steps = jnp.concatenate([form.steps(part) for part in start])
    moved = jnp.split(compensated(weight, steps, gram, form.grid), ends)
    found = [form.recode(own, part) for own, part in zip(moved, start, strict=True)]

    def error(packed):
        rounded = jnp.concatenate([form.unpack(part, jnp.float32) for part in packed])
        return output_error(rounded - weight, gram)

    choices = [form.pack(weights), list(start), found]
    errors = jnp.stack([error(choice) for choice in choices])
    # NaN, where the Gram matrix could not be factored, is never the smallest.
    errors = jnp.where(jnp.isnan(errors), jnp.inf, errors)
    best = jnp.argmin(errors)
    kept = jax.tree.map(lambda *leaves: jnp.select([best == i for i in range(3)], leaves), *choices)
    errors = jnp.stack([errors[0], errors.min()])
    whole = jnp.maximum(output_error(weight, gram), 1e-30)
    return kept, jnp.sqrt(jnp.maximum(errors / whole, 0))


def compensated(
    weight: jax.Array, steps: jax.Array, gram: jax.Array, grid: np.ndarray
) -> jax.Array:
    """The weight as GPTQ has it when it rounds each column: to nearest from here gives its result.

    Args:
        weight: float32 [N, K].
        steps: float32 [N, K], what one unit of the grid is worth at each entry.
        gram: float32 [K, K].
        grid: Values of the codes, in rising order.

    Returns:
        float32 [N, K]; not finite where the Gram matrix is not.
    """
    n, k = weight.shape
    order = jnp.argsort(-jnp.diag(gram), stable=True)
    factor = _factor(gram[order][:, order])
    # The last block is filled up with columns that take and give no errors.
    more = -k % BLOCK
    rows = lambda x: jnp.pad(x[:, order].T, ((0, more), (0, 0)))
    columns, worth = rows(weight), rows(steps)
    factor = jnp.pad(factor, ((0, more), (0, more)))
    factor = factor + jnp.diag((jnp.arange(k + more) >= k).astype(jnp.float32))

    def one(j, carry):
        block, errors, worth, square = carry
        off = (block[j] - _nearest(block[j], worth[j], grid)) / square[j, j]
        later = jnp.where(jnp.arange(BLOCK) > j, square[j], 0)
        return block - later[:, None] * off, errors.at[j].set(off), worth, square

    def one_block(b, columns):
        first = b * BLOCK
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, BLOCK)
        upper = cut(factor)
        square = jax.lax.dynamic_slice_in_dim(upper, first, BLOCK, axis=1)
        block, errors, _, _ = jax.lax.fori_loop(
            0, BLOCK, one, (cut(columns), jnp.zeros((BLOCK, n), jnp.float32), cut(worth), square)
        )
        columns = jax.lax.dynamic_update_slice_in_dim(columns, block, first, 0)
        later = jnp.where(jnp.arange(k + more) >= first + BLOCK, upper, 0)
        return columns - jnp.dot(later.T, errors, precision=_HIGHEST)

    columns = jax.lax.fori_loop(0, (k + more) // BLOCK, one_block, columns)
    return columns[:k].T[:, jnp.argsort(order)]


def _nearest(x: jax.Array, step: jax.Array, grid: np.ndarray) -> jax.Array:
    """The multiple of a step by a grid value that is nearest to each x."""
    ratio, found = x / jnp.where(step == 0, 1, step), jnp.full_like(x, grid[0])
    for below, above in zip(grid[:-1], grid[1:], strict=True):
        found = jnp.where(ratio > (below + above) / 2, above, found)
    return found * step


def _factor(gram: jax.Array) -> jax.Array:
    """U, upper triangular, of (H + damping)^-1 = U^T U."""
    size = jnp.maximum(jnp.diag(gram).mean(), 1e-30)
    # Inputs that are always 0 pass nothing on.
    diagonal = jnp.where(jnp.diag(gram) == 0, size, 0)

    def factored(damping):
        # From the other end H = R R^T with R upper triangular, and U = R^-1: one factorization serves.
        flipped = (gram + jnp.diag(diagonal + damping * size))[::-1, ::-1]
        return jnp.linalg.cholesky(flipped)[::-1, ::-1]

    def failed(state):
        damping, upper = state
        return (damping < 1e3) & ~jnp.isfinite(upper).all()

    _, upper = jax.lax.while_loop(
        failed, lambda state: (state[0] * 10, factored(state[0] * 10)), (DAMPING, factored(DAMPING))
    )
    return jax.scipy.linalg.solve_triangular(upper, jnp.eye(len(gram), dtype=jnp.float32))
