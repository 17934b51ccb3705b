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
from tests.pallas_kernels.devices import like

random = jax.jit(nvfp4.random, static_argnums=1)
prepare = jax.jit(layout.prepare)
on_cpu = pytest.mark.skipif(runtime.platform() != "cpu", reason="interpret mode is for a CPU")
interpreted = functools.partial(decode.matmul, interpret=True)


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def weight(seed, n, k, global_scale=None):
    t = random(jax.random.key(seed), (n, k))
    return t if global_scale is None else dataclasses.replace(t, global_scale=global_scale)


def assert_within_an_ulp(actual, x, t):
    """Checks that errors are at most one bfloat16 ulp of the largest output."""
    expected = np.asarray(reference.forward(x.astype(jnp.float32), t))
    largest = np.abs(expected).max()
    assert actual.dtype == jnp.bfloat16
    assert np.abs(np.asarray(actual, np.float32) - expected).max() <= largest * 2**-7


# The kernel, interpreted ---------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        # A split along K, unequal parts.
        pytest.param(*(8, 128, 320, Config(1, 64, 2, 4)), marks=pytest.mark.slow),
        (16, 256, 320, Config(2, 64, 2, 2)),  # warpgroups that share x, slots used again
        # Runs across tiles.
        pytest.param(*(8, 192, 256, Config(1, 128, 2, 2)), marks=pytest.mark.slow),
        (5, 180, 208, Config(3, 64, 3, 2)),  # ragged M, N and K
        # One row, one unit for each block.
        pytest.param(1, 64, 512, Config(1, 256, 2, 2), marks=pytest.mark.slow),
    ],
)
def test_the_kernel_meets_the_reference_without_a_race(capfd, m, n, k, config):
    x, t = normal(m, (m, k)), weight(n, n, k)
    actual = interpreted(x, prepare(t), config)
    assert_within_an_ulp(actual, x, t)
    # JAX 0.11 reports races on standard output and goes on; JAX 0.12 raises an error.
    assert "RACE" not in capfd.readouterr().out


@on_cpu
@pytest.mark.parametrize("global_scale", [38400 / 7, "one for each row"])
def test_one_hot_inputs_return_scaled_codes_times_the_multiplier(global_scale):
    per_row = np.geomspace(1e-3, 1e6, 64) if isinstance(global_scale, str) else [global_scale]
    t = weight(0, 64, 128, jnp.asarray(per_row, jnp.float32))
    columns = np.array([0, 1, 17, 63, 64, 127])
    x = jnp.eye(128, dtype=jnp.bfloat16)[columns]
    actual = interpreted(x, prepare(t), Config(1, 64, 2, 2))
    exact = np.asarray(nvfp4.scaled_codes(t, jnp.float32))[:, columns].T
    np.testing.assert_array_equal(actual, (exact * t.multiplier).astype(jnp.bfloat16))


# The decoder ---------------------------------------------------------------------------------


