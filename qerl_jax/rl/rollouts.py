"""Problems in, scored completions out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.config import RolloutConfig
from qerl_jax.data.datasets import Problem, collate
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.generation import batch, sampling
from qerl_jax.generation.stop_strings import StopStrings
from qerl_jax.model.transformer import Transformer
from qerl_jax.rewards import scoring as rewards
from qerl_jax.rl import grpo


@dataclasses.dataclass(frozen=True)
class Rollout:
    """B = P * G completions, the G of a problem in a row; numpy on the host.

    Attributes:
        problems: The P problems.
        texts: The B completions without special tokens.
        tokens: int32 [B, T], prompt and completion without a gap, right-padded.
        prompt_lengths: int32 [B].
        completions: int32 [B, C], padded.
        logps: float32 [B, C], the sampler's log-probabilities.
        lengths: int32 [B], tokens of each completion, the stop token included, or the token that
            completes a stop string.
        stopped: bool [B], False where the completion was cut at C tokens.
    """

    problems: tuple[Problem, ...]
    texts: tuple[str, ...]
    tokens: np.ndarray
    prompt_lengths: np.ndarray
    completions: np.ndarray
    logps: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray

    @property
    def num_generations(self) -> int:
        """G."""
        return len(self.texts) // len(self.problems)


@dataclasses.dataclass(frozen=True)
class Scored:
    """A rollout with its rewards.

    Attributes:
        rollout: P problems, B = P * G completions.
        positions: int32 [P], places of the problems in the order in which the data is met.
        rewards: float32 [P, G].
        per_function: float32 [B, number of functions], NaN where one abstained.
    """

    rollout: Rollout
    positions: np.ndarray
    rewards: np.ndarray
    per_function: np.ndarray

    def groups(self, chosen: Sequence[int] | np.ndarray) -> Scored:
        """Those groups, in that order."""
        chosen, size = np.asarray(chosen, int), self.rollout.num_generations
        rows = (chosen[:, None] * size + np.arange(size)).reshape(-1)
        picked = {
            field.name: _pick(
                getattr(self.rollout, field.name), chosen if field.name == "problems" else rows
            )
            for field in dataclasses.fields(Rollout)
        }
        return Scored(
            Rollout(**picked), self.positions[chosen], self.rewards[chosen], self.per_function[rows]
        )


def join(parts: Sequence[Scored]) -> Scored:
    """All groups of several rollouts of one shape, in order."""

    def together(values):
        return sum(values, ()) if isinstance(values[0], tuple) else np.concatenate(values)

    rollout = {
        field.name: together([getattr(part.rollout, field.name) for part in parts])
        for field in dataclasses.fields(Rollout)
    }
    return Scored(
        Rollout(**rollout),
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("positions", "rewards", "per_function")
        ),
    )


@dataclasses.dataclass(frozen=True)
class Supply:
    """Where a run stands in its data; the one part of a run that the step does not tell.

    Attributes:
        drawn: Problems met so far.
        surplus: Informative groups that the last rollout had no room for, fewer than one rollout
            needs; None for none.
    """

    drawn: int = 0
    surplus: Scored | None = None

    def to_table(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain numbers: problems are named by their places."""
        if self.surplus is None:
            return {"drawn": self.drawn}
        rollout = self.surplus.rollout
        rows = [
            {
                "completion": rollout.completions[row, :length].tolist(),
                "logps": rollout.logps[row, :length].tolist(),
                "stopped": bool(rollout.stopped[row]),
                "per_function": [None if np.isnan(x) else float(x) for x in each],
            }
            for row, (length, each) in enumerate(
                zip(rollout.lengths, self.surplus.per_function, strict=True)
            )
        ]
        return {
            "drawn": self.drawn,
            "positions": self.surplus.positions.tolist(),
            "rewards": self.surplus.rewards.tolist(),
            "rows": rows,
        }

    @classmethod
    def from_table(
        cls,
        table: dict[str, Any],
        problem_at: Callable[[int], Problem],
        tokenizer: Tokenizer,
        *,
        max_prompt_length: int,
        max_completion_length: int,
    ) -> Supply:
        """The inverse of `to_table`, bit for bit.

        Args:
            table: What `to_table` gave.
            problem_at: The problem at a place in the order of the data.
            tokenizer: Of the policy.
            max_prompt_length: The width to which prompts are padded.
            max_completion_length: C.
        """
        if "rows" not in table:
            return cls(table["drawn"])
        rows = table["rows"]
        completions = np.full((len(rows), max_completion_length), tokenizer.pad_token, np.int32)
        logps = np.zeros(completions.shape, np.float32)
        lengths = np.array([len(row["completion"]) for row in rows], np.int32)
        for index, row in enumerate(rows):
            completions[index, : lengths[index]] = row["completion"]
            logps[index, : lengths[index]] = row["logps"]
        problems = [problem_at(position) for position in table["positions"]]
        rollout = _assemble(
            problems,
            *_padded_prompts(problems, tokenizer, max_prompt_length),
            completions,
            logps,
            lengths,
            np.array([row["stopped"] for row in rows]),
            tokenizer,
        )
        scored = Scored(
            rollout,
            np.array(table["positions"], np.int32),
            np.array(table["rewards"], np.float32),
            np.array([row["per_function"] for row in rows], np.float32),
        )
        return cls(table["drawn"], scored)


