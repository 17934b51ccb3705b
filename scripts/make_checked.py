"""Writes docs/checked.md, the table of `scripts.check_device` on each card: `python -m scripts.make_checked`.

It reads docs/measured/check_device_*.jsonl, but only files whose lines say on which device and when. `--check` writes nothing and
fails if the page is out of date.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGE = DOCS / "checked.md"
# What a line must say of its run.
ABOUT = {"date", "device", "jax", "driver", "kernels"}
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


def read() -> list[list[Row]]:
    """Reads the files, by name."""
    files = sorted((DOCS / "measured").glob("check_device_*.jsonl"))
    found = [[json.loads(text) for text in file.read_text().splitlines()] for file in files]
    return [rows for rows in found if all(ABOUT <= row.keys() for row in rows)]


def main() -> int:
    """Writes the page, or checks it. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only check that it is up to date")
    made = page(read())
    if parser.parse_args().check:
        return int(PAGE.read_text() != made)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
