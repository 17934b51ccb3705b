"""Times the NVFP4 products of real models on one GPU, beside bf16: `python -m scripts.bench_kernels`.

Values are checked before every timing. First, all 16 codes times every block scale go through the decoder, with one-hot
inputs, and must be right bit for bit. Then each shape, at full size, must be within one bfloat16 ulp of the largest
output from a float32 product.

    bytes   N * K * 9 / 16 + 2 * M * (N + K)         (bf16: 2 * (N * K + M * (N + K)))
    flops   2 * M * N * K
    floor   the larger of bytes / 4.3 TB/s and flops / 790 TFLOP/s, which JAX reaches on one H200; on another card the
            same share of its bandwidth

Calls rotate among enough copies of a weight to miss the L2 cache, each with its own x. `kernel` is the device time of
the product kernel. `call` is that of all kernels of a call, including the reduction of partial sums. Both are from
CUPTI. `loop` is the wall time per call in a jitted loop. The H100 time is a projection, not a measurement: the kernel's
time plus the extra time for its bytes at 3.35 TB/s instead of 4.8. The script needs only jax and numpy, and ends itself
if a kernel hangs.

`--kernels portable` times the Triton kernels instead, which need the packages of `.[triton]`: up to M = 128 the
fused kernel, above that the product with an unpacked copy. `--kernels reference` times the fallback that uses no
kernel. (`scripts.bench_wide` times the Hopper kernels for more rows.) `--dx` times the derivative with respect to x.
`--rank` times each product as a layer has it, with LoRA added, and bf16 with the same LoRA.

    python -m scripts.bench_kernels --kernels portable --m 1 8 16 32 64
    python -m scripts.bench_kernels --kernels portable --m 2048 8192 --layers gate_up down
    python -m scripts.bench_kernels --kernels portable --m 2048 8192 --layers gate_up down --dx
    python -m scripts.bench_kernels --kernels portable --m 2048 8192 --rank 32
"""

import argparse
import dataclasses
import datetime
import faulthandler
import functools
import json
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels import nvfp4, runtime
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.finished_linear import finished_linear, lora
from pallas_kernels.formats.nvfp4 import NVFP4Tensor
from pallas_kernels.nvfp4_matmul import config as configs
from pallas_kernels.nvfp4_matmul import (
    decode,
    layout,
    nvfp4_matmul,
    reference,
    shapes,
)
from pallas_kernels.nvfp4_matmul.config import Config
from pallas_kernels.nvfp4_matmul.layout import HopperNVFP4
from pallas_kernels.portable import layout as portable_layout
from pallas_kernels.portable import matmul as portable
from pallas_kernels.portable import tuning as portable_tuning
from scripts.limits import BF16_RATE, REACHED, bandwidth

