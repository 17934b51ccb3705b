"""The programs of the engine: the prefill of prompts, and the loop that samples a chunk of tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from qerl_jax.aqn import draw as noise
from qerl_jax.generation import draft_search, verifying
from qerl_jax.generation.decode_step import EngineSpec, drawer, extender, seen_in
from qerl_jax.generation.device_pool import BY_HEADS
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
        pool: Keys and values, [L, N, J, S, C] each; donated.
        tokens: int32 [R, T], right-padded with 0.
        tables: int32 [R, W], the pages of each prompt.
        numbers: int32 [R], the number of each prompt's noise if rows have their own; else None.
        model: The policy.

    Returns:
        The new keys and values.
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
    how = variables, pool, slots, temperature, stop_tokens, model, spec
    if positions:
        pool, results, moved = verifying.sample(*how, odds, positions)
    else:
        pool, results, moved = _sample(*how, compares)
    return pool, Packed.of(results), Packed.of(dataclasses.replace(slots, texts=None, **moved))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Loop:
    """The state of the loop: every row that has not ended has `count` new tokens."""

    count: jax.Array
    token: jax.Array
    live: jax.Array
    lengths: jax.Array
    tokens: jax.Array
    behaviour_logps: jax.Array
    entropies: jax.Array | None
    seen: jax.Array | None
    pool: tuple[jax.Array, jax.Array]


def _sample(
    variables,
    pool,
    slots: Slots,
    temperature,
    stop_tokens,
    model: Transformer,
    spec: EngineSpec,
    compares,
):
    """Implements `decode` with one token of each row in a step.

    Returns:
        The pool, the results of the chunk, and the changed fields of `slots`, by name.
    """
    chunk = spec.chunk
    rows = jnp.arange(len(slots.live))
    row_keys = jax.random.wrap_key_data(slots.keys)
    extend = extender(model, variables, len(rows), slots.noise)
    draw = drawer(model, variables, spec, temperature)
    shape = (len(rows), chunk)
    loop = _Loop(
        count=jnp.int32(0),
        token=slots.token,
        live=slots.live,
        lengths=jnp.zeros(len(rows), jnp.int32),
        tokens=jnp.zeros(shape, jnp.int32),
        behaviour_logps=jnp.zeros(shape, jnp.float32),
        entropies=jnp.zeros(shape, jnp.float32) if spec.entropies else None,
        seen=seen_in(slots.history, spec, len(head(variables["frozen"]))),
        pool=pool,
    )

    def unfinished(loop: _Loop):
        return (loop.count < chunk) & jnp.any(loop.live)

    def step(loop: _Loop) -> _Loop:
        # A row that has ended writes to page 0 (scratch), and reads one token of it.
        cache = kv_cache.KVCache(
            *loop.pool,
            tables=jnp.where(loop.live[:, None], slots.tables, 0),
            ends=jnp.where(loop.live, slots.ends + loop.count, 0),
            shared=None if slots.shared is None else jnp.where(loop.live, slots.shared, 0),
        )
        steps = slots.step + loop.count
        hidden, cache = extend(loop.token, cache, steps)
        token, logp, entropy = draw(hidden, row_keys, steps, loop.seen)
        stops = jnp.isin(token, stop_tokens)
        if slots.given is not None:
            given = jax.lax.dynamic_index_in_dim(slots.given, loop.count, axis=1, keepdims=False)
            is_given = given >= 0
            token, logp = jnp.where(is_given, given, token), jnp.where(is_given, 0, logp)
            stops = stops & ~is_given
            entropy = None if entropy is None else jnp.where(is_given, 0, entropy)
        put = lambda held, new: None if held is None else held.at[:, loop.count].set(new)
        return _Loop(
            count=loop.count + 1,
            token=token,
            live=loop.live & ~stops & (steps + 1 < slots.limit),
            lengths=loop.lengths + loop.live,
            tokens=put(loop.tokens, token),
            behaviour_logps=put(loop.behaviour_logps, logp),
            entropies=put(loop.entropies, entropy),
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
        # All given tokens were used; a next chunk that starts before the host reads this one must not repeat them.
        moved["given"] = jnp.full_like(slots.given, -1)
    if slots.history is not None:
        places = slots.ends[:, None] + 1 + jnp.arange(chunk)
        made = jnp.where(jnp.arange(chunk) < loop.lengths[:, None], loop.tokens, -1)
        moved["history"] = (
            jnp.asarray(slots.history).at[rows[:, None], places].set(made, mode="drop")
        )
    outcome = None
    if slots.texts is not None:
        # A branch instead of a second program, which would have to be compiled for each batch size.
        compared = functools.partial(_compared, slots, loop.tokens, loop.lengths, moved["history"])
        outcome = jax.lax.cond(compares, compared, draft_search.Outcome.start)
        lived = jnp.sum(loop.lengths)
        outcome = dataclasses.replace(outcome, calls=loop.count, rows=lived)
    results = loop.tokens, loop.behaviour_logps, loop.lengths, loop.live, loop.entropies, outcome
    return loop.pool, results, moved


def _compared(
    slots: Slots, tokens: jax.Array, made: jax.Array, history: jax.Array
) -> draft_search.Outcome:
    """Compares drafts at some positions of a chunk with its tokens, so that the host learns whether drafts would pay.

    Args:
        slots: The rows before the chunk.
        tokens: int32 [B, n], the chunk's tokens.
        made: int32 [B], the number of tokens that each row got.
        history: int32 [B, T], the rows' tokens after the chunk.
    """
    chunk = tokens.shape[1]
    padded = jnp.pad(tokens, ((0, 0), (0, draft_search.MOST)))
    found = draft_search.Outcome.start()
    for place in range(0, chunk, _COMPARED):
        lengths = slots.ends + 1 + place
        is_known = jnp.arange(history.shape[1]) < lengths[:, None]
        drafts = draft_search.search(jnp.where(is_known, history, -1), lengths, slots.texts)
        right = drafts.tokens == padded[:, place : place + draft_search.MOST]
        live = slots.live & (made > place)
        if slots.given is not None:
            live = live & (slots.given[:, place] < 0)
        found += draft_search.outcome(drafts, right, made - place, live)
    return found
