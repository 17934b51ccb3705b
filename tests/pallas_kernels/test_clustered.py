"""qkv, o and down with sums exchanged inside clusters: against the two kernels that do the same, and plain arithmetic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4, runtime
from pallas_kernels.finished_linear import clustered, epilogue, lora
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.finished_linear.clustered import Config
from pallas_kernels.nvfp4_matmul import config as configs
from pallas_kernels.nvfp4_matmul import layout, shapes
from tests.pallas_kernels.devices import h200  # noqa: F401
from tests.pallas_kernels.test_finished_linear_decode import (
    EPS,
    assert_rounded,
    branches,
    expected,
    f32,
    normal,
    on_cpu,
)

H200 = runtime.H200


def operands(m, sizes, k, rank, *, is_stream, has_own_scales=False, x=None):
    """x, weight and options of a linear that follows a norm and has a bias, or that adds to a stream."""
    n = sum(sizes)
    t = nvfp4.random(jax.random.key(7), (n, k), std=k**-0.5)
    scales = jnp.geomspace(0.5, 8, n) if has_own_scales else 1.0
    t = dataclasses.replace(t, global_scale=t.global_scale * scales)
    parts = branches(k, rank, sizes) if rank else []
    branch = lora.pack_branch(parts, 0.5, is_packed=True) if rank else None
    x = normal(8, (m, k), 3.0) if x is None else x
    scale = lambda size: 1 + 0.1 * normal(3, (size,), 1.0, jnp.float32)
    if is_stream:
        options = {"residual": (epilogue.stream(normal(4, (m, n)), scale(n)), scale(n))}
    else:
        x, options = epilogue.stream(x, scale(k)), {"bias": normal(5, (n,)), "eps": EPS}
    return x, t, parts, {"branch": branch, **options}


def in_two_kernels(x, w, config, options, *, interpret=True):
    """The same linear by product and epilogue; without a branch each tile is divided among as many blocks."""
    blocks = layout.tiles(w.shape[0]) // config.warpgroups * config.cluster
    same = configs.Config(config.warpgroups, config.step, config.stages, blocks)
    has_branch = options["branch"] is not None
    return fused.linear(x, w, config=None if has_branch else same, interpret=interpret, **options)


def bits(y):
    """All arrays of a result; of a stream's squares only the rows that are written."""
    if not isinstance(y, epilogue.Stream):
        return [f32(y)]
    return [f32(y.values), f32(y.scaled), f32(y.squares[: layout.tiles(y.width)])]


# The kernel ----------------------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize(
    ("m", "sizes", "k", "config", "is_stream"),
    [
        # One window of rows, which the second block does not finish.
        (8, (128,), 256, Config(1, 64, 2, 2), True),
        # A window for each block.
        (16, (128, 64), 128, Config(1, 64, 2, 2), False),
        # More blocks than windows: blocks take different columns. An odd number of steps along K.
        pytest.param(*(16, (256,), 320, Config(2, 64, 2, 4), True), marks=pytest.mark.slow),
        # Four windows and five blocks.
        pytest.param(*(32, (256,), 384, Config(2, 64, 2, 5), True), marks=pytest.mark.slow),
        # Three blocks, windows of 8 rows, N that ends within a tile.
        pytest.param(*(24, (128, 40), 384, Config(1, 128, 2, 3), False), marks=pytest.mark.slow),
        # Windows of 16 rows.
        pytest.param(*(64, (128,), 512, Config(2, 128, 2, 4), True), marks=pytest.mark.slow),
    ],
)
def test_clusters_give_the_bits_of_two_kernels(capfd, m, sizes, k, config, is_stream):
    x, t, _, options = operands(m, sizes, k, 0, is_stream=is_stream, has_own_scales=k == 384)
    w = layout.prepare(t)
    y = fused.linear(x, w, config=config, interpret=True, **options)
    assert "RACE" not in capfd.readouterr().out
    jax.tree.map(
        np.testing.assert_array_equal, bits(y), bits(in_two_kernels(x, w, config, options))
    )


