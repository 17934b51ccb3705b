"""Estimates the gain of drafts from completions that were sampled before: `python -m scripts.study_drafts RUN ...`.

RUN is a run folder of `qerl train`, or a JSONL file of completions (described in `scripts/recorded_completions.py`),
optionally with a name for the tables: `after=runs/gsm8k`. It needs no model and no GPU. Run folders hold texts, which
are encoded again by the run's tokenizer.

For each step, source of drafts and rule for their length, the completions are replayed (`scripts/draft_replay.py`) and
priced. A call that verifies n positions over all rows is assumed to take as long as a decoding step of n rows, which
docs/measured/benchmarks.jsonl has for 7B and 32B; other values are interpolated linearly, or extrapolated beyond 128
rows. So speedups are estimates from a replay. They neglect the time to make drafts (`--overhead` adds it), and that the
positions of a row read its keys once instead of once per position.

A line of `--out` is one step of one run with one source and rule. `--table FILE.jsonl` prints the tables for the docs.
Acceptance at another temperature cannot be derived from these samples: give runs with several temperatures.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from scripts import recorded_completions
from scripts.draft_replay import (
    BOUND,
    ENGINE,
    LONGEST_DRAFT,
    SOURCES,
    Acceptance,
    ByMatch,
    Controller,
    Fixed,
    Outcome,
    Past,
    Policy,
    past,
    replay,
)
from scripts.recorded_completions import Recording, Row

MEASURED = pathlib.Path(__file__).parents[1] / "docs/measured/benchmarks.jsonl"
MODELS, ROWS, LENGTHS = ("7B", "32B"), (8, 16, 32, 64), (1, 2, 4, LONGEST_DRAFT)
TOGETHER = "together"
CHOICES = (*SOURCES, TOGETHER, BOUND, ENGINE)
# The step of 8 completions of up to 8192 tokens of 32B: `32b-long` in docs/measured/steps.jsonl.
_LONG_STEP, _LONG_ROLLOUT, _LONG_LENGTH, _LONG_ROWS = 103.7, 82.2, 8192, 8


@dataclasses.dataclass(frozen=True)
class Prices:
    """Time of a call as a function of its number of positions.

    Attributes:
        rows: Numbers of rows that were measured, ascending.
        ms: Their times in milliseconds.
        overhead: Additional milliseconds of a call with drafts, for any number of rows.
    """

    rows: tuple[float, ...]
    ms: tuple[float, ...]
    overhead: float = 0.0

    def time(self, positions: Any) -> np.ndarray:
        """Milliseconds, interpolated linearly; the last segment is extended."""
        x, y = np.array(self.rows), np.array(self.ms)
        positions = np.asarray(positions, float)
        beyond = y[-1] + (positions - x[-1]) * (y[-1] - y[-2]) / (x[-1] - x[-2])
        return np.where(positions > x[-1], beyond, np.interp(positions, x, y))

    def with_drafts(self, positions: Any, rows: Any) -> np.ndarray:
        """Milliseconds of calls with this many rows. Calls with more positions than rows have drafts."""
        return self.time(positions) + self.overhead * (np.asarray(positions) > rows * (1 + 1e-9))

    def speedup(self, outcome: Outcome, rows: int, draft: int | None = None) -> float:
        """The ratio of tokens/s with and without drafts if this many rows are live all the time.

        A call of the replay counts as its share of a call with that many rows.

        Args:
            outcome: The replay.
            rows: Live rows.
            draft: Draft positions that each row pays for, used or not; absent means those it uses.
        """
        positions = outcome.positions if draft is None else outcome.live * (draft + 1)
        share = outcome.live / rows
        time = (self.with_drafts(positions / share, rows) * share).sum()
        return float(outcome.emitted.sum() * self.time(rows) / rows / time)


def measured(model: str, path: pathlib.Path = MEASURED, overhead: float = 0.0) -> Prices:
    """The measured decoding steps of a model with its adapter on an H200."""
    found = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        named = re.fullmatch(rf"{model}, (\d+) rows?", row["name"])
        if row["table"] == "decoding" and row["device"] == "NVIDIA H200" and named:
            found[float(named[1])] = float(row["more"]["step ms"])
    return Prices(tuple(sorted(found)), tuple(found[rows] for rows in sorted(found)), overhead)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Groups of a step to replay with what was known before it, and the same for the step before, if there was one."""

    groups: Sequence[Sequence[Row]]
    known: Past
    before: Sample | None = None


