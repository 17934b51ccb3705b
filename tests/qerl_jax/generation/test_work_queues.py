"""Tests rows on several devices: each row is in one place, shapes are equal, and no device idles while rows wait."""

import itertools

import numpy as np
import pytest

from qerl_jax.generation.work_queues import WorkQueues, spans


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_dealt_once_and_in_order(seed, whole):
    draw = np.random.default_rng(seed)
    sizes, places = draw.integers(1, 9, draw.integers(1, 12)).tolist(), int(draw.integers(1, 6))
    parts = spans(sizes, places, whole=whole)
    assert len(parts) == places
    rows = [
        (group, row) for group, start, end in itertools.chain(*parts) for row in range(start, end)
    ]
    assert rows == [(group, row) for group, size in enumerate(sizes) for row in range(size)]
    pieces = sum(map(len, parts))
    if whole:
        assert pieces == len(sizes)
    else:
        counts = [sum(end - start for _, start, end in part) for part in parts]
        assert max(counts) - min(counts) <= 1 and pieces < len(sizes) + places


def test_places_have_as_many_tokens_to_make_as_is_expected():
    lengths = [1, 1, 1, 9, 3, 3]
    parts = spans([2] * 6, 3, whole=False, lengths=lengths)
    first = [(0, 0, 2), (1, 0, 2), (2, 0, 2), (3, 0, 1)]
    assert parts == [first, [(3, 1, 2)], [(4, 0, 2), (5, 0, 2)]]
    # One row that is longer than all others leaves a place without any: it takes what waits elsewhere.
    parts = spans([1, 1, 1], 3, whole=False, lengths=[1, 1, 98])
    assert parts == [[(0, 0, 1), (1, 0, 1)], [(2, 0, 1)], []]


def test_groups_that_come_out_even_are_not_parted():
    assert spans([4] * 6, 3, whole=False) == spans([4] * 6, 3, whole=True)
    assert spans([4] * 6, 3, whole=False)[1] == [(2, 0, 4), (3, 0, 4)]


def test_who_has_nothing_takes_half_of_the_longest_hand_from_its_end():
    queues = WorkQueues([[], [1, 2], [3, 4, 5, 6]])
    first = lambda waiting: waiting[:1]
    assert queues.take(0, first) == [5]
    assert queues.take(2, first) == [3]
    assert queues.take(0, first) == [6]
    assert queues.take(0, first) == [2]
    assert queues.take(1, lambda waiting: []) == [] and queues.any()
    assert queues.take(0, lambda waiting: waiting[:]) == [1]
    assert queues.take(0, first) == [4] and not queues.any()
    assert queues.take(0, first) == []
