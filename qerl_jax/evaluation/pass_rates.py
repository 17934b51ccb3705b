"""How often a policy solves each problem of a set, and the problems that teach it something.

A group whose completions are all right or all wrong has no advantage. Leaving such problems out
before training saves their rollouts (QeRL's tools keep pass rates from 0.1 to 0.6).
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from qerl_jax import memory
from qerl_jax.checked import require, to_table
from qerl_jax.checkpoint.policy import LoadedPolicy, PolicySource, load_policy
from qerl_jax.config import RunConfig
from qerl_jax.data import datasets
from qerl_jax.evaluation.evaluator import Evaluator, reward_of, try_reward
from qerl_jax.files import Progress, content_hashes, to_line, write_whole
from qerl_jax.generation.conversations import Tools
from qerl_jax.rewards import scoring
from qerl_jax.rewards.environments import Toolboxes
from qerl_jax.rl import rollouts


def select(
    cfg: RunConfig,
    out: str | pathlib.Path,
    *,
    low: float,
    high: float,
    samples: int,
    reward: str | None = None,
    adapter: str | pathlib.Path | None = None,
    batch_size: int = 32,
    log: Callable[[str], None] = lambda text: None,
) -> tuple[int, int]:
    """Writes the problems whose pass rate lies in [low, high], measuring what is not measured yet.

    Rates go to `<out>.measured` as they come, a problem a line. A call that finds this file goes on
    after its last line, so a measurement survives a kill, and another band of a finished one is
    not measured anew. `out` itself appears at the end: rows of {"prompt", the problem's columns,
    "pass_rate"}, with the prompt as the policy met it, system message included; train on them with
    `data.dataset = "<out>"` and no system prompt.

    Args:
        cfg: The run whose model, data, devices and sampling settings are used.
        out: A .jsonl file.
        low: Lowest rate that is kept.
        high: Highest rate that is kept.
        samples: Completions per problem.
        reward: A completion passes where this function gives at least 1, rows on which it abstains
            aside; None means the config's first, or where it has none its environment's own.
        adapter: A PEFT folder; None means the bare base.
        batch_size: Problems sampled together.
        log: Called with a line for every batch.

    Returns:
        How many problems were kept, and out of how many.

    Raises:
        ValueError: For an impossible argument, or a measurement of something else under that name.
    """
    out = pathlib.Path(out)
    require(out.suffix == ".jsonl", "out", os.fspath(out), "must be a .jsonl file")
    require(0 <= low <= high <= 1, "low, high", (low, high), "must be in order, between 0 and 1")
    require(samples >= 1, "samples", samples, "must be at least 1")
    require(batch_size >= 1, "batch_size", batch_size, "must be at least 1")
    toolboxes = None if cfg.tools is None else Toolboxes(cfg.tools)
    own = [] if toolboxes is None else [name for name, _ in toolboxes.own_rewards()]
    field = "reward" if reward else "rewards.functions"
    reward = reward or (*cfg.rewards.functions, *own)[0]
    function = reward_of(reward, cfg.rewards.options, toolboxes, field=field)
    measured = Progress(
        out.with_name(out.name + ".measured"), _identity(cfg, samples, reward, adapter)
    )
    memory.require_context(cfg)
    # Nothing trains here, so a base for full training is read like any other.
    base = dataclasses.replace(cfg.model, trainable="lora")
    source = PolicySource(base, adapter and pathlib.Path(adapter))
    rows = batch_size * samples
    policy = load_policy(source, cfg.seed, mesh=cfg.mesh, rows=rows, quiet=False)
    memory.require_context(cfg, policy.model.arch)
    tools = None
    if toolboxes is not None:
        tools = Tools.of(cfg.tools, policy.tokenizer, toolboxes, log)
    evaluator = _evaluator(cfg, policy, function, samples, batch_size, tools)
    problems = evaluator.problems
    for records in evaluator.records(policy.variables, len(measured.values), voting=False):
        measured.add(map(pass_rate, records))
        log(f"{len(measured.values)}/{len(problems)} problems measured")
    kept = [
        problem.columns | {"prompt": problem.prompt, "pass_rate": rate}
        for problem, rate in zip(problems, measured.values, strict=True)
        if rate is not None and low <= rate <= high
    ]
    write_whole(out, "".join(map(to_line, kept)))
    return len(kept), len(problems)


def _evaluator(
    cfg: RunConfig,
    policy: LoadedPolicy,
    function: scoring.Named,
    samples: int,
    batch_size: int,
    tools: Tools | None,
) -> Evaluator:
    """The evaluator of a run's training problems, which are sampled as in its rollouts."""
    problems = rollouts.admit(
        datasets.from_config(cfg.data, split=cfg.data.split, seed=cfg.seed),
        policy.tokenizer,
        max_prompt_length=cfg.data.max_prompt_length,
        overlong=cfg.data.overlong_prompts,
        tools=tools,
    )
    try_reward(function, problems, tools and tools.toolboxes)
    sampler = rollouts.make_sampler(
        policy.model,
        policy.tokenizer,
        cfg.rollout,
        max_prompt_length=cfg.data.max_prompt_length,
        tools=tools,
        replicas=policy.replicas,
    )
    sampler = dataclasses.replace(sampler, num_generations=samples)
    return Evaluator(sampler, problems, function, batch_size, jax.random.key(cfg.seed))


def pass_rate(record: dict[str, Any]) -> float | None:
    """The share of a problem's judged completions that pass; None if none was judged.

    Args:
        record: A problem's record from `Evaluator.records`.
    """
    judged = len(record["right"]) - record["unjudged"]
    return sum(record["right"]) / judged if judged else None


def _identity(cfg: RunConfig, samples: int, reward: str, adapter: Any) -> dict[str, Any]:
    """Everything that a rate depends on."""
    table = to_table(cfg)
    sampling = (
        "max_completion_length",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "stop",
        "ignore_eos",
    )
    return {
        "model": table["model"],
        "data": table["data"],
        "rollout": {name: table["rollout"].get(name) for name in sampling},
        "seed": cfg.seed,
        "samples": samples,
        "reward": [reward, (cfg.rewards.options or {}).get(reward)],
        "adapter": adapter and os.fspath(adapter),
        "tools": table.get("tools"),
        **content_hashes(
            {"model": cfg.model.model_name_or_path, "adapter": adapter},
            {"data": cfg.data.path or cfg.data.dataset},
        ),
    }
