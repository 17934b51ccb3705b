"""Tests the decoders' assembly on a CPU: it is evaluated here, and must agree with the formats."""

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats import nf4, nvfp4
from tests.pallas_kernels import ptx

pytest.importorskip("triton", reason="needs triton")

from pallas_kernels.portable import decoders

# All codes along the last axis, for the four parts of a word's lower and of its upper half.
E2M1 = nvfp4.CODE_VALUES.astype(float)
LOW, HIGH = ([(np.arange(16) + step * i) % 16 for i in range(4)] for step in (5, 3))


def run(assembly, *inputs):
    """Evaluates inline assembly: returns $0 ... $3 for the 32-bit inputs $4 ..."""
    registers = ptx.run(assembly.value, dict(enumerate(inputs, 4)))
    return [registers[f"${i}"] for i in range(4)]


def pairs_of(low, high):
    return np.stack([low, high], axis=-1)


def e2m1_words(codes):
    """Puts four codes of one lane at the places that `layout` gives them."""
    sign, rest = [c >> 3 for c in codes], [c & 7 for c in codes]
    word = sign[0] << 15 | rest[0] << 6 | sign[1] << 12 | rest[1] << 3 | sign[2] << 9 | rest[2]
    return word | sign[3] << 14 | rest[3] >> 2 << 13 | (rest[3] & 3) << 10


@pytest.mark.parametrize(("name", "scales"), [("BFLOAT16", "NVFP4"), ("FLOAT16", "NVFP4_HALF")])
def test_assembly_decodes_every_code_with_every_scale(name, scales):
    values = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float)
    exponents = np.floor(np.log2(values))
    bytes_ = ((exponents + 9) * 8 + (values / 2.0**exponents - 1) * 8).astype(int)[:, None]
    others = np.random.default_rng(0).integers(0, 143, (3, *bytes_.shape))
    words = bytes_ | sum(b << 8 * i for i, b in enumerate(others, 1))
    pairs = run(getattr(decoders, f"_{scales}_SCALES"), words)
    np.testing.assert_array_equal(pairs[0] & 0xFFFF, pairs[0] >> 16)
    # Each of the four parts with the same scale; a pair of 16 bits comes in two registers.
    words = e2m1_words(LOW) | e2m1_words(HIGH) << 16
    decoded = run(getattr(decoders, f"_{name}_CODES"), words, *[pairs[0]] * 8)
    for low, high, actual in zip(LOW, HIGH, decoded, strict=True):
        expected = E2M1[pairs_of(low, high)] * values[:, None, None] * decoders.DECODED_SCALE
        halves = ptx.halves(actual, getattr(ptx, name))
        np.testing.assert_array_equal(halves, expected, strict=True)


def test_each_scale_of_a_word_meets_its_block():
    for steps, shift, offset in (
        (decoders._NVFP4_SCALES, 4, 0x7680),
        (decoders._NVFP4_HALF_SCALES, 7, 0x3400),
        (decoders._MXFP4_SCALES, 7, 0),
    ):
        pairs = run(steps, 0x3C2B1A09)
        for pair, byte in zip(pairs, (0x09, 0x1A, 0x2B, 0x3C), strict=True):
            assert pair == (byte << shift) + offset << 16 | (byte << shift) + offset
    ones = e2m1_words([2] * 4)
    values = run(decoders._BFLOAT16_CODES, ones, 0x3F80, 9, 0x4000, 9, 0x4080, 9, 0x4100, 9)
    sizes = [ptx.halves(value, ptx.BFLOAT16)[0] for value in values]
    np.testing.assert_array_equal(sizes, np.array([1, 2, 4, 8]) * 2.0**-126)


def test_assembly_scales_every_code_of_mxfp4_by_powers_of_two():
    exponents = np.arange(1, 255)[:, None]
    pair = run(decoders._MXFP4_SCALES, exponents)[0]
    decoded = run(decoders._BFLOAT16_CODES, e2m1_words(LOW) | e2m1_words(HIGH) << 16, *[pair] * 8)
    for low, high, actual in zip(LOW, HIGH, decoded, strict=True):
        expected = E2M1[pairs_of(low, high)] * 2.0 ** (exponents[..., None] - 253)
        expected = expected.astype(ptx.BFLOAT16).astype(float)  # subnormal ones are rounded
        np.testing.assert_array_equal(ptx.halves(actual, ptx.BFLOAT16), expected, strict=True)


@pytest.mark.parametrize("name", ["BFLOAT16", "FLOAT16"])
def test_assembly_looks_every_code_of_nf4_up(name):
    lookup, kind = getattr(decoders, f"_{name}_LOOKUP"), getattr(ptx, name)
    word = sum(codes << 4 * i for i, codes in enumerate(LOW + HIGH))
    table = nf4.CODE_VALUES.astype(kind).astype(float)
    for low, high, actual in zip(LOW, HIGH, run(lookup, word), strict=True):
        np.testing.assert_array_equal(ptx.halves(actual, kind), table[pairs_of(low, high)])
