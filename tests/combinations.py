"""Combinations of parameters of which a few run by default."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def spread(*axes: Sequence[Any], every: int) -> list[Any]:
    """All combinations of the axes' values as parameters of a test; all but one of so many are slow.

    Those that are not slow lie on diagonals, so that each value is among them, and of two axes most pairs of values.

    Args:
        *axes: Values of a parameter each.
        every: How many combinations there are for one that is not slow.
    """
    made = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        made.append(pytest.param(*values, marks=[pytest.mark.slow] if sum(places) % every else []))
    return made
