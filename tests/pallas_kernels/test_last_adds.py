"""Tests linears that the last block of a tile finishes against the two kernels, whose bits they give."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import runtime
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.finished_linear import few_rows, gated, last_adds, lora
from pallas_kernels.mosaic import fragments
from pallas_kernels.nvfp4_matmul import config as configs
from pallas_kernels.nvfp4_matmul import decode, shapes
from pallas_kernels.nvfp4_matmul.config import Config
from tests.combinations import spread
from tests.pallas_kernels.devices import h200  # noqa: F401
from tests.pallas_kernels.test_few_rows import bits, operands
from tests.pallas_kernels.test_finished_linear_decode import normal, on_cpu, prepare

H200 = runtime.H200
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)
# Joined rows of W and K of a layer's linears.
QKV, O, DOWN = ((3584, 512, 512), 3584), ((3584,), 3584), ((3584,), 18944)


def assert_same(one, two):
    jax.tree.map(np.testing.assert_array_equal, bits(one), bits(two))


# The kernel ----------------------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize(
    ("m", "sizes", "k", "rank", "config", "is_stream"),
    [
        # Norm and bias, three parts, blocks that have units of two tiles, and two sums of A.
        (8, (64, 64), 384, 16, Config(1, 64, 2, 8), False),
        # A residual, two tiles in a block, neither N nor K in whole tiles.
        slow(16, (100,), 240, 0, Config(2, 64, 2, 3), True),
        # One part, which is not counted. Ranks of two parts in one tile of A, of the third in another.
        slow(8, (128, 64, 64), 128, 32, Config(2, 128, 2, 2), False),
        # Several windows of x, of 32 and of 16 rows, and more sums of A than are loaded at once.
        slow(64, (128,), 1024, 32, Config(1, 64, 2, 12), True),
        slow(96, (64, 64), 512, 16, Config(1, 64, 2, 16), False),
        slow(24, (64,), 256, 32, Config(1, 64, 2, 4), True),
        # Two tiles of A's ranks for a row of W.
        slow(128, (64,), 512, 128, Config(1, 128, 2, 4), True),
        slow(16, (128, 64), 384, 128, Config(3, 64, 2, 4), False),
    ],
)
def test_one_kernel_gives_the_bits_of_two(capfd, m, sizes, k, rank, config, is_stream):
    has_own_scales = m == 8
    x, t, _, options = operands(
        m, sizes, k, rank, is_stream=is_stream, has_own_scales=has_own_scales
    )
    w = prepare(t)
    one = last_adds.linear(x, w, config=config, device=H200, interpret=True, **options)
    assert "RACE" not in capfd.readouterr().out
    two = fused.linear(x, w, config=config, interpret=True, **options)
    jax.tree.map(np.testing.assert_array_equal, bits(one)[:2], bits(two)[:2])
    # The epilogue adds up squares of eight rows of x at a time, and XLA may then choose another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), bits(one), bits(two))


@on_cpu
@pytest.mark.slow
def test_a_linear_of_decoding_finds_the_kernel_by_its_configuration(monkeypatch, h200):  # noqa: F811
    monkeypatch.setenv("PALLAS_LAST_ADDS", "1")
    started = []
    launch = last_adds.linear
    monkeypatch.setattr(last_adds, "linear", lambda *a, **o: started.append(o) or launch(*a, **o))
    x, t, _, options = operands(8, (128,), 256, 0, is_stream=True)
    w, after = prepare(t), prepare(operands(8, (64,), 128, 0, is_stream=True)[1])
    config = fused._config(8, 128, 256, with_branch=False)
    run = lambda **more: fused.linear(x, w, interpret=True, **options, **more)
    wanted = run(config=config)
    assert not started
    assert_same(run(), wanted)
    # It asks for what the next product reads first, and that changes nothing.
    assert_same(run(following=(after, None, False)), wanted)
    assert [(o["config"], o["following"] is None) for o in started] == [
        (config, True),
        (config, False),
    ]


def both(m, shape, rank, seed=8):
    """A problem's functions: in one kernel with the given counters, and in two."""
    sizes, k = shape
    x = normal(seed, (m, k), 3.0)
    x, t, _, options = operands(m, sizes, k, rank, is_stream=len(sizes) == 1, x=x)
    w, ranks = prepare(t), lora.filled_rank(rank) if rank else 0
    base = fused._config(m, sum(sizes), k, rank > 0)
    config = last_adds.fitted(m, sizes, k, base, rank=ranks)
    one = lambda counters: last_adds.linear(x, w, config=config, counters=counters, **options)
    return one, lambda: fused.linear(x, w, config=base, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "rank", "shape"),
    spread(
        [8, 16, 24, 32, 64, 96, 128],
        [0, 16, 32, 64, 128],
        [
            QKV,
            O,
            DOWN,
            ((5120, 1024, 1024), 5120),
            ((5120,), 13824),
            ((576,), 1008),
            ((2000,), 576),
        ],
        every=7,
    ),
)
def test_on_its_device_one_kernel_gives_the_bits_of_two(m, rank, shape):
    one, two = both(m, shape, rank)
    wanted = two()
    for _ in range(10):  # whichever block is last
        assert_same(one(None), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [8, 64, 128])
