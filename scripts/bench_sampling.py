"""Benchmarks of sampling, for `scripts.bench`: decoding, mixed lengths, drafts, one layer, agreement.

Weights are random in a known shape, except for drafts, which need a policy. Prompts are random tokens, and end tokens
are ignored.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import qerl_jax
from pallas_kernels import runtime
from qerl_jax import config
from qerl_jax.data import datasets
from qerl_jax.distributed import sharding
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.generation.draft_control import Always, Auto, Drafting
from qerl_jax.generation.engine import Engine, EngineSpec
from qerl_jax.generation.fleet import engine_of
from qerl_jax.generation.scheduler import QueuedPrompt
from qerl_jax.model import architecture, fused_decode, kv_cache, logprobs
from qerl_jax.model.transformer import Transformer, abstract_base, head, init_params, random_base
from scripts import bench
from scripts.bench import ROOT, Benchmark, Case, Tell

TINY = str(ROOT / "qerl_jax" / "assets" / "tiny")
KNOWN_IDS = 151_665
# New tokens of the two calls whose difference is decoding time.
SHORT = 32
# Bytes per weight of a packed linear; 16-bit ones have two.
BYTES = {"nvfp4": 0.5625, "mxfp4": 0.53125, "nf4": 0.516}


def known_name(model: str) -> str:
    """The name of a shape: 7b and Qwen/Qwen2.5-7B-Instruct are qwen2.5-7b. Another name, as of a folder, stays."""
    shape = pathlib.PurePath(model).name.lower().removesuffix("-instruct")
    return next((name for name in (shape, f"qwen2.5-{shape}") if name in architecture.KNOWN), model)


def shape_of(model: str) -> architecture.Architecture:
    """The shape of a model: one with a known name, or of a folder."""
    return architecture.KNOWN.get(known_name(model)) or architecture.load(model)


def devices_of(case: Case) -> dict[str, str]:
    """Environment variables with which a process sees only the devices of its case."""
    count = case["devices"]
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        flags = f"--xla_force_host_platform_device_count={count}"
        return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(16)))).split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[:count])}


class Policy:
    """A random policy on one device, or on one replica of several.

    Args:
        case: A model, a base, a rank (0 for no adapter), and kernels; also devices and a mesh, if there are several.
        arch: The shape, instead of the model's.
    """

    def __init__(self, case: SimpleNamespace, arch: architecture.Architecture | None = None):
        runtime.use_compilation_cache()
        runtime.use_kernels(case.kernels)
        self.arch = arch or shape_of(case.model)
        self.num_tokens = min(KNOWN_IDS, self.arch.vocab_size)
        axis, devices = getattr(case, "mesh", "data"), getattr(case, "devices", 1)
        mesh = config.MeshConfig(**({"data": 1} | {axis: devices}))
        lora = config.LoraConfig(case.rank, float(case.rank)) if case.rank else None
        parts = {"fsdp": mesh.fsdp, "tensor": mesh.tensor}
        self.model = Transformer(self.arch, case.base, lora, jnp.bfloat16, **parts)
        self.replicas = Replicas.of(mesh, rows=1 << 20)
        if self.replicas.devices:
            runtime.use_several_devices()
        is_shared = self.replicas.group > 1
        shardings = self.replicas.places_of(abstract_base(self.model)) if is_shared else None
        variables = {"frozen": random_base(self.model, jax.random.key(0), shardings)}
        if lora:
            params = init_params(self.model, variables["frozen"], jax.random.key(1))
            variables["params"] = jax.tree.map(lambda leaf: leaf + 1e-3, params)
        self.variables = self.replicas.hold(variables)

    def prompts(
        self, count: int, generations: int, tokens: int, limits: int | Sequence[int]
    ) -> list[QueuedPrompt]:
        """Random prompts, each with a number of completions and their limit."""
        draw = np.random.default_rng(2)
        return [
            QueuedPrompt(
                draw.integers(0, min(150_000, self.arch.vocab_size), tokens).astype(np.int32),
                draw.integers(0, 2**32, (generations, 2), np.uint32),
                int(limit),
            )
            for limit in np.broadcast_to(limits, count)
        ]

    def seconds(
        self, prompts: Sequence[QueuedPrompt], slots: int, longest: int, space: int | None = None
    ) -> float:
        """Seconds of sampling all rows, of prompts of one length.

        Programs are compiled for `longest` new tokens. The cache has space for `space`, on average over the slots; None
        means `longest`.
        """
        width = len(prompts[0].tokens)
        tokens = slots * (width + (space or longest))
        engine = Engine(self.model, EngineSpec(self.num_tokens), kv_cache_tokens=tokens)
        most = width + longest - max(prompt.limit for prompt in prompts)
        limits = {"max_prompt_length": most, "max_concurrent": slots}
        started = time.perf_counter()
        chunks = engine_of(engine, self.replicas).stream(self.variables, prompts, 1.0, **limits)
        collections.deque(chunks, maxlen=0)
        return time.perf_counter() - started


def least_seconds(policy: Policy, case: SimpleNamespace) -> float:
    """The least time of a decode step on the card at hand: of reading weights, head, adapters, keys and values.

    Keys and values of a prompt are read once for all of its completions.
    """
    arch = policy.arch
    linears = [(arch.input_width(name), parts) for name, parts in arch.linears().items()]
    weights = sum(k * size for k, parts in linears for _, size in parts)
    adapters = sum(case.rank * (k + size) for k, parts in linears for _, size in parts)
    matrices = arch.num_layers * (weights * BYTES.get(case.base, 2) + adapters * 2)
    tokens = case.rows * (case.prompt / case.siblings + (SHORT + case.tokens) / 2)
    live = tokens * 4 * arch.num_layers * arch.kv_width
    total = matrices + 2 * arch.vocab_size * arch.width + live
    return total / bench.bandwidth() / max(1, case.devices)


def decode(case: SimpleNamespace) -> Callable[[Tell], None]:
    """A decode step: the time of all new tokens minus that of 32, so without prefill and the fixed cost of a call.

    `bound` is the time to read what a step must read, and `of_bound` its share of the step. `reduces_ms` are the
    all-reduces of a step alone, two per layer, where devices decode rows together (`--mesh tensor`).
    """
    policy = Policy(case)
    of_length = lambda tokens: policy.seconds(
        policy.prompts(case.rows // case.siblings, case.siblings, case.prompt, tokens),
        case.rows,
        case.tokens,
    )
    of_length(case.tokens), of_length(SHORT)

    def measure(tell: Tell) -> None:
        short, long = of_length(SHORT), of_length(case.tokens)
        step, least = (long - short) / (case.tokens - SHORT), least_seconds(policy, case)
        reduces = 0.0
        if case.mesh == "tensor" and case.devices > 1:
            one = reduce_seconds(policy.replicas, case.rows, policy.arch.width)
            reduces = 2 * policy.arch.num_layers * one
        tell(
            {
                "step_ms": 1e3 * step,
                "tokens_per_s": case.rows / step,
                "bound_ms": 1e3 * least,
                "of_bound": least / step,
                "prefill_s": short - SHORT * step,
                "reduces_ms": 1e3 * reduces,
                "fused": fused_decode.fit(policy.model.own_part, case.rows) or "no",
                "peak_gb": peak_gb(),
            }
        )

    return measure


def peak_gb() -> float:
    """The largest memory of a device so far, in GB; 0 if the devices do not report it."""
    stats = (device.memory_stats() or {} for device in jax.local_devices())
    return max(stat.get("peak_bytes_in_use", 0) for stat in stats) / 1e9


def seconds_of(call: Callable[[], Any], times: int) -> list[float]:
    """The seconds of some calls, after one that may compile."""
    spent = []
    for _ in range(times + 1):
        started = time.perf_counter()
        jax.block_until_ready(call())
        spent.append(time.perf_counter() - started)
    return spent[1:]


def reduce_seconds(replicas: Replicas, rows: int, width: int, times: int = 128) -> float:
    """Seconds of an all-reduce of bfloat16 [rows, width] over the devices of a replica, many one after the other."""

    def reduced(x):
        mean = lambda _, y: jax.lax.psum(y, sharding.GROUP) / replicas.group
        return jax.lax.fori_loop(0, times, mean, x)

    run = jax.jit(sharding.in_group(replicas.group, reduced))
    (x,) = replicas.each(replicas.hold(jnp.ones((rows, width), jnp.bfloat16)))
    return min(seconds_of(lambda: run(x), 5)) / times


def mixed(case: SimpleNamespace) -> Callable[[Tell], None]:
    """Rollouts of 8 completions a prompt with log-normal lengths, and with equal lengths of the same mean."""
    policy, groups = Policy(case), case.rows // 8
    lengths = np.random.default_rng(0).lognormal(np.log(case.mean) - 0.5, 1.0, groups)
    lengths = np.clip(lengths, 1, case.tokens).astype(int)
    equal = np.full(groups, int(lengths.mean()))
    space = 3 * case.tokens // 8
    seconds = lambda limits: policy.seconds(
        policy.prompts(groups, 8, case.prompt, limits), case.slots, case.tokens, space
    )
    seconds(lengths), seconds(equal)

    def measure(tell: Tell) -> None:
        uneven, even = 8 * lengths.sum() / seconds(lengths), 8 * equal.sum() / seconds(equal)
        tell({"tokens_per_s": uneven, "equal_tokens_per_s": even, "share": uneven / even})

    return measure


def by_kernel(
    run: Callable[..., Any], *arguments: Any, most: int = 16
) -> dict[str, tuple[float, int]]:
    """Milliseconds and launches of the kernels of a call, the most expensive first; empty without a GPU."""
    if runtime.platform() != "gpu":
        return {}
    from jax.experimental.mosaic.gpu import profiler

    _, kernels = profiler.measure(run, aggregate=False)(*arguments)
    spent, launches = collections.Counter(), collections.Counter()
    for name, milliseconds in kernels:
        spent[name[:70]] += milliseconds
        launches[name[:70]] += 1
    return {name: (ms, launches[name]) for name, ms in spent.most_common(most)}


def print_kernels(kernels: Mapping[str, tuple[float, int]], parts: int) -> float:
    """Prints microseconds and launches of a part, by kernel; returns those of all kernels in milliseconds."""
    for name, (ms, launches) in kernels.items():
        print(f"{1e3 * ms / parts:9.2f} us x{launches / parts:6.2f}  {name}", flush=True)
    return sum(ms for ms, _ in kernels.values()) / parts


def decode_layer(case: SimpleNamespace) -> Callable[[Tell], None]:
    """A decoding layer with attention: all layers of a model in a loop, without embedding and head.

    `layer_us` is the wall time, `kernels_us` that of the kernels of a layer, which are printed. The cache is random.
    `probe` has a projection of each row's hidden state after a first step. If it differs between two environments by
    more than `MOST_APART` of its size, that is an error.
    """
    layers_ = case.layers or shape_of(case.model).num_layers
    arch = dataclasses.replace(shape_of(case.model), vocab_size=512, num_layers=layers_)
    policy = Policy(case, arch)
    page = kv_cache.PAGE_SIZE
    width = case.length // page + 1
    empty = kv_cache.pool(arch, case.rows * width + 1, jnp.bfloat16, page)
    draw = jax.jit(lambda key: jax.random.normal(key, empty[0].shape[1:], jnp.bfloat16))
    pools = [jnp.broadcast_to(draw(jax.random.key(i)), x.shape) for i, x in enumerate(empty)]
    tables = 1 + jnp.arange(case.rows * width, dtype=jnp.int32).reshape(case.rows, width)
    ends = jnp.full(case.rows, case.length, jnp.int32)

    @jax.jit
    def steps(variables, pools, tokens, count):
        extend = fused_decode.extender(policy.model, variables, case.rows)

        def following(state):
            step, tokens, pools, _ = state
            cache = kv_cache.KVCache(*pools, tables, ends)
            hidden, cache = extend(tokens, cache)
            tokens = (jnp.abs(hidden[:, 0]) * 64).astype(jnp.int32) % 512
            return step + 1, tokens, (cache.keys, cache.values), hidden

        # As in generation the end depends on data, although it never comes early.
        unfinished = lambda state: (state[0] < count) & (state[1][0] >= 0)
        start = jnp.int32(0), tokens, pools, jnp.zeros((case.rows, arch.width), jnp.bfloat16)
        return jax.lax.while_loop(unfinished, following, start)[3]

    tokens = jnp.arange(case.rows, dtype=jnp.int32) % 512
    arguments = policy.variables, tuple(pools), tokens

    def seconds(count: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready(steps(*arguments, jnp.int32(count)))
        return time.perf_counter() - started

    few, many = 4, 4 + case.steps
    hidden = np.asarray(steps(*arguments, jnp.int32(1)), np.float32)
    probe = hidden @ np.random.default_rng(0).standard_normal(arch.width) / arch.width**0.5
    seconds(few)

    def measure(tell: Tell) -> None:
        layer = (seconds(many) - seconds(few)) / case.steps / layers_
        row = {"layer_us": 1e6 * layer, "probe": [round(float(x), 4) for x in probe]}
        row["fused"] = fused_decode.fit(policy.model, case.rows) or "no"
        tell(row)
        kernels = by_kernel(steps, *arguments, jnp.int32(few))
        total = print_kernels(kernels, few * layers_)
        tell(row | {"kernels_us": 1e3 * total, "by_kernel": kernels})

    return measure


# By what share of their size the probes of two environments may differ.
MOST_APART = 0.03


def apart(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the probes of `decode_layer`: cases that differ from the first one of the same problem."""
    first, wrong = {}, []
    for row in rows:
        problem = tuple(row[name] for name in ("model", "base", "rank", "rows", "layers", "length"))
        actual, expected = np.array(row["probe"]), first.setdefault(problem, np.array(row["probe"]))
        size = np.sqrt(np.mean(expected**2))
        error = np.sqrt(np.mean((actual - expected) ** 2)) / size
        worst = np.abs(actual - expected).max() / size
        if not error <= MOST_APART or not worst <= 10 * MOST_APART:
            row_of = int(np.abs(actual - expected).argmax())
            wrong.append(
                f"{problem}, env {row['env']!r}: probes differ by {error:.3f}, row {row_of} by {worst:.3f}"
            )
    return wrong


