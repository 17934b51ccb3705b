"""Measures decode tokens per second of the rollout engine: `python -m scripts.bench_rollouts`.

Weights are random in a known shape, prompts have 256 random tokens, end tokens are ignored, and LoRA is on. Decoding
time is the time to generate 512 tokens minus the time for 32, so prefill and the fixed cost of a call are left out. The
bound is the time to read what a step must read: packed or 16-bit linears, head, adapters, live keys and values. It
assumes nine tenths of the card's nominal bandwidth, 4.3 TB/s on an H200. Every row of the table runs in its own process,
which is killed at its time limit. `--together N` lets N processes compile at the same time; each is measured while the
others wait. A row can be run alone:

    python -m scripts.bench_rollouts --model 7b                   # both bases at 1, 8, 32, 64, 128
    python -m scripts.bench_rollouts --model 32b --arms nvfp4 --batch 64
    python -m scripts.bench_rollouts --arms nvfp4 nvfp4-no-lora   # the cost of LoRA
    python -m scripts.bench_rollouts --arms nvfp4 nvfp4-plain nf4 mxfp4 --batch 8 64
                                                                  # beside the layers of training
    python -m scripts.bench_rollouts --arms nvfp4 nvfp4-unpaired --batch 8 64 128
                                                                  # gate_up finished by a kernel after its product
    python -m scripts.bench_rollouts --arms nvfp4 nvfp4-tall --batch 8 64
                                                                  # LoRA's A in tiles of 64 ranks
    python -m scripts.bench_rollouts --arms nvfp4 nvfp4-unshared --batch 128 --siblings 8 --prompt 1024
                                                                  # 16 prompts x 8; a prompt's pages read for each
    python -m scripts.bench_rollouts --model 3b 7b --rank 16 64 --arms nvfp4 --batch 1 --together 4
                                                                  # four processes compile at a time
    python -m scripts.bench_rollouts --arms nvfp4 nvfp4-unrolled --batch 64 128
                                                                  # all layers written out
    python -m scripts.bench_rollouts --kernels portable --arms nvfp4 --batch 8 64
                                                                  # as on cards other than Hopper
    python -m scripts.bench_rollouts --mixed                      # 128 x 8 log-normal lengths, 64 slots
    python -m scripts.bench_rollouts --mixed --arms nvfp4 --slots 128 192 256 --rows 192 256
                                                                  # rollouts of that many rows, in that many slots
    python -m scripts.bench_rollouts --prefill                    # 128 x 256 tokens; 16 prompts x 8

`--profile` adds the time of a step by kernel; `--out` keeps the rows.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from scripts import limits

PROMPT, SHORT, LONG = 256, 32, 512
KNOWN_IDS = 151_665
# What a child process prints when it has compiled all and waits for its turn.
READY = "READY"
# Bytes per weight of a packed linear; 16-bit ones have two.
BYTES = {"nvfp4": 0.5625, "mxfp4": 0.53125, "nf4": 0.516}
# Decode tokens per second of 7B, 14B and 32B on an H200, by batch size: our target, and what vLLM 0.26 reaches with
# NVFP4 (7B with LoRA).
TARGETS = {
    "7b": {1: 520, 8: 4000, 32: 13000, 64: 19500, 128: 25000, 192: 22000, 256: 26000},
    "14b": {1: 280, 8: 2150, 32: 6200, 64: 9200},
    "32b": {1: 150, 8: 1200, 32: 3500, 64: 5100, 128: 6600},
}
VLLM = {
    "7b": {1: 205, 8: 1728, 32: 6198, 64: 8909, 128: 10190},
    "14b": {1: 176, 8: 1362, 32: 4059, 64: 5483},
    "32b": {1: 97, 8: 755, 32: 2245, 64: 3011},
}


def bound(
    arch, weights: str, batch: int, rank: int, prompt: int = PROMPT, siblings: int = 1
) -> float:
    """The least time of a decode step on the card at hand, in seconds; keys and values of a prompt are read once."""
    per_layer = [(arch.input_width(n), parts) for n, parts in arch.linears().items()]
    linears = sum(k * size for k, parts in per_layer for _, size in parts)
    adapters = sum(rank * (k + size) for k, parts in per_layer for _, size in parts)
    matrices = arch.num_layers * (linears * BYTES.get(weights, 2) + adapters * 2)
    tokens = batch * (prompt / siblings + (SHORT + LONG) / 2)
    live = tokens * 4 * arch.num_layers * arch.kv_width
    return (matrices + 2 * arch.vocab_size * arch.width + live) / limits.bandwidth()


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        model: A name of `--model`.
        rank: LoRA rank.
        arm: A name of `--arms`.
        what: A batch size, "prefill", or "mixed" and a number of slots.
    """

    model: str
    rank: int
    arm: str
    what: str


