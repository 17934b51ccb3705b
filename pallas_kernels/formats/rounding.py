"""A rounding that XLA cannot omit, for computations that two programs must do with the same bits."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Converts x to `dtype`, rounding to nearest, ties to even.

    `astype` alone does not guarantee rounding. If a conversion back follows, XLA may omit both conversions
    (`xla_allow_excess_precision`), depending on its fusions.
    """
    of = jnp.finfo(dtype)
    if of.bits < jnp.finfo(x.dtype).bits:
        x = jax.lax.reduce_precision(x, of.nexp, of.nmant)
    return x.astype(dtype)
