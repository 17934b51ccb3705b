"""Tests the replay of recorded lengths through the schedule."""

import numpy as np
import pytest

from scripts import replay_slots


def test_a_step_costs_what_was_measured_and_what_lies_between():
    prices = {8: 2.0, 32: 4.0, 64: 5.0}
    costs = [replay_slots.step_ms(prices, rows) for rows in (1, 8, 20, 64, 96)]
    assert costs == pytest.approx([2.0, 2.0, 3.0, 5.0, 6.0])


def test_every_row_is_replayed_to_its_length():
    lengths, prompts = np.random.default_rng(0).integers(1, 300, 32).tolist(), [100] * 4
    few, many = (replay_slots.replay(lengths, prompts, 8, slots, 32, 300) for slots in (4, 32))
    # One row at a time would take the sum, all at once the longest.
    for chunks, live, _ in (few, many):
        assert max(lengths) <= chunks.total() <= sum(lengths) and live > 2
    assert many[0].total() < few[0].total() and many[2] > 0 == few[2]