def main() -> None:
    """Replays, writes the lines, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help="[NAME=]run folder, or [NAME=]file.jsonl")
    parser.add_argument("--out", type=pathlib.Path, help="write the lines to this file")
    parser.add_argument(
        "--table", type=pathlib.Path, metavar="JSONL", help="only print the tables of this file"
    )
    parser.add_argument(
        "--steps", type=int, nargs="+", help="steps to replay; default: the first and the last one"
    )
    parser.add_argument(
        "--groups", type=int, default=8, help="number of groups of a step, spread evenly over it"
    )
    parser.add_argument(
        "--recent", type=int, default=8, help="number of earlier steps that `history` uses"
    )
    parser.add_argument("--sources", nargs="+", default=[*CHOICES], metavar="NAME")
    parser.add_argument(
        "--overhead", type=float, default=0.0, help="additional milliseconds of a call with drafts"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help="sampling temperature of all completions; default: that of the run",
    )
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="folder of the tokenizer, if it is not the run's"
    )
    args = parser.parse_args()
    unknown = sorted({*args.sources} - {*CHOICES})
    if unknown:
        parser.error(f"--sources: got {unknown}; choose from {', '.join(CHOICES)}")
    if min(args.groups, args.recent) < 1 or args.overhead < 0:
        parser.error("--groups and --recent must be at least 1, --overhead at least 0")
    if args.table:
        print(tables([json.loads(line) for line in args.table.read_text().splitlines()]))
        return
    if not args.runs:
        parser.error("give a run folder or a file of completions")
    lines = []
    for run in args.runs:
        label, _, path = run.rpartition("=")
        recording = recorded_completions.read(
            path, label=label or None, temperature=args.temperature, tokenizer_folder=args.tokenizer
        )
        for line in study(recording, args):
            lines.append(line)
            print(json.dumps(line), flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    print(tables(lines))


def study(recording: Recording, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of a recording."""
    steps = args.steps or sorted({min(recording.steps), max(recording.steps)})
    for step in steps:
        if step not in recording.steps:
            found = f"{min(recording.steps)} ... {max(recording.steps)}"
            raise ValueError(f"--steps: got {step}; {recording.label} has steps {found}")
        sample = sample_of(recording, step, args.groups, args.recent)
        groups = sample.groups
        rows = [row for group in groups for row in group]
        of_step = {
            "run": recording.label,
            "temperature": recording.temperature,
            "step": step,
            "groups": len(groups),
            "rows": len(rows),
            "tokens": sum(len(row.completion) for row in rows),
            "seen_problems": sum(bool(each.count(())) for each in sample.known.earlier),
            "same_length": recording.same_length,
            "overhead_ms": args.overhead,
        }
        for source in args.sources:
            for line in of_source(source, sample, args.overhead):
                yield of_step | {"source": source} | line


def sample_of(recording: Recording, step: int, count: int, recent: int) -> Sample:
    """This many groups of a step, spread evenly over it."""

    def groups_of(step: int) -> Sample:
        groups = recording.steps[step]
        chosen = np.unique(np.linspace(0, len(groups) - 1, count).round().astype(int))
        groups = [groups[number] for number in chosen]
        return Sample(groups, past(recording.steps, step, groups, recent))

    before = [number for number in recording.steps if number < step]
    return dataclasses.replace(groups_of(step), before=groups_of(max(before)) if before else None)


def of_source(source: str, sample: Sample, overhead: float) -> Iterator[dict[str, Any]]:
    """The lines of a source: every fixed length, the length by the match, and the controller."""
    names = SOURCES if source == TOGETHER else (source,)
    prices = {model: measured(model, overhead=overhead) for model in MODELS}
    learned = Acceptance()  # as in a run: learned in the step before
    if sample.before:
        replay(sample.before.groups, names, sample.before.known, Fixed(LONGEST_DRAFT), learned)

    def replayed(policy: Policy) -> Outcome:
        return replay(sample.groups, names, sample.known, policy, copy.deepcopy(learned))

    def speedups(outcome: Outcome, draft: int | None = None) -> dict[str, dict[str, float]]:
        return {
            model: {str(rows): round(price.speedup(outcome, rows, draft), 3) for rows in ROWS}
            for model, price in prices.items()
        }

    for most in LENGTHS:
        outcome = replayed(Fixed(most))
        yield {"rule": str(most), **statistics(outcome), "speedup": speedups(outcome, most)}
    outcome = replayed(ByMatch())
    yield {"rule": "match", **statistics(outcome), "speedup": speedups(outcome)}
    controlled: dict[str, dict[str, float]] = {model: {} for model in MODELS}
    drafted: dict[str, dict[str, float]] = {model: {} for model in MODELS}
    for model, price in prices.items():
        for rows in ROWS:
            outcome = replayed(Controller(lambda n, p=price: p.with_drafts(n, n[0]), rows))
            controlled[model][str(rows)] = round(price.speedup(outcome, rows), 3)
            drafted[model][str(rows)] = round(float(outcome.drafted.mean()), 2)
    yield {
        "rule": "controller",
        "speedup": controlled,
        "drafted_per_call": drafted,
        "long_step_s": round(long_step(names, sample, prices["32B"], learned), 1),
    }


def statistics(outcome: Outcome) -> dict[str, Any]:
    """The numbers of a replay that tables show."""
    drafted, accepted, emitted = outcome.drafted, outcome.accepted, outcome.emitted
    # Tokens after a wrong one, or after the end of the recorded completion, were not tried.
    places = [
        accepted[(drafted > place) & (emitted > place)] > place for place in range(LONGEST_DRAFT)
    ]
    return {
        "tokens_per_call": round(outcome.tokens_per_call, 3),
        "without_draft": round(float((drafted == 0).mean()), 3),
        "drafted_per_call": round(float(drafted.mean()), 3),
        "acceptance": [round(float(each.mean()), 3) if len(each) else None for each in places],
        "by_position": by_size(outcome.position, emitted),
        "by_match": by_size(outcome.match, emitted),
    }


