"""The decoding step with drafts: it runs a row's last token and its drafted tokens.

A token is a function of the row's key, its position and the tokens before it. A row keeps the sampled tokens up to and
including the first that differs from the draft, so they are those of sampling one by one (speculative decoding, arXiv
2211.17192, with fixed random numbers). A row's positions are separate rows of the step that read the same pages. Keys
and values of rejected tokens stay behind the row's end, where the next step overwrites them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from qerl_jax.generation import draft_search
from qerl_jax.generation.decode_step import Chunk, Loop
from qerl_jax.generation.draft_search import MOST
from qerl_jax.generation.scheduler import Slots
from qerl_jax.model import kv_cache

# The "chance" of a forced token: above 1, so that it has priority over all drafted tokens.
_FORCED = 2.0


@dataclasses.dataclass(frozen=True)
class _Positions:
    """The row and the token of each of a step's M positions."""

    row: jax.Array  # int32 [M], the row of each position
    offset: jax.Array  # int32 [M], the position's index among those of its row
    is_used: jax.Array  # bool [M], False for positions that compute nothing
    first: jax.Array  # int32 [B], the first position of each row

    @classmethod
    def of(cls, counts: jax.Array, positions: int) -> "_Positions":
        """Returns positions in the order of rows: counts[b] positions for row b."""
        ends = jnp.cumsum(counts)
        index = jnp.arange(positions)
        row = jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1), len(counts) - 1)
        first = ends - counts
        is_used = index < ends[-1]
        return cls(row, jnp.where(is_used, index - first[row], 0), is_used, first)

    def by_row(self, values: jax.Array) -> jax.Array:
        """Gathers values [M] to [B, MOST + 1]: those of a row's positions, and arbitrary ones behind them."""
        at = self.first[:, None] + jnp.arange(MOST + 1)
        return values[jnp.minimum(at, len(values) - 1)]


def unfinished(chunk: Chunk, loop: Loop) -> jax.Array:
    """Whether a step follows.

    The chunk ends when a row that has not ended has got `chunk.size` or `slots.span` tokens, when all rows have
    ended, or when ended rows have been idle for `slots.patience` row-steps in total.
    """
    slots = chunk.slots
    has_space = jnp.all(~loop.live | (loop.count < jnp.minimum(chunk.size, slots.span)))
    return jnp.any(loop.live) & has_space & (loop.idle < slots.patience)


def step(chunk: Chunk, loop: Loop, *, odds: jax.Array, positions: int) -> Loop:
    """Runs `positions` tokens, at least one of each row: the last token of each row, and drafted or forced ones.

    `odds`, float32 [draft_search.KINDS], are the chances that a drafted token is right, by its kind of match.
    """
    slots = chunk.slots
    ends, steps = slots.ends + loop.count, slots.step + loop.count
    drafts, forced = _drafts(slots, loop, ends)
    is_forced = forced >= 0
    clear = lambda values: jnp.where(is_forced, 0, values)
    chances = jnp.where(is_forced[:, :MOST], _FORCED, drafts.chances(odds))
    # At least one token of a step is sampled after the draft, so one less can be drafted than the row may take.
    space = jnp.minimum(chunk.size - loop.count, slots.limit - steps) - 1
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
    extend = chunk.extend or chunk.extend_with(its(slots.noise))
    their_steps = its(steps) + at.offset
    hidden, cache = extend(inputs[at.row, at.offset], cache, their_steps)
    seen = None if loop.seen is None else _with_drafts(its(loop.seen), inputs, at)
    drawn = chunk.draw(hidden, its(chunk.row_keys), their_steps, seen)
    token, logp, entropy = (None if x is None else at.by_row(x) for x in drawn)

    # The sampled or forced tokens of a row's positions: [B, MOST + 1].
    token = jnp.where(is_forced, forced, token)
    right = (token[:, :MOST] == drafts.tokens) & (jnp.arange(MOST) < drafted[:, None])
    taken, is_stopped = _taken(right, jnp.isin(token, chunk.stop_tokens) & ~is_forced)
    taken = jnp.where(loop.live, taken, 0)
    put = functools.partial(_put, taken)
    last = jnp.take_along_axis(token, jnp.maximum(taken - 1, 0)[:, None], axis=1)[:, 0]
    # If all tokens of a draft were tried, its end is counted as one more (wrong) token.
    compared = drafted + (drafted == jnp.sum(drafts.tokens >= 0, axis=1))
    outcome = draft_search.outcome(drafts, right, compared, loop.live & ~is_forced[:, 0])
    live = loop.live & ~is_stopped & (steps + taken < slots.limit)
    return Loop(
        count=loop.count + taken,
        token=jnp.where(loop.live, last, loop.token),
        live=live,
        lengths=None,
        history=put(loop.history, ends + 1, token),
        tokens=put(loop.tokens, loop.count, token),
        behaviour_logps=put(loop.behaviour_logps, loop.count, clear(logp)),
        entropies=None if entropy is None else put(loop.entropies, loop.count, clear(entropy)),
        seen=None if loop.seen is None else _seen(loop.seen, taken, token),
        pool=(cache.keys, cache.values),
        outcome=loop.outcome + dataclasses.replace(outcome, rows=jnp.sum(loop.live)),
        idle=loop.idle + jnp.sum(slots.live & ~live),
    )


