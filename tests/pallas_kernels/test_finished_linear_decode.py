"""Tests product, LoRA and epilogue of a decoding step against plain arithmetic, interpreted and on a GPU."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4, runtime
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.finished_linear import epilogue, lora, residual_stream
from pallas_kernels.mosaic import fragments
from pallas_kernels.nvfp4_matmul import decode, dense_tile, layout, shapes
from pallas_kernels.nvfp4_matmul import decode_config as configs
from pallas_kernels.nvfp4_matmul.decode_config import Config
from tests.combinations import spread
from tests.pallas_kernels.common import f32, slow, to_hopper, weight

EPS = 1e-6

# One program each: operation by operation, compilation takes longer than all kernels.
scaled_codes = jax.jit(nvfp4.scaled_codes, static_argnums=1)
pack_lora = jax.jit(lora.pack_lora, static_argnames=("is_packed", "is_paired"))
stream_of = jax.jit(residual_stream.stream)


@functools.partial(jax.jit, static_argnums=(1, 3))
def normal(seed, shape, scale=1.0, dtype=jnp.bfloat16):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def branches(k, rank, sizes):
    """Makes A and B of each part, as a trainer keeps them."""
    return [
        (normal(i, (k, rank), k**-0.5, jnp.float32), normal(9 + i, (rank, n), 1.0, jnp.float32))
        for i, n in enumerate(sizes)
    ]


def rounded(x):
    return f32(np.asarray(x).astype(jnp.bfloat16))


def expected(h, t, parts, bias, unit=1.0):
    """Computes the linear in float32, and rounds where the kernels round. The weight may be packed or in bfloat16."""
    is_packed = isinstance(t, nvfp4.NVFP4Tensor)
    codes, scale = (scaled_codes(t, jnp.float32), f32(t.multiplier)) if is_packed else (t, 1)
    y = rounded(h @ f32(codes).T) * scale
    if parts:
        added = [rounded(rounded(h @ rounded(a)) @ rounded(0.5 * b)) for a, b in parts]
        y += np.concatenate(added, axis=1)
    y = y * unit
    return y if bias is None else y + f32(bias)


def swiglu(gate_up):
    """Rounds gate and up, and returns SiLU(gate) * up."""
    gate, up = np.split(rounded(gate_up), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def unit_of(values):
    """Returns 1 / RMS of each row, in numpy."""
    return 1 / np.sqrt(np.mean(f32(values) ** 2, axis=1, keepdims=True) + EPS)


def residual(m, width):
    """Returns values of a residual stream, the scale of its norm, and the stream."""
    values, scale = normal(2, (m, width), 3.0), 1 + 0.1 * normal(3, (width,), 1.0, jnp.float32)
    return values, scale, stream_of(values, scale)


def assert_rounded(actual, wanted, *, share=0.01):
    """Checks equality, except for a few values at a tie that another order of a sum may round the other way."""
    actual, wanted = f32(actual), rounded(wanted)
    assert np.mean(actual != wanted) < share
    largest = np.abs(wanted).max()
    assert np.abs(actual - wanted).max() <= 2 * 2.0 ** (np.floor(np.log2(largest)) - 7)


def run(m, n, k, config, *, rank, sizes, x=None, t=None, interpret=True, **options):
    t = weight(7, n, k, std=k**-0.5) if t is None else t
    is_packed = isinstance(t, nvfp4.NVFP4Tensor)
    parts = branches(k, rank, sizes) if rank else []
    branch = pack_lora(parts, 0.5, is_packed=is_packed) if rank else None
    x = normal(8, (m, k)) if x is None else x
    options |= {"branch": branch, "config": config, "interpret": interpret}
    return x, t, parts, fused.linear(x, to_hopper(t) if is_packed else t, **options)


def assert_meets_arithmetic(m, n, k, config, *, share=0.01, **options):
    """Checks a linear with a bias, and LoRA if the rank is not 0, whose matrices it returns."""
    bias = normal(1, (n,))
    x, t, parts, y = run(m, n, k, config, bias=bias, **options)
    assert_rounded(y, expected(f32(x), t, parts, bias), share=share)
    return parts


@pytest.mark.parametrize(
    ("k", "rank", "height"),
    [
        *[slow(64, 64, 64), slow(128, 24, 64), (192, 100, 64)],
        *[slow(128, 16, 32), slow(256, 96, 32), (128, 40, 32)],
    ],
)
def test_a_tile_of_a_comes_back_as_it_was_and_a_low_one_has_each_rank_twice(k, rank, height):
    a = normal(0, (k, rank))
    words = dense_tile.pack(a, height)
    assert words.shape == (-(-rank // height), k // 64, height // 16, *layout.TILE_SHAPE)
    rows = [
        jnp.concatenate([dense_tile.unpack_tile(list(tile)) for tile in row], axis=1)
        for row in words
    ]
    for row in rows:
        np.testing.assert_array_equal(row[:height], row[64 - height :])
    np.testing.assert_array_equal(jnp.concatenate([row[:height] for row in rows])[:rank], a.T)


def test_tiles_of_a_are_low_where_that_is_fewer_bytes():
    height = functools.partial(dense_tile.height, 3584)
    assert [height(ranks) for ranks in (8, 32, 96, 160)] == [32] * 4
    assert [height(ranks) for ranks in (48, 64, 128, 128 + 48)] == [64] * 4
    assert dense_tile.height(576, 32) == 64  # nine tiles, which four warpgroups could not share


def test_low_tiles_are_shared_by_more_blocks_if_rows_are_few():
    def shares(m, height):
        units = jnp.zeros((1, 56, 1, height // 16, *layout.TILE_SHAPE), jnp.int32)
        of = functools.partial(dense_tile.shares, units, height=height, m=m, base_bytes=7 << 20)
        return of(most=99, processors=132)

    assert [shares(m, 64) for m in (8, 16, 32, 64)] == [19, 19, 19, 10]
    assert [shares(m, 32) for m in (8, 16, 32, 64)] == [14, 14, 10, 5]


def test_a_unit_of_low_tiles_has_twice_the_columns_where_warpgroups_would_repeat_each_other():
    width = functools.partial(dense_tile.width, 18944)
    wider = {
        (groups, step)
        for groups, step in itertools.product((1, 2, 3, 4), (64, 128, 256))
        if width(groups, step, 32) != width(groups, step)
    }
    assert wider == {(2, 128)} and width(2, 128, 32) == 128 == 2 * width(2, 128)
    assert dense_tile.pieces(18944, 2, 128, 32) == dense_tile.pieces(18944, 2, 128) == 2


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_no_block_multiplies_more_than_twice_as_many_units_of_low_tiles_as_of_the_weight(name):
    """Four times as many held up `down` of 7B on an H200: 27 us instead of 19."""
    card = dataclasses.replace(runtime.H200, name=name)
    for problem, m in itertools.product(shapes.PROBLEMS, (8, 16, 32, 64, 128)):
        ranks = {"qkv": 96, "o": 32, "down": 32}.get(problem.layer)
        if ranks is None or dense_tile.height(problem.k, ranks) != dense_tile.LOW:
            continue
        empty = lambda *shape: np.broadcast_to(np.int32(0), (*shape, *layout.TILE_SHAPE))
        columns = layout.tiles(problem.k)
        words = empty(layout.tiles(problem.n), columns)
        w = layout.HopperNVFP4(words, None, (problem.n, problem.k))
        a = empty(ranks // 32, columns, 2)
        with runtime.on(card):
            config = fused._config(m, problem.n, problem.k, True)
            plan, shares = decode._cut(m, w, config, a)
        units = dense_tile.in_units(a, config.warpgroups, config.step).shape[1]
        assert units <= shares * 2 * -(-plan.units // config.blocks)


def test_a_piece_is_in_the_order_of_a_warpgroups_registers():
    values = jnp.arange(128 * 24.0).reshape(128, 24)
    pieces = fragments.from_rows(values)
    assert pieces.shape == fragments.shape(128, 24) == (2, 3, 512)
    for tile, column, w, g, t, half, i in [(0, 0, 0, 0, 0, 0, 1), (1, 2, 3, 5, 2, 1, 1)]:
        actual = pieces[tile, column, 4 * (32 * w + 4 * g + t) + 2 * half + i]
        assert actual == values[64 * tile + 16 * w + 8 * half + g, 8 * column + 2 * t + i]
    np.testing.assert_array_equal(fragments.to_rows(pieces[None]), values[None])


@pytest.mark.parametrize("sizes", [(128, 64, 64), (100, 40, 8)])
@pytest.mark.parametrize("rank", [8, *map(slow, (24, 32, 64)), 128])
def test_a_row_of_b_meets_the_ranks_of_its_own_part_alone(rank, sizes):
    parts = [(jnp.ones((64, rank)), jnp.full((rank, n), i + 1.0)) for i, n in enumerate(sizes)]
    branch = pack_lora(parts, 1.0, is_packed=False)
    # Column j of a row of b meets row first + j of u: count what each row of the base picks up.
    filled = [layout.whole(size) for size in sizes]
    ranks = np.zeros((sum(filled), branch.a.shape[0]))
    for row in range(sum(filled)):
        first = int(branch.first(row))
        ranks[row, first : first + branch.b.shape[1]] = f32(branch.b[row])
    for i, rows in enumerate(np.split(ranks, np.cumsum(filled)[:-1])):
        rows, more = np.split(rows, [sizes[i]])
        assert not more.any()
        assert (rows[:, i * branch.rank : i * branch.rank + rank] == i + 1).all()
        assert (rows.sum(1) == rank * (i + 1)).all()


@pytest.mark.parametrize(("m", "rows"), [(1, 8), (8, 8), (17, 24), (32, 32), (33, 64), (100, 128)])
def test_rows_are_filled_up_to_what_the_kernels_take(m, rows):
    assert fused.padded(m) == rows
    assert epilogue.supports(rows, 64) is None


def test_what_a_slot_cannot_hold_is_refused_with_its_reason():
    config = Config(3, 64, 2, 2)
    reason = "needs K of whole 192s for A and 3 warpgroups; got K = 256"
    assert configs.supports(8, 192, 256, config, with_adapter=True) == reason
    # Slots of W are made larger for A.
    config = Config(1, 64, 9, 2)
    assert configs.supports(128, 128, 256, config) is None
    reason = "needs 230400 bytes of shared memory of 229376"
    with runtime.on(dataclasses.replace(runtime.H200, shared_bytes=229376 + 1024)):
        assert configs.supports(128, 128, 256, config, with_adapter=True) == reason
    assert "whole tiles of 64 rows; got N = 96" in epilogue.supports(8, 96)


def test_an_epilogue_says_how_much_shared_memory_a_rank_takes():
    assert epilogue.supports(96, 37888, rank=640) is None
    assert epilogue.supports(64, 37888, rank=640, is_swiglu=True) is None
    reason = (
        "needs 245760 bytes of shared memory of 231424 to finish M = 96 rows of LoRA of rank 640"
    )
    assert epilogue.supports(96, 37888, rank=640, is_swiglu=True) == reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "n", "k", "rank", "sizes", "config"),
    [
        # Where W has less in a slot than a tile of A takes.
        slow(8, 192, 192, 24, (64, 128), Config(1, 64, 2, 5)),
        slow(16, 64, 256, 64, (64,), Config(1, 128, 2, 2)),
        slow(8, 128, 192, 8, (128,), Config(2, 64, 2, 2)),
        # Three warpgroups share the pieces of three tiles of A.
        slow(8, 192, 384, 32, (192,), Config(3, 64, 2, 2)),
        # Neither K nor the parts of N in whole tiles; ranks in one tile, and in two.
        (8, 168, 80, 16, (96, 40, 32), Config(1, 64, 2, 3)),
        slow(8, 168, 208, 32, (96, 40, 32), Config(1, 64, 2, 5)),
        slow(8, 104, 208, 32, (104,), Config(2, 128, 2, 2)),
        slow(8, 104, 208, 0, (104,), Config(2, 128, 2, 2)),
    ],
)
@pytest.mark.parametrize("is_packed", [slow(True), False])
def test_linears_of_any_size_meet_arithmetic(interpreter, m, n, k, rank, sizes, config, is_packed):
    t = weight(7, n, k, std=k**-0.5, scale_per_row=True)
    t = t if is_packed else nvfp4.dequantize(t, jnp.bfloat16)
    assert_meets_arithmetic(m, n, k, config, t=t, rank=rank, sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "n", "k", "rank", "sizes", "config"),
    [
        slow(16, 192, 512, 24, (64, 128), Config(1, 256, 2, 5)),  # two parts in one tile of ranks
        slow(8, 128, 256, 0, (), Config(2, 128, 2, 1)),
        slow(8, 256, 512, 128, (128, 128), Config(2, 128, 2, 5)),
        slow(64, 256, 512, 64, (64, 192), Config(2, 128, 2, 4)),
        # Low tiles of A.
        (8, 192, 256, 32, (64, 64, 64), Config(1, 64, 2, 4)),
        slow(8, 192, 512, 32, (64, 64, 64), Config(1, 256, 2, 5)),
        slow(8, 192, 256, 8, (64, 128), Config(1, 256, 2, 3)),
        slow(16, 128, 512, 32, (128,), Config(2, 256, 2, 2)),
        # Each of two warpgroups has a tile of its own: twice the columns of a tile of 64 ranks.
        slow(16, 128, 512, 32, (128,), Config(2, 128, 2, 3)),
        slow(8, 192, 384, 32, (192,), Config(3, 64, 2, 2)),
        slow(64, 256, 512, 16, (256,), Config(4, 128, 2, 2)),
        # Four warpgroups have two pieces of one tile, so a slot takes two tiles.
        slow(8, 256, 384, 16, (256,), Config(4, 64, 2, 2)),
    ],
)
def test_a_linear_with_bias_and_lora_meets_arithmetic(interpreter, m, n, k, rank, sizes, config):
    parts = assert_meets_arithmetic(m, n, k, config, rank=rank, sizes=sizes)
    if parts:
        height = pack_lora(parts, 0.5, is_packed=True).height
        assert height == (64 if rank in (24, 64, 128) else 32)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 16])
def test_what_fills_up_n_and_k_changes_no_bit(interpreter, rank):
    m, n, k, config = 8, 104, 80, Config(2, 64, 2, 2)
    t = weight(7, n, k, std=k**-0.5)
    codes = jnp.pad(nvfp4.unpack_codes(t.codes), ((0, 24), (0, 48)))
    scales = jnp.pad(t.scales.view(jnp.uint8), ((0, 24), (0, 3))).view(t.scales.dtype)
    full = nvfp4.NVFP4Tensor(nvfp4.pack_codes(codes), scales, t.global_scale, (128, 128))
    x, bias, parts = normal(8, (m, k)), normal(1, (n,)), branches(k, rank or 1, (n,))
    more = lambda a, *shape: jnp.pad(a, [(0, s - d) for s, d in zip(shape, a.shape, strict=True)])
    whole_parts = [(more(a, 128, rank or 1), more(b, rank or 1, 128)) for a, b in parts]

    def run(x, t, bias, parts):
        branch = pack_lora(parts, 0.5, is_packed=True) if rank else None
        options = {"branch": branch, "config": config, "interpret": True}
        return fused.linear(x, to_hopper(t), bias=bias, **options)

    wanted = run(more(x, m, 128), full, more(bias, 128), whole_parts)
    np.testing.assert_array_equal(run(x, t, bias, parts), wanted[:, :n])
    assert not wanted[:, n:].any()


@pytest.mark.slow
def test_a_norm_and_a_gate_of_any_width_meet_plain_arithmetic(interpreter):
    m, width, inner, config = 8, 80, 112, Config(1, 64, 2, 4)
    values, scale, stream = residual(m, width)
    unit = unit_of(values)
    np.testing.assert_allclose(stream.unit(EPS)[:, None], unit, rtol=1e-6)
    real = f32(stream.scaled)[:, :width]

    sizes, options = (inner, inner), {"x": stream, "eps": EPS, "is_swiglu": True}
    _, t, parts, hidden = run(m, 2 * inner, width, config, rank=16, sizes=sizes, **options)
    assert hidden.shape == (m, 128) and not hidden[:, inner:].any()
    assert_rounded(hidden[:, :inner], swiglu(expected(real, t, parts, None, unit)))

    traits = {"rank": 16, "sizes": (width,), "x": hidden, "residual": (stream, scale)}
    _, t, parts, new = run(m, width, inner, config, **traits)
    assert (new.width, new.values.shape, new.scaled.shape) == (width, (128, m), (m, 128))
    y = expected(f32(hidden)[:, :inner], t, parts, None)
    assert_rounded(new.values[:width].T, f32(values) + y)
    assert not new.values[width:].any() and not new.scaled[:, width:].any()
    np.testing.assert_allclose(new.unit(EPS)[:, None], unit_of(new.values[:width].T), rtol=1e-6)


@pytest.mark.slow
def test_what_the_next_product_reads_first_is_asked_for_as_that_cuts_it_up(interpreter):
    m, k, config, next_config = 8, 512, Config(1, 256, 2, 4), Config(2, 128, 2, 3)
    w, after = (to_hopper(weight(n, n, k)) for n in (192, 256))
    a = dense_tile.pack(normal(1, (k, 64)))
    x = normal(2, (m, k))
    plain = decode.product(x, w, config, interpret=True)
    after_this = decode.next_product(m, after, next_config, a)
    actual = decode.product(x, w, config, following=after_this, interpret=True)
    np.testing.assert_array_equal(actual.partials, plain.partials)
    plan = decode.product(x, after, next_config, a, interpret=True).plan
    assert after_this.blocks == plan.blocks and after_this.shape == (2, 2)
    for block in range(plan.blocks):
        tile, step = divmod(plan.start(block), plan.steps)
        assert after_this.first(jnp.int32(block)) == (2 * tile, 2 * step)


def run_residual(m, width, config, **options):
    """Runs a linear that reads a residual stream and adds to it; returns the new stream, and what it must be."""
    values, scale, stream = residual(m, width)
    traits = {"rank": 32, "sizes": (width,), "x": stream, "eps": EPS, "residual": (stream, scale)}
    _, t, parts, new = run(m, width, width, config, **traits, **options)
    y = expected(f32(stream.scaled)[:, :width], t, parts, None, unit_of(values))
    return scale, new, f32(values) + y


@pytest.mark.slow
def test_a_norm_spread_over_two_kernels_meets_the_whole_one(interpreter):
    scale, new, wanted = run_residual(8, 256, Config(1, 256, 2, 4))
    assert_rounded(new.values.T, wanted)
    np.testing.assert_array_equal(new.scaled, (f32(new.values.T) * f32(scale)).astype(jnp.bfloat16))
    np.testing.assert_allclose(new.unit(EPS)[:, None], unit_of(new.values.T), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [32, 64])
def test_a_gate_lets_through_what_swiglu_says(interpreter, rank):
    problem = 16, 256, 256, Config(1, 256, 2, 4)
    x, t, parts, y = run(*problem, rank=rank, sizes=(128, 128), is_swiglu=True)
    assert_rounded(y, swiglu(expected(f32(x), t, parts, None)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "shape"),
    spread(
        [8, 16, 32, 64, 128],
        [
            (4608, 3584, 32, (3584, 512, 512)),
            (4608, 3584, 8, (3584, 512, 512)),
            (3584, 18944, 64, (3584,)),
            (3584, 18944, 32, (3584,)),
            # SmolLM2-135M, and parts that begin within a tile.
            (960, 576, 32, (576, 192, 192)),
            (960, 576, 8, (576, 192, 192)),
            (576, 576, 64, (576,)),
            (576, 1536, 32, (576,)),
            (480, 208, 32, (288, 96, 96)),
            (1000, 1008, 100, (600, 200, 200)),
        ],
        every=2,
    ),
)
def test_on_its_device_a_linear_with_lora_meets_plain_arithmetic(m, shape):
    n, k, rank, sizes = shape
    # A tensor core cuts off what it adds up, thousands of times.
    options = {"interpret": False, "share": 0.05}
    assert_meets_arithmetic(m, n, k, None, rank=rank, sizes=sizes, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [8, 64, 128])
@pytest.mark.parametrize("rank", [32, 128])
@pytest.mark.parametrize(("n", "k"), [(37888, 3584), (3072, 576), (2000, 1008)])
def test_on_its_device_a_norm_and_a_gate_meet_plain_arithmetic(m, rank, n, k):
    _, _, stream = residual(m, k)
    options = {"x": stream, "eps": EPS, "is_swiglu": True, "interpret": False}
    _, t, parts, y = run(m, n, k, None, rank=rank, sizes=(n // 2, n // 2), **options)
    unit = np.asarray(stream.unit(EPS))[:, None]
    gate_up = expected(f32(stream.scaled)[:, :k], t, parts, None, unit)
    assert_rounded(y[:, : n // 2], swiglu(gate_up), share=0.05)
    assert not y[:, n // 2 :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [8, 64, 128])
@pytest.mark.parametrize("config", [Config(1, 64, 2, 9), Config(2, 64, 2, 3), Config(3, 64, 2, 4)])
def test_on_its_device_a_slot_is_made_larger_for_lora(m, config):
    x, t, parts, y = run(m, 384, 576, config, rank=32, sizes=(384,), interpret=False)
    assert_rounded(y, expected(f32(x), t, parts, None), share=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [8, 64, 128])
@pytest.mark.parametrize("width", [576, 1008])
def test_on_its_device_a_residual_stream_of_any_width_meets_plain_arithmetic(m, width):
    _, new, wanted = run_residual(m, width, None, interpret=False)
    assert_rounded(new.values[:width].T, wanted, share=0.05)
    assert not new.values[width:].any() and not new.scaled[:, width:].any()
