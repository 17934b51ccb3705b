"""Estimates how long sampling takes with several numbers of slots: `python -m scripts.replay_slots`.

Recorded lengths (`scripts/bench_recipe_lengths.json`) go through the schedule of the engine, without a device. A chunk
of 32 steps is assumed to take 32 times as long as a measured decoding step of as many rows. Prefills and the copies of
parked rows are not counted. "Reserved" is a schedule in which each row holds all pages that it can need.

    python -m scripts.replay_slots --model qwen2.5-32b --cache-gb 50
"""

from __future__ import annotations

import argparse
import collections
import json
import math
from unittest import mock

import numpy as np

from qerl_jax.generation import kv_capacity, scheduler
from qerl_jax.model import architecture, fused_decode
from scripts.bench_recipe import LENGTHS, completion_lengths

CHUNK, PAGE, PROMPT = 32, 64, 256
# Milliseconds of a decoding step by rows, H200: rows / tokens per second in docs/benchmarks.md, "Decoding".
PRICES = {
    "qwen2.5-7b": {
        8: 2.23,
        32: 2.85,
        64: 3.93,
        128: 6.09,
        192: 9.32,
        256: 11.1,
        384: 15.6,
        512: 19.6,
    },
    "qwen2.5-32b": {8: 7.38, 32: 10.49, 64: 14.48, 128: 23.4},
}


def step_ms(prices: dict[int, float], rows: int) -> float:
    """A step of so many rows: on straight lines between those that were measured, and beyond the last."""
    known = sorted(prices)
    if rows > known[-1]:
        low, high = known[-2:]
        return prices[high] + (rows - high) * (prices[high] - prices[low]) / (high - low)
    return float(np.interp(rows, known, [prices[n] for n in known]))


def replay(lengths: list[int], prompts: list[int], group: int, slots: int, pages: int, limit: int):
    """Runs a schedule to its end.

    Returns:
        Chunks by the rows of their batch, the mean of live rows per chunk, and how often a row was parked.
    """
    queue = [
        scheduler.QueuedPrompt(np.zeros(n, np.int32), np.zeros((group, 2), np.uint32), limit)
        for n in prompts
    ]
    width = -(-(PROMPT - 1 + limit) // PAGE)
    shapes = scheduler.Shapes(
        PAGE, CHUNK, width, PROMPT + limit, PROMPT - 1, slots, scheduler.batch_sizes(slots)
    )
    schedule = scheduler.Schedule(shapes, pages, scheduler.distribute(queue))
    chunks, live_rows, made = collections.Counter(), [], np.zeros(len(lengths), int)
    while schedule.unfinished():
        schedule.leaving()
        while schedule.next_prefill() is not None:
            pass
        schedule.returning()
        schedule.copies()
        chunk = schedule.slots(with_history=False)
        rows = [row.index for _, row in schedule._running()]
        at = [slot for slot, _ in schedule._running()]
        steps, live = np.zeros(len(chunk.live), int), chunk.live.copy()
        steps[at] = np.minimum(CHUNK, [lengths[row] - made[row] for row in rows])
        made[rows] += steps[at]
        live[at] = [made[row] < lengths[row] for row in rows]
        chunks[len(chunk.live)] += int(steps.max())
        live_rows.append(len(rows))
        blank = np.ones((len(chunk.live), CHUNK), np.int32)
        schedule.harvest(blank, blank, steps, live, np.array([1]), None)
    return chunks, float(np.mean(live_rows)), schedule.times_parked


def main() -> None:
    """Prints a row for each number of slots, with pages that are reserved and with pages on demand."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-32b", choices=PRICES)
    parser.add_argument(
        "--cache-gb", type=float, default=50, help="size of the cache of keys and values"
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--limit", type=int, default=4096)
    parser.add_argument("--sigma", default="0.5", choices=["0.5", "1"])
    parser.add_argument("--truncated", type=float, default=0.01)
    parser.add_argument("--stretch", type=float, default=1.0, help="factor for all lengths")
    parser.add_argument(
        "--share",
        type=float,
        default=kv_capacity.EXPECTED_SHARE,
        help="share of the limit that a row is expected to need; it sets the number of slots on demand",
    )
    args = parser.parse_args()
    arch = architecture.KNOWN[args.model]
    found = completion_lengths(args.sigma, args.truncated, args.limit)
    lengths = [min(args.limit, math.ceil(args.stretch * n)) for n in found[: args.rows]]
    prompts = json.loads(LENGTHS.read_text())["prompt_tokens"][: args.rows // args.group]
    pages = kv_capacity.pages_for(int(args.cache_gb * 1e9 / arch.kv_bytes(2)), PAGE)
    longest = PROMPT - 1 + args.limit
    most = fused_decode.MAX_ROWS
    demand = kv_capacity.Demand(
        arch, args.rows, len(prompts), PROMPT, longest, PAGE, True, 2, fused_rows=most
    )
    reserved = kv_capacity.best_slots(
        args.rows,
        lambda n: kv_capacity.pages_wanted(n, longest, 1, PROMPT - 1, PAGE),
        lambda _: pages,
    )
    with mock.patch.object(kv_capacity, "EXPECTED_SHARE", args.share):
        chosen = demand.best_slots(lambda _: (pages - 2) * PAGE)
    print(f"{pages} pages, {np.mean(lengths):.0f} tokens per completion on average")
    print("| pages | slots | rows live | parked | seconds |\n| --- | --- | --- | --- | --- |")
    for name, slots, ahead in (("reserved", reserved, 10**6), ("on demand", chosen, 4)):
        with mock.patch.object(scheduler, "_AHEAD", ahead):
            chunks, live, parked = replay(lengths, prompts, args.group, slots, pages, args.limit)
        ms = sum(count * step_ms(PRICES[args.model], rows) for rows, count in chunks.items())
        print(f"| {name} | {slots} | {live:.0f} | {parked} | {ms / 1e3:.1f} |")


if __name__ == "__main__":
    main()
