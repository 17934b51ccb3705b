"""The one way in: checks, choice of implementation, derivative."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import runtime
from pallas_kernels.nvfp4 import NVFP4Tensor
from pallas_kernels.nvfp4_matmul import dequantize, hopper, layout, reference, tuning, wide
from pallas_kernels.nvfp4_matmul.layout import HopperNVFP4
from pallas_kernels.rounding import rounded

PackedWeight = NVFP4Tensor | HopperNVFP4


class _Hopper:
    """`hopper.matmul` with the configuration that `tuning` has for the problem."""

    @staticmethod
    def supports(m: int, n: int, k: int, dtype: DTypeLike) -> str | None:
        if reason := _unfit(dtype):
            return reason
        if not 1 <= m <= hopper.MAX_M:
            return f"needs 1 <= M <= {hopper.MAX_M}; got M = {m}"
        return hopper.supports(m, n, k, tuning.pick_config(m, n, k))

    @staticmethod
    def forward(x: jax.Array, w: HopperNVFP4) -> jax.Array:
        return hopper.matmul(x, w, tuning.pick_config(len(x), *w.shape))

    @staticmethod
    def backward(dy: jax.Array, w: HopperNVFP4) -> jax.Array:
        return _Wide.backward(dy, w)


class _Wide:
    """`wide.matmul`, with the configuration that it picks itself; dX as `tuning` has it."""

    @staticmethod
    def supports(m: int, n: int, k: int, dtype: DTypeLike) -> str | None:
        if reason := _unfit(dtype):
            return reason
        if m == 0:
            return "needs M >= 1; got M = 0"
        return wide.supports(n, k, wide.pick_config(m, n, k))

    forward = staticmethod(wide.matmul)

    @staticmethod
    def backward(dy: jax.Array, w: HopperNVFP4) -> jax.Array:
        chosen = dequantize if tuning.unpacks_for_dx(len(dy), *w.shape) else wide
        return chosen.backward(dy, w)


class _Dequantized:
    """cuBLAS on a bfloat16 copy that lives no longer than the product."""

    @staticmethod
    def supports(m: int, n: int, k: int, dtype: DTypeLike) -> str | None:
        return _unfit(dtype) or dequantize.supports(n, k, dequantize.pick_config(k))

    forward = staticmethod(dequantize.forward)
    backward = staticmethod(dequantize.backward)


class _UnpreparedReference:
    """`reference` for weights in the Hopper layout."""

    supports = staticmethod(reference.supports)

    @staticmethod
    def forward(x: jax.Array, w: HopperNVFP4) -> jax.Array:
        return reference.forward(x, layout.unprepare(w))

    @staticmethod
    def backward(dy: jax.Array, w: HopperNVFP4) -> jax.Array:
        return reference.backward(dy, layout.unprepare(w))


def _unfit(dtype: DTypeLike) -> str | None:
    if reason := runtime.unless_hopper():
        return reason
    return None if dtype == jnp.bfloat16 else f"needs x in bfloat16; got {dtype}"


# By the layout that they read, best first. Each offers supports(m, n, k, dtype) -> reason or None,
# forward(x, w) and backward(dy, w), where x and dy are matrices.
_IMPLEMENTATIONS: dict[str, Any] = {"reference": reference}
_HOPPER_IMPLEMENTATIONS: dict[str, Any] = {
    "hopper": _Hopper,
    "wide": _Wide,
    "dequantized": _Dequantized,
    "reference": _UnpreparedReference,
}


def prepare(t: NVFP4Tensor, dtype: DTypeLike) -> PackedWeight:
    """Puts a weight, or a stack of them, into the layout that this device's kernels read.

    Args:
      t: the weight.
      dtype: of the activations that it will meet. On a Hopper GPU, kernels take bfloat16; for any
        other device or type the weight stays as it is.
    """
    return layout.prepare(t) if _unfit(dtype) is None else t


def unprepare(w: PackedWeight) -> NVFP4Tensor:
    """Inverse of `prepare`, bit for bit."""
    return w if isinstance(w, NVFP4Tensor) else layout.unprepare(w)


def nvfp4_matmul(
    x: jax.Array,
    w: PackedWeight,
    *,
    implementation: str | None = None,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Multiplies activations with a packed weight: y = x @ dequantize(w)^T.

        y = rounded(sum over k of x * (code * scale)) / global_scale

    The sums are in float32 and rounded to x's type as they leave the product, whatever implements it
    (cuBLAS can do no other); the multiplication comes after that, in float32, by the fusion that reads
    them, where it costs nothing. A one-hot x finds scaled codes, which need no rounding.

    The derivative with respect to x is formed from the packed weight too, and nothing but the
    weight is kept for it. The weight is frozen: its cotangent is zero.

    Args:
      x: [..., K], float32 or bfloat16.
      w: an [N, K] weight without stacked axes; slice those with `lax.scan`. `prepare` brings it into
        the layout that the kernels read.
      implementation: None for the best that supports the problem; or "reference"; or, for a weight in
        the Hopper layout, "hopper" (M <= 128), "wide" or "dequantized".
      out_dtype: of y, by default x's; in float32 y is not rounded again.

    Returns:
      [..., N].

    Raises:
      ValueError: a wrong type or shape, or an unknown implementation.
      NotImplementedError: the named implementation cannot run this problem.
    """
    if not isinstance(w, PackedWeight):
        raise ValueError(f"w must be an NVFP4Tensor; got {type(w).__name__}")
    if isinstance(w, NVFP4Tensor) and w.codes.ndim != 2:
        raise ValueError(f"w must be one [N, K] matrix; its codes have shape {w.codes.shape}")
    if isinstance(w, HopperNVFP4) and w.words.ndim != 4:
        raise ValueError(f"w must be one [N, K] matrix; its words have shape {w.words.shape}")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"x must be float32 or bfloat16; got {x.dtype}")
    n, k = w.shape
    if x.ndim == 0 or x.shape[-1] != k:
        raise ValueError(f"x must be [..., K = {k}] to meet w of shape {w.shape}; got {x.shape}")

    *rows, _ = x.shape
    m = math.prod(rows)
    name = _choose(_implementations(w), implementation, m, n, k, x.dtype)
    # As one matrix: with two leading axes a bfloat16 dot took twice as long on a CPU (8 x 64 rows).
    y = _matmul(name, x.dtype, x.reshape(m, k), w).reshape(*rows, n)
    return y.astype(out_dtype or x.dtype)


