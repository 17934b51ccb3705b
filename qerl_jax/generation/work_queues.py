"""Distributes rows among devices. A device whose queue is empty takes rows from the one that has most."""

import bisect
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np


def spans(
    sizes: Sequence[int], places: int, *, whole: bool, lengths: Sequence[float] | None = None
) -> list[list[tuple[int, int, int]]]:
    """Splits groups of rows, in order, into one list per device, with nearly equal numbers of expected tokens.

    Args:
        sizes: Rows of each group, which share a prompt.
        places: How many places there are.
        whole: Whether a group must stay in one place. Else at most `places - 1` of them are parted.
        lengths: Tokens that are expected of a row of each group; None means as many of all.

    Returns:
        For each place the parts of groups that it gets, (group, start, end): rows start to end. There may be none.
    """
    each = np.repeat(np.ones(len(sizes)) if lengths is None else lengths, sizes)
    made = np.concatenate([[0], np.cumsum(each)])
    # Of the rows' ends those that are next to equal shares of the tokens.
    shares = made[-1] * np.arange(1, places) / places
    seams = np.searchsorted(made[:-1] + each / 2, shares).tolist()
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(places)]
    firsts = itertools.accumulate(sizes, initial=0)
    for group, (first, size) in enumerate(zip(firsts, sizes, strict=False)):
        inner = [seam - first for seam in dict.fromkeys(seams) if first < seam < first + size]
        inner = [] if whole else inner
        for start, end in itertools.pairwise([0, *inner, size]):
            # Of one that is not parted, where its middle lies.
            at = first + (size // 2 if whole else start)
            parts[bisect.bisect_right(seams, at)].append((group, start, end))
    return parts


class WorkQueues[Piece]:
    """One queue of waiting work per device, for threads. A device with an empty queue takes half of the longest
    one."""

    def __init__(self, parts: Sequence[Sequence[Piece]]):
        self._queues = [list(each) for each in parts]
        self._lock = threading.Lock()

    def of(self, places: range) -> Self:
        """What waits at some of the places, who take from each other alone."""
        return type(self)(self._queues[places.start : places.stop])

    def any(self) -> bool:
        """Whether anything waits at any place."""
        return any(self._queues)

    def take(self, place: int, choose: Callable[[list[Piece]], list[Piece]]) -> list[Piece]:
        """Removes and returns the entries that `choose` picks from the queue of `place`.

        If that queue is empty, the second half of the longest queue moves to it first. Returns [] if all are empty.

        Args:
            place: Whose turn it is.
            choose: Picks some of a list that is not empty, or none.
        """
        with self._lock:
            fullest = max(self._queues, key=len)
            if not self._queues[place] and fullest:
                # Half, from the end: the rest is what the other comes to first.
                half = len(fullest) // 2
                self._queues[place], fullest[half:] = fullest[half:], []
            if not self._queues[place]:
                return []
            chosen = choose(self._queues[place])
            for each in chosen:
                self._queues[place].remove(each)
            return chosen
