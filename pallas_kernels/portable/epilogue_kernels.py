"""The Triton kernel of the operations after a product in a decoding step; `epilogue.py` defines and launches it."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, ASSEMBLY: tl.constexpr):
    """Rounds float32 x to bfloat16, to nearest, ties to even; returns float32."""
    if ASSEMBLY:
        return x.to(tl.bfloat16).to(tl.float32)
    # Triton's interpreter cannot round to bfloat16.
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _product(
    index,
    partials,
    multiplier,
    bias,
    b,
    down,
    unit,
    row,
    n,
    real,
    first_rank,
    M: tl.constexpr,
    N: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    RANK_SPLIT: tl.constexpr,
    PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_UNIT: tl.constexpr,
    COMPUTE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Computes ([sum of parts] * multiplier + [[x A] B]) * unit + bias for rows `row` and columns n, in float32."""
    at = partials + row[:, None] * STRIDE + n[None, :]
    known = (row < M)[:, None] & real[None, :]
    y = tl.load(at, mask=known, other=0.0)
    for part in tl.static_range(1, SPLIT):
        y += tl.load(at + part * (M * STRIDE), mask=known, other=0.0)
    if PER_ROW:
        scale = tl.load(multiplier + index * N + n, mask=real, other=0.0)[None, :]
    else:
        scale = tl.load(multiplier + index)
    y = rounded(y, ASSEMBLY) * scale
    if RANK > 0:
        rank = tl.arange(0, RANK)
        at_down = down + row[:, None] * RANKS + (first_rank + rank)[None, :]
        there = (row < M)[:, None]
        u = tl.load(at_down, mask=there, other=0.0)
        for part in tl.static_range(1, RANK_SPLIT):
            u += tl.load(at_down + part * (M * RANKS), mask=there, other=0.0)
        ups = b + index * (N * RANK) + n[None, :] * RANK + rank[:, None]
        up = tl.load(ups, mask=real[None, :], other=0.0)
        y += rounded(tl.dot(rounded(u, ASSEMBLY).to(COMPUTE), up.to(COMPUTE)), ASSEMBLY)
    if HAS_UNIT or COMPUTE == tl.float16:
        y *= unit[:, None]
    if HAS_BIAS:
        y += tl.load(bias + index * N + n, mask=real, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _unit(
    squares,
    back,
    row,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    TILES_FILLED: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_UNIT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Returns the factor of each row: 1 / RMS from the norm before, and what undoes the scaling of x for float16."""
    there = row < M
    unit = tl.full((BLOCK_M,), 1.0, tl.float32)
    if HAS_UNIT:
        square_tile = tl.arange(0, TILES_FILLED)
        known = (square_tile < TILES)[:, None] & there[None, :]
        sums = tl.load(squares + square_tile[:, None] * M + row[None, :], mask=known, other=0.0)
        unit = tl.rsqrt(tl.sum(sums, axis=0) / WIDTH + EPS)
    if COMPUTE == tl.float16:
        # These are powers of two, so values that were rounded before this factor keep their significant bits.
        unit *= tl.load(back + row, mask=there, other=0.0)
    return unit


@triton.jit
def _columns(
    tile,
    N: tl.constexpr,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
):
    """Returns the part of N that a tile belongs to, its columns, and which of them are in that part."""
    # The first tile of each part begins with the part's first column.
    tiles_0: tl.constexpr = (SIZE_0 + BLOCK_N - 1) // BLOCK_N
    tiles_1: tl.constexpr = (SIZE_1 + BLOCK_N - 1) // BLOCK_N
    part = (tile >= tiles_0).to(tl.int32)
    begin = tile * BLOCK_N
    end = SIZE_0
    if SIZE_0 < N and not IS_SWIGLU:
        is_third = tile >= tiles_0 + tiles_1
        part += is_third.to(tl.int32)
        begin = tl.where(part == 1, SIZE_0 + (tile - tiles_0) * BLOCK_N, begin)
        begin = tl.where(is_third, SIZE_0 + SIZE_1 + (tile - tiles_0 - tiles_1) * BLOCK_N, begin)
        end = tl.where(part == 1, SIZE_0 + SIZE_1, end)
        end = tl.where(is_third, N, end)
    n = begin + tl.arange(0, BLOCK_N)
    return part, n, n < end


@triton.jit
def finish(
    layer,
    partials,
    multiplier,
    bias,
    b,
    down,
    squares,
    back,
    residual,
    scale,
    out,
    scaled,
    new_squares,
    M: tl.constexpr,
    N: tl.constexpr,
    STRIDE: tl.constexpr,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SPLIT: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    RANK_SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    TILES_FILLED: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_UNIT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
    COMPUTE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Computes a tile of columns for a block of rows. The grid is (tile, block). A tile belongs to one part of N.

    Arrays and constants:
      layer: int32 [1], index into every axis L.
      partials: float32 [SPLIT, M, STRIDE], sums over parts of K; the first N columns are used.
      multiplier: float32 [L, 1]; [L, N] with PER_ROW.
      bias: [L, N]. b: [L, N, RANK]; each row has the ranks of its own part.
      down: float32 [RANK_SPLIT, M, RANKS], sums of x A; RANK columns for each part.
      squares: float32 [TILES, M], sums of squares of the stream that was multiplied.
      back: float32 [M], factors that undo the scaling of x for float16 (`matmul.Sums`); not read for bfloat16.
      residual: [M, N] and scale: float32 [L, N] of the next norm, only with HAS_RESIDUAL.
      out: [M, N]; [M, N / 2] with IS_SWIGLU.
      scaled: [M, N] and new_squares: float32 [tiles, M], only with HAS_RESIDUAL.
      SIZE_0, SIZE_1: columns of the first two parts; the third has the rest of N.
    """
    index = tl.load(layer).to(tl.int64)
    tile = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < M
    unit = _unit(squares, back, row, M, WIDTH, TILES, TILES_FILLED, EPS, BLOCK_M, HAS_UNIT, COMPUTE)
    part, n, real = _columns(tile, N, SIZE_0, SIZE_1, BLOCK_N, IS_SWIGLU)
    operands = (index, partials, multiplier, bias, b, down, unit, row)
    y = _product(
        *operands,
        n,
        real,
        part * RANK,
        M,
        N,
        STRIDE,
        SPLIT,
        RANK,
        RANKS,
        RANK_SPLIT,
        PER_ROW,
        HAS_BIAS,
        HAS_UNIT,
        COMPUTE,
        ASSEMBLY,
    )
    if IS_SWIGLU:
        up = _product(
            *operands,
            n + SIZE_0,
            real,
            RANK,
            M,
            N,
            STRIDE,
            SPLIT,
            RANK,
            RANKS,
            RANK_SPLIT,
            PER_ROW,
            HAS_BIAS,
            HAS_UNIT,
            COMPUTE,
            ASSEMBLY,
        )
        gate = rounded(y, ASSEMBLY)
        y = gate / (1 + tl.exp(-gate)) * rounded(up, ASSEMBLY)
    mask = there[:, None] & real[None, :]
    at = row[:, None] * (N // 2 if IS_SWIGLU else N) + n[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        y = rounded(tl.where(mask, y, 0.0), ASSEMBLY)
        after = tl.load(scale + index * N + n, mask=real, other=0.0)
        _store(scaled + at, y * after[None, :], mask, ASSEMBLY)
        tl.store(new_squares + tile * M + row, tl.sum(y * y, axis=1), mask=there)
    _store(out + at, y, mask, ASSEMBLY)


@triton.jit
def _store(pointers, values, mask, ASSEMBLY: tl.constexpr):
    if ASSEMBLY:
        tl.store(pointers, values.to(tl.bfloat16), mask=mask)
    else:
        tl.store(pointers, rounded(values, ASSEMBLY), mask=mask)