# Bandwidths that an H200 and an H100 reach.
H200_BANDWIDTH, H100_BANDWIDTH = 4.8e12 * REACHED, 3.35e12 * REACHED
KERNEL = "nvfp4_matmul"
LAYERS = ("qkv", "o", "gate_up", "down")
# Microseconds of a call with PEER_M rows, measured on a card of the same kind: vLLM 0.26's Marlin kernel with NVFP4
# weights, and bitsandbytes 0.50.2 with NF4.
PEER_M = (1, 8, 16, 32, 64, 128)
PEERS = {
    ("qwen2.5-7b", "qkv"): (
        (11.4, 11.4, 12.2, 13.4, 19.1, 27.4),
        (11.7, 43.4, 43.4, 28.2, 28.9, 30.2),
    ),
    ("qwen2.5-7b", "o"): (
        (10.1, 9.9, 10.4, 12.0, 16.7, 22.8),
        (10.0, 23.8, 24.1, 24.5, 23.2, 24.0),
    ),
    ("qwen2.5-7b", "gate_up"): (
        (36.6, 36.7, 39.7, 44.9, 62.9, 115.3),
        (65.9, 138.3, 141.3, 147.3, 193.3, 222.4),
    ),
    ("qwen2.5-7b", "down"): (
        (30.8, 26.1, 27.0, 30.1, 46.5, 79.7),
        (41.4, 119.3, 117.2, 116.8, 119.2, 121.4),
    ),
    ("qwen2.5-32b", "qkv"): (
        (15.8, 15.2, 15.7, 19.7, 28.9, 39.7),
        (23.9, 62.0, 61.0, 62.9, 63.3, 66.6),
    ),
    ("qwen2.5-32b", "o"): (
        (13.9, 13.4, 14.3, 16.5, 24.1, 34.5),
        (15.8, 45.0, 45.0, 45.3, 46.5, 48.6),
    ),
    ("qwen2.5-32b", "gate_up"): (
        (71.1, 69.8, 76.0, 84.2, 118.4, 228.7),
        (124.7, 273.3, 277.9, 289.1, 381.4, 459.9),
    ),
    ("qwen2.5-32b", "down"): (
        (49.0, 39.9, 40.9, 53.9, 82.2, 118.6),
        (74.8, 233.6, 229.7, 230.6, 232.1, 236.1),
    ),
}
# The data read between two uses of a weight is this many times the size of the L2 cache.
_ROTATION = 5
# How a weight is laid out for kernels; the reference reads it as it is stored.
_PREPARE = {
    "hopper": layout.prepare,
    "portable": portable_layout.prepare,
    "reference": lambda tensor: tensor,
}
# Kernels of the timing loop itself: they fetch x or count.
_BOOKKEEPING = re.compile("dynamic_slice|add_fusion|compare|mem(cpy|set)", re.IGNORECASE)
# The same where a call adds LoRA: the loop's own additions take a microsecond, and are counted.
_WITHOUT_SUMS = re.compile("dynamic_slice|compare|mem(cpy|set)", re.IGNORECASE)
# Most seconds for one check or timing with its compilation; then the process ends.
_PATIENCE_S = 90


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the product kernel, all kernels, and wall time including gaps."""

    kernel: float
    call: float
    loop: float


def bytes_moved(m: int, n: int, k: int) -> float:
    """Bytes that an NVFP4 product must read and write, each once."""
    return n * k * 9 / 16 + 2 * m * (n + k)


def floor_us(m: int, n: int, k: int) -> float:
    """The least time that an NVFP4 product needs on the card at hand, in microseconds."""
    return max(bytes_moved(m, n, k) / bandwidth(), 2 * m * n * k / BF16_RATE) * 1e6


def projected_h100_us(kernel: float, m: int, n: int, k: int) -> float:
    """Projects the time of a kernel on an H200 to an H100, in microseconds."""
    return kernel + bytes_moved(m, n, k) * (1 / H100_BANDWIDTH - 1 / H200_BANDWIDTH) * 1e6


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_weights(key: jax.Array, copies: int, n: int, k: int) -> HopperNVFP4:
    """Makes a stack of `copies` random weights in the kernel's layout."""
    return layout.prepare(nvfp4.random(key, (copies, n, k), std=k**-0.5))


def rounds_of(call: Callable[..., jax.Array], out: Any) -> Callable[..., Any]:
    """Makes a jitted function of (x, weights, rounds) that computes `call(x[r, i], weights[i])` for all r, i.

    Args:
      call: the product.
      out: shape and dtype of its result.

    x is [2, copies, M, K], for two rounds, because XLA would move a single round out of the loop. Weights are a stack
    of `copies`, or a list of them.
    """

    def run(x, weights, rounds):
        copies = x.shape[1]

        def one_round(r, y):
            if isinstance(weights, list):  # XLA would copy slices of a stack
                return [call(x[r % 2, i], w) for i, w in enumerate(weights)]
            at = lambda i: jax.tree.map(lambda leaf: leaf[i], weights)
            return jax.lax.fori_loop(0, copies, lambda i, y: call(x[r % 2, i], at(i)), y)

        zeros = jnp.zeros(out.shape, out.dtype)
        start = [zeros] * copies if isinstance(weights, list) else zeros
        return jax.lax.fori_loop(0, rounds, one_round, start)

    return jax.jit(run)


