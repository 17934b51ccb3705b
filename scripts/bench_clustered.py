"""qkv, o and down of a decoding step in one kernel and in two: values and times, `python -m scripts.bench_clustered`.

For each model, layer and M, with LoRA (`--rank`), the norm before and a bias (qkv) or the residual after (o and down):
the linear in one kernel, whose sums are exchanged inside clusters (`finished_linear.clustered`), is computed ten times
and compared with itself, with the two kernels of the default, and with itself where all rows but the first are others.
Without LoRA and with the same cut both must give the same bits. Then a call is timed in two kernels and in one, in each
of the first `--candidates` configurations, or in that of `--config`. Weights rotate among enough copies to miss the L2.
The process ends itself after `--seconds`, also when a kernel hangs. Needs nothing but jax and numpy.

    python -m scripts.bench_clustered --m 8 64 128
    python -m scripts.bench_clustered --layers down --m 64 --config 2/128/4/4/8/0 4/128/3/8/8/1
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.finished_linear import clustered, epilogue, lora
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.nvfp4_matmul import config as configs
from pallas_kernels.nvfp4_matmul import layout, shapes
from scripts import bench_kernels as bench
from scripts.bench_gated import compiled, stream_of

EPS = 1e-6
LAYERS = ("qkv", "o", "down")


@dataclasses.dataclass(frozen=True)
class Case:
    """A linear with what is around it.

    Attributes:
      problem: the linear.
      m: rows of x.
      sizes: rows of W of each part.
      rank: rank of LoRA; 0 without.
    """

    problem: shapes.Problem
    m: int
    sizes: tuple[int, ...]
    rank: int

    @property
    def asked(self) -> tuple[tuple, dict[str, int]]:
        """Arguments of `clustered.candidates`."""
        rank = lora.filled_rank(self.rank) if self.rank else 0
        return (self.m, self.sizes, self.problem.k), {"rank": rank}


def sizes_of(problem: shapes.Problem) -> tuple[int, ...]:
    """Rows of W of each part of a linear."""
    if problem.layer != "qkv":
        return (problem.n,)
    # In all models of `shapes`, queries are as wide as the residual stream.
    return problem.k, (problem.n - problem.k) // 2, (problem.n - problem.k) // 2


def options_of(case: Case) -> dict[str, Any]:
    """The branch, and bias or residual, of random values."""
    normal = lambda seed, shape, scale: scale * jax.random.normal(jax.random.key(seed), shape)
    parts = [
        (
            normal(i, (case.problem.k, case.rank), case.problem.k**-0.5),
            normal(9 + i, (case.rank, n), 1.0),
        )
        for i, n in enumerate(case.sizes)
    ]
    options = {"branch": lora.pack_branch(parts, 1.0, is_packed=True) if case.rank else None}
    if case.problem.layer == "qkv":
        return options | {
            "bias": normal(5, (case.problem.n,), 1.0).astype(jnp.bfloat16),
            "eps": EPS,
        }
    stream = stream_of(normal(4, (case.m, case.problem.n), 3.0).astype(jnp.bfloat16))
    return options | {"residual": (stream, jnp.ones(case.problem.n))}


def inputs_of(case: Case, x: jax.Array) -> jax.Array | epilogue.Stream:
    """The linear's x: a stream before qkv, else activations."""
    return stream_of(x) if case.problem.layer == "qkv" else x


def results_of(y: jax.Array | epilogue.Stream) -> jax.Array:
    """[M, N] of a result: the linear's own, or a stream's values."""
    return y.values.T if isinstance(y, epilogue.Stream) else y


def name_of(config: clustered.Config | None) -> str:
    """A configuration in a cell of the table."""
    return (
        "two kernels"
        if config is None
        else "/".join(str(int(value)) for value in dataclasses.astuple(config))
    )


def check(case: Case, config: clustered.Config, w: Any) -> str:
    """Compares one case's results; returns its row of the table.

    Raises:
      AssertionError: another result of the same call; a row that depends on the others; without LoRA other bits than
        those of two kernels; with it an error of more than 2 bfloat16 ulps of the largest result.
    """
    problem, m = case.problem, case.m
    x = 3 * jax.random.normal(jax.random.key(8), (m, problem.k), jnp.bfloat16)
    options = options_of(case)
    same = None
    if not case.rank:
        blocks = layout.tiles(problem.n) // config.warpgroups * config.cluster
        same = configs.Config(config.warpgroups, config.step, config.stages, blocks)

    def call(x, w, config):
        return results_of(fused.linear(inputs_of(case, x), w, config=config, **options))

    run = jax.jit(call, static_argnums=2)
    one, two = compiled([run.lower(x, w, config), run.lower(x, w, same)])
    results = [np.asarray(one(x, w), np.float32) for _ in range(10)]
    assert all((result == results[0]).all() for result in results), "results differ"
    others = np.asarray(one(x.at[1:].multiply(-3), w), np.float32)
    assert (others[0] == results[0][0]).all(), "a row depends on the others"
    expected = np.asarray(two(x, w), np.float32)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(expected).max())) - 7)
    errors = np.abs(results[0] - expected) / ulp
    assert errors.max() <= (2 if case.rank else 0), f"{case}: {errors.max()} ulp"
    cells = problem.model, problem.layer, m, case.rank, name_of(config), f"{errors.max():.3f}"
    return "| " + " | ".join(map(str, cells)) + " |"


