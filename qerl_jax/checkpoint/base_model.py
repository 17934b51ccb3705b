"""Reads a Hugging Face folder: the model, its frozen base on the device, and its tokenizer."""

import concurrent.futures
import functools
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import PackedTensor, PackedWeight, prepare, runtime
from qerl_jax.checkpoint import checksum, hf_folder, packed_formats
from qerl_jax.checkpoint.folder_tensors import FolderTensors
from qerl_jax.config import DENSE, BlockScales, LoraConfig, MeshConfig, ModelConfig
from qerl_jax.data import tokenizer
from qerl_jax.model import architecture, lora
from qerl_jax.model.transformer import DenseLinears, Transformer, abstract_base, random_base
from qerl_jax.system.checked import require, tell

# A function from a tree of shapes to a tree of shardings.
type Placer = Callable[[Any], Any]


def choose_kernels(cfg: ModelConfig) -> None:
    """Makes this process use the kernels that a config names.

    Raises:
        ConfigError: If they cannot run on this device.
    """
    try:
        runtime.use_kernels(cfg.kernels)
    except NotImplementedError as error:
        reason = str(error).partition(": ")[2]
        require(False, "model.kernels", cfg.kernels, f"cannot run here: {reason}")


def describe_files(cfg: ModelConfig) -> tuple[architecture.Architecture, tokenizer.Tokenizer]:
    """Returns the architecture that a base's config states, and its tokenizer; downloads no weights.

    Raises:
        FileNotFoundError: If files are missing.
        ValueError, NotImplementedError: If the model or its tokenizer is not supported, or not with the kernels that
            the config names.
    """
    choose_kernels(cfg)
    name, is_full = cfg.model_name_or_path, cfg.trainable == "full"
    is_shape = cfg.random_base and name in architecture.KNOWN
    folder = None if is_shape else hf_folder.local_folder(name, weights=False)
    arch = architecture.KNOWN[name] if folder is None else architecture.load(folder)
    if cfg.weights not in DENSE:
        packed_formats.named(cfg.weights).check(arch)
    rule = f"{name!r} is a shape without files, from which the checkpoint of a run could take its config.json"
    require(not (is_shape and is_full), "model.trainable", cfg.trainable, rule)
    return arch, _tokenizer(cfg, folder, arch)


def describe_model(
    cfg: ModelConfig,
    arch: architecture.Architecture,
    lora: LoraConfig | None,
    mesh: MeshConfig = MeshConfig(),
) -> Transformer:
    """Returns the model of a base, without reading its weights.

    Unless the base is random, its weights are downloaded from the hub: they say which linears are packed, and whether
    the head is the embedding.

    Args:
        cfg: Names the base, and the storage format of its linears.
        arch: The architecture that `describe_files` returned for it.
        lora: Config of the model's adapter, or None for the bare base.
        mesh: Among how many devices the model is divided.

    Raises:
        FileNotFoundError, SafetensorsError: If files are missing or cut short.
        ValueError, NotImplementedError: If the weights are not supported, or the model cannot be divided among that
            many devices.
    """
    in_16_bits: DenseLinears = ()
    if not cfg.random_base:
        tensors = FolderTensors(hf_folder.local_folder(cfg.model_name_or_path), arch)
        arch, in_16_bits = tensors.arch, tensors.dense_linears()
    is_full = cfg.trainable == "full"
    model = Transformer(
        arch,
        cfg.weights,
        None if is_full else lora,
        jnp.dtype(cfg.dtype),
        full=is_full,
        dense_linears=in_16_bits,
        fsdp=mesh.fsdp,
        tensor=mesh.tensor,
    )
    model.division.require()
    return model


def describe_base(
    cfg: ModelConfig, lora: LoraConfig | None, mesh: MeshConfig = MeshConfig()
) -> tuple[Transformer, tokenizer.Tokenizer]:
    """Returns the model (`describe_model`) and the tokenizer (`describe_files`) of a base."""
    arch, tokens = describe_files(cfg)
    return describe_model(cfg, arch, lora, mesh), tokens


def load_weights(
    cfg: ModelConfig,
    model: Transformer,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    places: Placer | None = None,
) -> Any:
    """Returns the `frozen` tree of a base on the device: read from its folder, or random.

    Args:
        cfg: Names the base.
        model: The model that `describe_base` returned for it.
        seed: Random seed for a random base.
        progress: Called after each layer with the fraction of layers that are read.
        places: The sharding of a base that several devices share; see `assemble`.

    Raises:
        FileNotFoundError, SafetensorsError: If files are missing or cut short; before any weight is read.
        ValueError, NotImplementedError: If the files do not fit the model.
    """
    model = model.clone(full=False)
    if cfg.random_base:
        at = None if places is None else places(abstract_base(model))
        return random_base(model, jax.random.key(seed), at)
    folder = hf_folder.local_folder(cfg.model_name_or_path)
    load = lambda: read_base(folder, model, cfg.block_scales, progress, places)
    form = cfg.weights, cfg.block_scales, cfg.dtype, model.division.count
    return checksum.load_checked(load, folder, form)


