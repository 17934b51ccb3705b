"""Samples completions of problems, and computes their rewards."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qerl_jax.config import RolloutConfig
from qerl_jax.data.datasets import Problem, collate
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.generation.sampler import Completion, Sampler, row_keys
from qerl_jax.generation.sampling_params import EngineLimits, from_section
from qerl_jax.generation.scheduler import RowTokens
from qerl_jax.model.transformer import Transformer
from qerl_jax.rewards import scoring
from qerl_jax.rl import grpo
from qerl_jax.system.checked import require
from qerl_jax.tools.conversations import Conversation


@dataclasses.dataclass(frozen=True)
class Rollout:
    """P problems and B = P * G completions, on the host and not padded; those of a problem are neighbours.

    Attributes:
        problems: The P problems.
        prompt_ids: Tokens of each problem's prompt, int32 [tokens].
        texts: The B completions without special tokens; for multi-turn rows the last turn.
        completion_ids: Tokens of each completion, int32 [tokens], including the stop token, or the
            token that completes a stop string.
        behaviour_logps: The sampler's log-probability of each token of each completion, float32 [tokens], in nats.
        stopped: False for each completion that was truncated at the limit.
        entropies: For each completion the sum of the sampler's entropies over its tokens, in nats; None if
            the sampler was not asked for them.
        observation_mask: For each completion bool [tokens]: True for tokens of a tool's answer, which the policy did not
            sample; None if there are no tools.
        conversations: The turns and answers of each row; None if there are no tools.
        versions: For each completion int32 [tokens]: how many optimizer steps the policy had done that sampled a token;
            None if one policy sampled all of them.
    """

    problems: tuple[Problem, ...]
    prompt_ids: tuple[np.ndarray, ...]
    texts: tuple[str, ...]
    completion_ids: tuple[np.ndarray, ...]
    behaviour_logps: tuple[np.ndarray, ...]
    stopped: tuple[bool, ...]
    entropies: tuple[float, ...] | None = None
    observation_mask: tuple[np.ndarray, ...] | None = None
    conversations: tuple[Conversation, ...] | None = None
    versions: tuple[np.ndarray, ...] | None = None

    @property
    def num_generations(self) -> int:
        """G, completions per problem."""
        return len(self.texts) // len(self.problems)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each completion, int32 [B]."""
        return np.array([len(ids) for ids in self.completion_ids], np.int32)

    @property
    def sampled_lengths(self) -> np.ndarray:
        """The number of each completion's tokens that the policy sampled, int32 [B]."""
        if self.observation_mask is None:
            return self.lengths
        return np.array([np.count_nonzero(~mask) for mask in self.observation_mask], np.int32)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all B rows, each with its prompt."""
        prompts = sum(len(ids) for ids in self.prompt_ids)
        return self.num_generations * prompts + int(self.lengths.sum())


@dataclasses.dataclass(frozen=True)
class Scored:
    """A rollout with its rewards.

    Attributes:
        rollout: P problems, B = P * G completions.
        positions: int32 [P], positions of the problems in the order of the data.
        rewards: float32 [P, G], NaN where every function abstained.
        per_function: float32 [B, number of functions], NaN where a function abstained.
    """

    rollout: Rollout
    positions: np.ndarray
    rewards: np.ndarray
    per_function: np.ndarray


def make_sampler(
    model: Transformer,
    tokenizer: Tokenizer,
    cfg: RolloutConfig,
    **options: Any,
) -> Sampler:
    """Makes a sampler from a config.

    Args:
        model: The policy.
        tokenizer: The policy's tokenizer.
        cfg: The sampling options.
        **options: `max_prompt_length`, `tools` and `replicas` of `Sampler.of`; `entropies`, for rollouts with the
            sampler's entropies; `poll` and `row_lengths` of `Engine`.
    """
    params, limits = from_section(cfg), EngineLimits.of(cfg)
    options |= {"compact": cfg.compact, "carries": cfg.carry > 0}
    return Sampler.of(model, tokenizer, params, limits, **options)


def collect(
    sampler: Sampler,
    variables: dict[str, Any],
    problems: Sequence[Problem],
    key: jax.Array,
    *,
    first_row: int = 0,
    groups: Sequence[int] | np.ndarray | None = None,
    on_text: Callable[[int, str], None] | None = None,
    **limits: Any,
) -> Rollout:
    """Samples G completions of each problem: `sampler.params.n`.

    Args:
        sampler: Samples them.
        variables: `params`, `frozen` and, under AQN, `noise`: vectors for all rows, or `RowNoise`.
        problems: The P problems.
        key: Random key; row r samples from fold_in(key, first_row + r).
        first_row: Number of rows that were sampled with the same key before.
        groups: See `Sampler.ask`.
        on_text: See `Sampler.ask`.
        **limits: See `Sampler.ask`.

    Returns:
        The P problems and their P * G completions. Rows that are left unfinished count as truncated.

    Raises:
        ValueError: If a prompt is too long, or an environment cannot be reset.
    """
    keys = [*row_keys(key, len(problems), sampler.params.n, first_row)]
    completions = sampler.ask(variables, problems, keys, groups=groups, on_text=on_text, **limits)
    done = sorted(completions, key=lambda completion: completion.row.row)
    return joined(done, sampler.params.n)


def joined(completions: Sequence[Completion], group: int) -> Rollout:
    """Returns completions as a rollout, in their order; `group` neighbours are of one problem."""
    rows, firsts = [completion.row for completion in completions], completions[::group]
    return Rollout(
        problems=tuple(first.problem for first in firsts),
        prompt_ids=tuple(first.prompt_ids for first in firsts),
        texts=tuple(completion.text for completion in completions),
        **columns(rows),
        conversations=_present(completion.conversation for completion in completions),
    )


def columns(rows: Sequence[RowTokens]) -> dict[str, Any]:
    """Returns the fields of a `Rollout` that its rows have, as a mapping by their names."""
    total = lambda entropies: float(np.sum(entropies, dtype=np.float64))
    return {
        "completion_ids": tuple(row.tokens for row in rows),
        "behaviour_logps": tuple(row.behaviour_logps for row in rows),
        "stopped": tuple(row.ended == "stop" for row in rows),
        "entropies": _present(
            None if row.entropies is None else total(row.entropies) for row in rows
        ),
        "observation_mask": _present(row.given for row in rows),
    }


def _present(values: Iterable[Any]) -> tuple[Any, ...] | None:
    """Returns the values, or None if rows have none."""
    return tuple(value for value in values if value is not None) or None


def score(
    rollout: Rollout,
    functions: Sequence[scoring.Named],
    weights: Sequence[float] | None,
    extras: Mapping[str, Any] | None = None,
    record: scoring.Record | None = None,
    hosts: Hosts = Hosts(),
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the rewards of a rollout: each function is called once, on all B rows, with TRL's arguments.

    Args:
        rollout: The completions to judge.
        functions: Names and functions, from `scoring.resolve`.
        weights: One weight per function; None means 1 each.
        extras: Further arguments of the functions.
        record: Collects the values that the functions log.
        hosts: The processes that have the rollout: the first one calls the functions, and sends the results to the
            others.

    Returns:
        The rewards combined by `grpo.combine_rewards`, float32 [P, G], NaN where every function abstained; and the
        rewards of each function, float32 [B, number of functions], NaN where it abstained.

    Raises:
        RewardError: If a function raises, or does not return one finite number or None per row.
        ValueError: If the numbers of weights and functions differ, or a column has the name of an argument.
    """
    weights = [1.0] * len(functions) if weights is None else weights
    rule = f"must be one for each of {len(functions)} functions"
    require(len(weights) == len(functions), "weights", len(weights), rule)
    per_function = hosts.told(lambda: judge(rollout, functions, extras, record))
    combined = grpo.combine_rewards(per_function, np.asarray(weights, np.float32))
    return np.asarray(combined).reshape(-1, rollout.num_generations), per_function


def judge(
    rollout: Rollout,
    functions: Sequence[scoring.Named],
    extras: Mapping[str, Any] | None = None,
    record: scoring.Record | None = None,
) -> np.ndarray:
    """Returns the rewards of each function, float32 [B, number of functions], NaN where it abstained; see `score`."""
    problems = [problem for problem in rollout.problems for _ in range(rollout.num_generations)]
    prompts, columns = collate(problems)
    talks = rollout.conversations
    if talks is None:
        completions = list(map(scoring.as_completion, prompts, rollout.texts))
    else:
        completions = [
            talk.text if isinstance(prompt, str) else list(talk.messages)
            for prompt, talk in zip(prompts, talks, strict=True)
        ]
        if talks[0].public is not None:
            columns["environments"] = [talk.snapshot for talk in talks]
    ids, rows = [ids.tolist() for ids in rollout.completion_ids], [p.row for p in problems]
    judged = (functions, prompts, completions, ids, columns, extras, record)
    return scoring.evaluate(*judged, rows=rows)
