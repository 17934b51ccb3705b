"""How often a policy solves each problem of a set, and the problems that teach it something.

A group whose completions are all right or all wrong has no advantage. Leaving such problems out
before training saves their rollouts (QeRL's tools keep pass rates from 0.1 to 0.6).
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from qerl_jax import config, memory
from qerl_jax.checkpoint import base_model, peft
from qerl_jax.config import RunConfig
from qerl_jax.data import datasets
from qerl_jax.files import Progress, digest, fingerprint, write_whole
from qerl_jax.rewards import scoring
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
    say: Callable[[str], None] = lambda text: None,
) -> tuple[int, int]:
    """Writes the problems whose pass rate lies in [low, high], measuring what is not measured yet.

    Rates go to `<out>.measured` as they come, a problem a line. A call that finds this file goes on
    after its last line, so a measurement survives a kill, and another band of a finished one is
    not measured anew. `out` itself appears at the end: rows of {"prompt", the problem's columns,
    "pass_rate"}, with the prompt as the policy met it, system message included; train on them with
    `data.dataset = "<out>"` and no system prompt.

    Args:
        cfg: Whose model, data and sampling settings are used.
        out: A .jsonl file.
        low: Lowest rate that is kept.
        high: Highest.
        samples: Completions per problem.
        reward: A completion passes where this function gives at least 1, rows on which it abstains
            aside; absent means the config's first.
        adapter: A PEFT folder; absent means the bare base.
        batch_size: Problems sampled together.
        say: Told of every batch.

    Returns:
        How many problems were kept, and out of how many.

    Raises:
        ValueError: For an impossible argument, or a measurement of something else under that name.
    """
    out = pathlib.Path(out)
    if out.suffix != ".jsonl" or not 0 <= low <= high <= 1 or samples < 1 or batch_size < 1:
        raise ValueError(
            "needs a .jsonl file, 0 <= low <= high <= 1, samples >= 1 and batch_size >= 1; "
            f"got {os.fspath(out)!r}, {low=}, {high=}, {samples=}, {batch_size=}"
        )
    reward = reward or cfg.rewards.functions[0]
    out.parent.mkdir(parents=True, exist_ok=True)
    measured = Progress(
        out.with_name(out.name + ".measured"), _identity(cfg, samples, reward, adapter)
    )
    (function,) = scoring.resolve([reward], cfg.rewards.options)
    memory.require_context(cfg)
    lora = None if adapter is None else peft.read_lora(adapter)
    model, frozen, tokenizer = base_model.load_policy(cfg.model, lora, cfg.seed)
    memory.require_context(cfg, model.arch)
    variables = {"frozen": frozen}
    if adapter is not None:
        variables["params"] = peft.import_adapter(adapter, model)
    problems = rollouts.admit(
        datasets.from_config(cfg.data, split=cfg.data.split, seed=cfg.seed),
        tokenizer,
        max_prompt_length=cfg.data.max_prompt_length,
        overlong=cfg.data.overlong_prompts,
    )
    scoring.check([function], problems[:2])
    generate = rollouts.make_generate(model, tokenizer, cfg.rollout, num_generations=samples)
    batch_size = min(batch_size, len(problems))
    while (start := len(measured.values)) < len(problems):
        batch = list(problems[start : start + batch_size])
        wanted = len(batch)
        # The last batch is filled up with repeats: one shape, one compilation.
        batch += [batch[-1]] * (batch_size - wanted)
        rollout = rollouts.collect(
            generate,
            variables,
            tokenizer,
            batch,
            jax.random.key(cfg.seed),
            num_generations=samples,
            max_prompt_length=cfg.data.max_prompt_length,
            temperature=cfg.rollout.temperature,
            # A completion's randomness is a function of its problem's place, not of the batch.
            first_row=start * samples,
        )
        _, values = rollouts.score(rollout, [function], None)
        measured.add(pass_rates(values[:, 0].reshape(-1, samples)[:wanted]))
        say(f"{len(measured.values)}/{len(problems)} problems measured")
    kept = [
        (problem, rate)
        for problem, rate in zip(problems, measured.values, strict=True)
        if rate is not None and low <= rate <= high
    ]
    write_whole(out, "".join(map(_row, kept)))
    return len(kept), len(problems)


def pass_rates(values: np.ndarray) -> list[float | None]:
    """Share of the completions of each problem that pass, of those that were judged.

    Args:
        values: [P, samples] rewards; at least 1 passes, NaN was not judged.

    Returns:
        P rates; None where no completion was judged.
    """
    judged = ~np.isnan(values)
    passed = (values >= 1).sum(axis=1)
    return [
        float(right / count) if count else None
        for right, count in zip(passed, judged.sum(axis=1), strict=True)
    ]


def _identity(cfg: RunConfig, samples: int, reward: str, adapter: Any) -> dict[str, Any]:
    """Everything that a rate depends on, as plain JSON."""
    table = config.to_table(cfg)
    options = (cfg.rewards.options or {}).get(reward)
    return {
        "model": table["model"],
        "model.sha256": fingerprint(pathlib.Path(cfg.model.model_name_or_path)),
        "data": table["data"],
        "rollout": {
            name: table["rollout"].get(name)
            for name in (
                "max_completion_length",
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "repetition_penalty",
                "stop",
                "ignore_eos",
            )
        },
        "seed": cfg.seed,
        "samples": samples,
        "reward": [reward, options],
        "adapter": adapter and os.fspath(adapter),
        "adapter.sha256": adapter and fingerprint(pathlib.Path(adapter)),
        "data.sha256": digest(pathlib.Path(cfg.data.path or cfg.data.dataset)),
    }


def _row(kept: tuple[datasets.Problem, float]) -> str:
    problem, rate = kept
    row = problem.columns | {"prompt": problem.prompt, "pass_rate": rate}
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"