class Bench:
    """A random policy on one device or on a mesh of several, with methods that time it."""

    def __init__(self, args: argparse.Namespace, arm: str, mesh: Any = None):
        import jax
        import jax.numpy as jnp

        from pallas_kernels import decode_attention, runtime
        from pallas_kernels.nvfp4_matmul import config, dense_tile
        from qerl_jax.config import LoraConfig, MeshConfig
        from qerl_jax.distributed.mesh import Replicas
        from qerl_jax.model import architecture, fused_decode
        from qerl_jax.model.transformer import (
            Transformer,
            abstract_base,
            init_params,
            random_base,
        )

        runtime.use_compilation_cache()
        runtime.use_kernels(args.kernels)
        weights, _, trait = arm.partition("-")
        self.rank = 0 if trait == "no-lora" else args.rank
        self.prompt, self.siblings = args.prompt, args.siblings
        if trait == "unpaired":
            # gate_up is finished by a kernel after its product.
            os.environ["PALLAS_PAIRED_GATES"] = "0"
        if trait == "tall":
            # LoRA's A in tiles of 64 ranks, whatever the rank.
            dense_tile.height = lambda *_: dense_tile.TILE
        if trait == "unshared":
            # Attention reads the pages of a prompt for each of its completions.
            decode_attention.LEAST_SHARED = 1 << 30
        if trait == "unrolled":
            # All layers are written out, whatever the number of rows.
            fused_decode.UNROLLED_ROWS = 256
        if trait == "plain":
            # Decode with the layers of training, as where the fused ones do not apply.
            fused_decode.fit = lambda *_, **__: None
        if trait == "wide":
            # Also compute their products with the kernel for many rows, however few there are.
            fused_decode.fit = lambda *_, **__: None
            config.MAX_M = 8
        lora = LoraConfig(self.rank, float(self.rank)) if self.rank else None
        name = args.model if args.model in architecture.KNOWN else f"qwen2.5-{args.model}"
        known = architecture.KNOWN.get(name)
        self.arch, self.weights = known or architecture.load(args.model), weights
        mesh = mesh or MeshConfig(data=1)
        traits = {"fsdp": mesh.fsdp, "tensor": mesh.tensor}
        self.model = Transformer(self.arch, weights, lora, jnp.bfloat16, **traits)
        self.replicas = Replicas.of(mesh, rows=1 << 20)
        if self.replicas.devices:
            runtime.use_several_devices()
        places = None
        if self.replicas.group > 1:
            places = self.replicas.places_of(abstract_base(self.model))
        self.variables = {"frozen": random_base(self.model, jax.random.key(0), places)}
        if lora:
            params = init_params(self.model, self.variables["frozen"], jax.random.key(1))
            self.variables["params"] = jax.tree.map(lambda x: x + 1e-3, params)
        self.variables = self.replicas.hold(self.variables)

    def prompts(self, count: int, generations: int, limits):
        import numpy as np

        from qerl_jax.generation.scheduler import QueuedPrompt

        draw = np.random.default_rng(2)
        for limit in np.broadcast_to(limits, count):
            yield QueuedPrompt(
                draw.integers(0, min(150_000, self.arch.vocab_size), self.prompt).astype(np.int32),
                draw.integers(0, 2**32, (generations, 2), np.uint32),
                int(limit),
            )

    def time(
        self, prompts, slots: int, longest: int = LONG, repeats: int = 2, kept: int | None = None
    ):
        """Seconds of a call that compiles nothing, and of the first call.

        Args:
            prompts: Prompts with their numbers of completions and of tokens.
            slots: Rows sampled at a time.
            longest: Determines what is compiled.
            repeats: Calls after the first.
            kept: New tokens for which the cache has space, on average over the slots; None means `longest`.
        """
        from qerl_jax.generation.engine import Engine, EngineSpec
        from qerl_jax.generation.fleet import engine_of

        num_tokens, prompts = min(KNOWN_IDS, self.arch.vocab_size), list(prompts)
        space = slots * (self.prompt + (kept or longest))
        engine = Engine(self.model, EngineSpec(num_tokens), kv_cache_tokens=space)
        engine = engine_of(engine, self.replicas)
        limits = {
            "max_prompt_length": self.prompt + longest - max(prompt.limit for prompt in prompts),
            "max_concurrent": slots,
        }
        seconds = []
        for _ in range(1 + repeats):
            started = time.perf_counter()
            collections.deque(engine.stream(self.variables, prompts, 1.0, **limits), maxlen=0)
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:], default=None), seconds[0]


