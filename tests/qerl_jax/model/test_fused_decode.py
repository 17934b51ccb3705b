"""Tests the fused decoding step against the plain model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import runtime
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.finished_linear import gated_config
from pallas_kernels.nvfp4_matmul import decode_config, layout
from pallas_kernels.nvfp4_matmul.decode_config import Config
from pallas_kernels.portable import layout as portable_layout
from qerl_jax.config import LoraConfig
from qerl_jax.model import architecture, fused_decode, transformer
from qerl_jax.model.transformer import Transformer
from tests.combinations import spread
from tests.pallas_kernels.common import slow
from tests.pallas_kernels.devices import h200, portable  # noqa: F401
from tests.qerl_jax.model import caches

TRAITS = {"rope_theta": 1e4, "tie_word_embeddings": True, "qkv_bias": False, "qk_norm": True}
ARCH = architecture.Architecture("qwen3", 64, 256, 256, 2, 4, 2, 64, context=512, **TRAITS)
# Nothing but heads in whole tiles of 64; a gate that ends within one.
ODD = dataclasses.replace(ARCH, width=80, ffn_width=112, num_heads=2, num_kv_heads=1)
# SmolLM2-135M, of two layers and few words: no width is 256 or twice as much.
SMALL = dataclasses.replace(
    ARCH, width=576, ffn_width=1536, num_heads=9, num_kv_heads=3, qk_norm=False
)


def policy_of(weights, rows=3, cached=5, arch=ARCH):
    """Makes a policy whose adapter, norms and noise all have an effect, and a cache with a few of its tokens."""
    policy = Transformer(arch, weights, LoraConfig(16, 16.0, train_norms=True), jnp.bfloat16)
    frozen = transformer.random_base(policy, jax.random.key(0))
    jitter = lambda p: p + 0.02 * jax.random.normal(jax.random.key(p.size), p.shape)
    params = jax.tree.map(jitter, transformer.init_params(policy, frozen, jax.random.key(1)))
    shapes = transformer.noise_shapes(arch, final_norm=True)
    noise = jax.tree.map(lambda s: 0.05 * jax.random.normal(jax.random.key(2), s.shape), shapes)
    variables = {"params": params, "frozen": frozen, "noise": noise}
    cache = caches.create(arch, rows, 16, jnp.bfloat16)
    prompts = jax.random.randint(jax.random.key(3), (rows, cached), 0, 64)
    _, cache = jax.jit(policy.apply)(variables, prompts, cache=cache)
    return policy, variables, cache


def prepared(variables, prepare=layout.prepare):
    layers = {
        name: leaf | {"weight": prepare(leaf["weight"])} if "weight" in leaf else leaf
        for name, leaf in variables["frozen"]["layers"].items()
    }
    return variables | {"frozen": variables["frozen"] | {"layers": layers}}


def transformer_of(**traits):
    return Transformer(**{"arch": ARCH, "weights": "nvfp4", "dtype": jnp.bfloat16} | traits)


def error(actual, expected):
    """Returns the share of values that differ, and the size of the difference relative to the expected values."""
    actual, expected = np.float32(actual), np.float32(expected)
    difference = actual - expected
    return np.mean(difference != 0), np.sqrt(np.mean(difference**2) / np.mean(expected**2))


def pair_gates(monkeypatch, variables):
    """Lets gate_up be finished inside its product."""
    gate_up = variables["frozen"]["layers"]["gate_up"]
    gate_up["weight"] = layout.prepare(layout.unprepare(gate_up["weight"]), is_paired=True)
    config = gated_config.Config(1, 128, 2, 3)
    monkeypatch.setattr(gated_config, "pick_config", lambda *_, **__: config)


def assert_extended(actual, expected, cache, most=(0.02, 0.001)):
    """Compares hidden states and the new keys and values of two steps from a cache, in shares and sizes of `error`.

    A sum in another order may go the other way in bfloat16, which two layers do not spread far. A rounding left out
    changes half of all values and more.
    """
    (hidden, extended), (wanted, grown) = actual, expected
    # The token's place, slot 5 of a row's first page; those that fill up M write to page 0.
    new = np.s_[:, cache.tables[:, 0], :, 5]
    pairs = [
        (getattr(extended, name)[new], getattr(grown, name)[new]) for name in ("keys", "values")
    ]
    for pair in [(hidden, wanted[:, 0]), *pairs]:
        assert np.all(np.array(error(*pair)) <= most)
    np.testing.assert_array_equal(extended.ends, grown.ends)


def assert_meets_the_plain_model(arch, weights, rows, kernels):
    """Compares a step on this device with one of the plain model, in which sums have another order."""
    plain, variables, cache = policy_of(weights, rows=rows, arch=arch)
    assert fused_decode.fit(plain, rows) == kernels
    tokens = jnp.arange(rows) % 64
    step = lambda variables, *a: fused_decode.extender(plain, variables, rows)(*a)
    actual, extended = jax.jit(step)(variables, tokens, cache)
    expected, grown = jax.jit(plain.apply)(variables, tokens[:, None], cache=cache)
    assert error(actual, expected[:, 0])[1] < 0.01
    np.testing.assert_array_equal(extended.ends, grown.ends)


@pytest.mark.skipif(runtime.is_hopper(), reason="interprets the kernels, on a CPU")
@pytest.mark.parametrize(
    ("arch", "weights"),
    [
        *[slow(ARCH, "bfloat16"), slow(ARCH, "nvfp4")],
        slow(ARCH, "nvfp4-paired"),  # gate_up is finished inside its product
        *[(ODD, "bfloat16"), slow(ODD, "nvfp4")],
        *[slow(SMALL, "bfloat16"), slow(SMALL, "nvfp4")],
    ],
)
def test_the_fused_step_rounds_where_the_plain_model_does(monkeypatch, arch, weights):
    weights, _, paired = weights.partition("-")
    plain, variables, cache = policy_of(weights, arch=arch)
    # Of SMALL's 1,536 columns of random weights one value of `gate_up` that goes the other way changes half
    # of what follows. These tokens have none.
    tokens = jnp.array([2, 30, 50] if arch is SMALL else [1, 40, 63])
    expected = jax.jit(plain.apply)(variables, tokens[:, None], cache=cache)

    step = 256 if arch is ARCH else 64
    monkeypatch.setattr(fused, "_config", lambda m, n, k, _: Config(1, step, 2, layout.tiles(n)))
    monkeypatch.setattr(fused_decode, "step", functools.partial(fused_decode.step, interpret=True))
    variables = prepared(variables) if weights == "nvfp4" else variables
    if paired:
        pair_gates(monkeypatch, variables)
    policy = jax.jit(functools.partial(fused_decode.policy, plain))(variables)
    extend = jax.jit(functools.partial(fused_decode.extend, plain))
    assert_extended(extend(policy, tokens, cache), expected, cache)


@pytest.mark.slow
@pytest.mark.skipif(runtime.is_hopper(), reason="interprets the kernels, on a CPU")
def test_rows_in_several_tiles_round_where_the_plain_model_does(monkeypatch):
    monkeypatch.setattr(decode_config, "MAX_M", 16)
    monkeypatch.setattr(decode_config, "GRAIN", 8)
    plain, variables, cache = policy_of("nvfp4", rows=20)
    tokens = jnp.arange(20) % 64
    expected = jax.jit(plain.apply)(variables, tokens[:, None], cache=cache)
    monkeypatch.setattr(fused, "_config", lambda m, n, *_: Config(1, 256, 2, n // 64 + 1, 1))
    monkeypatch.setattr(fused_decode, "step", functools.partial(fused_decode.step, interpret=True))
    variables = prepared(variables)
    pair_gates(monkeypatch, variables)
    policy = jax.jit(functools.partial(fused_decode.policy, plain))(variables)
    extend = jax.jit(functools.partial(fused_decode.extend, plain))
    assert_extended(extend(policy, tokens, cache), expected, cache)


@pytest.mark.parametrize(
    ("arch", "weights"),
    [(ODD, "nvfp4"), (ARCH, "nvfp4"), (ARCH, "mxfp4"), (ARCH, "nf4"), (SMALL, "nvfp4")],
)
@pytest.mark.slow
def test_the_portable_step_rounds_where_the_plain_model_does(portable, arch, weights):  # noqa: F811
    with runtime.on(runtime.device(), "reference"):
        plain, variables, cache = policy_of(weights, arch=arch)
        assert fused_decode.fit(plain, 3) is None
        tokens = jnp.array([1, 40, 63] if arch is ARCH else [7, 30, 50])
        expected = jax.jit(plain.apply)(variables, tokens[:, None], cache=cache)

    assert fused_decode.fit(plain, 3) == "portable"
    variables = prepared(variables, jax.jit(portable_layout.prepare))
    step = jax.jit(lambda *a: fused_decode.extender(plain, variables, 3)(*a))
    # NF4's scales meet sums here, and not weights, which are then rounded. Of SMALL, as above, one value changes half.
    is_exact = weights != "nf4" and arch is not SMALL
    most = (0.02, 0.001) if is_exact else (1.0, 0.01)
    assert_extended(step(tokens, cache), expected, cache, most)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "arch", "weights"),
    spread([3, 40, 128], [ARCH, SMALL], ["nvfp4", "mxfp4", "nf4"], every=3),
)
def test_on_its_device_the_portable_step_meets_the_plain_model(portable, arch, weights, rows):  # noqa: F811
    assert_meets_the_plain_model(arch, weights, rows, "portable")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "arch", "weights"),
    spread([3, 40, 128], [ARCH, SMALL], ["nvfp4", "bfloat16"], every=2),
)
def test_on_its_device_the_fused_step_meets_the_plain_model(monkeypatch, arch, weights, rows):
    # So that with more than 32 rows the layers are a loop, as those of large models are.
    monkeypatch.setattr(fused_decode, "UNROLLED_BYTES", 0)
    assert_meets_the_plain_model(arch, weights, rows, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("arch", [ARCH, SMALL])
@pytest.mark.parametrize("rows", [129, 300, 512])
def test_on_its_device_rows_in_several_tiles_meet_the_plain_model(monkeypatch, arch, rows):
    monkeypatch.setenv("PALLAS_DECODE_TILES", "1")
    assert_meets_the_plain_model(arch, "nvfp4", rows, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("arch", "weights"), spread([ARCH, SMALL], ["bfloat16", "nvfp4", "nf4"], every=2)
)
def test_on_its_device_more_rows_are_decoded_as_the_plain_model_does(arch, weights):
    """LoRA's matrices are prepared as a loop of steps prepares them."""
    assert_meets_the_plain_model(arch, weights, 160, None)


