"""Checks and times gate_up of a decoding step in one kernel and in two: `python -m scripts.bench_gated`.

For each model and M, gate_up at full size runs in one kernel with rows in pairs (`finished_linear.gated`), after a
norm and with LoRA (`--rank`). Its values are compared with a float32 product that is rounded where kernels round. Ten
calls must give equal bits, and so must a call in which all rows but the first are replaced. Then a call is timed in
two kernels, product and epilogue, and in one kernel, which is the default, with each of the first `--candidates`
configurations. Weights rotate among enough copies to miss the L2 cache. The script needs only jax and numpy, and ends
itself if a kernel hangs.

    python -m scripts.bench_gated --m 1 8 64 128
    python -m scripts.bench_gated --models qwen2.5-32b llama-3.1-8b --m 8 64 128 --values
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import faulthandler
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import nvfp4
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.finished_linear import epilogue, gated, lora
from pallas_kernels.nvfp4_matmul import layout, reference, shapes
from scripts import bench_kernels as bench

EPS = 1e-6


def pack(n: int, k: int, rank: int, *, is_paired: bool):
    """A branch of random matrices, or None for rank 0, and its matrices."""
    if not rank:
        return None, []
    normal = lambda seed, shape, scale: scale * jax.random.normal(jax.random.key(seed), shape)
    parts = [
        (normal(seed, (k, rank), k**-0.5), normal(seed + 9, (rank, n // 2), 1.0)) for seed in (1, 2)
    ]
    return lora.pack_branch(parts, 1.0, is_packed=True, is_paired=is_paired), parts


def stream_of(values: jax.Array) -> epilogue.Stream:
    """A residual stream of these rows, before a norm that is all ones."""
    return epilogue.stream(values, jnp.ones(values.shape[1]))


def check(problem: shapes.Problem, ms: list[int], rank: int) -> list[dict[str, Any]]:
    """Compares one weight's results for all M with plain arithmetic, and rows with themselves.

    Returns:
      A row for each M with its largest error, in bfloat16 ulps of the largest result.

    Raises:
      AssertionError: an error of more than 2 bfloat16 ulps of the largest result, or of more than half an ulp
        of it in a hundredth of all; another result of the same call; a row that depends on the others.
    """
    n, k, ranks = problem.n, problem.k, lora.filled_rank(rank) if rank else 0
    t = jax.jit(nvfp4.random, static_argnums=1)(jax.random.key(7), (n, k))
    w = jax.jit(functools.partial(layout.prepare, is_paired=True))(t)
    branch, parts = pack(n, k, rank, is_paired=True)
    values = 3 * jax.random.normal(jax.random.key(8), (max(ms), k), jnp.bfloat16)
    stream = jax.jit(stream_of)(values)
    rounded = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
    dot = functools.partial(jnp.dot, precision="highest", preferred_element_type="float32")
    y = reference.forward(stream.scaled.astype(jnp.float32), t)
    y = rounded(y / t.multiplier) * t.multiplier
    if parts:
        added = [
            rounded(
                dot(
                    dot(stream.scaled, a.astype(jnp.bfloat16)).astype(jnp.bfloat16),
                    b.astype(jnp.bfloat16),
                )
            )
            for a, b in parts
        ]
        y += jnp.concatenate(added, axis=1)
    gate, up = jnp.split(rounded(y * stream.unit(EPS)[:, None]), 2, axis=1)
    expected = np.asarray(jax.nn.silu(gate) * up)

    others = jax.jit(stream_of)(values.at[1:].multiply(-3))
    of = lambda stream, m: dataclasses.replace(
        stream,
        values=stream.values[:, :m],
        scaled=stream.scaled[:m],
        squares=stream.squares[:, :m],
    )
    call = jax.jit(functools.partial(gated.linear, eps=EPS))
    programs = compiled([call.lower(of(stream, m), w, branch=branch) for m in ms])
    rows = []
    for m, program in zip(ms, programs, strict=True):
        bench.watch()
        run = lambda stream, m=m, program=program: np.asarray(
            program(of(stream, m), w, branch=branch), np.float32
        )
        results = [run(stream) for _ in range(10)]
        assert all((result == results[0]).all() for result in results), (
            "equal calls gave different results"
        )
        assert (run(others)[0] == results[0][0]).all(), "a row depends on the other rows"
        ulp = 2.0 ** (np.floor(np.log2(np.abs(expected[:m]).max())) - 7)
        errors = np.abs(results[0] - expected[:m]) / ulp
        assert errors.max() <= 2 and np.mean(errors > 0.5) < 0.01, f"M = {m}: {errors.max()} ulp"
        config = gated.pick_config(m, n, k, rank=ranks)
        print(
            f"| {problem.model} | {m} | {rank} | {name_of(config)} | {errors.max():.3f} |",
            flush=True,
        )
        row = {"model": problem.model, "layer": "gate_up", "m": m, "n": n, "k": k, "rank": rank}
        rows.append(row | {"is_paired": config is not None, "ulp": float(errors.max())})
    return rows


def compiled(programs: list[jax.stages.Lowered]) -> list[jax.stages.Compiled]:
    """Compiles several programs at a time."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(lambda program: program.compile(), programs))


