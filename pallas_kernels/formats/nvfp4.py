"""The NVFP4 number format, defined in jnp. Every kernel is tested against this file.

An [N, K] matrix has a 4-bit E2M1 code for each entry, one E4M3 scale for each block of 16 adjacent entries along K,
and a float32 global scale. All conventions, including roundings, are those of compressed-tensors' scheme NVFP4A16. So
packed bytes can be exchanged with that library unchanged (and should work in vLLM, which was not tested):

    weight[n, k] = value(code[n, k]) * (scale[n, k // 16] / global_scale)

The global scale is a divisor. It is 2688 / max|w| = 448 * 6 / max|w|, which puts the largest block scale at 448, the
largest E4M3 value.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.formats.number_format import NumberFormat, PackedTensor, Tiling
from pallas_kernels.formats.rounding import float8_values

BLOCK = 16
CODE_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)

_CODE_MAX = 6.0
_SCALE_MAX = 448.0
# The replacement for a block scale that rounds to zero: weights are divided by the scale to get codes.
_SCALE_FOR_ZERO = 0.125
# Block scales that `search_scales` tries: steps in the order of E4M3 values from the scale of the block's maximum,
# the nearest first. One step is an eighth to a fifteenth of the scale, so the candidates reach from about 0.7 to 1.75
# times it.
SEARCHED_STEPS = (1, -1, 2, -2, 3, -3, 4, -4, 5, 6)
# The largest block scale with the smaller global scale that `search` tries: 1.75 times it is 448.
_ROOMY_SCALE_MAX = 256.0
# The smaller global scale is tried if more than this share of blocks have a scale above `_ROOMY_SCALE_MAX`.
_CROWDED = 1e-3
# The most entries of a weight that are searched at once, because each candidate needs several times their memory.
_SEARCHED_ENTRIES = 1 << 25
# `random` chooses block scales among the 16 E4M3 values from 64 to 240. In a Gaussian matrix of 10^7 entries they are
# about 150 +- 40.
_RANDOM_SCALE_BITS = np.arange(0x68, 0x78, dtype=np.uint8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NVFP4Tensor(PackedTensor):
    """An [N, K] weight of y = x W^T, packed in 4.5 bits per entry, or a stack of such weights.

    Attributes:
      codes: uint8 [..., N, K / 2], two E2M1 codes per byte, the even column in the low nibble.
      scales: float8_e4m3fn [..., N, K / 16], not negative.
      global_scale: float32 divisor, [..., 1], or [..., N] with a value for each row.
      shape: (N, K) of one matrix, static. It stays valid when `lax.scan` or `vmap` slices leading axes of the leaves
        (stacked layers).
    """

    codes: jax.Array
    scales: jax.Array
    global_scale: jax.Array
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @property
    def multiplier(self) -> jax.Array:
        """1 / global_scale, float32 [..., 1] or [..., N]. Products multiply their rounded sums by it."""
        return 1 / self.global_scale


def pack_codes(codes: jax.Array) -> jax.Array:
    """Packs two codes into a byte, the even one in the low nibble: uint8 [..., K] -> [..., K / 2]."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_codes(packed: jax.Array) -> jax.Array:
    """Inverts `pack_codes`: uint8 [..., K / 2] -> [..., K], each entry in 0..15."""
    pairs = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def nearest_codes(x: jax.Array) -> jax.Array:
    """Returns the E2M1 code nearest to each value, ties to the even code, saturating at 6: uint8, x's shape."""
    # A tie is at the midpoint of two neighbouring magnitudes. The even code is the lower neighbour at every other
    # midpoint. NaN compares as false, so it becomes zero.
    midpoints = (CODE_VALUES[:7] + CODE_VALUES[1:8]) / 2
    magnitude = sum(
        (jnp.abs(x) >= mid if code % 2 else jnp.abs(x) > mid).astype(jnp.uint8)
        for code, mid in enumerate(midpoints.tolist())
    )
    return magnitude | jnp.signbit(x).astype(jnp.uint8) << 3


