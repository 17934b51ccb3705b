"""AWQ (arXiv 2306.00978): scales and clipping that move the error of 4-bit rounding to where it matters less.

A linear's inputs are divided by s and its columns multiplied by s before it is packed, which changes
nothing but the rounding. The division is folded into what comes before:

    q, k, v    the layer's first norm          o      the rows of v, alike in all heads that read one
    gate, up   its second norm                 down   the rows of up

With a = mean |x| of an input channel and w = mean |W| of its column in units of its block's largest,
s = a^r or a^r / w^(1-r) for r on a grid, divided by the root of its largest times its smallest. For
each s every block is clipped at the share of its largest entry that rounds it best. Of all, what gives
the smallest squared error on calibration inputs is taken, sum |x (W - W')^T|^2 = tr(D X^T X D^T): so
X^T X is all that is kept of the inputs, and a candidate costs the same whatever their number. Rounding
to nearest is among the candidates: the error of a linear on these inputs cannot become larger.

A 4-bit float spaces its values by their size, so scales do less here than for integers: most of the
gain comes from clipping.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.checkpoint.packed_formats import Format
from qerl_jax.model.architecture import PARENT, Architecture

GRID = 20
CLIPS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)

_HIGHEST = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What is known of the inputs of a linear.

    Attributes:
        gram: float32 [K, K], X^T X of all tokens.
        magnitude: float32 [K], the sum of |x|.
    """

    gram: jax.Array
    magnitude: jax.Array


@dataclasses.dataclass(frozen=True)
class Folded:
    """A layer whose scales are folded in.

    Attributes:
        tensors: Its norms, biases and float32 weights, by their names in a folder.
        errors: For each linear the relative error of its output on the calibration inputs: rounded to
            nearest, and with the scales that were found.
    """

    tensors: dict[str, Any]
    errors: dict[str, tuple[float, float]]


def no_inputs(width: int) -> Inputs:
    """The start of a sum of `observe`."""
    return Inputs(jnp.zeros((width, width), jnp.float32), jnp.zeros((width,), jnp.float32))


def observe(seen: Inputs, x: jax.Array, live: jax.Array) -> Inputs:
    """Adds inputs [B, T, K] at the slots where `live` [B, T] is true."""
    x = jnp.where(live[..., None], x, 0).reshape(-1, x.shape[-1])
    gram = jnp.dot(
        x.T,
        x,
        precision=_HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return Inputs(seen.gram + gram, seen.magnitude + jnp.sum(jnp.abs(x), axis=0, dtype=jnp.float32))


def fold(
    arch: Architecture, form: Format, tensors: dict[str, Any], prefix: str, seen: dict[str, Inputs]
) -> Folded:
    """Finds the scales of a layer's four inputs and folds them in.

    Args:
        arch: Says what the layer has.
        form: What its linears will be packed to.
        tensors: The layer's tensors, by their names in a folder.
        prefix: Start of these names.
        seen: What is known of the inputs of each fused linear.
    """
    tensors, errors, rows = dict(tensors), {}, {}

    def scaled(
        linear: str, norm: str | None = None, heads: tuple[int, int] | None = None
    ) -> jax.Array:
        parts = [part for part, _ in arch.linears()[linear]]
        names = [f"{prefix}{PARENT[linear]}.{part}.weight" for part in parts]
        weights = [jnp.asarray(tensors[name]) for name in names]
        before = None if norm is None else jnp.asarray(tensors[f"{prefix}{norm}.weight"])
        divided = [rows.get(part, jnp.ones(len(w))) for part, w in zip(parts, weights, strict=True)]
        s, after, new, (nearest, found) = _search(
            form, heads, weights, divided, seen[linear], before
        )
        tensors.update(zip(names, new, strict=True))
        if norm is not None:
            tensors[f"{prefix}{norm}.weight"] = np.asarray(after)
        errors[linear] = float(nearest), float(found)
        return s

    # Those whose scales divide rows of another linear come first: its search then sees them.
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
    return Folded(tensors, errors)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _search(
    form: Format,
    heads: tuple[int, int] | None,
    weights: list[jax.Array],
    rows: list[jax.Array],
    seen: Inputs,
    norm: jax.Array | None,
):
    """The best s; the norm divided by it; the weights in float32; errors without and with it.

    Rows are divided by `rows` first; their error counts in the undivided weight's units. With
    `heads` = (J, C) the channels are [J, heads of one key, C], and the heads of one key share s.
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

    def rounded(scaled):
        packed = form.pack(jnp.split(scaled, ends))
        return jnp.concatenate([form.unpack(part, jnp.float32) for part in packed])

    def size(off):
        return jnp.vdot(jnp.dot(off, seen.gram, precision=_HIGHEST), off)

    def error(scaled, s):
        return size((rounded(scaled) / s - weight) * row)

    def clipped(s):
        return _clipped(weight * s, rounded, form.group, seen.gram / jnp.outer(s, s))

    nearest = error(weight, 1.0)
    errors = jax.lax.map(lambda s: jnp.stack([error(weight * s, s), error(clipped(s), s)]), s)
    index, cut = jnp.unravel_index(jnp.argmin(errors), errors.shape)
    best = s[index]
    new = jnp.where(cut == 1, clipped(best), weight * best)
    relative = jnp.stack([nearest, errors.min()]) / jnp.maximum(size(weight * row), 1e-30)
    after = None if norm is None else _exact(norm, best)[1]
    return best, after, jnp.split(new, ends), jnp.sqrt(jnp.maximum(relative, 0))


def _clipped(weight, rounded, block, gram):
    """The weight, each block cut at the share of its largest entry that rounds it best.

    What counts is the error of the block's part of the output: d G d^T, where G is the block's own
    square of the Gram matrix of the scaled inputs.
    """
    n, k = weight.shape
    if k % block:  # NF4's blocks may go over the ends of rows
        return weight
    blocks = weight.reshape(n, -1, block)
    largest = jnp.abs(blocks).max(axis=-1, keepdims=True)
    index = jnp.arange(k // block)
    own = gram.reshape(k // block, block, k // block, block)[index, :, index]

    def cut(share):
        return jnp.clip(blocks, -share * largest, share * largest)

    def error(share):
        off = rounded(cut(share).reshape(n, k)).reshape(blocks.shape) - blocks
        return jnp.einsum("nbi,bij,nbj->nb", off, own, off, precision=_HIGHEST)

    shares = jnp.asarray([1.0, *CLIPS])
    kept = shares[jnp.argmin(jax.lax.map(error, shares), axis=0)]
    return cut(kept[..., None]).reshape(n, k)


def _exact(norm: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The norm divided by s in its own dtype, and what it was divided by in fact."""
    narrow = jnp.finfo(norm.dtype)
    wide = norm.astype(jnp.float32)
    divided = jax.lax.reduce_precision(wide / s, narrow.nexp, narrow.nmant)
    usable = (divided != 0) & jnp.isfinite(divided)
    return jnp.where(usable, wide / divided, 1.0), jnp.where(usable, divided, wide).astype(
        norm.dtype
    )
