"""A policy to talk to, for notebooks and the command line.

generator = Generator.load("Qwen/Qwen2.5-7B-Instruct", adapter="runs/mine/adapter")
texts = generator(["What is 12 + 30?", "And 7 * 8?"], temperature=0.0)
for piece in generator.stream("Tell me a story.", max_tokens=500):
    print(piece, end="")
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from pallas_kernels import runtime
from qerl_jax import config
from qerl_jax.checkpoint.policy import PolicySource, load_policy
from qerl_jax.config import Dtype, Weights
from qerl_jax.data.tokenizer import Prompt, Tokenizer
from qerl_jax.generation.engine import Engine
from qerl_jax.generation.sampling import Truncation
from qerl_jax.generation.scheduler import Piece
from qerl_jax.generation.scheduler import Prompt as Queued
from qerl_jax.generation.stop_strings import StopStrings
from qerl_jax.model.transformer import Transformer

# What a reader sees appear at once.
_STREAMED_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How completions are sampled, by vLLM's names.

    Attributes:
        n: Completions per prompt.
        max_tokens: Longest completion; it ends where the model's context does, too.
        temperature: 0 is greedy.
        top_k: Keep the k likeliest tokens; 0 is off.
        top_p: Keep the likeliest tokens up to this mass; 1 is off.
        min_p: Drop tokens below this fraction of the likeliest one's probability; 0 is off.
        repetition_penalty: Divides positive scores of tokens that were there before, and multiplies
            negative ones; 1 is off.
        stop: Texts before which a completion ends; they are not part of it.
        ignore_eos: Go on after the end token.
        seed: Of the samples; or one for each prompt, which then draws the same in any company (a
            batch of another size rounds otherwise, which now and then tips a draw). Less than 2^32.
    """

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    seed: int | Sequence[int] = 0

    def __post_init__(self):
        for name, good, rule in (
            ("n", self.n >= 1, "must be at least 1"),
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("temperature", self.temperature >= 0, "must not be negative"),
            ("top_k", self.top_k >= 0, "must not be negative (0 is off)"),
            ("top_p", 0 < self.top_p <= 1, "must be in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "must be in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "must be positive (1 is off)"),
            (
                "stop",
                not isinstance(self.stop, str) and all(self.stop),
                "must be texts, none empty",
            ),
            (
                "seed",
                # JAX's keys keep only the low 32 bits.
                all(isinstance(s, numbers.Integral) and 0 <= s < 2**32 for s in self.seeds),
                "must be an integer in [0, 2**32), or one for each prompt",
            ),
        ):
            if not good:
                raise ValueError(f"{name}: got {getattr(self, name)!r}; {rule}")

    @property
    def seeds(self) -> Sequence[int]:
        """The one seed, or each prompt's."""
        return self.seed if isinstance(self.seed, Sequence | np.ndarray) else [self.seed]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One completion.

    Attributes:
        text: Without special tokens, and without the stop string that ended it.
        tokens: int32 [n], to the stop token or the token that completed a stop string.
        logps: float32 [n], their log-probabilities.
        finish_reason: "stop", or "length" where it was cut.
    """

    text: str
    tokens: np.ndarray
    logps: np.ndarray
    finish_reason: Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Generator:
    """Samples texts from a policy.

    A prompt is a user's message, or a list of chat messages. Options are those of `Sampling`.

    Attributes:
        model: The policy.
        variables: Its `frozen` and, with an adapter, `params`.
        tokenizer: Of the policy.
        max_concurrent: Rows sampled at a time.
        kv_cache_tokens: Room for keys and values, in tokens; rows wait while there is none. None means
            what `max_concurrent` rows can need, or what the device has.
        kv_cache_fraction: The same as a fraction of the device memory that is free; give one of the two.
    """

    model: Transformer
    variables: dict[str, Any]
    tokenizer: Tokenizer
    max_concurrent: int = 64
    kv_cache_tokens: int | None = None
    kv_cache_fraction: float | None = None

    @classmethod
    def load(
        cls,
        model: str = "qerl-tiny",
        adapter: str | pathlib.Path | None = None,
        *,
        weights: Weights = "nvfp4",
        dtype: Dtype = "bfloat16",
        max_concurrent: int = 64,
        kv_cache_tokens: int | None = None,
        kv_cache_fraction: float | None = None,
    ) -> Generator:
        """Reads a base and an adapter.

        Args:
            model: Local folder or hub name; "qerl-tiny" ships with the package.
            adapter: A PEFT folder, such as a run's `adapter`.
            weights: How the linears are held.
            dtype: Of the activations.
            max_concurrent: Rows sampled at a time.
            kv_cache_tokens: Room for keys and values, see `Generator`.
            kv_cache_fraction: Likewise.
        """
        limits = {
            "max_concurrent": max_concurrent,
            "kv_cache_tokens": kv_cache_tokens,
            "kv_cache_fraction": kv_cache_fraction,
        }
        _require(limits)  # before minutes of reading
        runtime.use_compilation_cache()
        table = {"model_name_or_path": model, "weights": weights, "dtype": dtype}
        cfg = config.from_table(config.ModelConfig, table, "model.")
        policy = load_policy(PolicySource(cfg, None if adapter is None else pathlib.Path(adapter)))
        return cls(policy.model, policy.variables, policy.tokenizer, **limits)

    def __call__(self, prompts: Sequence[Prompt], **options: Any) -> list[str]:
        """Texts, the n of a prompt in a row."""
        return [completion.text for completion in self.completions(prompts, **options)]

    def completions(
        self, prompts: Sequence[Prompt], *, first_row: int = 0, **options: Any
    ) -> Iterator[Completion]:
        """Completions in the order of the prompts, the n of each in a row, each as soon as it can be given.

        What is wrong with prompts or options is said at the call.

        Args:
            prompts: Texts or chats.
            first_row: The first completion that is wanted, where those before it are known. The others are what
                they would have been with them, but for roundings where fewer prompts are prefilled at a time.
            **options: Of `Sampling`.
        """
        if isinstance(prompts, str) or any(isinstance(prompt, Mapping) for prompt in prompts):
            raise ValueError(f"prompts: got {prompts!r}; must be a list of texts or of chats")
        sampling = Sampling(**options)
        stops = self._stop_strings(sampling)
        pieces = iter(())
        if len(prompts):
            pieces = self._stream(prompts, sampling, stops, chunk=32, first_row=first_row)
        return self._in_order(len(prompts) * sampling.n - first_row, pieces, stops)

    def _in_order(self, count: int, stream: Iterator[list[Piece]], stops: StopStrings | None):
        rows = [([], []) for _ in range(count)]
        done, given = {}, 0
        for pieces in stream:
            for piece in pieces:
                tokens, logps = rows[piece.row]
                tokens += piece.tokens.tolist()
                logps += piece.logps.tolist()
                if piece.ended:
                    text = self.tokenizer.decode(tokens)
                    done[piece.row] = Completion(
                        stops.before(text) if stops else text,
                        np.array(tokens, np.int32),
                        np.array(logps, np.float32),
                        piece.ended,
                    )
            while given in done:
                yield done.pop(given)
                given += 1

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """The text of one completion, piece by piece as it is sampled."""
        sampling = Sampling(**options)
        if sampling.n != 1:
            raise ValueError(f"n: got {sampling.n}; a stream is of one completion")
        stops = self._stop_strings(sampling)
        tokens, shown = [], ""
        for (piece,) in self._stream([prompt], sampling, stops, chunk=_STREAMED_TOKENS):
            tokens += piece.tokens.tolist()
            text = self.tokenizer.decode(tokens)
            if piece.ended:
                text = stops.before(text) if stops else text
            else:
                # The next token may complete a character, or a stop string.
                text = text.rstrip("\ufffd")
                text = stops.settled(text) if stops else text
            if len(text) > len(shown):
                yield text[len(shown) :]
                shown = text

    def _stream(
        self,
        prompts,
        sampling: Sampling,
        stops: StopStrings | None,
        chunk: int,
        first_row: int = 0,
    ):
        engine = Engine(
            self.model,
            num_tokens=self.tokenizer.num_tokens,
            stop_tokens=() if sampling.ignore_eos else self.tokenizer.stop_tokens,
            stop_strings=stops,
            truncation=Truncation(sampling.top_k, sampling.top_p, sampling.min_p),
            repetition_penalty=sampling.repetition_penalty,
            adapter="params" in self.variables,
            chunk=chunk,
            kv_cache_tokens=self.kv_cache_tokens,
            kv_cache_fraction=self.kv_cache_fraction,
        )
        tokens = self.tokenizer.encode([_messages(prompt) for prompt in prompts])
        queue = [
            Queued(np.array(ids, np.int32), keys, self._limit(place, len(ids), sampling))
            for place, (ids, keys) in enumerate(
                zip(tokens, _keys(sampling, len(prompts)), strict=True)
            )
        ]
        # Powers of two: other prompts, and another number of them, rarely compile anew.
        longest = max(map(len, tokens), default=1)
        return engine.stream(
            self.variables,
            _from(first_row, queue),
            sampling.temperature,
            max_prompt_length=1 << (longest - 1).bit_length(),
            max_concurrent=min(
                self.max_concurrent, 1 << (len(prompts) * sampling.n - 1).bit_length()
            ),
        )

    def _limit(self, place: int, prompt: int, sampling: Sampling) -> int:
        """Tokens that may follow a prompt: what is asked for, or what the model's context leaves."""
        context = self.model.arch.context
        if context is None:
            return sampling.max_tokens
        if prompt >= context:
            raise ValueError(
                f"prompt {place}: got {prompt} tokens; the model was made for {context} (max_position_embeddings)"
            )
        return min(sampling.max_tokens, context - prompt)

    def _stop_strings(self, sampling: Sampling) -> StopStrings | None:
        return StopStrings(tuple(sampling.stop), self.tokenizer.decode) if sampling.stop else None


