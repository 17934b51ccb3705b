"""Times NVFP4 products with many rows on one GPU, beside bf16: `python -m scripts.bench_wide`.

It times two directions, y = x W^T and dx = dy W. Each is computed by the kernel that decodes its tiles ("wide"), and by
cuBLAS on an unpacked copy ("dequantized"). Values are checked first: the unpacked copy of every shape must be right bit
for bit, and products must be within one bfloat16 ulp of the largest output from a float32 product.

    flops   2 * M * N * K
    floor   flops / 790 TFLOP/s, which JAX reaches on one H200
    unpack  N * K * (9 / 16 + 2) bytes

`kernel` is the device time of unpacking and multiplying. `rest` is that of the other kernels of a call. "dequantized"
scales its result in a separate pass here; in a model this is part of whatever reads the result. Others sum what they
split along K, which counts in `bf16 / kernel`. Both times are from CUPTI. `loop` is the wall time per call in a jitted
loop. The bf16 baseline is `jnp.dot` with the weight as [K, N], or its transpose for dx. The script needs only jax and
numpy, and ends itself if a kernel hangs.
"""

import argparse
import dataclasses
import faulthandler
import functools
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

from pallas_kernels import nvfp4, runtime
from pallas_kernels.nvfp4_matmul import (
    dequantize,
    layout,
    prefill,
    prefill_config,
    reference,
    shapes,
)
from scripts.bench_kernels import LAYERS, problems, rounds_of, versions, watch
from scripts.limits import BF16_RATE

# The data read between two uses of an operand is this many times the size of the L2 cache.
_ROTATION = 2
# Kernels of the timing loop itself: they fetch an operand, count, or keep a result.
_BOOKKEEPING = re.compile(
    "(?<!update_)slice|add_fusion|compare|broadcast|mem(cpy|set)", re.IGNORECASE
)
# Elementwise kernels of a call. Other kernels multiply; their names depend on the library.
_REST = re.compile("^(loop|input|wrapped)_|transpose|copy", re.IGNORECASE)
# Rows of the float32 product for the check, which is slow without tensor cores.
_CHECKED_ROWS = 384


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one call: kernels that unpack or multiply, other kernels, and wall time including gaps."""

    kernel: float
    rest: float
    loop: float


def measure(run: Callable[..., Any], x: jax.Array, weights: Any) -> Timing:
    """Times a function that `rounds_of` made, compiled or not."""
    copies = x.shape[1]

    def wall(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(run(x, weights, jnp.int32(rounds)))
        return time.perf_counter() - begin

    few = 2
    wall(few)
    # Enough calls for a tenth of a second, according to the first estimate.
    many = few + max(2, min(100, round(0.1 / (wall(few) / few))))
    walls = [(wall(few), wall(many)) for _ in range(3)]
    loop = statistics.median(long - short for short, long in walls) / ((many - few) * copies)

    _, kernels = profiler.measure(run, aggregate=False)(x, weights, jnp.int32(few))
    own = [(name, ms) for name, ms in kernels if not _BOOKKEEPING.search(name)]
    rest = sum(ms for name, ms in own if _REST.search(name)) / (few * copies)
    total = sum(ms for _, ms in own) / (few * copies)
    return Timing(kernel=1e3 * (total - rest), rest=1e3 * rest, loop=1e6 * loop)


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to compute a product.

    Attributes:
      direction: "forward" or "dx".
      packed: whether it reads a packed weight.
      call: (x or dy, weight) -> y or dx.
    """

    direction: str
    packed: bool
    call: Callable[..., jax.Array]


ARMS = {
    "bf16": Arm("forward", False, jnp.dot),
    "wide": Arm("forward", True, prefill.matmul),
    "dequantized": Arm("forward", True, dequantize.forward),
    "bf16 dx": Arm("dx", False, lambda dy, w: jnp.dot(dy, w.T)),
    "wide dx": Arm("dx", True, prefill.backward),
    "dequantized dx": Arm("dx", True, dequantize.backward),
}
# Most ulps of error of an arm, with a margin for float32 sums: one, and half of one more if a product is rounded twice.
_ROUNDED_ONCE, _ROUNDED_TWICE = 1.1, 1.6


