"""What decoding steps with and without drafts share: the loop's state, the model's step, and the sampling of a token."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from qerl_jax.aqn import draw as noise
from qerl_jax.generation import draft_search, sampling
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.generation.scheduler import Slots
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
        entropies: Whether the entropy of each token's distribution is returned: that of the log-probabilities, before
            penalty and truncation (`logprobs.entropy`, as in the trainer).
    """

    num_tokens: int
    params: SamplingParams = SamplingParams()
    chunk: int = 32
    entropies: bool = False

    def __post_init__(self):
        object.__setattr__(self, "params", self.params.compiled())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loop:
    """The state of the loop over the steps of a chunk.

    Attributes:
        count: int32, new tokens: a scalar for all rows that have not ended, or [B] with drafts.
        token: int32 [B], the last token of each row.
        live: bool [B], rows that have not ended.
        lengths: int32 [B], new tokens of each row; None with drafts, where `count` has them.
        history: int32 [B, T], see `Slots`; None without drafts, which need no new tokens in it.
        tokens: int32 [B, n], the new tokens.
        behaviour_logps: float32 [B, n], their log-probabilities in nats.
        entropies: float32 [B, n], in nats, or None.
        seen: bool [B, V], tokens to which the repetition penalty applies, or None.
        pool: Keys and values.
        outcome: Statistics of the drafts; None without.
        idle: int32, with drafts: row-steps in which rows that had ended were idle.
    """

    count: jax.Array
    token: jax.Array
    live: jax.Array
    lengths: jax.Array | None
    history: jax.Array | None
    tokens: jax.Array
    behaviour_logps: jax.Array
    entropies: jax.Array | None
    seen: jax.Array | None
    pool: tuple[jax.Array, jax.Array]
    outcome: draft_search.Outcome | None = None
    idle: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What the steps of a chunk read and do not change.

    Attributes:
        slots: The rows before the chunk.
        row_keys: PRNG keys [B].
        stop_tokens: int32 [k].
        size: The most new tokens of a row.
        extend: The result of `extender` for all steps; None if each step has noise of its own.
        extend_with: extend_with(numbers) -> the result of `extender` for rows with these numbers of their noise.
        draw: The result of `drawer`.
    """

    slots: Slots
    row_keys: jax.Array
    stop_tokens: jax.Array
    size: int
    extend: Callable | None
    extend_with: Callable[[jax.Array], Callable]
    draw: Callable


def extender(model: Transformer, variables, rows: int, numbers):
    """Returns the function that runs the model on one token of each of B rows.

    `numbers`, int32 [B], are those of the rows' noise if rows have their own; else None.

    Returns:
        extend(tokens int32 [B], cache, steps int32 [B]) -> hidden states [B, D], cache. `steps` is the number of
        completion tokens before this one.
    """

    def at_steps(steps):
        drawn = noise.of_rows(variables, numbers, steps + 1)
        return fused_decode.extender(model, drawn, rows, adapter="params" in variables)

    if noise.has_own(variables) and variables["noise"].per == "token":
        return lambda tokens, cache, steps: at_steps(steps)(tokens, cache)
    # What does not change with the token is computed once for all steps.
    once = at_steps(jnp.zeros(rows, jnp.int32))
    return lambda tokens, cache, steps: once(tokens, cache)


def drawer(model: Transformer, variables, spec: EngineSpec, temperature):
    """Returns the function that samples a token for each row at a temperature, float32 scalar.

    Returns:
        draw(hidden [B, D], keys [B], steps int32 [B], seen bool [B, V] or None) -> tokens int32 [B], their
        log-probabilities float32 [B] in nats, and entropies float32 [B] in nats, or None without `spec.entropies`.
        `seen` marks the tokens to which the repetition penalty applies.
    """
    scores_of = scorer(model, head(variables["frozen"]))

    def draw(hidden, keys, steps, seen):
        scores, penalized, params = scores_of(hidden), None, spec.params
        if seen is not None:
            penalized = sampling.penalize(scores, seen, params.repetition_penalty)
        keys = jax.vmap(jax.random.fold_in)(keys, steps)
        token, logp = sampling.next_token(
            scores, keys, temperature, spec.num_tokens, params, penalized
        )
        entropies = None
        if spec.entropies:
            # The same expression as in `sampling.next_token`, so XLA computes it once.
            entropies = logprobs.entropy(logprobs.log_softmax(scores, temperature, spec.num_tokens))
        return *agreed(model, token, logp), entropies

    return draw


def seen_in(history: jax.Array | None, spec: EngineSpec, vocab: int) -> jax.Array | None:
    """Returns the tokens to which the repetition penalty applies, bool [B, V]; None without a penalty.

    `history` is that of `Slots`, and `vocab` is V.
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
    part = jax.lax.dynamic_slice_in_dim(matrix, jax.lax.axis_index(model.over) * size, size)
    return lambda hidden: jax.lax.all_gather(
        layers.logits(hidden, part), model.over, axis=1, tiled=True
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
