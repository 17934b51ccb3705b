"""Finds the fastest configuration of each problem on this GPU: `python -m scripts.tune_kernels`.

Every candidate of `config.candidates` is timed as a decoding layer uses it, with LoRA of rank 32 and its epilogue,
because a finer split makes the epilogue longer. The fastest one with the right values becomes a row of this card's
table, `pallas_kernels/nvfp4_matmul/tuned/<name of the card>.json`, or of another file (`--out`). Rows of other problems
stay in the table.

It stops within `--seconds`: each row is written when it is found, and a problem is not started if it may not finish in
time. The same command continues with the rest, because it skips rows that this card has with this version of JAX
(`--again` measures those too). Like `scripts.bench_kernels`, whose timing it uses, it needs only jax and numpy, and
ends itself if a kernel hangs.

`--kernels portable` finds the Triton kernels' configurations, each timed with the sum of its parts, for the table in
`pallas_kernels/portable/tuned/`. It needs the packages of `.[triton]`.
"""

import argparse
import concurrent.futures
import dataclasses
import faulthandler
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.finished_linear import lora
from pallas_kernels.nvfp4_matmul import config as configs
from pallas_kernels.nvfp4_matmul import dense_tile
from pallas_kernels.portable import tuning as portable_tuning
from scripts import bench_kernels as bench

# LoRA rank while tuning.
RANK = 32