def decode(bench: Bench, batch: int) -> dict:
    """Measures one row of the table."""
    each = bench.siblings
    short, first = bench.time(bench.prompts(batch // each, each, SHORT), batch)
    long, _ = bench.time(bench.prompts(batch // each, each, LONG), batch)
    step = (long - short) / (LONG - SHORT)
    least = bound(bench.arch, bench.weights, batch, bench.rank, bench.prompt, each)
    row = {"batch": batch, "step": step, "bound": least, "first_call": first}
    row |= {"prompt": bench.prompt, "siblings": each}
    return row | {"prefill": short - SHORT * step}


def mixed(bench: Bench, slots: int, rows: int) -> dict:
    """Tokens per second with log-normal lengths and with equal ones, for prompts of 8 completions.

    Args:
        bench: The policy.
        slots: Rows sampled at a time.
        rows: All rows.
    """
    import numpy as np

    lengths = np.random.default_rng(0).lognormal(np.log(400) - 0.5, 1.0, rows // 8)
    lengths = np.clip(lengths, 1, 2048).astype(int)
    equal = np.full(rows // 8, int(lengths.mean()))
    limits = {"slots": slots, "longest": 2048, "repeats": 0, "kept": 768}
    _, seconds = bench.time(bench.prompts(rows // 8, 8, lengths), **limits)
    _, even = bench.time(bench.prompts(rows // 8, 8, equal), **limits)
    speeds = 8 * lengths.sum() / seconds, 8 * equal.sum() / even
    row = {"slots": slots, "rows": rows, "mixed_tok_s": speeds[0], "equal_tok_s": speeds[1]}
    return row | {"share": speeds[0] / speeds[1]}


def prefill(bench: Bench) -> dict:
    """Seconds until every row has its first token, for 128 prompts, for 16, and for 16 x 8 rows."""
    return {
        "prefill_128_s": bench.time(bench.prompts(128, 1, 1), 128)[0],
        "prefill_16_s": bench.time(bench.prompts(16, 1, 1), 16)[0],
        "prefill_16x8_s": bench.time(bench.prompts(16, 8, 1), 128)[0],
    }


def profile(bench: Bench, batch: int) -> list[tuple[str, float, float]]:
    """Microseconds and launches per decode step of the kernels in a chunk, the most expensive first, and of all
    kernels.
    """
    from qerl_jax.generation import engine

    plain, kernels, chunks = engine.decode, [], []

    def watched(*arguments, **traits):
        chunks.append(traits["spec"].chunk)
        # Start with as many tokens as a step has on average.
        if len(chunks) == LONG // 2 // chunks[0]:
            kernels.extend(undonated(plain, *arguments, **traits)())
        return plain(*arguments, **traits)

    engine.decode = watched
    each = bench.siblings
    bench.time(bench.prompts(batch // each, each, LONG), batch, repeats=0)
    return by_kernel(kernels, chunks[0])


def undonated(decode: Any, *arguments: Any, **traits: Any) -> Any:
    """Compiles a decoding program so that it can run twice: its pool is not donated.

    Returns:
        A function that runs it, and returns the name and milliseconds of each kernel.
    """
    import jax
    from jax.experimental.mosaic.gpu import profiler

    from qerl_jax.generation import programs

    program = decode.of(traits["model"])
    twice = jax.jit(
        program.__wrapped__,
        static_argnames=tuple(traits),
        compiler_options=programs.IN_PLACE if program is decode.dense else None,
    )
    jax.block_until_ready(twice(*arguments, **traits))
    return lambda: profiler.measure(twice, aggregate=False)(*arguments, **traits)[1]


def by_kernel(
    kernels: list[tuple[str, float]], steps: int, most: int = 24
) -> list[tuple[str, float, float]]:
    """Microseconds and launches per step of each kernel, the most expensive first, and of all."""
    spent, launches = collections.Counter(), collections.Counter()
    for name, milliseconds in kernels:
        if name.startswith("memcpy"):  # kernels that copy the cache, because it is not donated here
            continue
        spent[name] += milliseconds * 1e3 / steps
        launches[name] += 1
    rows = [(name[:70], us, launches[name] / steps) for name, us in spent.most_common(most)]
    return [*rows, ("all kernels", spent.total(), launches.total() / steps)]


def child(args: argparse.Namespace, case: Case) -> None:
    """Compiles what a row needs, waits for a line of input, measures the row and prints it as JSON."""
    bench = Bench(args, case.arm)
    what, *slots = case.what.split()
    first = 0.0
    if what == "mixed":
        measure = lambda: [mixed(bench, int(slots[0]), rows) for rows in args.rows]
        measure()  # compiles, also for the smaller batches of the last rows
    elif what == "prefill":
        measure = lambda: [prefill(bench)]
    else:
        rows = bench.prompts(int(what) // bench.siblings, bench.siblings, LONG)
        _, first = bench.time(rows, int(what), repeats=0)
        measure = lambda: [decode(bench, int(what)) | {"first_call": first}]
    print(READY, flush=True)
    sys.stdin.readline()
    found = measure()
    from scripts.bench_kernels import versions

    origin = {"model": case.model, "rank": bench.rank, "arm": case.arm, "kernels": args.kernels}
    origin |= {"together": args.together} if args.together > 1 else {}
    origin |= versions()
    for row in found:
        print("ROW " + json.dumps(origin | row), flush=True)
    if args.profile and "step" in row:
        rows = profile(bench, int(case.what))
        rows.append(
            ("between kernels: the rest of the time of a step", 1e6 * row["step"] - rows[-1][1], 0)
        )
        for name, us, launches in rows:
            print(f"{us:9.1f} us x{launches:6.1f}  {name}", flush=True)


class Child:
    """A process that measures a row.

    Args:
        case: The row.
        timeout: Seconds for compiling and seconds for measuring; the process is killed after either.
        shares: Whether other processes have bases on the card, so that none may take all of its memory.
    """

    def __init__(self, case: Case, timeout: int, *, shares: bool):
        self.case, self._timeout = case, timeout
        what = map(str, dataclasses.astuple(case))
        command = [sys.executable, "-m", "scripts.bench_rollouts", *sys.argv[1:], "--child", *what]
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if shares else {}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(
            command, env=os.environ | environment, start_new_session=True, **pipes
        )
        self._watch()

    def wait_until_ready(self) -> None:
        """Waits until the process has compiled all, or has ended."""
        for line in self._process.stdout:
            if line.strip() == READY:
                break
        self._timer.cancel()

    def measure(self) -> tuple[list[dict], int]:
        """Lets the process measure. Returns its rows and its status, which is not 0 if it failed or was killed."""
        self._watch()
        try:
            output, _ = self._process.communicate("\n")
        finally:
            self._timer.cancel()
        rows = [json.loads(line[4:]) for line in output.splitlines() if line.startswith("ROW ")]
        notes = [line for line in output.splitlines() if " us x" in line]
        return [
            row | ({"longest": notes} if notes else {}) for row in rows
        ], self._process.returncode

    def kill(self) -> None:
        """Ends the process, which is not in this one's group and would go on."""
        self._timer.cancel()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _watch(self) -> None:
        self._timer = threading.Timer(self._timeout, self.kill)
        self._timer.daemon = True
        self._timer.start()


def measured(cases: list[Case], timeout: int) -> Iterator[tuple[Case, list[dict], int]]:
    """Starts a process for each row, waits until all have compiled, and measures one after the other.

    Yields:
        Each row, what it measured, and the status of its process.
    """
    children = [Child(case, timeout, shares=len(cases) > 1) for case in cases]
    try:
        for child in children:
            child.wait_until_ready()
        for child in children:
            yield child.case, *child.measure()
    finally:
        for child in children:
            child.kill()


def main() -> int:
    """Runs the rows one after the other and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        nargs="+",
        default=["7b"],
        help="7b, 14b, 32b or names of architecture.KNOWN",
    )
    parser.add_argument(
        "--batch", type=int, nargs="+", help="batch sizes; default: those with a target"
    )
    parser.add_argument("--rank", type=int, nargs="+", default=[32])
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        metavar="N",
        help="rows that compile at the same time; the card must hold all their bases",
    )
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a prompt")
    parser.add_argument(
        "--siblings",
        type=int,
        default=1,
        help="completions of a prompt; must divide the batch size",
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["nvfp4", "bfloat16"],
        choices=[
            weights + trait
            for weights in ("nvfp4", "mxfp4", "nf4", "bfloat16")
            for trait in (
                "",
                "-no-lora",
                "-plain",
                "-wide",
                "-unpaired",
                "-tall",
                "-unshared",
                "-unrolled",
            )
        ],
    )
    parser.add_argument(
        "--kernels", default="auto", choices=("auto", "hopper", "portable", "reference")
    )
    parser.add_argument(
        "--mixed", action="store_true", help="measure mixed lengths instead of the table"
    )
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[64], help="with --mixed: rows sampled at a time"
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1024],
        help="with --mixed: all rows; multiples of 8",
    )
    parser.add_argument(
        "--prefill", action="store_true", help="measure prefill instead of the table"
    )
    parser.add_argument(
        "--timeout", type=int, default=240, help="seconds for compiling a row, and for measuring it"
    )
    parser.add_argument("--profile", action="store_true", help="print the time of a step by kernel")
    parser.add_argument("--out", type=pathlib.Path, help="append each row to this JSONL file")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        model, rank, arm, what = args.child
        args.model, args.rank = model, int(rank)
        child(args, Case(model, int(rank), arm, what))
        return 0

    if args.out:
        args.out.open("a").close()  # Fail now, not after minutes of measuring.
    others = [f"mixed {slots}" for slots in args.slots if args.mixed]
    others += ["prefill"] * args.prefill
    cases = [
        Case(model, rank, arm, str(what))
        for model, rank in itertools.product(args.model, args.rank)
        for what in others or args.batch or TARGETS.get(model, (1, 8, 32, 64))
        for arm in args.arms
    ]
    rows, failed = [], False
    print(f"prompts of {args.prompt} x {args.siblings}, {LONG} new tokens")
    if not others:
        print(
            "| model | rank | base | batch | tok/s | target | vLLM | step ms | of bound | prefill s | first call s |"
        )
        print("|" + " --- |" * 11)
    for wave in itertools.batched(cases, args.together):
        for case, found, status in measured(list(wave), args.timeout):
            if status:
                print(
                    f"{case.model}, rank {case.rank}, {case.arm} {case.what}: failed, "
                    f"or was killed after {args.timeout} s",
                    flush=True,
                )
            failed |= status != 0
            rows += found
            if args.out:
                with args.out.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
            for row in found:
                print(_line(row), *row.get("longest", ()), sep="\n", flush=True)
    steps = {
        (row["model"], row["rank"], row["batch"], row["arm"]): row["step"]
        for row in rows
        if "step" in row
    }
    for (model, rank, batch, arm), step in steps.items():
        for other, other_rank, verb in (
            ("bfloat16", rank, "as fast as bfloat16"),
            (f"{arm}-no-lora", 0, "as fast as without LoRA"),
        ):
            beside = steps.get((model, other_rank, batch, other))
            if other != arm and beside:
                print(f"{model}, rank {rank}, {arm} at {batch}: {beside / step:.2f} times {verb}")
    return int(failed)


def _line(row: dict) -> str:
    if "step" not in row:
        return row["arm"] + "".join(
            f", {name} {value:,.3f}" for name, value in row.items() if isinstance(value, float)
        )
    batch = row["batch"]
    target, vllm = (of.get(row["model"], {}).get(batch, "") for of in (TARGETS, VLLM))
    return (
        f"| {row['model']} | {row['rank']} | {row['arm']} | {batch} | {batch / row['step']:,.0f} "
        f"| {target} | {vllm} | {row['step'] * 1e3:.2f} | {row['bound'] / row['step']:.2f} "
        f"| {row['prefill']:.3f} | {row['first_call']:.1f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
