"""Tests stop strings: where a completion is cut, and which part of it can be shown before."""

import itertools
import random

import pytest

from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.generation.stop_strings import StopStrings, text_before

# Token 9 says nothing, like a special token.
WORDS = {0: "a", 1: "b", 2: "ab", 3: "</", 4: "ans>", 5: ">\n", 6: "<", 7: "/ans", 9: ""}


def decode(tokens):
    return "".join(WORDS[token] for token in tokens)


STOPS = StopStrings(("</ans>", "bb"), decode)


def first_end(stops, tokens):
    """Looks for the end by the definition: the fewest tokens whose text holds a string."""
    ends = range(1, len(tokens) + 1)
    holds = lambda text: any(string in text for string in stops.strings)
    return next((n for n in ends if holds(stops.decode(tokens[:n]))), None)


@pytest.mark.parametrize(
    "tokens,kept",
    [
        *[([0, 1, 0, 1], None), ([0, 3, 4, 1], 3), ([6, 7, 5, 0, 1, 1], 3)],
        *[([6, 7, 9, 9, 9, 9, 9, 9, 9, 5], 10), ([2, 1, 3, 4], 2), ([3, 7], None)],
    ],
)
def test_the_fewest_tokens_whose_text_holds_a_string(tokens, kept):
    assert STOPS.end(tokens) == kept
    # However the tokens came: what was seen before holds none.
    for seen in range((kept or len(tokens) + 1) - 1):
        assert STOPS.end(tokens, seen) == kept


def test_in_pieces_of_any_size_all_short_sequences_are_cut_as_a_whole_is():
    for tokens in itertools.product(WORDS, repeat=4):
        expected = first_end(STOPS, tokens)
        assert STOPS.end(tokens) == expected
        if expected != 1:
            assert STOPS.end(tokens, 1) == expected


def test_characters_of_several_tokens_are_seen_however_the_tokens_came():
    by_bytes = lambda tokens: bytes(tokens).decode(errors="replace")
    texts = ("caé", "ééé。xx", "a🙂é", "ca。🙂", "é。é", "xaéxaé")
    for strings, text in itertools.product((("aé", "。x", "🙂"), ("🙂", "é")), texts):
        stops = StopStrings(strings, by_bytes)
        tokens = list(text.encode())
        expected = first_end(stops, tokens)
        for seen in range(expected or len(tokens)):
            assert stops.end(tokens, seen) == expected, (text, seen)


def test_bytes_that_take_a_whole_run_along_hide_no_string():
    """In sentencepiece's tokenizers tokens below 256 are bytes, and a whole run of them is a text or is not."""

    def by_runs(tokens):
        texts = []
        for is_byte, run in itertools.groupby(tokens, lambda token: token < 256):
            run = list(run)
            try:
                texts.append(bytes(run).decode() if is_byte else "".join(map(chr, run)))
            except UnicodeDecodeError as error:
                texts.append("\ufffd" * len(error.object))
        return "".join(texts)

    draw = random.Random(0)
    letters = [[1000], [1001], list("你".encode()), list("é".encode()), list("🙂".encode())]
    cut = [letters[2][:1], letters[4][:2]]
    for _ in range(3000):
        strings = draw.sample(["你", "é你", chr(1000) + "你", "🙂" + chr(1001), "éé"], 2)
        stops = StopStrings(tuple(strings), by_runs)
        tokens = [token for _ in range(8) for token in draw.choice(letters + cut)]
        chunk = draw.choice((1, 2, 3, 5, 8))
        found = (stops.end(tokens[: seen + chunk], seen) for seen in range(0, len(tokens), chunk))
        assert next(filter(None, found), None) == first_end(stops, tokens)


def test_the_text_before_the_first_string():
    params = SamplingParams(stop=STOPS.strings, stop_token_ids=[ord("!")])
    before = lambda text: text_before(text, list(map(ord, text)), params, lambda ids: chr(*ids))
    assert before("ab</ans>bb") == "ab"
    assert before("abbb</ans>") == "a"
    assert before("ab</ans") == "ab</ans"
    assert before("a!b!") == "a!b" and before("") == ""


@pytest.mark.parametrize(
    "text,settled",
    [("xyz", "xyz"), ("xy<", "xy"), ("xy</an", "xy"), ("xyb", "xy"), ("</a<", "</a")],
)
def test_what_may_become_a_stop_string_is_held_back(text, settled):
    assert STOPS.settled(text) == settled


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="none may be empty"):
        StopStrings(("a", ""), decode)
