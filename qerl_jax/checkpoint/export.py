"""Exports a trained policy to a folder that other libraries can read, and checks that the folder holds that policy.

    peft     the adapter, with its trained norms
    merged   base + scaling * B A in 16 bits, as a whole model
    nvfp4    the merged weights packed again: a model of the size of the packed base
    pair     the packed base unchanged but for trained norms, and the adapter: two folders, which vLLM should load

An export is read back before the folder gets its final name, and its log-probabilities on fixed prompts are compared
with those of the trained policy. Packing rounds the weights: an adapter smaller than a step of the 4-bit numbers is
lost. So for `nvfp4` and `pair` the report gives the KL divergence from the trained policy for each way to serve it,
and `lines` warns if the merged model loses what the pair keeps.
"""

import collections
import dataclasses
import functools
import json
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import NumberFormat
from qerl_jax import config
from qerl_jax.checkpoint import base_model, hf_folder, packed_formats, peft, run_state
from qerl_jax.checkpoint.folder_tensors import FolderTensors
from qerl_jax.checkpoint.policy import PolicySource, find_policy, load_base, saved, trained_model
from qerl_jax.data import arithmetic, tokenizer
from qerl_jax.model import architecture, layers, logprobs, lora, transformer
from qerl_jax.system.checked import require
from qerl_jax.system.files import whole_folder

type Kind = Literal["peft", "merged", "nvfp4", "pair"]
type Base = Literal["original", "packed"]

REPORT = "export.json"

# Names in reports of the ways to serve a policy.
_ALONE, _BESIDE = "4-bit base alone", "4-bit base with the adapter beside it"
_MERGED_16, _MERGED_4 = "merged in 16 bits", "merged in 4 bits"

# Warn of a merged model that loses more than this fraction of the effect of training, as the KL from the base.
MOST_LOST = 0.1

_NUM_PROMPTS = 16


class ExportError(ValueError):
    """Raised for an export that differs from the trained policy."""