def measure(
    run: Callable[..., Any],
    x: jax.Array,
    weights: Any,
    *,
    repeats: int = 7,
    name: str | None = KERNEL,
    bookkeeping: re.Pattern = _BOOKKEEPING,
) -> Timing:
    """Times a function made by `rounds_of`. `loop` is the median of several runs; `kernel` is the kernel of that
    name, or all of a call if there is none; kernels with names of `bookkeeping` are left out.
    """
    copies = x.shape[1]

    def wall(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(run(x, weights, jnp.int32(rounds)))
        return time.perf_counter() - begin

    few, many = 2, 2 + max(2, 200 // copies)
    wall(few)
    walls = [(wall(few), wall(many)) for _ in range(repeats)]
    loop = statistics.median(long - short for short, long in walls) / ((many - few) * copies)

    _, kernels = profiler.measure(run, aggregate=False)(x, weights, jnp.int32(few))
    named = [ms for kernel, ms in kernels if name and name in kernel]
    per_call = sum(ms for kernel, ms in kernels if not bookkeeping.search(kernel))
    per_call /= few * copies
    kernel = statistics.median(named) if named else per_call
    return Timing(kernel=1e3 * kernel, call=1e3 * per_call, loop=1e6 * loop)


def nvfp4_inputs(m: int, n: int, k: int) -> tuple[jax.Array, HopperNVFP4]:
    """Makes random x and weights for `rounds_of`."""
    copies = max(2, round(_ROTATION * runtime.device().l2_bytes / (n * k * 9 / 16)))
    x = jax.random.normal(jax.random.key(1), (2, copies, m, k), jnp.bfloat16)
    return x, random_weights(jax.random.key(2), copies, n, k)


def nvfp4_rounds(m: int, n: int, config: Config) -> Callable[..., Any]:
    """Makes the function of `rounds_of` for the kernel."""

    def call(x, w):
        # The next product would read y row-major; without this constraint the loop keeps y^T.
        return with_layout_constraint(decode.matmul(x, w, config), Layout((0, 1)))

    return rounds_of(call, jax.ShapeDtypeStruct((m, n), jnp.bfloat16))


@functools.lru_cache(maxsize=1)
def by_format(kernels: str, n: int, k: int, *, is_stack: bool) -> Any:
    """Makes random weights in the layout that the kernels read, enough of them to miss the L2 cache."""
    copies = max(2, round(_ROTATION * runtime.device().l2_bytes / (n * k * 9 / 16)))
    prepare = _PREPARE[kernels]
    make = jax.jit(lambda key: prepare(nvfp4.random(key, (n, k), std=k**-0.5)))
    weights = [make(key) for key in jax.random.split(jax.random.key(2), copies)]
    return (
        jax.jit(lambda *w: jax.tree.map(lambda *x: jnp.stack(x), *w))(*weights)
        if is_stack
        else weights
    )


def other_inputs(
    kernels: str, m: int, n: int, k: int, *, config: Any = None, is_dx: bool = False
) -> tuple[jax.Array, Any]:
    """Makes x, or dy, and weights: a stack for `stacked_rounds` if a configuration is given, else a list."""
    weights = by_format(kernels, n, k, is_stack=config is not None)
    copies = len(weights.words) if config is not None else len(weights)
    shape = (2, copies, m, n if is_dx else k)
    return jax.random.normal(jax.random.key(1), shape, jnp.bfloat16), weights


def linear_rounds(
    m: int, n: int, k: int, *, rank: int = 0, is_dx: bool = False
) -> Callable[..., Any]:
    """Makes the function of `rounds_of` for a list of weights, packed or dense, or for the derivative of x.

    With a rank it is the linear as a layer has it, with LoRA's branch added. Without, a dense weight is [K, N].
    """
    a = jax.random.normal(jax.random.key(9), (k, rank), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(10), (rank, n), jnp.bfloat16)

    def linear(x, w):
        if rank:
            return finished_linear(x, w, ((x @ a, b),))
        return x @ w if isinstance(w, jax.Array) else nvfp4_matmul(x, w)

    def call(x, w):
        if not is_dx:
            return linear(x, w)
        like = jnp.zeros((m, k), jnp.bfloat16)
        return jax.vjp(functools.partial(linear, w=w), like)[1](x)[0]

    return rounds_of(call, jax.ShapeDtypeStruct((m, k if is_dx else n), jnp.bfloat16))


def stacked_rounds(m: int, n: int, config: Any) -> Callable[..., Any]:
    """Makes the function of `rounds_of` for the portable kernel, with a stack and a layer's number as in decoding."""
    out = jax.ShapeDtypeStruct((m, n), jnp.bfloat16)

    def run(x, stack, rounds):
        def indexed(r, i):
            sums = portable.product(x[r % 2, i], stack, layer=i[None], config=config)
            y = _rounded(jnp.sum(sums.partials, axis=0)[:, :n]) * stack.multiplier[i]
            return y.astype(x.dtype)

        one_round = lambda r, y: jax.lax.fori_loop(0, x.shape[1], lambda i, y: indexed(r, i), y)
        return jax.lax.fori_loop(0, rounds, one_round, jnp.zeros(out.shape, out.dtype))

    return jax.jit(run)


def check_other(kernels: str, m: int, n: int, k: int, *, config: Any = None) -> float:
    """Does the check of `check_product` for `nvfp4_matmul` with any kernels, or for the portable kernel."""
    t = jax.jit(nvfp4.random, static_argnums=1)(jax.random.key(5), (n, k))
    x = jax.random.normal(jax.random.key(6), (m, k), jnp.bfloat16)
    w = jax.jit(_PREPARE[kernels])(t)
    if config is None:
        actual = jax.jit(nvfp4_matmul)(x, w)
    else:
        run = jax.jit(functools.partial(portable.product, config=config))
        sums = jnp.sum(run(x, w).partials, axis=0)[:, :n]
        actual = (_rounded(sums) * w.multiplier).astype(x.dtype)
    error = float(_ulps(actual, jax.jit(reference.forward)(x.astype(jnp.float32), t)))
    # Both the sums and the results are rounded.
    assert error <= 2, f"{(m, n, k)} {config}: {error} ulp"
    return error


def time_bf16(m: int, n: int, k: int, *, rank: int = 0, is_dx: bool = False) -> Timing:
    """Times the same as `linear_rounds` with weights in bfloat16: [K, N], or as in a layer [N, K] if there is a rank.

    Without a rank, dX is timed as the product with weights [N, K], which is what it is.
    """
    if is_dx and not rank:
        n, k, is_dx = k, n, False
    copies = max(2, round(_ROTATION * runtime.device().l2_bytes / (n * k * 2)))
    keys = jax.random.split(jax.random.key(3), copies)
    shape = (n, k) if rank else (k, n)
    weights = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    x = jax.random.normal(jax.random.key(4), (2, copies, m, n if is_dx else k), jnp.bfloat16)
    bookkeeping = _WITHOUT_SUMS if rank else _BOOKKEEPING
    rounds = linear_rounds(m, n, k, rank=rank, is_dx=is_dx)
    return measure(rounds, x, weights, bookkeeping=bookkeeping)


def check_decoder(kernels: str = "hopper") -> None:
    """Checks all 16 codes times all scales except NaN with one-hot inputs; raises AssertionError unless all bits are
    right.
    """
    scale_bytes = np.arange(127, dtype=np.uint8)
    k = nvfp4.BLOCK * len(scale_bytes)
    codes = (np.arange(64)[:, None] + np.arange(k)) % 16
    scales = np.broadcast_to(scale_bytes, (64, len(scale_bytes))).view(jnp.float8_e4m3fn)
    t = NVFP4Tensor(
        codes=nvfp4.pack_codes(jnp.asarray(codes, jnp.uint8)),
        scales=jnp.asarray(scales),
        global_scale=jnp.array([38400 / 7], jnp.float32),
        shape=(64, k),
    )
    exact = nvfp4.CODE_VALUES[codes] * np.repeat(np.float32(scales), nvfp4.BLOCK, axis=-1)
    expected = exact.T * np.asarray(t.multiplier)
    product = functools.partial(nvfp4_matmul, implementation=kernels, out_dtype=jnp.float32)
    product, w = jax.jit(product), jax.jit(_PREPARE[kernels])(t)
    one_hot = jnp.eye(k, dtype=jnp.bfloat16).reshape(nvfp4.BLOCK, len(scale_bytes), k)
    actual = np.concatenate([product(rows, w) for rows in one_hot])
    np.testing.assert_array_equal(actual, expected)  # `==` takes 0 and -0 as equal


def check_product(m: int, n: int, k: int, config: Config, *, global_scale: float = 1.0) -> float:
    """Largest error of a random product, in bfloat16 ulps of the largest output.

    Raises:
      AssertionError: it is more than 1.
    """
    t = jax.jit(nvfp4.random, static_argnums=1)(jax.random.key(5), (n, k))
    t = dataclasses.replace(t, global_scale=t.global_scale * global_scale)
    x = jax.random.normal(jax.random.key(6), (m, k), jnp.bfloat16)
    actual = jax.jit(functools.partial(decode.matmul, config=config))(x, jax.jit(layout.prepare)(t))
    error = float(_ulps(actual, jax.jit(reference.forward)(x.astype(jnp.float32), t)))
    assert error <= 1, f"{(m, n, k)} {config}: {error} ulp"
    return error


@jax.jit
def _ulps(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """Largest error, in bfloat16 ulps of the largest expected value."""
    ulp = jnp.exp2(jnp.floor(jnp.log2(jnp.abs(expected).max())) - 7)
    return jnp.abs(actual.astype(jnp.float32) - expected).max() / ulp


def check_values(
    problem: shapes.Problem, ms: Sequence[int], rank: int, kernels: str = "hopper"
) -> list[dict[str, Any]]:
    """Compares products of one random full-size weight, for all M, with one float32 product.

    Args:
      problem: the product's shape.
      ms: numbers of rows of x.
      rank: 0 for the product alone. Otherwise the product has LoRA of this rank, the epilogue finishes it, and M is
          padded, as in a decoding layer. Only the Hopper kernels have that.
      kernels: the kernels that compute the product.

    Returns:
      A row for each M with its error in bfloat16 ulps of the largest output. At most 1 is allowed, or 2 with LoRA and
      for other kernels, where a sum near a tie is rounded twice.

    Raises:
      AssertionError: an error is larger than that.
    """
    n, k = problem.n, problem.k
    ms = sorted({fused.padded(m) for m in ms}) if rank else ms
    t = jax.jit(nvfp4.random, static_argnums=1)(jax.random.key(7), (n, k))
    w = jax.jit(_PREPARE[kernels])(t)
    x = jax.random.normal(jax.random.key(8), (max(ms), k), jnp.bfloat16)
    branch, added = None, 0.0
    if rank:
        a = k**-0.5 * jax.random.normal(jax.random.key(9), (k, rank), jnp.bfloat16)
        b = jax.random.normal(jax.random.key(10), (rank, n), jnp.bfloat16)
        branch = lora.pack_branch([(a, b)], 1.0, is_packed=True)
        in_float32 = functools.partial(
            jnp.dot, precision="highest", preferred_element_type="float32"
        )
        added = _rounded(in_float32(in_float32(x, a).astype(x.dtype), b))
    expected = jax.jit(reference.forward)(x.astype(jnp.float32), t)
    if rank:
        expected = _rounded(expected / t.multiplier) * t.multiplier
    expected = np.asarray(expected + added)

    def lowered(m):
        if kernels != "hopper":
            return jax.jit(nvfp4_matmul).lower(x[:m], w)
        if rank:
            return jax.jit(fused.linear).lower(x[:m], w, branch=branch)
        config = configs.pick_config(m, n, k)
        return jax.jit(functools.partial(decode.matmul, config=config)).lower(x[:m], w)

    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda program: program.compile(), map(lowered, ms)))
    rows = []
    for m, product in zip(ms, compiled, strict=True):
        y = product(x[:m], w, branch=branch) if rank else product(x[:m], w)
        error = float(_ulps(y, expected[:m]))
        assert error <= (2 if rank or kernels != "hopper" else 1), (
            f"{problem.model} {problem.layer}, M = {m}: {error} ulp"
        )
        row = {"model": problem.model, "layer": problem.layer, "m": m, "n": n, "k": k}
        rows.append(row | {"kernels": kernels, "rank": rank, "ulp": error})
    return rows


def _rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def watch() -> None:
    """Starts the time limit of the next piece of work. The process ends if it is exceeded."""
    faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)


