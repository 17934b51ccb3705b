"""Writes docs/benchmarks.md, docs/checked.md and the results in README.md: `python -m scripts.make_benchmarks`.

Each line of docs/measured/benchmarks.jsonl is one measured number with its context:

- table: key of the table that it belongs to, as in `benchmarks_page.md`
- name, value, unit: what was measured; lines with one name and different devices become one row
- baseline, baseline_value, ratio: what it is compared with, or null
- more: values of further columns, by heading
- command, date, device, versions, conditions: the run; equal ones become one row of the last table
- note: what else a reader of the row must know

Numbers are printed with the digits in the file. docs/checked.md is from docs/measured/check_device.jsonl, which has the last
run of `scripts.check_device` on each card, case by case; `--add FILE` adds a new one. `--check` writes nothing and fails if
a page is out of date.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).parents[1] / "docs"
SOURCE = DOCS / "measured" / "benchmarks.jsonl"
PAGE = DOCS / "benchmarks.md"
FIELDS = (
    "table name value unit baseline baseline_value ratio more command date device versions "
    "conditions note"
).split()
RUN = ("command", "date", "device", "versions", "conditions")
README = DOCS.parent / "README.md"
# The fixed texts of the page, with a place for the table of each key.
TEMPLATE = pathlib.Path(__file__).with_name("benchmarks_page.md")
PLACE = re.compile(r"\{\{(\w+)\}\}")
BEGIN, END = "<!-- results: scripts/make_benchmarks.py -->", "<!-- end of results -->"


# What the README shows: table and name of a line, its text there, and the options of `scripts.bench` that measure it
# again (else its own command stands there). The card is an H200 unless `DEVICES` names another.
HIGHLIGHTS = (
    ("decoding", "7B, 8 rows", "decode 7B, 8 rows, with LoRA", "decode --model 7b --base nvfp4 --rows 8"),
    ("decoding", "7B, 64 rows", "decode 7B, 64 rows, with LoRA", "decode --model 7b --base nvfp4 --rows 64"),
    ("decoding", "14B, 64 rows", "decode 14B, 64 rows, with LoRA", "decode --model 14b --base nvfp4 --rows 64"),
    ("decoding", "32B, 8 rows", "decode 32B, 8 rows, with LoRA", "decode --model 32b --base nvfp4 --rows 8"),
    ("training", "7B update, 8 x 1024 tokens, LoRA 32", "update of 7B, 8 x 1024 tokens, layers recomputed", "update"),
    ("training", "7B step, 64 completions of 512", "GRPO step of 7B, 64 completions of 512 tokens", "step --prompts 8"),
    ("recipes", "GSM8K, 7B: a rollout of 512 and its 4 updates, 1 % at the limit",
     "the GSM8K recipe at 7B: a rollout of 512 completions and four updates", ""),
    ("training", "32B step, 1 x 8 x 512, LoRA 16", "GRPO step of 32B, 8 completions of 512 tokens",
     "step --model 32b --rank 16 --prompts 1 --pool-gib 78"),
    ("training", "72B step, 1 x 4 x 1024, LoRA 16", "GRPO step of 72B, 4 completions of 1024 tokens",
     "step --model 72b --rank 16 --prompts 1 --group 4 --completion 1024 --steps 2"),
    ("start", "1.5B, from the command to 68 % of 400 held-out GSM8K problems, greedy",
     "a real 1.5B learns GSM8K from 61 to 68 % of held-out problems, from the command", ""),
    ("tiny", "quickstart: held-out accuracy after 30 steps", "the quickstart: accuracy on unseen problems", ""),
)  # fmt: skip
DEVICES = {"32B step, 1 x 8 x 512, LoRA 16": "NVIDIA H100", HIGHLIGHTS[-1][1]: "CPU, two cores"}


def read(path: pathlib.Path) -> list[dict]:
    """Reads the lines of a JSONL file. Numbers with a fraction stay text, to keep all their digits.

    Raises:
      ValueError: A line lacks a field or has an unknown one; the message names the line and the fields.
    """
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        line = json.loads(text, parse_float=str)
        if wrong := set(FIELDS) ^ set(line):
            what = f"fields missing or unknown: {sorted(wrong)}"
            raise ValueError(f"{path.name}, line {number}: {what}")
        lines.append(line)
    return lines


def shown(value: object) -> str:
    """Formats a value for the page: whole numbers with commas, None as an empty cell."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


