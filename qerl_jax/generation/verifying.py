"""The loop that samples a chunk of tokens with drafts: a step runs a row's token and those that may follow it.

A token is a function of (key, place) and of what comes before it. So each position of a draft is sampled with that
position's random numbers, and a drafted token is accepted if it equals the sampled one. A row keeps the tokens up
to and including the first that differs from the draft. Sampling one by one would give the same tokens: the
distribution is exactly the same (the idea of
speculative decoding, arXiv 2211.17192, in its form for a fixed source of randomness). Their log-probabilities are those
of this step.

A row's positions are rows of the step, over the same pages. Keys and values of tokens that are not accepted stay behind
its end, where the next step writes over them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from qerl_jax.generation import draft_search
from qerl_jax.generation.decode_step import EngineSpec, drawer, extender, seen_in
from qerl_jax.generation.draft_search import CHUNKS, MOST
from qerl_jax.generation.scheduler import Slots
from qerl_jax.model import kv_cache, noise
from qerl_jax.model.transformer import Transformer, head

# The likelihood of a token that is given: it comes before all drafted ones.
_GIVEN = 2.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Loop:
    """The state within a chunk: row b has sampled counts[b] tokens; rows that have ended were idle for `idle` steps."""

    counts: jax.Array
    token: jax.Array
    live: jax.Array
    history: jax.Array
    tokens: jax.Array
    logps: jax.Array
    entropies: jax.Array | None
    seen: jax.Array | None
    pool: tuple[jax.Array, jax.Array]
    outcome: draft_search.Outcome
    idle: jax.Array


@dataclasses.dataclass(frozen=True)
class _Positions:
    """Which token of which row each of M positions runs.

    Attributes:
        row: int32 [M].
        offset: int32 [M], tokens of the step before it in its row.
        is_used: bool [M].
        first: int32 [B], where a row's positions begin.
    """

    row: jax.Array
    offset: jax.Array
    is_used: jax.Array
    first: jax.Array

    @classmethod
    def of(cls, counts: jax.Array, positions: int) -> "_Positions":
        """Positions of rows one behind the other: counts[b] of row b."""
        ends = jnp.cumsum(counts)
        place = jnp.arange(positions)
        row = jnp.minimum(jnp.sum(place[:, None] >= ends, axis=1), len(counts) - 1)
        first = ends - counts
        is_used = place < ends[-1]
        return cls(row, jnp.where(is_used, place - first[row], 0), is_used, first)

    def by_row(self, values: jax.Array) -> jax.Array:
        """Values [M] as [B, MOST + 1]: those of a row's positions, and others behind them."""
        at = self.first[:, None] + jnp.arange(MOST + 1)
        return values[jnp.minimum(at, len(values) - 1)]


