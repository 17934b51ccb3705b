"""Problems in, scored completions out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import grpo, rewards
from qerl_jax.data import Problem, collate
from qerl_jax.tokenizer import Tokenizer


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
        lengths: int32 [B], tokens of each completion, the stop token included.
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


def admit(
    problems: Sequence[Problem], tokenizer: Tokenizer, *, max_prompt_length: int, overlong: str
) -> Sequence[Problem]:
    """The problems whose prompts fit, checked before any training time is spent.

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
            f"data.max_prompt_length: got {max_prompt_length}; {too_long} of {len(problems)} prompts are longer (problem "
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
    return kept


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
) -> Rollout:
    """Samples G completions of each problem.

    Args:
        generate: From `sampling.make_generate`, with the same G.
        variables: `params`, `frozen` and, under AQN, `noise`.
        tokenizer: Of the policy.
        problems: P of them.
        key: Row r samples from fold_in(key, r).
        num_generations: G.
        max_prompt_length: The width to which prompts are padded, so that nothing recompiles.
        temperature: 0 is greedy.
    """
    prompts = tokenizer.encode([problem.prompt for problem in problems])
    prompt_lengths = np.array([len(ids) for ids in prompts], np.int32)
    padded = np.full((len(prompts), max_prompt_length), tokenizer.pad_token, np.int32)
    for row, ids in enumerate(prompts):
        padded[row, : len(ids)] = ids

    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
        key, jnp.arange(len(prompts) * num_generations)
    )
    sampled = jax.device_get(generate(variables, padded, prompt_lengths, keys, temperature))

    padded, prompt_lengths = (
        padded.repeat(num_generations, 0),
        prompt_lengths.repeat(num_generations),
    )
    tokens = np.concatenate([padded, np.full_like(sampled.tokens, tokenizer.pad_token)], axis=1)
    slots = prompt_lengths[:, None] + np.arange(sampled.tokens.shape[1])
    np.put_along_axis(tokens, slots, sampled.tokens, axis=1)
    texts = tuple(
        tokenizer.decode(ids[:n]) for ids, n in zip(sampled.tokens, sampled.lengths, strict=True)
    )
    return Rollout(
        problems=tuple(problems),
        texts=texts,
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        completions=sampled.tokens,
        logps=sampled.logps,
        lengths=sampled.lengths,
        stopped=sampled.stopped,
    )


def score(
    rollout: Rollout, functions: Sequence[rewards.Named], weights: Sequence[float] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Rewards of a rollout: every function is called once, on all B rows, with the arguments TRL would give it.

    Prompts and columns are the problems', each repeated for its G rows. Rows are combined by
    `grpo.combine_rewards`.

    Args:
        rollout: What was sampled.
        functions: Names and functions, from `rewards.resolve`.
        weights: One per function; None means 1 each.

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
    )
    weights = np.ones(len(functions)) if weights is None else weights
    combined, _ = grpo.combine_rewards(per_function, jnp.asarray(weights, jnp.float32))
    return np.asarray(combined).reshape(-1, group), per_function