def nearest_magnitudes(x: jax.Array) -> jax.Array:
    """Returns the E2M1 magnitude nearest to each value >= 0, ties to the even code: float32, x's shape."""
    x = jnp.minimum(x, _CODE_MAX)
    # The sum is rounded to the step of float32, which is 1/2 from 2^22 on, 1 from 2^23 on and 2 from 2^24 on.
    shift = jnp.where(x < 2, 2.0**22, jnp.where(x < 4, 2.0**23, 2.0**24)).astype(jnp.float32)
    return (x + shift) - shift


def global_scale(w: jax.Array) -> jax.Array:
    """Computes the global scale of a single weight: 2688 / max|w|.

    Weights that are fused (q, k and v; gate and up) share the smallest of their global scales.

    Args:
      w: [..., N, K], float32, bfloat16 or float16.

    Returns:
      float32 [..., 1]; 1 if the quotient is not finite, as for a matrix of zeros.

    Raises:
      ValueError: w has another dtype, or K % 16 != 0.
    """
    return _global_scale(_block_max(w), w.dtype)


def quantize(
    w: jax.Array, global_scale: ArrayLike | None = None, scales: jax.Array | None = None
) -> NVFP4Tensor:
    """Rounds a weight to NVFP4. By default the result is bit for bit that of compressed-tensors.

        scale = e4m3(global_scale * (block max|w| / 6)),   where 0 becomes 0.125
        code  = nearest E2M1 to w / (scale / global_scale),   ties to the even code, saturating

    For a bfloat16 weight, max|w| / 6 and 2688 / max|w| are rounded to bfloat16 too. A float16 weight is converted to
    float32, because 2688 / max|w| can exceed float16's range.

    Args:
      w: [..., N, K], float32, bfloat16 or float16.
      global_scale: float32 [..., 1] or [..., N]; by default `global_scale(w)`.
      scales: float8_e4m3fn [..., N, K / 16], scales of the blocks, not zero, such as those of `search_scales`. By
        default the formula above gives them.

    Raises:
      ValueError: w has another dtype, K % 16 != 0, or the last axis of global_scale is neither 1 nor N.

    Source: compressed-tensors 0.19 and llm-compressor 0.14, whose output is recorded in the tests.
    """
    block_max = _block_max(w)
    *_, n, k = w.shape
    if global_scale is None:
        global_scale = _global_scale(block_max, w.dtype)
    global_scale = jnp.asarray(global_scale, jnp.float32)
    if global_scale.ndim == 0 or global_scale.shape[-1] not in (1, n):
        raise ValueError(
            f"global_scale holds one value, or one for each of {n} rows, on its last axis; "
            f"got shape {global_scale.shape}"
        )
    divisor = global_scale[..., None]

    if scales is None:
        scales = _scales_of_maxima(block_max, divisor, w.dtype)
    worth = _divide(scales.astype(jnp.float32), divisor)
    ratios = _divide(_blocks(w), worth[..., None]).reshape(w.shape)
    codes = nearest_codes(ratios)
    global_scale = jnp.broadcast_to(global_scale, (*w.shape[:-2], global_scale.shape[-1]))
    return NVFP4Tensor(pack_codes(codes), scales, global_scale, (n, k))


