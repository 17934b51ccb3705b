"""Samples completions of problems, and computes their rewards."""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qerl_jax.aqn.draw import RowNoise
from qerl_jax.config import RolloutConfig
from qerl_jax.data.datasets import Problem, collate
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.generation.engine import Engine
from qerl_jax.generation.fleet import Fleet, engine_of
from qerl_jax.generation.scheduler import QueuedPrompt, RowTokens
from qerl_jax.model.transformer import Transformer
from qerl_jax.rewards import scoring
from qerl_jax.rl import grpo
from qerl_jax.system.checked import require
from qerl_jax.tools import conversations
from qerl_jax.tools.conversations import Conversation, Conversations, Tools, observed


@dataclasses.dataclass(frozen=True)
class Sampler:
    """An engine and the options with which it samples completions of problems.

    Attributes:
        engine: The engine that samples from the policy, or a fleet that runs it on several devices.
        tokenizer: The policy's tokenizer.
        num_generations: G, completions per problem.
        max_prompt_length: The most tokens of a prompt; programs are compiled for it.
        max_completion_length: The most tokens of a completion.
        temperature: Sampling temperature; 0 takes the likeliest token.
        max_concurrent: Rows that are sampled at a time on each device; None means as many as the cache holds.
        tools: Tools that the policy may call; None for single-turn rows.
        hosts: The processes that sample; the first one computes rewards and runs tools.
    """

    engine: Engine | Fleet
    tokenizer: Tokenizer
    num_generations: int
    max_prompt_length: int
    max_completion_length: int
    temperature: float
    max_concurrent: int | None = None
    tools: Tools | None = None
    hosts: Hosts = Hosts()


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
        given: For each completion bool [tokens]: True for tokens of a tool's answer, which the policy did not
            sample; None if there are no tools.
        conversations: The turns and answers of each row; None if there are no tools.
    """

    problems: tuple[Problem, ...]
    prompt_ids: tuple[np.ndarray, ...]
    texts: tuple[str, ...]
    completion_ids: tuple[np.ndarray, ...]
    behaviour_logps: tuple[np.ndarray, ...]
    stopped: tuple[bool, ...]
    entropies: tuple[float, ...] | None = None
    given: tuple[np.ndarray, ...] | None = None
    conversations: tuple[Conversation, ...] | None = None

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
        if self.given is None:
            return self.lengths
        return np.array([np.count_nonzero(~given) for given in self.given], np.int32)

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


def admit(
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    overlong: str,
    tools: Tools | None = None,
    what: str = "prompts",
    log: Callable[[str], None] | None = None,
) -> Sequence[Problem]:
    """Returns the problems whose prompts fit, so that too long ones are found before training starts.

    Args:
        problems: The problems.
        tokenizer: The policy's tokenizer.
        max_prompt_length: The most tokens of a prompt.
        overlong: "error" to refuse longer prompts, or "drop" to leave them out.
        tools: Tools that prompts list; None for no tools.
        what: Name of the problems in messages.
        log: Called with a line that says how many problems are dropped.

    Raises:
        ValueError: If there is no problem, a prompt has no tokens, a prompt is longer than
            `max_prompt_length` while `overlong` is "error", or no problem is left; also see `Tools.encode`.
    """
    require(bool(problems), "problems", len(problems), "there must be at least one")
    lengths = [len(ids) for ids in encode(problems, tokenizer, tools)]
    if 0 in lengths:
        raise ValueError(
            f"prompt of problem {lengths.index(0)}: must have at least one token; got none"
        )
    longest = max(lengths)
    if longest <= max_prompt_length:
        return problems
    too_long = sum(length > max_prompt_length for length in lengths)
    require(
        overlong != "error",
        "data.max_prompt_length",
        max_prompt_length,
        f"{too_long} of {len(problems)} {what} are longer (problem {lengths.index(longest)} has "
        f'{longest} tokens): raise it, or set data.overlong_prompts = "drop"',
    )
    kept = [
        problem
        for problem, length in zip(problems, lengths, strict=True)
        if length <= max_prompt_length
    ]
    require(bool(kept), "data.max_prompt_length", max_prompt_length, "no prompt is that short")
    if log:
        log(
            f"{too_long} of {len(problems)} {what} are left out: longer than data.max_prompt_length = "
            f"{max_prompt_length}"
        )
    return kept


def begun(
    tools: Tools, problems: Sequence[Problem], tokenizer: Tokenizer, max_prompt_length: int
) -> Sequence[Problem]:
    """Returns the problems with their environment's first observation in the prompt.

    Raises:
        ValueError: If an environment cannot be reset, or a prompt is then longer than `max_prompt_length`.
    """
    return admit(
        observed(tools, problems),
        tokenizer,
        max_prompt_length=max_prompt_length,
        overlong="error",
        tools=tools,
        what="prompts with what the environment says",
    )


def make_sampler(
    model: Transformer,
    tokenizer: Tokenizer,
    cfg: RolloutConfig,
    *,
    max_prompt_length: int,
    entropies: bool = False,
    poll: Callable[[], None] | None = None,
    tools: Tools | None = None,
    replicas: Replicas = Replicas(),
    row_lengths: Sequence[int] | None = None,
) -> Sampler:
    """Makes a sampler from a config.

    Args:
        model: The policy.
        tokenizer: The policy's tokenizer.
        cfg: The sampling options.
        max_prompt_length: The most tokens of a prompt.
        entropies: Whether rollouts have the sampler's entropies.
        poll: See `Engine`.
        tools: Tools that the policy may call.
        replicas: The devices that sample.
        row_lengths: For benchmarks, see `Engine`.
    """
    engine = Engine.of(
        model,
        tokenizer,
        cfg,
        entropies=entropies,
        compact=cfg.compact,
        kv_cache_tokens=cfg.kv_cache_tokens,
        kv_cache_fraction=cfg.kv_cache_fraction,
        poll=poll,
        row_lengths=row_lengths,
    )
    return Sampler(
        engine_of(engine, replicas),
        tokenizer,
        num_generations=cfg.num_generations,
        max_prompt_length=max_prompt_length,
        max_completion_length=cfg.max_completion_length,
        temperature=cfg.temperature,
        max_concurrent=cfg.max_concurrent,
        tools=tools,
        hosts=replicas.hosts,
    )


@jax.jit
def _row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the PRNG key data of rows int32 [B], uint32 [B, 2]."""
    return jax.random.key_data(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows))


