"""Products with weights of any packed format.

NVFP4 weights, and weights in a kernel's layout, use `nvfp4_matmul`. Weights of other formats are unpacked to the
activations' dtype and then multiplied, as bitsandbytes does for many rows. XLA fuses the unpacking into one pass,
whose result is freed after the product.
"""

import jax
from jax.typing import DTypeLike

from pallas_kernels.formats.number_format import PackedTensor
from pallas_kernels.formats.registry import format_of
from pallas_kernels.formats.rounding import rounded
from pallas_kernels.nvfp4_matmul import api, reference

PackedWeight = api.PackedWeight | PackedTensor


def packed_matmul(
    x: jax.Array, w: PackedWeight, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """Multiplies activations by a packed weight: y = x @ dequantize(w)^T, accumulated in float32.

    The derivative with respect to x also uses the packed weight, and saves nothing else for the backward pass. The
    weight is frozen: it gets no gradient.

    Args:
      x: [..., K], float32 or bfloat16.
      w: an [N, K] weight without stacked axes; slice those with `lax.scan`.
      out_dtype: dtype of y; by default x's dtype. The sums are always rounded to x's dtype first. With float32, y is
        not rounded again after the division by a global scale.

    Returns:
      y [..., N] in `out_dtype`.

    Raises:
      ValueError: a wrong dtype or shape.
    """
    if isinstance(w, api.PackedWeight):
        return api.nvfp4_matmul(x, w, out_dtype=out_dtype)
    if not isinstance(w, PackedWeight):
        raise ValueError(f"w must be a packed weight; got {type(w).__name__}")
    shape = jax.eval_shape(lambda: format_of(w).dequantize(w, x.dtype)).shape
    if len(shape) != 2:
        raise ValueError(f"w must be one [N, K] matrix; got a stack {shape}")
    api.check_fits(x, w)
    n, k = w.shape
    return _matmul(x.reshape(-1, k), w).reshape(*x.shape[:-1], n).astype(out_dtype or x.dtype)


@jax.custom_vjp
def _matmul(x: jax.Array, w: PackedTensor) -> jax.Array:
    return _dot(x, w, contract=1)


def _matmul_fwd(x, w):
    return _matmul(x, w), w


def _matmul_bwd(w, dy):
    return _dot(dy, w, contract=0), None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _dot(x: jax.Array, w: PackedTensor, *, contract: int) -> jax.Array:
    weight = format_of(w).dequantize(w, x.dtype)
    return rounded(reference.dot(x, weight, contract=contract), x.dtype)
