"""Tests qkv and o of few rows in one kernel against two kernels that divide K alike, and against plain arithmetic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import runtime
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.finished_linear import epilogue, few_rows, lora
from pallas_kernels.finished_linear.few_rows import Config
from pallas_kernels.nvfp4_matmul import config as configs
from pallas_kernels.nvfp4_matmul import layout, shapes
from tests.combinations import spread
from tests.pallas_kernels.devices import h200  # noqa: F401
from tests.pallas_kernels.test_finished_linear_decode import (
    EPS,
    assert_rounded,
    branches,
    expected,
    f32,
    normal,
    on_cpu,
    pack_branch,
    prepare,
    random,
    stream_of,
)

H200 = runtime.H200


def operands(m, sizes, k, rank, *, is_stream, has_own_scales=False, x=None):
    """x, weight and options of a linear that follows a norm and has a bias, or that adds to a stream."""
    n = sum(sizes)
    t = random(jax.random.key(7), (n, k), std=k**-0.5)
    scales = jnp.geomspace(0.5, 8, n) if has_own_scales else 1.0
    t = dataclasses.replace(t, global_scale=t.global_scale * scales)
    parts = branches(k, rank, sizes) if rank else []
    branch = pack_branch(parts, 0.5, is_packed=True) if rank else None
    x = normal(8, (m, k), 3.0) if x is None else x
    scale = lambda size: 1 + 0.1 * normal(3, (size,), 1.0, jnp.float32)
    if is_stream:
        options = {"residual": (stream_of(normal(4, (m, n)), scale(n)), scale(n))}
    else:
        x, options = stream_of(x, scale(k)), {"bias": normal(5, (n,)), "eps": EPS}
    return x, t, parts, {"branch": branch, **options}


def bits(y):
    """All arrays of a result; of a stream's squares only the rows that are written."""
    if not isinstance(y, epilogue.Stream):
        return [f32(y)]
    return [f32(y.values), f32(y.scaled), f32(y.squares[: layout.tiles(y.width)])]


def assert_meets_plain_arithmetic(y, x, t, parts, options, share=0.01):
    if isinstance(y, epilogue.Stream):
        stream, scale = options["residual"]
        wanted = f32(stream.values).T + expected(f32(x), t, parts, None)
        assert_rounded(y.values.T, wanted, share=share)
        assert_rounded(y.scaled, f32(y.values).T * f32(scale), share=share)
        whole = 1 / np.sqrt(np.mean(np.float64(f32(y.values)) ** 2, axis=0) + EPS)
        np.testing.assert_allclose(y.unit(EPS), whole, rtol=1e-5)
        return
    unit = np.asarray(x.unit(EPS))[:, None]
    wanted = expected(f32(x.scaled)[:, : t.shape[1]], t, parts, options["bias"], unit)
    assert_rounded(y, wanted, share=share)


# The kernel ----------------------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize(
    ("m", "sizes", "k", "config", "is_stream"),
    [
        (8, (128,), 256, Config(2, 64, 2), True),
        # Slots are used again, and the last of four warpgroups has more columns than the others.
        pytest.param(*(16, (64, 64), 640, Config(4, 64, 2), False), marks=pytest.mark.slow),
        pytest.param(*(8, (192,), 1280, Config(2, 128, 2), False), marks=pytest.mark.slow),
        # A warpgroup without columns.
        pytest.param(*(16, (64,), 192, Config(4, 64, 2), True), marks=pytest.mark.slow),
    ],
)
def test_one_kernel_gives_the_bits_of_two(capfd, m, sizes, k, config, is_stream):
    x, t, _, options = operands(m, sizes, k, 0, is_stream=is_stream, has_own_scales=k == 640)
    w = prepare(t)
    y = few_rows.linear(x, w, config=config, device=H200, interpret=True, **options)
    assert "RACE" not in capfd.readouterr().out
    blocks = layout.tiles(sum(sizes)) * min(config.warpgroups, k // config.step)
    same = configs.Config(1, config.step, 2, blocks)
    two = fused.linear(x, w, config=same, interpret=True, **options)
    # The epilogue adds up squares of eight rows of x at a time, and XLA may then choose another order.
    jax.tree.map(np.testing.assert_array_equal, bits(y)[:2], bits(two)[:2])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), bits(y), bits(two))


