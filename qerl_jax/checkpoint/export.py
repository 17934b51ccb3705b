"""Exports a trained policy to a folder that others read, and proves that the folder holds that policy.

    peft     the adapter, with the norms it trained
    merged   base + scaling * B A in 16 bits, as a whole model
    nvfp4    that sum packed again: a model of the size of the base

An export is read back before it gets its name: its log-probabilities on fixed prompts are compared
with those of the policy that was trained. Packing rounds; where the adapter is smaller than a step of
the 4-bit numbers, it is lost in them, and the comparison says so.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import config
from qerl_jax.checkpoint import base_model, hf_folder, packed_formats, peft
from qerl_jax.checkpoint.run_state import StateFiles
from qerl_jax.checkpoint.safetensors import Tensors
from qerl_jax.config import DENSE, RunConfig, Weights
from qerl_jax.data import arithmetic
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.files import whole_folder
from qerl_jax.model import architecture, logprobs
from qerl_jax.model.architecture import LAYER_NORMS, Architecture
from qerl_jax.model.transformer import Transformer, abstract_base, head

type Kind = Literal["peft", "merged", "nvfp4"]
type Base = Literal["original", "packed"]

REPORT = "export.json"

_NUM_PROMPTS = 16


class ExportError(ValueError):
    """An export that is not the policy that was trained."""


def export(
    run: str | pathlib.Path,
    to: Kind,
    out: str | pathlib.Path,
    *,
    base: Base | None = None,
    step: int | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """Writes what a run has learned, and checks that the written policy is the trained one.

    Args:
        run: A run folder.
        to: What is written.
        out: The folder, which appears whole or not at all; replaced if it is an export already.
        base: To what the adapter is added: the "original" 16-bit weights, or those on which it was
            trained, "packed" and dequantized again. None means "packed" for a merged model if there is
            such, and otherwise the only one that there is.
        step: Step of the checkpoint to take; None means the final adapter, or the newest checkpoint.
        limit: Largest mean difference of log-probabilities, in nats; None means what the rounding
            of that kind explains. Where the adapter is added to a base that it was not trained on,
            the difference is that to this base with the adapter beside it.

    Returns:
        The report, which the folder holds as export.json.

    Raises:
        FileNotFoundError: When the run, or what it has learned, is not there.
        FileExistsError: When `out` holds something else.
        ValueError: When the choice of base is missing or impossible.
        ExportError: When the log-probabilities differ by more than the limit.
    """
    run = pathlib.Path(run)
    cfg = _config(run)
    if cfg.model.trainable == "full":
        folder = _trained_model(run, to, step)
    else:
        folder = hf_folder.local_folder(cfg.model.model_name_or_path)
    base = _checked_base(cfg, folder, to, base)
    _require_outside(pathlib.Path(out), run, folder)
    learned, frozen, probe = _load(run, cfg, folder, step)
    trained = probe.logps(learned.model, frozen, learned.params)
    bare = probe.logps(learned.model, frozen, learned.params, adapter=False)
    with whole_folder(out, REPORT, "export") as partial:
        if to == "peft":
            name = cfg.model.model_name_or_path
            peft.export_adapter(partial, learned.params, learned.model.lora, name)
            model = learned.model.clone(lora=peft.read_lora(partial))
            found = probe.logps(model, frozen, peft.import_adapter(partial, model))
        else:
            del frozen  # its memory is needed for what is read back
            _write_model(
                partial, learned, base, None if to == "merged" else packed_formats.named(to)
            )
            found = probe.logps(*_read_model(partial, learned, to))
        differences = _Differences(trained - bare, found - trained)
        if to == "merged" and base == "original" and cfg.model.weights not in DENSE:
            # On another base the adapter does something else: the merged model must equal that base with
            # the adapter beside its weights.
            original = learned.model.clone(weights=str(learned.dtype))
            frozen = base_model.read_base(folder, original)
            of_bases = probe.logps(original, frozen, learned.params, adapter=False) - bare
            of_merging = found - probe.logps(original, frozen, learned.params)
            differences = dataclasses.replace(differences, of_bases=of_bases, of_merging=of_merging)
        if limit is None:
            limit = _limit(to, learned.model.dtype, _mean_size(differences.of_training))
        report = {
            "run": str(run.resolve()),
            "to": to,
            "base": cfg.model.model_name_or_path,
            "from": base,
            "step": learned.step,
            **differences.report(),
            "limit": limit,
        }
        _require_close(out, differences, limit)
        (partial / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    return report


def line(report: dict[str, Any]) -> str:
    """The comparison in a sentence."""
    return (
        f"log-probabilities of {report['tokens']} tokens differ from the trained policy's by "
        f"{report['mean_difference']:.3g} on average, {report['max_difference']:.3g} at most; "
        f"training has changed them by {report['mean_effect_of_training']:.3g}"
    )


def _config(run: pathlib.Path) -> RunConfig:
    path = run / "config.toml"
    if not path.is_file():
        raise FileNotFoundError(f"no config.toml in {run}: a run folder is what qerl train writes")
    cfg = config.load(path)
    if cfg.model.random_base:
        raise ValueError(f"{path}: model.random_base: there is no base to export with")
    return cfg


def _trained_model(run: pathlib.Path, to: Kind, step: int | None) -> pathlib.Path:
    """The model that a run which trained its base wrote at its end."""
    if to != "nvfp4":
        raise ValueError(
            f"to: got {to!r}; a run with model.trainable = 'full' has no adapter, and its 16-bit model is "
            f"{run / 'model'}"
        )
    if step is not None:
        raise ValueError(f"step: got {step}; of a whole model only the final one is written")
    if not (run / "model").is_dir():
        raise FileNotFoundError(f"no model in {run}: the run has not ended")
    return run / "model"


def _checked_base(cfg: RunConfig, folder: pathlib.Path, to: Kind, base: Base | None) -> Base | None:
    if to == "peft":
        if base is not None:
            raise ValueError(f"from: got {base!r}; an adapter is exported without a base")
        return None
    packed = packed_formats.of_folder(folder) is not None
    choices = [] if packed else ["original"]
    if packed or cfg.model.weights not in DENSE:
        choices.append("packed")
    if base is None and (to == "merged" or len(choices) == 1):
        return choices[-1]
    if base not in choices:
        raise ValueError(
            f"from: got {base!r}; must be {' or '.join(map(repr, choices))}: the adapter is added to the "
            f"16-bit weights of {folder} ('original') or to packed ones ('packed'), if there are such"
        )
    return base


def _require_outside(out: pathlib.Path, run: pathlib.Path, folder: pathlib.Path) -> None:
    """Refuses a folder whose replacement would delete the run or its base."""
    for source, what in ((run, "the run"), (folder, "the base of the run")):
        if out.resolve() in (source.resolve(), *source.resolve().parents):
            raise FileExistsError(f"{out}: holds {what}, which would be deleted")


@dataclasses.dataclass(frozen=True)
class _Learned:
    """What a run has learned, without its base.

    Attributes:
        folder: The folder of the base.
        base_weights: How the run held the base's linears.
        model: Names and shapes.
        params: The adapter; empty where the base itself was trained.
        step: The step of the checkpoint; None for the final adapter.
    """

    folder: pathlib.Path
    base_weights: Weights
    model: Transformer
    params: dict[str, Any]
    step: int | None

    @property
    def dtype(self) -> np.dtype:
        """The type in which what is not packed is held and written."""
        return np.dtype(abstract_base(self.model)["embed_tokens"].dtype)


def _load(
    run: pathlib.Path, cfg: RunConfig, folder: pathlib.Path, step: int | None
) -> tuple[_Learned, Any, _Probe]:
    """Reads what was learned, the base on the device, and the prompts on which both are measured."""
    full = cfg.model.trainable == "full"
    base = dataclasses.replace(cfg.model, model_name_or_path=str(folder), trainable="lora")
    model, frozen, tokens = base_model.load_base(base, None if full else cfg.lora)
    if full:
        params = {}
    elif step is None and (run / "adapter").is_dir():
        params = peft.import_adapter(run / "adapter", model)
    else:
        step, params = _checkpoint(run, step)
    learned = _Learned(folder, cfg.model.weights, model, params, step)
    return learned, frozen, _probe(tokens)


def _read_model(folder: pathlib.Path, learned: _Learned, to: Kind) -> tuple[Transformer, Any]:
    """Reads a whole model that was written: its modules, and its base on the device."""
    weights = "nvfp4" if to == "nvfp4" else str(learned.dtype)
    model = Transformer(architecture.load(folder), weights, None, learned.model.dtype)
    return model, base_model.read_base(folder, model)


@dataclasses.dataclass(frozen=True)
class _Probe:
    """Prompts with answers, on which policies are compared.

    Attributes:
        ids: int32 [B, T], right-padded.
        answers: bool [B, T], true at the tokens of answers.
        num_tokens: Ids that the tokenizer has.
    """

    ids: np.ndarray
    answers: np.ndarray
    num_tokens: int

    def logps(
        self, model: Transformer, frozen: Any, params: Any = None, *, adapter: bool = True
    ) -> np.ndarray:
        """Log-probabilities of the answers' tokens, one answer after the other, float32."""
        variables = {"params": params or {}, "frozen": frozen}
        logps = _score(model, adapter, self.num_tokens, variables, jnp.asarray(self.ids))
        return np.asarray(logps)[self.answers[:, 1:]]