def collect(
    sampler: Sampler,
    variables: dict[str, Any],
    problems: Sequence[Problem],
    key: jax.Array,
    *,
    first_row: int = 0,
    groups: Sequence[int] | np.ndarray | None = None,
    on_text: Callable[[int, str], None] | None = None,
) -> Rollout:
    """Samples G completions of each problem.

    Each prompt is prefilled once for its G rows. A row's random numbers depend only on its own key and the token's
    position, so its samples depend neither on the rest of the batch nor on the slot in which it runs.

    Args:
        sampler: The engine, and the options of sampling.
        variables: `params`, `frozen` and, under AQN, `noise`: vectors for all rows, or `RowNoise`.
        problems: The P problems.
        key: Random key; row r samples from fold_in(key, first_row + r).
        first_row: Number of rows that were sampled with the same key before.
        groups: int [P], the numbers of the groups' noise if rows have their own; None means 0, 1, ... With
            noise per sequence each completion has its own prefill.
        on_text: Called as on_text(row, text) when a row has ended, in a separate thread, while the device
            samples the others; see `scoring.beginner`.

    Returns:
        The P problems and their P * G completions.

    Raises:
        ValueError: If a prompt is too long, or an environment cannot be reset.
    """
    talk = None
    if sampler.tools is not None:
        problems = begun(sampler.tools, problems, sampler.tokenizer, sampler.max_prompt_length)
        talk = Conversations(
            sampler.tools, sampler.tokenizer, problems, group=sampler.num_generations
        )
    prompts = encode(problems, sampler.tokenizer, sampler.tools)
    rows = np.arange(first_row, first_row + len(problems) * sampler.num_generations, dtype=np.int32)
    keys = _row_keys(key, rows)
    sampled = sampler.engine.completions(
        variables,
        _queue(
            prompts,
            np.asarray(keys).reshape(len(problems), sampler.num_generations, -1),
            sampler.max_completion_length,
            variables.get("noise"),
            np.arange(len(problems)) if groups is None else np.asarray(groups),
        ),
        sampler.temperature,
        max_prompt_length=sampler.max_prompt_length,
        max_concurrent=sampler.max_concurrent and min(len(rows), sampler.max_concurrent),
        turns=talk,
    )

    def heard(row: int, text: str) -> str:
        if on_text is not None:
            on_text(row, text)
        return text

    def decoded(completion: RowTokens, said: concurrent.futures.Future | None) -> str:
        if said is None:
            return heard(completion.row, sampler.tokenizer.decode(completion.tokens))
        return heard(completion.row, said.result().text)

    done, texts, said, talks = [], {}, {}, {}
    # If sampling fails, rows are abandoned before the thread is joined, because it waits for rows to end.
    with concurrent.futures.ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as failed:
        if talk is not None:
            failed.callback(talk.abandon)
        for each in sampled:
            done.append(each)
            if talk is not None and each.is_own:
                said[each.row] = talk.ended(each.row, each.tokens)
            if talk is None or each.is_own:
                texts[each.row] = thread.submit(decoded, each, said.get(each.row))
        if talk is not None:
            talks = _exchanged(sampler.hosts, said)
            of_others = sorted(talks.keys() - texts.keys())
            texts |= {row: thread.submit(heard, row, talks[row].text) for row in of_others}
        failed.pop_all()
    done.sort(key=lambda each: each.row)
    return Rollout(
        problems=tuple(problems),
        prompt_ids=prompts,
        texts=tuple(texts[each.row].result() for each in done),
        completion_ids=tuple(each.tokens for each in done),
        behaviour_logps=tuple(each.behaviour_logps for each in done),
        stopped=tuple(each.ended == "stop" for each in done),
        entropies=_entropies(done),
        given=None if talk is None else tuple(each.given for each in done),
        conversations=None if talk is None else tuple(talks[each.row] for each in done),
    )


