"""Measures the difference of log-probabilities between sampler and trainer: `python -m scripts.compare_logps`.

It uses random weights, so that every rounding has an effect. The yardstick is the difference between two evaluations of
one bfloat16 reference that sum products in a different order: K as a whole, and in `SPLITS` parts. All of them score
the tokens that the sampler drew. The mean of |sampler - trainer| must be at most 1.2 times the yardstick's, otherwise
the exit status is 1.

Sampler and trainer round in the same places (docs/design/model.md, "Where rounding happens") except in attention: its
weights are rounded relative to a maximum that each kernel finds in its own way. The last row shows the effect of that
alone: cuDNN's attention against one that rounds the finished softmax.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
from contextlib import ExitStack
from unittest import mock

PROMPT, SPLITS, ALLOWED = 256, 4, 1.2


def main() -> int:
    """Samples, scores the tokens in four ways, and prints the differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b", help="a name of architecture.KNOWN")
    parser.add_argument("--weights", default="nvfp4", choices=("nvfp4", "bfloat16"))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument(
        "--timeout", type=int, default=240, help="seconds after which the process is killed"
    )
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.timeout, exit=True)

    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import runtime
    from pallas_kernels.finished_linear import api, prefill
    from qerl_jax.config import LoraConfig
    from qerl_jax.generation.engine import Engine, EngineSpec
    from qerl_jax.generation.scheduler import QueuedPrompt
    from qerl_jax.model import architecture, layers, logprobs
    from qerl_jax.model.transformer import Transformer, head, init_params, random_base

    runtime.use_compilation_cache()
    arch = architecture.KNOWN[args.model]
    model = Transformer(arch, args.weights, LoraConfig(args.rank, float(args.rank)), jnp.bfloat16)
    frozen = random_base(model, jax.random.key(0))
    params = init_params(model, frozen, jax.random.key(1))
    variables = {"frozen": frozen, "params": jax.tree.map(lambda x: x + 1e-3, params)}
    num_tokens = arch.vocab_size - 256

    prompts = np.random.default_rng(2).integers(0, num_tokens, (args.batch, PROMPT), np.int32)
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(3), args.batch)))
    queue = [
        QueuedPrompt(prompt, key[None], args.tokens)
        for prompt, key in zip(prompts, keys, strict=True)
    ]
    engine = Engine(model, EngineSpec(num_tokens))
    rows = sorted(
        engine.completions(variables, queue, 1.0, max_prompt_length=PROMPT),
        key=lambda each: each.row,
    )
    sampled = np.stack([row.behaviour_logps for row in rows])
    tokens = np.concatenate([prompts, np.stack([row.tokens for row in rows])], axis=1)

    def score(*patches):
        """Log-probabilities [B, C] of the sampled tokens from one forward pass with these patches."""

        @jax.jit
        def of(variables, tokens):
            with ExitStack() as stack:
                for patch in patches:
                    stack.enter_context(patch)
                hidden, _ = model.apply(variables, tokens)
            states = hidden[:, PROMPT - 1 : -1].reshape(-1, arch.width)
            targets = tokens[:, PROMPT:].reshape(-1)
            matrix = head(variables["frozen"])
            options = {"temperature": 1.0, "num_tokens": num_tokens}
            return logprobs.of_targets(states, matrix, targets, **options)[0]

        return np.asarray(of(variables, tokens)).reshape(args.batch, -1)

    def score_by_reference(splits):
        # The reference computes all products, including those that normally a fused kernel finishes.
        return score(
            mock.patch.object(api, "linear", functools.partial(reference, splits=splits)),
            mock.patch.object(prefill, "supports", lambda *_: "is the reference's"),
        )

    trainer = score()
    whole, split = score_by_reference(1), score_by_reference(SPLITS)
    other = score(mock.patch.object(layers, "attention", layers.plain_attention))
    pairs = {
        "sampler - trainer": np.abs(sampled - trainer),
        "reference, K whole - K split": np.abs(whole - split),
        "trainer - reference": np.abs(trainer - whole),
        "trainer - trainer with another attention": np.abs(trainer - other),
    }
    print(
        f"{args.model} {args.weights}, {args.batch} x {args.tokens} tokens on {runtime.device_kind()}"
    )
    print("| difference | mean | p99 | max |")
    print("| --- | --- | --- | --- |")
    for name, difference in pairs.items():
        p99 = np.quantile(difference, 0.99)
        print(f"| {name} | {difference.mean():.4f} | {p99:.4f} | {difference.max():.4f} |")
    ours, yardstick = pairs["sampler - trainer"], pairs["reference, K whole - K split"]
    kinds = {"mean": np.mean, "p99": functools.partial(np.quantile, q=0.99), "max": np.max}
    ratios = {name: of(ours) / of(yardstick) for name, of in kinds.items()}
    print(
        "sampler - trainer, divided by the yardstick:", *(f"{k} {v:.2f}" for k, v in ratios.items())
    )
    return int(ratios["mean"] > ALLOWED)


def reference(x, weight, *, splits: int):
    """Computes `finished_linear.linear` with plain products of `splits` parts of K, summed in float32."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import PackedWeight, nvfp4, rounded, unprepare

    multiplier = jnp.float32(1)
    if isinstance(weight, PackedWeight):
        packed = unprepare(weight)
        multiplier, weight = packed.multiplier, nvfp4.scaled_codes(packed, x.dtype)
    flat = x.reshape(-1, x.shape[-1])
    total = sum(
        jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        for a, b in zip(
            jnp.split(flat, splits, axis=1),
            jnp.split(weight.astype(x.dtype), splits, axis=1),
            strict=True,
        )
    )
    total = rounded(total, x.dtype).astype(jnp.float32) * multiplier
    return total.reshape(*x.shape[:-1], -1)


if __name__ == "__main__":
    raise SystemExit(main())