@pytest.mark.parametrize("rows", [129, 200, 512])
@pytest.mark.parametrize("arch", [ARCH, ODD, SMALL], ids=["whole", "odd", "small"])
def test_more_rows_are_decoded_in_tiles_on_request(h200, monkeypatch, arch, rows):  # noqa: F811
    model = transformer_of(arch=arch, lora=LoraConfig(32, 32.0))
    assert fused_decode.supports(model, rows) is not None
    monkeypatch.setenv("PALLAS_DECODE_TILES", "1")
    assert fused_decode.supports(model, rows) is None
    assert fused_decode.slow_because(model, rows) is None
    assert "needs 1 <= M <= 512; got M = 513" in fused_decode.supports(model, 513)
    dense = transformer_of(arch=arch, weights="bfloat16")
    assert "needs 1 <= M <= 128" in fused_decode.supports(dense, rows)


@pytest.mark.parametrize("rows", [1, 24, 64, 128])
@pytest.mark.parametrize("rank", [None, 8, 32, 64])
@pytest.mark.parametrize("arch", [ARCH, ODD, SMALL], ids=["whole", "odd", "small"])
def test_models_of_any_width_are_decoded_so_on_a_hopper_card(h200, arch, rank, rows):  # noqa: F811
    lora = None if rank is None else LoraConfig(rank, float(rank))
    for weights in ("bfloat16", "nvfp4"):
        model = transformer_of(arch=arch, weights=weights, lora=lora)
        assert fused_decode.supports(model, rows) is None