@on_cpu
@pytest.mark.parametrize(
    ("m", "sizes", "k", "rank", "config"),
    [
        (8, (64, 64), 128, 16, Config(1, 64, 2, 2, 2)),
        # Two tiles of ranks, and more blocks of A than fill their last cluster.
        pytest.param(*(16, (128, 64, 64), 256, 32, Config(1, 64, 2, 3, 2)), marks=pytest.mark.slow),
        pytest.param(*(24, (256,), 512, 32, Config(2, 128, 2, 2, 4)), marks=pytest.mark.slow),
        pytest.param(*(8, (128,), 256, 96, Config(2, 64, 2, 2, 1)), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_stream", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_clusters_add_loras_branches(capfd, m, sizes, k, rank, config, is_stream):
    x, t, parts, options = operands(m, sizes, k, rank, is_stream=is_stream)
    y = fused.linear(x, layout.prepare(t), config=config, interpret=True, **options)
    assert "RACE" not in capfd.readouterr().out
    if is_stream:
        stream, scale = options["residual"]
        wanted = f32(stream.values).T + expected(f32(x), t, parts, None)
        assert_rounded(y.values.T, wanted)
        assert_rounded(y.scaled, f32(y.values).T * f32(scale))
        return
    unit = np.asarray(x.unit(EPS))[:, None]
    assert_rounded(y, expected(f32(x.scaled)[:, :k], t, parts, options["bias"], unit))


@on_cpu
@pytest.mark.slow
def test_a_row_of_a_cluster_does_not_depend_on_the_others():
    x, config = normal(8, (16, 256), 3.0), Config(1, 64, 2, 4, 4)
    results = []
    for rows in (x, x.at[1:].multiply(-3)):
        stream, t, _, options = operands(16, (128,), 256, 8, is_stream=False, x=rows)
        y = fused.linear(stream, layout.prepare(t), config=config, interpret=True, **options)
        results.append(f32(y)[0])
    np.testing.assert_array_equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [8, 24, 64, 96, 128])
@pytest.mark.parametrize("rank", [0, 16, 32, 64])
@pytest.mark.parametrize(
    ("sizes", "k", "is_stream"),
    [
        ((3584, 512, 512), 3584, False),
        ((3584,), 3584, True),
        ((3584,), 18944, True),
        ((576, 192, 192), 576, False),
    ],
)
def test_on_its_device_clusters_give_the_values_of_two_kernels(m, rank, sizes, k, is_stream):
    x, t, _, options = operands(m, sizes, k, rank, is_stream=is_stream)
    w, ranks = layout.prepare(t), lora.filled_rank(rank) if rank else 0
    config = clustered.pick_config(m, sizes, k, rank=ranks)
    run = lambda: bits(fused.linear(x, w, config=config, **options))
    first = run()
    for _ in range(3):  # counters are zeros again
        jax.tree.map(np.testing.assert_array_equal, run(), first)
    wanted = bits(in_two_kernels(x, w, config, options, interpret=False))
    if not rank:
        jax.tree.map(np.testing.assert_array_equal, first, wanted)
        return
    # The parts of x A are other ones, and the sums' parts may be.
    for actual, values in zip(first[:2], wanted[:2], strict=False):
        assert_rounded(actual, values, share=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [8, 64, 128])
def test_on_its_device_a_row_does_not_depend_on_the_others(m):
    rows = normal(8, (m, 3584), 3.0)
    results = []
    for x in (rows, rows.at[1:].multiply(-3)):
        _, t, _, options = operands(m, (3584,), 3584, 32, is_stream=True)
        config = clustered.pick_config(m, (3584,), 3584, rank=32)
        y = fused.linear(x, layout.prepare(t), config=config, **options)
        results.append(bits(y))
    np.testing.assert_array_equal(results[0][0][:, 0], results[1][0][:, 0])
    np.testing.assert_array_equal(results[0][1][0], results[1][1][0])


# Configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [p for p in shapes.PROBLEMS if p.layer in ("o", "down")])
@pytest.mark.parametrize("m", [8, 16, 24, 32, 64, 96, 128])
@pytest.mark.parametrize("rank", [0, 32])
def test_every_model_has_a_configuration(problem, m, rank):
    asked = {"rank": rank, "device": H200}
    assert clustered.supports(m, (problem.n,), problem.k, **asked) is None
    config = clustered.pick_config(m, (problem.n,), problem.k, **asked)
    assert m % clustered.columns(m, config.cluster) == 0
    # Up to 64 rows all clusters run at the same time.
    ranks = layout.whole(rank)
    grid = clustered.clusters(problem.n, config, ranks=ranks)
    assert m > 64 or grid <= clustered.resident(m, problem.k, config, **asked)


def test_rows_are_divided_among_the_blocks_in_windows_of_eights():
    windows = [clustered.columns(m, cluster) for m, cluster in [(8, 4), (24, 4), (24, 3), (64, 4)]]
    assert windows == [8, 8, 8, 16]
    assert [clustered.columns(128, cluster) for cluster in (2, 3, 8)] == [64, 64, 16]


def test_memory_of_slots_is_reused_only_for_more_slots():
    asked = {"rank": 32, "device": H200}
    few = clustered.candidates(8, (3584,), 3584, **asked)
    many = clustered.candidates(128, (3584,), 3584, **asked)
    assert not few[0].reuses_slots and many[0].reuses_slots
    apart = dataclasses.replace(many[0], reuses_slots=False)
    assert "bytes of shared memory" in clustered.supports(128, (3584,), 3584, apart, **asked)
    assert len(set(few)) == len(few)


def test_clusters_that_run_at_once_are_counted_by_gpcs():
    small, large = (Config(1, 64, 2, size) for size in (4, 8))
    asked = {"rank": 0, "device": dataclasses.replace(H200, shared_bytes=30_000)}
    assert clustered.resident(8, 512, small, **asked) == 32
    assert clustered.resident(8, 512, large, **asked) == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warpgroups": 5}, "warpgroups must be 1 to 4; got 5"),
        ({"step": 96}, "step must be 64, 128 or 256; got 96"),
        ({"stages": 1}, "stages must be 2 or more; got 1"),
        ({"cluster": 9}, "cluster must be 2 to 8; got 9"),
        ({"shares": 0}, "shares must be 1 or more; got 0"),
    ],
)
def test_a_wrong_configuration_is_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Config(1, 64, 2, 2), **change)


