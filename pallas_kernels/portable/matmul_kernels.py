"""The Triton kernels of products with packed weights. `matmul.py` launches them; `layout.py` describes the weight.

A tile of rows of W is the left operand of the tensor cores, and x^T is the right operand. So a product with one row
of x wastes seven columns of an instruction, instead of fifteen rows. And a weight goes from shared memory through the
decoder into the registers that the instruction reads, without being written back.
"""

import triton
import triton.language as tl

from pallas_kernels.portable import decoders


@triton.jit
def _decoded(words, scales, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Decodes words int16 [R, 16] and scales [R] of a chunk to its four blocks, [R, 16] of dtype COMPUTE each.

    NF4 values are not multiplied by their scales, which do not fit into 16 bits.
    """
    if FORMAT == "nf4":
        return decoders.nf4_values(words, COMPUTE, ASSEMBLY)
    s0, s1, s2, s3 = decoders.scale_pairs(scales, FORMAT, COMPUTE, ASSEMBLY)
    s0 = tl.broadcast_to(s0[:, None], words.shape)
    s1 = tl.broadcast_to(s1[:, None], words.shape)
    s2 = tl.broadcast_to(s2[:, None], words.shape)
    s3 = tl.broadcast_to(s3[:, None], words.shape)
    return decoders.scaled_values(words, s0, s1, s2, s3, COMPUTE, ASSEMBLY)


@triton.jit
def _of_x(pointers, chunk, part: tl.constexpr, K: tl.constexpr, COMPUTE: tl.constexpr):
    """Loads block `part` of a chunk of x^T, [16, BLOCK_M] of dtype COMPUTE. Rows from K on are zeros."""
    at = pointers + (chunk * 64 + 16 * part)
    if K % 64 == 0:
        return tl.load(at).to(COMPUTE)
    column = chunk * 64 + 16 * part + tl.arange(0, 16)
    return tl.load(at, mask=(column < K)[:, None], other=0.0).to(COMPUTE)


@triton.jit
def _dense_sums(
    matrix,
    x,
    begin,
    end,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Sums matrix [ROWS, K] times x^T over the chunks begin ... end - 1: float32 [ROWS, BLOCK_M]."""
    sums = tl.zeros((ROWS, BLOCK_M), tl.float32)
    for chunk in tl.range(begin, end, num_stages=STAGES):
        for part in tl.static_range(4):
            first = chunk * 64 + 16 * part
            if K % 64 == 0:
                values = tl.load(matrix + first)
            else:
                real = (first + tl.arange(0, 16) < K)[None, :]
                values = tl.load(matrix + first, mask=real, other=0.0)
            sums = tl.dot(values.to(COMPUTE), _of_x(x, chunk, part, K, COMPUTE), sums)
    return sums


@triton.jit
def product(
    layer,
    x,
    words,
    scales,
    a,
    partials,
    down,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    UNITS: tl.constexpr,
    SPLIT: tl.constexpr,
    RANK_SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Computes partial sums over K: of x W^T in `partials`, and of x A^T in `down`.

    The grid is (i, j); j is a block of x's rows. The first RANKS / BLOCK_R * RANK_SPLIT programs i process A, the
    others W. A program for W sums one of SPLIT ranges of chunks for BLOCK_N rows of W. Each value is written by only
    one program, so results do not depend on the order of programs.

    Arrays and constants:
      layer: int32 [1], index into every axis L.
      x: [M, K].
      words: int16 [L, ceil(K / 64), N, 16].
      scales: int32 [L, ceil(K / 64), N], four bytes each; float32 for NF4.
      a: [L, RANKS, K], in x's dtype.
      partials: float32 [SPLIT, M, N].
      down: float32 [RANK_SPLIT, M, RANKS].
      N: padded rows of W, a multiple of BLOCK_N.
      UNITS: chunks in one iteration of the loop.
    """
    chunks: tl.constexpr = (K + 63) // 64
    rank_programs: tl.constexpr = RANKS // BLOCK_R * RANK_SPLIT
    index = tl.load(layer).to(tl.int64)
    program = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows beyond M read the last row of x, and their sums are not written.
    pointers = x + tl.minimum(row, M - 1)[None, :] * K + tl.arange(0, 16)[:, None]
    if RANKS > 0:
        if program < rank_programs:
            tile = program % (RANKS // BLOCK_R)
            part = program // (RANKS // BLOCK_R)
            rank = tile * BLOCK_R + tl.arange(0, BLOCK_R)
            of_a = a + index * (RANKS * K) + rank[:, None] * K + tl.arange(0, 16)[None, :]
            begin = part * chunks // RANK_SPLIT
            end = (part + 1) * chunks // RANK_SPLIT
            low = _dense_sums(of_a, pointers, begin, end, K, BLOCK_R, BLOCK_M, STAGES, COMPUTE)
            to_low = down + part * (M * RANKS) + row[None, :] * RANKS + rank[:, None]
            tl.store(to_low, low, mask=(row < M)[None, :])
            return
    tile = (program - rank_programs) % (N // BLOCK_N)
    part = (program - rank_programs) // (N // BLOCK_N)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    of_words = words + index * (chunks * N * 16) + n[:, None] * 16 + tl.arange(0, 16)[None, :]
    of_scales = scales + index * (chunks * N) + n
    rounds: tl.constexpr = chunks // UNITS
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = part * rounds // SPLIT
    # With num_stages on the loop, Triton prefetches all loads; without it, only those that `tl.dot` reads directly.
    for turn in tl.range(first, (part + 1) * rounds // SPLIT, num_stages=STAGES):
        for unit in tl.static_range(UNITS):
            chunk = turn * UNITS + unit
            scale = tl.load(of_scales + chunk * N)
            word = tl.load(of_words + chunk * (N * 16))
            w0, w1, w2, w3 = _decoded(word, scale, FORMAT, COMPUTE, ASSEMBLY)
            if FORMAT == "nf4":
                one = tl.dot(w0, _of_x(pointers, chunk, 0, K, COMPUTE))
                one = tl.dot(w1, _of_x(pointers, chunk, 1, K, COMPUTE), one)
                one = tl.dot(w2, _of_x(pointers, chunk, 2, K, COMPUTE), one)
                one = tl.dot(w3, _of_x(pointers, chunk, 3, K, COMPUTE), one)
                sums += one * scale[:, None]
            else:
                sums = tl.dot(w0, _of_x(pointers, chunk, 0, K, COMPUTE), sums)
                sums = tl.dot(w1, _of_x(pointers, chunk, 1, K, COMPUTE), sums)
                sums = tl.dot(w2, _of_x(pointers, chunk, 2, K, COMPUTE), sums)
                sums = tl.dot(w3, _of_x(pointers, chunk, 3, K, COMPUTE), sums)
    to = partials + part * (M * N) + row[None, :] * N + n[:, None]
    tl.store(to, sums, mask=(row < M)[None, :])


@triton.jit
def unpack(
    words,
    scales,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Decodes a weight to [N, K] of dtype COMPUTE: the weights times `layout.PortableWeight.global_scale`.

    Arrays and constants:
      words: int16 [ceil(K / 64), ROWS, 16]; ROWS is at least N and a multiple of BLOCK_N.
      scales: int32 or float32 [ceil(K / 64), ROWS].
      out: [N, K].
    """
    chunk = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, 16)
    scale = tl.load(scales + chunk * ROWS + n)
    word = tl.load(words + chunk * (ROWS * 16) + n[:, None] * 16 + j[None, :])
    w0, w1, w2, w3 = _decoded(word, scale, FORMAT, COMPUTE, ASSEMBLY)
    if FORMAT == "nf4":
        w0 = (w0.to(tl.float32) * scale[:, None]).to(COMPUTE)
        w1 = (w1.to(tl.float32) * scale[:, None]).to(COMPUTE)
        w2 = (w2.to(tl.float32) * scale[:, None]).to(COMPUTE)
        w3 = (w3.to(tl.float32) * scale[:, None]).to(COMPUTE)
    column = chunk * 64 + j
    to = out + n.to(tl.int64)[:, None] * K + column[None, :]
    real = (n < N)[:, None] & (column < K)[None, :]
    tl.store(to, w0, mask=real)
    tl.store(to + 16, w1, mask=real & (column + 16 < K)[None, :])
    tl.store(to + 32, w2, mask=real & (column + 32 < K)[None, :])
    tl.store(to + 48, w3, mask=real & (column + 48 < K)[None, :])
