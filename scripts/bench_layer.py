"""Times a decoding layer without attention, kernel by kernel: `python -m scripts.bench_layer`.

All layers of a model run in a loop with an end that depends on data, as in generation: products, norms, LoRA, SwiGLU
and residual additions. Attention is replaced by a copy of the right size. First the values of two layers are compared
with those of the plain functions. Then for each base, adapter and M the script prints: the wall time of all layers and
of one, the device time of every kernel by name, and gaps (wall time without a running kernel). Each arm runs in its own
process, which is killed at its time limit. In arm "nvfp4-unpaired" gate_up is finished by a kernel after its product:

    python -m scripts.bench_layer --arms nvfp4,nvfp4-unpaired --m 8 64 128
    python -m scripts.bench_layer --arms nvfp4 --m 64 128 --unroll 28    # all layers written out
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time

BASE_KERNELS = (
    "nvfp4_matmul",
    "nvfp4_gated",
    "gemm",
    "nvjet",
    "cutlass",
    "sm90_xmma",
)


def run_arm(args: argparse.Namespace) -> None:
    """Measures one base with every M; prints a JSON object for each."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.mosaic.gpu import profiler

    from pallas_kernels import runtime
    from pallas_kernels.finished_linear import decode as fused
    from qerl_jax.config import LoraConfig
    from qerl_jax.model import architecture, fused_decode
    from qerl_jax.model import layers as plain
    from qerl_jax.model.transformer import FusedLinear, Role, Transformer, init_params, random_base

    runtime.use_compilation_cache()
    weights, *traits = args.child.split("-")
    if "unpaired" in traits:
        os.environ["PALLAS_PAIRED_GATES"] = "0"
    arch = architecture.KNOWN[args.model]
    arch = dataclasses.replace(arch, vocab_size=64, num_layers=args.layers or arch.num_layers)
    lora = LoraConfig(args.rank, float(args.rank)) if args.rank else None
    model = Transformer(arch, weights, lora, jnp.bfloat16)
    variables = {"frozen": random_base(model, jax.random.key(0))}
    if lora:
        params = init_params(model, variables["frozen"], jax.random.key(1))
        variables["params"] = jax.tree.map(
            lambda p: p + 0.01 * jax.random.normal(jax.random.key(2), p.shape), params
        )

    def attend(qkv, head_norms, index, state):
        return qkv[:, : arch.query_width], state

    def embedded(m):
        return jax.random.normal(jax.random.key(3), (m, arch.width), jnp.bfloat16)

    def plain_layers(variables, x, count):
        stacked, adapters = variables["frozen"]["layers"], variables.get("params", {})
        for index in range(count):
            at = lambda tree, index=index: jax.tree.map(lambda leaf: leaf[index], tree)
            frozen, params = at(stacked), at(adapters.get("layers", {}))

            def linear(name, x, frozen=frozen, params=params, **options):
                parts = arch.linears()[name]
                role = Role.FROZEN if lora is None else Role.ADAPTED
                module = FusedLinear(parts, weights, lora, role, bias="bias" in frozen[name])
                tree = {"frozen": frozen[name], "params": params.get(name, {})}
                return module.apply(tree, x, **options)

            def norm(name, x, frozen=frozen):
                return plain.split_norm(x, frozen[name]["scale"], arch.rms_norm_eps)

            mixed = linear("qkv", norm("input_layernorm", x))[:, : arch.query_width]
            x = linear("o", mixed, residual=x)
            gate_up = linear("gate_up", norm("post_attention_layernorm", x))
            x = linear("down", plain.swiglu(gate_up), residual=x)
        return plain.rms_norm(x, variables["frozen"]["norm"]["scale"], arch.rms_norm_eps)

    @functools.partial(jax.jit, static_argnums=0)
    def gathered(model, variables):
        return fused_decode.policy(model, variables)

    def one_step(model, policy, x):
        return fused_decode.step(model, policy, x, attend, (), unroll=args.unroll)[0]

    def check(m):
        """Returns the relative error of two fused layers against plain ones, and checks that rows are independent."""
        two = dataclasses.replace(model, arch=dataclasses.replace(arch, num_layers=2))
        first = jax.tree.map(lambda leaf: leaf[:2], {k: v["layers"] for k, v in variables.items()})
        small = {name: {"layers": layers} for name, layers in first.items()}
        small["frozen"] |= {name: variables["frozen"][name] for name in ("norm", "embed_tokens")}

        by_kernels = jax.jit(functools.partial(one_step, two))
        x, given = embedded(m), gathered(two, small)
        actual = np.float32(by_kernels(given, x))
        expected = np.float32(jax.jit(plain_layers, static_argnums=2)(small, x, 2))
        error = np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))
        changed = np.float32(by_kernels(given, x.at[1:].multiply(-3)))
        return float(error), bool((changed[0] == actual[0]).all())

    def run(given, x, steps):
        def following(state):
            step, x = state
            return step + 1, one_step(model, given, x)

        # The end depends on data, although it never comes early.
        unfinished = lambda state: (state[0] < steps) & (state[1][0, 0] < 1e9)
        return jax.lax.while_loop(unfinished, following, (jnp.int32(0), x))[1]

    given = gathered(model, variables)
    for m in args.m:
        m = fused.padded(m)
        error, independent = check(m)
        assert error < 0.01, f"M = {m}: the fused layers differ from the plain ones by {error}"
        assert independent, f"M = {m}: a row depends on the other rows"
        started = time.perf_counter()
        compiled = jax.jit(run)
        x = embedded(m)
        jax.block_until_ready(compiled(given, x, jnp.int32(2)))
        first_call = time.perf_counter() - started

        def wall(steps, compiled=compiled, x=x):
            started = time.perf_counter()
            jax.block_until_ready(compiled(given, x, jnp.int32(steps)))
            return time.perf_counter() - started

        few, many = 4, 24
        walls = [wall(many) - wall(few) for _ in range(7)]
        step = statistics.median(walls) / (many - few)
        _, kernels = profiler.measure(compiled, aggregate=False)(given, x, jnp.int32(few))
        spent, launches = collections.Counter(), collections.Counter()
        for name, milliseconds in kernels:
            spent[name[:60]] += milliseconds * 1e3 / few / arch.num_layers
            launches[name[:60]] += 1
        row = {"base": args.child, "rank": args.rank, "m": m, "error": error}
        row |= {"step_us": step * 1e6, "first_call": first_call, "layers": arch.num_layers}
        row["kernels"] = [
            (name, us, launches[name] / few / arch.num_layers) for name, us in spent.most_common(14)
        ]
        print("ROW " + json.dumps(row), flush=True)


