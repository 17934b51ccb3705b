"""Drafts on the device: tokens that may come next, found in texts that are there already.

A draft is what followed the longest match of a row's last tokens: in the texts of the rows that run beside it, its own
among them, or in the texts of its group that have ended. That drafts need no model but only text is the idea of prompt
lookup (Saxena, 2023) and of SuffixDecoding (arXiv 2411.04975).
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

# The most tokens of a draft: with the token before it they fill a tile of decode attention.
MOST = 7
# The most tokens of a match.
LONGEST_MATCH = 8
# A chunk with drafts brings a row as many tokens as this number of chunks without: its steps bring several each.
CHUNKS = 4
# Matches are told apart by their number of binary digits: none, 1, 2 to 3, 4 to 7, 8.
KINDS = LONGEST_MATCH.bit_length() + 1
# No text has these: before the beginning of a text, and before that of a row.
_NO_TEXT, _NO_CONTEXT = -2, -3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Texts:
    """Where drafts are looked for, beside the texts of the rows in the batch.

    Attributes:
        ended: int32 [B, P], completions of each row's group that have ended, one behind the other; each behind the
            last tokens of the prompt, and before a -1.
        group: int32 [B], the number of each row's group.
    """

    ended: Any
    group: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """A draft for each row.

    Attributes:
        match: int32 [B], tokens that the row has in common with the text of its draft, at most `LONGEST_MATCH`;
            0 where there is no draft.
        tokens: int32 [B, MOST], -1 after the draft's end.
    """

    match: jax.Array
    tokens: jax.Array

    def kinds(self) -> jax.Array:
        """int32 [B, MOST], the kind of match before each token, if those before it are right."""
        return kind(self.match[:, None] + jnp.arange(MOST))

    def chances(self, odds: jax.Array) -> jax.Array:
        """float32 [B, MOST], the chance that a token and all before it are right; 0 after the draft's end.

        Args:
            odds: float32 [KINDS], the chance of a token by its kind of match.
        """
        is_there = (self.tokens >= 0) & (self.match[:, None] > 0)
        return jnp.cumprod(jnp.where(is_there, odds[self.kinds()], 0), axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of the drafts of a chunk.

    Attributes:
        tried: int32 [KINDS], drafted tokens behind right ones, by their kind of match. A draft that ends there counts
            as a wrong token.
        right: int32 [KINDS], how many of them were right.
        matches: int32 [LONGEST_MATCH + 1], drafts by the length of their match.
        calls: int32, steps of the chunk.
        rows: int32, rows of all steps together.
    """

    tried: jax.Array
    right: jax.Array
    matches: jax.Array
    calls: jax.Array
    rows: jax.Array

    @classmethod
    def start(cls) -> Self:
        """Nothing yet."""
        kinds, nothing = jnp.zeros(KINDS, jnp.int32), jnp.int32(0)
        return cls(kinds, kinds, jnp.zeros(LONGEST_MATCH + 1, jnp.int32), nothing, nothing)

    def __add__(self, other: Self) -> Self:
        return jax.tree.map(jnp.add, self, other)


def outcome(drafts: Drafts, right: jax.Array, lengths: jax.Array, live: jax.Array) -> Outcome:
    """Counts what became of drafts, in one step.

    Args:
        drafts: Of B rows.
        right: bool [B, MOST], whether each token is that of the text.
        lengths: int32 [B], how many of a row's tokens were compared.
        live: bool [B], which rows count.
    """
    is_first = (jnp.arange(MOST) < lengths[:, None]) & live[:, None]
    right = right & is_first
    behind_right = (
        jnp.cumprod(jnp.pad(right[:, :-1], ((0, 0), (1, 0)), constant_values=True), 1) > 0
    )
    tried = is_first & behind_right & (drafts.match[:, None] > 0)
    by_kind = drafts.kinds()[..., None] == jnp.arange(KINDS)
    count = lambda which: jnp.sum(which[..., None] & by_kind, axis=(0, 1), dtype=jnp.int32)
    of_match = drafts.match[:, None] == jnp.arange(LONGEST_MATCH + 1)
    return Outcome(
        tried=count(tried),
        right=count(tried & right),
        matches=jnp.sum(of_match & live[:, None], axis=0, dtype=jnp.int32),
        calls=jnp.int32(1),
        rows=jnp.sum(live, dtype=jnp.int32),
    )


