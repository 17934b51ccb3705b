"""A 16-bit Hugging Face folder -> a 4-bit one, layer by layer.

The folder is written beside its place, `<name>.partial`, one file for each layer, and renamed at the
end. A job that was stopped goes on after the last whole file. Host memory holds one layer, and with
calibration the hidden states of its rows.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import resource
import shutil
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mxfp4, runtime
from qerl_jax.checkpoint import base_model, hf_folder, packed_formats, safetensors
from qerl_jax.checkpoint.packed_formats import Format
from qerl_jax.checkpoint.safetensors import Tensors
from qerl_jax.data import tokenizer
from qerl_jax.files import write_whole
from qerl_jax.model import architecture
from qerl_jax.model.architecture import PARENT, Architecture
from qerl_jax.model.transformer import Transformer
from qerl_jax.quantization import awq, calibration
from qerl_jax.quantization.calibration import Calibration, HiddenStates

REPORT = "quantization_report.json"

_PROGRESS = "progress.json"
_KEPT = (".json", ".txt", ".jinja", ".model")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a folder is quantized.

    Attributes:
        format: What linears are packed to; embedding, head, norms and biases stay as they are.
        method: "rtn" rounds to nearest; "awq" scales inputs by what calibration shows; see `awq`.
        scale_rounding: Of MXFP4's scales: compressed-tensors' "nearest", or the OCP
            specification's "floor".
        double_quant: Whether NF4's scales are quantized too.
        calibration: For "awq".
    """

    format: Literal["nvfp4", "mxfp4", "nf4"] = "nvfp4"
    method: Literal["rtn", "awq"] = "rtn"
    scale_rounding: mxfp4.Rounding = "nearest"
    double_quant: bool = True
    calibration: Calibration = Calibration()


def expected_size(arch: Architecture, form: Format, itemsize: int = 2) -> int:
    """Bytes of a quantized folder's tensors.

    Args:
        arch: Says what there is.
        form: Of the linears.
        itemsize: Bytes of an entry of what is not packed.
    """
    shapes = [
        (n, arch.input_width(linear)) for linear, parts in arch.linears().items() for _, n in parts
    ]
    dense = arch.num_parameters() - arch.num_layers * sum(n * k for n, k in shapes)
    return itemsize * dense + arch.num_layers * sum(form.nbytes(n, k) for n, k in shapes)


def quantize(
    source: str, target: str | pathlib.Path, recipe: Recipe, say: Callable[[str], None]
) -> dict[str, Any]:
    """Writes the quantized folder of a model.

    Beside the weights it holds config.json with `quantization_config`, the source's tokenizer and
    generation config, and quantization_report.json: size, time, peak host memory, and for each
    layer the relative error of its weights and, with calibration, of their outputs.

    Args:
        source: A 16-bit folder, or a name of the hub.
        target: Does not exist, or is empty.
        recipe: How.
        say: Takes lines about the progress.

    Returns:
        The report.

    Raises:
        FileExistsError: When the target holds something, or what is left of a job that differs.
        ValueError: When the source is quantized already, cannot be packed, or will not fit on disk.
    """
    folder, target = hf_folder.local_folder(source), pathlib.Path(target).resolve()
    form = packed_formats.named(
        recipe.format, scale_rounding=recipe.scale_rounding, double_quant=recipe.double_quant
    )
    arch, config = architecture.load(folder), json.loads((folder / "config.json").read_text())
    if packed_formats.of_folder(folder) is not None:
        raise ValueError(f"{folder}: is quantized already; 16-bit weights are needed")
    form.check(arch)
    base_model.check_names(arch, Tensors(folder), None)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target}: exists; give the name of a new folder")

    job = _Job(folder, target, recipe, arch.num_layers)
    size, free = expected_size(arch, form), shutil.disk_usage(job.partial).free
    if free + job.nbytes < size:
        raise ValueError(f"{target}: needs {size / 1e9:.1f} GB; the disk has {free / 1e9:.1f} GB")
    if job.num_layers:
        say(f"going on after {job.num_layers} of {arch.num_layers} layers: {job.partial}")
    states = None
    if recipe.method == "awq":
        states = _hidden_states(folder, arch, recipe.calibration, say)

    start, earlier, done = time.monotonic(), job.seconds, job.num_layers
    passed = lambda: time.monotonic() - start
    if 0 not in job:
        job.write(0, _outside(Tensors(folder)), {}, passed())
    for index in range(arch.num_layers):
        # Opened anew for each layer: what was mapped of the last one is let go.
        prefix, number = f"model.layers.{index}.", index + 1
        if number not in job:
            tensors, errors = _under(Tensors(folder), prefix), {}
            if states is not None:
                seen = states.observe(_dense(arch, tensors, prefix))
                folded = awq.fold(arch, form, tensors, prefix, seen)
                tensors, errors["outputs"] = folded.tensors, folded.errors
            tensors, errors["weights"] = _packed(arch, form, tensors, prefix)
            job.write(number, tensors, {"layer": index} | errors, earlier + passed())
            say(_line(errors, number, arch.num_layers, passed() / (number - done)))
        if states is not None and number < arch.num_layers:
            states.advance(_unpacked(arch, form, job.open(number), prefix))
    report = job.finish(config | {"quantization_config": form.config})
    say(
        f"{report['bytes'] / 1e9:.2f} GB, from {report['source_bytes'] / 1e9:.2f} GB, in {target}: "
        f"{report['seconds']:.0f} s, peak host memory {report['peak_host_bytes'] / 1e9:.1f} GB"
    )
    return report