def name_of(config: gated.Config | None) -> str:
    """A configuration in a cell of the table."""
    return "two kernels" if config is None else "/".join(map(str, dataclasses.astuple(config)))


def time_calls(problem: shapes.Problem, ms: list[int], rank: int, count: int) -> None:
    """Times a call in two kernels, and in one in the first `count` configurations."""
    n, k, ranks = problem.n, problem.k, lora.filled_rank(rank) if rank else 0
    branches = {paired: pack(n, k, rank, is_paired=paired)[0] for paired in (False, True)}
    _, joined = bench.nvfp4_inputs(8, n, k)
    copies = len(joined.words)
    # The order of rows changes no time: the same bytes are read as pairs.
    paired = dataclasses.replace(joined, is_paired=True)
    counters = jnp.zeros((copies, 64), jnp.int32)

    def program(m, config):
        x = jax.random.normal(jax.random.key(1), (2, copies, m, k), jnp.bfloat16)
        stream, branch = stream_of(x[0, 0]), branches[config is not None]

        def call(x, weights):
            w, counters = weights
            options = {} if config is None else {"config": config, "counters": counters}
            of_rows = dataclasses.replace(stream, scaled=x)
            return fused.linear(of_rows, w, branch=branch, eps=EPS, is_swiglu=True, **options)

        weights = joined if config is None else paired, counters
        out = jax.ShapeDtypeStruct((m, n // 2), jnp.bfloat16)
        run = bench.rounds_of(call, out)
        return (m, config, x, weights), run.lower(x, weights, jnp.int32(1))

    configs = lambda m: [None, *gated.candidates(m, n, k, rank=ranks)[:count]]
    bench.watch()
    wanted, lowered = zip(*[program(m, c) for m in ms for c in configs(m)], strict=True)
    for (m, config, x, weights), run in zip(wanted, compiled(lowered), strict=True):
        bench.watch()
        timing = bench.measure(run, x, weights, repeats=5, name="nvfp4")
        share = bench.floor_us(m, n, k) / timing.call
        cells = problem.model, m, name_of(config), f"{timing.call:.1f}", f"{timing.loop:.1f}"
        print("| " + " | ".join(map(str, cells)) + f" | {share:.0%} |", flush=True)


def main() -> None:
    """Checks and times what the arguments name; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen2.5-7b"])
    parser.add_argument("--m", nargs="+", type=int, default=[1, 8, 64, 128])
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank; 0 for no LoRA")
    parser.add_argument(
        "--candidates", type=int, default=3, help="number of configurations to time"
    )
    parser.add_argument("--values", action="store_true", help="check values without timing")
    parser.add_argument(
        "--out", type=pathlib.Path, help="append the errors to this file, one JSON object a line"
    )
    args = parser.parse_args()
    ms = sorted({fused.padded(m) for m in args.m})
    print(bench.versions())
    problems = bench.problems(args.models, ["gate_up"])
    print(
        "| model | M | rank | configuration | largest error, ulp |\n| --- | --- | --- | --- | --- |"
    )
    for problem in problems:
        for rank in dict.fromkeys((args.rank, 0)):
            rows = check(problem, ms, rank)
            if args.out:
                with args.out.open("a") as file:
                    file.writelines(json.dumps(bench.versions() | row) + "\n" for row in rows)
    if not args.values:
        print("\n| model | M | groups/step/stages/blocks/shared | call us | loop us | of floor |")
        print("| --- | --- | --- | --- | --- | --- |")
        for problem in problems:
            time_calls(problem, ms, args.rank, args.candidates)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
