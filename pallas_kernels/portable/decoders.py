"""Decodes four 4-bit codes from a 16-bit word in Triton, by bit operations without a table in memory.

docs/design/kernels.md, "Decoding in Triton", says where the bits are and why the products are exact. Triton's
interpreter runs no assembly and has no bfloat16 arithmetic. For it every function has a second version (without
ASSEMBLY), which uses plain operations in float32.
"""

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

from pallas_kernels.formats import nf4

DECODED_SCALE = 2.0**-7

# The fourth code has its sign at bit 14, its higher exponent bit at 13 and the other two bits at 11 and 10.
_BFLOAT16_CODES = tl.constexpr("""{
    .reg .b32 t, u, z;
    mov.b32 z, 0x80008000;
    and.b32 $0, $4, 0x81C081C0;
    shl.b32 t, $4, 3;
    and.b32 $1, t, 0x81C081C0;
    shl.b32 t, $4, 6;
    and.b32 $2, t, 0x81C081C0;
    shr.b32 t, $4, 5;
    shr.b32 u, $4, 4;
    and.b32 t, t, 0x01000100;
    lop3.b32 t, t, u, 0x00C000C0, 0xF8;
    shl.b32 u, $4, 1;
    lop3.b32 $3, t, u, 0x80008000, 0xF8;
    fma.rn.bf16x2 $0, $0, $5, z;
    fma.rn.bf16x2 $1, $1, $7, z;
    fma.rn.bf16x2 $2, $2, $9, z;
    fma.rn.bf16x2 $3, $3, $11, z;
}""")

# float16 uses the same words. Its exponent and mantissa bits are three places further to the left.
_FLOAT16_CODES = tl.constexpr("""{
    .reg .b32 t, u;
    and.b32 t, $4, 0x01C001C0;
    shl.b32 t, t, 3;
    lop3.b32 $0, t, $4, 0x80008000, 0xF8;
    shl.b32 u, $4, 3;
    and.b32 t, u, 0x01C001C0;
    shl.b32 t, t, 3;
    lop3.b32 $1, t, u, 0x80008000, 0xF8;
    shl.b32 u, $4, 6;
    and.b32 t, u, 0x01C001C0;
    shl.b32 t, t, 3;
    lop3.b32 $2, t, u, 0x80008000, 0xF8;
    shr.b32 t, $4, 2;
    shr.b32 u, $4, 1;
    and.b32 t, t, 0x08000800;
    lop3.b32 t, t, u, 0x06000600, 0xF8;
    shl.b32 u, $4, 1;
    lop3.b32 $3, t, u, 0x80008000, 0xF8;
    mul.rn.f16x2 $0, $0, $5;
    mul.rn.f16x2 $1, $1, $7;
    mul.rn.f16x2 $2, $2, $9;
    mul.rn.f16x2 $3, $3, $11;
}""")
_FLOAT16, _BFLOAT16 = tl.constexpr((tl.float16,) * 4), tl.constexpr((tl.bfloat16,) * 4)
_FOUR_BY_FOUR = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r")
_FOUR_BY_ONE = tl.constexpr("=&r,=&r,=&r,=&r,r")


def _spread(shift: int, offset: int) -> tl.constexpr:
    """Writes assembly that turns each byte of a word into a pair of equal 16-bit values, (byte << shift) + offset."""
    steps = (
        f"prmt.b32 t, $4, 0, 0x4{i}4{i};\n mad.lo.u32 ${i}, t, {1 << shift}, {offset * 0x10001:#x};"
        for i in range(4)
    )
    return tl.constexpr("{\n .reg .b32 t;\n " + "\n ".join(steps) + "\n}")


# Shift and offset that turn a scale's byte into 16 bits: for NVFP4 scale * 2^119 in bfloat16 or scale * 2^7 in
# float16 ("nvfp4_half"), for MXFP4 the relative scale in bfloat16 (see `layout.py`).
_SCALE_SHIFTS = {"nvfp4": (4, 0x7680), "nvfp4_half": (7, 0x3400), "mxfp4": (7, 0)}
_NVFP4_SCALES = _spread(*_SCALE_SHIFTS["nvfp4"])
_NVFP4_HALF_SCALES = _spread(*_SCALE_SHIFTS["nvfp4_half"])
_MXFP4_SCALES = _spread(*_SCALE_SHIFTS["mxfp4"])


def _lookup(values: list[int]) -> tl.constexpr:
    """Writes assembly that looks up the four 4-bit codes in each half of a word, in a table of 16 16-bit values."""
    table = lambda byte, first: [
        sum((values[first + 4 * half + i] >> 8 * byte & 0xFF) << 8 * i for i in range(4))
        for half in range(2)
    ]
    lines = ["and.b32 s0, $4, 0x77777777;", "shr.u32 s1, s0, 16;", "shl.b32 t, $4, 4;"]
    # The highest bits of codes 0 and 2 are the top bits of t's bytes, those of codes 1 and 3 of the word's bytes.
    lines += ["prmt.b32 m0, $4, t, 0x9D8C;", "prmt.b32 m1, $4, t, 0xBFAE;"]
    for lane in range(2):
        for byte, name in enumerate(("l", "h")):
            (a, b), (c, d) = table(byte, 0), table(byte, 8)
            for target, low, high in (("p", a, b), ("q", c, d)):
                lines += [f"mov.b32 x, {low:#x};", f"mov.b32 y, {high:#x};"]
                lines += [f"prmt.b32 {target}, x, y, s{lane};"]
            lines += [f"lop3.b32 {name}{lane}, m{lane}, q, p, 0xCA;"]
        lines += [f"prmt.b32 v{lane}, l{lane}, h{lane}, 0x5140;"]
        lines += [f"prmt.b32 w{lane}, l{lane}, h{lane}, 0x7362;"]
    lines += ["prmt.b32 $0, v0, v1, 0x5410;", "prmt.b32 $1, v0, v1, 0x7632;"]
    lines += ["prmt.b32 $2, w0, w1, 0x5410;", "prmt.b32 $3, w0, w1, 0x7632;"]
    names = "s0, s1, t, m0, m1, x, y, p, q, l0, l1, h0, h1, v0, v1, w0, w1"
    return tl.constexpr("{\n .reg .b32 " + names + ";\n " + "\n ".join(lines) + "\n}")


