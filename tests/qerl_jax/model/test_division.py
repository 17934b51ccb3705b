"""A policy in parts computes what the whole one does.

Here one device runs all parts; tests/test_several_devices.py has several.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from pallas_kernels import nvfp4, runtime
from pallas_kernels.formats.registry import format_of
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.decode_config import Config
from pallas_kernels.portable import layout as portable
from qerl_jax.config import LoraConfig
from qerl_jax.distributed import sharding
from qerl_jax.model import fused_decode, transformer
from qerl_jax.model.architecture import KNOWN, Architecture
from qerl_jax.model.division import Division
from qerl_jax.model.transformer import Transformer
from qerl_jax.system.checked import ConfigError
from tests.pallas_kernels.common import to_hopper, to_portable
from tests.pallas_kernels.devices import assume  # noqa: F401
from tests.qerl_jax.model import caches
from tests.qerl_jax.model import test_fused_decode as fused

# Heads of 64 and blocks of any format.
ARCH = Architecture("qwen2", 64, 64, 448, 2, 6, 2, 64)
# Devices, query heads and key/value heads: evenly, shared ones, with one that is filled up, and devices without any.
HEADS = [(2, 6, 2), (3, 6, 6), (4, 6, 2), (4, 7, 1), (2, 6, 3), (3, 4, 4), (5, 6, 2)]


def of_heads(heads, kv_heads, **more):
    return dataclasses.replace(ARCH, num_heads=heads, num_kv_heads=kv_heads, **more)


@pytest.mark.parametrize(("count", "heads", "kv_heads"), HEADS)
def test_each_head_is_on_one_device_with_the_one_whose_keys_it_reads(count, heads, kv_heads):
    division = Division(of_heads(heads, kv_heads), count, "nvfp4")
    part, group = division.part, heads // kv_heads
    query, key, value = (x[:, ::64] // 64 for x in division.outputs("qkv"))
    np.testing.assert_array_equal(key, value)
    held = query[query >= 0]
    assert sorted(held) == list(range(heads))
    np.testing.assert_array_equal(division.inputs("o")[:, ::64] // 64, query)
    assert query.shape == (count, part.num_heads) and key.shape == (count, part.num_kv_heads)
    read = np.repeat(key, part.num_heads // part.num_kv_heads, axis=1)
    np.testing.assert_array_equal(read[query >= 0], held // group)


def test_columns_of_the_mlp_come_in_tiles_or_in_blocks_where_there_are_few():
    widths = lambda width, count, weights="nvfp4": (
        Division(dataclasses.replace(ARCH, ffn_width=width), count, weights).part.ffn_width
    )
    assert widths(448, 2) == 256 and widths(448, 7) == 64
    assert widths(48, 2) == 32 and widths(96, 2, "mxfp4") == 64 and widths(24, 8, "float32") == 3
    # Qwen2.5-72B.
    assert widths(29568, 2) == 14784 and widths(29568, 4) == 7424


def weight_of(form, shape):
    model = Transformer(ARCH, form.split()[-1])
    weight = transformer.FusedLinear((("q_proj", shape[0]),), model.weights)
    variables = weight.init(jax.random.key(0), jnp.zeros((1, shape[1]), jnp.bfloat16))
    found = variables["frozen"]["weight"]
    if form.startswith("hopper"):
        return to_hopper(found, is_paired=form.startswith("hopper pairs"))
    return to_portable(found) if form.startswith("portable") else found


QUICK = [("nvfp4", "qkv"), ("nvfp4", "down"), ("float32", "o")]
QUICK += [("hopper pairs nvfp4", "gate_up")]
FORMATS = ["nvfp4", "mxfp4", "nf4", "float32", "hopper nvfp4"]
FORMATS += [f"portable {form}" for form in ("nvfp4", "mxfp4", "nf4")]
SLOW = [(form, linear) for form in FORMATS for linear in ("qkv", "o", "gate_up", "down")]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in QUICK]


# Compiled whole: operation by operation these tests take several times as long.
@jax.jit
def values(weight):
    if isinstance(weight, jax.Array):
        return weight
    if isinstance(weight, layout.HopperNVFP4):
        weight = layout.unprepare(weight)
    if isinstance(weight, portable.PortableWeight):
        weight = portable.unprepare(weight)
    return format_of(weight).dequantize(weight)


def test_rows_in_pairs_are_moved_in_whole_tiles():
    """Training puts a divided weight together in each layer: it must not be unpacked for that."""
    division, rows = Division(ARCH, 4, "nvfp4"), 2 * ARCH.ffn_width
    weight = weight_of("hopper pairs nvfp4", (rows, ARCH.width))
    there = lambda w: division.whole("gate_up", division.split("gate_up", w))
    assert "shift" not in str(jax.make_jaxpr(there)(weight))
    assert jax.eval_shape(there, weight).is_paired


@pytest.mark.parametrize(("form", "linear"), QUICK + SLOW)
def test_split_weights_are_rows_or_columns_and_together_the_whole(form, linear):
    division = Division(ARCH, 4, form.split()[-1])
    outputs = sum(size for _, size in ARCH.linears()[linear])
    weight = weight_of(form, (outputs, ARCH.input_width(linear)))
    parted = jax.jit(lambda w: (s := division.split(linear, w), division.whole(linear, s)))
    stack, whole = parted(weight)
    matrix, again = values(weight), values(whole)
    assert_same = np.testing.assert_array_equal
    if form == "nf4":
        # Scales are decoded, a product and a sum that a compiler may round once.
        assert_same = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    assert_same(again, matrix)
    if not form.endswith("nf4"):
        assert jax.tree.map(jnp.shape, whole) == jax.tree.map(jnp.shape, weight)
    axis = int(linear in ("o", "down"))
    places = division.rows(linear) if axis == 0 else division.inputs(linear)
    for device, place in enumerate(places):
        part = jax.tree.map(lambda x, n=device: x[n], stack)
        taken, is_padding = np.take(np.asarray(matrix), place, axis), place < 0
        assert_same(values(part), np.where(np.expand_dims(is_padding, 1 - axis), 0, taken))


@pytest.mark.slow
def test_tiles_are_taken_apart_where_heads_do_not_end_with_them():
    arch = dataclasses.replace(ARCH, head_size=16, ffn_width=80, num_heads=4)
    division = Division(arch, 2, "nvfp4")
    for linear, parts in arch.linears().items():
        shape = sum(size for _, size in parts), arch.input_width(linear)
        plain = nvfp4.random(jax.random.key(0), shape)
        stack = division.split(linear, layout.prepare(plain))
        np.testing.assert_array_equal(values(division.whole(linear, stack)), values(plain))


@pytest.mark.slow
def test_rows_with_a_global_scale_each_keep_it():
    rows = nvfp4.random(jax.random.key(0), (896, 64))
    scales = 1.0 + jnp.arange(896.0)
    division = Division(ARCH, 2, "nvfp4")
    for weight in (rows, layout.prepare(rows)):
        weight = dataclasses.replace(weight, global_scale=scales)
        stack = division.split("gate_up", weight)
        assert stack.global_scale.shape == (2, 512)
        np.testing.assert_array_equal(division.whole("gate_up", stack).global_scale, scales)


@functools.cache
def policy(weights, arch, dense_linears=()):
    lora = LoraConfig(8, 16.0, train_norms=True, rank_pattern={"o_proj": 4})
    model = Transformer(arch, weights, lora, jnp.float32, dense_linears=dense_linears)
    frozen = transformer.random_base(model, jax.random.key(0))
    jitter = lambda p: p + 0.1 * jax.random.normal(jax.random.key(p.size), p.shape)
    params = jax.tree.map(jitter, transformer.init_params(model, frozen, jax.random.key(1)))
    qkv = frozen["layers"]["qkv"]
    if (bias := qkv.get("bias")) is not None:
        bias = jax.random.normal(jax.random.key(4), bias.shape, bias.dtype)
        frozen["layers"]["qkv"] = qkv | {"bias": bias}
    shapes = transformer.noise_shapes(arch, final_norm=True)
    noise = jax.tree.map(lambda s: 0.05 * jax.random.normal(jax.random.key(2), s.shape), shapes)
    return model, {"params": params, "frozen": frozen, "noise": noise}


def is_parted(path):
    return {"layers", "weight"} <= {getattr(key, "key", None) for key in path}


def divided(model, variables):
    """Makes the variables as devices hold them together: parts of weights along axis 1."""
    layers = dict(variables["frozen"]["layers"])
    for linear in model.arch.linears():
        weight = model.division.split(linear, layers[linear]["weight"], axis=1)
        layers[linear] = layers[linear] | {"weight": weight}
    return variables | {"frozen": variables["frozen"] | {"layers": layers}}


def in_parts(model, variables, function):
    """Returns the results [count, ...] of a function of each device's model and variables."""
    held, mapped = divided(model, variables), jax.tree_util.tree_map_with_path
    axes = mapped(lambda path, _: 1 if is_parted(path) else None, held)

    def of_device(held):
        mark = lambda path, x: sharding.Part(x[:, None]) if is_parted(path) else x
        return function(model.own_part, model.division.local(mapped(mark, held)))

    run = jax.vmap(of_device, (axes,), axis_name=sharding.GROUP, axis_size=model.tensor)
    return jax.jit(run)(held)


