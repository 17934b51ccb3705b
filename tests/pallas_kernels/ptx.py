"""Evaluates straight-line PTX on whole arrays, to test the decoders' assembly without a GPU."""

import re

import ml_dtypes
import numpy as np

BFLOAT16, FLOAT16 = ml_dtypes.bfloat16, np.float16


def halves(words, kind):
    """Returns the lower and the upper 16 bits of 32-bit words as numbers: float64 [..., 2]."""
    return np.asarray(words, np.uint32)[..., None].view(kind).astype(float)


def run(text, inputs):
    """Evaluates PTX with 32-bit inputs, by the numbers of their operands; returns all registers by name."""
    registers = {f"${i}": np.asarray(value, np.uint64) for i, value in inputs.items()}
    value = lambda name: registers[name] if name in registers else np.uint64(int(name, 0))
    for operation, rest in re.findall(r"^\s*([\w.]+) (.+);$", text, re.MULTILINE):
        if operation == ".reg":
            continue
        target, *sources = re.findall(r"\{[^}]*\}|[\w$]+", rest)
        if target.startswith("{"):
            low, high = re.findall(r"\w+", target)
            registers |= {low: value(sources[0]) & 0xFFFF, high: value(sources[0]) >> 16}
        elif sources[0].startswith("{"):
            low, high = map(value, re.findall(r"\w+", sources[0]))
            registers[target] = low | high << 16
        else:
            registers[target] = _OPERATIONS[operation](*map(value, sources)) & 0xFFFFFFFF
    return registers


def _product(kind):
    def multiply(a, b, *addend):
        # Only ever with -0, that is, as a product.
        assert all(c == 0x80008000 for c in addend)
        with np.errstate(over="ignore"):
            product = (halves(a, kind) * halves(b, kind)).astype(kind)
        return product.view(np.uint32)[..., 0].astype(np.uint64)

    return multiply


def _lop3(a, b, c, table):
    terms = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8)]
    return sum(term for i, term in enumerate(terms) if int(table) >> i & 1)


def _prmt(a, b, selector):
    result, pool = 0, a | b << 32
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = pool >> 8 * (nibble & 7) & 0xFF
        sign = (byte >> 7) * 0xFF
        result |= np.where(nibble & 8, sign, byte) << 8 * i
    return result


_OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "shr.u32": lambda a, b: a >> b,
    "shf.r.wrap.b32": lambda low, high, by: (low | high << 32) >> by,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.rn.f16x2": _product(FLOAT16),
    "mul.rn.bf16x2": _product(BFLOAT16),
    "fma.rn.bf16x2": _product(BFLOAT16),
}