_bits_in = lambda dtype: nf4.CODE_VALUES.astype(dtype).view(np.uint16).tolist()
_BFLOAT16_LOOKUP = _lookup(_bits_in(ml_dtypes.bfloat16))
_FLOAT16_LOOKUP = _lookup(_bits_in(np.float16))
_NF4_VALUES = tl.constexpr(nf4.CODE_VALUES.astype(ml_dtypes.bfloat16).astype(float).tolist())


@triton.jit
def scale_pairs(words, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Decodes the four scales of each int32 word to four tensors.

    With ASSEMBLY they are int32, a pair of equal 16-bit values each; without it they are float32.
    """
    if ASSEMBLY:
        if FORMAT == "mxfp4":
            steps: tl.constexpr = _MXFP4_SCALES
        elif COMPUTE == tl.float16:
            steps: tl.constexpr = _NVFP4_HALF_SCALES
        else:
            steps: tl.constexpr = _NVFP4_SCALES
        s0, s1, s2, s3 = tl.inline_asm_elementwise(
            steps,
            _FOUR_BY_ONE,
            [words],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        s0 = _scale(words, 0, FORMAT)
        s1 = _scale(words, 8, FORMAT)
        s2 = _scale(words, 16, FORMAT)
        s3 = _scale(words, 24, FORMAT)
    return s0, s1, s2, s3


@triton.jit
def scaled_values(words, s0, s1, s2, s3, COMPUTE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Decodes words of E2M1 codes to four tensors of dtype COMPUTE, the weights times `global_scale`.

    For NVFP4 this is code * scale * `DECODED_SCALE`. s0 to s3 are the scales from `scale_pairs`.
    """
    if ASSEMBLY:
        v0, v1, v2, v3 = tl.inline_asm_elementwise(
            _FLOAT16_CODES if COMPUTE == tl.float16 else _BFLOAT16_CODES,
            _FOUR_BY_FOUR,
            [words, s0, s1, s2, s3],
            dtype=_FLOAT16 if COMPUTE == tl.float16 else _BFLOAT16,
            is_pure=True,
            pack=2,
        )
    else:
        bits = words.to(tl.int32)
        v0 = _e2m1(bits) * s0
        v1 = _e2m1(bits << 3) * s1
        v2 = _e2m1(bits << 6) * s2
        v3 = _e2m1((bits << 1 & 0x8000) | (bits >> 5 & 0x0100) | (bits >> 4 & 0x00C0)) * s3
    return v0.to(COMPUTE), v1.to(COMPUTE), v2.to(COMPUTE), v3.to(COMPUTE)


@triton.jit
def nf4_values(words, COMPUTE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Decodes words of NF4 codes to four tensors of table entries, rounded to COMPUTE and not scaled."""
    if ASSEMBLY:
        v0, v1, v2, v3 = tl.inline_asm_elementwise(
            _FLOAT16_LOOKUP if COMPUTE == tl.float16 else _BFLOAT16_LOOKUP,
            _FOUR_BY_ONE,
            [words],
            dtype=_FLOAT16 if COMPUTE == tl.float16 else _BFLOAT16,
            is_pure=True,
            pack=2,
        )
    else:
        bits = words.to(tl.int32)
        v0 = _nf4(bits)
        v1 = _nf4(bits >> 4)
        v2 = _nf4(bits >> 8)
        v3 = _nf4(bits >> 12)
    return v0.to(COMPUTE), v1.to(COMPUTE), v2.to(COMPUTE), v3.to(COMPUTE)


@triton.jit
def _scale(words, shift: tl.constexpr, FORMAT: tl.constexpr):
    """Decodes the scale in one byte to float32: NVFP4's scale * DECODED_SCALE, or MXFP4's relative scale * 2^-126.

    The scales of the bfloat16 assembly are 2^126 times as large, because its codes have the factor 2^-126. Here codes
    are not subnormal, because the interpreter treats float32 subnormals as zeros.
    """
    byte = words >> shift & 0xFF
    if FORMAT == "mxfp4":
        bits = tl.maximum(byte - 126, 0) << 7
    else:
        bits = (byte << 4) + 0x3780
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(bits):
    """Returns the value of an E2M1 code at bits 15, 8, 7 and 6, in float32."""
    exponent = bits >> 7 & 3
    mantissa = (bits >> 6 & 1).to(tl.float32) * 0.5
    power = (1 << exponent).to(tl.float32) * 0.5
    value = tl.where(exponent == 0, mantissa, (1 + mantissa) * power)
    return tl.where((bits & 0x8000) == 0, value, -value)


@triton.jit
def _nf4(bits):
    values = tl.zeros(bits.shape, tl.float32)
    for code in tl.static_range(16):
        values = tl.where((bits & 15) == code, _NF4_VALUES[code], values)
    return values
