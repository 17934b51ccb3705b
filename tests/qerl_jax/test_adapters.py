"""PEFT adapters in and out: the same numbers, and what is refused."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax import adapters
from qerl_jax.config import LoraConfig
from qerl_jax.model import LoRA, Transformer
from tests import golden_files
from tests.model_folders import (
    ADAPTER,
    ARCH,
    adapter_model,
    assert_trees_equal,
    with_norms,
)


@pytest.fixture(scope="module")
def norms():
    return with_norms()


def test_pefts_adapter_is_written_back_tensor_by_tensor(tmp_path):
    model = adapter_model()
    shape = adapters.read_lora(ADAPTER)
    assert shape == LoraConfig(8, 16.0, 0.0, False)
    params = adapters.import_adapter(ADAPTER, model)
    adapters.export_adapter(tmp_path / "a", params, model.lora, "models/qwen2_untied")

    expected = golden_files.load(ADAPTER / "adapter_model.safetensors")
    actual = golden_files.load(tmp_path / "a/adapter_model.safetensors")
    assert set(actual) == set(expected)
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(actual[name], array)
    ours, theirs = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "a", ADAPTER)
    )
    assert ours == {name: theirs[name] for name in ours}
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_an_adapter_with_trained_norms_round_trips(tmp_path, norms):
    model, params = norms
    adapters.export_adapter(tmp_path / "a", params, model.lora, "somewhere")
    assert adapters.read_lora(tmp_path / "a") == LoraConfig(8, 16.0, 0.0, True)
    assert_trees_equal(adapters.import_adapter(tmp_path / "a", model), params)
    names = golden_files.load(tmp_path / "a/adapter_model.safetensors")
    assert "base_model.model.model.layers.2.post_attention_layernorm.weight" in names
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert config["modules_to_save"] == ["input_layernorm", "post_attention_layernorm"]
    assert config["base_model_name_or_path"] == "somewhere"


def test_an_export_replaces_an_adapter_whole(tmp_path, norms):
    model, params = norms
    folder = tmp_path / "deep" / "a"
    adapters.export_adapter(folder, params, model.lora, "first")
    (folder / "README.md").write_text("of the first")
    adapters.export_adapter(folder, params, model.lora, "second")
    assert [path.name for path in folder.parent.iterdir()] == ["a"]
    assert not (folder / "README.md").exists()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "second"


def test_a_failing_export_leaves_the_old_adapter_and_nothing_else(tmp_path, norms, monkeypatch):
    import safetensors.numpy

    model, params = norms
    folder = tmp_path / "a"
    adapters.export_adapter(folder, params, model.lora, "first")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        adapters.export_adapter(folder, params, model.lora, "second")
    with pytest.raises(OSError, match="disk full"):
        adapters.export_adapter(tmp_path / "new", params, model.lora, "second")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_export_deletes_nothing_but_an_adapter(tmp_path, norms):
    model, params = norms
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(FileExistsError, match=f"{tmp_path}: holds something that is no adapter"):
        adapters.export_adapter(tmp_path, params, model.lora, "base")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def changed_adapter(target, **fields):
    shutil.copy(ADAPTER / "adapter_model.safetensors", target)
    config = json.loads((ADAPTER / "adapter_config.json").read_text()) | fields
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    "fields,match",
    [
        ({"peft_type": "IA3"}, "peft_type: got 'IA3'"),
        ({"bias": "all"}, "bias: got 'all'"),
        ({"use_dora": True}, "use_dora: got True"),
        ({"use_rslora": True}, "use_rslora: got True"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"target_modules": ["q_proj", "v_proj"]}, r"target_modules: got \['q_proj', 'v_proj'\]"),
        ({"target_modules": ".*attn.*"}, r"target_modules: got '\.\*attn\.\*'"),
        ({"target_modules": None}, "target_modules: got None"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: got .*lm_head"),
    ],
)
def test_an_adapter_that_is_no_plain_lora_is_refused(tmp_path, fields, match):
    with pytest.raises(NotImplementedError, match=match):
        adapters.read_lora(changed_adapter(tmp_path, **fields))


def test_all_linear_is_all_seven(tmp_path):
    folder = changed_adapter(tmp_path, target_modules="all-linear")
    assert adapters.read_lora(folder) == adapters.read_lora(ADAPTER)


def test_a_folder_without_adapter_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no adapter_config.json in {tmp_path}"):
        adapters.read_lora(tmp_path)


def test_an_adapter_of_another_rank_is_refused():
    model = Transformer(ARCH, "float32", LoRA(4, 16.0), jnp.float32)
    with pytest.raises(ValueError, match=r"lora_A.weight: got shape \(8, 128\); .* \(4, 128\)"):
        adapters.import_adapter(ADAPTER, model)


def test_an_adapter_of_a_deeper_model_is_refused():
    model = dataclasses.replace(adapter_model(), arch=dataclasses.replace(ARCH, num_layers=2))
    with pytest.raises(ValueError, match=r"layers\.2\..* has no place in the model \(14 such"):
        adapters.import_adapter(ADAPTER, model)


def test_trained_norms_are_not_dropped_silently(tmp_path, norms):
    model, params = norms
    adapters.export_adapter(tmp_path / "a", params, model.lora, "base")
    with pytest.raises(ValueError, match=r"layernorm\.weight has no place in the model \(6 such"):
        adapters.import_adapter(tmp_path / "a", adapter_model())
