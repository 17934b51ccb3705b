"""The study of QeRL's claims on a real Qwen2.5: `make study MODEL=1.5b BASE=FILE.gguf`, or

    python -m scripts.gsm8k_study BASE --out RESULTS [--stage 0 1 ...] [--cards 2] [--seconds 540] [--machine 1500]

BASE is any GGUF file or folder of a Qwen2.5 that is tuned for chats. Arms and stages are in `gsm8k_arms.py`, the common
config is configs/gsm8k_study.toml, and docs/results.md has the rules. One call makes everything that is left of its stages:

    stage 0   the bases on the test set, what rounding and noise do, the dose of noise and the matched temperature
    stage 1   the rates
    stage 2   A, B, C, D: 16 bits or NVFP4, without or with AQN
    stage 3   static noise, matched temperature, GPTQ, NF4, MXFP4, all weights
    stage 4   controls: the other estimator, other rewards, other doses, longer runs

A run is a process on one card, and writes RESULTS/RUN.json when it has ended; it is not repeated then. Its final test is
RESULTS/RUN.test.json: adapters of one base are tested together. A run that is stopped goes on from its checkpoint in the
work folder (`--work`). The call ends after `--seconds`; and begins no run that would not have ended, and been tested, within
`--machine` seconds, after which the work folder is lost. So only RESULTS has to be taken from one machine to the next.

`--data FOLDER` has rows.jsonl, val.jsonl, test.jsonl and math.jsonl. Where it is missing it is made from GSM8K and MATH,
from the hub, or from `--gsm8k PATH` and `--math PATH`, as `data.path` reads them.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts import accuracy, cards
from scripts import gsm8k_arms as arms
from scripts.gsm8k_arms import ARMS, Piece

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ROOT / "configs/gsm8k_study.toml"
# Guessed seconds, before records tell: of a run beside its steps, of a step, of loading a base for tests, of a test.
_START, _STEP, _LOAD, _TEST = 60.0, 2.2, 90.0, 60.0
# A run that begins or goes on needs at least this many seconds of a call to come further than its start.
_LEAST = 150.0
# Adapters of one kind of base that are tested together as soon as there are so many.
_TOGETHER = 6
# Metrics of each rollout that a record has.
_ROLLOUTS = {
    "reward": "reward",
    "entropy": "entropy",
    "kl": "sampling/kl_k3",
    "length": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
}
_SECONDS = {"rollout": "perf/rollout_time", "update": "perf/update_time", "evaluation": "perf/eval_time"}  # fmt: skip
# Problems of a file that are used: all of the test set, and more than enough of MATH.
_MOST = 1319
# Validation problems whose answers by the 16-bit policy stage 0 compares policies on.
_COMPARED = 128


def main(argv: Sequence[str] | None = None) -> None:
    """Makes what is left of some stages, as far as time allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="GGUF file or folder of the 16-bit weights")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the records")
    parser.add_argument("--stage", type=int, nargs="+", default=[0, 1, 2, 3, 4], choices=range(5))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--cards", type=int, default=1, help="cards, one process on each")
    parser.add_argument("--seconds", type=float, default=1e9, help="seconds until the call ends")
    parser.add_argument("--machine", type=float, help="seconds until the work folder is lost")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/gsm8k_study"))
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path("runs/gsm8k_data"))
    parser.add_argument("--gsm8k", help="where GSM8K is, if not on the hub")
    parser.add_argument("--math", help="where MATH is, if not on the hub")
    parser.add_argument("--config", type=pathlib.Path, default=CONFIG)
    parser.add_argument("--commit", help="commit of this code; by default git says it")
    parser.add_argument("--plan", action="store_true", help="only print what is left")
    parser.add_argument("--do", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.do:
        {"run": run, "test": test, "start": start}[args.do[0]](args, *args.do[1:])
        return
    prepare_data(args)
    args.commit = args.commit or commit()
    if not args.plan:
        # A start on a GPU may fail by chance (docs/troubleshooting.md, "The base is wrong on the device").
        options = {"patience": 60, "tries": 2}
        queue = cards.Queue(args.work, args.cards, args.cards, args.seconds, **options)
        queue.run(functools.partial(choose, args))
    print(progress(args), flush=True)
    sys.exit(int(not is_done(args)))


def prepare_data(args: argparse.Namespace) -> None:
    """Writes the problems: train without 400 rows, these, test, and MATH's questions; what is there stays."""
    from qerl_jax.config import DataConfig
    from qerl_jax.data import datasets

    def rows(name: str, path: str | None, split: str) -> list[str]:
        cfg = DataConfig(name, path=path, split=split, system_prompt="")
        problems = datasets.from_config(cfg, split=split, seed=0)
        texts = ((item.prompt[-1]["content"], item.columns.get("answer")) for item in problems)
        return [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in texts]

    sources = {"test": ("gsm8k", args.gsm8k, "test"), "math": ("math", args.math, "train")}
    if not (args.data / "val.jsonl").is_file():
        others, held_out = accuracy.divided(rows("gsm8k", args.gsm8k, "train"))
        args.data.mkdir(parents=True, exist_ok=True)
        (args.data / "rows.jsonl").write_text("".join(others))
        (args.data / "val.jsonl").write_text("".join(held_out))
    for name, source in sources.items():
        if not (args.data / f"{name}.jsonl").is_file():
            (args.data / f"{name}.jsonl").write_text("".join(rows(*source)[:_MOST]))


def read(out: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The records of a folder by name: runs, their tests as "RUN.test", tests of bases, and "start"."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(out.glob("*.json"))}


# What is left --------------------------------------------------------------------------------------


def wanted(args: argparse.Namespace, records: arms.Records) -> Iterator[Piece]:
    """The runs that are not done, in order. One whose adapter was lost before its test is repeated."""
    for stage in args.stage:
        for piece in arms.pieces(stage, records):
            has_test = (
                piece.is_swept or f"{piece.name}.test" in records or trained(args, piece.name)
            )
            if piece.arm in args.arms and not (piece.name in records and has_test):
                yield piece


def untested(args: argparse.Namespace, records: arms.Records) -> list[str]:
    """The runs and, in stage 0, the bases ("base_NAME") that have yet to be tested, as far as they can be."""
    bases = [f"base_{base}" for base in arms.MEASURED if 0 in args.stage]
    runs = [name for name in records if _is_run(name) and not Piece.named(name).is_swept]
    runs = [name for name in runs if trained(args, name)]
    return [name for name in [*bases, *runs] if f"{name}.test" not in records]


def unmeasured(args: argparse.Namespace, records: arms.Records) -> bool:
    """Whether stage 0 has yet to measure what a base is before learning."""
    policies = records.get("start", {}).get("policies", {})
    return 0 in args.stage and not policies.keys() >= {*arms.MEASURED}


def trained(args: argparse.Namespace, name: str) -> pathlib.Path | None:
    """The adapter or the model that a run has left in the work folder; None if it is not there."""
    folders = (args.work / name / kind for kind in ("adapter", "model"))
    return next((folder for folder in folders if folder.is_dir()), None)


def is_done(args: argparse.Namespace) -> bool:
    """Whether nothing is left of the stages, also no run that cannot be known yet."""
    records = read(args.out)
    rates_known = all(arms.best_rate(records, arm) for arm in ARMS if arm in args.arms)
    is_open = unmeasured(args, records)
    is_open |= any(args.stage) and not rates_known
    return not (is_open or untested(args, records) or any(wanted(args, records)))


def _is_run(name: str) -> bool:
    return name.count("_") == 3 and "." not in name.rpartition("_")[2]


def _base_of(name: str) -> str:
    """The base of a run, or the base that a name of a test is."""
    return name.removeprefix("base_") if name.startswith("base_") else Piece.named(name).base


def _kind(name: str) -> str:
    """What is compiled for the test of a run or base: those of a kind share a process."""
    return f"full-{name}" if _trains_all(name) else arms.weights(_base_of(name))


def _trains_all(name: str) -> bool:
    return _is_run(name) and ARMS[Piece.named(name).arm].trains_all


def choose(args: argparse.Namespace, queue: cards.Queue) -> cards.Job | None:
    """The next job: what stage 0 measures, tests where many wait or no run fits into the time, else a run."""
    records, busy = read(args.out), {*queue.running, *queue.failed}
    machine = 1e9 if args.machine is None else args.machine - queue.elapsed()
    if unmeasured(args, records) and "start" not in busy:
        return _job(args, "start", "start")
    testing = {name for job in busy if job.startswith("test,") for name in job.split(",")[1:]}
    pending: dict[str, list[str]] = {}
    for name in untested(args, records):
        if name not in testing:
            pending.setdefault(_kind(name), []).append(name)
    waiting = sum(map(len, pending.values()))
    reserve = _LOAD * bool(waiting) + _TEST * waiting / args.cards

    def fits(piece: Piece) -> bool:
        seconds = seconds_of(args, piece, records)
        # The checkpoint of all weights may take longer than a stopped run is given.
        least = seconds if ARMS[piece.arm].trains_all else _LEAST
        after = reserve + (0 if piece.is_swept else _LOAD + _TEST)
        return queue.left() > least and seconds + after < machine

    runs = [piece for piece in wanted(args, records) if piece.name not in busy and fits(piece)]
    # A run that was stopped comes first: its checkpoint is on this machine only.
    runs.sort(key=lambda piece: not _began(args, piece))
    for names in sorted(pending.values(), key=len, reverse=True):
        free = args.cards - len(queue.running)
        # Nothing is gained if a base or a model with all weights waits.
        is_alone = names[0].startswith("base_") or _trains_all(names[0])
        is_time = not runs or len(names) >= _TOGETHER or is_alone
        fit = int((min(queue.left(), machine) - _LOAD) // _TEST)
        if is_time and fit > 0:
            some = names[: min(fit, 2 * _TOGETHER, -(-len(names) // max(free, 1)))]
            return _job(args, ",".join(["test", *some]), "test", *some)
    return _job(args, runs[0].name, "run", runs[0].name) if runs else None


def seconds_of(args: argparse.Namespace, piece: Piece, records: arms.Records) -> float:
    """Seconds that a run will take: as the slowest of its length and kind so far, or a guess; less what is done."""
    is_alike = lambda other: (
        other.steps == piece.steps and ARMS[other.arm].trains_all == ARMS[piece.arm].trains_all
    )
    took = [
        records[name]["wall"] for name in records if _is_run(name) and is_alike(Piece.named(name))
    ]
    whole = max(took, default=_START + _STEP * piece.steps)
    return _START + (whole - _START) * (1 - _began(args, piece) / piece.steps)


def _began(args: argparse.Namespace, piece: Piece) -> int:
    """The step of the newest checkpoint of a run; 0 if there is none."""
    folders = (args.work / piece.name / "checkpoints").glob("[0-9]*")
    return max((int(folder.name) for folder in folders if folder.name.isdecimal()), default=0)


def _job(args: argparse.Namespace, name: str, *what: str) -> cards.Job:
    paths = ("out", "work", "data", "config")
    options = [text for path in paths for text in (f"--{path}", getattr(args, path))]
    options += ["--cards", args.cards, "--commit", args.commit]
    command = ["scripts.gsm8k_study", args.base, *options, "--do", *what]
    return cards.Job(name, command, 0.9)


# What a process does -------------------------------------------------------------------------------


def run(args: argparse.Namespace, name: str) -> None:
    """Trains a run, or goes on with it, and writes its record.

    A run of a sweep whose numbers are no longer finite, twice, has an accuracy of 0 at its end: its rate is too high.
    """
    from qerl_jax.config import RunConfig, read_table
    from qerl_jax.system.checked import NotFinite, from_table
    from qerl_jax.tracking import logger
    from qerl_jax.training.trainer import train

    began, piece, folder = time.monotonic(), Piece.named(name), args.work / name
    decided = read(args.out).get("start")
    # A checkpoint of all weights has 16 GB: one is written when the run is stopped, and none on the way.
    saving = {"save_steps": piece.steps} if ARMS[piece.arm].trains_all else {}
    local = {
        "model": {"model_name_or_path": _path_of(args, piece.base)},
        "data": {"dataset": str(args.data / "rows.jsonl")},
        "eval": {"dataset": str(args.data / "val.jsonl")},
        "output_dir": str(folder),
    }
    cfg = from_table(
        RunConfig, arms.configured(piece, read_table(args.config), decided, local) | saving
    )
    clock, broke, is_over = folder / "wall", folder / "broke", False
    earlier = float(clock.read_text()) if clock.is_file() else 0.0
    try:
        train(cfg, quiet=True)
    except NotFinite:
        # The first time it may be the device, and the queue begins the run again.
        is_over = piece.is_swept and broke.is_file()
        if not is_over:
            broke.touch()
            raise
    finally:
        wall = round(earlier + time.monotonic() - began, 1)
        if folder.is_dir():
            clock.write_text(str(wall))
    record = summed(logger.read_metrics(folder)) | {"wall": wall}
    if is_over:
        record["eval_steps"].append(piece.steps)
        record["accuracies"].append(0.0)
        rewards = record["rollouts"]["reward"]
        rewards += [0.0] * (piece.steps // cfg.updates_per_rollout - len(rewards))
    record |= {"arm": piece.arm, "rate": piece.rate, "seed": piece.seed, "steps": piece.steps}
    record |= {"temperature": cfg.rollout.temperature}
    record |= {} if cfg.noise is None else {"sigma": cfg.noise.sigma_start}
    record |= _folder_hash(piece.base, cfg.model.model_name_or_path)
    write(args, name, record)
    for kind in ("checkpoints", "best"):
        shutil.rmtree(folder / kind, ignore_errors=True)
    if piece.is_swept:
        shutil.rmtree(folder)


def summed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a record has of a run's metrics: its validations, a list over rollouts for each quantity, and seconds."""
    from scripts.study import short

    evals = [row for row in rows if "eval/accuracy" in row]
    rollouts = [row for row in rows if "loss" in row]
    return {
        "eval_steps": [row["step"] for row in evals],
        "accuracies": [short(row["eval/accuracy"]) for row in evals],
        "rollouts": {
            name: [short(row[source]) for row in rollouts if source in row]
            for name, source in _ROLLOUTS.items()
        },
        "time": {
            name: round(sum(row.get(source, 0.0) for row in rows), 1)
            for name, source in _SECONDS.items()
        },
        "skipped": int(rollouts[-1]["updates/skipped"]),
    }


def test(args: argparse.Namespace, *names: str) -> None:
    """Asks runs or bases the test set; those with the same base after each other, on one loaded base."""
    from qerl_jax.checkpoint import peft
    from qerl_jax.config import LoraConfig
    from scripts import gsm8k_measure as measure

    section, longest = _asked(args)
    rows = _rows(args, "test")
    order = sorted(names, key=_base_of)
    policy = path = None
    for name in order:
        base, is_full = _base_of(name), _trains_all(name)
        wanted_path = str(trained(args, name)) if is_full else _path_of(args, base)
        if wanted_path != path:
            policy, path = None, wanted_path  # frees the memory first
            lora = None if is_full else LoraConfig(**section["lora"])
            policy = measure.loaded(path, arms.weights(base), lora)
        now, seed = policy, 0
        if _is_run(name):
            seed = Piece.named(name).seed
            if not is_full:
                adapter = trained(args, name)
                now = policy.with_params(peft.import_adapter(adapter, policy.model))
        prompt = section["data"]["system_prompt"]
        record = measure.tested(now, rows, prompt, longest, seed)
        write(args, f"{name}.test", record | ({} if is_full else _folder_hash(base, path)))


def start(args: argparse.Namespace) -> None:
    """Measures what rounding, noise and temperature do before learning, and chooses the dose and the temperature.

    The record is written when these are chosen, and again with each further base: a stopped process goes on after it.
    """
    from qerl_jax.config import LoraConfig
    from scripts import gsm8k_measure as measure

    section, longest = _asked(args)
    lora = LoraConfig(**section["lora"])
    exact = measure.loaded(_path_of(args, "16"), "bfloat16", lora)
    path = args.out / "answers.jsonl"
    if not path.is_file():
        prompts = measure.chats(_rows(args, "val")[:_COMPARED], section["data"]["system_prompt"])
        answers = measure.own_answers(exact, prompts, longest, seed=0)
        path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    begun, decided = measure.Start(exact, answers), read(args.out).get("start")

    def measured(base: str) -> dict[str, Any]:
        return begun.measured(measure.loaded(_path_of(args, base), arms.weights(base), lora))

    if decided is None:
        rounded = measured("nvfp4")
        doses = {sigma: measure.dose(begun, exact, sigma) for sigma in measure.SIGMAS}
        temperature = begun.matched_temperature(rounded["entropy"][0])
        lengths = sorted(begun.lengths)
        decided = {
            "policies": {"16": begun.measured(exact), "nvfp4": rounded},
            "doses": {f"{x:g}": one for x, one in doses.items()},
            "temperatures": {f"{t:.4g}": begun.at_temperature(t) for t in (temperature, 1.1, 1.2)},
            "temperature": float(f"{temperature:.4g}"),
            "sigma": arms.chosen_sigma(
                {x: one["kl"] for x, one in doses.items()}, rounded["kl"][0]
            ),
            "tokens": sum(lengths),
            "mean_length": round(sum(lengths) / len(lengths), 1),
            "longest": lengths[int(0.95 * (len(lengths) - 1))],
            "truncated": round(sum(row["truncated"] for row in answers) / len(answers), 4),
        }
        write(args, "start", decided)
    for base in arms.MEASURED:
        if base not in decided["policies"]:
            decided["policies"][base] = measured(base)
            write(args, "start", decided)


def _asked(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """The common config as a table, and the longest answer."""
    from qerl_jax.config import read_table

    table = read_table(args.config)
    return table, table["rollout"]["max_completion_length"]


def _path_of(args: argparse.Namespace, base: str) -> str:
    """Where a base is; it is made if it is missing."""
    from scripts import gsm8k_bases
    from scripts.gsm8k_measure import chats

    table, longest = _asked(args)
    questions = chats(_rows(args, "math"), table["data"]["system_prompt"])
    answers = args.out / "calibration.jsonl"
    return gsm8k_bases.path_of(base, args.base, args.work, questions, answers, longest)


def _folder_hash(base: str, path: str) -> dict[str, str]:
    """The name and the hash of a base that was made, for a record: it is made again on each machine."""
    from scripts import gsm8k_bases

    if base in ("16", "nvfp4"):
        return {}
    return {"made": f"{base} {gsm8k_bases.describe(path)['base']}"}


def _rows(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (args.data / f"{name}.jsonl").read_text().splitlines()]


def write(args: argparse.Namespace, name: str, record: Mapping[str, Any]) -> None:
    """Writes a record, with what it depends on: weights, commit, card and versions."""
    import jax
    import numpy

    from pallas_kernels import runtime
    from qerl_jax.system.files import write_whole
    from scripts import gsm8k_bases

    about = gsm8k_bases.describe(args.base) | {
        "commit": args.commit or commit(),
        "device": runtime.device_kind(),
        "cards": args.cards,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": numpy.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    write_whole(args.out / f"{name}.json", json.dumps({**record, **about}) + "\n")


def commit() -> str:
    """The commit of this code; "unknown" without git."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def progress(args: argparse.Namespace) -> str:
    """What is done and what is left, and the seconds that are expected for it on one card."""
    records, lines = read(args.out), []
    runs = [Piece.named(name) for name in records if _is_run(name)]
    done = [piece.arm for piece in runs if not piece.is_swept]
    for name, arm in ARMS.items():
        if name in args.arms and arm.stage in args.stage:
            rate = arms.best_rate(records, name)
            shown = "" if rate is None else f", rate {rate:g}"
            lines.append(f"{name:4} {arm.title:28} {done.count(name)} of {arm.seeds} runs{shown}")
    left, tests = list(wanted(args, records)), untested(args, records)
    seconds = sum(seconds_of(args, piece, records) for piece in left)
    lines.append(
        f"known to be left: {len(left)} runs of {seconds / 60:.0f} card-minutes, {len(tests)} tests"
        + (", and the start" if unmeasured(args, records) else "")
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
