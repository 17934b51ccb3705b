"""Tests import and export of PEFT adapters: the numbers stay the same, and unsupported options are refused."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from qerl_jax.checkpoint import peft, safetensors
from qerl_jax.checkpoint.safetensors import SafetensorsError
from qerl_jax.config import LoraConfig
from qerl_jax.model.architecture import PARENT
from qerl_jax.model.transformer import Transformer
from qerl_jax.system.process_pool import Pool
from tests import golden_files
from tests.faults.harness import files_of
from tests.model_folders import ADAPTER, ARCH, adapter_model, assert_trees_equal, with_norms


@pytest.fixture(scope="module")
def norms():
    return with_norms()


def fields_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def test_pefts_adapter_is_written_back_tensor_by_tensor(tmp_path):
    model = adapter_model()
    shape = peft.read_lora(ADAPTER)
    assert shape == LoraConfig(8, 16.0, 0.0, False)
    params = peft.import_adapter(ADAPTER, model)
    peft.export_adapter(tmp_path / "a", params, model.lora, "models/qwen2_untied")

    expected = golden_files.load(ADAPTER / "adapter_model.safetensors")
    actual = golden_files.load(tmp_path / "a/adapter_model.safetensors")
    assert set(actual) == set(expected)
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(actual[name], array)
    ours, theirs = (fields_of(folder) for folder in (tmp_path / "a", ADAPTER))
    assert ours == {name: theirs[name] for name in ours}
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]


def test_an_adapter_with_trained_norms_round_trips(tmp_path, norms):
    model, params = norms
    peft.export_adapter(tmp_path / "a", params, model.lora, "somewhere")
    assert peft.read_lora(tmp_path / "a") == LoraConfig(8, 16.0, 0.0, True)
    assert_trees_equal(peft.import_adapter(tmp_path / "a", model), params)
    names = golden_files.load(tmp_path / "a/adapter_model.safetensors")
    assert "base_model.model.model.layers.2.post_attention_layernorm.weight" in names
    config = fields_of(tmp_path / "a")
    assert config["modules_to_save"] == ["input_layernorm", "post_attention_layernorm"]
    assert config["base_model_name_or_path"] == "somewhere"


def test_an_export_replaces_an_adapter_whole_or_not_at_all_and_nothing_else(
    tmp_path, norms, monkeypatch
):
    import safetensors.numpy

    model, params = norms
    folder, other = tmp_path / "deep" / "a", tmp_path / "thesis"
    peft.export_adapter(folder, params, model.lora, "first")
    (folder / "README.md").write_text("of the first")
    peft.export_adapter(folder, params, model.lora, "second")
    assert not (folder / "README.md").exists()
    assert fields_of(folder)["base_model_name_or_path"] == "second"
    other.mkdir()
    (other / "thesis.tex").write_text("years")
    with pytest.raises(FileExistsError, match=f"{other}: holds files, but no adapter"):
        peft.export_adapter(other, params, model.lora, "base")
    before = {path: path.read_bytes() for path in files_of(tmp_path)}

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    for target in (folder, folder.with_name("new")):
        with pytest.raises(OSError, match="disk full"):
            peft.export_adapter(target, params, model.lora, "third")
    assert {path: path.read_bytes() for path in files_of(tmp_path)} == before


def changed_adapter(target, **fields):
    shutil.copy(ADAPTER / "adapter_model.safetensors", target)
    (target / "adapter_config.json").write_text(json.dumps(fields_of(ADAPTER) | fields))
    return target


@pytest.mark.parametrize(
    "fields,match",
    [
        ({"peft_type": "IA3"}, "peft_type: got 'IA3'"),
        ({"bias": "all"}, "bias: got 'all'"),
        ({"use_dora": True}, "use_dora: got True"),
        ({"use_newlora": True}, "use_newlora: got True; only plain LoRA"),
        ({"lora_bias": True}, "lora_bias: got True"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: got 'pissa_niter_4'"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication: got"),
        ({"alora_invocation_tokens": [5, 6]}, r"alora_invocation_tokens: got \[5, 6\]"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config: got"),
        ({"modules_to_save": ["input_layernorm"]}, "modules_to_save: got .*; only"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: got .*lm_head"),
    ],
)
def test_an_adapter_that_is_no_plain_lora_is_refused(tmp_path, fields, match):
    with pytest.raises(NotImplementedError, match=match):
        peft.read_lora(changed_adapter(tmp_path, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(self_attn|mlp)\.\w+_proj"},
        {"layers_to_transform": []},
    ],
)
def test_linears_may_be_named_by_a_pattern_and_no_choice_of_layers_chooses_all(tmp_path, fields):
    folder = changed_adapter(tmp_path, **fields)
    assert peft.read_lora(folder) == peft.read_lora(ADAPTER)
    assert_trees_equal(*(peft.import_adapter(path, adapter_model()) for path in (folder, ADAPTER)))


HOSTILE = "(([a-z_.0-9])+)+!"


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("target_modules", "*bad[", "is no regular expression"),
        ("target_modules", HOSTILE, "adapter_config.json: .* takes too long to match"),
        ("exclude_modules", HOSTILE, "adapter_config.json: .* takes too long to match"),
        ("rank_pattern", {HOSTILE: 4}, "adapter_config.json: .* takes too long to match"),
    ],
)
def test_a_pattern_that_is_none_or_matched_for_ever_is_refused(
    tmp_path, field, value, match, monkeypatch
):
    pool = Pool("qerl_jax.checkpoint.name_patterns", workers=1, seconds=0.2)
    monkeypatch.setattr(peft, "_matchers", lambda: pool)
    with pytest.raises(ValueError, match=match):
        peft.import_adapter(changed_adapter(tmp_path, **{field: value}), adapter_model())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("r", value) for value in (0, 2.5, True, 1 << 40)),
        *(("lora_alpha", value) for value in (None, "16", float("inf"))),
        *(("target_modules", value) for value in (None, [1])),
        ("exclude_modules", {"a": 1}),
        *(("rank_pattern", value) for value in (["q_proj"], {"q_proj": "4"})),
        ("alpha_pattern", {"q_proj": None}),
        ("use_rslora", "false"),
        *(("layers_to_transform", value) for value in ("all", [0, None])),
        *(("modules_to_save", value) for value in (3, [[]])),
    ],
)
def test_a_field_of_another_form_is_named(tmp_path, field, value):
    folder = changed_adapter(tmp_path, **{field: value})
    with pytest.raises((ValueError, NotImplementedError), match=f"{field}: got .*(must|only)"):
        peft.read_lora(folder)


def test_rslora_divides_by_the_root_of_the_rank(tmp_path):
    folder = changed_adapter(tmp_path, use_rslora=True)
    lora = peft.read_lora(folder)
    assert lora == LoraConfig(8, 16.0, use_rslora=True)
    model = Transformer(ARCH, "float32", lora, jnp.float32)
    assert model.lora.scaling == pytest.approx(16 / 8**0.5)
    trees = peft.import_adapter(folder, model), peft.import_adapter(ADAPTER, adapter_model())
    assert_trees_equal(*trees)


def test_patterns_that_match_nothing_are_ignored_with_a_warning(tmp_path, capsys):
    """As PEFT does (issue 3582 there)."""
    patterns = {
        "rank_pattern": {"lm_head": 4, "layers.9.mlp.up_proj": 2},
        "alpha_pattern": {"^up_proj$": 1.0, "q_proj": 16, "nothing.*": 2},
    }
    folder = changed_adapter(tmp_path, **patterns)
    form = peft.read_lora(folder)
    assert form.rank_pattern == peft.read_lora(ADAPTER).rank_pattern
    assert form.alpha_pattern == {"q_proj": 16.0}
    model = adapter_model(rank_pattern=form.rank_pattern, alpha_pattern=form.alpha_pattern)
    trees = peft.import_adapter(folder, model), peft.import_adapter(ADAPTER, adapter_model())
    assert_trees_equal(*trees)
    lines = capsys.readouterr().err.splitlines()
    starts = [line.startswith(f"warning: {folder}/adapter_config.json: ") for line in lines]
    assert starts == [True] * 4
    assert "rank_pattern: 'lm_head' matches no linear of the adapter, and has no effect" in lines[0]


@pytest.mark.parametrize("pattern", ["(", "*("])
def test_a_pattern_that_is_none_is_named(tmp_path, pattern):
    folder = changed_adapter(tmp_path, alpha_pattern={pattern: 4})
    with pytest.raises(ValueError, match=r"adapter_config.json: .* is no regular expression: "):
        peft.read_lora(folder)


def test_patterns_of_rank_and_alpha_become_one_rank_and_one_alpha(tmp_path):
    """Each linear's alpha / rank * B A is what the patterns make of the tensors."""
    held = dict(golden_files.load(ADAPTER / "adapter_model.safetensors"))
    prefix = "base_model.model.model.layers."
    for name in list(held):
        keep = slice(0, 4) if ".q_proj." in name else slice(None)
        value = held.pop(name)
        if ".1.mlp." not in name and ".0.self_attn.k_proj." not in name:
            held[name] = np.ascontiguousarray(value[keep] if ".lora_A" in name else value[:, keep])
    folder = changed_adapter(
        tmp_path,
        r=8,
        rank_pattern={"q_proj": 4},
        alpha_pattern={"layers.2.self_attn.o_proj": 2, ".*down_proj": 64},
        exclude_modules=r"model\.layers\.(1\.mlp|0\.self_attn\.k_proj).*",
    )
    save_file(held, folder / "adapter_model.safetensors")
    lora = peft.read_lora(folder)
    assert (lora.rank, lora.alpha) == (8, 16.0)
    model = adapter_model()
    layers = peft.import_adapter(folder, model)["layers"]
    for linear, parts in ARCH.linears().items():
        for part, _ in parts:
            for index in range(ARCH.num_layers):
                a, b = (np.asarray(layers[linear][part][leaf][index]) for leaf in "ab")
                ours = model.lora.scaling * (a @ b).T
                name = f"{prefix}{index}.{PARENT[linear]}.{part}"
                rank = 4 if part == "q_proj" else 8
                at_2 = {"o_proj": 2} if index == 2 else {}
                alpha = ({"down_proj": 64} | at_2).get(part, 16)
                theirs = 0.0
                if f"{name}.lora_A.weight" in held:
                    b, a = (held[f"{name}.lora_{leaf}.weight"] for leaf in "BA")
                    theirs = alpha / rank * b @ a
                else:
                    assert (linear in ("gate_up", "down") and index == 1) or part == "k_proj"
                np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=name)


