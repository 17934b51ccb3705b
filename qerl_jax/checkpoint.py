"""A Hugging Face folder -> the model, its frozen base on the device, its tokenizer."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import NVFP4Tensor, PackedWeight, nvfp4, prepare
from qerl_jax import architecture, tokenizer
from qerl_jax.architecture import LAYER_NORMS, PARENT, Architecture
from qerl_jax.config import LoraConfig, ModelConfig
from qerl_jax.model import LoRA, Transformer, abstract_base, random_base
from qerl_jax.tensor_files import Tensors
from qerl_jax.tokenizer import Tokenizer

TINY = pathlib.Path(__file__).parent / "assets" / "tiny"


def load_policy(
    cfg: ModelConfig, lora: LoraConfig | None, seed: int = 0
) -> tuple[Transformer, Any, Tokenizer]:
    """The model, its frozen base on the device, and its tokenizer.

    Args:
        cfg: Which base, and how its linears are held.
        lora: Shape of the adapter, or None for the bare base.
        seed: Of a random base.

    Raises:
        FileNotFoundError, SafetensorsError: When files are missing or cut short; before any weight
            is read.
        ValueError, NotImplementedError: When the model or its tokenizer cannot be used.
    """
    known = cfg.random_base and cfg.model_name_or_path in architecture.KNOWN
    folder = None if known else local_folder(cfg.model_name_or_path, weights=not cfg.random_base)
    arch = architecture.KNOWN[cfg.model_name_or_path] if known else architecture.load(folder)
    if cfg.weights == "nvfp4":
        _check_blocks(arch)
    source = cfg.tokenizer_name_or_path
    if known and cfg.trainable == "full":
        raise ValueError(
            f"model.trainable: got 'full'; {cfg.model_name_or_path!r} is a shape without files, from "
            "which the checkpoint of a run could take its config.json"
        )
    if source is None and folder is None:
        raise ValueError(
            f"model.tokenizer_name_or_path: missing; {cfg.model_name_or_path!r} is a shape without files of its own"
        )
    tokens = tokenizer.load(folder if source is None else local_folder(source, weights=False))
    if tokens.num_tokens > arch.vocab_size:
        raise ValueError(
            f"model.tokenizer_name_or_path: has ids up to {tokens.num_tokens - 1}; "
            f"the model's embedding has only {arch.vocab_size} rows"
        )
    adapter = None if lora is None else LoRA(lora.rank, lora.alpha, lora.dropout, lora.train_norms)
    model = Transformer(arch, cfg.weights, adapter, jnp.dtype(cfg.dtype))
    frozen = (
        random_base(model, jax.random.key(seed)) if cfg.random_base else load_base(folder, model)
    )
    if cfg.trainable == "full":
        model = model.clone(lora=None, full=True)
    return model, frozen, tokens


def local_folder(name_or_path: str, *, weights: bool = True) -> pathlib.Path:
    """A local folder as it is, "qerl-tiny" in the package, anything else downloaded from the hub.

    Raises:
        FileNotFoundError: When it is neither a folder nor a model of the hub that can be reached.
    """
    if name_or_path == "qerl-tiny":
        return TINY
    folder = pathlib.Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name_or_path.startswith("."):
        raise FileNotFoundError(f"no such folder: {name_or_path}")
    import huggingface_hub

    patterns = ["*.json", "*.txt", "*.jinja", "tokenizer*"] + (["*.safetensors"] if weights else [])
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(name_or_path, allow_patterns=patterns)
        )
    except Exception as error:
        raise FileNotFoundError(
            f"{name_or_path!r} is no local folder, and the hub did not give it: {type(error).__name__}: {error}"
        ) from error


def load_base(folder: str | pathlib.Path, model: Transformer) -> Any:
    """Reads a Hugging Face checkpoint into the `frozen` tree, layer by layer.

    16-bit linears are packed on the device as they are read (round to nearest; q/k/v share one
    global scale, gate/up another, as vLLM needs it); a compressed-tensors NVFP4 checkpoint is read
    as it is. Either is then brought into the layout that the device's kernels read. Host memory
    holds one layer, and the device no more than one beside the stack.

    Args:
        folder: Holds config.json and *.safetensors.
        model: Says what is expected, and how linears are to be held.
    """
    folder = pathlib.Path(folder)
    arch, tensors = model.arch, Tensors(folder)
    packed = _is_packed(json.loads((folder / "config.json").read_text()))
    _check_names(arch, tensors, packed)

    expected = abstract_base(model)
    dtype = expected["embed_tokens"].dtype
    # jnp.array copies; asarray may leave a CPU's array in the mapped file, and the base would
    # change with it.
    frozen = {
        "embed_tokens": jnp.array(tensors["model.embed_tokens.weight"], dtype),
        "norm": {"scale": jnp.array(tensors["model.norm.weight"], dtype)},
    }
    if "lm_head" in expected:
        frozen["lm_head"] = jnp.array(tensors["lm_head.weight"], dtype)

    @functools.partial(jax.jit, donate_argnums=0)
    def put(stack, layer, index):
        return jax.tree.map(lambda s, x: s.at[index].set(x.astype(s.dtype)), stack, layer)

    shared = _shared_scales(arch, tensors) if packed else set()
    arrange = jax.jit(lambda weight: prepare(weight, model.dtype))

    def read_linear(linear: str, names: list[str]) -> PackedWeight | jax.Array:
        if model.weights != "nvfp4":
            if packed:
                return _dequantize(_read_packed(tensors, names, linear in shared), dtype)
            return _read_dense(tensors, names).astype(dtype)
        if packed:
            return arrange(_read_packed(tensors, names, linear in shared))
        return arrange(_quantize(tensors, names))

    stack = None
    for index in range(arch.num_layers):
        layer = _read_layer(arch, tensors, f"model.layers.{index}.", dtype, read_linear)
        if stack is None:
            stack = jax.tree.map(lambda x: jnp.zeros((arch.num_layers, *x.shape), x.dtype), layer)
        stack = put(stack, layer, index)
    return frozen | {"layers": stack}


def _read_layer(
    arch: Architecture,
    tensors: Tensors,
    prefix: str,
    dtype,
    read_linear: Callable[[str, list[str]], PackedWeight | jax.Array],
) -> dict:
    layer = {
        name: {"scale": jnp.asarray(tensors[f"{prefix}{name}.weight"], dtype)}
        for name in LAYER_NORMS
    }
    if arch.qk_norm:
        for name in ("q_norm", "k_norm"):
            layer[name] = {"scale": jnp.asarray(tensors[f"{prefix}self_attn.{name}.weight"], dtype)}
    for linear, parts in arch.linears().items():
        names = [f"{prefix}{PARENT[linear]}.{part}" for part, _ in parts]
        layer[linear] = {"weight": read_linear(linear, names)}
        if linear == "qkv" and arch.qkv_bias:
            layer[linear]["bias"] = jnp.concatenate(
                [jnp.asarray(tensors[f"{name}.bias"], dtype) for name in names]
            )
    return layer


def _read_dense(tensors: Tensors, names: list[str]) -> jax.Array:
    return jnp.concatenate([jnp.asarray(tensors[f"{name}.weight"]) for name in names])


def _quantize(tensors: Tensors, names: list[str]) -> NVFP4Tensor:
    parts = [jnp.asarray(tensors[f"{name}.weight"]) for name in names]
    return _quantize_parts(parts)


_dequantize = jax.jit(nvfp4.dequantize, static_argnums=1)


@jax.jit
def _quantize_parts(parts: list[jax.Array]) -> NVFP4Tensor:
    shared = functools.reduce(jnp.minimum, [nvfp4.global_scale(part) for part in parts])
    return nvfp4.fuse([nvfp4.quantize(part, shared) for part in parts], shared=True)


def _read_packed(tensors: Tensors, names: list[str], shared: bool) -> NVFP4Tensor:
    parts = [
        NVFP4Tensor(
            codes=jnp.asarray(tensors[f"{name}.weight_packed"]),
            scales=jnp.asarray(tensors[f"{name}.weight_scale"]),
            global_scale=jnp.asarray(tensors[f"{name}.weight_global_scale"], jnp.float32),
            shape=(
                tensors.shape(f"{name}.weight_packed")[0],
                2 * tensors.shape(f"{name}.weight_packed")[1],
            ),
        )
        for name in names
    ]
    return nvfp4.fuse(parts, shared=shared)


def _shared_scales(arch: Architecture, tensors: Tensors) -> set[str]:
    """The fused linears whose parts have one global scale, and so in every layer: stacked layers have one form.

    A scale per row costs a multiply more per output; quantizers that follow vLLM's rule do not need
    it.
    """

    def scale(linear: str, index: int, part: str) -> float:
        return tensors[f"model.layers.{index}.{PARENT[linear]}.{part}.weight_global_scale"].item()

    return {
        linear
        for linear, parts in arch.linears().items()
        if all(
            len({scale(linear, index, part) for part, _ in parts}) == 1
            for index in range(arch.num_layers)
        )
    }


def _is_packed(config: dict[str, Any]) -> bool:
    quantization = config.get("quantization_config")
    if quantization is None:
        return False
    method, form = quantization.get("quant_method"), quantization.get("format")
    if (method, form) != ("compressed-tensors", "nvfp4-pack-quantized"):
        raise NotImplementedError(
            f"quantization_config: got quant_method {method!r}, format {form!r}; "
            "read are 16-bit checkpoints and compressed-tensors 'nvfp4-pack-quantized'"
        )
    groups = quantization.get("config_groups", {}).values()
    if any(group.get("input_activations") for group in groups):
        raise NotImplementedError(
            "quantization_config: input_activations are quantized (W4A4); only W4A16 is supported"
        )
    return True


def _check_blocks(arch: Architecture) -> None:
    for linear in arch.linears():
        width = arch.input_width(linear)
        if width % nvfp4.BLOCK:
            raise ValueError(
                f"model.weights: got 'nvfp4'; {linear} has {width} input features (K), "
                f"and NVFP4 needs a multiple of {nvfp4.BLOCK}"
            )


def _check_names(arch: Architecture, tensors: Tensors, packed: bool) -> None:
    """Demands every tensor and shape at the door, so that nothing is half loaded."""
    expected = {
        "model.embed_tokens.weight": (arch.vocab_size, arch.width),
        "model.norm.weight": (arch.width,),
    }
    if not arch.tie_word_embeddings:
        expected["lm_head.weight"] = (arch.vocab_size, arch.width)
    for index in range(arch.num_layers):
        prefix = f"model.layers.{index}."
        expected |= {f"{prefix}{name}.weight": (arch.width,) for name in LAYER_NORMS}
        if arch.qk_norm:
            expected |= {
                f"{prefix}self_attn.{name}.weight": (arch.head_size,)
                for name in ("q_norm", "k_norm")
            }
        for linear, parts in arch.linears().items():
            k = arch.input_width(linear)
            for part, n in parts:
                name = f"{prefix}{PARENT[linear]}.{part}"
                if packed:
                    expected[f"{name}.weight_packed"] = (n, k // 2)
                    expected[f"{name}.weight_scale"] = (n, k // nvfp4.BLOCK)
                    expected[f"{name}.weight_global_scale"] = (1,)
                else:
                    expected[f"{name}.weight"] = (n, k)
                if linear == "qkv" and arch.qkv_bias:
                    expected[f"{name}.bias"] = (n,)
    for name, shape in expected.items():
        if tensors.shape(name) != shape:
            raise ValueError(f"{name}: got shape {tensors.shape(name)}; config.json says {shape}")