def time_calls(cases: list[Case], wanted: list[clustered.Config] | None, count: int) -> None:
    """Times calls of one linear in two kernels, and in one in several configurations."""
    problem = cases[0].problem
    _, weights = bench.nvfp4_inputs(8, problem.n, problem.k)
    copies = len(weights.words)
    counters = jnp.zeros((copies, 64), jnp.int32)

    def program(case, config):
        x = jax.random.normal(jax.random.key(1), (2, copies, case.m, problem.k), jnp.bfloat16)
        options = options_of(case)
        stream = inputs_of(case, x[0, 0])

        def call(x, weights):
            w, counters = weights
            of_rows = dataclasses.replace(stream, scaled=x) if problem.layer == "qkv" else x
            return results_of(fused.linear(of_rows, w, config=config, counters=counters, **options))

        out = jax.eval_shape(call, x[0, 0], jax.tree.map(lambda leaf: leaf[0], (weights, counters)))
        return (case, config, x), bench.rounds_of(call, out).lower(
            x, (weights, counters), jnp.int32(1)
        )

    def configs_of(case):
        args, kwargs = case.asked
        if wanted is None:
            return [None, *clustered.candidates(*args, **kwargs)[:count]]
        return [None, *(c for c in wanted if clustered.supports(*args, c, **kwargs) is None)]

    found, lowered = zip(
        *[program(c, config) for c in cases for config in configs_of(c)], strict=True
    )
    for (case, config, x), run in zip(found, compiled(lowered), strict=True):
        timing = bench.measure(run, x, (weights, counters), repeats=5, name="nvfp4")
        share = bench.floor_us(case.m, problem.n, problem.k) / timing.call
        cells = problem.model, problem.layer, case.m, name_of(config)
        cells += f"{timing.call:.1f}", f"{timing.loop:.1f}", f"{share:.0%}"
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def config_of(text: str) -> clustered.Config:
    """A configuration from `warpgroups/step/stages/cluster/shares/reuses_slots`, the last as 0 or 1."""
    *sizes, reuses_slots = map(int, text.split("/"))
    return clustered.Config(*sizes, bool(reuses_slots))


def main() -> None:
    """Checks and times what the arguments name; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen2.5-7b"])
    parser.add_argument("--layers", nargs="+", default=LAYERS, choices=LAYERS)
    parser.add_argument("--m", nargs="+", type=int, default=[8, 64, 128])
    parser.add_argument("--rank", type=int, default=32, help="of LoRA; 0 leaves it out")
    parser.add_argument("--candidates", type=int, default=3, help="configurations to time")
    parser.add_argument(
        "--config",
        nargs="+",
        type=config_of,
        help="warpgroups/step/stages/cluster/shares/reuses_slots",
    )
    parser.add_argument("--values", action="store_true", help="check values only")
    parser.add_argument("--times", action="store_true", help="time only")
    parser.add_argument("--seconds", type=int, default=95, help="after which the process ends")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    print(bench.versions())
    problems = bench.problems(args.models, args.layers)
    ms = sorted({fused.padded(m) for m in args.m})
    if not args.times:
        header = "model", "layer", "M", "rank", "configuration", "largest difference, ulp"
        print("| " + " | ".join(header) + " |\n" + "| --- " * len(header) + "|", flush=True)
        for problem in problems:
            w = jax.tree.map(
                lambda leaf: leaf[0],
                bench.random_weights(jax.random.key(7), 1, problem.n, problem.k),
            )
            for m, rank in itertools.product(ms, dict.fromkeys((0, args.rank))):
                case = Case(problem, m, sizes_of(problem), rank)
                positional, named = case.asked
                for config in args.config or [clustered.pick_config(*positional, **named)]:
                    print(check(case, config, w), flush=True)
    if not args.values:
        header = "model", "layer", "M", "groups/step/stages/cluster/shares/reuses slots"
        header += "call us", "loop us", "of floor"
        print("\n| " + " | ".join(header) + " |\n" + "| --- " * len(header) + "|", flush=True)
        for problem in problems:
            cases = [Case(problem, m, sizes_of(problem), args.rank) for m in ms]
            time_calls(cases, args.config, args.candidates)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
