"""Tests the decoders' assembly on a CPU: it is parsed and evaluated here, and must agree with the formats."""

import re

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats import nf4, nvfp4

pytest.importorskip("triton", reason="needs triton")

from pallas_kernels.portable import decoders

KINDS = {"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}


def halves(word, kind):
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(kind).astype(np.float64)


def run(assembly, inputs):
    """Evaluates inline assembly: returns $0 ... $3 for the 32-bit inputs $4 ..."""
    registers = {f"${4 + i}": value & 0xFFFFFFFF for i, value in enumerate(inputs)}

    def value(text):
        return registers[text] if text in registers else int(text, 0)

    def multiplied(kind, a, b):
        with np.errstate(over="ignore"):
            product = (halves(a, kind) * halves(b, kind)).astype(kind).view(np.uint16)
        return int(product[0]) | int(product[1]) << 16

    def permuted(a, b, selector):
        pool = (a | b << 32).to_bytes(8, "little")
        chosen = []
        for i in range(4):
            nibble = selector >> 4 * i & 15
            byte = pool[nibble & 7]
            chosen.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
        return int.from_bytes(bytes(chosen), "little")

    def looked_up(a, b, c, table):
        bits = (
            (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i
            for i in range(32)
        )
        return sum(bits)

    operations = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "shr.b32": lambda a, b: a >> b,
        "shr.u32": lambda a, b: a >> b,
        "lop3.b32": looked_up,
        "prmt.b32": permuted,
        "mad.lo.u32": lambda a, b, c: a * b + c & 0xFFFFFFFF,
        "mul.rn.f16x2": lambda a, b: multiplied(np.float16, a, b),
        # Only ever with -0, that is, as a product.
        "fma.rn.bf16x2": lambda a, b, c: {0x80008000: multiplied(ml_dtypes.bfloat16, a, b)}[c],
    }
    body = assembly.value.strip().strip("{}")
    for line in filter(None, (line.strip() for line in body.split(";"))):
        name, rest = line.split(maxsplit=1)
        if name == ".reg":
            continue
        target, *sources = [part.strip() for part in re.split(r",\s*", rest)]
        registers[target] = operations[name](*map(value, sources))
    return [registers[f"${i}"] for i in range(4)]


def e2m1_word(codes):
    """Puts four codes of one lane at the places that `layout` gives them."""
    sign, rest = [c >> 3 for c in codes], [c & 7 for c in codes]
    word = sign[0] << 15 | rest[0] << 6 | sign[1] << 12 | rest[1] << 3 | sign[2] << 9 | rest[2]
    return word | sign[3] << 14 | rest[3] >> 2 << 13 | (rest[3] & 3) << 10


@pytest.mark.parametrize(
    ("codes", "scales", "kind"),
    [
        ("_BFLOAT16_CODES", "_NVFP4_SCALES", ml_dtypes.bfloat16),
        ("_FLOAT16_CODES", "_NVFP4_HALF_SCALES", np.float16),
    ],
)
def test_assembly_decodes_every_code_with_every_scale(codes, scales, kind):
    all_scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float)
    rng = np.random.default_rng(0)
    for index, scale in enumerate(all_scales):
        if scale == 0:
            continue
        exponent = int(np.floor(np.log2(scale)))
        byte = exponent + 9 << 3 | int((scale / 2.0**exponent - 1) * 8)
        other = rng.integers(0, 143, 3)
        pairs = run(
            getattr(decoders, scales),
            [byte | sum(int(o) << 8 * (i + 1) for i, o in enumerate(other))],
        )
        assert pairs[0] & 0xFFFF == pairs[0] >> 16
        low, high = rng.permutation(16)[:4], np.arange(index, index + 4) % 16
        word = e2m1_word(list(map(int, low))) | e2m1_word(list(map(int, high))) << 16
        # Each of the four with the same scale; a pair of 16 bits comes in two registers.
        values = run(getattr(decoders, codes), [word, *[pairs[0]] * 8])
        for part in range(4):
            expected = nvfp4.CODE_VALUES[[low[part], high[part]]] * scale * decoders.DECODED_SCALE
            np.testing.assert_array_equal(halves(values[part], kind), expected)


def test_each_scale_of_a_word_meets_its_block():
    for steps, shift, offset in (
        (decoders._NVFP4_SCALES, 4, 0x7680),
        (decoders._NVFP4_HALF_SCALES, 7, 0x3400),
        (decoders._MXFP4_SCALES, 7, 0),
    ):
        pairs = run(steps, [0x3C2B1A09])
        for pair, byte in zip(pairs, (0x09, 0x1A, 0x2B, 0x3C), strict=True):
            assert pair == (byte << shift) + offset << 16 | (byte << shift) + offset
    word = e2m1_word([2, 2, 2, 2])  # ones
    values = run(decoders._BFLOAT16_CODES, [word, 0x3F80, 9, 0x4000, 9, 0x4080, 9, 0x4100, 9])
    sizes = [halves(v, ml_dtypes.bfloat16)[0] for v in values]
    np.testing.assert_array_equal(sizes, np.array([1, 2, 4, 8]) * 2.0**-126)


@pytest.mark.parametrize("exponent", [1, 126, 127, 254])
def test_assembly_scales_mxfp4_by_powers_of_two(exponent):
    pair = run(decoders._MXFP4_SCALES, [exponent])[0]
    for code in range(16):
        value = run(decoders._BFLOAT16_CODES, [e2m1_word([code] * 4), *[pair] * 8])[0]
        expected = nvfp4.CODE_VALUES[code] * 2.0 ** (exponent - 253)
        if abs(expected) >= 2.0**-126 or not expected:
            assert halves(value, ml_dtypes.bfloat16)[0] == expected


@pytest.mark.parametrize(
    ("lookup", "kind"),
    [("_BFLOAT16_LOOKUP", ml_dtypes.bfloat16), ("_FLOAT16_LOOKUP", np.float16)],
)
def test_assembly_looks_every_code_of_nf4_up(lookup, kind):
    table = nf4.CODE_VALUES.astype(kind).astype(float)
    for first in range(16):
        low = [(first + 5 * i) % 16 for i in range(4)]
        high = [(first + 3 * i + 7) % 16 for i in range(4)]
        word = sum(c << 4 * i for i, c in enumerate(low + high))
        values = run(getattr(decoders, lookup), [word])
        for part in range(4):
            np.testing.assert_array_equal(
                halves(values[part], kind), table[[low[part], high[part]]]
            )
