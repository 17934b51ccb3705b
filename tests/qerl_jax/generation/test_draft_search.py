"""Tests the search for drafts against plain Python."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.generation import draft_search
from qerl_jax.generation.draft_search import LONGEST_MATCH, MOST, Drafts, Texts


def lines(texts, width):
    """int32 [B, width]: the texts, -1 behind each."""
    return np.array([[*text, *[-1] * (width - len(text))] for text in texts], np.int32)


def matches_at(text, place, context):
    """How many tokens up to a place are the context's last, where a token follows."""
    if place + 1 >= len(text) or text[place + 1] < 0:
        return 0
    pairs = zip(text[place::-1], context[: -1 - LONGEST_MATCH : -1], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def expected(rows, ended, group):
    """The definition: for each row the match's length and the draft."""
    for row, context in enumerate(rows):
        # Of rows with equal matches at equal places the first.
        texts = [(2, 0, ended[row])]
        texts += [
            (int(group[row] == g), -n, text)
            for n, (g, text) in enumerate(zip(group, rows, strict=True))
        ]
        match, _, place, _, text = max(
            (matches_at(text, place, context), rank, place, order, text)
            for rank, order, text in texts
            for place in range(len(text))
        )
        tokens = itertools.takewhile(lambda token: token >= 0, text[place + 1 : place + 1 + MOST])
        yield (match, [*tokens] if match else [])


@pytest.mark.parametrize("seed", range(6))
def test_a_draft_is_what_followed_the_longest_match(seed):
    draw = np.random.default_rng(seed)
    count, words = 5, 2 + seed
    rows = [draw.integers(0, words, draw.integers(1, 40)).tolist() for _ in range(count)]
    text = lambda: [*draw.integers(0, words, draw.integers(0, 30)).tolist(), -1]
    ended = [sum((text() for _ in range(draw.integers(0, 4))), []) for _ in range(count)]
    group = draw.integers(0, 2, count)
    texts = Texts(jnp.array(lines(ended, 130)), jnp.array(group))
    lengths = jnp.array([len(row) for row in rows])
    found = jax.jit(draft_search.search)(jnp.array(lines(rows, 41)), lengths, texts)
    for row, (match, tokens) in enumerate(expected(rows, ended, group)):
        assert int(found.match[row]) == match
        assert found.tokens[row].tolist() == tokens + [-1] * (MOST - len(tokens))


def test_a_draft_ends_with_its_text():
    """Also where the text fills its line, and where a draft would run into the next text."""
    texts = Texts(jnp.array([[1, 2, 3, 4], [1, 2, -1, 3], [5, 6, 7, -1]]), jnp.arange(3))
    rows = jnp.array([[2], [1], [9]])
    found = jax.jit(draft_search.search)(rows, jnp.ones(3, jnp.int32), texts)
    assert found.match.tolist() == [1, 1, 0]
    assert found.tokens.tolist() == [[3, 4, *[-1] * 5], [2, *[-1] * 6], [-1] * MOST]


def test_chances_fall_along_a_draft_and_are_0_behind_it():
    drafts = Drafts(jnp.array([1, 7, 0]), jnp.array([[4, 5, 6, -1, -1, -1, -1], [3] * 7, [-1] * 7]))
    odds = jnp.array([0.9, 0.1, 0.5, 0.6, 0.8])
    assert drafts.kinds()[:2].tolist() == [[1, 2, 2, 3, 3, 3, 3], [3, 4, 4, 4, 4, 4, 4]]
    found = drafts.chances(odds)
    np.testing.assert_allclose(found[0], [0.1, 0.05, 0.025, 0, 0, 0, 0])
    np.testing.assert_allclose(found[1], 0.6 * 0.8 ** np.arange(7), rtol=1e-6)
    assert not found[2].any()


def test_the_likeliest_tokens_of_all_rows_share_a_budget():
    chances = jnp.array([[0.9, 0.5, 0.2], [0.6, 0.5, 0.4], [0, 0, 0]])
    expected = {0: [0, 0, 0], 1: [1, 0, 0], 3: [2, 1, 0], 4: [2, 2, 0], 9: [3, 3, 0]}
    for budget, shares in expected.items():
        assert draft_search.shares(chances, jnp.int32(budget)).tolist() == shares


def test_of_a_draft_tokens_count_up_to_the_first_wrong_one():
    drafts = Drafts(jnp.array([1, 4, 0, 2]), jnp.ones((4, MOST), jnp.int32))
    right = jnp.array([[1, 1, 0, 1, 0, 0, 0], [1] * 7, [0] * 7, [1] * 7], bool)
    found = draft_search.outcome(
        drafts, right, jnp.array([7, 2, 5, 7]), jnp.array([True, True, True, False])
    )
    # Row 0: kinds 1, 2, 2 of which the last is wrong. Row 1: two of kind 3.
    assert found.tried.tolist() == [0, 1, 2, 2, 0]
    assert found.right.tolist() == [0, 1, 1, 2, 0]
    assert found.matches.tolist() == [1, 1, 0, 0, 1, 0, 0, 0, 0]
    assert (int(found.calls), int(found.rows)) == (1, 3)
    assert (found + found).tried.tolist() == [0, 2, 4, 4, 0]
