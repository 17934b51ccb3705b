"""The loop that samples a chunk of tokens with drafts: a step runs a row's last token and its drafted tokens.

A token is a function of the row's key, its position and the tokens before it. So each position of a draft is sampled
with that position's random numbers, and a drafted token is accepted if it equals the sampled one. A row keeps the
sampled tokens up to and including the first that differs from the draft. Sampling one by one would give the same
tokens, so the distribution is exactly the same (speculative decoding, arXiv 2211.17192, with fixed random numbers).
Log-probabilities are those of the step that sampled the token.

A row's positions are separate rows of the step that read the same pages. Keys and values of rejected tokens stay
behind the row's end, where the next step overwrites them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from qerl_jax.aqn import draw as noise
from qerl_jax.generation import draft_search
from qerl_jax.generation.decode_step import EngineSpec, drawer, extender, seen_in
from qerl_jax.generation.draft_search import CHUNKS, MOST
from qerl_jax.generation.scheduler import Slots
from qerl_jax.model import kv_cache
from qerl_jax.model.transformer import Transformer, head

# The "chance" of a given token: above 1, so that it has priority over all drafted tokens.
_GIVEN = 2.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Loop:
    """The state of the loop: row b has counts[b] new tokens; ended rows were idle for `idle` row-steps in total."""

    counts: jax.Array
    token: jax.Array
    live: jax.Array
    history: jax.Array
    tokens: jax.Array
    behaviour_logps: jax.Array
    entropies: jax.Array | None
    seen: jax.Array | None
    pool: tuple[jax.Array, jax.Array]
    outcome: draft_search.Outcome
    idle: jax.Array


@dataclasses.dataclass(frozen=True)
class _Positions:
    """The row and the token of each of a step's M positions.

    Attributes:
        row: int32 [M], the row of each position.
        offset: int32 [M], the position's index among those of its row.
        is_used: bool [M], False for positions that compute nothing.
        first: int32 [B], the first position of each row.
    """

    row: jax.Array
    offset: jax.Array
    is_used: jax.Array
    first: jax.Array

    @classmethod
    def of(cls, counts: jax.Array, positions: int) -> "_Positions":
        """Returns positions in the order of rows: counts[b] positions for row b."""
        ends = jnp.cumsum(counts)
        place = jnp.arange(positions)
        row = jnp.minimum(jnp.sum(place[:, None] >= ends, axis=1), len(counts) - 1)
        first = ends - counts
        is_used = place < ends[-1]
        return cls(row, jnp.where(is_used, place - first[row], 0), is_used, first)

    def by_row(self, values: jax.Array) -> jax.Array:
        """Gathers values [M] to [B, MOST + 1]: those of a row's positions, and arbitrary ones behind them."""
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
    """Samples a chunk with drafts: a step runs `positions` tokens, at least one of each row.

    The chunk ends when a row that has not ended has got `CHUNKS * spec.chunk` or `slots.span` tokens, when all rows
    have ended, or when ended rows have been idle for `slots.patience` row-steps in total.

    Args:
        variables: See `decoding.decode`.
        pool: Keys and values, [L, N, J, S, C] each.
        slots: The rows.
        temperature: float32 scalar.
        stop_tokens: int32 [k].
        model: The policy.
        spec: Sampling options.
        odds: float32 [draft_search.KINDS], the chance that a drafted token is right, by its kind of match.
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
        # At least one token of a step is sampled after the draft, so one less can be drafted than the row may take.
        space = jnp.minimum(chunk - loop.counts, slots.limit - steps) - 1
        is_possible = loop.live[:, None] & (jnp.arange(MOST) < space[:, None])
        budget = positions - jnp.sum(loop.live)
        drafted = draft_search.shares(jnp.where(is_possible, chances, 0), budget)
        at = _Positions.of(jnp.where(loop.live, 1 + drafted, 0), positions)

        inputs = jnp.concatenate([loop.token[:, None], drafts.tokens], axis=1)
        its = lambda values: values[at.row]
        cache = kv_cache.KVCache(
            *loop.pool,
            # An unused position writes to page 0 (scratch), and reads one token of it.
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

        # The sampled or given tokens of a row's positions: [B, MOST + 1].
        token = jnp.where(is_given, given, token)
        right = (token[:, :MOST] == drafts.tokens) & (jnp.arange(MOST) < drafted[:, None])
        taken, is_stopped = _taken(right, jnp.isin(token, stop_tokens) & ~is_given)
        taken = jnp.where(loop.live, taken, 0)
        put = functools.partial(_put, taken)
        last = jnp.take_along_axis(token, jnp.maximum(taken - 1, 0)[:, None], axis=1)[:, 0]
        # If all tokens of a draft were tried, its end is counted as one more (wrong) token.
        compared = drafted + (drafted == jnp.sum(drafts.tokens >= 0, axis=1))
        outcome = draft_search.outcome(drafts, right, compared, loop.live & ~is_given[:, 0])
        live = loop.live & ~is_stopped & (steps + taken < slots.limit)
        return _Loop(
            counts=loop.counts + taken,
            token=jnp.where(loop.live, last, loop.token),
            live=live,
            history=put(loop.history, ends + 1, token),
            tokens=put(loop.tokens, loop.counts, token),
            behaviour_logps=put(loop.behaviour_logps, loop.counts, jnp.where(is_given, 0, logp)),
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
            behaviour_logps=jnp.zeros(shape, jnp.float32),
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
        # The host passes given tokens that are left to the next chunk.
        moved["given"] = jnp.full_like(slots.given, -1)
    results = (
        loop.tokens,
        loop.behaviour_logps,
        loop.counts,
        loop.live,
        loop.entropies,
        loop.outcome,
    )
    return loop.pool, results, moved


def _drafts(slots: Slots, loop: _Loop, ends: jax.Array) -> tuple[draft_search.Drafts, jax.Array]:
    """Returns drafts, and the given tokens, int32 [B, MOST + 1], -1 where a token is sampled.

    Given tokens replace the draft of a row.
    """
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
    """Returns the number of tokens that each row takes, int32 [B], and whether the last of them ends it, bool [B].

    Args:
        right: bool [B, MOST], whether each drafted token is the one that was sampled.
        stops: bool [B, MOST + 1], whether each sampled token ends a completion.
    """
    taken = 1 + jnp.sum(jnp.cumprod(right, axis=1), axis=1)
    stops = stops & (jnp.arange(MOST + 1) < taken[:, None])
    is_stopped = jnp.any(stops, axis=1)
    return jnp.where(is_stopped, jnp.argmax(stops, axis=1) + 1, taken), is_stopped


def _put(taken: jax.Array, held: jax.Array, begin: jax.Array, new: jax.Array) -> jax.Array:
    """Writes the first `taken` [B] of values [B, MOST + 1] into rows [B, n], from index `begin` [B] on."""
    offset = jnp.arange(MOST + 1)
    places = jnp.where(offset < taken[:, None], begin[:, None] + offset, held.shape[1])
    return held.at[jnp.arange(len(held))[:, None], places].set(new, mode="drop")


def _seen(seen: jax.Array, taken: jax.Array, token: jax.Array) -> jax.Array:
    """Returns the tokens that each row has seen, bool [B, V], after it took `taken` [B] of tokens [B, MOST + 1]."""
    ids = jnp.where(jnp.arange(MOST + 1) < taken[:, None], token, seen.shape[1])
    return seen.at[jnp.arange(len(seen))[:, None], ids].set(True, mode="drop")


def _with_drafts(seen: jax.Array, inputs: jax.Array, at: _Positions) -> jax.Array:
    """Returns the tokens that each position has seen, bool [M, V]: those of its row, and the inputs up to its own.

    Args:
        seen: bool [M, V], the tokens that each position's row has seen.
        inputs: int32 [B, MOST + 1], a row's last token and its draft.
        at: The positions.
    """
    tokens = inputs[at.row]
    is_before = jnp.arange(tokens.shape[1]) <= at.offset[:, None]
    place = jnp.arange(len(seen))[:, None]
    return seen.at[place, jnp.where(is_before, tokens, seen.shape[1])].set(True, mode="drop")
