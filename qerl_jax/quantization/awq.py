"""AWQ (arXiv 2306.00978): scales and clips weights so that 4-bit rounding errors affect the output less.

The inputs of a linear are divided by s per channel, and its columns are multiplied by s before packing. The division
is folded into the weights before the linear: of q, k, v and of gate, up into the norm before them, of o into the rows
of v (heads that share a v head share s), of down into the rows of up.

Let a = mean |x| of an input channel, and w = mean of |W| in its column, each entry relative to the largest of its
block. The candidates are s = a^r and a^r / w^(1-r) for r on a grid, divided by sqrt(max(s) * min(s)), and rounding to
nearest without s. The one with the smallest squared error on the calibration inputs is used, tr(D X^T X D^T) with
D = W - W'. Block scales are searched by the error of a block's part of the output (docs/design/checkpoints.md).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import NumberFormat
from qerl_jax.config import BlockScales
from qerl_jax.model.architecture import PARENT, Architecture

GRID = 20

_HIGHEST = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Statistics of the inputs of a linear.

    Attributes:
        gram: float32 [K, K], X^T X over all tokens.
        magnitude: float32 [K], the sum of |x| over all tokens.
    """

    gram: jax.Array
    magnitude: jax.Array


@dataclasses.dataclass(frozen=True)
class Folded:
    """A layer with its scales folded in.

    Attributes:
        tensors: Its norms, biases and float32 weights, by Hugging Face's names.
        packed: The packed weights of each fused linear's parts.
        grams: float32 [K, K], X^T X of the scaled inputs of each fused linear.
        errors: For each fused linear the relative error of its output on the calibration inputs: after rounding to
            nearest, and with the scales that were found.
    """

    tensors: dict[str, Any]
    packed: dict[str, list[Any]]
    grams: dict[str, jax.Array]
    errors: dict[str, tuple[float, float]]


def no_inputs(width: int) -> Inputs:
    """Returns zero statistics for K = `width`, the start for `observe`."""
    return Inputs(jnp.zeros((width, width), jnp.float32), jnp.zeros((width,), jnp.float32))


def observe(seen: Inputs, x: jax.Array, live: jax.Array) -> Inputs:
    """Returns the statistics with inputs x [B, T, K] added at the slots where `live`, bool [B, T], is true."""
    x = jnp.where(live[..., None], x, 0).reshape(-1, x.shape[-1])
    precision = _HIGHEST if x.dtype == jnp.float32 else None
    gram = jnp.dot(x.T, x, precision=precision, preferred_element_type=jnp.float32)
    return Inputs(seen.gram + gram, seen.magnitude + jnp.sum(jnp.abs(x), axis=0, dtype=jnp.float32))


