"""Makes the 16-bit base of the study: `python -m scripts.warm_up SMOLLM2 OUT`, SMOLLM2 from `scripts/smollm2.py`.

The package that holds SmolLM2-135M-Instruct stores it in 4 bits (Q4_1), and the model hardly solves two-step
arithmetic. So all layers are first trained for a short while in 16 bits, on worked answers to the study's problems
(`mixed` of `qerl_jax/data/arithmetic.py`, its training split). The policy learns the form of an answer and some of the
sums, and weights change in their last bits. That is too little to leave the 4-bit grid. How much the grid favours a
format is printed: the error of rounding a linear before and after, beside that of random numbers. The loss is on the
answers' tokens only. Training ends early on purpose: 20 to 40 % of samples at temperature 1 should be right, so that
reinforcement learning has something to reward and room to grow.

Data and order follow from the seed, and GPU kernels are deterministic, so the same card makes the same folder (269 MB)
again. The script prints accuracies on held-out problems before and after, and the SHA-256 of the weights, by which the
study identifies a base. OUT/warm_up.json keeps these numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qerl_jax
from pallas_kernels import FORMATS, runtime
from qerl_jax.checkpoint import hf_folder, safetensors
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.config import ModelConfig
from qerl_jax.data import answers, arithmetic, tokenizer
from qerl_jax.model import logprobs
from qerl_jax.model.transformer import Transformer, head, trainable

SYSTEM_PROMPT = "Work it out."  # as in configs/study.toml
MAX_TOKENS = 48  # of an answer, as in configs/study.toml


@dataclasses.dataclass(frozen=True)
class Rows:
    """Token rows, and which of their tokens count.

    Attributes:
        ids: int32 [S, T], right-padded.
        live: bool [S, T], true at tokens that count.
    """

    ids: np.ndarray
    live: np.ndarray


def main() -> None:
    """Trains, writes the folder, and measures both models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="folder of the pretrained model")
    parser.add_argument("target", type=pathlib.Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, default=BATCH, help="rows per step")
    parser.add_argument("--rate", type=float, default=RATE, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    text = "number of held-out problems; 0 to measure no accuracy"
    parser.add_argument("--problems", type=int, default=512, help=text)
    args = parser.parse_args()
    began = time.monotonic()
    warm_up(args.source, args.target, args.steps, args.batch, args.rate, args.seed)
    results = about(args.source, args.target) | {"seconds": round(time.monotonic() - began, 1)}
    results |= {name: getattr(args, name) for name in ("steps", "batch", "rate", "seed")}
    if args.problems:
        results["before"] = accuracies(args.source, args.problems)
        results["after"] = accuracies(str(args.target), args.problems)
    (args.target / "warm_up.json").write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


# Rows have so few tokens that the backward pass needs no recomputation.
_SHORT = 128
# The study's.
STEPS, BATCH, RATE = 40, 16, 5e-5


def warm_up(
    source: str, target: pathlib.Path, steps: int, batch: int, rate: float, seed: int
) -> None:
    """Trains all layers on worked answers, and writes the result as a model folder."""
    # Set before JAX looks for a GPU, which reads the flags.
    runtime.use_deterministic_kernels()
    runtime.use_compilation_cache()
    tokens = tokenizer.load(hf_folder.local_folder(source, weights=False))
    fit(source, target, examples(tokens, seed, steps * batch), steps=steps, batch=batch, rate=rate)


def examples(tokens: tokenizer.Tokenizer, seed: int, count: int) -> Rows:
    """The first problems of the training split with worked answers. The answer and its stop token count."""
    problems = [arithmetic.mixed("train", seed, index) for index in range(count)]
    texts = [arithmetic.plain_answer(problem) for problem in problems]
    ends = [[*ids, tokens.stop_tokens[0]] for ids in tokens.ids(texts)]
    prompts = tokens.encode([chat(item.question) for item in problems])
    return joined(prompts, ends, tokens.pad_token)


def chat(question: str) -> list[tokenizer.Message]:
    """The chat with the study's question."""
    system = {"role": "system", "content": SYSTEM_PROMPT}
    return [system, {"role": "user", "content": question}]


def joined(prompts, completions, pad: int, length: int | None = None) -> Rows:
    """Right-padded rows of prompts with completions, whose tokens count; of at most `length` tokens unless it is None.

    The same data gives the same width.
    """
    pairs = zip(prompts, completions, strict=True)
    rows = [[*prompt, *completion][:length] for prompt, completion in pairs]
    width = -(-max(map(len, rows)) // 32) * 32
    slots = np.arange(width if length is None else min(length, width))
    ids = np.array([row + [pad] * (len(slots) - len(row)) for row in rows], np.int32)
    starts, ends = (np.array([len(x) for x in item])[:, None] for item in (prompts, rows))
    return Rows(ids, (starts <= slots) & (slots < ends))


def fit(
    source: str, target: pathlib.Path, rows: Rows, *, steps: int, batch: int, rate: float
) -> None:
    """Trains all layers of a base in 16 bits on rows, and writes the result as a model folder.

    It uses AdamW with a warm-up of a tenth and a cosine to 0. Gradients are clipped to a norm of 1. Rows come in a
    fixed random order.
    """
    dtype = "bfloat16" if runtime.platform() == "gpu" else "float32"
    cfg = ModelConfig(str(source), weights="bfloat16", dtype=dtype, trainable="full")
    model, base, tokens = load_base(cfg, None)
    params, frozen = trainable(model, base, jax.random.key(0))
    schedule = optax.warmup_cosine_decay_schedule(0, rate, steps // 10 + 1, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    remat = "none" if rows.ids.shape[1] <= _SHORT else "layer"

    def loss(params, frozen, ids, live):
        variables = {"params": params, "frozen": frozen}
        total = log_likelihood(model, variables, ids, live, tokens.num_tokens, remat=remat)
        return -total / jnp.sum(live[:, 1:].reshape(-1))

    order = np.random.default_rng(1).permutation(len(rows.ids))
    indices = [
        np.take(order, np.arange(batch) + number * batch, mode="wrap") for number in range(steps)
    ]
    params = descend(loss, params, optimizer, rows, indices, frozen)
    hf_folder.export_model(target, model, frozen | params, hf_folder.local_folder(str(source)))


def log_likelihood(
    model: Transformer, variables: Any, ids: jax.Array, live: jax.Array, num_tokens: int, **how: Any
) -> jax.Array:
    """The sum of the log-probabilities of the tokens of rows [S, T] that count, except of a first one."""
    hidden, _ = model.apply(variables, ids, **how)
    logps, _ = logprobs.of_targets(
        hidden[:, :-1].reshape(-1, hidden.shape[-1]),
        head(variables["frozen"]),
        ids[:, 1:].reshape(-1),
        temperature=1.0,
        num_tokens=num_tokens,
    )
    return jnp.sum(jnp.where(live[:, 1:].reshape(-1), logps, 0))


def descend(
    loss: Callable[..., jax.Array],
    params: Any,
    optimizer: optax.GradientTransformation,
    rows: Rows,
    indices: Sequence[np.ndarray],
    *frozen: Any,
) -> Any:
    """Takes a step of `loss(params, *frozen, ids, live)` with the rows of each array of indices; returns the parameters."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, *rest):
        value, slopes = jax.value_and_grad(loss)(params, *rest)
        updates, state = optimizer.update(slopes, state, params)
        return optax.apply_updates(params, updates), state, value

    state, start = jax.jit(optimizer.init)(params), time.monotonic()
    for number, at in enumerate(indices):
        params, state, value = step(params, state, *frozen, rows.ids[at], rows.live[at])
        if number % max(1, len(indices) // 10) == 0 or number == len(indices) - 1:
            seconds = time.monotonic() - start
            print(f"training: step {number} loss {float(value):.4f} {seconds:.0f} s", flush=True)
    return params


def about(source: str, target: pathlib.Path) -> dict[str, object]:
    """Describes the new weights: size, hash, and distance from the old ones."""
    before = safetensors.Tensors(hf_folder.local_folder(source))
    after = safetensors.Tensors(target)
    moved, size, changed, count = 0.0, 0.0, 0, 0
    for name in (name for name in after if name.endswith("_proj.weight")):
        old, new = (np.asarray(item[name], np.float32) for item in (before, after))
        moved += float(np.square(new - old).sum())
        size += float(np.square(old).sum())
        changed, count = changed + int((new != old).sum()), count + new.size
    return {
        "device": runtime.device_kind(),
        "bytes": sum(file.stat().st_size for file in target.iterdir()),
        "sha256": sha256(target),
        "relative change of the linears": float(f"{(moved / size) ** 0.5:.3g}"),
        "share of their weights that changed": round(changed / count, 4),
        "rounding error": {
            "before": rounding_errors(before[_LINEAR]),
            "after": rounding_errors(after[_LINEAR]),
            "normal": rounding_errors(np.random.default_rng(0).normal(size=(512, 512))),
        },
    }


# A linear that SmolLM2 and the base in the package both have.
_LINEAR = "model.layers.1.mlp.down_proj.weight"


def rounding_errors(weight: np.ndarray) -> dict[str, float]:
    """Relative error of a matrix rounded to nearest, by format, which shows whether the matrix's grid favours one."""
    errors, weight = {}, np.asarray(weight, np.float32)
    for name, form in FORMATS.items():
        rounded = np.asarray(form.unpack(form.pack([jnp.asarray(weight)])[0]))
        errors[name] = float(f"{np.linalg.norm(rounded - weight) / np.linalg.norm(weight):.4f}")
    return errors


def sha256(folder: pathlib.Path) -> str:
    """The first 16 digits of the SHA-256 over all weight files."""
    total = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        total.update(file.read_bytes())
    return total.hexdigest()[:16]


def accuracies(folder: str, count: int) -> dict[str, float]:
    """The share of right samples at temperature 1, with one sample for each of the first held-out problems, by kind."""
    dtype = "bfloat16" if runtime.platform() == "gpu" else "float32"
    policy = qerl_jax.load(folder, weights="bfloat16", dtype=dtype, max_concurrent=512, quiet=True)
    problems = [arithmetic.mixed("test", 0, index) for index in range(count)]
    how = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "seed": 0}
    outputs = policy.generate([chat(problem.question) for problem in problems], **how)
    right: dict[str, list[float]] = {}
    for problem, output in zip(problems, outputs, strict=True):
        is_right = answers.same(answers.last_number(output.text), str(problem.answer))
        for name in ("all", kind(problem)):
            right.setdefault(name, []).append(is_right)
    return {name: round(float(np.mean(values)), 4) for name, values in sorted(right.items())}


def kind(problem: arithmetic.ArithmeticProblem) -> str:
    """The part of the mixture that a problem belongs to."""
    if len(problem.operations) > 1:
        return f"{len(problem.operations)} steps"
    ((sign, operand),) = problem.operations
    if sign == "*":
        return "products"
    return "one digit" if max(problem.start, operand) < 10 else "two digits"


if __name__ == "__main__":
    main()