def markdown(rows: list[list[str]]) -> str:
    """Returns rows of cells as a Markdown table; the first row is the head. Empty columns are left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    head, *body = zip(*columns, strict=True)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def table(name: str, lines: list[dict], devices: list[str], runs: dict[tuple, int]) -> str:
    """Returns the Markdown table of a key: a row for each name, a column for each device."""
    rows: dict[str, dict[str, dict]] = {}
    for line in lines:
        row = rows.setdefault(line["name"], {})
        if line["device"] in row:
            raise ValueError(f"{name}: {line['name']!r} comes twice for {line['device']}")
        row[line["device"]] = line
    further = dict.fromkeys(heading for line in lines for heading in line["more"])
    further = sorted(further, key=lambda heading: heading != "of bound")
    columns = [device for device in devices if any(device in row for row in rows.values())]
    units = {line["unit"] for line in lines}
    baselines = {line["baseline"] for line in lines} - {None}
    unit = f", {next(iter(units))}" if len(units) == 1 else ""
    one = next(iter(baselines)) if len(baselines) == 1 else ""
    head = ["what", "" if unit else "unit", *(device + unit for device in columns)]
    head += ["" if one else "beside", one or "its value", "ratio"]
    cells = [[*head, *further, "note", "run"]]
    for label, row in rows.items():
        first = row[next(device for device in columns if device in row)]
        measured = [row[device] for device in columns if device in row]
        cells.append(
            [
                label,
                "" if unit else first["unit"],
                *(shown(row[device]["value"]) if device in row else "" for device in columns),
                "" if one else shown(first["baseline"]),
                shown(first["baseline_value"]),
                shown(first["ratio"]),
                *(shown(first["more"].get(heading)) for heading in further),
                "; ".join(dict.fromkeys(line["note"] for line in measured if line["note"])),
                ", ".join(str(runs[run(line)]) for line in measured),
            ]
        )
    return markdown(cells)


def run(line: dict) -> tuple:
    """Returns what distinguishes two runs."""
    return tuple(line[field] for field in RUN)


def page(lines: list[dict]) -> str:
    """Returns docs/benchmarks.md."""
    text = TEMPLATE.read_text()
    *keys, _ = PLACE.findall(text)
    if unknown := {line["table"] for line in lines} - {*keys}:
        raise ValueError(f"no table of the page is called {sorted(unknown)}")
    devices = list(dict.fromkeys(line["device"] for line in lines))
    chosen = {key: [line for line in lines if line["table"] == key] for key in keys}
    ordered = [run(line) for key in keys for line in chosen[key]]
    runs = {key: number for number, key in enumerate(dict.fromkeys(ordered), 1)}
    tables = {key: table(key, rows, devices, runs) for key, rows in chosen.items() if rows}
    rows = [[str(number), f"`{key[0]}`", *key[1:]] for key, number in runs.items()]
    tables["runs"] = markdown([["run", *RUN], *rows])
    return PLACE.sub(lambda match: tables.get(match[1], "Not measured."), text)


def results(lines: list[dict]) -> str:
    """Returns the table of the README: the measurement, its baseline, its device, and the command."""
    rows = [["what", "ours", "baseline", "device", "command"]]
    for table_, name, text, options in HIGHLIGHTS:
        device, of_name = DEVICES.get(name, "NVIDIA H200"), (table_, name)
        alike = [line for line in lines if (line["table"], line["name"]) == of_name]
        (line,) = (line for line in alike if line["device"] == device)
        # The baseline may be recorded with the same measurement on another device.
        other = next((e for e in [line, *alike] if e["baseline"] is not None), None)
        unit = "" if line["unit"] == "accuracy" else f" {line['unit']}"
        beside = f"{shown(other['baseline_value'])}{unit} ({other['baseline']})" if other else ""
        command = f"python -m scripts.bench {options}" if options else line["command"]
        value = f"**{shown(line['value'])}**{unit}"
        rows.append([text, value, beside, device.removeprefix("NVIDIA "), f"`{command}`"])
    return markdown(rows)


def readme(lines: list[dict]) -> str:
    """Returns README.md with the current results."""
    before, _, rest = README.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{results(lines)}\n{END}{rest.partition(END)[2]}"


# The table of check_device

CHECKED = DOCS / "checked.md"
CHECKED_TEMPLATE = pathlib.Path(__file__).with_name("checked_page.md")
CHECKED_SOURCE = DOCS / "measured" / "check_device.jsonl"
# What is kept of a run of a case, and what is kept with two digits.
SHARED = ("device", "kernels", "jax", "driver", "date")
SHOWN = ("ok", "error", "fused", "seconds")
ROUNDED = ("difference", "effect")


def checked_page(files: list[list[dict]]) -> str:
    """Returns the page: a table for each file."""
    parts = [CHECKED_TEMPLATE.read_text()]
    for rows in files:
        first, passed = rows[0], sum(row["ok"] for row in rows)
        dates = sorted({row["date"] for row in rows})
        about = f"jax {first['jax']}, driver {first['driver']}, kernels: {first['kernels']}, {' and '.join(dates)}"
        title = first["device"]
        # Cards have a table of their own kernels, and perhaps one of others.
        if first["kernels"] != "hopper":
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


def read_checked(path: pathlib.Path = CHECKED_SOURCE) -> list[list[dict]]:
    """Reads the rows of each card and its kernels, by case. The first line has what many rows share."""
    tables: dict[tuple[str, str], list[dict]] = {}
    head, *lines = map(json.loads, path.read_text().splitlines())
    for line in lines:
        for run in line.pop("runs"):
            row = line | head[run.pop("on")] | run
            tables.setdefault((row["device"], row["kernels"]), []).append(row)
    return [rows for _, rows in sorted(tables.items())]


def add_checked(output: pathlib.Path, path: pathlib.Path = CHECKED_SOURCE) -> None:
    """Adds what `scripts.check_device --out` wrote, in place of earlier runs on that card with those kernels."""
    new = [json.loads(text) for text in output.read_text().splitlines()]
    replaced = {(row["device"], row["kernels"]) for row in new}
    is_replaced = lambda row: (row["device"], row["kernels"]) in replaced
    old = [rows for rows in read_checked(path) if not is_replaced(rows[0])]
    head: list[dict] = []
    cases: dict[tuple[int, str], list[dict]] = {}
    for row in itertools.chain(*old, new):
        if (shared := {name: row[name] for name in SHARED}) not in head:
            head.append(shared)
        cells = {"on": head.index(shared)} | {name: row[name] for name in SHOWN if name in row}
        cells |= {name: float(f"{row[name]:.2g}") for name in ROUNDED if name in row}
        cases.setdefault((row["number"], row["name"]), []).append(cells)
    line = lambda case: {"number": case[0], "name": case[1], "runs": cases[case]}
    lines = (
        json.dumps(value, separators=(",", ":")) for value in (head, *map(line, sorted(cases)))
    )
    path.write_text("".join(f"{line}\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", type=pathlib.Path, metavar="FILE", help="of check_device --out")
    text = "write nothing; fail if a page is out of date"
    parser.add_argument("--check", action="store_true", help=text)
    args, lines = parser.parse_args(), read(SOURCE)
    if args.add:
        add_checked(args.add)
    pages = {PAGE: page(lines), README: readme(lines), CHECKED: checked_page(read_checked())}
    for path, text in pages.items():
        if not args.check:
            path.write_text(text)
        elif text != path.read_text():
            sys.exit(f"{path} is out of date: run python -m scripts.make_benchmarks")


if __name__ == "__main__":
    main()
