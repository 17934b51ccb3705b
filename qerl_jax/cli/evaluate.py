"""The commands that measure policies: `eval`, `compare`, `filter`."""

import dataclasses
import pathlib
from typing import Annotated

import tyro

import qerl_jax
from qerl_jax.cli.common import DEVICES, Devices, log, run_config, use_compilation_cache
from qerl_jax.cli.options import of_function
from qerl_jax.config import Dtype, Weights
from qerl_jax.evaluation.options import EvalOptions
from qerl_jax.system.checked import require

# The exit code of a filter that kept no problem; that of a run that has learned nothing is the same.
NOTHING_KEPT = 3


def evaluate(
    sets: tuple[str, ...],
    /,
    *,
    model: str | None = None,
    adapter: pathlib.Path | None = None,
    base: bool = False,
    options: Annotated[EvalOptions, tyro.conf.arg(name="")],
    weights: Weights | None = None,
    dtype: Dtype | None = None,
    output_dir: pathlib.Path | None = None,
    mesh: Devices = DEVICES,
) -> None:
    """Measures how often a policy is right on sets of problems, with confidence intervals.

    Results go to OUTPUT_DIR/<set>/. If they are unfinished, the same call goes on with the completions that are missing.

    Args:
        sets: "gsm8k", "math500", "aime24", "aime25", "amc23", "arithmetic", any data set of the hub, or
            a .jsonl, .json or .parquet file of {"prompt": ..., "answer": ...}.
        model: Local folder or hub name; absent means the adapter's base, or the one in the package.
        adapter: A PEFT folder, or a run folder, whose adapter and settings are taken. Of a run that has not
            ended it is the newest checkpoint.
        base: Leave out the adapter: measures the policy before training, asked and judged in the same way.
        options: How the sets are asked and judged.
        weights: Storage format of the linears; absent means that of the adapter's run, else "nvfp4".
        dtype: Data type of the activations; absent means that of the run, else "bfloat16".
        output_dir: Folder of the results. Absent means a folder in `eval/` of the run folder, or without a run in
            `evals/`. Its name is that of the policy, and of the protocol if one is given.
        mesh: The devices (docs/scale.md).

    Examples:
        qerl eval gsm8k math500 --adapter runs/mine
        qerl eval gsm8k --adapter runs/mine --base    # the policy before training
        qerl eval my_problems.jsonl --model Qwen/Qwen2.5-7B-Instruct --samples 4 --num-problems 100
    """
    if not sets:
        raise ValueError("missing the sets: qerl eval SET ... [--adapter RUN_FOLDER]")
    if options.path is not None and len(sets) > 1:
        raise ValueError(f"--path is the place of one set; got {len(sets)} sets")
    for name in sets:
        rule = f"is a run folder, not a set: qerl eval SET --adapter {name}"
        require(not pathlib.Path(name, "config.toml").is_file(), "sets", name, rule)
    from qerl_jax.api.jobs import results_folder
    from qerl_jax.checkpoint.policy import find_policy
    from qerl_jax.evaluation import summary

    source = find_policy(model, adapter, base=base, weights=weights, dtype=dtype)
    folder = output_dir or results_folder(source, options.protocol)
    summaries = qerl_jax.evaluate(source, *sets, options=options, output_dir=folder, mesh=mesh)
    for of_set in summaries.values():
        log(*summary.lines(of_set))
    log(f"results in {folder}")


def compare(argv: list[str]) -> None:
    """usage: qerl compare EVAL_FOLDER EVAL_FOLDER

    Prints the differences of two policies on the same problems, with their intervals.
    An EVAL_FOLDER is what `qerl eval` writes.

    Examples:
      qerl compare runs/mine/eval/adapter runs/mine/eval/base
    """
    if len(argv) != 2 or argv[0].startswith("-"):
        raise ValueError("usage: qerl compare EVAL_FOLDER EVAL_FOLDER")
    from qerl_jax.evaluation import comparison

    for dataset, compared in comparison.compare(*argv).items():
        log(f"{dataset}: {argv[0]} minus {argv[1]}, 95 % intervals of paired differences")
        log(*(f"  {name:8} {value:+.3f}" for name, value in compared.differences.items()))
        log(f"  settings that differ: {', '.join(compared.changed) or 'none'}")


def filter_problems(
    config: pathlib.Path,
    out: pathlib.Path,
    /,
    *fields: str,
    low: float = 0.1,
    high: float = 0.6,
    samples: int = 8,
    reward: str | None = None,
    adapter: pathlib.Path | None = None,
    num_problems: int | None = None,
) -> int:
    """Measures how often a policy solves each problem of a config, and keeps those within a range of rates.
    If it keeps none, its exit status is 3.

    Change fields of the config by `--section.field VALUE`, as in `qerl plan`; `qerl plan CONFIG --help` lists all.

    Args:
        config: A TOML file, or the name of a config in the package. Its model, devices, data and
            sampling settings are used.
        out: A .jsonl file for the problems that are kept, with the prompts of their rows; system prompt and
            template are added when it is read. The pass rate of each problem is stored in `<out>.measured`;
            a later call goes on with the completions that are missing.
        *fields: Fields of the config that take another value.
        low: Lowest pass rate that is kept.
        high: Highest pass rate that is kept.
        samples: Completions per problem.
        reward: The function that says whether a completion passes: it gives at least 1. Absent means the
            config's first, or without one the environment's own.
        adapter: A PEFT folder, or a run folder, whose adapter or newest checkpoint is taken; absent means the base
            alone.
        num_problems: How many problems to measure, from the front; absent means as many as the config says.

    Examples:
        qerl filter gsm8k_qwen2.5_7b some.jsonl --low 0.2 --high 0.8
        qerl filter quickstart some.jsonl --data.dataset problems.jsonl --rollout.max-completion-length 64
        qerl train gsm8k_qwen2.5_7b --data.dataset some.jsonl --eval.dataset gsm8k --output-dir runs/some
    """
    # Under the name of `plan`, whose help is the one that lists the fields.
    cfg = run_config("plan", [str(config), *fields], read=of_function(filter_problems).kinds)
    if num_problems is not None:
        require(num_problems >= 1, "num_problems", num_problems, "must be at least 1")
        data = dataclasses.replace(cfg.data, num_problems=num_problems)
        cfg = dataclasses.replace(cfg, data=data)
    from qerl_jax.data import datasets
    from qerl_jax.evaluation import pass_rates

    use_compilation_cache()
    options = {"low": low, "high": high, "samples": samples, "reward": reward, "adapter": adapter}
    selected, total = pass_rates.select(cfg, out, **options, log=log)
    log(f"{selected} of {total} problems have a pass rate in [{low}, {high}]: {out}")
    if not selected:
        bounds = f"choose other bounds by the rates in {out}.measured"
        log(f"{out} is empty (exit status {NOTHING_KEPT}); {bounds}")
        return NOTHING_KEPT
    set_prompt = datasets.system_prompt(cfg.data)
    if cfg.data.system_prompt is None and set_prompt:
        remedy = f"train with --data.system-prompt {set_prompt}"
        log(f"the system prompt of {cfg.data.dataset} is not in {out}: {remedy}")
    return 0
