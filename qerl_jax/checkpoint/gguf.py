"""Reads GGUF files (llama.cpp's format) as 16-bit weights with Hugging Face's names.

The header is parsed here, and every length is checked against the file, because such files are untrusted. `gguf_blocks`
dequantizes the common types on the device (Q4_0 ... Q8_0, Q2_K ... Q6_K), and the package `gguf` all others on the host
(IQ types and more): `pip install gguf`. All weights become bfloat16, as in a 16-bit checkpoint.

    general.architecture    llama (and Mistral), qwen2, qwen3
    q and k of llama        in GGUF, RoPE rotates neighbouring rows of a head; in Hugging Face's order, its two halves
    rope_freqs.weight       Llama 3's scaling, as divisors of the frequencies
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import mmap
import pathlib
import reprlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from qerl_jax.checkpoint import gguf_blocks
from qerl_jax.checkpoint.checksum import to_device
from qerl_jax.system.checked import require
from qerl_jax.system.files import cache_folder, whole_folder

# Name of the weights in a folder that stands for a GGUF file.
FILE = "model.gguf"

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_MOST_AXES = 4
# Types of tokens: control tokens, which are not text; text that is never split; and unused rows of the embedding.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
# Part of the names of cached folders: a version of this program that changes it makes them anew.
_FOLDER_FORM = 4

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_ROPE_FACTORS = "rope_freqs.weight"
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class GGUFError(ValueError):
    """A GGUF file that is cut short, inconsistent, or has content that cannot be read."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Position, shape and type of a tensor in the file.

    Attributes:
        shape: Shape in NumPy's order, [N, K] for a linear.
        type: ggml's number of its type.
        start: First byte in the file.
        nbytes: Size in bytes.
    """

    shape: tuple[int, ...]
    type: int
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Header:
    """The parsed header of a GGUF file.

    Attributes:
        fields: Metadata by key.
        entries: Tensors by llama.cpp's names.
    """

    fields: dict[str, Any]
    entries: dict[str, Entry]


def read_header(path: str | pathlib.Path) -> Header:
    """Reads and checks the header of a GGUF file, version 2 or 3.

    Raises:
        GGUFError: If the file is broken or cannot be read; the error names the file and the reason.
    """
    whole = pathlib.Path(path).resolve()
    stat = whole.stat()
    try:
        return _header(whole, stat.st_size, stat.st_mtime_ns)
    except GGUFError as error:
        raise GGUFError(f"{path}: {error}") from None


# A start reads the same header several times, and that of a large vocabulary takes a fifth of a second.
@functools.lru_cache(maxsize=1)
def _header(path: pathlib.Path, size: int, changed: int) -> Header:
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    return _Parser(data).header()


class _Parser:
    """Parses a header from the first byte on, and rejects every length that exceeds the file."""

    def __init__(self, data: bytes | mmap.mmap):
        self._data, self._at = data, 0

    def header(self) -> Header:
        if self._bytes(4) != _MAGIC:
            raise GGUFError("is no GGUF file")
        if (version := self._number("I")) not in (2, 3):
            rule = "only 2 and 3 can be read, in little-endian order"
            raise GGUFError(f"is of version {version}; {rule}")
        num_tensors, num_fields = self._count(), self._count()
        fields = self._items(num_fields, lambda: self._value(self._number("I")))
        entries = self._items(num_tensors, self._tensor)
        align = fields.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= 1 << 20 or align & (align - 1):
            raise GGUFError(f"general.alignment: got {align!r}; must be a power of two")
        start = -(-self._at // align) * align
        return Header(fields, {name: self._placed(name, *t, start) for name, t in entries.items()})

    def _items(self, count: int, read: Callable[[], Any]) -> dict[str, Any]:
        """Reads names, each with what follows it."""
        items = {}
        for _ in range(count):
            name = self._text()
            if name in items:
                raise GGUFError(f"{name}: comes twice")
            items[name] = read()
        return items

    def _tensor(self) -> tuple[tuple[int, ...], int, int]:
        axes = self._number("I")
        if not 1 <= axes <= _MOST_AXES:
            raise GGUFError(f"a tensor has {axes} axes; 1 to {_MOST_AXES} are possible")
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]
        return shape, self._number("I"), self._number("Q")

    def _placed(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int
    ) -> Entry:
        entry = Entry(shape, kind, start + offset, math.prod(_byte_shape(name, shape, kind)))
        if (end := entry.start + entry.nbytes) > (size := len(self._data)):
            why = f"{name} ends at byte {end} of {size}"
            raise GGUFError(f"is cut short, or not what its header says: {why}")
        return entry

    def _bytes(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise GGUFError(f"is cut short: {len(self._data)} bytes, in the middle of the header")
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _count(self) -> int:
        """Reads the number of items that follow, each of which takes at least one byte."""
        count = self._number("Q")
        if count > len(self._data) - self._at:
            size = len(self._data)
            raise GGUFError(f"is cut short: a header of {size} bytes says {count} of something")
        return count

    def _text(self) -> str:
        try:
            return self._bytes(self._count()).decode()
        except UnicodeDecodeError as error:
            raise GGUFError(f"holds a text that is not UTF-8: {error}") from None

    def _texts(self, count: int) -> list[str]:
        """Reads texts as `_text` does, which reads again what it must refuse; a vocabulary has 300,000 with its merges."""
        texts, read, size = [], struct.Struct("<Q").unpack_from, len(self._data)
        while len(texts) < count:
            start = self._at + 8
            end = start + read(self._data, self._at)[0] if start <= size else size + 1
            try:
                texts.append(self._data[start:end].decode() if end <= size else self._text())
            except UnicodeDecodeError:
                self._text()
            self._at = end
        return texts

    def _value(self, kind: int) -> Any:
        is_array, count = kind == _ARRAY, 1
        if is_array:
            kind, count = self._number("I"), self._count()
        if kind == _STRING:
            values = self._texts(count)
        elif code := _SCALARS.get(kind):
            form = f"<{count}{code}"
            values = list(struct.unpack(form, self._bytes(struct.calcsize(form))))
        else:
            why = "which is unknown, or an array of arrays"
            raise GGUFError(f"holds a value of type {kind}, {why}")
        return values if is_array else values[0]


def _byte_shape(name: str, shape: tuple[int, ...], kind: int) -> tuple[int, ...]:
    """Returns the shape of a tensor's bytes, [..., bytes of a row]."""
    if (sizes := gguf_blocks.sizes(kind)) is None:
        known = {int(number): size for number, size in _package(name).GGML_QUANT_SIZES.items()}
        if (sizes := known.get(kind)) is None:
            raise GGUFError(f"{name}: has the type {kind}, which is unknown")
    block, nbytes = sizes
    if shape[-1] % block:
        raise GGUFError(f"{name}: rows of {shape[-1]} are no whole blocks of {block}")
    return (*shape[:-1], shape[-1] // block * nbytes)


def _package(name: str):
    try:
        import gguf
    except ImportError:
        rule = "is quantized, and the package that unpacks it is missing: pip install gguf"
        raise GGUFError(f"{name}: {rule}") from None
    return gguf


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of a GGUF file by Hugging Face's names, in bfloat16; each is dequantized on access.

    Attributes:
        header: The header of the file.
        config: The config.json of its model, from `model_config`.
    """

    def __init__(self, path: str | pathlib.Path):
        """Reads the header, but no tensor.

        Raises:
            GGUFError: If the file is broken, its model is not supported, or a tensor has no Hugging Face name.
        """
        self._path = pathlib.Path(path)
        self.header = read_header(path)
        self.config = model_config(self.header)
        self._data = np.memmap(path, mode="r")
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        heads = heads if self.config["model_type"] == "llama" else {}
        self._heads = {part: self.config[field] for part, field in heads.items()}
        self._entries = {
            _hf_name(name): (name, entry)
            for name, entry in self.header.entries.items()
            if name != _ROPE_FACTORS
        }

    def __getitem__(self, name: str) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            return np.ascontiguousarray(_weight(*self._stored(name)))

    def on_device(self, name: str) -> jax.Array:
        """Returns the same tensor on the device, to which its bytes are copied as they are in the file."""
        data, *form = self._stored(name)
        return _compiled(to_device(data, name), *form)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor without dequantizing it."""
        return self._entry(name)[1].shape

    def type(self, name: str) -> str:
        """Returns safetensors' name of the dtype that access gives: "BF16"."""
        self._entry(name)
        return "BF16"

    def path(self, name: str) -> pathlib.Path:
        """Returns the file."""
        return self._path

    def _entry(self, name: str) -> tuple[str, Entry]:
        if name not in self._entries:
            raise GGUFError(f"{self._path}: holds no tensor for {name}")
        return self._entries[name]

    def _stored(self, name: str) -> tuple[np.ndarray, int, tuple[int, ...], int]:
        """Returns the arguments of `_weight` for a tensor."""
        source, entry = self._entry(name)
        heads = next((n for part, n in self._heads.items() if part in source.split(".")), 0)
        if heads and entry.shape[0] % (2 * heads):
            rule = f"{entry.shape[0]} rows are not {heads} heads of an even size"
            raise GGUFError(f"{source}: {rule}")
        return *self._bytes(source, entry), entry.shape, heads

    def _bytes(self, name: str, entry: Entry) -> tuple[np.ndarray, int]:
        """Returns bytes, uint8 [n], and their type: those in the file, or float32 from the package `gguf`."""
        data = self._data[entry.start : entry.start + entry.nbytes].view(np.ndarray)
        if gguf_blocks.sizes(entry.type) is not None:
            return data, entry.type
        gguf = _package(name)
        rows = data.reshape(_byte_shape(name, entry.shape, entry.type))
        kind = gguf.GGMLQuantizationType(entry.type)
        try:
            return gguf.dequantize(rows, kind).reshape(-1).view(np.uint8), gguf_blocks.F32
        except NotImplementedError:
            rule = f"the package gguf cannot unpack {kind.name}"
            raise GGUFError(f"{self._path}: {name}: {rule}") from None


def _weight(data: Any, kind: int, shape: Sequence[int], heads: int) -> Any:
    """Returns a tensor in bfloat16 from its bytes, and those of q and k, with `heads`, in Hugging Face's order."""
    weight = gguf_blocks.decode(data, kind, shape)
    weight = _halves(weight, heads) if heads else weight
    return weight.astype(ml_dtypes.bfloat16)


# Tensors of one type and shape share a program.
_compiled = jax.jit(_weight, static_argnums=(1, 2, 3))


def _hf_name(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _IN_LAYER:
        if parts[3] in ("weight", "bias"):
            return f"model.layers.{int(parts[1])}.{_IN_LAYER[parts[2]]}.{parts[3]}"
    raise GGUFError(f"{name}: has no place in the models that can be read")


def _halves(rows: Any, heads: int) -> Any:
    """Reorders rows [heads * C, ...] as Hugging Face does: the two halves of a rotation, which GGUF interleaves, are
    put one after the other."""
    pairs = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def model_config(header: Header) -> dict[str, Any]:
    """Makes the config.json of a model from the header of its file.

    Raises:
        GGUFError: For an architecture, a rotation or a split file that is not supported, or a missing field.
    """
    fields = header.fields
    arch = fields.get("general.architecture")
    if not isinstance(arch, str) or arch not in _CLASSES:
        raise GGUFError(f"general.architecture: got {arch!r}; must be one of {', '.join(_CLASSES)}")
    if fields.get("split.count", 1) not in (0, 1):
        rule = "join them first (llama-gguf-split --merge)"
        raise GGUFError(f"is one of several files of a model; {rule}")
    if fields.get(f"{arch}.expert_count", 0):
        raise GGUFError("holds a mixture of experts, which is not supported")
    if "token_embd.weight" not in header.entries:
        raise GGUFError("holds no token_embd.weight")

    def number(name: str, kind: type = int) -> Any:
        value = fields.get(f"{arch}.{name}")
        holds = isinstance(value, kind | int) and not isinstance(value, bool)
        if not holds or not math.isfinite(value) or value <= 0:
            raise GGUFError(f"{arch}.{name}: got {value!r}; must be a positive number")
        return value

    width, heads = number("embedding_length"), number("attention.head_count")
    optional = lambda name, default: number(name) if f"{arch}.{name}" in fields else default
    head = optional("attention.key_length", width // heads)
    sizes = (optional(n, head) for n in ("rope.dimension_count", "attention.value_length"))
    if set(sizes) != {head}:
        raise GGUFError(f"{arch}.rope.dimension_count: only rotations of whole heads can be read")
    kind = fields.get(f"{arch}.rope.scaling.type", "none")
    scaling = None
    if kind != "none" and fields.get(f"{arch}.rope.scaling.factor", 1) != 1:
        if kind not in ("linear", "yarn") or _ROPE_FACTORS in header.entries:
            rule = f"only 'none', 'linear' and 'yarn' can be read, and not beside {_ROPE_FACTORS}"
            raise GGUFError(f"{arch}.rope.scaling.type: got {kind!r}; {rule}")
        scaling = {"rope_type": kind, "factor": number("rope.scaling.factor", float)}
        if kind == "yarn":
            original = optional("rope.scaling.original_context_length", number("context_length"))
            scaling["original_max_position_embeddings"] = original
    # A float32 as a Python float shows more digits than it had.
    short = lambda value: float(f"{value:.6g}")
    theta = short(number("rope.freq_base", float)) if f"{arch}.rope.freq_base" in fields else 1e4
    config = {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": optional("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": short(number("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "vocab_size": header.entries["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.entries,
        "torch_dtype": "bfloat16",
        # Without a version, transformers takes a large tokenizer for a faulty one of Mistral's, and warns.
        "transformers_version": importlib.metadata.version("transformers"),
    }
    ids = {name: _token_id(fields, name) for name in ("bos", "eos", "pad")}
    return config | {f"{name}_token_id": id_ for name, id_ in ids.items() if id_ is not None}


def _token_id(fields: Mapping[str, Any], name: str) -> Any:
    """Returns what a header states as the id of a special token, by Hugging Face's name; None if nothing."""
    theirs = {"pad": "padding", "unk": "unknown"}.get(name, name)
    return fields.get(f"tokenizer.ggml.{theirs}_token_id")


def _llama3_scaling(factors: np.ndarray, theta: float, head_size: int) -> dict[str, Any]:
    """Returns the `rope_scaling` of config.json that gives these factors of the wavelengths, float64 [C / 2]."""
    factor, low, high = float(factors.max()), 1.0, 4.0
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    rule = "these are not Llama 3's factors, the only ones that are read"
    fail = GGUFError(f"{_ROPE_FACTORS}: {rule}")
    if factors.shape != wavelengths.shape or not np.isfinite(factors).all() or factor <= 1:
        raise fail
    # Each factor between 1 (unscaled frequencies) and the largest (fully scaled ones) gives the original context.
    shares = (1 / np.maximum(factors, 1) - 1 / factor) / (1 - 1 / factor)
    between = (shares > 1e-3) & (shares < 1 - 1e-3)
    contexts = (low + shares * (high - low)) * wavelengths
    context = round(float(np.median(contexts[between]))) if between.any() else 8192
    share = np.clip((context / wavelengths - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / ((1 - share) / factor + share), rtol=1e-3):
        raise fail
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def as_folder(path: str | pathlib.Path) -> pathlib.Path:
    """Makes a model folder for a GGUF file, with config, tokenizer and a link to the file, and returns its path.

    The folder is in ~/.cache/qerl_jax (or XDG_CACHE_HOME) and is made again when the file changes. Weights are not
    copied. If the kind of tokenizer is not supported, the folder has none, and `model.tokenizer_name_or_path` must
    name one.

    Raises:
        GGUFError: If the file cannot be read.
    """
    path = pathlib.Path(path).expanduser().resolve()
    stat = path.stat()
    seen = f"{_FOLDER_FORM} {path} {stat.st_size} {stat.st_mtime_ns}"
    key = hashlib.sha256(seen.encode()).hexdigest()[:16]
    folder = cache_folder("gguf") / f"{path.stem}-{key}"
    if (folder / "config.json").is_file():
        return folder
    try:
        tensors = Tensors(path)
        config, fields = tensors.config, tensors.header.fields
        if entry := tensors.header.entries.get(_ROPE_FACTORS):
            factors = gguf_blocks.decode(*tensors._bytes(_ROPE_FACTORS, entry), entry.shape)
            factors = factors.astype(np.float64)
            scaling = _llama3_scaling(factors, config["rope_theta"], config["head_dim"])
            config["rope_scaling"] = scaling
    except GGUFError as error:
        text = str(error)
        raise GGUFError(text if text.startswith(str(path)) else f"{path}: {text}") from None
    with whole_folder(folder, "config.json", "model", first_wins=True) as partial:
        (partial / FILE).symlink_to(path)
        write_tokenizer(partial, fields)
        generation = {name: config[name] for name in config if name.endswith("_token_id")}
        # llama.cpp also ends a completion at the end-of-turn and end-of-message tokens.
        ends = (_token_id(fields, name) for name in ("eos", "eot", "eom"))
        if ends := list(dict.fromkeys(i for i in ends if type(i) is int)):
            generation["eos_token_id"] = ends
        (partial / "generation_config.json").write_text(json.dumps(generation, indent=1))
        (partial / "config.json").write_text(json.dumps(config, indent=1))
    return folder


# Maps llama.cpp's names of pre-tokenizers to their regular expressions.
_SPLITS = {
    "smollm": None,
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


# Checks of the entries of a tokenizer's lists, and the rules in words.
_TOKENIZER_FORMS = {
    "tokenizer.ggml.tokens": (lambda token: isinstance(token, str), "must be texts"),
    "tokenizer.ggml.merges": (
        lambda merge: isinstance(merge, str) and all(merge.partition(" ")),
        "must be two tokens with a space between each",
    ),
    "tokenizer.ggml.token_type": (lambda kind: type(kind) is int, "must be whole numbers"),
}


def write_tokenizer(folder: pathlib.Path, fields: Mapping[str, Any]) -> bool:
    """Writes tokenizer.json and tokenizer_config.json from the fields of a header.

    Returns:
        Whether the kind of tokenizer is supported; if not, nothing is written.

    Raises:
        GGUFError: If the fields of the tokenizer are invalid.
    """
    model, kind = (fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model != "gpt2" or not isinstance(kind, str) or kind not in _SPLITS:
        return False
    for name, (holds, rule) in _TOKENIZER_FORMS.items():
        value = fields.get(name)
        if not isinstance(value, list) or not all(map(holds, value)):
            raise GGUFError(f"{name}: got {reprlib.repr(value)}; {rule}")
    tokens, merges, types = map(fields.get, _TOKENIZER_FORMS)
    try:
        byte_pair_tokenizer = byte_pairs(kind, tokens, merges, types)
    except Exception as error:  # the package tokenizers has no error type of its own
        raise GGUFError(f"tokenizer.ggml: is no tokenizer: {error}") from error
    ids = {name: _token_id(fields, name) for name in ("bos", "eos", "pad", "unk")}
    is_token = lambda i: type(i) is int and 0 <= i < len(tokens) and types[i] != _UNUSED
    # As in llama.cpp, whose Llama 3 tokenizer begins texts with it unless the file says otherwise.
    if fields.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe") and is_token(ids["bos"]):
        from tokenizers.processors import TemplateProcessing

        bos = tokens[ids["bos"]]
        byte_pair_tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, ids["bos"])]
        )
    byte_pair_tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[i] for name, i in ids.items() if is_token(i)},
        "clean_up_tokenization_spaces": False,
    }
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return True


def byte_pairs(kind: str, tokens: list[str], merges: list[str], types: list[int]):
    """Makes a byte-level BPE tokenizer of the package `tokenizers`.

    Args:
        kind: llama.cpp's name of the pre-tokenizer ("tokenizer.ggml.pre"), a key of `_SPLITS`.
        tokens: Tokens by id.
        merges: Pairs of tokens, each as a text with a space between the two.
        types: ggml's type of each token.

    Raises:
        ConfigError: If there is not one type per token.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    rule = "must be one a token"
    require(len(types) == len(tokens), "tokenizer.ggml.token_type", len(types), rule)
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    options = {"ignore_merges": True} if kind == "llama-bpe" else {}
    byte_pair_tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, **options)
    )
    pattern: str | None = _SPLITS[kind]
    words = pre_tokenizers.Digits(individual_digits=True)
    if pattern is not None:
        words = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    byte_pair_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    byte_pair_tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        byte_pair_tokenizer.normalizer = normalizers.NFC()
    whole = [
        tokenizers.AddedToken(token, special=kind_of == _CONTROL, normalized=False)
        for token, kind_of in zip(tokens, types, strict=True)
        if kind_of in (_CONTROL, _USER_DEFINED)
    ]
    byte_pair_tokenizer.add_tokens(whole)
    return byte_pair_tokenizer
