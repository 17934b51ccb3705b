"""The commands that measure policies: `eval`, `compare`, `filter`."""

import dataclasses
import pathlib
from typing import Literal

import qerl_jax
from qerl_jax.checked import require
from qerl_jax.cli.common import log, use_compilation_cache
from qerl_jax.config import Dtype, Weights, load


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
    reward: str | None = None,
    path: str | None = None,
    split: str | None = None,
    columns: dict[str, str] | None = None,
    num_problems: int | None = None,
    weights: Weights | None = None,
    dtype: Dtype | None = None,
    output_dir: pathlib.Path | None = None,
    max_concurrent: int = 128,
    seed: int = 0,
) -> None:
    """Measures how often a policy is right on sets of problems, with confidence intervals.

    Results go to OUTPUT_DIR/<set>/; a call that finds them unfinished goes on after the last problem.

    Args:
        sets: "gsm8k", "math500", "aime24", "aime25", "amc23", "arithmetic", any data set of the hub, or
            a .jsonl, .json or .parquet file of {"question": ..., "answer": ...}. A text under "prompt" is
            given to the model as it is, without its chat template.
        model: Local folder or hub name; absent means the adapter's base, or the one in the package.
        adapter: A PEFT folder, or a run folder, whose adapter and settings are taken.
        base: Leave the adapter away: the policy before training, asked and judged alike.
        protocol: "paper" (temperature 0.6, top-p 0.95), "verl" (verl's own words, sampling and scorers), or
            "run" (prompt, sampling and reward of the run). Absent means the run's where there is one, else
            the paper's.
        samples: N, completions per problem, instead of the protocol's; so are the next six.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Keep the likeliest tokens up to this mass.
        max_tokens: Longest completion in tokens.
        system_prompt: A system message, or a name of `datasets.SYSTEM_PROMPTS`; "" for none.
        prompt_template: Text around the problem: "{prompt}" is filled in.
        reward: The function that is at least 1 where a completion is right.
        path: Where the set (one) lies if not on the hub: a folder or a file.
        split: Split of the set, instead of the usual one.
        columns: Which columns hold the `prompt` and the `answer`.
        num_problems: Ask only so many problems, from the front.
        weights: How the linears are held; absent means as in the adapter's run, else "nvfp4".
        dtype: Data type of the activations; absent means that of the run, else "bfloat16".
        output_dir: Folder of the results; absent means `eval/` of the run folder, else `evals/`, and there
            the policy's name and the protocol, if one is given.
        max_concurrent: Most completions sampled at a time; fused decoding takes up to 128.
        seed: Random seed for sampling.

    Examples:
        qerl eval gsm8k math500 --adapter runs/mine
        qerl eval gsm8k --adapter runs/mine --base    # the policy before training
        qerl eval my_problems.jsonl --model Qwen/Qwen2.5-7B-Instruct --samples 4 --num-problems 100
    """
    if not sets:
        raise ValueError("missing the sets: qerl eval SET ... [--adapter RUN_FOLDER]")
    require(max_concurrent >= 1, "max_concurrent", max_concurrent, "must be at least 1")
    if path is not None and len(sets) > 1:
        raise ValueError(f"--path is where one set lies; got {len(sets)} sets")
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
        reward=reward,
        path=path,
        split=split,
        columns=columns,
        num_problems=num_problems,
        output_dir=folder,
        max_concurrent=max_concurrent,
        seed=seed,
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
    *,
    low: float = 0.1,
    high: float = 0.6,
    samples: int = 8,
    reward: str | None = None,
    adapter: pathlib.Path | None = None,
    num_problems: int | None = None,
    batch_size: int = 32,
) -> None:
    """Measures how often a policy solves each problem of a config, and keeps a band.

    Args:
        config: The TOML file whose model, data and sampling settings are used.
        out: A .jsonl file for the problems that are kept; rates go to `<out>.measured`, from which
            a later call goes on.
        low: Lowest pass rate that is kept.
        high: Highest pass rate that is kept.
        samples: Completions per problem.
        reward: A completion passes where this function gives at least 1; absent means the config's
            first.
        adapter: A PEFT folder; absent means the bare base.
        num_problems: Measure only so many problems, from the front, instead of as many as the config says.
        batch_size: Problems sampled together.

    Examples:
        qerl filter gsm8k_qwen2.5_7b some.jsonl --low 0.2 --high 0.8
        qerl train gsm8k_qwen2.5_7b --data.dataset some.jsonl
    """
    cfg = load(config)
    if num_problems is not None:
        cfg = dataclasses.replace(
            cfg, data=dataclasses.replace(cfg.data, num_problems=num_problems)
        )
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
