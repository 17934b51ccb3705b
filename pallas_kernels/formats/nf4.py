"""The NF4 number format (QLoRA, arXiv 2305.14314), defined in jnp.

An [N, K] matrix is read row by row as one vector. Each entry is a 4-bit index into a table of 16 quantiles of the
normal distribution. Each block of 64 adjacent entries in the vector has one scale, its largest magnitude:

    weight[i] = CODE_VALUES[code[i]] * absmax[i // 64]

With double quantization the scales too are stored as 8-bit indices into a table of 256 values. Each group of 256
scales has one float32 scale, and the mean of all scales is added back:

    absmax[j] = SCALE_VALUES[index[j]] * absmax2[j // 256] + offset

Bytes and tables are those of bitsandbytes.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.formats.number_format import NumberFormat, PackedTensor, Tiling
from pallas_kernels.formats.nvfp4 import block_errors, least_errors

BLOCK = 64
GROUP = 256
# Quantiles of the normal distribution, as bitsandbytes rounded them.
CODE_VALUES = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)


# Factors by which `search_scales` multiplies a block's largest magnitude to get candidate scales, nearest to 1 first.
SEARCHED_SHARES = (0.97, 1.03, 0.94, 1.06, 0.91, 1.1, 0.88, 1.15, 0.85, 1.2, 0.8, 1.25, 0.75, 1.3)


def _scale_values() -> np.ndarray:
    """Computes the signed 8-bit table of arXiv 1511.04561. Each power of ten has twice as many values as the one
    below.
    """
    f32, magnitudes = np.float32, []
    for exponent in range(7):
        # Equally spaced bounds from 0.1 to 1, rounded as torch.linspace does: once, counted from the nearer end.
        count = 2**exponent
        step, index = np.float64((f32(1) - f32(0.1)) / f32(count)), np.arange(count + 1)
        bounds = np.where(2 * index < count + 1, f32(0.1) + step * index, 1 - step * index[::-1])
        bounds = bounds.astype(f32)
        magnitudes += list(f32(10.0 ** (exponent - 6)) * ((bounds[:-1] + bounds[1:]) / f32(2)))
    return np.sort(np.array([-value for value in magnitudes] + [*magnitudes, 0, 1], f32))


SCALE_VALUES = _scale_values()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NF4Tensor(PackedTensor):
    """An [N, K] weight of y = x W^T, or a stack of such weights.

    It is packed in 4.5 bits per entry, or in 4.13 with double quantization.

    Attributes:
      codes: uint8 [..., N * K / 2], two codes per byte, the even entry in the HIGH nibble.
      absmax: [..., ceil(N * K / 64)], float32 scales, or with double quantization uint8 indices.
      absmax2: float32 [..., ceil(blocks / 256)], scales of the scales; None if absmax is float32.
      offset: float32, shaped like absmax2: the mean scale of the matrix that a group belongs to; None if absmax is
        float32.
      shape: (N, K) of one matrix, static. It stays valid when leading axes of the leaves are sliced.
    """

    codes: jax.Array
    absmax: jax.Array
    absmax2: jax.Array | None
    offset: jax.Array | None
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})


def pack_codes(codes: jax.Array) -> jax.Array:
    """Packs two codes into a byte, the even one in the HIGH nibble: uint8 [..., K] -> [..., K / 2]."""
    return codes[..., 0::2] << 4 | codes[..., 1::2]


def unpack_codes(packed: jax.Array) -> jax.Array:
    """Inverts `pack_codes`: uint8 [..., K / 2] -> [..., K], each entry in 0..15."""
    pairs = jnp.stack([packed >> 4, packed & 0xF], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def quantize(w: jax.Array, *, double: bool = False, absmax: jax.Array | None = None) -> NF4Tensor:
    """Rounds a weight to NF4: each entry becomes the table entry nearest to w / absmax.

    With `double` and default scales, codes are computed with the scales before their quantization, as bitsandbytes
    does. Scales given as `absmax` are quantized first, and codes are computed with the quantized scales.

    Args:
      w: [..., N, K] with N * K even; float32, bfloat16 or float16.
      double: quantize the scales too.
      absmax: float32 [..., ceil(N * K / 64)], scales of the blocks, such as those of `search_scales`. By default the
        largest magnitude of each block.

    Raises:
      ValueError: w has another dtype or shape.

    Source: bitsandbytes 0.50, whose output is recorded in the tests.
    """
    if w.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"w must be float32, bfloat16 or float16; got {w.dtype}")
    n, k = _checked_shape(w.shape)[-2:]
    blocks = _blocks(w)
    largest = jnp.max(jnp.abs(blocks), axis=-1) if absmax is None else absmax
    bare = NF4Tensor(None, largest, None, None, (n, k))
    stored = _with_quantized_scales(bare) if double else bare
    return _coded(stored, blocks, largest if absmax is None else scales(stored))


def recode(w: jax.Array, t: NF4Tensor) -> NF4Tensor:
    """Rounds w [..., N, K] to NF4 with the scales of `t`, a weight of the same shape."""
    return _coded(t, _blocks(w), scales(t))


def search_scales(w: jax.Array, moments: jax.Array | None = None) -> jax.Array:
    """Finds for each block the scale that rounds it with the smallest error, as `nvfp4.search_scales` defines it.

    The candidates are the largest magnitude and its products with `SEARCHED_SHARES`. The first of equal ones wins.

    Args:
      w: as for `quantize`.
      moments: float32 [K / 64, 64, 64], as for `nvfp4.search_scales`. Not used if K % 64 != 0, when blocks cross the
        ends of rows.

    Returns:
      float32 [..., ceil(N * K / 64)].
    """
    n, k = _checked_shape(w.shape)[-2:]
    entries = jnp.moveaxis(_blocks(w), -1, 0)
    largest = jnp.max(jnp.abs(entries), axis=0)

    def error(share):
        absmax = share * largest
        off = _nearest_values(entries / jnp.where(absmax == 0, 1, absmax)) * absmax - entries
        if moments is None or k % BLOCK:
            return block_errors(off, None)
        return block_errors(off.reshape(BLOCK, n, k // BLOCK), moments).reshape(-1)

    start = jnp.ones_like(largest), error(jnp.float32(1))
    shares, _ = least_errors(error, start, jnp.asarray(SEARCHED_SHARES, jnp.float32))
    return shares * largest


def scales(t: NF4Tensor) -> jax.Array:
    """Returns the scale of each block, float32 [..., ceil(N * K / 64)], decoded if it is quantized."""
    if t.absmax2 is None:
        return t.absmax
    groups = _split(jnp.asarray(SCALE_VALUES)[t.absmax], GROUP)
    decoded = groups * t.absmax2[..., None] + t.offset[..., None]
    return decoded.reshape(*t.absmax.shape[:-1], -1)[..., : t.absmax.shape[-1]]


def steps(t: NF4Tensor) -> jax.Array:
    """Returns the scale of each entry: float32 [..., N, K]."""
    n, k = t.shape
    repeated = jnp.repeat(scales(t), BLOCK, axis=-1)[..., : n * k]
    return repeated.reshape(*repeated.shape[:-1], n, k)


def dequantize(t: NF4Tensor, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Decodes a weight to table entry * scale, [..., N, K]: in float32, then rounded once to dtype."""
    n, k = t.shape
    values = _split(jnp.asarray(CODE_VALUES)[unpack_codes(t.codes)], BLOCK)
    values = (values * scales(t)[..., None]).reshape(*t.codes.shape[:-1], -1)[..., : n * k]
    return values.reshape(*t.codes.shape[:-1], n, k).astype(dtype)


