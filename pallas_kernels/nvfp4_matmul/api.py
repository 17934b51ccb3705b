"""The public functions of products with packed weights: they check arguments and choose the implementation.

`nvfp4_matmul` also defines its derivative.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import runtime
from pallas_kernels.formats.number_format import PackedTensor
from pallas_kernels.formats.nvfp4 import NVFP4Tensor
from pallas_kernels.formats.rounding import rounded
from pallas_kernels.nvfp4_matmul import (
    decode,
    decode_config,
    dequantize,
    layout,
    prefill,
    prefill_config,
    reference,
)
from pallas_kernels.nvfp4_matmul.layout import HopperNVFP4
from pallas_kernels.portable import layout as portable_layout
from pallas_kernels.portable import matmul as portable
from pallas_kernels.portable import tuning as portable_tuning
from pallas_kernels.portable.layout import PortableWeight

PackedWeight = NVFP4Tensor | HopperNVFP4 | PortableWeight


class _Decode:
    """Runs `decode.matmul`, for few rows; `decode_config` picks its configuration."""

    @staticmethod
    def supports(m: int, n: int, k: int, dtype: DTypeLike) -> str | None:
        if reason := _unfit(dtype):
            return reason
        if not 1 <= m <= decode_config.MAX_M:
            return f"needs 1 <= M <= {decode_config.MAX_M}; got M = {m}"
        return decode_config.supports(m, n, k, decode_config.pick_config(m, n, k))

    @staticmethod
    def forward(x: jax.Array, w: HopperNVFP4) -> jax.Array:
        y = decode.matmul(x, w.as_it_lies, decode_config.pick_config(len(x), *w.shape))
        return layout.joined_rows(y, -1) if w.is_paired else y

    @staticmethod
    def backward(dy: jax.Array, w: HopperNVFP4) -> jax.Array:
        return _Prefill.backward(dy, w)


class _Prefill:
    """Runs `prefill.matmul`, for any number of rows; `prefill_config` picks its configuration and dX's kernel."""

    @staticmethod
    def supports(m: int, n: int, k: int, dtype: DTypeLike) -> str | None:
        if reason := _unfit(dtype):
            return reason
        if m == 0:
            return "needs M >= 1; got M = 0"
        return prefill_config.supports(n, k, prefill_config.pick_config(m, n, k))

    forward = staticmethod(prefill.matmul)

    @staticmethod
    def backward(dy: jax.Array, w: HopperNVFP4) -> jax.Array:
        chosen = dequantize if prefill_config.unpacks_for_dx(len(dy), *w.shape) else prefill
        return chosen.backward(dy, w)


class Implementation(NamedTuple):
    """One way to compute the product: supports(m, n, k, dtype) -> reason or None, and x, dy and results are matrices."""

    supports: Callable[[int, int, int, DTypeLike], str | None]
    forward: Callable[[jax.Array, Any], jax.Array]
    backward: Callable[[jax.Array, Any], jax.Array]


def _portable_supports(m: int, n: int, k: int, dtype: DTypeLike) -> str | None:
    if reason := portable.unless_fit(dtype):
        return reason
    # Check M first: there is no configuration for M = 0.
    if not 1 <= m <= portable.MAX_M:
        return f"needs 1 <= M <= {portable.MAX_M}; got M = {m}"
    return portable.supports(m, n, k, portable_tuning.pick_config(m, n, k))


def _decoded_back(dy: jax.Array, w: PortableWeight) -> jax.Array:
    # The sum may be over rows with different global scales, so the multiplier is applied before it.
    scaled = (dy.astype(jnp.float32) * w.multiplier).astype(dy.dtype)
    product = reference.dot(scaled, portable_layout.decoded(w, dy.dtype), contract=0)
    return product.astype(dy.dtype)


def _unfit(dtype: DTypeLike) -> str | None:
    if reason := runtime.unless_hopper():
        return reason
    return None if dtype == jnp.bfloat16 else f"needs x in bfloat16; got {dtype}"


# Implementations for each layout, the fastest first. "dequantized" and "unpacked" multiply a copy of the weight with
# cuBLAS; it is freed after the product.
_IMPLEMENTATIONS: dict[str, Any] = {"reference": reference}
_HOPPER_IMPLEMENTATIONS: dict[str, Any] = {
    "decode": _Decode,
    "prefill": _Prefill,
    "dequantized": Implementation(
        lambda m, n, k, dtype: (
            _unfit(dtype) or dequantize.supports(n, k, dequantize.pick_config(k))
        ),
        dequantize.forward,
        dequantize.backward,
    ),
    "reference": Implementation(
        reference.supports,
        lambda x, w: reference.forward(x, layout.unprepare(w)),
        lambda dy, w: reference.backward(dy, layout.unprepare(w)),
    ),
}
_PORTABLE_IMPLEMENTATIONS: dict[str, Any] = {
    "portable": Implementation(_portable_supports, portable.few_rows, portable.backward),
    "unpacked": Implementation(
        lambda m, n, k, dtype: portable.unless_fit(dtype), portable.many_rows, portable.backward
    ),
    "reference": Implementation(
        reference.supports,
        lambda x, w: reference.dot(x, portable_layout.decoded(w, x.dtype), contract=1),
        _decoded_back,
    ),
}


