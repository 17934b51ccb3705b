"""Text generation with a policy, for notebooks and the command line.

generator = Generator.load("Qwen/Qwen2.5-7B-Instruct", adapter="runs/mine/adapter")
texts = generator(["What is 12 + 30?", "And 7 * 8?"], temperature=0.0)
for chunk in generator.stream("Tell me a story.", max_tokens=500):
    print(chunk, end="")
"""

import contextlib
import dataclasses
import itertools
import math
import numbers
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import jax
import numpy as np

from pallas_kernels import runtime
from qerl_jax.checkpoint.policy import ALONE, PolicySource, find_policy, load_policy
from qerl_jax.config import Dtype, MeshConfig, ToolsConfig, Weights
from qerl_jax.data.datasets import Problem
from qerl_jax.data.tokenizer import Prompt, Tokenizer
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.generation import scheduler
from qerl_jax.generation.engine import Engine
from qerl_jax.generation.fleet import Fleet, engine_of
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.generation.stop_strings import StopStrings
from qerl_jax.model import fused_decode
from qerl_jax.model.transformer import Transformer
from qerl_jax.system.checked import require
from qerl_jax.tools.conversations import (
    Conversation,
    Conversations,
    Tools,
    encode,
    observed,
)
from qerl_jax.tools.environments import Toolboxes

# Tokens of a chunk in `Generator.stream`, which appear at once.
_STREAMED_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Completion:
    """One completion.

    Attributes:
        text: The text without special tokens, and without the stop string that ended it.
        tokens: int32 [n], including the stop token or the token that completed a stop string.
        behaviour_logps: float32 [n], their log-probabilities in nats, at the sampling temperature.
        finish_reason: "stop", or "length" if the completion was truncated.
        prompt_tokens: int32 [tokens], the prompt as the model saw it.
        given: bool [n], marks tokens of a tool's answer, whose log-probabilities are 0; None without tools.
        conversation: All turns; `text` is the last one. None without tools.
    """

    text: str
    tokens: np.ndarray
    behaviour_logps: np.ndarray
    finish_reason: Literal["stop", "length"]
    prompt_tokens: np.ndarray
    given: np.ndarray | None = None
    conversation: Conversation | None = None