def search_scales(
    w: jax.Array,
    global_scale: jax.Array,
    moments: jax.Array | None = None,
    tried_scales: jax.Array | None = None,
    *,
    as_float8: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Finds for each block the scale that rounds it with the smallest squared error.

    The candidates are the scale of `quantize` and its ten neighbours in E4M3 (`SEARCHED_STEPS`). So the largest entry
    of a block may be clipped, or get the code for 4 instead of 6. The error of a block is d G d^T, where d is
    rounded w - w, and G is the block's matrix of moments, or the identity. On equal errors the first candidate wins.
    The scale of `quantize` comes first, so blocks of zeros keep it, and no error is larger than with `quantize`.

    Args:
      w: [..., N, K], float32, bfloat16 or float16.
      global_scale: float32 [..., 1]. Candidates above 448 become 448.
      moments: float32 [K / 16, 16, 16], second moments of the 16 inputs that a block multiplies. By default all
        entries have equal weight. Only for w [N, K].
      tried_scales: float8_e4m3fn [..., N, K / 16], scales that are tried too, or None.
      as_float8: whether rounded w is e4m3(code * scale / 8) * 8, as in `float8`, instead of code * scale.

    Returns:
      The scales, float8_e4m3fn [..., N, K / 16], and the sum of all blocks' errors, float32 [...].

    Source: mit-han-lab/fouroversix; ScaleSweep, arXiv 2606.07618.
    """
    _block_max(w)  # checks w
    *stack, n, k = w.shape
    rows = n if stack else _rows_at_a_time(n, k)
    options = {"moments": moments, "as_float8": as_float8}
    one = functools.partial(_search_rows, divisor=global_scale[..., None], **options)
    if rows == n:
        scales, errors = one((w, tried_scales))
        return scales, jnp.sum(errors, axis=(-2, -1))
    chunks = lambda x: None if x is None else x.reshape(n // rows, rows, -1)
    scales, errors = jax.lax.map(one, (chunks(w), chunks(tried_scales)))
    return scales.reshape(n, -1), jnp.sum(errors)


def _rows_at_a_time(n: int, k: int) -> int:
    """Returns the largest divisor of n such that so many rows of length k may be searched at once; at least 1."""
    return max(
        rows
        for rows in range(1, n + 1)
        if n % rows == 0 and (rows * k <= _SEARCHED_ENTRIES or rows == 1)
    )


def _search_rows(
    rows: tuple[jax.Array, jax.Array | None],
    *,
    divisor: jax.Array,
    moments: jax.Array | None,
    as_float8: bool,
) -> tuple[jax.Array, jax.Array]:
    """Searches the scales of rows: w [..., N, K], and scales to try [..., N, K / 16] or None.

    The divisor is the global scale, float32 [..., 1, 1]. Returns scales and errors of the blocks, [..., N, K / 16].
    """
    w, tried_scales = rows
    block_max = _block_max(w)
    first = _scales_of_maxima(block_max, divisor, w.dtype)
    # A block's entries are on the first axis, so that sums over them need no shuffles.
    sizes = jnp.moveaxis(jnp.abs(_blocks(w)) * divisor[..., None], -1, 0)
    signs = jnp.moveaxis(jnp.sign(_blocks(w)), -1, 0)

    def error(bits):
        scales = jax.lax.bitcast_convert_type(bits.astype(jnp.uint8), jnp.float8_e4m3fn)
        scales = scales.astype(jnp.float32)
        # A rounded magnitude and its product with a scale are exact, so equal errors of candidates compare as equal.
        products = nearest_magnitudes(sizes * (1 / scales)) * scales
        off = (float8_values(products / 8) * 8 if as_float8 else products) - sizes
        return block_errors(off if moments is None else off * signs, moments)

    as_bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.int32)
    start = as_bits(_scales_of_maxima(block_max, divisor, w.dtype, 0))
    best = as_bits(first), error(as_bits(first))
    if tried_scales is not None:
        best = _better_of(error, best, as_bits(tried_scales))
    # Positive E4M3 values have the order of their bytes, from 1 (2^-9) to 126 (448).
    candidate = lambda step: jnp.clip(start + step, 1, 126)
    bits, errors = least_errors(error, best, jnp.asarray(SEARCHED_STEPS), candidate)
    scales = jax.lax.bitcast_convert_type(bits.astype(jnp.uint8), jnp.float8_e4m3fn)
    return scales, errors / divisor**2


def pack(parts: Sequence[jax.Array]) -> list[NVFP4Tensor]:
    """Rounds weights with one common input to NVFP4, as `quantize`, with the smallest of their global scales for all.

    vLLM needs one global scale for the linears that it fuses.
    """
    shared = _shared_scale(parts)
    return [quantize(part, shared) for part in parts]


def _shared_scale(parts: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.minimum, [global_scale(part) for part in parts])


def search(
    parts: Sequence[jax.Array],
    moments: jax.Array | None = None,
    like: Sequence[NVFP4Tensor] | None = None,
    *,
    as_float8: bool = False,
) -> list[NVFP4Tensor]:
    """Rounds weights with one common input to NVFP4, with one global scale and searched block scales.

    The global scale is the smallest of those of the single weights. With it the largest block scale is 448 and cannot
    grow, which limits the search of all block scales above 256. If more than one block in a thousand has such a
    scale, a global scale that puts the largest block scale at 256 is searched too. It is used if its total error is
    smaller.

    Args:
      parts: weights [N_i, K], each float32, bfloat16 or float16.
      moments: float32 [K / 16, 16, 16], as in `search_scales`.
      like: packed weights of these shapes with one global scale, which may be close to the new ones. Their scales are
        tried too, so weights that did not change keep their bytes.
      as_float8: as in `search_scales`.

    Returns:
      A packed weight for each part.
    """
    shared = _shared_scale(parts)
    roomy = shared * (_ROOMY_SCALE_MAX / _SCALE_MAX)
    sizes = [len(part) for part in parts]
    whole = jnp.concatenate(parts)

    def searched(divisor, tried_scales=None):
        scales = search_scales(whole, divisor, moments, tried_scales, as_float8=as_float8)
        return divisor, *scales

    def better(old, new, is_first=False):
        is_better = is_first | (new[2] < old[2])
        return jax.tree.map(lambda a, b: jnp.where(is_better, b, a), old, new)

    is_crowded = _block_max(whole) * shared / _CODE_MAX > _ROOMY_SCALE_MAX
    count = 1 + (is_crowded.mean() > _CROWDED).astype(jnp.int32)
    divisors = jnp.stack([shared, roomy])
    scales = jnp.zeros((*whole.shape[:-1], whole.shape[-1] // BLOCK), jnp.float8_e4m3fn)
    # A loop compiles the search once.
    best = jax.lax.fori_loop(
        *(0, count, lambda index, best: better(best, searched(divisors[index]), index == 0)),
        (shared, scales, jnp.float32(0)),
    )
    if like is not None:
        tried_scales = jnp.concatenate([t.scales for t in like])
        best = better(searched(like[0].global_scale, tried_scales), best)
    divisor, scales, _ = best
    return split(quantize(whole, divisor, scales), sizes)


def least_errors(
    error: Callable[[jax.Array], jax.Array],
    best: tuple[jax.Array, jax.Array],
    steps: jax.Array,
    candidate: Callable[[jax.Array], jax.Array] = lambda step: step,
) -> tuple[jax.Array, jax.Array]:
    """Returns values and errors of blocks: of `best`, or the first of candidate(step) for all steps with a smaller error."""
    tried = lambda best, step: (_better_of(error, best, candidate(step)), None)
    return jax.lax.scan(tried, best, steps)[0]


def _better_of(error, best, values):
    errors = error(values)
    better = errors < best[1]
    return jnp.where(better, values, best[0]), jnp.where(better, errors, best[1])


def block_errors(off: jax.Array, moments: jax.Array | None) -> jax.Array:
    """Computes the squared error of each block: of its entries, or with moments of its share of the output.

    Args:
      off: float32 [b, ..., K / b], the errors of a block's b entries on the first axis.
      moments: float32 [K / b, b, b], second moments G of a block's inputs, or None.

    Returns:
      float32 [..., K / b]: off G off^T, or without moments the sum of squares of `off`.
    """
    if moments is None:
        return jnp.sum(off**2, axis=0)
    highest = jax.lax.Precision.HIGHEST
    pulled = jnp.einsum("kij,j...k->i...k", moments, off, precision=highest)
    return jnp.sum(off * pulled, axis=0)


def steps(t: NVFP4Tensor) -> jax.Array:
    """Returns the value of one code unit, scale / global_scale, for each entry: float32 [..., N, K]."""
    return jnp.repeat(_steps(t), BLOCK, axis=-1)


def dequantize(t: NVFP4Tensor, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Decodes a weight to code * (scale / global_scale), [..., N, K]: in float32, then rounded once to dtype."""
    return _times_codes(_steps(t), t.codes).astype(dtype)


def scaled_codes(t: NVFP4Tensor, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """Computes code * scale, the operand of matrix products, exactly: dtype [..., N, K].

    A code has 2 significant bits and a scale has 4, so their product fits bfloat16's 8. Its magnitudes, 2^-10 to
    2688, fit too. The global scale is left out: products apply it to the sum over K.
    """
    return _times_codes(t.scales.astype(jnp.float32), t.codes).astype(dtype)


def fuse(parts: Sequence[NVFP4Tensor], *, shared: bool = False) -> NVFP4Tensor:
    """Joins weights along N, so that one product can serve them all.

    Args:
      parts: tensors of equal K and equal leading axes.
      shared: the caller guarantees that all parts have the first one's global scale. Then the result has one value,
        [..., 1]; otherwise one for each row, [..., N].

    Raises:
      ValueError: parts differ in K, or `shared` is set and a part has a global scale for each row.
    """
    ks = [part.shape[1] for part in parts]
    if len(set(ks)) != 1:
        raise ValueError(f"parts joined along N have one K; got K = {ks}")
    if shared:
        widths = [part.global_scale.shape[-1] for part in parts]
        if set(widths) != {1}:
            raise ValueError(f"shared=True needs one global scale in each part; got {widths}")
        scale = parts[0].global_scale
    else:
        rows = [
            jnp.broadcast_to(p.global_scale, (*p.global_scale.shape[:-1], p.shape[0]))
            for p in parts
        ]
        scale = jnp.concatenate(rows, axis=-1)
    return NVFP4Tensor(
        codes=jnp.concatenate([part.codes for part in parts], axis=-2),
        scales=jnp.concatenate([part.scales for part in parts], axis=-2),
        global_scale=scale,
        shape=(sum(part.shape[0] for part in parts), ks[0]),
    )


def split(t: NVFP4Tensor, sizes: Sequence[int]) -> list[NVFP4Tensor]:
    """Splits a weight along N into parts of `sizes` rows: the inverse of `fuse`.

    Raises:
      ValueError: sizes do not add up to N.
    """
    n, k = t.shape
    if sum(sizes) != n:
        raise ValueError(f"sizes add up to N = {n}; got {list(sizes)}, {sum(sizes)} in all")
    per_row = t.global_scale.shape[-1] != 1
    parts, start = [], 0
    for size in sizes:
        rows = slice(start, start + size)
        scale = t.global_scale[..., rows] if per_row else t.global_scale
        parts.append(NVFP4Tensor(t.codes[..., rows, :], t.scales[..., rows, :], scale, (size, k)))
        start += size
    return parts


def random(key: jax.Array, shape: Sequence[int], *, std: float = 0.02) -> NVFP4Tensor:
    """Makes a random packed weight for benchmarks, without ever holding it unpacked.

    Codes are uniform over all 16. Block scales are uniform over the 16 E4M3 values from 64 to 240.

    Args:
      key: a JAX random key.
      shape: (..., N, K).
      std: standard deviation of the dequantized entries.

    Raises:
      ValueError: shape has fewer than two axes or K % 16 != 0.
    """
    *stack, n, k = _checked_shape(shape)
    code_key, scale_key = jax.random.split(key)
    choice = jax.random.bits(scale_key, (*stack, n, k // BLOCK), jnp.uint8) % len(
        _RANDOM_SCALE_BITS
    )
    values = _RANDOM_SCALE_BITS.view(jnp.float8_e4m3fn).astype(np.float64)
    spread = math.sqrt(np.mean(CODE_VALUES.astype(np.float64) ** 2) * np.mean(values**2))
    return NVFP4Tensor(
        codes=jax.random.bits(code_key, (*stack, n, k // 2), jnp.uint8),
        scales=jax.lax.bitcast_convert_type(_RANDOM_SCALE_BITS[0] + choice, jnp.float8_e4m3fn),
        global_scale=jnp.full((*stack, 1), spread / std, jnp.float32),
        shape=(n, k),
    )


def _checked_shape(shape: Sequence[int]) -> Sequence[int]:
    if len(shape) < 2:
        raise ValueError(f"an NVFP4 weight has axes [..., N, K]; got shape {tuple(shape)}")
    if shape[-1] % BLOCK:
        raise ValueError(f"NVFP4 blocks hold {BLOCK} values along K; got K = {shape[-1]}")
    return shape


def _blocks(w: jax.Array) -> jax.Array:
    return w.astype(jnp.float32).reshape(*w.shape[:-1], -1, BLOCK)


def _block_max(w: jax.Array) -> jax.Array:
    if w.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"w must be float32, bfloat16 or float16; got {w.dtype}")
    _checked_shape(w.shape)
    return jnp.max(jnp.abs(_blocks(w)), axis=-1)


def _scales_of_maxima(
    block_max: jax.Array, divisor: jax.Array, dtype: DTypeLike, for_zero: float = _SCALE_FOR_ZERO
) -> jax.Array:
    """Computes the scales that map each block's largest magnitude to 6: float8_e4m3fn, block_max's shape."""
    scales = divisor * _round_like(_divide(block_max, _CODE_MAX), dtype)
    scales = jnp.minimum(scales, _SCALE_MAX).astype(jnp.float8_e4m3fn)
    return jnp.where(scales == 0, jnp.float8_e4m3fn(for_zero), scales)


def _global_scale(block_max: jax.Array, dtype: DTypeLike) -> jax.Array:
    # torch computes number / tensor as number * (1 / tensor) and rounds both to the tensor's dtype. A single division
    # gives another result in 3 of 12 layers of a recorded bfloat16 checkpoint.
    reciprocal = _round_like(_divide(1.0, jnp.max(block_max, axis=(-2, -1))), dtype)
    scale = _round_like(reciprocal * (_SCALE_MAX * _CODE_MAX), dtype)
    return jnp.where(jnp.isfinite(scale), scale, 1.0)[..., None]


def _steps(t: NVFP4Tensor) -> jax.Array:
    return _divide(t.scales.astype(jnp.float32), t.global_scale[..., None])


def _times_codes(worth: jax.Array, packed: jax.Array) -> jax.Array:
    # In float32, without bit tricks on bfloat16, because XLA on a CPU flushes bfloat16 subnormals to zero.
    values = jnp.asarray(CODE_VALUES)[unpack_codes(packed)]
    return (_blocks(values) * worth[..., None]).reshape(values.shape)


def _round_like(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    # XLA removes a cast to bfloat16 and back, because it may keep excess precision.
    return jax.lax.reduce_precision(x, 8, 7) if dtype == jnp.bfloat16 else x


def _divide(a: ArrayLike, b: ArrayLike) -> jax.Array:
    """Divides with correct float32 rounding, which `/` does not guarantee.

    XLA turns a / broadcast(b) into a * broadcast(1 / b). Then on a CPU a third of all quotients by 6 are off by one
    unit in the last place. For NVIDIA GPUs XLA uses `div.full`, whose error is up to 2 units. So one Newton step
    corrects the quotient. Its remainder a - q b is exact, whether or not the compiler fuses multiplications and
    additions, because q and b are split into halves of 12 bits (Dekker, 1971). The result equals numpy's on 2 * 10^7
    quotients. From a start that is 2 units off, one result in 10^6 is wrong.
    """
    a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    q = a / b
    (q_high, q_low), (b_high, b_low) = _halves(q), _halves(b)
    remainder = a - q_high * b_high - q_high * b_low - q_low * b_high - q_low * b_low
    return q + remainder / b


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    high = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFF000), jnp.float32)
    return high, x - high


# Indices of the E2M1 codes with values from -6 to 6 in ascending order, with only one zero.
ASCENDING = np.array([*range(15, 8, -1), *range(8)])
FORMAT = NumberFormat(
    name="nvfp4",
    tensor=NVFP4Tensor,
    multiple=BLOCK,
    group=BLOCK,
    grid=CODE_VALUES[ASCENDING],
    quantize=lambda parts, options: pack(parts),
    search=lambda parts, moments, like, options: search(parts, moments, like),
    recode=lambda w, t: quantize(w, t.global_scale, t.scales),
    steps=steps,
    dequantize=dequantize,
    fuse=fuse,
    random=random,
    tilings={
        "rows": {"codes": Tiling(-2), "scales": Tiling(-2)},
        "columns": {"codes": Tiling(-1, 2), "scales": Tiling(-1, BLOCK)},
    },
    is_searched=True,
)
