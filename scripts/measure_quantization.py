"""How far 4-bit models are from their 16-bit one: `python -m scripts.measure_quantization`.

Quantizes a model in every format by every method, and prints bits per weight and the mean
KL(16 bit || 4 bit) per token, in nats, over rows that calibration has not seen.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.checkpoint import base_model
from qerl_jax.config import ModelConfig
from qerl_jax.model import layers, logprobs
from qerl_jax.model.transformer import head
from qerl_jax.quantization import calibration
from qerl_jax.quantization.calibration import Calibration
from qerl_jax.quantization.quantizer import Recipe, quantize


def load(folder: str, weights: str):
    """A model and its frozen base, computed in float32."""
    cfg = ModelConfig(str(folder), weights=weights, dtype="float32")
    return base_model.load_base(cfg, None)


def mean_kl(reference, other, ids: np.ndarray, lengths: np.ndarray, rows: int = 8) -> float:
    """Mean over all predictions of KL(reference || other), in nats.

    Args:
        reference: Model, base and tokenizer, as `load` gives them.
        other: Likewise.
        ids: int32 [S, T], right-padded.
        lengths: int32 [S].
        rows: Computed together.
    """
    num_tokens = reference[2].num_tokens

    @functools.partial(jax.jit, static_argnums=0)
    def of_rows(models, bases, ids, live):
        logps = []
        for model, base in zip(models, bases, strict=True):
            hidden, _ = model.apply({"frozen": base}, ids)
            scores = layers.logits(hidden, head(base))
            logps.append(logprobs.log_softmax(scores, 1.0, num_tokens)[..., :num_tokens])
        kl = jnp.sum(jnp.exp(logps[0]) * (logps[0] - logps[1]), axis=-1)
        return jnp.sum(jnp.where(live, kl, 0))

    # The last token of a row predicts nothing that is there.
    live = np.arange(ids.shape[1]) < lengths[:, None] - 1
    total = sum(
        float(
            of_rows(
                (reference[0], other[0]),
                (reference[1], other[1]),
                ids[first : first + rows],
                live[first : first + rows],
            )
        )
        for first in range(0, len(ids), rows)
    )
    return total / live.sum()


def main():
    """Prints a table for docs/lab-notes.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qerl-tiny")
    parser.add_argument("--dataset", default="arithmetic")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp4", "nf4"])
    parser.add_argument("--seeds", type=int, default=1, help="draws of the calibration rows")
    args = parser.parse_args()

    reference = load(args.model, "float32")
    both = Calibration(args.dataset, args.samples + args.held_out, args.length, seed=1000)
    ids, lengths = calibration.token_rows(both, reference[2])
    picked = np.random.default_rng(0).permutation(len(ids))[: args.held_out]
    ids, lengths = ids[picked], lengths[picked]
    print(f"{len(ids)} held-out rows of {args.dataset}, {lengths.sum()} tokens")
    print(
        "| format | method | KL per token | of rtn | bytes | seconds |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name in args.formats:
        nearest = None
        for method, seed in [("rtn", 0), *(("awq", seed) for seed in range(args.seeds))]:
            with tempfile.TemporaryDirectory() as folder:
                target = pathlib.Path(folder) / "model"
                cfg = Calibration(args.dataset, args.samples, args.length, seed)
                recipe = Recipe(name, method, calibration=cfg)
                report = quantize(args.model, target, recipe, lambda line: None)
                kl = mean_kl(reference, load(target, name), ids, lengths)
            nearest = nearest or kl
            print(
                f"| {name} | {method} | {kl:.5f} | {kl / nearest:.3f} | {report['bytes']} | "
                f"{report['seconds']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
