"""Tests reading and writing of bases: what is read, what is refused, and what a crash leaves behind."""

import json
import shutil
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4, runtime
from qerl_jax.checkpoint import base_model, hf_folder, safetensors
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.checkpoint.safetensors import SafetensorsError
from qerl_jax.config import LoraConfig, ModelConfig
from qerl_jax.model import architecture
from qerl_jax.model.transformer import Transformer, abstract_base
from qerl_jax.system.checked import ConfigError
from scripts.compile_decode import as_on
from tests import golden_files
from tests.golden_files import GOLDEN
from tests.model_folders import ARCH, DENSE, PACKED, assert_trees_equal, base, copy

LINEARS = ("qkv", "o", "gate_up", "down")


NONE, RANDOM = {"tokenizer_name_or_path": None}, {"random_base": True}
WHOLE = RANDOM | {"weights": "bfloat16", "trainable": "full"}


def policy(folder, weights="float32", **options):
    options = {"tokenizer_name_or_path": "qerl-tiny", "dtype": "float32"} | options
    return load_base(ModelConfig(str(folder), weights=weights, **options), None)


# Reading a base


def test_shards_give_the_tree_of_the_single_file(tmp_path):
    tensors = golden_files.load(DENSE / "model.safetensors")
    (copy(DENSE, tmp_path) / "model.safetensors").unlink()
    table = {name: (value.dtype, value.shape) for name, value in tensors.items()}
    safetensors.write_shards(tmp_path, table, tensors.__getitem__, shard_bytes=2**18)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    model, frozen, _ = policy(tmp_path)
    assert model.arch == ARCH
    assert_trees_equal(frozen, base(DENSE, "float32"))


def test_a_packed_checkpoint_read_as_float32_is_its_dequantized_self():
    packed, dense = base(PACKED, "nvfp4"), base(PACKED, "float32")
    for linear in LINEARS:
        expected = jax.jit(nvfp4.dequantize)(packed["layers"][linear]["weight"])
        np.testing.assert_array_equal(dense["layers"][linear]["weight"], expected)
    assert dense["layers"]["qkv"]["bias"].dtype == jnp.float32


@pytest.mark.slow
def test_global_scales_may_be_shared_in_some_layers_only(tmp_path):
    """Layers are stacked, so one layer with its own scales for gate and up decides the form of all."""
    name = "model.layers.1.mlp.up_proj.weight_global_scale"
    scale = 2 * golden_files.load(PACKED / "model.safetensors")[name]
    copy(PACKED, tmp_path, tensors={name: scale})
    packed, dense = base(tmp_path, "nvfp4"), base(tmp_path, "float32")
    widths = {linear: packed["layers"][linear]["weight"].global_scale.shape for linear in LINEARS}
    assert widths == {"qkv": (3, 1), "o": (3, 1), "gate_up": (3, 704), "down": (3, 1)}
    unpacked = nvfp4.dequantize(packed["layers"]["gate_up"]["weight"])
    np.testing.assert_array_equal(unpacked, dense["layers"]["gate_up"]["weight"])
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
    frozen = base_model.read_base(tmp_path, model)
    jax.block_until_ready(frozen)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert_trees_equal(frozen, base(DENSE, "float32"))


def test_a_random_base_is_packed_repeatable_and_as_wide_as_asked(tmp_path):
    """It needs a config.json, and no weights."""
    shutil.copy(DENSE / "config.json", tmp_path)
    cfg = ModelConfig(str(tmp_path), "qerl-tiny", "nvfp4", "float32", random_base=True)
    first, again, other = (load_base(cfg, None, seed)[1] for seed in (0, 0, 1))
    assert_trees_equal(first, again)
    dequantize = jax.jit(nvfp4.dequantize)
    for linear in LINEARS:
        weight = first["layers"][linear]["weight"]
        assert isinstance(weight, nvfp4.NVFP4Tensor) and weight.codes.shape[0] == ARCH.num_layers
        dense = np.asarray(dequantize(weight))
        np.testing.assert_allclose(dense.std(axis=(1, 2)), 0.02, rtol=0.03)
        assert (dense != dequantize(other["layers"][linear]["weight"])).mean() > 0.8
        assert (dense[0] != dense[1]).mean() > 0.8


