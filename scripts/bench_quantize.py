"""Time and peak host memory of `qerl quantize` on a made folder: `python -m scripts.bench_quantize`.

Writes random bfloat16 weights in the shape of a published model, or of its first layers, into a
temporary folder, in shards, quantizes it in a process of its own, and deletes both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile

import ml_dtypes
import numpy as np

from qerl_jax.checkpoint import safetensors
from qerl_jax.model.architecture import KNOWN, LAYER_NORMS, PARENT, Architecture


def make_folder(folder: pathlib.Path, arch: Architecture) -> None:
    """A model of random weights: one shard for what is outside the layers, one for each layer."""
    rng = np.random.default_rng(0)

    def matrix(*shape):
        # One draw repeated: the quantizer's work does not depend on it, and drawing takes longer.
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


def main():
    """Prints the quantizer's own lines, the last of which holds size, time and peak host memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b", choices=KNOWN)
    parser.add_argument("--layers", type=int, help="only so many; absent means all")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--seconds", type=float, default=3600, help="when to give up")
    args = parser.parse_args()
    arch = KNOWN[args.model]
    if args.layers:
        arch = dataclasses.replace(arch, num_layers=args.layers)
    with tempfile.TemporaryDirectory() as place:
        source = pathlib.Path(place) / "source"
        source.mkdir()
        make_folder(source, arch)
        command = [sys.executable, "-m", "qerl_jax", "quantize", source, f"{place}/packed"]
        subprocess.run(
            [*map(str, command), "--format", args.format], check=True, timeout=args.seconds
        )


if __name__ == "__main__":
    main()