def drafts(case: SimpleNamespace) -> Callable[[Tell], None]:
    """Sampling of a real policy with drafts: "off", "auto", or always so many tokens in a step.

    Tokens must be those without drafts; where rounding makes them differ, `rows_that_differ` says in how many rows.
    `step_ms` relative to that of "off" is the price of a step.
    """
    adapter = {"adapter": case.adapter} if case.adapter else {}
    policy = qerl_jax.load(case.model or "qerl-tiny", **adapter, quiet=True)
    tokenizer = policy.tokenizer
    if case.prompts:
        lines = map(json.loads, pathlib.Path(case.prompts).read_text().splitlines())
        texts = [row.get("prompt") or row["question"] for row in lines]
        questions = [[{"role": "user", "content": text}] for text in texts[: case.groups]]
    else:
        data = config.DataConfig("arithmetic")
        problems = datasets.from_config(data, split="train", seed=0, num_problems=case.groups)
        questions = [problem.prompt for problem in problems]
    ids = tokenizer.encode(questions)
    draw = np.random.default_rng(0)
    seeds = lambda: draw.integers(0, 2**32, (8, 2), np.uint32)
    queue = [QueuedPrompt(np.array(row, np.int32), seeds(), case.limit) for row in ids]
    limits = {"max_prompt_length": max(map(len, ids)), "max_concurrent": case.rows}

    def sampled(mode: str) -> tuple[float, dict[int, Any], Any]:
        drafting = None
        if mode != "off":
            control = functools.partial(Always, int(mode)) if mode.isdigit() else Auto
            drafting = Drafting(control, least_limit=1)
        options = {"stop_tokens": tokenizer.stop_tokens, "drafts": drafting}
        engine = Engine(policy.model, EngineSpec(tokenizer.num_tokens), **options)
        started = time.perf_counter()
        sample = engine.completions(policy.variables, queue, case.temperature, **limits)
        rows = {row.row: row.tokens for row in sample}
        return time.perf_counter() - started, rows, engine.drafted

    _, expected, _ = sampled("off")
    sampled(case.drafts)

    def measure(tell: Tell) -> None:
        seconds, rows, record = sampled(case.drafts)
        tokens = sum(map(len, rows.values()))
        per_call = record.accepted_per_call or 1.0
        tell(
            {
                "tokens_per_s": tokens / seconds,
                "tokens_per_call": per_call,
                "step_ms": 1e3 * seconds * per_call * min(case.rows, len(rows)) / tokens,
                "rows_that_differ": sum((rows[n].tolist() != expected[n].tolist()) for n in rows),
            }
        )

    return measure


