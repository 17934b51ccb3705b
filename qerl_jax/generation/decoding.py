"""What the device runs: the prefill of prompts, and the loop that samples a chunk of tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from qerl_jax.generation import sampling
from qerl_jax.generation.device_pool import BY_HEADS
from qerl_jax.generation.programs import program
from qerl_jax.generation.scheduler import Slots
from qerl_jax.model import fused_decode, kv_cache, layers, logprobs, noise
from qerl_jax.model.transformer import Transformer, head


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """How tokens are sampled, as far as it is compiled: a static argument of the decoding program.

    Attributes:
        num_tokens: Ids that the tokenizer has.
        truncation: Which tokens may be sampled: top-k, top-p, min-p.
        repetition_penalty: See `sampling.penalize`; 1 is off.
        chunk: The most tokens that the device samples between two looks of the host.
        entropies: Whether the entropy of each token's distribution comes with it: that of the
            log-probabilities, before penalty and truncation (`logprobs.entropy`, as in the trainer).
            One more sum in passes over the scores that sampling makes anyway.
    """

    num_tokens: int
    truncation: sampling.Truncation = sampling.Truncation()
    repetition_penalty: float = 1.0
    chunk: int = 32
    entropies: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Loop:
    """The state within a chunk: every row that still lives has sampled `count` tokens."""

    count: jax.Array
    token: jax.Array
    live: jax.Array
    lengths: jax.Array
    tokens: jax.Array
    logps: jax.Array
    entropies: jax.Array | None
    seen: jax.Array | None
    pool: tuple[jax.Array, jax.Array]


@program("model")
def prefill(variables, pool, tokens, tables, numbers=None, *, model: Transformer):
    """Puts prompts [R, T] into the pages of `tables`, under the noise of those numbers where rows have their own."""
    variables = noise.of_rows(variables, numbers, jnp.zeros(len(tokens), jnp.int32))
    cache = kv_cache.KVCache(*pool, tables, jnp.zeros(len(tokens), jnp.int32))
    _, cache = model.apply(variables, tokens, cache=cache, adapter="params" in variables)
    return cache.keys, cache.values


@program("model", "spec", gives=(BY_HEADS, False, False))
def decode(
    variables,
    pool,
    slots: Slots,
    temperature,
    stop_tokens,
    *,
    model: Transformer,
    spec: EngineSpec,
):
    """Samples up to `spec.chunk` tokens per row; ends early when no row lives.

    Returns:
        The pool; tokens and log-probabilities [B, spec.chunk], how many of them each row has, who lives,
        and entropies [B, spec.chunk] or None; and the fields of `slots` that have moved.
    """
    chunk = spec.chunk
    extend = _extender(model, variables, slots)
    scores_of = scorer(model, matrix := head(variables["frozen"]))
    rows = jnp.arange(len(slots.live))
    row_keys = jax.random.wrap_key_data(slots.keys)
    seen = None
    if slots.history is not None:
        seen = jnp.zeros((len(rows), len(matrix)), bool)
        seen = seen.at[rows[:, None], jnp.where(slots.history < 0, len(matrix), slots.history)].set(
            True, mode="drop"
        )
    shape = (len(rows), chunk)
    loop = _Loop(
        count=jnp.int32(0),
        token=slots.token,
        live=slots.live,
        lengths=jnp.zeros(len(rows), jnp.int32),
        tokens=jnp.zeros(shape, jnp.int32),
        logps=jnp.zeros(shape, jnp.float32),
        entropies=jnp.zeros(shape, jnp.float32) if spec.entropies else None,
        seen=seen,
        pool=pool,
    )

    def unfinished(loop: _Loop):
        return (loop.count < chunk) & jnp.any(loop.live)

    def step(loop: _Loop) -> _Loop:
        # An ended row writes to page 0, and reads one slot of it.
        cache = kv_cache.KVCache(
            *loop.pool,
            tables=jnp.where(loop.live[:, None], slots.tables, 0),
            ends=jnp.where(loop.live, slots.ends + loop.count, 0),
            shared=None if slots.shared is None else jnp.where(loop.live, slots.shared, 0),
        )
        steps = slots.step + loop.count
        hidden, cache = extend(loop.token, cache, steps)
        scores = scores_of(hidden)
        token, logp = sampling.next_token(
            scores,
            jax.vmap(jax.random.fold_in)(row_keys, steps),
            temperature,
            spec.num_tokens,
            spec.truncation,
            None
            if loop.seen is None
            else sampling.penalize(scores, loop.seen, spec.repetition_penalty),
        )
        token, logp = agreed(model, token, logp)
        stops = jnp.isin(token, stop_tokens)
        entropies = _with_entropies(loop, scores, temperature, spec.num_tokens)
        if slots.given is not None:
            given = jax.lax.dynamic_index_in_dim(slots.given, loop.count, axis=1, keepdims=False)
            is_given = given >= 0
            token, logp = jnp.where(is_given, given, token), jnp.where(is_given, 0, logp)
            stops = stops & ~is_given
            if entropies is not None:
                entropies = entropies.at[:, loop.count].multiply(~is_given)
        return _Loop(
            count=loop.count + 1,
            token=token,
            live=loop.live & ~stops & (steps + 1 < slots.limit),
            lengths=loop.lengths + loop.live,
            tokens=loop.tokens.at[:, loop.count].set(token),
            logps=loop.logps.at[:, loop.count].set(logp),
            entropies=entropies,
            seen=None if loop.seen is None else loop.seen.at[rows, token].set(True),
            pool=(cache.keys, cache.values),
        )

    loop = jax.lax.while_loop(unfinished, step, loop)
    moved = {
        "ends": slots.ends + loop.count,
        "token": loop.token,
        "step": slots.step + loop.count,
        "live": loop.live,
    }
    if slots.given is not None:
        # They were taken: the chunk that follows without the host gives none.
        moved["given"] = jnp.full_like(slots.given, -1)
    if slots.history is not None:
        places = slots.ends[:, None] + 1 + jnp.arange(chunk)
        made = jnp.where(jnp.arange(chunk) < loop.lengths[:, None], loop.tokens, -1)
        moved["history"] = (
            jnp.asarray(slots.history).at[rows[:, None], places].set(made, mode="drop")
        )
    brought = loop.tokens, loop.logps, loop.lengths, loop.live, loop.entropies
    return loop.pool, brought, moved


def _extender(model: Transformer, variables, slots: Slots):
    """extend(tokens [B], cache, steps [B]) -> hidden states [B, D], cache; steps count completion tokens before."""

    def made(steps):
        drawn = noise.of_rows(variables, slots.noise, steps + 1)
        return fused_decode.extender(model, drawn, len(slots.live), adapter="params" in variables)

    if noise.has_own(variables) and variables["noise"].per == "token":
        return lambda tokens, cache, steps: made(steps)(tokens, cache)
    # Computed once for all steps: everything that does not change with the token.
    once = made(jnp.asarray(slots.step))
    return lambda tokens, cache, steps: once(tokens, cache)


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


def _with_entropies(loop: _Loop, scores, temperature, num_tokens: int) -> jax.Array | None:
    """The entropies of a chunk with those of the next token added; None if they are not needed."""
    if loop.entropies is None:
        return None
    # The same log-probabilities as `sampling.next_token`'s, of which XLA keeps one.
    logps = logprobs.log_softmax(scores, temperature, num_tokens)
    return loop.entropies.at[:, loop.count].set(logprobs.entropy(logps))
