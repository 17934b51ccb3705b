"""The Triton kernels of decode attention; `attention.py` launches them.

They are a split-KV attention. The pages of a row, up to its end, are cut into parts of PAGES pages. One program of
`attend` processes one part for all query heads of a key head. It writes its weighted sum of values, the largest score
and the sum of exponentials. `combine` then merges the parts of a row. How a row is cut depends only on shapes, so the
bits of its result do not depend on what other rows hold.
"""

import triton
import triton.language as tl

from pallas_kernels.portable.epilogue_kernels import rounded


@triton.jit
def _turned(first, second, cos, sin, ASSEMBLY: tl.constexpr):
    """Rotates pairs (first, second) by RoPE. The results are rounded to bfloat16 and returned in float32."""
    one = rounded(first * cos - second * sin, ASSEMBLY)
    return one, rounded(second * cos + first * sin, ASSEMBLY)


@triton.jit
def attend(
    layer,
    qkv,
    cos,
    sin,
    keys,
    values,
    tables,
    ends,
    products,
    weights,
    new_keys,
    new_values,
    LAYERS: tl.constexpr,
    POOL: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_FILLED: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGES: tl.constexpr,
    PIECES: tl.constexpr,
    APPENDS: tl.constexpr,
    COMPUTE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Attends to one part. The grid is (row, key head, part).

    Arrays:
      layer: int32 [1], index of the layer.
      qkv: [B, (GROUP + 2) * KEY_HEADS, SIZE], not rotated.
      cos: float32 [B, SIZE / 2].
      sin: float32 [B, SIZE / 2].
      keys: [LAYERS, POOL, KEY_HEADS, SLOTS, SIZE].
      values: [LAYERS, POOL, KEY_HEADS, SLOTS, SIZE].
      tables: int32 [B, WIDTH], the page table: each row's pages.
      ends: int32 [B], positions of the new tokens in their rows.
      products: float32 [B, KEY_HEADS, PIECES, GROUP, SIZE], sums of exponentials times values.
      weights: float32 [B, KEY_HEADS, PIECES, 2, GROUP], the largest scores times log2(e), and the sums of
        exponentials.
      new_keys, new_values: the same memory as `keys` and `values`; the new token is written there if APPENDS.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    piece = tl.program_id(2)
    end = tl.minimum(tl.maximum(tl.load(ends + row), 0), WIDTH * SLOTS - 1)
    last = end // SLOTS
    begin = piece * PAGES
    if begin > last:
        return
    half: tl.constexpr = SIZE // 2
    c = tl.arange(0, half)
    s = tl.arange(0, SLOTS)
    g = tl.arange(0, GROUP_FILLED)
    is_head = (g < GROUP)[:, None]
    turn_cos = tl.load(cos + row * half + c)[None, :]
    turn_sin = tl.load(sin + row * half + c)[None, :]

    of_row = qkv + row * ((GROUP + 2) * KEY_HEADS * SIZE)
    of_query = of_row + (head * GROUP + g)[:, None] * SIZE + c[None, :]
    q0 = tl.load(of_query, mask=is_head, other=0.0).to(tl.float32)
    q1 = tl.load(of_query + half, mask=is_head, other=0.0).to(tl.float32)
    q0, q1 = _turned(q0, q1, turn_cos, turn_sin, ASSEMBLY)
    of_key = of_row + (GROUP * KEY_HEADS + head) * SIZE + c[None, :]
    k0 = tl.load(of_key).to(tl.float32)
    k1 = tl.load(of_key + half).to(tl.float32)
    k0, k1 = _turned(k0, k1, turn_cos, turn_sin, ASSEMBLY)
    all_c = tl.arange(0, SIZE)
    new_value = tl.load(of_row + (GROUP * KEY_HEADS + KEY_HEADS + head) * SIZE + all_c)[None, :]
    which = tl.minimum(tl.maximum(tl.load(layer), 0), LAYERS - 1).to(tl.int64)
    of_layer = which * POOL

    # Scores are multiplied by log2(e), together with the scale, so that exp2 can be used. The new token is not in the
    # cache yet: the program with the last page starts its softmax with it.
    factor: tl.constexpr = 1.4426950408889634 / SIZE**0.5
    is_last = last < begin + PAGES
    score = tl.sum(q0 * k0, axis=1) + tl.sum(q1 * k1, axis=1)
    largest = tl.where(is_last, score * factor, float("-inf"))
    total = tl.full((GROUP_FILLED,), 1.0, tl.float32) * is_last.to(tl.float32)
    sums = tl.zeros((GROUP_FILLED, SIZE), tl.float32)
    sums += tl.where(is_last, new_value.to(tl.float32), 0.0)
    q0 = q0.to(COMPUTE)
    q1 = q1.to(COMPUTE)
    for page in range(begin, tl.minimum(begin + PAGES, last + 1)):
        number = tl.load(tables + row * WIDTH + page)
        number = tl.minimum(tl.maximum(number, 0), POOL - 1)
        start = ((of_layer + number) * KEY_HEADS + head) * (SLOTS * SIZE)
        # Slots after the end are not read, because they may hold infinities or NaN.
        slot = page * SLOTS + s
        is_old = slot < end
        of_page = keys + start + s[None, :] * SIZE + c[:, None]
        p0 = tl.load(of_page, mask=is_old[None, :], other=0.0)
        p1 = tl.load(of_page + half, mask=is_old[None, :], other=0.0)
        of_page = values + start + s[:, None] * SIZE + all_c[None, :]
        v = tl.load(of_page, mask=is_old[:, None], other=0.0)
        scores = tl.dot(q0, p0.to(COMPUTE))
        scores = tl.dot(q1, p1.to(COMPUTE), scores) * factor
        scores = tl.where(is_old[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp2(largest - higher)
        p = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        sums = tl.dot(p.to(COMPUTE), v.to(COMPUTE), sums * shrink[:, None])
        largest = higher

    # Without APPENDS the new tokens are in the cache already, and another program may be reading them.
    if APPENDS and is_last:
        number = tl.minimum(tl.maximum(tl.load(tables + row * WIDTH + last), 0), POOL - 1)
        start = ((of_layer + number) * KEY_HEADS + head) * (SLOTS * SIZE) + end % SLOTS * SIZE
        kind: tl.constexpr = new_keys.dtype.element_ty
        tl.store(new_keys + start + c[None, :], k0.to(kind))
        tl.store(new_keys + start + half + c[None, :], k1.to(kind))
        tl.store(new_values + start + all_c[None, :], new_value.to(kind))

    unit = (row * KEY_HEADS + head) * PIECES + piece
    to = products + (unit * GROUP + g)[:, None] * SIZE + all_c[None, :]
    tl.store(to, sums, mask=is_head)
    tl.store(weights + unit * (2 * GROUP) + g, largest, mask=g < GROUP)
    tl.store(weights + unit * (2 * GROUP) + GROUP + g, total, mask=g < GROUP)


@triton.jit
def combine(
    ends,
    products,
    weights,
    out,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGES: tl.constexpr,
    PIECES: tl.constexpr,
    PIECES_FILLED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Merges the parts of `attend` into out [B, KEY_HEADS * GROUP, SIZE]. The grid is (row, query head)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    end = tl.minimum(tl.maximum(tl.load(ends + row), 0), WIDTH * SLOTS - 1)
    pieces = end // SLOTS // PAGES + 1
    piece = tl.arange(0, PIECES_FILLED)
    unit = (row * KEY_HEADS + head // GROUP) * PIECES + piece
    there = piece < pieces
    of_piece = weights + unit * (2 * GROUP) + head % GROUP
    largest = tl.load(of_piece, mask=there, other=float("-inf"))
    total = tl.load(of_piece + GROUP, mask=there, other=0.0)
    share = tl.exp2(largest - tl.max(largest, axis=0))
    share = share / tl.sum(share * total, axis=0)
    c = tl.arange(0, SIZE)
    of_products = products + (unit * GROUP + head % GROUP)[:, None] * SIZE + c[None, :]
    parts = tl.load(of_products, mask=there[:, None], other=0.0)
    result = tl.sum(parts * share[:, None], axis=0)
    to = out + (row * (KEY_HEADS * GROUP) + head) * SIZE + c
    tl.store(to, rounded(result, ASSEMBLY).to(out.dtype.element_ty))
