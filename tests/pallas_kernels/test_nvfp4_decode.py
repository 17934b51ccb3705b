import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4, runtime
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.nvfp4_matmul import (
    api,
    decode,
    layout,
    nvfp4_matmul,
    packed_tile,
    reference,
    shapes,
)
from pallas_kernels.nvfp4_matmul import decode_config as configs
from pallas_kernels.nvfp4_matmul.decode import Plan
from pallas_kernels.nvfp4_matmul.decode_config import Config
from tests.pallas_kernels import ptx
from tests.pallas_kernels.common import (
    assert_within_an_ulp,
    normal,
    nvfp4_tensor,
    on_cpu,
    slow,
    to_hopper,
    weight,
)
from tests.pallas_kernels.devices import like

interpreted = functools.partial(decode.matmul, interpret=True)


def exact(x, t):
    return reference.forward(x.astype(jnp.float32), t)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        slow(8, 128, 320, Config(1, 64, 2, 4)),  # a split along K, unequal parts
        slow(16, 256, 320, Config(2, 64, 2, 2)),  # warpgroups that share x, slots used again
        slow(8, 192, 256, Config(1, 128, 2, 2)),  # runs across tiles
        (5, 180, 208, Config(3, 64, 3, 2)),  # ragged M, N and K
        slow(1, 64, 512, Config(1, 256, 2, 2)),  # one row, one unit for each block
    ],
)
def test_the_kernel_meets_the_reference_without_a_race(interpreter, m, n, k, config):
    x, t = normal(m, (m, k)), weight(n, n, k)
    assert_within_an_ulp(interpreted(x, to_hopper(t), config), exact(x, t))


@pytest.mark.slow
@pytest.mark.parametrize("scales", [[38400 / 7], np.geomspace(1e-3, 1e6, 64)], ids=len)
def test_one_hot_inputs_return_scaled_codes_times_the_multiplier(interpreter, scales):
    t = dataclasses.replace(weight(0, 64, 128), global_scale=jnp.asarray(scales, jnp.float32))
    columns = np.array([0, 1, 17, 63, 64, 127])
    x = jnp.eye(128, dtype=jnp.bfloat16)[columns]
    actual = interpreted(x, to_hopper(t), Config(1, 64, 2, 2))
    exact = np.asarray(nvfp4.scaled_codes(t, jnp.float32))[:, columns].T
    np.testing.assert_array_equal(actual, (exact * t.multiplier).astype(jnp.bfloat16))


