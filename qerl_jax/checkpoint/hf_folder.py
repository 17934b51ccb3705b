"""Finds, opens and writes Hugging Face model folders; weights are written layer by layer."""

import functools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qerl_jax.checkpoint import gguf, safetensors
from qerl_jax.data import tokenizer
from qerl_jax.model.transformer import Transformer, abstract_base
from qerl_jax.system import hub
from qerl_jax.system.checked import meant, require
from qerl_jax.system.files import read_json, whole_folder

# The small base that comes with the package.
TINY = pathlib.Path(__file__).parents[1] / "assets" / "tiny"
# Endings of the files that are copied with a model, and files that are not, since they describe the source's weights.
_COPIED = (".json", ".txt", ".jinja", ".model")
_OWN = ("hf_quant_config.json", "quantization_report.json", "export.json")


def local_folder(name_or_path: str, *, weights: bool = True) -> pathlib.Path:
    """Returns a model's local folder; a model that is not local is downloaded from the hub.

    Args:
        name_or_path: A folder, a GGUF file (see `gguf.as_folder`), "qerl-tiny" for the base in the package, or a hub
            name.
        weights: Whether to download the weights too.

    Raises:
        FileNotFoundError: If it is not local and the hub does not deliver it.
        GGUFError: If a GGUF file cannot be read.
    """
    if name_or_path == "qerl-tiny":
        return TINY
    folder = pathlib.Path(name_or_path).expanduser()
    if os.path.isdir(folder):
        return folder
    is_gguf = folder.suffix == ".gguf"
    if is_gguf and os.path.isfile(folder):
        return gguf.as_folder(folder)
    if is_gguf or hub.is_local(os.path.expanduser(name_or_path)):
        rule = "no such file" if is_gguf else "no such folder"
        if os.path.lexists(folder):
            rule = "must be a model folder, or a .gguf file"
        elif not is_gguf and hub.can_be_name(name_or_path):
            rule += f"; the hub is not asked, since there is a local folder {str(folder.parent)!r}"
        raise FileNotFoundError(f"model or adapter: got {name_or_path!r}; {rule}")
    import huggingface_hub

    patterns = ["*.json", "*.txt", "*.jinja", "tokenizer*"] + (["*.safetensors"] if weights else [])
    try:
        with hub.quiet():
            path = huggingface_hub.snapshot_download(name_or_path, allow_patterns=patterns)
    except Exception as error:
        why = (
            f"the hub did not give it{meant(name_or_path, ['qerl-tiny'], 0.8)}: {hub.reason(error)}"
        )
        raise FileNotFoundError(f"{name_or_path!r} is no local folder, and {why}") from error
    return pathlib.Path(path)


def open_weights(folder: str | pathlib.Path) -> safetensors.Tensors | gguf.Tensors:
    """Opens the weights of a model folder, as a mapping from Hugging Face's names to arrays.

    Raises:
        SafetensorsError, GGUFError: If a file is missing or broken.
    """
    file = pathlib.Path(folder) / gguf.FILE
    return gguf.Tensors(file) if file.is_file() else safetensors.Tensors(folder)


def fill_folder(
    folder: pathlib.Path,
    source: pathlib.Path,
    num_layers: int,
    outside: Mapping[str, np.ndarray],
    layer: Callable[[int], Mapping[str, np.ndarray]],
    *,
    kind: Callable[[int], Hashable] = lambda index: None,
    dtype: Any,
    quantization_config: dict[str, Any] | None = None,
) -> None:
    """Writes weights in shards, config.json, and the tokenizer and generation config of `source`.

    Host memory holds one layer at a time.

    Args:
        folder: An existing empty folder.
        source: A model folder of the same architecture.
        num_layers: L.
        outside: Tensors that are in no layer, by name; written in `dtype`.
        layer: Maps a layer's index to its tensors by name.
        kind: Maps a layer's index to a value that is equal for layers whose tensors have the same names, dtypes and
            shapes.
        dtype: Dtype of the model: bfloat16 or float32.
        quantization_config: The entry of config.json if weights are packed, else None.
    """
    dtype, layer = np.dtype(dtype), functools.lru_cache(maxsize=1)(layer)
    table = {name: (dtype, array.shape) for name, array in outside.items()}
    shapes: dict[Hashable, dict[str, tuple]] = {}
    for index in range(num_layers):
        prefix = f"model.layers.{index}."
        if kind(index) not in shapes:
            content = layer(index).items()
            shapes[kind(index)] = {n.removeprefix(prefix): (a.dtype, a.shape) for n, a in content}
        table |= {prefix + name: shape for name, shape in shapes[kind(index)].items()}

    def read(name: str) -> np.ndarray:
        if name in outside:
            return np.asarray(outside[name], dtype)
        return layer(int(name.split(".")[2]))[name]

    safetensors.write_shards(folder, table, read)
    copy_companions(source, folder)
    config = read_json(source / "config.json") | {"torch_dtype": str(dtype)}
    config.pop("quantization_config", None)
    config.pop("dtype", None)  # transformers 5 writes this name and reads both
    state_head(config, has_head="lm_head.weight" in outside)
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def state_head(config: dict[str, Any], *, has_head: bool) -> None:
    """Writes into the content of a config.json that the head is not the embedding, if the weights have a head."""
    if has_head and config.get("tie_word_embeddings"):
        config["tie_word_embeddings"] = False