def _outside(tensors: Tensors) -> dict[str, np.ndarray]:
    return {name: tensors[name] for name in tensors if not name.startswith("model.layers.")}


def _under(tensors: Tensors, prefix: str) -> dict[str, np.ndarray]:
    return {name: tensors[name] for name in tensors if name.startswith(prefix)}


def _packed(
    arch: Architecture, form: Format, tensors: dict[str, Any], prefix: str
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """A layer's tensors with packed linears, and the relative error of each fused linear's weights."""
    written, errors = dict(tensors), {}
    for linear, parts in arch.linears().items():
        names = [f"{prefix}{PARENT[linear]}.{part}" for part, _ in parts]
        packed, error = _pack(form, [jnp.asarray(written.pop(f"{name}.weight")) for name in names])
        errors[linear] = float(error)
        for name, part in zip(names, packed, strict=True):
            written |= {f"{name}.{suffix}": array for suffix, array in form.write(part).items()}
    return written, errors


@functools.partial(jax.jit, static_argnums=0)
def _pack(form: Format, weights: list[jax.Array]):
    packed = form.pack(weights)
    off = whole = 0.0
    for weight, part in zip(weights, packed, strict=True):
        weight = weight.astype(jnp.float32)
        off += jnp.sum((form.unpack(part, jnp.float32) - weight) ** 2)
        whole += jnp.sum(weight**2)
    return packed, jnp.sqrt(off / jnp.where(whole == 0, 1, whole))


def _calibration_dtype() -> str:
    return "bfloat16" if runtime.platform() == "gpu" else "float32"


def _hidden_states(
    folder: pathlib.Path, arch: Architecture, cfg: Calibration, say: Callable[[str], None]
) -> HiddenStates:
    ids, lengths = calibration.token_rows(cfg, tokenizer.load(folder))
    say(f"calibrating on {len(ids)} rows of {cfg.dataset}, {lengths.sum()} tokens")
    model = Transformer(arch, _calibration_dtype(), None, jnp.dtype(_calibration_dtype()))
    return HiddenStates(model, Tensors(folder)["model.embed_tokens.weight"], ids, lengths)


def _dense(arch: Architecture, tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    def read(_, names):
        weights = [jnp.asarray(tensors[f"{name}.weight"]) for name in names]
        return jnp.concatenate(weights).astype(_calibration_dtype())

    return base_model.read_layer(arch, tensors, prefix, _calibration_dtype(), read)


def _unpacked(arch: Architecture, form: Format, tensors: Tensors, prefix: str) -> dict[str, Any]:
    def read(_, names):
        parts = [jax.tree.map(jnp.asarray, form.read(tensors, name)) for name in names]
        return _unpack(form, parts)

    return base_model.read_layer(arch, tensors, prefix, _calibration_dtype(), read)


@functools.partial(jax.jit, static_argnums=0)
def _unpack(form: Format, parts: list[Any]) -> jax.Array:
    return jnp.concatenate([form.unpack(part, _calibration_dtype()) for part in parts])


def _line(errors: dict[str, Any], number: int, total: int, seconds: float) -> str:
    weights = "  ".join(f"{linear} {error:.4f}" for linear, error in errors["weights"].items())
    outputs = "  ".join(
        f"{linear} {found:.4f} (rtn {nearest:.4f})"
        for linear, (nearest, found) in errors.get("outputs", {}).items()
    )
    minutes, rest = divmod(round(seconds * (total - number)), 60)
    return (
        f"layer {number}/{total}  error of weights: {weights}"
        + (f"  of outputs: {outputs}" if outputs else "")
        + f"  {seconds:.1f} s a layer, {minutes}:{rest:02d} left"
    )


class _Job:
    """The folder in the making: a file for each layer, and progress.json, which names those that are whole."""

    def __init__(self, source: pathlib.Path, target: pathlib.Path, recipe: Recipe, num_layers: int):
        self.source, self.target, self._num_files = source, target, num_layers + 1
        self.partial = target.with_name(f"{target.name}.partial")
        sizes = {path.name: path.stat().st_size for path in sorted(source.glob("*.safetensors"))}
        settings = {"source": str(source.resolve()), "sizes": sizes, **dataclasses.asdict(recipe)}
        self._state: dict[str, Any] = {"settings": settings, "files": {}}
        if (self.partial / _PROGRESS).is_file():
            left = json.loads((self.partial / _PROGRESS).read_text())
            if left["files"] and left["settings"] != settings:
                raise FileExistsError(
                    f"{self.partial}: is what a job with other settings left; delete it first"
                )
            self._state["files"] = left["files"]
        elif self.partial.exists() and any(self.partial.iterdir()):
            raise FileExistsError(f"{self.partial}: holds something that is no unfinished job")
        self.partial.mkdir(parents=True, exist_ok=True)
        write_whole(self.partial / _PROGRESS, json.dumps(self._state))

    @property
    def _files(self) -> dict[str, Any]:
        return self._state["files"]

    def __contains__(self, number: int) -> bool:
        return str(number) in self._files

    @property
    def num_layers(self) -> int:
        """How many layers are written."""
        return max(0, len(self._files) - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are written."""
        return sum(file["bytes"] for file in self._files.values())

    @property
    def seconds(self) -> float:
        """Time that they took."""
        return max([file["seconds"] for file in self._files.values()], default=0.0)

    def open(self, number: int) -> Tensors:
        return Tensors(self.partial, self._stem(number))

    def write(self, number: int, tensors: dict[str, Any], errors: dict, seconds: float) -> None:
        safetensors.write(self.partial / f"{self._stem(number)}.safetensors", tensors)
        self._files[str(number)] = {
            "tensors": list(tensors),
            "bytes": sum(tensor.nbytes for tensor in tensors.values()),
            "errors": errors,
            "seconds": seconds,
        }
        write_whole(self.partial / _PROGRESS, json.dumps(self._state))

    def finish(self, config: dict[str, Any]) -> dict[str, Any]:
        """Adds what a folder has beside its weights, and puts it in its place."""
        for path in self.source.iterdir():
            if path.suffix in _KEPT and not path.name.endswith(".index.json"):
                shutil.copyfile(path, self.partial / path.name)
        weight_map = {
            name: f"{self._stem(number)}.safetensors"
            for number in range(self._num_files)
            for name in self._files[str(number)]["tensors"]
        }
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
        report = {
            "settings": self._state["settings"],
            "bytes": self.nbytes,
            "source_bytes": sum(self._state["settings"]["sizes"].values()),
            "seconds": self.seconds,
            "peak_host_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "layers": [self._files[str(number)]["errors"] for number in range(1, self._num_files)],
        }
        for name, content in (
            ("model.safetensors.index.json", index),
            ("config.json", config),
            (REPORT, report),
        ):
            (self.partial / name).write_text(json.dumps(content, indent=2) + "\n")
        if self.target.exists():
            self.target.rmdir()
        os.replace(self.partial, self.target)
        (self.target / _PROGRESS).unlink()
        return report

    def _stem(self, number: int) -> str:
        return f"model-{number + 1:05d}-of-{self._num_files:05d}"