def assert_close(actual, expected, size=1e-5):
    error = np.abs(np.float32(actual) - np.float32(expected)).max()
    assert error < size * np.abs(np.float32(expected)).max()


# Norms of heads, biases, an even and an uneven division; some weights kept in 16 bits in one layer or in all.
KEPT = (("down", (0, 1)), ("o", (1,)), ("qkv", (0,)))
CASES = [
    ("float32", of_heads(6, 2), 4, ()),
    ("nvfp4", of_heads(7, 1, model_type="qwen3", qkv_bias=False, qk_norm=True), 4, ()),
    ("nvfp4", of_heads(6, 2), 2, ()),
    ("mxfp4", of_heads(6, 3), 2, ()),
    ("nf4", of_heads(6, 2), 3, ()),
    ("nvfp4", of_heads(6, 2), 2, KEPT),
]


@pytest.mark.parametrize(("weights", "arch", "count", "dense_linears"), CASES)
@pytest.mark.slow
def test_prompts_and_tokens_get_the_hidden_states_of_the_whole_model(
    weights, arch, count, dense_linears
):
    model, variables = policy(weights, arch, dense_linears)
    prompts = jax.random.randint(jax.random.key(3), (3, 5), 0, 64)

    def run(model, variables):
        cache = caches.create(model.arch, 3, 16, jnp.float32)
        first, cache = model.apply(variables, prompts, cache=cache)
        variables = transformer.with_prepared_adapter(model, variables, 3)
        second, _ = model.apply(variables, prompts[:, :1], cache=cache)
        return first, second

    expected = jax.jit(functools.partial(run, model))(variables)
    found = in_parts(model.clone(tensor=count), variables, run)
    for actual, wanted in zip(found, expected, strict=True):
        assert len(actual) == count
        for each in actual:
            assert_close(each, wanted)


