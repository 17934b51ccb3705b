"""Files to trees and back: what is read, what is refused at the door, and what a crash leaves behind."""

import dataclasses
import functools
import json
import shutil
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from pallas_kernels import nvfp4
from qerl_jax import architecture, checkpoint, update
from qerl_jax.config import LoraConfig, ModelConfig, OptimConfig
from qerl_jax.model import LoRA, Transformer, init_params
from qerl_jax.tensor_files import SafetensorsError
from tests import golden_files
from tests.golden_files import GOLDEN

DENSE = GOLDEN / "models/qwen2_untied"
PACKED = GOLDEN / "nvfp4/qwen2_untied"
ADAPTER = GOLDEN / "lora/qwen2_untied_r8"
ARCH = architecture.load(DENSE)
LINEARS = ("qkv", "o", "gate_up", "down")


@functools.cache
def base(folder, weights):
    model = Transformer(architecture.load(folder), weights, None, jnp.float32)
    return checkpoint.load_base(folder, model)


def assert_trees_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def copy(source, target, *, config=None, tensors=None):
    """A model folder with some fields of its config and some tensors replaced; None removes one."""

    def changed(old, new):
        return {k: v for k, v in (old | (new or {})).items() if v is not None}

    target.mkdir(exist_ok=True)
    fields = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(changed(fields, config)))
    if tensors is None:
        shutil.copy(source / "model.safetensors", target)
    else:
        held = golden_files.load(source / "model.safetensors")
        save_file(changed(held, tensors), target / "model.safetensors")
    return target


def split_into_shards(folder):
    tensors = golden_files.load(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard)
        weight_map |= dict.fromkeys(names, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def policy(folder, weights="float32", **options):
    options = {"tokenizer_name_or_path": "qerl-tiny", "dtype": "float32"} | options
    return checkpoint.load_policy(ModelConfig(str(folder), weights=weights, **options), None)


# Reading a base


def test_shards_give_the_tree_of_the_single_file(tmp_path):
    split_into_shards(copy(DENSE, tmp_path))
    model, frozen, _ = policy(tmp_path)
    assert model.arch == ARCH
    assert_trees_equal(frozen, base(DENSE, "float32"))


def test_a_packed_checkpoint_read_as_float32_is_its_dequantized_self():
    packed, dense = base(PACKED, "nvfp4"), base(PACKED, "float32")
    for linear in LINEARS:
        expected = nvfp4.dequantize(packed["layers"][linear]["weight"])
        np.testing.assert_array_equal(dense["layers"][linear]["weight"], expected)
    assert dense["layers"]["qkv"]["bias"].dtype == jnp.float32


def test_global_scales_may_be_shared_in_some_layers_only(tmp_path):
    """Layers are stacked, so one layer with its own scales for gate and up decides the form of all."""
    name = "model.layers.1.mlp.up_proj.weight_global_scale"
    scale = 2 * golden_files.load(PACKED / "model.safetensors")[name]
    copy(PACKED, tmp_path, tensors={name: scale})
    packed, dense = base(tmp_path, "nvfp4"), base(tmp_path, "float32")
    widths = {linear: packed["layers"][linear]["weight"].global_scale.shape for linear in LINEARS}
    assert widths == {"qkv": (3, 1), "o": (3, 1), "gate_up": (3, 704), "down": (3, 1)}
    np.testing.assert_array_equal(
        nvfp4.dequantize(packed["layers"]["gate_up"]["weight"]),
        dense["layers"]["gate_up"]["weight"],
    )
    before = np.asarray(base(PACKED, "float32")["layers"]["gate_up"]["weight"])
    after = np.array(dense["layers"]["gate_up"]["weight"])
    after[1, 352:] *= 2
    np.testing.assert_array_equal(after, before)


def test_a_loaded_base_does_not_change_with_its_file(tmp_path):
    """Data on a 64-byte boundary is what a CPU's array could stay in."""
    path = copy(DENSE, tmp_path) / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" " * (-(8 + length) % 64)
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    model = Transformer(ARCH, "float32", None, jnp.float32)
    frozen = checkpoint.load_base(tmp_path, model)
    jax.block_until_ready(frozen)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert_trees_equal(frozen, base(DENSE, "float32"))


def test_a_random_base_is_packed_repeatable_and_as_wide_as_asked(tmp_path):
    """It needs a config.json, and no weights."""
    shutil.copy(DENSE / "config.json", tmp_path)
    cfg = ModelConfig(str(tmp_path), "qerl-tiny", "nvfp4", "float32", random_base=True)
    first, again, other = (checkpoint.load_policy(cfg, None, seed)[1] for seed in (0, 0, 1))
    assert_trees_equal(first, again)
    dequantize = jax.jit(nvfp4.dequantize)
    for linear in LINEARS:
        weight = first["layers"][linear]["weight"]
        assert isinstance(weight, nvfp4.NVFP4Tensor) and weight.codes.shape[0] == ARCH.num_layers
        dense = np.asarray(dequantize(weight))
        np.testing.assert_allclose(dense.std(axis=(1, 2)), 0.02, rtol=0.03)
        assert (dense != dequantize(other["layers"][linear]["weight"])).mean() > 0.8
        assert (dense[0] != dense[1]).mean() > 0.8


def test_a_policy_has_the_adapter_and_the_dtypes_that_were_asked_for():
    cfg = ModelConfig(str(DENSE), "qerl-tiny", "nvfp4", "bfloat16")
    model, frozen, tokens = checkpoint.load_policy(cfg, LoraConfig(4, 8.0, 0.1, True))
    assert (model.lora, model.dtype) == (LoRA(4, 8.0, 0.1, True), jnp.bfloat16)
    assert frozen["embed_tokens"].dtype == frozen["norm"]["scale"].dtype == jnp.bfloat16
    assert frozen["layers"]["qkv"]["weight"].codes.dtype == jnp.uint8
    assert tokens.num_tokens <= model.arch.vocab_size


# What is refused at the door


def test_a_missing_shard_is_refused(tmp_path):
    split_into_shards(copy(DENSE, tmp_path))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SafetensorsError, match="1 of 2 shards are missing: model-00002-of-00002"):
        policy(tmp_path)


