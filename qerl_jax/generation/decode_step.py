"""What a step of decoding is, with drafts and without: hidden states to scores, scores to a token of each row."""

import dataclasses

import jax
import jax.numpy as jnp

from qerl_jax.generation import sampling
from qerl_jax.model import fused_decode, layers, logprobs, noise
from qerl_jax.model.transformer import Transformer, head


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """How tokens are sampled, as far as it is compiled: a static argument of the decoding program.

    Attributes:
        num_tokens: Ids that the tokenizer has.
        truncation: Which tokens may be sampled: top-k, top-p, min-p.
        repetition_penalty: See `sampling.penalize`; 1 is off.
        chunk: The most tokens that the device samples between two looks of the host; with drafts
            `draft_search.CHUNKS` times as many.
        entropies: Whether the entropy of each token's distribution comes with it: that of the
            log-probabilities, before penalty and truncation (`logprobs.entropy`, as in the trainer).
            One more sum in passes over the scores that sampling makes anyway.
    """

    num_tokens: int
    truncation: sampling.Truncation = sampling.Truncation()
    repetition_penalty: float = 1.0
    chunk: int = 32
    entropies: bool = False


def extender(model: Transformer, variables, rows: int, numbers):
    """The function that runs a token of each row, at most that many.

    Args:
        model: The policy.
        variables: See `Engine.stream`.
        rows: B.
        numbers: int32 [B], numbers of the rows' noise, where rows have their own.

    Returns:
        extend(tokens int32 [B], cache, steps int32 [B]) -> hidden states [B, D], cache. The steps count completion
        tokens before.
    """

    def made(steps):
        drawn = noise.of_rows(variables, numbers, steps + 1)
        return fused_decode.extender(model, drawn, rows, adapter="params" in variables)

    if noise.has_own(variables) and variables["noise"].per == "token":
        return lambda tokens, cache, steps: made(steps)(tokens, cache)
    # Computed once for all steps: everything that does not change with the token.
    once = made(jnp.zeros(rows, jnp.int32))
    return lambda tokens, cache, steps: once(tokens, cache)


def drawer(model: Transformer, variables, spec: EngineSpec, temperature):
    """The function that samples a token of each row.

    Args:
        model: The policy.
        variables: See `Engine.stream`.
        spec: How tokens are sampled.
        temperature: float32 scalar.

    Returns:
        draw(hidden [B, D], keys [B], steps int32 [B], seen bool [B, V] or None) -> tokens int32 [B], their
        log-probabilities float32 [B], and entropies float32 [B] or None where nobody asks. `seen` are the tokens that
        a repetition penalty is for.
    """
    scores_of = scorer(model, head(variables["frozen"]))

    def draw(hidden, keys, steps, seen):
        scores = scores_of(hidden)
        penalized = None
        if seen is not None:
            penalized = sampling.penalize(scores, seen, spec.repetition_penalty)
        token, logp = sampling.next_token(
            scores,
            jax.vmap(jax.random.fold_in)(keys, steps),
            temperature,
            spec.num_tokens,
            spec.truncation,
            penalized,
        )
        entropies = None
        if spec.entropies:
            # The same log-probabilities as `sampling.next_token`'s, of which XLA keeps one.
            logps = logprobs.log_softmax(scores, temperature, spec.num_tokens)
            entropies = logprobs.entropy(logps)
        return *agreed(model, token, logp), entropies

    return draw


def seen_in(history: jax.Array | None, spec: EngineSpec, vocab: int) -> jax.Array | None:
    """Which tokens a repetition penalty is for: bool [B, vocab] of histories [B, T]; None where there is no penalty."""
    if spec.repetition_penalty == 1:
        return None
    rows = jnp.arange(len(history))[:, None]
    # -1, where there is no token, would be the last one.
    ids = jnp.where(history < 0, vocab, history)
    return jnp.zeros((len(rows), vocab), bool).at[rows, ids].set(True, mode="drop")


def scorer(model: Transformer, matrix: jax.Array):
    """Maps hidden states [B, D] to scores [B, V]; of several devices that decode rows together each computes some."""
    if model.over is None or len(matrix) % (count := jax.lax.axis_size(model.over)):
        return lambda hidden: layers.logits(hidden, matrix)
    size = len(matrix) // count
    # Copied out once for all steps of a chunk.
    own = jax.lax.dynamic_slice_in_dim(matrix, jax.lax.axis_index(model.over) * size, size)
    return lambda hidden: jax.lax.all_gather(
        layers.logits(hidden, own), model.over, axis=1, tiled=True
    )


def agreed(model: Transformer, token, logp):
    """The first device's choice where several decode rows together: if they differed, one would wait for the others."""
    if model.over is None:
        return token, logp
    bits = jax.lax.bitcast_convert_type(logp, jnp.int32)
    token, bits = jax.lax.all_gather(jnp.stack([token, bits]), model.over)[0]
    return token, jax.lax.bitcast_convert_type(bits, jnp.float32)