def sample(
    variables,
    pool,
    slots: Slots,
    temperature,
    stop_tokens,
    model: Transformer,
    spec: EngineSpec,
    odds,
    positions: int,
):
    """Samples a chunk with drafts: `positions` tokens in a step, at least one of each row.

    The chunk ends when a row has got `CHUNKS * spec.chunk` tokens or `slots.span`, when all have ended, or when those
    that have ended have been idle for `slots.patience` steps together.

    Args:
        variables: As for `decoding.decode`, and so are those up to `spec`.
        pool: Keys and values.
        slots: The rows.
        temperature: float32 scalar.
        stop_tokens: int32 [n].
        model: The policy.
        spec: How tokens are sampled.
        odds: float32 [draft_search.KINDS], the chance that a draft of each kind is right.
        positions: Tokens that a step runs, at least the number of rows.

    Returns:
        The pool, the results and the changed fields of `slots`, as `decoding.decode` packs them.
    """
    chunk, rows = CHUNKS * spec.chunk, len(slots.live)
    row_keys = jax.random.wrap_key_data(slots.keys)
    draw = drawer(model, variables, spec, temperature)
    own_noise = noise.has_own(variables)
    extend_all = None if own_noise else extender(model, variables, positions, None)
    vocab = len(head(variables["frozen"]))

    def unfinished(loop: _Loop):
        is_room = jnp.all(~loop.live | (loop.counts < jnp.minimum(chunk, slots.span)))
        return jnp.any(loop.live) & is_room & (loop.idle < slots.patience)

    def step(loop: _Loop) -> _Loop:
        ends, steps = slots.ends + loop.counts, slots.step + loop.counts
        drafts, given = _drafts(slots, loop, ends)
        is_given = given >= 0
        chances = jnp.where(is_given[:, :MOST], _GIVEN, drafts.chances(odds))
        # The last token that a row may take is sampled, and never drafted.
        room = jnp.minimum(chunk - loop.counts, slots.limit - steps) - 1
        is_possible = loop.live[:, None] & (jnp.arange(MOST) < room[:, None])
        budget = positions - jnp.sum(loop.live)
        drafted = draft_search.shares(jnp.where(is_possible, chances, 0), budget)
        at = _Positions.of(jnp.where(loop.live, 1 + drafted, 0), positions)

        inputs = jnp.concatenate([loop.token[:, None], drafts.tokens], axis=1)
        its = lambda values: values[at.row]
        cache = kv_cache.KVCache(
            *loop.pool,
            # A position out of use writes to page 0, and reads one slot of it.
            tables=jnp.where(at.is_used[:, None], its(slots.tables), 0),
            ends=jnp.where(at.is_used, its(ends) + at.offset, 0),
            sequence=jnp.where(at.is_used, at.row, -1),
        )
        extend = extend_all or extender(model, variables, positions, its(slots.noise))
        their_steps = its(steps) + at.offset
        hidden, cache = extend(inputs[at.row, at.offset], cache, their_steps)
        seen = None if loop.seen is None else _with_drafts(its(loop.seen), inputs, at)
        found = draw(hidden, its(row_keys), their_steps, seen)
        token, logp, entropy = (None if x is None else at.by_row(x) for x in found)

        # What a row's positions sampled, or were given: [B, MOST + 1].
        token = jnp.where(is_given, given, token)
        right = (token[:, :MOST] == drafts.tokens) & (jnp.arange(MOST) < drafted[:, None])
        taken, is_stopped = _taken(right, jnp.isin(token, stop_tokens) & ~is_given)
        taken = jnp.where(loop.live, taken, 0)
        put = functools.partial(_put, taken)
        last = jnp.take_along_axis(token, jnp.maximum(taken - 1, 0)[:, None], axis=1)[:, 0]
        # A draft that has ended and was right so far is compared once more, and wrong.
        compared = drafted + (drafted == jnp.sum(drafts.tokens >= 0, axis=1))
        outcome = draft_search.outcome(drafts, right, compared, loop.live & ~is_given[:, 0])
        live = loop.live & ~is_stopped & (steps + taken < slots.limit)
        return _Loop(
            counts=loop.counts + taken,
            token=jnp.where(loop.live, last, loop.token),
            live=live,
            history=put(loop.history, ends + 1, token),
            tokens=put(loop.tokens, loop.counts, token),
            logps=put(loop.logps, loop.counts, jnp.where(is_given, 0, logp)),
            entropies=None
            if entropy is None
            else put(loop.entropies, loop.counts, jnp.where(is_given, 0, entropy)),
            seen=None if loop.seen is None else _seen(loop.seen, taken, token),
            pool=(cache.keys, cache.values),
            outcome=loop.outcome + dataclasses.replace(outcome, rows=jnp.sum(loop.live)),
            idle=loop.idle + jnp.sum(slots.live & ~live),
        )

    shape = (rows, chunk)
    loop = jax.lax.while_loop(
        unfinished,
        step,
        _Loop(
            counts=jnp.zeros(rows, jnp.int32),
            token=jnp.asarray(slots.token),
            live=jnp.asarray(slots.live),
            history=jnp.asarray(slots.history),
            tokens=jnp.zeros(shape, jnp.int32),
            logps=jnp.zeros(shape, jnp.float32),
            entropies=jnp.zeros(shape, jnp.float32) if spec.entropies else None,
            seen=seen_in(slots.history, spec, vocab),
            pool=pool,
            outcome=draft_search.Outcome.start(),
            idle=jnp.int32(0),
        ),
    )
    moved = {
        "ends": slots.ends + loop.counts,
        "token": loop.token,
        "step": slots.step + loop.counts,
        "live": loop.live,
        "history": loop.history,
    }
    if slots.given is not None:
        # The host gives what is left of them to the chunk that follows.
        moved["given"] = jnp.full_like(slots.given, -1)
    results = loop.tokens, loop.logps, loop.counts, loop.live, loop.entropies, loop.outcome
    return loop.pool, results, moved