def versions() -> dict[str, str]:
    """Versions of the software and the device, which belong to every measurement."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }


def problems(models: Sequence[str], layers: Sequence[str]) -> list[shapes.Problem]:
    """Selects problems of `shapes.PROBLEMS` by name."""
    return [p for p in shapes.PROBLEMS if p.model in models and p.layer in layers]


def bench(
    problem: shapes.Problem,
    m: int,
    *,
    with_bf16: bool,
    kernels: str = "hopper",
    is_dx: bool = False,
    rank: int = 0,
) -> dict[str, Any]:
    """Makes one row: checks the values, then times."""
    n, k = problem.n, problem.k
    watch()
    row = {"model": problem.model, "layer": problem.layer, "m": m, "n": n, "k": k}
    row |= {"kernels": kernels, "is_dx": is_dx, "rank": rank}
    is_plain = not is_dx and not rank
    if kernels == "hopper" and m <= configs.MAX_M and is_plain:
        config = configs.pick_config(m, n, k)
        row |= {"config": dataclasses.asdict(config), "ulp": check_product(m, n, k, config)}
        watch()
        timing = measure(nvfp4_rounds(m, n, config), *nvfp4_inputs(m, n, k))
    else:
        is_fused = kernels == "portable" and m <= portable.MAX_M and is_plain
        config = portable_tuning.pick_config(m, n, k) if is_fused else None
        row |= {"config": dataclasses.asdict(config) if config else {}}
        row |= {"ulp": check_other(kernels, m, n, k)}
        watch()
        run = (
            stacked_rounds(m, n, config)
            if is_fused
            else linear_rounds(m, n, k, rank=rank, is_dx=is_dx)
        )
        inputs = other_inputs(kernels, m, n, k, config=config, is_dx=is_dx)
        bookkeeping = _WITHOUT_SUMS if rank else _BOOKKEEPING
        name = "product" if is_fused else None
        timing = measure(run, *inputs, name=name, bookkeeping=bookkeeping)
    row |= {"us": dataclasses.asdict(timing), "floor": floor_us(m, n, k)}
    if with_bf16:
        watch()
        row["bf16"] = dataclasses.asdict(time_bf16(m, n, k, rank=rank, is_dx=is_dx))
    return row


def markdown(row: dict[str, Any]) -> str:
    """Formats a row of the table with the header `HEAD`."""
    us, config = row["us"], row["config"]
    problem = (row["m"], row["n"], row["k"])
    bf16 = row.get("bf16", {}).get("kernel")
    marlin, nf4 = (None, None) if row.get("is_dx") or row.get("rank") else _peers(row)
    # A separate kernel writes a copy of the weight.
    ours = us["kernel"] if row.get("kernels", "hopper") == "hopper" else us["call"]
    of = lambda other, own: f"{other:.1f}, {other / own:.2f}" if other else ""
    cells = (
        f"{row['model']} {row['layer']} {row['k']}x{row['n']}",
        row["m"],
        "/".join(str(int(value)) for value in config.values()),
        f"{us['kernel']:.1f}",
        f"{us['call']:.1f}",
        f"{us['loop']:.1f}",
        f"{100 * row['floor'] / us['kernel']:.0f}%",
        of(bf16, ours),
        of(marlin, us["call"]),
        of(nf4, us["call"]),
        f"{projected_h100_us(us['kernel'], *problem):.1f}",
        f"{row['ulp']:.2f}",
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _peers(row: dict[str, Any]) -> tuple[float | None, float | None]:
    known = PEERS.get((row["model"], row["layer"]))
    if known is None or row["m"] not in PEER_M:
        return None, None
    return tuple(times[PEER_M.index(row["m"])] for times in known)


HEAD = """| linear (K x N) | M | groups/step/stages/blocks | kernel us | call us | loop us | of floor | bf16 us, / kernel | Marlin us, / call | NF4 us, / call | H100 us, projected | error, ulp |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def print_values(args: argparse.Namespace) -> None:
    """Prints the largest errors of products, and the problems of the tuned table that were not checked."""
    rows = []
    is_hopper = args.kernels == "hopper"
    untried = set(configs.table_of(jax.devices()[0].device_kind)) if is_hopper else set()
    print("| product | N x K | M | largest error, ulp |\n| --- | --- | --- | --- |")
    for problem in problems(args.models, args.layers):
        watch()
        found = check_values(problem, args.m, args.rank, args.kernels)
        rows += found
        untried -= {(row["m"], row["n"], row["k"]) for row in found}
        worst, ms = max(row["ulp"] for row in found), " ".join(str(row["m"]) for row in found)
        print(
            f"| {problem.model} {problem.layer} | {problem.n} x {problem.k} | {ms} | {worst:.3f} |"
        )
        sys.stdout.flush()
        if args.out:
            args.out.write_text(json.dumps(versions() | {"rows": rows}, indent=1))
    faulthandler.cancel_dump_traceback_later()
    worst = max(row["ulp"] for row in rows)
    print(f"\n{len(rows)} products, largest error {worst:.3f} ulp")
    if is_hopper:
        print(f"problems of the tuned table that were not tried: {sorted(untried) or 'none'}")