def test_a_slow_way_on_a_fast_card_is_told_with_its_remedy():
    policy = functools.partial(Transformer, ARCH, lora=LoraConfig(8, 8.0), dtype=jnp.bfloat16)
    if not runtime.is_hopper():
        assert fused_decode.slow_because(policy("nf4"), 8) is None  # no fast card
        assert "needs a GPU of compute capability 9.0" in fused_decode.supports(policy("nvfp4"), 8)
    with runtime.on(runtime.H200):
        assert fused_decode.slow_because(policy("nvfp4"), 512) is None
        for rows, is_slow in ((128, False), (129, True), (256, True), (257, False)):
            said = fused_decode.slow_because(policy("nvfp4"), rows) or ""
            assert ("set max_concurrent to 128" in said) == is_slow
        counts = [fused_decode.most_rows(policy(weights)) for weights in ("nvfp4", "nf4")]
        assert counts == [128, 0]
        assert 'set model.weights to "nvfp4"' in fused_decode.slow_because(policy("nf4"), 8)
        single = fused_decode.slow_because(policy("nvfp4", dtype=jnp.float32), 8)
        assert 'set model.dtype to "bfloat16"' in single
        trains = fused_decode.slow_because(policy("bfloat16", full=True, lora=None), 8)
        assert trains.endswith('(model.trainable = "full") is decoded by the plain layers')


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 32}, "a head size of 64 or 128; got 32"),
        ({"num_heads": 20, "num_kv_heads": 1}, "at most 16 query heads per key head; got 20"),
    ],
)
def test_attention_without_a_kernel_is_said_to_be_many_times_slower(changes, reason):
    model = transformer_of(arch=dataclasses.replace(ARCH, **changes))
    whole = model.clone(weights="bfloat16", full=True)
    with runtime.on(runtime.H200, "hopper"):
        for each, rows in ((model, 8), (model, 512), (whole, 8)):
            said = fused_decode.slow_because(each, rows)
            assert reason in said and said.endswith("expect it to be many times slower")
    # The portable kernel of attention takes such heads where it can run.
    with runtime.on(dataclasses.replace(runtime.H200, has_packages=True)):
        said = fused_decode.slow_because(model, 8)
        assert reason in said and said.endswith("expect about half the speed")


