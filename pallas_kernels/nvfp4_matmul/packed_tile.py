"""Decodes one 64 x 64 tile of packed weights from shared memory to registers, in the layout that `wgmma` reads.

The four bits of a code become the sign, the two lowest exponent bits and the highest mantissa bit of a bfloat16. Its
value is the code's value times 2^-126 (0.5 becomes a subnormal). A scale byte becomes the bfloat16 scale * 2^106. One
multiplication per pair of weights then gives code * scale * 2^-20. This is exact in bfloat16: the factors have 2 and
4 significant bits, the product at most 6.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.formats import nvfp4
from pallas_kernels.mosaic import registers
from pallas_kernels.mosaic.registers import elements, fragment, i32, vectors
from pallas_kernels.nvfp4_matmul import layout

# Converts two words of codes ($8, $9) with their scales ($10, $11; each half is for one row) to eight pairs of
# bfloat16 ($0 to $7). u is the third word of `layout`, which holds the fourth codes of both words.
_DECODE_WORDS = f"""{{
.reg .b32 even, odd, u, low, high;
.reg .b16 s, z;
mov.b32 even, $8;
mov.b32 odd, $9;
shl.b32 u, odd, {layout.ODD_SHIFT};
lop3.b32 u, even, {hex(layout.EVEN_BITS)}, u, 0xE2;
mov.b32 {{s, z}}, $10;
mov.b32 low, {{s, s}};
mov.b32 high, {{z, z}};
and.b32 $0, even, 0x81C081C0;
shf.r.wrap.b32 $1, even, even, 4;
and.b32 $1, $1, 0x81C081C0;
shl.b32 $2, even, 6;
and.b32 $2, $2, 0x81C081C0;
shf.r.wrap.b32 $3, u, u, 6;
and.b32 $3, $3, 0x81C081C0;
mul.rn.bf16x2 $0, $0, low;
mul.rn.bf16x2 $1, $1, high;
mul.rn.bf16x2 $2, $2, low;
mul.rn.bf16x2 $3, $3, high;
mov.b32 {{s, z}}, $11;
mov.b32 low, {{s, s}};
mov.b32 high, {{z, z}};
and.b32 $4, odd, 0x81C081C0;
shf.r.wrap.b32 $5, odd, odd, 6;
and.b32 $5, $5, 0x81C081C0;
shl.b32 $6, odd, 4;
and.b32 $6, $6, 0x81C081C0;
shl.b32 $7, u, 4;
and.b32 $7, $7, 0x81C081C0;
mul.rn.bf16x2 $4, $4, low;
mul.rn.bf16x2 $5, $5, high;
mul.rn.bf16x2 $6, $6, low;
mul.rn.bf16x2 $7, $7, high;
}}"""
# Converts a word of scales ($2) to pairs of bfloat16 for both words of codes ($0, $1). The constant upper bits start
# the exponent fields at 0xE0.
_DECODE_SCALES = """{
.reg .b32 u, upper;
mov.b32 upper, 0x70007000;
lop3.b32 $0, $2, 0x0FF00FF0, upper, 0xEA;
shf.r.wrap.b32 u, $2, $2, 8;
lop3.b32 $1, u, 0x0FF00FF0, upper, 0xEA;
}"""
_CODES = plgpu.ShapeDtypeStruct((64, 8), jnp.int32, layout=plgpu.Layout.WGMMA)
_SCALES = plgpu.ShapeDtypeStruct((64,), jnp.int32, layout=plgpu.Layout.WGMMA.reduce(1))
_DECODED = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=plgpu.Layout.WGMMA)


def load(tile: jax.Ref) -> tuple[jax.Array, jax.Array]:
    """Loads a tile, int32 [3, 192] in shared memory, to a warpgroup's registers, for `convert`.

    Returns:
      Codes int32 [64, 8] and scales int32 [64]. Each thread has the words that it needs; the order of the elements
      has no other meaning.
    """
    arg_types, return_type = (plgpu.RefType(),), (_CODES, _SCALES)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)(_emit_load)(tile)


def convert(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Converts the result of `load` to bfloat16 [64, 64] in registers: code * scale * 2^-20."""
    arg_types = (_CODES.layout, _SCALES.layout)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=_DECODED)(_emit_convert)(
        codes, scales
    )


