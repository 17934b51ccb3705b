"""Tests rows of several turns: between turns a row keeps its slot and waits for the tokens of the reply."""

import concurrent.futures
import dataclasses
import threading

import jax
import numpy as np
import pytest

from qerl_jax.generation.draft_control import Drafting
from qerl_jax.generation.stop_strings import StopStrings
from tests.pallas_kernels.common import slow
from tests.qerl_jax.generation.test_drafts import Control, drafting
from tests.qerl_jax.generation.test_engine import (
    WIDTH,
    complete,
    likeliest,
    make,
    plain_scores,
    policy,
    prompts,
)

# Ends of turns that random weights reach soon; a reply may hold one, which ends nothing.
STOPS = tuple(range(8))
REPLIES = ([9, 3, 10, 11, 12, 13], [14], [15, 16, 17])
LIMIT = 40


class Turns:
    """Gives each row the replies in turn, at once or from a thread of its own."""

    def __init__(self, replies=REPLIES, late=False):
        self.replies, self.late, self.asked = replies, late, []

    def __call__(self, row, tokens):
        self.asked.append((row, list(tokens)))
        turn = sum(1 for r, _ in self.asked if r == row) - 1
        if turn == len(self.replies):
            return None
        future = concurrent.futures.Future()
        answer = lambda: future.set_result(self.replies[turn])
        if self.late and row % 2:
            threading.Timer(0.05 * (turn + 1), answer).start()
        else:
            answer()
        return future


def sample(turns, max_concurrent=4, **options):
    subject, limits = make(**{"stop_tokens": STOPS} | options), {"max_concurrent": max_concurrent}
    rows = complete(subject, prompts(limit=LIMIT), turns=turns, **limits)
    return [rows[number] for number in sorted(rows)]


def turns_of(row):
    """Returns the tokens of each turn and of each reply."""
    edges = np.flatnonzero(np.diff(row.given.astype(int))) + 1
    parts = np.split(row.tokens, edges)
    return [part.tolist() for part in parts[::2]], [part.tolist() for part in parts[1::2]]


@pytest.fixture(scope="module")
def rows():
    return sample(Turns())


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert a.tokens.tolist() == e.tokens.tolist() and a.ended == e.ended
        np.testing.assert_array_equal(a.given, e.given)
        np.testing.assert_allclose(a.behaviour_logps, e.behaviour_logps, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("positions", [slow(6), 40])
def test_replies_are_run_several_tokens_at_a_time_where_there_are_drafts(rows, positions):
    """A reply may be longer than a draft, and than the room of a step; what follows it is sampled."""
    drafts = drafting(positions)
    assert_same(sample(Turns(), drafts=drafts, chunk=12), rows)
    long = [[9, 3, 10, 11, 12, 13, 14, 15, 16, 17, 9, 9, 10], [18]]
    assert_same(sample(Turns(long), drafts=drafts, chunk=12), sample(Turns(long)))


@pytest.mark.slow
def test_a_row_whose_turn_has_ended_is_answered_before_others_have_run_long():
    """A chunk that the device began before the host has looked would run without the row to its end."""
    control = Control(10)
    drafts = Drafting(lambda: control, least_limit=1)
    # Ten rows in as many slots, each with a token in each step: none is at its limit before the 40th.
    sample(Turns([[9]] * LIMIT), drafts=drafts, chunk=16, max_concurrent=10)
    steps = np.cumsum([calls for calls, _, _ in control.chunks])
    idle = [idle for _, idle, _ in control.chunks[: np.argmax(steps >= LIMIT)]]
    assert len(idle) > 5 and max(idle) == 1


def test_turns_end_with_a_stop_and_replies_stand_between_them_as_they_were_given(rows):
    several = 0
    for row in rows:
        own, replies = turns_of(row)
        assert replies == [list(reply) for reply in REPLIES[: len(replies)]]
        several += len(replies) > 1
        for turn in own[:-1]:
            assert np.isin(turn, STOPS).tolist() == [False] * (len(turn) - 1) + [True]
        assert row.ended == "length" or own[-1][-1] in STOPS
        assert not row.given[-1] and len(row.tokens) <= LIMIT
        assert (
            not row.behaviour_logps[row.given].any() and (row.behaviour_logps[~row.given] < 0).all()
        )
    assert several > 3 and {row.ended for row in rows} == {"stop", "length"}


def test_each_turn_is_what_the_policy_says_to_all_that_stands_before_it(rows):
    """Log-probabilities are compared with one plain pass over prompt, turns and replies."""
    owners = [prompt for prompt in prompts(limit=LIMIT) for _ in prompt.keys]
    for row in rows:
        logps = jax.nn.log_softmax(plain_scores(owners[row.row].tokens, row.tokens))
        expected = np.where(row.given, 0, logps[np.arange(len(row.tokens)), row.tokens])
        np.testing.assert_allclose(row.behaviour_logps, expected, atol=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        *[{}, slow({"kv_cache_tokens": 130})],
        *[slow({"max_concurrent": None}), slow({"chunk": 3, "page_size": 7})],
    ],
)
def test_neither_late_replies_nor_slots_nor_pages_change_a_row(rows, options):
    assert_same(sample(Turns(late=True), **options), rows)