def gather(
    sample: Callable[[int, int], Scored], supply: Supply, *, max_rounds: int | None
) -> tuple[Scored, Scored, Supply, dict[str, float]]:
    """Samples in rounds until a rollout's worth of groups is informative (DAPO, arXiv:2503.14476).

    What the last rollout had left over comes first; what is over this time is left to the next, so
    no group waits for longer than one rollout, and the surplus stays below one. After
    `max_rounds` the batch is filled up with groups of equal rewards, which teach nothing.

    Args:
        sample: sample(drawn, round) samples and scores the P problems from place `drawn` on.
        supply: Where the data stands.
        max_rounds: At least 1; None takes one round as it comes.

    Returns:
        The P groups to learn from, all that was sampled this time (what the policy is like is seen
        there: the batch is a selection), the new supply, and metrics under `dynamic_sampling/`.
    """
    if max_rounds is None:
        scored = sample(supply.drawn, 0)
        return scored, scored, Supply(supply.drawn + len(scored.positions)), {}
    fresh, drawn = [], supply.drawn
    waiting = [] if supply.surplus is None else [supply.surplus]
    for index in range(max_rounds):
        fresh.append(sample(drawn, index))
        wanted = len(fresh[0].positions)
        drawn += wanted
        pool = join(waiting + fresh)
        good = np.asarray(grpo.informative(pool.rewards))
        if good.sum() >= wanted:
            break
    # Informative ones first, and among equals those that were sampled first.
    order = np.argsort(~good, kind="stable")
    left = order[wanted : good.sum()]
    filled = max(0, wanted - int(good.sum()))
    metrics = {
        "dynamic_sampling/rounds": len(fresh),
        "dynamic_sampling/groups_discarded": int((~good).sum()) - filled,
        "dynamic_sampling/groups_filled": filled,
        "dynamic_sampling/groups_carried_over": len(left),
    }
    new = Supply(drawn, pool.groups(left) if len(left) else None)
    return pool.groups(order[:wanted]), join(fresh), new, metrics


def admit(
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    overlong: str,
    what: str = "prompts",
    say: Callable[[str], None] | None = None,
) -> Sequence[Problem]:
    """The problems whose prompts fit, checked before any training time is spent.

    Args:
        problems: Any number.
        tokenizer: Of the policy.
        max_prompt_length: Tokens of the longest that fits.
        overlong: "error", or "drop".
        what: What they are called.
        say: Told how many are dropped.

    Raises:
        ValueError: When a prompt has no tokens, is longer than `max_prompt_length` and `overlong`
            is "error", or none is left.
    """
    lengths = [len(ids) for ids in tokenizer.encode([problem.prompt for problem in problems])]
    if 0 in lengths:
        raise ValueError(
            f"prompt of problem {lengths.index(0)}: must have at least one token; got none"
        )
    longest = max(lengths)
    if longest <= max_prompt_length:
        return problems
    too_long = sum(length > max_prompt_length for length in lengths)
    if overlong == "error":
        raise ValueError(
            f"data.max_prompt_length: got {max_prompt_length}; {too_long} of {len(problems)} {what} are longer (problem "
            f'{lengths.index(longest)} has {longest} tokens): raise it, or set data.overlong_prompts = "drop"'
        )
    kept = [
        problem
        for problem, length in zip(problems, lengths, strict=True)
        if length <= max_prompt_length
    ]
    if not kept:
        raise ValueError(
            f"data.max_prompt_length: got {max_prompt_length}; no prompt is that short"
        )
    if say:
        say(
            f"{too_long} of {len(problems)} {what} are left out: longer than data.max_prompt_length = "
            f"{max_prompt_length}"
        )
    return kept


def make_generate(
    model: Transformer,
    tokenizer: Tokenizer,
    cfg: RolloutConfig,
    *,
    num_generations: int | None = None,
) -> Callable[..., batch.Completions]:
    """The sampler that a config asks for; see `sampling.make_generate`.

    Args:
        model: The policy.
        tokenizer: Of the policy.
        cfg: How completions are sampled.
        num_generations: Instead of the config's.
    """
    return batch.make_generate(
        model,
        num_generations=num_generations or cfg.num_generations,
        max_completion_length=cfg.max_completion_length,
        max_concurrent=cfg.max_concurrent,
        pad_token=tokenizer.pad_token,
        num_tokens=tokenizer.num_tokens,
        stop_tokens=() if cfg.ignore_eos else tokenizer.stop_tokens,
        stop_strings=StopStrings(cfg.stop, tokenizer.decode) if cfg.stop else None,
        truncation=sampling.Truncation(cfg.top_k, cfg.top_p, cfg.min_p),
        repetition_penalty=cfg.repetition_penalty,
        compact=cfg.compact,
        kv_cache_tokens=cfg.kv_cache_tokens,
        kv_cache_fraction=cfg.kv_cache_fraction,
    )


