"""Sizes and traits of a decoder-only transformer, read from a Hugging Face `config.json`.

`FAMILIES` holds the traits of a model family that its config file does not state. All other values are read from the
file. The rotary fields may be those of transformers 4 (`rope_theta`, `rope_scaling`) or of transformers 5
(`rope_parameters`).
"""

import dataclasses
import functools
import math
import pathlib
from typing import Any

from qerl_jax.system.checked import require
from qerl_jax.system.files import read_json


@dataclasses.dataclass(frozen=True)
class Family:
    """The traits of a model family that its `config.json` does not state.

    Attributes:
        qkv_bias: Whether q, k and v have a bias.
        qk_norm: Whether queries and keys pass an RMSNorm over the head before the rotation.
        head_size: Head size C if the config has no `head_dim`; None means D / H.
        window_switch: Whether `sliding_window` is ignored unless `use_sliding_window` is true.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    head_size: int | None = None
    window_switch: bool = True


FAMILIES = {
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, head_size=128),
    "llama": Family(),
    "mistral": Family(window_switch=False),
}

# Raises NotImplementedError for a feature that a config asks for and we do not support.
_support = functools.partial(require, error=NotImplementedError)

# The field of config.json with the context length.
_CONTEXT = "max_position_embeddings"
# Hugging Face's names: the module of a layer that holds a fused linear's parts, and the layer's two norms.
PARENT = {"qkv": "self_attn", "o": "self_attn", "gate_up": "mlp", "down": "mlp"}
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's scaling of the rotary wavelengths (transformers: `rope_type = "llama3"`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class LinearRope:
    """Positions divided by a factor (transformers: `rope_type = "linear"`)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class YarnRope:
    """YaRN's scaling of the rotary wavelengths (arXiv 2309.00071; transformers: `rope_type = "yarn"`).

    Attributes:
        factor: How many times longer the context is than the original one.
        original_max_position_embeddings: The original context, in tokens.
        attention_factor: What cosines and sines are multiplied by.
        beta_fast: Wavelengths with more rotations in the original context are not scaled.
        beta_slow: Wavelengths with fewer rotations are scaled by the whole factor.
        truncate: Whether the bounds between the two are rounded to whole pairs of channels.
    """

    factor: float
    original_max_position_embeddings: float
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


