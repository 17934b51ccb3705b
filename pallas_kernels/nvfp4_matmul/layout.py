"""The memory layout of a packed weight for the Hopper kernels; made once, when the weight is loaded.

The matrix is cut into tiles of 64 rows x 64 columns. A tile is 576 words of 32 bits, 4.5 bits a
weight: 512 words of codes, then 64 of scales. In a warpgroup, thread 32 w + 4 g + t feeds `wgmma`
with rows 16 w + g and 16 w + g + 8 of its operand A, columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of
every 16. Each thread finds what it needs in two loads and shuffles nothing:

    codes    words 4 thread + i: the eight codes of columns 16 i ... 16 i + 15
    scales   words 512 + 16 w + 2 g + j: two bytes (rows g, g + 8) for columns 32 j ...,
             two for columns 32 j + 16 ...

Both are in the order of K, so x needs no permutation. Codes and scales share an array so that one
bulk copy brings both.

A code becomes a bfloat16's sign, two lowest exponent bits and highest mantissa bit, 15, 8, 7 and 6 of
a 16-bit lane (the even column in the low lane, the odd one in the high). A word has four codes in
each lane, of rows g and g + 8 in columns 2 t, then in 2 t + 8. Rotations of a word and a mask bring
the first three where they belong; what is left of an even word and of the odd one after it makes a
third word, from which the fourth ones come alike:

    even word   rotated left by 0, 28 (right by 4) and 6
    odd word    rotated left by 0, 26 (right by 6) and 4
    third word  bits 4, 5, 13, 14 of the even word's lanes, the others of the odd word shifted left
                by 2; rotated left by 26 (right by 6) for the even word's code and by 4 for the odd

No such splitting takes fewer than 16 operations for 16 codes (all rotations were searched).

A scale byte is an unsigned 8-bit float of 5 exponent and 3 mantissa bits that holds every E4M3 value
(subnormals are normal in it). Its bits are 11 ... 4 of a lane, those of the first pair as they are,
those of the second after a rotation by 8, so that a mask and constant upper bits make a bfloat16.
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
# A bulk copy takes at most 256 elements along an axis, hence three rows for a tile's 576 words.
TILE_SHAPE = (3, 192)

# Products of decoded codes and decoded scales are this factor below code * scale.
DECODED_SCALE = 2.0**-20

# Of E4M3's non-negative bytes: zero, the subnormals m / 8 * 2^-6, the normals, NaN. No byte decodes
# to zero, so zero has one that is no other value's, and its codes are zeros. 255 decodes to a NaN.
_SCALE_BYTES = np.array([143, 0, 8, 12, 16, 18, 20, 22, *range(24, 143), 255], np.uint8)

# Where a code's sign, exponent and mantissa bits go in a lane, from the highest.
_LANE_BITS = (15, 8, 7, 6)
# By parity of the word: how far its first three codes are rotated to the left.
_ROTATIONS = ((0, -4, 6), (0, -6, 4))
# The third word: bits that are the even word's, the odd word's shift, and rotations for both codes.
EVEN_BITS, ODD_SHIFT, LEFT_ROTATIONS = 0x60306030, 2, (-6, 4)


def _code_places() -> np.ndarray:
    """Of each bit of each code of two words: the word, and the place there, [2, 4, 2, 4, 2].

    Axes: word of the code, field, lane, bit of the code from the highest, (word, place).
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
    """An [N, K] weight, y = x W^T, as the Hopper kernels read it, or a stack of such weights.

    As for `NVFP4Tensor`, `shape` belongs to one matrix and leading axes may be sliced away.

    Attributes:
      words: int32 [..., ceil(N / 64), ceil(K / 64), 3, 192], 64 x 64 tiles of codes and scales.
      global_scale: float32 [..., 1] or [..., N]; a divisor. In the order of the rows that `words` has.
      shape: (N, K), without padding.
      is_paired: whether the rows of N are in the order of `paired_rows`.
    """

    words: jax.Array
    global_scale: jax.Array
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    is_paired: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def multiplier(self) -> jax.Array:
        """float32 1 / global_scale, [..., 1] or [..., N]: products multiply their rounded sums by it."""
        return 1 / self.global_scale


