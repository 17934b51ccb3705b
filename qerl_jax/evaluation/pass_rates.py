"""Measures how often a policy solves each problem of a set, and selects problems by this pass rate.

A group whose completions are all right or all wrong has zero advantages. Leaving out such problems before training
saves their rollouts (QeRL's tools keep pass rates from 0.1 to 0.6).
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from qerl_jax.checkpoint.policy import PolicySource, find_policy, load_policy
from qerl_jax.config import RunConfig
from qerl_jax.data import datasets
from qerl_jax.evaluation.evaluator import Evaluator, reward_of, try_reward
from qerl_jax.evaluation.results import Measurement, Results, measure
from qerl_jax.generation.prompts import admit
from qerl_jax.generation.sampling_params import from_section
from qerl_jax.planning import memory
from qerl_jax.rl import rollouts
from qerl_jax.system.checked import require, to_table
from qerl_jax.system.files import content_hashes, to_line, write_whole
from qerl_jax.tools.conversations import Tools
from qerl_jax.tools.environments import Toolboxes


def select(
    cfg: RunConfig,
    out: str | pathlib.Path,
    *,
    low: float,
    high: float,
    samples: int,
    reward: str | None = None,
    adapter: str | pathlib.Path | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> tuple[int, int]:
    """Writes the problems whose pass rate is in [low, high], and measures the rates that are not known yet.

    Rates are written to `<out>.measured`, one line per problem, and until all are known, what was judged is written to
    `<out>.measured.partial`, one line per completion. A call that finds these files continues: an interrupted
    measurement is not lost, and another band needs no new measurement. `out` is written at the end, with rows of
    {"prompt", the problem's columns, "pass_rate"}. The prompt is that of the row; the config's system message and the
    chat template are added when the rows are read.

    Args:
        cfg: The run whose model, data, devices and sampling settings are used.
        out: A .jsonl file.
        low: Lowest rate that is kept.
        high: Highest rate that is kept.
        samples: Number of completions per problem.
        reward: Name of a reward function. A completion passes if it gives at least 1; completions for which it gives
            None are not counted. None means the first function of the config, or without one the environment's own
            reward.
        adapter: A PEFT folder, or a run folder, of which it is the final adapter or the newest checkpoint; None
            means the bare base.
        log: Called with a line about every ten seconds.

    Returns:
        The number of problems that were kept, and of all problems.

    Raises:
        FileNotFoundError: If there is no such adapter.
        ValueError: If an argument is invalid, or `<out>.measured` was made with other settings.
    """
    out = pathlib.Path(out)
    is_file = out.suffix == ".jsonl" and not out.is_dir()
    require(is_file, "out", os.fspath(out), "must be a .jsonl file")
    require(0 <= low <= high <= 1, "low, high", (low, high), "must be in order, between 0 and 1")
    require(samples >= 1, "samples", samples, "must be at least 1")
    toolboxes = None if cfg.tools is None else Toolboxes(cfg.tools)
    rewards = [] if toolboxes is None else [name for name, _ in toolboxes.own_rewards()]
    field = "reward" if reward else "rewards.functions"
    reward = reward or [*cfg.rewards.functions, *rewards][0]
    function = reward_of(reward, cfg.rewards.options, toolboxes, field=field)
    # Nothing is trained here, so a base for full training is loaded like any other.
    source = PolicySource(dataclasses.replace(cfg.model, trainable="lora"))
    if adapter is not None:
        named = find_policy(cfg.model.model_name_or_path, adapter)
        rule = "this run has trained the whole base: name its model in model.model_name_or_path"
        require(named.adapter is not None, "adapter", os.fspath(adapter), rule)
        source = dataclasses.replace(named, model=source.model)
    path = out.with_name(out.name + ".measured")
    identity = _identity(cfg, samples, reward, source.adapter)
    with Results(path, identity, frozen=source.frozen_date()) as results:
        memory.require_context(cfg)
        problems = datasets.from_config(cfg.data, split=cfg.data.split, seed=cfg.seed)
        try_reward(function, problems, toolboxes, before="measuring")
        rows = len(problems) * samples
        policy = load_policy(source, cfg.seed, mesh=cfg.mesh, rows=rows, quiet=False)
        policy = policy.dated(results.identity)
        memory.require_context(cfg, policy.model.arch)
        tools = toolboxes and Tools.of(cfg.tools, policy.tokenizer, toolboxes, log)
        limits = {"max_prompt_length": cfg.data.max_prompt_length, "tools": tools}
        problems = admit(problems, policy.tokenizer, overlong=cfg.data.overlong_prompts, **limits)
        of = (policy.model, policy.tokenizer, cfg.rollout)
        sampler = rollouts.make_sampler(*of, replicas=policy.replicas, **limits)
        params = dataclasses.replace(sampler.params, n=samples)
        sampler = dataclasses.replace(sampler, params=params)
        evaluator = Evaluator(sampler, problems, function, jax.random.key(cfg.seed))
        columns = ("problem", "sample", "right", "judged")
        one = Measurement(evaluator, results, pass_rates, "{} judged".format, columns)
        measure(policy.variables, [one], log)
        rates = results.of_problems.values
    selected = [
        problem.columns | {"prompt": problem.row_prompt or problem.prompt, "pass_rate": rate}
        for problem, rate in zip(problems, rates, strict=True)
        if rate is not None and low <= rate <= high
    ]
    write_whole(out, "".join(map(to_line, selected)))
    return len(selected), len(problems)


def pass_rates(rows: Sequence[dict[str, Any]]) -> list[float | None]:
    """Returns the pass rate of each problem, from all rows of `Evaluator.judge` of some problems, in any order.

    It is the fraction of judged completions that pass; None if none was judged.
    """
    verdicts: dict[int, list[bool]] = {}
    for row in rows:
        verdicts.setdefault(row["problem"], []).extend([row["right"]] * row["judged"])
    return [sum(of) / len(of) if of else None for _, of in sorted(verdicts.items())]


def _identity(cfg: RunConfig, samples: int, reward: str, adapter: Any) -> dict[str, Any]:
    """Returns everything that a pass rate depends on."""
    table = to_table(cfg)
    return {
        "model": table["model"],
        "data": table["data"],
        "sampling": from_section(cfg.rollout).identity(),
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