def test_what_it_cannot_do_is_refused_with_its_reason():
    refused = lambda m, sizes, k, config, rank=0: clustered.supports(
        m, sizes, k, config, rank=rank, device=H200
    )
    config = Config(2, 64, 2, 4)
    assert "M a multiple of 8 up to 128; got M = 12" in refused(12, (128,), 256, config)
    assert "parts of whole tiles of 64 rows" in refused(8, (96, 32), 256, config)
    assert "N of whole 128-row tiles; got N = 192" in refused(8, (192,), 256, config)
    assert "has 3 steps along K for 4 blocks" in refused(8, (128,), 192, config)
    assert "whole steps of 128; got K = 192" in refused(8, (128,), 192, Config(1, 128, 2, 2))
    many = dataclasses.replace(config, shares=8)
    assert "has 4 units of A for 8 blocks" in refused(8, (128,), 256, many, rank=8)
    large = Config(4, 128, 4, 2)
    assert "bytes of shared memory of 231424" in refused(128, (256,), 512, large)
    with pytest.raises(NotImplementedError, match="has 3 steps"):
        x, t, _, options = operands(8, (128,), 192, 0, is_stream=True)
        fused.linear(x, layout.prepare(t), config=config, interpret=True, **options)


def test_clusters_are_used_only_where_they_are_asked_for(monkeypatch, h200):  # noqa: F811
    asked = {"is_packed": True, "rank": 32}
    assert fused._clusters(8, (3584,), 3584, 32) is None
    monkeypatch.setenv("PALLAS_CLUSTER_SUMS", "1")
    config = fused._clusters(8, (3584,), 3584, 32)
    assert config == clustered.pick_config(8, (3584,), 3584, rank=32)
    assert fused.supports(8, (3584,), 3584, **asked) is None
    # Parts that are not whole tiles are still computed by two kernels.
    assert fused._clusters(8, (100, 60), 3584, 32) is None
    assert fused.supports(8, (100, 60), 3584, **asked) is None
