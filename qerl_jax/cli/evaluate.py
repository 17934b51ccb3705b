"""The commands that measure policies: `eval`, `compare`, `filter`."""

import dataclasses
import pathlib
from typing import Literal

import qerl_jax
from qerl_jax.cli import options
from qerl_jax.cli.common import DEVICES, Devices, log, run_config, use_compilation_cache
from qerl_jax.config import Drafts, Dtype, Weights
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
    protocol: Literal["paper", "verl", "run"] | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    system_prompt: str | None = None,
    prompt_template: str | None = None,
    apply_chat_template: bool | None = None,
    reward: str | None = None,
    path: str | None = None,
    split: str | None = None,
    columns: dict[str, str] | None = None,
    num_problems: int | None = None,
    weights: Weights | None = None,
    dtype: Dtype | None = None,
    output_dir: pathlib.Path | None = None,
    max_concurrent: int = 128,
    drafts: Drafts = "auto",
    seed: int = 0,
    mesh: Devices = DEVICES,
) -> None:
    """Measures how often a policy is right on sets of problems, with confidence intervals.

    Results go to OUTPUT_DIR/<set>/. If they are unfinished, the same call goes on after the last problem.

    Args:
        sets: "gsm8k", "math500", "aime24", "aime25", "amc23", "arithmetic", any data set of the hub, or
            a .jsonl, .json or .parquet file of {"prompt": ..., "answer": ...}.
        model: Local folder or hub name; absent means the adapter's base, or the one in the package.
        adapter: A PEFT folder, or a run folder, whose adapter and settings are taken. Of a run that has not
            ended it is the newest checkpoint.
        base: Leave out the adapter: measures the policy before training, asked and judged in the same way.
        protocol: "paper" (temperature 0.6, top-p 0.95), "verl" (verl's own words, sampling and scorers), or
            "run" (prompt and sampling of the run, judged by its `eval.reward`). Absent means the run's where
            there is one, else the paper's.
        samples: N, completions per problem. It replaces what the protocol says, as do --temperature, --top-p,
            --max-tokens, --system-prompt, --prompt-template and --reward.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Keep the likeliest tokens whose probabilities add up to this.
        max_tokens: Longest completion in tokens.
        system_prompt: A system message, or the name of one: "think-answer", "answer-line" or
            "think-code"; "" for none.
        prompt_template: Text around the problem: "{prompt}" is filled in.
        apply_chat_template: Whether a prompt that is a text passes the chat template; absent means as it was in
            training, if there is a run, else true. With a system prompt it always does.
        reward: The function that is at least 1 where a completion is right.
        path: Where the set lies if not on the hub: a folder or a file. Only with one set.
        split: Split of the set, instead of the usual one.
        columns: Which columns hold the `prompt` and the `answer`, such as: prompt question answer solution
        num_problems: How many problems to ask, from the front: shuffle a file that is sorted.
        weights: Storage format of the linears; absent means that of the adapter's run, else "nvfp4".
        dtype: Data type of the activations; absent means that of the run, else "bfloat16".
        output_dir: Folder of the results. Absent means a folder in `eval/` of the run folder, or without a run in
            `evals/`. Its name is that of the policy, and of the protocol if one is given.
        max_concurrent: The most completions sampled at a time, by each replica; fused decoding takes up to 128.
        drafts: "auto" makes drafts where few completions are left (`rollout.drafts`); "off" makes none.
        seed: Random seed for sampling.
        mesh: The devices (docs/scale.md).

    Examples:
        qerl eval gsm8k math500 --adapter runs/mine
        qerl eval gsm8k --adapter runs/mine --base    # the policy before training
        qerl eval my_problems.jsonl --model Qwen/Qwen2.5-7B-Instruct --samples 4 --num-problems 100
    """
    if not sets:
        raise ValueError("missing the sets: qerl eval SET ... [--adapter RUN_FOLDER]")
    require(max_concurrent >= 1, "max_concurrent", max_concurrent, "must be at least 1")
    if path is not None and len(sets) > 1:
        raise ValueError(f"--path is the place of one set; got {len(sets)} sets")
    for each in sets:
        rule = f"is a run folder, not a set: qerl eval SET --adapter {each}"
        require(not pathlib.Path(each, "config.toml").is_file(), "sets", each, rule)
    from qerl_jax.api.jobs import results_folder
    from qerl_jax.checkpoint.policy import find_policy
    from qerl_jax.evaluation import summary

    source = find_policy(model, adapter, base=base, weights=weights, dtype=dtype)
    folder = output_dir or results_folder(source, protocol)
    summaries = qerl_jax.evaluate(
        source,
        *sets,
        protocol=protocol,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        system_prompt=system_prompt,
        prompt_template=prompt_template,
        apply_chat_template=apply_chat_template,
        reward=reward,
        path=path,
        split=split,
        columns=columns,
        num_problems=num_problems,
        output_dir=folder,
        max_concurrent=max_concurrent,
        drafts=drafts,
        seed=seed,
        mesh=mesh,
    )
    for each in summaries.values():
        log(*summary.lines(each))
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

    for name, compared in comparison.compare(*argv).items():
        log(f"{name}: {argv[0]} minus {argv[1]}, 95 % intervals of paired differences")
        log(*(f"  {estimate:8} {each:+.3f}" for estimate, each in compared.differences.items()))
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
    batch_size: int = 32,
) -> int:
    """Measures how often a policy solves each problem of a config, and keeps those within a range of rates.
    If it keeps none, its exit status is 3.

    Change fields of the config by `--section.field VALUE`, as in `qerl plan`; `qerl plan CONFIG --help` lists all.

    Args:
        config: A TOML file, or the name of a config in the package. Its model, devices, data and
            sampling settings are used.
        out: A .jsonl file for the problems that are kept, with the prompts of their rows; system prompt and
            template are added when it is read. The pass rate of each problem is stored in `<out>.measured`, from
            which a later call continues.
        *fields: Fields of the config that take another value.
        low: Lowest pass rate that is kept.
        high: Highest pass rate that is kept.
        samples: Completions per problem.
        reward: The function that says whether a completion passes: it gives at least 1. Absent means the
            config's first, or without one the environment's own.
        adapter: A PEFT folder, or a run folder, whose adapter or newest checkpoint is taken; absent means the base
            alone.
        num_problems: How many problems to measure, from the front; absent means as many as the config says.
        batch_size: Problems sampled together.

    Examples:
        qerl filter gsm8k_qwen2.5_7b some.jsonl --low 0.2 --high 0.8
        qerl filter quickstart some.jsonl --data.dataset problems.jsonl --rollout.max-completion-length 64
        qerl train gsm8k_qwen2.5_7b --data.dataset some.jsonl --eval.dataset gsm8k --output-dir runs/some
    """
    # Under the name of `plan`, whose help is the one that lists the fields.
    cfg = run_config("plan", [str(config), *fields], own=options.of_function(filter_problems).kinds)
    if num_problems is not None:
        require(num_problems >= 1, "num_problems", num_problems, "must be at least 1")
        cfg = dataclasses.replace(
            cfg, data=dataclasses.replace(cfg.data, num_problems=num_problems)
        )
    from qerl_jax.data import datasets
    from qerl_jax.evaluation import pass_rates

    use_compilation_cache()
    kept, total = pass_rates.select(
        cfg,
        out,
        low=low,
        high=high,
        samples=samples,
        reward=reward,
        adapter=adapter,
        batch_size=batch_size,
        log=log,
    )
    log(f"{kept} of {total} problems have a pass rate in [{low}, {high}]: {out}")
    set_prompt = datasets.system_prompt(cfg.data)
    if kept and cfg.data.system_prompt is None and set_prompt:
        log(
            f"the system prompt of {cfg.data.dataset} is not in {out}: train with --data.system-prompt {set_prompt}"
        )
    if not kept:
        log(
            f"{out} is empty (exit status {NOTHING_KEPT}); choose other bounds by the rates in {out}.measured"
        )
    return 0 if kept else NOTHING_KEPT
