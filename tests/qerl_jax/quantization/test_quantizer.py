"""Tests the streaming quantizer: what it writes, what it refuses, and what a kill leaves behind."""

import json
import os
import re
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats.number_format import Options
from qerl_jax.checkpoint import packed_formats
from qerl_jax.checkpoint.safetensors import Tensors
from qerl_jax.cli import main
from qerl_jax.model import architecture
from qerl_jax.model.architecture import KNOWN
from qerl_jax.quantization import quantizer
from qerl_jax.quantization.quantizer import REPORT, Recipe
from tests import golden_files
from tests.model_folders import DENSE, PACKED, assert_trees_equal, copy, read
from tests.pallas_kernels.common import slow, without_negative_zero

QUIET = lambda line: None
RECIPES = {
    "nvfp4": Recipe("nvfp4"),
    "mxfp4": Recipe("mxfp4"),
    "mxfp4 floor": Recipe("mxfp4", scale_rounding="floor"),
    "nf4": Recipe("nf4"),
    "nf4 single": Recipe("nf4", double_quant=False),
}


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory):
    """Makes the recorded model in 16 bits, with a tokenizer's file beside it."""
    tensors = golden_files.load(DENSE / "model.safetensors")
    folder = tmp_path_factory.mktemp("source")
    narrow = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    copy(DENSE, folder, config={"torch_dtype": "bfloat16"}, tensors=narrow)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def load(folder, weights):
    return read(folder, weights)[1]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != REPORT}


def test_nvfp4_folders_hold_the_bytes_of_llm_compressor(bfloat16, tmp_path):
    recipe = Recipe(block_scales="maximum")
    quantizer.quantize(bfloat16, tmp_path / "out", recipe, QUIET)
    ours, theirs = Tensors(tmp_path / "out"), Tensors(PACKED)
    assert set(ours) == set(theirs)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        a, b = ours[name], theirs[name]
        if name.endswith("weight_packed"):
            a, b = without_negative_zero(a), without_negative_zero(b)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", *map(slow, [*RECIPES][1:])])
def test_a_quantized_folder_is_what_its_report_says(name, bfloat16, tmp_path):
    recipe, arch = RECIPES[name], architecture.load(bfloat16)
    report = quantizer.quantize(bfloat16, tmp_path / "out", recipe, QUIET)
    packed, dense = (load(tmp_path / "out", weights) for weights in (recipe.format, "float32"))
    original = load(bfloat16, "float32")
    form = packed_formats.named(recipe.format, Options(recipe.scale_rounding, recipe.double_quant))
    for linear in arch.linears():
        weight, before = (base["layers"][linear].pop("weight") for base in (dense, original))
        unpacked = form.numbers.unpack(packed["layers"][linear]["weight"])
        np.testing.assert_allclose(weight, unpacked, rtol=1e-6)
        off = np.asarray(weight - before)
        for layer, errors in enumerate(report["layers"]):
            relative = np.sqrt(np.sum(off[layer] ** 2) / np.sum(before[layer] ** 2))
            np.testing.assert_allclose(errors["weights"][linear], relative, rtol=1e-3)
    assert_trees_equal(dense, original)

    expected, held = quantizer.expected_size(arch, form), Tensors(tmp_path / "out")
    # A text of some 150 bytes stands beside each NF4 weight.
    slack = 200 * 7 * arch.num_layers if recipe.format == "nf4" else 0
    assert expected <= report["bytes"] <= expected + slack
    assert report["bytes"] == sum(held[tensor].nbytes for tensor in held)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "nf4"])
def test_a_quantized_folder_is_the_base_that_loading_would_have_packed(weights, bfloat16, tmp_path):
    quantizer.quantize(bfloat16, tmp_path / "out", Recipe(weights), QUIET)
    ours, loaded = load(tmp_path / "out", weights), load(bfloat16, weights)
    if weights == "nf4":  # the mean of the scales is summed in another order
        for linear in ("qkv", "o", "gate_up", "down"):
            a, b = (base["layers"][linear]["weight"] for base in (ours, loaded))
            np.testing.assert_array_equal(a.codes, b.codes)
    else:
        assert_trees_equal(ours, loaded)