def test_a_targeted_linear_without_tensors_is_named(tmp_path):
    held = golden_files.load(ADAPTER / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    folder = changed_adapter(tmp_path)
    fewer = {key: value for key, value in held.items() if key != name}
    save_file(fewer, folder / "adapter_model.safetensors")
    with pytest.raises(SafetensorsError, match=f"no tensor {name}"):
        peft.import_adapter(folder, adapter_model())


def test_a_branch_that_the_config_does_not_name_is_not_dropped_silently(tmp_path):
    folder = changed_adapter(tmp_path, target_modules=["q_proj"])
    model = Transformer(ARCH, "float32", peft.read_lora(folder), jnp.float32)
    with pytest.raises(ValueError, match=r"has no place in the model \(36 such"):
        peft.import_adapter(folder, model)


def test_another_chat_template_beside_an_adapter_is_named(tmp_path):
    assert peft.about_template(tmp_path, "a") == []
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a\n"}))
    assert peft.about_template(tmp_path, "a") == []
    (line,) = peft.about_template(tmp_path, "")
    assert line.startswith(f"warning: {tmp_path}: has a chat template, which is not that of the")
    (tmp_path / "chat_template.jinja").write_text("b")
    assert peft.about_template(tmp_path, "a") == [line] and peft.about_template(tmp_path, "b") == []


def test_a_folder_without_adapter_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no adapter_config.json in {tmp_path}"):
        peft.read_lora(tmp_path)


def test_an_adapter_of_another_rank_is_refused():
    model = Transformer(ARCH, "float32", LoraConfig(4, 16.0), jnp.float32)
    with pytest.raises(ValueError, match="adapter_config.json: rank: got 8; the model has 4"):
        peft.import_adapter(ADAPTER, model)


def test_an_adapter_of_another_shape_is_refused(tmp_path):
    folder = changed_adapter(tmp_path, rank_pattern={"k_proj": 4})
    with pytest.raises(ValueError, match="rank_pattern: got {'k_proj': 4}; the model has None"):
        peft.import_adapter(folder, adapter_model())
    model = Transformer(ARCH, "float32", peft.read_lora(folder), jnp.float32)
    rule = r"k_proj.lora_A.weight: got shape \(8, 128\); .* \(4, 128\)"
    with pytest.raises(ValueError, match=rule):
        peft.import_adapter(folder, model)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x: x.at[2, 1].set(jnp.nan), r"file: NAME\[2, 1\]: got nan; must be a finite"),
        (lambda x: x.at[2, 1].set(jnp.inf), r"NAME\[2, 1\]: got inf"),
        (lambda x: x.astype(jnp.int8), "NAME: type: got 'I8'; must be F32"),
    ],
)
def test_numbers_of_an_adapter_that_are_none_are_named(tmp_path, change, match):
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    tensors = golden_files.load(ADAPTER / "adapter_model.safetensors")
    folder = changed_adapter(tmp_path)
    path = folder / "adapter_model.safetensors"
    safetensors.write(path, tensors | {name: np.asarray(change(jnp.asarray(tensors[name])))})
    match = match.replace("NAME", name).replace("file", str(path))
    with pytest.raises((ValueError, NotImplementedError), match=match):
        peft.import_adapter(folder, adapter_model())


def test_an_adapter_of_a_deeper_model_is_refused():
    model = dataclasses.replace(adapter_model(), arch=dataclasses.replace(ARCH, num_layers=2))
    with pytest.raises(ValueError, match=r"layers\.2\..* has no place in the model \(14 such"):
        peft.import_adapter(ADAPTER, model)


def test_trained_norms_are_not_dropped_silently(tmp_path, norms):
    model, params = norms
    peft.export_adapter(tmp_path / "a", params, model.lora, "base")
    with pytest.raises(ValueError, match=r"layernorm\.weight has no place in the model \(6 such"):
        peft.import_adapter(tmp_path / "a", adapter_model())