@pytest.mark.slow
def test_a_policy_has_the_adapter_and_the_dtypes_that_were_asked_for():
    cfg = ModelConfig(str(DENSE), "qerl-tiny", "nvfp4", "bfloat16")
    model, frozen, tokens = load_base(cfg, LoraConfig(4, 8.0, 0.1, True))
    assert (model.lora, model.dtype) == (LoraConfig(4, 8.0, 0.1, True), jnp.bfloat16)
    assert frozen["embed_tokens"].dtype == frozen["norm"]["scale"].dtype == jnp.bfloat16
    assert frozen["layers"]["qkv"]["weight"].codes.dtype == jnp.uint8
    assert tokens.num_tokens <= model.arch.vocab_size


@pytest.mark.parametrize(
    ("lora", "is_paired"),
    [
        (LoraConfig(64, rank_pattern={"gate_proj": 8, "up_proj": 8}), True),
        *(
            pytest.param(lora, is_paired, marks=pytest.mark.slow)
            for lora, is_paired in (
                *((None, True), (LoraConfig(32), True), (LoraConfig(64), False)),
                (LoraConfig(64, target_modules=("q_proj",)), True),
            )
        ),
    ],
)
def test_bases_that_are_read_and_random_bases_have_one_layout(lora, is_paired):
    cfg = ModelConfig(str(DENSE), "qerl-tiny", "nvfp4", "bfloat16")
    with as_on("H200"):
        model, frozen, _ = load_base(cfg, lora)
        expected = abstract_base(model)
    assert jax.tree.structure(frozen) == jax.tree.structure(expected)
    assert frozen["layers"]["gate_up"]["weight"].is_paired == is_paired
    assert not frozen["layers"]["qkv"]["weight"].is_paired


# What is refused at the door


def test_a_missing_tensor_is_refused(tmp_path):
    name = "model.layers.2.mlp.down_proj.weight"
    copy(DENSE, tmp_path, tensors={name: None})
    with pytest.raises(SafetensorsError, match=f"no tensor {name}"):
        policy(tmp_path)


NAMES = "self_attn.k_proj.weight self_attn.k_proj.bias post_attention_layernorm.weight".split()


@pytest.mark.parametrize(
    "name",
    [
        *("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"),
        *(f"model.layers.2.{name}" for name in NAMES),
    ],
)
def test_a_tensor_of_another_shape_is_refused(tmp_path, name):
    held = golden_files.load(DENSE / "model.safetensors")[name]
    copy(DENSE, tmp_path, tensors={name: np.ascontiguousarray(held[1:])})
    shape = rf"got shape \({len(held) - 1},.*config.json says"
    with pytest.raises(ValueError, match=f"{name}: {shape}"):
        policy(tmp_path)


