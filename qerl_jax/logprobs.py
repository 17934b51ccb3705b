"""The one definition of a log-probability, shared by sampler and trainer.

    log p(v) = log_softmax over v < num_tokens of (hidden . head[v] / temperature), in float32

taken before any penalty or top-k/top-p/min-p truncation, over the ids that the tokenizer has; at
temperature 0 (greedy) it is taken at temperature 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qerl_jax import layers


def log_softmax(logits: jax.Array, temperature: jax.Array | float, num_tokens: int) -> jax.Array:
    """Log-probabilities [..., V], float32; -inf at ids >= num_tokens (rows of the embedding that pad it)."""
    temperature = jnp.asarray(temperature, jnp.float32)
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    known = jnp.arange(logits.shape[-1]) < num_tokens
    return jax.nn.log_softmax(jnp.where(known, scaled, -jnp.inf), axis=-1)


def entropy(logps: jax.Array) -> jax.Array:
    """-sum p log p over the last axis, in nats; ids of probability zero count as zero."""
    return -jnp.sum(jnp.where(jnp.isneginf(logps), 0.0, jnp.exp(logps) * logps), axis=-1)


def of_targets(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature: jax.Array | float,
    num_tokens: int,
    chunk: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy of each distribution, without ever holding [N, V] logits.

    Rows go through the head `chunk` at a time, and the backward pass recomputes a chunk's logits:
    memory is chunk * V float32, whatever N is.

    Args:
        hidden: [N, D], the state that predicts each target.
        head: [V, D].
        targets: int32 [N].
        temperature: Of the policy; see the module's definition.
        num_tokens: Ids that the tokenizer has.
        chunk: Rows at a time.

    Returns:
        float32 [N] log-probabilities, float32 [N] entropies in nats (no gradient flows through
        these).
    """
    rows = hidden.shape[0]
    chunk = min(chunk, rows)
    padding = -rows % chunk
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, hidden.shape[-1])
    targets = jnp.pad(targets, (0, padding)).reshape(-1, chunk)

    @jax.checkpoint
    def of_chunk(args):
        hidden, targets = args
        logps = log_softmax(layers.logits(hidden, head), temperature, num_tokens)
        picked = jnp.take_along_axis(logps, targets[:, None], axis=-1)[:, 0]
        return picked, entropy(jax.lax.stop_gradient(logps))

    logps, entropies = jax.lax.map(of_chunk, (hidden, targets))
    return logps.reshape(-1)[:rows], entropies.reshape(-1)[:rows]
