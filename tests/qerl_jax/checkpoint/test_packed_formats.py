"""Tests folders of quantized models: each stored form gives the same numbers; what would change them is refused."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import nvfp4
from qerl_jax import config
from qerl_jax.checkpoint import safetensors
from qerl_jax.checkpoint.safetensors import SafetensorsError
from tests import golden_files
from tests.model_folders import ARCH, DENSE, PACKED, assert_trees_equal, base, copy

LINEARS = ("qkv", "o", "gate_up", "down")
NAME = "model.layers.1.mlp.down_proj"
UNKNOWN = {"version": "99.0", "observer": {"a": 1}, "kv_cache_scheme": {"num_bits": 8}}
UNKNOWN |= {"sparsity_config": None, "transform_config": {}}


def quantization(**changes):
    return json.loads((PACKED / "config.json").read_text())["quantization_config"] | changes


def modelopt(folder, *, beside=False, **extra):
    """Makes the recorded packed folder as ModelOpt would write it: its second scale multiplies."""
    held = golden_files.load(PACKED / "model.safetensors")
    tensors = dict.fromkeys(held)
    for name, value in held.items():
        stem = name.removesuffix(".weight_global_scale")
        if name.endswith(".weight_packed"):
            tensors[name.replace("_packed", "")] = value
        elif stem != name:
            tensors[f"{stem}.weight_scale_2"] = np.float32(1) / value.reshape(())
            tensors[f"{stem}.input_scale"] = np.float32(0.5)
        else:
            tensors[name] = value
    algorithm = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    config = {"quantization_config": None if beside else {"quant_method": "modelopt"} | algorithm}
    copy(PACKED, folder, config=config, tensors=tensors | extra)
    if beside:
        table = {"producer": {"name": "modelopt"}, "quantization": algorithm}
        (folder / "hf_quant_config.json").write_text(json.dumps(table))
    return folder


@pytest.mark.parametrize("what", ["unknown keys", "quantized activations", "a scalar scale"])
def test_what_does_not_concern_the_weights_is_passed_over(tmp_path, what):
    """With W4A4 activations stay in 16 bits here, and the scales for rounding them are not needed."""
    config, tensors, name = {}, {}, f"{NAME}.weight_global_scale"
    if what == "unknown keys":
        config = {"quantization_config": quantization(**UNKNOWN)}
    elif what == "quantized activations":
        groups = quantization()["config_groups"]
        groups["group_0"]["input_activations"] = {"num_bits": 4}
        config = {"quantization_config": quantization(config_groups=groups)}
        tensors = {f"{NAME}.input_global_scale": np.ones(1, np.float32)}
    else:
        tensors = {name: golden_files.load(PACKED / "model.safetensors")[name].reshape(())}
    copy(PACKED, tmp_path, config=config, tensors=tensors)
    assert_trees_equal(base(tmp_path, "nvfp4"), base(PACKED, "nvfp4"))


@pytest.mark.parametrize("beside", [False, True], ids=["config.json", "hf_quant_config.json"])
def test_modelopts_scale_is_the_reciprocal(tmp_path, beside):
    folder = modelopt(tmp_path, beside=beside)
    held = golden_files.load(folder / "model.safetensors")
    ours = base(folder, "nvfp4")["layers"]
    for linear in LINEARS:
        weight, known = ours[linear]["weight"], base(PACKED, "nvfp4")["layers"][linear]["weight"]
        np.testing.assert_array_equal(weight.codes, known.codes)
        assert weight.global_scale.shape == known.global_scale.shape == (ARCH.num_layers, 1)
        np.testing.assert_allclose(weight.global_scale, known.global_scale, rtol=2e-7)
    # ModelOpt's own definition: code * block scale * second scale.
    steps = np.repeat(held[f"{NAME}.weight_scale"].astype(np.float32), 16, axis=1)
    codes = nvfp4.CODE_VALUES[np.asarray(nvfp4.unpack_codes(jnp.asarray(held[f"{NAME}.weight"])))]
    expected = codes * steps * held[f"{NAME}.weight_scale_2"]
    np.testing.assert_allclose(nvfp4.dequantize(ours["down"]["weight"])[1], expected, rtol=1e-6)


def test_scales_for_awq_inputs_are_not_dropped_silently(tmp_path):
    extra = {f"{NAME}.pre_quant_scale": np.ones(352, np.float32)}
    with pytest.raises(NotImplementedError, match=rf"{NAME}\.pre_quant_scale: has no place"):
        base(modelopt(tmp_path, **extra), "nvfp4")


def test_a_linear_left_out_of_the_quantization_is_named(tmp_path):
    dense = golden_files.load(DENSE / "model.safetensors")[f"{NAME}.weight"]
    parts = ("weight_packed", "weight_scale", "weight_global_scale")
    tensors = dict.fromkeys(f"{NAME}.{p}" for p in parts) | {f"{NAME}.weight": dense}
    copy(PACKED, tmp_path, tensors=tensors)
    rule = r"model.dense_linears: got \(\); .* keeps \(\('down', \(1,\)"
    with pytest.raises(config.ConfigError, match=rule):
        base(tmp_path, "nvfp4")


@pytest.mark.parametrize(
    ("suffix", "change", "error", "match"),
    [
        ("weight_scale", lambda x: x[:, :4], ValueError, r"got shape \(128, 4\); .* \(128, 22\)"),
        ("weight_global_scale", lambda x: None, SafetensorsError, "no tensor NAME"),
        ("weight_packed", lambda x: x.view(np.int8), NotImplementedError, "got 'I8'; must be U8"),
        ("weight_scale", lambda x: x.view(np.uint8), NotImplementedError, "'U8'; must be F8_E4M3"),
        ("weight_g_idx", lambda x: np.zeros(352, np.int32), NotImplementedError, "has no place"),
    ],
)
def test_a_packed_tensor_that_is_not_of_the_format_is_named(tmp_path, suffix, change, error, match):
    name = f"{NAME}.{suffix}"
    stored = golden_files.load(PACKED / "model.safetensors").get(name)
    copy(PACKED, tmp_path, tensors={name: change(stored)})
    text = match.replace("NAME", name) if "NAME" in match else f"{name}: .*{match}"
    with pytest.raises(error, match=text):
        base(tmp_path, "nvfp4")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_dense_weights_of_any_float_are_read(tmp_path, dtype):
    held = golden_files.load(DENSE / "model.safetensors")
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text((DENSE / "config.json").read_text())
    table = {name: (dtype, value.shape) for name, value in held.items()}
    safetensors.write_shards(tmp_path / "m", table, lambda name: held[name].astype(dtype))
    read = base(tmp_path / "m", "float32")["layers"]["down"]["weight"][1]
    np.testing.assert_array_equal(read, held[f"{NAME}.weight"].astype(dtype).astype(np.float32))


def test_packed_weights_are_not_packed_again():
    with pytest.raises(NotImplementedError, match="model.weights: got 'mxfp4'; .* holds nvfp4"):
        base(PACKED, "mxfp4")
