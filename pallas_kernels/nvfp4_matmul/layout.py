"""How a packed weight lies in memory for the Hopper kernels; made once, at load.

The matrix is cut into tiles of 64 rows x 64 columns. A tile is 576 words of 32 bits, 4.5 bits a
weight: 512 words of codes, then 64 of scales. In a warpgroup, thread 32 w + 4 g + t feeds `wgmma`
with rows 16 w + g and 16 w + g + 8 of its operand A, columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of
every 16. Each thread finds what it needs in two loads and shuffles nothing:

    codes    words 4 thread + i: the eight codes of columns 16 i ... 16 i + 15
    scales   words 512 + 16 w + 2 g + j: two bytes (rows g, g + 8) for columns 32 j ...,
             two for columns 32 j + 16 ...

Both are in the order of K, so x needs no permutation. Codes and scales share an array so that one
bulk copy brings both.

A word of codes holds two 16-bit lanes (the even column in the low one), a lane four codes, each
spread over the bits from which a mask can lift it into a bfloat16's sign, lowest two exponent bits
and highest mantissa bit (15, 8, 7, 6). The first three are there after shifts by 0, 3 and 6:

    row g,     column 2 t       bits 15, 8, 7, 6
    row g + 8, column 2 t       bits 12, 5, 4, 3
    row g,     column 2 t + 8   bits  9, 2, 1, 0
    row g + 8, column 2 t + 8   bits 14, 13, 11, 10

A scale byte is an unsigned 8-bit float of 5 exponent and 3 mantissa bits that holds every E4M3 value
(subnormals are normal in it), so that a shift and a sum make it a bfloat16.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import nvfp4
from pallas_kernels.nvfp4 import NVFP4Tensor

TILE = 64
CODE_WORDS = TILE * TILE // 8
SCALE_WORDS = TILE * TILE // nvfp4.BLOCK // 4
# A bulk copy takes at most 256 elements along an axis, hence three rows for a tile's 576 words.
TILE_SHAPE = (3, 192)

# Products of decoded codes and decoded scales are this factor below code * scale.
DECODED_SCALE = 2.0**-7

# Of E4M3's non-negative bytes: zero, the subnormals m / 8 * 2^-6, the normals, NaN. Zero becomes
# the byte 255, which decodes to -1.875 * 2^-115: times any decoded code (at most 6 * 2^-126) that
# underflows to a zero, and the codes survive.
_SCALE_BYTES = np.array([255, 0, 8, 12, 16, 18, 20, 22, *range(24, 143), 151], np.uint8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HopperNVFP4:
    """An [N, K] weight, y = x W^T, as the Hopper kernels read it, or a stack of such weights.

    As for `NVFP4Tensor`, `shape` belongs to one matrix and leading axes may be sliced away.

    Attributes:
      words: int32 [..., ceil(N / 64), ceil(K / 64), 3, 192], 64 x 64 tiles of codes and scales.
      global_scale: float32 [..., 1] or [..., N]; a divisor.
      shape: (N, K), without padding.
    """

    words: jax.Array
    global_scale: jax.Array
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @property
    def multiplier(self) -> jax.Array:
        """float32 1 / global_scale, [..., 1] or [..., N]: applied to the float32 accumulator."""
        return 1 / self.global_scale


def tiles(size: int) -> int:
    """Number of tiles that cover `size` rows or columns."""
    return -(-size // TILE)


def prepare(t: NVFP4Tensor) -> HopperNVFP4:
    """Reorders a weight, or a stack of them, for the Hopper kernels.

    N and K are padded to multiples of 64 with zeros. Scales are not negative (their sign is lost).
    """
    n, k = t.shape
    codes = _padded(nvfp4.unpack_codes(t.codes), 0, TILE, TILE)
    scale_bytes = jnp.asarray(_SCALE_BYTES)[jax.lax.bitcast_convert_type(t.scales, jnp.uint8) & 127]
    scales = _padded(scale_bytes, _SCALE_BYTES[0], TILE, TILE // nvfp4.BLOCK)
    words = jnp.concatenate([_code_words(codes), _scale_words(scales)], axis=-1)
    words = jax.lax.bitcast_convert_type(words, jnp.int32)
    return HopperNVFP4(
        words=words.reshape(*words.shape[:-1], *TILE_SHAPE),
        global_scale=t.global_scale,
        shape=(n, k),
    )


def unprepare(w: HopperNVFP4) -> NVFP4Tensor:
    """Inverse of `prepare`, bit for bit."""
    n, k = w.shape
    codes, scale_bytes = unpack_tiles(w.words)
    inverse = np.zeros(256, np.uint8)
    inverse[_SCALE_BYTES] = np.arange(len(_SCALE_BYTES))
    scales = jnp.asarray(inverse)[scale_bytes[..., :n, : k // nvfp4.BLOCK]]
    return NVFP4Tensor(
        codes=nvfp4.pack_codes(codes[..., :n, :k]),
        scales=jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn),
        global_scale=w.global_scale,
        shape=(n, k),
    )


def unpack_tiles(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes tiles apart: int32 [..., n, k, 3, 192] -> codes, scale bytes.

    Returns:
      uint8 [..., 64 n, 64 k], each in 0..15, and uint8 [..., 64 n, 4 k].
    """
    *stack, n, k, _, _ = words.shape
    words = jax.lax.bitcast_convert_type(words, jnp.uint32).reshape(*stack, n, k, -1)
    code_words, scale_words = jnp.split(words, [CODE_WORDS], axis=-1)

    # [..., n, k, w, g, t, i] words of [a, b, h] codes, see `_code_words`.
    lanes = jnp.stack([code_words, code_words >> 16], axis=-1)
    codes = jnp.stack([_gather_code(lanes, field) for field in range(4)], axis=-1)
    codes = codes.reshape(*stack, n, k, 4, 8, 4, 4, 2, 2, 2)
    codes = _transposed(codes, "nkwgtiabh", "nwhgkibta")

    scales = jnp.stack([scale_words >> 8 * byte & 0xFF for byte in range(4)], axis=-1)
    scales = scales.astype(jnp.uint8).reshape(*stack, n, k, 4, 8, 2, 2, 2)
    scales = _transposed(scales, "nkwgjih", "nwhgkji")
    return codes.reshape(*stack, n * TILE, k * TILE), scales.reshape(*stack, n * TILE, k * 4)


