"""Benchmarks of kernels, for `scripts.bench`: products, decode attention, quantizing, loading; and tuning.

Shapes are those of `pallas_kernels.nvfp4_matmul.shapes`. Values are checked before every timing. Calls rotate among
enough copies of a weight to miss the L2 cache, each with its own x. `kernel_us` is the device time of the longest
kernel of a call, `call_us` that of all its kernels (both from CUPTI), and `loop_us` the wall time of a call in a jitted
loop. `of_floor` is the share of the larger of two times: of all bytes at the bandwidth that the card reaches, and of all
operations at 790 TFLOP/s, which JAX reaches on one H200.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import nvfp4, runtime
from pallas_kernels.decode_attention import config as attention_configs
from pallas_kernels.decode_attention import decode as attention
from pallas_kernels.decode_attention import decode_attention as attend_any
from pallas_kernels.decode_attention import reference as attention_reference
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.finished_linear import finished_linear, lora
from pallas_kernels.nvfp4_matmul import decode_config as configs
from pallas_kernels.nvfp4_matmul import layout, nvfp4_matmul, reference, shapes
from pallas_kernels.portable import layout as portable_layout
from pallas_kernels.portable import matmul as portable
from pallas_kernels.portable import tuning as portable_tuning
from qerl_jax.checkpoint import base_model, hf_folder
from qerl_jax.checkpoint.folder_tensors import FolderTensors
from qerl_jax.config import LoraConfig, ModelConfig
from qerl_jax.model import architecture
from qerl_jax.model.architecture import Architecture
from qerl_jax.model.transformer import Transformer, random_base
from qerl_jax.quantization import quantizer
from qerl_jax.quantization.calibration import Calibration
from scripts import bench
from scripts.bench import BF16_RATE, Benchmark, Tell
from scripts.bench_sampling import shape_of
from scripts.make_tiny_base import write_model

# How a weight is laid out for kernels; the reference reads it as it is stored.
PREPARE = {
    "hopper": layout.prepare,
    "portable": portable_layout.prepare,
    "reference": lambda tensor: tensor,
}
# The data read between two uses of a weight is this many times the size of the L2 cache.
_ROTATION = 5
# Kernels of the timing loop itself: they fetch an operand, count, or keep a result.
_BOOKKEEPING = re.compile(
    "(?<!update_)dynamic_slice|add_fusion|compare|mem(cpy|set)", re.IGNORECASE
)
TINY_PROBLEM = shapes.Problem("tiny", "qkv", 128, 128)


def problem_of(case: SimpleNamespace) -> shapes.Problem:
    """The shape of a case's linear."""
    for problem in (*shapes.PROBLEMS, dataclasses.replace(TINY_PROBLEM, layer=case.layer)):
        names = (case.model, f"qwen2.5-{case.model}")
        if problem.layer == case.layer and problem.model in names:
            return problem
    raise ValueError(f"--model {case.model} --layer {case.layer}: no such product in shapes.py")


def kernels_of(case: SimpleNamespace) -> str:
    """The kernels of a case: those of the device at hand for "auto"."""
    if runtime.platform() == "gpu":  # elsewhere kernels are interpreted
        runtime.use_kernels(case.kernels)
    if case.kernels != "auto":
        return case.kernels
    return "hopper" if runtime.unless_hopper() is None else "reference"


def floor_us(m: int, n: int, k: int, weight_bytes: float = 9 / 16) -> float:
    """The least time of a product on the card at hand, in microseconds."""
    moved = n * k * weight_bytes + 2 * m * (n + k)
    return max(moved / bench.bandwidth(), 2 * m * n * k / BF16_RATE) * 1e6


def copies_of(n: int, k: int, weight_bytes: float) -> int:
    """The number of copies of a weight that miss the L2 cache together; two without a GPU."""
    if runtime.platform() != "gpu":
        return 2
    return max(2, round(_ROTATION * runtime.device().l2_bytes / (n * k * weight_bytes)))