def _drafts(slots: Slots, loop: _Loop, ends: jax.Array) -> tuple[draft_search.Drafts, jax.Array]:
    """What may come next, and the tokens that are given: int32 [B, MOST + 1], -1 where a token is sampled."""
    found = draft_search.search(loop.history, ends + 1, slots.texts)
    if slots.given is None:
        return found, jnp.full((len(ends), MOST + 1), -1)
    places = loop.counts[:, None] + jnp.arange(MOST + 1)
    given = jnp.pad(slots.given, ((0, 0), (0, MOST + 1)), constant_values=-1)
    given = jnp.take_along_axis(given, places, axis=1)
    takes = given[:, 0] >= 0
    tokens = jnp.where(takes[:, None], given[:, :MOST], found.tokens)
    return draft_search.Drafts(jnp.where(takes, 0, found.match), tokens), given


def _taken(right: jax.Array, stops: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many tokens of a step each row takes, int32 [B], and whether the last of them ends it, bool [B].

    Args:
        right: bool [B, MOST], whether each drafted token is the one that was sampled.
        stops: bool [B, MOST + 1], whether each sampled token ends a completion.
    """
    taken = 1 + jnp.sum(jnp.cumprod(right, axis=1), axis=1)
    stops = stops & (jnp.arange(MOST + 1) < taken[:, None])
    is_stopped = jnp.any(stops, axis=1)
    return jnp.where(is_stopped, jnp.argmax(stops, axis=1) + 1, taken), is_stopped


def _put(taken: jax.Array, held: jax.Array, begin: jax.Array, new: jax.Array) -> jax.Array:
    """Puts the first `taken` [B] of values [B, MOST + 1] into lines [B, n], from places `begin` [B] on."""
    offset = jnp.arange(MOST + 1)
    places = jnp.where(offset < taken[:, None], begin[:, None] + offset, held.shape[1])
    return held.at[jnp.arange(len(held))[:, None], places].set(new, mode="drop")


def _seen(seen: jax.Array, taken: jax.Array, token: jax.Array) -> jax.Array:
    """Which tokens each row has seen, bool [B, V], after it has taken the first `taken` [B] of tokens [B, MOST + 1]."""
    ids = jnp.where(jnp.arange(MOST + 1) < taken[:, None], token, seen.shape[1])
    return seen.at[jnp.arange(len(seen))[:, None], ids].set(True, mode="drop")


def _with_drafts(seen: jax.Array, inputs: jax.Array, at: _Positions) -> jax.Array:
    """Which tokens each position has seen: those that its row had, and the drafted ones before it.

    Args:
        seen: bool [M, V].
        inputs: int32 [B, MOST + 1], a row's token and its draft.
        at: The positions.
    """
    tokens = inputs[at.row]
    is_before = jnp.arange(tokens.shape[1]) <= at.offset[:, None]
    place = jnp.arange(len(seen))[:, None]
    return seen.at[place, jnp.where(is_before, tokens, seen.shape[1])].set(True, mode="drop")
