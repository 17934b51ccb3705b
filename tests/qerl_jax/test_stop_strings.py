"""Stop strings: where a completion is cut, and what of it can be shown before."""

import itertools

import pytest

from qerl_jax.stop_strings import StopStrings

# Token 9 says nothing, like a special token.
WORDS = {0: "a", 1: "b", 2: "ab", 3: "</", 4: "ans>", 5: ">\n", 6: "<", 7: "/ans", 9: ""}


def decode(tokens):
    return "".join(WORDS[token] for token in tokens)


STOPS = StopStrings(("</ans>", "bb"), decode)


@pytest.mark.parametrize(
    "tokens,kept",
    [
        ([0, 1, 0, 1], None),
        ([0, 3, 4, 1], 3),
        ([6, 7, 5, 0, 1, 1], 3),
        ([6, 7, 9, 9, 9, 9, 9, 9, 9, 5], 10),
        ([2, 1, 3, 4], 2),
        ([3, 7], None),
    ],
)
def test_the_fewest_tokens_whose_text_holds_a_string(tokens, kept):
    assert STOPS.kept(tokens) == kept
    # However the tokens came: what was seen before holds none.
    for seen in range((kept or len(tokens) + 1) - 1):
        assert STOPS.kept(tokens, seen) == kept


def test_in_pieces_of_any_size_all_short_sequences_are_cut_as_a_whole_is():
    for tokens in itertools.product(WORDS, repeat=4):
        whole = STOPS.kept(tokens)
        expected = next(
            (n for n in range(1, 5) if any(s in decode(tokens[:n]) for s in STOPS.strings)), None
        )
        assert whole == expected
        if expected != 1:
            assert STOPS.kept(tokens, 1) == expected


def test_characters_of_several_tokens_are_seen_however_the_tokens_came():
    by_bytes = lambda tokens: bytes(tokens).decode(errors="replace")
    texts = ("caé", "ééé。xx", "a🙂é", "ca。🙂", "é。é", "xaéxaé")
    for strings, text in itertools.product((("aé", "。x", "🙂"), ("🙂", "é")), texts):
        stops = StopStrings(strings, by_bytes)
        tokens = list(text.encode())
        expected = next(
            (
                end
                for end in range(1, len(tokens) + 1)
                if any(string in by_bytes(tokens[:end]) for string in strings)
            ),
            None,
        )
        for seen in range(expected or len(tokens)):
            assert stops.kept(tokens, seen) == expected, (text, seen)


def test_the_text_before_the_first_string():
    assert STOPS.before("ab</ans>bb") == "ab"
    assert STOPS.before("abbb</ans>") == "a"
    assert STOPS.before("ab</ans") == "ab</ans"


@pytest.mark.parametrize(
    "text,settled",
    [("xyz", "xyz"), ("xy<", "xy"), ("xy</an", "xy"), ("xyb", "xy"), ("</a<", "</a")],
)
def test_what_may_become_a_stop_string_is_held_back(text, settled):
    assert STOPS.settled(text) == settled


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="none may be empty"):
        StopStrings(("a", ""), decode)
