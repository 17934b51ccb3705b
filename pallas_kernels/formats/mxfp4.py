"""The MXFP4 number format, defined in jnp.

An [N, K] matrix has a 4-bit E2M1 code for each entry, and one E8M0 scale, a power of two, for each block of 32
adjacent entries along K. There is no global scale. The bytes are those of compressed-tensors' scheme MXFP4A16:

    weight[n, k] = value(code[n, k]) * 2^(scale[n, k // 32] - 127)

Two rules for rounding the scale are in use. `quantize` supports both.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.formats.number_format import (
    NumberFormat,
    PackedTensor,
    ScaleRounding,
    Tiling,
)
from pallas_kernels.formats.nvfp4 import (
    ASCENDING,
    CODE_VALUES,
    block_errors,
    least_errors,
    nearest_codes,
    nearest_magnitudes,
    pack_codes,
    unpack_codes,
)

BLOCK = 32

# The exponents that `search_scales` tries, relative to the exponent that `quantize` uses.
SEARCHED_STEPS = (1, -1)

_BIAS = 127
# The exponent of the largest code, 6 = 1.5 * 2^2.
_CODE_EXPONENT = 2
# Byte 255 is NaN. For byte 254, 2^-(254 - 127) is not a normal float32, so codes could not be computed.
_SCALE_MAX = 253


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXFP4Tensor(PackedTensor):
    """An [N, K] weight of y = x W^T, packed in 4.25 bits per entry, or a stack of such weights.

    Attributes:
      codes: uint8 [..., N, K / 2], two E2M1 codes per byte, the even column in the low nibble.
      scales: uint8 [..., N, K / 32], E8M0: exponents of two with a bias of 127.
      shape: (N, K) of one matrix, static. It stays valid when leading axes of the leaves are sliced.
    """

    codes: jax.Array
    scales: jax.Array
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})


def quantize(
    w: jax.Array, *, rounding: ScaleRounding = "nearest", scales: jax.Array | None = None
) -> MXFP4Tensor:
    """Rounds a weight to MXFP4.

        scale = 127 + exponent(block max|w|) - 2
        code  = nearest E2M1 to w / 2^(scale - 127),   ties to the even code, saturating

    Args:
      w: [..., N, K], float32, bfloat16 or float16.
      rounding: "nearest", as in compressed-tensors, takes the next exponent for maxima from 1.75 * 2^e on, because
        those would saturate most. "floor" is the rule of the OCP Microscaling specification.
      scales: uint8 [..., N, K / 32], scales of the blocks, such as those of `search_scales`. By default the formula
        above gives them.

    Raises:
      ValueError: w has another dtype, K % 32 != 0, or rounding is unknown.

    Source: compressed-tensors 0.19; OCP Microscaling Formats 1.0, section 6.3.
    """
    if rounding not in ("nearest", "floor"):
        raise ValueError(f"rounding must be 'nearest' or 'floor'; got {rounding!r}")
    if w.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"w must be float32, bfloat16 or float16; got {w.dtype}")
    _check_shape(w.shape)
    blocks = _blocks(w)
    if scales is None:
        scales = _scales_of_maxima(blocks, rounding)
    codes = nearest_codes(blocks * _inverse(scales)[..., None]).reshape(w.shape)
    return MXFP4Tensor(pack_codes(codes), scales.astype(jnp.uint8), (w.shape[-2], w.shape[-1]))


def search_scales(
    w: jax.Array, moments: jax.Array | None = None, *, rounding: ScaleRounding = "nearest"
) -> jax.Array:
    """Finds for each block the scale that rounds it with the smallest error, as `nvfp4.search_scales` defines it.

    The candidates are the scale of `quantize`, its double and its half. On equal errors the scale of `quantize` wins,
    then the larger one.

    Args:
      w: as for `quantize`, and so is `rounding`.
      moments: float32 [K / 32, 32, 32], as for `nvfp4.search_scales`.
      rounding: "nearest" or "floor".

    Returns:
      uint8 [..., N, K / 32].
    """
    _check_shape(w.shape)
    first = _scales_of_maxima(_blocks(w), rounding)
    sizes = jnp.moveaxis(jnp.abs(_blocks(w)), -1, 0)
    signs = jnp.moveaxis(jnp.sign(_blocks(w)), -1, 0)

    def error(scales):
        off = nearest_magnitudes(sizes * _inverse(scales)) * _steps(scales) - sizes
        return block_errors(off if moments is None else off * signs, moments)

    candidate = lambda step: jnp.clip(first + step, 0, _SCALE_MAX)
    scales, _ = least_errors(error, (first, error(first)), jnp.asarray(SEARCHED_STEPS), candidate)
    return scales.astype(jnp.uint8)


def steps(t: MXFP4Tensor) -> jax.Array:
    """Returns the value of one code unit, 2^(scale - 127), for each entry: float32 [..., N, K]."""
    return jnp.repeat(_steps(t.scales), BLOCK, axis=-1)


def dequantize(t: MXFP4Tensor, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Decodes a weight to code * 2^(scale - 127) in dtype, [..., N, K]. It is exact in float32 and bfloat16."""
    values = jnp.asarray(CODE_VALUES)[unpack_codes(t.codes)]
    blocks = values.reshape(*t.scales.shape, BLOCK) * _steps(t.scales)[..., None]
    return blocks.reshape(values.shape).astype(dtype)