def report(row: dict) -> str:
    """Formats one measurement as lines."""
    layer = row["step_us"] / row["layers"]
    all_kernels = sum(us for _, us, _ in row["kernels"])
    base = sum(us for name, us, _ in row["kernels"] if any(k in name for k in BASE_KERNELS))
    lines = [
        f"| {row['base']} | {row['rank']} | {row['m']} | {row['step_us']:.0f} | {layer:.1f} | {base:.1f} "
        f"| {all_kernels - base:.1f} | {layer - all_kernels:.1f} | {layer - base:.1f} "
        f"| {100 * row['error']:.2f} % | {row['first_call']:.1f} |"
    ]
    lines += [f"    {us:8.2f} us x{count:5.2f}  {name}" for name, us, count in row["kernels"]]
    return "\n".join(lines)


def main() -> int:
    """Runs the arms one after the other and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--m", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank; 0 for no LoRA")
    parser.add_argument("--layers", type=int, help="number of layers; default: the model's")
    parser.add_argument("--unroll", type=int, help="layers in one round of the loop")
    parser.add_argument("--arms", default="nvfp4,bfloat16")
    parser.add_argument("--timeout", type=int, default=150, help="time limit of an arm, in seconds")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_arm(args)
        return 0

    print(f"{args.model} without attention; times in microseconds")
    print(
        "| base | rank | M | all layers | a layer | its products | other kernels | gaps | all but products "
        "| error | first call s |\n" + "| --- " * 11 + "|",
        flush=True,
    )
    failed = False
    for arm in args.arms.split(","):
        command = [sys.executable, "-m", "scripts.bench_layer", *sys.argv[1:], "--child", arm]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            output, _ = process.communicate(timeout=args.timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        except KeyboardInterrupt:  # it would go on, on the card
            process.kill()
            raise
        failed |= process.returncode != 0
        for line in output.splitlines():
            if line.startswith("ROW "):
                print(report(json.loads(line[4:])), flush=True)
    if failed:
        print("an arm failed or was killed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
