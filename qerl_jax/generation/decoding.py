"""The programs of the engine: the prefill of prompts, and the loop that samples a chunk of tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from qerl_jax.aqn import draw as noise
from qerl_jax.generation import draft_search, verifying
from qerl_jax.generation.decode_step import Chunk, EngineSpec, Loop, drawer, extender, seen_in
from qerl_jax.generation.device_pool import BY_HEADS
from qerl_jax.generation.draft_search import CHUNKS
from qerl_jax.generation.packed import Packed
from qerl_jax.generation.programs import program
from qerl_jax.generation.scheduler import Slots
from qerl_jax.model import kv_cache
from qerl_jax.model.transformer import Transformer, head

# In a chunk that does not use drafts, one is made and compared every `_COMPARED` tokens.
_COMPARED = 16


@program("model")
def prefill(variables, pool, tokens, tables, numbers=None, *, model: Transformer):
    """Computes keys and values of R prompts, and writes them to their pages.

    Args:
        variables: See `Engine.stream`.
        pool: Keys and values, [L, N, J, S, C] each; donated, and returned with the new ones.
        tokens: int32 [R, T], right-padded with 0.
        tables: int32 [R, W], the pages of each prompt.
        numbers: int32 [R], the number of each prompt's noise if rows have their own; else None.
        model: The policy.
    """
    variables = noise.of_rows(variables, numbers, jnp.zeros(len(tokens), jnp.int32))
    cache = kv_cache.KVCache(*pool, tables, jnp.zeros(len(tokens), jnp.int32))
    _, cache = model.apply(variables, tokens, cache=cache, adapter="params" in variables)
    return cache.keys, cache.values


@program("model", "spec", "positions", gives=(BY_HEADS, False, False))
def decode(
    variables,
    pool,
    rows: Packed,
    temperature,
    stop_tokens,
    texts: draft_search.Texts | None = None,
    odds=None,
    compares=None,
    *,
    model: Transformer,
    spec: EngineSpec,
    positions: int | None = None,
):
    """Samples up to `spec.chunk` tokens per row, or more with drafts; ends early when all rows have ended.

    Args:
        variables: See `Engine.stream`.
        pool: Keys and values, [L, N, J, S, C] each; donated.
        rows: The rows: packed `Slots` without `texts`.
        temperature: float32 scalar.
        stop_tokens: int32 [k].
        texts: The texts in which drafts are searched; None for no drafts.
        odds: float32 [draft_search.KINDS], the chance that a drafted token is right; None without `texts`.
        compares: bool scalar; whether a chunk without `positions` makes some drafts, which are compared with the
            sampled tokens but not used. None without `texts`.
        model: The policy.
        spec: Sampling options.
        positions: Tokens of all rows that a step runs, those of drafts included; None for one token of each row.

    Returns:
        The pool; the results of the chunk; and the rows as inputs of the next chunk, `Packed`. The results are
        `Packed`, too: tokens int32 [B, n], log-probabilities float32 [B, n], the number of tokens that each row got,
        int32 [B], which rows have not ended, bool [B], entropies float32 [B, n] or None, and statistics of drafts
        (`draft_search.Outcome`) or None. n is `spec.chunk`, or `CHUNKS * spec.chunk` with `positions`.
    """
    slots: Slots = dataclasses.replace(rows.tree(), texts=texts)
    has_drafts, count = positions is not None, len(slots.live)
    extend_with = functools.partial(extender, model, variables, positions or count)
    chunk = Chunk(
        slots,
        row_keys=jax.random.wrap_key_data(slots.keys),
        stop_tokens=stop_tokens,
        size=spec.chunk * (CHUNKS if has_drafts else 1),
        # A step with drafts runs other rows each time.
        extend=None if has_drafts and noise.has_own(variables) else extend_with(slots.noise),
        extend_with=extend_with,
        draw=drawer(model, variables, spec, temperature),
    )
    shape = (count, chunk.size)
    loop = Loop(
        count=jnp.zeros(count if has_drafts else (), jnp.int32),
        token=jnp.asarray(slots.token),
        live=jnp.asarray(slots.live),
        lengths=None if has_drafts else jnp.zeros(count, jnp.int32),
        history=slots.history if has_drafts else None,
        tokens=jnp.zeros(shape, jnp.int32),
        behaviour_logps=jnp.zeros(shape, jnp.float32),
        entropies=jnp.zeros(shape, jnp.float32) if spec.entropies else None,
        seen=seen_in(slots.history, spec, len(head(variables["frozen"]))),
        pool=pool,
        outcome=draft_search.Outcome.start() if has_drafts else None,
        idle=jnp.int32(0) if has_drafts else None,
    )
    unfinished, step = _unfinished, _step
    if has_drafts:
        unfinished = verifying.unfinished
        step = functools.partial(verifying.step, odds=odds, positions=positions)
    bound = (functools.partial(function, chunk) for function in (unfinished, step))
    loop = jax.lax.while_loop(*bound, loop)
    moved = {
        "texts": None,
        "ends": slots.ends + loop.count,
        "token": loop.token,
        "step": slots.step + loop.count,
        "live": loop.live,
        "history": loop.history,
    }
    if slots.forced is not None:
        # The host passes forced tokens that are left to the next chunk; one that starts before the host has read this
        # one must not repeat those that were used.
        moved["forced"] = jnp.full_like(slots.forced, -1)
    lengths, outcome = loop.count, loop.outcome
    if not has_drafts:
        lengths = loop.lengths
        moved["history"] = _extended(slots, loop.tokens, lengths)
        outcome = _outcome(slots, loop, moved["history"], compares)
    results = loop.tokens, loop.behaviour_logps, lengths, loop.live, loop.entropies, outcome
    return loop.pool, Packed.of(results), Packed.of(dataclasses.replace(slots, **moved))


def _unfinished(chunk: Chunk, loop: Loop) -> jax.Array:
    """Whether a step without drafts follows."""
    return (loop.count < chunk.size) & jnp.any(loop.live)


def _step(chunk: Chunk, loop: Loop) -> Loop:
    """Samples one token of each row."""
    slots = chunk.slots
    # A row that has ended writes to page 0 (scratch), and reads one token of it.
    cache = kv_cache.KVCache(
        *loop.pool,
        tables=jnp.where(loop.live[:, None], slots.tables, 0),
        ends=jnp.where(loop.live, slots.ends + loop.count, 0),
        shared=None if slots.shared is None else jnp.where(loop.live, slots.shared, 0),
    )
    steps = slots.step + loop.count
    hidden, cache = chunk.extend(loop.token, cache, steps)
    token, logp, entropy = chunk.draw(hidden, chunk.row_keys, steps, loop.seen)
    stops = jnp.isin(token, chunk.stop_tokens)
    if slots.forced is not None:
        forced = jax.lax.dynamic_index_in_dim(slots.forced, loop.count, axis=1, keepdims=False)
        is_forced = forced >= 0
        token, logp = jnp.where(is_forced, forced, token), jnp.where(is_forced, 0, logp)
        stops = stops & ~is_forced
        entropy = None if entropy is None else jnp.where(is_forced, 0, entropy)
    put = lambda buffer, new: None if buffer is None else buffer.at[:, loop.count].set(new)
    return dataclasses.replace(
        loop,
        count=loop.count + 1,
        token=token,
        live=loop.live & ~stops & (steps + 1 < slots.limit),
        lengths=loop.lengths + loop.live,
        tokens=put(loop.tokens, token),
        behaviour_logps=put(loop.behaviour_logps, logp),
        entropies=put(loop.entropies, entropy),
        seen=None if loop.seen is None else loop.seen.at[jnp.arange(len(token)), token].set(True),
        pool=(cache.keys, cache.values),
    )


def _extended(slots: Slots, tokens: jax.Array, lengths: jax.Array) -> jax.Array | None:
    """Returns the history with the first lengths [B] of a chunk's tokens [B, n]; None if it is not needed."""
    if slots.history is None:
        return None
    offset = jnp.arange(tokens.shape[1])
    indices = slots.ends[:, None] + 1 + offset
    new = jnp.where(offset < lengths[:, None], tokens, -1)
    rows = jnp.arange(len(tokens))[:, None]
    return jnp.asarray(slots.history).at[rows, indices].set(new, mode="drop")