def run_ptx(text, inputs):
    """Runs straight-line PTX on whole arrays, given and returned by the numbers of operands."""
    registers = {f"${i}": np.asarray(value, np.uint64) for i, value in inputs.items()}
    value = lambda name: registers[name] if name in registers else np.uint64(int(name, 0))
    as_float = lambda a: (a.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    halves = lambda a: (a & 0xFFFF, a >> 16)

    def times(a, b):
        product = (as_float(a) * as_float(b)).astype(jnp.bfloat16).view(np.uint16)
        return product.astype(np.uint64)

    def lop3(a, b, c, table):
        terms = [
            (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8)
        ]
        return sum(term for i, term in enumerate(terms) if int(table) >> i & 1)

    for line in re.findall(r"^(\S+) (.+);$", text, re.MULTILINE):
        operation, operands = line[0], re.findall(r"\{[^}]*\}|[\w$]+", line[1])
        if operation.startswith(".reg"):
            continue
        target, *sources = operands
        if operation == "mov.b32" and target.startswith("{"):
            names = re.findall(r"\w+", target)
            registers |= dict(zip(names, halves(value(sources[0])), strict=True))
            continue
        if operation == "mov.b32" and sources[0].startswith("{"):
            low, high = (value(name) for name in re.findall(r"\w+", sources[0]))
            result = low | high << 16
        else:
            result = {
                "mov.b32": lambda a: a,
                "and.b32": lambda a, b: a & b,
                "shl.b32": lambda a, b: a << b,
                "shf.r.wrap.b32": lambda low, high, by: (low | high << 32) >> by,
                "lop3.b32": lop3,
                "mul.rn.bf16x2": lambda a, b: (
                    times(a & 0xFFFF, b & 0xFFFF) | times(a >> 16, b >> 16) << 16
                ),
            }[operation](*map(value, sources))
        registers[target] = result & 0xFFFFFFFF
    return registers


def decode_by_threads(words):
    """Decodes a tile with the 128 threads of a warpgroup, and puts the results where `wgmma` expects them."""
    words, thread = np.asarray(words).view(np.uint32).ravel(), np.arange(128)
    warp, group, t = thread // 32, thread // 4 % 8, thread % 4
    tile = np.empty((64, 64), np.uint16)
    for half in range(2):
        scales = words[layout.CODE_WORDS + 2 * (thread // 4) + half]
        pairs = run_ptx(packed_tile._DECODE_SCALES, {2: scales})
        even, odd = words[4 * thread + 2 * half], words[4 * thread + 2 * half + 1]
        operands = {8: even, 9: odd, 10: pairs["$0"], 11: pairs["$1"]}
        registers = run_ptx(packed_tile._DECODE_WORDS, operands)
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
    packed = nvfp4.pack_codes(jnp.asarray(codes, jnp.uint8))
    t = nvfp4.NVFP4Tensor(packed, jnp.asarray(scales), jnp.ones(1), (64, 2048))
    exact = nvfp4.CODE_VALUES[codes] * np.repeat(scales.astype(np.float32), 16, axis=-1)
    return t, exact * np.float32(layout.DECODED_SCALE)


def test_ptx_decodes_all_codes_times_all_scales_exactly():
    t, expected = all_codes_times_all_scales()
    tiles = np.asarray(prepare(t).words)[0]
    actual = np.concatenate([decode_by_threads(tile) for tile in tiles], axis=-1)
    np.testing.assert_array_equal(actual.astype(np.float32), expected)


def test_the_twin_of_the_decoder_agrees():
    t, expected = all_codes_times_all_scales()
    tiles = prepare(t).words[0, :-1]  # the last has the NaN, which the twin need not know
    actual = np.concatenate(jax.vmap(packed_tile.decode_words)(tiles), axis=-1)
    np.testing.assert_array_equal(actual.astype(np.float32), expected[:, :-64])


# Configurations ------------------------------------------------------------------------------


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
        ((129, 128, 256), Config(1, 64, 2, 1), "needs 1 <= M <= 128; got M = 129"),
        ((0, 128, 256), Config(1, 64, 2, 1), "needs 1 <= M <= 128; got M = 0"),
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
        decode.matmul(jnp.ones((m, k), jnp.bfloat16), prepare(weight(0, n, k)), config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 64, 2, 1), "warpgroups must be 1 to 4; got 0"),
        ((1, 96, 2, 1), "step must be 64, 128 or 256; got 96"),
        ((1, 64, 1, 1), "stages must be 2 or more; got 1"),
        ((1, 64, 2, 0), "blocks must be 1 or more; got 0"),
    ],
)
def test_impossible_configurations_cannot_be_made(values, message):
    with pytest.raises(ValueError, match=message):
        Config(*values)


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