def fuse(parts: Sequence[NF4Tensor]) -> NF4Tensor:
    """Joins weights of equal K along N, so that one product can serve them all.

    Quantized scales stay quantized if all parts but the last fill whole groups of 256 blocks (as in all published
    models). Otherwise they are decoded, which changes no value.

    Raises:
      ValueError: parts differ in K, or only some of them have quantized scales.
      NotImplementedError: a part other than the last does not fill whole blocks.
    """
    ks = [part.shape[1] for part in parts]
    if len(set(ks)) != 1:
        raise ValueError(f"parts joined along N have one K; got K = {ks}")
    if len({part.absmax2 is None for part in parts}) != 1:
        raise ValueError("parts joined along N have quantized scales all or none")
    if any(part.shape[0] * part.shape[1] % BLOCK for part in parts[:-1]):
        raise NotImplementedError(
            f"parts of shape {[part.shape for part in parts]} do not fill whole blocks of {BLOCK}"
        )
    double = parts[0].absmax2 is not None
    if double and any(part.absmax.shape[-1] % GROUP for part in parts[:-1]):
        parts, double = [_decoded(part) for part in parts], False
    join = lambda name: jnp.concatenate([getattr(part, name) for part in parts], axis=-1)
    return NF4Tensor(
        codes=join("codes"),
        absmax=join("absmax"),
        absmax2=join("absmax2") if double else None,
        offset=join("offset") if double else None,
        shape=(sum(part.shape[0] for part in parts), ks[0]),
    )