@dataclasses.dataclass(frozen=True)
class _Differences:
    """Differences of log-probabilities, token by token.

    Attributes:
        of_training: The trained policy's minus those of its base.
        of_export: The export's minus the trained policy's.
        of_bases: Those of the base that the export was made from minus those of the base that was trained on.
        of_merging: The export's minus those of the base that it was made from with the adapter beside
            it; None where that is the trained policy.
    """

    of_training: np.ndarray
    of_export: np.ndarray
    of_bases: np.ndarray | float = 0.0
    of_merging: np.ndarray | None = None

    def report(self) -> dict[str, Any]:
        """Counts and means for the report."""
        return {
            "tokens": self.of_export.size,
            "mean_difference": _mean_size(self.of_export),
            "max_difference": float(np.abs(self.of_export).max()),
            "mean_difference_of_bases": _mean_size(self.of_bases),
            "mean_effect_of_training": _mean_size(self.of_training),
        }


def _mean_size(values: np.ndarray | float) -> float:
    return float(np.abs(values).mean())


def _require_close(out: str | pathlib.Path, differences: _Differences, limit: float) -> None:
    """Refuses an export that differs by more than the limit from what it should equal."""
    merging = differences.of_merging
    off = _mean_size(differences.of_export if merging is None else merging)
    if not off <= limit:  # also if it is no number
        whose = "the trained policy's" if merging is None else "those of base and adapter"
        raise ExportError(
            f"{out}: not written: its log-probabilities differ from {whose} by {off:.4g} on average, and the "
            f"limit (--limit) is {limit:.4g}; training changed them by "
            f"{_mean_size(differences.of_training):.4g}"
        )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _score(model: Transformer, adapter: bool, num_tokens: int, variables, ids) -> jax.Array:
    """Log-probability of each token but the first, float32 [B, T - 1]."""
    hidden, _ = model.apply(variables, ids, adapter=adapter)
    logps, _ = logprobs.of_targets(
        hidden[:, :-1].reshape(-1, hidden.shape[-1]),
        head(variables["frozen"]),
        ids[:, 1:].reshape(-1),
        temperature=1.0,
        num_tokens=num_tokens,
    )
    return logps.reshape(len(ids), -1)