def test_a_truncated_shard_is_refused(tmp_path):
    split_into_shards(copy(DENSE, tmp_path))
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(SafetensorsError, match=r"model-00002-of-00002.*truncated"):
        policy(tmp_path)


def test_an_index_that_names_an_absent_tensor_is_refused(tmp_path):
    split_into_shards(copy(DENSE, tmp_path))
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.extra"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(SafetensorsError, match="no shard holds model.layers.9.extra"):
        policy(tmp_path)


def test_a_missing_tensor_is_refused(tmp_path):
    name = "model.layers.2.mlp.down_proj.weight"
    copy(DENSE, tmp_path, tensors={name: None})
    with pytest.raises(SafetensorsError, match=f"no tensor {name}"):
        policy(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.2.self_attn.k_proj.weight",
        "model.layers.2.self_attn.k_proj.bias",
        "model.layers.1.post_attention_layernorm.weight",
    ],
)
def test_a_tensor_of_another_shape_is_refused(tmp_path, name):
    held = golden_files.load(DENSE / "model.safetensors")[name]
    copy(DENSE, tmp_path, tensors={name: np.ascontiguousarray(held[1:])})
    with pytest.raises(
        ValueError, match=rf"{name}: got shape \({len(held) - 1},.*config.json says"
    ):
        policy(tmp_path)


def test_a_packed_tensor_of_another_shape_is_refused(tmp_path):
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    held = golden_files.load(PACKED / "model.safetensors")[name].view(np.uint8)
    copy(PACKED, tmp_path, tensors={name: np.ascontiguousarray(held[:, :4])})
    with pytest.raises(ValueError, match=rf"{name}: got shape \(128, 4\); .* says \(128, 8\)"):
        policy(tmp_path)


QUANTIZED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


