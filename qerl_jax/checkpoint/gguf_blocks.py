"""Decodes the tensors of GGUF files from their blocks of quantized weights, on the host or on a device.

A block holds 32 or 256 neighbouring weights of a row: one or two float16 scales, integer scales of its groups, and the
codes. The same functions decode NumPy arrays and JAX arrays. Both give exactly the numbers of the package `gguf`: a scale
has 11 bits, a group's scale at most 7 and a code at most 8, but never more than 24 together, so float32 represents their
products exactly. Only adding a group's minimum rounds.

Source: `dequantize_row_*` of ggml (ggml-quants.c), and the package `gguf`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

# A NumPy or JAX array; its first axis counts blocks.
type Array = Any

F32 = 0
_PLAIN = {F32: np.float32, 1: np.float16, 30: ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of one of ggml's types.

    Attributes:
        weights: Number of weights in a block.
        parts: Bytes of the parts of a block, in order.
        values: Maps these parts, uint8 [B, bytes] each, to the weights, float32 [B, weights].
    """

    weights: int
    parts: tuple[int, ...]
    values: Callable[..., Array]


def sizes(kind: int) -> tuple[int, int] | None:
    """Returns the weights and the bytes of a block of ggml's type with this number; None if it cannot be decoded."""
    if kind in _PLAIN:
        return 1, np.dtype(_PLAIN[kind]).itemsize
    return (TYPES[kind].weights, sum(TYPES[kind].parts)) if kind in TYPES else None


def decode(data: Array, kind: int, shape: Sequence[int]) -> Array:
    """Returns the weights of a tensor, float32 [*shape], from its bytes, uint8 [n]."""
    if kind in _PLAIN:
        return data.view(_PLAIN[kind]).astype(np.float32).reshape(shape)
    blocks = TYPES[kind]
    ends = np.cumsum(blocks.parts).tolist()
    rows = data.reshape(len(data) // ends[-1], ends[-1])
    parts = (rows[:, end - size : end] for end, size in zip(ends, blocks.parts, strict=True))
    return blocks.values(*parts).reshape(shape)


def _half(x: Array) -> Array:
    """Reads float16: [B, 2 n] bytes -> float32 [B, n]."""
    return x.view(np.float16).astype(np.float32)


def _codes(x: Array, bits: int, run: int) -> Array:
    """Unpacks codes: [B, n] bytes -> [B, 8 n / bits]. A run of bytes holds first the lowest bits of all, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = x.reshape(len(x), x.shape[1] // run, 1, run)
    return (runs >> shifts & np.uint8((1 << bits) - 1)).reshape(len(x), x.shape[1] * len(shifts))


def _values(scales: Array, codes: Array, minima: Array | None = None) -> Array:
    """Returns scale * code - minimum; scales and minima are those of groups, [B, G], or of blocks, [B, 1]."""
    groups = codes.astype(np.float32).reshape(*scales.shape, codes.shape[1] // scales.shape[1])
    values = scales[:, :, None] * groups
    values = values if minima is None else values - minima[:, :, None]
    return values.reshape(codes.shape)


def _signed(codes: Array, zero: int) -> Array:
    return codes.astype(np.int8) - np.int8(zero)


def _five_bits(high: Array, low: Array) -> Array:
    return _codes(low, 4, 16) | _codes(high, 1, 1) << np.uint8(4)


def _scales_and_minima(scale: Array, minimum: Array, packed: Array) -> tuple[Array, Array]:
    """Unpacks scales and minima of 8 groups, each of 6 bits, from 12 bytes, and multiplies them: float32 [B, 8]."""
    # Groups 0 to 3 have bytes 0 to 3 for scales and 4 to 7 for minima, whose two highest bits belong to groups 4 to 7.
    # These have their low bits in bytes 8 to 11: a scale's in the low half, a minimum's in the high one.
    first, rest = packed[:, :8], _codes(packed[:, 8:], 4, 4)
    rest = rest | first >> np.uint8(6) << np.uint8(4)
    join = packed.__array_namespace__().concat
    both = [
        join([(first & np.uint8(63))[:, i : i + 4], rest[:, i : i + 4]], axis=1) for i in (0, 4)
    ]
    return _half(scale) * both[0].astype(np.float32), _half(minimum) * both[1].astype(np.float32)


def _q2_k(packed: Array, codes: Array, scale: Array, minimum: Array) -> Array:
    scales, minima = (x.astype(np.float32) for x in (packed & np.uint8(15), packed >> np.uint8(4)))
    return _values(_half(scale) * scales, _codes(codes, 2, 32), _half(minimum) * minima)


def _q3_k(high: Array, low: Array, packed: Array, scale: Array) -> Array:
    scales = _codes(packed[:, :8], 4, 8) | _codes(packed[:, 8:], 2, 4) << np.uint8(4)
    scales = _half(scale) * _signed(scales, 32).astype(np.float32)
    return _values(scales, _signed(_codes(low, 2, 32) | _codes(high, 1, 32) << np.uint8(2), 4))


def _q4_k(scale: Array, minimum: Array, packed: Array, codes: Array) -> Array:
    scales, minima = _scales_and_minima(scale, minimum, packed)
    return _values(scales, _codes(codes, 4, 32), minima)


def _q5_k(scale: Array, minimum: Array, packed: Array, high: Array, low: Array) -> Array:
    scales, minima = _scales_and_minima(scale, minimum, packed)
    return _values(scales, _codes(low, 4, 32) | _codes(high, 1, 32) << np.uint8(4), minima)


def _q6_k(low: Array, high: Array, scales: Array, scale: Array) -> Array:
    codes = _codes(low, 4, 64) | _codes(high, 2, 32) << np.uint8(4)
    return _values(_half(scale) * scales.view(np.int8).astype(np.float32), _signed(codes, 32))


# By ggml's number of the type. A minimum is subtracted here; Q4_1 and Q5_1 store what is added.
TYPES = {
    2: Blocks(32, (2, 16), lambda d, q: _values(_half(d), _signed(_codes(q, 4, 16), 8))),  # Q4_0
    3: Blocks(32, (2, 2, 16), lambda d, m, q: _values(_half(d), _codes(q, 4, 16), -_half(m))),
    6: Blocks(32, (2, 4, 16), lambda d, h, q: _values(_half(d), _signed(_five_bits(h, q), 16))),
    7: Blocks(32, (2, 2, 4, 16), lambda d, m, h, q: _values(_half(d), _five_bits(h, q), -_half(m))),
    8: Blocks(32, (2, 32), lambda d, q: _values(_half(d), q.view(np.int8))),  # Q8_0
    10: Blocks(256, (16, 64, 2, 2), _q2_k),
    11: Blocks(256, (32, 64, 12, 2), _q3_k),
    12: Blocks(256, (2, 2, 12, 128), _q4_k),
    13: Blocks(256, (2, 2, 12, 32, 128), _q5_k),
    14: Blocks(256, (128, 64, 16, 2), _q6_k),
}