@dataclasses.dataclass(frozen=True)
class Generator:
    """Samples texts from a policy.

    A prompt is a text or a list of chat messages. Options are the fields of `SamplingParams`.

    Attributes:
        model: The policy.
        variables: Variables of the model: `frozen` and, with an adapter, `params`.
        tokenizer: Tokenizer of the policy.
        max_concurrent: Rows sampled at a time by each replica.
        kv_cache_tokens: Capacity for keys and values, in tokens; rows wait while it is full. None means what
            `max_concurrent` rows can need, or what fits in the device's memory.
        kv_cache_fraction: That capacity as a fraction of the free device memory; give at most one of the two.
        tools: Tools that the policy may call; None for single-turn completions.
        replicas: The devices that hold the variables.
        apply_chat_template: Whether a text is a message of the user; else the policy continues it as it is, as it
            does if its tokenizer has no chat template.
    """

    model: Transformer
    variables: dict[str, Any]
    tokenizer: Tokenizer
    max_concurrent: int = 64
    kv_cache_tokens: int | None = None
    kv_cache_fraction: float | None = None
    tools: Tools | None = None
    replicas: Replicas = Replicas()
    apply_chat_template: bool = True

    @classmethod
    def load(
        cls,
        model: str | None = None,
        adapter: str | pathlib.Path | None = None,
        *,
        weights: Weights | None = None,
        dtype: Dtype | None = None,
        **limits: Any,
    ) -> Self:
        """Loads a base model and an adapter.

        Args:
            model: Local folder or hub name; absent means the adapter's base, or the one in the package.
            adapter: A PEFT folder, or a run folder, whose adapter is used.
            weights: Storage format of the linears; absent means that of the adapter's run, else "nvfp4".
            dtype: Data type of the activations; absent means that of the run, else "bfloat16".
            **limits: `max_concurrent`, `kv_cache_tokens` and `kv_cache_fraction` of the generator.

        Raises:
            ConfigError: For invalid limits; see `check_limits`.
            FileNotFoundError: If `adapter` is neither of these folders.
        """
        return cls.of(find_policy(model, adapter, weights=weights, dtype=dtype), **limits)

    @classmethod
    def of(
        cls,
        source: PolicySource,
        tools: ToolsConfig | None = None,
        log: Callable[[str], None] = lambda text: None,
        *,
        mesh: MeshConfig = ALONE,
        rows: int = 1,
        quiet: bool = True,
        **limits: Any,
    ) -> Self:
        """Loads the policy that a source names.

        Args:
            source: Base and adapter.
            tools: Tools that the policy may call.
            log: Called with a message if sampling is slower than it could be on this GPU; also see `Tools.of`.
            mesh: See `load_policy`.
            rows: See `load_policy`.
            quiet: See `load_policy`.
            **limits: See `load`.
        """
        check_limits(limits)  # before minutes of reading
        boxes = None if tools is None else Toolboxes(tools)
        runtime.use_compilation_cache()
        policy = load_policy(source, mesh=mesh, rows=rows, quiet=quiet)
        applies = source.apply_chat_template and bool(policy.tokenizer.chat_template)
        held = {"replicas": policy.replicas, "apply_chat_template": applies}
        made = cls(policy.model, policy.variables, policy.tokenizer, **limits, **held)
        if slow := made.slow_because:
            log(slow)
        if boxes is None:
            return made
        return dataclasses.replace(made, tools=Tools.of(tools, policy.tokenizer, boxes, log))

    @property
    def slow_because(self) -> str | None:
        """The reason why this GPU samples more slowly than it could, and the remedy; None if there is none."""
        return fused_decode.slow_because(self.model.own_part, int(self.max_concurrent))

    def as_asked(self, prompt: Prompt) -> Prompt:
        """Returns a prompt as the policy gets it: a text as a message of the user, if these pass the chat template."""
        is_message = self.apply_chat_template and isinstance(prompt, str)
        return ({"role": "user", "content": prompt},) if is_message else prompt

    def __call__(self, prompts: Sequence[Prompt], **options: Any) -> list[str]:
        """Returns the texts of `completions`; see there for arguments and errors."""
        return [completion.text for completion in self.completions(prompts, **options)]

    def completions(
        self,
        prompts: Sequence[Prompt],
        *,
        columns: Sequence[Mapping[str, Any]] | None = None,
        first_row: int = 0,
        **options: Any,
    ) -> Iterator[Completion]:
        """Samples completions, and yields them in the order of the prompts, n per prompt, each as soon as possible.

        Errors in prompts or options are raised at the call.

        Args:
            prompts: Texts or chats.
            columns: For each prompt the columns with which its environment is reset; only for generators with tools.
            first_row: Number of completions to skip. The others are the same as without skipping, except for
                rounding if fewer prompts are prefilled together.
            **options: Fields of `SamplingParams`.

        Returns:
            An iterator over completions.

        Raises:
            ConfigError: For invalid prompts, columns or options.
            ValueError: For a prompt that is empty, or too long for the context.
        """
        alone = isinstance(prompts, str) or any(isinstance(prompt, Mapping) for prompt in prompts)
        require(not alone, "prompts", prompts, "must be a list of texts or of chats")
        params = SamplingParams(**options)
        if not len(prompts):
            return iter(())
        require(
            columns is None or (self.tools is not None and len(columns) == len(prompts)),
            "columns",
            columns,
            f"must be one for each of {len(prompts)} prompts, and go with tools",
        )
        engine, asked = self._ask(prompts, params, columns=columns, first_row=first_row)
        stops = StopStrings(tuple(params.stop), self.tokenizer.decode)
        owners = [prompt.tokens for prompt in asked["prompts"] for _ in prompt.keys]
        return self._in_order(engine.completions(**asked), owners, stops, asked["turns"])

    def _in_order(
        self,
        rows: Iterator[scheduler.RowTokens],
        prompts: Sequence[np.ndarray],
        stops: StopStrings,
        talk: Conversations | None,
    ) -> Iterator[Completion]:
        done, given = {}, 0
        with contextlib.ExitStack() as failed:
            if talk is not None:
                failed.callback(talk.abandon)
            for row in rows:
                said = None if talk is None else talk.ended(row.row, row.tokens).result()
                text = self.tokenizer.decode(row.tokens) if said is None else said.text
                done[row.row] = Completion(
                    stops.before(text),
                    row.tokens,
                    row.behaviour_logps,
                    row.ended,
                    prompts[row.row],
                    row.given,
                    said,
                )
                while given in done:
                    yield done.pop(given)
                    given += 1
            failed.pop_all()

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """Yields the text of one completion in chunks, as it is sampled.

        Args:
            prompt: A text or a chat.
            **options: Fields of `SamplingParams`.

        Raises:
            ConfigError: For invalid options, n > 1, or a generator with tools.
            ValueError: For a prompt that is empty, or too long for the context.
        """
        params = SamplingParams(**options)
        rule = "a stream calls no tools: use completions, or a generator without tools"
        require(self.tools is None, "tools", self.tools, rule)
        require(params.n == 1, "n", params.n, "a stream gives one completion")
        engine, asked = self._ask([prompt], params, chunk=_STREAMED_TOKENS)
        stops = StopStrings(tuple(params.stop), self.tokenizer.decode)
        tokens, shown = [], ""
        for (piece,) in engine.stream(**asked):
            tokens += piece.tokens.tolist()
            text = self.tokenizer.decode(tokens)
            # The next token may complete a character or a stop string, so such an end is held back.
            text = stops.before(text) if piece.ended else stops.settled(text.rstrip("\ufffd"))
            if len(text) > len(shown):
                yield text[len(shown) :]
                shown = text

    def _ask(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        chunk: int = 32,
        columns: Sequence[Mapping[str, Any]] | None = None,
        first_row: int = 0,
    ) -> tuple[Engine | Fleet, dict[str, Any]]:
        """Returns the engine, and the arguments for its `stream` and `completions`."""
        engine = Engine.of(
            self.model,
            self.tokenizer,
            params,
            chunk=chunk,
            kv_cache_tokens=self.kv_cache_tokens,
            kv_cache_fraction=self.kv_cache_fraction,
        )
        problems = [
            Problem(self.as_asked(each), row)
            for each, row in zip(prompts, columns or [{}] * len(prompts), strict=True)
        ]
        talk = None
        if self.tools is not None:
            problems = observed(self.tools, problems)
            talk = Conversations(self.tools, self.tokenizer, problems, params.n, first_row)
        tokens = encode(problems, self.tokenizer, self.tools)
        queue = [
            scheduler.QueuedPrompt(
                np.array(ids, np.int32), keys, self._limit(place, len(ids), params)
            )
            for place, (ids, keys) in enumerate(
                zip(tokens, _keys(params, len(prompts)), strict=True)
            )
        ]
        # Powers of two, so that other prompts, or another number of them, rarely need a new compilation.
        most = 1 << (len(prompts) * params.n - 1).bit_length()
        return engine_of(engine, self.replicas), {
            "variables": self.variables,
            "prompts": _from(first_row, queue),
            "temperature": params.temperature,
            "max_prompt_length": 1 << (max(map(len, tokens)) - 1).bit_length(),
            "max_concurrent": min(int(self.max_concurrent), most),
            "turns": talk,
        }

    def _limit(self, place: int, prompt: int, params: SamplingParams) -> int:
        """Returns how many tokens may follow a prompt: `max_tokens`, or what the model's context leaves."""
        context = self.model.arch.context or math.inf
        if prompt >= context:
            raise ValueError(
                f"prompt {place}: got {prompt} tokens; the model was made for {context} (max_position_embeddings)"
            )
        return min(params.max_tokens, context - prompt)