def time_arm(arm: Arm, m: int, n: int, k: int) -> Timing:
    """Times an arm on random operands; enough copies rotate to miss the L2 cache."""
    inner, outer = (k, n) if arm.direction == "forward" else (n, k)
    weight_bytes = n * k * (9 / 16 if arm.packed else 2)
    copies = max(2, round(_ROTATION * runtime.device().l2_bytes / (weight_bytes + 2 * m * (n + k))))
    keys = jax.random.split(jax.random.key(1), copies + 1)
    x = jax.random.normal(keys[0], (2, copies, m, inner), jnp.bfloat16)
    if arm.packed:
        random = jax.jit(lambda key: layout.prepare(nvfp4.random(key, (copies, n, k))))
        weights = random(keys[1])
    else:
        weights = [jax.random.normal(key, (k, n), jnp.bfloat16) for key in keys[1:]]
    run = rounds_of(arm.call, jax.ShapeDtypeStruct((m, outer), jnp.bfloat16))
    return measure(run, x, weights)


def check(
    m: int, n: int, k: int, names: Sequence[str], *, is_paired: bool = False
) -> dict[str, float]:
    """Largest errors of the packed arms, in bfloat16 ulps of the largest output.

    Args:
      m: rows of x.
      n: rows of W.
      k: columns of W.
      names: arms.
      is_paired: whether the rows of W, gate and up, are stored in pairs, as a model holds them.

    Raises:
      AssertionError: an error is too large, or the unpacked copy is not exact.
    """
    t = jax.jit(nvfp4.random, static_argnums=1)(jax.random.key(5), (n, k))
    w = jax.jit(functools.partial(layout.prepare, is_paired=is_paired))(t)
    unpacked = jax.jit(dequantize.dequantize)(w)
    # Compared as bits: at 72B there is no memory for a float32 copy of gate_up.
    equal = jax.jit(lambda a, t: jnp.all(a == nvfp4.scaled_codes(t)))(unpacked, t)
    assert bool(equal), f"{(n, k)}: the unpacked copy is not exact"
    sample = np.linspace(0, m - 1, min(m, _CHECKED_ROWS)).astype(int)
    oracles = {"forward": reference.forward, "dx": reference.backward}
    errors = {}
    for name in names:
        arm = ARMS[name]
        if not arm.packed:
            continue
        shape = (m, k if arm.direction == "forward" else n)
        x = jax.random.normal(jax.random.key(6), shape, jnp.bfloat16)
        actual = np.asarray(jax.jit(arm.call)(x, w)[sample], np.float32)
        oracle = jax.jit(oracles[arm.direction])
        expected = np.asarray(oracle(x[sample].astype(jnp.float32), t))
        largest = np.abs(expected).max()
        ulp = 2.0 ** (np.floor(np.log2(largest)) - 7)
        errors[name] = float(np.abs(actual - expected).max() / ulp)
        limit = _ROUNDED_ONCE if name.startswith("wide") else _ROUNDED_TWICE
        assert errors[name] <= limit, f"{name} {(m, n, k)}: {errors[name]} ulp of {largest}"
    return errors


def time_unpacking(n: int, k: int) -> dict[str, float]:
    """Times the kernel that only unpacks, by configuration, in microseconds."""
    copies = max(2, round(_ROTATION * runtime.device().l2_bytes / (n * k * 9 / 16)))
    random = jax.jit(lambda key: layout.prepare(nvfp4.random(key, (copies, n, k))))
    weights, x, times = random(jax.random.key(2)), jnp.zeros((2, copies, 1)), {}
    out = jax.ShapeDtypeStruct((n, k), jnp.bfloat16)
    for step in (64, 128, 256):
        for stages, per_multiprocessor in ((3, 2), (3, 4), (2, 6), (3, 8)):
            config = dequantize.Config(
                step, stages, runtime.device().processors * per_multiprocessor
            )
            if dequantize.supports(n, k, config) is not None:
                continue
            watch()
            run = rounds_of(lambda x, w, c=config: dequantize.dequantize(w, c), out)
            times[f"{step}/{stages}/{per_multiprocessor}"] = measure(run, x, weights).kernel
    return times


