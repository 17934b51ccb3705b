"""Compares recipes by their accuracy on GSM8K problems held out of train: `python -m scripts.accuracy`.

    python -m scripts.accuracy split train.jsonl runs/gsm8k     # the rows that train, and 400 that are asked
    python -m scripts.accuracy train runs/gsm8k --base FOLDER --out seconds.jsonl --seeds 1 2 3 --level 0.68
    python -m scripts.accuracy train runs/gsm8k --base FOLDER --out carry.jsonl --seeds 1 2 3 4 5 6 --name carry-0 \\
        --set max_steps=48 save_steps=48 rollout.carry=0 eval.eval_steps=0 eval.num_generations=4 eval.temperature=0.6
    python -m scripts.accuracy report seconds.jsonl --level 0.68
    python -m scripts.accuracy report carry.jsonl --pair carry-0 carry-64

train.jsonl has GSM8K's train split in its order: on each line `prompt`, the question, and `answer`, the number.

A run is `qerl train` on configs/accuracy_1.5b.toml with `--set`; it becomes one row of --out when it ends, and is not
repeated for a name and a seed that are there. With --level it ends after two successive evaluations at or above the level.
The time to a level is that of the first of these two, from the command on. Evaluations do not count, except the first
one: programs of the training compile meanwhile.

`--pair` compares the last evaluations of the runs with the same seeds, by Student's t: "equal" if the 90 % interval of the
difference lies within 2 points.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.tracking.logger import read_metrics
from scripts.two_way import interval

CONFIG = pathlib.Path(__file__).parents[1] / "configs/accuracy_1.5b.toml"
HELD_OUT, SPLIT_SEED, MARGIN = 400, 20261127, 2.0


def split(train: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the rows of GSM8K's train split that are asked, `asked.jsonl`, and the others, `rows.jsonl`."""
    rows, held_out = divided(train.read_text().splitlines(keepends=True))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "asked.jsonl").write_text("".join(held_out))
    (folder / "rows.jsonl").write_text("".join(rows))


