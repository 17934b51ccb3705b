"""Measures what drafts bring to sampling: `python -m scripts.bench_drafts`.

A policy samples completions of real prompts, with a fixed number of rows at a time, without drafts and with them. Each
arm runs once untimed, for its programs to compile, and then as often as asked, arms in turn. A run in which a program was
compiled, because fewer rows were left or other drafts were made, is done again. Tokens must be the same;
where rounding makes them differ, the table says in how many rows, by how much log-probabilities differ before, and how
close the draw of the first other token was in the last repeat (`median_lead`, `largest_lead`, in nats). For "off" it
says how they differ from the first of --rows without drafts.
"again" has sampled the same prompts before, with other keys, as in a later epoch.

    python -m scripts.bench_drafts --model smollm2 --adapter runs/short --rows 8 16 32
    python -m scripts.bench_drafts --model smollm2 --prompts gsm8k.jsonl --temperature 0.6 --limit 512 --rows 8 16
    python -m scripts.bench_drafts --prices 7b --rows 8       # milliseconds of a step by its number of tokens
    python -m scripts.bench_drafts --least-limit 1 --limit 64 --rows 4 --groups 2   # a trial on a CPU

It prints for each number of rows: tokens per second, also relative to no drafts; tokens per row and step with drafts;
and the speedup that prices predict (`drafts/speedup`). With --prices the weights are random and no draft is right: a
step of 8 rows then runs as many tokens as asked, most of them for nothing. Its time, relative to a step without drafts,
is what `draft_control` calls a price. The program ends itself after --seconds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import statistics
import threading
import time
from typing import Any

import numpy as np

ARMS = ("off", "auto", "again")
STEPS = ("off", "0", "8", "16", "32", "64")


def fixed(tokens: int) -> Any:
    """A control (`draft_control.Control`) whose steps have the same number of tokens always."""
    from qerl_jax.generation.draft_control import Auto

    control = Auto()
    control.positions = lambda slots, live: tokens and max(tokens, slots)
    return control


def drafting_of(arm: str, least_limit: int) -> Any:
    """How an arm's engine makes drafts; None without."""
    from qerl_jax.generation.draft_control import Auto, Drafting

    if arm == "off":
        return None
    control = functools.partial(fixed, int(arm)) if arm.isdigit() else Auto
    return Drafting(control, least_limit=least_limit)


def watchdog(seconds: float) -> None:
    """Ends this process after some time, whatever it waits for."""

    def end():
        print(f"ended after {seconds:.0f} s", flush=True)
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def prompts_of(args: argparse.Namespace) -> list[Any]:
    """The questions: of a file of {"prompt"} or {"question"}, of the run that made the adapter, or sums in words."""
    if args.prompts:
        rows = [json.loads(line) for line in pathlib.Path(args.prompts).open()]
        asked = [row.get("prompt") or row["question"] for row in rows[: args.groups]]
        return [[{"role": "user", "content": text}] for text in asked]
    from qerl_jax.config import DataConfig
    from qerl_jax.data import datasets

    data = args.run.data if args.run else DataConfig(dataset="arithmetic")
    problems = datasets.from_config(data, split=data.split, seed=0, num_problems=args.groups)
    return [problem.prompt for problem in problems]


def run_of(args: argparse.Namespace) -> Any:
    """The configuration of the run that made the adapter; None for another adapter."""
    from qerl_jax import config

    folder = args.adapter
    return config.load_run(folder) if folder and (folder / "config.toml").exists() else None


def queue_of(ids: list[list[int]], args: argparse.Namespace, seed: int) -> list[Any]:
    """The prompts with keys for each completion."""
    from qerl_jax.generation.scheduler import QueuedPrompt

    draw = np.random.default_rng(seed)
    keys = lambda: draw.integers(0, 2**32, (args.generations, 2), np.uint32)
    return [QueuedPrompt(np.array(each, np.int32), keys(), args.limit) for each in ids]