def _padded(a: jax.Array, value: int, rows: int, columns: int) -> jax.Array:
    *stack, n, k = a.shape
    widths = [(0, 0)] * len(stack) + [(0, -n % rows), (0, -k % columns)]
    return jnp.pad(a, widths, constant_values=a.dtype.type(value))


def _code_words(codes: jax.Array) -> jax.Array:
    """uint8 [..., N, K] -> uint32 [..., N / 64, K / 64, 512].

    Row 16 w + 8 h + g and column 16 i + 8 b + 2 t + a of a tile is lane a, field 2 b + h of word
    (w, g, t, i).
    """
    *stack, n, k = codes.shape
    codes = codes.reshape(*stack, n // TILE, 4, 2, 8, k // TILE, 4, 2, 4, 2)
    codes = _transposed(codes, "nwhgkibta", "nkwgtiabh").astype(jnp.uint32)
    words = sum(
        _spread_code(codes[..., a, b, h], 2 * b + h) << 16 * a for a, b, h in np.ndindex(2, 2, 2)
    )
    return words.reshape(*stack, n // TILE, k // TILE, CODE_WORDS)


def _scale_words(scales: jax.Array) -> jax.Array:
    """uint8 [..., N, K / 16] -> uint32 [..., N / 64, K / 64, 64]."""
    *stack, n, blocks = scales.shape
    scales = scales.reshape(*stack, n // TILE, 4, 2, 8, blocks // 4, 2, 2)
    scales = _transposed(scales, "nwhgkji", "nkwgjih").astype(jnp.uint32)
    words = sum(scales[..., i, h] << 8 * (2 * i + h) for i, h in np.ndindex(2, 2))
    return words.reshape(*stack, n // TILE, blocks // 4, SCALE_WORDS)


def _spread_code(code: jax.Array, field: int) -> jax.Array:
    if field == 3:
        return (code & 8) << 11 | (code & 4) << 11 | (code & 3) << 10
    return ((code & 8) << 12 | (code & 7) << 6) >> 3 * field


def _gather_code(lane: jax.Array, field: int) -> jax.Array:
    if field == 3:
        code = lane >> 11 & 8 | lane >> 11 & 4 | lane >> 10 & 3
    else:
        code = lane << 3 * field >> 12 & 8 | lane << 3 * field >> 6 & 7
    return code.astype(jnp.uint8)


def _transposed(a: jax.Array, axes: str, order: str) -> jax.Array:
    """Reorders the last axes of a, which are named by letters; leading ones stay."""
    leading = a.ndim - len(axes)
    return a.transpose(*range(leading), *(leading + axes.index(axis) for axis in order))
