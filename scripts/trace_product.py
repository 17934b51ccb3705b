"""Shows where the time of a decoding product goes inside its kernel: `python -m scripts.trace_product`.

Mosaic's profiler records a multiprocessor's clock at both ends of the kernel's named scopes, for each warpgroup.
Weights come from memory, not from the cache. It prints in cycles, as medians over warpgroups:

    set up     initializing barriers, until all threads of the block see them
    fill       from there until warpgroup 0 has started the first copies
    first tile from the block's start until the first tile of W has arrived
    waits      for all later tiles
    decode, multiply, store
    between    units of work: releasing a slot and refilling it
    all        from the block's start to the end of its last scope

and the times at which a multiprocessor's first and last warpgroups end, as means over multiprocessors. Recording a
clock costs a warpgroup about ten cycles.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import faulthandler
import functools
import json
import pathlib
import statistics
import tempfile
from typing import Any
from unittest import mock

HEAD = ("set up", "fill", "first tile", "waits", "decode", "multiply", "between", "store", "all")


@dataclasses.dataclass(frozen=True)
class Scope:
    """A named span of a warpgroup's time, in cycles since the start of the first block."""

    name: str
    start: float
    end: float


def scopes_of(trace: dict[str, Any]) -> list[tuple[int, list[Scope]]]:
    """Reads multiprocessor and scopes of each warpgroup, in the order of blocks, from the profiler's output."""
    events = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        events[event["tid"]].append(event)
    first = min(event["ts"] for event in trace["traceEvents"])
    warpgroups = []
    for _, noted in sorted(events.items()):
        scopes = [
            Scope(start["name"], 1e3 * (start["ts"] - first), 1e3 * (end["ts"] - first))
            for start, end in zip(noted[::2], noted[1::2], strict=True)
        ]
        warpgroups.append((noted[0]["pid"], scopes))
    return warpgroups


def summary(warpgroups: list[tuple[int, list[Scope]]], per_block: int) -> dict[str, float]:
    """The columns of `HEAD`, and `first end` and `last end` of a multiprocessor."""
    columns = collections.defaultdict(list)
    ends = collections.defaultdict(list)
    for index, (multiprocessor, scopes) in enumerate(warpgroups):
        spent = collections.Counter()
        for scope in scopes:
            spent[scope.name] += scope.end - scope.start
        loads = [scope for scope in scopes if scope.name == "load"]
        pairs = zip(scopes, scopes[1:], strict=False)
        begin = scopes[0].start
        columns["set up"].append(spent["Init"])
        if index % per_block == 0:
            columns["fill"].append(loads[0].start - scopes[0].end)
        columns["first tile"].append(loads[0].end - begin)
        columns["waits"].append(spent["load"] - (loads[0].end - loads[0].start))
        columns["decode"].append(spent["decode"])
        columns["multiply"].append(spent["mma"])
        columns["between"].append(
            sum(b.start - a.end for a, b in pairs if (a.name, b.name) == ("mma", "load"))
        )
        columns["store"].append(spent["store"])
        columns["all"].append(scopes[-1].end - begin)
        ends[multiprocessor].append(scopes[-1].end)
    medians = {name: statistics.median(columns[name]) for name in HEAD}
    return medians | {
        "first end": statistics.mean(map(min, ends.values())),
        "last end": statistics.mean(map(max, ends.values())),
    }


def traced(m: int, n: int, k: int, config: Any) -> dict[str, Any]:
    """The profiler's record of one call with a weight that was in no cache."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels import nvfp4
    from pallas_kernels.nvfp4_matmul import decode, layout

    w = jax.jit(lambda key: layout.prepare(nvfp4.random(key, (n, k))))(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (m, k), jnp.bfloat16)
    # More data than the L2 cache holds, and another kernel's instructions.
    flush = jax.random.normal(jax.random.key(2), (8192, 8192), jnp.bfloat16)
    square = jax.jit(lambda a: a @ a.T)
    with tempfile.TemporaryDirectory() as folder:
        # Patched in, because the kernel has no argument for profiling.
        profiled = functools.partial(plgpu.CompilerParams, profile_space=200, profile_dir=folder)
        with mock.patch.object(plgpu, "CompilerParams", profiled):
            call = jax.jit(lambda x, w: decode.product(x, w, config).partials)
            for _ in range(3):
                for written in pathlib.Path(folder).iterdir():
                    written.unlink()
                jax.block_until_ready(square(flush))
                jax.block_until_ready(call(x, w))
                jax.effects_barrier()
        (written,) = pathlib.Path(folder).iterdir()
        return json.loads(written.read_text())


def main() -> None:
    """Traces the products that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen2.5-7b"])
    parser.add_argument("--layers", nargs="+", default=["gate_up", "down"])
    parser.add_argument("--m", nargs="+", type=int, default=[8, 64, 128])
    parser.add_argument(
        "--config", help="WARPGROUPS,STEP,STAGES,BLOCKS; default: the tuned configuration"
    )
    parser.add_argument(
        "--timeout", type=int, default=90, help="time limit of the script, in seconds"
    )
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.timeout, exit=True)

    from pallas_kernels.nvfp4_matmul import config as configs
    from scripts import bench_kernels

    print("| linear | M | config | " + " | ".join(HEAD) + " | ends in a multiprocessor |")
    print("| --- | --- | --- |" + " --- |" * (len(HEAD) + 1))
    for problem in bench_kernels.problems(args.models, args.layers):
        n, k = problem.n, problem.k
        for m in args.m:
            if args.config:
                config = configs.Config(*map(int, args.config.split(",")))
            else:
                config = configs.pick_config(m, n, k)
            found = summary(scopes_of(traced(m, n, k, config)), config.warpgroups)
            shape = "/".join(map(str, dataclasses.astuple(config)))
            cells = " | ".join(f"{found[name]:,.0f}" for name in HEAD)
            ends = f"{found['first end']:,.0f}, {found['last end']:,.0f}"
            print(
                f"| {problem.model} {problem.layer} | {m} | {shape} | {cells} | {ends} |",
                flush=True,
            )
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