@pytest.mark.slow
def test_a_model_puts_its_parts_together_again_and_makes_its_base_in_parts():
    """Updates do this, and so does whoever runs the model as a whole."""
    model, variables = policy("nvfp4", of_heads(6, 2))
    tokens, parted = jnp.arange(10)[None], model.clone(tensor=4)
    expected, _ = jax.jit(model.apply)(variables, tokens)
    parts = divided(parted, variables)
    np.testing.assert_array_equal(jax.jit(parted.apply)(parts, tokens)[0], expected)
    base = transformer.random_base(parted, jax.random.key(0))["layers"]["o"]
    jax.tree.map(np.testing.assert_array_equal, base, parts["frozen"]["layers"]["o"])


@pytest.mark.parametrize(
    ("weights", "arch", "count", "rule"),
    [
        ("nvfp4", ARCH, 7, "must not exceed the 6 heads"),
        ("nvfp4", dataclasses.replace(ARCH, head_size=8), 6, "blocks of 16 that share a scale"),
        ("nvfp4", dataclasses.replace(ARCH, head_size=24), 2, "have 72 inputs .* heads of 24"),
        ("nf4", dataclasses.replace(ARCH, width=96), 2, "blocks of 64 must not cross"),
    ],
)
def test_what_cannot_be_divided_is_refused(weights, arch, count, rule):
    with pytest.raises(ConfigError, match=rf"mesh.tensor: got {count}; .*{rule}"):
        Division(arch, count, weights).require()
    Division(arch, 1, "bfloat16").require()


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_published_models_can_be_divided_with_little_that_is_filled_up(name, count):
    for weights in ("nvfp4", "mxfp4", "nf4", "bfloat16"):
        division = Division(KNOWN[name], count, weights)
        division.require()
        assert division.part.ffn_width * count < 1.06 * KNOWN[name].ffn_width


