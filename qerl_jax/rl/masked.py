"""Masked reductions: the only module that defines which elements count, and the result if none does.

Every function takes `x` and a `mask` of the same shape (bool, or numbers that are zero where an
element does not count), ignores masked-out elements (an infinity or NaN there affects neither the
value nor the gradient), and returns 0 if no element counts. Different shapes raise a ValueError.
"""

import jax.numpy as jnp
from jax import Array

type Axis = int | tuple[int, ...] | None


def sum(x: Array, mask: Array, axis: Axis = None) -> Array:
    """Returns the sum of the elements that count, along `axis` or over everything."""
    return jnp.sum(x, axis, where=_where(x, mask))


def mean(x: Array, mask: Array, axis: Axis = None) -> Array:
    """Returns the mean of the elements that count, along `axis` or over everything."""
    count = jnp.sum(_where(x, mask), axis)
    return sum(x, mask, axis) / jnp.maximum(count, 1)


def min(x: Array, mask: Array, axis: Axis = None) -> Array:
    """Returns the smallest floating-point element that counts, for metrics."""
    where = _where(x, mask)
    return jnp.where(jnp.any(where, axis), jnp.min(x, axis, initial=jnp.inf, where=where), 0)


def max(x: Array, mask: Array, axis: Axis = None) -> Array:
    """Returns the largest floating-point element that counts, for metrics."""
    where = _where(x, mask)
    return jnp.where(jnp.any(where, axis), jnp.max(x, axis, initial=-jnp.inf, where=where), 0)


def _where(x: Array, mask: Array) -> Array:
    # A [B] mask would broadcast over [B, B] without an error, so shapes must be equal.
    if x.shape != mask.shape:
        raise ValueError(f"mask must have the shape of x, {x.shape}; got {mask.shape}")
    return mask != 0