def listen() -> list[float]:
    """Where seconds of compiling are added from now on, an item for each program."""
    import jax

    seconds: list[float] = []

    def add(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(add)
    return seconds


def sampled(
    engine: Any, variables: Any, queue: list, rows: int, temperature: float, longest: int
) -> tuple[float, dict]:
    """Seconds, and the rows by number; `longest`, the most tokens of a row, determines what is compiled."""
    width = longest - max(prompt.limit for prompt in queue)
    limits = {"max_prompt_length": width, "max_concurrent": rows}
    begin = time.perf_counter()
    found = list(engine.completions(variables, queue, temperature, **limits))
    return time.perf_counter() - begin, {row.row: row for row in found}


class Measured(Exception):
    """Ends a run whose second chunk has been measured; its argument is the result."""


@contextlib.contextmanager
def second_chunks(measure: Any) -> Any:
    """Calls measure(decode, arguments, traits) in place of the second chunk of every run, which ends with `Measured`.

    The first chunk brings prefill with it. Several threads may each have a run at the same time.
    """
    from qerl_jax.generation import engine

    decode, own = engine.decode, threading.local()

    def watched(*arguments: Any, **traits: Any) -> Any:
        own.is_second = not getattr(own, "is_second", True)
        if not own.is_second:
            return decode(*arguments, **traits)
        raise Measured(measure(decode, arguments, traits))

    engine.decode = watched
    try:
        yield
    finally:
        engine.decode = decode


def step_seconds(decode: Any, arguments: tuple, traits: dict) -> float:
    """Seconds of a step of a chunk."""
    import jax

    jax.block_until_ready(arguments)
    begin = time.perf_counter()
    _, brought, _ = jax.block_until_ready(decode(*arguments, **traits))
    seconds = time.perf_counter() - begin
    *_, lengths, _, _, outcome = jax.device_get(brought).tree()
    return seconds / int(lengths.max() if outcome is None else outcome.calls)


def measured(engine: Any, variables: Any, queue: list, rows: int, longest: int) -> Any:
    """What `second_chunks` measures of a run."""
    limits = {"max_prompt_length": longest - queue[0].limit, "max_concurrent": rows}
    try:
        for _ in engine.stream(variables, queue, 1.0, **limits):
            pass
    except Measured as end:
        return end.args[0]
    raise ValueError("the run had one chunk only")


def differences(found: dict, expected: dict) -> dict[str, float]:
    """How many rows have other tokens, after how many equal ones, and how far log-probabilities of these are apart."""
    other, places, apart = 0, [], []
    for number, row in expected.items():
        a, b = found[number], row
        size = min(len(a.tokens), len(b.tokens))
        unlike = np.flatnonzero(a.tokens[:size] != b.tokens[:size])
        alike = unlike[0] if len(unlike) else size
        is_other = bool(len(unlike)) or len(a.tokens) != len(b.tokens)
        other += is_other
        places += [int(alike)] * is_other
        apart.append(np.abs(a.behaviour_logps[:alike] - b.behaviour_logps[:alike]))
    gaps = np.concatenate(apart)
    return {
        "rows_that_differ": other / len(expected),
        "equal_before": float(np.median(places)) if places else None,
        "mean_difference": float(gaps.mean()) if len(gaps) else 0.0,
        "largest_difference": float(gaps.max(initial=0)),
    }


def leads(policy: Any, queue: list, found: dict, expected: dict, temperature: float) -> np.ndarray:
    """The lead of what was expected at the first token that differs (`sampling.lead`), in nats, of each such row.

    The log-probabilities there are computed a third time, as in training. A lead far from 0 would be a fault.
    """
    import jax

    from qerl_jax.generation import sampling
    from qerl_jax.model import layers, logprobs
    from qerl_jax.model.transformer import head

    of_rows = [(prompt, key) for prompt in queue for key in prompt.keys]
    cases = []
    for number, row in expected.items():
        a, b = found[number].tokens, row.tokens
        unlike = np.flatnonzero(a[: len(b)] != b[: len(a)])
        if len(unlike):
            (prompt, key), place = of_rows[number], int(unlike[0])
            cases.append((np.r_[prompt.tokens, b[:place]], key, place, a[place], b[place]))
    if not cases:
        return np.zeros(0)
    width = -(-max(len(ids) for ids, *_ in cases) // 64) * 64
    matrix = head(policy.variables["frozen"])

    @jax.jit
    def lead(ids, last, key, place, other, token):
        hidden = policy.model.apply(policy.variables, ids[None])[0][0, last]
        scores = layers.logits(hidden[None], matrix)
        logps = logprobs.log_softmax(scores, temperature, policy.tokenizer.num_tokens)
        key = jax.random.fold_in(jax.random.wrap_key_data(key), place)
        return sampling.lead(logps, key[None], temperature, token[None], other[None])[0]

    made = [lead(np.pad(ids, (0, width - len(ids))), len(ids) - 1, *rest) for ids, *rest in cases]
    return np.array(made)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of rows and each arm."""
    from pallas_kernels import runtime
    from qerl_jax.checkpoint.policy import find_policy, load_policy
    from qerl_jax.generation import draft_control
    from qerl_jax.generation.engine import Engine, EngineSpec

    runtime.use_compilation_cache()
    policy = load_policy(
        find_policy(args.model, args.adapter, weights=args.weights, dtype=args.dtype)
    )
    tokenizer = policy.tokenizer
    ids = tokenizer.encode(prompts_of(args))

    def made(arm: str) -> Engine:
        spec = EngineSpec(tokenizer.num_tokens)
        drafts = drafting_of("auto" if arm == "again" else arm, args.least_limit)
        return Engine(policy.model, spec, stop_tokens=tokenizer.stop_tokens, drafts=drafts)

    def timed(rows: int, arm: str, turn: int) -> tuple[float, dict, draft_control.Record]:
        engine = made(arm)
        asked = [queue_of(ids, args, seed) for seed in (turn % 100, 1000 + turn)]
        how = rows, args.temperature, args.limit + max(map(len, ids))
        if arm == "again":
            sampled(engine, policy.variables, asked[1], *how)
        before = engine.drafted
        return *sampled(engine, policy.variables, asked[0], *how), engine.drafted - before

    compiled = listen()

    def steady(rows: int, arm: str, turn: int) -> tuple[float, dict, draft_control.Record]:
        while True:
            before = len(compiled)
            found = timed(rows, arm, turn)
            if len(compiled) == before:
                return found
            spent = sum(compiled[before:])
            print(f"{rows} rows, {arm}, turn {turn}: compiled for {spent:.1f} s", flush=True)

    def closeness(found: dict, expected: dict) -> dict[str, float | None]:
        queue = queue_of(ids, args, (args.repeats - 1) % 100)
        close = np.abs(leads(policy, queue, found, expected, args.temperature))
        if not len(close):
            return {"median_lead": None, "largest_lead": None}
        return {"median_lead": float(np.median(close)), "largest_lead": float(close.max())}

    table, first = [], None
    for rows in args.rows:
        compile_all(functools.partial(timed, rows, turn=-1), args, rows)
        times: dict[str, list[float]] = {arm: [] for arm in args.arms}
        records = {arm: draft_control.Record() for arm in args.arms}
        counts, said = dict.fromkeys(args.arms, 0), {arm: {} for arm in args.arms}
        for turn in range(args.repeats):
            kept = {}
            for arm in args.arms:
                seconds, kept[arm], record = steady(rows, arm, turn)
                print(f"{rows} rows, {arm}, turn {turn}: {seconds:.2f} s", flush=True)
                times[arm].append(seconds)
                records[arm] += record
                counts[arm] += sum(len(row.tokens) for row in kept[arm].values())
            for arm in args.arms:
                said[arm] |= {(turn, number): row for number, row in kept[arm].items()}
            last = kept
        # Another number of rows rounds differently, too. What drafts change is to be compared with that.
        first = first or said["off"]
        rates = {arm: counts[arm] / max(sum(times[arm]), 1e-9) for arm in args.arms}
        for arm in args.arms if args.repeats else ():
            table.append(
                {
                    "rows": rows,
                    "arm": arm,
                    "tokens_per_second": rates[arm],
                    "relative": rates[arm] / rates["off"],
                    "mean_length": counts[arm] / args.repeats / len(ids) / args.generations,
                    "tokens_per_call": records[arm].accepted_per_call,
                    "predicted": records[arm].speedup,
                    **differences(said[arm], first if arm == "off" else said["off"]),
                    **(closeness(last[arm], last["off"]) if arm != "off" else {}),
                }
            )
            print("ROW " + json.dumps(table[-1]), flush=True)
    return table


def compile_all(work: Any, args: argparse.Namespace, rows: int) -> None:
    """Does the work once for each arm, so that its programs are compiled.

    Arms are done at the same time if nothing is timed afterwards, or with --hasty, and then also those whose steps "auto"
    may choose. Else one after the other: XLA times kernels while it compiles, and would choose worse ones beside other
    work.
    """
    is_timed = args.repeats > 0 and not (args.profile or args.hasty)
    arms = args.arms
    if args.hasty and "auto" in arms:
        arms = list(dict.fromkeys([*arms, *(n for n in STEPS if n.isdigit() and int(n) >= rows)]))
    with concurrent.futures.ThreadPoolExecutor(1 if is_timed else 6) as threads:
        list(threads.map(work, arms))


def price_table(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a step by its number of tokens, with random weights."""
    import jax

    from qerl_jax.generation.engine import Engine, EngineSpec
    from scripts.bench_rollouts import KNOWN_IDS, Bench

    how = {"model": args.prices, "prompt": 256, "siblings": 1, "kernels": "auto"}
    bench = Bench(argparse.Namespace(**vars(args) | how), "nvfp4")
    spec = EngineSpec(min(KNOWN_IDS, bench.arch.vocab_size))
    table = []
    for rows in args.rows:
        draw = np.random.default_rng(0)
        ids = [draw.integers(0, bench.arch.vocab_size, 256).tolist() for _ in range(rows)]
        drawn = argparse.Namespace(**vars(args) | {"generations": 1})

        def timed(arm: str, ids=ids, rows=rows, how=drawn) -> tuple[Any, float | None]:
            engine = Engine(bench.model, spec, drafts=drafting_of(arm, 1))
            queue = queue_of(ids, how, 0)
            found = measured(engine, bench.variables, queue, rows, 256 + args.limit)
            return found, engine.drafted.accepted_per_call

        if args.profile:
            profile(timed, rows, args)
            continue
        with second_chunks(step_seconds):
            compile_all(timed, args, rows)
            least = None
            for arm in args.arms if args.repeats else ():
                steps, accepted = zip(*(timed(arm) for _ in range(args.repeats + 1)), strict=True)
                step = statistics.median(steps)
                least = least or step
                row = {"model": args.prices, "rows": rows, "arm": arm, "step_ms": 1e3 * step}
                # 1 where no draft was right: only then a token is a step.
                row |= {"price": step / least, "tokens_per_call": accepted[0]}
                table.append(row | {"device": jax.devices()[0].device_kind})
                print("ROW " + json.dumps(table[-1]), flush=True)
    return table


def profile(timed: Any, rows: int, args: argparse.Namespace) -> None:
    """Prints the kernels of a step of each arm, for a chunk in the middle of its rows."""
    import jax

    from qerl_jax.generation.draft_search import CHUNKS
    from scripts.bench_rollouts import by_kernel, undonated

    ready = {}

    def compiled(decode: Any, arguments: tuple, traits: dict) -> None:
        has_texts, positions = len(arguments) > 5, traits["positions"]
        # No draft is right.
        slots = jax.device_get(arguments[2]).tree()
        most = traits["spec"].chunk * (CHUNKS if positions else 1)
        steps = min(most, int(np.max(slots.limit - slots.step)))
        arm = positions or 0 if has_texts else "off"
        ready[arm] = steps, undonated(decode, *arguments, **traits)

    with second_chunks(compiled):
        compile_all(timed, args, rows)
    for arm, (steps, run) in ready.items():
        print(f"{rows} rows, positions: {arm}", flush=True)
        for name, us, launches in by_kernel(run(), steps):
            print(f"{us:9.1f} us x{launches:6.1f}  {name}", flush=True)


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program, with a message, if what is asked cannot be measured."""
    from qerl_jax.generation.draft_search import CHUNKS
    from qerl_jax.generation.engine import EngineSpec

    if args.arms[0] != "off":
        parser.error('the first arm must be "off", to which the others are compared')
    for arm in args.arms:
        if not (arm.isdigit() or arm in (STEPS if args.prices else ARMS)):
            parser.error(f"no such arm: {arm}")
    first = CHUNKS * EngineSpec(1).chunk
    if args.prices and args.limit <= first:
        parser.error(f"steps are measured behind a chunk of {first} tokens: raise --limit")
    if args.profile and not args.prices:
        parser.error("--profile needs --prices")


def main() -> None:
    """Runs the rows and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub name; default: the one in the package")
    parser.add_argument("--adapter", type=pathlib.Path, help="a PEFT folder, or a run folder")
    parser.add_argument("--weights", help="storage format; default: the adapter's")
    parser.add_argument("--dtype", help="data type of activations; default: the adapter's")
    parser.add_argument(
        "--prompts",
        help="a JSONL file; default: problems of the run that made the adapter, or sums in words",
    )
    parser.add_argument("--groups", type=int, default=16, help="most prompts")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--limit", type=int, help="most tokens; default: the run's, or 512")
    parser.add_argument("--temperature", type=float, help="default: the run's, or 1")
    parser.add_argument("--least-limit", type=int, default=512, help="see draft_control.Drafting")
    parser.add_argument(
        "--repeats", type=int, default=2, help="0: only compile, several programs at a time"
    )
    parser.add_argument(
        "--hasty",
        action="store_true",
        help="compile programs at the same time; XLA may choose a slower product for the head then",
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        help='"off" first; "auto", "again", or a number: always so many tokens in a step, 0 to compare only',
    )
    parser.add_argument("--prices", help="7b, 32b ...: measure prices of steps instead")
    parser.add_argument("--profile", action="store_true", help="with --prices: a step's kernels")
    parser.add_argument("--rank", type=int, default=32, help="of LoRA, with --prices")
    parser.add_argument("--seconds", type=float, default=580, help="time limit")
    parser.add_argument("--out", type=pathlib.Path, help="append each row to this JSONL file")
    args = parser.parse_args()
    watchdog(args.seconds)
    args.run = run_of(args)
    args.arms = args.arms or (STEPS if args.prices else ARMS)
    if args.limit is None:
        args.limit = args.run.rollout.max_completion_length if args.run else 512
    if args.temperature is None:
        args.temperature = args.run.rollout.temperature if args.run else 1.0
    check(parser, args)
    from scripts.bench_kernels import versions

    rows = price_table(args) if args.prices else measure(args)
    if args.out:
        with args.out.open("a") as file:
            file.writelines(json.dumps(versions() | row) + "\n" for row in rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    print("| " + " | ".join(names) + " |")
    print("|" + " --- |" * len(names))
    for row in rows:
        values = [row.get(name, "") for name in names]
        cells = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in values]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
