"""Tests whether learning goes as the paper says: `python -m scripts.study BASE --out RESULTS`.

BASE is a folder of `scripts.warm_up`. The arms differ in the format of the base, in what trains, and in the noise.
Everything else is configs/study.toml. Each arm has three learning rates over two decades with two seeds (the stage
"rates"), then three more seeds at its best rate (the stage "seeds"): 72 runs. The best rate is the one with the highest
training reward in the last fifth of the steps. The reported held-out accuracy has no part in that choice.
Full-parameter training uses a tenth of the adapters' rates: equally many over an equally wide span around values known
to work ("LoRA Without Regret", Thinking Machines 2025, finds a factor of 10).

A run has 100 steps of 256 completions of at most 48 tokens, and 2048 held-out completions at both ends. With 16 runs at a
time on two H100s (`--cards 2 --jobs 16`, 32 processors, CUDA's MPS on), the first 16 took 220 to 310 s each, since all
compiled, later ones 95 to 210 s, and the first 56 of them 12 minutes. `--timing` takes 5 minutes more.

A run is a process with one result file, RESULTS/RUN.json. A run with a result file is not repeated. A run that does not
end within `--seconds` is repeated by the next call. In pieces of at most ten minutes, on a machine that starts empty
each time:

    python -m scripts.warm_up smollm2 warm                                      # the same weights each time
    python -m scripts.study warm --out runs/results --jobs 4 --seconds 500      # as often as needed
    python -m scripts.study warm --out runs/results --timing                    # each arm alone, for seconds per step
    python -m scripts.study_results --add runs/results                          # tables, figures, docs/results.md
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts import cards

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ROOT / "configs/study.toml"
RATES, FIRST_SEEDS, MORE_SEEDS = (3e-5, 3e-4, 3e-3), (0, 1), (2, 3, 4)
RUNS = len(RATES) * len(FIRST_SEEDS) + len(MORE_SEEDS)  # of an arm
# Seconds that a run is assumed to take until one has finished. A run is not started if less time is left than the
# longest took.
_FIRST_GUESS = 120
# Shares of a card's memory: of all its runs together, and of the quantization beside them.
_OF_RUNS, _OF_GPTQ = 0.8, 0.1
# Number of timed steps, after those that compile.
_TIMED, _COMPILING = 10, 4
# Metrics that are kept for each step: our name, and the name in the run's metrics.
STEPS = {
    "reward": "reward",
    "entropy": "entropy",
    "kl": "kl",
    "sampler_kl": "sampling/kl_k3",
    "mismatch": "sampling/sampling_logp_difference/mean",
    "length": "completions/mean_length",
    "clipped": "completions/clipped_ratio",
    "no_signal": "frac_reward_zero_std",
    "grad_norm": "grad_norm",
    "sigma": "aqn/sigma",
    "seconds": "step_time",
}
EVALS = re.compile("eval/(accuracy|pass@|maj@|mean_length)")


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        title: Its name in tables.
        changes: Its changes to the common config, by section; None removes a section.
        quantized: The method that quantizes the base beforehand; "" uses the 16-bit base.
        rate_factor: Its learning rates divided by `RATES`.
    """

    title: str
    changes: Mapping[str, Mapping[str, Any] | None]
    quantized: str = ""
    rate_factor: float = 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Its learning rates."""
        return tuple(float(f"{rate * self.rate_factor:.6g}") for rate in RATES)


# The defaults are those of QeRL's code: sigma 1e-2 to 1e-4 in 10 stages. Before learning, 1e-2 changes the 16-bit
# policy of the study less than rounding to NVFP4 does, and 1e-3 hardly changes it (docs/results.md).
AQN: dict[str, Any] = {}
ARMS = {
    "bf16": Arm("BF16 LoRA", {"model": {"weights": "bfloat16"}}),
    "bf16-aqn": Arm("BF16 LoRA + AQN", {"model": {"weights": "bfloat16"}, "noise": AQN}),
    "nf4": Arm("NF4 LoRA", {"model": {"weights": "nf4"}}),
    "mxfp4": Arm("MXFP4 LoRA", {"model": {"weights": "mxfp4"}}),
    "nvfp4": Arm("NVFP4 LoRA", {}),
    "nvfp4-aqn": Arm("NVFP4 LoRA + AQN", {"noise": AQN}),
    "nvfp4-gptq": Arm("NVFP4 LoRA, GPTQ", {}, quantized="gptq"),
    "full": Arm(
        "BF16 full",
        {
            "model": {"weights": "bfloat16", "trainable": "full"},
            "lora": None,
            # The divergence is measured from a copy of the initial weights.
            "grpo": {"reference": {"beta": 1e-6, "policy": "synced", "mixup_alpha": 0.0}},
        },
        rate_factor=0.1,
    ),
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """One run.

    Attributes:
        arm: Its name in `ARMS`.
        rate: The highest learning rate.
        seed: Seed of problems, sampling, adapter and noise. Arms with the same seed get the same problems.
    """

    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """The name of the run and of its result file."""
        return f"{self.arm}_{self.rate:g}_{self.seed}"

    @classmethod
    def named(cls, name: str) -> Piece:
        """Parses the name of a run."""
        arm, rate, seed = name.rsplit("_", 2)
        return cls(arm, float(rate), int(seed))


def main() -> None:
    """Makes the runs that are left, as far as time allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="folder of the 16-bit base")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/study"))
    parser.add_argument("--config", type=pathlib.Path, default=CONFIG)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, metavar="ARM")
    parser.add_argument("--stage", choices=["rates", "seeds"], help="only the runs of this stage")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at once")
    parser.add_argument("--cards", type=int, default=1, help="NVIDIA cards that runs share")
    parser.add_argument("--seconds", type=float, default=1e9, help="seconds until the call ends")
    parser.add_argument("--timing", action="store_true", help="time each arm alone on the card")
    parser.add_argument("--plan", action="store_true", help="only print what is done")
    parser.add_argument("--piece", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not 1 <= args.cards <= args.jobs:
        parser.error(f"--cards {args.cards}: must be at least 1, and at most --jobs, {args.jobs}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.piece:
        run_piece(args)
        return
    has_ended = args.plan or (time_arms if args.timing else work_off)(args)
    print(progress(args))
    sys.exit(int(not has_ended))


def pieces(
    results: Mapping[str, Mapping[str, Any]],
    arms: Sequence[str] = tuple(ARMS),
    stage: str | None = None,
) -> Iterator[Piece]:
    """The runs of the study, in the order in which they are made.

    Different arms are next to each other, so that runs at the same time compile different programs. An arm's runs with
    more seeds are known once its rates are done. A stage is "rates" or "seeds"; None means both.
    """
    if stage != "seeds":
        for seed in FIRST_SEEDS:
            for number in range(len(RATES)):
                yield from (Piece(arm, ARMS[arm].rates[number], seed) for arm in arms)
    if stage != "rates":
        best = {arm: best_rate(results, arm) for arm in arms}
        for seed in MORE_SEEDS:
            yield from (Piece(arm, rate, seed) for arm, rate in best.items() if rate is not None)


def best_rate(results: Mapping[str, Mapping[str, Any]], arm: str) -> float | None:
    """The rate with the highest training reward in the last fifth of the steps; None while runs are missing."""
    means = {}
    for rate in ARMS[arm].rates:
        matches = [results.get(Piece(arm, rate, seed).name) for seed in FIRST_SEEDS]
        if None in matches:
            return None
        means[rate] = statistics.mean(last_reward(item) for item in matches)
    return max(means, key=means.__getitem__)


def last_reward(result: Mapping[str, Any]) -> float:
    """Mean training reward in the last fifth of the steps."""
    rewards = result["steps"]["reward"]
    return statistics.mean(rewards[-max(1, len(rewards) // 5) :])


def read(out: pathlib.Path, *, timings: bool = False) -> dict[str, dict[str, Any]]:
    """Reads all results of a folder, by run name; or those of `--timing`, by file name."""
    files = {file.stem: json.loads(file.read_text()) for file in sorted(out.glob("*.json"))}
    return {name: item for name, item in files.items() if name.startswith("timing_") == timings}


def configured(piece: Piece, table: Mapping[str, Any], base: str, folder: pathlib.Path) -> dict:
    """The config of a run in a folder, as a table: the common one with the changes of its arm and the arm's base."""
    # One device, however many there are: a run is to be the same on every machine.
    sections = {**table, "output_dir": str(folder), "seed": piece.seed, "mesh": {"data": 1}}
    local = {"model": {"model_name_or_path": base}, "optim": {"learning_rate": piece.rate}}
    for changes in (ARMS[piece.arm].changes, local):
        for name, fields in changes.items():
            sections[name] = None if fields is None else {**(sections.get(name) or {}), **fields}
    return {name: fields for name, fields in sections.items() if fields is not None}


def work_off(args: argparse.Namespace) -> bool:
    """Makes the runs that are left, several at a time. Returns whether none is left.

    A failed run is reported and left for the next call. When the time is over, runs still in progress are ended.
    """

    def choose(queue: cards.Queue) -> cards.Job | None:
        todo = waiting(args, {*queue.running, *queue.failed})
        needs = [piece for piece in todo if ARMS[piece.arm].quantized]
        if needs and not gptq_folder(args).is_dir():
            if not {"gptq"} & {*queue.running, *queue.failed}:
                return quantization(args)
            todo = [piece for piece in todo if piece not in needs]
        took = [seconds for name, seconds in queue.took.items() if name != "gptq"]
        has_time = queue.left() > max(took, default=_FIRST_GUESS)
        return job_of(args, todo[0].name) if todo and has_time else None

    queue = cards.Queue(args.work, args.cards, args.jobs, args.seconds)
    return queue.run(choose) and not waiting(args, set())


def waiting(args: argparse.Namespace, others: set[str]) -> list[Piece]:
    """The runs that have no result, are not running and have not failed."""
    done = read(args.out)
    named = {piece.name: piece for piece in pieces(done, args.arms, args.stage)}
    return [piece for name, piece in named.items() if name not in done and name not in others]


def quantization(args: argparse.Namespace) -> cards.Job:
    """The job that quantizes the base for the arms that need it."""
    how = "--method gptq --block-scales search --dataset arithmetic-mixed --max-length 128".split()
    command = ["qerl_jax", "quantize", args.base, gptq_folder(args), *how]
    return cards.Job("gptq", command, _OF_GPTQ)


def gptq_folder(args: argparse.Namespace) -> pathlib.Path:
    """The base that `quantization` writes."""
    return args.work / "gptq"


def job_of(args: argparse.Namespace, name: str) -> cards.Job:
    """A run as a job with its share of a card's memory."""
    together = -(-args.jobs // args.cards)
    options = ["--out", args.out, "--work", args.work, "--config", args.config, "--jobs", together]
    timing = ["--timing"] if args.timing else []
    command = ["scripts.study", args.base, *options, "--piece", name, *timing]
    return cards.Job(name, command, _OF_RUNS / together)


def run_piece(args: argparse.Namespace) -> None:
    """Makes one run and writes its result."""
    from qerl_jax import config
    from qerl_jax.system.checked import from_table
    from qerl_jax.system.files import write_whole
    from qerl_jax.tracking import logger
    from qerl_jax.training.trainer import train

    piece, name = Piece.named(args.piece), args.piece
    base = str(gptq_folder(args)) if ARMS[piece.arm].quantized else args.base
    table = configured(piece, config.read_table(args.config), base, args.work / name)
    if args.timing:
        name = f"timing_{piece.arm}"
        table |= {"max_steps": _COMPILING + _TIMED, "output_dir": str(args.work / name)}
        table.pop("eval", None)
    folder, began = pathlib.Path(table["output_dir"]), time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    train(from_table(config.RunConfig, table), quiet=True)
    rows = logger.read_metrics(folder)
    result = timed(rows) if args.timing else kept(rows)
    about = {"arm": piece.arm, "rate": piece.rate, "seed": piece.seed}
    about |= surroundings(args, ARMS[piece.arm])
    about |= {"wall_seconds": round(time.monotonic() - began, 1)}
    write_whole(args.out / f"{name}.json", json.dumps(about | result) + "\n")
    shutil.rmtree(folder)


def surroundings(args: argparse.Namespace, arm: Arm) -> dict[str, Any]:
    """The base and the device of a run, and how many runs shared the device.

    `base` is the hash of the 16-bit base, for all arms. An arm whose base is quantized beforehand also has the hash of
    that, as `quantized`.
    """
    import jax

    from pallas_kernels import runtime
    from qerl_jax.checkpoint import hf_folder
    from scripts.warm_up import sha256

    quantized = {"quantized": sha256(gptq_folder(args))} if arm.quantized else {}
    return {
        "base": sha256(hf_folder.local_folder(args.base)),
        **quantized,
        "device": runtime.device_kind(),
        "jax": jax.__version__,
        "jobs": args.jobs,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def kept(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of a run that are kept: evaluations at both ends, and a list over the steps of each quantity."""
    evals = [row for row in rows if "eval/accuracy" in row]
    steps = [row for row in rows if "loss" in row]
    logged = {name: source for name, source in STEPS.items() if all(source in r for r in steps)}
    columns = {name: [short(row[source]) for row in steps] for name, source in logged.items()}
    ends = {
        when: {name.removeprefix("eval/"): short(row[name]) for name in row if EVALS.match(name)}
        for when, row in (("start", evals[0]), ("end", evals[-1]))
    }
    return {**ends, "skipped": int(steps[-1]["updates/skipped"]), "steps": columns}


def timed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median seconds of a step and its parts, without the steps that compile."""
    steps = [row for row in rows if "loss" in row][_COMPILING:]
    names = {"step": "step_time", "rollout": "perf/rollout_time", "update": "perf/update_time"}
    median = lambda source: short(statistics.median(row[source] for row in steps))
    return {name: median(source) for name, source in names.items()}


def short(value: float) -> float:
    """Rounds a number to four significant digits."""
    return float(f"{value:.4g}")


def time_arms(args: argparse.Namespace) -> bool:
    """Times the arms without timings, each alone on the card. Returns whether all are timed."""
    args.jobs = args.cards = 1
    queue = cards.Queue(args.work, 1, 1, args.seconds)

    def choose(queue: cards.Queue) -> cards.Job | None:
        for arm in args.arms:
            name = Piece(arm, ARMS[arm].rates[1], 0).name
            if name in queue.failed or (args.out / f"timing_{arm}.json").is_file():
                continue
            if not ARMS[arm].quantized or gptq_folder(args).is_dir():
                return job_of(args, name)
            if "gptq" not in queue.failed:
                return quantization(args)
        return None

    queue.run(choose)
    return all((args.out / f"timing_{arm}.json").is_file() for arm in args.arms)


def progress(args: argparse.Namespace) -> str:
    """The number of finished runs of each arm, and its best rate if it is known."""
    done = read(args.out)
    lines = []
    for arm in args.arms:
        count = sum(Piece.named(name).arm == arm for name in done)
        best = best_rate(done, arm)
        lines.append(f"{arm:12} {count} of {RUNS}" + (f", best rate {best:g}" if best else ""))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
