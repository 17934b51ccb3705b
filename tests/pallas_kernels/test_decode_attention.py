import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import runtime
from pallas_kernels.decode_attention import (
    api,
    append,
    append_kernel,
    decode,
    decode_attention,
    decode_kernel,
    plans,
    reference,
)
from pallas_kernels.decode_attention import config as configs
from pallas_kernels.decode_attention.config import PAGE, Config
from pallas_kernels.mosaic import launch
from tests.pallas_kernels.common import f32, on_cpu, slow

# One program each: operation by operation, compilation takes longer than all kernels.
oracle = jax.jit(reference.decode_attention)
make_plan = jax.jit(plans.make, static_argnums=(2, 3))
plan_of = jax.jit(decode.plan, static_argnums=0)


def interpreted(config):
    return jax.jit(functools.partial(decode.decode_attention, config=config, interpret=True))


def problem(seed, heads, key_heads, head_size, ends, width, *, layers=2, dtype=jnp.bfloat16):
    """Makes random arguments, with pages in random order and NaN wherever there is no token."""
    rng = np.random.default_rng(seed)
    rows, pages = len(ends), 1 + len(ends) * width
    tables = 1 + rng.permutation(pages - 1).reshape(rows, width)
    shape = (layers, pages, key_heads, PAGE, head_size)
    keys, values = (rng.standard_normal(shape) for _ in range(2))
    layer = layers - 1
    for cache in (keys, values):
        cache[:, 0] = 0
        for row, end in enumerate(ends):
            cache[layer, tables[row, end // PAGE], :, end % PAGE :] = np.nan
            cache[layer, tables[row, end // PAGE + 1 :]] = np.nan
    angles = rng.uniform(0, 2 * np.pi, (rows, head_size // 2))
    return (
        jnp.asarray(rng.standard_normal((rows, heads + 2 * key_heads, head_size)), dtype),
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
        jnp.asarray(keys, dtype),
        jnp.asarray(values, dtype),
        jnp.int32(layer),
        jnp.asarray(tables, jnp.int32),
        jnp.asarray(ends, jnp.int32),
    )


def bound(qkv, cos, sin, keys, values, *rest):
    """What rounding weights and result to bfloat16 may change: 2^-8 of the weighted sum of |values|.

    Twice that, since a key or query may itself be rounded the other way.
    """
    value_heads = -keys.shape[2]
    qkv = qkv.at[:, value_heads:].set(jnp.abs(qkv[:, value_heads:]))
    out, *_ = oracle(qkv, cos, sin, keys, jnp.abs(values), *rest)
    return f32(out) * 2**-7


def assert_meets_reference(actual, arguments, *, ulps=0):
    """Checks that the result is within `bound`, and the cache equal or off by so many ulps of bfloat16."""
    expected = oracle(*arguments)
    assert actual[0].dtype == arguments[0].dtype
    assert np.all(np.abs(f32(actual[0]) - f32(expected[0])) <= bound(*arguments))
    for cache, expected_cache in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_allclose(f32(cache), f32(expected_cache), rtol=ulps * 2**-7)


def test_the_reference_is_softmax_attention_over_the_tokens_so_far():
    heads, key_heads, ends, width, size = 6, 2, [70, 0, 127], 2, 8
    arguments = problem(0, heads, key_heads, size, ends, width, dtype=jnp.float32)
    out, *caches = oracle(*arguments)
    qkv, cos, sin, keys, values, layer, tables, _ = (np.asarray(a, np.float64) for a in arguments)
    turn = cos + 1j * sin
    for row, end in enumerate(ends):
        pairs = (qkv[row, :, : size // 2] + 1j * qkv[row, :, size // 2 :]) * turn[row]
        turned = np.concatenate([pairs.real, pairs.imag], axis=-1)
        page, slot = int(tables[row, end // PAGE]), end % PAGE
        keys[int(layer), page, :, slot] = turned[heads : heads + key_heads]
        values[int(layer), page, :, slot] = qkv[row, heads + key_heads :]
        for head in range(heads):
            at = (int(layer), tables[row].astype(int), head * key_heads // heads)
            k, v = (cache[at].reshape(-1, size)[: end + 1] for cache in (keys, values))
            weights = np.exp(k @ turned[head] / np.sqrt(size))
            np.testing.assert_allclose(out[row, head], weights @ v / weights.sum(), atol=1e-5)
    for cache, expected in zip(caches, (keys, values), strict=True):
        np.testing.assert_allclose(cache, expected, atol=1e-6)


def assert_indices_are_clamped(run, arguments):
    """Checks that what is outside the cache is moved to the nearest inside; row 0 ends at 127 of 128, row 1 at 0 or 5."""
    *rest, layer, tables, ends = arguments
    last = rest[3].shape[1] - 1
    inside = (*rest, layer, tables.at[0].set(jnp.array([last, 0])), ends)
    outside = jnp.where(ends == 127, 500, jnp.where(ends == 0, -1, ends))
    outside = (*rest, layer + 7, tables.at[0].set(jnp.array([99, -3])), outside)
    for a, b in zip(run(inside), run(outside), strict=True):
        # NaN equals NaN in float32 only.
        np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))


def test_places_outside_are_moved_to_the_nearest_inside():
    arguments = problem(1, 6, 2, 8, [127, 0, 5], 2, dtype=jnp.float32)
    assert_indices_are_clamped(lambda arguments: oracle(*arguments), arguments)


def lists_of(plan, split):
    """A plan's pieces (fields, pages) by warpgroup, numbers of pages of warpgroups, tiles and totals."""
    plan = np.asarray(plan)
    assert plan.shape == (split.size,) and not plan[: split.pieces_at].any()
    pieces = plan[split.pieces_at : split.pages_at].reshape(split.blocks, split.rounds, -1)
    pages = plan[split.pages_at : split.counts_at].reshape(split.blocks, -1)
    found, loads = [], []
    for mine, own, count in zip(pieces, pages, plan[split.counts_at : split.tiles_at], strict=True):
        n = 0
        for fields in mine[:count].tolist():
            length = -(-fields[plans.SLOTS] // PAGE)
            found.append((fields, own[n : n + length].tolist()))
            n += length
        assert np.all(own[n:] == -1)
        loads.append(n)
    tiles = plan[split.tiles_at : split.totals_at].reshape(split.rows, split.siblings)
    return found, loads, tiles, plan[split.totals_at : split.places_at]


def assert_rows_are_read(plan, split, tables, ends):
    """Checks that the parts of each row and head, those of its tile included, read its pages in order.

    Returns the plan's lists, and for each (row, head) its parts: pages, slots, home, whether of a tile.
    """
    pieces, loads, tiles, totals = lists_of(plan, split)
    totals = totals if split.siblings else plans.totals_of(ends, split)
    parts_of = {}
    for (unit, part, slots, home), pages in pieces:
        row, head = divmod(unit, split.key_heads)
        is_tile = row >= split.rows
        members = tiles[row - split.rows] if is_tile else [row]
        for member in (m for m in members if m >= 0):
            parts = parts_of.setdefault((int(member), head), {})
            assert part // plans.SHIFT not in parts
            parts[part // plans.SHIFT] = pages, slots, home, is_tile
            assert is_tile or part % plans.SHIFT == totals[member]
    assert sorted(parts_of) == [*itertools.product(range(split.rows), range(split.key_heads))]
    for (row, head), parts in parts_of.items():
        parts_of[row, head] = parts = [parts[index] for index in range(totals[row])]
        live = tables[row, : ends[row] // PAGE + 1] * split.key_heads + head
        assert sum((pages for pages, *_ in parts), []) == live.tolist()
        assert sum(slots for _, slots, *_ in parts) == ends[row] + 1
        assert [home for _, _, home, _ in parts] == [-1] * (len(parts) - 1) + [live[-1]]
    return pieces, loads, parts_of


@pytest.mark.parametrize(("pages", "parts", "blocks"), [(4, 16, 20), (2, 3, 7), (1, 64, 132)])
def test_a_plan_gives_every_live_page_to_one_block(pages, parts, blocks):
    rng = np.random.default_rng(3)
    rows, width, key_heads = 13, 20, 2
    ends = rng.integers(0, width * PAGE, rows)
    ends[:3] = 0, width * PAGE - 1, PAGE - 1
    tables = 1 + rng.permutation(rows * width).reshape(rows, width)
    split = plans.Split(rows, width, key_heads, pages, parts, blocks)
    plan = make_plan(tables, ends, 1 + rows * width, split)
    _, loads, _ = assert_rows_are_read(plan, split, tables, ends)
    # As even as the last pieces, which are the shortest, allow.
    assert max(loads) - min(loads) <= max(pages, -(-width // parts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "ends", "width", "config"),
    [
        # Ends of pages; parts; pieces; warpgroups.
        ((4, 2, 64), [63, 64, 130], 3, Config(2, 3, 2, 2, 2)),
        slow((12, 1, 128), [130], 3, Config(2, 2, 2, 1)),  # more than eight queries, in parts
        slow((7, 1, 128), [320, 5], 6, Config(3, 2, 1, 1)),  # slots used again; the most parts is 1
        slow((2, 2, 128), [0, 319], 5, Config(1, 2, 5, 1)),
        slow((5, 1, 64), [200, 319, 1], 5, Config(4, 6, 2, 4)),
        slow((8, 1, 128), [511], 8, Config(2, 1, 4, 9)),
        slow((16, 2, 64), [511, 447], 8, Config(2, 2, 2, 3)),
        slow((2, 1, 128), [383, 65], 8, Config(4, 3, 16, 1, 2)),
        slow((9, 1, 128), [200, 64], 4, Config(2, 2, 2, 2)),  # more than eight queries
        slow((32, 2, 128), [130, 63], 3, Config(1, 2, 3, 2, 2)),
    ],
)
def test_the_kernel_meets_the_reference_without_a_race(interpreter, shape, ends, width, config):
    arguments = problem(0, *shape, ends, width)
    assert_meets_reference(interpreted(config)(*arguments), arguments)


def assert_first_row_has_the_same_bits(run, arguments, other_ends, *plan):
    *rest, tables, ends = arguments
    first = run(*arguments, *plan)[0][0]
    # The other rows out of use: tables of zeros, ends that mean nothing.
    idle = run(*rest, tables.at[1:].set(0), ends.at[1:].set(jnp.array(other_ends)))[0]
    np.testing.assert_array_equal(idle[0], first)
    assert np.all(np.isfinite(f32(idle)))


@pytest.mark.slow
def test_a_row_has_the_same_bits_whatever_the_others_are(interpreter):
    arguments, config = problem(2, 4, 1, 64, [100, 40], 2), Config(1, 2, 2, 2)
    plan = decode.plan(arguments[3].shape, *arguments[-2:], config)
    assert_first_row_has_the_same_bits(interpreted(config), arguments, [127], plan)


def sharing(seed, heads, key_heads, head_size, groups, width):
    """`problem` for rows in groups: (shared pages, ends) of each; and how many first pages each row shares."""
    ends = [end for _, of_group in groups for end in of_group]
    *rest, tables, ends = problem(seed, heads, key_heads, head_size, ends, width)
    tables, shared, row = np.array(tables), [], 0
    for pages, of_group in groups:
        tables[row : row + len(of_group), :pages] = tables[row, :pages]
        shared += [pages] * len(of_group)
        row += len(of_group)
    # The first row's pages may have held nothing where it ends early; shared ones are whole.
    whole = np.concatenate([tables[r, :pages] for r, pages in enumerate(shared)])
    shared = jnp.array(shared, jnp.int32)
    filled = lambda cache: cache.at[:, whole].set(jnp.nan_to_num(cache[:, whole], nan=0.5))
    return (*rest[:3], *map(filled, rest[3:5]), rest[5], jnp.asarray(tables), ends), shared


def test_a_plan_reads_shared_pages_once_for_each_tile():
    rng = np.random.default_rng(5)
    width, key_heads, pages = 20, 2, 401
    shared = np.array([7] * 11 + [3] * 2 + [0] * 3 + [5, 2])  # more than a tile; a pair; alone
    ends = rng.integers(8 * PAGE, width * PAGE, len(shared))
    ends[13], ends[17] = 5, 70  # an idle row; a row that ends in what it says to share
    tables = 1 + rng.permutation(pages - 1)[: len(shared) * width].reshape(-1, width)
    tables[:11, :7], tables[11:13, :3] = tables[0, :7], tables[11, :3]
    split = plans.Split(len(shared), width, key_heads, 3, 8, 13, siblings=8)
    plan = make_plan(tables, ends, pages, split, shared)
    found, _, parts_of = assert_rows_are_read(plan, split, tables, ends)
    for (row, _), parts in parts_of.items():
        of_tile = sum(len(pages) for pages, _, _, is_tile in parts if is_tile)
        assert of_tile == min(shared[row], ends[row] // PAGE)
    # Each tile's pages are read once: of 11 rows by two tiles, and by one of the pair and of each row alone.
    of_tiles = sum(len(own) for (unit, *_), own in found if unit >= split.units)
    assert of_tiles == key_heads * (2 * 7 + 3 + 5 + 1)


@pytest.mark.slow
def test_a_row_is_cut_alike_with_and_without_its_siblings():
    split = plans.Split(9, 12, 1, 2, 4, 5, siblings=8)
    tables = np.arange(1, 9 * 12 + 1).reshape(9, 12)
    tables[:, :6] = tables[0, :6]
    ends = np.array([600, 500, 400, 700, 650, 450, 500, 520, 740])

    def pieces_of_first(live):
        alone = np.where(live, tables.T, 0).T, np.where(live, ends, 0), np.where(live, 6, 0)
        plan = plans.make(alone[0], alone[1], 200, split, alone[2])
        found, _, tiles, totals = lists_of(plan, split)
        mine = [
            (part // plans.SHIFT, own)
            for (unit, part, *_), own in found
            if unit == 3 or (unit >= split.units and 3 in tiles[unit - split.units])
        ]
        return sorted(mine), totals[3]

    expected = pieces_of_first(np.ones(9, bool))
    assert len(expected[0]) == expected[1] == 3 + 3
    for live in np.eye(9, dtype=bool)[3], np.arange(9) % 2 == 1, np.arange(9) >= 2:
        assert pieces_of_first(live) == expected


@pytest.mark.parametrize(
    # `shape` is (heads, key heads, head size), and `groups` are (shared pages, ends).
    ("shape", "groups", "width", "config"),
    [
        ((4, 2, 64), [(1, [70, 130]), (0, [5])], 3, Config(1, 2, 3, 2, 2)),
        ((7, 1, 128), [(2, [200, 140, 130])], 4, Config(2, 2, 2, 1)),
        ((8, 1, 128), [(3, [200, 255, 300, 220, 193, 192, 210, 230, 240]), (1, [64])], 5, Config(2, 2, 4, 2)),
        ((14, 2, 64), [(4, [300, 319, 260]), (4, [280, 256])], 5, Config(2, 3, 2, 3)),
        ((3, 3, 128), [(2, [140]), (0, [0]), (1, [100, 65])], 3, Config(3, 1, 2, 2)),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_rows_that_share_pages_meet_the_reference(interpreter, shape, groups, width, config):
    arguments, shared = sharing(0, *shape, groups, width)
    assert_meets_reference(interpreted(config)(*arguments, shared=shared), arguments)


@pytest.mark.slow
def test_a_row_has_the_same_bits_whichever_siblings_it_has(interpreter, monkeypatch):
    # Idle rows all write to the scratch page and read it: a race of values that nobody uses.
    monkeypatch.setattr(launch, "INTERPRETED", plgpu.InterpretGPUParams(detect_races=False))
    groups = [(2, [200, 140, 130, 190])]
    (*rest, tables, ends), shared = sharing(2, 4, 1, 64, groups, 4)
    run = interpreted(Config(2, 2, 2, 2))
    first = run(*rest, tables, ends, shared=shared)[0]
    for left in [2], [1, 2], [0, 2, 3]:
        is_left = jnp.isin(jnp.arange(4), jnp.array(left))
        only = jnp.where(is_left[:, None], tables, 0), jnp.where(is_left, ends, 0)
        # An idle row shares nothing, even if it says so.
        for said in jnp.where(is_left, shared, 0), shared:
            same = run(*rest, *only, shared=said)[0]
            np.testing.assert_array_equal(same[2], first[2])
            assert np.all(np.isfinite(f32(same)))
    # Rows that share nothing, beside some that do, have the bits that they have where none does.
    arguments, shared = sharing(3, 4, 1, 64, [(2, [200, 140]), (0, [130]), (0, [255])], 4)
    together, apart = run(*arguments, shared=shared)[0], run(*arguments)[0]
    np.testing.assert_array_equal(together[2:], apart[2:])


def test_rows_of_many_queries_cannot_share_pages():
    arguments, shared = sharing(0, 12, 1, 128, [(1, [70, 130])], 3)
    with pytest.raises(NotImplementedError, match="at most 8 query heads per key head; got 12"):
        decode.decode_attention(*arguments, config=Config(1, 1, 1, 1), shared=shared)


def tokens_of(seed, heads, key_heads, head_size, rows, width, **options):
    """`problem` with consecutive tokens: (end of the first, how many) of each row; and the pages before the first."""
    draw = lambda seed, ends: problem(seed, heads, key_heads, head_size, ends, width, **options)
    *_, keys, values, layer, tables, _ = draw(seed, [end for end, _ in rows])
    at = np.repeat(np.arange(len(rows)), [count for _, count in rows])
    every = [end + i for end, count in rows for i in range(count)]
    new, caches = draw(seed + 1, every)[:3], (keys, values)
    caches = (jnp.nan_to_num(cache) for cache in caches)
    sequence = jnp.asarray(at, jnp.int32)
    return (*new, *caches, layer, tables[at], jnp.array(every, jnp.int32)), sequence


def test_tokens_of_a_row_at_once_are_those_one_after_another():
    arguments, sequence = tokens_of(0, 6, 2, 8, [(62, 4), (0, 1), (5, 3)], 2, dtype=jnp.float32)
    qkv, cos, sin, *caches, layer, tables, ends = arguments
    run = jax.jit(functools.partial(decode_attention, implementation="reference"))
    at_once = run(*arguments, sequence=sequence)
    for row in range(len(ends)):
        only = lambda array, row=row: array[row : row + 1]
        new, where = map(only, (qkv, cos, sin)), map(only, (tables, ends))
        out, *caches = oracle(*new, *caches, layer, *where)
        np.testing.assert_allclose(at_once[0][row], out[0], atol=1e-6)
    for actual, expected in zip(at_once[1:], caches, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    # `shape` is (heads, key heads, head size), and `rows` are (end, tokens).
    ("shape", "rows", "width", "config"),
    [
        slow((7, 1, 128), [(190, 5), (0, 2), (70, 1)], 4, Config(2, 2, 2, 1)),
        slow((16, 1, 128), [(126, 3), (5, 1)], 3, Config(1, 2, 3, 2)),  # too many queries for tiles
        ((4, 2, 64), [(126, 3)], 3, Config(1, 2, 3, 2, 2)),
        slow((8, 1, 128), [(250, 9), (64, 8), (63, 2)], 5, Config(2, 2, 4, 2)),
        slow((14, 2, 64), [(255, 2), (300, 7)], 5, Config(2, 3, 2, 3)),
    ],
)
def test_tokens_of_a_row_at_once_meet_the_reference(interpreter, shape, rows, width, config):
    arguments, sequence = tokens_of(1, *shape, rows, width)
    assert_meets_reference(interpreted(config)(*arguments, sequence=sequence), arguments)


def test_new_keys_and_values_go_to_the_slots_at_the_rows_ends():
    """Two rows end at the same slot, as rows out of use do: the last one's stay."""
    arguments = new_tokens(key_heads=2, head_size=8, slots=4, dtype=np.float32)
    qkv, cos, sin, keys, values, layer, tables, ends = map(np.array, arguments)
    found = append.append(*arguments)
    for row in range(len(ends)):
        page, slot = tables[row, ends[row] // 4], ends[row] % 4
        new = qkv[row : row + 1, -4:]
        keys[layer, page, :, slot] = append.rotated(new[:, :2], cos[[row]], sin[[row]])[0]
        values[layer, page, :, slot] = new[0, 2:]
    for actual, expected in zip(found, (keys, values), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize(("key_heads", "head_size"), [(3, 64), slow(2, 128)])
def test_one_kernel_writes_what_the_definition_does(interpreter, key_heads, head_size):
    assert_the_kernel_appends(key_heads, head_size, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("key_heads", "head_size"), [(3, 64), (4, 128), (8, 128)])
def test_on_its_device_one_kernel_writes_what_the_definition_does(key_heads, head_size):
    assert_the_kernel_appends(key_heads, head_size, ulps=1)


def new_tokens(key_heads, head_size, slots, dtype):
    """Arguments of `append.append` for 5 rows, of which two end at the same slot."""
    draw = np.random.default_rng(0)
    made = lambda *shape: jnp.asarray(draw.normal(size=shape), dtype)
    angles = draw.normal(size=(5, head_size // 2))
    turns = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    caches = (made(2, 7, key_heads, slots, head_size) for _ in range(2))
    tables = jnp.array([[1, 2], [0, 0], [3, 4], [0, 0], [5, 6]], jnp.int32)
    ends = jnp.array([slots + 3, 0, 2, 0, 2 * slots - 1], jnp.int32)
    qkv = made(5, 4 + 2 * key_heads, head_size)
    return qkv, *turns, *caches, jnp.int32(1), tables, ends


def assert_the_kernel_appends(key_heads, head_size, *, interpret=False, ulps=0):
    arguments = new_tokens(key_heads, head_size, PAGE, jnp.bfloat16)
    *new, keys, values, layer, tables, ends = arguments
    split = plans.Split(*tables.shape, keys.shape[2], 2, 2, 4, appends=False)
    plan = make_plan(tables, ends, keys.shape[1], split)
    run = functools.partial(append_kernel.launch, split=split, interpret=interpret)
    found = jax.jit(run)(*new, layer.reshape(1), plan, keys, values)
    for actual, expected in zip(found, jax.jit(append.append)(*arguments), strict=True):
        bits = [np.asarray(x).view(np.int16).astype(int) for x in (actual, expected)]
        assert np.abs(bits[0] - bits[1]).max() <= ulps


def test_a_plan_reads_the_pages_of_a_sequence_once():
    """Nine tokens are two tiles; rows out of use are tiles of their own, with the page that they point to."""
    counts, ends = [9, 1, 3], [110, 64, 190]
    tables = np.repeat([[1, 2, 0], [3, 4, 0], [5, 6, 7]], counts, axis=0)
    ends = np.concatenate([end + np.arange(n) for end, n in zip(ends, counts, strict=True)])
    sequence = np.repeat(np.arange(3), counts)
    # Two rows out of use.
    tables, ends = np.pad(tables, ((0, 2), (0, 0))), np.pad(ends, (0, 2))
    sequence = np.pad(sequence, (0, 2), constant_values=-1)
    split = plans.Split(15, 3, 2, 2, 4, 5, siblings=8, appends=False, sequences=True)
    plan = make_plan(tables, ends, 8, split, sequence=sequence)
    found, _, tiles, totals = lists_of(plan, split)
    members = {0: [*range(8)], 8: [8], 9: [9], 10: [10, 11, 12], 13: [13, 14]}
    for row, own in members.items():
        assert tiles[row].tolist() == own + [-1 - row] * (8 - len(own))
    pages = {0: [[1, 2]], 8: [[1, 2]], 9: [[3, 4]], 10: [[5, 6], [7]], 13: [[0]]}
    assert totals[[0, 8, 9, 10, 13]].tolist() == [1, 1, 1, 2, 1]
    seen = {}
    for (unit, part, slots, home), own in found:
        row, head = divmod(unit, 2)
        number, parts = divmod(part, plans.SHIFT)
        begin = sum(map(len, pages[row][:number])) * PAGE
        assert [page * 2 + head for page in pages[row][number]] == own
        assert home == ends[row] - begin
        assert slots == min(ends[members[row][-1]] + 1 - begin, len(own) * PAGE)
        assert parts == len(pages[row])
        seen[unit, number] = True
    assert len(seen) == len(found) == 2 * sum(map(len, pages.values()))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(28, 4, 128), (9, 3, 64), (24, 3, 64), (40, 8, 128)])
def test_on_its_device_tokens_of_a_row_at_once_meet_the_reference(shape):
    counts = 8, 1, 4, 7, 2, 8, 1, 1
    ends = np.random.default_rng(0).integers(0, 3000, len(counts)).tolist()
    rows = list(zip(ends, counts, strict=True))
    arguments, sequence = tokens_of(2, *shape, rows, 48)
    run = jax.jit(decode_attention)
    found = run(*arguments, sequence=sequence)
    assert_meets_reference(found, arguments, ulps=1)
    # Counters are 0 again, and nothing depends on what an earlier launch left.
    for actual, expected in zip(run(*arguments, sequence=sequence), found, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        ({"config": Config(4, 6, 16, 132)}, None),
        ({"config": Config(4, 6, 16, 114), "all_heads": 72}, None),
        ({"dtype": "float32"}, "needs qkv in bfloat16; got float32"),
        ({"head_size": 96}, "needs a head size of 64 or 128; got 96"),
        ({"slots": 32}, "needs pages of 64 slots; got 32"),
        ({"all_heads": 76}, "needs at most 16 query heads per key head; got 17"),
        (
            {"layers": 80, "pages": 150_000},
            "needs fewer than 2^31 rows of keys; got L * N * J * S of (80, 150000, 4, 64)",
        ),
        ({"config": Config(1, 7, 1, 1)}, "needs 235040 bytes of shared memory of 230400"),
    ],
)
def test_the_kernel_says_what_it_takes(traits, reason):
    def supports(
        all_heads=36, head_size=128, dtype="bfloat16", layers=28, pages=9, slots=64, config=None
    ):
        cache, config = (layers, pages, 4, slots, head_size), config or Config(1, 1, 1, 1)
        types = jnp.dtype(dtype), jnp.dtype(jnp.bfloat16)
        return configs.supports((2, all_heads, head_size), types[0], cache, types[1], config)

    assert supports(**traits) == reason


@pytest.mark.parametrize("head_size", configs.HEAD_SIZES)
@pytest.mark.parametrize("rows", [1, 8, 16, 64, 256])
def test_every_problem_has_a_configuration(rows, head_size):
    for key_heads, group in itertools.product((1, 2, 4, 8, 32), (1, 8, 9, 16)):
        config = configs.pick_config(rows, key_heads, head_size, group)
        shape, dtype = (rows, (group + 2) * key_heads, head_size), jnp.dtype(jnp.bfloat16)
        cache = (2, 9, key_heads, PAGE, head_size)
        assert configs.supports(shape, dtype, cache, dtype, config) is None
        # One plan serves whatever the group.
        without_stages = lambda c: dataclasses.replace(c, stages=1)
        anew = configs.pick_config(rows, key_heads, head_size)
        assert without_stages(config) == without_stages(anew)


def test_on_hopper_the_kernel_is_chosen_for_its_head_sizes_in_bfloat16(assume):
    assume(runtime.H200, "hopper")  # no portable kernels
    tables, ends = jnp.zeros((16, 4), jnp.int32), jnp.zeros(16, jnp.int32)
    chosen = [("bfloat16", 64, "hopper"), ("float32", 64, "reference")]
    chosen += [("bfloat16", size, "reference") for size in (32, 80, 96, 256)]
    for dtype, size, name in chosen:
        keys, qkv = (jnp.zeros((*shape, size), dtype) for shape in ((2, 9, 2, PAGE), (16, 8)))
        assert api._choose(None, qkv, keys, tables) == name
        plan = jax.eval_shape(functools.partial(api.plan, heads=2), keys, tables, ends)
        assert (plan is not None) == (name == "hopper")


@on_cpu
def test_the_kernel_is_refused_without_its_device():
    arguments = problem(0, 6, 2, 8, [70, 0, 127], 2, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="'hopper': needs a GPU of compute capability 9"):
        decode_attention(*arguments, implementation="hopper")
    assert api.plan(arguments[3], *arguments[-2:], heads=4) is None
    for mine, other in zip(jax.jit(decode_attention)(*arguments), oracle(*arguments), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qkv", lambda a: a[0], "qkv must be [B, H + 2 J, C]"),
        ("qkv", lambda a: a.astype(jnp.float16), "float32 or bfloat16; got (2, 8, 64), float16"),
        ("qkv", lambda a: a[:, :7], "H a multiple of J = 2; got 7"),
        ("cos", lambda a: a[:1], "cos must be float32 [2, 32]; got float32 [1, 32]"),
        ("sin", lambda a: a.astype(jnp.bfloat16), "sin must be float32 [2, 32]; got bfloat16"),
        ("keys", lambda a: a[..., :32], "keys must be [L, N, J, S, C = 64]"),
        ("values", lambda a: a[:1], "values must be like keys"),
        ("layer", lambda a: a[None], "layer must be int32 []; got int32 [1]"),
        ("tables", lambda a: a[0], "tables must be [B, W]"),
        ("tables", lambda a: a[:1], "tables must be int32 [2, 2]; got int32 [1, 2]"),
        ("ends", lambda a: a.astype(jnp.uint32), "ends must be int32 [2]; got uint32 [2]"),
        (
            "implementation",
            lambda _: "triton",
            "one of ['hopper', 'portable', 'reference'] or None; got 'triton'",
        ),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(name, change, message):
    names = ("qkv", "cos", "sin", "keys", "values", "layer", "tables", "ends")
    arguments = dict(zip(names, problem(0, 4, 2, 64, [5, 70], 2), strict=True))
    arguments[name] = change(arguments.get(name))
    with pytest.raises(ValueError, match=re.escape(message)):
        decode_attention(**arguments)


def test_a_plan_of_another_problem_is_an_error():
    *rest, tables, ends = problem(0, 2, 1, 64, [5, 70], 2)
    other = plan_of((2, 9, 1, PAGE, 64), tables[:1], ends[:1])
    with pytest.raises(ValueError, match="plan must be int32"):
        decode.decode_attention(*rest, tables, ends, other)


@on_cpu
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_counter_that_is_not_zero_is_found_where_that_is_asked_for(monkeypatch, is_asked):
    monkeypatch.setenv("PALLAS_KERNELS_CHECK", str(int(is_asked)))
    # The kernel as such is of no interest here.
    launched = lambda *_: ((jnp.ones((2, 2, 64), jnp.bfloat16),), *_[5:7])
    monkeypatch.setattr(decode_kernel, "launch", launched)
    arguments = problem(0, 2, 1, 64, [5, 70], 2)
    plan = plan_of(arguments[3].shape, *arguments[-2:])
    run = jax.jit(lambda plan, *arguments: decode.decode_attention(*arguments, plan)[0])
    np.testing.assert_array_equal(run(plan, *arguments), 1)
    if not is_asked:
        np.testing.assert_array_equal(run(plan.at[1].set(3), *arguments), 1)
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="got 3 for unit 1, and 1 of 2 not 0"):
        run(plan.at[1].set(3), *arguments)
        jax.effects_barrier()


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", configs.HEAD_SIZES)
@pytest.mark.parametrize(
    ("group", "config"),
    [
        (1, Config(1, 2, 16, 10)),
        (2, Config(2, 3, 4, 3, 2)),
        (4, Config(4, 6, 1, 4)),
        (5, Config(3, 2, 16, 132, 3)),
        (7, Config(4, 2, 4, 1, 2)),
        (8, Config(2, 1, 8, 7, 4)),
        (9, Config(4, 6, 1, 4)),
        (12, Config(2, 2, 8, 7, 3)),
        (16, Config(1, 2, 16, 10)),
        (16, Config(2, 1, 8, 7, 4)),
    ],
)
def test_the_kernel_on_its_device_meets_the_reference(group, config, head_size):
    arguments = problem(0, 2 * group, 2, head_size, [0, 63, 64, 700, 1023], 16)
    run = jax.jit(functools.partial(decode.decode_attention, config=config))
    # Multiplied and added in one step, a new key may be rounded the other way.
    assert_meets_reference(run(*arguments), arguments, ulps=1)


@pytest.mark.gpu
def test_on_its_device_a_row_has_the_same_bits_whatever_the_others_are():
    arguments = problem(1, 28, 4, 128, [900, 40, 512, 3], 16)
    run = jax.jit(functools.partial(decode_attention, implementation="hopper"))
    assert_first_row_has_the_same_bits(run, arguments, [0, 1023, 77])


@pytest.mark.gpu
def test_a_loop_over_layers_copies_no_cache():
    *rest, layer, tables, ends = problem(0, 28, 4, 128, [900, 40], 16, layers=4)

    def body(carry, layer):
        qkv, *turns, _, _ = carry
        out, *caches = decode_attention(*carry, layer, tables, ends, implementation="hopper")
        return (qkv.at[:, :28].add(out), *turns, *caches), None

    run = jax.jit(lambda *a: jax.lax.scan(body, a, jnp.arange(4))[0][-2:], donate_argnums=(3, 4))
    used = run.lower(*rest).compile().memory_analysis()
    assert used.temp_size_in_bytes < rest[3].nbytes / 8


@pytest.mark.gpu
def test_on_its_device_counters_are_zero_again_after_every_launch(monkeypatch):
    monkeypatch.setenv("PALLAS_KERNELS_CHECK", "1")
    *rest, _, tables, ends = problem(0, 28, 4, 128, [900, 40], 16, layers=4)
    plan = decode.plan(rest[3].shape, tables, ends)

    @jax.jit
    def run(plan, qkv, cos, sin, keys, values):
        def body(carry, layer):
            arguments = qkv, cos, sin, *carry, layer, tables, ends
            out, *caches = decode.decode_attention(*arguments, plan)
            return tuple(caches), out

        return jax.lax.scan(body, (keys, values), jnp.arange(4))[1]

    jax.block_until_ready(run(plan, *rest))
    jax.effects_barrier()
    with pytest.raises(jax.errors.JaxRuntimeError, match="the counters of a plan must be 0"):
        jax.block_until_ready(run(plan.at[0].set(1), *rest))
        jax.effects_barrier()