def by_size(sizes: np.ndarray, emitted: np.ndarray) -> dict[str, tuple[float, int]]:
    """Tokens per call and number of calls, by a size in classes: 0, 1, 2-3, 4-7 and so on."""
    bits = np.array([int(size).bit_length() for size in sizes])
    found = {}
    for bit in np.unique(bits):
        low, high = (2**bit) // 2, 2**bit - 1
        name = str(low) if low == high else f"{low}-{high}"
        among = emitted[bits == bit]
        found[name] = (round(float(among.mean()), 3), len(among))
    return found


def long_step(names: Sequence[str], sample: Sample, prices: Prices, learned: Acceptance) -> float:
    """Seconds of the step of 8 x 8192 tokens of 32B with groups like these and the controller's drafts.

    Each group is replayed alone, from the first token to the end of its longest row. The measured step was slower than
    one with as many rows and short contexts, because it reads more keys and values. That extra time is added for each
    live row.
    """
    keys = (_LONG_ROLLOUT * 1000 / _LONG_LENGTH - float(prices.time(_LONG_ROWS))) / _LONG_ROWS
    rule = Controller(lambda n: prices.with_drafts(n, n[0]) + keys * n[0])
    acceptance, with_drafts, without = copy.deepcopy(learned), 0.0, 0.0
    for number, group in enumerate(sample.groups):
        known = sample.known.of_group(number)
        outcome = replay([group], names, known, rule, acceptance)
        live = outcome.live
        with_drafts += (prices.with_drafts(outcome.positions, live) + keys * live).sum()
        lengths = np.array([len(row.completion) for row in group])
        live = (lengths > np.arange(lengths.max())[:, None]).sum(1)
        without += (prices.time(live) + keys * live).sum()
    return _LONG_STEP - _LONG_ROLLOUT * (1 - with_drafts / without)


def tables(lines: Sequence[dict[str, Any]]) -> str:
    """The tables in Markdown: tokens per call, sources of drafts, and speedups."""
    found: dict[tuple, dict[str, dict[str, Any]]] = collections.defaultdict(dict)
    for line in lines:
        found[line["run"], line["temperature"], line["step"], line["source"]][line["rule"]] = line
    parts = [
        _runs(lines),
        _table(
            ["k = 1", "2", "4", "8", "by match", "no draft", "accepted, draft token 1, 2, 4, 8"],
            {name: _acceptance(rules) for name, rules in found.items()},
        ),
        _table(
            [
                *[f"{model}, {rows} rows" for model in MODELS for rows in ROWS],
                "32B, 8 x 8192, s",
            ],
            {name: _speedups(rules) for name, rules in found.items()},
        ),
    ]
    for size in ("by_position", "by_match"):
        chosen = {name: rules[str(LENGTHS[-1])][size] for name, rules in found.items()}
        headings = sorted(
            {key for each in chosen.values() for key in each},
            key=lambda key: int(key.split("-")[0]),
        )
        cells = {
            name: [
                f"{each[key][0]:.2f} ({each[key][1]})" if key in each else "" for key in headings
            ]
            for name, each in chosen.items()
        }
        parts.append(
            f"Tokens per call, k = {LENGTHS[-1]}, {size.replace('_', ' ')} (calls):\n\n"
            + _table(headings, cells)
        )
    return "\n\n".join(parts)


def _runs(lines: Sequence[dict[str, Any]]) -> str:
    names = ("groups", "rows", "tokens", "seen_problems", "same_length")
    of_step = {
        (line["run"], line["temperature"], line["step"], "all"): [
            "" if line[name] is None else f"{line[name]:.4g}" for name in names
        ]
        for line in lines
    }
    return _table([name.replace("_", " ") for name in names], of_step)


def _acceptance(rules: dict[str, dict[str, Any]]) -> list[str]:
    longest = rules[str(LENGTHS[-1])]
    shares = [longest["acceptance"][length - 1] for length in LENGTHS]
    return [
        *[f"{rules[name]['tokens_per_call']:.2f}" for name in (*map(str, LENGTHS), "match")],
        f"{longest['without_draft']:.0%}",
        ", ".join("-" if share is None else f"{share:.2f}" for share in shares),
    ]


def _speedups(rules: dict[str, dict[str, Any]]) -> list[str]:
    cells = []
    for model in MODELS:
        for rows in ROWS:
            of = {name: line["speedup"][model][str(rows)] for name, line in rules.items()}
            best = max(map(str, LENGTHS), key=lambda name: of[name])
            cells.append(f"{of[best]:.2f} ({best}); {of['controller']:.2f}")
    return [*cells, f"{rules['controller']['long_step_s']:.0f}"]


def _table(headings: Sequence[str], rows: dict[tuple, Sequence[str]]) -> str:
    lines = [["run", "T", "step", "source", *headings], ["---"] * (4 + len(headings))]
    lines += [
        ["" if each is None else str(each) for each in (*name, *row)] for name, row in rows.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