def decode_by_threads(words):
    """Decodes a tile with the 128 threads of a warpgroup, and puts the results where `wgmma` expects them."""
    words, thread = np.asarray(words).view(np.uint32).ravel(), np.arange(128)
    warp, group, t = thread // 32, thread // 4 % 8, thread % 4
    tile = np.empty((64, 64), np.uint16)
    for half in range(2):
        scales = words[layout.CODE_WORDS + 2 * (thread // 4) + half]
        pairs = ptx.run(packed_tile._DECODE_SCALES, {2: scales})
        even, odd = words[4 * thread + 2 * half], words[4 * thread + 2 * half + 1]
        operands = {8: even, 9: odd, 10: pairs["$0"], 11: pairs["$1"]}
        registers = ptx.run(packed_tile._DECODE_WORDS, operands)
        for i, field in np.ndindex(2, 4):
            row = 16 * warp + group + 8 * (field % 2)
            column = 16 * (2 * half + i) + 2 * t + 8 * (field // 2)
            tile[row, column] = registers[f"${4 * i + field}"] & 0xFFFF
            tile[row, column + 1] = registers[f"${4 * i + field}"] >> 16
    return tile.view(jnp.bfloat16)


def all_codes_times_all_scales():
    """Makes [64, 2048]: block j has the scale of byte j (127 is NaN), and every column holds all codes."""
    codes = (np.arange(64)[:, None] + np.arange(2048)) % 16
    scales = np.broadcast_to(np.arange(128, dtype=np.uint8), (64, 128)).view(jnp.float8_e4m3fn)
    exact = nvfp4.CODE_VALUES[codes] * np.repeat(scales.astype(np.float32), 16, axis=-1)
    return nvfp4_tensor(codes, scales), exact * np.float32(layout.DECODED_SCALE)


def test_ptx_and_its_twin_decode_all_codes_times_all_scales_exactly():
    t, expected = all_codes_times_all_scales()
    tiles = to_hopper(t).words[0]
    actual = np.concatenate([decode_by_threads(tile) for tile in tiles], axis=-1)
    np.testing.assert_array_equal(actual.astype(np.float32), expected)
    # The last tile has the NaN, which the twin need not know.
    actual = np.concatenate(jax.vmap(packed_tile.decode_words)(tiles[:-1]), axis=-1)
    np.testing.assert_array_equal(actual.astype(np.float32), expected[:, :-64])


@pytest.mark.parametrize(
    ("tiles", "steps", "blocks"),
    [(72, 14, 288), (148, 14, 132), (14, 74, 132), (3, 5, 7), (4, 1, 4)],
)
def test_a_plan_gives_every_unit_to_one_block_and_every_part_a_slot(tiles, steps, blocks):
    plan = Plan(tiles, steps, blocks)
    starts = np.array([plan.start(block) for block in range(blocks + 1)])
    assert (starts[0], starts[-1]) == (0, tiles * steps)
    assert set(np.diff(starts)) <= {plan.units // blocks, -(-plan.units // blocks)}
    owner = np.repeat(np.arange(blocks), np.diff(starts)).reshape(tiles, steps)
    np.testing.assert_array_equal(plan.first_block(np.arange(tiles)), owner[:, 0])
    np.testing.assert_array_equal(plan.parts(np.arange(plan.tiles)), owner[:, -1] - owner[:, 0] + 1)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        ((513, 128, 256), Config(1, 64, 2, 1), "needs 1 <= M <= 512; got M = 513"),
        ((0, 128, 256), Config(1, 64, 2, 1), "needs 1 <= M <= 512; got M = 0"),
        ((8, 192, 256), Config(2, 64, 2, 1), "needs N of whole 128-row tiles; got N = 192"),
        ((8, 128, 320), Config(1, 128, 2, 1), "needs K of whole steps of 128; got K = 320"),
        ((8, 128, 256), Config(2, 128, 2, 3), "has 2 units of work for 3 blocks"),
        ((128, 256, 512), Config(4, 256, 3, 1), "needs 307200 bytes of shared memory of 231424"),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(problem, config, reason):
    assert configs.supports(*problem, config) == reason
    m, n, k = problem
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        decode.matmul(jnp.ones((m, k), jnp.bfloat16), to_hopper(weight(0, n, k)), config)


@pytest.mark.parametrize("processors", [132, 114])
@pytest.mark.parametrize("m", [1, 3, *configs.TUNED_M])
def test_every_problem_has_a_configuration_and_candidates(assume, m, processors):
    assume(like(processors=processors))
    odd = [(64, 64), (16, 16), (40, 1040), (192, 4096), (100_000, 256)]
    odd += [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # SmolLM2-135M
    for n, k in [(p.n, p.k) for p in shapes.PROBLEMS] + odd:
        config = configs.pick_config(m, n, k)
        supports = functools.partial(configs.supports, m, n, k)
        assert supports(config) is None, (n, k, config)
        candidates = configs.candidates(m, n, k)
        assert configs.heuristic(m, n, k) in candidates
        assert any(supports(c, with_adapter=True) is None for c in candidates), (n, k)


@pytest.fixture
def write_table(monkeypatch, tmp_path):
    """Returns a function that writes a card's table: M -> configuration of N, K = 128, 256."""
    monkeypatch.setattr(configs, "TABLES", tmp_path)
    configs.table_of.cache_clear()

    def write(name, table):
        row = lambda m, config: {"m": m, "n": 128, "k": 256, "config": dataclasses.asdict(config)}
        rows = [row(m, config) for m, config in table.items()]
        (tmp_path / name).write_text(json.dumps({"rows": rows}))

    yield write
    configs.table_of.cache_clear()


def test_a_table_goes_before_the_heuristic_and_serves_smaller_m(write_table, assume):
    write_table("nvidia_h200.json", {16: Config(2, 128, 4, 2)})
    for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        assume(runtime.CARDS[name])
        assert configs.pick_config(9, 128, 256) == Config(2, 128, 4, 2)
        assert configs.pick_config(17, 128, 256) == configs.heuristic(17, 128, 256)
    # Blocks of that table are as many as 132 processors hold.
    assume(runtime.CARDS["NVIDIA H100 PCIe"])
    assert configs.pick_config(9, 128, 256) == configs.heuristic(9, 128, 256)


def test_a_card_takes_its_own_table_first(write_table, assume):
    ours, other = Config(2, 128, 4, 2), Config(2, 128, 4, 1)
    write_table("nvidia_h200.json", {16: other, 32: other})
    write_table("nvidia_h100_80gb_hbm3.json", {16: ours})
    for name, config in (("NVIDIA H200", other), ("NVIDIA H100 80GB HBM3", ours)):
        assume(runtime.CARDS[name])
        assert configs.pick_config(16, 128, 256) == config
        assert configs.pick_config(32, 128, 256) == other


@pytest.mark.parametrize("path", sorted(configs.TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_every_row_of_a_tuned_table_is_accepted_with_an_adapter_and_without(assume, path):
    card = next(card for card in runtime.CARDS.values() if configs.path_of(card.name) == path)
    assume(card)
    rows = configs.table_of(card.name)
    assert rows
    for (m, n, k), config in rows.items():
        assert m in configs.TUNED_M
        assert configs.supports(m, n, k, config) is None
        with_adapter = fused._config(m, n, k, True)
        assert configs.supports(m, n, k, with_adapter, with_adapter=True) is None


def test_the_table_of_an_h200_has_the_linears_of_7b_14b_and_32b():
    tuned = configs.table_of("NVIDIA H200")
    models = ("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
    linears = [p for p in shapes.PROBLEMS if p.model in models and p.layer != "lm_head"]
    assert {(m, p.n, p.k) for p in linears for m in configs.TUNED_M} <= set(tuned)
    assert set(tuned) <= {(m, p.n, p.k) for p in shapes.PROBLEMS for m in configs.TUNED_M}


@on_cpu
def test_a_prepared_weight_is_multiplied_anywhere_and_gives_the_same_derivative():
    x, dy, t = normal(0, (2, 3, 80)), normal(1, (2, 3, 96)), weight(2, 96, 80)

    @jax.jit
    def both(w):
        y, pull = jax.vjp(lambda x: nvfp4_matmul(x, w), x)
        return y, *pull(dy)

    jax.tree.map(np.testing.assert_array_equal, both(to_hopper(t)), both(t))


@on_cpu
def test_the_kernel_is_refused_without_its_device_or_its_layout():
    x, t = normal(0, (2, 64)), weight(0, 64, 64)
    with pytest.raises(NotImplementedError, match="'decode': needs a GPU of compute capability 9"):
        nvfp4_matmul(x, to_hopper(t), implementation="decode")
    with pytest.raises(ValueError, match=r"one of \['reference'\] or None; got 'decode'"):
        nvfp4_matmul(x, t, implementation="decode")


def test_on_hopper_the_kernel_says_what_it_takes(h200):
    supports = lambda m, dtype: api._Decode.supports(m, 4608, 3584, jnp.dtype(dtype))
    assert supports(16, jnp.bfloat16) is None
    assert supports(16, jnp.float32) == "needs x in bfloat16; got float32"
    assert supports(129, jnp.bfloat16) == "needs 1 <= M <= 128; got M = 129"


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 5, 16, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(4608, 3584), (3584, 18944), (180, 208)])
def test_the_kernel_on_its_device_meets_the_reference(m, n, k):
    x, t = normal(m, (m, k)), weight(n, n, k)
    actual = jax.jit(functools.partial(nvfp4_matmul, implementation="decode"))(x, to_hopper(t))
    assert_within_an_ulp(actual, exact(x, t))


@pytest.mark.gpu
def test_the_lowered_text_names_the_kernel():
    x, w = normal(0, (8, 256)), to_hopper(weight(0, 128, 256))
    text = jax.jit(functools.partial(nvfp4_matmul, implementation="decode")).lower(x, w).as_text()
    assert "nvfp4_matmul_sm90" in text
