"""From four 4-bit codes in 16 bits to four values, in Triton: by bit operations, without a table in memory.

A word is int16. For NVFP4 and MXFP4 the bits of its four codes (sign, two of the exponent, one of the
mantissa) lie where shifts to the left by 0, 3 and 6 bring the first three codes to the sign, the lowest
two exponent bits and the highest mantissa bit of a bfloat16 (15, 8, 7, 6); the bits that are left are the
fourth code's. So three codes cost a shift and a mask, and E2M1's subnormal 0.5 is one of bfloat16 too:
what comes out is code * 2^-126 (float16: the places are 15, 11, 10, 9, and it is code * 2^-14). One
multiplication by the scale times 2^119 (float16: 2^7) makes of it code * scale * 2^-7, exactly. The 2^-7
is `DECODED_SCALE`, which a product multiplies back in float32.

NF4's values follow no rule. `prmt` looks bytes up in registers, eight at a time: two look-ups for the low
bytes of 16 values, two for the high ones, and a choice by the code's highest bit.

Every function has a twin in plain operations for Triton's interpreter, which knows no assembly and no
arithmetic in bfloat16: it computes in float32.
"""

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

from pallas_kernels.formats import nf4

DECODED_SCALE = 2.0**-7

# Fourth code: bit 14 is the sign, 13 the exponent's higher bit, 11 and 10 the rest.
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

# The same places of a word serve float16: three bits more to the left.
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
_FOUR_BY_FOUR = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r")
_FOUR_BY_ONE = tl.constexpr("=&r,=&r,=&r,=&r,r")


def _spread(shift: int, offset: int) -> tl.constexpr:
    """Assembly that makes of each byte of a word a pair of equal 16-bit values, byte << shift, plus offset."""
    steps = (
        f"prmt.b32 t, $4, 0, 0x4{i}4{i};\n mad.lo.u32 ${i}, t, {1 << shift}, {offset * 0x10001:#x};"
        for i in range(4)
    )
    return tl.constexpr("{\n .reg .b32 t;\n " + "\n ".join(steps) + "\n}")


# Of scales times 2^119 or 2^7: NVFP4's in bfloat16, NVFP4's in float16, MXFP4's in bfloat16.
_SCALE_SHIFTS = {"nvfp4": (4, 0x7680), "nvfp4_half": (7, 0x3400), "mxfp4": (7, 0)}
_NVFP4_SCALES = _spread(*_SCALE_SHIFTS["nvfp4"])
_NVFP4_HALF_SCALES = _spread(*_SCALE_SHIFTS["nvfp4_half"])
_MXFP4_SCALES = _spread(*_SCALE_SHIFTS["mxfp4"])


def _lookup(values: list[int]) -> tl.constexpr:
    """Assembly that looks four 4-bit codes in each half of a word up among 16 values of 16 bits."""
    table = lambda byte, first: [
        sum((values[first + 4 * half + i] >> 8 * byte & 0xFF) << 8 * i for i in range(4))
        for half in range(2)
    ]
    lines = ["and.b32 s0, $4, 0x77777777;", "shr.u32 s1, s0, 16;", "shl.b32 t, $4, 4;"]
    # The highest bits of codes 0 and 2 are those of bytes of t, of codes 1 and 3 those of bytes of the word.
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
    """Four scales of each int32 word, as pairs of 16 bits that lie in an int32; or each in float32 (the twin)."""
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
    """E2M1 codes times the scales of `scale_pairs`, times `DECODED_SCALE`: four tensors of COMPUTE."""
    if ASSEMBLY:
        if COMPUTE == tl.float16:
            v0, v1, v2, v3 = tl.inline_asm_elementwise(
                _FLOAT16_CODES,
                _FOUR_BY_FOUR,
                [words, s0, s1, s2, s3],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            v0, v1, v2, v3 = tl.inline_asm_elementwise(
                _BFLOAT16_CODES,
                _FOUR_BY_FOUR,
                [words, s0, s1, s2, s3],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
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
    """Table entries of NF4 codes, rounded to COMPUTE, without a scale: four tensors."""
    if ASSEMBLY:
        if COMPUTE == tl.float16:
            v0, v1, v2, v3 = tl.inline_asm_elementwise(
                _FLOAT16_LOOKUP,
                _FOUR_BY_ONE,
                [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            v0, v1, v2, v3 = tl.inline_asm_elementwise(
                _BFLOAT16_LOOKUP,
                _FOUR_BY_ONE,
                [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
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
def _scale(words, place: tl.constexpr, FORMAT: tl.constexpr):
    """Scale * DECODED_SCALE. That and not more: the interpreter takes float32's subnormals for zeros."""
    byte = words >> place & 0xFF
    if FORMAT == "mxfp4":
        bits = tl.maximum(byte - 126, 0) << 7
    else:
        bits = (byte << 4) + 0x3780
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(bits):
    """The value of a code at bits 15, 8, 7 and 6."""
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