def export(
    run: str | pathlib.Path,
    to: Kind,
    out: str | pathlib.Path,
    *,
    base: Base | None = None,
    step: int | None = None,
    limit: float | None = None,
    overwrite: bool = False,
    model: str | None = None,
    weights: config.Weights | None = None,
) -> dict[str, Any]:
    """Writes the trained policy of a run, and checks that the written policy is the same.

    Args:
        run: A run folder, or the folder of an adapter.
        to: The kind of export.
        out: The new folder, written completely or not at all.
        base: The weights to which the adapter is added: "original" for the 16-bit weights, "packed" for the
            dequantized weights on which it was trained. None means "packed" for a merged model if there are packed
            weights, otherwise the only choice.
        step: Step of the checkpoint to export; None means the final adapter, or the newest checkpoint of a run that
            has not ended.
        limit: Largest allowed mean difference of log-probabilities, in nats; None means a limit for the difference
            that rounding can cause. If the adapter is added to a base on which it was not trained, the difference is
            measured against that base with the adapter beside it.
        overwrite: Whether to replace an earlier export in `out`.
        model: The base of an adapter; None means the one that its adapter_config.json names.
        weights: The form of that base's weights in training; None means "nvfp4".

    Returns:
        The report, which is also in the folder as export.json.

    Raises:
        FileNotFoundError: If the run, or its trained weights, cannot be found.
        FileExistsError: If `out` holds files, or with `overwrite` files that are not an export.
        ValueError: If the choice of base is missing or impossible.
        ExportError: If the log-probabilities differ by more than the limit.
    """
    run = pathlib.Path(run)
    source = _source(run, model, weights)
    cfg, name = source.model, source.model.model_name_or_path
    require(not cfg.random_base, f"{run}: model.random_base", True, "there is no base to export")
    folder = _base_folder(cfg, run, to, step)
    base = _checked_base(cfg, folder, to, base)
    if overwrite and not pathlib.Path(out).is_file():
        _require_outside(pathlib.Path(out), run, folder)
    else:
        remedy = ", or replace an earlier export with overwrite=True (--overwrite)"
        hf_folder.require_new(pathlib.Path(out), "out", remedy)
    model, params, step, frozen, probe = _load(source, folder, step)
    seen = probe.policy(model, frozen, params)
    trained = probe.logps(seen)
    bare = probe.policy(model, frozen, params, adapter=False)
    effect = _mean_size(trained - probe.logps(bare))
    dtype = np.dtype(frozen["embed_tokens"].dtype)
    report = {"run": str(run.resolve()), "to": to, "base": name, "from": base, "step": step}
    report["tokens"] = trained.size
    with whole_folder(out, REPORT, "export") as partial:
        goal, whose, of_bases = trained, "the trained policy's", 0.0
        if to == "peft":
            peft.export_adapter(partial, params, model.lora, name)
            written = model.clone(lora=peft.read_lora(partial))
            exported = probe.policy(written, frozen, peft.import_adapter(partial, written))
        else:
            del frozen  # frees memory to read the export back
            sums = _Sums.of(cfg, folder, model, params, base, dtype)
            if to == "pair":
                exported = _write_pair(partial, pathlib.Path(out), sums, probe)
            else:
                exported = _write_base(partial, sums, probe, is_packed=to == "nvfp4")
            if source.run is not None:
                rollout, written = source.run.rollout, partial / ("base" if to == "pair" else "")
                hf_folder.state_ends(written, rollout.stop_token_ids or (), rollout.stop or ())
        if to == "merged" and base == "original" and cfg.weights not in config.DENSE:
            # On another base the adapter has another effect, so compare the merged model with that base and the
            # adapter beside it.
            alone, goal = _on_original(folder, model.clone(weights=str(dtype)), params, probe)
            of_bases, whose = alone - probe.logps(bare), "those of base and adapter"
        if to in ("nvfp4", "pair"):
            report["kl"] = _ways(sums, probe, seen, bare, exported, to)
        logps = probe.logps(exported)
        off = _mean_size(logps - goal)
        limit = _limit(to, model.dtype, effect) if limit is None else limit
        if not off <= limit:  # also if it is NaN
            raise ExportError(
                f"{out}: not written: its log-probabilities differ from {whose} by {off:.4g} on average, "
                f"and the limit (--limit) is {limit:.4g}; training changed them by {effect:.4g}"
            )
        report |= {
            "mean_difference": _mean_size(logps - trained),
            "max_difference": float(np.abs(logps - trained).max()),
            "mean_difference_of_bases": _mean_size(of_bases),
            "mean_effect_of_training": effect,
            "limit": limit,
        }
        (partial / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    return report


def _write_base(folder: pathlib.Path, sums: "_Sums", probe: "_Probe", *, is_packed: bool) -> Any:
    """Writes the sums of base and adapter, packed as NVFP4 or in 16 bits; returns the written policy, read back."""
    form = packed_formats.named("nvfp4") if is_packed else None
    _write_model(folder, sums, form)
    written = sums.model.clone(
        weights=form.name if form else str(sums.dtype),
        lora=None,
        dense_linears=FolderTensors(folder, sums.arch).dense_linears(),
    )
    return probe.policy(written, base_model.read_base(folder, written))


def _on_original(
    folder: pathlib.Path, model: transformer.Transformer, params: Any, probe: "_Probe"
):
    """Returns the log-probabilities [n] of a base in 16 bits, without and with the adapter beside it."""
    frozen = base_model.read_base(folder, model)
    policies = [probe.policy(model, frozen, params, adapter=beside) for beside in (False, True)]
    return [probe.logps(policy) for policy in policies]


def lines(report: dict[str, Any]) -> list[str]:
    """Returns a report as lines of text: the comparison, the KL of each way to serve it, and warnings if needed."""
    text = [
        f"log-probabilities of {report['tokens']} tokens differ from the trained policy's by "
        f"{report['mean_difference']:.3g} on average, {report['max_difference']:.3g} at most; "
        f"training has changed them by {report['mean_effect_of_training']:.3g}"
    ]
    if report["to"] == "peft" and report["base"] == "qerl-tiny":
        text.append(
            'note: PEFT cannot find the base "qerl-tiny", which is in this package. --to pair writes the base beside the '
            "adapter, and --to merged writes a model that needs no base"
        )
    kl = report.get("kl", {})
    if kl:
        ways = ", ".join(f"{way} {value:.3g}" for way, value in kl.items())
        text.append(f"difference from the trained policy, KL in nats per token: {ways}")
    if _ALONE in kl and _MERGED_4 in kl:
        alone, lost = kl[_ALONE], kl[_MERGED_4] - kl[_BESIDE]
        if not lost <= MOST_LOST * alone:  # also if it is NaN
            text.append(
                f"WARNING: merging into 4-bit weights loses {lost / max(alone, 1e-12):.0%} of what "
                "training changed: the adapter is smaller than a step of these numbers. Serve base and adapter side by "
                "side instead: qerl export RUN --to pair OUT, then vllm serve OUT/base --enable-lora --lora-modules "
                "policy=OUT/adapter"
            )
    return text


def _source(run: pathlib.Path, model: str | None, weights: str | None) -> PolicySource:
    """Returns the base and the adapter that are exported; see `export` for the arguments."""
    if not (run / "config.toml").is_file():
        rule = "has no config.toml; a run folder is what qerl train writes"
        is_adapter = (run / "adapter_config.json").is_file()
        require(is_adapter, "run", str(run), rule, FileNotFoundError)
        return find_policy(model, run, weights=weights)
    for name, value in (("model", model), ("weights", weights)):
        rule = "the config of the run says it; it is for an adapter without its run"
        require(value is None, name, value, rule)
    cfg = config.load_run(run)
    return PolicySource(cfg.model, run=cfg, folder=run)


def _base_folder(
    cfg: config.ModelConfig, run: pathlib.Path, to: Kind, step: int | None
) -> pathlib.Path:
    """Returns the folder of the base: of a run that trained the whole of it, what that run has written."""
    if cfg.trainable != "full":
        return hf_folder.local_folder(cfg.model_name_or_path)
    rule = f"a run with model.trainable = 'full' has no adapter, and its 16-bit model is {run / 'model'}"
    require(to == "nvfp4", "to", to, rule)
    rule = "a run that trains the whole model writes only its last step"
    require(step is None, "step", step, rule)
    return trained_model(run)


def _checked_base(
    cfg: config.ModelConfig, folder: pathlib.Path, to: Kind, base: Base | None
) -> Base | None:
    if to in ("peft", "pair"):
        require(base is None, "from", base, "an adapter is exported without adding it to weights")
        return None
    choices = ["original"] if cfg.weights in config.DENSE else ["original", "packed"]
    if packed_formats.of_folder(folder) is not None:
        choices = ["packed"]
    if base is None and (to == "merged" or len(choices) == 1):
        return choices[-1]
    rule = (
        f"must be {' or '.join(map(repr, choices))}: the adapter is added to the 16-bit weights of "
        f"{folder} ('original') or to packed ones ('packed'), if there are such"
    )
    require(base in choices, "from", base, rule)
    return base


def _require_outside(out: pathlib.Path, run: pathlib.Path, folder: pathlib.Path) -> None:
    """Checks that replacing a folder would not delete the run or its base."""
    for source, what in ((run, "the run"), (folder, "the base of the run")):
        if out.resolve() in (source.resolve(), *source.resolve().parents):
            raise FileExistsError(f"{out}: holds {what}, which would be deleted")


@dataclasses.dataclass(frozen=True)
class _Probe:
    """Prompts with answers, on which policies are compared.

    Attributes:
        ids: int32 [B, T], right-padded.
        answers: bool [B, T], true at the tokens of answers.
        num_tokens: Number of ids that the tokenizer has.
    """

    ids: np.ndarray
    answers: np.ndarray
    num_tokens: int

    def policy(
        self,
        model: transformer.Transformer,
        frozen: Any,
        params: Any = None,
        *,
        adapter: bool = True,
    ) -> np.ndarray:
        """Computes a policy's log-probabilities of all ids at the n answer tokens, float32 [n, num_tokens]."""
        variables = {"params": params or {}, "frozen": frozen}
        answers = np.nonzero(self.answers[:, 1:])
        ids = jnp.asarray(self.ids)
        return np.asarray(_distributions(model, adapter, self.num_tokens, variables, ids, *answers))

    def logps(self, policy: np.ndarray) -> np.ndarray:
        """Returns the log-probabilities [n] of the answer tokens, from the result of `policy`."""
        targets = self.ids[:, 1:][self.answers[:, 1:]]
        return np.take_along_axis(policy, targets[:, None], axis=-1)[:, 0]


def _mean_kl(p: np.ndarray, q: np.ndarray) -> float:
    """Computes the mean KL(p || q) per token in nats, from log-probabilities [n, V]."""
    return float(np.sum(np.exp(p) * (p - q), axis=-1, dtype=np.float64).mean())


def _load(
    source: PolicySource, folder: pathlib.Path, step: int | None
) -> tuple[transformer.Transformer, dict[str, Any], int | None, Any, _Probe]:
    """Reads the trained policy, with the base in `folder`.

    Returns the model, the adapter (empty if the whole base was trained), the step of its checkpoint (None for a PEFT
    folder), the base on the device, and the prompts on which policies are compared.
    """
    base = dataclasses.replace(source.model, model_name_or_path=str(folder), trainable="lora")
    adapter, shape = source.adapter, None
    if adapter is not None:
        require(
            step is None, "step", step, "an adapter's folder holds no checkpoints: name its run"
        )
        shape = peft.read_lora(adapter)
    elif source.model.trainable != "full":
        shape = source.run.lora
        adapter, step = saved(source.folder) if step is None else (None, step)
    model, frozen, tokens = load_base(base, shape)
    params = {}
    if step is not None:
        step, params = run_state.StateFiles(source.folder, keep=None).params(step)
    elif shape is not None:
        params = peft.import_adapter(adapter, model)
    return model, params, step, frozen, _probe(tokens)


def _mean_size(values: np.ndarray | float) -> float:
    return float(np.abs(values).mean())


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _distributions(
    model: transformer.Transformer, adapter: bool, num_tokens: int, variables, ids, rows, slots
) -> jax.Array:
    """Computes the log-probabilities of the next token after each of these slots, float32 [n, num_tokens]."""
    hidden, _ = model.apply(variables, ids, adapter=adapter)
    scores = layers.logits(hidden[rows, slots], transformer.head(variables["frozen"]))
    return logprobs.log_softmax(scores, 1.0, num_tokens)[:, :num_tokens]


def _probe(tokens: tokenizer.Tokenizer) -> _Probe:
    """Makes prompts of arithmetic problems, with the chat template and their worked answers."""
    problems = [arithmetic.problem("test", 0, index) for index in range(_NUM_PROMPTS)]
    questions = tokens.encode([({"role": "user", "content": p.question},) for p in problems])
    answers = tokens.ids([arithmetic.worked_answer(p) for p in problems])
    rows = [question + answer for question, answer in zip(questions, answers, strict=True)]
    slots = np.arange(max(map(len, rows)))
    ids = [row + [tokens.pad_token] * (len(slots) - len(row)) for row in rows]
    starts, ends = (np.array([len(x) for x in each])[:, None] for each in (questions, rows))
    return _Probe(np.array(ids, np.int32), (starts <= slots) & (slots < ends), tokens.num_tokens)


def _limit(to: Kind, dtype: Any, effect: float) -> float:
    """Returns the largest mean difference of log-probabilities, in nats, that rounding can cause.

    A merge that lost the adapter differs by `effect`, the mean difference between the trained policy and its base.
    """
    if to == "peft":
        return 1e-4  # float32 in, float32 out: nothing is rounded
    if to == "nvfp4":
        # Every weight is rounded to 4 bits again. An export that differs more than the base does has lost the effect
        # of training.
        return max(0.25, min(0.5, effect))
    # With bfloat16 activations the order of summation alone causes 0.03 in 28 random layers. With the rounding of the
    # merged weights, the difference is 0.055 in SmolLM2-135M.
    floor = 0.08 if dtype == jnp.bfloat16 else 0.01
    return max(floor, min(0.1, effect / 2))


@dataclasses.dataclass(frozen=True)
class _Sums:
    """The weights of a base, to which the adapter is added linear by linear.

    Attributes:
        tensors: The tensors of the base's folder.
        model: The model of the trained policy.
        layers: The adapter's layers; empty if the whole base was trained.
        rounding: Format to which the base's 16-bit linears are rounded before the adapter is added, or None.
        scales: How block scales of `rounding` are chosen.
        dtype: The dtype of what is not packed.
    """

    tensors: FolderTensors
    model: transformer.Transformer
    layers: dict[str, Any]
    rounding: packed_formats.FolderFormat | None
    scales: config.BlockScales
    dtype: np.dtype

    @classmethod
    def of(
        cls,
        cfg: config.ModelConfig,
        folder: pathlib.Path,
        model: transformer.Transformer,
        params: dict[str, Any],
        base: Base | None,
        dtype: np.dtype,
    ) -> "_Sums":
        """Makes the sums for a choice of base; None for `pair`, which uses the base of the training."""
        tensors = FolderTensors(folder, model.arch)
        packed = cfg.weights not in config.DENSE and cfg.trainable != "full"
        rounded = tensors.source is None and packed and base != "original"
        rounding = packed_formats.named(cfg.weights) if rounded else None
        return cls(tensors, model, params.get("layers", {}), rounding, cfg.block_scales, dtype)

    @property
    def arch(self) -> architecture.Architecture:
        """The architecture, for the names of layers and tensors."""
        return self.tensors.arch

    @property
    def form(self) -> packed_formats.FolderFormat | None:
        """The format of the base's packed linears; None if none are packed."""
        return self.tensors.source or self.rounding

    @functools.cached_property
    def dense(self) -> frozenset[tuple[str, int]]:
        """The (linear, layer) pairs that a packed folder does not pack."""
        return frozenset((name, index) for name, at in self.tensors.dense_linears() for index in at)

    def packed(self, linear: str, index: int) -> list[Any] | None:
        """Returns the packed weights of a linear's parts, in the format `form`; None if they are not packed."""
        if (linear, index) in self.dense:
            return None
        names = self.arch.linear_names(linear, index)
        if self.tensors.source is not None:
            return [self.tensors.packed(name) for name in names]
        if self.rounding is None:
            return None
        weights = [self.tensors[f"{name}.weight"] for name in names]
        return self.rounding.numbers.pack(weights, self.scales)

    def weights(self, linear: str, index: int, packed: list[Any] | None) -> list[jax.Array]:
        """Returns the weights [N, K] of a linear's parts with the adapter added, float32 if there is an adapter.

        `packed` is the result of `packed`.
        """
        if packed is not None:
            weights = [self.form.numbers.unpack(part, jnp.float32) for part in packed]
        else:
            weights = self.tensors.weights(self.arch.linear_names(linear, index))
        if linear not in self.layers:
            return weights
        shape = lora.shapes(self.model.lora, self.arch)[linear]
        pairs = [self.layers[linear][part] for part, _ in self.arch.linears()[linear]]
        pairs = [
            (pair["a"][index], shape.scaled(pair["b"][index], part, index))
            for part, pair in enumerate(pairs)
        ]
        return _merge(weights, pairs, shape.factor)

    def norm(self, norm: str, index: int) -> Any:
        """Returns the scale of a layer's norm: the trained one if there is one."""
        if norm in self.layers:
            return self.layers[norm]["scale"][index]
        name, _ = self.arch.norms()[norm]
        return self.tensors[f"model.layers.{index}.{name}.weight"]

    def dense_base(self) -> Any:
        """Makes the `frozen` tree of the merged model in 16 bits, on the device."""
        norms = {
            f"model.layers.{index}.{name}.weight": self.norm(norm, index)
            for index in range(self.arch.num_layers)
            for norm, (name, _) in self.arch.norms().items()
        }

        def read(linear, names):
            index = int(names[0].split(".")[2])
            weights = self.weights(linear, index, self.packed(linear, index))
            return jnp.concatenate(weights).astype(self.dtype)

        tensors = collections.ChainMap(norms, self.tensors)
        return base_model.assemble(self.arch, tensors, self.dtype, read)


def _ways(
    sums: _Sums,
    probe: _Probe,
    trained: np.ndarray,
    bare: np.ndarray,
    exported: np.ndarray,
    to: Kind,
) -> dict[str, float]:
    """Computes KL(trained policy || served policy) for each way to serve it, in nats per token.

    `trained`, `bare` and `exported` are the log-probabilities of the trained policy, its base, and the written policy.
    """
    if not sums.layers:
        return {_MERGED_4: _mean_kl(trained, exported)}
    alone, beside = bare, trained
    if sums.model.weights in config.DENSE and sums.tensors.source is None:
        # The policy was trained on 16-bit weights, so the 4-bit base is another one.
        four = sums.model.clone(weights="nvfp4")
        frozen = base_model.read_base(sums.tensors.folder, four)
        params = {"layers": sums.layers}
        alone = probe.policy(four, frozen, params, adapter=False)
        beside = exported if to == "pair" else probe.policy(four, frozen, params)
        del frozen
    if to == "pair":
        return {_ALONE: _mean_kl(trained, alone), _BESIDE: _mean_kl(trained, exported)}
    in_16 = probe.policy(sums.model.clone(weights=str(sums.dtype), lora=None), sums.dense_base())
    ways = {_ALONE: alone, _BESIDE: beside, _MERGED_16: in_16, _MERGED_4: exported}
    return {way: _mean_kl(trained, policy) for way, policy in ways.items()}


def _write_pair(folder: pathlib.Path, out: pathlib.Path, sums: _Sums, probe: _Probe) -> np.ndarray:
    """Writes a packed base and the adapter; returns the log-probabilities of both as read back.

    Trained norms are written into the base: serving engines do not read norms from an adapter.
    """
    form = sums.form or packed_formats.named("nvfp4")
    pairs = {name: x for name, x in sums.layers.items() if name in sums.arch.linears()}
    norms = {name: x for name, x in sums.layers.items() if name not in pairs}
    base, adapter = folder / "base", folder / "adapter"
    base.mkdir()
    _write_model(base, dataclasses.replace(sums, layers=norms), form)
    without_norms = dataclasses.replace(sums.model.lora, train_norms=False)
    peft.export_adapter(adapter, {"layers": pairs}, without_norms, str(out.resolve() / "base"))
    written = sums.model.clone(weights=form.name, lora=peft.read_lora(adapter))
    frozen = base_model.read_base(base, written)
    return probe.policy(written, frozen, peft.import_adapter(adapter, written))


def _write_model(
    folder: pathlib.Path, sums: _Sums, form: packed_formats.FolderFormat | None
) -> None:
    """Writes a merged model layer by layer; linears are packed in `form`, all else is in 16 bits."""
    arch, tensors, dtype = sums.arch, sums.tensors, sums.dtype
    dense = [name for at in sorted(sums.dense) for name in arch.linear_names(*at)]

    def layer(index: int) -> dict[str, np.ndarray]:
        written = {}
        for norm, (name, _) in arch.norms().items():
            scale = np.asarray(sums.norm(norm, index), dtype)
            written[f"model.layers.{index}.{name}.weight"] = scale
        for name in arch.linear_names("qkv", index) if arch.qkv_bias else ():
            written[f"{name}.bias"] = np.asarray(tensors[f"{name}.bias"], dtype)
        for linear in arch.linears():
            names = arch.linear_names(linear, index)
            packed = sums.packed(linear, index)
            weights = sums.weights(linear, index, packed)
            if form is None or (linear, index) in sums.dense:
                files = [{"weight": np.asarray(weight.astype(dtype))} for weight in weights]
            else:
                if linear in sums.layers or packed is None or sums.form.name != form.name:
                    like = _like(form.numbers, packed)
                    packed = form.numbers.pack(weights, "search", like=like)
                files = map(form.write, jax.device_get(packed))
            for name, file in zip(names, files, strict=True):
                written |= {f"{name}.{suffix}": array for suffix, array in file.items()}
        return written

    hf_folder.fill_folder(
        folder,
        sums.tensors.folder,
        arch.num_layers,
        {name: tensors[name] for name in tensors if not name.startswith("model.layers.")},
        layer,
        kind=lambda index: frozenset(linear for linear, at in sums.dense if at == index),
        dtype=dtype,
        quantization_config=None if form is None else form.config_without(dense),
    )


def _like(form: NumberFormat, packed: list[Any] | None) -> list[Any] | None:
    """Returns the packed weights if the search for new scales may try theirs too, else None.

    They must have this format, and all parts must have the same global scale.
    """
    if packed is None or not isinstance(packed[0], form.tensor) or not form.has_global_scale:
        return None
    return packed if len({float(part.global_scale[0]) for part in packed}) == 1 else None


@jax.jit
def _merge(weights: list[jax.Array], pairs: list[tuple[jax.Array, jax.Array]], scaling: float):
    """Computes W + scaling * (A B)^T for each weight W [N, K], A [K, R] and B [R, N], in float32."""
    return [
        weight.astype(jnp.float32) + scaling * jnp.matmul(a, b, precision="highest").T
        for weight, (a, b) in zip(weights, pairs, strict=True)
    ]
