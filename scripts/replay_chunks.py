"""Estimates what the end of a chunk with drafts costs: `python -m scripts.replay_chunks`.

Slots are filled from a queue of recorded lengths. Between two chunks the host gives slots of rows that have ended to
rows that wait, for which it takes as long as some steps. Longer chunks leave slots idle, and shorter ones make the host
work more often. A row gets 1 to 8 tokens in a step with drafts, binomially with the mean of --tokens.

    python -m scripts.replay_chunks --rows 16 --price 1.54
    python -m scripts.replay_chunks --completions RUN/completions/step_000024.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib

import numpy as np

from qerl_jax.generation.draft_search import CHUNKS, MOST
from qerl_jax.generation.scheduler import _IDLE
from scripts.bench_recipe import completion_lengths

CHUNK = 32


@dataclasses.dataclass(frozen=True)
class Rule:
    """When a chunk ends, while rows wait.

    Attributes:
        tokens: After so many tokens of a row.
        idle: When ended rows have been idle for so many steps of all slots.
    """

    tokens: int = CHUNKS * CHUNK
    idle: float = float("inf")


def replay(
    lengths: list[int], slots: int, rule: Rule, *, mean: float, price: float, host: float, seed=0
) -> tuple[float, float]:
    """Samples rows of these lengths.

    Args:
        lengths: Tokens of each row, in the order in which they begin.
        slots: Rows at a time.
        rule: When a chunk ends.
        mean: Tokens that a row gets in a step.
        price: Time of a step.
        host: Time of the host between two chunks.
        seed: Of the tokens.

    Returns:
        The time, and the share of all slots' steps in which they were idle.
    """
    draw, waiting, left = np.random.default_rng(seed), list(lengths), np.zeros(slots)
    time, steps, idle = 0.0, 0, 0
    while waiting or left.any():
        for slot in np.flatnonzero(left == 0)[: len(waiting)]:
            left[slot] = waiting.pop(0)
        got, ended = np.zeros(slots), 0
        most = max(1, np.floor(rule.idle * slots)) if waiting else np.inf
        live = left > 0
        while left.any() and got.max() < rule.tokens and ended < most:
            idle += int(np.sum(left == 0))
            taken = np.minimum(left, 1 + draw.binomial(MOST, (mean - 1) / MOST, slots))
            got, left, steps = got + taken, left - taken, steps + 1
            ended += int(np.sum(live & (left == 0)))
            time += price
        time += host
    return time, idle / (steps * slots)


def main() -> None:
    """Prints a row for each rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--completions", type=pathlib.Path, help="a step's file of a run; default: recorded lengths"
    )
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--count", type=int, default=128, help="completions")
    parser.add_argument("--rows", type=int, default=16, help="slots")
    parser.add_argument("--tokens", type=float, default=2.3, help="of a row, in a step with drafts")
    parser.add_argument(
        "--price", type=float, default=1.45, help="steps that one with drafts takes"
    )
    parser.add_argument("--host", type=float, default=2.0, help="steps that the host takes")
    args = parser.parse_args()
    if args.completions:
        found = [json.loads(line)["length"] for line in args.completions.open()]
    else:
        found = completion_lengths("0.5", 0.01, args.limit)
    lengths = np.random.default_rng(0).choice([min(args.limit, n) for n in found], args.count)
    how = {"slots": args.rows, "host": args.host}
    plain, _ = replay(lengths, rule=Rule(CHUNK), mean=1, price=1, **how)
    print(f"as fast without anything idle: {args.tokens / args.price:.2f}")
    print("| tokens of a row | idle steps of all slots | as fast as without drafts | idle |")
    print("| --- | --- | --- | --- |")
    rules = [Rule(n * CHUNK) for n in (1, 2, CHUNKS)]
    for rule in rules + [Rule(idle=x) for x in sorted({0.1, _IDLE, 0.5, 1.0, 2.0})]:
        time, idle = replay(lengths, rule=rule, mean=args.tokens, price=args.price, **how)
        print(f"| {rule.tokens} | {rule.idle} | {plain / time:.2f} | {100 * idle:.0f} % |")


if __name__ == "__main__":
    main()
