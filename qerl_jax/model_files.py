"""A model as a Hugging Face folder: what its tensors are called, and how it is written."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np

from qerl_jax.architecture import LAYER_NORMS, PARENT, Architecture
from qerl_jax.model import Transformer, abstract_base
from qerl_jax.tensor_files import whole_folder


def export_model(
    folder: str | pathlib.Path, model: Transformer, base: Any, source: str | pathlib.Path
) -> None:
    """Writes a dense base as a Hugging Face folder that `load_base`, transformers and vLLM read.

    Weights are written in the type in which `model` holds a base (bfloat16 or float32), config and
    tokenizer are the source's. The folder appears whole or not at all.

    Args:
        folder: Replaced if it is a model already.
        model: Says how the linears are fused.
        base: The whole `frozen` tree; its layers may be trained ones, in float32.
        source: The folder that the base came from.

    Raises:
        FileExistsError: When the folder holds something else.
    """
    from safetensors.numpy import save_file

    source = pathlib.Path(source)
    dtype = np.dtype(abstract_base(model.clone(full=False))["embed_tokens"].dtype)
    tensors = {
        name: np.ascontiguousarray(np.asarray(value, dtype))
        for name, value in _hf_tensors(model.arch, jax.device_get(base))
    }
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    config.pop("dtype", None)  # transformers 5 writes this name and reads both
    config["torch_dtype"] = str(dtype)
    with whole_folder(folder, "config.json", "model") as partial:
        for path in source.iterdir():
            wanted = path.suffix in (".json", ".txt", ".jinja", ".model")
            if wanted and not path.name.endswith(".index.json"):
                shutil.copyfile(path, partial / path.name)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _hf_tensors(arch: Architecture, base: Any):
    yield "model.embed_tokens.weight", base["embed_tokens"]
    yield "model.norm.weight", base["norm"]["scale"]
    if "lm_head" in base:
        yield "lm_head.weight", base["lm_head"]
    linears = arch.linears()
    for module, content in base["layers"].items():
        for index in range(arch.num_layers):
            prefix = f"model.layers.{index}."
            if module not in linears:
                parent = "" if module in LAYER_NORMS else "self_attn."
                yield f"{prefix}{parent}{module}.weight", content["scale"][index]
                continue
            ends = np.cumsum([size for _, size in linears[module]])[:-1]
            for leaf, stack in content.items():
                pieces = zip(linears[module], np.split(stack[index], ends), strict=True)
                for (part, _), piece in pieces:
                    yield f"{prefix}{PARENT[module]}.{part}.{leaf}", piece
