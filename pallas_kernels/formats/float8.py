"""W4A8: products of rows in float8 and NVFP4 weights, defined in jnp. Nothing uses it yet.

With e4m3(.) for the nearest float8 (E4M3, ties to even, subnormals included), a row scale r and the weight's exponent s:

    x8[m, k] = e4m3(x[m, k] / r[m]),                     r[m] = max_k |x[m, k]| / 448
    w8[n, k] = e4m3(code[n, k] * scale[n, k // 16] * 2^-s)
    y[m, n]  = (sum_k x8[m, k] * w8[n, k]) * r[m] * 2^s / global_scale,   summed in float32

code * scale has up to 6 significant bits and E4M3 has 4, so this W is not the one that `nvfp4.dequantize` gives: scales are best
searched for it (`nvfp4.search` with `as_float8`). s is the smallest integer with which no product exceeds 448, the largest E4M3 value.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.formats import nvfp4
from pallas_kernels.formats.nvfp4 import NVFP4Tensor
from pallas_kernels.formats.rounding import float8_values

_MAX = 448.0


def exponent(t: NVFP4Tensor) -> jax.Array:
    """Returns s of each matrix, int32 [...]: 3, if a scale of 448 has a code for 6."""
    largest = jnp.max(jnp.abs(nvfp4.scaled_codes(t, jnp.float32)), axis=(-2, -1))
    # The quotient is a power of two only if it is exact, so its exponent is right.
    mantissa, power = jnp.frexp(largest / _MAX)
    return jnp.where(largest == 0, 0, power - (mantissa == 0.5))


def weight(t: NVFP4Tensor) -> tuple[jax.Array, jax.Array]:
    """Rounds a weight to float8.

    Returns:
      w8, float8_e4m3fn [..., N, K], and 2^s / global_scale, float32 [..., 1] or [..., N].
    """
    power = exponent(t)[..., None]
    codes = nvfp4.scaled_codes(t, jnp.float32)
    w8 = float8_values(jnp.ldexp(codes, -power[..., None]))
    return w8.astype(jnp.float8_e4m3fn), jnp.ldexp(t.multiplier, power)


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds rows [..., K] to float8: float8_e4m3fn [..., K] and float32 scales [..., 1]; a row of zeros has the scale 1."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scale = jnp.where(largest > 0, largest / _MAX, 1.0)
    x8 = float8_values(jnp.clip(wide / scale, -_MAX, _MAX))
    return x8.astype(jnp.float8_e4m3fn), scale


def forward(x: jax.Array, t: NVFP4Tensor) -> jax.Array:
    """Computes x W^T for x [M, K] and a weight [N, K]: [M, N] in x's dtype."""
    (x8, row_scale), (w8, multiplier) = quantize_rows(x), weight(t)
    return (_sums(x8, w8, 1) * row_scale * multiplier).astype(x.dtype)


def backward(dy: jax.Array, t: NVFP4Tensor) -> jax.Array:
    """Computes dX = dY W for dY [M, N] and a weight [N, K], with the same w8: [M, K] in dY's dtype.

    If each row of the weight has its own global scale, dY is multiplied by it before it is rounded.
    """
    w8, multiplier = weight(t)
    if multiplier.shape[-1] != 1:
        dy, multiplier = dy.astype(jnp.float32) * multiplier, 1.0
    dy8, row_scale = quantize_rows(dy)
    return (_sums(dy8, w8, 0) * row_scale * multiplier).astype(dy.dtype)


def _sums(x8: jax.Array, w8: jax.Array, contract: int) -> jax.Array:
    # Products of two float8 values are exact in float32.
    wide = x8.astype(jnp.float32), w8.astype(jnp.float32)
    dimensions = ((1,), (contract,)), ((), ())
    return jax.lax.dot_general(*wide, dimensions, precision=jax.lax.Precision.HIGHEST)
