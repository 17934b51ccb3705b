"""Exports a trained policy to a folder that others read, and proves that the folder holds that policy.

    peft     the adapter, with the norms it trained
    merged   base + scaling * B A in 16 bits, as a whole model
    nvfp4    that sum packed again: a model of the size of the base

An export is read back before it gets its name: its log-probabilities on fixed prompts are compared
with those of the policy that was trained. Packing rounds; where the adapter is smaller than a step of
the 4-bit numbers, it is lost in them, and the comparison says so.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import config
from qerl_jax.checked import require
from qerl_jax.checkpoint import base_model, hf_folder, packed_formats, peft, run_state, safetensors
from qerl_jax.data import arithmetic, tokenizer
from qerl_jax.files import whole_folder
from qerl_jax.model import architecture, logprobs, lora, transformer

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
        base: The weights that the adapter is added to: the "original" 16-bit weights, or those on which it was
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
    full, name = cfg.model.trainable == "full", cfg.model.model_name_or_path
    folder = _trained_model(run, to, step) if full else hf_folder.local_folder(name)
    base = _checked_base(cfg, folder, to, base)
    _require_outside(pathlib.Path(out), run, folder)
    model, params, step, frozen, probe = _load(run, cfg, folder, step)
    trained = probe.logps(model, frozen, params)
    bare = probe.logps(model, frozen, params, adapter=False)
    dtype = np.dtype(frozen["embed_tokens"].dtype)
    with whole_folder(out, REPORT, "export") as partial:
        if to == "peft":
            peft.export_adapter(partial, params, model.lora, name)
            written = model.clone(lora=peft.read_lora(partial))
            found = probe.logps(written, frozen, peft.import_adapter(partial, written))
        else:
            del frozen  # its memory is needed for what is read back
            form = packed_formats.named(to) if to == "nvfp4" else None
            rounded = base == "packed" and packed_formats.of_folder(folder) is None
            held = packed_formats.named(cfg.model.weights) if rounded else None
            _write_model(partial, folder, model, params, held, form, dtype, cfg.model.block_scales)
            written = transformer.Transformer(
                architecture.load(partial), form.name if form else str(dtype), None, model.dtype
            )
            found = probe.logps(written, base_model.read_base(partial, written))
        goal, whose, of_bases = trained, "the trained policy's", 0.0
        if to == "merged" and base == "original" and cfg.model.weights not in config.DENSE:
            # On another base the adapter does something else: the merged model must equal that base with
            # the adapter beside its weights.
            original = model.clone(weights=str(dtype))
            frozen = base_model.read_base(folder, original)
            of_bases = probe.logps(original, frozen, params, adapter=False) - bare
            goal, whose = probe.logps(original, frozen, params), "those of base and adapter"
        off, effect = _mean_size(found - goal), _mean_size(trained - bare)
        if limit is None:
            limit = _limit(to, model.dtype, effect)
        if not off <= limit:  # also if it is no number
            raise ExportError(
                f"{out}: not written: its log-probabilities differ from {whose} by {off:.4g} on average, "
                f"and the limit (--limit) is {limit:.4g}; training changed them by {effect:.4g}"
            )
        report = {
            "run": str(run.resolve()),
            "to": to,
            "base": name,
            "from": base,
            "step": step,
            "tokens": found.size,
            "mean_difference": _mean_size(found - trained),
            "max_difference": float(np.abs(found - trained).max()),
            "mean_difference_of_bases": _mean_size(of_bases),
            "mean_effect_of_training": effect,
            "limit": limit,
        }
        (partial / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    return report


def line(report: dict[str, Any]) -> str:
    """The comparison in a sentence."""
    return (
        f"log-probabilities of {report['tokens']} tokens differ from the trained policy's by "
        f"{report['mean_difference']:.3g} on average, {report['max_difference']:.3g} at most; "
        f"training has changed them by {report['mean_effect_of_training']:.3g}"
    )


def _config(run: pathlib.Path) -> config.RunConfig:
    path = run / "config.toml"
    require(
        path.is_file(),
        "run",
        str(run),
        "has no config.toml; a run folder is what qerl train writes",
        FileNotFoundError,
    )
    cfg = config.load_run(run)
    require(
        not cfg.model.random_base, f"{path}: model.random_base", True, "there is no base to export"
    )
    return cfg


def _trained_model(run: pathlib.Path, to: Kind, step: int | None) -> pathlib.Path:
    """The model that a run which trained its base wrote at its end."""
    rule = f"a run with model.trainable = 'full' has no adapter, and its 16-bit model is {run / 'model'}"
    require(to == "nvfp4", "to", to, rule)
    require(step is None, "step", step, "of a whole model only the final one is written")
    require(
        (run / "model").is_dir(),
        "run",
        str(run),
        "has no model: the run has not ended",
        FileNotFoundError,
    )
    return run / "model"


def _checked_base(
    cfg: config.RunConfig, folder: pathlib.Path, to: Kind, base: Base | None
) -> Base | None:
    if to == "peft":
        require(base is None, "from", base, "an adapter is exported without a base")
        return None
    packed = packed_formats.of_folder(folder) is not None
    both = ["original"] if cfg.model.weights in config.DENSE else ["original", "packed"]
    choices = ["packed"] if packed else both
    if base is None and (to == "merged" or len(choices) == 1):
        return choices[-1]
    require(
        base in choices,
        "from",
        base,
        f"must be {' or '.join(map(repr, choices))}: the adapter is added to the 16-bit weights of "
        f"{folder} ('original') or to packed ones ('packed'), if there are such",
    )
    return base


def _require_outside(out: pathlib.Path, run: pathlib.Path, folder: pathlib.Path) -> None:
    """Refuses a folder whose replacement would delete the run or its base."""
    for source, what in ((run, "the run"), (folder, "the base of the run")):
        if out.resolve() in (source.resolve(), *source.resolve().parents):
            raise FileExistsError(f"{out}: holds {what}, which would be deleted")


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
        self,
        model: transformer.Transformer,
        frozen: Any,
        params: Any = None,
        *,
        adapter: bool = True,
    ) -> np.ndarray:
        """Log-probabilities of the answers' tokens, one answer after the other, float32."""
        variables = {"params": params or {}, "frozen": frozen}
        logps = _score(model, adapter, self.num_tokens, variables, jnp.asarray(self.ids))
        return np.asarray(logps)[self.answers[:, 1:]]


