"""Tests adapters with different branches: by linear, by layer, in rank and in scaling."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, path_aware_map

from qerl_jax.checkpoint import peft
from qerl_jax.config import LoraConfig
from qerl_jax.model import fused_decode, lora
from qerl_jax.model.transformer import Transformer, init_params
from qerl_jax.system.checked import ConfigError
from tests import golden_files
from tests.model_folders import ARCH, DENSE, adapter_model, assert_trees_equal, base
from tests.qerl_jax.model import caches

SHAPE = LoraConfig(
    4,
    16.0,
    target_modules=("q_proj", "v_proj", "down_proj"),
    rank_pattern={"layers.1.self_attn.q_proj": 2, "down_proj": 6},
    alpha_pattern={"v_proj": 32.0},
    use_rslora=True,
)
MODEL = Transformer(ARCH, "float32", SHAPE, jnp.float32)
TOKENS = np.arange(1, 13, dtype=np.int32)[None]


def rank_and_factor(part, layer):
    """Returns by hand what SHAPE says of a linear; None if it has no branch."""
    rank = {"q_proj": 2 if layer == 1 else 4, "v_proj": 4, "down_proj": 6}.get(part)
    return None if rank is None else (rank, (32 if part == "v_proj" else 16) / np.sqrt(rank))


@pytest.fixture(scope="module")
def params():
    """Makes a fresh A, and a B that is not 0 where a branch has ranks."""
    fresh = init_params(MODEL, base(DENSE, "float32"), jax.random.key(0))
    key = iter(jax.random.split(jax.random.key(1), 20))

    def moved(path, leaf):
        if path[-1] == "a":
            return leaf
        values = 0.1 * jax.random.normal(next(key), leaf.shape)
        return jnp.where(real(path, leaf), values, 0)

    return path_aware_map(moved, fresh)


def real(path, leaf):
    """Returns bools like a leaf: whether a number belongs to a rank that its branch has."""
    ranks = [(rank_and_factor(path[-2], i) or (0,))[0] for i in range(ARCH.num_layers)]
    within = np.arange(leaf.shape[2 if path[-1] == "a" else 1]) < np.array(ranks)[:, None]
    return within[:, None, :] if path[-1] == "a" else within[:, :, None]


@functools.partial(jax.jit, static_argnums=0)
def states(model, variables):
    return model.apply(variables, TOKENS)[0]


def hidden(params, model=MODEL):
    return states(model, {"params": params, "frozen": base(DENSE, "float32")})


@pytest.mark.slow
def test_branches_are_filled_up_to_the_largest_rank_of_their_linear(params):
    shapes = {path[1:]: leaf.shape for path, leaf in flatten_dict(params).items()}
    assert {linear for linear, *_ in shapes} == {"qkv", "down"}
    assert {shape[2] for (linear, _, leaf), shape in shapes.items() if leaf == "a"} == {4, 6}
    for path, leaf in flatten_dict(params).items():
        unreal = np.broadcast_to(~real(path, leaf), leaf.shape)
        assert not np.any(leaf[unreal]) and np.all(leaf[~unreal] != 0)


def test_each_branch_adds_its_own_factor_times_its_own_matrices(params):
    """The other base has the weights W + factor * (A B)^T, with the factors by hand."""
    frozen = jax.tree.map(np.array, base(DENSE, "float32"))
    for linear, parts in ARCH.linears().items():
        first = 0
        for part, size in parts:
            for layer in range(ARCH.num_layers):
                if found := rank_and_factor(part, layer):
                    pair = params["layers"][linear][part]
                    rank, factor = found
                    delta = factor * np.asarray(
                        pair["a"][layer][:, :rank] @ pair["b"][layer][:rank]
                    )
                    weight = frozen["layers"][linear]["weight"]
                    weight[layer, first : first + size] += delta.T
            first += size
    bare = MODEL.clone(lora=None)
    expected = states(bare, {"frozen": frozen})
    found = hidden(params)
    assert np.abs(found - hidden({}, bare)).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.slow
def test_what_fills_up_a_branch_has_no_gradient(params):
    grads = jax.grad(lambda p: jnp.sum(hidden(p) ** 2))(params)
    for path, leaf in flatten_dict(grads).items():
        unreal = np.broadcast_to(~real(path, leaf), leaf.shape)
        assert not np.any(leaf[unreal]) and np.all(leaf[~unreal] != 0)


@pytest.mark.slow
def test_a_step_of_decoding_reads_the_same_branches(params):
    variables = {"params": params, "frozen": base(DENSE, "float32")}
    cache = caches.create(ARCH, 1, 16, jnp.float32)
    expected = hidden(params)
    extend = fused_decode.extender(MODEL, variables, 1)
    for token, state in zip(TOKENS[0], expected[0], strict=True):
        found, cache = extend(jnp.array([token]), cache)
        np.testing.assert_allclose(found[0], state, atol=1e-4)


def test_an_adapter_of_several_shapes_round_trips_as_peft_writes_it(params, tmp_path):
    peft.export_adapter(tmp_path / "a", params, SHAPE, "base")
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    wanted = {
        "r": 4,
        "lora_alpha": 16.0,
        "use_rslora": True,
        "target_modules": ["down_proj", "q_proj", "v_proj"],
        "rank_pattern": SHAPE.rank_pattern,
        "alpha_pattern": SHAPE.alpha_pattern,
    }
    assert {name: config[name] for name in wanted} == wanted
    tensors = golden_files.load(tmp_path / "a/adapter_model.safetensors")
    assert len(tensors) == 2 * 3 * ARCH.num_layers
    prefix = "base_model.model.model.layers"
    assert tensors[f"{prefix}.1.self_attn.q_proj.lora_A.weight"].shape == (2, ARCH.width)
    assert tensors[f"{prefix}.0.mlp.down_proj.lora_B.weight"].shape == (ARCH.width, 6)
    assert peft.read_lora(tmp_path / "a") == SHAPE
    assert_trees_equal(peft.import_adapter(tmp_path / "a", MODEL), params)


def test_an_adapter_of_one_shape_is_made_as_ever():
    """A seed gives the same A with defaults, and with patterns that change nothing."""
    frozen = base(DENSE, "float32")
    plain = init_params(adapter_model(), frozen, jax.random.key(3))
    said = adapter_model(rank_pattern={"q_proj": 8}, alpha_pattern={".*_proj": 16.0})
    assert_trees_equal(init_params(said, frozen, jax.random.key(3)), plain)
    (shape,) = {lora.shapes(said.lora, ARCH)["qkv"].factor}
    assert shape == 2.0


@pytest.mark.parametrize(
    "field, pattern", [("rank_pattern", "lm_head"), ("alpha_pattern", "layers.9.mlp.down_proj")]
)
def test_a_pattern_that_names_no_branch_is_refused(field, pattern):
    with pytest.raises(ConfigError, match=f"lora.{field}: got '{pattern}'; names no linear"):
        lora.shapes(LoraConfig(**{field: {pattern: 4}}), ARCH)


def test_the_order_and_number_of_names_make_no_other_shape():
    names, twice = ("v_proj", "q_proj"), ["q_proj", "v_proj", "q_proj"]
    assert LoraConfig(target_modules=names) == LoraConfig(target_modules=twice)
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert LoraConfig(target_modules=every, rank_pattern={}) == LoraConfig()
    assert hash(SHAPE) == hash(LoraConfig(**vars(SHAPE)))
