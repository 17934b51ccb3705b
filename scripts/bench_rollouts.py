"""Decode tokens per second of the sampler, NVFP4 beside BF16: `python -m scripts.bench_rollouts`.

Random weights in a known shape, distinct random prompts, stop tokens off, LoRA on. Two generations
that differ only in length are timed; their difference is decoding alone, without prefill and
without what a call costs once. The bound is what a step must read, at 4.3 TB/s: packed or 16-bit
linears, head, adapters, live keys and values. `--profile` adds where the time of a step goes, by
kernel. Each arm is a process of its own, killed when it overstays.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import subprocess
import sys
import time

BANDWIDTH = 4.3e12
PROMPT = 256


def bound(arch, weights: str, batch: int, new_tokens: int, rank: int) -> float:
    """Seconds of a decode step below which no implementation on that card can go."""
    per_layer = [(arch.input_width(n), parts) for n, parts in arch.linears().items()]
    linears = sum(k * size for k, parts in per_layer for _, size in parts)
    adapters = sum(rank * (k + size) for k, parts in per_layer for _, size in parts)
    matrices = arch.num_layers * (linears * (0.5625 if weights == "nvfp4" else 2) + adapters * 4)
    live = batch * (PROMPT + new_tokens / 2) * 4 * arch.num_layers * arch.kv_width
    return (matrices + 2 * arch.vocab_size * arch.width + live) / BANDWIDTH


def run_arm(args: argparse.Namespace, weights: str) -> None:
    """Measures every batch with one base; prints a JSON object per batch."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import runtime
    from qerl_jax import architecture, sampling
    from qerl_jax.model import LoRA, Transformer, init_params, random_base

    runtime.use_compilation_cache()
    arch = architecture.KNOWN[args.model]
    lora = LoRA(args.rank, float(args.rank)) if args.rank else None
    model = Transformer(arch, weights, lora, jnp.bfloat16)
    variables = {"frozen": random_base(model, jax.random.key(0))}
    if lora:
        params = init_params(model, variables["frozen"], jax.random.key(1))
        variables["params"] = jax.tree.map(lambda x: x + 1e-3, params)

    for batch in args.batch:
        prompts = jax.random.randint(jax.random.key(2), (batch, PROMPT), 0, 150_000)
        lengths = jnp.full(batch, PROMPT, jnp.int32)
        keys = jax.random.split(jax.random.key(3), batch)
        times, compiled = {}, 0.0
        for new_tokens in (args.tokens // 4, args.tokens):
            generate = sampling.make_generate(
                model,
                num_generations=1,
                max_completion_length=new_tokens,
                num_tokens=151_665,
                stop_tokens=(),
                pad_token=0,
            )
            arguments = (variables, prompts, lengths, keys, 1.0)
            call = functools.partial(generate, *arguments)
            started = time.perf_counter()
            jax.block_until_ready(call())
            compiled = time.perf_counter() - started
            samples = []
            for _ in range(3):
                started = time.perf_counter()
                jax.block_until_ready(call())
                samples.append(time.perf_counter() - started)
            times[new_tokens] = min(samples)
        short, long = sorted(times)
        step = (times[long] - times[short]) / (long - short)
        limit = bound(arch, weights, batch, args.tokens, args.rank)
        row = {"weights": weights, "batch": batch, "step": step, "bound": limit}
        row |= {"first_call": compiled, "prefill": times[short] - short * step}
        if args.profile:
            row["kernels"] = profile(generate, arguments, long)
        print("ROW " + json.dumps(row), flush=True)


def profile(generate, arguments, steps: int) -> list[tuple[str, float, float]]:
    """Kernels of a call by name: microseconds and launches per decode step, most expensive first."""
    from jax.experimental.mosaic.gpu import profiler

    # As arguments: it compiles what it measures, and would keep captured weights as constants.
    _, kernels = profiler.measure(generate, aggregate=False)(*arguments)
    spent, launches = collections.Counter(), collections.Counter()
    for name, milliseconds in kernels:
        spent[name] += milliseconds * 1e3 / steps
        launches[name] += 1
    return [(name[:70], us, launches[name] / steps) for name, us in spent.most_common(24)]


def main() -> int:
    """Runs the arms one after the other and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--arms", default="nvfp4,bfloat16")
    parser.add_argument("--timeout", type=int, default=240, help="seconds per arm")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_arm(args, args.child)
        return 0

    rows, failed = [], False
    for arm in args.arms.split(","):
        command = [sys.executable, "-m", "scripts.bench_rollouts", *sys.argv[1:], "--child", arm]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            output, _ = process.communicate(timeout=args.timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        failed |= process.returncode != 0
        rows += [json.loads(line[4:]) for line in output.splitlines() if line.startswith("ROW ")]
    print(f"{args.model}, prompts of {PROMPT}, {args.tokens} new tokens, LoRA rank {args.rank}")
    print("| base | batch | tok/s | step ms | of bound | prefill s | first call s | vs bfloat16 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    plain = {row["batch"]: row["step"] for row in rows if row["weights"] == "bfloat16"}
    for row in rows:
        ratio = f"{plain[row['batch']] / row['step']:.2f}x" if row["batch"] in plain else ""
        print(
            f"| {row['weights']} | {row['batch']} | {row['batch'] / row['step']:,.0f} "
            f"| {row['step'] * 1e3:.2f} | {row['bound'] / row['step']:.2f} | {row['prefill']:.3f} "
            f"| {row['first_call']:.1f} | {ratio} |"
        )
    for row in rows:
        for name, us, launches in row.get("kernels", []):
            print(f"{row['weights']:9} B={row['batch']:<4} {us:9.1f} us x{launches:6.1f}  {name}")
    if failed:
        print("an arm failed or was killed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