def load_plain(*pieces: jax.Ref) -> jax.Array:
    """Loads a tile of `dense_tile` to registers: four int32 refs [3, 192], or two -> bfloat16 [64, 64]."""
    arg_types = (plgpu.RefType(),) * len(pieces)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=_DECODED)(_emit_load_plain)(*pieces)


def decode(tile: jax.Ref) -> jax.Array:
    """Decodes a tile, int32 [3, 192] in shared memory, to bfloat16 [64, 64] in registers: code * scale * 2^-20."""
    return convert(*load(tile))


def decode_words(words: jax.Array) -> jax.Array:
    """Computes the same as `decode` without bit tricks: int32 [3, 192] -> bfloat16 [64, 64].

    Interpreted kernels use it, because XLA on a CPU flushes the subnormals that `decode` needs. It is also an oracle
    for tests.
    """
    codes, scale_bytes = (a.astype(jnp.int32) for a in layout.unpack_tiles(words[None, None]))
    half_steps = codes & 7  # codes 0 and 1 are halves (0 and 0.5); the others are normal floats
    magnitudes = jnp.where(
        half_steps < 2, half_steps / 2, _ldexp(2 + (codes & 1), (codes >> 1 & 3) - 2)
    )
    scales = _ldexp(8 + (scale_bytes & 7), (scale_bytes >> 3) - 12)
    values = jnp.where(codes & 8, -magnitudes, magnitudes)
    scales = jnp.repeat(scales * layout.DECODED_SCALE, nvfp4.BLOCK, axis=-1)
    return (values * scales).astype(jnp.bfloat16)


def _ldexp(mantissa: jax.Array, exponent: jax.Array) -> jax.Array:
    return mantissa * jnp.exp2(exponent.astype(jnp.float32))


def _emit_load(_, tile: ir.Value) -> tuple:
    base, thread = registers.pointer(tile), registers.thread()
    codes = registers.load_words(base, _affine(thread, 4), 4)
    row = arith.divui(thread, i32(4))
    scales = registers.load_words(base, _affine(row, 2, layout.CODE_WORDS), 2)
    codes, scales = vectors(elements(codes), 2), vectors(elements(scales), 1)
    return fragment(_CODES, codes), fragment(_SCALES, scales)


def _emit_convert(_, codes, scales):
    words = [word for vector in codes.registers.flat for word in elements(vector)]
    pairs = []
    for half, vector in enumerate(scales.registers.flat):
        even, odd = words[2 * half : 2 * half + 2]
        scale_pairs = registers.assembly(_DECODE_SCALES, 2, elements(vector))
        pairs += registers.assembly(_DECODE_WORDS, 8, [even, odd, *scale_pairs])
    return fragment(_DECODED, [registers.as_pair(pair) for pair in pairs])


def _emit_load_plain(_, *pieces: ir.Value):
    thread, of_columns = registers.thread(), layout.CODE_WORDS * len(pieces) // 4
    if len(pieces) < 4:
        # The threads of the rows that a low tile does not store read those that it stores.
        thread = arith.remui(thread, i32(of_columns // 4))
    words = []
    for columns in range(4):
        piece, at = divmod(columns * of_columns, layout.CODE_WORDS)
        first = _affine(thread, 4, at)
        words += elements(registers.load_words(registers.pointer(pieces[piece]), first, 4))
    return fragment(_DECODED, [registers.as_pair(word) for word in words])


def _affine(value: ir.Value, factor: int, offset: int = 0) -> ir.Value:
    return arith.addi(arith.muli(value, i32(factor)), i32(offset))