def _tokenizer(
    cfg: ModelConfig, folder: pathlib.Path | None, arch: architecture.Architecture
) -> tokenizer.Tokenizer:
    """Loads the tokenizer that the config names, else that of the base's folder; its ids must fit the embedding."""
    source = cfg.tokenizer_name_or_path
    rule = f"{cfg.model_name_or_path!r} is a shape without files of its own"
    require(source or folder, "model.tokenizer_name_or_path", source, rule)
    if source is not None:
        folder = hf_folder.local_folder(source, weights=False)
    tokens = tokenizer.load(folder, cfg.chat_template_kwargs, cfg.chat_template_date)
    return tokens.fitted(arch.vocab_size, "model.tokenizer_name_or_path")


def read_base(
    folder: str | pathlib.Path,
    model: Transformer,
    scales: BlockScales = "auto",
    progress: Callable[[float], None] | None = None,
    places: Placer | None = None,
) -> Any:
    """Reads a Hugging Face checkpoint into the `frozen` tree, layer by layer.

    16-bit linears are packed on the device as they are read: rounded to nearest, and for NVFP4 with one global scale
    for q/k/v and one for gate/up, as vLLM needs it. Weights in a packed format (`packed_formats`) are not changed.
    Both are then put into the layout that the device's kernels read. Threads read a layer while the device packs the
    one before, so host memory holds one layer, and the device two besides the stack.

    Args:
        folder: A folder with config.json and *.safetensors (or a GGUF file).
        model: The model, which determines the expected tensors and the storage format of the linears.
        scales: How the block scales of 16-bit linears are chosen.
        progress: Called after each layer with the fraction of layers that are read.
        places: As for `assemble`.

    Raises:
        NotImplementedError: If the folder has an unsupported packed format, or another format than the model.
        ValueError: If a tensor is missing, has another shape than config.json says, or is not finite.
    """
    tensors = FolderTensors(folder, model.arch)
    arch, source = model.arch, tensors.source
    can_read = source is None or model.weights in (source.name, *DENSE)
    name = source and source.name
    rule = f"{folder} holds {name}: set it to that, or to {' or '.join(DENSE)}, which unpacks it"
    require(can_read, "model.weights", model.weights, rule, NotImplementedError)
    for line in tensors.check():
        tell(line)
    is_tied, in_16_bits = tensors.arch.tie_word_embeddings, tensors.dense_linears()
    rule = f"{folder} has another head than the embedding"
    stated = arch.tie_word_embeddings
    require(is_tied == stated, "model.arch.tie_word_embeddings", stated, rule)
    is_same = model.weights in DENSE or model.dense_linears == in_16_bits
    rule = f"{folder} keeps {in_16_bits} in 16 bits"
    require(is_same, "model.dense_linears", model.dense_linears, rule)
    dtype = abstract_base(model)["embed_tokens"].dtype
    branches = lora.shapes(model.lora, arch) if model.lora else {}

    form = source or (None if model.weights in DENSE else packed_formats.named(model.weights))
    shared = tensors.shared_scales()

    @functools.partial(jax.jit, static_argnums=1)
    def arrange(parts: list[PackedTensor], linear: str) -> PackedWeight:
        weight = form.numbers.fuse(parts, shared=linear in shared)
        rank = branches[linear].rank if linear in branches else 0
        return prepare(weight, model.dtype, is_gated=linear == "gate_up", rank=rank)

    dense_layers = dict(in_16_bits)
    _, partly = model.split_dense()
    stacks: dict[str, jax.Array] = {}
    lock = threading.Lock()

    def read_linear(linear: str, names: list[str]) -> PackedWeight | jax.Array:
        index = int(names[0].split(".")[2])
        if model.weights in DENSE or index in dense_layers.get(linear, ()):
            dense = tensors.weights(names, dtype)
            whole = jnp.concatenate(dense).astype(dtype)
            if model.weights in DENSE or linear not in partly:
                return whole
            layers = partly[linear]
            with lock:
                if linear not in stacks:
                    stacks[linear] = jnp.zeros((len(layers), *whole.shape), dtype)
                stacks[linear] = _put(stacks[linear], whole, layers.index(index))
            # All layers must have the same structure: this one gets a packed weight too, which is never read.
            parts = form.numbers.pack(dense)
        elif source is None:
            parts = form.numbers.pack(tensors.weights(names), scales)
        else:
            parts = [checksum.tree_to_device(tensors.packed(name), name) for name in names]
        return arrange(parts, linear)

    read = read_linear
    if model.division.count > 1:
        split = jax.jit(model.division.split, static_argnums=0)
        read = lambda linear, names: split(linear, read_linear(linear, names))
    frozen = assemble(arch, tensors, dtype, read, progress, places)
    return frozen | ({"dense_overrides": stacks} if stacks else {})