def divided(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divides GSM8K's train split into the lines that train and those that are held out."""
    out = {*np.random.default_rng(SPLIT_SEED).permutation(len(lines))[:HELD_OUT].tolist()}
    rows, held_out = (
        [line for at, line in enumerate(lines) if (at in out) == is_out] for is_out in (False, True)
    )
    return rows, held_out


def evaluations(ends: Sequence[tuple[float, Mapping[str, Any]]]) -> list[dict[str, float]]:
    """Returns the evaluations of a run.

    Args:
        ends: Each row of the run's metrics, with the seconds from the command until it was written.

    Returns:
        For each evaluation its step, its accuracy, and the seconds of the run until then without later evaluations than
        the first.
    """
    evaluated, beside = [], 0.0
    for seconds, row in ends:
        if "eval/accuracy" in row:
            beside += row["perf/eval_time"] if evaluated else 0.0
            at = {"step": row["step"], "seconds": round(seconds - beside, 1)}
            evaluated.append(at | {"accuracy": row["eval/accuracy"]})
    return evaluated


def seconds_to(level: float, evaluated: Sequence[Mapping[str, float]]) -> float | None:
    """Returns the seconds until the first of two successive evaluations at or above a level; None if there are none."""
    for first, second in zip(evaluated, evaluated[1:], strict=False):
        if min(first["accuracy"], second["accuracy"]) >= level:
            return first["seconds"]
    return None


def train(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Runs one seed; returns its row."""
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "run"
        fields = {
            "model.model_name_or_path": args.base,
            "data.dataset": args.folder / "rows.jsonl",
            "eval.dataset": args.folder / "asked.jsonl",
            "output_dir": output,
            "seed": seed,
        } | dict(change.split("=", 1) for change in args.set)
        options = [text for name, value in fields.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "qerl_jax", "train", str(CONFIG), *options]
        began, ends = time.perf_counter(), []
        with subprocess.Popen(command, stdout=sys.stderr) as process:
            while process.poll() is None:
                time.sleep(0.05)
                rows = read_metrics(output) if (output / "metrics.jsonl").exists() else []
                ends += [(time.perf_counter() - began, row) for row in rows[len(ends) :]]
                if args.level and seconds_to(args.level, evaluations(ends)):
                    process.terminate()
                    process.wait()
        evaluated = evaluations(ends)
        # 3 means that the run learned nothing, which is a result.
        if process.returncode not in (0, 3) and not (
            args.level and seconds_to(args.level, evaluated)
        ):
            raise SystemExit(f"seed {seed}: qerl train ended with {process.returncode}")
    return {"name": args.name, "seed": seed, "set": args.set, "evaluations": evaluated}


def difference(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Compares the last accuracies of two names by seed, in points: the second's less the first's."""
    last = {(row["name"], row["seed"]): row["evaluations"][-1]["accuracy"] for row in rows}
    seeds = sorted(seed for name, seed in last if name == names[0] and (names[1], seed) in last)
    if len(seeds) < 2:
        raise SystemExit(f"--pair {' '.join(names)}: {len(seeds)} seeds have both, 2 are needed")
    first, second = ([100 * last[name, seed] for seed in seeds] for name in names)
    between = interval(np.subtract(second, first).tolist(), 0.9)
    return {
        "seeds": seeds,
        **{
            name: round(statistics.fmean(of), 2)
            for name, of in zip(names, (first, second), strict=True)
        },
        "difference": round(between.mean, 2),
        "interval_90": [round(between.low, 2), round(between.high, 2)],
        "verdict": "equal" if between.is_within(MARGIN) else "not shown to be equal",
    }


def report(args: argparse.Namespace) -> None:
    """Prints what the rows of a file say, as JSON."""
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    if not rows:
        raise SystemExit(f"{args.rows}: no run has ended")
    if args.pair:
        sys.stdout.write(f"{json.dumps(difference(rows, args.pair))}\n")
        return
    rows = [row for row in rows if row["name"] == args.name]
    times = {row["seed"]: seconds_to(args.level, row["evaluations"]) for row in rows}
    median = statistics.median(float("inf") if t is None else t for t in times.values())
    sys.stdout.write(f"{json.dumps({'seconds': times, 'median': median})}\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Does what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "split", help="write the rows that train and those that are asked"
    )
    command.add_argument("train", type=pathlib.Path, help="GSM8K's train split, JSON lines")
    command.add_argument("folder", type=pathlib.Path)
    command = commands.add_parser("train", help="run seeds that --out does not have")
    command.add_argument("folder", type=pathlib.Path, help="what `split` wrote")
    command.add_argument("--base", required=True, help="checkpoint folder or GGUF file")
    command.add_argument("--out", type=pathlib.Path, required=True)
    command.add_argument("--seeds", type=int, nargs="+", required=True)
    command.add_argument("--name", default="recipe")
    command.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE")
    command.add_argument("--level", type=float, help="stop after two evaluations at this accuracy")
    command = commands.add_parser("report", help="print times to a level, or a paired difference")
    command.add_argument("rows", type=pathlib.Path)
    command.add_argument(
        "--name", default="recipe", help="with --level: of the runs with this name"
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--level", type=float)
    what.add_argument("--pair", nargs=2, metavar="NAME")
    args = parser.parse_args(argv)
    if args.command == "split":
        split(args.train, args.folder)
    elif args.command == "report":
        report(args)
    else:
        lines = args.out.read_text().splitlines() if args.out.exists() else []
        done = {(row["name"], row["seed"]) for row in map(json.loads, lines)}
        for seed in args.seeds:
            if (args.name, seed) not in done:
                with args.out.open("a") as out:
                    out.write(json.dumps(train(args, seed)) + os.linesep)


if __name__ == "__main__":
    main()
