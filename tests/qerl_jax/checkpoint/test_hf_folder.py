"""Tests that a model written as a Hugging Face folder reads back as the same model."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.checkpoint import base_model, hf_folder
from qerl_jax.model import architecture
from qerl_jax.model.transformer import Transformer
from tests import golden_files
from tests.golden_files import GOLDEN
from tests.model_folders import ARCH, DENSE, PACKED, assert_trees_equal, base, copy
from tests.pallas_kernels.common import slow


@pytest.mark.parametrize("name", ["qwen2_untied", "qwen2_tied", *map(slow, ("qwen3", "llama3"))])
def test_an_exported_model_has_the_tensors_it_was_read_from(name, tmp_path):
    source = GOLDEN / "models" / name
    model = Transformer(architecture.load(source), "float32", None, jnp.float32, full=True)
    hf_folder.export_model(tmp_path / "model", model, base(source, "float32"), source)
    ours, theirs = (
        golden_files.load(folder / "model.safetensors") for folder in (tmp_path / "model", source)
    )
    assert ours.keys() == theirs.keys()
    for tensor, value in ours.items():
        np.testing.assert_array_equal(value, theirs[tensor], err_msg=tensor)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["torch_dtype"] == "float32" and "dtype" not in config
    assert architecture.load(tmp_path / "model") == architecture.load(source)


def test_a_model_from_packed_weights_is_exported_in_16_bits_with_its_tokenizer(tmp_path):
    source = copy(PACKED, tmp_path / "source")
    for file in hf_folder.TINY.glob("tokenizer*"):
        shutil.copy(file, source)
    (source / "old.safetensors.index.json").write_text("{}")
    model = Transformer(architecture.load(source), "bfloat16", None, jnp.bfloat16)
    hf_folder.export_model(tmp_path / "model", model, base(PACKED, "bfloat16"), source)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    companions = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names == {"config.json", "model.safetensors"} | companions
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and "quantization_config" not in config
    assert_trees_equal(base_model.read_base(tmp_path / "model", model), base(PACKED, "bfloat16"))


@pytest.mark.parametrize(
    ("config", "generation", "end", "expected"),
    [
        ({}, None, "<|im_end|>", {"eos_token_id": 421}),
        ({}, {"top_p": 0.9}, "<|im_end|>", {"top_p": 0.9, "eos_token_id": 421}),
        ({}, None, {"__type": "AddedToken", "content": "<|im_end|>"}, {"eos_token_id": 421}),
        ({}, {"eos_token_id": [1, 2]}, "<|im_end|>", {"eos_token_id": [421, 1, 2]}),
        ({}, {"eos_token_id": [2, 421]}, "<|im_end|>", {"eos_token_id": [2, 421]}),
        ({"eos_token_id": 3}, None, "<|im_end|>", {"eos_token_id": [421, 3]}),
        ({}, None, None, None),
    ],
)
def test_a_copy_states_all_ends_of_tokenizer_and_configs(
    config, generation, end, expected, tmp_path
):
    source, folder = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    folder.mkdir()
    shutil.copy(hf_folder.TINY / "tokenizer.json", source)
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps(generation))
    hf_folder.copy_companions(source, folder)
    written = folder / "generation_config.json"
    assert (json.loads(written.read_text()) if written.is_file() else None) == expected


def test_an_exported_model_deletes_nothing_but_a_model(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    model = Transformer(ARCH, "float32", None, jnp.float32)
    with pytest.raises(FileExistsError, match=f"{tmp_path}: holds files, but no model"):
        hf_folder.export_model(tmp_path, model, base(DENSE, "float32"), DENSE)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