# How many times the yardstick the mean difference of sampler and trainer may be.
ALLOWED = 1.2


def logps(case: SimpleNamespace) -> Callable[[Tell], None]:
    """Log-probabilities of sampler and trainer: their mean difference in nats, and that divided by a yardstick.

    Weights are random, so that every rounding has an effect. The yardstick is the mean difference between the trainer's
    kernels and plain products, which round in the same places and sum in another order. All score the tokens that the
    sampler drew. The case fails if the ratio is above 1.2. Sampler and trainer round in the same places
    (docs/design/model.md, "Where rounding happens") except in attention; `attention` is the effect of plain attention.
    """
    policy = Policy(case)
    queue = policy.prompts(case.rows, 1, case.prompt, case.tokens)
    engine = Engine(policy.model, EngineSpec(policy.num_tokens))
    sample = engine.completions(policy.variables, queue, 1.0, max_prompt_length=case.prompt)
    rows = sorted(sample, key=lambda row: row.row)
    sampler = np.stack([row.behaviour_logps for row in rows])
    prompts, completions = ([item.tokens for item in items] for items in (queue, rows))
    tokens = np.concatenate([np.stack(prompts), np.stack(completions)], axis=1)

    def score(device: runtime.Device, kernels: str | None = None) -> np.ndarray:
        """Log-probabilities [B, C] of the sampled tokens from one forward pass, with the kernels of a device."""

        def of(variables, tokens):
            hidden, _ = policy.model.apply(variables, tokens)
            states = hidden[:, case.prompt - 1 : -1].reshape(-1, policy.arch.width)
            options = {"temperature": 1.0, "num_tokens": policy.num_tokens}
            targets = tokens[:, case.prompt :].reshape(-1)
            return logprobs.of_targets(states, head(variables["frozen"]), targets, **options)[0]

        jax.clear_caches()  # a trace does not depend on the device that is assumed
        with runtime.on(device, kernels):
            return np.asarray(jax.jit(of)(policy.variables, tokens)).reshape(case.rows, -1)

    def measure(tell: Tell) -> None:
        here = runtime.device()
        trainer, reference = score(here), score(here, "reference")
        # Without compute capability there is no attention of cuDNN.
        plain = score(dataclasses.replace(here, compute_capability=""), "reference")
        difference, yardstick = np.abs(sampler - trainer), np.abs(trainer - reference).mean()
        ratio = difference.mean() / yardstick if yardstick else 0.0
        tell(
            {
                "mean": float(difference.mean()),
                "p99": float(np.quantile(difference, 0.99)),
                "yardstick": float(yardstick),
                "ratio": float(ratio),
                "attention": float(np.abs(reference - plain).mean()),
            }
        )
        assert ratio <= ALLOWED, f"sampler and trainer differ by {ratio:.2f} times the yardstick"

    return measure


