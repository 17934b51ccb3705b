"""Quantizes a 16-bit Hugging Face folder to 4 bits, layer by layer.

The folder is written as `<name>.partial`, with one file per layer, and renamed at the end. An interrupted job
continues after its last complete file. Host memory holds one layer and, with calibration, the hidden states of all
rows.
"""

import dataclasses
import fnmatch
import functools
import json
import pathlib
import resource
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import NumberFormat, runtime
from pallas_kernels.formats.number_format import Options, ScaleRounding
from qerl_jax.checkpoint import base_model, hf_folder, packed_formats, safetensors
from qerl_jax.checkpoint.folder_tensors import FolderTensors
from qerl_jax.checkpoint.packed_formats import FLOATS
from qerl_jax.config import BlockScales, PackedFormat
from qerl_jax.data import tokenizer
from qerl_jax.model import architecture, transformer
from qerl_jax.quantization import awq, gptq, sensitivity
from qerl_jax.quantization.calibration import (
    Calibration,
    HiddenStates,
    token_rows,
    worked_answers,
)
from qerl_jax.system.checked import require
from qerl_jax.system.files import Progress, read_json, writing

REPORT = "quantization_report.json"

# Number of problems on whose answers the divergence of the whole model is measured.
_ANSWERS = 16

_PROGRESS = "progress.jsonl"