QUANTIZED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
MIXED = {"format": "mixed-precision", "config_groups": {"g": {"format": "marlin-24"}}}
MIXED = QUANTIZED | MIXED
LLAMA3 = {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}
# What a config is changed to, and the error.
UNSUPPORTED = [
    ({"model_type": "gemma2"}, "model_type: got 'gemma2'"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "got 'chunked_attention'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5"),
    ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
    ({"model_type": "llama", "attention_bias": True}, "got True; llama is supported without"),
    ({"model_type": "llama", "mlp_bias": True}, "mlp_bias: got True"),
    ({"model_type": "qwen3", "attention_bias": True}, "attention_bias: got True; qwen3"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "su"}}, "rope_type: got 'su'"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "got .*yarn.*; differs from rope_param"),
]
IMPOSSIBLE = [
    ({"rope_parameters": LLAMA3}, "got 'llama3'; it needs low_freq_factor"),
    ({"rope_parameters": "x"}, "rope_parameters: got 'x'; must be an object"),
    ({"rope_parameters": {"rope_theta": None}}, "rope_theta: got None"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: got 3"),
    ({"head_dim": 31}, "head_dim: got 31"),
    ({"head_dim": "32"}, "head_dim: got '32'; must be a positive integer"),
    ({"num_key_value_heads": 2.0}, "num_key_value_heads: got 2.0"),
    ({"hidden_size": None}, "hidden_size: got None"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: got 0"),
    ({"intermediate_size": 360}, r"model.weights: got 'nvfp4'; down has 360 input features \(K\)"),
]
# The same of the config's `quantization_config`.
UNREADABLE = [
    ({"quant_method": "gptq"}, "quant_method, format: got .'gptq', None."),
    (QUANTIZED | {"format": "pack-quantized"}, "got .'compressed-tensors', 'pack-quantized'."),
    (MIXED, "config_groups: g: format: got 'marlin-24'; must be one of"),
    (QUANTIZED | {"transform_config": {"config_groups": {"R1": {}}}}, "config: rotated weights"),
    (QUANTIZED | {"sparsity_config": {"format": "sparse-24"}}, "config: format: got 'sparse-24'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "got .'modelopt', 'NVFP4_AWQ'."),
]


@pytest.mark.parametrize(
    "config,error,match",
    [
        *((config, NotImplementedError, match) for config, match in UNSUPPORTED),
        *((config, ValueError, match) for config, match in IMPOSSIBLE),
        *(({"quantization_config": q}, NotImplementedError, match) for q, match in UNREADABLE),
    ],
)
def test_an_unsupported_model_is_refused(tmp_path, config, error, match):
    copy(DENSE, tmp_path, config=config)
    with pytest.raises(error, match=match):
        policy(tmp_path, "nvfp4")


@pytest.mark.parametrize(
    "model_type,window", [("mistral", None), ("mistral", 256), ("qwen2", 128), ("qwen2", None)]
)
def test_a_window_that_hides_nothing_is_no_window(tmp_path, model_type, window):
    """The model has 256 positions; Qwen2's window has a switch, which is off."""
    config = json.loads((DENSE / "config.json").read_text())
    changed = config | {"model_type": model_type, "sliding_window": window}
    assert architecture.from_hf(changed).model_type == model_type


@pytest.mark.parametrize("model_type", ["mistral", "qwen2"])
def test_a_context_of_null_is_as_one_that_is_not_stated(model_type):
    config = json.loads((DENSE / "config.json").read_text()) | {"model_type": model_type}
    for name in ("sliding_window", "layer_types"):
        config.pop(name, None)
    absent = {name: value for name, value in config.items() if name != "max_position_embeddings"}
    null = architecture.from_hf(config | {"max_position_embeddings": None})
    window = 4096 if model_type == "mistral" else None  # transformers' default
    assert null == architecture.from_hf(absent) and null.context == window


def test_a_bias_that_the_family_lacks_is_not_dropped_silently(tmp_path):
    name = "model.layers.1.self_attn.o_proj.bias"
    copy(DENSE, tmp_path, tensors={name: np.zeros(128, np.float32)})
    with pytest.raises(NotImplementedError, match=f"{name}: has no place in the model"):
        policy(tmp_path)


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


@pytest.mark.parametrize(
    ("folder", "options", "error", "match"),
    [
        # The tiny tokenizer has 426 ids; this model has 320 rows.
        (GOLDEN / "models/llama3", {}, ValueError, "has ids up to 425; .* embedding has only 320"),
        (DENSE, NONE, FileNotFoundError, "qwen2_untied'; has no tokenizer.json"),
        (
            "qwen2.5-3b",
            NONE | RANDOM,
            ValueError,
            "tokenizer_name_or_path: got None; 'qwen2.5-3b' is",
        ),
        ("qwen2.5-0.5b", WHOLE, ValueError, "trainable: got 'full'; 'qwen2.5-0.5b' is a shape"),
    ],
)
def test_a_base_without_a_fitting_tokenizer_or_config_is_refused(folder, options, error, match):
    with pytest.raises(error, match=match):
        policy(folder, **options)


@pytest.mark.parametrize(
    "text,match", [("{", "not JSON"), ("[1]", "not a JSON object but a list"), ("\0", "not JSON")]
)
def test_a_config_that_is_none_or_missing_is_named(tmp_path, text, match):
    with pytest.raises(FileNotFoundError, match=f"no config.json in {tmp_path}"):
        policy(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json: {match}"):
        policy(tmp_path)


def test_a_folder_that_does_not_exist_is_not_looked_for_elsewhere(tmp_path):
    for name in (str(tmp_path / "nowhere"), "./nowhere"):
        with pytest.raises(FileNotFoundError, match=f"got '{name}'; no such folder"):
            hf_folder.local_folder(name)


def test_what_the_hub_says_is_passed_on(monkeypatch):
    import huggingface_hub

    asked = []

    def refuse(name, allow_patterns):
        asked.append(allow_patterns)
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match="'org/name' is no local folder.*OSError: offline"):
        hf_folder.local_folder("org/name")
    with pytest.raises(FileNotFoundError):
        policy("org/name", random_base=True)
    assert ["*.safetensors" in patterns for patterns in asked] == [True, False]


def test_kernels_that_cannot_run_here_are_an_error_that_says_why():
    cfg = ModelConfig("qwen2.5-3b", random_base=True, kernels="hopper")
    rule = "model.kernels: got 'hopper'; cannot run here: needs a GPU of compute capability 9.0"
    with runtime.on(runtime.device(), "auto"), pytest.raises(ConfigError, match=rule):
        load_base(cfg, None)
