"""Reads PEFT adapters into `params`, and writes `params` as PEFT adapters."""

import functools
import json
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.checkpoint.packed_formats import FLOATS, refuse_first
from qerl_jax.checkpoint.safetensors import Tensors
from qerl_jax.config import Linear, LoraConfig
from qerl_jax.model import architecture, lora, transformer
from qerl_jax.system.checked import ConfigError, require, tell
from qerl_jax.system.files import read_json, whole_folder
from qerl_jax.system.process_pool import Failure, Pool

_PEFT_PREFIX = "base_model.model."
# Fields of `LoraConfig` that determine the branches, besides rank and alpha.
SHAPE_FIELDS = ("target_modules", "rank_pattern", "alpha_pattern", "use_rslora")


def _branch(config: dict[str, Any], name: str) -> tuple[int, float] | None:
    """Returns rank and scaling of the branch of a linear such as "model.layers.0.mlp.up_proj"; None if it has none.

    The scaling is alpha / rank, or alpha / sqrt(rank) with rslora (arXiv 2312.03732).
    """
    layers = config.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    chosen = _all_layers(config) or int(name.split(".")[2]) in layers
    excluded, targets = config.get("exclude_modules"), config["target_modules"]
    if not chosen or excluded and _is_named(excluded, name):
        return None
    if targets != "all-linear" and not _is_named(targets, name):
        return None
    rank = _by_pattern(config.get("rank_pattern"), name, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _is_named(modules: str | list[str], name: str) -> bool:
    """Whether `target_modules` matches a linear: a string is a pattern for whole names, a list has names or their
    last parts."""
    if not isinstance(modules, str):
        return any(f".{name}".endswith(f".{module}") for module in modules)
    return _is_matched(modules, name)


def _by_pattern(patterns: dict[str, float] | None, name: str, default: float) -> float:
    return next((v for p, v in (patterns or {}).items() if _is_key_of(p, name)), default)


# Repetitions could keep `re` busy forever.
_REPEATS = frozenset("*+?{")


def _is_key_of(pattern: str, name: str) -> bool:
    """Whether a key of `rank_pattern` or `alpha_pattern` matches a linear's name; errors as for `_is_matched`."""
    if _REPEATS & set(pattern):
        return _is_matched(rf"(.*\.)?({pattern})", name)
    try:
        return lora.matches(pattern, name)
    except re.error as error:
        raise _no_pattern(pattern, f"is no regular expression: {error}") from error


def _no_pattern(pattern: str, why: str) -> ValueError:
    return ValueError(f"adapter_config.json: {pattern!r} {why}")


def _is_matched(pattern: str, name: str) -> bool:
    """Whether a pattern from an untrusted file matches a whole name; ValueError if not soon, or it is no pattern."""
    (matched,) = _matchers().map("full_match", [(pattern, name)])
    if isinstance(matched, Failure):
        why = f"is no regular expression: {matched.detail}"
        why = "takes too long to match" if matched.reason == "timeout" else why
        raise _no_pattern(pattern, why)
    return matched


@functools.cache
def _matchers() -> Pool:
    return Pool("qerl_jax.checkpoint.name_patterns", workers=1, seconds=1.0)


# Fields that could make an adapter something other than B A x, each with its value in plain LoRA.
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_qalora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "use_bdlora": None,
}
# Values of `init_lora_weights` that begin so change the base.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def _is_plain(plain: Any) -> Callable[[Any], bool]:
    return lambda value: (value or plain) == plain