def _outcome(
    slots: Slots, loop: Loop, history: jax.Array | None, compares: jax.Array | None
) -> draft_search.Outcome | None:
    """Returns statistics of a chunk without drafts: of what drafts would have been, if it `compares` any."""
    if slots.texts is None:
        return None
    # A branch instead of a second program, which would have to be compiled for each batch size.
    compared = functools.partial(_compared, slots, loop.tokens, loop.lengths, history)
    outcome = jax.lax.cond(compares, compared, draft_search.Outcome.start)
    return dataclasses.replace(outcome, calls=loop.count, rows=jnp.sum(loop.lengths))


def _compared(
    slots: Slots, tokens: jax.Array, lengths: jax.Array, history: jax.Array
) -> draft_search.Outcome:
    """Compares drafts at some positions with a chunk's tokens [B, n], so that the host learns whether drafts would pay.

    `slots` are the rows before the chunk, and `history` is that after it.
    """
    padded = jnp.pad(tokens, ((0, 0), (0, draft_search.MOST)))
    total = draft_search.Outcome.start()
    for start in range(0, tokens.shape[1], _COMPARED):
        known = slots.ends + 1 + start
        is_known = jnp.arange(history.shape[1]) < known[:, None]
        drafts = draft_search.search(jnp.where(is_known, history, -1), known, slots.texts)
        right = drafts.tokens == padded[:, start : start + draft_search.MOST]
        live = slots.live & (lengths > start)
        if slots.forced is not None:
            live = live & (slots.forced[:, start] < 0)
        total += draft_search.outcome(drafts, right, lengths - start, live)
    return total