def test_on_its_device_linears_share_counters_and_leave_them_at_zero(m):
    counters = jnp.zeros((fused.counters_for(QKV[0], 128),), jnp.int32)
    mixed = [(QKV, 32), (O, 32), (DOWN, 32), (QKV, 0), (DOWN, 128), (QKV, 128)]
    problems = [both(m, shape, rank, seed) for seed, (shape, rank) in enumerate(mixed)]
    wanted = [two() for _, two in problems]
    for _ in range(2):
        for (one, _), expected in zip(problems, wanted, strict=True):
            assert_same(one(counters), expected)
    assert not np.any(counters)


# Configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("rank", [0, 32, 128])
def test_a_model_keeps_its_plans_and_as_many_blocks_at_once(m, rank, h200):  # noqa: F811
    for problem in shapes.PROBLEMS:
        if problem.layer not in ("qkv", "o", "down"):
            continue
        sizes = (problem.n - 256, 128, 128) if problem.layer == "qkv" else (problem.n,)
        base = fused._config(m, problem.n, problem.k, rank > 0)
        if configs.supports(m, problem.n, problem.k, base, with_adapter=rank > 0) is not None:
            continue
        config = last_adds.fitted(m, sizes, problem.k, base, rank=rank)
        if config is None:
            # In two kernels three blocks of two slots run at once, which leave no room for B and U.
            assert (m, rank, base.stages) == (32, 128, 2), problem
            continue
        cut = lambda c: (c.warpgroups, c.step, c.blocks)
        assert cut(config) == cut(base) and 2 <= config.stages <= base.stages
        used = last_adds.shared_bytes(m, problem.n, problem.k, config, rank=rank)
        resident = -(-base.blocks // H200.processors)
        # Each block takes 1 KiB that is not its own.
        assert resident * (used + 1024) <= H200.shared_bytes, problem


@pytest.mark.parametrize("blocks", [1, 7, 36, 37, 132, 250])
def test_a_tile_has_no_more_parts_than_registers_were_kept_for(blocks):
    for tiles, steps in ((28, 28), (36, 7), (56, 74), (1, 250)):
        for fewer in range(max(1, blocks - 20), min(blocks, tiles * steps) + 1):
            assert decode.Plan(tiles, steps, fewer).most_parts <= -(-blocks // tiles) + 1


def test_registers_decide_how_many_rows_of_x_are_finished_at_a_time():
    columns = lambda m, n, config: last_adds.columns(m, n, config, H200)
    # Threads of a processor: 128 of 7 parts each, 512, 512 in two blocks.
    assert columns(64, 3584, Config(1, 128, 4, 132)) == 32
    assert columns(64, 5120, Config(4, 128, 4, 132)) == 8
    assert columns(64, 3584, Config(2, 128, 4, 264)) == 8
    assert [columns(m, 3584, Config(1, 128, 4, 132)) for m in (8, 16, 24, 48)] == [8, 16, 8, 16]


def test_sums_of_all_parts_are_added_in_order():
    values = np.float32([1e8, 1, -1e8, 1, 3, 1e8, -1e8, 0.5, 2])
    for parts, at_once in itertools.product(range(1, len(values) + 1), (1, 4, 8)):
        total = fragments.added_up(lambda i: jnp.asarray(values)[i], parts, at_once)
        wanted = np.float32(0)
        for value in values[:parts]:
            wanted += value
        assert total == wanted


def test_what_it_cannot_do_is_refused_with_its_reason():
    config = Config(4, 128, 4, 4)
    refused = lambda m, sizes, k, rank=0: last_adds.supports(
        m, sizes, k, config, rank=rank, device=H200
    )
    assert refused(12, (512,), 512) == "needs M a multiple of 8; got M = 12"
    assert "parts of whole tiles of 64 rows" in refused(8, (96, 416), 512)
    assert refused(8, (512,), 448) == "needs K of whole steps of 128; got K = 448"
    assert refused(128, (512,), 512) is None
    assert "for slots, and B and U of rank 128" in refused(128, (512,), 512, 128)
    x, t, _, options = operands(8, (128,), 256, 0, is_stream=True)
    with pytest.raises(NotImplementedError, match="whole 256-row tiles"):
        last_adds.linear(x, prepare(t), config=config, device=H200, **options)
    few = jnp.zeros((3,), jnp.int32)
    with pytest.raises(ValueError, match="needs 4 counters for N = 128; got 3"):
        last_adds.linear(
            x, prepare(t), config=Config(1, 64, 2, 4), counters=few, device=H200, **options
        )


def test_it_is_used_only_where_it_is_asked_for(monkeypatch, h200):  # noqa: F811
    problems = [(8, *QKV, 32), (64, *O, 128), (128, *DOWN, 0)]
    assert [fused._last_adds(*problem) for problem in problems] == [None] * 3
    monkeypatch.setenv("PALLAS_LAST_ADDS", "1")
    for m, sizes, k, rank in problems:
        assert fused._last_adds(m, sizes, k, rank).stages >= 2
    # Parts that are not whole tiles are still computed by two kernels.
    assert fused._last_adds(8, (100, 60), 512, 32) is None


def test_the_counters_of_a_step_are_enough_for_each_of_its_kernels():
    assert fused.counters_for((64,), 0) == gated.COUNTERS
    assert fused.counters_for((3584, 512, 512), 32) == 2 + 2 + 72
    assert fused.counters_for((3584,), 24) == last_adds.counters_for((3584,), 32) == 2 + 1 + 56
    assert few_rows.tiles_of_a((3584, 512, 512), 32) == 2