type Rope = LinearRope | Llama3Rope | YarnRope


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Sizes and traits of one model.

    Attributes:
        model_type: Key of `FAMILIES`.
        vocab_size: V, rows of the embedding; may exceed the ids that the tokenizer has.
        width: D, `hidden_size`.
        ffn_width: F, `intermediate_size`.
        num_layers: L.
        num_heads: H, query heads.
        num_kv_heads: J, key/value heads; divides H.
        head_size: C.
        rms_norm_eps: Epsilon that every RMSNorm adds to the mean square.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: The scaling of the rotary wavelengths, or None.
        tie_word_embeddings: Whether the LM head shares the embedding's weight.
        qkv_bias: Whether q, k and v have a bias.
        qk_norm: Whether queries and keys are normalized per head.
        context: The longest row that the base is for, in tokens: `max_position_embeddings`, that which YaRN extends
            it to, or the window of its attention if that is shorter. None if the config does not state it.
        window: The window if it is what limits `context`, else None. In rows that fit in it, attention is full.
    """

    model_type: str
    vocab_size: int
    width: int
    ffn_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: Rope | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = True
    qk_norm: bool = False
    context: int | None = None
    window: int | None = None

    def __post_init__(self):
        heads, kv_heads, size = self.num_heads, self.num_kv_heads, self.head_size
        rule = f"must divide num_attention_heads = {heads}"
        require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, rule)
        require(size % 2 == 0, "head_dim", size, "the rotation pairs halves, so it must be even")

    def require_context(self, prompt: int, completion: int, field: str) -> None:
        """Checks that prompt and completion fit into the context length of the base.

        Args:
            prompt: Tokens of the longest prompt.
            completion: Maximum number of tokens after the prompt.
            field: The config field that sets `completion`, for the error.

        Raises:
            ValueError: If they do not fit; the error names the field.
        """
        fits = self.context is None or prompt + completion <= self.context
        limit = f"the {self.context} that the model was made for (max_position_embeddings)"
        if self.window is not None:
            limit = f"the window of its attention (sliding_window = {self.window}); only full attention is supported"
        rule = f"with a prompt of {prompt} tokens that is more than {limit}"
        require(fits, field, completion, rule)

    @property
    def query_width(self) -> int:
        """H * C, the width of all queries."""
        return self.num_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """J * C, the width of all keys (and of all values)."""
        return self.num_kv_heads * self.head_size

    def kv_bytes(self, itemsize: int) -> int:
        """Returns the bytes of one token's keys and values in all layers, with `itemsize` bytes per number."""
        return 2 * self.num_layers * self.kv_width * itemsize

    def linears(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Returns the fused linears of a layer: name -> its parts as (Hugging Face name, output features).

        q, k and v read the same input, and so do gate and up. So each of these groups is one matmul and shares one
        NVFP4 global scale.
        """
        query, kv, ffn = self.query_width, self.kv_width, self.ffn_width
        return {
            "qkv": (("q_proj", query), ("k_proj", kv), ("v_proj", kv)),
            "o": (("o_proj", self.width),),
            "gate_up": (("gate_proj", ffn), ("up_proj", ffn)),
            "down": (("down_proj", self.width),),
        }

    def linear_names(self, linear: str, index: int) -> list[str]:
        """Returns Hugging Face's full names of the parts of a fused linear in layer `index`."""
        parts = self.linears()[linear]
        return [f"model.layers.{index}.{PARENT[linear]}.{part}" for part, _ in parts]

    def norms(self) -> dict[str, tuple[str, int]]:
        """Returns the norms of a layer: name -> (Hugging Face's name within the layer, size)."""
        heads = ("q_norm", "k_norm") if self.qk_norm else ()
        of_heads = {name: (f"self_attn.{name}", self.head_size) for name in heads}
        return {name: (name, self.width) for name in LAYER_NORMS} | of_heads

    def input_width(self, linear: str) -> int:
        """Returns K, the number of input features of a fused linear."""
        return {"o": self.query_width, "down": self.ffn_width}.get(linear, self.width)

    def linear_size(self, linear: str) -> int:
        """Returns N * K, the number of entries in the weight of a fused linear."""
        return self.input_width(linear) * sum(size for _, size in self.linears()[linear])

    def num_parameters(self) -> int:
        """Returns the number of parameters of the base: embedding, untied head, linears, biases and norms."""
        embedding = self.vocab_size * self.width * (1 if self.tie_word_embeddings else 2)
        linear = sum(map(self.linear_size, self.linears()))
        bias = (self.query_width + 2 * self.kv_width) if self.qkv_bias else 0
        norms = 2 * self.width + (2 * self.head_size if self.qk_norm else 0)
        return embedding + self.num_layers * (linear + bias + norms) + self.width


def from_hf(config: dict[str, Any]) -> Architecture:
    """Makes an `Architecture` from the contents of a Hugging Face `config.json`.

    Raises:
        NotImplementedError: For a model family, activation, bias, rotary scaling or kind of attention that is not
            supported.
        ValueError: If a size is missing or impossible.
    """
    model_type = config.get("model_type")
    holds = isinstance(model_type, str) and model_type in FAMILIES
    _support(holds, "model_type", model_type, f"supported are {', '.join(FAMILIES)}")
    family, act = FAMILIES[model_type], config.get("hidden_act", "silu")
    _support(act == "silu", "hidden_act", act, "only 'silu' is supported")
    for field in ("attention_bias", "mlp_bias"):
        # In Llama and Qwen3 these fields add biases to o_proj and the MLP too; Qwen2 does not have
        # them.
        holds = family.qkv_bias or not config.get(field)
        _support(holds, field, config.get(field), f"{model_type} is supported without biases")

    def size(field: str) -> int:
        value = config.get(field)
        holds = type(value) is int and 1 <= value < 2**31
        require(holds, f"config.json: {field}", value, "must be a positive integer")
        return value

    width, heads, epsilon = size("hidden_size"), size("num_attention_heads"), "rms_norm_eps"
    head_size = family.head_size or width // heads
    longest = None if config.get(_CONTEXT) is None else size(_CONTEXT)
    theta, scaling = _rope(config, longest)
    if isinstance(scaling, YarnRope) and longest is not None:
        longest = max(longest, int(scaling.factor * scaling.original_max_position_embeddings))
    window = _window(config, family, size("num_hidden_layers"))
    # A window that is as long as the longest row hides nothing.
    window = None if longest is not None and window is not None and window >= longest else window
    return Architecture(
        model_type=model_type,
        vocab_size=size("vocab_size"),
        width=width,
        ffn_width=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads") if config.get("num_key_value_heads") else heads,
        head_size=size("head_dim") if config.get("head_dim") else head_size,
        rms_norm_eps=_positive(epsilon, config.get(epsilon, 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        context=longest if window is None else window,
        window=window,
    )


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e38  # the range of float32


def _positive(field: str, value: Any) -> float:
    """Returns the value of a field of config.json if it is a positive number; else raises an error."""
    require(_is_positive(value), f"config.json: {field}", value, "must be a positive number")
    return value


def _window(config: dict[str, Any], family: Family, num_layers: int) -> int | None:
    """Returns the window of the layers that have one; None if all attention is full."""
    layers = config.get("layer_types") or []
    require(isinstance(layers, list), "config.json: layer_types", layers, "must be a list")
    for kind in layers:
        holds = kind in ("full_attention", "sliding_attention")
        _support(holds, "layer_types", kind, "only 'full_attention' is supported")
    if layers:
        is_used = "sliding_attention" in layers
    elif family.window_switch:
        first = config.get("max_window_layers", 28)  # transformers' default
        require(type(first) is int, "config.json: max_window_layers", first, "must be a number")
        is_used = _flag(config, "use_sliding_window") and first < num_layers
    else:
        is_used = True
    window = config.get("sliding_window", 4096) if is_used else None  # transformers' default
    holds = window is None or (type(window) is int and window > 0)
    rule = "must be a positive whole number, or null"
    require(holds, "config.json: sliding_window", window, rule)
    return window


def _flag(config: dict[str, Any], field: str) -> bool:
    """Returns a field of config.json that is true or false; absent or null is false."""
    value = config.get(field)
    require(isinstance(value, bool | None), f"config.json: {field}", value, "must be true or false")
    return bool(value)


def _rope(config: dict[str, Any], longest: int | None) -> tuple[float, Rope | None]:
    """Returns the base of the wavelengths and their scaling; `longest` is `max_position_embeddings`."""
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    # If they differ, transformers 5 uses `rope_scaling` and drops the theta of `rope_parameters`.
    rule = f"differs from rope_parameters = {newer!r}: write all of it there"
    _support(not (newer and older) or newer == older, "rope_scaling", older, rule)
    name = "rope_parameters" if newer else "rope_scaling"
    rope = config.get(name) or {}
    require(isinstance(rope, dict), f"config.json: {name}", rope, "must be an object")
    # For models whose kinds of layers differ in it.
    nested = next((field for field, value in rope.items() if isinstance(value, dict)), None)
    _support(nested is None, name, nested, "one rotation for all layers is supported")
    stated = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0} | config | rope
    theta = float(_positive("rope_theta", stated["rope_theta"]))
    share = stated["partial_rotary_factor"]
    _support(share == 1.0, "partial_rotary_factor", share, "only 1 is supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    kinds = ("default", "linear", "dynamic", "yarn", "llama3")
    _support(kind in kinds, "rope_type", kind, f"supported are {', '.join(kinds)}")
    # As transformers: the field beside the table wins, and the default is the whole context.
    original = config.get("original_max_position_embeddings")
    if original is None:
        original = rope.get("original_max_position_embeddings", longest)
    rope = rope | {"original_max_position_embeddings": original}

    def number(field: str, default: float | None = None) -> float:
        value = rope.get(field)
        value = default if value is None else value
        require(value is not None, f"config.json: {name}.rope_type", kind, f"it needs {field}")
        return _positive(f"{name}.{field}", value)

    if kind in ("default", "dynamic"):
        # Dynamic scaling begins beyond the context, and longer rows are refused.
        is_known = kind == "default" or longest is not None
        require(is_known, "config.json: rope_type", kind, f"it needs {_CONTEXT}")
        return theta, None
    if kind == "linear":
        return theta, LinearRope(number("factor"))
    if kind == "llama3":
        fields = [field.name for field in dataclasses.fields(Llama3Rope)]
        return theta, Llama3Rope(**{field: number(field) for field in fields})
    original = number("original_max_position_embeddings")
    factor = number("factor", longest and longest / original)
    rule = "must be greater than 1 for YaRN"
    require(theta > 1, "config.json: rope_theta", theta, rule)
    # Attention grows sharper with the context: the paper's equation 22, and DeepSeek's variant of it.
    scale = lambda weight: 1 + 0.1 * weight * math.log(max(factor, 1))
    weights = [rope.get(field) and number(field) for field in ("mscale", "mscale_all_dim")]
    default = scale(weights[0]) / scale(weights[1]) if all(weights) else scale(1)
    sharpness, betas = number("attention_factor", default), {"beta_fast": 32.0, "beta_slow": 1.0}
    betas = [number(field, value) for field, value in betas.items()]
    return theta, YarnRope(factor, original, sharpness, *betas, bool(rope.get("truncate", True)))


def _qwen2(
    width, ffn_width, layers, heads, kv_heads, vocab_size, tied=False, head_size=None, **traits
) -> Architecture:
    sizes = vocab_size, width, ffn_width, layers, heads, kv_heads, head_size or width // heads
    traits = {"model_type": "qwen2"} | traits
    return Architecture(traits.pop("model_type"), *sizes, tie_word_embeddings=tied, **traits)


_qwen3 = functools.partial(
    _qwen2, vocab_size=151936, model_type="qwen3", head_size=128, qkv_bias=False, qk_norm=True
)
_llama = functools.partial(_qwen2, model_type="llama", rms_norm_eps=1e-5, qkv_bias=False)
_llama3 = functools.partial(
    _llama, vocab_size=128256, rope_theta=5e5, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 8192)
)
# The scaling of Llama 3.2.
_STRETCHED = Llama3Rope(32.0, 1.0, 4.0, 8192)

# Published architectures, so that benchmarks and memory plans need no download.
KNOWN = {
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8, 152064),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 8, rope_scaling=_STRETCHED, tied=True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 8, rope_scaling=_STRETCHED, tied=True),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 8),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64, 8),
    "mistral-7b-v0.3": _llama(4096, 14336, 32, 32, 8, 32768, model_type="mistral", rope_theta=1e6),
}


def known(name: str) -> Architecture | None:
    """Returns the published architecture for a hub name such as "Qwen/Qwen2.5-7B-Instruct", or None."""
    return KNOWN.get(pathlib.PurePath(name).name.lower().removesuffix("-instruct"))


def load(folder: str | pathlib.Path) -> Architecture:
    """Reads the architecture from `config.json` of a local model folder.

    Raises:
        FileNotFoundError: If there is no config.json.
        NotImplementedError, ValueError: As for `from_hf`.
    """
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no config.json in {folder}: a model folder holds config.json and *.safetensors"
        )
    return from_hf(read_json(path))