def _checkpoint(run: pathlib.Path, step: int | None) -> tuple[int, Any]:
    if not (run / "checkpoints").is_dir():
        raise FileNotFoundError(f"neither adapter nor checkpoints in {run}: nothing has been saved")
    files = StateFiles(run, keep=None)
    try:
        return files.params(step)
    finally:
        files.close()


def _probe(tokens: Tokenizer) -> _Probe:
    """Arithmetic problems under the chat template, and their worked answers."""
    problems = [arithmetic.problem("test", 0, index) for index in range(_NUM_PROMPTS)]
    questions = tokens.encode([({"role": "user", "content": p.question},) for p in problems])
    answers = tokens.encode([arithmetic.worked_answer(p) for p in problems])
    length = max(len(q) + len(a) for q, a in zip(questions, answers, strict=True))
    ids = np.full((len(problems), length), tokens.pad_token, np.int32)
    mask = np.zeros(ids.shape, bool)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        end = len(question) + len(answer)
        ids[row, :end] = question + answer
        mask[row, len(question) : end] = True
    return _Probe(ids, mask, tokens.num_tokens)


def _limit(to: Kind, dtype: Any, effect: float) -> float:
    """The mean difference, in nats, that rounding explains; a merge without the adapter is off by its effect.

    Args:
        to: What is written.
        dtype: Type of the activations.
        effect: Mean difference that training made, in nats.
    """
    if to == "peft":
        return 1e-4  # float32 in, float32 out: nothing is rounded
    if to == "nvfp4":
        # Every weight is rounded to 4 bits anew. What is further off than the base is not trained.
        return max(0.25, min(0.5, effect))
    # Where activations are bfloat16, the order of summation alone makes 0.03 in 28 random layers, and with the
    # rounding of the sum of weight and adapter 0.055 in SmolLM2-135M.
    floor = 0.08 if dtype == jnp.bfloat16 else 0.01
    return max(floor, min(0.1, effect / 2))