def test_other_rows_go_on_while_one_waits():
    """The first row's reply comes when all others have ended."""
    gate, ended = concurrent.futures.Future(), []

    def turns(row, tokens):
        return gate if row == 0 and not ended and not gate.done() else None

    options = {"max_prompt_length": WIDTH, "max_concurrent": 4, "turns": turns}
    subject = make(stop_tokens=STOPS)
    for row in subject.completions(policy()[1], prompts(limit=LIMIT), 1.0, **options):
        ended.append(row.row)
        if len(ended) == 9:
            gate.set_result([20, 21])
    assert ended[-1] == 0 and len(ended) == 10


def test_a_reply_without_tokens_ends_the_row_and_one_too_long_cuts_it():
    for reply, why in (([], "stop"), ([9] * LIMIT, "length")):
        for row in sample(Turns([reply])):
            assert not row.given.any()
            assert row.ended == (why if row.tokens[-1] in STOPS else "length")


def test_an_error_of_a_turn_taker_ends_the_sampling():
    future = concurrent.futures.Future()
    future.set_exception(OSError("no environment"))
    with pytest.raises(OSError, match="no environment"):
        sample(lambda row, tokens: future)


@pytest.mark.slow
def test_stop_strings_end_turns_and_those_of_replies_end_nothing():
    """Tokens are letters; a turn ends after its first own "a" or "b"."""
    letters = {5: "a", 6: "b", 9: "a"}
    decode = lambda ids: "".join(letters.get(int(i), ".") for i in ids)
    strings = StopStrings(("a", "b"), decode)
    rows = sample(Turns(), stop_tokens=(), stop_strings=strings)
    assert sum(bool(turns_of(row)[1]) for row in rows) > 3
    for row in rows:
        for turn in turns_of(row)[0][:-1]:
            text = decode(turn)
            assert text[-1] in "ab" and not set(text[:-1]) & set("ab")
    # What the device sampled behind an end is not in the cache of the next turn.
    assert_same(sample(Turns(late=True), stop_tokens=(), stop_strings=strings, chunk=1), rows)


def test_given_tokens_have_no_entropy_and_count_as_seen_for_the_penalty():
    """One plain pass over the row gives the likeliest token under the penalty."""
    subject = make(stop_tokens=range(0, 64, 2), repetition_penalty=1.5)
    subject._spec = dataclasses.replace(subject._spec, entropies=True)
    queue = prompts(lengths=(3, 5), groups=(1, 1), limit=LIMIT)
    for row in complete(subject, queue, 0.0, max_concurrent=2, turns=Turns()).values():
        assert not row.entropies[row.given].any() and row.entropies[~row.given].all()
        expected = np.array(likeliest(queue[row.row].tokens, row.tokens, 1.5))
        assert row.given.any() and np.all((row.tokens == expected) | row.given)
