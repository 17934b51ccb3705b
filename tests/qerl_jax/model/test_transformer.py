"""Tests the forward pass against logits of transformers and PEFT, with every padding and with the cache."""

import dataclasses
import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.checkpoint import base_model, peft
from qerl_jax.config import LoraConfig
from qerl_jax.model import architecture, layers, logprobs, transformer
from qerl_jax.model.transformer import (
    FusedLinear,
    Role,
    Transformer,
    as_computed,
    head,
    init_params,
    noise_shapes,
    random_base,
    trainable,
)
from tests import golden_files
from tests.pallas_kernels.common import slow
from tests.qerl_jax.model import caches

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
MODELS = ["qwen2_untied", "qwen2_tied", "qwen3", "llama3", "mistral"]
# golden/README.md: float32 with full-precision products.
ATOL = 1e-4


@functools.cache
def load(folder, *, weights="float32", lora=None, dtype=jnp.float32):
    model = Transformer(architecture.load(folder), weights, lora, dtype)
    return model, base_model.read_base(folder, model)


def rolled(rows, mask, back=False):
    """Moves rows [B, T, ...] so that their live slots begin at slot 0, or back to where they were."""
    starts = mask.argmax(axis=1)
    return np.stack(
        [np.roll(row, s if back else -s, 0) for row, s in zip(rows, starts, strict=True)]
    )


# One program each: operation by operation, compilation takes longer than all layers.
@functools.partial(jax.jit, static_argnames=("model", "adapter", "remat"))
def applied(model, variables, tokens, **options):
    return model.apply(variables, tokens, **options)


@functools.partial(jax.jit, static_argnames=("model", "adapter", "remat"))
def scores(model, variables, tokens, **options):
    hidden, cache = model.apply(variables, tokens, **options)
    return layers.logits(hidden, head(variables["frozen"])), cache


def assert_live_rows_close(actual, expected, mask, atol):
    difference = np.abs(np.asarray(actual) - expected) * mask[..., None]
    assert difference.max() < atol


def assert_logits(model, variables, folder, side, atol=ATOL, name="logits", **options):
    """Compares logits of recorded rows; rows with padding on the left get it on the right here."""
    reference = reference_of(folder)
    mask, expected = reference[f"{side}.attention_mask"], reference[f"{side}.{name}"]
    tokens = rolled(reference[f"{side}.input_ids"], mask)
    logits, _ = scores(model, variables, tokens, **options)
    actual = rolled(np.asarray(logits), mask, back=True)
    assert_live_rows_close(actual, expected, mask, atol)


def reference_of(folder):
    return golden_files.load(folder / "reference.safetensors")


@pytest.mark.parametrize("side", ["left", slow("right")])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name, side):
    model, frozen = load(GOLDEN / "models" / name)
    assert_logits(model, {"frozen": frozen}, GOLDEN / "models" / name, side)


@pytest.mark.parametrize("name", MODELS)
def test_both_spellings_of_the_config_give_one_architecture(name, tmp_path):
    folder = GOLDEN / "models" / name
    (tmp_path / "config.json").write_text((folder / "config.v4.json").read_text())
    assert architecture.load(tmp_path) == architecture.load(folder)