def _load(
    run: pathlib.Path, cfg: config.RunConfig, folder: pathlib.Path, step: int | None
) -> tuple[transformer.Transformer, dict[str, Any], int | None, Any, _Probe]:
    """Reads what a run has learned.

    Returns:
        The modules, the adapter (empty where the base itself was trained), the step of its checkpoint
        (None for the final adapter), the base on the device, and the prompts on which both are measured.
    """
    full = cfg.model.trainable == "full"
    base = dataclasses.replace(cfg.model, model_name_or_path=str(folder), trainable="lora")
    model, frozen, tokens = base_model.load_base(base, None if full else cfg.lora)
    if full:
        params = {}
    elif step is None and (run / "adapter").is_dir():
        params = peft.import_adapter(run / "adapter", model)
    elif (run / "checkpoints").is_dir():
        with contextlib.closing(run_state.StateFiles(run, keep=None)) as files:
            step, params = files.params(step)
    else:
        raise FileNotFoundError(f"neither adapter nor checkpoints in {run}: nothing has been saved")
    return model, params, step, frozen, _probe(tokens)


def _mean_size(values: np.ndarray | float) -> float:
    return float(np.abs(values).mean())


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _score(
    model: transformer.Transformer, adapter: bool, num_tokens: int, variables, ids
) -> jax.Array:
    """Log-probability of each token but the first, float32 [B, T - 1]."""
    hidden, _ = model.apply(variables, ids, adapter=adapter)
    logps, _ = logprobs.of_targets(
        hidden[:, :-1].reshape(-1, hidden.shape[-1]),
        transformer.head(variables["frozen"]),
        ids[:, 1:].reshape(-1),
        temperature=1.0,
        num_tokens=num_tokens,
    )
    return logps.reshape(len(ids), -1)


