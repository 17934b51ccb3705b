"""Tests what a fleet knows of prompts; what it does on several devices is in `tests/test_several_devices.py`."""

import numpy as np

from qerl_jax.generation import fleet
from qerl_jax.generation.scheduler import QueuedPrompt, RowTokens


def test_lengths_are_kept_of_the_prompts_that_were_sampled_last(monkeypatch):
    monkeypatch.setattr(fleet, "_MOST_LENGTHS", 3)
    subject = fleet.Fleet(engine=None, replicas=None)
    prompt = lambda n: QueuedPrompt(np.array([n], np.int32), np.zeros((1, 2), np.uint32), 9)

    def sampled(lengths):
        """A round in which prompt n has a completion of so many tokens."""
        tokens = map(np.zeros, lengths.values())
        chunk = [RowTokens(row, array, array, "stop") for row, array in enumerate(tokens)]
        list(subject._remembered([prompt(n) for n in lengths], iter([chunk])))

    def known():
        return [n for n in range(6) if subject._expected([prompt(n)]) != [1.0]]

    sampled({0: 5, 1: 6})
    sampled({2: 7, 0: 8})
    assert known() == [0, 1, 2] and subject._expected([prompt(0)]) == [8.0]
    sampled({3: 4})
    assert known() == [0, 2, 3]
    # More at once than are kept.
    sampled({1: 2, 2: 2, 4: 2, 5: 2})
    assert known() == [2, 4, 5]