def bench(problem: shapes.Problem, m: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Makes the rows of one product: checks the values, then times."""
    n, k = problem.n, problem.k
    watch()
    errors = check(m, n, k, names)
    found, baseline = [], {}
    for name in names:
        arm = ARMS[name]
        watch()
        timing = time_arm(arm, m, n, k)
        own = timing.kernel + (0 if name.startswith("dequantized") else timing.rest)
        baseline.setdefault(arm.direction, own)
        found.append(
            {
                "model": problem.model,
                "layer": problem.layer,
                "m": m,
                "n": n,
                "k": k,
                "arm": name,
                "us": dataclasses.asdict(timing),
                "share": 2 * m * n * k / BF16_RATE * 1e6 / own,
                "of_bf16": baseline[arm.direction] / own,
                "ulp": errors.get(name),
                "tile": _tile(m, n, k, arm) if name.startswith("wide") else None,
            }
        )
    return found


def _tile(m: int, n: int, k: int, arm: Arm) -> str:
    if arm.direction == "forward":
        config = prefill_config.pick_config(m, n, k)
    else:
        config = prefill_config.pick_config(m, k, n, backward=True)
    return f"{config.rows} rows" + (f" / {config.split}" if config.split > 1 else "")


def markdown(row: dict[str, Any]) -> str:
    """Formats a row of the table with the header `HEAD`."""
    us = row["us"]
    cells = (
        f"{row['model']} {row['layer']} {row['k']}x{row['n']}",
        row["m"],
        row["arm"] + (f", {row['tile']}" if row["tile"] else ""),
        f"{us['kernel']:.1f}",
        f"{us['rest']:.1f}",
        f"{us['loop']:.1f}",
        f"{100 * row['share']:.0f}%",
        f"{row['of_bf16']:.3f}",
        "" if row["ulp"] is None else f"{row['ulp']:.2f}",
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


HEAD = """| linear (K x N) | M | arm | kernel us | rest us | loop us | of 790 TFLOP/s | bf16 / kernel | error, ulp |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    """Checks, times and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen2.5-7b"])
    parser.add_argument("--layers", nargs="+", default=LAYERS)
    parser.add_argument("--m", nargs="+", type=int, default=[256, 512, 1024, 2048, 8192])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--values", action="store_true", help="check values without timing")
    parser.add_argument("--unpack", action="store_true", help="time only the unpacking kernel")
    parser.add_argument("--out", type=pathlib.Path, help="write all measurements to this JSON file")
    args = parser.parse_args()

    print(versions(), flush=True)
    if args.unpack:
        for problem in problems(args.models, args.layers):
            moved = problem.n * problem.k * (9 / 16 + 2)
            times = time_unpacking(problem.n, problem.k)
            for config, us in sorted(times.items(), key=lambda item: item[1]):
                rate = moved / us / 1e6
                label = f"{problem.model} {problem.layer} step/stages/blocks per SM {config}"
                print(f"{label}: {us:.1f} us, {rate:.2f} TB/s", flush=True)
        faulthandler.cancel_dump_traceback_later()
        return

    if args.values:
        arms = [name for name in args.arms if ARMS[name].packed]
        print("| linear | M | largest error, ulp: " + ", ".join(arms) + " |\n| --- | --- | --- |")
        rows = []
        cases = [
            (problem, m, is_paired)
            for problem in problems(args.models, args.layers)
            for is_paired in ((False, True) if problem.layer == "gate_up" else (False,))
            for m in args.m
        ]
        for problem, m, is_paired in cases:
            watch()
            errors = check(m, problem.n, problem.k, arms, is_paired=is_paired)
            found = ", ".join(f"{error:.2f}" for error in errors.values())
            name = f"{problem.model} {problem.layer}" + (" in pairs" if is_paired else "")
            print(f"| {name} | {m} | {found} |", flush=True)
            row = {"model": problem.model, "layer": problem.layer, "m": m, "ulps": errors}
            rows.append(row | {"n": problem.n, "k": problem.k, "is_paired": is_paired})
            if args.out:
                args.out.write_text(json.dumps(versions() | {"rows": rows}))
        faulthandler.cancel_dump_traceback_later()
        return

    print("\n" + HEAD, flush=True)
    rows = []
    for problem in problems(args.models, args.layers):
        for m in args.m:
            rows += bench(problem, m, args.arms)
            print("\n".join(map(markdown, rows[-len(args.arms) :])), flush=True)
            if args.out:
                args.out.write_text(json.dumps(versions() | {"rows": rows}, indent=1))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
