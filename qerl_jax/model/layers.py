"""The transformer's arithmetic as pure functions of arrays. The Linen modules are in `transformer.py`.

Slot i of a row holds its i-th token. Padding is on the right and needs no mask array: a query at slot s sees only the
keys of slots 0 to s, so no real token sees padding.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels import rounded, runtime
from pallas_kernels.linear import LoraTerm
from qerl_jax.model.architecture import Architecture, LinearRope, Llama3Rope, YarnRope


class Normed(NamedTuple):
    """The result of an RMSNorm as two factors. A linear may multiply `values` first, and its output by `unit` later."""

    values: jax.Array  # [..., D], x * scale in x's dtype
    unit: jax.Array  # float32 [..., 1], 1 / sqrt(mean(x^2) + eps)


def logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """Computes logits: hidden states [..., D] and head [V, D] -> float32 [..., V]."""
    options = {"preferred_element_type": jnp.float32, "precision": _precision(hidden.dtype)}
    return jnp.einsum("...d,vd->...v", hidden, head.astype(hidden.dtype), **options)


def branches(
    adapters: Sequence[tuple[jax.Array, jax.Array, jax.Array]], scaling: float
) -> list[LoraTerm]:
    """Computes LoRA branches `scaling * (x A) B` (arXiv 2106.09685) as pairs x A and scaling * B, in x's dtype.

    Args:
        adapters: x [..., K], A float32 [K, R] and B float32 [R, N] of each adapter. Fused linears read the same x,
            unless dropout has made different copies of it.
        scaling: The LoRA scaling, such as alpha / R.

    Returns:
        For each adapter x A [rows of x, R] and scaling * B [R, N], for `finished_linear`.
    """
    x, dtype = adapters[0][0], adapters[0][0].dtype
    product = lambda x, a: jnp.dot(
        x.reshape(-1, x.shape[-1]), a.astype(dtype), precision=_precision(dtype)
    )
    if all(other is x for other, _, _ in adapters):
        # With one product, the gradient with respect to x is also one product, not a sum of several.
        down = product(x, jnp.concatenate([a for _, a, _ in adapters], axis=1))
        downs = jnp.split(down, len(adapters), axis=1)
    else:
        downs = [product(x, a) for x, a, _ in adapters]
    ups = [(scaling * b).astype(dtype) for _, _, b in adapters]
    return list(zip(downs, ups, strict=True))


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Computes x * scale / sqrt(mean(x^2) + eps) over the last axis, in float32; the result has x's dtype.

    The scale may be float32 while x is bfloat16: AQN's noise on it is far smaller than a bfloat16 step.
    """
    unit = x.astype(jnp.float32) * _unit(x, eps)
    return rounded(unit * scale.astype(jnp.float32), x.dtype)


def split_norm(x: jax.Array, scale: jax.Array, eps: float) -> Normed:
    """Computes `rms_norm` as two factors, for linears that multiply by `values` first and by `unit` afterwards.

    In a decoding step the product begins before `unit` is known. Everything that `unit` multiplies must be linear in
    `values`. Then the gradient of `unit` follows from that of `values`,

        d unit = sum of (values * d values) / unit

    and the backward pass of `values` includes it; no gradient flows through `unit` itself. This costs as much as the
    gradient of `rms_norm`. The direct way would need another pass over a linear's N outputs.
    """
    values, unit = _split_norm(x, scale.astype(jnp.float32), eps)
    return Normed(values, jax.lax.stop_gradient(unit))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _split_norm(x, scale, eps):
    return rounded(x.astype(jnp.float32) * scale, x.dtype), _unit(x, eps)


def _split_norm_fwd(x, scale, eps):
    values, unit = _split_norm(x, scale, eps)
    return (values, unit), (x, scale, unit)


def _split_norm_bwd(eps, residuals, cotangents):
    x, scale, unit = residuals
    wide, dvalues = x.astype(jnp.float32), cotangents[0].astype(jnp.float32)
    slope = dvalues * scale
    dx = slope - wide * unit**2 * jnp.mean(slope * wide, axis=-1, keepdims=True)
    dscale = dvalues * wide
    # The scale is [D], or [B, 1, D] if each row has its own noise.
    dscale = jnp.sum(dscale, axis=range(x.ndim - scale.ndim))
    wanted = [axis for axis in range(scale.ndim) if scale.shape[axis] == 1]
    return dx.astype(x.dtype), jnp.sum(dscale, axis=wanted, keepdims=True)


_split_norm.defvjp(_split_norm_fwd, _split_norm_bwd)


def _unit(x, eps):
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