@pytest.mark.parametrize("name", [MODELS[0], slow(MODELS[1]), MODELS[2], *map(slow, MODELS[3:])])
def test_prefill_and_single_steps_through_the_cache_equal_transformers(name):
    reference = reference_of(GOLDEN / "models" / name)
    model, frozen = load(GOLDEN / "models" / name)
    variables = {"frozen": frozen}
    tokens, mask = reference["right.input_ids"], reference["right.attention_mask"]
    rows, length = tokens.shape
    # Rows of different lengths are prefilled together with the junk after their ends; then every
    # row goes on from its own end. A page ends in the middle of both.
    prefill = length - 4
    cache = caches.create(model.arch, rows, length, model.dtype, page_size=4)
    first = np.minimum(mask.sum(axis=1), prefill).astype(np.int32)
    actual, cache = scores(model, variables, tokens[:, :prefill], cache=cache)
    cache = dataclasses.replace(cache, ends=jnp.asarray(first))
    actual = np.pad(np.asarray(actual), ((0, 0), (0, length - prefill), (0, 0)))
    for _ in range(length - prefill):
        at = np.minimum(np.asarray(cache.ends), length - 1)
        token = tokens[np.arange(rows), at][:, None]
        logits, cache = scores(model, variables, token, cache=cache)
        actual[np.arange(rows), at] = np.asarray(logits[:, 0])
    assert_live_rows_close(actual, reference["right.logits"], mask, ATOL)


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        case if case in (("qwen2_tied", 1.0), ("qwen3", 0.7)) else slow(*case)
        for case in itertools.product(MODELS, (1.0, 0.7))
    ],
)
def test_log_probabilities_and_entropies_equal_the_reference(name, temperature):
    reference = reference_of(GOLDEN / "models" / name)
    model, frozen = load(GOLDEN / "models" / name)
    tokens, mask = reference["right.input_ids"], reference["right.attention_mask"]
    hidden, _ = applied(model, {"frozen": frozen}, tokens)
    states, targets = np.asarray(hidden)[:, :-1], tokens[:, 1:].reshape(-1)
    states = states.reshape(-1, states.shape[-1])
    options = {"temperature": temperature, "num_tokens": model.arch.vocab_size, "chunk": 7}
    of_targets = jax.jit(functools.partial(logprobs.of_targets, **options))
    logps, entropy = of_targets(states, head(frozen), targets)
    live = mask[:, 1:].reshape(-1)
    for actual, key in ((logps, "next_logps"), (entropy, "entropy")):
        expected = reference[f"right.{key}_t{temperature}"].reshape(-1)
        assert np.abs((np.asarray(actual) - expected) * live).max() < ATOL


def test_bfloat16_logits_stay_within_two_percent_of_the_largest():
    folder = GOLDEN / "models/qwen2_untied"
    model, frozen = load(folder, weights="bfloat16", dtype=jnp.bfloat16)
    largest = np.abs(reference_of(folder)["right.logits"]).max()
    assert_logits(model, {"frozen": frozen}, folder, "right", atol=2e-2 * largest)


@pytest.mark.parametrize("side", ["left", "right"])
def test_compressed_tensors_checkpoint_gives_its_reference_logits(side):
    model, frozen = load(GOLDEN / "nvfp4/qwen2_untied", weights="nvfp4")
    assert_logits(model, {"frozen": frozen}, GOLDEN / "nvfp4/qwen2_untied", side)


LORA_GOLDEN = GOLDEN / "lora/qwen2_untied_r8"


def load_adapter(base, weights):
    shape = peft.read_lora(LORA_GOLDEN)
    model, frozen = load(base, weights=weights, lora=LoraConfig(shape.rank, shape.alpha))
    return model, {"params": peft.import_adapter(LORA_GOLDEN, model), "frozen": frozen}


@pytest.mark.parametrize(
    ("base", "side", "name"),
    [
        ("models", "left", "logits"),
        ("models", "right", "logits"),
        ("models", "left", "logits_adapter_off"),
        ("nvfp4", "left", "logits_nvfp4_base"),
    ],
)
def test_adapter_logits_equal_peft_on_both_bases_and_with_the_adapter_off(base, side, name):
    weights = "nvfp4" if base == "nvfp4" else "float32"
    model, variables = load_adapter(GOLDEN / base / "qwen2_untied", weights)
    adapter = not name.endswith("off")
    assert_logits(model, variables, LORA_GOLDEN, side, 2e-4, name, adapter=adapter)


@pytest.mark.slow
def test_the_more_is_kept_the_fewer_products_are_computed_again():
    arch = dataclasses.replace(architecture.load(GOLDEN / "models/qwen2_untied"), num_layers=1)
    model = Transformer(arch, "float32", LoraConfig(2, 2.0), jnp.float32)
    frozen = transformer.abstract_base(model)
    params = jax.eval_shape(functools.partial(init_params, model), frozen, jax.random.key(1))

    def products(remat):
        def total(params, frozen):
            variables = {"params": params, "frozen": frozen}
            return model.apply(variables, jnp.ones((1, 4), jnp.int32), remat=remat)[0].sum()

        return str(jax.make_jaxpr(jax.grad(total))(params, frozen)).count("dot_general")

    none = products("none")
    # x A of four linears and attention's two; then gate_up's base with B of its two parts; then qkv's with
    # three and o's with one.
    again = {"products": 6, "mlp": 6 + 3, "layer": 6 + 3 + 6}
    assert {remat: products(remat) - none for remat in again} == again


