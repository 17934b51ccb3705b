"""Tests the replay of chunks: its time is what rows need, and what the rule of their end costs."""

import pytest

from scripts.replay_chunks import Rule, replay


def test_rows_of_one_length_are_never_idle():
    assert replay([64] * 12, 4, Rule(32), mean=1, price=2.0, host=3.0) == (6 * (32 * 2 + 3), 0)


# The third row begins when the chunk ends in which the first, of 8 tokens, has ended.
@pytest.mark.parametrize(("rule", "steps"), [(Rule(32), 32 + 66), (Rule(32, 0.25), 8 + 66)])
def test_a_slot_is_idle_until_its_chunk_ends(rule, steps):
    time, idle = replay([8, 64, 66], 2, rule, mean=1, price=1.0, host=0.0)
    assert time == steps
    assert idle == pytest.approx(1 - (8 + 64 + 66) / (2 * steps))