def test_a_table_goes_before_the_heuristic_and_serves_smaller_m(monkeypatch, tmp_path, assume):
    monkeypatch.setattr(configs, "TABLES", tmp_path)
    configs.table_of.cache_clear()
    row = {"m": 16, "n": 128, "k": 256, "config": dataclasses.asdict(Config(2, 128, 4, 2))}
    (tmp_path / "nvidia_h200.json").write_text(json.dumps({"rows": [row]}))
    try:
        for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
            assume(runtime.CARDS[name])
            assert configs.pick_config(9, 128, 256) == Config(2, 128, 4, 2)
            assert configs.pick_config(17, 128, 256) == configs.heuristic(17, 128, 256)
        # Blocks of that table are as many as 132 processors hold.
        assume(runtime.CARDS["NVIDIA H100 PCIe"])
        assert configs.pick_config(9, 128, 256) == configs.heuristic(9, 128, 256)
    finally:
        configs.table_of.cache_clear()


def test_a_card_takes_its_own_table_first(monkeypatch, tmp_path, assume):
    monkeypatch.setattr(configs, "TABLES", tmp_path)
    configs.table_of.cache_clear()
    cards = [runtime.CARDS[name] for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")]
    for blocks, card in enumerate(cards, 1):
        config = dataclasses.asdict(Config(2, 128, 4, blocks))
        rows = [{"m": 16, "n": 128, "k": 256, "config": config}]
        if card is runtime.H200:
            rows.append({"m": 32, "n": 128, "k": 256, "config": config})
        configs.path_of(card.name).write_text(json.dumps({"rows": rows}))
    assert {path.name for path in tmp_path.iterdir()} == {
        "nvidia_h200.json",
        "nvidia_h100_80gb_hbm3.json",
    }
    try:
        for blocks, card in enumerate(cards, 1):
            assume(card)
            assert configs.pick_config(16, 128, 256).blocks == blocks
            assert configs.pick_config(32, 128, 256).blocks == 1
    finally:
        configs.table_of.cache_clear()


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


# Through the front door ----------------------------------------------------------------------


@on_cpu
def test_a_prepared_weight_is_multiplied_anywhere_and_gives_the_same_derivative():
    x, dy, t = normal(0, (2, 3, 80)), normal(1, (2, 3, 96)), weight(2, 96, 80)
    actual, vjp = jax.vjp(lambda x: nvfp4_matmul(x, prepare(t)), x)
    expected, expected_vjp = jax.vjp(lambda x: nvfp4_matmul(x, t), x)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(vjp(dy)[0], expected_vjp(dy)[0])


@on_cpu
def test_the_kernel_is_refused_without_its_device_or_its_layout():
    x, t = normal(0, (2, 64)), weight(0, 64, 64)
    with pytest.raises(
        NotImplementedError, match="'decode': needs a GPU of compute capability 9.0"
    ):
        nvfp4_matmul(x, prepare(t), implementation="decode")
    with pytest.raises(ValueError, match=r"one of \['reference'\] or None; got 'decode'"):
        nvfp4_matmul(x, t, implementation="decode")


@pytest.mark.parametrize(
    ("m", "dtype", "reason"),
    [
        (16, jnp.bfloat16, None),
        (16, jnp.float32, "needs x in bfloat16; got float32"),
        (129, jnp.bfloat16, "needs 1 <= M <= 128; got M = 129"),
    ],
)
def test_on_hopper_the_kernel_says_what_it_takes(h200, m, dtype, reason):
    assert api._Decode.supports(m, 4608, 3584, jnp.dtype(dtype)) == reason


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 5, 16, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(4608, 3584), (3584, 18944), (180, 208)])
def test_the_kernel_on_its_device_meets_the_reference(m, n, k):
    x, t = normal(m, (m, k)), weight(n, n, k)
    actual = jax.jit(functools.partial(nvfp4_matmul, implementation="decode"))(x, prepare(t))
    assert_within_an_ulp(actual, x, t)


@pytest.mark.gpu
def test_the_lowered_text_names_the_kernel():
    x, w = normal(0, (8, 256)), prepare(weight(0, 128, 256))
    text = jax.jit(functools.partial(nvfp4_matmul, implementation="decode")).lower(x, w).as_text()
    assert "nvfp4_matmul_sm90" in text
