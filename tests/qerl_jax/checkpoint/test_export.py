"""Tests exports of a run: each kind reads back as the same policy, and a different one is refused."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import nf4, nvfp4
from qerl_jax import config
from qerl_jax.checkpoint import export, hf_folder, packed_formats, peft
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.checkpoint.run_state import StateFiles
from qerl_jax.cli import main
from qerl_jax.config import LoraConfig, ModelConfig, RolloutConfig, RunConfig
from qerl_jax.model import layers
from qerl_jax.model.transformer import head, init_params
from qerl_jax.rl import update
from tests import model_folders
from tests.model_folders import PACKED, assert_trees_equal

TOKENS = np.random.default_rng(0).integers(0, 426, (2, 24)).astype(np.int32)
LORA = LoraConfig(8, 16.0, 0.1, train_norms=True)


def run_config(folder, lora=LORA, **model):
    model = {"model_name_or_path": "qerl-tiny", "dtype": "float32"} | model
    return RunConfig(
        output_dir=str(folder),
        max_steps=1,
        model=ModelConfig(**model),
        data=config.DataConfig("arithmetic", num_problems=64),
        rewards=config.RewardConfig(("correct_and_well_formed_reward",)),
        lora=lora,
        rollout=RolloutConfig(stop=("<|endoftext|>", "no token"), stop_token_ids=(9,)),
    )


def finished_run(folder, size=0.05, **model):
    """Makes a run folder as training leaves it, with an adapter that changes much."""
    cfg = run_config(folder, **model)
    model, frozen, _ = load_base(cfg.model, cfg.lora)
    params = init_params(model, frozen, jax.random.key(0))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + size * rng.normal(size=x.shape).astype(np.float32), params)
    folder.mkdir()
    config.write_run(folder, cfg)
    peft.export_adapter(folder / "adapter", params, model.lora, cfg.model.model_name_or_path)
    return model, {"params": params, "frozen": frozen}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "run"
    return folder, *finished_run(folder)


@functools.partial(jax.jit, static_argnums=0)
def scores(model, variables):
    hidden, _ = model.apply(variables, jnp.asarray(TOKENS))
    return layers.logits(hidden, head(variables["frozen"]))


def logits(model, variables):
    return np.asarray(scores(model, variables))


def read(folder, weights):
    model, frozen = model_folders.read(folder, weights)
    return model, {"frozen": frozen}


def weights_of(model, *variables):
    """Returns the weights of each fused linear in several bases."""
    layers = [tree["frozen"]["layers"] for tree in variables]
    return [[tree[linear]["weight"] for tree in layers] for linear in model.arch.linears()]


def test_an_exported_adapter_is_the_runs_and_changes_nothing(run, tmp_path):
    folder, model, variables = run
    report = export.export(folder, "peft", tmp_path / "out")
    assert report["mean_difference"] == report["max_difference"] == 0.0
    assert report["mean_effect_of_training"] > 0.02
    assert report == json.loads((tmp_path / "out" / "export.json").read_text())
    assert_trees_equal(
        peft.import_adapter(tmp_path / "out", model.clone(lora=model.lora)), variables["params"]
    )
    table = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert table["base_model_name_or_path"] == "qerl-tiny"
    assert table["modules_to_save"] == ["input_layernorm", "post_attention_layernorm"]


@pytest.mark.slow
def test_an_adapter_merged_into_the_packed_base_is_the_trained_policy(run, tmp_path):
    folder, model, variables = run
    report = export.export(folder, "merged", tmp_path / "out")
    assert report["from"] == "packed"  # of the two bases that there are
    assert report["mean_difference"] < 0.02 < report["mean_effect_of_training"]
    ours = logits(*read(tmp_path / "out", "bfloat16"))
    trained, bare = logits(model, variables), logits(model.clone(lora=None), variables)
    assert np.abs(ours - trained).max() < 0.1 * np.abs(bare - trained).max()
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    assert table["torch_dtype"] == "bfloat16" and "quantization_config" not in table
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    # The end of the template, a token of the run, and a stop string of the run that is a token.
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [421, 9, 419]


@pytest.mark.slow
def test_a_merged_weight_is_the_base_plus_the_scaled_product(run, tmp_path):
    """The original weights are bfloat16, so one sum is rounded once."""
    folder, model, variables = run
    export.export(folder, "merged", tmp_path / "out", base="original")
    folders = tmp_path / "out", hf_folder.TINY
    merged, source = (read(folder, "bfloat16")[1]["frozen"]["layers"] for folder in folders)
    params = variables["params"]["layers"]
    for linear, parts in model.arch.linears().items():
        deltas = [
            model.lora.scaling * np.einsum("lkr,lrn->lnk", pair["a"], pair["b"], dtype=np.float64)
            for pair in (params[linear][part] for part, _ in parts)
        ]
        expected = np.asarray(source[linear]["weight"], np.float64) + np.concatenate(deltas, axis=1)
        found = np.asarray(merged[linear]["weight"], np.float64)
        np.testing.assert_allclose(found, expected, rtol=2.0**-8, atol=1e-6)
    np.testing.assert_array_equal(merged["qkv"]["bias"], source["qkv"]["bias"])
    for norm in ("input_layernorm", "post_attention_layernorm"):
        expected = np.asarray(params[norm]["scale"]).astype(jnp.bfloat16)
        np.testing.assert_array_equal(merged[norm]["scale"], expected)


@pytest.mark.slow
def test_an_adapter_may_do_something_else_on_the_base_that_was_packed(tmp_path, monkeypatch):
    """A merge is compared with the adapter on that base, not with the adapter on the packed one."""
    finished_run(tmp_path / "run", size=0.1)
    report = export.export(tmp_path / "run", "merged", tmp_path / "out", base="original")
    assert report["mean_difference"] > report["limit"] > report["mean_difference_of_bases"]
    merge = export._merge
    monkeypatch.setattr(export, "_merge", lambda w, pairs, scaling: merge(w, pairs, -scaling))
    with pytest.raises(export.ExportError, match="differ from those of base and adapter by"):
        export.export(tmp_path / "run", "merged", tmp_path / "new", base="original")


@pytest.mark.slow
@pytest.mark.parametrize("base", ["original", "packed"])
def test_a_repacked_model_is_the_merged_one_in_4_bits(run, tmp_path, base):
    folder, _, _ = run
    report = export.export(folder, "nvfp4", tmp_path / "packed", base=base)
    assert 0 < report["mean_difference"] < report["mean_effect_of_training"]
    assert packed_formats.of_folder(tmp_path / "packed").name == "nvfp4"
    export.export(folder, "merged", tmp_path / "merged", base=base)
    _, packed = read(tmp_path / "packed", "nvfp4")
    _, merged = read(tmp_path / "merged", "float32")
    for weight, dense in weights_of(run[1], packed, merged):
        assert weight.global_scale.shape == (3, 1)  # one for q, k and v, and for gate and up
        dense = np.asarray(dense)
        error = np.asarray(nvfp4.dequantize(weight)) - dense
        assert np.sqrt((error**2).mean() / (dense**2).mean()) < 0.11


@pytest.mark.slow
def test_a_run_on_a_packed_folder_has_no_original(tmp_path):
    folder = tmp_path / "run"
    finished_run(folder, model_name_or_path=str(PACKED), tokenizer_name_or_path="qerl-tiny")
    with pytest.raises(ValueError, match="from: got 'original'; must be 'packed'"):
        export.export(folder, "merged", tmp_path / "out", base="original")
    report = export.export(folder, "merged", tmp_path / "out")
    assert report["from"] == "packed" and report["mean_difference"] < 0.02


def test_where_there_are_two_bases_one_must_be_chosen(run, tmp_path):
    with pytest.raises(ValueError, match="from: got None; must be 'original' or 'packed'"):
        export.export(run[0], "nvfp4", tmp_path / "out")
    with pytest.raises(ValueError, match="from: got 'packed'; an adapter is exported without"):
        export.export(run[0], "peft", tmp_path / "out", base="packed")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_export_that_is_off_is_an_error_and_leaves_nothing(run, tmp_path, monkeypatch):
    """The merge has the wrong sign."""
    folder = run[0]
    before = export.export(folder, "merged", tmp_path / "out", base="packed")
    merge = export._merge
    monkeypatch.setattr(export, "_merge", lambda w, pairs, scaling: merge(w, pairs, -scaling))
    limit = before["mean_effect_of_training"] / 2  # smaller than the cap, larger than the floor
    rule = f"not written: .* the limit .--limit. is {limit:.4g};"
    with pytest.raises(export.ExportError, match=rule):
        export.export(folder, "merged", tmp_path / "new", base="packed")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_an_earlier_export_is_replaced_only_if_asked_to_and_nothing_else_ever(run, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    for folder in (out, other):
        folder.mkdir()
    export.export(run[0], "peft", out)
    (out / "more").write_text("of the first export")
    (other / "thesis.txt").write_text("mine")
    rule = "exists already: choose another folder, or remove that one"
    for there in (out, out / "export.json", run[0], run[0].parent, hf_folder.TINY):
        with pytest.raises(FileExistsError, match=re.escape(f"out: got '{there}'; {rule}")):
            export.export(run[0], "peft", there)
    assert (out / "more").is_file()
    export.export(run[0], "peft", out, overwrite=True)
    assert (out / "export.json").is_file() and not (out / "more").exists()
    for there in (other, out / "export.json", run[0], run[0].parent, hf_folder.TINY):
        with pytest.raises(FileExistsError):
            export.export(run[0], "peft", there, overwrite=True)
    assert (other / "thesis.txt").read_text() == "mine" and (out / "export.json").is_file()


@pytest.mark.slow
def test_a_run_that_has_not_ended_is_exported_from_its_checkpoints(run, tmp_path):
    folder, _, variables = run
    early = tmp_path / "run"
    early.mkdir()
    (early / "config.toml").write_text((folder / "config.toml").read_text())
    with pytest.raises(FileNotFoundError, match="neither an adapter nor a checkpoint"):
        export.export(early, "peft", tmp_path / "out")
    files = StateFiles(early, keep=None)
    state = update.init_state(variables["params"], config.OptimConfig())
    for step, factor in ((2, 1.0), (4, 2.0)):
        params = jax.tree.map(lambda x, f=factor: f * x, variables["params"])
        files.save(dataclasses.replace(state, params=params, step=jnp.int32(step)))
    assert export.export(early, "peft", tmp_path / "new")["step"] == 4
    assert export.export(early, "peft", tmp_path / "old", step=2)["step"] == 2
    export.export(folder, "peft", tmp_path / "whole")
    old, whole = (tmp_path / name / "adapter_model.safetensors" for name in ("old", "whole"))
    assert old.read_bytes() == whole.read_bytes()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 3 .* there are \[2, 4\]"):
        export.export(early, "peft", tmp_path / "out", step=3)


@pytest.mark.slow
def test_a_model_that_was_trained_whole_is_packed_from_what_the_run_wrote(tmp_path):
    (tmp_path / "run").mkdir()
    cfg = run_config(tmp_path / "run", LoraConfig(), weights="bfloat16", trainable="full")
    config.write_run(tmp_path / "run", cfg)
    with pytest.raises(ValueError, match="to: got 'peft'; a run with .* has no adapter"):
        export.export(tmp_path / "run", "peft", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="has no model: a run that trains"):
        export.export(tmp_path / "run", "nvfp4", tmp_path / "out")
    shutil.copytree(hf_folder.TINY, tmp_path / "run" / "model")
    report = export.export(tmp_path / "run", "nvfp4", tmp_path / "out")
    assert report["from"] == "original" and report["mean_effect_of_training"] == 0
    _, direct = read(hf_folder.TINY, "nvfp4")
    assert_trees_equal(read(tmp_path / "out", "nvfp4")[1], direct)


@pytest.mark.slow
def test_the_command_says_where_it_is_and_how_far_off(run, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main.main(["export", str(run[0]), "--to", "merged", out, "--from", "packed"]) == 0
    said = capsys.readouterr().out
    assert f"merged in {out}\n" in said and "differ from the trained policy's by" in said
    assert "PEFT cannot find" not in said
    assert main.main(["export", str(run[0]), "--to", "peft", str(tmp_path / "adapter")]) == 0
    assert 'PEFT cannot find the base "qerl-tiny"' in capsys.readouterr().out
    assert main.main(["export", str(tmp_path / "no"), "--to", "peft", out]) == 2
    assert "has no config.toml" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["nvfp4", "nf4"])
def test_a_pair_is_the_packed_base_as_trained_on_and_the_adapter_beside_it(weights, tmp_path):
    """Trained norms are in its base, because engines read none from an adapter."""
    lora = dataclasses.replace(LORA, dropout=0.0)
    model, variables = finished_run(tmp_path / "run", weights=weights)
    report = export.export(tmp_path / "run", "pair", tmp_path / "out")
    assert report["mean_difference"] < 0.01 < report["mean_effect_of_training"]
    assert report["kl"]["4-bit base with the adapter beside it"] < 1e-3
    assert report["kl"]["4-bit base alone"] > 1e-3
    table = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert table["base_model_name_or_path"] == str(tmp_path / "out/base")
    assert not table["modules_to_save"]
    packed, read_back = read(tmp_path / "out/base", weights)
    for ours, theirs in weights_of(model, variables, read_back):
        np.testing.assert_array_equal(np.asarray(ours.codes), np.asarray(theirs.codes))
    adapted = packed.clone(lora=dataclasses.replace(lora, train_norms=False))
    read_back["params"] = peft.import_adapter(tmp_path / "out/adapter", adapted)
    np.testing.assert_allclose(logits(adapted, read_back), logits(model, variables), atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["peft", "merged", "nvfp4", "pair"])
def test_an_adapter_of_some_linears_is_exported_in_every_way(to, tmp_path):
    lora = LoraConfig(4, 8.0, target_modules=("q_proj", "up_proj"))
    finished_run(tmp_path / "run", lora=lora)
    base = {"base": "packed"} if to == "nvfp4" else {}
    report = export.export(tmp_path / "run", to, tmp_path / "out", **base)
    assert report["mean_effect_of_training"] > 0


@pytest.mark.slow
def test_linears_without_a_branch_are_packed_anew_where_the_format_is_another(tmp_path):
    lora = LoraConfig(4, 8.0, target_modules=("q_proj", "up_proj"))
    model, variables = finished_run(tmp_path / "run", weights="nf4", lora=lora)
    export.export(tmp_path / "run", "nvfp4", tmp_path / "out", base="packed", limit=9.0)
    _, read_back = read(tmp_path / "out", "nvfp4")
    down = read_back["frozen"]["layers"]["down"]["weight"]
    before = nf4.dequantize(variables["frozen"]["layers"]["down"]["weight"])
    error = np.asarray(nvfp4.dequantize(down) - before)
    assert 0.02 < np.sqrt(np.mean(error**2) / np.mean(np.square(before))) < 0.2


@pytest.mark.slow
def test_a_packed_export_says_what_merging_loses_and_offers_the_other_way(tmp_path, capsys):
    """The adapter is small beside the weights, as after a short training."""
    folder = tmp_path / "run"
    finished_run(folder, size=0.01)
    base = ["--to", "nvfp4", "--from", "packed", "--limit", "9"]
    assert main.main(["export", str(folder), str(tmp_path / "out"), *base]) == 0
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "export.json").read_text())
    kl, beside = report["kl"], "4-bit base with the adapter beside it"
    assert list(kl) == ["4-bit base alone", beside, "merged in 16 bits", "merged in 4 bits"]
    assert kl[beside] == 0
    assert kl["merged in 16 bits"] < 0.1 * kl["merged in 4 bits"]
    assert "KL in nats per token: 4-bit base alone" in said
    assert "WARNING: merging into 4-bit weights loses" in said and "--to pair" in said
    kept = dict(report, kl=dict(kl, **{"merged in 4 bits": 0.09 * kl["4-bit base alone"]}))
    assert not any("WARNING" in line for line in export.lines(kept))


@pytest.mark.slow
def test_an_adapter_that_changes_nothing_leaves_the_packed_base_as_it_is(tmp_path):
    """Its scales are kept, although the maxima of blocks would give other scales."""
    model, variables = finished_run(tmp_path / "run", size=0.0)
    export.export(tmp_path / "run", "nvfp4", tmp_path / "out", base="packed")
    _, read_back = read(tmp_path / "out", "nvfp4")
    for ours, theirs in weights_of(model, variables, read_back):
        assert_trees_equal(theirs.scales, ours.scales)
        # -0 + 0 is 0: a code of it may have lost its sign.
        np.testing.assert_array_equal(nvfp4.dequantize(theirs), nvfp4.dequantize(ours))