_POLICY = {"model": ["7b"], "base": ["nvfp4", "bfloat16"], "rank": [32]}
_TINY = {"model": [TINY], "base": ["nvfp4"], "rank": [4], "rows": [2], "prompt": 16, "tokens": 40}
BENCHMARKS = {
    "decode": Benchmark(
        decode,
        axes=_POLICY | {"rows": [8, 64, 128], "siblings": [1], "mesh": ["data"], "devices": [1]},
        settings={"kernels": "auto", "prompt": 256, "tokens": 512},
        tiny=_TINY,
        shows=("tokens_per_s", "step_ms", "of_bound", "prefill_s", "fused", "peak_gb"),
        metric="step_ms",
        environment=devices_of,
    ),
    "mixed": Benchmark(
        mixed,
        axes={**_POLICY, "base": ["nvfp4"], "rows": [1024], "slots": [64]},
        settings={"kernels": "auto", "prompt": 256, "tokens": 2048, "mean": 400},
        tiny=_TINY | {"rows": [16], "slots": [8], "mean": 10},
        shows=("tokens_per_s", "equal_tokens_per_s", "share"),
        metric="tokens_per_s",
    ),
    "decode_layer": Benchmark(
        decode_layer,
        axes={**_POLICY, "rows": [8, 64, 128]},
        settings={"kernels": "auto", "layers": 0, "length": 512, "steps": 20},
        tiny=_TINY | {"length": 20, "steps": 2},
        shows=("layer_us", "kernels_us", "fused"),
        metric="layer_us",
        disagreements=apart,
    ),
    "drafts": Benchmark(
        drafts,
        axes={"model": [""], "drafts": ["off", "auto"], "rows": [1, 8, 16, 32]},
        settings={"adapter": "", "prompts": "", "groups": 16, "limit": 512, "temperature": 1.0},
        tiny={"drafts": ["auto"], "rows": [4], "groups": 2, "limit": 40},
        shows=("tokens_per_s", "tokens_per_call", "step_ms", "rows_that_differ"),
        metric="tokens_per_s",
        compared="drafts",
    ),
    "logps": Benchmark(
        logps,
        axes={**_POLICY, "base": ["nvfp4"], "rows": [16]},
        settings={"kernels": "auto", "prompt": 256, "tokens": 128},
        tiny=_TINY,
        shows=("mean", "p99", "yardstick", "ratio", "attention"),
        metric="ratio",
        rounds=1,
    ),
}