@pytest.mark.parametrize("remat", ["none", *map(slow, ("products", "mlp", "layer"))])
def test_adapter_gradients_equal_peft(remat):
    reference = reference_of(LORA_GOLDEN)
    model, variables = load_adapter(GOLDEN / "models/qwen2_untied", "float32")
    mask = reference["left.attention_mask"]
    tokens, mask = rolled(reference["left.input_ids"], mask), rolled(mask, mask)
    live = jnp.asarray(mask[:, 1:] * mask[:, :-1], jnp.float32)

    def loss(params):
        variables_ = {"params": params, "frozen": variables["frozen"]}
        logits, _ = scores(model, variables_, tokens, remat=remat)
        logps = jax.nn.log_softmax(logits[:, :-1], axis=-1)
        picked = jnp.take_along_axis(logps, tokens[:, 1:, None], axis=-1)[..., 0]
        return -(picked * live).sum() / live.sum()

    value, grads = jax.jit(jax.value_and_grad(loss))(variables["params"])
    np.testing.assert_allclose(value, reference["grad.loss"][0], rtol=1e-5)
    checked = 0
    for name, actual in peft._peft_tensors(grads, model.lora):
        if f"grad.{name}" in reference:
            expected = reference[f"grad.{name}"]
            assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max(), name
            checked += 1
    assert checked == 12


TOKENS = jax.random.randint(jax.random.key(2), (2, 9), 0, 512)


@functools.cache
def base_of(model):
    return random_base(model, jax.random.key(0))


def tiny(weights="nvfp4", dtype=jnp.float32, **lora):
    """Makes a small model with a fresh adapter: the model, `frozen` and `params`."""
    arch = architecture.load(GOLDEN / "models/qwen2_untied")
    model = Transformer(arch, weights, LoraConfig(4, 8.0, **lora), dtype)
    # A tree of dicts of one's own, which a test may change.
    frozen = jax.tree.map(lambda x: x, base_of(model.clone(lora=None)))
    return model, frozen, init_params(model, frozen, jax.random.key(1))


def test_a_linear_rounds_products_and_its_result_and_nothing_between():
    """Inputs are integers, whose sums are exact in float32 and too long for bfloat16."""
    rng = np.random.default_rng(0)
    integers = lambda most, *shape: rng.integers(-most, most + 1, shape).astype(np.float32)
    x, weight, bias, residual = integers(8, 4, 64), integers(8, 48, 64), integers(8, 48), 64.0
    unit = np.array([[0.5], [2], [0.75], [3]], np.float32)
    parts = {name: {"a": integers(3, 64, 8), "b": integers(3, 8, 24)} for name in "kv"}

    b16 = lambda x: jnp.asarray(x, jnp.bfloat16)
    once = lambda x: np.float32(b16(x))
    branches = [once(once(x @ part["a"]) @ (2 * part["b"])) for part in parts.values()]
    y = (once(x @ weight.T) + np.concatenate(branches, axis=1)) * unit + bias + residual
    linear = FusedLinear(
        (("k", 24), ("v", 24)), "bfloat16", LoraConfig(8, 16.0), Role.ADAPTED, bias=True
    )
    actual = jax.jit(linear.apply)(
        {"frozen": {"weight": b16(weight), "bias": b16(bias)}, "params": parts},
        layers.Normed(b16(x), jnp.asarray(unit)),
        jnp.full((4, 48), b16(residual)),
    )
    np.testing.assert_array_equal(np.float32(actual), once(y))


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [*itertools.product(("nvfp4", "nf4", "bfloat16"), (jnp.float32, jnp.bfloat16))],
)
@pytest.mark.slow
def test_an_adapter_prepared_for_decoding_gives_the_same_bits(weights, dtype):
    model, frozen, params = tiny(weights, dtype)
    params = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(jax.random.key(2), p.shape), params)
    variables, tokens = {"frozen": frozen, "params": params}, jnp.arange(12).reshape(3, 4)
    prepared = transformer.with_prepared_adapter(model, variables, 12)
    # Of the adapter nothing else is read.
    prepared["params"] = jax.tree.map(jnp.zeros_like, params)
    expected, found = (model.apply(each, tokens)[0] for each in (variables, prepared))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_fresh_adapter_changes_nothing_and_trained_norms_start_at_the_base():
    model, frozen, _ = tiny(train_norms=True)
    frozen["layers"]["input_layernorm"]["scale"] *= 1.5
    params = init_params(model, frozen, jax.random.key(1))
    variables, norm = {"params": params, "frozen": frozen}, params["layers"]["input_layernorm"]
    np.testing.assert_array_equal(norm["scale"], 1.5)
    off, _ = scores(model, variables, TOKENS, adapter=False)
    np.testing.assert_allclose(scores(model, variables, TOKENS)[0], off, atol=1e-6)
    # They are switched off with the adapter.
    norm["scale"] += 0.5
    np.testing.assert_array_equal(scores(model, variables, TOKENS, adapter=False)[0], off)
    assert np.abs(scores(model, variables, TOKENS)[0] - off).max() > 1e-3


