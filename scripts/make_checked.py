"""Writes docs/checked.md, the table of `scripts.check_device` on each card: `python -m scripts.make_checked`.

It reads docs/measured/check_device.jsonl, which has the last run on each card, case by case; `--add FILE` adds a new one. `--check`
writes nothing and fails if the page is out of date.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
from typing import Any

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGE = DOCS / "checked.md"
SOURCE = DOCS / "measured" / "check_device.jsonl"
# What is kept of a run of a case, and what is kept with two digits.
SHOWN = ("device", "kernels", "jax", "driver", "date", "ok", "error", "fused", "seconds")
ROUNDED = ("difference", "effect")
HEAD = """\
# Every path, case by case

What `python -m scripts.check_device` found on a card: formats, families, shapes, losses, noise, sampling, exports, in 107 combinations in
which each pair of values occurs. Each case trains a small random model for two or three rollouts, and then runs the stage that it names
(`then=`). A value that is not named is the default. `scripts/make_checked.py` writes this page. [What ran where](verified.md) lists
everything else that was run.

- *difference*: mean |difference| of log-probabilities of sampler and trainer, in nats. The limit is .05, and 1e-4 in float32.
- *effect*: the same between the trained policy with its adapter and without, which must not be 0.
- *fused*: whether the fused layers sampled it.
"""

type Row = dict[str, Any]


def page(files: list[list[Row]]) -> str:
    """Returns the page: a table for each file."""
    parts = [HEAD]
    for rows in files:
        first, passed = rows[0], sum(row["ok"] for row in rows)
        dates = sorted({row["date"] for row in rows})
        about = f"jax {first['jax']}, driver {first['driver']}, kernels: {first['kernels']}, {' and '.join(dates)}"
        title = first["device"]
        if (
            first["kernels"] != "hopper"
        ):  # cards have a table of their own kernels, and perhaps one of others
            title += f", {first['kernels']} kernels"
        parts.append(f"## {title}\n\n{about}: {passed} of {len(rows)} passed.\n")
        parts.append("| case | result | date | fused | difference | effect | seconds |")
        parts.append("| --- | --- | --- | --- | --- | --- | --- |")
        for row in sorted(rows, key=lambda row: row["number"]):
            cells = [
                row["name"],
                "passed" if row["ok"] else f"failed: {row['error']}".replace("|", "\\|"),
                row["date"],
                "yes" if row.get("fused") else "no",
                *(f"{row[name]:.2g}" if name in row else "" for name in ("difference", "effect")),
                f"{row['seconds']:.0f}",
            ]
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def read(path: pathlib.Path = SOURCE) -> list[list[Row]]:
    """Reads the rows of each card and its kernels, by case."""
    tables: dict[tuple[str, str], list[Row]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        for run in line.pop("runs"):
            tables.setdefault((run["device"], run["kernels"]), []).append(line | run)
    return [rows for _, rows in sorted(tables.items())]


def add(output: pathlib.Path, path: pathlib.Path = SOURCE) -> None:
    """Adds what `scripts.check_device --out` wrote, in place of earlier runs on that card with those kernels."""
    new = [json.loads(text) for text in output.read_text().splitlines()]
    replaced = {(row["device"], row["kernels"]) for row in new}
    old = [rows for rows in read(path) if (rows[0]["device"], rows[0]["kernels"]) not in replaced]
    cases: dict[tuple[int, str], list[Row]] = {}
    for row in itertools.chain(*old, new):
        cells = {name: row[name] for name in SHOWN if name in row}
        cells |= {name: float(f"{row[name]:.2g}") for name in ROUNDED if name in row}
        cases.setdefault((row["number"], row["name"]), []).append(cells)
    lines = [
        {"number": number, "name": name, "runs": runs}
        for (number, name), runs in sorted(cases.items())
    ]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def main() -> int:
    """Writes the page, or checks it. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", type=pathlib.Path, metavar="FILE", help="of check_device --out")
    parser.add_argument("--check", action="store_true", help="only check that it is up to date")
    args = parser.parse_args()
    if args.add:
        add(args.add)
    page_ = page(read())
    if args.check:
        return int(PAGE.read_text() != page_)
    PAGE.write_text(page_)
    return 0


if __name__ == "__main__":
    sys.exit(main())
