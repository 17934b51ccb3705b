"""Rounding that is part of a definition, so that two programs round in the same places."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x in `dtype`, rounded to nearest, ties to even.

    `astype` alone does not guarantee rounding: if a conversion back follows, XLA may omit both
    (`xla_allow_excess_precision`), and this depends on what it fuses.
    """
    of = jnp.finfo(dtype)
    if of.bits < jnp.finfo(x.dtype).bits:
        x = jax.lax.reduce_precision(x, of.nexp, of.nmant)
    return x.astype(dtype)
