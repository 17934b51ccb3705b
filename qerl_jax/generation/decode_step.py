"""The parts of a decoding step, with and without drafts: tokens to hidden states, logits, and sampled tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from qerl_jax.aqn import draw as noise
from qerl_jax.generation import sampling
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.model import fused_decode, layers, logprobs
from qerl_jax.model.transformer import Transformer, head


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """The sampling options that are compiled: a static argument of the decoding program.

    Attributes:
        num_tokens: Number of ids that the tokenizer has; no other is sampled.
        params: Top-k, top-p, min-p and repetition penalty; other fields take their defaults, because programs are not
            compiled for them.
        chunk: The most tokens per row that the device samples before the host reads them; with drafts
            `draft_search.CHUNKS` times as many.
        entropies: Whether the entropy of each token's distribution is returned: that of the
            log-probabilities, before penalty and truncation (`logprobs.entropy`, as in the trainer).
            It costs one more sum in passes over the logits that sampling makes anyway.
    """

    num_tokens: int
    params: SamplingParams = SamplingParams()
    chunk: int = 32
    entropies: bool = False

    def __post_init__(self):
        object.__setattr__(self, "params", self.params.compiled())


def extender(model: Transformer, variables, rows: int, numbers):
    """Returns the function that runs the model on one token of each row.

    Args:
        model: The policy.
        variables: See `Engine.stream`.
        rows: B.
        numbers: int32 [B], numbers of the rows' noise, if rows have their own; else None.

    Returns:
        extend(tokens int32 [B], cache, steps int32 [B]) -> hidden states [B, D], cache. `steps` is the number of
        completion tokens before this one.
    """

    def made(steps):
        drawn = noise.of_rows(variables, numbers, steps + 1)
        return fused_decode.extender(model, drawn, rows, adapter="params" in variables)

    if noise.has_own(variables) and variables["noise"].per == "token":
        return lambda tokens, cache, steps: made(steps)(tokens, cache)
    # What does not change with the token is computed once for all steps.
    once = made(jnp.zeros(rows, jnp.int32))
    return lambda tokens, cache, steps: once(tokens, cache)


def drawer(model: Transformer, variables, spec: EngineSpec, temperature):
    """Returns the function that samples a token for each row.

    Args:
        model: The policy.
        variables: See `Engine.stream`.
        spec: Sampling options.
        temperature: float32 scalar.

    Returns:
        draw(hidden [B, D], keys [B], steps int32 [B], seen bool [B, V] or None) -> tokens int32 [B], their
        log-probabilities float32 [B] in nats, and entropies float32 [B] in nats, or None without `spec.entropies`.
        `seen` marks the tokens to which the repetition penalty applies.
    """
    scores_of = scorer(model, head(variables["frozen"]))

    def draw(hidden, keys, steps, seen):
        scores = scores_of(hidden)
        penalized = None
        if seen is not None:
            penalized = sampling.penalize(scores, seen, spec.params.repetition_penalty)
        token, logp = sampling.next_token(
            scores,
            jax.vmap(jax.random.fold_in)(keys, steps),
            temperature,
            spec.num_tokens,
            spec.params,
            penalized,
        )
        entropies = None
        if spec.entropies:
            # The same expression as in `sampling.next_token`, so XLA computes it once.
            logps = logprobs.log_softmax(scores, temperature, spec.num_tokens)
            entropies = logprobs.entropy(logps)
        return *agreed(model, token, logp), entropies

    return draw


def seen_in(history: jax.Array | None, spec: EngineSpec, vocab: int) -> jax.Array | None:
    """Returns which tokens the repetition penalty applies to.

    Args:
        history: int32 [B, T], tokens of each row, -1 after the last; None without a penalty.
        spec: Sampling options.
        vocab: V.

    Returns:
        bool [B, V]; None without a penalty.
    """
    if spec.params.repetition_penalty == 1:
        return None
    rows = jnp.arange(len(history))[:, None]
    # An index of -1 would mean the last token; an index of `vocab` is dropped.
    ids = jnp.where(history < 0, vocab, history)
    return jnp.zeros((len(rows), vocab), bool).at[rows, ids].set(True, mode="drop")


def scorer(model: Transformer, matrix: jax.Array):
    """Returns the function from hidden states [B, D] to logits [B, V].

    If several devices decode rows together and their number divides V, each computes a part of the vocabulary.
    """
    if model.over is None or len(matrix) % (count := jax.lax.axis_size(model.over)):
        return lambda hidden: layers.logits(hidden, matrix)
    size = len(matrix) // count
    # Sliced once for all steps of a chunk.
    own = jax.lax.dynamic_slice_in_dim(matrix, jax.lax.axis_index(model.over) * size, size)
    return lambda hidden: jax.lax.all_gather(
        layers.logits(hidden, own), model.over, axis=1, tiled=True
    )


def agreed(model: Transformer, token, logp):
    """Returns the first device's sample if several devices decode rows together.

    If their samples differed, their loops would end at different steps, and one device would wait forever.
    """
    if model.over is None:
        return token, logp
    bits = jax.lax.bitcast_convert_type(logp, jnp.int32)
    token, bits = jax.lax.all_gather(jnp.stack([token, bits]), model.over)[0]
    return token, jax.lax.bitcast_convert_type(bits, jnp.float32)
