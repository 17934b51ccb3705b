"""Compares QeRL's tables of speed with our numbers: `python -m scripts.paper_tables` writes docs/paper-tables.md.

The paper's numbers (arXiv 2510.11696, tables 3 and 5 to 9) are in this file. Ours are those of
docs/measured/benchmarks.jsonl, found by the name of their line; sizes follow from the shapes. A cell says what was not
measured, and what needs more memory than the card has.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import pathlib
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from qerl_jax.model import architecture
from qerl_jax.model.transformer import Transformer, abstract_base
from qerl_jax.planning import cards
from scripts import make_benchmarks
from scripts.study_results import table

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/paper-tables.md"
H100, H200 = "NVIDIA H100", "NVIDIA H200"
# The cell of a value that was not measured, or that the paper does not have; and of one that no card of this kind can have.
MISSING, NO_ROOM = "-", "does not fit"
# Tokens of a sequence at the end of our rollouts.
_TOKENS = 256 + 512
# Completions of our steps.
_COUNTS = (16, 64)
FORMATS = {"bfloat16": "BF16", "nf4": "NF4", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}
# GB, tables 3 and 5 to 8.
PAPER_SIZES = {
    "3B": {"bfloat16": 6.2, "nvfp4": 2.8},
    "7B": {"bfloat16": 15.2, "nf4": 5.7, "nvfp4": 5.9},
    "14B": {"bfloat16": 29.6, "nf4": 10.2, "nvfp4": 10.6},
    "32B": {"bfloat16": 62.3, "nvfp4": 20.7},
}
# Rollout tokens/s on one H100 with rank 16, tables 5 to 8, for the batch sizes ("BS") 2 and 8.
PAPER_ROLLOUT = {
    "3B": {"bfloat16": (151.2, 2226.3), "nvfp4": (157.0, 2271.4)},
    "7B": {"bfloat16": (115.4, 1641.1), "nvfp4": (151.6, 2091.8)},
    "14B": {"bfloat16": (65.4, 737.2), "nvfp4": (95.3, 1091.1)},
    "32B": {"bfloat16": (34.0, 344.3), "nvfp4": (60.0, 688.2)},
}
# Tokens/s at batch 1 with rank 16, 32 and 64, table 9.
PAPER_RANKS = {
    "3B": {"bfloat16": (151.2, 148.8, 138.6), "nvfp4": (157.0, 153.1, 140.0)},
    "7B": {"bfloat16": (115.4, 113.2, 108.3), "nvfp4": (151.6, 149.9, 137.7)},
    "14B": {
        "bfloat16": (65.4, 63.1, 61.2),
        "nf4": (45.1, 44.2, 42.8),
        "nvfp4": (95.3, 92.9, 86.0),
    },
    "32B": {
        "bfloat16": (34.0, 33.3, 31.9),
        "nf4": (25.2, 25.6, 23.0),
        "nvfp4": (58.0, 56.0, 51.3),
    },
}
# The rank of our adapters, except where a line's name says another.
RANK = 32
# How many times as fast a step is as with BF16 LoRA: "BS 2, 4, 8" of table 3; "BS 2, 8" of tables 5 to 8, without and
# with gradient checkpointing.
PAPER_ENDS = {
    "3B": {"nvfp4": ("-", "1.1, 1.1", "1.0, 1.1")},
    "7B": {"nvfp4": ("1.5, 1.4, 1.2", "1.2, 1.1", "1.2, 1.1"), "nf4": ("0.8, 0.8, 0.7", "-", "-")},
    "14B": {
        "nvfp4": ("1.4, 1.2, 1.2", "1.4, out of memory", "1.4, 1.3"),
        "nf4": ("0.9, 0.7, 0.7", "-", "-"),
    },
    "32B": {"nvfp4": ("-", "out of memory", "BF16 out of memory")},
}


@dataclasses.dataclass(frozen=True)
class Lines:
    """The lines of docs/measured/benchmarks.jsonl."""

    lines: Sequence[dict]

    def line(self, kind: str, name: str, device: str) -> dict | None:
        """The line of a name and a device; None if there is none."""
        key = (kind, name, device)
        found = (
            each for each in self.lines if (each["table"], each["name"], each["device"]) == key
        )
        return next(found, None)

    def value(self, kind: str, name: str, device: str, of: str | None = None) -> str:
        """The value of a line, or of one of its further columns."""
        line = self.line(kind, name, device)
        if line is None:
            return MISSING
        return make_benchmarks.shown(line["value"] if of is None else line["more"].get(of))


def sizes() -> str:
    """Bytes of the base on the device, by format."""
    rows = [["model", *(f"{each}, ours (the paper's)" for each in FORMATS.values())]]
    for model, theirs in PAPER_SIZES.items():
        cells = [f"{size(model, each):.2f} ({theirs.get(each, '-')})" for each in FORMATS]
        rows.append([f"Qwen2.5-{model}", *cells])
    return table(rows)


@functools.cache
def size(model: str, weights: str) -> float:
    """GB of a base in the device's layout, with embedding and head in 16 bits. No weight is made."""
    arch = architecture.KNOWN[f"qwen2.5-{model.lower()}"]
    leaves = jax.tree.leaves(abstract_base(Transformer(arch, weights, None, jnp.bfloat16)))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) / 1e9