@pytest.mark.parametrize(
    "config,error,match",
    [
        ({"model_type": "mistral"}, NotImplementedError, "model_type: got 'mistral'"),
        ({"use_sliding_window": True}, NotImplementedError, "use_sliding_window: got true"),
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act: got 'gelu'"),
        (
            {"model_type": "llama", "attention_bias": True},
            NotImplementedError,
            "attention_bias: got True; llama is supported without",
        ),
        ({"model_type": "llama", "mlp_bias": True}, NotImplementedError, "mlp_bias: got True"),
        (
            {"model_type": "qwen3", "attention_bias": True},
            NotImplementedError,
            "attention_bias: got True; qwen3",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}},
            NotImplementedError,
            "rope_type: got 'yarn'",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}},
            ValueError,
            "'llama3' needs low_freq_factor, high_freq_factor, original_max_position_embeddings",
        ),
        ({"num_key_value_heads": 3}, ValueError, "num_key_value_heads: got 3"),
        ({"head_dim": 31}, ValueError, "head_dim: got 31"),
        ({"hidden_size": None}, ValueError, "hidden_size: got None"),
        ({"num_hidden_layers": 0}, ValueError, "num_hidden_layers: got 0"),
        (
            {"intermediate_size": 360},
            ValueError,
            r"model.weights: got 'nvfp4'; down has 360 input features \(K\)",
        ),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            NotImplementedError,
            "got quant_method 'gptq', format None",
        ),
        (
            {"quantization_config": QUANTIZED | {"format": "float-quantized"}},
            NotImplementedError,
            "format 'float-quantized'",
        ),
        (
            {
                "quantization_config": QUANTIZED
                | {"config_groups": {"group_0": {"input_activations": {"num_bits": 4}}}}
            },
            NotImplementedError,
            "W4A4",
        ),
    ],
)
def test_an_unsupported_model_is_refused(tmp_path, config, error, match):
    copy(DENSE, tmp_path, config=config)
    with pytest.raises(error, match=match):
        policy(tmp_path, "nvfp4")


def test_a_width_that_is_no_multiple_of_16_is_fine_without_packing(tmp_path):
    shapes = {"gate_proj": (360, 128), "up_proj": (360, 128), "down_proj": (128, 360)}
    tensors = {
        f"model.layers.{index}.mlp.{name}.weight": np.zeros(shape, np.float32)
        for index in range(3)
        for name, shape in shapes.items()
    }
    copy(DENSE, tmp_path, config={"intermediate_size": 360}, tensors=tensors)
    _, frozen, _ = policy(tmp_path)
    assert frozen["layers"]["down"]["weight"].shape == (3, 128, 360)


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused():
    """The tiny tokenizer has 426 ids; this model has 320 rows."""
    with pytest.raises(ValueError, match="has ids up to 425; the model's embedding has only 320"):
        policy(GOLDEN / "models/llama3")


def test_a_named_shape_needs_a_tokenizer():
    with pytest.raises(ValueError, match="model.tokenizer_name_or_path: missing; 'qwen2.5-3b' is"):
        checkpoint.load_policy(ModelConfig("qwen2.5-3b", random_base=True), None)


def test_a_model_folder_without_tokenizer_is_refused():
    with pytest.raises(FileNotFoundError, match="no tokenizer.json in .*qwen2_untied"):
        policy(DENSE, tokenizer_name_or_path=None)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no config.json in {tmp_path}"):
        policy(tmp_path)


def test_a_folder_that_does_not_exist_is_not_looked_for_elsewhere(tmp_path):
    for name in (str(tmp_path / "nowhere"), "./nowhere"):
        with pytest.raises(FileNotFoundError, match=f"no such folder: {name}"):
            checkpoint.local_folder(name)


def test_what_the_hub_says_is_passed_on(monkeypatch):
    import huggingface_hub

    asked = []

    def refuse(name, allow_patterns):
        asked.append(allow_patterns)
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match="'org/name' is no local folder.*OSError: offline"):
        checkpoint.local_folder("org/name")
    with pytest.raises(FileNotFoundError):
        policy("org/name", random_base=True)
    assert ["*.safetensors" in patterns for patterns in asked] == [True, False]


# Adapters


def adapter_model(**changes):
    return Transformer(ARCH, "float32", LoRA(8, 16.0, **changes), jnp.float32)


