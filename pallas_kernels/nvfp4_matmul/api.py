"""The one way in: checks, choice of implementation, derivative."""

import functools
import math
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.nvfp4 import NVFP4Tensor
from pallas_kernels.nvfp4_matmul import reference

# Best first. Each module offers supports(m, n, k, dtype) -> reason or None, forward(x, w) and
# backward(dy, w), where x and dy are matrices.
_IMPLEMENTATIONS: dict[str, ModuleType] = {"reference": reference}


def nvfp4_matmul(x: jax.Array, w: NVFP4Tensor, *, implementation: str | None = None) -> jax.Array:
    """Multiplies activations with a packed weight: y = x @ dequantize(w)^T.

    Products x * (code * scale) are summed in float32 and multiplied by 1 / global_scale there, so a
    one-hot x returns a row of scaled codes times that multiplier, rounded once.

    The derivative with respect to x is formed from the packed weight too, and nothing but the
    weight is kept for it. The weight is frozen: its cotangent is zero.

    Args:
      x: [..., K], float32 or bfloat16.
      w: an [N, K] weight without stacked axes; slice those with `lax.scan`.
      implementation: "reference", or None for the best that supports the problem.

    Returns:
      [..., N] in x.dtype.

    Raises:
      ValueError: a wrong type or shape, or an unknown implementation.
      NotImplementedError: the named implementation cannot run this problem.
    """
    if not isinstance(w, NVFP4Tensor):
        raise ValueError(f"w must be an NVFP4Tensor; got {type(w).__name__}")
    if w.codes.ndim != 2:
        raise ValueError(f"w must be one [N, K] matrix; its codes have shape {w.codes.shape}")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"x must be float32 or bfloat16; got {x.dtype}")
    n, k = w.shape
    if x.ndim == 0 or x.shape[-1] != k:
        raise ValueError(f"x must be [..., K = {k}] to meet w of shape {w.shape}; got {x.shape}")

    *rows, _ = x.shape
    m = math.prod(rows)
    name = _choose(implementation, m, n, k, x.dtype)
    # As one matrix: with two leading axes a bfloat16 dot took twice as long on a CPU (8 x 64 rows).
    return _matmul(name, x.reshape(m, k), w).reshape(*rows, n)


def _choose(implementation: str | None, m: int, n: int, k: int, dtype: jnp.dtype) -> str:
    if implementation is None:
        return next(
            name for name, i in _IMPLEMENTATIONS.items() if i.supports(m, n, k, dtype) is None
        )
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {sorted(_IMPLEMENTATIONS)} or None; "
            f"got {implementation!r}"
        )
    reason = _IMPLEMENTATIONS[implementation].supports(m, n, k, dtype)
    if reason is not None:
        raise NotImplementedError(f"implementation {implementation!r}: {reason}")
    return implementation


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(name: str, x: jax.Array, w: NVFP4Tensor) -> jax.Array:
    return _IMPLEMENTATIONS[name].forward(x, w)


def _matmul_fwd(name: str, x: jax.Array, w: NVFP4Tensor) -> tuple[jax.Array, NVFP4Tensor]:
    return _matmul(name, x, w), w


def _matmul_bwd(name: str, w: NVFP4Tensor, dy: jax.Array) -> tuple[jax.Array, None]:
    return _IMPLEMENTATIONS[name].backward(dy, w), None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)
