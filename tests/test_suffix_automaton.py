"""Tests the suffix automaton against a search through all sequences."""

import collections
import itertools

import numpy as np
import pytest

from scripts.suffix_automaton import Draft, SuffixAutomaton


def occurrences(sequences, tokens):
    """Finds the places (sequence, position) just after the tokens by looking everywhere."""
    n = len(tokens)
    return [
        (row, at)
        for row, sequence in enumerate(sequences)
        for at in range(n, len(sequence) + 1)
        if sequence[at - n : at] == tokens
    ]


def followers(sequences, tokens):
    """Counts how often each token follows the tokens."""
    places = occurrences(sequences, tokens)
    return collections.Counter(sequences[row][at] for row, at in places if at < len(sequences[row]))


def longest(sequences, context):
    """Returns the length of the context's longest end after which something followed."""
    ends = (context[len(context) - n :] for n in range(len(context), 0, -1))
    return next((len(end) for end in ends if followers(sequences, end)), 0)


def grown(rng, letters, count, length):
    """Makes an automaton and its sequences, which grew in pieces in a random order."""
    automaton, sequences, ends = SuffixAutomaton(), [[] for _ in range(count)], [0] * count
    for row in rng.permutation(np.repeat(np.arange(count), length // 4)):
        piece = rng.integers(0, letters, rng.integers(1, 8)).tolist()
        ends[row] = automaton.add(piece, ends[row])
        sequences[row] += piece
    return automaton, sequences


@pytest.mark.parametrize("letters", [1, 2, 3, 8])
def test_counts_are_those_of_a_search(letters):
    rng = np.random.default_rng(letters)
    automaton, sequences = grown(rng, letters, count=4, length=24)
    substrings = {
        tuple(sequence[i:j])
        for sequence in sequences
        for i, j in itertools.combinations(range(len(sequence) + 1), 2)
    }
    for tokens in substrings:
        assert automaton.count(tokens) == len(occurrences(sequences, list(tokens)))
    for _ in range(50):
        tokens = rng.integers(0, letters + 1, 5).tolist()
        assert automaton.count(tokens) == len(occurrences(sequences, tokens))
    assert len(automaton._next) <= 2 * sum(map(len, sequences)) + 1


@pytest.mark.parametrize("letters", [2, 4, 12])
def test_drafts_follow_the_longest_match_by_the_most_frequent_token(letters):
    rng = np.random.default_rng(letters)
    automaton, sequences = grown(rng, letters, count=3, length=20)
    for _ in range(200):
        # What was never seen, and then what perhaps was.
        source = sequences[rng.integers(3)]
        begin = rng.integers(len(source))
        context = [letters, *source[begin : begin + rng.integers(9)], rng.integers(letters).item()]
        found = automaton.draft(context, 4)
        assert found.match == longest(sequences, context)
        matched = context[len(context) - found.match :]
        for token, share in zip(found.tokens, found.shares, strict=True):
            counts = followers(sequences, matched)
            assert counts[token] == max(counts.values())
            assert share == counts[token] / (len(occurrences(sequences, matched)) + 1)
            matched = [*matched, token]
        if found.match and len(found.tokens) < 4:
            assert not followers(sequences, matched)


def test_nothing_is_drafted_without_a_match():
    automaton = SuffixAutomaton()
    assert automaton.draft([1, 2], 4) == Draft()
    automaton.add([1, 2, 3])
    assert automaton.draft([5], 4) == automaton.draft([], 4) == automaton.draft([3], 4) == Draft()
    assert automaton.draft([5, 2], 4) == Draft(1, [3], [0.5])
    assert automaton.draft([1, 2], 0) == Draft(2, [], [])
