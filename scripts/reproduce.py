"""Runs QeRL's GSM8K experiment on one card, from download to table: `make reproduce MODEL=7b`, or

    python -m scripts.reproduce 7b [--device H100] [--plan-only] [--folder FOLDER] [--data FILE] [--section.field VALUE
    ...]

MODEL is 3b, 7b, 14b or 32b: configs/paper/gsm8k_qwen2.5_MODEL.toml on Qwen2.5-MODEL-Instruct in NVFP4, with LoRA and
AQN, for one epoch. The script prints the memory and the time that the run is expected to need, and stops if the card
has too little memory. Then it downloads model and data, measures the policy on the 1319 problems of the test split,
trains, measures again, and writes table.md into the run folder, with the paper's numbers beside ours. If it was
interrupted, the same command continues. `--noise None` turns AQN off. `--model.weights bfloat16` is the paper's 16-bit
arm. Give each variant its own `--output-dir`.

`--folder` and `--data` read model and data from disk. `--quick` tries everything in minutes with any model given by
`--folder`: two steps of short completions, and eight problems. With `--random-weights` its weights are random.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import qerl_jax
from qerl_jax import config
from qerl_jax.checkpoint import hf_folder
from qerl_jax.cli.common import run_config
from qerl_jax.config import RunConfig
from qerl_jax.model import architecture
from qerl_jax.planning import cards, memory
from qerl_jax.tracking import logger
from scripts import make_benchmarks
from scripts.study_results import table

ROOT = pathlib.Path(__file__).parents[1]
MODELS = ("3b", "7b", "14b", "32b")
# GSM8K accuracy in table 1 of the paper: NVFP4 before training, BF16 LoRA, NVFP4 LoRA, NVFP4 LoRA + AQN.
PAPER = {"3b": (59.4, 76.1, 83.3, 83.7), "7b": (73.4, 88.1, 88.5, 90.8)}
GSM8K_TRAIN = 7473
# The line of docs/measured/benchmarks.jsonl with the time of a rollout and its updates.
_MEASURED = {"7b": ("recipes", "GSM8K, 7B: a rollout of 512 and its 4 updates, 1 % at the limit")}
# Changes for a quick trial.
_QUICK = """--max-steps 2 --data.max-prompt-length 192 --data.overlong-prompts drop
  --rollout.generation-batch-size 16 --rollout.num-generations 4 --rollout.max-completion-length 24 --optim.per-device-train-batch-size 4 --optim.gradient-accumulation-steps 2
  --eval.num-problems 8 --save-steps 2 --noise.num-stages 3""".split()


def main() -> None:
    """Plans, downloads, trains, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", help="card to plan for, such as H100; default: this machine's")
    parser.add_argument("--folder", help="folder of the model; default: download it")
    parser.add_argument("--data", help="file of rows with question and answer, instead of GSM8K")
    for option, text in (
        ("--plan-only", "only print the expected memory and time"),
        ("--random-weights", "use random weights in the shape of the model in --folder"),
        ("--quick", "run only two short steps"),
    ):
        parser.add_argument(option, action="store_true", help=text)
    args, options = parser.parse_known_args()
    cfg = configured(args, options)
    card = cards.named(args.device) if args.device else None
    limit, device = (card.limit, card.device) if card else (memory.device_memory(), None)
    # The shape of a published model is known, so a plan needs no download.
    arch = None if args.folder else architecture.KNOWN[f"qwen2.5-{args.model}"]
    plan = memory.plan(cfg, arch, limit=limit, device=device)
    print(plan, *expected_time(args.model, cfg), sep="\n", flush=True)
    plan.require()
    if args.plan_only:
        return
    if jax.default_backend() == "cpu" and not args.quick:
        sys.exit(
            "reproduce: device: got cpu, must be a GPU; JAX finds none here. With an NVIDIA card run "
            "pip install -e '.[cuda]', or try everything on a CPU with --quick --folder FOLDER"
        )
    if not args.random_weights:
        folder = hf_folder.local_folder(cfg.model.model_name_or_path)
        print(f"model in {folder}", flush=True)
    qerl_jax.train(cfg)
    text = result(args.model, cfg, logger.read_metrics(cfg.output_dir))
    path = pathlib.Path(cfg.output_dir) / "table.md"
    path.write_text(text)
    print(f"{text}\nwritten to {path}")