Method = Literal["rtn", "awq", "gptq", "awq+gptq"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of a quantization.

    Attributes:
        format: Format of the packed linears; embedding, head, norms and biases stay as they are.
        method: "rtn" rounds to nearest; "awq" scales input channels; "gptq" lets later columns compensate the errors
            of earlier ones; "awq+gptq" does both in this order. All but "rtn" use calibration. See `awq` and `gptq`.
        block_scales: How block scales are chosen: "search" takes the scales with the smallest error, "maximum" the
            formula of other libraries, "auto" the choice that suits the format (`NumberFormat.pack`).
        scale_rounding: How MXFP4's scales are rounded: compressed-tensors' "nearest", or the OCP
            specification's "floor".
        double_quant: Whether NF4's scales are quantized too.
        calibration: The calibration data, for all methods except "rtn".
        keep: Linears to keep in 16 bits: names, or patterns with *, ? and [...], such as "model.layers.0.*" or
            "*.down_proj". If one matches, all linears that read the same input are kept.
    """

    format: PackedFormat = "nvfp4"
    method: Method = "rtn"
    block_scales: BlockScales = "auto"
    scale_rounding: ScaleRounding = "nearest"
    double_quant: bool = True
    calibration: Calibration = Calibration()
    keep: tuple[str, ...] = ()


# Fused linears that stay in 16 bits, as (fused linear, layer) pairs.
type DenseLinears = frozenset[tuple[str, int]]


def kept_linears(arch: architecture.Architecture, patterns: Sequence[str]) -> DenseLinears:
    """Returns the fused linears that patterns match, as (fused linear, layer) pairs.

    A fused linear is included if a pattern matches one of its parts.

    Raises:
        ValueError: If a pattern matches no linear.
    """
    names = {
        (linear, index): arch.linear_names(linear, index)
        for linear in arch.linears()
        for index in range(arch.num_layers)
    }
    first, last = names["qkv", 0][0], names["down", arch.num_layers - 1][0]
    rule, all_matches = f"names no linear; they are called {first} to {last}", set()
    for pattern in patterns:
        matches = {at for at, parts in names.items() if fnmatch.filter(parts, pattern)}
        require(bool(matches), "keep", pattern, rule)
        all_matches |= matches
    return frozenset(all_matches)


def expected_size(
    arch: architecture.Architecture,
    form: packed_formats.FolderFormat,
    in_16_bits: DenseLinears = frozenset(),
) -> int:
    """Returns the bytes of a quantized folder's tensors; those that are not packed count 16 bits per number."""
    dense, packed = arch.num_parameters(), 0
    for linear, parts in arch.linears().items():
        layers = arch.num_layers - sum(name == linear for name, _ in in_16_bits)
        shapes = [(n, arch.input_width(linear)) for _, n in parts]
        dense -= layers * sum(n * k for n, k in shapes)
        packed += layers * sum(form.nbytes(n, k) for n, k in shapes)
    return 2 * dense + packed


@dataclasses.dataclass(frozen=True)
class _Job:
    """A folder that is being written: one file for the tensors outside of layers, then one per layer.

    Attributes:
        source: The 16-bit folder.
        target: Path of the finished folder.
        arch: The architecture, which determines layers and tensors.
        form: Format of the packed linears.
        in_16_bits: Linears that stay in 16 bits.
        progress: `tensors`, `bytes` and `errors` of each complete file, and the `seconds` until it was complete.
    """

    source: pathlib.Path
    target: pathlib.Path
    arch: architecture.Architecture
    form: packed_formats.FolderFormat
    in_16_bits: DenseLinears
    progress: Progress

    @property
    def folder(self) -> pathlib.Path:
        """The folder that holds the files until the job is finished."""
        return self.progress.path.parent

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors written so far."""
        return sum(file["bytes"] for file in self.progress.values)

    def file(self, number: int) -> str:
        """Returns the name of a file without its ending."""
        return f"model-{number + 1:05d}-of-{self.arch.num_layers + 1:05d}"

    def write(self, tensors: dict[str, Any], errors: dict, seconds: float) -> None:
        """Writes the next file and records it in `progress`."""
        path = self.folder / f"{self.file(len(self.progress.values))}.safetensors"
        safetensors.write(path, tensors)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        file = {"tensors": list(tensors), "bytes": nbytes, "errors": errors, "seconds": seconds}
        self.progress.add([file])


def quantize(
    source: str,
    target: str | pathlib.Path,
    recipe: Recipe,
    log: Callable[[str], None],
    move: Callable[[float], None] = lambda share: None,
    *,
    with_sensitivity: bool = True,
) -> dict[str, Any]:
    """Writes the quantized folder of a model.

    Besides the weights the folder holds config.json with `quantization_config`, the source's tokenizer and generation
    config, and quantization_report.json. The report has size, time and peak memory, and for each fused linear of each
    layer the relative error of its weights. Its `kl` is KL(16 bit || packed) of the whole model on worked answers to
    procedural problems, in nats per token; null if there is no tokenizer that encodes them. With calibration, the report
    also has for each fused linear the relative error of its outputs, and the KL divergence of the whole model if only
    this linear is packed (`sensitivity`).

    Args:
        source: A 16-bit folder, or a hub name.
        target: The new folder; must not exist, or be empty.
        recipe: The format and the method.
        log: Called with a line for every layer.
        move: Called with the fraction of the job that is done, several times per layer.
        with_sensitivity: Whether a calibration also measures the divergence for each linear.

    Returns:
        The report.

    Raises:
        FileNotFoundError: If the source cannot be found.
        FileExistsError: If the target holds other files, or an unfinished job with other settings.
        Busy: If another process quantizes into the target.
        ValueError: If the source is already quantized, cannot be packed, or will not fit on the disk.
    """
    job = _open(hf_folder.local_folder(source), pathlib.Path(target).resolve(), recipe, log)
    with job.progress, writing(job.folder):
        return _quantize(job, recipe, log, move, with_sensitivity=with_sensitivity)


def _quantize(
    job: _Job,
    recipe: Recipe,
    log: Callable[[str], None],
    move: Callable[[float], None],
    *,
    with_sensitivity: bool,
) -> dict[str, Any]:
    arch, done = job.arch, job.progress.values
    size, free = expected_size(arch, job.form, job.in_16_bits), shutil.disk_usage(job.folder).free
    rule = f"needs {size / 1e9:.1f} GB; the disk has {free / 1e9:.1f} GB"
    require(free + job.nbytes >= size, "target", str(job.target), rule)
    written, earlier = max(0, len(done) - 1), done[-1]["seconds"] if done else 0.0
    if written:
        log(f"going on after {written} of {arch.num_layers} layers: {job.folder}")
    states = probe = None
    if recipe.method != "rtn":
        states = _hidden_states(job.source, arch, recipe.calibration, log)
        if with_sensitivity:
            probe = sensitivity.Sensitivities(states.model, *states.sample(), job.folder)
    whole = _divergence(job, log)

    start = time.monotonic()
    passed = lambda: time.monotonic() - start
    if not done:
        tensors = FolderTensors(job.source, arch)
        outside = [name for name in tensors if not name.startswith("model.layers.")]
        content = {name: np.asarray(tensors[name], tensors.stored_dtype(name)) for name in outside}
        job.write(content, {}, passed())
    for index in range(arch.num_layers):
        number = index + 1
        if index >= written:
            within = lambda share, index=index: move((index + share) / arch.num_layers)
            tensors, errors = _quantized_layer(job, recipe, index, states, probe, within)
            if probe is not None:
                probe.save(index)
            job.write(tensors, {"layer": index} | errors, earlier + passed())
            log(_line(errors, number, arch.num_layers, passed() / (number - written)))
        elif probe is not None:
            probe.restore(index)
        if probe is not None:
            probe.advance(index, _layer(states.model, _stored(job, index), index))
        if states is not None and number < arch.num_layers:
            written_layer = safetensors.Tensors(job.folder, job.file(number))
            states.advance(_layer(states.model, written_layer, index, job.form))
        if whole is not None:
            model, packed = whole.model, safetensors.Tensors(job.folder, job.file(number))
            dense = _layer(model, _stored(job, index), index)
            whole.advance(dense, _layer(model, packed, index, job.form))
        move(number / arch.num_layers)
    divergences = probe.divergences(*_ends(job)) if probe is not None else {}
    kl = None if whole is None else whole.mean(*_ends(job))
    if kl is not None:
        log(
            f"KL(16 bit || {recipe.format}) is {kl:.2g} a token, the mean of {whole.tokens} of worked answers"
        )
    report = _finish(job, divergences, kl)
    if probe is not None:
        for text in sensitivity.table(arch, divergences, probe.tokens):
            log(text)
    peak = report["peak_device_bytes"]
    on_device = "" if peak is None else f", device memory {peak / 1e9:.1f} GB"
    log(
        f"{_size(report['bytes'])}, from {_size(report['source_bytes'])}, in {job.target}: "
        f"{report['seconds']:.0f} s, peak host memory {report['peak_host_bytes'] / 1e9:.1f} GB{on_device}"
    )
    return report


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"


def _open(
    source: pathlib.Path, target: pathlib.Path, recipe: Recipe, log: Callable[[str], None]
) -> _Job:
    """Checks that the source can be quantized into the target, and opens the job, with files of an earlier call."""
    options = Options(recipe.scale_rounding, recipe.double_quant)
    form = packed_formats.named(recipe.format, options)
    tensors = FolderTensors(source)
    arch, is_dense = tensors.arch, tensors.source is None
    require(is_dense, "source", str(source), "is quantized already; 16-bit weights are needed")
    in_16_bits = kept_linears(arch, recipe.keep)
    form.check(arch)
    for line in tensors.check():
        log(line)
    hf_folder.require_new(target, "target")
    files = [path for path in sorted(source.iterdir()) if path.suffix in (".safetensors", ".gguf")]
    sizes = {path.name: path.stat().st_size for path in files}
    settings = {"source": str(source.resolve()), "sizes": sizes, **dataclasses.asdict(recipe)}
    folder = target.with_name(f"{target.name}.partial")
    path = folder / _PROGRESS
    if folder.exists() and any(folder.iterdir()) and not path.is_file():
        raise FileExistsError(f"{folder}: holds files, but no unfinished job: choose another name")
    refusal = "{folder}: holds an unfinished job with other settings: remove it first"
    try:
        progress = Progress(path, settings, refusal=refusal)
    except ValueError as error:
        raise FileExistsError(str(error)) from error
    return _Job(source, target, arch, form, in_16_bits, progress)


def _quantized_layer(
    job: _Job,
    recipe: Recipe,
    index: int,
    states: HiddenStates | None,
    probe: sensitivity.Sensitivities | None,
    move: Callable[[float], None],
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the packed tensors of a layer, and the errors of its weights and, with calibration, of its outputs."""
    form, scales, tensors = job.form.numbers, recipe.block_scales, _stored(job, index)
    dtype_of = FolderTensors(job.source, job.arch).stored_dtype
    packed: dict[str, list[Any]] = {}
    grams: dict[str, jax.Array] = {}
    outputs: dict[str, tuple[float, float]] = {}
    if states is not None:
        seen = states.observe(_layer(states.model, tensors, index))
        move(0.2)
        if "awq" in recipe.method:
            dense = [linear for linear, at in job.in_16_bits if at == index]
            prefix, with_grams = f"model.layers.{index}.", "gptq" in recipe.method
            folded = awq.fold(
                job.arch, form, scales, tensors, prefix, seen, dense, with_grams=with_grams
            )
            tensors, packed, grams = folded.tensors, folded.packed, folded.grams
            outputs = folded.errors
        else:
            grams = {linear: inputs.gram for linear, inputs in seen.items()}
    if probe is not None:
        layer = _layer(states.model, tensors, index)
    written, errors = dict(tensors), {}
    for position, linear in enumerate(job.arch.linears()):
        move(0.4 + 0.1 * position)
        names = job.arch.linear_names(linear, index)
        weights = [jnp.asarray(written.pop(f"{name}.weight")) for name in names]
        if (linear, index) in job.in_16_bits:
            for name, weight in zip(names, weights, strict=True):
                written[f"{name}.weight"] = np.asarray(weight, dtype_of(f"{name}.weight"))
            continue
        if "gptq" in recipe.method:
            before = packed.pop(linear, None)
            gram = grams.pop(linear)
            parts, relative_errors = gptq.pack(form, scales, weights, gram, before)
            del gram
            nearest = outputs.get(linear, relative_errors)[0]
            outputs[linear] = float(nearest), float(relative_errors[1])
        else:
            grams.pop(linear, None)
            parts = packed.pop(linear, None) or form.pack(weights, scales)
        errors[linear] = float(_weight_error(form, weights, parts))
        if probe is not None:
            dtype = states.model.dtype
            unpacked = jnp.concatenate([form.unpack(part, dtype) for part in parts])
            probe.add(linear, layer, unpacked)
        for name, part in zip(names, jax.device_get(parts), strict=True):
            written |= {f"{name}.{suffix}": array for suffix, array in job.form.write(part).items()}
    errors_by_kind = {"weights": errors, "outputs": outputs}
    return written, {name: values for name, values in errors_by_kind.items() if values}


@functools.partial(jax.jit, static_argnums=0)
def _weight_error(form: NumberFormat, weights: list[jax.Array], packed: list[Any]):
    """Computes the relative error of packed weights that read the same input."""
    off = whole = 0.0
    for weight, part in zip(weights, packed, strict=True):
        weight = weight.astype(jnp.float32)
        off += jnp.sum((form.unpack(part, jnp.float32) - weight) ** 2)
        whole += jnp.sum(weight**2)
    return jnp.sqrt(off / jnp.where(whole == 0, 1, whole))


def _finish(
    job: _Job, divergences: dict[tuple[int, str], float], kl: float | None
) -> dict[str, Any]:
    """Writes all files except the weights, moves the folder to its target, and returns the report."""
    hf_folder.copy_companions(job.source, job.folder)
    files, settings = job.progress.values, job.progress.identity
    weight_map = {
        name: f"{job.file(number)}.safetensors"
        for number, file in enumerate(files)
        for name in file["tensors"]
    }
    of_layers = [dict(file["errors"]) for file in files[1:]]
    for (index, linear), kl in divergences.items():
        of_layers[index].setdefault("divergence", {})[linear] = kl
    report = {
        "settings": settings,
        "bytes": job.nbytes,
        "source_bytes": sum(settings["sizes"].values()),
        "seconds": files[-1]["seconds"],
        "kl": kl,
        "peak_device_bytes": (runtime.memory_stats() or {}).get("peak_bytes_in_use"),
        "peak_host_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "layers": of_layers,
    }
    names = [name for at in sorted(job.in_16_bits) for name in job.arch.linear_names(*at)]
    quantization = job.form.config_without(names)
    config = read_json(job.source / "config.json") | {"quantization_config": quantization}
    hf_folder.state_head(config, has_head=not job.arch.tie_word_embeddings)
    index = {"metadata": {"total_size": job.nbytes}, "weight_map": weight_map}
    contents = {"model.safetensors.index.json": index, "config.json": config, REPORT: report}
    for name, content in contents.items():
        (job.folder / name).write_text(json.dumps(content, indent=2) + "\n")
    job.folder.replace(job.target)
    for path in (job.target / _PROGRESS, *job.target.glob("sensitivity-*.safetensors")):
        path.unlink()
    return report


def _hidden_states(
    folder: pathlib.Path,
    arch: architecture.Architecture,
    cfg: Calibration,
    log: Callable[[str], None],
) -> HiddenStates:
    ids, lengths = token_rows(cfg, tokenizer.load(folder).fitted(arch.vocab_size, "tokenizer"))
    log(f"calibrating on {len(ids)} rows of {cfg.dataset}, {lengths.sum()} tokens")
    return HiddenStates(*_dense(folder, arch), ids, lengths)


def _divergence(job: _Job, log: Callable[[str], None]) -> sensitivity.Divergence | None:
    """Begins to measure the divergence of the whole model; None, with a line, if its tokenizer cannot be used."""
    try:
        tokens = tokenizer.load(job.source).fitted(job.arch.vocab_size, "tokenizer")
        ids, live = worked_answers(_ANSWERS, tokens)
    except (OSError, ValueError) as error:
        log(f"KL(16 bit || packed) is not measured: {error}")
        return None
    model, embedding = _dense(job.source, job.arch)
    return sensitivity.Divergence(model, jnp.asarray(embedding[ids], model.dtype), live)


def _dense(
    folder: pathlib.Path, arch: architecture.Architecture
) -> tuple[transformer.Transformer, np.ndarray]:
    """Returns a dense model that runs layers, and the embedding."""
    dtype = "bfloat16" if runtime.platform() == "gpu" else "float32"
    embedding = np.asarray(FolderTensors(folder, arch)["model.embed_tokens.weight"])
    return transformer.Transformer(arch, dtype, None, jnp.dtype(dtype)), embedding


def _layer(
    model: transformer.Transformer,
    tensors: Mapping[str, Any],
    index: int,
    form: packed_formats.FolderFormat | None = None,
) -> dict[str, Any]:
    """Makes the dense tree of a layer for calibration, from its tensors in 16 bits, or packed in `form`."""

    def weight(name):
        if form is None or f"{name}.weight" in tensors and tensors.type(f"{name}.weight") in FLOATS:
            return jnp.asarray(tensors[f"{name}.weight"])
        return form.numbers.unpack(form.read(tensors, name), model.dtype)

    def read(_, names):
        return jnp.concatenate(list(map(weight, names))).astype(model.dtype)

    return base_model.read_layer(model.arch, tensors, f"model.layers.{index}.", model.dtype, read)


def _stored(job: _Job, index: int) -> dict[str, jax.Array]:
    """Returns a layer's tensors; opening the source again releases the mapped memory of the last layer."""
    tensors, prefix = FolderTensors(job.source, job.arch), f"model.layers.{index}."
    return {name: tensors[name] for name in tensors if name.startswith(prefix)}


def _ends(job: _Job) -> tuple[jax.Array, jax.Array]:
    """Returns the scale [D] of the last norm, and the matrix [V, D] of the LM head."""
    tensors, tied = FolderTensors(job.source, job.arch), job.arch.tie_word_embeddings
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    return tensors["model.norm.weight"], head


def _line(errors: dict[str, Any], number: int, total: int, seconds: float) -> str:
    weight_errors = errors.get("weights", {})  # none where all linears of the layer stay in 16 bits
    weights = "  ".join(f"{linear} {error:.4f}" for linear, error in weight_errors.items())
    outputs = "  ".join(
        f"{linear} {searched:.4f} (rtn {nearest:.4f})"
        for linear, (nearest, searched) in errors.get("outputs", {}).items()
    )
    minutes, rest = divmod(round(seconds * (total - number)), 60)
    return (
        f"layer {number}/{total}  error of weights: {weights or 'none'}"
        + (f"  of outputs: {outputs}" if outputs else "")
        + f"  {seconds:.1f} s a layer, {minutes}:{rest:02d} left"
    )
