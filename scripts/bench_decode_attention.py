"""Times decode attention on one GPU, beside cuDNN: `python -m scripts.bench_decode_attention`.

Values are checked before every timing: the result must equal the reference within bfloat16 rounding, the cache may
differ only in the last bit of a new key, and a row's bits must not change when the other rows are removed.
`--sweep` times every configuration instead of the default one. Where rows share the pages of a prompt (16 prompts of 8
rows), a second line of the table times the kernel with each row reading its pages by itself.

    timeout 100 python -m scripts.bench_decode_attention --no-cudnn --only 9 10 11

    bytes   4 * J * C * (live tokens of all rows), keys and values in bfloat16
    floor   bytes / 4.3 TB/s, the bandwidth that JAX reaches on one H200; elsewhere the same share of the nominal one

A call rotates, appends and attends for one layer. The caches of all layers together are larger than the L2 cache.
`kernel` is the device time of the attention kernel. `plan` is that of all kernels that make the plan, once per step for
all layers. Both are from CUPTI. `loop` is the wall time per call in a jitted loop over layers. cuDNN reads a contiguous
cache and neither rotates nor appends; its column is the sum of its kernels. The script needs only jax and numpy, and
ends itself if a kernel hangs.
"""

import argparse
import dataclasses
import faulthandler
import functools
import itertools
import json
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels import runtime
from pallas_kernels.decode_attention import config as configs
from pallas_kernels.decode_attention import decode, reference
from pallas_kernels.decode_attention.config import PAGE, Config
from scripts.bench_kernels import versions, watch
from scripts.limits import bandwidth