def prepare(
    t: PackedTensor, dtype: DTypeLike, *, is_gated: bool = False, rank: int = 0
) -> PackedWeight | PackedTensor:
    """Converts a weight, or a stack of weights, to the layout that this device's kernels read.

    Args:
      t: the weight, in any packed format.
      dtype: dtype of the activations. All kernels need bfloat16. The Hopper kernels read NVFP4; the portable
        kernels read what `portable.layout.supports`. If no kernel fits, the weight is returned unchanged.
      is_gated: whether the rows are gate and up of a SwiGLU. For the Hopper kernels they are then put in pairs
        (`layout.paired_rows`) if `layout.can_pair` and `runtime.pairs_gates` say so.
      rank: rank of LoRA on this weight; 0 without LoRA.

    Returns:
      A `HopperNVFP4` or a `PortableWeight`; or t itself if no kernel fits.
    """
    if isinstance(t, NVFP4Tensor) and _unfit(dtype) is None:
        is_paired = is_gated and runtime.pairs_gates() and layout.can_pair(t.shape[0], rank)
        return layout.prepare(t, is_paired=is_paired)
    if portable.unless_fit(dtype) is None and portable_layout.supports(t) is None:
        return portable_layout.prepare(t)
    return t


def unprepare(w: PackedWeight | PackedTensor) -> PackedTensor:
    """Inverts `prepare`, exactly with two exceptions.

    In both layouts, NVFP4 codes whose scale is zero become zero. Doubly quantized NF4 scales come back decoded.
    """
    if isinstance(w, HopperNVFP4):
        return layout.unprepare(w)
    return portable_layout.unprepare(w) if isinstance(w, PortableWeight) else w


def nvfp4_matmul(
    x: jax.Array,
    w: PackedWeight,
    *,
    implementation: str | None = None,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Multiplies activations by a packed weight: y = x @ dequantize(w)^T.

        y = rounded(sum over k of x * (code * scale)) / global_scale

    Sums are float32. Every implementation rounds them to x's dtype at the end of the product, because with cuBLAS
    float32 sums would cost another pass over them (`dequantize.forward`). The division follows in float32; XLA fuses
    it into the operation that reads the sums, so it costs nothing. For a one-hot x the sums are scaled codes, which
    are exact in bfloat16.

    The derivative with respect to x also reads the packed weight, and saves nothing else for the backward pass.
    The weight is frozen: its cotangent is zero.

    Args:
      x: [..., K], float32 or bfloat16.
      w: one [N, K] weight; slice a stack with `lax.scan`. `prepare` converts it to the layout that the kernels read.
      implementation: None for the fastest that supports the problem. "reference" works for every layout. The Hopper
        layout also has "decode" (at most 128 rows), "prefill" and "dequantized". The portable layout, which holds every
        format, also has "portable" (at most 128 rows) and "unpacked".
      out_dtype: dtype of y; by default x's dtype. With float32, y is not rounded again after the division.

    Returns:
      y [..., N] in `out_dtype`.

    Raises:
      ValueError: a dtype or shape is wrong, or the implementation is unknown.
      NotImplementedError: the named implementation cannot run this problem.
    """
    if not isinstance(w, PackedWeight):
        raise ValueError(
            f"w must be an NVFP4Tensor, or what prepare returned; got {type(w).__name__}"
        )
    field, axes = {
        NVFP4Tensor: ("codes", 2),
        HopperNVFP4: ("words", 4),
        PortableWeight: ("words", 3),
    }[type(w)]
    if (array := getattr(w, field)).ndim != axes:
        raise ValueError(f"w must be one [N, K] matrix; its {field} have shape {array.shape}")
    check_fits(x, w)
    *rows, k = x.shape
    n = w.shape[0]
    m = math.prod(rows)
    name = _choose(_implementations(w), implementation, m, n, k, x.dtype)
    # Flatten x to one matrix: on a CPU a bfloat16 dot with two leading axes takes twice as long (8 x 64 rows).
    y = _matmul(name, x.dtype, x.reshape(m, k), w).reshape(*rows, n)
    return y.astype(out_dtype or x.dtype)


def check_fits(x: jax.Array, w: PackedWeight | PackedTensor) -> None:
    """Raises ValueError if x is not [..., K] in float32 or bfloat16, to meet a weight w [N, K]."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"x must be float32 or bfloat16; got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"x must be [..., K = {w.shape[1]}] to meet w of shape {w.shape}; got {x.shape}"
        )


def _implementations(w: PackedWeight) -> dict[str, Any]:
    if isinstance(w, PortableWeight):
        return _PORTABLE_IMPLEMENTATIONS
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
    """Computes dy @ dequantize(w) [M, K] in dy's dtype, for dy [M, N]: the cotangent of x in `nvfp4_matmul`."""
    name = _choose(_HOPPER_IMPLEMENTATIONS, None, len(dy), *w.shape, dy.dtype)
    return _HOPPER_IMPLEMENTATIONS[name].backward(dy, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(name: str, dtype: DTypeLike, x: jax.Array, w: PackedWeight) -> jax.Array:
    without = dataclasses.replace(w, global_scale=jnp.ones((1,)))
    sums = _implementations(w)[name].forward(x, without)
    return rounded(sums.astype(jnp.float32), dtype).astype(jnp.float32) * w.multiplier


def _matmul_fwd(name, dtype, x, w):
    return _matmul(name, dtype, x, w), w


def _matmul_bwd(name, dtype, w, dy):
    return _implementations(w)[name].backward(dy.astype(dtype), w), None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)