def _is_names(value: Any) -> bool:
    listed = value if isinstance(value, list) else [value]
    return all(isinstance(name, str) for name in listed)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_scale(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 2**31


def _values(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns the check of a table with such values, which may be empty or absent."""
    return lambda table: (
        not table or (isinstance(table, dict) and all(map(is_value, table.values())))
    )


def _is_layers(value: Any) -> bool:
    listed = value if isinstance(value, list) else [value]
    return value is None or all(type(layer) is int for layer in listed)


def _is_norms(names: Any) -> bool:
    return not names or (_is_names(names) and set(names) == set(architecture.LAYER_NORMS))


# The rule for each field, as a check and in words: of fields that could make an adapter something other than plain
# LoRA, and of the form of fields that are read.
_SUPPORTED = {
    field: (_is_plain(plain), f"only {plain!r} is supported") for field, plain in _PLAIN.items()
} | {
    "init_lora_weights": (
        lambda start: not (isinstance(start, str) and start.startswith(_CHANGES_BASE)),
        "which changes the base; convert the adapter to plain LoRA (PEFT: "
        "path_initial_model_for_weight_conversion)",
    ),
    "modules_to_save": (_is_norms, f"only {list(architecture.LAYER_NORMS)} can be read"),
}
_FORMS = {
    "target_modules": (_is_names, "must be names, or a pattern"),
    "exclude_modules": (lambda value: not value or _is_names(value), "must be names, or a pattern"),
    "layers_to_transform": (_is_layers, "must be numbers of layers"),
    "r": (_is_count, "must be positive and a whole number"),
    "lora_alpha": (_is_scale, "must be positive"),
    "rank_pattern": (_values(_is_count), "must hold a positive integer for each pattern"),
    "alpha_pattern": (_values(_is_scale), "must hold a positive number for each pattern"),
    "use_rslora": (lambda value: isinstance(value, bool | None), "must be true or false"),
}


def _config(folder: str | pathlib.Path) -> dict[str, Any]:
    path = pathlib.Path(folder) / "adapter_config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no adapter_config.json in {folder}")
    config = read_json(path)
    for rules, error in ((_SUPPORTED, NotImplementedError), (_FORMS, ConfigError)):
        for field, (holds, rule) in rules.items():
            require(holds(config.get(field)), f"{path}: {field}", config.get(field), rule, error)
    # Variants of LoRA that are newer than this code.
    for field in config.keys() - _SUPPORTED.keys() - _FORMS.keys():
        is_off, rule = (
            not (field.startswith("use_") and config[field]),
            "only plain LoRA can be read",
        )
        require(is_off, f"{path}: {field}", config[field], rule, NotImplementedError)
    return config


def read_lora(folder: str | pathlib.Path) -> LoraConfig:
    """Returns the LoRA config that a model needs for a PEFT adapter, from its adapter_config.json.

    Some adapters cannot be described exactly: those with `layers_to_transform`, `exclude_modules`, a pattern or an
    unknown name in `target_modules`, or a repetition in a key of `rank_pattern` or `alpha_pattern`. For them all
    linears get a branch of the largest rank, and alpha is chosen so that alpha / rank is the scaling of linears that
    no pattern matches.

    Raises:
        FileNotFoundError: If the folder has no adapter_config.json.
        NotImplementedError: If the adapter is not plain LoRA; the error names the field that says so.
        ValueError: If a field has an invalid value.
    """
    config = _config(folder)
    config |= _used_patterns(folder, config)
    alpha, root = float(config["lora_alpha"]), bool(config.get("use_rslora"))
    trains_norms, targets = bool(config.get("modules_to_save")), config["target_modules"]
    is_listed = targets == "all-linear" or (
        not isinstance(targets, str) and set(targets) <= set(get_args(Linear))
    )
    patterns = [*(config.get("rank_pattern") or {}), *(config.get("alpha_pattern") or {})]
    # `lora.shapes` matches without a time limit.
    is_simple = not any(_REPEATS & set(pattern) for pattern in patterns)
    if is_listed and is_simple and not config.get("exclude_modules") and _all_layers(config):
        targets = None if targets == "all-linear" else tuple(targets)
        alphas = {p: float(x) for p, x in (config.get("alpha_pattern") or {}).items()}
        ranks = config.get("rank_pattern")
        return LoraConfig(config["r"], alpha, 0.0, trains_norms, targets, ranks, alphas, root)
    rank = max(config["r"], *(config.get("rank_pattern") or {"": 0}).values())
    if root or rank != config["r"]:
        alpha = rank * (alpha / (math.sqrt(config["r"]) if root else config["r"]))
    return LoraConfig(rank, alpha, 0.0, trains_norms)


def about_template(folder: str | pathlib.Path, template: str) -> list[str]:
    """Returns a warning if an adapter's folder has another chat template than the one that is used."""
    jinja, config = (
        pathlib.Path(folder) / n for n in ("chat_template.jinja", "tokenizer_config.json")
    )
    theirs = read_json(config).get("chat_template") if config.is_file() else None
    theirs = jinja.read_text("utf-8", "replace") if jinja.is_file() else theirs
    if not isinstance(theirs, str) or theirs.strip() == template.strip():
        return []
    rule = "has a chat template, which is not that of the base's tokenizer and is not used"
    return [f"warning: {folder}: {rule}: name its folder in model.tokenizer_name_or_path to use it"]


def _used_patterns(folder: str | pathlib.Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the patterns of rank and alpha that match a linear with a branch; PEFT ignores others, and warns."""
    path = pathlib.Path(folder)
    if not list(path.glob("adapter_model*.safetensors")):
        return {}
    names = [name.removeprefix(_PEFT_PREFIX) for name in Tensors(path, "adapter_model")]
    names = [name.removesuffix(".lora_A.weight") for name in names if ".lora_A." in name]
    used = {}
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(field) or {}
        used[field] = {p: v for p, v in patterns.items() if any(_is_key_of(p, n) for n in names)}
        for pattern in (p for p in patterns if p not in used[field]):
            rule = "matches no linear of the adapter, and has no effect"
            tell(f"warning: {path / 'adapter_config.json'}: {field}: {pattern!r} {rule}")
    return used


def _all_layers(config: dict[str, Any]) -> bool:
    return config.get("layers_to_transform") in (None, [])  # PEFT treats an empty list as None


def import_adapter(folder: str | pathlib.Path, model: transformer.Transformer) -> Any:
    """Reads a PEFT adapter into the `params` tree of `model`, in float32.

    The result computes the same function as the adapter. A branch of a lower rank than the model's is padded with
    zeros in A and in B, and a linear without a branch gets only zeros: these stay zero in training. If a scaling
    differs from the model's (see `read_lora`), B is multiplied by the quotient, so the effect of an optimizer step
    on such a branch is scaled by its inverse.

    Args:
        folder: A PEFT folder.
        model: The model, whose `lora` must be the result of `read_lora` but for alpha.

    Raises:
        SafetensorsError, ValueError: If the model's `lora` differs, or a tensor is missing, has another shape, or
            does not belong to the model, or is not finite.
        FileNotFoundError, NotImplementedError: As for `read_lora`.
    """
    tensors, config = Tensors(folder, "adapter_model"), _config(folder)
    arch, ours, needed = model.arch, model.lora, read_lora(folder)
    for field in ("rank", *SHAPE_FIELDS):
        value, expected = getattr(needed, field), getattr(ours, field)
        name = f"{folder}/adapter_config.json: {field}"
        require(value == expected, name, value, f"the model has {expected}")
    unread = set(tensors)

    def read(name: str, sizes: tuple[int, ...]) -> np.ndarray:
        full = f"{_PEFT_PREFIX}{name}.weight"
        if tensors.shape(full) != sizes:
            raise ValueError(f"{full}: got shape {tensors.shape(full)}; the model needs {sizes}")
        unread.discard(full)
        holds, rule = tensors.type(full) in FLOATS, f"must be {' or '.join(FLOATS)}"
        require(holds, f"{full}: type", tensors.type(full), rule, NotImplementedError)
        with np.errstate(over="ignore"):
            values = np.asarray(tensors[full], np.float32)
        refuse_first(tensors, full, ~np.isfinite(values), "must be a finite number")
        return values

    def branch(name: str, n: int, k: int, filled: int) -> tuple[np.ndarray, np.ndarray]:
        a, b = np.zeros((k, filled), np.float32), np.zeros((filled, n), np.float32)
        if rank_and_scaling := _branch(config, name):
            rank, scaling = rank_and_scaling
            quotient = np.float32(scaling / lora.branch(ours, name)[1])
            a[:, :rank] = read(f"{name}.lora_A", (rank, k)).T
            b[:rank] = quotient * read(f"{name}.lora_B", (n, rank)).T
        return a, b

    prefixes = [f"model.layers.{index}." for index in range(arch.num_layers)]
    shapes = lora.shapes(ours, arch)
    layers: dict[str, Any] = {linear: {} for linear in shapes}
    for linear, shape in shapes.items():
        for part, n in arch.linears()[linear]:
            names = [f"{prefix}{architecture.PARENT[linear]}.{part}" for prefix in prefixes]
            pairs = [branch(name, n, arch.input_width(linear), shape.rank) for name in names]
            # With a dtype: without one, JAX compiles a program for each shape.
            a, b = (jnp.asarray(np.stack(x), jnp.float32) for x in zip(*pairs, strict=True))
            layers[linear][part] = {"a": a, "b": b}
    if ours.train_norms:
        for norm in architecture.LAYER_NORMS:
            scales = [read(f"{prefix}{norm}", (arch.width,)) for prefix in prefixes]
            layers[norm] = {"scale": jnp.asarray(np.stack(scales), jnp.float32)}
    if unread:
        more = f"({len(unread)} such tensors)"
        raise ValueError(f"{folder}: {min(unread)} has no place in the model {more}")
    return {"layers": layers}


def _peft_tensors(params: Any, shape: LoraConfig):
    for module, content in params["layers"].items():
        for index in range(len(jax.tree.leaves(content)[0])):
            prefix = f"{_PEFT_PREFIX}model.layers.{index}."
            if module in architecture.LAYER_NORMS:
                yield f"{prefix}{module}.weight", content["scale"][index]
            else:
                for part, pair in content.items():
                    name = f"{prefix}{architecture.PARENT[module]}.{part}"
                    if rank_and_alpha := lora.branch(shape, name.removeprefix(_PEFT_PREFIX)):
                        yield f"{name}.lora_A.weight", pair["a"][index][:, : rank_and_alpha[0]].T
                        yield f"{name}.lora_B.weight", pair["b"][index][: rank_and_alpha[0]].T


def export_adapter(folder: str | pathlib.Path, params: Any, shape: LoraConfig, base: str) -> None:
    """Writes the adapter as PEFT does: adapter_config.json and adapter_model.safetensors, in float32.

    Trained norms are written too and listed in `modules_to_save`. The folder is written completely or not at all.

    Args:
        folder: The new folder; an adapter that is there already is replaced.
        params: The `params` tree.
        shape: The LoRA config.
        base: The name or path of the base, for `base_model_name_or_path`.

    Raises:
        FileExistsError: If the folder holds something else.
    """
    from safetensors.numpy import save_file

    items = _peft_tensors(jax.device_get(params), shape)
    tensors = {name: np.ascontiguousarray(value) for name, value in items}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "lora_dropout": shape.dropout,
        "target_modules": sorted({name.split(".")[-3] for name in tensors if ".lora_A." in name}),
        "modules_to_save": list(architecture.LAYER_NORMS) if shape.train_norms else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": shape.use_rslora,
        "rank_pattern": shape.rank_pattern or {},
        "alpha_pattern": shape.alpha_pattern or {},
        "inference_mode": True,
    }
    with whole_folder(folder, "adapter_config.json", "adapter") as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