def _implementations(w: PackedWeight) -> dict[str, Any]:
    return _IMPLEMENTATIONS if isinstance(w, NVFP4Tensor) else _HOPPER_IMPLEMENTATIONS


def _choose(
    offered: dict[str, Any], name: str | None, m: int, n: int, k: int, dtype: DTypeLike
) -> str:
    if name is None:
        return next(name for name, i in offered.items() if i.supports(m, n, k, dtype) is None)
    if name not in offered:
        raise ValueError(f"implementation must be one of {sorted(offered)} or None; got {name!r}")
    reason = offered[name].supports(m, n, k, dtype)
    if reason is not None:
        raise NotImplementedError(f"implementation {name!r}: {reason}")
    return name


def backward(dy: jax.Array, w: HopperNVFP4) -> jax.Array:
    """dy [M, N] -> dy @ dequantize(w) [M, K], in dy's type: the derivative of `nvfp4_matmul` by x."""
    name = _choose(_HOPPER_IMPLEMENTATIONS, None, len(dy), *w.shape, dy.dtype)
    return _HOPPER_IMPLEMENTATIONS[name].backward(dy, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(name: str, dtype: DTypeLike, x: jax.Array, w: PackedWeight) -> jax.Array:
    without = dataclasses.replace(w, global_scale=jnp.ones((1,)))
    sums = _implementations(w)[name].forward(x, without)
    return rounded(sums.astype(jnp.float32), dtype).astype(jnp.float32) * w.multiplier


def _matmul_fwd(
    name: str, dtype: DTypeLike, x: jax.Array, w: PackedWeight
) -> tuple[jax.Array, PackedWeight]:
    return _matmul(name, dtype, x, w), w


def _matmul_bwd(
    name: str, dtype: DTypeLike, w: PackedWeight, dy: jax.Array
) -> tuple[jax.Array, None]:
    return _implementations(w)[name].backward(dy.astype(dtype), w), None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)