def _exchanged(
    hosts: Hosts, said: Mapping[int, concurrent.futures.Future]
) -> dict[int, Conversation]:
    """Sends the conversations of this host's rows to the other hosts, and returns those of all rows."""
    own = {row: conversation.result() for row, conversation in said.items()}
    return {row: talk for found in hosts.gathered(own) for row, talk in found.items()}


def _queue(
    prompts: Sequence[np.ndarray], keys: np.ndarray, limit: int, noise: Any, groups: np.ndarray
) -> list[QueuedPrompt]:
    """Makes the engine's queue: prompts with the keys [P, G, ...] of their completions, and numbers of row noise."""
    if not isinstance(noise, RowNoise):
        return [QueuedPrompt(ids, each, limit) for ids, each in zip(prompts, keys, strict=True)]
    queue = [
        QueuedPrompt(ids, each, limit, numbers)
        for ids, each, numbers in zip(
            prompts, keys, noise.numbers(groups, keys.shape[1]), strict=True
        )
    ]
    if noise.per != "sequence":
        return queue
    # With noise per sequence the keys and values of the prompt differ between completions, too.
    return [
        QueuedPrompt(each.tokens, key[None], limit, number[None])
        for each in queue
        for key, number in zip(each.keys, each.noise, strict=True)
    ]


def _entropies(completions: Sequence[RowTokens]) -> tuple[float, ...] | None:
    """Returns the sum of each completion's entropies; None if they were not asked for."""
    if completions[0].entropies is None:
        return None
    return tuple(float(np.sum(each.entropies, dtype=np.float64)) for each in completions)


def encode(
    problems: Sequence[Problem], tokenizer: Tokenizer, tools: Tools | None = None
) -> tuple[np.ndarray, ...]:
    """Returns the tokens of each problem's prompt, int32 [tokens], which lists the tools if there are any."""
    ids = conversations.encode(problems, tokenizer, tools)
    return tuple(np.array(each, np.int32) for each in ids)


def score(
    rollout: Rollout,
    functions: Sequence[scoring.Named],
    weights: Sequence[float] | None,
    extras: Mapping[str, Any] | None = None,
    record: scoring.Record | None = None,
    hosts: Hosts = Hosts(),
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the rewards of a rollout: each function is called once, on all B rows, with TRL's arguments.

    Prompts and columns come from the problems, each repeated for its G rows. `grpo.combine_rewards` combines the
    functions' rewards of a row.

    Args:
        rollout: The completions to judge.
        functions: Names and functions, from `scoring.resolve`.
        weights: One weight per function; None means 1 each.
        extras: Further arguments of the functions.
        record: Collects the values that the functions log.
        hosts: The processes that have the rollout: the first one calls the functions, and sends the results to the
            others.

    Returns:
        The combined rewards, float32 [P, G], NaN where every function abstained; and the rewards of each
        function, float32 [B, number of functions], NaN where it abstained.

    Raises:
        RewardError: If a function raises, or does not return one finite number or None per row.
        ValueError: If the numbers of weights and functions differ, or a column has the name of an argument.
    """
    weights = [1.0] * len(functions) if weights is None else weights
    require(
        len(weights) == len(functions),
        "weights",
        len(weights),
        f"must be one for each of {len(functions)} functions",
    )
    group = rollout.num_generations
    prompts, columns = collate([problem for problem in rollout.problems for _ in range(group)])
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
    per_function = hosts.told(
        lambda: scoring.evaluate(
            functions,
            prompts,
            completions,
            [ids.tolist() for ids in rollout.completion_ids],
            columns,
            extras,
            record,
            rows=[problem.row for problem in rollout.problems for _ in range(group)],
        )
    )
    combined = grpo.combine_rewards(per_function, np.asarray(weights, np.float32))
    return np.asarray(combined).reshape(-1, group), per_function