def main() -> None:
    """Checks, times and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models",
        nargs="+",
        help="models to time; default: qwen2.5-7b, or all models with --values",
    )
    parser.add_argument("--layers", nargs="+", default=LAYERS)
    parser.add_argument("--m", nargs="+", type=int, default=[1, 16, 64, 128])
    parser.add_argument("--kernels", default="hopper", choices=("hopper", "portable", "reference"))
    parser.add_argument("--dx", action="store_true", help="time the derivative with respect to x")
    parser.add_argument("--no-bf16", action="store_true", help="do not time bf16")
    parser.add_argument(
        "--values", action="store_true", help="check values of products for all M, without timing"
    )
    parser.add_argument(
        "--rank", type=int, default=0, help="rank of a LoRA that is added, here and in bf16"
    )
    parser.add_argument("--out", type=pathlib.Path, help="write all measurements to this JSON file")
    args = parser.parse_args()
    known = dict.fromkeys(problem.model for problem in shapes.PROBLEMS)
    args.models = args.models or (list(known) if args.values else ["qwen2.5-7b"])
    is_hopper = args.kernels == "hopper"
    if is_hopper and not args.values and (args.dx or args.rank or max(args.m) > configs.MAX_M):
        parser.error("scripts.bench_wide times the Hopper kernels of many rows, and for dx")
    if args.values and args.rank and not is_hopper:
        parser.error("--values --rank needs --kernels hopper")

    runtime.use_kernels(args.kernels)
    print(versions(), args.kernels)
    watch()
    check_decoder(args.kernels)
    if args.kernels == "hopper":
        for scale in (1e-6, 1e6):
            check_product(8, 256, 512, Config(2, 128, 2, 3), global_scale=scale)
    print("the decoder is exact for 16 codes x 127 scales\n", flush=True)
    if args.values:
        print_values(args)
        return

    print(HEAD, flush=True)
    rows = []
    for problem in problems(args.models, args.layers):
        for m in args.m:
            traits = {"kernels": args.kernels, "is_dx": args.dx, "rank": args.rank}
            rows.append(bench(problem, m, with_bf16=not args.no_bf16, **traits))
            print(markdown(rows[-1]), flush=True)
            if args.out:
                args.out.write_text(json.dumps(versions() | {"rows": rows}, indent=1))
    faulthandler.cancel_dump_traceback_later()

    print(
        "\n| four linears of a layer | M | kernel us | call us | bf16 us |\n| --- | --- | --- | --- | --- |"
    )
    for model in args.models:
        for m in args.m:
            layer = [row for row in rows if (row["model"], row["m"]) == (model, m)]
            total = lambda part, field, layer=layer: sum(
                row.get(part, {}).get(field, 0) for row in layer
            )
            sums = (total("us", "kernel"), total("us", "call"), total("bf16", "kernel"))
            print(f"| {model} | {m} | " + " | ".join(f"{value:.1f}" for value in sums) + " |")


if __name__ == "__main__":
    main()
