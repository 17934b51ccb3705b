"""Tests fused linears whose rows of x are several tiles, interpreted and on a GPU.

Tiles are small here, so that a kernel with several is interpreted in a second.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import runtime
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.finished_linear import gated_config, lora
from pallas_kernels.nvfp4_matmul import decode_config as configs
from pallas_kernels.nvfp4_matmul import dense_tile, layout, shapes
from pallas_kernels.nvfp4_matmul.decode_config import Config
from pallas_kernels.nvfp4_matmul.decode_plan import Plan
from tests.combinations import spread
from tests.pallas_kernels import test_gated
from tests.pallas_kernels.common import f32, slow, to_hopper, weight
from tests.pallas_kernels.devices import like
from tests.pallas_kernels.test_finished_linear_decode import (
    EPS,
    assert_meets_arithmetic,
    assert_rounded,
    branches,
    expected,
    pack_lora,
    residual,
    run,
    unit_of,
)


@pytest.fixture
def small_tiles(monkeypatch):
    """Makes a tile of x at most 16 rows, and allows any multiple of 8."""
    monkeypatch.setattr(configs, "MAX_M", 16)
    monkeypatch.setattr(configs, "GRAIN", 8)


@pytest.mark.parametrize(
    ("m", "rows"), [(129, 192), (200, 256), (256, 256), (257, 288), (300, 384), (512, 512)]
)
def test_rows_beyond_a_tile_are_filled_up_to_equal_tiles(m, rows):
    assert fused.padded(m) == rows
    assert configs.unless_rows(rows) is None
    assert configs.rows_of_tile(rows) in (96, 128)


def test_rows_that_are_no_equal_tiles_are_refused_with_the_reason():
    assert configs.unless_rows(200) == "needs 2 tiles of whole 32s of M; got M = 200"
    assert gated_config.supports(516, 128, 64) == "needs M a multiple of 8; got M = 516"
    assert gated_config.supports(520, 128, 64) == "needs 1 <= M <= 512; got M = 520"


@pytest.mark.parametrize("x_tiles", [2, 4])
def test_a_tile_of_w_is_multiplied_by_each_tile_of_x_before_the_next_one(x_tiles):
    plan = Plan(3 * x_tiles, 5, 4, x_tiles)
    pairs = [tuple(map(int, plan.split_tile(jnp.int32(tile)))) for tile in range(plan.tiles)]
    assert pairs == list(itertools.product(range(3), range(x_tiles)))


@pytest.mark.parametrize(
    ("m", "n", "k", "config", "rank", "sizes"),
    [
        (32, 128, 128, Config(1, 64, 2, 5), 0, ()),  # a block ends a tile of x and begins the next
        # Low tiles of A in two parts; some of the blocks multiply by A, or others do.
        (32, 192, 256, Config(1, 64, 2, 7), 32, (64, 64, 64)),
        slow(48, 192, 256, Config(1, 64, 2, 7, shares=2), 32, (64, 64, 64)),
        slow(64, 168, 80, Config(1, 64, 2, 11, shares=1), 16, (96, 40, 32)),
        slow(24, 128, 256, Config(2, 128, 2, 3, shares=2), 64, (128,)),
    ],
)
def test_linears_of_several_tiles_meet_arithmetic(
    interpreter, small_tiles, m, n, k, config, rank, sizes
):
    m = m + -m % (8 * configs.x_tiles(m))
    t = weight(7, n, k, std=k**-0.5, scale_per_row=True)
    assert_meets_arithmetic(m, n, k, config, t=t, rank=rank, sizes=sizes)


@pytest.mark.parametrize("rank", [slow(0), 16])
def test_a_residual_of_several_tiles_meets_arithmetic(interpreter, small_tiles, rank):
    m, n, k, shares = 32, 128, 128, int(rank > 0)
    values, scale, stream = residual(m, n)
    config = Config(1, 64, 2, 5, shares)
    more = {"residual": (stream, scale)}
    x, t, parts, new = run(m, n, k, config, rank=rank, sizes=(n,), **more)
    wanted = f32(values) + expected(f32(x), t, parts, None)
    assert_rounded(new.values.T, wanted)
    assert_rounded(new.scaled, f32(new.values.T) * f32(scale))
    np.testing.assert_allclose(new.unit(EPS)[:, None], unit_of(new.values.T), rtol=1e-5)


@pytest.mark.parametrize(
    ("m", "inner", "k", "rank", "config"),
    [
        (32, 64, 128, 32, gated_config.Config(1, 64, 2, 2)),
        slow(32, 64, 128, 0, gated_config.Config(1, 64, 2, 2)),
        # Four tiles of x; two turns, in the second of which a warpgroup has no tile.
        slow(64, 160, 208, 48, gated_config.Config(2, 64, 3, 2)),
        slow(32, 96, 128, 32, gated_config.Config(2, 64, 2, 1, True)),
    ],
)
def test_a_gate_of_several_tiles_lets_through_what_swiglu_says(
    interpreter, small_tiles, monkeypatch, m, inner, k, rank, config
):
    several = lambda **traits: like(**traits | {"processors": 4 * traits["processors"]})
    monkeypatch.setattr(test_gated, "like", several)
    y, wanted = test_gated.run(m, inner, k, rank, config, scale_per_row=rank == 32)
    assert_rounded(y, wanted)


@pytest.mark.parametrize("problem", [p for p in shapes.PROBLEMS if p.layer != "lm_head"])
@pytest.mark.parametrize("card", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_every_model_has_a_configuration_for_several_tiles(problem, card, monkeypatch):
    monkeypatch.setenv("PALLAS_DECODE_TILES", "1")
    n, k = problem.n, problem.k
    parts = {"qkv": 3, "gate_up": 2}.get(problem.layer, 1)
    with runtime.on(like(**{**vars(runtime.H200), "name": card})):
        for m, rank in itertools.product((192, 256, 288, 384, 512), (0, 16, 32, 64)):
            sizes = [n // parts] * parts
            options = {"is_packed": True, "rank": rank, "is_swiglu": parts == 2}
            assert fused.supports(m, sizes, k, **options) is None
            if problem.layer == "gate_up":
                config = gated_config.pick_config(m, n, k, rank=rank)
                tiling = gated_config.tiling_of(m, n, k, config, rank=rank)
                blocks = tiling.x_tiles * (config.blocks + tiling.blocks_of_a)
                assert tiling.tiles_of_a * 4 <= 16 < gated_config.COUNTERS_OF_TILE
            else:
                config = fused._config(m, n, k, parts * rank)
                tiles = dense_tile.tiles(k, parts * lora.filled_rank(rank)) if rank else 0
                blocks = config.blocks + configs.x_tiles(m) * tiles * config.shares
            assert blocks <= runtime.H200.processors


def test_the_least_cost_is_of_few_parts_and_of_blocks_that_all_work(h200):
    for n, k in [(1536, 1536), (1536, 8960), (3584, 3584), (4608, 3584)]:
        config = configs.estimated(256, n, k)
        tiles = 2 * layout.tiles(n) // config.warpgroups
        plan = Plan(tiles, layout.whole(k) // config.step, config.blocks, 2)
        assert plan.most_parts <= 6 and config.blocks > 60
        worse = Config(config.warpgroups, config.step, config.stages, tiles)
        assert configs.cost(256, n, k, config) <= configs.cost(256, n, k, worse)


def test_several_tiles_are_off_until_they_are_asked_for(h200, monkeypatch):
    options = {"is_packed": True, "rank": 16}
    assert fused.supports(256, [128], 128, **options) == "needs 1 <= M <= 128; got M = 256"
    monkeypatch.setenv("PALLAS_DECODE_TILES", "1")
    assert fused.supports(256, [128], 128, **options) is None
    # XLA multiplies by a dense weight, whose sums take more memory than one tile's.
    assert fused.supports(256, [128], 128, **options | {"is_packed": False}) is not None


_LINEARS = [
    (p.n, p.k, {"qkv": (p.n // 2, p.n // 4, p.n // 4)}.get(p.layer, (p.n,)))
    for p in shapes.PROBLEMS
    if p.model in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b") and p.layer in ("qkv", "o", "down")
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "rank", "shape"), spread([192, 256, 288, 512], [0, 16, 32, 64], _LINEARS, every=6)
)
def test_on_its_device_a_linear_of_several_tiles_meets_arithmetic(monkeypatch, m, rank, shape):
    monkeypatch.setenv("PALLAS_DECODE_TILES", "1")
    n, k, sizes = shape
    options = {"rank": rank, "sizes": sizes, "interpret": False, "share": 0.05}
    assert_meets_arithmetic(m, n, k, None, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize("m", [192, 512])
@pytest.mark.parametrize(("n", "k"), [(896, 4864), (1536, 8960), (3584, 3584)])
def test_on_its_device_a_residual_of_several_tiles_meets_arithmetic(monkeypatch, n, k, m, rank):
    monkeypatch.setenv("PALLAS_DECODE_TILES", "1")
    values, scale, stream = residual(m, n)
    more = {"residual": (stream, scale), "interpret": False}
    x, t, parts, new = run(m, n, k, None, rank=rank, sizes=(n,), **more)
    wanted = f32(values) + expected(f32(x), t, parts, None)
    assert_rounded(new.values.T, wanted, share=0.05)
    np.testing.assert_allclose(new.unit(EPS)[:, None], unit_of(new.values.T), rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "rank", "shape"),
    spread(
        [192, 256, 384, 512], [0, 8, 32, 64], [(4864, 896), (8960, 1536), (18944, 3584)], every=4
    ),
)
def test_on_its_device_a_gate_of_several_tiles_lets_through_what_swiglu_says(m, rank, shape):
    for _ in range(3):  # counters are zeros again
        y, wanted = test_gated.run(m, *shape, rank, interpret=False)
        assert_rounded(y, wanted, share=0.05)


@pytest.mark.gpu
def test_on_its_device_a_row_does_not_depend_on_the_other_tiles(monkeypatch):
    monkeypatch.setenv("PALLAS_DECODE_TILES", "1")
    x = jax.random.normal(jax.random.key(0), (512, 1536), jnp.bfloat16)
    t = weight(7, 2048, 1536, std=1536**-0.5)
    branch = pack_lora(branches(1536, 32, (1536, 512)), 0.5, is_packed=True)
    linear = functools.partial(fused.linear, w=to_hopper(t), branch=branch)
    y, other = linear(x), linear(x.at[1:].multiply(-3))
    np.testing.assert_array_equal(y[0], other[0])
