"""The memory layout of a packed weight for the portable kernels. A weight is converted once, when it is loaded.

Columns are cut into chunks of 64, which are four blocks of 16. Each row of a chunk has 16 words of 16 bits. Word j
holds the codes of columns j, 16 + j, 32 + j and 48 + j. So a kernel that splits the words of a row gets its four
blocks in order, each with one scale, without shuffles. Any range of a chunk's rows is contiguous.

    words     int16 [chunks, N, 16]     `decoders.py` says where the bits of an E2M1 code are
    scales    int32 [chunks, N]         four bytes, with the first block's byte lowest; one float32 for NF4

A few operations turn a scale's byte into a bfloat16 or float16 (see `decoders.py`). NVFP4's byte is an E5M3 number:
the exponent plus 9, and three mantissa bits. In it all E4M3 values are normal. MXFP4's byte is the exponent relative
to the largest exponent of its matrix.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels import runtime
from pallas_kernels.formats import mxfp4, nf4, nvfp4
from pallas_kernels.formats.mxfp4 import MXFP4Tensor
from pallas_kernels.formats.nf4 import NF4Tensor
from pallas_kernels.formats.number_format import PackedTensor
from pallas_kernels.formats.nvfp4 import NVFP4Tensor
from pallas_kernels.formats.registry import format_of

CHUNK = 64
# Rows are padded with zeros to a multiple of this.
TILE = 64
# For NVFP4 kernels decode code * scale * DECODED_SCALE, which is exact in bfloat16 and in float16.
DECODED_SCALE = 2.0**-7

# The E5M3 byte for each non-negative E4M3 byte: zero, the subnormals m / 8 * 2^-6, the normals, NaN. No byte decodes
# to zero. So zero gets a byte that no other value has, and the codes of its block are set to zero.
_SCALE_BYTES = np.array([143, 0, 8, 12, 16, 18, 20, 22, *range(24, 143), 145], np.uint8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PortableWeight:
    """An [N, K] weight of y = x W^T in the layout of the portable kernels, or a stack of such weights.

    Attributes:
      words: int16 [..., ceil(K / 64), N', 16], with N' = N rounded up to a multiple of 64.
      scales: int32 [..., ceil(K / 64), N'], four bytes each; float32 for NF4.
      global_scale: float32 [..., 1] or [..., N], a divisor: weights are decoded values / global_scale.
      shape: (N, K) of one matrix without padding, static. It stays valid when leading axes of the leaves are sliced.
      format: "nvfp4", "mxfp4" or "nf4".
    """

    words: jax.Array
    scales: jax.Array
    global_scale: jax.Array
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    format: str = dataclasses.field(metadata={"static": True})

    @property
    def multiplier(self) -> jax.Array:
        """1 / global_scale, float32 [..., 1] or [..., N]. Products multiply their rounded sums by it."""
        return 1 / self.global_scale


def whole(n: int) -> int:
    """Rounds a number of rows up to a multiple of `TILE`."""
    return n + -n % TILE


def unless_format(name: str, k: int = CHUNK) -> str | None:
    """Returns why weights [N, K] of a format cannot be used on this device, or None if they can."""
    if name not in ("nvfp4", "mxfp4", "nf4"):
        return f"cannot read {name.upper()}"
    if name == "nf4" and k % CHUNK:
        return f"needs NF4's blocks of {nf4.BLOCK} within rows; got K = {k}"
    if name == "mxfp4" and runtime.tensor_core_type() == "float16":
        least = "compute capability 8.0"
        return f"needs {least} for MXFP4, whose exponents exceed float16's; this is {runtime.device_kind()}"
    return None


def supports(t: PackedTensor) -> str | None:
    """Returns why a weight cannot be converted to this layout, or None if it can."""
    return unless_format(format_of(t).name, t.shape[1])


def prepare(t: PackedTensor) -> PortableWeight:
    """Converts a weight, or a stack of weights, to the layout of the portable kernels.

    NVFP4 scales must not be negative, because their sign is lost. Codes whose scale is zero become zeros.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    if reason := supports(t):
        raise NotImplementedError(reason)
    if isinstance(t, NF4Tensor):
        return _prepared_nf4(t)
    codes = nvfp4.unpack_codes(t.codes)
    if isinstance(t, NVFP4Tensor):
        kind = "nvfp4"
        bytes_ = jax.lax.bitcast_convert_type(t.scales, jnp.uint8) & 127
        codes = jnp.where(jnp.repeat(bytes_ == 0, nvfp4.BLOCK, axis=-1), 0, codes)
        bytes_ = jnp.asarray(_SCALE_BYTES)[bytes_]
        divisor = t.global_scale * DECODED_SCALE
    else:
        kind = "mxfp4"
        # The largest scale gets bfloat16's largest exponent, 2^127; code * 2^-126 times it is code * 2.
        most = jnp.maximum(jnp.max(t.scales, axis=(-2, -1), keepdims=True), 1).astype(jnp.int32)
        bytes_ = (254 - most + t.scales).astype(jnp.uint8)
        bytes_ = jnp.repeat(bytes_, mxfp4.BLOCK // nvfp4.BLOCK, axis=-1)
        divisor = jnp.exp2((128 - most[..., 0]).astype(jnp.float32))
    bits = _chunked(codes).astype(jnp.int32)
    sign, rest = bits >> 3, bits & 7
    words = sign[..., 0] << 15 | rest[..., 0] << 6 | sign[..., 1] << 12 | rest[..., 1] << 3
    words |= sign[..., 2] << 9 | rest[..., 2]
    words |= sign[..., 3] << 14 | rest[..., 3] >> 2 << 13 | (rest[..., 3] & 3) << 10
    *stack, n, blocks = bytes_.shape
    bytes_ = _padded(bytes_, TILE, CHUNK // nvfp4.BLOCK).reshape(*stack, -1, -(-blocks // 4), 4)
    scales = jax.lax.bitcast_convert_type(bytes_, jnp.int32)
    return PortableWeight(
        words=_as_int16(words),
        scales=jnp.swapaxes(scales, -1, -2),
        global_scale=divisor,
        shape=t.shape,
        format=kind,
    )


def unprepare(w: PortableWeight) -> PackedTensor:
    """Inverts `prepare`, exactly with two exceptions.

    NVFP4 codes whose scale is zero have become zeros, and quantized NF4 scales are returned in float32.
    """
    n, k = w.shape
    codes, scales = _codes(w), _scale_bytes(w)
    if w.format == "nf4":
        *stack, _, _ = codes.shape
        absmax = jnp.swapaxes(w.scales, -1, -2)[..., :n, :]
        return NF4Tensor(
            nf4.pack_codes(codes).reshape(*stack, -1),
            absmax.reshape(*stack, -1),
            None,
            None,
            w.shape,
        )
    if w.format == "nvfp4":
        inverse = np.zeros(256, np.uint8)
        inverse[_SCALE_BYTES] = np.arange(len(_SCALE_BYTES))
        scales = jax.lax.bitcast_convert_type(jnp.asarray(inverse)[scales], jnp.float8_e4m3fn)
        divisor = w.global_scale / DECODED_SCALE
        return NVFP4Tensor(nvfp4.pack_codes(codes), scales, divisor, w.shape)
    most = 128 - jnp.round(jnp.log2(w.global_scale)).astype(jnp.int32)
    scales = scales[..., :: mxfp4.BLOCK // nvfp4.BLOCK].astype(jnp.int32) - 254 + most[..., None]
    return MXFP4Tensor(nvfp4.pack_codes(codes), scales.astype(jnp.uint8), w.shape)


def decoded(w: PortableWeight, dtype: DTypeLike) -> jax.Array:
    """Decodes a weight in jnp as the kernels do: weights times `global_scale`, rounded once to dtype; [..., N, K]."""
    n, k = w.shape
    codes = _codes(w)
    if w.format == "nf4":
        # The kernels round the table to 16 bits and keep the scales in float32.
        table = jnp.asarray(nf4.CODE_VALUES)
        table = table.astype(jnp.bfloat16).astype(jnp.float32) if dtype != jnp.float32 else table
        scales = jnp.repeat(jnp.swapaxes(w.scales, -1, -2)[..., :n, :], CHUNK, axis=-1)
        return (table[codes] * scales).astype(dtype)
    exponents = _scale_bytes(w).astype(jnp.int32)
    if w.format == "nvfp4":
        bits = (exponents << 4) + 0x7680
        # These bits are scale * 2^119. A decoded code has the factor 2^-126, so scale * 2^-7 remains.
        scales = jax.lax.bitcast_convert_type(bits << 16, jnp.float32) * 2.0**-126
    else:
        scales = jax.lax.bitcast_convert_type(jnp.maximum(exponents - 126, 1) << 23, jnp.float32)
    values = jnp.asarray(nvfp4.CODE_VALUES)[codes]
    return (values * jnp.repeat(scales, nvfp4.BLOCK, axis=-1)).astype(dtype)


def _prepared_nf4(t: NF4Tensor) -> PortableWeight:
    n, k = t.shape
    *stack, _ = t.codes.shape
    codes = nf4.unpack_codes(t.codes).reshape(*stack, n, k)
    bits = _chunked(codes).astype(jnp.int32)
    words = bits[..., 0] | bits[..., 1] << 4 | bits[..., 2] << 8 | bits[..., 3] << 12
    absmax = nf4.scales(t).reshape(*stack, n, k // CHUNK)
    return PortableWeight(
        words=_as_int16(words),
        scales=jnp.swapaxes(_padded(absmax, TILE, 1), -1, -2),
        global_scale=jnp.ones((*stack, 1), jnp.float32),
        shape=t.shape,
        format="nf4",
    )


def _chunked(codes: jax.Array) -> jax.Array:
    """Rearranges [..., N, K] into [..., chunks, N', 16, 4], padded with zeros."""
    codes = _padded(codes, TILE, CHUNK)
    *stack, n, k = codes.shape
    codes = codes.reshape(*stack, n, k // CHUNK, 4, 16)
    return jnp.moveaxis(codes, (-3, -4, -1), (-4, -3, -2))


def _codes(w: PortableWeight) -> jax.Array:
    """Unpacks the codes of the format: uint8 [..., N, K]."""
    n, k = w.shape
    bits = w.words.astype(jnp.int32)
    if w.format == "nf4":
        codes = [bits >> 4 * part & 15 for part in range(4)]
    else:
        sign = [bits >> shift & 1 for shift in (15, 12, 9, 14)]
        rest = [bits >> 6 & 7, bits >> 3 & 7, bits & 7, (bits >> 13 & 1) << 2 | bits >> 10 & 3]
        codes = [s << 3 | r for s, r in zip(sign, rest, strict=True)]
    codes = jnp.moveaxis(jnp.stack(codes, -2), -4, -3).astype(jnp.uint8)
    *stack, rows, chunks, _, _ = codes.shape
    return codes.reshape(*stack, rows, chunks * CHUNK)[..., :n, :k]


def _scale_bytes(w: PortableWeight) -> jax.Array:
    """Unpacks the scale bytes: uint8 [..., N, K / 16]. For NF4 the result is meaningless."""
    n, k = w.shape
    bytes_ = jax.lax.bitcast_convert_type(jnp.swapaxes(w.scales, -1, -2), jnp.uint8)
    return bytes_.reshape(*bytes_.shape[:-2], -1)[..., :n, : k // nvfp4.BLOCK]


def _as_int16(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words.astype(jnp.uint16), jnp.int16)


def _padded(a: jax.Array, rows: int, columns: int) -> jax.Array:
    *stack, n, k = a.shape
    return jnp.pad(a, [(0, 0)] * len(stack) + [(0, -n % rows), (0, -k % columns)])
