"""The one definition of a log-probability, shared by sampler and trainer.

    log p(v) = log_softmax over v < num_tokens of (hidden . head[v] / temperature), in float32

before any penalty or top-k/top-p/min-p truncation, over the ids that the tokenizer has. For temperature 0 (greedy)
it is computed at temperature 1.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.finished_linear import linear
from qerl_jax.model import layers


def log_softmax(logits: jax.Array, temperature: jax.Array | float, num_tokens: int) -> jax.Array:
    """Computes log-probabilities, float32 [..., V], at a temperature; ids >= num_tokens get -inf.

    The ids from num_tokens to V - 1 are padding of the embedding. A temperature of 0 counts as 1.
    """
    temperature = jnp.asarray(temperature, jnp.float32)
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    known = jnp.arange(logits.shape[-1]) < num_tokens
    return jax.nn.log_softmax(jnp.where(known, scaled, -jnp.inf), axis=-1)


def entropy(logps: jax.Array) -> jax.Array:
    """Computes -sum p log p over the last axis, in nats; entries with log-probability -inf add 0."""
    return -jnp.sum(jnp.where(jnp.isneginf(logps), 0.0, jnp.exp(logps) * logps), axis=-1)


def of_targets(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature: jax.Array | float,
    num_tokens: int,
    count: jax.Array | None = None,
    chunk: int = 1024,
    entropy_slopes: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes the log-probability of each target and the entropy of each distribution, without [N, V] logits.

        d log p(target) / d hidden = (head[target] - sum over v of p(v) head[v]) / temperature
        d entropy / d hidden = -(sum over v of p(v) (log p(v) + entropy) head[v]) / temperature

    Rows go through the head `chunk` at a time, so the logits take chunk * V float32, whatever N is. If a gradient is
    needed, the derivatives above, [N, D], are computed while a chunk's logits are in memory, so that logits are
    computed only once; the backward pass multiplies them by one factor per row.

    Args:
        hidden: [N, D], the hidden state that predicts each target.
        head: [V, D].
        targets: int32 [N].
        temperature: Sampling temperature of the policy, a scalar. No gradient flows through it.
        num_tokens: Number of ids that the tokenizer has.
        count: int32 scalar, the number of targets that are needed, from the first on; None means all. A chunk
            without a needed target is skipped and returns 0.
        chunk: Number of rows at a time.
        entropy_slopes: Whether a gradient flows through the entropies. This takes one more product with the head, and
            [N, D] more memory.

    Returns:
        float32 [N] log-probabilities, float32 [N] entropies in nats.
    """
    rows, chunk = len(hidden), min(chunk, len(hidden))
    padding = -rows % chunk
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, hidden.shape[-1])
    targets = jnp.pad(targets, (0, padding)).reshape(-1, chunk)
    temperature = jnp.asarray(temperature, jnp.float32)
    needed = None if count is None else jnp.arange(len(targets)) * chunk < count
    arrays = hidden, head, targets, needed, temperature
    logps, entropies = _of_chunks(*arrays, num_tokens, entropy_slopes)
    return logps.reshape(-1)[:rows], entropies.reshape(-1)[:rows]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _of_chunks(hidden, head, targets, needed, temperature, num_tokens, entropy_slopes):
    def of_chunk(hidden, targets):
        logps = log_softmax(layers.logits(hidden, head), temperature, num_tokens)
        return _picked(logps, targets), entropy(logps)

    return jax.lax.map(lambda args: _if_needed(of_chunk, *args), (needed, hidden, targets))


def _of_chunks_fwd(hidden, head, targets, needed, temperature, num_tokens, entropy_slopes):
    def of_chunk(hidden, targets):
        logps = log_softmax(layers.logits(hidden, head), temperature, num_tokens)
        through_head = lambda x: linear(x.astype(hidden.dtype), head.T).astype(hidden.dtype)
        slopes = [through_head(_logit_slopes(logps, targets, temperature))]
        if entropy_slopes:
            slopes.append(through_head(_entropy_slopes(logps, temperature)))
        return _picked(logps, targets), entropy(logps), tuple(slopes)

    logps, entropies, slopes = jax.lax.map(
        lambda args: _if_needed(of_chunk, *args), (needed, hidden, targets)
    )
    return (logps, entropies), (slopes, hidden, head, targets, needed, temperature)


def _of_chunks_bwd(num_tokens, entropy_slopes, residuals, cotangents):
    slopes, hidden, head, targets, needed, temperature = residuals
    # The cotangents of the log-probabilities and, if entropies need a gradient, of the entropies.
    factors = cotangents[: len(slopes)]
    pairs = zip(factors, slopes, strict=True)
    dhidden = sum(factor[..., None] * slope.astype(jnp.float32) for factor, slope in pairs)
    dhidden = dhidden.astype(hidden.dtype)

    # If the head is frozen, this result is unused and the compiler removes it.
    def of_chunk(dhead, args):
        hidden, targets, factors = args
        logps = log_softmax(layers.logits(hidden, head), temperature, num_tokens)
        dlogits = factors[0][:, None] * _logit_slopes(logps, targets, temperature)
        if entropy_slopes:
            dlogits = dlogits + factors[1][:, None] * _entropy_slopes(logps, temperature)
        return dhead + layers.logits(dlogits.astype(hidden.dtype).T, hidden.T), None

    zeros = jnp.zeros(head.shape, jnp.float32)
    dhead, _ = jax.lax.scan(of_chunk, zeros, (hidden, targets, factors))
    return dhidden, dhead.astype(head.dtype), None, None, jnp.zeros_like(temperature)


_of_chunks.defvjp(_of_chunks_fwd, _of_chunks_bwd)


def _if_needed(f, needed, *args):
    """Returns f(*args), or zeros of the same shapes if `needed` is false; None counts as true."""
    if needed is None:
        return f(*args)
    zeros = lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(f, *args))
    return jax.lax.cond(needed, f, zeros, *args)


def _picked(logps: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logps, targets[:, None], axis=-1)[:, 0]


def _logit_slopes(logps: jax.Array, targets: jax.Array, temperature: jax.Array) -> jax.Array:
    """Computes the derivative of each target's log-probability with respect to the logits, [N, V]."""
    hit = jnp.arange(logps.shape[-1]) == targets[:, None]
    return (hit - jnp.exp(logps)) / jnp.where(temperature > 0, temperature, 1.0)


def _entropy_slopes(logps: jax.Array, temperature: jax.Array) -> jax.Array:
    """Computes the derivative of each distribution's entropy with respect to the logits, [N, V]."""
    above = jnp.where(jnp.isneginf(logps), 0.0, logps) + entropy(logps)[:, None]
    return -jnp.exp(logps) * above / jnp.where(temperature > 0, temperature, 1.0)