def kind(match: jax.Array) -> jax.Array:
    """The kind of a match by its length: its number of binary digits, at most `KINDS` - 1."""
    return sum((match >= 1 << digit).astype(jnp.int32) for digit in range(KINDS - 1))


def search(history: jax.Array, lengths: jax.Array, texts: Texts) -> Drafts:
    """Finds a draft for each row.

    The longest match wins. Among equal lengths, ended completions of the group come first, then running rows of the
    group, then other rows; among these, the latest position in its text.

    Args:
        history: int32 [B, T], the tokens of each row, its prompt included; -1 after its last.
        lengths: int32 [B], how many tokens that are.
        texts: Where to look beside it.
    """
    rows, width = history.shape
    behind = lengths[:, None] - 1 - jnp.arange(LONGEST_MATCH)
    context = jnp.take_along_axis(history, jnp.maximum(behind, 0), axis=1)
    context = jnp.where(behind >= 0, context, _NO_CONTEXT)

    # [row, text, place]: how many tokens up to a place are the row's last.
    beside = _matches(history[None], context[:, None])
    is_group = texts.group[:, None] == texts.group
    # One number, of which the largest is wanted: length, group, place.
    ranks = (2 * beside + is_group[..., None]) * width + jnp.arange(width)
    ranks = jnp.where(beside > 0, ranks, 0).max(axis=2)
    text = ranks.argmax(axis=1)
    rank = jnp.take_along_axis(ranks, text[:, None], axis=1)[:, 0]
    match, place = rank // (2 * width), rank % width

    size = texts.ended.shape[1]
    before = _matches(texts.ended, context)
    ranks = jnp.where(before > 0, before * size + jnp.arange(size), 0).max(axis=1)
    match_before, place_before = ranks // size, ranks % size

    steps = 1 + jnp.arange(MOST)
    from_beside = history[text[:, None], jnp.minimum(place[:, None] + steps, width - 1)]
    at = jnp.minimum(place_before[:, None] + steps, size - 1)
    from_before = jnp.take_along_axis(texts.ended, at, axis=1)
    is_before = match_before >= match
    tokens = jnp.where(is_before[:, None], from_before, from_beside)
    # After the first -1 another text begins; and the last place of a text is followed by itself.
    last = jnp.where(
        is_before[:, None], place_before[:, None] + steps >= size, place[:, None] + steps >= width
    )
    is_there = jnp.cumprod((tokens >= 0) & ~last, axis=1) > 0
    match = jnp.maximum(match, match_before)
    return Drafts(match, jnp.where(is_there & (match[:, None] > 0), tokens, -1))


def _matches(texts: jax.Array, context: jax.Array) -> jax.Array:
    """How many of a row's last tokens end at each place of a text; 0 where no token follows.

    Args:
        texts: int32 [..., P].
        context: int32 [..., LONGEST_MATCH], the last token first.
    """
    *shape, size = texts.shape
    ahead = jnp.full((*shape, LONGEST_MATCH - 1), _NO_TEXT, jnp.int32)
    padded = jnp.concatenate([ahead, texts, jnp.full((*shape, 1), -1, jnp.int32)], axis=-1)
    run = padded[..., LONGEST_MATCH:] >= 0
    length = jnp.zeros(jnp.broadcast_shapes(context.shape[:-1], tuple(shape)) + (size,), jnp.int32)
    for back in range(LONGEST_MATCH):
        begin = LONGEST_MATCH - 1 - back
        run = run & (padded[..., begin : begin + size] == context[..., back, None])
        length = length + run
    return length


def shares(chances: jax.Array, budget: jax.Array) -> jax.Array:
    """How many tokens of each draft to verify, int32 [B]: the `budget` most likely tokens over all rows; tokens
    with chance 0 are never chosen.

    Args:
        chances: float32 [B, n], which do not rise along a row; 0 where there is no token.
        budget: int32 scalar.
    """
    rows, most = chances.shape
    # Place by place, so that of tokens of one chance a row's earlier ones come first.
    flat = chances.T.reshape(-1)
    place = jnp.arange(rows * most)
    is_before = (flat > flat[:, None]) | ((flat == flat[:, None]) & (place < place[:, None]))
    is_chosen = (flat > 0) & (is_before.sum(axis=1) < budget)
    return is_chosen.reshape(most, rows).sum(axis=0)
