"""Generation for batches of one shape: prompts in, completions and their log-probabilities out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from qerl_jax.generation.engine import Engine
from qerl_jax.generation.sampling import Truncation
from qerl_jax.generation.scheduler import Prompt
from qerl_jax.model.transformer import Transformer

__all__ = ["Completions", "Truncation", "make_generate"]


@dataclasses.dataclass(frozen=True)
class Completions:
    """What was sampled for B = P * G rows, the G rows of a prompt in a row; numpy on the host.

    Attributes:
        tokens: int32 [B, C]; after the end, padding.
        logps: float32 [B, C], log-probability of each token (see `logprobs`); 0 after the end.
        lengths: int32 [B], tokens up to and including the stop token, or the token that completes a
            stop string; what was sampled after that is dropped and does not count.
        stopped: bool [B], whether a stop token or string was sampled; False means truncated.
    """

    tokens: np.ndarray
    logps: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray


def make_generate(
    model: Transformer,
    *,
    num_generations: int,
    max_completion_length: int,
    pad_token: int,
    max_concurrent: int | None = None,
    **options: Any,
) -> Callable[[dict[str, Any], jax.Array, jax.Array, jax.Array, jax.Array], Completions]:
    """Builds the sampler of batches [P, Tp] with G rows a prompt.

    Each prompt is prefilled once, and its G rows share what that left. A row's randomness depends
    only on its own key and its own step, so neither the rest of the batch nor the slot in which it
    runs changes what it samples.

    Args:
        model: The policy.
        num_generations: G.
        max_completion_length: C, the most tokens per row.
        pad_token: Fills rows after their end.
        max_concurrent: Rows sampled at a time; the next row takes the place of one that ends. None
            samples all at once.
        **options: Of `Engine`: num_tokens, stop_tokens, stop_strings, truncation,
            repetition_penalty, adapter, and the room of the cache.

    Returns:
        generate(variables, prompts int32 [P, Tp] right-padded, prompt_lengths int32 [P], keys [P *
        G], temperature float32 scalar) -> Completions.
    """
    engine = Engine(model, **options)

    def generate(variables, prompts, prompt_lengths, keys, temperature):
        prompts, width = np.asarray(prompts, np.int32), np.shape(prompts)[1]
        key_data = np.asarray(jax.random.key_data(keys))
        groups = key_data.reshape(len(prompts), num_generations, *key_data.shape[1:])
        queue = [
            Prompt(prompt[:length], group, max_completion_length)
            for prompt, length, group in zip(
                prompts, np.asarray(prompt_lengths), groups, strict=True
            )
        ]
        shape = (len(key_data), max_completion_length)
        out = Completions(
            tokens=np.full(shape, pad_token, np.int32),
            logps=np.zeros(shape, np.float32),
            lengths=np.zeros(len(key_data), np.int32),
            stopped=np.zeros(len(key_data), bool),
        )
        limits = {
            "max_prompt_length": width,
            "max_concurrent": min(len(key_data), max_concurrent or len(key_data)),
        }
        for pieces in engine.stream(variables, queue, temperature, **limits):
            for piece in pieces:
                first = out.lengths[piece.row]
                last = first + len(piece.tokens)
                out.tokens[piece.row, first:last] = piece.tokens
                out.logps[piece.row, first:last] = piece.logps
                out.lengths[piece.row] = last
                out.stopped[piece.row] = piece.ended == "stop"
        return out

    return generate
