"""Measures how far 4-bit models are from their 16-bit one: `python -m scripts.measure_quantization`.

It quantizes a model in every format with every method, and prints bits per weight and the mean KL(16 bit || 4 bit) per
token, in nats, over rows that were not used for calibration.
"""

from __future__ import annotations

import argparse
import dataclasses
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
    """Loads a model and its frozen base, to be computed in float32."""
    cfg = ModelConfig(str(folder), weights=weights, dtype="float32")
    return base_model.load_base(cfg, None)


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the predictions of each row, float64 [S], in nats.

    Attributes:
        tokens: Number of predictions that count.
        kl: KL(reference || other).
        nll: -log p of the actual tokens, by the other model.
        entropy: Entropy of the other model's distribution.
    """

    tokens: np.ndarray
    kl: np.ndarray
    nll: np.ndarray
    entropy: np.ndarray


def hidden_states(policy, ids: np.ndarray, rows: int = 8) -> list[jax.Array]:
    """Hidden states before the head for rows [S, T], a few rows at a time: float32 [rows, T - 1, D]."""
    model, base, _ = policy
    ids = np.pad(ids, ((0, -len(ids) % rows), (0, 0)))
    return [_hidden_states(model, base, cut) for cut in np.split(ids, len(ids) // rows)]


@functools.partial(jax.jit, static_argnums=0)
def _hidden_states(model, base, ids):
    return model.apply({"frozen": base}, ids)[0][:, :-1]


def sums(
    reference, other, ids: np.ndarray, live: np.ndarray, states: list[jax.Array] | None = None
) -> Sums:
    """Compares two models on the same rows.

    Args:
        reference: Model, base and tokenizer, from `load`.
        other: Model, base and tokenizer, from `load`.
        ids: int32 [S, T], right-padded.
        live: bool [S, T], true at the tokens whose prediction counts; the first token has none.
        states: The reference's `hidden_states` of the rows, if they are known.
    """
    both = hidden_states(reference, ids) if states is None else states, hidden_states(other, ids)
    heads, rows = (head(reference[1]), head(other[1])), len(both[0][0])
    filled = -len(ids) % rows
    targets, counted = (np.pad(x[:, 1:], ((0, filled), (0, 0))) for x in (ids, live))
    found = [
        _sums(
            reference[2].num_tokens,
            heads,
            hidden,
            *(x[at * rows :][:rows] for x in (targets, counted)),
        )
        for at, hidden in enumerate(zip(*both, strict=True))
    ]
    columns = np.concatenate([np.asarray(each, np.float64) for each in found], axis=1)
    return Sums(*columns[:, : columns.shape[1] - filled])


@functools.partial(jax.jit, static_argnums=0)
def _sums(num_tokens, heads, hidden, targets, counted):
    def of_row(row):
        hidden, targets, counted = row
        logps = [
            logprobs.log_softmax(layers.logits(x, matrix), 1.0, num_tokens)[..., :num_tokens]
            for x, matrix in zip(hidden, heads, strict=True)
        ]
        kl = jnp.sum(jnp.exp(logps[0]) * (logps[0] - logps[1]), axis=-1)
        nll = -jnp.take_along_axis(logps[1], targets[:, None], axis=-1)[:, 0]
        each = jnp.stack([jnp.ones_like(kl), kl, nll, logprobs.entropy(logps[1])])
        return jnp.sum(jnp.where(counted, each, 0), axis=-1)

    return jax.lax.map(of_row, (hidden, targets, counted)).T


def mean_kl(reference, other, ids: np.ndarray, lengths: np.ndarray) -> float:
    """Mean over all predictions of KL(reference || other), in nats.

    Args:
        reference: Model, base and tokenizer, from `load`.
        other: Model, base and tokenizer, from `load`.
        ids: int32 [S, T], right-padded.
        lengths: int32 [S].
    """
    found = sums(reference, other, ids, np.arange(ids.shape[1]) < lengths[:, None])
    return float(found.kl.sum() / found.tokens.sum())


def main():
    """Prints a table for docs/lab-notes.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qerl-tiny")
    parser.add_argument("--dataset", default="arithmetic")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp4", "nf4"])
    parser.add_argument("--methods", nargs="+", default=["rtn", "awq", "gptq", "awq+gptq"])
    parser.add_argument(
        "--seeds", type=int, default=1, help="number of random draws of the calibration rows"
    )
    args = parser.parse_args()

    reference = load(args.model, "float32")
    both = Calibration(args.dataset, args.samples + args.held_out, args.length, seed=1000)
    ids, lengths = calibration.token_rows(both, reference[2])
    picked = np.random.default_rng(0).permutation(len(ids))[: args.held_out]
    ids, lengths = ids[picked], lengths[picked]
    print(f"{len(ids)} held-out rows of {args.dataset}, {lengths.sum()} tokens")
    print(
        "| format | method | block scales | KL per token | of rtn | bytes | seconds |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name in args.formats:
        nearest = None
        draws = lambda method: range(1 if method == "rtn" else args.seeds)
        chosen = [("rtn", "maximum", 0)]
        chosen += [(method, "search", seed) for method in args.methods for seed in draws(method)]
        for method, scales, seed in chosen:
            with tempfile.TemporaryDirectory() as folder:
                target = pathlib.Path(folder) / "model"
                cfg = Calibration(args.dataset, args.samples, args.length, seed)
                recipe = Recipe(name, method, scales, calibration=cfg)
                report = quantize(args.model, target, recipe, lambda line: None)
                kl = mean_kl(reference, load(target, name), ids, lengths)
            nearest = nearest or kl
            print(
                f"| {name} | {method} | {scales} | {kl:.5f} | {kl / nearest:.3f} | {report['bytes']} | "
                f"{report['seconds']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
