"""Tests GGUF files as a source of models, and the errors for broken ones."""

import contextlib
import importlib.util
import json
import shutil
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from qerl_jax.checkpoint import gguf, hf_folder
from qerl_jax.checkpoint.gguf import GGUFError
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.config import ModelConfig
from qerl_jax.data import tokenizer
from qerl_jax.model import architecture
from qerl_jax.quantization import quantizer
from qerl_jax.quantization.quantizer import Recipe
from tests import golden_files
from tests.gguf_files import write
from tests.golden_files import GOLDEN
from tests.model_folders import assert_trees_equal, copy, read

HAS_PACKAGE = importlib.util.find_spec("gguf") is not None
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="the package gguf is not installed")
MODELS = {"qwen2_untied": "qwen2", "qwen3": "qwen3", "llama3": "llama", "mistral": "llama"}
F32, F16, Q8_0, Q4_1, Q4_K, BF16 = 0, 1, 8, 3, 12, 30


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def llama_rows(weight, heads):
    """Puts the rows of q and k into llama.cpp's order, as its converter does."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def contents(name, pack=None):
    """Returns fields and tensors of a recorded model with llama.cpp's names and order."""
    folder, arch = GOLDEN / "models" / name, MODELS[name]
    traits = architecture.load(folder)
    fields = {
        "general.architecture": arch,
        f"{arch}.block_count": traits.num_layers,
        f"{arch}.context_length": traits.context,
        f"{arch}.embedding_length": traits.width,
        f"{arch}.feed_forward_length": traits.ffn_width,
        f"{arch}.attention.head_count": traits.num_heads,
        f"{arch}.attention.head_count_kv": traits.num_kv_heads,
        f"{arch}.attention.key_length": traits.head_size,
        f"{arch}.attention.layer_norm_rms_epsilon": float(traits.rms_norm_eps),
        f"{arch}.rope.freq_base": float(traits.rope_theta),
        f"{arch}.rope.dimension_count": traits.head_size,
    }
    names = {ours: theirs for theirs, ours in gguf._OUTSIDE.items()}
    parts = {ours: theirs for theirs, ours in gguf._IN_LAYER.items()}
    tensors = {}
    for name, weight in golden_files.load(folder / "model.safetensors").items():
        if name in names:
            theirs = names[name]
        else:
            _, _, index, *part, suffix = name.split(".")
            theirs = f"blk.{index}.{parts['.'.join(part)]}.{suffix}"
        if arch == "llama" and theirs.split(".")[2:3] in (["attn_q"], ["attn_k"]):
            heads = traits.num_heads if "attn_q" in theirs else traits.num_kv_heads
            weight = llama_rows(weight, heads)
        fits = pack is not None and weight.ndim == 2 and weight.shape[1] % 32 == 0
        packed = pack(weight) if fits else (F32, weight.astype("<f4").tobytes())
        tensors[theirs] = (weight.shape, *packed)
    if traits.rope_scaling is not None:
        tensors["rope_freqs.weight"] = rope_factors(traits)
    return folder, fields, tensors


def rope_factors(traits):
    """Computes llama.cpp's own loop over the frequencies."""
    scaling, factors = traits.rope_scaling, []
    original, factor = scaling.original_max_position_embeddings, scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    for i in range(0, traits.head_size, 2):
        wavelength = 2 * np.pi * traits.rope_theta ** (i / traits.head_size)
        smooth = (original / wavelength - low) / (high - low)
        between = factor if wavelength > original / low else 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if wavelength < original / high else between)
    return (len(factors),), F32, np.array(factors, "<f4").tobytes()


def base(folder):
    return read(folder, "bfloat16")[1]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in ("qwen3", "mistral"))) for n in MODELS],
)
def test_a_model_of_each_family_comes_out_as_it_went_in(name, tmp_path):
    """This includes biases, norms of heads, llama.cpp's order of rows of q and k, and Llama 3's rotation."""
    folder, fields, tensors = contents(name)
    file = write(tmp_path / "model.gguf", fields, tensors)
    found = hf_folder.local_folder(str(file))
    ours, theirs = architecture.load(found), architecture.load(folder)
    if name == "llama3":
        assert ours.rope_scaling == theirs.rope_scaling
    changed = {"model_type": ours.model_type} if name == "mistral" else {}
    assert ours == theirs.__class__(**vars(theirs) | changed)
    assert_trees_equal(base(found), base(folder))
    assert hf_folder.local_folder(str(file)) == found  # made once


