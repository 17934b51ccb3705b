"""Tests gate_up that is finished inside its product against plain arithmetic, in interpret mode and on a GPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4_matmul, runtime, unprepare
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.finished_linear import finished_linear, gated, gated_config, lora, prepare_lora
from pallas_kernels.finished_linear.gated_config import Config
from pallas_kernels.nvfp4_matmul import api, layout, shapes
from tests.combinations import spread
from tests.pallas_kernels.common import f32, slow, to_hopper, weight
from tests.pallas_kernels.devices import like
from tests.pallas_kernels.test_finished_linear_decode import (
    EPS,
    assert_rounded,
    branches,
    expected,
    normal,
    pack_lora,
    stream_of,
    swiglu,
)


def run(m, inner, k, rank, config=None, *, scale_per_row=False, interpret=True, x=None):
    """Returns the result of the kernel for a stream, and that of plain arithmetic."""
    t = weight(7, 2 * inner, k, std=k**-0.5, scale_per_row=scale_per_row)
    parts = branches(k, rank, (inner, inner)) if rank else []
    branch = pack_lora(parts, 0.5, is_packed=True, is_paired=True) if rank else None
    scale = 1 + 0.1 * normal(3, (k,), 1.0, jnp.float32)
    stream = stream_of(normal(2, (m, k), 3.0) if x is None else x, scale)
    device = runtime.device()
    if interpret:
        of_a = 2 * max(1, layout.tiles(2 * lora.filled_rank(rank)))
        device = like(processors=config.blocks + of_a, shared_bytes=runtime.H200.shared_bytes)
    options = {"branch": branch, "eps": EPS, "config": config, "interpret": interpret}
    with runtime.on(device):
        y = gated.linear(stream, to_hopper(t, is_paired=True), **options)
    unit = np.asarray(stream.unit(EPS))[:, None]
    return y, swiglu(expected(f32(stream.scaled)[:, :k], t, parts, None, unit))


@pytest.mark.parametrize("scale_per_row", [slow(False), True])
def test_a_weight_in_pairs_comes_back_as_it_was(scale_per_row):
    t = weight(7, 192, 128, scale_per_row=scale_per_row)
    wanted = jax.jit(unprepare)(to_hopper(t))
    actual = jax.jit(unprepare)(to_hopper(t, is_paired=True))
    bits = lambda t: [np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(t)]
    jax.tree.map(np.testing.assert_array_equal, bits(actual), bits(wanted))


def test_a_thread_has_the_same_column_of_the_gate_and_of_up():
    rows = layout.paired_rows(jnp.arange(128), 0)
    for tile, w, g in [(0, 0, 0), (0, 3, 7), (1, 2, 5)]:
        column = 32 * tile + 8 * w + g
        assert rows[64 * tile + 16 * w + g] == column
        assert rows[64 * tile + 16 * w + 8 + g] == 64 + column
    np.testing.assert_array_equal(layout.joined_rows(rows, 0), jnp.arange(128))


@pytest.mark.parametrize("rank", [8, *map(slow, (16, 32, 64, 128))])
def test_b_in_pairs_has_no_zeros_and_comes_back_with_them(rank):
    gate, up = (normal(seed, (64, rank)) for seed in (1, 2))
    pieces = lora.pack_pairs(gate, up)
    assert pieces.shape == (2, max(1, rank // 16), *layout.TILE_SHAPE)
    assert np.count_nonzero(pieces) == 2 * 128 * rank // 4
    tiles_of_a = -(-2 * rank // 64)
    for tile, own in enumerate(pieces):
        parts = enumerate(jnp.split(own, tiles_of_a))
        columns = [lora.unpack_pairs(part, lora.owners(rank, at)) for at, part in parts]
        rows = jnp.concatenate(columns, axis=1).reshape(4, 2, 8, 64 * tiles_of_a)
        window = slice(32 * tile, 32 * tile + 32)
        np.testing.assert_array_equal(rows[:, 0, :, :rank].reshape(32, rank), gate[window])
        np.testing.assert_array_equal(rows[:, 1, :, rank : 2 * rank].reshape(32, rank), up[window])
        assert not rows[:, 0, :, rank:].any() and not rows[:, 1, :, :rank].any()
        assert not rows[:, 1, :, 2 * rank :].any()


@pytest.mark.slow
@pytest.mark.parametrize("scale_per_row", [False, True])
def test_products_of_many_rows_do_not_see_the_order_of_rows(scale_per_row):
    m, n, k = 24, 192, 128
    t = weight(7, n, k, std=k**-0.5, scale_per_row=scale_per_row)
    joined, paired = to_hopper(t), to_hopper(t, is_paired=True)
    x, dy = normal(1, (m, k)), normal(2, (m, n))
    forward = lambda w: jax.vjp(lambda x: nvfp4_matmul(x, w), x)
    (y, back), (wanted, wanted_back) = forward(paired), forward(joined)
    np.testing.assert_array_equal(y, wanted)
    # Rows are added up in another order.
    np.testing.assert_allclose(f32(back(dy)[0]), f32(wanted_back(dy)[0]), rtol=0.02, atol=0.1)

    matrices, bias = branches(k, 8, (n // 2, n // 2)), normal(3, (n,))
    ready = [(x @ a.astype(x.dtype), b.astype(x.dtype)) for a, b in matrices]
    prepared = lambda w: prepare_lora(matrices, bias, 1.0, w, x.dtype, rows=m, has_unit=True)
    finish = lambda w, more: f32(finished_linear(x, w, more, unit=jnp.full((m, 1), 0.7), bias=bias))
    wanted = finish(joined, ready)
    for more in (ready, prepared(paired), prepared(None)):
        np.testing.assert_allclose(finish(paired, more), wanted, rtol=0.01, atol=0.02)


def test_only_gates_are_put_in_pairs_and_only_beside_ranks_that_lose_nothing(monkeypatch):
    t = weight(7, 128, 64)
    with runtime.on(runtime.H200):
        prepared = lambda **kind: jax.eval_shape(lambda t: api.prepare(t, jnp.bfloat16, **kind), t)
        is_paired = lambda **kind: prepared(**kind).is_paired
        assert is_paired(is_gated=True) and not is_paired()
        # Products of many rows add 64 ranks to rows in order, 32 to rows in pairs, and no more in any case.
        ranks = {rank: is_paired(is_gated=True, rank=rank) for rank in (32, 33, 64, 65, 128, 129)}
        assert ranks == {32: True, 33: False, 64: False, 65: True, 128: True, 129: False}
        monkeypatch.setenv("PALLAS_PAIRED_GATES", "0")
        assert not is_paired(is_gated=True)


@pytest.mark.parametrize("problem", [p for p in shapes.PROBLEMS if p.layer == "gate_up"])
def test_every_model_has_a_configuration_whose_blocks_run_at_once(h200, problem):
    n, k = problem.n, problem.k
    for m, rank in itertools.product((8, 16, 24, 32, 64, 96, 128), (0, 32, 64, 128)):
        assert gated_config.supports(m, n, k, rank=rank) is None
        config = gated_config.pick_config(m, n, k, rank=rank)
        tiling = gated_config.tiling_of(m, n, k, config, rank=rank)
        # Who waits for x A waits for a block that has a processor.
        assert config.blocks + tiling.blocks_of_a <= runtime.H200.processors
        assert tiling.tiles_of_a == -(-2 * rank // 64) <= config.stages
        # Each window of each tile of A has a counter of its own.
        assert tiling.tiles_of_a * 4 <= gated.COUNTERS - 2
        assert tiling.turns * config.blocks * config.high >= n // 64
        assert m // 8 % tiling.windows == 0 and tiling.windows <= min(4, config.warpgroups)


def test_what_it_cannot_do_is_refused_with_its_reason(h200):
    config = Config(4, 128, 4, 132)
    reason = gated_config.supports(64, 33792, 3584, config, rank=32)
    assert reason == "needs more than 0 processors beside 132 for LoRA's A"
    assert gated_config.supports(64, 33792, 3584, config) is None
    assert "rank 128 at most; got 192" in gated_config.supports(64, 37888, 3584, rank=192)
    few = Config(5, 128, 3, 119)
    reason = gated_config.supports(64, 37888, 3584, few, rank=128)
    assert reason == "needs 4 slots for LoRA of rank 128; got 3"
    assert gated_config.supports(64, 37888, 3584, few, rank=64) is None
    many = Config(5, 128, 4, 125)
    reason = gated_config.supports(64, 37888, 3584, many, rank=128)
    assert reason == "needs more than 4 processors beside 125 for LoRA's A"
    assert "whole tiles of 64 rows; got N = 96" in gated_config.supports(8, 96, 128)
    shared = Config(3, 64, 2, 8, is_shared=True)
    assert "whole 24s for a shared tile" in gated_config.supports(64, 512, 128, shared)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "inner", "k", "rank", "config"),
    [
        slow(8, 64, 128, 32, Config(1, 64, 2, 2)),
        # Blocks whose last tiles are not there; three windows of x A, in two of which nothing is done.
        slow(16, 96, 256, 8, Config(2, 128, 2, 1)),
        slow(48, 160, 256, 16, Config(2, 64, 3, 2)),  # two turns, and windows of unlike rows
        slow(32, 96, 128, 32, Config(2, 64, 2, 1, True)),  # a tile that two warpgroups share
        slow(24, 64, 128, 0, Config(1, 64, 2, 2)),
        # The ranks of gate and of up are in tiles of A of their own, one each and two each.
        (8, 64, 128, 64, Config(1, 64, 2, 2)),
        slow(16, 96, 192, 100, Config(2, 64, 4, 1)),
        # Two turns, in the second of which a warpgroup has no tile; K in whole tiles only when it is filled up.
        slow(24, 160, 208, 48, Config(2, 64, 3, 2)),
        slow(32, 96, 128, 128, Config(2, 64, 4, 1, True)),
    ],
)
def test_a_gate_lets_through_what_swiglu_says(interpreter, m, inner, k, rank, config):
    y, wanted = run(m, inner, k, rank, config, scale_per_row=rank == 8)
    assert_rounded(y, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "rank", "shape"),
    spread(
        [8, 24, 64, 96, 128],
        [0, 8, 32, 48, 64, 128],
        [(18944, 3584), (13824, 5120), (1536, 576), (992, 1024)],
        every=8,
    ),
)
def test_on_its_device_a_gate_lets_through_what_swiglu_says(m, rank, shape):
    inner, k = shape
    for _ in range(3):  # counters are zeros again
        y, wanted = run(m, inner, k, rank, interpret=False)
        assert_rounded(y, wanted, share=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [32, 128])
@pytest.mark.parametrize("m", [8, 64, 128])
def test_on_its_device_a_row_does_not_depend_on_the_others(m, rank):
    x = normal(2, (m, 3584), 3.0)
    y, _ = run(m, 18944, 3584, rank, interpret=False, x=x)
    other, _ = run(m, 18944, 3584, rank, interpret=False, x=x.at[1:].multiply(-3))
    np.testing.assert_array_equal(y[0], other[0])


@pytest.mark.slow
def test_a_linear_of_decoding_finds_the_kernel_by_its_weight(interpreter):
    config = Config(1, 64, 2, 2)
    t, x = weight(7, 128, 128, std=128**-0.5), normal(2, (8, 128), 3.0)
    stream = stream_of(x, jnp.ones(128))
    w = to_hopper(t, is_paired=True)
    options = {"eps": EPS, "config": config, "interpret": True}
    y = fused.linear(stream, w, is_swiglu=True, **options)
    np.testing.assert_array_equal(y, gated.linear(stream, w, **options))
    branch = pack_lora(branches(128, 8, (64, 64)), 0.5, is_packed=True)
    with pytest.raises(NotImplementedError, match="those of LoRA's B are not"):
        fused.linear(stream, w, is_swiglu=True, branch=branch, **options)
