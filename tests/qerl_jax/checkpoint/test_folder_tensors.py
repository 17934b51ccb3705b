"""Tests the rule for every tensor of a model folder: dequantized as NumPy does it, refused by name, or listed."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qerl_jax.checkpoint import export, folder_tensors, packed_formats
from qerl_jax.checkpoint.folder_tensors import FolderTensors
from qerl_jax.checkpoint.hf_folder import TINY
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.checkpoint.safetensors import Tensors
from qerl_jax.config import ModelConfig
from qerl_jax.model import layers
from qerl_jax.model.transformer import head
from qerl_jax.quantization import quantizer
from tests import golden_files
from tests.model_folders import DENSE, PACKED, copy
from tests.qerl_jax.checkpoint.test_export import finished_run

F8 = ml_dtypes.float8_e4m3fn
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
DOWN, UP, Q, O = (
    f"model.layers.{i}"
    for i in ("1.mlp.down_proj", "1.mlp.up_proj", "0.self_attn.q_proj", "2.self_attn.o_proj")
)
PACKED_PARTS = ("weight_packed", "weight_scale", "weight_global_scale")
IDS = np.random.default_rng(0).integers(0, 426, (2, 12)).astype(np.int32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] + [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def dense():
    return golden_files.load(DENSE / "model.safetensors")


def packed():
    return golden_files.load(PACKED / "model.safetensors")


def in_8_bits(weight, dtype, scale_shape):
    """Returns codes, scale and the weight that they stand for, by NumPy; blocks are 128 x 128."""
    n, k = weight.shape
    rows, columns = (*scale_shape, 1, 1)[:2] if len(scale_shape) < 3 else scale_shape[::2]
    steps = [-(-size // count) for size, count in zip((n, k), (rows, columns), strict=True)]
    steps = [128 if 64 < step < size else step for step, size in zip(steps, (n, k), strict=True)]
    scale = np.zeros((rows, columns), np.float32)
    codes, value = np.zeros((n, k), dtype), np.zeros((n, k), np.float32)
    for i in range(rows):
        for j in range(columns):
            at = np.s_[i * steps[0] : (i + 1) * steps[0], j * steps[1] : (j + 1) * steps[1]]
            scale[i, j] = np.abs(weight[at]).max() / (127 if dtype == np.int8 else 448)
            units = weight[at] / scale[i, j]
            codes[at] = (np.round(units) if dtype == np.int8 else units).astype(dtype)
            value[at] = codes[at].astype(np.float32) * scale[i, j]
    return codes, scale.reshape(scale_shape), value


def unpacked(tensors, name):
    """NVFP4 by NumPy: code * block scale / global scale."""
    codes = tensors[f"{name}.weight_packed"]
    codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    scale = np.repeat(tensors[f"{name}.weight_scale"].astype(np.float32), 16, axis=1)
    return E2M1[codes] * (scale / tensors[f"{name}.weight_global_scale"])


def logits(folder, weights="float32"):
    cfg = ModelConfig(str(folder), "qerl-tiny", weights, "float32")
    model, frozen, _ = load_base(cfg, None)
    run = lambda frozen: layers.logits(model.apply({"frozen": frozen}, IDS)[0], head(frozen))
    return model, np.asarray(jax.jit(run)(frozen))


def mixed(folder, plain, config=None):
    """Writes the NVFP4 folder with linears in 8 and 16 bits, and ends in FP8, and a float32 folder of its values."""
    stored = packed()
    values = {k: np.float32(v) for k, v in stored.items() if not k.endswith(PACKED_PARTS)}
    names = [n.removesuffix(".weight_packed") for n in stored if n.endswith(".weight_packed")]
    values |= {f"{name}.weight": unpacked(stored, name) for name in names}
    changed = {}
    for name, dtype, suffix, shape in (
        (DOWN, F8, "weight_scale_inv", (1, 3)),
        (Q, np.int8, "weight_scale", (128, 1)),
        ("lm_head", F8, "weight_scale", ()),
        ("model.embed_tokens", F8, "weight_scale", (512, 1)),
    ):
        codes, scale, value = in_8_bits(values[f"{name}.weight"], dtype, shape)
        changed |= dict.fromkeys(f"{name}.{part}" for part in PACKED_PARTS)
        changed |= {f"{name}.weight": codes, f"{name}.{suffix}": scale}
        values[f"{name}.weight"] = value
    in_16_bits = values[f"{O}.weight"].astype(ml_dtypes.bfloat16)
    changed |= dict.fromkeys(f"{O}.{part}" for part in PACKED_PARTS) | {f"{O}.weight": in_16_bits}
    values[f"{O}.weight"] = in_16_bits.astype(np.float32)
    changed |= {f"{DOWN}.input_scale": np.ones(1, np.float32)}
    copy(PACKED, folder, config=config, tensors=changed)
    copy(DENSE, plain, tensors=values)


@pytest.mark.parametrize("stated", ["nvfp4-pack-quantized", "mixed-precision", None])
def test_a_mixed_folder_computes_what_numpy_reads_from_it(tmp_path, stated, capfd):
    """Head and embedding are in FP8, and linears in NVFP4, FP8, INT8 and 16 bits, whatever config.json says."""
    groups = {name: {"format": name} for name in ("float-quantized", "nvfp4-pack-quantized")}
    quantization = {"quant_method": "compressed-tensors", "format": stated, "config_groups": groups}
    config = {"quantization_config": quantization if stated else None}
    mixed(tmp_path / "mixed", tmp_path / "plain", config)
    _, expected = logits(tmp_path / "plain")
    model, exact = logits(tmp_path / "mixed")
    np.testing.assert_allclose(exact, expected, atol=1e-4 * np.abs(expected).max())
    model, four = logits(tmp_path / "mixed", "nvfp4")
    assert model.dense_linears == (("qkv", (0,)), ("o", (2,)), ("down", (1,)))
    # Head, embedding and dense linears are rounded to bfloat16.
    assert np.abs(four - expected).max() < 0.02 * np.abs(expected).max()
    assert capfd.readouterr().err == ""


def test_modelopts_mixed_precision_is_read_by_its_tensors(tmp_path):
    stored, tensors = packed(), {}
    for name in (n.removesuffix(".weight_packed") for n in stored if n.endswith("_packed")):
        tensors |= dict.fromkeys(f"{name}.{part}" for part in PACKED_PARTS)
        tensors[f"{name}.weight"] = stored[f"{name}.weight_packed"]
        tensors[f"{name}.weight_scale"] = stored[f"{name}.weight_scale"]
        tensors[f"{name}.weight_scale_2"] = 1 / stored[f"{name}.weight_global_scale"]
    codes, scale, value = in_8_bits(unpacked(stored, DOWN), F8, ())
    tensors |= {f"{DOWN}.weight": codes, f"{DOWN}.weight_scale": scale}
    del tensors[f"{DOWN}.weight_scale_2"]
    layers = {DOWN: {"quant_algo": "FP8"}, UP: {"quant_algo": "NVFP4", "group_size": 16}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    config = {"quantization_config": config | {"quantized_layers": layers}}
    copy(PACKED, tmp_path / "m", config=config, tensors=tensors)
    read = FolderTensors(tmp_path / "m")
    assert (read.check(), read.dense_linears()) == ([], (("down", (1,)),))
    np.testing.assert_array_equal(read[f"{DOWN}.weight"], value)
    np.testing.assert_allclose(read[f"{UP}.weight"], unpacked(stored, UP), rtol=1e-6)
    layers[DOWN]["quant_algo"] = "W4A8_AWQ"
    copy(PACKED, tmp_path / "awq", config=config, tensors=tensors)
    rule = rf"quantized_layers: {DOWN}: quant_algo: got 'W4A8"
    with pytest.raises(NotImplementedError, match=rule):
        FolderTensors(tmp_path / "awq")


@pytest.mark.parametrize(
    ("dtype", "shape", "suffix", "stated"),
    [
        (F8, (1,), "weight_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}),
        (F8, (128,), "weight_scale", None),
        (F8, (1, 3), "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        (F8, (1, 1, 3, 1), "weight_scale", {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}),
        (np.int8, (), "weight_scale", None),
    ],
)
def test_each_shape_of_a_scale_of_8_bits_is_read(tmp_path, dtype, shape, suffix, stated):
    """The folder is a 16-bit source: its linears can be packed, on load and by `quantize`."""
    codes, scale, value = in_8_bits(dense()[f"{DOWN}.weight"], dtype, shape)
    tensors = {f"{DOWN}.weight": codes, f"{DOWN}.{suffix}": scale.astype(np.float32)}
    copy(DENSE, tmp_path, config={"quantization_config": stated}, tensors=tensors)
    read = FolderTensors(tmp_path)
    assert read.source is None and read.check() == []
    np.testing.assert_array_equal(read[f"{DOWN}.weight"], value)


def test_a_zero_point_is_subtracted(tmp_path):
    codes, scale, _ = in_8_bits(dense()[HEAD], np.int8, (512, 1))
    zero = np.full((512, 1), 3, np.int8)
    tensors = {HEAD: codes, "lm_head.weight_scale": scale, "lm_head.weight_zero_point": zero}
    expected = (codes.astype(np.float32) - 3) * scale
    read = FolderTensors(copy(DENSE, tmp_path, tensors=tensors))
    np.testing.assert_array_equal(read[HEAD], expected)


@pytest.mark.parametrize("format_", ["nvfp4", "mxfp4", "nf4"])
def test_a_head_in_4_bits_is_unpacked(tmp_path, format_):
    form = packed_formats.named(format_)
    (part,) = form.numbers.pack([jnp.asarray(dense()[HEAD])])
    tensors = {f"lm_head.{suffix}": np.asarray(x) for suffix, x in form.write(part).items()}
    copy(DENSE, tmp_path, tensors={HEAD: None} | tensors)
    read = FolderTensors(tmp_path)
    assert read.source is None and read.check() == []
    np.testing.assert_array_equal(read[HEAD], form.numbers.unpack(part, jnp.float32))


ONE = np.ones(1, np.float32)
CODES, HEAD_SCALE = np.zeros((512, 128), F8), "lm_head.weight_scale"
# Tensors that are changed or added, and the error.
REFUSED = [
    ({HEAD_SCALE: ONE}, f"{HEAD_SCALE}: has no place in the model"),
    ({"lm_head.weight.absmax": ONE}, "lm_head.weight.absmax: has no place"),
    ({"model.embed_tokens.weight_scale_inv": ONE}, "embed_tokens.weight_scale_inv: has no place"),
    ({"model.norm.pre_quant_scale": ONE}, "model.norm.pre_quant_scale: has no place"),
    ({f"{DOWN}.weight_scale": ONE}, f"{DOWN}.weight_scale: has no place"),
    ({f"{DOWN}.qweight": ONE}, f"{DOWN}.qweight: has no place"),
    ({HEAD: CODES}, f"{HEAD}: type: got 'F8_E4M3'; must be F32 .*weight_scale or"),
    ({HEAD: CODES.view(np.uint8)}, f"{HEAD}: type: got 'U8'; must be F32"),
    ({EMBEDDING: np.zeros((512, 128), np.int32)}, f"{EMBEDDING}: type: got 'I32'"),
    ({NORM: np.zeros(128, np.int8)}, f"{NORM}: type: got 'I8'"),
    ({f"{Q}.bias": np.zeros(128, F8)}, f"{Q}.bias: type: got 'F8_E4M3'"),
    ({HEAD: CODES, HEAD_SCALE: ONE, f"{HEAD_SCALE}_inv": ONE}, "weight_scale_inv: has no place"),
    (
        {HEAD: CODES, HEAD_SCALE: np.ones(128, np.float32)},
        rf"{HEAD_SCALE}: got shape \(128,\); must be one scale for the whole weight",
    ),
    ({HEAD: CODES, HEAD_SCALE: np.ones(1, np.int32)}, f"{HEAD_SCALE}: type: got 'I32'"),
]


@pytest.mark.parametrize("head", [None, dense()[EMBEDDING]])
@pytest.mark.parametrize("name", ["bias", "qweight", "weight_scale", "weight.absmax"])
def test_a_tied_head_has_nothing_beside_it(tmp_path, head, name):
    tensors = {HEAD: head, f"lm_head.{name}": ONE, "lm_head.input_scale": ONE}
    folder = copy(DENSE, tmp_path, config={"tie_word_embeddings": True}, tensors=tensors)
    with pytest.raises(NotImplementedError, match=f"lm_head.{name}: has no place in the model"):
        FolderTensors(folder).check()


@pytest.mark.parametrize(("tensors", "match"), REFUSED)
def test_what_would_change_a_tensor_is_refused_by_name(tmp_path, tensors, match):
    read = FolderTensors(copy(DENSE, tmp_path, tensors=tensors))
    with pytest.raises((NotImplementedError, ValueError), match=match):
        read.check()


def test_tensors_that_nobody_reads_are_listed_in_one_line(tmp_path, capfd):
    extra = {f"model.layers.{i}.mlp.up_proj.weight": ONE for i in range(3, 7)}
    extra |= {"model.layers.0.self_attn.q_norm.weight": ONE, "visual.x": ONE}
    harmless = ("rotary_emb.inv_freq", "k_scale", "q_proj.input_scale", "k_proj.k_scale")
    extra |= {f"model.layers.0.self_attn.{name}": ONE for name in harmless}
    logits(copy(DENSE, tmp_path, tensors=extra))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path}: 6 tensors have no place in the model")
    assert line.endswith(", and 2 more") and "layers.3.mlp.up_proj.weight" in line


def with_value(name, index, value, source=DENSE):
    tensor = np.array(golden_files.load(source / "model.safetensors")[name])
    tensor[index] = value
    return {name: tensor}


def scaled(factor):
    name = f"{DOWN}.weight_global_scale"
    return {name: np.float32(factor) * packed()[name] ** (-1 if factor == 1 else 1)}


def head_in_8_bits(dtype=F8, code=None, **scales):
    codes, scale, _ = in_8_bits(dense()[HEAD], dtype, (512, 1))
    for row, value in scales.items():
        scale[int(row[1:])] = value
    if code is not None:
        codes[7, 9] = code
    return {HEAD: codes, "lm_head.weight_scale": scale}


NAN, INF = np.nan, np.inf
SCALE, GLOBAL = f"{DOWN}.weight_scale", f"{DOWN}.weight_global_scale"
NOT_FINITE = [
    (DENSE, with_value(f"{DOWN}.weight", (3, 37), NAN), rf"{DOWN}.weight\[3, 37\]: got nan; must"),
    (DENSE, with_value(f"{DOWN}.weight", (3, 37), -INF), r"\[3, 37\]: got -inf"),
    (DENSE, with_value(f"{Q}.bias", 5, NAN), rf"{Q}.bias\[5\]: got nan"),
    (DENSE, with_value(NORM, 5, INF), rf"{NORM}\[5\]: got inf"),
    (DENSE, with_value(EMBEDDING, (2, 1), NAN), rf"{EMBEDDING}\[2, 1\]: got nan"),
    (DENSE, head_in_8_bits(code=NAN), rf"{HEAD}\[7, 9\]: got nan"),
    (DENSE, head_in_8_bits(r3=NAN), r"lm_head.weight_scale\[3, 0\]: got nan"),
    (DENSE, head_in_8_bits(r3=-1.0), r"lm_head.weight_scale\[3, 0\]: got -1.0; .*not negative"),
    (DENSE, head_in_8_bits(np.int8, r3=0.0), r"weight_scale\[3, 0\]: got 0.0; makes 0 of codes"),
    (DENSE, head_in_8_bits(r3=1e3), r"weight_scale\[3, 0\]: got 1000.0; .*inverted"),
    (PACKED, with_value(SCALE, (4, 2), NAN, PACKED), rf"{SCALE}\[4, 2\]: got nan; a block scale"),
    (PACKED, with_value(SCALE, (4, 2), -2.0, PACKED), rf"{SCALE}\[4, 2\]: got -2.0; a block scale"),
    (PACKED, scaled(0), rf"{GLOBAL}\[0\]: got 0.0; a global scale"),
    *((PACKED, scaled(x), rf"{GLOBAL}\[0\]: got {x}") for x in (INF, NAN)),
    *((PACKED, scaled(x), rf"{GLOBAL}\[0\]: got {sign}") for x, sign in ((-1.0, "-"), (1e20, ""))),
    (PACKED, scaled(1), rf"{GLOBAL}\[0\]: got .*is the scale inverted"),
]


@pytest.mark.parametrize(
    ("weights", "source", "tensors", "match"),
    [
        pytest.param(weights, *row, marks=[pytest.mark.slow] * (is_packed != (row[0] == PACKED)))
        for weights, is_packed in (("nvfp4", True), ("bfloat16", False))
        for row in NOT_FINITE
    ],
)
def test_the_first_impossible_number_is_named(tmp_path, source, tensors, match, weights):
    copy(source, tmp_path, tensors=tensors)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/model.safetensors: .*{match}"):
        logits(tmp_path, weights)


@pytest.mark.parametrize(
    ("suffix", "index", "value"),
    [("absmax", 3, NAN), ("absmax", 3, -1.0), ("quant_map", 3, 0.5), ("nested_absmax", 0, INF)],
)
def test_impossible_scales_of_nf4_are_named(tmp_path, suffix, index, value):
    form = packed_formats._nf4(packed_formats.Options(double_quant=suffix == "nested_absmax"))
    (part,) = form.numbers.pack([jnp.asarray(dense()[HEAD])])
    tensors = {f"lm_head.{name}": np.array(x) for name, x in form.write(part).items()}
    tensors[f"lm_head.weight.{suffix}"][index] = value
    read = FolderTensors(copy(DENSE, tmp_path, tensors={HEAD: None} | tensors))
    with pytest.raises((ValueError, NotImplementedError), match=f"lm_head.weight.{suffix}.*: got"):
        read.read(HEAD)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"shape": None}, "shape: got None; must be a list"),
        ({"nested_offset": None}, "nested_offset: got None; must be finite"),
        ({"nested_offset": "x"}, "nested_offset: got 'x'; must be finite"),
        ({"quant_type": "fp4"}, "quant_type: got 'fp4'; must be 'nf4'"),
        ({"nested_blocksize": 64}, "nested_blocksize: got 64; must be 256"),
        ([1], r"got \[1\]; must be an object"),
        (b"\xff{", "not JSON: "),
    ],
)
def test_an_impossible_state_of_nf4_is_named(tmp_path, change, rule):
    form = packed_formats._nf4(packed_formats.Options(double_quant=True))
    (part,) = form.numbers.pack([jnp.asarray(dense()[HEAD])])
    tensors = {f"lm_head.{name}": np.array(x) for name, x in form.write(part).items()}
    state = f"lm_head.weight.{packed_formats._QUANT_STATE}"
    if isinstance(change, dict):
        change = json.loads(tensors[state].tobytes()) | change
    text = change if isinstance(change, bytes) else json.dumps(change).encode()
    tensors[state] = np.frombuffer(text, np.uint8)
    read = FolderTensors(copy(DENSE, tmp_path, tensors={HEAD: None} | tensors))
    with pytest.raises((ValueError, NotImplementedError), match=f"{state}: {rule}"):
        read.read(HEAD)


# Tied and not


def test_a_head_that_differs_from_a_tied_embedding_is_used_and_stays(tmp_path, capfd):
    """As transformers 5 does; the expected logits are those of the same folder with an honest config."""
    _, expected = logits(DENSE)
    copy(DENSE, tmp_path / "m", config={"tie_word_embeddings": True})
    model, ours = logits(tmp_path / "m")
    assert not model.arch.tie_word_embeddings
    np.testing.assert_array_equal(ours, expected)
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "config.json says tie_word_embeddings, but lm_head" in err
    quantizer.quantize(str(tmp_path / "m"), tmp_path / "q", quantizer.Recipe(), lambda line: None)
    config = json.loads((tmp_path / "q/config.json").read_text())
    assert config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(Tensors(tmp_path / "q")[HEAD], dense()[HEAD])


@pytest.mark.slow
@pytest.mark.parametrize("to", ["merged", "nvfp4", "pair"])
def test_exports_keep_a_head_untied(tmp_path, to):
    base = shutil.copytree(TINY, tmp_path / "m")
    head = np.roll(Tensors(TINY)[EMBEDDING], 1, axis=0)
    copy(TINY, base, tensors={HEAD: head})
    finished_run(tmp_path / "run", model_name_or_path=str(base))
    options = {"base": "original"} if to == "nvfp4" else {}
    export.export(tmp_path / "run", to, tmp_path / "out", limit=9.0, **options)
    written = tmp_path / "out" / "base" if to == "pair" else tmp_path / "out"
    assert json.loads((written / "config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(Tensors(written)[HEAD], head)


def test_a_head_that_equals_the_embedding_stays_tied_silently(tmp_path, capfd):
    tensors = {HEAD: dense()[EMBEDDING]}
    copy(DENSE, tmp_path, config={"tie_word_embeddings": True}, tensors=tensors)
    model, _ = logits(tmp_path)
    assert model.arch.tie_word_embeddings and capfd.readouterr().err == ""


def test_numbers_that_only_the_device_finds_not_finite_are_an_error(monkeypatch):
    monkeypatch.setattr(folder_tensors, "_is_usable", lambda x: False)
    with pytest.raises(
        RuntimeError, match="model.norm.weight: all numbers are finite in .*but not"
    ):
        FolderTensors(DENSE).read(NORM)
