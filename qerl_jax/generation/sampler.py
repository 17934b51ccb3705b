"""Samples completions of problems: rollouts, evaluations and `Policy` all ask here.

sampler = Sampler.of(model, tokenizer, SamplingParams(n=4, max_tokens=100))
keys = row_keys(jax.random.key(0), len(problems), 4)
for completion in sampler.ask(variables, problems, keys):
    print(completion.problem.prompt, completion.text)
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from qerl_jax.aqn.draw import RowNoise
from qerl_jax.data.datasets import Problem
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.generation.engine import Engine
from qerl_jax.generation.fleet import Fleet, engine_of
from qerl_jax.generation.prompts import encode, with_observations
from qerl_jax.generation.sampling_params import EngineLimits, SamplingParams
from qerl_jax.generation.scheduler import QueuedPrompt, RowTokens, power_of_two
from qerl_jax.generation.stop_strings import StopStrings, text_before, with_stop_tokens
from qerl_jax.model.transformer import Transformer
from qerl_jax.tools.conversations import Conversation, Conversations, Tools, observed


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """A completion that has ended.

    Attributes:
        row: Its tokens; `row.row` is its index among all completions of the call, in which those of a problem are
            neighbours.
        problem: Its problem; with an environment, the prompt has the first observation.
        prompt_ids: int32 [tokens], the prompt as the policy saw it.
        pending_text: Future of `text`.
        pending_conversation: Future of `conversation`; None without tools.
    """

    row: RowTokens
    problem: Problem
    prompt_ids: np.ndarray
    pending_text: concurrent.futures.Future[str]
    pending_conversation: concurrent.futures.Future[Conversation] | None = None

    @property
    def text(self) -> str:
        """The text without special tokens, with the stop string that ended it; with tools, that of the last turn."""
        return self.pending_text.result()

    @property
    def conversation(self) -> Conversation | None:
        """All turns; None without tools."""
        return self.pending_conversation and self.pending_conversation.result()


@dataclasses.dataclass(frozen=True)
class Sampler:
    """An engine and the options with which it samples completions of problems.

    Attributes:
        engine: The engine that samples from the policy, or a fleet that runs it on several devices.
        tokenizer: The policy's tokenizer.
        params: Number and length of completions, and how they are sampled. Of its fields the engine has those that
            are compiled and those that end a row; `n`, `max_tokens`, `temperature`, `stop` and `stop_token_ids` are
            used here.
        max_prompt_length: The most tokens of a prompt; programs are compiled for it. None rounds lengths and numbers
            of rows up to powers of two, so that other prompts, or another number of them, rarely need a new program.
        max_concurrent: Rows that are sampled at a time on each device; None means what `Demand.slots` chooses.
        context: Positions that the model was made for, at which a completion ends; None for any number.
        tools: Tools that the policy may call; None for single-turn rows.
        hosts: The processes that sample; the first one computes rewards and runs tools.
        window: The window of the policy's attention, which no row may exceed; None for full attention.
        prompts: The number of prompts for which programs are compiled; None means that of a call.
    """

    engine: Engine | Fleet
    tokenizer: Tokenizer
    params: SamplingParams
    max_prompt_length: int | None = None
    max_concurrent: int | None = None
    context: int | None = None
    tools: Tools | None = None
    hosts: Hosts = Hosts()
    window: int | None = None
    prompts: int | None = None

    @classmethod
    def of(
        cls,
        model: Transformer,
        tokenizer: Tokenizer,
        params: SamplingParams,
        limits: EngineLimits = EngineLimits(),
        *,
        max_prompt_length: int | None = None,
        tools: Tools | None = None,
        replicas: Replicas = Replicas(),
        prompts: int | None = None,
        **options: Any,
    ) -> Self:
        """Makes a sampler with an engine of its own.

        Args:
            model: The policy.
            tokenizer: The policy's tokenizer.
            params: How completions are sampled.
            limits: How many rows are sampled at a time, and the capacity of the cache.
            max_prompt_length: See the attributes of the class.
            tools: Tools that the policy may call.
            replicas: The devices that sample.
            prompts: See the attributes of the class.
            **options: `chunk` and `entropies` of `Engine.of`, and `compact`, `poll`, `free` and `early` of `Engine`.
        """
        params = with_stop_tokens(params, tokenizer)
        options |= {
            name: getattr(limits, name) for name in ("kv_cache_tokens", "kv_cache_fraction")
        }
        engine = engine_of(Engine.of(model, tokenizer, params, **options), replicas)
        shapes = max_prompt_length, limits.max_concurrent, model.arch.context
        others = tools, replicas.hosts, model.arch.window, prompts
        return cls(engine, tokenizer, params, *shapes, *others)

    def ask(
        self,
        variables: dict[str, Any],
        problems: Sequence[Problem],
        keys: Sequence[np.ndarray],
        *,
        groups: Sequence[int] | np.ndarray | None = None,
        begun: Sequence[RowTokens | None] | None = None,
        on_text: Callable[[int, str], None] | None = None,
        **limits: Any,
    ) -> Iterator[Completion]:
        """Samples completions of problems, and yields each when it has ended.

        Each prompt is prefilled once for its completions. A row's random numbers depend only on its own key and the
        token's position, so its samples depend neither on the rest of the batch nor on the slot in which it runs.

        Args:
            variables: `params`, `frozen` and, under AQN, `noise`: vectors for all rows, or `RowNoise`.
            problems: At least one problem.
            keys: For each problem, the key data of its completions, uint32 [completions, ...]; see `row_keys`.
            groups: int [P], the numbers of the groups' noise if rows have their own; None means 0, 1, ... With
                noise per sequence each completion has its own prefill.
            begun: For each problem what an earlier call has sampled of its only completion, or None; problems with
                such a completion come first.
            on_text: Called as on_text(row, text) when a row has ended, in a separate thread, while the device
                samples the others; see `scoring.beginner`.
            **limits: `rows` (if these are the rest of a job), `num_prompts` and, without tools, `leave` of
                `Engine.schedules`.

        Returns:
            An iterator over completions, in the order in which they end; rows that are left come last, and have not
            ended. Those of other hosts come last if there are tools. If the iterator is closed or fails, the
            conversations of rows that have not ended are abandoned.

        Raises:
            ValueError: At the call, if a prompt is empty or too long, or an environment cannot be reset.
        """
        noise = variables.get("noise")
        row_problems, queue, shapes = self._prepared(noise, problems, keys, groups, **limits)
        if begun is not None:
            rows = zip(queue, begun, strict=True)
            queue = [dataclasses.replace(prompt, begun=row) for prompt, row in rows]
        conversations = None
        if self.tools is not None:
            of_rows = [problem for problem, _ in row_problems]
            conversations = Conversations(self.tools, self.tokenizer, of_rows)
        ended = self.engine.completions(
            variables, queue, self.params.temperature, turns=conversations, **shapes
        )
        return self._completed(ended, row_problems, conversations, on_text)

    def stream(self, variables: dict[str, Any], problem: Problem, key: np.ndarray) -> Iterator[str]:
        """Yields the text of one completion in pieces, as it is sampled, up to its stop string; without tools.

        `key` is the key data of the completion, uint32 [...]. See `ask` for the variables and errors.
        """
        _, queue, shapes = self._prepared(variables.get("noise"), [problem], [key[None]])
        tokens, shown = [], ""
        stops = StopStrings(tuple(self.params.stop), self.tokenizer.decode)
        for (piece,) in self.engine.stream(variables, queue, self.params.temperature, **shapes):
            tokens += piece.tokens.tolist()
            text = self.tokenizer.decode(tokens)
            if piece.ended:
                text = text_before(text, tokens, self.params, self.tokenizer.decode)
            else:  # the next token may complete a character or a stop string
                text = stops.settled(text.rstrip("\ufffd"))
            if len(text) > len(shown):
                yield text[len(shown) :]
                shown = text

    def _prepared(
        self,
        noise: Any,
        problems: Sequence[Problem],
        keys: Sequence[np.ndarray],
        groups: Sequence[int] | np.ndarray | None = None,
        **limits: Any,
    ) -> tuple[list[tuple[Problem, np.ndarray]], list[QueuedPrompt], dict[str, Any]]:
        """Returns the problem and the prompt of each row, the engine's queue, and its arguments that choose shapes."""
        width = self.max_prompt_length
        if self.tools is not None and width is None:
            problems = observed(self.tools, problems)
        elif self.tools is not None:
            problems = with_observations(self.tools, problems, self.tokenizer, width)
        prompts = encode(problems, self.tokenizer, self.tools)
        most = [self._limit(index, len(ids)) for index, ids in enumerate(prompts)]
        queue = [QueuedPrompt(*row) for row in zip(prompts, keys, most, strict=True)]
        if isinstance(noise, RowNoise):
            groups = np.arange(len(problems)) if groups is None else np.asarray(groups)
            queue = _with_noise(queue, noise, groups)
        pairs = zip(zip(problems, prompts, strict=True), keys, strict=True)
        row_problems = [pair for pair, of_rows in pairs for _ in of_rows]
        rows, shapes = limits.get("rows") or len(row_problems), limits
        if width is None:
            width, rows = power_of_two(max(map(len, prompts))), power_of_two(rows)
            shapes["rows"] = rows
        elif self.prompts is not None:
            rows = max(rows, self.prompts * self.params.n)
            shapes = {"rows": rows, "num_prompts": rows // len(queue[0].keys)} | limits
        slots = self.max_concurrent and min(rows, self.max_concurrent)
        return row_problems, queue, shapes | {"max_prompt_length": width, "max_concurrent": slots}

    def _limit(self, index: int, prompt: int) -> int:
        """Returns how many tokens may follow a prompt: `max_tokens`, or what the model's context leaves."""
        longest = prompt + self.params.max_tokens
        if self.window is not None and longest > self.window:
            rule = f"only full attention is supported, in rows up to sliding_window = {self.window}"
            raise ValueError(f"prompt {index}: got {longest} tokens with max_tokens; {rule}")
        context = self.context or math.inf
        if prompt >= context:
            raise ValueError(
                f"prompt {index}: got {prompt} tokens; the model was made for {context} (max_position_embeddings)"
            )
        return min(self.params.max_tokens, context - prompt)

    def _completed(
        self,
        rows: Iterator[RowTokens],
        row_problems: Sequence[tuple[Problem, np.ndarray]],
        conversations: Conversations | None,
        on_text: Callable[[int, str], None] | None,
    ) -> Iterator[Completion]:
        futures: dict[int, concurrent.futures.Future[Conversation]] = {}
        of_others: list[RowTokens] = []

        def text_of(row: RowTokens) -> str:
            talk = futures.get(row.row)
            text = talk.result().text if talk else self.tokenizer.decode(row.tokens)
            if on_text is not None and row.ended:
                on_text(row.row, text)
            return text

        def completion(row: RowTokens) -> Completion:
            text = thread.submit(text_of, row)
            return Completion(row, *row_problems[row.row], text, futures.get(row.row))

        # If sampling fails, rows are abandoned before the thread is joined, because it waits for rows to end.
        with concurrent.futures.ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as failed:
            if conversations is not None:
                failed.callback(conversations.abandon)
            for row in rows:
                if conversations is not None and not row.is_own:
                    of_others.append(row)
                    continue
                if conversations is not None:
                    futures[row.row] = conversations.ended(row.row, row.tokens)
                yield completion(row)
            if conversations is not None:
                futures |= _exchanged(self.hosts, futures)
                yield from map(completion, sorted(of_others, key=lambda row: row.row))
            failed.pop_all()


def row_keys(key: jax.Array, problems: int, n: int, first_row: int = 0) -> np.ndarray:
    """Returns the key data of P * n rows, uint32 [P, n, ...]: that of row r is of fold_in(key, first_row + r)."""
    rows = np.arange(first_row, first_row + problems * n, dtype=np.int32)
    return np.asarray(_row_keys(key, rows)).reshape(problems, n, -1)


@jax.jit
def _row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    return jax.random.key_data(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows))