@needs_package
@pytest.mark.parametrize(
    ("kind", "most"),
    [*(pytest.param(*row, marks=pytest.mark.slow) for row in ((F16, 3e-3), (Q8_0, 8e-3)))]
    + [(BF16, 4e-3), (Q4_1, 0.1)],
)
def test_quantized_tensors_come_out_near_what_went_in(kind, most, tmp_path):
    import gguf as package

    def pack(weight):
        if kind == BF16:
            return kind, weight.astype(ml_dtypes.bfloat16).tobytes()
        return kind, package.quantize(weight, package.GGMLQuantizationType(kind)).tobytes()

    folder, fields, tensors = contents("llama3", pack)
    file = write(tmp_path / "model.gguf", fields, tensors)
    ours, theirs = base(hf_folder.local_folder(str(file))), base(folder)
    for linear in ("qkv", "o", "gate_up"):  # 176 inputs of "down" are no whole blocks
        a, b = (np.asarray(tree["layers"][linear]["weight"], np.float32) for tree in (ours, theirs))
        error = np.sqrt(np.sum((a - b) ** 2) / np.sum(b**2))
        assert 0 <= error < most
        assert kind in (BF16, F16) or error > 1e-3


def test_the_first_number_that_is_none_is_named(tmp_path):
    _, fields, tensors = contents("qwen2_untied")
    shape, kind, content = tensors["blk.1.ffn_up.weight"]
    values = np.frombuffer(content, "<f4").copy().reshape(shape)
    values[3, 37] = np.nan
    tensors["blk.1.ffn_up.weight"] = shape, kind, values.tobytes()
    folder = gguf.as_folder(write(tmp_path / "m.gguf", fields, tensors))
    with pytest.raises(ValueError, match=r"gguf: model.*.1.mlp.up_proj.weight\[3, 37\]: got nan"):
        base(folder)


def test_a_block_of_q4_k_is_unpacked_as_ggml_defines_it(tmp_path):
    """It has 256 weights: eight times 32 codes of 4 bits, scales and minima of 6 bits, and two halves for all."""
    rng = np.random.default_rng(0)
    scales, minima = rng.integers(0, 64, (2, 8))
    codes = rng.integers(0, 16, 256)
    packed = np.zeros(12, np.uint8)
    for j in range(4):
        packed[j] = scales[j] | (scales[j + 4] >> 4) << 6
        packed[j + 4] = minima[j] | (minima[j + 4] >> 4) << 6
        packed[j + 8] = (scales[j + 4] & 15) | (minima[j + 4] & 15) << 4
    pairs = codes.reshape(4, 2, 32)
    nibbles = (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8)
    block = np.array([0.5, 0.25], "<f2").tobytes() + packed.tobytes() + nibbles.tobytes()
    expected = 0.5 * np.repeat(scales, 32) * codes - 0.25 * np.repeat(minima, 32)

    _, fields, tensors = contents("qwen3")
    tensors["output.weight"] = ((1, 256), Q4_K, block)
    file = write(tmp_path / "model.gguf", fields, tensors)
    found = gguf.Tensors(file)["lm_head.weight"]
    np.testing.assert_array_equal(found[0], expected.astype(ml_dtypes.bfloat16))


