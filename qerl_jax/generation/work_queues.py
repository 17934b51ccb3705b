"""Distributes rows among devices; a device with an empty queue takes waiting work from the longest queue."""

import bisect
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np


def spans(
    sizes: Sequence[int], replicas: int, *, whole: bool, lengths: Sequence[float] | None = None
) -> list[list[tuple[int, int, int]]]:
    """Splits groups of rows, in order, into one list per device, with nearly equal numbers of expected tokens.

    Args:
        sizes: Number of rows of each group; these share a prompt.
        replicas: Number of devices.
        whole: Whether a group must stay on one device. Otherwise at most `replicas - 1` groups are split.
        lengths: Expected tokens of a row of each group; None means the same number for all.

    Returns:
        For each device the parts of groups that it gets, (group, start, end): rows start to end - 1 of the group. A
        device may get none.
    """
    expected = np.repeat(np.ones(len(sizes)) if lengths is None else lengths, sizes)
    starts = np.concatenate([[0], np.cumsum(expected)])
    # The boundaries between rows that are nearest to equal shares of the tokens.
    shares = starts[-1] * np.arange(1, replicas) / replicas
    seams = np.searchsorted(starts[:-1] + expected / 2, shares).tolist()
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(replicas)]
    firsts = itertools.accumulate(sizes, initial=0)
    for group, (first, size) in enumerate(zip(firsts, sizes, strict=False)):
        inner = () if whole else (seam - first for seam in dict.fromkeys(seams))
        for start, end in itertools.pairwise([0, *(n for n in inner if 0 < n < size), size]):
            # A group that is not split goes to the device of its middle row.
            at = first + (size // 2 if whole else start)
            parts[bisect.bisect_right(seams, at)].append((group, start, end))
    return parts


class WorkQueues[Piece]:
    """Thread-safe queues of waiting work, one per device. A device with an empty queue takes half of the longest."""

    def __init__(self, parts: Sequence[Sequence[Piece]]):
        self._queues = [list(part) for part in parts]
        self._lock = threading.Lock()

    def of(self, replicas: range) -> Self:
        """Returns the queues of some devices, which then take work only from each other."""
        return type(self)(self._queues[replicas.start : replicas.stop])

    def only(self, replica: int) -> Self:
        """Returns the queues with entries of one device alone, so that it takes no work from others."""
        parts = enumerate(self._queues)
        return type(self)([part if index == replica else [] for index, part in parts])

    def any(self) -> bool:
        """Whether any queue has an entry."""
        return any(self._queues)

    def take(self, replica: int, choose: Callable[[list[Piece]], list[Piece]]) -> list[Piece]:
        """Removes and returns the entries that `choose` picks from the queue of `replica`.

        If that queue is empty, the second half of the longest queue moves to it first. Returns [] if all are empty.
        `choose` returns some entries of a non-empty list, or none.
        """
        with self._lock:
            fullest = max(self._queues, key=len)
            if not self._queues[replica] and fullest:
                # Takes the end, because the other device takes from the front.
                half = len(fullest) // 2
                self._queues[replica], fullest[half:] = fullest[half:], []
            waiting = self._queues[replica]
            chosen = choose(waiting) if waiting else []
            for piece in chosen:
                waiting.remove(piece)
            return chosen
