"""Compares QeRL's tables of speed with our numbers: `python -m scripts.paper_tables` writes docs/paper-tables.md.

The paper's numbers (arXiv 2510.11696, tables 3 and 5 to 9) are in this file. Ours are those of
docs/measured/benchmarks.jsonl, found by the name of their line; sizes follow from the shapes. What was not measured is
empty.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from qerl_jax.model import architecture
from qerl_jax.model.transformer import Transformer, abstract_base
from scripts import make_benchmarks
from scripts.study_results import table

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/paper-tables.md"
H100, H200 = "NVIDIA H100", "NVIDIA H200"
# The cell of a value that was not measured.
MISSING = ""
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

    def value(self, kind: str, name: str, device: str, of: str | None = None) -> str:
        """The value of a line, or of one of its further columns; an empty cell if there is none."""
        for line in self.lines:
            if (line["table"], line["name"], line["device"]) == (kind, name, device):
                return make_benchmarks.shown(line["value"] if of is None else line["more"].get(of))
        return MISSING


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
            paper = {1: 0, 8: 1}.get(count)
            if set(cells) == {MISSING} and (paper is None or model != "3B"):
                continue
            said = ""
            if paper is not None:
                said = ", ".join(f"{FORMATS[each]} {theirs[each][paper]}" for each in theirs)
                said += f' ("BS {(2, 8)[paper]}")'
            rows.append([model, str(count), *cells, said])
    return table(rows)


def cell(lines: Lines, weights: str, model: str, count: int, device: str, rank: int = RANK) -> str:
    """Our tokens per second with so many rows and an adapter of this rank."""
    kind, column = _OURS[weights]
    name = f"{count} row{'s' if count > 1 else ''}"
    name += f", rank {rank}" * (rank != RANK)
    if kind == "plain":
        # Lines of the plain layers are of 7B, unless they name another model.
        prefix = "" if model == "7B" else f"{model} "
        return lines.value(kind, f"{prefix}{FORMATS[weights]}, {name}", device)
    return lines.value(kind, f"{model}, {name}", device, column)


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
            "the paper, table 3",
            "tables 5 to 8, activations kept",
            "recomputed",
            "ours, H200",
            "ours, H100",
        ]
    ]
    for model, formats in PAPER_ENDS.items():
        for weights, cells in formats.items():
            counts = [ratio(lines, model, weights, count) for count in (16, 64)]
            ours = (", ".join(filter(None, device)) for device in zip(*counts, strict=True))
            rows.append([model, FORMATS[weights], *cells, *ours])
    return table(rows)


def steps(lines: Lines) -> str:
    """Seconds of a whole step."""
    value: Callable[..., str] = functools.partial(lines.value, "training")
    long, name = "7B step, 64 completions of 512", "32B step, 1 x 8 x 512, LoRA 16"
    rows = [
        ["what", "H200", "H100", "the paper, H100"],
        [
            "32B, NVFP4, rank 16: 8 completions of one prompt, all of 512 tokens, seconds",
            value(name, H200),
            value(name, H100),
            '12.2 ("BS 8"), 10.6 ("BS 2"): up to 2048 tokens, mean length unknown',
        ],
        [
            "32B, NVFP4: 8 completions of up to 8192 tokens, seconds",
            value("32B step, 8 completions of up to 8192 tokens", H200),
            value("32B step, 8 completions of up to 8192 tokens", H100),
            "-",
        ],
    ]
    rows.append(
        ["7B, NVFP4, 64 completions of 512, seconds", value(long, H200), value(long, H100), "-"]
    )
    return table(rows)


def ratio(lines: Lines, model: str, weights: str, count: int) -> list[str]:
    """How many times longer a step takes with a BF16 base, on both cards."""
    name = f"{model} step, {count} completions of 512"
    name += "" if weights == "nvfp4" else f", {FORMATS[weights]}"
    cells, number = [], make_benchmarks.number
    for device in (H200, H100):
        found = [line for line in lines.lines if (line["name"], line["device"]) == (name, device)]
        cells += [
            f"{number(line['baseline_value']) / number(line['value']):.2f}" for line in found
        ] or [MISSING]
    return cells


def page(lines: Lines) -> str:
    """Returns docs/paper-tables.md."""
    return TEXT.format(
        sizes=sizes(),
        rollouts=rollouts(lines),
        ranks=ranks(lines),
        steps=steps(lines),
        ends=ends(lines),
    )


TEXT = """\
# The paper's tables of speed, and ours

Tables 3 and 5 to 9 of [QeRL](https://arxiv.org/abs/2510.11696), compared with our measurements.
`scripts/paper_tables.py` writes this page from [measured/benchmarks.jsonl](measured/benchmarks.jsonl).
[benchmarks.md](benchmarks.md) has all lines, with commands, dates and versions. The paper's numbers are for one H100 with
vLLM 0.10 and PyTorch, and were not measured again. Ours are for random weights in these shapes, with end tokens
ignored, which does not change the speed of a token. **An empty cell was not measured yet.**

A **row** is a sequence that is decoded at the same time as others. "8 rows" are eight completions at once, with any prompts. The
paper does not say what its "BS" counts. It cannot be rows: from BS 2 to BS 8 its tokens per second rise ten to fourteen times, and
its numbers for BS 2 are those of its table for batch 1. So the tables below show 1 row beside BS 2, and 8 rows beside BS 8. Only
the first pair can be compared.

## Size (tables 3 and 5 to 8)

GB of the base in device memory: packed linears, embedding and head in 16 bits. The paper's 3B has the embedding twice.

{sizes}

## Rollout, tokens per second (tables 5 to 8)

Ours: LoRA of rank 32, prompts of 256 tokens, 512 new tokens, prefill taken out. The paper's: rank 16, prompts of 256
tokens, up to 2048 new tokens.

{rollouts}

NF4 and MXFP4 are slow in ours because the Hopper kernels do not read them: the layers of training decoded them
([benchmarks](benchmarks.md#decoding-without-the-fused-layers)). They are untuned baselines, and say nothing about the formats.

## Rank, tokens per second of one row (table 9)

{ranks}

Here NF4 was decoded by the portable kernels (jax-triton), which were tuned for NVFP4 only. Other cards of the machine were busy in most
of these runs, so a difference of 3 % may be chance, and one of 8 % for 3B, whose step of 2 ms depends most on the host.

To measure what is empty: `python -m scripts.measure_batch paper`.

## A whole step (tables 3 and 5 to 8)

{steps}

How many times as fast a step is as with a 16-bit base. The paper: batch sizes 2, 4 and 8 in table 3, 2 and 8 in the others, where its
numbers for 7B and 14B differ from those of table 3. Ours: 16 and 64 completions of 512 tokens, layers recomputed.

{ends}
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