def tune(layer: str, m: int, n: int, k: int, *, threads: int) -> dict[str, Any]:
    """Makes the table's row for a problem: the best configuration, and every candidate's time.

    Raises:
      AssertionError: no candidate gives the right values.
    """
    candidates = [
        c
        for c in configs.candidates(m, n, k)
        if not configs.supports(m, n, k, c, with_adapter=True)
    ]
    # If possible, only candidates with which the kernel gives LoRA two warpgroups instead of larger slots.
    as_wide = [c for c in candidates if dense_tile.is_as_wide(c.warpgroups, c.step)]
    candidates = as_wide or candidates
    is_swiglu = layer == "gate_up"
    inputs = bench.nvfp4_inputs(m, n, k)
    a, b = jnp.ones((k, RANK)), jnp.ones((RANK, n // 2 if is_swiglu else n))
    branch = lora.pack_branch([(a, b)] * (2 if is_swiglu else 1), 1.0, is_packed=True)

    def compiled(config):
        def call(x, w):
            return fused.linear(x, w, branch=branch, is_swiglu=is_swiglu, config=config)

        out = jax.ShapeDtypeStruct((m, n // 2 if is_swiglu else n), jnp.bfloat16)
        return bench.rounds_of(call, out).lower(*inputs, jnp.int32(1)).compile()

    timed = []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for config, run in zip(candidates, pool.map(compiled, candidates), strict=True):
            bench.watch()
            timed.append((bench.measure(run, *inputs, repeats=1), config))
    timed.sort(key=lambda pair: pair[0].call)

    for timing, config in timed:
        bench.watch()
        try:
            bench.check_product(m, n, k, config)
        except AssertionError as wrong:
            print(f"left out: {wrong}")
            continue
        others = [dataclasses.astuple(c) + (round(t.call, 2),) for t, c in timed]
        return {
            **{"m": m, "n": n, "k": k, "config": dataclasses.asdict(config)},
            "us": {"kernel": round(timing.kernel, 2), "call": round(timing.call, 2)},
            **bench.versions(),
            "candidates": others,
        }
    raise AssertionError(f"no candidate of {(m, n, k)} gives the right values")


def tune_portable(layer: str, m: int, n: int, k: int, *, threads: int) -> dict[str, Any]:
    """Makes a row as `tune` does, for the portable kernel. The time of a candidate includes the sum of its parts."""
    candidates, timed = portable_tuning.candidates(m, n, k), []
    inputs = bench.other_inputs("portable", m, n, k, config=candidates[0])

    def compiled(config):
        return bench.stacked_rounds(m, n, config).lower(*inputs, jnp.int32(1)).compile()

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for config, future in [(c, pool.submit(compiled, c)) for c in candidates]:
            bench.watch()
            try:
                timing = bench.measure(future.result(), *inputs, repeats=1, name="product")
                timed.append((timing, config))
            except jax.errors.JaxRuntimeError as refused:  # such as too little shared memory
                print(f"left out: {config}: {str(refused).splitlines()[0]}")
    timed.sort(key=lambda pair: pair[0].call)
    for timing, config in timed:
        bench.watch()
        try:
            bench.check_other("portable", m, n, k, config=config)
        except AssertionError as wrong:
            print(f"left out: {wrong}")
            continue
        others = [dataclasses.astuple(c) + (round(t.call, 2),) for t, c in timed]
        return {
            **{"m": m, "n": n, "k": k, "config": dataclasses.asdict(config)},
            "us": {"kernel": round(timing.kernel, 2), "call": round(timing.call, 2)},
            **bench.versions(),
            "candidates": others,
        }
    raise AssertionError(f"no candidate of {(m, n, k)} gives the right values")


def merged(table: pathlib.Path, row: dict[str, Any]) -> str:
    """The table's text with this row in it, one line per row."""
    key = lambda row: (row["n"], row["k"], row["m"])
    rows = sorted([r for r in rows_of(table) if key(r) != key(row)] + [row], key=key)
    return '{"rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n"


def rows_of(table: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a table; none if there is no file."""
    return json.loads(table.read_text())["rows"] if table.exists() else []


def without_known(
    wanted: Sequence[tuple[str, int, int, int]], rows: Sequence[dict[str, Any]]
) -> list[tuple[str, int, int, int]]:
    """The problems (layer, M, N, K) for which this card has no row with this version of JAX."""
    found = bench.versions()
    same = lambda row: all(row.get(name) == found[name] for name in ("device", "jax"))
    known = {(row["m"], row["n"], row["k"]) for row in rows if same(row)}
    return [problem for problem in wanted if problem[1:] not in known]


def within[T](seconds: float, todo: Sequence[T], work: Callable[[T], None]) -> list[T]:
    """Works through a list within a time limit. Returns the items that were not started.

    Args:
      seconds: time limit. An item is not started if it would exceed this when it takes as long as the slowest so far.
      todo: the items.
      work: called with each item.
    """
    end, slowest = time.monotonic() + seconds, 0.0
    for i, problem in enumerate(todo):
        begin = time.monotonic()
        if begin + slowest > end:
            return list(todo[i:])
        work(problem)
        slowest = max(slowest, time.monotonic() - begin)
    return []


def main() -> None:
    """Tunes the problems that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen2.5-7b"])
    parser.add_argument("--layers", nargs="+", default=bench.LAYERS)
    parser.add_argument("--kernels", default="hopper", choices=("hopper", "portable"))
    parser.add_argument("--m", nargs="+", type=int, help="values of M; default: those of the table")
    parser.add_argument(
        "--threads", type=int, default=14, help="number of kernels that are compiled at a time"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="table to write; default: the package's own"
    )
    parser.add_argument(
        "--seconds", type=float, default=270, help="seconds after which the script stops"
    )
    parser.add_argument(
        "--again", action="store_true", help="also measure rows that are already in the table"
    )
    args = parser.parse_args()
    tables = portable_tuning if args.kernels == "portable" else configs
    if unread := set(args.m or ()) - set(tables.TUNED_M):
        listed = ", ".join(map(str, tables.TUNED_M))
        parser.error(f"--m: got {min(unread)}; a table is read at {listed} only")
    tune_one = tune_portable if args.kernels == "portable" else tune
    out = args.out or tables.path_of(runtime.device_kind())
    runtime.use_kernels(args.kernels)

    bench.watch()
    begin = time.monotonic()
    bench.check_decoder(args.kernels)
    problems = {(p.n, p.k): p.layer for p in bench.problems(args.models, args.layers)}
    todo = [
        (layer, m, n, k) for (n, k), layer in problems.items() for m in args.m or tables.TUNED_M
    ]
    if not args.again:
        todo = without_known(todo, rows_of(out))

    def work(problem):
        layer, m, n, k = problem
        row = tune_one(layer, m, n, k, threads=args.threads)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(merged(out, row))
        share = bench.floor_us(m, n, k) / row["us"]["kernel"]
        print(f"{k}x{n} M={m}: {row['config']} {row['us']} {share:.0%} of floor", flush=True)

    left = within(args.seconds - (time.monotonic() - begin), todo, work)
    faulthandler.cancel_dump_traceback_later()
    print(f"{len(todo) - len(left)} rows in {time.monotonic() - begin:.0f} s -> {out}")
    for layer, m, n, k in left:
        print(f"left for another run: {layer} {k}x{n} M={m}")


if __name__ == "__main__":
    main()