def rounds_of(call: Callable[..., jax.Array], out: jax.ShapeDtypeStruct) -> Callable[..., Any]:
    """Makes a jitted function of (x, weights, rounds) that computes `call(x[r, i], weights[i])`, like `out`, for all r, i.

    x is [2, copies, M, K], for two rounds, because XLA would move a single round out of the loop. Weights are a stack
    of copies, or a list of them, where XLA would copy slices of a stack.
    """

    def run(x, weights, rounds):
        copies = x.shape[1]

        def one_round(r, y):
            if isinstance(weights, list):
                return [call(x[r % 2, i], w) for i, w in enumerate(weights)]
            at = lambda i: jax.tree.map(lambda leaf: leaf[i], weights)
            return jax.lax.fori_loop(0, copies, lambda i, y: call(x[r % 2, i], at(i)), y)

        zeros = jnp.zeros(out.shape, out.dtype)
        start = [zeros] * copies if isinstance(weights, list) else zeros
        return jax.lax.fori_loop(0, rounds, one_round, start)

    return jax.jit(run)


def timing(run: Callable[..., Any], *arguments: Any, calls: int, repeats: int = 3) -> dict:
    """Microseconds of a call of `run(*arguments, rounds)`, which makes so many calls in each round."""

    def wall(rounds: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready(run(*arguments, jnp.int32(rounds)))
        return time.perf_counter() - started

    few, on_gpu = 2, runtime.platform() == "gpu"
    wall(few)
    # Enough calls for a tenth of a second, according to the first estimate.
    many = few + max(2, min(200 // calls + 2, round(0.1 / (wall(few) / few))))
    walls = [(wall(few), wall(many)) for _ in range(repeats)]
    loop = 1e6 * statistics.median(long - short for short, long in walls) / ((many - few) * calls)
    if not on_gpu:
        return {"kernel_us": loop, "call_us": loop, "loop_us": loop}
    from jax.experimental.mosaic.gpu import profiler

    _, kernels = profiler.measure(run, aggregate=False)(*arguments, jnp.int32(few))
    spent: dict[str, float] = {}
    for name, ms in kernels:
        if not _BOOKKEEPING.search(name):
            spent[name] = spent.get(name, 0.0) + 1e3 * ms / (few * calls)
    longest = max(spent.values(), default=loop)
    return {"kernel_us": longest, "call_us": sum(spent.values()) or loop, "loop_us": loop}


def random_weights(kernels: str, n: int, k: int) -> Any:
    """Random packed weights that miss the L2 cache: a stack for Hopper's kernels, else a list."""
    copies, std = copies_of(n, k, 9 / 16), k**-0.5
    if kernels == "hopper":
        make = jax.jit(lambda key: layout.prepare(nvfp4.random(key, (copies, n, k), std=std)))
        return make(jax.random.key(2))
    make = jax.jit(lambda key: PREPARE[kernels](nvfp4.random(key, (n, k), std=std)))
    return [make(key) for key in jax.random.split(jax.random.key(2), copies)]


def length_of(weights: Any) -> int:
    """The number of copies in a stack or a list."""
    return len(weights) if isinstance(weights, list) else len(jax.tree.leaves(weights)[0])


@jax.jit
def ulps(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """Largest error, in bfloat16 ulps of the largest expected value."""
    ulp = jnp.exp2(jnp.floor(jnp.log2(jnp.abs(expected).max())) - 7)
    return jnp.abs(actual.astype(jnp.float32) - expected).max() / ulp


def error_of(
    product: Callable[..., Any], oracle: Callable[..., Any], kernels: str, m: int, n: int, k: int
) -> float:
    """The error of a product with a random weight [N, K], in ulps; 2 are right, where a sum near a tie is rounded twice."""
    tensor = jax.jit(nvfp4.random, static_argnums=1)(jax.random.key(5), (n, k))
    width = n if oracle is reference.backward else k
    x = jax.random.normal(jax.random.key(6), (m, width), jnp.bfloat16)
    # The reference is slow without tensor cores.
    some = np.linspace(0, m - 1, min(m, 384)).astype(int)
    actual = jax.jit(product)(x, jax.jit(PREPARE[kernels])(tensor))[some]
    return float(ulps(actual, jax.jit(oracle)(x[some].astype(jnp.float32), tensor)))


def check_product(kernels: str, m: int, n: int, k: int) -> dict:
    """Errors of a random product and of its dX, in ulps."""
    backward = functools.partial(derivative, like=jnp.zeros((m, k), jnp.bfloat16))
    errors = {
        "ulp": error_of(nvfp4_matmul, reference.forward, kernels, m, n, k),
        "dx_ulp": error_of(backward, reference.backward, kernels, m, n, k),
    }
    assert max(errors.values()) <= 2, f"{errors} of {(m, n, k)}"
    return errors


def derivative(dy: jax.Array, weight: Any, like: jax.Array) -> jax.Array:
    """The derivative with respect to x, [M, K] as `like`."""
    return jax.vjp(lambda x: nvfp4_matmul(x, weight), like)[1](dy)[0]


def product(case: SimpleNamespace) -> Callable[[Tell], None]:
    """A linear of a model, y = x W^T or dX = dY W, by the kernel that the library chooses for M, or in bfloat16.

    With `--rank` LoRA is added on both sides, as in a layer.
    """
    kernels, problem, m = kernels_of(case), problem_of(case), case.m
    n, k = problem.n, problem.k
    is_dx, is_packed = case.direction == "dx", case.base != "bfloat16"
    errors = check_product(kernels, m, n, k) if is_packed else {}
    if is_packed:
        weights = random_weights(kernels, n, k)
    else:
        keys = jax.random.split(jax.random.key(3), copies_of(n, k, 2))
        shape = (n, k) if case.rank or is_dx else (k, n)
        weights = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    a = jax.random.normal(jax.random.key(9), (k, case.rank), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(10), (case.rank, n), jnp.bfloat16)
    like = jnp.zeros((m, k), jnp.bfloat16)

    def linear(x, w):
        if case.rank:
            return finished_linear(x, w, ((x @ a, b),))
        return nvfp4_matmul(x, w) if is_packed else x @ w

    def call(x, w):
        if not is_dx:
            return linear(x, w)
        if not is_packed and not case.rank:
            return x @ w
        return jax.vjp(lambda rows: linear(rows, w), like)[1](x)[0]

    wide = (n, k) if is_dx else (k, n)
    x = jax.random.normal(jax.random.key(4), (2, length_of(weights), m, wide[0]), jnp.bfloat16)
    run = rounds_of(call, jax.ShapeDtypeStruct((m, wide[1]), jnp.bfloat16))
    floor = floor_us(m, n, k, 9 / 16 if is_packed else 2)

    def measure(tell: Tell) -> None:
        spent = timing(run, x, weights, calls=length_of(weights))
        tell({**spent, "floor_us": floor, "of_floor": floor / spent["call_us"], **errors})

    measure(lambda row: None)
    return measure


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows that attend.

    Attributes:
        lengths: Tokens of each row, including the new one.
        width: W, most pages of a row.
        heads: H, query heads.
        key_heads: J, key/value heads.
        head_size: C, channels per head.
        siblings: Rows of each prompt; 1 if rows share no pages.
        shared: Pages of each prompt, which its rows share.
    """

    lengths: Sequence[int]
    width: int
    heads: int = 28
    key_heads: int = 4
    head_size: int = 128
    siblings: int = 1
    shared: int = 0

    @property
    def floor_us(self) -> float:
        """The time to read keys and values on the card at hand, in microseconds; shared pages are read once."""
        again = len(self.lengths) - len(self.lengths) // self.siblings
        tokens = sum(self.lengths) - again * self.shared * attention_configs.PAGE
        return 4 * self.key_heads * self.head_size * tokens / bench.bandwidth() * 1e6

    @property
    def layers(self) -> int:
        """The number of layers whose caches together exceed the L2 cache; two without a GPU."""
        if runtime.platform() != "gpu":
            return 2
        size = self.floor_us * bench.bandwidth() / 1e6
        return max(2, round(_ROTATION * runtime.device().l2_bytes / size))


def log_normal(rows: int, mean: float) -> list[int]:
    """Row lengths from a log-normal distribution with sigma 1, at most 4096, with a fixed seed."""
    lengths = np.random.default_rng(0).lognormal(np.log(mean) - 0.5, 1, rows)
    return np.clip(lengths.round(), 1, 4096).astype(int).tolist()


def uniform(rows: int) -> list[int]:
    """Row lengths from 256 to 768, like rows of a rollout that began together."""
    return np.linspace(256, 768, rows).astype(int).tolist()


def grouped(prompt: int, mean: int = 125) -> Rows:
    """16 prompts of so many tokens with 8 completions each, of exponential lengths with a mean, with a fixed seed."""
    lengths = prompt + 1 + np.random.default_rng(0).exponential(mean, 128).astype(int)
    page = attention_configs.PAGE
    width = -(-int(lengths.max()) // page)
    return Rows(lengths.tolist(), width, siblings=8, shared=prompt // page)


# Shapes are those of 7B unless the name says otherwise.
ATTENTION: dict[str, Callable[[], Rows]] = {
    "1x4096": lambda: Rows([4096], 64),
    "8x512": lambda: Rows(uniform(8), 12),
    "16x512": lambda: Rows(uniform(16), 12),
    "64xlog-normal": lambda: Rows(log_normal(64, 512), 64),
    "64x512": lambda: Rows(uniform(64), 12),
    "128xlog-normal": lambda: Rows(log_normal(128, 512), 64),
    "32b-16x512": lambda: Rows(uniform(16), 12, heads=40, key_heads=8),
    "0.5b-64x512": lambda: Rows(uniform(64), 12, heads=14, key_heads=2, head_size=64),
    "1x32768": lambda: Rows([32768], 512),
    **{f"16x8-{n}": functools.partial(grouped, n) for n in (256, 1024, 2048)},
    "tiny": lambda: Rows([70, 3], 2, 4, 2, 64),
}


def attention_inputs(rows: Rows, layers: int) -> tuple[tuple[jax.Array, ...], tuple]:
    """Random inputs: (qkv, cos, sin, tables, ends), with qkv for two rounds of all layers, and (keys, values)."""
    rng, page = np.random.default_rng(1), attention_configs.PAGE
    lengths, size = np.asarray(rows.lengths), rows.head_size
    counts = -(-lengths // page)
    pages = rng.permutation(counts.sum()) + 1  # page 0 is for unused rows
    tables = np.zeros((len(lengths), rows.width), np.int32)
    for row, mine in enumerate(np.split(pages, np.cumsum(counts)[:-1])):
        tables[row, : len(mine)] = mine
        first = row - row % rows.siblings
        tables[row, : rows.shared] = tables[first, : rows.shared]
    angles = rng.uniform(0, 2 * np.pi, (len(lengths), size // 2)).astype(np.float32)
    random = lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    all_heads = rows.heads + 2 * rows.key_heads
    cache = (layers, len(pages) + 1, rows.key_heads, page, size)
    small = (
        random(1, (2, layers, len(lengths), all_heads, size)),
        *map(jnp.asarray, (np.cos(angles), np.sin(angles), tables, lengths.astype(np.int32) - 1)),
    )
    return small, (random(2, cache), random(3, cache))


def check_attention(rows: Rows, attend: Callable[..., Any]) -> float:
    """The kernel's largest error relative to the allowed bfloat16 rounding; above 1 the case fails.

    The cache may differ only in the last bit of a new key, and a row's bits must not change when the others are gone.
    """
    (qkv, cos, sin, tables, ends), (keys, values) = attention_inputs(rows, 2)
    qkv, layer = qkv[0, 1], jnp.int32(1)
    # Rows in use write to distinct pages, so the two caches may differ only by rounding.
    oracle, run = jax.jit(attention_reference.decode_attention), jax.jit(attend)
    out, *caches = run(qkv, cos, sin, keys, values, layer, tables, ends)
    expected, *expected_caches = oracle(qkv, cos, sin, keys, values, layer, tables, ends)
    value_heads = -rows.key_heads
    positive = qkv.at[:, value_heads:].set(jnp.abs(qkv[:, value_heads:]))
    # Weights and result are rounded, and a query or a key may be rounded in the other direction.
    bound, *_ = oracle(positive, cos, sin, keys, jnp.abs(values), layer, tables, ends)
    difference = np.abs(np.asarray(out, np.float32) - np.asarray(expected, np.float32))
    error = float((difference / (np.asarray(bound, np.float32) * 2**-7)).max())
    assert error <= 1, f"the error is {error} times what rounding allows"
    for name, a, b in zip(("keys", "values"), caches, expected_caches, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert (np.abs(a - b) <= 2**-7 * np.maximum(np.abs(b), 1e-6)).all(), f"{name} are wrong"
    alone = (tables.at[1:].set(0), ends.at[1:].set(0))
    same, *_ = run(qkv, cos, sin, keys, values, layer, *alone)
    assert bool((same[0] == out[0]).all()), "a row depends on the other rows"
    return error


def decode_attention(case: SimpleNamespace) -> Callable[[Tell], None]:
    """Decode attention of a layer: it rotates, appends to the cache and attends; or cuDNN's, which only attends.

    `together` reads the shared pages of a prompt once for its rows, `apart` for each row.
    """
    rows, is_hopper = ATTENTION[case.problem](), runtime.unless_hopper() is None
    if case.kernel == "cudnn":
        return cudnn(rows)
    layers, shape = rows.layers, (len(rows.lengths), rows.key_heads, rows.head_size)
    attend, config, shared = attend_any, None, None
    if case.kernel == "together" and rows.shared:
        shared = jnp.full(len(rows.lengths), rows.shared, jnp.int32)
    if is_hopper:
        config = attention_configs.pick_config(*shape)
        attend = functools.partial(attention.decode_attention, config=config, shared=shared)
    error = check_attention(rows, attend)
    small, caches = attention_inputs(rows, layers)

    def run(small, caches, rounds):
        qkv, *rest, tables, ends = small
        plan = lambda: attention.plan(caches[0].shape, tables, ends, config, shared)
        more = {"plan": plan()} if is_hopper else {}

        def one_layer(layer, carry):
            r, _, keys, values = carry
            position = (keys, values, layer, tables, ends)
            return r, *attend(qkv[r % 2, layer], *rest, *position, **more)

        def one_round(r, carry):
            return jax.lax.fori_loop(0, layers, one_layer, (r, *carry))[1:]

        out = jnp.zeros_like(qkv[0, 0, :, : -2 * caches[0].shape[2]])
        return jax.lax.fori_loop(0, rounds, one_round, (out, *caches))[0]

    run = jax.jit(run)

    def measure(tell: Tell) -> None:
        spent = timing(run, small, caches, calls=layers)
        tell({**spent, "of_floor": rows.floor_us / spent["kernel_us"], "error": error})

    measure(lambda row: None)
    return measure


def cudnn(rows: Rows) -> Callable[[Tell], None]:
    """Times `jax.nn.dot_product_attention` on a contiguous cache with as many slots as the longest row."""
    page, layers = attention_configs.PAGE, rows.layers
    count, slots = len(rows.lengths), -(-max(rows.lengths) // page) * page
    lengths = jnp.asarray(rows.lengths, jnp.int32)
    random = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    cache = (count, slots, rows.key_heads, rows.head_size)
    # A list, because XLA would copy the slices of a stack.
    caches = [(random(2 * i, *cache), random(2 * i + 1, *cache)) for i in range(layers)]
    queries = random(99, 2, layers, count, 1, rows.heads, rows.head_size)
    attend = functools.partial(
        jax.nn.dot_product_attention,
        query_seq_lengths=jnp.ones_like(lengths),
        key_value_seq_lengths=lengths,
        implementation="cudnn" if runtime.platform() == "gpu" else "xla",
    )

    def run(queries, caches, rounds):
        def one_round(r, outs):
            # A call depends on the one before, as in a model's layers.
            for i, (keys, values) in enumerate(caches):
                query = queries[r % 2, i] + 0 * outs[i - 1]
                outs = [*outs[:i], attend(query, keys, values), *outs[i + 1 :]]
            return outs

        return jax.lax.fori_loop(0, rounds, one_round, [jnp.zeros_like(queries[0, 0])] * layers)

    run = jax.jit(run)

    def measure(tell: Tell) -> None:
        spent = timing(run, queries, caches, calls=layers)
        tell({**spent, "of_floor": rows.floor_us / spent["call_us"]})

    return measure


# LoRA rank while tuning.
RANK = 32


def tune(case: SimpleNamespace) -> Callable[[Tell], None]:
    """Finds the fastest configuration of a product, and writes it into the table of this card, or of `--table`.

    All candidates are timed: on Hopper as a decoding layer uses them, with LoRA of rank 32 and the epilogue, because a
    finer split makes the epilogue longer; the portable kernel with the sum of its parts. Those with wrong values are
    left out.
    """
    kernels, problem, m = kernels_of(case), problem_of(case), case.m
    n, k = problem.n, problem.k
    tables = portable_tuning if kernels == "portable" else configs
    table = pathlib.Path(case.table or tables.path_of(runtime.device_kind()))
    if m not in tables.TUNED_M:
        raise ValueError(f"--m: got {m}; a table is read at {tables.TUNED_M} only")
    weights = random_weights(kernels, n, k)
    x = jax.random.normal(jax.random.key(1), (2, length_of(weights), m, k), jnp.bfloat16)
    is_swiglu = case.layer == "gate_up" and kernels == "hopper"
    out = jax.ShapeDtypeStruct((m, n // 2 if is_swiglu else n), jnp.bfloat16)
    candidates, branch = tables.candidates(m, n, k), None
    if kernels == "hopper":
        candidates = [c for c in candidates if not configs.supports(m, n, k, c, with_adapter=True)]
        pair = jnp.ones((k, RANK)), jnp.ones((RANK, out.shape[1]))
        branch = lora.pack_lora([pair] * (2 if is_swiglu else 1), 1.0, is_packed=True)

    candidates = candidates[: case.most or None]

    def call(x, w, config):
        if kernels == "hopper":
            more = {"is_swiglu": is_swiglu, "interpret": runtime.platform() != "gpu"}
            return fused.linear(x, w, branch=branch, config=config, **more)
        sums = jnp.sum(portable.product(x, w, config=config).partials, axis=0)[:, :n]
        return (sums.astype(jnp.bfloat16) * w.multiplier).astype(x.dtype)

    def compiled(config):
        run = rounds_of(functools.partial(call, config=config), out)
        return run.lower(x, weights, jnp.int32(1)).compile()

    def measure(tell: Tell) -> None:
        timed = []
        with concurrent.futures.ThreadPoolExecutor(case.threads) as pool:
            for config, run in [(c, pool.submit(compiled, c)) for c in candidates]:
                try:
                    spent = timing(run.result(), x, weights, calls=length_of(weights), repeats=1)
                    timed.append((spent["call_us"], config))
                except jax.errors.JaxRuntimeError as error:  # such as too little shared memory
                    print(f"left out: {config}: {str(error).splitlines()[0]}", flush=True)
        timed.sort(key=lambda pair: pair[0])
        us, config = next(pair for pair in timed if has_right_values(pair[1]))
        row = {"m": m, "n": n, "k": k, "config": dataclasses.asdict(config)}
        row |= {"us": {"call": round(us, 2)}, **bench.about()}
        row["candidates"] = [(*dataclasses.astuple(c), round(us, 2)) for us, c in timed]
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(merged(table, row))
        tell({"call_us": us, "of_floor": floor_us(m, n, k) / us, "config": row["config"]})

    def has_right_values(config: Any) -> bool:
        more = {"interpret": runtime.platform() != "gpu"} if kernels == "hopper" else {}
        product = fused.linear if kernels == "hopper" else call
        product = functools.partial(product, config=config, **more)
        return error_of(product, reference.forward, kernels, m, n, k) <= 2

    return measure


def merged(table: pathlib.Path, row: dict[str, Any]) -> str:
    """The table's text with this row in it, one line per row."""
    key = lambda row: (row["n"], row["k"], row["m"])
    before = json.loads(table.read_text())["rows"] if table.exists() else []
    rows = sorted([r for r in before if key(r) != key(row)] + [row], key=key)
    return '{"rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n"


SMALL = Architecture("qwen2", 512, 128, 256, 3, 4, 2, 32)


def write_random(folder: pathlib.Path, arch: Architecture) -> None:
    """Writes a model folder with random weights in bfloat16, and the tokenizer of the package."""
    names = ("model_type", "vocab_size", "rope_theta", "tie_word_embeddings")
    fields = {name: getattr(arch, name) for name in names} | {
        **{"hidden_size": arch.width, "intermediate_size": arch.ffn_width},
        **{"num_hidden_layers": arch.num_layers, "num_attention_heads": arch.num_heads},
        **{"num_key_value_heads": arch.num_kv_heads, "torch_dtype": "bfloat16"},
    }
    model = Transformer(arch, "bfloat16", None, jnp.bfloat16)
    write_model(folder, model, random_base(model, jax.random.key(0)), fields)


def quantize(case: SimpleNamespace) -> Callable[[Tell], None]:
    """Loading a model's first layers as a packed base, or quantizing them to a folder; calibrated on arithmetic.

    `seconds` is scaled up from these layers to all of them. The first round includes compilation.
    """
    runtime.use_compilation_cache()
    arch = SMALL if case.model == "tiny" else shape_of(case.model)
    few = min(case.layers, arch.num_layers)
    parent = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, parent)
    folder = pathlib.Path(parent) / "model"
    write_random(folder, dataclasses.replace(arch, num_layers=few))
    calibration = Calibration("arithmetic", case.samples, case.length)

    def measure(tell: Tell) -> None:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as out:
            if case.method in ("maximum", "search"):
                model = Transformer(architecture.load(folder), case.format, None, jnp.bfloat16)
                jax.block_until_ready(base_model.read_base(folder, model, case.method))
            else:
                recipe = quantizer.Recipe(case.format, case.method, calibration=calibration)
                quantizer.quantize(folder, pathlib.Path(out) / "model", recipe, lambda line: None)
        spent = time.monotonic() - started
        stats = runtime.memory_stats() or {}
        peak = stats.get("peak_bytes_in_use", 0) / 1e9
        tell({"layer_s": spent / few, "seconds": spent / few * arch.num_layers, "peak_gb": peak})

    return measure


def load(case: SimpleNamespace) -> Callable[[Tell], None]:
    """Loading a base from a folder or a GGUF file; the first round includes compilation.

    `describe_s` reads config and tokenizer, `tensors_s` reads and unpacks every tensor on the device, one after the
    other, and `load_s` reads and packs the base as a run does.
    """
    runtime.use_compilation_cache()

    def measure(tell: Tell) -> None:
        cfg, marks = ModelConfig(case.path, weights=case.base), [time.monotonic()]
        model, _ = base_model.describe_base(cfg, LoraConfig())
        marks.append(time.monotonic())
        tensors = FolderTensors(hf_folder.local_folder(case.path), model.arch)
        for name in tensors:
            jax.block_until_ready(tensors[name])
        marks.append(time.monotonic())
        jax.block_until_ready(base_model.load_weights(cfg, model))
        marks.append(time.monotonic())
        described, read, loaded = np.diff(marks).tolist()
        peak = (runtime.memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9
        tell({"describe_s": described, "tensors_s": read, "load_s": loaded, "peak_gb": peak})

    return measure


_LINEAR = {"model": ["7b"], "layer": ["qkv", "o", "gate_up", "down"]}
_TINY = {"model": ["tiny"], "layer": ["qkv"], "m": [2]}
_TIMES = ("kernel_us", "call_us", "loop_us", "of_floor")
BENCHMARKS = {
    "product": Benchmark(
        product,
        axes=_LINEAR
        | {"m": [1, 16, 64, 128], "base": ["bfloat16", "nvfp4"], "direction": ["forward"]},
        settings={"kernels": "auto", "rank": 0},
        tiny=_TINY | {"direction": ["forward", "dx"]},
        shows=(*_TIMES, "ulp", "dx_ulp"),
        metric="call_us",
    ),
    "decode_attention": Benchmark(
        decode_attention,
        axes={"problem": list(ATTENTION)[:-1], "kernel": ["cudnn", "apart", "together"]},
        settings={},
        tiny={"problem": ["tiny"]},
        shows=(*_TIMES, "error"),
        metric="call_us",
        compared="kernel",
    ),
    "tune": Benchmark(
        tune,
        axes={**_LINEAR, "m": [16, 64, 128]},
        settings={"kernels": "auto", "table": "", "threads": 14, "most": 0},
        tiny={"model": ["tiny"], "layer": ["o"], "m": [16], "most": 1, "kernels": "hopper"},
        shows=("call_us", "of_floor", "config"),
        metric="call_us",
        compared="model",
        rounds=1,
    ),
    "quantize": Benchmark(
        quantize,
        axes={"model": ["7b"], "method": "maximum search rtn awq gptq awq+gptq".split()},
        settings={"format": "nvfp4", "layers": 3, "samples": 256, "length": 2048},
        tiny={"model": ["tiny"], "samples": 8, "length": 64, "method": ["search", "awq"]},
        shows=("layer_s", "seconds", "peak_gb"),
        metric="seconds",
        compared="method",
        rounds=2,
    ),
    "load": Benchmark(
        load,
        axes={"path": ["qerl-tiny"], "base": ["nvfp4", "bfloat16"]},
        settings={},
        tiny={"base": ["bfloat16"]},
        shows=("describe_s", "tensors_s", "load_s", "peak_gb"),
        metric="load_s",
    ),
}