def random(
    key: jax.Array, shape: Sequence[int], *, std: float = 0.02, double: bool = False
) -> NF4Tensor:
    """Makes a random packed weight, as `nvfp4.random` does; N * K must be even. With `double`, scales are quantized too.

    Codes are uniform over all 16. Scales are uniform between 0.8 and 1.2 times their mean, before quantization.
    """
    *stack, n, k = _checked_shape(shape)
    spread = math.sqrt(np.mean(CODE_VALUES.astype(np.float64) ** 2))
    blocks = -(-n * k // BLOCK)
    # The scales of Gaussian blocks vary by about a fifth of their mean.
    varied = 1 + 0.2 * jax.random.uniform(key, (*stack, blocks), minval=-1.0)
    codes = jax.random.bits(jax.random.fold_in(key, 1), (*stack, n * k // 2), jnp.uint8)
    t = NF4Tensor(codes, std / spread * varied, None, None, (n, k))
    return _with_quantized_scales(t) if double else t


def _checked_shape(shape: Sequence[int]) -> Sequence[int]:
    if len(shape) < 2:
        raise ValueError(f"an NF4 weight has axes [..., N, K]; got shape {tuple(shape)}")
    if shape[-2] * shape[-1] % 2:
        raise ValueError(f"NF4 puts two entries in a byte; got N * K = {shape[-2]} * {shape[-1]}")
    return shape


def _split(x: jax.Array, size: int) -> jax.Array:
    """Splits [..., E] into [..., ceil(E / size), size]; the last row is padded with zeros."""
    padding = -x.shape[-1] % size
    if padding:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    return x.reshape(*x.shape[:-1], -1, size)


def _blocks(w: jax.Array) -> jax.Array:
    """Splits w [..., N, K] into blocks, float32 [..., ceil(N * K / 64), 64]."""
    return _split(w.astype(jnp.float32).reshape(*w.shape[:-2], -1), BLOCK)


def _coded(t: NF4Tensor, blocks: jax.Array, absmax: jax.Array) -> NF4Tensor:
    """Returns `t` with the codes nearest to blocks / absmax. The stored scales stay those of `t`."""
    n, k = t.shape
    ratios = blocks / jnp.where(absmax == 0, 1, absmax)[..., None]
    codes = _nearest(ratios, CODE_VALUES).reshape(*blocks.shape[:-2], -1)[..., : n * k]
    return dataclasses.replace(t, codes=pack_codes(codes))


def _nearest(x: jax.Array, table: np.ndarray) -> jax.Array:
    midpoints = (table[:-1] + table[1:]) / 2
    return jnp.searchsorted(midpoints, x, method="compare_all").astype(jnp.uint8)


def _nearest_values(x: jax.Array) -> jax.Array:
    """Returns the table entry nearest to each value."""
    nearest = jnp.full_like(x, CODE_VALUES[0])
    for below, above in itertools.pairwise(CODE_VALUES):  # no gather: faster on a CPU
        nearest = jnp.where(x > (below + above) / 2, above, nearest)
    return nearest


def _with_quantized_scales(t: NF4Tensor) -> NF4Tensor:
    offset = _mean(t.absmax)
    groups = _split(t.absmax - offset, GROUP)
    absmax2 = jnp.max(jnp.abs(groups), axis=-1)
    ratios = groups / jnp.where(absmax2 == 0, 1, absmax2)[..., None]
    # `searchsorted` bisects here, because comparing with all 255 bounds would be slow to compile.
    bounds = (SCALE_VALUES[:-1] + SCALE_VALUES[1:]) / 2
    indices = jnp.searchsorted(bounds, ratios).astype(jnp.uint8)
    indices = indices.reshape(*t.absmax.shape[:-1], -1)[..., : t.absmax.shape[-1]]
    return dataclasses.replace(
        t, absmax=indices, absmax2=absmax2, offset=jnp.broadcast_to(offset, absmax2.shape)
    )


def _mean(x: jax.Array) -> jax.Array:
    """Returns the mean [..., 1] over the last axis, in float64 so that the order of summation does not matter."""
    with jax.enable_x64(True):
        return jnp.mean(x, axis=-1, keepdims=True, dtype=jnp.float64).astype(x.dtype)


def _decoded(t: NF4Tensor) -> NF4Tensor:
    return dataclasses.replace(t, absmax=scales(t), absmax2=None, offset=None)


def _by_rows(t: NF4Tensor) -> NF4Tensor:
    """Returns a weight with codes [..., N, K / 2] and decoded scales [..., N, K / 64]; no block may cross rows."""
    n, k = t.shape
    if k % BLOCK:
        raise ValueError(f"NF4's blocks of {BLOCK} cross the ends of rows; got K = {k}")
    return jax.tree.map(lambda x: x.reshape(*x.shape[:-1], n, -1), _decoded(t))


FORMAT = NumberFormat(
    name="nf4",
    tensor=NF4Tensor,
    multiple=1,
    group=BLOCK,
    grid=CODE_VALUES,
    quantize=lambda parts, options: [quantize(part, double=options.double_quant) for part in parts],
    search=lambda parts, moments, like, options: [
        quantize(part, double=options.double_quant, absmax=search_scales(part, moments))
        for part in parts
    ],
    recode=recode,
    steps=steps,
    dequantize=dequantize,
    fuse=lambda parts, shared: fuse(parts),
    random=functools.partial(random, double=True),
    # For the arrays of `_by_rows`.
    tilings={
        "rows": {"codes": Tiling(-2), "absmax": Tiling(-2)},
        "columns": {"codes": Tiling(-1, 2), "absmax": Tiling(-1, BLOCK)},
    },
    by_rows=_by_rows,
    from_rows=lambda t: jax.tree.map(lambda x: x.reshape(*x.shape[:-2], -1), t),
)