@pytest.mark.parametrize(("size", "gigabytes"), [("7b", 5.9), ("14b", 10.6), ("32b", 20.7)])
def test_published_models_take_what_the_paper_says(size, gigabytes):
    nbytes = quantizer.expected_size(KNOWN[f"qwen2.5-{size}"], packed_formats.named("nvfp4"))
    assert nbytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_the_folder_is_a_model_with_all_that_belongs_to_it(bfloat16, tmp_path):
    target = tmp_path / "out"
    target.mkdir()  # empty: may be there
    report = quantizer.quantize(bfloat16, target, Recipe(), QUIET)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = {"config.json", "tokenizer.json", REPORT, "model.safetensors.index.json"}
    assert {path.name for path in target.iterdir()} == files | set(index["weight_map"].values())
    assert len(set(index["weight_map"].values())) == 4
    assert index["metadata"]["total_size"] == report["bytes"]
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert config["torch_dtype"] == "bfloat16"
    assert json.loads((target / REPORT).read_text()) == report
    assert report["peak_host_bytes"] > 0 and len(report["layers"]) == 3


class Killed(BaseException):
    pass


@pytest.mark.parametrize("during", ["a layer", "the renaming"])
def test_a_killed_job_leaves_nothing_half_made_and_goes_on(during, bfloat16, tmp_path, monkeypatch):
    whole, target = tmp_path / "whole", tmp_path / "out"
    quantizer.quantize(bfloat16, whole, Recipe(), QUIET)

    replace, calls = os.replace, []

    def killed(source, destination):
        name = str(destination)
        calls.append(name)
        if name.endswith("model-00003-of-00004.safetensors" if during == "a layer" else "/out"):
            raise Killed
        return replace(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            quantizer.quantize(bfloat16, target, Recipe(), QUIET)
    assert not target.exists()
    with pytest.raises(FileExistsError, match="other settings"):
        quantizer.quantize(bfloat16, target, Recipe("mxfp4"), QUIET)

    lines = []
    quantizer.quantize(bfloat16, target, Recipe(), lines.append)
    done = 1 if during == "a layer" else 3
    assert lines[0].startswith(f"going on after {done} of 3 layers")
    assert sum(line.startswith("layer ") for line in lines) == 3 - done
    assert contents(target) == contents(whole)
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out"}


def test_what_cannot_be_quantized_is_named(bfloat16, tmp_path, monkeypatch):
    for name in ("full", "left.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "something").touch()
    for source, target, kind, message in (
        (bfloat16, "full", FileExistsError, "full'; exists"),
        (PACKED, "out", ValueError, "is quantized already"),
        (bfloat16, "left", FileExistsError, "no unfinished job"),
    ):
        with pytest.raises(kind, match=message):
            quantizer.quantize(source, tmp_path / target, Recipe(), QUIET)
    usage = types.SimpleNamespace(free=10**5)
    monkeypatch.setattr(quantizer.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="the disk has 0.0 GB"):
        quantizer.quantize(bfloat16, tmp_path / "out", Recipe(), QUIET)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_named_and_no_folder_is_left(value, bfloat16, tmp_path):
    tensors = golden_files.load(DENSE / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = value
    copy(DENSE, tmp_path / "source", tensors=tensors)
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"{re.escape(name)}\[3, 5\]: got {value}; must be a fin"):
        quantizer.quantize(tmp_path / "source", tmp_path / "out", Recipe(), QUIET)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_quantizes_and_says_why_it_cannot(tmp_path, capsys):
    target = str(tmp_path / "tiny")
    assert main.main(["quantize", "qerl-tiny", target, "--format", "nf4", "--no-double-quant"]) == 0
    out = capsys.readouterr().out
    assert "layer 3/3  error of weights: qkv 0.09" in out and "peak host memory" in out
    written = sum(path.stat().st_size for path in (tmp_path / "tiny").glob("*.safetensors"))
    megabytes = float(re.search(r"\n([.\d]+) MB, from ", out)[1])
    assert megabytes == pytest.approx(written / 1e6, rel=0.1)
    weight = load(tmp_path / "tiny", "nf4")["layers"]["down"]["weight"]
    assert weight.absmax.dtype == jnp.float32 and weight.absmax2 is None
    assert main.main(["quantize", "qerl-tiny", target]) == 2
    assert "exists" in capsys.readouterr().err
    assert len(jax.tree.leaves(weight)) == 2
