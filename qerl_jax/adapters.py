"""PEFT adapters: folder -> `params`, and back."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.architecture import LAYER_NORMS, PARENT
from qerl_jax.config import LoraConfig
from qerl_jax.model import LoRA, Transformer
from qerl_jax.tensor_files import Tensors, whole_folder

_PEFT_PREFIX = "base_model.model."


def read_lora(folder: str | pathlib.Path) -> LoraConfig:
    """The shape of a PEFT adapter, from its adapter_config.json.

    Raises:
        NotImplementedError: For adapters other than plain LoRA on all seven linears.
    """
    path = pathlib.Path(folder) / "adapter_config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no adapter_config.json in {folder}")
    config = json.loads(path.read_text())
    targets = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    found = config.get("target_modules")
    if found != "all-linear" and (not isinstance(found, list) or set(found) != targets):
        raise NotImplementedError(
            f"{path}: target_modules: got {found!r}; must be {sorted(targets)}"
        )
    for field, plain in {
        "peft_type": "LORA",
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
    }.items():
        if config.get(field, plain) != plain:
            raise NotImplementedError(
                f"{path}: {field}: got {config[field]!r}; only {plain!r} is supported"
            )
    for field in ("rank_pattern", "alpha_pattern"):
        if config.get(field):
            raise NotImplementedError(
                f"{path}: {field}: got {config[field]!r}; one rank and alpha for all is supported"
            )
    norms = config.get("modules_to_save") or []
    if norms and set(norms) != set(LAYER_NORMS):
        raise NotImplementedError(
            f"{path}: modules_to_save: got {norms}; only {list(LAYER_NORMS)} can be read"
        )
    return LoraConfig(config["r"], float(config["lora_alpha"]), 0.0, bool(norms))


def import_adapter(folder: str | pathlib.Path, model: Transformer) -> Any:
    """Reads a PEFT adapter into the `params` tree of `model`, float32.

    Raises:
        SafetensorsError, ValueError: When a tensor is missing, of another shape, or none of the
            model's.
    """
    tensors, arch, lora = Tensors(folder, "adapter_model"), model.arch, model.lora
    unread = set(tensors)

    def stack(name: str, shape: tuple[int, ...], transpose: bool) -> jax.Array:
        layers = []
        for index in range(arch.num_layers):
            full = f"{_PEFT_PREFIX}model.layers.{index}.{name}.weight"
            if tensors.shape(full) != shape:
                raise ValueError(
                    f"{full}: got shape {tensors.shape(full)}; the model needs {shape}"
                )
            unread.discard(full)
            layers.append(
                np.asarray(tensors[full], np.float32).T
                if transpose
                else np.asarray(tensors[full], np.float32)
            )
        return jnp.asarray(np.stack(layers))

    layers: dict[str, Any] = {}
    for linear, parts in arch.linears().items():
        k = arch.input_width(linear)
        layers[linear] = {
            part: {
                "a": stack(f"{PARENT[linear]}.{part}.lora_A", (lora.rank, k), True),
                "b": stack(f"{PARENT[linear]}.{part}.lora_B", (n, lora.rank), True),
            }
            for part, n in parts
        }
    if lora.train_norms:
        for name in LAYER_NORMS:
            layers[name] = {"scale": stack(name, (arch.width,), False)}
    if unread:
        raise ValueError(
            f"{folder}: {min(unread)} has no place in the model ({len(unread)} such tensors)"
        )
    return {"layers": layers}


def _peft_tensors(params: Any):
    for module, content in params["layers"].items():
        for index in range(len(jax.tree.leaves(content)[0])):
            prefix = f"{_PEFT_PREFIX}model.layers.{index}."
            if module in LAYER_NORMS:
                yield f"{prefix}{module}.weight", content["scale"][index]
                continue
            for part, pair in content.items():
                yield f"{prefix}{PARENT[module]}.{part}.lora_A.weight", pair["a"][index].T
                yield f"{prefix}{PARENT[module]}.{part}.lora_B.weight", pair["b"][index].T


def export_adapter(folder: str | pathlib.Path, params: Any, lora: LoRA, base: str) -> None:
    """Writes the adapter as PEFT does: adapter_config.json and adapter_model.safetensors, float32.

    Trained norms are written too and listed in `modules_to_save`. The folder appears whole or not
    at all.

    Args:
        folder: Replaced if it is an adapter already.
        params: The `params` tree.
        lora: Its shape.
        base: `base_model_name_or_path`.

    Raises:
        FileExistsError: When the folder holds something else.
    """
    from safetensors.numpy import save_file

    tensors = {
        name: np.ascontiguousarray(value) for name, value in _peft_tensors(jax.device_get(params))
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted({name.split(".")[-3] for name in tensors if ".lora_A." in name}),
        "modules_to_save": list(LAYER_NORMS) if lora.train_norms else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    with whole_folder(folder, "adapter_config.json", "adapter") as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