# Saves gate_up for the backward pass, not the float32 values computed from it.
@functools.partial(jax.checkpoint, prevent_cse=False)
def swiglu(gate_up: jax.Array) -> jax.Array:
    """Computes silu(gate) * up (arXiv 2002.05202): [..., 2F] -> [..., F], in float32, rounded once to the dtype."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return rounded(jax.nn.silu(gate) * up, gate_up.dtype)


def rope_frequencies(arch: Architecture) -> np.ndarray:
    """Computes the angle per position of each pair of channels: float32 [C/2] (RoPE, arXiv 2104.09864)."""
    exponent = np.arange(0, arch.head_size, 2, dtype=np.float32) / np.float32(arch.head_size)
    frequency = (1.0 / arch.rope_theta**exponent).astype(np.float32)
    if (scaling := arch.rope_scaling) is None:
        return frequency
    # Long wavelengths are stretched by `factor`, short ones are kept, those between two bounds are interpolated.
    match scaling:
        case LinearRope():
            blend = np.zeros_like(frequency)
        case Llama3Rope():
            rotations = scaling.original_max_position_embeddings * frequency / (2 * np.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            blend = np.clip((rotations - low) / (high - low), 0.0, 1.0)
        case YarnRope():
            blend = _yarn_blend(scaling, arch.head_size, arch.rope_theta)
    return ((1 - blend) * frequency / scaling.factor + blend * frequency).astype(np.float32)


def _yarn_blend(scaling: YarnRope, head_size: int, theta: float) -> np.ndarray:
    """Computes how much of each frequency is kept under YaRN (arXiv 2309.00071): float64 [C/2].

    The bounds are those pairs of channels that rotate `beta_fast` and `beta_slow` times in the original context.
    """
    rotations = 2 * np.pi * np.array([scaling.beta_fast, scaling.beta_slow])
    original = scaling.original_max_position_embeddings
    low, high = head_size * np.log(original / rotations) / (2 * np.log(theta))
    if scaling.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    high += 0.001 * (low == high)
    return 1 - np.clip((np.arange(head_size // 2) - low) / (high - low), 0.0, 1.0)


def rope_tables(positions: jax.Array, arch: Architecture) -> tuple[jax.Array, jax.Array]:
    """Computes cosine and sine of position * frequency: int32 [B, T] -> two float32 [B, T, 1, C/2].

    Under YaRN both are multiplied by its attention factor, so the logits of attention grow by its square.
    """
    angle = positions[..., None, None].astype(jnp.float32) * rope_frequencies(arch)
    tables = jnp.cos(angle), jnp.sin(angle)
    if not isinstance(arch.rope_scaling, YarnRope):
        return tables
    return tables[0] * arch.rope_scaling.attention_factor, tables[
        1
    ] * arch.rope_scaling.attention_factor


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (c, c + C/2) of x [B, T, heads, C] by `rope_tables`, in float32; keeps x's dtype."""
    cos, sin = (table[..., None, :] for table in tables)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    # The halves are swapped by a flip, not concatenated: XLA's derivative of a concatenation is slow.
    turned = halves * cos + jnp.flip(halves, -2) * jnp.concatenate([-sin, sin], axis=-2)
    return rounded(turned.reshape(x.shape), x.dtype)


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Computes causal grouped-query attention: the query at slot t sees the keys of slots 0 to t.

    Queries [B, T, H, C], keys and values [B, T, J, C] -> [B, T, H, C], in the dtype of the arguments.
    """
    if has_fused_attention(query.dtype, query.shape[-1]):
        # JAX cannot differentiate this for an odd number of tokens, so one is added at the end. No token sees it.
        padding = (0, 0), (0, query.shape[1] % 2), (0, 0), (0, 0)
        even = (jnp.pad(heads, padding) for heads in (query, key, value))
        mixed = jax.nn.dot_product_attention(*even, is_causal=True, implementation="cudnn")
        return mixed[:, : query.shape[1]]
    return plain_attention(query, key, value)


def has_fused_attention(dtype: DTypeLike, head_size: int) -> bool:
    """Whether `attention` uses cuDNN's fused kernel on this device, which does not store the [B, H, T, T] scores."""
    return dtype == jnp.bfloat16 and runtime.has_cudnn_attention(head_size)


def plain_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Computes `attention` in jnp, on any device. It stores all [B, H, T, T] scores in float32."""
    batch, length, heads, size = query.shape
    groups = key.shape[2]
    slot = jnp.arange(length)
    visible = (slot <= slot[:, None])[None, None]

    # Batched three-dimensional products: XLA:CPU runs them 1.5 times faster than the five-index einsum.
    grouped = query.reshape(batch, length, groups, heads // groups, size).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch * groups, (heads // groups) * length, size)
    keys = key.transpose(0, 2, 3, 1).reshape(batch * groups, size, -1)
    values = value.transpose(0, 2, 1, 3).reshape(batch * groups, -1, size)
    precision = _precision(query.dtype)
    scores = jnp.matmul(grouped, keys, preferred_element_type=jnp.float32, precision=precision)
    scores = (scores * size**-0.5).reshape(batch, heads, length, -1)
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1).astype(query.dtype)
    weights = weights.reshape(batch * groups, (heads // groups) * length, -1)
    mixed = jnp.matmul(weights, values, precision=precision)
    mixed = mixed.reshape(batch, groups, heads // groups, length, size).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(batch, length, heads, size)


def _precision(dtype):
    # float32 inputs are multiplied in float32, even on GPUs whose default is TF32.
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