def _drafts(slots: Slots, loop: Loop, ends: jax.Array) -> tuple[draft_search.Drafts, jax.Array]:
    """Returns drafts, and the forced tokens, int32 [B, MOST + 1], -1 where a token is sampled.

    Forced tokens replace the draft of a row.
    """
    drafts = draft_search.search(loop.history, ends + 1, slots.texts)
    if slots.forced is None:
        return drafts, jnp.full((len(ends), MOST + 1), -1)
    indices = loop.count[:, None] + jnp.arange(MOST + 1)
    forced = jnp.pad(slots.forced, ((0, 0), (0, MOST + 1)), constant_values=-1)
    forced = jnp.take_along_axis(forced, indices, axis=1)
    has_forced = forced[:, 0] >= 0
    tokens = jnp.where(has_forced[:, None], forced[:, :MOST], drafts.tokens)
    return draft_search.Drafts(jnp.where(has_forced, 0, drafts.match), tokens), forced


def _taken(right: jax.Array, stops: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the number of tokens that each row takes, int32 [B], and whether the last of them ends it, bool [B].

    `right` [B, MOST] marks drafted tokens that were sampled; `stops` [B, MOST + 1], sampled ones that end a row.
    """
    taken = 1 + jnp.sum(jnp.cumprod(right, axis=1), axis=1)
    stops = stops & (jnp.arange(MOST + 1) < taken[:, None])
    is_stopped = jnp.any(stops, axis=1)
    return jnp.where(is_stopped, jnp.argmax(stops, axis=1) + 1, taken), is_stopped


def _put(taken: jax.Array, buffer: jax.Array, begin: jax.Array, new: jax.Array) -> jax.Array:
    """Writes the first `taken` [B] of values [B, MOST + 1] into rows [B, n], from index `begin` [B] on."""
    offset = jnp.arange(MOST + 1)
    indices = jnp.where(offset < taken[:, None], begin[:, None] + offset, buffer.shape[1])
    return buffer.at[jnp.arange(len(buffer))[:, None], indices].set(new, mode="drop")


def _seen(seen: jax.Array, taken: jax.Array, token: jax.Array) -> jax.Array:
    """Returns the tokens that each row has seen, bool [B, V], after it took `taken` [B] of tokens [B, MOST + 1]."""
    ids = jnp.where(jnp.arange(MOST + 1) < taken[:, None], token, seen.shape[1])
    return seen.at[jnp.arange(len(seen))[:, None], ids].set(True, mode="drop")


def _with_drafts(seen: jax.Array, inputs: jax.Array, at: _Positions) -> jax.Array:
    """Adds to the tokens that each position's row has seen, bool [M, V], the inputs [B, MOST + 1] up to its own."""
    tokens = inputs[at.row]
    is_before = jnp.arange(tokens.shape[1]) <= at.offset[:, None]
    position = jnp.arange(len(seen))[:, None]
    return seen.at[position, jnp.where(is_before, tokens, seen.shape[1])].set(True, mode="drop")