@needs_package
def test_a_type_of_the_package_is_read_like_the_others(tmp_path):
    """IQ4_NL, by the package, with the rows of q and k in Hugging Face's order."""
    import gguf as package

    kind, name = package.GGMLQuantizationType.IQ4_NL, "model.layers.0.self_attn.q_proj.weight"
    _, fields, tensors = contents("llama3")
    shape, stored, _ = tensors["blk.0.attn_q.weight"]
    rows = np.random.default_rng(0).integers(0, 100, (shape[0], shape[1] // 32 * 18), np.uint8)
    weight = package.dequantize(rows, kind)
    tensors["blk.0.attn_q.weight"] = shape, stored, weight.tobytes()
    expected = gguf.Tensors(write(tmp_path / "plain.gguf", fields, tensors))[name]
    tensors["blk.0.attn_q.weight"] = shape, kind, rows.tobytes()
    read = gguf.Tensors(write(tmp_path / "rare.gguf", fields, tensors))
    for found in (read[name], read.on_device(name)):
        np.testing.assert_array_equal(np.asarray(found), expected)


def test_a_header_is_read_again_when_its_file_has_changed(tmp_path):
    _, fields, tensors = contents("qwen3")
    for heads in (2, 4):
        changed = {"qwen3.attention.head_count": heads, "general.name": "a" * heads}
        file = write(tmp_path / "model.gguf", fields | changed, tensors)
        assert gguf.read_header(file).fields["qwen3.attention.head_count"] == heads
        assert gguf.read_header(file) is gguf.read_header(file)


def test_a_file_is_a_source_for_loading_and_quantizing(tmp_path):
    """The file has no tokenizer, so the tiny one is used."""
    folder, fields, tensors = contents("qwen2_untied")
    file = write(tmp_path / "model.gguf", fields, tensors)
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json"):
        load_base(ModelConfig(str(file)), None)
    quantizer.quantize(str(file), tmp_path / "ours", Recipe(), lambda line: None)
    (tmp_path / "bare").mkdir()
    narrow = golden_files.load(folder / "model.safetensors")
    narrow = {name: value.astype(ml_dtypes.bfloat16) for name, value in narrow.items()}
    copy(folder, tmp_path / "bare", tensors=narrow)
    quantizer.quantize(str(tmp_path / "bare"), tmp_path / "theirs", Recipe(), lambda line: None)
    assert_trees_equal(*(read(tmp_path / name, "nvfp4")[1] for name in ("ours", "theirs")))


def test_sensitivities_of_a_tied_file_are_measured_with_its_embedding(tmp_path):
    """At the end of a job that calibrates: what all of its hours have found would be lost."""
    folder, fields, tensors = contents("qwen2_untied")
    del tensors["output.weight"]
    file = write(tmp_path / "model.gguf", fields, tensors)
    job = quantizer._open(gguf.as_folder(file), tmp_path / "out", Recipe(), lambda line: None)
    job.progress.close()
    norm, head = quantizer._ends(job)
    stored = golden_files.load(folder / "model.safetensors")
    for found, name in ((norm, "norm"), (head, "embed_tokens")):
        expected = stored[f"model.{name}.weight"].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(found, expected)


def tokenizer_fields(tokens, types, merges=(), **others):
    """Returns the fields of a tokenizer of Qwen2's kind."""
    fields = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": types}
    fields |= {"merges": list(merges)} | others
    template = {"tokenizer.chat_template": "{{ messages[0]['content'] }}"}
    return template | {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def test_a_tokenizer_of_byte_pairs_is_read_and_another_is_left_out(tmp_path):
    tokens = ["a", "b", "ab", "Ġ", "Ġab", "1", "2", "<|end|>"]
    fields = tokenizer_fields(tokens, [1] * 7 + [3], ["a b", "Ġ ab"], eos_token_id=7)
    assert gguf.write_tokenizer(tmp_path, fields)
    made = tokenizer.load(tmp_path)
    assert made.encode(["ab ab12<|end|>"]) == [[2, 4, 5, 6, 7]]
    assert made.stop_tokens == (7,) and made.decode([2, 4, 5]) == "ab ab1"
    assert not gguf.write_tokenizer(tmp_path, fields | {"tokenizer.ggml.pre": "tekken"})
    assert not gguf.write_tokenizer(tmp_path, fields | {"tokenizer.ggml.model": "llama"})


@pytest.mark.parametrize("says", [None, False, True])
@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2"])
def test_texts_begin_as_with_llama_cpp(kind, says, tmp_path):
    others = {"pre": kind, "bos_token_id": 2, "eos_token_id": 3} | {"add_bos_token": says}
    fields = tokenizer_fields(["a", "b", "<s>", "</s>"], [1, 1, 3, 3], **others)
    begins = kind == "llama-bpe" if says is None else says
    if says is None:
        del fields["tokenizer.ggml.add_bos_token"]
    assert gguf.write_tokenizer(tmp_path, fields)
    assert tokenizer.load(tmp_path).encode(["ab"]) == [[2] * begins + [0, 1]]


def test_tokens_that_are_text_stay_whole_and_rows_without_a_token_are_none(tmp_path):
    """Qwen3's <think> is such text: its tokenizer never splits it, and its embedding has more rows than tokens."""
    tokens = ["a", "<", ">", "<|end|>", "<a>", "[PAD5]"]
    fields = tokenizer_fields(tokens, [1, 1, 1, 3, 4, 5], eos_token_id=3, padding_token_id=5)
    assert gguf.write_tokenizer(tmp_path, fields)
    made = tokenizer.load(tmp_path)
    assert made.encode(["a<a>a<a<|end|>"]) == [[0, 4, 0, 1, 0, 3]]
    assert made.decode([4, 0, 3]) == "<a>a"
    assert made.num_tokens == 5 and made.pad_token == 3


def test_a_completion_ends_where_llama_cpp_ends_it(tmp_path):
    """At the end of the text, of a turn and of a message: Llama 3.1's <|end_of_text|>, <|eot_id|> and <|eom_id|>."""
    _, fields, tensors = contents("qwen2_untied")
    ends = {"eos": 5, "eot": 7, "eom": 5}
    fields |= {f"tokenizer.ggml.{name}_token_id": each for name, each in ends.items()}
    folder = gguf.as_folder(write(tmp_path / "model.gguf", fields, tensors))
    stated = json.loads((folder / "generation_config.json").read_text())
    assert stated["eos_token_id"] == [5, 7]


def program(text, *args):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", text, *map(str, args)], text=True, **pipes)


OPEN = """
import os, sys
from qerl_jax.checkpoint import gguf
for line in sys.stdin:
    os.environ["XDG_CACHE_HOME"] = line.strip()
    folder = gguf.as_folder(sys.argv[1])
    print(*sorted(os.listdir(folder)), len(gguf.Tensors(folder / gguf.FILE)), flush=True)
"""


@pytest.mark.slow
def test_four_processes_open_one_file_at_once(tmp_path):
    """20 times, each with an empty cache."""
    _, fields, tensors = contents("qwen2_untied")
    fields |= tokenizer_fields(["a", "b", "ab", "<|end|>"], [1, 1, 1, 3], ["a b"], eos_token_id=3)
    file = write(tmp_path / "model.gguf", fields, tensors)
    names = "config.json generation_config.json model.gguf tokenizer.json tokenizer_config.json"
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(program(OPEN, file)) for _ in range(4)]
        for cache in (tmp_path / f"{number}" for number in range(20)):
            for process in processes:
                print(cache, file=process.stdin, flush=True)
            answers = [process.stdout.readline() for process in processes]
            assert answers == [f"{names} {len(tensors)}\n"] * 4
            assert len(list((cache / "qerl_jax" / "gguf").iterdir())) == 1
        assert [process.communicate() for process in processes] == [("", "")] * 4


LOAD = """
import sys
from qerl_jax.data import tokenizer
for folder in sys.argv[1:]:
    print(tokenizer.load(folder).encode(["ab"])[0])
"""


@pytest.mark.slow
def test_a_large_tokenizer_is_loaded_without_a_warning(tmp_path):
    """transformers warns of a fault in tokenizers of more than 100,000 tokens if it takes them for Mistral's."""
    _, fields, tensors = contents("qwen2_untied")
    tokens, types = ["a", "b", "ab", "<|end|>", *map(str, range(100_000))], [1, 1, 1, 3]
    fields |= tokenizer_fields(tokens, types + [1] * 100_000, ["a b"], eos_token_id=3)
    folder = gguf.as_folder(write(tmp_path / "model.gguf", fields, tensors))
    other = shutil.copytree(folder, tmp_path / "other", symlinks=True)  # as of another program
    table = json.loads((folder / "config.json").read_text())
    assert table.pop("transformers_version")
    (other / "config.json").write_text(json.dumps(table))
    with program(LOAD, folder, other) as process:
        assert process.communicate() == ("[2]\n[2]\n", "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"", "cut short"),
        (lambda data: b"PK" + data[2:], "is no GGUF file"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "of version 1"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "of version 50331648"),
        (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], f"says {1 << 60}"),
        (lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:], f"says {1 << 60}"),
        (lambda data: data[:24] + struct.pack("<Q", 1 << 62) + data[32:], "cut short"),
        (lambda data: data[:300], "cut short"),
        (lambda data: data[:-100], "is cut short, or not what its header says: .* ends at byte"),
        (lambda data: data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"), "has no place"),
        (lambda data: data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), "comes twice"),
        (lambda data: data.replace(b"blk.0.attn_q.w", b"blk.0.attn_\xff.w"), "not UTF-8"),
        # In a list of texts: its second one, the length of this, and in the middle of both.
        (lambda data: data.replace(b"word", b"w\xffrd"), "not UTF-8"),
        (
            lambda data: data.replace(b"\4" + bytes(7) + b"word", b"\4" + bytes(6) + b"\1word"),
            "says",
        ),
        (lambda data: data[: data.index(b"word") + 2], "says 4 of something"),
        (lambda data: data[: data.index(b"word") - 2], "in the middle of the header"),
    ],
)
def test_a_broken_file_is_an_error_that_says_what_is_wrong(tmp_path, change, said):
    """Lengths in a header may not exceed the file, so they cause no large allocation."""
    _, fields, tensors = contents("llama3")
    fields["general.tags"] = ["a", "word"]
    file = write(tmp_path / "model.gguf", fields, tensors)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(GGUFError, match=said) as error:
        hf_folder.local_folder(str(file))
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"general.architecture": "bloom"},
            "general.architecture: got 'bloom'; must be one of llama",
        ),
        *(({"general.architecture": x}, "architecture: got") for x in (["llama"], 3, True, "")),
        ({"llama.embedding_length": 0}, "llama.embedding_length: got 0; must be a positive"),
        ({"llama.block_count": "many"}, "llama.block_count: got 'many'"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"split.count": 3}, "join them first"),
        ({"llama.rope.dimension_count": 8}, "rotations of whole heads"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "got 'yarn'"),
        ({"general.alignment": 24}, "general.alignment: got 24"),
        ({"llama.rope.freq_base": 7e4}, "these are not Llama 3's factors"),
        ({"llama.attention.head_count": 3}, "rope|rows are not|head"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, changes, said):
    _, fields, tensors = contents("llama3")
    file = write(tmp_path / "model.gguf", fields | changes, tensors)
    with pytest.raises(ValueError, match=said):
        base(hf_folder.local_folder(str(file)))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rotations_are_those_of_the_same_config(kind, tmp_path):
    """golden/rope has what transformers makes of such a config."""
    folder, fields, tensors = contents("qwen2_untied")
    scaling = {"type": kind, "factor": 4.0, "original_context_length": 64}
    fields |= {f"qwen2.rope.scaling.{name}": value for name, value in scaling.items()}
    arch = architecture.load(gguf.as_folder(write(tmp_path / "m.gguf", fields, tensors)))
    config = json.loads((folder / "config.json").read_text())
    table = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    rope = config["rope_parameters"] | table
    assert arch == architecture.from_hf(config | {"rope_parameters": rope})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("tokens", value) for value in (None, 3, [1, 2])),
        *(("merges", value) for value in (["ab"], ["a "], ["x y"])),
        *(("token_type", value) for value in (["1", "1", "1"], [1])),
    ],
)
def test_a_tokenizer_that_is_none_is_refused_by_its_field(name, value, tmp_path):
    odd = {"eos_token_id": "3", "bos_token_id": -1}
    fields = tokenizer_fields(["a", "b", "ab"], [1, 1, 1], ["a b"], **odd)
    with pytest.raises(ValueError, match="tokenizer.ggml"):
        gguf.write_tokenizer(tmp_path, fields | {f"tokenizer.ggml.{name}": value})
    assert gguf.write_tokenizer(tmp_path, fields)
    assert "eos_token" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
