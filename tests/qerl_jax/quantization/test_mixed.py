"""Tests bases with some linears in 16 bits, in all layers or in some."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qerl_jax
from pallas_kernels import NVFP4Tensor, runtime
from qerl_jax.checkpoint import export, safetensors
from qerl_jax.checkpoint.folder_tensors import FolderTensors
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.checkpoint.safetensors import Tensors
from qerl_jax.config import LoraConfig, ModelConfig
from qerl_jax.model import architecture, fused_decode
from qerl_jax.model.transformer import init_params
from qerl_jax.planning import memory
from qerl_jax.quantization import awq, quantizer
from qerl_jax.quantization.quantizer import Recipe
from tests.qerl_jax.checkpoint.test_export import TOKENS, finished_run, logits, read, run_config
from tests.qerl_jax.quantization.test_awq import ROWS

KEEP = ("*.down_proj", "model.layers.[02].self_attn.v_proj")
KEPT = (("qkv", (0, 2)), ("down", (0, 1, 2)))
QUIET = lambda line: None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("mixed") / "base"
    quantizer.quantize("qerl-tiny", place, Recipe(keep=KEEP), QUIET)
    return place


def load(folder, **changes):
    cfg = ModelConfig(str(folder), dtype="float32", **changes)
    model, frozen, _ = load_base(cfg, None)
    return model, {"frozen": frozen}


def test_kept_linears_are_written_as_they_are_and_named_in_the_config(folder):
    ours, theirs = Tensors(folder), Tensors(quantizer.hf_folder.TINY)
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    kept = [
        f"model.layers.{index}.{name}"
        for index in range(3)
        for name in ("mlp.down_proj", *(f"self_attn.{part}_proj" for part in "qkv" if index != 1))
    ]
    assert sorted(ignored) == sorted(["lm_head", *kept])
    for name in kept:
        np.testing.assert_array_equal(ours[f"{name}.weight"], theirs[f"{name}.weight"])
        assert f"{name}.weight_packed" not in ours
    assert "model.layers.1.self_attn.v_proj.weight_packed" in ours


@pytest.mark.slow
def test_a_mixed_base_computes_what_its_unpacked_weights_compute(folder):
    model, variables = load(folder)
    assert model.dense_linears == KEPT
    kinds = {"o": NVFP4Tensor, "qkv": NVFP4Tensor, "down": jax.Array}
    for name, kind in kinds.items():
        assert isinstance(variables["frozen"]["layers"][name]["weight"], kind)
    assert variables["frozen"]["dense_overrides"]["qkv"].shape[0] == 2
    dense = logits(*load(folder, weights="float32"))
    np.testing.assert_allclose(logits(model, variables), dense, atol=2e-3)
    packed = {k: v for k, v in variables["frozen"].items() if k != "dense_overrides"}
    other = logits(model.clone(dense_linears=KEPT[1:]), variables | {"frozen": packed})
    assert np.abs(other - dense).max() > 0.05  # the packed weights of kept layers are not read


@pytest.mark.parametrize("remat", ["none", "layer"])
@pytest.mark.slow
def test_slopes_of_an_adapter_over_a_mixed_base_are_those_over_its_unpacked_weights(folder, remat):
    found = []
    for weights in ("nvfp4", "float32"):
        model, variables = load(folder, weights=weights)
        model = model.clone(lora=LoraConfig(4, 8.0))
        if not found:
            params = init_params(model, variables["frozen"], jax.random.key(0))
            params = jax.tree.map(lambda x: x + 0.02, params)

        @jax.jit
        def loss(params, model=model, variables=variables):
            variables = variables | {"params": params}
            return jnp.sum(model.apply(variables, jnp.asarray(TOKENS), remat=remat)[0] ** 2)

        found.append(jax.grad(loss)(params))
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        scale = np.abs(np.asarray(theirs)).max()
        np.testing.assert_allclose(ours, theirs, atol=2e-3 * scale)


@pytest.mark.slow
def test_a_mixed_base_decodes_what_its_unpacked_weights_decode(folder):
    """It decodes one token at a time over the cache; the fused layers refuse it and say why."""

    def answer(weights):
        policy = qerl_jax.load(folder, weights=weights, dtype="float32", quiet=True)
        return policy.generate("What is 3+4?", temperature=0.0, max_tokens=12)[0].text

    assert answer("nvfp4") == answer("float32")
    model, _ = load(folder)
    with runtime.on(runtime.H200):
        reason = fused_decode.supports(model.clone(dtype=jnp.bfloat16), 8)
    assert reason == "needs linears that are all packed; some of this base are kept in 16 bits"


def test_the_memory_plan_counts_linears_in_16_bits(folder, tmp_path):
    frozen = load(folder)[1]["frozen"]
    cfg = run_config(tmp_path, model_name_or_path=str(folder))
    _, _, planned = memory.abstract_policy(cfg, architecture.load(folder))
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    assert size(planned) == size(frozen)
    assert size(planned["dense_overrides"]) == size(frozen["dense_overrides"]) > 0


def test_a_pattern_without_a_linear_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"keep: got 'model.layers.9.\*'; names no linear; they ar"
    ):
        quantizer.quantize("qerl-tiny", tmp_path / "x", Recipe(keep=("model.layers.9.*",)), QUIET)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq+gptq"])
def test_calibration_leaves_kept_linears_and_prints_what_hurts_most(method, tmp_path, monkeypatch):
    """AWQ may divide rows of v and up, for o and down; nothing else of them changes."""
    monkeypatch.setattr(awq, "GRID", 2)
    lines = []
    recipe = Recipe("nvfp4", method, keep=KEEP, calibration=ROWS)
    report = quantizer.quantize("qerl-tiny", tmp_path / "out", recipe, lines.append)
    packed = {"o", "gate_up"}
    divergent = [set(layer["divergence"]) for layer in report["layers"]]
    assert divergent == [packed, packed | {"qkv"}, packed]
    start = next(i for i, line in enumerate(lines) if line.startswith("most sensitive"))
    errors = [float(line.split()[1]) for line in lines[start + 2 : -1]]
    assert len(errors) == 7 and errors == sorted(errors, reverse=True) and errors[-1] > 0
    ours, theirs = Tensors(tmp_path / "out"), Tensors(quantizer.hf_folder.TINY)
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(ours[name], theirs[name])
    model, variables = load(tmp_path / "out")
    dense = logits(*load(tmp_path / "out", weights="float32"))
    np.testing.assert_allclose(logits(model, variables), dense, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["nvfp4", "pair", "merged"])
def test_exports_keep_what_the_base_keeps(to, folder, tmp_path):
    model, variables = finished_run(tmp_path / "run", model_name_or_path=str(folder))
    export.export(tmp_path / "run", to, tmp_path / "out", limit=9.0)
    written = tmp_path / "out" / "base" if to == "pair" else tmp_path / "out"
    kept = FolderTensors(written, model.arch).dense_linears()
    assert kept == (() if to == "merged" else KEPT)
    if to == "nvfp4":
        ours, theirs = Tensors(written), Tensors(folder)
        name = "model.layers.0.mlp.down_proj.weight"
        assert (np.asarray(ours[name]) != np.asarray(theirs[name])).any()
    if to == "merged":
        actual = logits(*read(written, "bfloat16"))
        np.testing.assert_allclose(actual, logits(model, variables), atol=0.2)


@pytest.mark.slow
def test_a_folder_that_keeps_one_part_of_a_linear_is_read(folder, tmp_path):
    """Other tools may leave only v in 16 bits: q and k are then unpacked beside it."""
    arch, tensors = architecture.load(folder), dict(Tensors(folder))
    v = arch.linear_names("qkv", 1)[2]
    for suffix in ("weight_packed", "weight_scale", "weight_global_scale"):
        del tensors[f"{v}.{suffix}"]
    tensors[f"{v}.weight"] = np.array(Tensors(quantizer.hf_folder.TINY)[f"{v}.weight"])
    safetensors.write(tmp_path / "model.safetensors", tensors)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    model, variables = load(tmp_path)
    assert model.dense_linears == (("qkv", (0, 1, 2)), KEPT[1])
    dense = logits(*load(tmp_path, weights="float32"))
    # What is unpacked beside it is rounded to bfloat16 once.
    np.testing.assert_allclose(logits(model, variables), dense, atol=2e-2)


def test_a_layer_that_stays_whole_in_16_bits_is_written_and_said_so(tmp_path):
    lines, recipe = [], Recipe(keep=("model.layers.*",))
    report = quantizer.quantize("qerl-tiny", tmp_path / "base", recipe, lines.append)
    assert report["layers"] == [{"layer": index} for index in range(3)]
    assert lines[0].startswith("layer 1/3  error of weights: none")
    ours, theirs = Tensors(tmp_path / "base"), Tensors(quantizer.hf_folder.TINY)
    contents = lambda tensors: {name: tensors[name].tobytes() for name in tensors}
    assert contents(ours) == contents(theirs)