def test_noise_acts_as_a_changed_norm_scale():
    """Equation 10 of arXiv 2510.11696 is RMSNorm with w + Z, for q/k/v and gate/up, and nowhere else."""
    model, frozen, _ = tiny()
    model, shapes = model.clone(lora=None), noise_shapes(model.arch)
    assert set(shapes) == {"layers"}
    assert set(shapes["layers"]) == {"input_layernorm", "post_attention_layernorm"}
    draw = lambda shape: 0.1 * jax.random.normal(jax.random.key(3), shape.shape, shape.dtype)
    noise, moved = jax.tree.map(draw, shapes), jax.tree.map(lambda x: x, frozen)
    for name, leaf in noise["layers"].items():
        scale = frozen["layers"][name]["scale"].astype(jnp.float32) + leaf["scale"]
        moved["layers"][name] = {"scale": scale}
    actual, _ = scores(model, {"frozen": frozen, "noise": noise}, TOKENS)
    expected, _ = scores(model, {"frozen": moved}, TOKENS)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert np.abs(actual - scores(model, {"frozen": frozen}, TOKENS)[0]).max() > 1e-3


@pytest.mark.slow
def test_dropout_acts_only_where_a_key_is_given():
    model, frozen, params = tiny(dropout=0.5)
    variables = {"params": jax.tree.map(lambda x: x + 0.1, params), "frozen": frozen}
    plain = scores(model.clone(lora=LoraConfig(4, 8.0)), variables, TOKENS)[0]
    np.testing.assert_array_equal(scores(model, variables, TOKENS)[0], plain)
    dropped = scores(model, variables, TOKENS, rngs={"dropout": jax.random.key(4)})[0]
    assert np.abs(dropped - plain).max() > 1e-3


def test_padding_rows_of_the_embedding_have_no_probability():
    logits = jnp.zeros((2, 6)).at[:, 5].set(100.0)
    logps = logprobs.log_softmax(logits, 1.0, num_tokens=4)
    np.testing.assert_allclose(logps[:, :4], np.log(0.25), rtol=1e-6)
    assert np.isneginf(np.asarray(logps[:, 4:])).all()
    np.testing.assert_allclose(logprobs.entropy(logps), np.log(4), rtol=1e-6)