# Our lines by format: the table, and the name of the column if it is not the value itself.
_OURS = {
    "nvfp4": ("decoding", None),
    "bfloat16": ("bfloat16", "BF16 tokens/s"),
    "nf4": ("plain", None),
    "mxfp4": ("plain", None),
}


def fits(model: str, weights: str, count: int, device: str) -> bool:
    """Whether a base and the keys and values of so many sequences are smaller than a card's memory."""
    arch = architecture.KNOWN[f"qwen2.5-{model.lower()}"]
    token = 2 * arch.num_layers * arch.num_kv_heads * arch.head_size * 2
    (card,) = (each for each in cards.CARDS if f"NVIDIA {each.name}" == device)
    return size(model, weights) * 1e9 + count * _TOKENS * token < card.mebibytes * 2**20


def rollouts(lines: Lines) -> str:
    """Tokens per second by number of rows that decode at once."""
    columns = [
        *itertools.product(("nvfp4", "bfloat16"), (H200, H100)),
        ("nf4", H200),
        ("mxfp4", H200),
    ]
    heads = [f"{FORMATS[weights]}, {device.split()[-1]}" for weights, device in columns]
    rows = [["model", "rows", *heads, "the paper, H100"]]
    for model, theirs in PAPER_ROLLOUT.items():
        for count in (1, 8, 16, 32, 64, 128):
            cells = [cell(lines, weights, model, count, device) for weights, device in columns]
            paper = _PAPER_ROWS.get(count)
            if {*cells} <= {MISSING, NO_ROOM} and paper is None:
                continue
            said = MISSING
            if paper is not None:
                said = ", ".join(f"{FORMATS[each]} {theirs[each][paper]}" for each in theirs)
                said += f' ("BS {(2, 8)[paper]}")'
            rows.append([model, str(count), *cells, said])
    return table(rows)


# By our number of rows: which of the paper's two numbers of a rollout is shown beside it.
_PAPER_ROWS = {1: 0, 8: 1}


def speedups(lines: Lines) -> str:
    """How many times as many tokens per second NVFP4 samples as a 16-bit base does."""
    rows = [["model", "rows", "ours, H200", "ours, H100", "the paper, H100"]]
    for model, theirs in PAPER_ROLLOUT.items():
        for count in (1, 8, 16, 32, 64, 128):
            name = f"{model}, {count} row{'s' if count > 1 else ''}"
            ours = [lines.value("bfloat16", name, device) for device in (H200, H100)]
            place, said = _PAPER_ROWS.get(count), MISSING
            if place is not None:
                times = theirs["nvfp4"][place] / theirs["bfloat16"][place]
                said = f'{times:.2f} ("BS {(2, 8)[place]}")'
            if {*ours, said} != {MISSING}:
                rows.append([model, str(count), *ours, said])
    return table(rows)


