"""Drafts on the device: likely next tokens, copied from texts that already exist.

A draft is what followed the longest match of a row's last tokens, in the rows of the batch (its own text included) or
in ended completions of its group. Drafting from text without a draft model is the idea of prompt lookup decoding
(Saxena, 2023) and of SuffixDecoding (arXiv 2411.04975).
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

# The most tokens of a draft: with the token before it, they fill a tile of decode attention.
MOST = 7
# The most tokens of a match.
LONGEST_MATCH = 8
# A chunk with drafts may sample this many times as many tokens of a row, because a step samples several.
CHUNKS = 4
# Matches are classified by the number of binary digits of their length: 0, 1, 2 to 3, 4 to 7, 8.
KINDS = LONGEST_MATCH.bit_length() + 1
# Ids that pad the beginning of a text and of a row's context; they are no tokens, and never match.
_NO_TEXT, _NO_CONTEXT = -2, -3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts in which drafts are searched, in addition to the rows of the batch.

    Ended completions are concatenated; each follows the last tokens of the prompt, and is followed by -1.
    """

    ended: Any  # int32 [B, P], the ended completions of each row's group
    group: Any  # int32 [B], the number of each row's group


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """A draft for each row; the match is that between the row's end and the draft's text."""

    match: jax.Array  # int32 [B], length of the match, at most `LONGEST_MATCH`; 0 without a draft
    tokens: jax.Array  # int32 [B, MOST], -1 after the draft's end

    def kinds(self) -> jax.Array:
        """Returns the kind of match before each token, if the tokens before it are right: int32 [B, MOST]."""
        return kind(self.match[:, None] + jnp.arange(MOST))

    def chances(self, odds: jax.Array) -> jax.Array:
        """Returns the chance that a token and all before it are right: float32 [B, MOST]; 0 after the draft's end.

        `odds`, float32 [KINDS], are the chances that a token is right, by its kind of match.
        """
        is_there = (self.tokens >= 0) & (self.match[:, None] > 0)
        return jnp.cumprod(jnp.where(is_there, odds[self.kinds()], 0), axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """Statistics of the drafts of a chunk.

    Attributes:
        tried: int32 [KINDS], number of compared tokens whose predecessors in the draft were all right, by their kind
            of match. The end of a draft counts as a wrong token.
        right: int32 [KINDS], number of these that were right.
        matches: int32 [LONGEST_MATCH + 1], number of drafts by the length of their match; 0 is no draft.
        calls: int32, steps of the chunk.
        rows: int32, number of rows that had not ended, summed over the steps.
    """

    tried: jax.Array
    right: jax.Array
    matches: jax.Array
    calls: jax.Array
    rows: jax.Array

    @classmethod
    def start(cls) -> Self:
        """Returns counts of zero."""
        kinds, nothing = jnp.zeros(KINDS, jnp.int32), jnp.int32(0)
        return cls(kinds, kinds, jnp.zeros(LONGEST_MATCH + 1, jnp.int32), nothing, nothing)

    def __add__(self, other: Self) -> Self:
        return jax.tree.map(jnp.add, self, other)


def outcome(drafts: Drafts, right: jax.Array, lengths: jax.Array, live: jax.Array) -> Outcome:
    """Counts how many drafted tokens were right, in one step.

    Args:
        drafts: The drafts of B rows.
        right: bool [B, MOST], whether each drafted token equals the sampled one.
        lengths: int32 [B], the number of a row's tokens that were compared.
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
    """Returns the kind of a match by its length: the number of binary digits, at most `KINDS` - 1."""
    return sum((match >= 1 << digit).astype(jnp.int32) for digit in range(KINDS - 1))


def search(history: jax.Array, lengths: jax.Array, texts: Texts) -> Drafts:
    """Finds a draft for each row.

    The longest match wins. Among equal lengths, ended completions of the group come first, then running rows of the
    group, then other rows; among these, the latest position in its text.

    Args:
        history: int32 [B, T], the tokens of each row, its prompt included; -1 after its last.
        lengths: int32 [B], the number of these tokens.
        texts: Further texts to search.
    """
    rows, width = history.shape
    behind = lengths[:, None] - 1 - jnp.arange(LONGEST_MATCH)
    context = jnp.take_along_axis(history, jnp.maximum(behind, 0), axis=1)
    context = jnp.where(behind >= 0, context, _NO_CONTEXT)

    # [row, text, position]: length of the match that ends at a position.
    beside = _matches(history[None], context[:, None])
    is_group = texts.group[:, None] == texts.group
    # Encodes length, group and position in one number, so that the best match is the largest.
    ranks = (2 * beside + is_group[..., None]) * width + jnp.arange(width)
    ranks = jnp.where(beside > 0, ranks, 0).max(axis=2)
    text = ranks.argmax(axis=1)
    rank = jnp.take_along_axis(ranks, text[:, None], axis=1)[:, 0]
    match, position = rank // (2 * width), rank % width

    size = texts.ended.shape[1]
    before = _matches(texts.ended, context)
    ranks = jnp.where(before > 0, before * size + jnp.arange(size), 0).max(axis=1)
    match_before, position_before = ranks // size, ranks % size

    steps = 1 + jnp.arange(MOST)
    from_beside = history[text[:, None], jnp.minimum(position[:, None] + steps, width - 1)]
    at = jnp.minimum(position_before[:, None] + steps, size - 1)
    from_before = jnp.take_along_axis(texts.ended, at, axis=1)
    is_before = match_before >= match
    tokens = jnp.where(is_before[:, None], from_before, from_beside)
    # After the first -1 another text begins. At the end of a text, the clipped index repeats its last token.
    last = jnp.where(
        is_before[:, None],
        position_before[:, None] + steps >= size,
        position[:, None] + steps >= width,
    )
    is_there = jnp.cumprod((tokens >= 0) & ~last, axis=1) > 0
    match = jnp.maximum(match, match_before)
    return Drafts(match, jnp.where(is_there & (match[:, None] > 0), tokens, -1))


def _matches(texts: jax.Array, context: jax.Array) -> jax.Array:
    """Returns the length of the match between a row's last tokens and each position of a text, int32 [..., P].

    It is the number of equal tokens up to and including that position; 0 where no token follows. Texts are int32
    [..., P]; the context, int32 [..., LONGEST_MATCH], has the row's last token first.
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
    """Returns how many tokens of each draft to verify, int32 [B]: the `budget` most likely tokens over all rows.

    The chances, float32 [B, n], do not increase along a row. They are 0 where there is no token, which is never chosen.
    """
    rows, most = chances.shape
    # Position by position, so that among tokens of equal chance a row's earlier ones come first.
    flat = chances.T.reshape(-1)
    index = jnp.arange(rows * most)
    is_before = (flat > flat[:, None]) | ((flat == flat[:, None]) & (index < index[:, None]))
    is_chosen = (flat > 0) & (is_before.sum(axis=1) < budget)
    return is_chosen.reshape(most, rows).sum(axis=0)
