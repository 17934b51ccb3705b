"""The product in jnp: the oracle for the kernels' tests, and the fallback where no kernel runs.

    y = (x @ scaled_codes(w)^T) * multiplier,   accumulated in float32

Not optimized: every call unpacks the weight.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.formats import nvfp4
from pallas_kernels.formats.nvfp4 import NVFP4Tensor


def supports(m: int, n: int, k: int, dtype: DTypeLike) -> str | None:
    """None: the reference runs every problem that the API accepts."""
    return None


def forward(x: jax.Array, w: NVFP4Tensor) -> jax.Array:
    """x [M, K] -> x @ dequantize(w)^T [M, N], in x.dtype."""
    product = dot(x, nvfp4.scaled_codes(w, x.dtype), contract=1)
    return (product * w.multiplier).astype(x.dtype)


def backward(dy: jax.Array, w: NVFP4Tensor) -> jax.Array:
    """dy [M, N] -> dy @ dequantize(w) [M, K], in dy.dtype."""
    codes = nvfp4.scaled_codes(w, dy.dtype)
    if w.global_scale.shape[-1] == 1:
        return (dot(dy, codes, contract=0) * w.multiplier).astype(dy.dtype)
    # The sum is over rows with different global scales, so the multiplier must come first here.
    scaled = (dy.astype(jnp.float32) * w.multiplier).astype(dy.dtype)
    return dot(scaled, codes, contract=0).astype(dy.dtype)


def dot(x: jax.Array, codes: jax.Array, *, contract: int) -> jax.Array:
    """x [M, K] times a matrix, summed over the matrix's axis `contract`; returns float32 sums."""
    return jax.lax.dot_general(
        x,
        codes,
        (((1,), (contract,)), ((), ())),
        # By default a GPU multiplies float32 in TF32.
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