def collect(
    generate: Callable[..., Any],
    variables: dict[str, Any],
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    key: jax.Array,
    *,
    num_generations: int,
    max_prompt_length: int,
    temperature: float,
    first_row: int = 0,
) -> Rollout:
    """Samples G completions of each problem.

    Args:
        generate: From `sampling.make_generate`, with the same G.
        variables: `params`, `frozen` and, under AQN, `noise`.
        tokenizer: Of the policy.
        problems: P of them.
        key: Row r samples from fold_in(key, first_row + r).
        num_generations: G.
        max_prompt_length: The width to which prompts are padded, so that nothing recompiles.
        temperature: 0 is greedy.
        first_row: Rows that were sampled with the same key before.
    """
    padded, prompt_lengths = _padded_prompts(problems, tokenizer, max_prompt_length)
    rows = first_row + jnp.arange(len(problems) * num_generations)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)
    sampled = generate(variables, padded, prompt_lengths, keys, temperature)
    return _assemble(
        problems,
        padded,
        prompt_lengths,
        sampled.tokens,
        sampled.logps,
        sampled.lengths,
        sampled.stopped,
        tokenizer,
    )


def _padded_prompts(problems, tokenizer, max_prompt_length) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded prompts [P, max_prompt_length] and their lengths [P]."""
    prompts = tokenizer.encode([problem.prompt for problem in problems])
    padded = np.full((len(prompts), max_prompt_length), tokenizer.pad_token, np.int32)
    for row, ids in enumerate(prompts):
        padded[row, : len(ids)] = ids
    return padded, np.array([len(ids) for ids in prompts], np.int32)


def _assemble(
    problems, prompts, prompt_lengths, completions, logps, lengths, stopped, tokenizer
) -> Rollout:
    """Puts each prompt before its completions, without a gap."""
    group = len(completions) // len(problems)
    prompts, prompt_lengths = prompts.repeat(group, 0), prompt_lengths.repeat(group)
    tokens = np.concatenate([prompts, np.full_like(completions, tokenizer.pad_token)], axis=1)
    slots = prompt_lengths[:, None] + np.arange(completions.shape[1])
    np.put_along_axis(tokens, slots, completions, axis=1)
    texts = tuple(tokenizer.decode(ids[:n]) for ids, n in zip(completions, lengths, strict=True))
    return Rollout(
        problems=tuple(problems),
        texts=texts,
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        completions=completions,
        logps=logps,
        lengths=lengths,
        stopped=stopped,
    )


def _pick(values, chosen):
    return tuple(values[i] for i in chosen) if isinstance(values, tuple) else values[chosen]


def score(
    rollout: Rollout,
    functions: Sequence[rewards.Named],
    weights: Sequence[float] | None,
    extras: Mapping[str, Any] | None = None,
    record: rewards.Record | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Rewards of a rollout: every function is called once, on all B rows, with the arguments TRL would give it.

    Prompts and columns are the problems', each repeated for its G rows. Rows are combined by
    `grpo.combine_rewards`.

    Args:
        rollout: What was sampled.
        functions: Names and functions, from `rewards.resolve`.
        weights: One per function; None means 1 each.
        extras: Further arguments of the functions.
        record: Takes what the functions log.

    Returns:
        float32 [P, G] combined rewards (0 where every function abstained), and float32 [B, number
        of functions] of each function by itself, NaN where it abstained.

    Raises:
        RewardError: When a function raises, or does not return one finite number or None per row.
        ValueError: When the number of weights is not that of functions, or a column has an
            argument's name.
    """
    if weights is not None and len(weights) != len(functions):
        raise ValueError(
            f"weights: got {len(weights)}; must be one for each of {len(functions)} functions"
        )
    group = rollout.num_generations
    prompts, columns = collate([problem for problem in rollout.problems for _ in range(group)])
    per_function = rewards.evaluate(
        functions,
        prompts,
        [
            rewards.as_completion(prompt, text)
            for prompt, text in zip(prompts, rollout.texts, strict=True)
        ],
        [
            row[:length].tolist()
            for row, length in zip(rollout.completions, rollout.lengths, strict=True)
        ],
        columns,
        extras,
        record,
    )
    weights = np.ones(len(functions)) if weights is None else weights
    combined, _ = grpo.combine_rewards(per_function, jnp.asarray(weights, jnp.float32))
    return np.asarray(combined).reshape(-1, group), per_function
