"""Roundings that XLA cannot omit, for computations that two programs must do with the same bits."""

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


def float8_values(x: jax.Array) -> jax.Array:
    """Rounds to the nearest E4M3 value, ties to even, and keeps float32.

    Args:
      x: float32, of magnitudes up to 448. Values below 2^-6 become subnormal: multiples of 2^-9.
    """
    size = jnp.abs(x)
    # The sum is rounded to the step of E4M3, an eighth of the power of two below.
    power = jnp.maximum(jax.lax.bitcast_convert_type(size, jnp.uint32) >> 23, 127 - 6)
    shift = jax.lax.bitcast_convert_type((power + 20).astype(jnp.uint32) << 23, jnp.float32)
    return jnp.copysign((size + shift) - shift, x)