def copy_companions(source: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the files beside a model's weights, such as config and tokenizer, without those that describe the
    weights; states what ends a completion (`state_ends`)."""
    for path in source.iterdir():
        described = path.name.endswith(".index.json") or path.name in _OWN
        if path.suffix in _COPIED and not described:
            shutil.copyfile(path, folder / path.name)
    state_ends(folder)


def state_ends(folder: pathlib.Path, ids: Sequence[int] = (), texts: Sequence[str] = ()) -> None:
    """Writes all tokens at which a completion ends here to generation_config.json, if it does not name them already.

    transformers and vLLM end completions by a model's configs, and know neither the ends of its tokenizer nor those of
    its chat template. A run may have ended completions at further `ids`, and at `texts`, of which special tokens count.
    """
    try:
        tokens = tokenizer.load(folder)
    except (FileNotFoundError, ValueError):  # none, or none that we could use
        return
    special = [tokens.special_tokens[text] for text in texts if text in tokens.special_tokens]
    ends = list(dict.fromkeys([*tokens.stop_tokens, *ids, *special]))
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    named = generation.get("eos_token_id")
    if {*ends} != {*(named if isinstance(named, list) else [named])}:
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        path.write_text(json.dumps(generation, indent=2) + "\n")


@jax.jit
def _layer(stacks: Any, index: int) -> Any:
    return jax.tree.map(lambda stack: stack[index], stacks)


def require_new(folder: pathlib.Path, field: str, remedy: str = "") -> None:
    """Checks that a folder to be written does not exist or is empty.

    Args:
        folder: The folder.
        field: Name of the argument that gave it, for the error.
        remedy: Text at the end of the error that says what else helps.

    Raises:
        FileExistsError: If the folder exists and is not empty.
    """
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    rule = f"exists already: choose another folder, or remove that one{remedy}"
    require(is_new, field, str(folder), rule, FileExistsError)


def export_model(
    folder: str | pathlib.Path, model: Transformer, base: Any, source: str | pathlib.Path
) -> None:
    """Writes a dense base as a Hugging Face folder that `read_base` and transformers can read, and vLLM should.

    Weights are written in the dtype of the model's base (bfloat16 or float32); config and tokenizer are copied from
    the source. The folder is written completely or not at all.

    Args:
        folder: The new folder; a model that is there already is replaced.
        model: The model of the base.
        base: The whole `frozen` tree; its layers may be trained ones, in float32.
        source: The folder that the base was read from.

    Raises:
        FileExistsError: If the folder holds something else.
    """
    arch = model.arch
    dtype = np.dtype(abstract_base(model.clone(full=False))["embed_tokens"].dtype)
    outside = {
        "model.embed_tokens.weight": base["embed_tokens"],
        "model.norm.weight": base["norm"]["scale"],
    }
    if "lm_head" in base:
        outside["lm_head.weight"] = base["lm_head"]

    def layer(index: int) -> dict[str, np.ndarray]:
        content = jax.device_get(_layer(base["layers"], index))
        tensors = {
            f"model.layers.{index}.{name}.weight": content[norm]["scale"]
            for norm, (name, _) in arch.norms().items()
        }
        for linear, parts in arch.linears().items():
            ends = np.cumsum([size for _, size in parts])[:-1]
            for leaf, array in content[linear].items():
                arrays = zip(arch.linear_names(linear, index), np.split(array, ends), strict=True)
                tensors |= {f"{name}.{leaf}": part for name, part in arrays}
        return {name: np.asarray(tensors[name], dtype) for name in sorted(tensors)}

    with whole_folder(folder, "config.json", "model") as partial:
        fill_folder(partial, pathlib.Path(source), arch.num_layers, outside, layer, dtype=dtype)