def configured(args: argparse.Namespace, options: Sequence[str]) -> RunConfig:
    """The config of the experiment, with the changes of the options."""
    words = [*(_QUICK if args.quick else []), "--output-dir", f"runs/reproduce_{args.model}"]
    if args.folder:
        words += ["--model.model-name-or-path", args.folder]
    if args.random_weights:
        words += ["--model.random-base", "True"]
    if args.data:
        words += ["--data.path", args.data]
    file = str(ROOT / f"configs/paper/gsm8k_qwen2.5_{args.model}.toml")
    cfg = run_config("reproduce", [file, *words, *options])
    if args.data:
        # The rows that are trained on. That is enough for a trial.
        section = dataclasses.replace(cfg.eval, dataset=args.data, split=cfg.data.split)
        cfg = dataclasses.replace(cfg, eval=section)
    return cfg


def expected_time(model: str, cfg: RunConfig) -> list[str]:
    """Describes the expected time of the run."""
    if cfg.max_steps is not None:
        steps = f"time       {cfg.max_steps} optimizer steps"
        return [f"{steps}: this is not the experiment, so the time is not known"]
    steps = cfg.total_steps(GSM8K_TRAIN)
    rollouts = steps // cfg.updates_per_rollout
    text = f"time       {steps} optimizer steps in {rollouts} rollouts"
    lines = make_benchmarks.read(make_benchmarks.SOURCE)
    lines = [x for x in lines if (x["table"], x["name"]) == _MEASURED.get(model)]
    if not lines:
        return [f"{text}; how long one takes was not measured for this model"]
    return [
        f"{text}: about {rollouts * float(line['value']) / 60:.0f} min of training on an {line['device']}, where "
        f"a rollout with its updates took {line['value']} s ({line['date']}, recorded lengths); without evaluations"
        for line in lines
    ]


def result(model: str, cfg: RunConfig, rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of a run: accuracy before and after, the paper's, and the time."""
    evals = [row for row in rows if "eval/accuracy" in row]
    steps = [row for row in rows if "loss" in row]
    before, after = evals[0], evals[-1]
    is_trial = cfg.model.random_base or cfg.max_steps is not None
    numbers = () if is_trial else PAPER.get(model, ())
    paper = dict(zip(("before", "bf16", "nvfp4", "aqn"), numbers, strict=False))
    arm = "aqn" if cfg.noise is not None else "nvfp4"
    arm = "bf16" if cfg.model.weights in config.DENSE else arm
    seconds = sum(row["step_time"] for row in steps)
    peak = max((row.get("perf/peak_memory_gb", 0) for row in steps), default=0)
    base = "random weights" if cfg.model.random_base else cfg.model.model_name_or_path
    told = [
        ["", "here", "the paper"],
        ["model", f"{base}, {cfg.model.weights}", f"Qwen2.5-{model.upper()}-Instruct"],
        ["accuracy before, %", _percent(before), str(paper.get("before", "-"))],
        ["accuracy after, %", _percent(after), str(paper.get(arm, "-"))],
        ["problems", str(cfg.eval.num_problems), "1319"],
        ["noise", "none" if cfg.noise is None else "AQN", "AQN" if arm == "aqn" else "none"],
        ["entropy of the sampler, first and last step", _ends(steps, "entropy"), ""],
        ["reward, first and last step", _ends(steps, "reward"), ""],
        ["optimizer steps", str(steps[-1]["step"]), ""],
        ["minutes of training", f"{seconds / 60:.1f}", ""],
        ["peak of memory, GB", f"{peak:.1f}" if peak else "not reported", ""],
    ]
    note = "\nThis was a test of the script: these are not results.\n" if is_trial else ""
    return f"# QeRL's GSM8K experiment\n{note}\n{table(told)}\n"


def _percent(row: Mapping[str, Any]) -> str:
    low, high = row["eval/accuracy_low"], row["eval/accuracy_high"]
    return f"{100 * row['eval/accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _ends(steps: Sequence[Mapping[str, Any]], name: str) -> str:
    return f"{steps[0][name]:.3f}, {steps[-1][name]:.3f}"


if __name__ == "__main__":
    main()
