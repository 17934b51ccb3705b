"""Times a layer in training, with a packed or a bfloat16 base: `python -m scripts.bench_training_layer`.

It measures the forward pass, dX and the gradients of the adapter and of trained norms of the model's own layer,
including attention, on random weights. Several layers with different weights follow one another, so that none is in the
L2 cache. All arms are compiled first and then timed in turn, several times, because a warm card is slower. "apart" lets
XLA do the operations after a product, which otherwise the kernel for many rows does (`finished_linear.prefill`), and in
"unpaired" rows of gate and up do not lie in pairs.
`kernels` is the sum of device times from CUPTI and `wall` the time of a call, both per layer. The script ends itself if
a kernel hangs.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.finished_linear import prefill
from qerl_jax.config import LoraConfig
from qerl_jax.model import architecture, layers
from qerl_jax.model.transformer import Block, Role

ARMS = {
    "bfloat16": "bfloat16",
    "nvfp4": "nvfp4",
    "nvfp4-apart": "nvfp4",
    "nvfp4-unpaired": "nvfp4",
}


def prepare(args: argparse.Namespace, arm: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the compiled forward and backward pass of an arm's layers, and its arguments."""
    arch = architecture.KNOWN[args.model]
    block = Block(arch, ARMS[arm], LoraConfig(args.rank, float(args.rank)), Role.ADAPTED)
    tables = layers.rope_tables(jnp.arange(args.length)[None], layers.rope_frequencies(arch))
    x = jax.random.normal(jax.random.key(0), (args.rows, args.length, arch.width), jnp.bfloat16)
    run = lambda variables, x: block.apply(variables, (x, None), 0, tables)[0][0]
    init = jax.jit(lambda key: block.init(key, (x[:1, :8], None), 0, _short(tables)))
    pairs = {"PALLAS_PAIRED_GATES": str(int(arm != "nvfp4-unpaired"))}
    with mock.patch.dict(os.environ, pairs):
        variables = [init(jax.random.key(1 + i)) for i in range(args.layers)]
    frozen = [v["frozen"] for v in variables]
    params = [jax.tree.map(lambda leaf: leaf + 1e-3, v["params"]) for v in variables]

    @jax.jit
    def grads(params, x, frozen):
        def loss(params, x):
            for p, f in zip(params, frozen, strict=True):
                x = run({"params": p, "frozen": f}, x)
            return jnp.sum(x.astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1))(params, x)

    arguments = (params, x, frozen)
    refuse = lambda *_: "this arm leaves it to XLA"
    apart = mock.patch.object(prefill, "supports", refuse)
    with apart if arm == "nvfp4-apart" else nullcontext():
        jax.block_until_ready(grads(*arguments))
    return grads, arguments


def measure(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, list]:
    """Milliseconds of a call, and of each of its kernels."""
    begin = time.perf_counter()
    jax.block_until_ready(call(*arguments))
    wall = 1e3 * (time.perf_counter() - begin)
    return wall, profiler.measure(call, aggregate=False)(*arguments)[1]


def _short(tables):
    return tuple(table[:, :8] for table in tables)


def _print_longest(kernels: list[tuple[str, float]], layers: int) -> None:
    by_name: dict[str, list[float]] = {}
    for name, ms in kernels:
        by_name.setdefault(name[:60], []).append(ms)
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:16]:
        # The first layer's kernels are listed one by one, because linears that share a kernel differ.
        first = " ".join(f"{ms:.3f}" for ms in times[: max(1, len(times) // layers)][:6])
        print(f"    {sum(times) / layers:8.3f} ms a layer  {name}  {first}")


def main() -> None:
    """Measures all arms and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4, help="number of layers, one after another")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument(
        "--timeout", type=int, default=150, help="time limit of all arms together, in seconds"
    )
    parser.add_argument("--profile", action="store_true", help="print the time by kernel")
    args = parser.parse_args()

    faulthandler.dump_traceback_later(args.timeout, exit=True)
    calls = {arm: prepare(args, arm) for arm in args.arms}
    rounds = [{arm: measure(*call) for arm, call in calls.items()} for _ in range(args.repeats)]
    faulthandler.cancel_dump_traceback_later()
    found = {}
    for arm in args.arms:
        walls = [timed[arm][0] for timed in rounds]
        kernels = [sum(ms for _, ms in timed[arm][1]) for timed in rounds]
        found[arm] = [statistics.median(times) / args.layers for times in (kernels, walls)]
        if args.profile:
            print(arm)
            _print_longest(rounds[-1][arm][1], args.layers)
    print(f"{args.model}, {args.rows} x {args.length} tokens, LoRA rank {args.rank}")
    print(
        f"\n| base | kernels ms | wall ms | kernels against {args.arms[0]} |\n| --- | --- | --- | --- |"
    )
    for arm, (kernels, wall) in found.items():
        ratio = kernels / found[args.arms[0]][0]
        print(f"| {arm} | {kernels:.3f} | {wall:.3f} | {ratio:.3f}x |")


if __name__ == "__main__":
    main()
