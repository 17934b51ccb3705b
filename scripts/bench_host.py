"""Measures what the host takes between two chunks of sampling: `python -m scripts.bench_host`.

Rows wait for slots, so the device waits while the host reads what a chunk brought, gives slots and pages to other rows,
and starts the next chunk. The clock runs from the moment at which the device has ended the chunk to the call that starts
the next: what it brought travels to the host, and prefill is started.

    python -m scripts.bench_host                      # the tiny base, on whatever device there is
    python -m scripts.bench_host --model smollm2 --rows 16 128 --limit 512

It prints for each number of rows, without drafts and with steps of 64 tokens: chunks, and the median and the mean of
their milliseconds in the best of --runs runs. The program ends itself after --seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from scripts.bench_drafts import drafting_of, prompts_of, queue_of, watchdog


def listen() -> list[tuple[str, float]]:
    """Where it is written from now on when a chunk has ended, and when the next is started."""
    import jax

    from qerl_jax.generation import engine

    marks: list[tuple[str, float]] = []
    get, decode = jax.device_get, engine.decode

    def marked_get(arrays: Any) -> Any:
        # As `device_get` does, before it waits.
        for each in jax.tree.leaves(arrays):
            each.copy_to_host_async()
        jax.block_until_ready(arrays)
        marks.append(("ended", time.perf_counter()))
        return get(arrays)

    def marked_decode(*arguments: Any, **static: Any) -> Any:
        marks.append(("started", time.perf_counter()))
        return decode(*arguments, **static)

    jax.device_get, engine.decode = marked_get, marked_decode
    return marks


def between(marks: list[tuple[str, float]]) -> list[float]:
    """Milliseconds from each chunk to the next, where that waited for the host."""
    pairs = zip(marks, marks[1:], strict=False)
    return [1e3 * (b - a) for (x, a), (y, b) in pairs if (x, y) == ("ended", "started")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--limit", type=int, default=256, help="tokens of a row")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600)
    args = parser.parse_args()
    watchdog(args.seconds)

    from qerl_jax.checkpoint.policy import find_policy, load_policy
    from qerl_jax.generation.engine import Engine, EngineSpec

    policy = load_policy(find_policy(args.model, None, weights=None, dtype=None))
    tokenizer, marks = policy.tokenizer, listen()
    args.run, args.prompts, args.generations = None, None, 8
    print("| rows | drafts | chunks | median ms | mean ms |\n|---:|---|---:|---:|---:|")
    for rows in args.rows:
        # Three times as many rows as slots, so that most chunks find rows that wait.
        args.groups = -(-3 * rows // args.generations)
        ids = tokenizer.encode(prompts_of(args))
        for arm in ("off", "64") if rows <= 32 else ("off",):
            drafts = drafting_of(arm, 1)
            runs = []
            for seed in range(args.runs + 1):
                engine = Engine(policy.model, EngineSpec(tokenizer.num_tokens), drafts=drafts)
                marks.clear()
                limits = {"max_prompt_length": max(map(len, ids)), "max_concurrent": rows}
                for _ in engine.completions(
                    policy.variables, queue_of(ids, args, seed), 0.6, **limits
                ):
                    pass
                runs.append(between(marks))
            # The first compiles.
            best = min(runs[1:], key=statistics.median)
            print(
                f"| {rows} | {arm} | {len(best)} | {statistics.median(best):.2f} | {statistics.mean(best):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