def _write_model(
    folder: pathlib.Path,
    learned: _Learned,
    base: Base | None,
    form: packed_formats.Format | None,
) -> None:
    """Writes the merged model, in 16 bits or packed, layer by layer."""
    arch, dtype = learned.model.arch, learned.dtype
    tensors, stored = Tensors(learned.folder), packed_formats.of_folder(learned.folder)
    read = _base_reader(arch, tensors, stored, learned.base_weights if base == "packed" else None)
    outside = [name for name in tensors if not name.startswith("model.layers.")]
    known = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    tied = arch.tie_word_embeddings

    def layer(index: int) -> dict[str, np.ndarray]:
        written = dict(_norms_and_biases(arch, tensors, learned.params, index))
        written = {name: np.asarray(array, dtype) for name, array in written.items()}
        for linear, parts in arch.linears().items():
            names, weights = arch.linear_names(linear, index), read(linear, index)
            if learned.params:
                branches = learned.params["layers"][linear]
                pairs = [
                    (branches[part]["a"][index], branches[part]["b"][index]) for part, _ in parts
                ]
                weights = _merge(weights, pairs, learned.model.lora.scaling)
            if form is None:
                weights = [{"weight": np.asarray(weight.astype(dtype))} for weight in weights]
            else:
                weights = [form.write(jax.device_get(w)) for w in _pack(form.name, weights)]
            for name, held in zip(names, weights, strict=True):
                written |= {f"{name}.{suffix}": array for suffix, array in held.items()}
        return written

    hf_folder.fill_folder(
        folder,
        learned.folder,
        arch.num_layers,
        {n: tensors[n] for n in outside if n in known and not (tied and n == known[2])},
        layer,
        dtype=dtype,
        quantization_config=None if form is None else form.config,
    )


def _base_reader(
    arch: Architecture, tensors: Tensors, stored: packed_formats.Format | None, weights: str | None
) -> Callable[[str, int], list[jax.Array]]:
    """The function (linear, layer) -> its parts as they are or, with `weights`, as a base so packed holds them."""

    def read(linear: str, index: int) -> list[jax.Array]:
        names = arch.linear_names(linear, index)
        if stored is not None:
            parts = [jax.tree.map(jnp.asarray, stored.read(tensors, name)) for name in names]
            return _unpack(stored.name, parts)
        parts = [jnp.asarray(tensors[f"{name}.weight"]) for name in names]
        if weights is None:
            return parts
        return _unpack(weights, _pack(weights, parts))

    return read


def _norms_and_biases(
    arch: Architecture, tensors: Tensors, params: dict[str, Any], index: int
) -> Iterator[tuple[str, Any]]:
    prefix = f"model.layers.{index}."
    trained = params.get("layers", {})
    for norm in LAYER_NORMS:
        name = f"{prefix}{norm}.weight"
        yield name, trained[norm]["scale"][index] if norm in trained else tensors[name]
    if arch.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield (name := f"{prefix}self_attn.{norm}.weight"), tensors[name]
    if arch.qkv_bias:
        for name in arch.linear_names("qkv", index):
            yield f"{name}.bias", tensors[f"{name}.bias"]


@functools.partial(jax.jit, static_argnums=0)
def _pack(name: str, parts: list[jax.Array]) -> list[Any]:
    return packed_formats.named(name).pack(parts)


@functools.partial(jax.jit, static_argnums=0)
def _unpack(name: str, parts: list[Any]) -> list[jax.Array]:
    return [packed_formats.named(name).unpack(part, jnp.float32) for part in parts]


@jax.jit
def _merge(weights: list[jax.Array], pairs: list[tuple[jax.Array, jax.Array]], scaling: float):
    """W + scaling * (A B)^T, in float32."""
    return [
        weight.astype(jnp.float32) + scaling * jnp.matmul(a, b, precision="highest").T
        for weight, (a, b) in zip(weights, pairs, strict=True)
    ]
