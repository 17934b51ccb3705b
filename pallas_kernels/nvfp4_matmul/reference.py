"""The product in jnp. Kernels are tested against it, and it runs where no kernel can.

    y = (x @ scaled_codes(w)^T) * multiplier,   accumulated in float32

It is not optimized: every call unpacks the weight.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.formats import nvfp4
from pallas_kernels.formats.nvfp4 import NVFP4Tensor


def supports(m: int, n: int, k: int, dtype: DTypeLike) -> str | None:
    """Returns None: the reference runs every problem that the API accepts."""
    return None


def forward(x: jax.Array, w: NVFP4Tensor) -> jax.Array:
    """Computes x @ dequantize(w)^T [M, N] in x's dtype, for x [M, K]."""
    product = dot(x, nvfp4.scaled_codes(w, x.dtype), contract=1)
    return (product * w.multiplier).astype(x.dtype)


def backward(dy: jax.Array, w: NVFP4Tensor) -> jax.Array:
    """Computes dy @ dequantize(w) [M, K] in dy's dtype, for dy [M, N]."""
    codes = nvfp4.scaled_codes(w, dy.dtype)
    if w.global_scale.shape[-1] == 1:
        return (dot(dy, codes, contract=0) * w.multiplier).astype(dy.dtype)
    # The sum is over rows with different global scales, so the multiplier must be applied before it.
    scaled = (dy.astype(jnp.float32) * w.multiplier).astype(dy.dtype)
    return dot(scaled, codes, contract=0).astype(dy.dtype)


def dot(x: jax.Array, codes: jax.Array, *, contract: int) -> jax.Array:
    """Multiplies x [M, K] by a matrix, whose axis `contract` has size K; returns float32 sums."""
    return jax.lax.dot_general(
        x,
        codes,
        (((1,), (contract,)), ((), ())),
        # By default a GPU multiplies float32 in TF32.
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
