"""Finds the fastest configuration of each problem on this GPU: `python -m scripts.tune_kernels`.

Every candidate of `tuning.candidates` is timed; all kernels of a call count, since a finer split
costs a longer reduction. The fastest whose values are right becomes a row of the table. Rows of
other problems that are in the table already stay. Like `scripts.bench_kernels`, whose timing this
is, it needs nothing but jax and numpy, and ends itself when a kernel hangs.
"""

import argparse
import concurrent.futures
import dataclasses
import faulthandler
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.nvfp4_matmul import tuning
from scripts import bench_kernels as bench


def tune(m: int, n: int, k: int, *, threads: int) -> dict[str, Any]:
    """The table's row for a problem: the best configuration, and every candidate's time.

    Raises:
      AssertionError: no candidate gives the right values.
    """
    candidates = tuning.candidates(m, n, k)
    inputs = bench.nvfp4_inputs(m, n, k)

    def compiled(config):
        return bench.nvfp4_rounds(m, n, config).lower(*inputs, jnp.int32(1)).compile()

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
            "us": {name: round(us, 2) for name, us in dataclasses.asdict(timing).items()},
            **bench.versions(),
            "candidates": others,
        }
    raise AssertionError(f"no candidate of {(m, n, k)} gives the right values")


def merged(table: pathlib.Path, row: dict[str, Any]) -> str:
    """The table's text with this row in it, a line for each row."""
    key = lambda row: (row["n"], row["k"], row["m"])
    rows = json.loads(table.read_text())["rows"] if table.exists() else []
    rows = sorted([r for r in rows if key(r) != key(row)] + [row], key=key)
    return '{"rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n"


def main() -> None:
    """Tunes what the arguments name; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen2.5-7b"])
    parser.add_argument("--layers", nargs="+", default=bench.LAYERS)
    parser.add_argument("--m", nargs="+", type=int, default=tuning.TUNED_M)
    parser.add_argument("--threads", type=int, default=14, help="kernels compiled at a time")
    parser.add_argument("--out", type=pathlib.Path, help="by default the package's own table")
    args = parser.parse_args()
    out = args.out or tuning.path_of(jax.devices()[0].device_kind)

    bench.watch()
    bench.check_decoder()
    sizes = dict.fromkeys((p.n, p.k) for p in bench.problems(args.models, args.layers))
    for n, k in sizes:
        for m in args.m:
            row = tune(m, n, k, threads=args.threads)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(merged(out, row))
            share = bench.floor_us(m, n, k) / row["us"]["kernel"]
            print(f"{k}x{n} M={m}: {row['config']} {row['us']} {share:.0%} of floor", flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