def tiles(size: int) -> int:
    """Number of tiles that cover `size` rows or columns."""
    return -(-size // TILE)


def whole(size: int) -> int:
    """Rows or columns of the tiles that cover `size` of them."""
    return tiles(size) * TILE


def can_pair(n: int) -> bool:
    """Whether rows of N, the gate and then what it lets through, can be put in pairs."""
    return n % TILE == 0


def paired_rows(a: jax.Array, axis: int) -> jax.Array:
    """Puts the gate's and the other's rows, halves of an axis, beside each other in a thread of `wgmma`.

    Of each 64 rows of the result, 32 rows of both, rows 16 w + g are of the gate and rows 16 w + 8 + g the same
    ones of what it lets through.
    """
    shape, axis = a.shape, axis % a.ndim
    a = a.reshape(*shape[:axis], 2, shape[axis] // 16, 8, *shape[axis + 1 :])
    return jnp.swapaxes(a, axis, axis + 1).reshape(shape)


def joined_rows(a: jax.Array, axis: int) -> jax.Array:
    """Inverse of `paired_rows`: all of the gate, then all of what it lets through."""
    shape, axis = a.shape, axis % a.ndim
    a = a.reshape(*shape[:axis], shape[axis] // 16, 2, 8, *shape[axis + 1 :])
    return jnp.swapaxes(a, axis, axis + 1).reshape(shape)


def prepare(t: NVFP4Tensor, *, is_paired: bool = False) -> HopperNVFP4:
    """Reorders a weight, or a stack of them, for the Hopper kernels.

    N and K are padded to multiples of 64 with zeros. Scales are not negative (their sign is lost),
    and codes whose scale is zero become zeros.

    Args:
      t: the weight.
      is_paired: whether to put its rows, a gate and what it lets through, in the order of `paired_rows`.
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
    """A weight whose rows are in another order."""
    has_rows = t.global_scale.shape[-1] == t.shape[0]
    scales = jax.lax.bitcast_convert_type(t.scales, jnp.uint8)
    return dataclasses.replace(
        t,
        codes=order(t.codes, -2),
        scales=jax.lax.bitcast_convert_type(order(scales, -2), t.scales.dtype),
        global_scale=order(t.global_scale, -1) if has_rows else t.global_scale,
    )


def unprepare(w: HopperNVFP4) -> NVFP4Tensor:
    """Inverse of `prepare`, bit for bit but for codes whose scale is zero: they are zeros."""
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
    """Takes tiles apart: int32 [..., n, k, 3, 192] -> codes, scale bytes.

    Returns:
      uint8 [..., 64 n, 64 k], each in 0..15, and uint8 [..., 64 n, 4 k].
    """
    *stack, n, k, _, _ = words.shape
    words = jax.lax.bitcast_convert_type(words, jnp.uint32).reshape(*stack, n, k, -1)
    code_words, scale_words = jnp.split(words, [CODE_WORDS], axis=-1)

    # [..., n, k, w, g, t, ij, ii] words of [b, h, a] codes, see `_code_words`.
    pairs = code_words.reshape(*code_words.shape[:-1], CODE_WORDS // 2, 2)
    codes = jnp.stack([_gather_code(pairs, *place) for place in np.ndindex(2, 4, 2)], axis=-1)
    codes = codes.reshape(*stack, n, k, 4, 8, 4, 2, 2, 2, 2, 2)
    codes = _transposed(codes, "nkwgtjibha", "nwhgkjibta")

    rotated = jnp.stack([scale_words >> 4, scale_words >> 12 | scale_words << 20], axis=-1)
    scales = jnp.stack([rotated & 0xFF, rotated >> 16 & 0xFF], axis=-1)
    scales = scales.astype(jnp.uint8).reshape(*stack, n, k, 4, 8, 2, 2, 2)
    scales = _transposed(scales, "nkwgjih", "nwhgkji")
    return codes.reshape(*stack, n * TILE, k * TILE), scales.reshape(*stack, n * TILE, k * 4)


def _padded(a: jax.Array, value: int, rows: int, columns: int) -> jax.Array:
    *stack, n, k = a.shape
    widths = [(0, 0)] * len(stack) + [(0, -n % rows), (0, -k % columns)]
    return jnp.pad(a, widths, constant_values=a.dtype.type(value))


def _code_words(codes: jax.Array) -> jax.Array:
    """uint8 [..., N, K] -> uint32 [..., N / 64, K / 64, 512].

    Row 16 w + 8 h + g and column 32 j + 16 i + 8 b + 2 t + a of a tile is lane a, field 2 b + h of
    word (w, g, t, j, i).
    """
    *stack, n, k = codes.shape
    codes = codes.reshape(*stack, n // TILE, 4, 2, 8, k // TILE, 2, 2, 2, 4, 2)
    codes = _transposed(codes, "nwhgkjibta", "nkwgtjibha").astype(jnp.uint32)
    words = [0, 0]
    for i, b, h, a, bit in np.ndindex(2, 2, 2, 2, 4):
        word, place = map(int, _CODE_PLACES[i, 2 * b + h, a, bit])
        words[word] |= (codes[..., i, b, h, a] >> (3 - bit) & 1) << place
    return jnp.stack(words, axis=-1).reshape(*stack, n // TILE, k // TILE, CODE_WORDS)


def _gather_code(pairs: jax.Array, word: int, field: int, lane: int) -> jax.Array:
    places = _CODE_PLACES[word, field, lane]
    bits = [(pairs[..., at] >> int(place) & 1) << (3 - i) for i, (at, place) in enumerate(places)]
    return sum(bits).astype(jnp.uint8)


def _scale_words(scales: jax.Array) -> jax.Array:
    """uint8 [..., N, K / 16] -> uint32 [..., N / 64, K / 64, 64]."""
    *stack, n, blocks = scales.shape
    scales = scales.reshape(*stack, n // TILE, 4, 2, 8, blocks // 4, 2, 2)
    scales = _transposed(scales, "nwhgkji", "nkwgjih").astype(jnp.uint32)
    first, second = (scales[..., i, 0] << 4 | scales[..., i, 1] << 20 for i in range(2))
    words = first | second << 8 | second >> 24
    return words.reshape(*stack, n // TILE, blocks // 4, SCALE_WORDS)


def _transposed(a: jax.Array, axes: str, order: str) -> jax.Array:
    """Reorders the last axes of a, which are named by letters; leading ones stay."""
    leading = a.ndim - len(axes)
    return a.transpose(*range(leading), *(leading + axes.index(axis) for axis in order))