def _probe(tokens: tokenizer.Tokenizer) -> _Probe:
    """Arithmetic problems under the chat template, and their worked answers."""
    problems = [arithmetic.problem("test", 0, index) for index in range(_NUM_PROMPTS)]
    questions = tokens.encode([({"role": "user", "content": p.question},) for p in problems])
    answers = tokens.encode([arithmetic.worked_answer(p) for p in problems])
    rows = [question + answer for question, answer in zip(questions, answers, strict=True)]
    slots = np.arange(max(map(len, rows)))
    ids = [row + [tokens.pad_token] * (len(slots) - len(row)) for row in rows]
    starts, ends = (np.array([len(x) for x in each])[:, None] for each in (questions, rows))
    return _Probe(np.array(ids, np.int32), (starts <= slots) & (slots < ends), tokens.num_tokens)


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
    source: pathlib.Path,
    model: transformer.Transformer,
    params: dict[str, Any],
    held: packed_formats.Format | None,
    form: packed_formats.Format | None,
    dtype: np.dtype,
    scales: config.BlockScales,
) -> None:
    """Writes the merged model layer by layer.

    Args:
        folder: Exists and is empty.
        source: The folder of the base.
        model: Names and shapes.
        params: The adapter; empty where the base itself was trained.
        held: Format whose rounding the base's 16-bit linears take before the adapter is added, if any.
        form: What the sum is packed to; None leaves it in `dtype`.
        dtype: Type of what is not packed.
        scales: How block scales of the base's 16-bit linears were chosen. Those of the sum are searched.
    """
    arch, tensors, stored = (
        model.arch,
        safetensors.Tensors(source),
        packed_formats.of_folder(source),
    )
    trained = params.get("layers", {})
    outside = {"model.embed_tokens.weight", "model.norm.weight"}
    outside |= set() if arch.tie_word_embeddings else {"lm_head.weight"}

    def base(names: list[str]) -> list[jax.Array]:
        """The weights to which the adapter is added."""
        if stored is not None:
            return [stored.unpack(stored.read(tensors, name), jnp.float32) for name in names]
        weights = [jnp.asarray(tensors[f"{name}.weight"]) for name in names]
        if held is None:
            return weights
        return [held.unpack(weight, jnp.float32) for weight in held.packed(weights, scales)]

    def layer(index: int) -> dict[str, np.ndarray]:
        written = {}
        for norm, (name, _) in arch.norms().items():
            name = f"model.layers.{index}.{name}.weight"
            scale = trained[norm]["scale"][index] if norm in trained else tensors[name]
            written[name] = np.asarray(scale, dtype)
        for name in arch.linear_names("qkv", index) if arch.qkv_bias else ():
            written[f"{name}.bias"] = np.asarray(tensors[f"{name}.bias"], dtype)
        for linear, parts in arch.linears().items():
            names = arch.linear_names(linear, index)
            weights = base(names)
            if trained:
                shape = lora.shapes(model.lora, arch).get(linear)
                pairs = [trained[linear][part] for part, _ in parts] if shape else []
                pairs = [
                    (pair["a"][index], shape.scaled(pair["b"][index], i, index))
                    for i, pair in enumerate(pairs)
                ]
                weights = _merge(weights, pairs, shape.factor) if shape else weights
            if form is None:
                files = [{"weight": np.asarray(weight.astype(dtype))} for weight in weights]
            else:
                files = map(form.write, jax.device_get(form.packed(weights, "search")))
            for name, file in zip(names, files, strict=True):
                written |= {f"{name}.{suffix}": array for suffix, array in file.items()}
        return written

    hf_folder.fill_folder(
        folder,
        source,
        arch.num_layers,
        {name: tensors[name] for name in tensors if name in outside},
        layer,
        dtype=dtype,
        quantization_config=None if form is None else form.config,
    )


@jax.jit
def _merge(weights: list[jax.Array], pairs: list[tuple[jax.Array, jax.Array]], scaling: float):
    """W + scaling * (A B)^T, in float32."""
    return [
        weight.astype(jnp.float32) + scaling * jnp.matmul(a, b, precision="highest").T
        for weight, (a, b) in zip(weights, pairs, strict=True)
    ]