@on_cpu
@pytest.mark.parametrize(
    ("m", "sizes", "k", "rank", "config", "is_stream"),
    [
        (8, (64, 64), 256, 16, Config(2, 64, 4, 2), False),
        # Slots of A are used again; two tiles of A, in each of which two parts have their ranks.
        pytest.param(
            *(16, (128, 64, 64), 768, 32, Config(2, 64, 4, 1), False), marks=pytest.mark.slow
        ),
        # K in whole tiles only when it is filled up, and ranks in two tiles that a row reads both.
        pytest.param(*(16, (128,), 496, 96, Config(2, 128, 2, 3), True), marks=pytest.mark.slow),
        pytest.param(*(8, (64,), 512, 8, Config(4, 64, 4, 2), True), marks=pytest.mark.slow),
    ],
)
def test_a_linear_with_lora_meets_plain_arithmetic(capfd, m, sizes, k, rank, config, is_stream):
    x, t, parts, options = operands(m, sizes, k, rank, is_stream=is_stream)
    w = prepare(t)
    y = few_rows.linear(x, w, config=config, device=H200, interpret=True, **options)
    assert "RACE" not in capfd.readouterr().out
    assert_meets_plain_arithmetic(y, x, t, parts, options)


@on_cpu
@pytest.mark.slow
def test_a_linear_of_decoding_finds_the_kernel_by_its_configuration(monkeypatch, h200):  # noqa: F811
    monkeypatch.setenv("PALLAS_FEW_ROWS", "1")
    x, t, _, options = operands(8, (128,), 256, 0, is_stream=True)
    w, after = prepare(t), prepare(operands(8, (64,), 128, 0, is_stream=True)[1])
    config = fused._few_rows(8, (128,), 256, 0)
    assert config == few_rows.pick_config(8, (128,), 256, rank=0)
    run = lambda **more: bits(fused.linear(x, w, interpret=True, **options, **more))
    wanted = bits(few_rows.linear(x, w, config=config, interpret=True, **options))
    jax.tree.map(np.testing.assert_array_equal, run(), wanted)
    # It asks for what the next product reads first, and that changes nothing.
    jax.tree.map(np.testing.assert_array_equal, run(following=(after, None, False)), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "rank", "shape"),
    spread(
        [8, 16],
        [0, 16, 32, 64, 128],
        [
            ((3584, 512, 512), 3584, False),
            ((3584,), 3584, True),
            ((5120, 1024, 1024), 5120, False),
            ((5120,), 5120, True),
            ((576, 192, 192), 576, False),
        ],
        every=5,
    ),
)
def test_on_its_device_a_linear_meets_plain_arithmetic(m, rank, shape):
    sizes, k, is_stream = shape
    x, t, parts, options = operands(m, sizes, k, rank, is_stream=is_stream)
    w, ranks = prepare(t), lora.filled_rank(rank) if rank else 0
    config = few_rows.pick_config(m, sizes, k, rank=ranks)
    run = lambda: few_rows.linear(x, w, config=config, **options)
    first = run()
    for _ in range(3):  # counters are zeros again
        jax.tree.map(np.testing.assert_array_equal, bits(run()), bits(first))
    assert_meets_plain_arithmetic(first, x, t, parts, options, share=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [8, 16])
def test_on_its_device_a_row_does_not_depend_on_the_others(m):
    rows = normal(8, (m, 3584), 3.0)
    results = []
    for x in (rows, rows.at[1:].multiply(-3)):
        x, t, _, options = operands(m, (3584,), 3584, 32, is_stream=True, x=x)
        config = few_rows.pick_config(m, (3584,), 3584, rank=32)
        results.append(bits(few_rows.linear(x, prepare(t), config=config, **options)))
    np.testing.assert_array_equal(results[0][0][:, 0], results[1][0][:, 0])
    np.testing.assert_array_equal(results[0][1][0], results[1][1][0])


# Configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [8, 16])
@pytest.mark.parametrize("rank", [0, 8, 32, 64, 128])
@pytest.mark.parametrize(
    ("sizes", "k"),
    [
        ((3584, 512, 512), 3584),  # 7B
        ((3584,), 3584),
        ((5120, 1024, 1024), 5120),  # 14B and 32B
        ((5120,), 5120),
        ((4096, 1024, 1024), 4096),  # Llama 8B
    ],
)
def test_blocks_of_a_configuration_run_at_once(m, rank, sizes, k):
    config = few_rows.pick_config(m, sizes, k, rank=rank, device=H200)
    assert few_rows.supports(m, sizes, k, rank=rank, device=H200) is None
    blocks = sum(sizes) // 64 + few_rows.tiles_of_a(sizes, rank) * config.shares
    assert blocks <= H200.processors and config.warpgroups == 4
    assert bool(config.shares) == bool(rank)


def test_down_and_gate_up_are_left_to_two_kernels():
    for problem in shapes.PROBLEMS:
        reason = few_rows.supports(8, (problem.n,), problem.k, device=H200)
        if problem.layer == "down" and problem.k > 8192:
            assert reason == f"needs K of 8192 at most; got K = {problem.k}"
        if problem.layer == "gate_up":
            assert reason is not None


def test_what_it_cannot_do_is_refused_with_its_reason():
    refused = lambda m, sizes, k, *config, rank=0: few_rows.supports(
        m, sizes, k, *config, rank=rank, device=H200
    )
    config = Config(2, 128, 2, 1)
    assert refused(24, (128,), 256) == "needs M = 8 or 16; got M = 24"
    assert "parts of whole tiles of 64 rows" in refused(8, (96, 32), 256)
    assert refused(8, (128,), 192, config) == "needs K of whole steps of 128; got K = 192"
    few = "needs 2 slots for each warpgroup; got 1"
    assert refused(8, (64,), 512, Config(2, 128, 1)) == few
    assert refused(8, (64,), 256, Config(2, 128, 1)) is None
    assert refused(8, (128 * 64,), 256, config) is None
    assert refused(8, (133 * 64,), 256, config) == "needs 133 processors of 132"
    assert refused(8, (132 * 64,), 256, config, rank=8) == "needs 133 processors of 132"
    assert "has no configuration" in refused(8, (132 * 64,), 256, rank=8)
    assert "needs slots of 4 tiles for LoRA's A; got 2" in refused(
        8, (64,), 256, Config(2, 128, 1, 1), rank=8
    )
    assert refused(8, (64,), 256, Config(2, 128, 2), rank=8) == "needs blocks for LoRA's A"
    assert "bytes of shared memory of 231424" in refused(16, (64,), 8192, Config(4, 256, 4))
    x, t, _, options = operands(8, (64,), 192, 0, is_stream=True)
    with pytest.raises(NotImplementedError, match="whole steps of 128"):
        few_rows.linear(x, prepare(t), config=config, device=H200, **options)


def test_one_kernel_is_used_only_where_it_is_asked_for(monkeypatch, h200):  # noqa: F811
    asked = {"is_packed": True, "rank": 32}
    assert fused._few_rows(8, (3584,), 3584, 32) is None
    monkeypatch.setenv("PALLAS_FEW_ROWS", "1")
    config = fused._few_rows(8, (3584,), 3584, 32)
    assert config == few_rows.pick_config(8, (3584,), 3584, rank=32)
    assert fused.supports(8, (3584,), 3584, **asked) is None
    # More rows, longer ones and parts that are not whole tiles are still computed by two kernels.
    for m, sizes, k in [(32, (3584,), 3584), (8, (3584,), 18944), (8, (100, 60), 3584)]:
        assert fused._few_rows(m, sizes, k, 32) is None
        assert fused.supports(m, sizes, k, **asked) is None