def _exchanged(
    hosts: Hosts, futures: Mapping[int, concurrent.futures.Future[Conversation]]
) -> dict[int, concurrent.futures.Future[Conversation]]:
    """Sends the conversations of this host's rows to the other hosts, and returns those of their rows."""
    done = {row: future.result() for row, future in futures.items()}
    others: dict[int, concurrent.futures.Future[Conversation]] = {}
    for row, conversation in itertools.chain(*map(dict.items, hosts.gathered(done))):
        if row not in done:
            others[row] = concurrent.futures.Future()
            others[row].set_result(conversation)
    return others


def _with_noise(
    queue: Sequence[QueuedPrompt], noise: RowNoise, groups: np.ndarray
) -> list[QueuedPrompt]:
    """Returns the engine's queue with the numbers of row noise."""
    pairs = zip(queue, noise.numbers(groups, len(queue[0].keys)), strict=True)
    if noise.per != "sequence":
        return [dataclasses.replace(prompt, noise=numbers) for prompt, numbers in pairs]
    # With noise per sequence the keys and values of the prompt differ between completions, too.
    return [
        QueuedPrompt(prompt.tokens, key[None], prompt.limit, number[None])
        for prompt, numbers in pairs
        for key, number in zip(prompt.keys, numbers, strict=True)
    ]