def _require(limits: dict[str, Any]) -> None:
    tokens, fraction = limits["kv_cache_tokens"], limits["kv_cache_fraction"]
    for name, good, rule in (
        ("max_concurrent", limits["max_concurrent"] >= 1, "must be at least 1"),
        ("kv_cache_tokens", tokens is None or tokens >= 1, "must be at least 1"),
        ("kv_cache_fraction", fraction is None or 0 < fraction < 1, "must be in (0, 1)"),
        ("kv_cache_fraction", None in (tokens, fraction), "must be absent beside kv_cache_tokens"),
        (
            "kv_cache_fraction",
            fraction is None or runtime.memory_stats() is not None,
            "this device does not report its memory: give kv_cache_tokens",
        ),
    ):
        if not good:
            raise ValueError(f"{name}: got {limits[name]}; {rule}")


def _messages(prompt: Prompt) -> Prompt:
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt


def _from(row: int, queue: list[Queued]) -> list[Queued]:
    """The queue without its first rows."""
    firsts = itertools.accumulate((len(prompt.keys) for prompt in queue), initial=0)
    left = (
        dataclasses.replace(prompt, keys=prompt.keys[max(0, row - first) :])
        for first, prompt in zip(firsts, queue, strict=False)
    )
    return [prompt for prompt in left if len(prompt.keys)]


def _keys(sampling: Sampling, prompts: int) -> np.ndarray:
    """Key data [P, n, ...]: rows count on through all prompts under one seed, and from 0 under a prompt's own."""
    seeds = sampling.seeds
    if isinstance(sampling.seed, numbers.Integral):
        rows = np.arange(prompts * sampling.n)[None]
    else:
        rows = np.tile(np.arange(sampling.n), (prompts, 1))
        if len(seeds) != prompts:
            raise ValueError(f"seed: got {len(seeds)}; must be one, or one for each of {prompts=}")
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = [fold_in(jax.random.key(seed), row) for seed, row in zip(seeds, rows, strict=True)]
    data = np.concatenate([np.asarray(jax.random.key_data(each)) for each in keys])
    return data.reshape(prompts, sampling.n, *data.shape[1:])
