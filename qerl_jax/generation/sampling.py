"""Samples the next token from logits (called scores here), and returns its log-probability."""

import jax
import jax.numpy as jnp

from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.model import logprobs

# Ids per block: a block is sampled first, then an id in it. Most vocabularies are padded to a multiple of this.
_BLOCK = 128


def truncate(logps: jax.Array, params: SamplingParams) -> jax.Array:
    """Restricts sampling to likely tokens: top-k, then top-p, then min-p, as in transformers (vLLM applies min_p first).

    Tokens as likely as the last one that top_k or top_p allows are allowed, too. Returns the log-probabilities, float32
    [..., V], with -inf at the tokens that may not be sampled.
    """
    if 0 < params.top_k < logps.shape[-1]:
        allowed = _likeliest(logps, jnp.ones_like(logps, jnp.int32), params.top_k)
        logps = jnp.where(allowed, logps, -jnp.inf)
    if params.top_p < 1:
        # A mass of 0, to which float32 may round, would allow no token.
        mass = max(params.top_p, float(jnp.finfo(jnp.float32).tiny))
        allowed = _likeliest(logps, jax.nn.softmax(logps, axis=-1), mass)
        logps = jnp.where(allowed, logps, -jnp.inf)
    if params.min_p > 0:
        best = jnp.max(logps, axis=-1, keepdims=True)
        logps = jnp.where(logps < best + jnp.log(params.min_p), -jnp.inf, logps)
    return logps


def _likeliest(logps: jax.Array, weights: jax.Array, target: float) -> jax.Array:
    """Marks (bool [..., V]) the likeliest tokens, up to the one at which their weights add up to the target.

    The threshold is found bit by bit: 32 sums over the vocabulary instead of a sort, which takes a GPU as long as
    the rest of a decode step.
    """
    bits = jax.lax.bitcast_convert_type(logps, jnp.int32)
    # Maps floats to unsigned integers of the same order.
    order = jnp.where(bits < 0, ~bits, bits ^ jnp.int32(-(2**31))).astype(jnp.uint32)

    def raise_threshold(i, threshold):
        higher = threshold | (jnp.uint32(1) << jnp.uint32(31 - i))
        total = jnp.sum(jnp.where(order >= higher, weights, 0), axis=-1, keepdims=True)
        return jnp.where(total >= target, higher, threshold)

    lowest = jnp.zeros((*logps.shape[:-1], 1), jnp.uint32)
    return order >= jax.lax.fori_loop(0, 32, raise_threshold, lowest)


def penalize(scores: jax.Array, seen: jax.Array, penalty: float) -> jax.Array:
    """Applies a repetition penalty: divides positive scores of seen tokens by it, and multiplies others.

    This is CTRL's penalty (arXiv 1909.05858), as in transformers and vLLM.

    Args:
        scores: float32 [B, V] logits, as the result.
        seen: bool [B, V], whether the prompt or the completion so far contains the token.
        penalty: A value above 1 makes seen tokens less likely, one between 0 and 1 more likely.
    """
    return jnp.where(seen, jnp.where(scores > 0, scores / penalty, scores * penalty), scores)


def gumbel(bits: jax.Array) -> jax.Array:
    """Computes standard Gumbel noise, float32, from uniform uint32 bits.

    The tail of large values is exact enough to sample rare tokens. `jax.random.gumbel` makes uniform numbers from 23
    bits, so its noise is never above 16: tokens of probability 1e-7, which are many among 150,000 ids, are sampled
    half as often as they should be, and those below 1e-8 never. Its `mode="high"` takes twice the bits.
    """
    # Small u give large noise, and float32 represents them precisely. If u rounded to 1, the noise would be -inf, and
    # the only token that truncation has kept would lose against excluded ones.
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-u))


def next_token(
    scores: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    num_tokens: int,
    params: SamplingParams,
    penalized: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Samples one token per row, each row from its own key.

    Args:
        scores: float32 [B, V] logits.
        keys: PRNG keys [B].
        temperature: float32 scalar; 0 takes the likeliest token.
        num_tokens: Number of ids that the tokenizer has; no other is sampled.
        params: Which tokens may be sampled: see `truncate`.
        penalized: float32 [B, V] logits to sample from instead of `scores`; None for `scores`.

    Returns:
        int32 [B] tokens, and their float32 [B] log-probabilities in nats: those of `scores` at the temperature,
        before penalty and truncation.
    """
    logps = sampled = logprobs.log_softmax(scores, temperature, num_tokens)
    if penalized is not None:
        sampled = logprobs.log_softmax(penalized, temperature, num_tokens)
    token = _draw(truncate(sampled, params), keys, temperature)
    return token, jnp.take_along_axis(logps, token[:, None], axis=-1)[:, 0]


def _draw(logps: jax.Array, keys: jax.Array, temperature: jax.Array) -> jax.Array:
    """Samples ids int32 [B] by log-probabilities [B, V], not necessarily normalized; at temperature 0 the likeliest.

    argmax(log p + Gumbel noise) is a sample of p. It is applied first to blocks of ids, by their total probability,
    and then to the ids of that block. The distribution is the same, but 1,300 random numbers are needed instead of
    150,000. A row's noise depends only on its key.
    """
    rows, vocab = logps.shape
    size = min(_BLOCK, vocab)
    padding = ((0, 0), (0, -vocab % size))
    padded = jnp.pad(logps, padding, constant_values=-jnp.inf).reshape(rows, -1, size)
    blocks = padded.shape[1]
    bits = jax.vmap(lambda key: jax.random.bits(key, (blocks + size,), jnp.uint32))(keys)
    of_blocks, of_ids = jnp.split(gumbel(bits), [blocks], axis=1)
    is_sampled = temperature > 0
    mass, likeliest = jnp.log(jnp.sum(jnp.exp(padded), axis=-1)), jnp.max(padded, axis=-1)
    block = jnp.argmax(jnp.where(is_sampled, mass + of_blocks, likeliest), axis=-1)
    inside = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    index = jnp.argmax(inside + jnp.where(is_sampled, of_ids, 0.0), axis=-1)
    return (block * size + index).astype(jnp.int32)