@pytest.fixture(scope="module")
def norms():
    """A model whose norms train, and params of it without two equal numbers."""
    model = adapter_model(train_norms=True)
    params = init_params(model, base(DENSE, "float32"), jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    leaves = [jnp.asarray(rng.normal(size=leaf.shape).astype(np.float32)) for leaf in leaves]
    return model, jax.tree.unflatten(tree, leaves)


def test_pefts_adapter_is_written_back_tensor_by_tensor(tmp_path):
    model = adapter_model()
    shape = checkpoint.read_lora(ADAPTER)
    assert shape == LoraConfig(8, 16.0, 0.0, False)
    params = checkpoint.import_adapter(ADAPTER, model)
    checkpoint.export_adapter(tmp_path / "a", params, model.lora, "models/qwen2_untied")

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
    checkpoint.export_adapter(tmp_path / "a", params, model.lora, "somewhere")
    assert checkpoint.read_lora(tmp_path / "a") == LoraConfig(8, 16.0, 0.0, True)
    assert_trees_equal(checkpoint.import_adapter(tmp_path / "a", model), params)
    names = golden_files.load(tmp_path / "a/adapter_model.safetensors")
    assert "base_model.model.model.layers.2.post_attention_layernorm.weight" in names
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert config["modules_to_save"] == ["input_layernorm", "post_attention_layernorm"]
    assert config["base_model_name_or_path"] == "somewhere"


def test_an_export_replaces_an_adapter_whole(tmp_path, norms):
    model, params = norms
    folder = tmp_path / "deep" / "a"
    checkpoint.export_adapter(folder, params, model.lora, "first")
    (folder / "README.md").write_text("of the first")
    checkpoint.export_adapter(folder, params, model.lora, "second")
    assert [path.name for path in folder.parent.iterdir()] == ["a"]
    assert not (folder / "README.md").exists()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "second"


def test_a_failing_export_leaves_the_old_adapter_and_nothing_else(tmp_path, norms, monkeypatch):
    import safetensors.numpy

    model, params = norms
    folder = tmp_path / "a"
    checkpoint.export_adapter(folder, params, model.lora, "first")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.export_adapter(folder, params, model.lora, "second")
    with pytest.raises(OSError, match="disk full"):
        checkpoint.export_adapter(tmp_path / "new", params, model.lora, "second")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_export_deletes_nothing_but_an_adapter(tmp_path, norms):
    model, params = norms
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(FileExistsError, match=f"{tmp_path}: holds something that is no adapter"):
        checkpoint.export_adapter(tmp_path, params, model.lora, "base")
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
        checkpoint.read_lora(changed_adapter(tmp_path, **fields))


def test_all_linear_is_all_seven(tmp_path):
    folder = changed_adapter(tmp_path, target_modules="all-linear")
    assert checkpoint.read_lora(folder) == checkpoint.read_lora(ADAPTER)


def test_a_folder_without_adapter_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no adapter_config.json in {tmp_path}"):
        checkpoint.read_lora(tmp_path)


def test_an_adapter_of_another_rank_is_refused():
    model = Transformer(ARCH, "float32", LoRA(4, 16.0), jnp.float32)
    with pytest.raises(ValueError, match=r"lora_A.weight: got shape \(8, 128\); .* \(4, 128\)"):
        checkpoint.import_adapter(ADAPTER, model)


def test_an_adapter_of_a_deeper_model_is_refused():
    model = dataclasses.replace(adapter_model(), arch=dataclasses.replace(ARCH, num_layers=2))
    with pytest.raises(ValueError, match=r"layers\.2\..* has no place in the model \(14 such"):
        checkpoint.import_adapter(ADAPTER, model)


def test_trained_norms_are_not_dropped_silently(tmp_path, norms):
    model, params = norms
    checkpoint.export_adapter(tmp_path / "a", params, model.lora, "base")
    with pytest.raises(ValueError, match=r"layernorm\.weight has no place in the model \(6 such"):
        checkpoint.import_adapter(tmp_path / "a", adapter_model())


# Writing a model


@pytest.mark.parametrize("name", ["qwen2_untied", "qwen2_tied", "qwen3", "llama3"])
def test_an_exported_model_has_the_tensors_it_was_read_from(name, tmp_path):
    source = GOLDEN / "models" / name
    model = Transformer(architecture.load(source), "float32", None, jnp.float32, full=True)
    checkpoint.export_model(tmp_path / "model", model, base(source, "float32"), source)
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
    for file in checkpoint.TINY.glob("tokenizer*"):
        shutil.copy(file, source)
    (source / "old.safetensors.index.json").write_text("{}")
    model = Transformer(architecture.load(source), "bfloat16", None, jnp.bfloat16)
    checkpoint.export_model(tmp_path / "model", model, base(PACKED, "bfloat16"), source)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and "quantization_config" not in config
    assert_trees_equal(checkpoint.load_base(tmp_path / "model", model), base(PACKED, "bfloat16"))


def test_an_exported_model_deletes_nothing_but_a_model(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    model = Transformer(ARCH, "float32", None, jnp.float32)
    with pytest.raises(FileExistsError, match=f"{tmp_path}: holds something that is no model"):
        checkpoint.export_model(tmp_path, model, base(DENSE, "float32"), DENSE)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_a_shape_without_files_cannot_train_whole():
    with pytest.raises(ValueError, match="model.trainable: got 'full'; 'qwen2.5-0.5b' is a shape"):
        policy("qwen2.5-0.5b", "bfloat16", trainable="full", random_base=True)


# The state of a run


@pytest.fixture(scope="module")
def state(norms):
    """A state after a step: no leaf is what a fresh state has."""
    _, params = norms
    fresh = update.init_state(params, OptimConfig())
    rng = np.random.default_rng(1)

    def moved(leaf):
        return (leaf + rng.integers(1, 100, leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(moved, fresh)


def at(state, step):
    return dataclasses.replace(state, step=jnp.int32(step))


def test_a_state_round_trips_bit_for_bit(tmp_path, norms, state):
    files = checkpoint.StateFiles(tmp_path, keep=2)
    files.save(at(state, 7))
    files.close()
    again = checkpoint.StateFiles(tmp_path, keep=2)
    restored = again.restore(update.init_state(norms[1], OptimConfig()))
    again.close()
    assert isinstance(restored, update.TrainState)
    assert_trees_equal(restored, at(state, 7))


def test_a_kept_reference_and_the_supply_round_trip_with_the_state(tmp_path, norms, state):
    supply = {"drawn": 8, "rows": [{"logps": [float(np.float32(-0.1))], "stopped": True}]}
    kept = dataclasses.replace(at(state, 3), reference=jax.tree.map(jnp.negative, state.params))
    files = checkpoint.StateFiles(tmp_path, keep=2)
    assert files.supply() is None
    files.save(at(kept, 2), {"drawn": 4})
    files.save(kept, supply)
    files.close()
    again = checkpoint.StateFiles(tmp_path, keep=2)
    like = update.init_state(norms[1], OptimConfig(), keep_reference=True)
    assert_trees_equal(again.restore(like), kept)
    assert again.supply() == supply
    again.close()


def test_the_newest_states_are_kept_and_the_newest_is_restored(tmp_path, state):
    files = checkpoint.StateFiles(tmp_path, keep=2)
    for step in (1, 2, 10):
        files.save(at(state, step))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["10", "2"]
    assert files.restore(state).step == 10
    files.close()


def test_an_empty_run_folder_has_no_state(tmp_path, state):
    files = checkpoint.StateFiles(tmp_path / "new", keep=2)
    assert files.restore(state) is None
    files.close()


def test_a_state_that_was_cut_off_while_written_is_not_restored(tmp_path, state):
    """orbax writes under a temporary name, which a killed process leaves behind."""
    files = checkpoint.StateFiles(tmp_path, keep=3)
    files.save(at(state, 1))
    files.save(at(state, 2))
    files.close()
    folder = tmp_path / "checkpoints"
    (folder / "2").rename(folder / "2.orbax-checkpoint-tmp-0")
    again = checkpoint.StateFiles(tmp_path, keep=3)
    assert again.restore(state).step == 1
    again.close()


def test_a_state_of_another_adapter_is_refused(tmp_path, state):
    files = checkpoint.StateFiles(tmp_path, keep=2)
    files.save(state)
    other = Transformer(ARCH, "float32", LoRA(4, 16.0, train_norms=True), jnp.float32)
    params = init_params(other, base(DENSE, "float32"), jax.random.key(0))
    with pytest.raises(ValueError, match="shape"):
        files.restore(update.init_state(params, OptimConfig()))
    files.close()