@pytest.mark.slow
@pytest.mark.parametrize(("unroll", "asked"), [(2, 4), (1, 3)])
def test_each_product_asks_for_the_next_ones_words(monkeypatch, unroll, asked):
    monkeypatch.setattr(fused, "_config", lambda m, n, k, _: Config(1, 256, 2, n // 64))
    plain, variables, _ = policy_of("nvfp4")
    policy = fused_decode.policy(plain, prepared(variables))
    attend = lambda qkv, norms, index, state: (qkv[:, : ARCH.query_width], state)
    options = {"attend": attend, "state": (), "unroll": unroll}
    step = functools.partial(fused_decode.step, plain, policy, **options)
    x = jnp.zeros((8, ARCH.width), jnp.bfloat16)
    # In a loop over layers the last one does not know where the next layer's lie.
    assert str(jax.make_jaxpr(step)(x)).count("async_prefetch") == asked


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({"weights": "nf4"}, 3),
        slow({"weights": "mxfp4"}, 3),
        slow({"weights": "bfloat16", "full": True, "lora": None}, 3),
        ({"weights": "float32", "dtype": jnp.float32}, 3),
        ({"weights": "bfloat16"}, 192),
    ],
)
def test_what_the_fused_layers_refuse_is_decoded_plainly_on_a_hopper_card(change, rows):
    policy = transformer_of(**{"lora": LoraConfig(8, 8.0)} | change)
    frozen = transformer.abstract_base(dataclasses.replace(policy, full=False))
    parts = functools.partial(transformer.trainable, policy)
    params, frozen = jax.eval_shape(parts, frozen, jax.random.key(0))
    variables = {"params": params, "frozen": frozen}
    cache = jax.eval_shape(lambda: caches.create(ARCH, rows, 64, policy.dtype))
    tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)
    extend = lambda variables, *a: fused_decode.extender(policy, variables, rows)(*a)
    with runtime.on(runtime.H200):
        assert fused_decode.supports(policy, rows) is not None
        traced = jax.make_jaxpr(extend)(variables, tokens, cache)
    # The paged cache is read by the attention kernel here, too, wherever that has heads of this kind.
    assert ("decode_attention_sm90" in str(traced)) == (policy.dtype == jnp.bfloat16)


MANY_HEADS = {"arch": dataclasses.replace(ARCH, num_heads=17, num_kv_heads=1)}
WIDE_HEADS = {"arch": dataclasses.replace(ARCH, head_size=96)}
LARGE_RANK = {"lora": LoraConfig(640, 640.0)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "needs activations in bfloat16"),
        ({"weights": "mxfp4"}, "and weights in mxfp4"),
        ({"full": True}, "needs frozen weights"),
        (MANY_HEADS, "attention needs at most 16 query heads per key head; got 17"),
        (WIDE_HEADS, "attention needs a head size of 64 or 128; got 96"),
        (LARGE_RANK, "needs 245760 bytes of shared memory of 231424 to finish M = 96 rows of LoRA"),
    ],
)
def test_what_cannot_be_decoded_so_is_refused_with_its_reason(h200, change, reason):  # noqa: F811
    assert reason in fused_decode.supports(transformer_of(**change), 96)
    assert fused_decode.supports(transformer_of(weights="bfloat16"), 96) is None


@pytest.mark.parametrize(
    ("capability", "change", "reason"),
    [
        ("8.9", {"dense_linears": (("o", (1,)),)}, "some of this base are kept in 16 bits"),
        ("8.9", {"weights": "mxfp4", "dense_linears": (("down", (0, 1)),)}, "are kept in 16 bits"),
        ("7.5", {"weights": "mxfp4"}, "needs compute capability 8.0 for MXFP4"),
        ("8.9", {"weights": "bfloat16"}, "activations in bfloat16 and packed weights; got"),
        ("8.9", WIDE_HEADS, "attention needs heads of size"),
        ("8.9", LARGE_RANK, "qkv needs LoRA of rank <= 256; got 640"),
        ("7.0", {}, "needs compute capability 7.5 or more"),
    ],
)
def test_what_the_portable_layers_cannot_decode_is_refused(capability, change, reason):
    card = dataclasses.replace(runtime.H200, compute_capability=capability, has_packages=True)
    with runtime.on(card, "auto"):
        policy = transformer_of(**change)
        assert reason in fused_decode.supports(policy, 96, "portable")
        assert fused_decode.fit(policy, 96) is None
        fits = "portable" if capability >= "7.5" else None
        assert fused_decode.fit(transformer_of(), 96) == fits