def cell(lines: Lines, weights: str, model: str, count: int, device: str, rank: int = RANK) -> str:
    """Our tokens per second with so many rows and an adapter of this rank."""
    kind, column = _OURS[weights]
    name = f"{count} row{'s' if count > 1 else ''}"
    name += f", rank {rank}" * (rank != RANK)
    if kind == "plain":
        # Lines of the plain layers are of 7B, unless they name another model.
        prefix = "" if model == "7B" else f"{model} "
        name = f"{prefix}{FORMATS[weights]}, {name}"
        line = lines.line(kind, name, device)
        mark = "" if line is None else f" ({mark_of(line)})"
        return lines.value(kind, name, device) + mark
    found = lines.value(kind, f"{model}, {name}", device, column)
    return found if found != MISSING or fits(model, weights, count, device) else NO_ROOM


def mark_of(line: dict) -> str:
    """What decoded a base that the Hopper kernels do not read: p, the portable kernels, or t, the layers of training."""
    return "p" if line["note"].startswith("portable kernels") else "t"


def dates(lines: Lines, mark: str) -> str:
    """The days of the NF4 and MXFP4 lines with a mark."""
    others = tuple(f"{FORMATS[weights]}," for weights in ("nf4", "mxfp4"))
    days = {
        line["date"]
        for line in lines.lines
        if line["table"] == "plain"
        and any(each in line["name"] for each in others)
        and mark_of(line) == mark
    }
    return " and ".join(sorted(days))


def batch_sizes() -> tuple[str, str]:
    """What the paper's numbers for "BS 2" and "BS 8" say of what it counts.

    Returns:
        The least and the largest ratio of tokens per second between the two, and the bases whose number for BS 2 is not
        that of table 9 for batch 1.
    """
    pairs = {
        (model, weights): pair
        for model, theirs in PAPER_ROLLOUT.items()
        for weights, pair in theirs.items()
    }
    ratios = [eight / two for two, eight in pairs.values()]
    others = [
        f"{FORMATS[weights]} of {model}, {two} and {PAPER_RANKS[model][weights][0]}"
        for (model, weights), (two, _) in pairs.items()
        if two != PAPER_RANKS[model][weights][0]
    ]
    return f"{min(ratios):.1f} to {max(ratios):.1f}", "; ".join(others)


def ranks(lines: Lines) -> str:
    """Tokens per second of one row by the rank of the adapter."""
    columns = list(itertools.product(("nvfp4", "bfloat16", "nf4"), (H200, H100)))
    heads = [f"{FORMATS[weights]}, {device.split()[-1]}" for weights, device in columns]
    rows = [["model", "rank", *heads, "the paper, H100"]]
    for model, theirs in PAPER_RANKS.items():
        for place, rank in enumerate((16, 32, 64)):
            ours = [cell(lines, weights, model, 1, device, rank) for weights, device in columns]
            said = ", ".join(f"{FORMATS[each]} {theirs[each][place]}" for each in theirs)
            rows.append([model, str(rank), *ours, said])
    return table(rows)


def ends(lines: Lines) -> str:
    """How many times as fast a whole step is as with a 16-bit base: the paper's numbers, and ours."""
    rows = [
        [
            "model",
            "format",
            'the paper, table 3: "BS 2, 4, 8"',
            'tables 5 to 8, activations kept: "BS 2, 8"',
            'recomputed: "BS 2, 8"',
            "ours, H200: 16, 64 completions",
            "ours, H100: 16, 64 completions",
        ]
    ]
    for model, formats in PAPER_ENDS.items():
        for weights, theirs in formats.items():
            ours = []
            for device in (H200, H100):
                both = [ratio(lines, model, weights, count, device) for count in _COUNTS]
                ours.append(MISSING if {*both} == {MISSING} else ", ".join(both))
            rows.append([model, FORMATS[weights], *theirs, *ours])
    return table(rows)


