"""GPTQ (arXiv 2210.17323): columns are rounded one after another, and those to come make up for the error.

With H = X^T X of a linear's inputs and its Cholesky factor, H = L L^T, columns of the weight W [N, K] are
rounded from the last to the first. When column k is due, the errors of those that were rounded before it
are made up for,

    w_k + sum over j > k of (w_j - rounded w_j) L_jk / L_kk

and that is rounded: the least squares answer to these errors on these inputs. This is GPTQ in the form of
LDLQ (QuIP, arXiv 2307.13304, theorem 6), which needs no inverse of H.

Scales of blocks are fixed before, searched on the original weight, as other readers need them. What an
error of column k costs after those to come have made up for it is its square times L_kk^2, and that is
what the search makes small (on SmolLM2 that was better than the error before it is made up for). 16
neighbours have one scale whatever the order in which they are rounded. So columns go in the order of
falling H_kk ("static groups" of act-order): what matters most is rounded while most columns are left
that can make up for it. Errors within 128 columns are passed on at once, those of columns before them in
one product for all 128.

Of the result and what there was before (rounding to nearest, and AWQ's) the one with the smallest error
on these inputs is kept.
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


def pack(
    form: Format,
    scales: BlockScales,
    weights: list[jax.Array],
    gram: jax.Array,
    before: list[Any] | None = None,
) -> tuple[list[Any], jax.Array]:
    """Packs weights that read one input so that the error of their outputs is small.

    Args:
        form: What they are packed to.
        scales: How scales of blocks are chosen.
        weights: [N_i, K] each, float32 or narrower.
        gram: float32 [K, K], X^T X of the inputs.
        before: The weights as they were packed by another method, which may turn out better.

    Returns:
        The packed weights, and float32 [2], the relative error of their outputs on these inputs:
        rounded to nearest by the largest entries, and of what is returned.
    """
    # From the least to the most important: the last is rounded first.
    order = jnp.argsort(jnp.diag(gram), stable=True)
    # Factored apart from the rest, whose memory is not needed yet.
    lower = factor(gram, order)
    start = _start(form, scales, weights, order, lower)
    return _rounded(form, weights, start, before, gram, order, lower)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(form, scales, weights, order, lower):
    """The weights to nearest, by the scales that GPTQ will keep."""
    costs = jnp.zeros(len(order)).at[order].set(jnp.diag(lower) ** 2)
    return form.packed(weights, scales, form.moments(costs))


@functools.partial(jax.jit, static_argnums=0)
def _rounded(form, weights, start, before, gram, order, lower):
    """What `pack` returns, by the factor of the Gram matrix in that order."""
    ends = np.cumsum([len(weight) for weight in weights])[:-1]
    weight = jnp.concatenate([weight.astype(jnp.float32) for weight in weights])
    steps = jnp.concatenate([form.steps(part) for part in start])
    moved = jnp.split(compensated(weight, steps, order, lower, form.grid), ends)
    found = [form.recode(own, part) for own, part in zip(moved, start, strict=True)]

    def error(packed):
        rounded = jnp.concatenate([form.unpack(part, jnp.float32) for part in packed])
        return output_error(rounded - weight, gram)

    choices = [form.pack(weights), *([] if before is None else [list(before)]), found]
    errors = jnp.stack([error(choice) for choice in choices])
    # NaN, where the Gram matrix could not be factored, is never the smallest.
    errors = jnp.where(jnp.isnan(errors), jnp.inf, errors)
    best = jnp.argmin(errors)
    kept = jax.tree.map(
        lambda *leaves: jnp.select([best == i for i in range(len(choices))], leaves), *choices
    )
    errors = jnp.stack([errors[0], errors.min()])
    whole = jnp.maximum(output_error(weight, gram), 1e-30)
    return kept, jnp.sqrt(jnp.maximum(errors / whole, 0))


def compensated(
    weight: jax.Array, steps: jax.Array, order: jax.Array, lower: jax.Array, grid: np.ndarray
) -> jax.Array:
    """The weight as GPTQ has it when it rounds each column: to nearest from here gives its result.

    Args:
        weight: float32 [N, K].
        steps: float32 [N, K], what one unit of the grid is worth at each entry.
        order: int32 [K], the columns; the last is rounded first.
        lower: float32 [K, K], the Cholesky factor of the Gram matrix in that order.
        grid: Values of the codes, in rising order.

    Returns:
        float32 [N, K]; not finite where the factor is not.
    """
    n, k = weight.shape
    # Columns that take and give no errors fill up the first block, which comes last.
    more = -k % BLOCK
    rows = lambda x: jnp.pad(x[:, order].T, ((more, 0), (0, 0)))
    columns, worth = rows(weight), rows(steps)
    if more:
        lower = jnp.pad(lower, ((more, 0), (more, 0)))
    diagonal = jnp.diag(lower)
    diagonal = jnp.where(jnp.arange(k + more) < more, 1, diagonal)

    def one_block(b, carry):
        moved, errors = carry
        first = k + more - (b + 1) * BLOCK
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, BLOCK)
        shares = jax.lax.dynamic_slice_in_dim(lower, first, BLOCK, axis=1) / cut(diagonal)
        # Errors of columns that are not rounded yet are still 0.
        due = cut(columns) + jnp.dot(shares.T, errors, precision=_HIGHEST)
        square, original, step = cut(shares), cut(columns), cut(worth)

        def one(i, carry):
            due, off = carry
            j = BLOCK - 1 - i
            own = original[j] - _nearest(due[j], step[j], grid)
            before = jnp.where(jnp.arange(BLOCK) < j, square[j], 0)
            return due + before[:, None] * own, off.at[j].set(own)

        due, off = jax.lax.fori_loop(0, BLOCK, one, (due, jnp.zeros((BLOCK, n), jnp.float32)))
        put = lambda x, block: jax.lax.dynamic_update_slice_in_dim(x, block, first, 0)
        return put(moved, due), put(errors, off)

    start = columns, jnp.zeros_like(columns)
    moved, _ = jax.lax.fori_loop(0, (k + more) // BLOCK, one_block, start)
    return moved[more:].T[:, jnp.argsort(order)]


def _nearest(x: jax.Array, step: jax.Array, grid: np.ndarray) -> jax.Array:
    """The multiple of a step by a grid value that is nearest to each x."""
    ratio, found = x / jnp.where(step == 0, 1, step), jnp.full_like(x, grid[0])
    for below, above in zip(grid[:-1], grid[1:], strict=True):
        found = jnp.where(ratio > (below + above) / 2, above, found)
    return found * step


def factor(gram: jax.Array, order: jax.Array) -> jax.Array:
    """The Cholesky factor [K, K] of a damped Gram matrix whose columns are put in an order.

    The damping becomes ten times as large until the matrix can be factored; where it never can, the
    result is not finite.
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
    # Inputs that are always 0 pass nothing on.
    diagonal = jnp.diag(ordered)
    more = damping * size + jnp.where(diagonal == 0, size, 0)
    at = jnp.arange(len(gram))
    return jnp.linalg.cholesky(ordered.at[at, at].add(more), symmetrize_input=False)