KERNEL = "decode_attention"
# The data read between two uses of a weight is this many times the size of the L2 cache.
_ROTATION = 5
# Kernels of the timing loop itself: they fetch an operand, count, or copy the cache once at the start.
_BOOKKEEPING = re.compile("slice|add_fusion|compare|broadcast|copy|mem(cpy|set)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The attention of one layer in one decoding step.

    Attributes:
      name: printed name.
      lengths: tokens of each row, including the new one.
      width: W, most pages of a row.
      heads: H, query heads.
      key_heads: J, key/value heads.
      head_size: C, channels per head.
      target: the most microseconds that the kernel should take, or None.
      siblings: rows of each prompt; 1 if rows share no pages.
      shared: pages of each prompt, which its rows share.
    """

    name: str
    lengths: Sequence[int]
    width: int
    heads: int = 28
    key_heads: int = 4
    head_size: int = 128
    target: float | None = None
    siblings: int = 1
    shared: int = 0

    @property
    def floor_us(self) -> float:
        """The least time that any implementation needs on the card at hand, in microseconds; shared pages are read once."""
        again = len(self.lengths) - len(self.lengths) // self.siblings
        tokens = sum(self.lengths) - again * self.shared * PAGE
        return 4 * self.key_heads * self.head_size * tokens / bandwidth() * 1e6

    @property
    def layers(self) -> int:
        """The number of layers whose caches together exceed the L2 cache."""
        return max(
            2, round(_ROTATION * runtime.device().l2_bytes / (self.floor_us * bandwidth() / 1e6))
        )


def log_normal(rows: int, mean: float) -> list[int]:
    """Row lengths from a log-normal distribution with sigma 1, at most 4096, with a fixed seed."""
    lengths = np.random.default_rng(0).lognormal(np.log(mean) - 0.5, 1, rows)
    return np.clip(lengths.round(), 1, 4096).astype(int).tolist()


def uniform(rows: int) -> list[int]:
    """Row lengths from 256 to 768, like rows of a rollout that began together."""
    return np.linspace(256, 768, rows).astype(int).tolist()


def grouped(prompt: int, mean: int) -> Problem:
    """16 prompts of so many tokens with 8 completions each, of exponential lengths with a mean, with a fixed seed."""
    own = 1 + np.random.default_rng(0).exponential(mean, 128).astype(int)
    width = -(-(prompt + int(own.max())) // PAGE)
    name = f"16 x 8, prompts of {prompt}, mean {mean}"
    return Problem(name, (prompt + own).tolist(), width, siblings=8, shared=prompt // PAGE)


def problems() -> list[Problem]:
    """The problems to time. Their shapes are those of 7B unless the name says otherwise."""
    skewed = Problem("64, log-normal, mean 512", log_normal(64, 512), 64)
    return [
        Problem("1 x 4096", [4096], 64, target=7),
        Problem("8 x 256 ... 768", uniform(8), 12),
        Problem("16 x 256 ... 768", uniform(16), 12),
        dataclasses.replace(skewed, target=skewed.floor_us / 0.8),
        Problem("64 x 256 ... 768", uniform(64), 12),
        Problem("128, log-normal, mean 512", log_normal(128, 512), 64),
        Problem("32B: 16 x 256 ... 768", uniform(16), 12, heads=40, key_heads=8),
        Problem("0.5B: 64 x 256 ... 768", uniform(64), 12, heads=14, key_heads=2, head_size=64),
        Problem("1 x 32768", [32768], 512),
        grouped(256, 125),
        grouped(1024, 125),
        grouped(2048, 125),
    ]


def inputs(problem: Problem, layers: int) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Makes random inputs: (qkv, cos, sin, tables, ends), with qkv for two rounds of all layers, and (keys, values)."""
    rng = np.random.default_rng(1)
    lengths, size = np.asarray(problem.lengths), problem.head_size
    counts = -(-lengths // PAGE)
    pages = rng.permutation(counts.sum()) + 1  # page 0 is for unused rows
    tables = np.zeros((len(lengths), problem.width), np.int32)
    for row, own in enumerate(np.split(pages, np.cumsum(counts)[:-1])):
        tables[row, : len(own)] = own
        first = row - row % problem.siblings
        tables[row, : problem.shared] = tables[first, : problem.shared]
    angles = rng.uniform(0, 2 * np.pi, (len(lengths), size // 2)).astype(np.float32)
    random = jax.jit(
        lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16),
        static_argnums=1,
    )
    all_heads = problem.heads + 2 * problem.key_heads
    cache = (layers, len(pages) + 1, problem.key_heads, PAGE, size)
    small = (
        random(1, (2, layers, len(lengths), all_heads, size)),
        *map(jnp.asarray, (np.cos(angles), np.sin(angles), tables, lengths.astype(np.int32) - 1)),
    )
    return small, (random(2, cache), random(3, cache))


def shared_pages(problem: Problem, *, shares: bool) -> jax.Array | None:
    """The number of pages that each row shares, int32 [B]; None if rows read them by themselves."""
    return jnp.full(len(problem.lengths), problem.shared, jnp.int32) if shares else None


def check(problem: Problem, config: Config, *, shares: bool = False) -> float:
    """Compares the kernel with the reference. Returns its largest error relative to the allowed bfloat16 rounding.

    Raises:
      AssertionError: the error is above 1, the cache is wrong, or rows depend on each other.
    """
    (qkv, cos, sin, tables, ends), (keys, values) = inputs(problem, 2)
    qkv, layer = qkv[0, 1], jnp.int32(1)
    # Rows in use write to distinct places, so the two caches may differ only by rounding.
    oracle = jax.jit(reference.decode_attention)
    shared = shared_pages(problem, shares=shares)
    run = jax.jit(functools.partial(decode.decode_attention, config=config, shared=shared))
    out, *caches = run(qkv, cos, sin, keys, values, layer, tables, ends)
    expected, *expected_caches = oracle(qkv, cos, sin, keys, values, layer, tables, ends)

    value_heads = -problem.key_heads
    positive = qkv.at[:, value_heads:].set(jnp.abs(qkv[:, value_heads:]))
    # Weights and result are rounded, and a query or a key may be rounded in the other direction.
    bound, *_ = oracle(positive, cos, sin, keys, jnp.abs(values), layer, tables, ends)
    difference = np.abs(np.asarray(out, np.float32) - np.asarray(expected, np.float32))
    error = float((difference / (np.asarray(bound, np.float32) * 2**-7)).max())
    assert error <= 1, f"{problem.name} {config}: the error is {error} times what rounding allows"

    @jax.jit
    def furthest(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.max(jnp.abs(a - b) / jnp.maximum(jnp.abs(b), 1e-6))

    for name, a, b in zip(("keys", "values"), caches, expected_caches, strict=True):
        assert furthest(a, b) <= 2**-7, f"{problem.name} {config}: {name} are wrong"

    alone = (tables.at[1:].set(0), ends.at[1:].set(0))
    same, *_ = run(qkv, cos, sin, keys, values, layer, *alone)
    np.testing.assert_array_equal(
        np.asarray(same[0], np.float32),
        np.asarray(out[0], np.float32),
        "a row depends on the other rows",
    )
    return error


def measure(
    run: Callable[..., Any], arguments: Sequence[Any], calls: int, *, repeats: int = 5
) -> dict[str, float]:
    """Microseconds per call of `run(*arguments, rounds)`, which makes `calls` calls in each round."""
    run = jax.jit(run)

    def wall(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments, jnp.int32(rounds)))
        return time.perf_counter() - begin

    few, many = 2, 2 + max(2, 200 // calls)
    wall(few)
    walls = [(wall(few), wall(many)) for _ in range(repeats)]
    loop = statistics.median(long - short for short, long in walls) / ((many - few) * calls)

    _, kernels = profiler.measure(run, aggregate=False)(*arguments, jnp.int32(few))
    named = [ms for name, ms in kernels if KERNEL in name]
    total = sum(ms for name, ms in kernels if not _BOOKKEEPING.search(name)) / (few * calls)
    kernel = statistics.median(named) if named else total
    return {"kernel": 1e3 * kernel, "call": 1e3 * total, "loop": 1e6 * loop}


def barred(r: jax.Array, array: jax.Array) -> jax.Array:
    """Returns the array as a value that a loop may change in round r, so that XLA cannot move work out of the loop."""
    return jax.lax.optimization_barrier((r, array))[1]


def rounds_of(layers: int, config: Config, shared: jax.Array | None = None) -> Callable[..., Any]:
    """Makes a function of (inputs, caches, rounds) that attends in every layer, `rounds` times."""

    def run(small, caches, rounds):
        qkv, *rest, tables, ends = small
        plan = decode.plan(caches[0].shape, tables, ends, config, shared)

        def one_layer(layer, carry):
            r, _, keys, values = carry
            out, keys, values = decode.decode_attention(
                qkv[r % 2, layer], *rest, keys, values, layer, tables, ends, plan, config, shared
            )
            return r, out, keys, values

        def one_round(r, carry):
            return jax.lax.fori_loop(0, layers, one_layer, (r, *carry))[1:]

        out = jnp.zeros_like(qkv[0, 0, :, : -2 * caches[0].shape[2]])
        return jax.lax.fori_loop(0, rounds, one_round, (out, *caches))[0]

    return run


def time_kernel(problem: Problem, config: Config, *, shares: bool = False) -> dict[str, float]:
    """Times the kernel with one configuration."""
    layers, shared = problem.layers, shared_pages(problem, shares=shares)
    return measure(rounds_of(layers, config, shared), inputs(problem, layers), layers)


def time_plan(problem: Problem, config: Config, *, shares: bool = False) -> float:
    """Microseconds of all kernels that make one plan."""
    (*_, tables, ends), (keys, _) = inputs(problem, 2)

    def run(tables, ends, rounds):
        shared = shared_pages(problem, shares=shares)
        plan = lambda r, _: decode.plan(keys.shape, tables, barred(r, ends), config, shared)
        return jax.lax.fori_loop(0, rounds, plan, plan(rounds, None))

    rounds = 20
    _, kernels = profiler.measure(jax.jit(run), aggregate=False)(tables, ends, jnp.int32(rounds))
    return 1e3 * sum(ms for _, ms in kernels) / (rounds + 1)


def time_cudnn(problem: Problem) -> dict[str, float]:
    """Times `jax.nn.dot_product_attention` on a contiguous cache with as many slots as the longest row."""
    rows, slots = len(problem.lengths), -(-max(problem.lengths) // PAGE) * PAGE
    lengths = jnp.asarray(problem.lengths, jnp.int32)
    layers = problem.layers
    random = jax.jit(
        lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16),
        static_argnums=1,
    )
    cache = (rows, slots, problem.key_heads, problem.head_size)
    # A list, because XLA would copy the slices of a stack.
    caches = [(random(2 * i, cache), random(2 * i + 1, cache)) for i in range(layers)]
    queries = random(99, (2, layers, rows, 1, problem.heads, problem.head_size))

    def run(queries, caches, rounds):
        attend = functools.partial(
            jax.nn.dot_product_attention,
            query_seq_lengths=jnp.ones_like(lengths),
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )

        def one_round(r, outs):
            # Each call depends on the one before, as in a model's layers.
            for i, (keys, values) in enumerate(caches):
                query = queries[r % 2, i] + 0 * outs[i - 1]
                outs = [*outs[:i], attend(query, keys, values), *outs[i + 1 :]]
            return outs

        return jax.lax.fori_loop(0, rounds, one_round, [jnp.zeros_like(queries[0, 0])] * layers)

    return measure(run, (queries, caches), layers)


def configurations(problem: Problem) -> list[Config]:
    """All configurations worth trying, each with as many page slots as fit into shared memory."""
    group = problem.heads // problem.key_heads
    found, processors = [], runtime.device().processors
    for pages, groups in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4)):
        stages = 768 // problem.head_size // groups
        if pages <= problem.width:
            found.append(Config(pages, stages, -(-64 // pages), processors, groups))
    most = configs.most_shared_bytes()
    fits = lambda c: configs.shared_bytes(group, problem.head_size, c) <= most
    return [config for config in found if fits(config)]


def arms(problem: Problem) -> list[tuple[Config, bool]]:
    """The default configuration and whether rows read shared pages together; then what a problem is compared with."""
    shape = len(problem.lengths), problem.key_heads, problem.head_size
    picked, shares = configs.pick_config(*shape), problem.shared > 0
    found = [(picked, shares)]
    if shares:
        found.append((picked, False))
    return found


def markdown(problem: Problem, row: dict[str, Any]) -> str:
    """Formats a row of the table with the header `HEAD`."""
    us, cudnn = row["us"], row.get("cudnn", {}).get("call")
    cells = (
        problem.name + (", together" if row["shares"] else ""),
        "/".join(str(int(value)) for value in row["config"].values()),
        *(f"{us[part]:.1f}" for part in ("kernel", "loop", "plan")),
        f"{problem.floor_us:.1f}",
        f"{problem.floor_us / us['kernel']:.2f}",
        f"{cudnn:.1f}" if cudnn else "",
        f"{problem.target:.1f}" if problem.target else "",
        f"{row['error']:.2f}",
    )
    return "| " + " | ".join(cells) + " |"


HEAD = """| rows x tokens | pages/stages/parts/blocks/warpgroups | kernel us | loop us | plan us | floor us | of floor | cuDNN us | target us | error / allowed |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    """Checks, times and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", type=int, help="numbers of the problems to time, from 0"
    )
    parser.add_argument("--sweep", action="store_true", help="time all configurations")
    parser.add_argument("--no-cudnn", action="store_true", help="do not time cuDNN")
    parser.add_argument("--out", type=pathlib.Path, help="write all measurements to this JSON file")
    args = parser.parse_args()

    print(versions())
    print("\n" + HEAD, flush=True)
    chosen = problems() if args.only is None else [problems()[i] for i in args.only]
    rows = []
    for problem in chosen:
        swept = [(config, problem.shared > 0) for config in configurations(problem)]
        for config, shares in swept if args.sweep else arms(problem):
            watch()
            row = {"problem": problem.name, "config": dataclasses.asdict(config), "shares": shares}
            row |= {"floor": problem.floor_us, "error": check(problem, config, shares=shares)}
            watch()
            row["us"] = time_kernel(problem, config, shares=shares)
            row["us"]["plan"] = time_plan(problem, config, shares=shares)
            if not (args.sweep or args.no_cudnn):
                watch()
                row["cudnn"] = time_cudnn(problem)
            rows.append(row)
            print(markdown(problem, row), flush=True)
            if args.out:
                args.out.write_text(json.dumps(versions() | {"rows": rows}, indent=1))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