def check_limits(limits: dict[str, Any]) -> None:
    """Checks the limits of a generator.

    Args:
        limits: Any of `max_concurrent`, `kv_cache_tokens` and `kv_cache_fraction`.

    Raises:
        ConfigError: For an invalid limit, with its name.
    """
    tokens, fraction = limits.get("kv_cache_tokens"), limits.get("kv_cache_fraction")
    counts = lambda value: isinstance(value, numbers.Integral) and value >= 1
    is_share = isinstance(fraction, numbers.Real) and 0 < fraction < 1
    whole = "must be at least 1, and a whole number"
    for name, holds, rule in (
        ("max_concurrent", counts(limits.get("max_concurrent", 1)), whole),
        ("kv_cache_tokens", tokens is None or counts(tokens), whole),
        ("kv_cache_fraction", fraction is None or is_share, "must be in (0, 1)"),
        ("kv_cache_fraction", None in (tokens, fraction), "must be absent beside kv_cache_tokens"),
        (
            "kv_cache_fraction",
            fraction is None or runtime.memory_stats() is not None,
            "this device does not report its memory: give kv_cache_tokens",
        ),
    ):
        require(holds, name, limits.get(name), rule)


def _from(row: int, queue: list[scheduler.QueuedPrompt]) -> list[scheduler.QueuedPrompt]:
    """Returns the queue without its first `row` rows."""
    firsts = itertools.accumulate((len(prompt.keys) for prompt in queue), initial=0)
    return [
        dataclasses.replace(prompt, keys=prompt.keys[max(0, row - first) :])
        for first, prompt in zip(firsts, queue, strict=False)
        if row - first < len(prompt.keys)
    ]


def _keys(params: SamplingParams, prompts: int) -> np.ndarray:
    """Returns key data uint32 [P, n, ...].

    With one seed, rows are numbered through all prompts; with a seed per prompt, from 0 for each prompt.
    """
    if np.ndim(params.seed) == 0:
        seeds, rows = [params.seed], np.arange(prompts * params.n)[None]
    else:
        seeds, rows = params.seed, np.tile(np.arange(params.n), (prompts, 1))
        require(
            len(seeds) == prompts,
            "seed",
            len(seeds),
            f"must be one, or one for each of {prompts=}",
        )
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = [fold_in(jax.random.key(seed), row) for seed, row in zip(seeds, rows, strict=True)]
    return np.concatenate([jax.random.key_data(each) for each in keys]).reshape(
        prompts, params.n, -1
    )