def test_chunked_log_probabilities_and_their_gradient_equal_the_whole():
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    arrays, targets = (normal(0, 10, 8), normal(1, 32, 8)), jnp.arange(10) * 3
    options = {"temperature": 0.8, "num_tokens": 30, "chunk": 4}

    def chunked(hidden, weight):
        return logprobs.of_targets(hidden, weight, targets, **options)[0]

    def whole(hidden, weight):
        logps = jax.nn.log_softmax((hidden @ weight.T / 0.8)[:, :30], axis=-1)
        return jnp.take_along_axis(logps, targets[:, None], axis=-1)[:, 0]

    def both(function):
        logps, pull = jax.vjp(function, *arrays)
        return [logps, *pull(jnp.linspace(-1, 1, 10))]

    for actual, expected in zip(jax.jit(both, static_argnums=0)(chunked), both(whole), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_memory_of_log_probabilities_does_not_grow_with_rows_times_vocabulary():
    def temporaries(rows, vocabulary=4096, width=8):
        options = {"temperature": 1.0, "num_tokens": vocabulary, "chunk": 32}

        def loss(hidden, weight, targets):
            logps, entropies = logprobs.of_targets(hidden, weight, targets, **options)
            return jnp.sum(logps), entropies

        arrays = np.zeros((rows, width)), np.zeros((vocabulary, width)), np.zeros(rows, int)
        compiled = jax.jit(jax.grad(loss, has_aux=True)).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # Nine times the rows: 2048 more, whose logits would be 32 MiB, and whose states are 64 KiB.
    assert temporaries(2304) - temporaries(256) < 2**20


def test_known_shapes_have_their_published_sizes():
    """Parameters are in units of 10^9, from the model cards."""
    expected = {"qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.77, "qwen2.5-32b": 32.76}
    expected |= {"qwen3-0.6b": 0.6, "qwen3-8b": 8.19, "qwen3-32b": 32.76, "mistral-7b-v0.3": 7.25}
    expected |= {"llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21}
    expected |= {"llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55}
    for name, size in expected.items():
        assert round(architecture.KNOWN[name].num_parameters() / 1e9, 2) == size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3"])
def test_a_full_model_trains_its_layers_with_the_gradient_of_the_bare_base(name):
    bare, frozen = load(GOLDEN / "models" / name)
    tokens = reference_of(GOLDEN / "models" / name)["right.input_ids"][:, :6]
    full = bare.clone(full=True)
    params, rest = trainable(full, frozen, jax.random.key(0))
    assert set(params) == {"layers"} and set(rest) == set(frozen) - {"layers"}
    noise = jax.tree.map(lambda s: jnp.full(s.shape, 0.1), noise_shapes(bare.arch))

    def loss(model, variables):
        return jnp.sum(jnp.sin(scores(model, variables | {"noise": noise}, tokens)[0]))

    found = jax.jit(jax.value_and_grad(lambda p: loss(full, {"params": p, "frozen": rest})))
    expected = jax.jit(jax.value_and_grad(lambda f: loss(bare, {"frozen": f})))
    (value, slopes), (bare_value, bare_slopes) = found(params), expected(frozen)
    # A sum in which most cancels, by two programs.
    np.testing.assert_allclose(value, bare_value, rtol=1e-5)
    assert jax.tree.structure(slopes) == jax.tree.structure({"layers": bare_slopes["layers"]})
    for path, slope in jax.tree_util.tree_leaves_with_path(slopes):
        theirs = functools.reduce(lambda tree, key: tree[key.key], path, bare_slopes)
        scale = np.abs(theirs).max()
        assert scale > 0, path
        np.testing.assert_allclose(slope, theirs, rtol=0, atol=1e-4 * scale, err_msg=str(path))


@pytest.mark.slow
def test_rounding_the_weights_once_changes_no_score():
    """What the sampler reads is what the trainer's products round to."""
    model, frozen = load(GOLDEN / "models" / "qwen2_tied", weights="bfloat16", dtype=jnp.bfloat16)
    model = model.clone(full=True)
    params, rest = trainable(model, frozen, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 1.001, params)  # no longer on bfloat16's grid
    rounded = as_computed(params, model.dtype)
    leaves = jax.tree_util.tree_leaves_with_path(rounded)
    types = {path[-1].key: leaf.dtype for path, leaf in leaves}
    assert types == {"weight": jnp.bfloat16, "bias": jnp.bfloat16, "scale": jnp.float32}
    tokens = jnp.arange(6)[None]
    both = [scores(model, {"params": p, "frozen": rest}, tokens)[0] for p in (params, rounded)]
    np.testing.assert_array_equal(*both)


def test_an_adapter_is_not_rounded():
    model = Transformer(architecture.KNOWN["qwen2.5-0.5b"], lora=LoraConfig(2, 2.0))
    params = {"layers": {"o": {"o_proj": {"a": jnp.ones(2) / 3, "b": jnp.ones(2) / 3}}}}
    rounded = as_computed(params, model.dtype)
    jax.tree.map(np.testing.assert_array_equal, rounded, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} == {jnp.dtype("float32")}
