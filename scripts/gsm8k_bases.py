"""The bases of the study on Qwen2.5: what is made of the 16-bit weights, as folders, and what a base is called.

Formats without fast kernels, and the controls, are dequantized to bfloat16, so that all arms in 16 bits run the same
programs and differ by their weights only. Static noise has in each block of 16 weights the size that the error of
rounding this block to NVFP4 has.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import qerl_jax
from pallas_kernels import FORMATS
from qerl_jax.checkpoint import gguf, hf_folder
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.config import ModelConfig
from qerl_jax.data.tokenizer import Message
from qerl_jax.quantization import quantizer
from qerl_jax.quantization.calibration import Calibration
from qerl_jax.system.checked import require
from qerl_jax.system.files import lock, write_whole

# The format whose rounding a folder holds.
_ROUNDED = {"nvfp4-16": "nvfp4", "nf4": "nf4", "mxfp4": "mxfp4"}
# GPTQ is calibrated on the policy's own answers to this many questions that are not of the task.
_CALIBRATED, _MAX_LENGTH = 128, 768
# Between these lies the relative error of any sensible rounding to 4 bits.
_LEAST, _MOST = 0.03, 0.3
# llama.cpp's numbers of the types of whole files.
_FILE_TYPES = {0: "float32", 1: "float16", 7: "Q8_0", 8: "Q5_0", 15: "Q4_K_M", 17: "Q5_K_M", 32: "bfloat16"}  # fmt: skip


def path_of(
    base: str,
    source: str,
    work: pathlib.Path,
    questions: Sequence[Sequence[Message]],
    answers: pathlib.Path,
    max_tokens: int = _MAX_LENGTH,
) -> str:
    """Returns where a base is, and makes its folder first if it is missing; several processes may ask at once.

    Args:
        base: A name, such as "16" or "noise-3" (`gsm8k_arms.BASES`).
        source: Folder or GGUF file of the 16-bit weights.
        work: Folder of what is made.
        questions: Chats that GPTQ is calibrated on, with the policy's own answers.
        answers: File of these answers, written if it is missing; outside of `work`, so that all machines have the same.
        max_tokens: Longest of these answers.
    """
    if base in ("16", "nvfp4"):
        return source
    folder = work / "bases" / base
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as file:
        lock(file, wait=True)
        if folder.is_dir():
            pass
        elif base == "gptq":
            if not answers.is_file():
                _answer(source, questions[:_CALIBRATED], answers, max_tokens)
            _calibrated(source, folder, answers)
        else:
            _changed(base, source, folder)
    return str(folder)


def _changed(base: str, source: str, folder: pathlib.Path) -> None:
    """Writes a folder in bfloat16 with rounded linears, or with static noise ("noise-SEED")."""
    model, frozen, _ = load_base(ModelConfig(source, weights="bfloat16"), None)
    form = FORMATS[_ROUNDED.get(base, "nvfp4")]
    name, _, seed = base.rpartition("-")
    key = jax.random.key(int(seed)) if name == "noise" else None
    layers = dict(frozen["layers"])
    for number, (linear, parts) in enumerate(model.arch.linears().items()):
        sizes = tuple(size for _, size in parts)
        of_linear = None if key is None else jax.random.fold_in(key, number)
        change = functools.partial(changed, form, sizes, key=of_linear)
        layers[linear] = layers[linear] | {"weight": change(layers[linear]["weight"])}
    hf_folder.export_model(
        folder, model, frozen | {"layers": layers}, hf_folder.local_folder(source)
    )


def changed(
    form: Any, sizes: Sequence[int], weights: jax.Array, *, key: jax.Array | None = None
) -> jax.Array:
    """Returns the weights of a fused linear in all layers, rounded to nearest; with a key, with noise of that size.

    Args:
        form: The format.
        sizes: The rows of the parts of the linear.
        weights: [L, N, K].
        key: Noise is normal, with a standard deviation for each block of the format: the root mean square of the error
            of rounding the block.
    """
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes) - 1)]
    layers = []
    for number, weight in enumerate(weights):
        packed = form.pack(jnp.split(weight, ends))
        rounded = jnp.concatenate([form.unpack(part, jnp.float32) for part in packed])
        if key is not None:
            exact = weight.astype(jnp.float32)
            blocks = (rounded - exact).reshape(len(exact), -1, form.group)
            size = jnp.sqrt(jnp.mean(jnp.square(blocks), axis=-1, keepdims=True))
            draw = jax.random.normal(jax.random.fold_in(key, number), blocks.shape)
            rounded = exact + (size * draw).reshape(exact.shape)
        error = float(jnp.linalg.norm(rounded - weight) / jnp.linalg.norm(weight))
        rule = "must be near .1: the weights on the device are wrong; start again"
        require(_LEAST < error < _MOST, f"relative error of layer {number}", error, rule)
        layers.append(rounded.astype(weight.dtype))
    return jnp.stack(layers)


def _answer(
    source: str, questions: Sequence[Sequence[Message]], path: pathlib.Path, max_tokens: int
) -> None:
    """Writes questions with the policy's answers, a chat on each line."""
    policy = qerl_jax.load(source, weights="bfloat16", quiet=True)
    outputs = policy.generate(
        list(questions), temperature=0.6, top_p=0.95, max_tokens=max_tokens, seed=0
    )
    rows = [
        {"messages": [*output.prompt, {"role": "assistant", "content": output.text}]}
        for output in outputs
    ]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def _calibrated(source: str, folder: pathlib.Path, answers: pathlib.Path) -> None:
    """Writes an NVFP4 folder with GPTQ and searched scales."""
    rows = Calibration(str(answers), _CALIBRATED, _MAX_LENGTH, 0)
    recipe = quantizer.Recipe("nvfp4", "gptq", "search", "nearest", True, rows, ())
    log = lambda text: print(text, flush=True)
    quantizer.quantize(source, folder, recipe, log, with_sensitivity=False)


@functools.cache
def describe(source: str) -> dict[str, str]:
    """What the 16-bit weights are: the first 16 digits of the SHA-256 of the file, or of all weight files, and a name."""
    path = pathlib.Path(source)
    files = (
        [path] if path.is_file() else sorted(hf_folder.local_folder(source).glob("*.safetensors"))
    )
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            while chunk := content.read(1 << 24):
                total.update(chunk)
    what = "16-bit folder"
    if path.suffix == ".gguf":
        kind = gguf.read_header(path).fields.get("general.file_type")
        what = f"dequantized {_FILE_TYPES.get(kind, f'GGUF of type {kind}')}"
    return {"base": total.hexdigest()[:16], "what": what}