def fold(
    arch: Architecture,
    form: NumberFormat,
    scales: BlockScales,
    tensors: dict[str, Any],
    prefix: str,
    seen: dict[str, Inputs],
    dense: Sequence[str] = (),
    *,
    with_grams: bool = True,
) -> Folded:
    """Finds the scales of a layer's four inputs, and folds them into the layer.

    Args:
        arch: The architecture, which determines the tensors of the layer.
        form: Format of the packed linears.
        scales: How block scales are chosen.
        tensors: The layer's tensors, by Hugging Face's names.
        prefix: Common prefix of these names.
        seen: Statistics of the inputs of each fused linear. The dict is emptied, to free memory.
        dense: Linears that are not packed; their inputs are not scaled.
        with_grams: Whether the result has Gram matrices, which are large.
    """
    tensors, rows = dict(tensors), {}
    packed, grams, errors = {}, {}, {}

    def scaled(
        linear: str, norm: str | None = None, heads: tuple[int, int] | None = None
    ) -> jax.Array:
        parts = [part for part, _ in arch.linears()[linear]]
        names = [f"{prefix}{PARENT[linear]}.{part}.weight" for part in parts]
        weights = [jnp.asarray(tensors[name]) for name in names]
        divided = [rows.get(part, jnp.ones(len(w))) for part, w in zip(parts, weights, strict=True)]
        if linear in dense:
            new = [np.asarray(w / by[:, None]) for w, by in zip(weights, divided, strict=True)]
            tensors.update(zip(names, new, strict=True))
            seen.pop(linear)
            return jnp.ones(weights[0].shape[1])
        before = None if norm is None else jnp.asarray(tensors[f"{prefix}{norm}.weight"])
        s, after, new, packed[linear], gram, (nearest, searched) = _search(
            form, scales, heads, weights, divided, seen.pop(linear), before
        )
        if with_grams:
            grams[linear] = gram
        tensors.update(zip(names, new, strict=True))
        if norm is not None:
            tensors[f"{prefix}{norm}.weight"] = np.asarray(after)
        errors[linear] = float(nearest), float(searched)
        return s

    # Linears whose scales divide the rows of another come first, so that the other's search sees the divided rows.
    rows["up_proj"] = scaled("down")
    heads = arch.num_kv_heads, arch.head_size
    by_head = scaled("o", heads=heads).reshape(heads[0], -1, heads[1])
    rows["v_proj"] = by_head[:, 0].reshape(-1)
    if arch.qkv_bias:
        bias = f"{prefix}{PARENT['qkv']}.v_proj.bias"
        divided = np.asarray(tensors[bias], np.float32) / np.asarray(rows["v_proj"])
        tensors[bias] = divided.astype(tensors[bias].dtype)
    scaled("qkv", norm="input_layernorm")
    scaled("gate_up", norm="post_attention_layernorm")
    return Folded(tensors, packed, grams, errors)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def _search(
    form: NumberFormat,
    scales: BlockScales,
    heads: tuple[int, int] | None,
    weights: list[jax.Array],
    rows: list[jax.Array],
    seen: Inputs,
    norm: jax.Array | None,
):
    """Returns the best s, the norm divided by it, the float32 weights, the packed ones, the new Gram matrix, errors.

    Rows are divided by `rows` first; their error is measured in units of the undivided weight. With `heads` = (J, C)
    the channels are [J, query heads per key head, C], and all query heads of a key head share s.
    """
    ends = np.cumsum([len(weight) for weight in weights])[:-1]
    row = jnp.concatenate(rows)[:, None]
    weight = jnp.concatenate([weight.astype(jnp.float32) for weight in weights]) / row

    def alike(x):
        if heads is None:
            return x
        by_head = x.reshape(heads[0], -1, heads[1])
        return jnp.broadcast_to(by_head.mean(1, keepdims=True), by_head.shape).reshape(-1)

    block = 1 if weight.shape[1] % form.group else form.group
    blocks = jnp.abs(weight).reshape(len(weight), -1, block)
    share = blocks / jnp.maximum(blocks.max(axis=-1, keepdims=True), 1e-12)
    means = alike(seen.magnitude), alike(share.reshape(weight.shape).mean(axis=0))
    a, w = (jnp.maximum(x / jnp.maximum(x.mean(), 1e-12), 1e-4) for x in means)
    r = jnp.arange(GRID, dtype=jnp.float32)[:, None] / GRID
    s = jnp.concatenate([a**r, a**r / w ** (1 - r)])
    s = s / jnp.sqrt(s.max(axis=-1, keepdims=True) * s.min(axis=-1, keepdims=True))
    if norm is not None:
        s = _exact(norm, s)[0]

    moments = form.moments(seen.gram)

    def candidate(s):
        scaled = None
        if moments is not None:
            by_block = s.reshape(-1, form.group)
            scaled = moments / by_block[:, None] / by_block[..., None]
        return form.pack(jnp.split(weight * s, ends), scales, scaled)

    def error(packed, s):
        rounded = jnp.concatenate([form.unpack(part, jnp.float32) for part in packed])
        return output_error((rounded / s - weight) * row, seen.gram)

    plain = form.pack(jnp.split(weight, ends))
    nearest = error(plain, 1.0)
    errors = jax.lax.map(lambda s: error(candidate(s), s), s)
    smallest = jnp.minimum(nearest, errors.min())
    best = jnp.where(errors.min() <= nearest, s[jnp.argmin(errors)], 1.0)
    packed = jax.lax.cond(errors.min() <= nearest, lambda: candidate(best), lambda: plain)
    whole = jnp.maximum(output_error(weight * row, seen.gram), 1e-30)
    relative = jnp.sqrt(jnp.maximum(jnp.stack([nearest, smallest]) / whole, 0))
    after = None if norm is None else _exact(norm, best)[1]
    new, gram = jnp.split(weight * best, ends), seen.gram / best / best[:, None]
    return best, after, new, packed, gram, relative


def output_error(off: jax.Array, gram: jax.Array) -> jax.Array:
    """Computes the squared error of outputs, sum |x D^T|^2, from the error D [N, K] of a weight and X^T X [K, K]."""
    return jnp.vdot(jnp.dot(off, gram, precision=_HIGHEST), off)


def _exact(norm: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the exact divisor after rounding, and the norm divided by s, rounded to its own dtype."""
    narrow = jnp.finfo(norm.dtype)
    wide = norm.astype(jnp.float32)
    divided = jax.lax.reduce_precision(wide / s, narrow.nexp, narrow.nmant)
    usable = (divided != 0) & jnp.isfinite(divided)
    after = jnp.where(usable, divided, wide).astype(norm.dtype)
    return jnp.where(usable, wide / divided, 1.0), after
