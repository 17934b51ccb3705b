"""The memory layout of a packed weight for the Hopper kernels. A weight is converted once, when it is loaded.

The matrix is cut into tiles of 64 rows x 64 columns. A tile is 576 words of 32 bits (4.5 bits per weight): 512 words
of codes, then 64 words of scales, in the order in which the threads of a warpgroup read them for `wgmma`. A scale byte
is an unsigned 8-bit float with 5 exponent and 3 mantissa bits (E5M3). docs/design/kernels.md, "Packed tiles of the
Hopper kernels", says where each bit is.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import nvfp4
from pallas_kernels.formats.nvfp4 import NVFP4Tensor

TILE = 64
CODE_WORDS = TILE * TILE // 8
SCALE_WORDS = TILE * TILE // nvfp4.BLOCK // 4
# A bulk copy takes at most 256 elements along an axis, so the 576 words of a tile are stored as 3 x 192.
TILE_SHAPE = (3, 192)

# Decoded code * decoded scale = code * scale * DECODED_SCALE.
DECODED_SCALE = 2.0**-20

# The E5M3 byte for each non-negative E4M3 byte: zero, the subnormals m / 8 * 2^-6, the normals, NaN (255). No byte
# decodes to zero. So zero gets a byte that no other value uses, and the codes of its block are set to zero.
_SCALE_BYTES = np.array([143, 0, 8, 12, 16, 18, 20, 22, *range(24, 143), 255], np.uint8)

# The bits of a lane to which a code's sign, exponent and mantissa bits go, the highest first.
_LANE_BITS = (15, 8, 7, 6)
# Left rotations that extract the first three codes of an even word, and of an odd word.
_ROTATIONS = ((0, -4, 6), (0, -6, 4))
# The third word: the mask of the even word's bits, the odd word's left shift, and the rotations for both codes.
EVEN_BITS, ODD_SHIFT, LEFT_ROTATIONS = 0x60306030, 2, (-6, 4)


def _code_places() -> np.ndarray:
    """Returns where each bit of the codes in two words is stored: the word and the bit in it, [2, 4, 2, 4, 2].

    Axes: word of the code, field (0 to 3), lane, bit of the code (highest first), (word, bit in the word).
    """
    places = np.empty((2, 4, 2, 4, 2), int)
    for word, field, lane, bit in np.ndindex(2, 4, 2, 4):
        target = 16 * lane + _LANE_BITS[bit]
        if field < 3:
            at = word, (target - _ROTATIONS[word][field]) % 32
        else:
            left = (target - LEFT_ROTATIONS[word]) % 32
            at = (0, left) if EVEN_BITS >> left & 1 else (1, left - ODD_SHIFT)
        places[word, field, lane, bit] = at
    return places


_CODE_PLACES = _code_places()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HopperNVFP4:
    """An [N, K] weight W of y = x W^T in the layout of the Hopper kernels, or a stack of such weights.

    As in `NVFP4Tensor`, `shape` is that of one matrix, and leading axes may be sliced away.

    Attributes:
      words: int32 [..., ceil(N / 64), ceil(K / 64), 3, 192], 64 x 64 tiles of codes and scales.
      global_scale: float32 [..., 1] or [..., N], a divisor; with its rows in the order of `words`.
      shape: (N, K), without padding.
      is_paired: whether the rows of `words` are in the order of `paired_rows`. The columns of a product are not:
        those of the gate come first, then those of up.
    """

    words: jax.Array
    global_scale: jax.Array
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    is_paired: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def multiplier(self) -> jax.Array:
        """1 / global_scale, float32 [..., 1] or [..., N]: the factor of a product's columns, in their order."""
        factor = 1 / self.global_scale
        return joined_rows(factor, -1) if self.is_paired and factor.shape[-1] > 1 else factor

    @property
    def as_it_lies(self) -> "HopperNVFP4":
        """The same words as a matrix whose rows are in the order of `words`: `is_paired` is False."""
        return dataclasses.replace(self, is_paired=False)