def fuse(parts: Sequence[MXFP4Tensor]) -> MXFP4Tensor:
    """Joins weights of equal K along N, so that one product can serve them all.

    Raises:
      ValueError: parts differ in K.
    """
    ks = [part.shape[1] for part in parts]
    if len(set(ks)) != 1:
        raise ValueError(f"parts joined along N have one K; got K = {ks}")
    return MXFP4Tensor(
        codes=jnp.concatenate([part.codes for part in parts], axis=-2),
        scales=jnp.concatenate([part.scales for part in parts], axis=-2),
        shape=(sum(part.shape[0] for part in parts), ks[0]),
    )


def random(key: jax.Array, shape: Sequence[int], *, std: float = 0.02) -> MXFP4Tensor:
    """Makes a random packed weight, as `nvfp4.random` does; K must be a multiple of 32.

    Codes are uniform over all 16. Scales are one of two neighbouring powers of two.
    """
    _check_shape(shape)
    *stack, n, k = shape
    code_key, scale_key = jax.random.split(key)
    ratio = std / math.sqrt(np.mean(CODE_VALUES.astype(np.float64) ** 2))
    low = math.floor(math.log2(ratio))
    # The share p of the larger power that gives the wanted mean square, (1 - p + 4 p) * 4^low.
    share = (ratio**2 / 4.0**low - 1) / 3
    larger = jax.random.bernoulli(scale_key, share, (*stack, n, k // BLOCK))
    return MXFP4Tensor(
        codes=jax.random.bits(code_key, (*stack, n, k // 2), jnp.uint8),
        scales=jnp.uint8(_BIAS + low) + larger.astype(jnp.uint8),
        shape=(n, k),
    )


def _blocks(w: jax.Array) -> jax.Array:
    return w.astype(jnp.float32).reshape(*w.shape[:-1], -1, BLOCK)


def _scales_of_maxima(blocks: jax.Array, rounding: ScaleRounding) -> jax.Array:
    """Computes the E8M0 scales of blocks, as int32, from the exponents of their largest entries."""
    bits = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(blocks), axis=-1), jnp.uint32)
    # Adding a quarter of the mantissa's range carries into the exponent if the significand is 1.75 or more.
    exponents = (bits + (1 << 21 if rounding == "nearest" else 0)) >> 23
    return jnp.clip(exponents.astype(jnp.int32) - _CODE_EXPONENT, 0, _SCALE_MAX)


def _steps(scales: jax.Array) -> jax.Array:
    """Decodes scales: float32 2^(scale - 127)."""
    bits = scales.astype(jnp.int32) << 23
    # 2^-127 is subnormal in float32; XLA may treat it as zero.
    bits = jnp.where(scales == 0, 1 << 22, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _inverse(scales: jax.Array) -> jax.Array:
    """Returns 2^(127 - scale) in float32."""
    bits = (2 * _BIAS - scales.astype(jnp.int32)) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _check_shape(shape: Sequence[int]) -> None:
    if len(shape) < 2:
        raise ValueError(f"an MXFP4 weight has axes [..., N, K]; got shape {tuple(shape)}")
    if shape[-1] % BLOCK:
        raise ValueError(f"MXFP4 blocks hold {BLOCK} values along K; got K = {shape[-1]}")


FORMAT = NumberFormat(
    name="mxfp4",
    tensor=MXFP4Tensor,
    multiple=BLOCK,
    group=BLOCK,
    grid=CODE_VALUES[ASCENDING],
    quantize=lambda parts, options: [
        quantize(part, rounding=options.scale_rounding) for part in parts
    ],
    search=lambda parts, moments, like, options: [
        quantize(part, scales=search_scales(part, moments, rounding=options.scale_rounding))
        for part in parts
    ],
    recode=lambda w, t: quantize(w, scales=t.scales),
    steps=steps,
    dequantize=dequantize,
    fuse=lambda parts, shared: fuse(parts),
    random=random,
    tilings={
        "rows": {"codes": Tiling(-2), "scales": Tiling(-2)},
        "columns": {"codes": Tiling(-1, 2), "scales": Tiling(-1, BLOCK)},
    },
)
