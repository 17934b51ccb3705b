"""Measures time and device memory of quantizing: `python -m scripts.bench_quantize [--model qwen2.5-7b]`.

Writes random bfloat16 weights in the shape of a published model (only its first layers) into a temporary folder. Then
it times a layer in several ways, each in its own process: loaded as a base, with and without searched scales; and
quantized with round-to-nearest, with AWQ, with GPTQ, and with both. It prints a JSON line for each. `seconds` is for
all layers, scaled up from the layers that were made (`scaled_from_layers`). On a CPU, `--model tiny` shows that the
script runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import runtime
from qerl_jax.checkpoint import hf_folder, safetensors
from qerl_jax.model import architecture
from qerl_jax.model.architecture import KNOWN, LAYER_NORMS, PARENT, Architecture
from qerl_jax.quantization import quantizer
from qerl_jax.quantization.calibration import Calibration
from qerl_jax.quantization.quantizer import Recipe

TINY = Architecture("qwen2", 512, 128, 256, 3, 4, 2, 32)


def make_folder(folder: pathlib.Path, arch: Architecture) -> None:
    """Writes a model folder with random weights: one shard for everything outside the layers, and one for each
    layer.
    """
    rng = np.random.default_rng(0)

    def matrix(*shape):
        # One random draw is repeated: the quantizer's work does not depend on values, and drawing takes longer.
        block = rng.standard_normal(2**20, np.float32) * 0.02
        return np.resize(block.astype(ml_dtypes.bfloat16), shape)

    def ones(size):
        return np.ones(size, ml_dtypes.bfloat16)

    shards = {"model-outside": {"model.norm.weight": ones(arch.width)}}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name == "lm_head.weight" and arch.tie_word_embeddings:
            continue
        shards["model-outside"][name] = matrix(arch.vocab_size, arch.width)
    weight_map = {}

    def write(stem, tensors):
        safetensors.write(folder / f"{stem}.safetensors", tensors)
        weight_map.update(dict.fromkeys(tensors, f"{stem}.safetensors"))

    write("model-outside", shards["model-outside"])
    for index in range(arch.num_layers):
        prefix = f"model.layers.{index}."
        tensors = {f"{prefix}{name}.weight": ones(arch.width) for name in LAYER_NORMS}
        for linear, parts in arch.linears().items():
            for part, n in parts:
                name = f"{prefix}{PARENT[linear]}.{part}"
                tensors[f"{name}.weight"] = matrix(n, arch.input_width(linear))
                if linear == "qkv" and arch.qkv_bias:
                    tensors[f"{name}.bias"] = ones(n)
        write(f"model-{index}", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "model_type": arch.model_type,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.width,
        "intermediate_size": arch.ffn_width,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "rope_theta": arch.rope_theta,
        "tie_word_embeddings": arch.tie_word_embeddings,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way of quantizing, timed in its own process.

    Attributes:
        name: Name in the output.
        seconds: Time of the first measured layer, which includes compilation, and of each other layer.
        peak: Peak device memory in bytes, or None if the device does not report it.
    """

    name: str
    seconds: list[float]
    peak: int | None


def load_arm(folder: str, scales: str, form: str) -> Arm:
    """Times reading and packing of each layer, as when a base is loaded."""
    from qerl_jax.checkpoint import base_model
    from qerl_jax.model.transformer import Transformer

    model = Transformer(architecture.load(folder), form, None, jnp.bfloat16)
    times, put = [time.monotonic()], base_model._put

    def timed(stack, layer, index):
        done = jax.block_until_ready(put(stack, layer, index))
        times.append(time.monotonic())
        return done

    base_model._put = timed
    jax.block_until_ready(base_model.read_base(folder, model, scales))
    return Arm(f"load, {scales}", np.diff(times).tolist(), peak())


def quantize_arm(folder: str, method: str, form: str, samples: int, length: int) -> Arm:
    """Times each layer of `qerl quantize`. It calibrates with random tokens in rows of full length."""
    cfg, rng = Calibration("arithmetic", samples, length), np.random.default_rng(0)
    vocab = architecture.load(folder).vocab_size
    ids = rng.integers(0, vocab, (samples, length), np.int32)
    quantizer.token_rows = lambda *_: (ids, np.full(samples, length, np.int32))
    times = [time.monotonic()]

    def log(line):
        print(line, file=sys.stderr, flush=True)
        if line.startswith(("layer ", "calibrating")):
            times.append(time.monotonic())

    with tempfile.TemporaryDirectory() as place:
        recipe = Recipe(form, method, calibration=cfg)
        quantizer.quantize(folder, f"{place}/packed", recipe, log)
    if method != "rtn":
        times = times[1:]  # work before the first layer
    return Arm(method, np.diff(times).tolist(), peak())


def peak() -> int | None:
    """Peak device memory of this process in bytes."""
    return (runtime.memory_stats() or {}).get("peak_bytes_in_use")


def line(arm: Arm, args, arch: Architecture) -> dict:
    """Formats a measurement as a JSON object, with the time scaled to all layers of the model.

    The first layer, which includes compilation, counts once. All others take as long as the other measured layers.
    """
    first, *others = arm.seconds
    each = float(np.mean(others)) if others else first
    return {
        "name": arm.name,
        "model": args.model,
        "format": args.format,
        "seconds": first + (arch.num_layers - 1) * each,
        "scaled_from_layers": len(arm.seconds),
        "layers": arch.num_layers,
        "first_layer_seconds": first,
        "layer_seconds": each,
        "peak_device_gb": None if arm.peak is None else arm.peak / 1e9,
        "tokens": None if arm.name.startswith(("load", "rtn")) else args.samples * args.length,
        "device": runtime.device_kind(),
        "jax": jax.__version__,
    }


def main():
    """Prints a JSON line for each arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b", choices=[*KNOWN, "tiny"])
    parser.add_argument(
        "--layers",
        type=int,
        default=4,
        help="number of layers to make and measure; times are scaled to the whole model",
    )
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["load", "load-maximum", "rtn", "awq", "gptq", "awq+gptq"],
    )
    parser.add_argument("--samples", type=int, default=256, help="number of calibration rows")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row")
    parser.add_argument(
        "--seconds", type=float, default=600, help="time limit of an arm, in seconds"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    arch = TINY if args.model == "tiny" else KNOWN[args.model]
    if args.child:
        runtime.use_compilation_cache()
        arm, place = args.child
        if arm.startswith("load"):
            scales = "maximum" if arm == "load-maximum" else "search"
            found = load_arm(place, scales, args.format)
        else:
            found = quantize_arm(place, arm, args.format, args.samples, args.length)
        print(json.dumps(line(found, args, arch)), flush=True)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        make_folder(folder, dataclasses.replace(arch, num_layers=min(args.layers, arch.num_layers)))
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (hf_folder.TINY / name).is_file():
                shutil.copy(hf_folder.TINY / name, folder)
        for arm in args.arms:
            command = [sys.executable, "-m", "scripts.bench_quantize", "--child", arm, place]
            for name in ("model", "format", "samples", "length"):
                command += [f"--{name}", str(getattr(args, name))]
            subprocess.run(command, check=True, timeout=args.seconds)


if __name__ == "__main__":
    main()
