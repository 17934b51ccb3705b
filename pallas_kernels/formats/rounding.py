"""A rounding that XLA cannot omit, for definitions that two programs must follow equally."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Converts x to `dtype`, rounding to nearest, ties to even.

    `astype` alone does not guarantee rounding. If a conversion back follows, XLA may omit both conversions
    (`xla_allow_excess_precision`), depending on what it fuses.
    """
    of = jnp.finfo(dtype)
    if of.bits < jnp.finfo(x.dtype).bits:
        x = jax.lax.reduce_precision(x, of.nexp, of.nmant)
    return x.astype(dtype)
