"""Tests when drafts are made, and how many tokens of them."""

import dataclasses

import numpy as np
import pytest

from qerl_jax.generation import draft_control
from qerl_jax.generation.draft_control import Auto, Record, price
from qerl_jax.generation.draft_search import KINDS, LONGEST_MATCH, Outcome


def outcome(odds, match=8, rows=8, calls=32, tried=100):
    """A chunk in which all drafts had a match of one length, and a share of their tokens was right."""
    kinds = np.arange(KINDS) > 0
    matches = np.zeros(LONGEST_MATCH + 1, np.int32)
    matches[match] = rows
    right = np.round(kinds * tried * odds).astype(np.int32)
    return Outcome(
        (kinds * tried).astype(np.int32), right, matches, np.int32(calls), np.int32(rows * calls)
    )


def taught(*outcomes):
    """A control that has seen that. Where drafts do not pay, the next chunk is one that compares some."""
    control = Auto()
    control._chunks_without = draft_control._SELDOM - 1
    for seen in outcomes:
        control.learn(8, 0, seen, int(seen.rows))
    return control


def test_prices_are_the_measured_times_and_lines_between_them():
    assert [price(n) for n in (1, 8, 32, 64)] == [1, 1, 1.28, 1.76]
    assert price(20) == pytest.approx((1 + 1.28) / 2)
    assert [price(8, n) for n in (8, 32)] == [1.22, 1.46]
    # A step of 32 rows is no cheaper with drafts.
    assert price(32, 32) == pytest.approx(1.28 + 0.22) and price(32, 64) == 1.65


def test_there_are_no_drafts_before_enough_tokens_were_compared():
    assert Auto().positions(8, 8) == 0
    assert taught(outcome(1.0, tried=4)).positions(8, 8) == 0
    assert taught(*[outcome(1.0, tried=4)] * 4).positions(8, 8) > 0


@pytest.mark.parametrize(
    ("odds", "slots", "live", "positions"),
    [
        (0.02, 8, 8, 0),  # nothing is right
        (0.5, 8, 8, 32),  # 16 tokens in 1.46
        (0.02, 8, 1, 0),
        (0.3, 8, 1, 0),  # 1.43 tokens in 1.46
        (0.4, 8, 1, 32),
        (0.2, 32, 32, 0),
        (0.95, 32, 32, 64),
        (0.95, 64, 64, 0),  # there is no room
    ],
)
def test_a_step_has_drafts_if_they_pay(odds, slots, live, positions):
    assert taught(*[outcome(odds)] * 4).positions(slots, live) == positions


def test_rows_without_a_match_have_no_drafts_to_pay():
    good, none = outcome(0.9), outcome(0.9, match=0)
    assert taught(good).positions(8, 8) > 0
    none = dataclasses.replace(none, tried=good.tried, right=good.right)
    assert taught(none).positions(8, 8) == 0


def test_drafts_begin_and_end_only_for_a_gain():
    """Estimates waver."""
    odds = np.linspace(0.02, 0.5, 97)
    begins = next(n for n in odds if taught(*[outcome(n)] * 4).positions(8, 8))
    control = taught(*[outcome(0.5)] * 4)
    for right, positions in ((0.5, 32), (begins - 0.02, 32), (0.02, 0), (begins - 0.02, 0)):
        for _ in range(6):
            control.learn(8, 32, outcome(right), 300)
        control._chunks_without = draft_control._SELDOM - 1
        assert control.positions(8, 8) == positions


def test_where_drafts_do_not_pay_they_are_compared_seldom():
    control = taught(*[outcome(0.02)] * 4)
    said = [control.positions(8, 8) for _ in range(2 * draft_control._SELDOM)]
    assert said == 2 * [0, *[None] * (draft_control._SELDOM - 1)]
    known = control.odds().tolist()
    control.learn(8, None, Outcome.start(), 256)
    assert control.odds().tolist() == known
    control.learn(8, 0, outcome(0.95), 256)
    control.learn(8, 0, outcome(0.95), 256)
    assert control.positions(8, 8) > 0


def test_drafts_begin_also_where_one_row_compares_a_few_tokens_at_a_time():
    control, said = Auto(), []
    for _ in range(8 * draft_control._SELDOM):
        said.append(control.positions(8, 1))
        if said[-1]:
            break
        compared = outcome(0.9, rows=1, tried=1) if said[-1] == 0 else Outcome.start()
        control.learn(8, said[-1], compared, 32)
    assert said[-1] == 32 and len(said) <= draft_control._MOST_AT_FIRST


def test_where_nothing_matches_drafts_are_looked_for_seldom():
    control, said = Auto(), []
    for _ in range(4 * draft_control._SELDOM):
        said.append(control.positions(8, 8))
        control.learn(8, said[-1], outcome(0.0, match=0, tried=0), 256)
    often = draft_control._MOST_AT_FIRST
    assert said[:often] == [0] * often and said[often:].count(0) == 2


def test_what_was_learned_is_forgotten_by_and_by():
    control = taught(*[outcome(0.9)] * 3)
    before = control.odds()
    for _ in range(20):
        control.learn(8, 32, outcome(0.1), 256)
    assert before[-1] > 0.85 and control.odds()[-1] < 0.12 and control.odds().dtype == np.float32


def test_the_record_counts_tokens_and_what_they_would_have_cost():
    record = Record()
    assert record.accepted_per_call is None and record.speedup is None
    record.add(8, 0, outcome(0.5, calls=10), 80)
    assert record.speedup == 1 and record.accepted_per_call is None
    # 8 rows in 10 calls got 160 tokens: without drafts 20 calls.
    drafted = Record()
    drafted.add(8, 32, outcome(0.5, calls=10), 160)
    assert drafted.accepted_per_call == 2
    assert drafted.speedup == pytest.approx(20 / (10 * 1.46))
    both = record + drafted
    assert both.time_without == 30
    rest = dataclasses.astuple(both - record)
    assert rest == pytest.approx(dataclasses.astuple(drafted))
    empty = dataclasses.replace(outcome(0.5), rows=np.int32(0), calls=np.int32(0))
    before = dataclasses.astuple(both)
    both.add(8, 32, empty, 0)
    assert dataclasses.astuple(both) == before