@pytest.mark.slow
@pytest.mark.skipif(runtime.is_hopper(), reason="interprets the kernels, on a CPU")
@pytest.mark.parametrize(
    ("weights", "kernels"), [("bfloat16", "hopper"), ("nvfp4", "hopper"), ("mxfp4", "portable")]
)
def test_fused_kernels_of_the_parts_give_the_hidden_states_of_the_whole_model(
    monkeypatch,
    assume,  # noqa: F811
    weights,
    kernels,
):
    """Their epilogues end where the terms of all devices are summed."""
    arch = dataclasses.replace(fused.ARCH, num_layers=1)
    model, variables, cache = fused.policy_of(weights, arch=arch)
    tokens, count = jnp.array([1, 40, 63]), 2
    expected, grown = model.apply(variables, tokens[:, None], cache=cache)
    config_of = lambda m, n, k, _: Config(1, 64, 2, layout.tiles(n))
    monkeypatch.setattr(fused.fused, "_config", config_of)
    step = functools.partial(fused_decode.step, interpret=True)
    monkeypatch.setattr(fused_decode, "step", step)
    if weights == "nvfp4":
        variables = fused.prepared(variables)
    if kernels == "portable":
        assume(runtime.device(), "portable")
        if not runtime.interprets_triton():
            pytest.skip("needs triton, TRITON_INTERPRET=1 and a CPU")
        variables = fused.prepared(variables, jax.jit(portable.prepare))
    parted = model.clone(tensor=count)
    if kernels == "portable":
        assert fused_decode.fit(parted.own_part, len(tokens)) == "portable"
    held = in_parts(parted, variables, lambda _, own: own)
    # Each device has one of two key/value heads.
    pools = [jnp.split(x, 2, axis=2) for x in (cache.keys, cache.values)]
    # The interpreter of kernels runs one program at a time. So each device runs again for each sum, with the sums
    # that are known.
    sums, terms = [], []

    def known(term):
        terms.append(np.float32(term))
        return sums[len(terms) - 1] if len(terms) <= len(sums) else terms[-1]

    def summed(term, over):
        assert over == sharding.GROUP
        return io_callback(known, jax.ShapeDtypeStruct(term.shape, jnp.float32), term, ordered=True)

    monkeypatch.setattr(fused_decode, "_summed", summed)

    def extended(device):
        terms.clear()
        own = jax.tree.map(lambda x: x[device], held)
        part = dataclasses.replace(cache, keys=pools[0][device], values=pools[1][device])
        policy = fused_decode.policy(parted.own_part, own, kernels=kernels)
        hidden, part = fused_decode.extend(parted.own_part, policy, tokens, part)
        return jax.block_until_ready((hidden, part.keys)), list(terms)

    for _ in range(2 * model.arch.num_layers + 1):
        found, each = zip(*map(extended, range(count)), strict=True)
        if len(sums) < len(each[0]):
            sums.append(each[0][len(sums)] + each[1][len(sums)])
    assert len(sums) == 2 * model.arch.num_layers
    # Terms are rounded to bfloat16 before they are added up.
    for hidden, _ in found:
        assert fused.error(hidden, expected[:, 0])[1] < 0.01
    keys = jnp.concatenate([keys for _, keys in found], axis=2)
    assert fused.error(keys[:, 1:], grown.keys[:, 1:])[1] < 0.01
