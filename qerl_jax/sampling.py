"""Jitted generation: prompts in, completions and their log-probabilities out; the host is not asked in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax import layers, logprobs
from qerl_jax.kv_cache import KVCache
from qerl_jax.model import Transformer, head


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Which tokens may be sampled at all, as in transformers and vLLM. Log-probabilities are taken before it.

    Tokens as likely as the last one kept by top_k or top_p stay too.

    Attributes:
        top_k: Keep the k likeliest; 0 is off.
        top_p: Keep the likeliest, down to and including the one at which their mass reaches p; 1 is
            off.
        min_p: Drop those below min_p times the likeliest one's probability; 0 is off.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __call__(self, logps: jax.Array) -> jax.Array:
        """[..., V] log-probabilities with -inf at the tokens that are out."""
        if 0 < self.top_k < logps.shape[-1]:
            worst = jax.lax.top_k(logps, self.top_k)[0][..., -1:]
            logps = jnp.where(logps < worst, -jnp.inf, logps)
        if self.top_p < 1:
            ranked = jnp.sort(logps, axis=-1, descending=True)
            mass = jnp.cumsum(jax.nn.softmax(ranked, axis=-1), axis=-1)
            # A token stays while the mass before it is short of p, so the likeliest always stays.
            before = jnp.pad(mass[..., :-1], [(0, 0)] * (mass.ndim - 1) + [(1, 0)])
            worst = jnp.min(jnp.where(before < self.top_p, ranked, jnp.inf), axis=-1, keepdims=True)
            logps = jnp.where(logps < worst, -jnp.inf, logps)
        if self.min_p > 0:
            best = jnp.max(logps, axis=-1, keepdims=True)
            logps = jnp.where(logps < best + jnp.log(self.min_p), -jnp.inf, logps)
        return logps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Completions:
    """What was sampled for B = P * G rows, the G rows of a prompt in a row.

    Attributes:
        tokens: int32 [B, C]; after the stop token, padding.
        logps: float32 [B, C], log-probability of each token (see `logprobs`); 0 after the stop
            token.
        lengths: int32 [B], tokens up to and including the stop token.
        stopped: bool [B], whether a stop token was sampled; False means truncated.
    """

    tokens: jax.Array
    logps: jax.Array
    lengths: jax.Array
    stopped: jax.Array


def next_token(
    scores: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    num_tokens: int,
    truncation: Truncation,
) -> tuple[jax.Array, jax.Array]:
    """Samples one token per row, each row from its own key.

    Args:
        scores: float32 [B, V] logits.
        keys: PRNG keys [B].
        temperature: float32 scalar; 0 takes the likeliest token.
        num_tokens: Ids that the tokenizer has; no other is sampled.
        truncation: top-k, top-p, min-p.

    Returns:
        int32 [B] tokens, float32 [B] log-probabilities.
    """
    logps = logprobs.log_softmax(scores, temperature, num_tokens)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[-1:], jnp.float32))(keys)
    # argmax of log p + Gumbel noise is a sample of p; without the noise it is the mode.
    token = jnp.argmax(truncation(logps) + jnp.where(temperature > 0, noise, 0.0), axis=-1)
    return token.astype(jnp.int32), jnp.take_along_axis(logps, token[:, None], axis=-1)[:, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """One decode loop: `step` tokens are sampled; `token` [B] is the last, not yet seen by the model."""

    step: jax.Array
    token: jax.Array
    tokens: jax.Array
    logps: jax.Array
    lengths: jax.Array
    stopped: jax.Array
    cache: KVCache


def make_generate(
    model: Transformer,
    *,
    num_generations: int,
    max_completion_length: int,
    num_tokens: int,
    stop_tokens: tuple[int, ...],
    pad_token: int,
    truncation: Truncation = Truncation(),
    adapter: bool = True,
    max_concurrent: int | None = None,
) -> Callable[[dict[str, Any], jax.Array, jax.Array, jax.Array, jax.Array], Completions]:
    """Builds the jitted sampler.

    Each prompt is prefilled once; its G rows start from copies of its cache. A row's randomness
    depends only on its own key and its own step, so the rest of the batch does not change what it
    samples.

    Args:
        model: The policy.
        num_generations: G.
        max_completion_length: C, the most tokens per row.
        num_tokens: Ids that the tokenizer has.
        stop_tokens: Ids that end a completion; none means every row runs to C.
        pad_token: Fills rows after their end.
        truncation: top-k, top-p, min-p.
        adapter: Whether params act.
        max_concurrent: Rows sampled at a time, a multiple of G, which bounds the cache; more prompts
            wait for the rows before them. None samples all at once.

    Returns:
        generate(variables, prompts int32 [P, Tp] right-padded, prompt_lengths int32 [P], keys [P *
        G], temperature float32 scalar) -> Completions.
    """
    stops = jnp.asarray(stop_tokens, jnp.int32)

    def sample(state: _State, scores, keys, temperature) -> _State:
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, state.step)
        token, logp = next_token(scores, step_keys, temperature, num_tokens, truncation)
        live = ~state.stopped
        token = jnp.where(live, token, pad_token)
        return dataclasses.replace(
            state,
            step=state.step + 1,
            token=token,
            tokens=state.tokens.at[:, state.step].set(token),
            logps=state.logps.at[:, state.step].set(jnp.where(live, logp, 0.0)),
            lengths=state.lengths + live,
            stopped=state.stopped | (live & jnp.isin(token, stops)),
        )

    @jax.jit
    def generate(variables, prompts, prompt_lengths, keys, temperature):
        temperature = jnp.asarray(temperature, jnp.float32)
        rows = prompts.shape[0] * num_generations
        matrix = head(variables["frozen"])

        cache = model.new_cache(*prompts.shape)
        hidden, cache = model.apply(
            variables, prompts, lengths=prompt_lengths, cache=cache, adapter=adapter
        )
        last = jnp.take_along_axis(hidden, prompt_lengths[:, None, None] - 1, axis=1)[:, 0]
        scores = jnp.repeat(layers.logits(last, matrix), num_generations, axis=0)

        state = _State(
            step=jnp.int32(0),
            token=jnp.full(rows, pad_token, jnp.int32),
            tokens=jnp.full((rows, max_completion_length), pad_token, jnp.int32),
            logps=jnp.zeros((rows, max_completion_length), jnp.float32),
            lengths=jnp.zeros(rows, jnp.int32),
            stopped=jnp.zeros(rows, bool),
            cache=cache.repeat(num_generations, prompts.shape[1] + max_completion_length),
        )

        def unfinished(state: _State):
            return (state.step < max_completion_length) & ~jnp.all(state.stopped)

        def decode(state: _State) -> _State:
            hidden, cache = model.apply(
                variables, state.token[:, None], cache=state.cache, adapter=adapter
            )
            scores = layers.logits(hidden[:, 0], matrix)
            return sample(dataclasses.replace(state, cache=cache), scores, keys, temperature)

        state = jax.lax.while_loop(unfinished, decode, sample(state, scores, keys, temperature))
        return Completions(state.tokens, state.logps, state.lengths, state.stopped)

    if max_concurrent is None:
        return generate
    if max_concurrent % num_generations:
        raise ValueError(
            f"max_concurrent: got {max_concurrent}; must be a multiple of {num_generations=}"
        )
    prompts_at_once = max_concurrent // num_generations

    def generate_in_turns(variables, prompts, prompt_lengths, keys, temperature):
        turns = []
        for start in range(0, len(prompts), prompts_at_once):
            some = slice(start, start + prompts_at_once)
            rows = slice(start * num_generations, (start + prompts_at_once) * num_generations)
            turns.append(
                generate(variables, prompts[some], prompt_lengths[some], keys[rows], temperature)
            )
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *turns)

    return generate_in_turns
