"""A linear of a decoding step with the operations around it, in two Triton kernels: product and epilogue.

    y = ([sum of parts] * multiplier + [[x A] B]) * unit + bias
    plain       [y]
    residual    r' = [r + y], [r' * scale of the next norm], and sums of squares of r'
    swiglu      [silu([gate]) * [up]]

Values in brackets are rounded to bfloat16, and nothing else is. Training and the Hopper kernels round in the same
places (docs/design/model.md, "Where rounding happens"). RMSNorm is split between two kernels, as in
`finished_linear.epilogue`. Weights and adapters are stacked over layers and read in place, because a slice of a stack
would be a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from pallas_kernels.formats.rounding import rounded
from pallas_kernels.portable import launch, matmul, tuning
from pallas_kernels.portable.layout import PortableWeight

BLOCK_M, BLOCK_N = 16, 64
MAX_M = matmul.MAX_M
MAX_RANK = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """The residual stream of M rows, with the first half of the next RMSNorm.

    Attributes:
      values: bfloat16 [M, D].
      scaled: bfloat16 [M, D], values times the scale of the next norm.
      squares: float32 [tiles, M]; its sum over tiles is each row's sum of squares.
    """

    values: jax.Array
    scaled: jax.Array
    squares: jax.Array

    def unit(self, eps: float) -> jax.Array:
        """Returns 1 / sqrt(mean of squares + eps) of each row, float32 [M]."""
        return jax.lax.rsqrt(jnp.sum(self.squares, axis=0) / self.values.shape[1] + eps)


def stream(values: jax.Array, scale: jax.Array) -> Stream:
    """Makes a stream from activations, bfloat16 [M, D], and the scale of the first norm, float32 [D]."""
    wide = values.astype(jnp.float32)
    squares = jnp.sum(wide * wide, axis=1)[None]
    # The kernel makes this many tiles; the same shape lets a loop over layers carry the stream.
    tiles = -(-values.shape[1] // BLOCK_N)
    squares = jnp.pad(squares, ((0, tiles - 1), (0, 0)))
    return Stream(values, (wide * scale).astype(values.dtype), squares)


def added(stream_: Stream, y: jax.Array, scale: jax.Array) -> Stream:
    """Adds y, float32 [M, D], to a stream without a kernel, for a y that is first summed over devices.

    `scale` is the scale of the next norm, float32 [D].
    """
    values = stream_.values
    return stream(rounded(values.astype(jnp.float32) + y, values.dtype), scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PortableLora:
    """LoRA matrices of linears that share an input, stacked over layers.

    Attributes:
      a: bfloat16 [L, parts * rank, K]; the rows of each part are padded with zeros to `rank`.
      b: bfloat16 [L, N, rank], times alpha / R; each row has the ranks of its own part.
      sizes: rows of the base weight in each part.
      rank: padded rank of a part, a power of two, 16 or more.
    """

    a: jax.Array
    b: jax.Array
    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    rank: int = dataclasses.field(metadata={"static": True})


def filled_rank(rank: int) -> int:
    """Returns the padded rank of a part of a `PortableLora`: the next power of two, at least 16."""
    return max(16, 1 << (rank - 1).bit_length())


def pack_lora(parts: Sequence[tuple[jax.Array, jax.Array]], scaling: float) -> PortableLora:
    """Joins the LoRA matrices of linears that share an input.

    Args:
      parts: A [L, K, R] and B [L, R, N_i] of each linear, in the order of the base weight's rows.
      scaling: alpha / R, multiplied into B.
    """
    rank = parts[0][0].shape[-1]
    more = ((0, 0), (0, 0), (0, filled_rank(rank) - rank))
    a = [jnp.pad(a, more) for a, _ in parts]
    b = [jnp.pad(scaling * b.mT, more) for _, b in parts]
    return PortableLora(
        a=jnp.concatenate(a, axis=-1).astype(jnp.bfloat16).mT,
        b=jnp.concatenate(b, axis=-2).astype(jnp.bfloat16),
        sizes=tuple(matrix.shape[-1] for _, matrix in parts),
        rank=filled_rank(rank),
    )


def supports(m: int, sizes: Sequence[int], k: int, *, rank: int) -> str | None:
    """Returns why these kernels cannot run a linear on this device, or None if they can.

    Args:
      m: M, rows of x.
      sizes: rows of the weight in each of the joined linears.
      k: K, columns of x and of the weight.
      rank: rank of LoRA; 0 without LoRA.
    """
    if reason := runtime.unless_portable():
        return reason
    if rank > MAX_RANK:
        return f"needs LoRA of rank <= {MAX_RANK}; got {rank}"
    if len(sizes) > 3:
        return f"needs at most three parts; got {len(sizes)}"
    n = sum(sizes)
    if not 1 <= m <= MAX_M:
        return f"needs 1 <= M <= {MAX_M}; got M = {m}"
    return matmul.supports(m, n, k, tuning.pick_config(m, n, k))


def linear(
    x: jax.Array | Stream,
    w: PortableWeight,
    *,
    layer: jax.Array,
    multiplier: jax.Array,
    sizes: Sequence[int],
    bias: jax.Array | None = None,
    branch: PortableLora | None = None,
    eps: float | None = None,
    residual: tuple[Stream, jax.Array] | None = None,
    is_swiglu: bool = False,
) -> jax.Array | Stream:
    """Computes y = x W^T + bias + LoRA, with the norm before it and the operations after it (see the module).

    Args:
      x: bfloat16 [M, K]; or a residual stream, which is normalized first.
      w: a stack [L, ...] of weights.
      layer: int32 [1], index into every axis L.
      multiplier: float32 [L, 1] or [L, N], `w.multiplier`.
      sizes: rows of the weight in each of the joined linears.
      bias: [L, N].
      branch: from `pack_lora`.
      eps: epsilon of the norm, if x is a stream.
      residual: a stream to which y is added, and the scales float32 [L, N] of the norm after it.
      is_swiglu: whether y is gate and up, so that the result is silu(gate) * up.

    Returns:
      bfloat16 [M, N], or [M, N / 2] with `is_swiglu`; with `residual` the new stream.

    Raises:
      NotImplementedError: the reason `portable.matmul.supports` gives.
    """
    values = x.scaled if isinstance(x, Stream) else x
    sums = matmul.product(values, w, layer=layer, a=None if branch is None else branch.a)
    (n, k), (split, m, rows) = w.shape, sums.partials.shape
    # A placeholder for absent operands; the kernel does not read it.
    none = sums.partials
    operands = {
        "layer": layer,
        "partials": sums.partials,
        "multiplier": multiplier,
        "bias": none if bias is None else bias,
        "b": none if branch is None else branch.b,
        "down": none if sums.down is None else sums.down,
        "squares": x.squares if isinstance(x, Stream) else none,
        "back": none if sums.back is None else sums.back,
        "residual": none if residual is None else residual[0].values,
        "scale": none if residual is None else residual[1],
    }
    tiles = [-(-size // BLOCK_N) for size in ((n // 2,) if is_swiglu else sizes)]
    outputs = n // 2 if is_swiglu else n
    wide = jax.ShapeDtypeStruct((m, outputs), jnp.bfloat16)
    small = jax.ShapeDtypeStruct((1, 1), jnp.bfloat16)
    squares = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    if residual is not None:
        small, squares = wide, jax.ShapeDtypeStruct((sum(tiles), m), jnp.float32)
    square_tiles = x.squares.shape[0] if isinstance(x, Stream) else 1
    out, scaled, new_squares = launch.call(
        "epilogue_kernels.finish",
        operands,
        {"out": wide, "scaled": small, "new_squares": squares},
        (sum(tiles), -(-m // BLOCK_M)),
        warps=4,
        stages=1,
        M=m,
        N=n,
        STRIDE=rows,
        SIZE_0=sizes[0],
        SIZE_1=sizes[1] if len(sizes) > 1 else 0,
        SPLIT=split,
        RANK=0 if branch is None else branch.rank,
        RANKS=0 if branch is None else branch.a.shape[1],
        RANK_SPLIT=1 if sums.down is None else len(sums.down),
        WIDTH=k,
        TILES=square_tiles,
        TILES_FILLED=1 << (square_tiles - 1).bit_length(),
        EPS=0.0 if eps is None else eps,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        PER_ROW=multiplier.shape[-1] > 1,
        HAS_BIAS=bias is not None,
        HAS_UNIT=isinstance(x, Stream),
        HAS_RESIDUAL=residual is not None,
        IS_SWIGLU=is_swiglu,
    )
    return out if residual is None else Stream(out, scaled, new_squares)