def step_name(model: str, weights: str, count: int) -> str:
    """The name of the line of a step with so many completions of 512 tokens."""
    return f"{model} step, {count} completions of 512" + (
        "" if weights == "nvfp4" else f", {FORMATS[weights]}"
    )


def steps(lines: Lines) -> str:
    """Seconds of a whole step, with the day of each."""
    rows = [["what", "H200", "H100", "the paper, H100"]]

    def add(text: str, name: str, paper: str = MISSING, *, always: bool = True) -> None:
        cells = [seconds(lines.line("training", name, device)) for device in (H200, H100)]
        if always or {*cells} != {MISSING}:
            rows.append([text, *cells, paper])

    for model, weights, count in itertools.product(("3B", "7B", "14B"), ("nvfp4", "nf4"), _COUNTS):
        text = f"{model}, {FORMATS[weights]}: {count} completions of 512 tokens"
        add(text, step_name(model, weights, count), always=False)
    add(
        "32B, NVFP4, rank 16: 8 completions of one prompt, all of 512 tokens",
        "32B step, 1 x 8 x 512, LoRA 16",
        '12.2 ("BS 8"), 10.6 ("BS 2"): up to 2048 tokens, mean length unknown',
    )
    add(
        "32B, NVFP4, rank 16: 8 completions of up to 8192 tokens",
        "32B step, 8 completions of up to 8192 tokens",
    )
    return table(rows)


def seconds(line: dict | None) -> str:
    """The value of a step, its day, and whether the card had only another card's tuned settings then."""
    if line is None:
        return MISSING
    borrowed = "tuning tables of the H200" in line["conditions"] and line["device"] != H200
    tuned = ", with the settings of an H200" if borrowed else ""
    return f"{make_benchmarks.shown(line['value'])} ({line['date']}{tuned})"


def ratio(lines: Lines, model: str, weights: str, count: int, device: str) -> str:
    """How many times longer a step takes with a BF16 base. A line without its time takes it from the line of NVFP4."""
    line = lines.line("training", step_name(model, weights, count), device)
    other = lines.line("training", step_name(model, "nvfp4", count), device)
    beside = next((e["baseline_value"] for e in (line, other) if e and e["baseline_value"]), None)
    if line is None or beside is None:
        return MISSING
    return f"{make_benchmarks.number(beside) / make_benchmarks.number(line['value']):.2f}"


def page(lines: Lines) -> str:
    """Returns docs/paper-tables.md."""
    rise, unequal = batch_sizes()
    return TEXT.format(
        rise=rise,
        unequal=unequal,
        sizes=sizes(),
        rollouts=rollouts(lines),
        training_dates=dates(lines, "t"),
        portable_dates=dates(lines, "p"),
        speedups=speedups(lines),
        ranks=ranks(lines),
        steps=steps(lines),
        ends=ends(lines),
    )