def assemble(
    arch: architecture.Architecture,
    tensors: Mapping[str, Any],
    dtype,
    read_linear: Callable[[str, list[str]], PackedWeight | jax.Array],
    progress: Callable[[float], None] | None = None,
    places: Placer | None = None,
) -> Any:
    """Makes the `frozen` tree layer by layer; the device holds only two layers besides the stack.

    Threads read the linears of the next layer while the device still works on those of this one, and compile what
    several linears need at the same time. If several devices share a base, each gets its part of a layer as soon as
    the layer is read.

    Args:
        arch: The architecture, which determines the layers and tensors.
        tensors: All tensors except the linears, by Hugging Face's names.
        dtype: Dtype of embedding, head, norms and biases.
        read_linear: As for `read_layer`; called in threads.
        progress: Called after each layer with the fraction of layers that are loaded.
        places: Maps a tree of shapes to shardings; None puts everything on one device.
    """
    linears = arch.linears()
    pool = concurrent.futures.ThreadPoolExecutor(len(linears))
    begin = lambda index: {
        linear: pool.submit(read_linear, linear, arch.linear_names(linear, index))
        for linear in (linears if index < arch.num_layers else ())
    }
    try:
        begun = begin(0)
        # jnp.array copies. On a CPU asarray may use the mapped file as the array's memory, and the base would change
        # with the file.
        frozen = {
            "embed_tokens": jnp.array(tensors["model.embed_tokens.weight"], dtype),
            "norm": {"scale": jnp.array(tensors["model.norm.weight"], dtype)},
        }
        if not arch.tie_word_embeddings:
            frozen["lm_head"] = jnp.array(tensors["lm_head.weight"], dtype)

        stack = None
        for index in range(arch.num_layers):
            coming, begun = begun, begin(index + 1)
            read = lambda linear, _, coming=coming: coming[linear].result()
            layer = read_layer(arch, tensors, f"model.layers.{index}.", dtype, read)
            if stack is None:
                stack, put = _empty(layer, arch.num_layers, places)
            stack = put(stack, layer, index)
            # Otherwise the device would get layer after layer long before it can pack them.
            jax.block_until_ready(layer)
            if progress is not None:
                progress((index + 1) / arch.num_layers)
    finally:
        pool.shutdown(cancel_futures=True)
    return frozen | {"layers": stack}


def _empty(layer: Any, count: int, places: Placer | None) -> tuple[Any, Callable]:
    """Makes a stack of zeros for `count` layers, and the function that writes one layer into it."""
    stack = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), layer)
    at = None if places is None else places({"layers": stack})["layers"]
    empty = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stack)
    put = _put if at is None else jax.jit(_into, donate_argnums=0, out_shardings=at)
    return jax.jit(empty, out_shardings=at)(), put


def _into(stack, layer, index):
    return jax.tree.map(lambda s, x: s.at[index].set(x.astype(s.dtype)), stack, layer)


_put = jax.jit(_into, donate_argnums=0)


def read_layer(
    arch: architecture.Architecture,
    tensors: Mapping[str, Any],
    prefix: str,
    dtype,
    read_linear: Callable[[str, list[str]], PackedWeight | jax.Array],
) -> dict:
    """Reads one layer into a tree without a leading axis.

    Args:
        arch: The architecture, which determines the tensors of the layer.
        tensors: The tensors by Hugging Face's names.
        prefix: Common prefix of the layer's names, such as "model.layers.0.".
        dtype: Dtype of norms and biases.
        read_linear: Maps a fused linear's name and the full names of its parts to its weight.
    """
    layer = {
        norm: {"scale": jnp.asarray(tensors[f"{prefix}{name}.weight"], dtype)}
        for norm, (name, _) in arch.norms().items()
    }
    for linear, parts in arch.linears().items():
        names = [f"{prefix}{architecture.PARENT[linear]}.{part}" for part, _ in parts]
        layer[linear] = {"weight": read_linear(linear, names)}
        if linear == "qkv" and arch.qkv_bias:
            biases = [jnp.asarray(tensors[f"{name}.bias"], dtype) for name in names]
            layer[linear]["bias"] = jnp.concatenate(biases)
    return layer