def tiles(size: int) -> int:
    """Returns the number of tiles that cover `size` rows or columns."""
    return -(-size // TILE)


def whole(size: int) -> int:
    """Rounds `size` up to whole tiles."""
    return tiles(size) * TILE


def can_pair(n: int, rank: int = 0) -> bool:
    """Returns whether N rows, those of the gate and then those of up, should be put in pairs with LoRA of this rank.

    In decoding, LoRA of up to 128 ranks can be added to rows in pairs. In training, the kernel for many rows adds up
    to 32 ranks to rows in pairs, but up to 64 to rows in order. So with ranks of 33 to 64, training is faster in
    order.
    """
    return n % TILE == 0 and (2 * rank <= TILE or TILE < rank <= 2 * TILE)


def paired_rows(a: jax.Array | np.ndarray, axis: int) -> jax.Array | np.ndarray:
    """Reorders gate and up, the halves of an axis, so that one thread of `wgmma` holds the same row of both.

    Each 64 rows of the result hold 32 rows of each. With g from 0 to 7, rows 16 w + g are rows 8 w + g of the gate,
    and rows 16 w + 8 + g are the same rows of up.

    Args:
      a: an array whose axis has a size that is a multiple of 16.
      axis: the axis.
    """
    shape, axis = a.shape, axis % a.ndim
    a = a.reshape(*shape[:axis], 2, shape[axis] // 16, 8, *shape[axis + 1 :])
    return a.swapaxes(axis, axis + 1).reshape(shape)


def joined_rows(a: jax.Array, axis: int) -> jax.Array:
    """Inverts `paired_rows`: all gate rows come first, then all up rows."""
    shape, axis = a.shape, axis % a.ndim
    a = a.reshape(*shape[:axis], shape[axis] // 16, 2, 8, *shape[axis + 1 :])
    return jnp.swapaxes(a, axis, axis + 1).reshape(shape)


def prepare(t: NVFP4Tensor, *, is_paired: bool = False) -> HopperNVFP4:
    """Converts a weight, or a stack of weights, to the layout of the Hopper kernels.

    N and K are padded with zeros to multiples of 64. Scales must not be negative, because their sign bit is dropped.
    Codes whose scale is zero become zero.

    Args:
      t: the weight.
      is_paired: whether to put its rows, gate and then up, in the order of `paired_rows`.
    """
    n, k = t.shape
    if is_paired:
        t = _with_rows(t, paired_rows)
    scale_bytes = jax.lax.bitcast_convert_type(t.scales, jnp.uint8) & 127
    is_zero = jnp.repeat(scale_bytes == 0, nvfp4.BLOCK, axis=-1)
    codes = jnp.where(is_zero, 0, nvfp4.unpack_codes(t.codes)).astype(jnp.uint8)
    codes = _padded(codes, 0, TILE, TILE)
    scale_bytes = jnp.asarray(_SCALE_BYTES)[scale_bytes]
    scales = _padded(scale_bytes, _SCALE_BYTES[0], TILE, TILE // nvfp4.BLOCK)
    words = jnp.concatenate([_code_words(codes), _scale_words(scales)], axis=-1)
    words = jax.lax.bitcast_convert_type(words, jnp.int32)
    return HopperNVFP4(
        words=words.reshape(*words.shape[:-1], *TILE_SHAPE),
        global_scale=t.global_scale,
        shape=(n, k),
        is_paired=is_paired,
    )


def _with_rows(t: NVFP4Tensor, order: Callable[[jax.Array, int], jax.Array]) -> NVFP4Tensor:
    """Returns the weight with its rows reordered by `order(array, axis)`."""
    has_rows = t.global_scale.shape[-1] == t.shape[0]
    scales = jax.lax.bitcast_convert_type(t.scales, jnp.uint8)
    return dataclasses.replace(
        t,
        codes=order(t.codes, -2),
        scales=jax.lax.bitcast_convert_type(order(scales, -2), t.scales.dtype),
        global_scale=order(t.global_scale, -1) if has_rows else t.global_scale,
    )


def unprepare(w: HopperNVFP4) -> NVFP4Tensor:
    """Inverts `prepare` exactly, except that codes whose scale is zero have become zero."""
    n, k = w.shape
    codes, scale_bytes = unpack_tiles(w.words)
    inverse = np.zeros(256, np.uint8)
    inverse[_SCALE_BYTES] = np.arange(len(_SCALE_BYTES))
    scales = jnp.asarray(inverse)[scale_bytes[..., :n, : k // nvfp4.BLOCK]]
    t = NVFP4Tensor(
        codes=nvfp4.pack_codes(codes[..., :n, :k]),
        scales=jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn),
        global_scale=w.global_scale,
        shape=(n, k),
    )
    return _with_rows(t, joined_rows) if w.is_paired else t


def unpack_tiles(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Extracts codes and scale bytes from tiles, int32 [..., n, k, 3, 192].

    Returns:
      Codes, uint8 [..., 64 n, 64 k], each 0 to 15; and E5M3 scale bytes, uint8 [..., 64 n, 4 k].
    """
    *stack, n, k, _, _ = words.shape
    words = jax.lax.bitcast_convert_type(words, jnp.uint32).reshape(*stack, n, k, -1)
    code_words, scale_words = jnp.split(words, [CODE_WORDS], axis=-1)

    # Words [..., n, k, w, g, t, j, i] of codes [b, h, a]; see `_code_words`.
    pairs = code_words.reshape(*code_words.shape[:-1], CODE_WORDS // 2, 2)
    codes = jnp.stack([_gather_code(pairs, *index) for index in np.ndindex(2, 4, 2)], axis=-1)
    codes = codes.reshape(*stack, n, k, 4, 8, 4, 2, 2, 2, 2, 2)
    codes = transposed(codes, "nkwgtjibha", "nwhgkjibta")

    rotated = jnp.stack([scale_words >> 4, scale_words >> 12 | scale_words << 20], axis=-1)
    scales = jnp.stack([rotated & 0xFF, rotated >> 16 & 0xFF], axis=-1)
    scales = scales.astype(jnp.uint8).reshape(*stack, n, k, 4, 8, 2, 2, 2)
    scales = transposed(scales, "nkwgjih", "nwhgkji")
    return codes.reshape(*stack, n * TILE, k * TILE), scales.reshape(*stack, n * TILE, k * 4)


def _padded(a: jax.Array, value: int, rows: int, columns: int) -> jax.Array:
    *stack, n, k = a.shape
    widths = [(0, 0)] * len(stack) + [(0, -n % rows), (0, -k % columns)]
    return jnp.pad(a, widths, constant_values=a.dtype.type(value))


def _code_words(codes: jax.Array) -> jax.Array:
    """Packs codes into words: uint8 [..., N, K] -> uint32 [..., N / 64, K / 64, 512].

    The code in row 16 w + 8 h + g and column 32 j + 16 i + 8 b + 2 t + a of a tile goes to lane a,
    field 2 b + h of word (w, g, t, j, i).
    """
    *stack, n, k = codes.shape
    codes = codes.reshape(*stack, n // TILE, 4, 2, 8, k // TILE, 2, 2, 2, 4, 2)
    codes = transposed(codes, "nwhgkjibta", "nkwgtjibha").astype(jnp.uint32)
    words = [0, 0]
    for i, b, h, a, bit in np.ndindex(2, 2, 2, 2, 4):
        word, bit_index = map(int, _CODE_PLACES[i, 2 * b + h, a, bit])
        words[word] |= (codes[..., i, b, h, a] >> (3 - bit) & 1) << bit_index
    return jnp.stack(words, axis=-1).reshape(*stack, n // TILE, k // TILE, CODE_WORDS)


def _gather_code(pairs: jax.Array, word: int, field: int, lane: int) -> jax.Array:
    places = _CODE_PLACES[word, field, lane]
    bits = [
        (pairs[..., at] >> int(bit_index) & 1) << (3 - i)
        for i, (at, bit_index) in enumerate(places)
    ]
    return sum(bits).astype(jnp.uint8)


def _scale_words(scales: jax.Array) -> jax.Array:
    """Packs scale bytes into words: uint8 [..., N, K / 16] -> uint32 [..., N / 64, K / 64, 64]."""
    *stack, n, blocks = scales.shape
    scales = scales.reshape(*stack, n // TILE, 4, 2, 8, blocks // 4, 2, 2)
    scales = transposed(scales, "nwhgkji", "nkwgjih").astype(jnp.uint32)
    first, second = (scales[..., i, 0] << 4 | scales[..., i, 1] << 20 for i in range(2))
    words = first | second << 8 | second >> 24
    return words.reshape(*stack, n // TILE, blocks // 4, SCALE_WORDS)


def transposed(a: jax.Array, axes: str, order: str) -> jax.Array:
    """Transposes the last axes of a from the order `axes` to `order`, one letter for each axis; leading axes stay."""
    leading = a.ndim - len(axes)
    return a.transpose(*range(leading), *(leading + axes.index(axis) for axis in order))