TEXT = """\
# The paper's tables of speed, and ours

Tables 3 and 5 to 9 of [QeRL](https://arxiv.org/abs/2510.11696), compared with our measurements.
`scripts/paper_tables.py` writes this page from [measured/benchmarks.jsonl](measured/benchmarks.jsonl).
[benchmarks.md](benchmarks.md) has all lines, with commands, dates and versions. The paper's numbers are for one H100 with
vLLM 0.10 and PyTorch, and were not measured again. Ours are for random weights in these shapes. Their completions do not stop at end
tokens, so all have the full length. The speed of a token does not depend on that.

In our columns, "-" was **not measured**, and "does not fit" needs more memory than the card has. In the paper's columns, "-" means that
the paper has no number. [Below](#to-measure-what-is-missing) are the commands for what is missing.

A **row** is a sequence that is decoded at the same time as others. "8 rows" are eight completions at once, with any prompts. The
paper does not say what its "BS" counts. It cannot be rows: from BS 2 to BS 8, four times as much, its tokens per second rise {rise}
times. And its numbers for BS 2 are those of its table for batch 1 (except {unequal}). So the tables below show 1 row beside BS 2, and 8
rows beside BS 8. Compare ours with the paper's for 1 row only: for 8 rows it is not known whether the work is the same.

## Size (tables 3 and 5 to 8)

GB of the base in device memory: packed linears, embedding and head in 16 bits. The paper's 3B has the embedding twice.

{sizes}

## Rollout, tokens per second (tables 5 to 8)

Ours: LoRA of rank 32, prompts of 256 tokens, 512 new tokens, prefill taken out. The paper's: rank 16, prompts of 256
tokens, up to 2048 new tokens.

{rollouts}

The Hopper kernels do not read NF4 and MXFP4, so other programs decoded these, and they are slow. **(t)**: the layers of training, on
{training_dates} ([benchmarks](benchmarks.md#decoding-without-the-fused-layers)). **(p)**: the portable kernels (jax-triton), on {portable_dates},
which were tuned for NVFP4 only. Do not compare (t) with (p): 8 rows of 7B in NF4 with (t) are barely twice as fast as one row with
(p) in the table of [ranks](#rank-tokens-per-second-of-one-row-table-9). Both are untuned baselines, and say nothing about the formats.

How many times as many tokens per second NVFP4 samples as BF16 does. For ours, both bases were measured on the same kind of card: in one run,
or on two cards ([benchmarks](benchmarks.md#nvfp4-beside-a-16-bit-base) says where). So a number may differ a little from the quotient of two cells above, which may be newer. For the paper, it is the quotient of
its two numbers above.

{speedups}

## Rank, tokens per second of one row (table 9)

{ranks}

(p) is as above. Other cards of the machine were busy in most of these runs, so a difference of 3 % may be chance. For 3B, 8 % may be
chance: its step takes only 2 ms and depends most on the host.

## A whole step (tables 3 and 5 to 8)

Seconds, with the day of each measurement. LoRA of rank 32 where nothing else is said, layers recomputed.

{steps}

**Speed-up.** The seconds of a step with a 16-bit base, divided by the seconds with the 4-bit base. Above 1, 4 bits are faster. The paper's
numbers for 7B and 14B in table 3 differ from those in its other tables. Ours have 16 and 64 completions, of 512 tokens each, with layers
recomputed; we measured no step with activations kept. [Benchmarks](benchmarks.md#training) says where the two steps are of different runs. The two sides are not the same work: the paper does not say what its BS counts, and
its completions have up to 2048 tokens and end by themselves. So only compare whether 4 bits are faster, not by how much.

{ends}

## To measure what is missing

| what | command |
| --- | --- |
| 1 and 8 rows: NVFP4; BF16 up to 14B; one row of BF16 at 32B | `python -m scripts.measure_batch paper` |
| ranks 16 and 64, one row: NVFP4, BF16, and NF4 of 7B and 14B | `python -m scripts.measure_batch paper` |
| steps of 3B, 7B and 14B, with their speed-ups | `python -m scripts.measure_batch paper` |
| other rows of NVFP4 and BF16 | `python -m scripts.bench_rollouts --model MODEL --arms nvfp4 bfloat16 --batch ROWS` |
| other cells of NF4 and MXFP4 | `python -m scripts.bench_rollouts --model MODEL --arms nf4 mxfp4 --rank RANK --batch ROWS` |
| the step of 32B with 8 completions of 512 tokens | `python -m scripts.bench_step --rows 32b-step` |
| the step of 32B with completions of up to 8192 tokens | `python -m scripts.bench_step --rows 32b-long` |
| the speed-up of 32B, and steps with activations kept | none: `scripts/bench_step.py` has no such row |
"""


def main() -> None:
    """Writes the page, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the page is out of date"
    )
    made = page(Lines(make_benchmarks.read(make_benchmarks.SOURCE)))
    if not parser.parse_args().check:
        PAGE.write_text(made)
    elif made != PAGE.read_text():
        sys.exit(f"{PAGE} is out of date: run python -m scripts.paper_tables")


if __name__ == "__main__":
    main()
