"""One 64 x 64 tile of packed weights, from shared memory to registers as `wgmma` reads them.

A code becomes a bfloat16 by putting its four bits at the sign, the two lowest exponent bits and the
highest mantissa bit: its value times 2^-126 (0.5 is a subnormal there). A scale byte becomes the
bfloat16 scale * 2^119. One multiplication per pair of weights gives code * scale * 2^-7, exact in
bfloat16: 2 and 4 significant bits make 6.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels import nvfp4
from pallas_kernels.nvfp4_matmul import layout

llvm = mgpu.utils.llvm  # which jax.extend.mlir leaves out

# Eight codes ($4) and the scales of two rows ($5, one in each half) to four pairs of bfloat16. The
# first three fields are lifted by a shift and a mask, the fourth takes three of each.
_DECODE_WORD = """{
.reg .b32 a, b, c, d, u, low, high;
.reg .b16 s, z;
mov.b32 {s, z}, $5;
mov.b32 low, {s, s};
mov.b32 high, {z, z};
and.b32 a, $4, 0x81C081C0;
shl.b32 b, $4, 3;
and.b32 b, b, 0x81C081C0;
shl.b32 c, $4, 6;
and.b32 c, c, 0x81C081C0;
shl.b32 d, $4, 1;
and.b32 d, d, 0x80008000;
shr.b32 u, $4, 5;
lop3.b32 d, u, 0x01000100, d, 0xEA;
shr.b32 u, $4, 4;
lop3.b32 d, u, 0x00C000C0, d, 0xEA;
mul.rn.bf16x2 $0, a, low;
mul.rn.bf16x2 $1, b, high;
mul.rn.bf16x2 $2, c, low;
mul.rn.bf16x2 $3, d, high;
}"""
# Bytes 0 and 1, or 2 and 3, of a word of scales each in a half of its own, times 16 to bring their
# exponent to bit 7, plus 110 << 7, which makes their exponent field 0 stand for 2^110.
_DECODE_SCALES = """{{
.reg .b32 u;
prmt.b32 u, $1, 0, {selector};
mad.lo.u32 $0, u, 16, 0x76807680;
}}"""
_SELECTORS = ("0x4140", "0x4342")


def decode(tile: jax.Ref) -> jax.Array:
    """Decodes a tile for a warpgroup: int32 ref [3, 192] in shared memory -> bfloat16 [64, 64].

    The values are code * scale * 2^-7.
    """
    result = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)(_emit)(tile)


def decode_words(words: jax.Array) -> jax.Array:
    """Twin of `decode` without bit tricks: int32 [3, 192] -> bfloat16 [64, 64].

    For interpret mode, and an oracle: XLA on a CPU flushes the subnormals that `decode` relies on.
    """
    codes, scale_bytes = (a.astype(jnp.int32) for a in layout.unpack_tiles(words[None, None]))
    half_steps = codes & 7  # counts halves up to 2 (the value 1), then grows as a float does
    magnitudes = jnp.where(
        half_steps < 2, half_steps / 2, _ldexp(2 + (codes & 1), (codes >> 1 & 3) - 2)
    )
    scales = _ldexp(8 + (scale_bytes & 7), (scale_bytes >> 3) - 12)
    scales = jnp.where(scale_bytes == 255, 0, scales * layout.DECODED_SCALE)
    values = jnp.where(codes & 8, -magnitudes, magnitudes)
    return (values * jnp.repeat(scales, nvfp4.BLOCK, axis=-1)).astype(jnp.bfloat16)


def _ldexp(mantissa: jax.Array, exponent: jax.Array) -> jax.Array:
    return mantissa * jnp.exp2(exponent.astype(jnp.float32))


def _emit(_: mgpu.LaunchContext, tile: ir.Value) -> mgpu.FragmentedArray:
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    four = llvm.StructType.get_literal([i32] * 4)
    base = mgpu.utils.memref_ptr(tile)

    def load(word: ir.Value, width: int) -> list[ir.Value]:
        address = mgpu.utils.getelementptr(base, [word], i32)
        vector = llvm.load(ir.VectorType.get((width,), i32), address, alignment=4 * width)
        return [
            llvm.extractelement(vector, arith.constant(i32, ir.IntegerAttr.get(i32, i)))
            for i in range(width)
        ]

    def times(value: ir.Value, factor: int, offset: int = 0) -> ir.Value:
        return arith.addi(arith.muli(value, mgpu.c(factor, i32)), mgpu.c(offset, i32))

    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, i32))
    codes = load(times(thread, 4), 4)
    scales = load(times(arith.divui(thread, mgpu.c(4, i32)), 2, layout.CODE_WORDS), 2)

    registers = np.empty((8, 2), dtype=object)
    for step in range(4):
        selector = _SELECTORS[step % 2]
        scale_pair = llvm.inline_asm(
            i32, [scales[step // 2]], _DECODE_SCALES.format(selector=selector), "=r,r"
        )
        decoded = llvm.inline_asm(four, [codes[step], scale_pair], _DECODE_WORD, "=r,=r,=r,=r,r,r")
        for field in range(4):
            value = llvm.extractvalue(i32, decoded, [field])
            registers[2 * step + field // 2, field % 2] = llvm.bitcast(pair, value)

    wgmma_layout = plgpu.Layout.WGMMA.to_mgpu()
    return mgpu.FragmentedArray(
        _registers=registers.reshape(wgmma_layout.registers_shape((64, 64))),
        _layout=wgmma_layout,
        _is_signed=None,
    )
