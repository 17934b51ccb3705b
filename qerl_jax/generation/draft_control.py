"""How many tokens of drafts to verify in a step, decided by the host between two chunks.

The decision depends on the rows alone, and not on a clock: a run that is repeated makes the same steps again.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np

from qerl_jax.generation.draft_search import KINDS, LONGEST_MATCH, MOST, Outcome

# Time of a step by the number of its tokens, in units of a step of at most 8 rows without drafts, measured with 7B on an
# H200. Steps with drafts were measured with 8 rows; the time to find drafts is included. Since attention reads a row's
# pages once these steps cost less, but rows that have ended are idle until their chunk has, and these prices are near
# what runs gained (docs/lab-notes.md, "Drafts on an H100").
_PRICES = {8: 1.0, 32: 1.28, 64: 1.76, 128: 2.73}
_PRICES_WITH_DRAFTS = {8: 1.22, 16: 1.33, 32: 1.46, 64: 1.65}
# Tokens that a step may have with drafts. Each is a program to compile.
_STEPS = (8, 16, 32, 64)
# The most tokens of a group's ended completions in which drafts are looked for.
MOST_ENDED = 1 << 15
# What a step must gain over another one before it takes its place, and the tokens that must have been compared before.
_GAIN, _EVIDENCE = 1.05, 32
# Comparing takes a millisecond or two. Where drafts do not pay, one of `_SELDOM` chunks compares them. At first every chunk
# does, until there is evidence enough, or until `_MOST_AT_FIRST` chunks have given too little.
_SELDOM, _MOST_AT_FIRST = 8, 16
# Decay of earlier counts when a chunk compares at least `_EVIDENCE` tokens; and the prior, one right token in `_BELIEF`.
_KEPT, _BELIEF = 0.75, 4.0


def price(rows: int, positions: int = 0) -> float:
    """Time of a step of so many rows, in units of one of at most 8 rows without drafts.

    Args:
        rows: Rows of the batch.
        positions: Tokens that the step runs, those of drafts included; 0 for a step without drafts.
    """
    at = lambda number, prices: float(np.interp(number, [*prices], [*prices.values()]))
    plain = at(rows, _PRICES)
    if not positions:
        return plain
    # Finding drafts takes no less time with more rows.
    return max(at(positions, _PRICES_WITH_DRAFTS), plain + _PRICES_WITH_DRAFTS[8] - 1)


class Control(Protocol):
    """Decides about the drafts of one device's rows. The attributes count what has been done.

    Attributes:
        record: See `Record`.
    """

    record: "Record"

    def positions(self, slots: int, live: int) -> int | None:
        """Returns the tokens per step of the next chunk, at least one per row.

        0 means one token per row, and drafts are compared but not used. None means one token per row, and no drafts.

        Args:
            slots: Rows of the batch.
            live: How many of them have not ended.
        """
        ...

    def odds(self) -> np.ndarray:
        """float32 [KINDS], the chance that a drafted token is right, by the kind of its match."""
        ...

    def learn(self, slots: int, positions: int | None, outcome: Outcome, tokens: int) -> None:
        """Takes the results of a chunk.

        Args:
            slots: Rows of its batch.
            positions: What `positions` said for it.
            outcome: What became of its drafts.
            tokens: What all rows got.
        """
        ...


@dataclasses.dataclass
class Record:
    """What drafts have gained.

    Attributes:
        rows: Rows of all steps with drafts together.
        tokens: What they got.
        time: What all steps took where drafts could be made, by `price`.
        time_without: What they would have taken without drafts.
    """

    rows: int = 0
    tokens: int = 0
    time: float = 0.0
    time_without: float = 0.0

    def add(self, slots: int, positions: int | None, outcome: Outcome, tokens: int) -> None:
        """Takes in a chunk; arguments as for `Control.learn`."""
        calls, rows = int(outcome.calls), int(outcome.rows)
        if not rows:
            return
        if not positions:
            self.time += calls * price(slots)
            self.time_without += calls * price(slots)
            return
        self.rows += rows
        self.tokens += tokens
        self.time += calls * price(slots, positions)
        # As many rows at a time as now, each getting one token.
        self.time_without += tokens * calls / rows * price(slots)

    def __add__(self, other: "Record") -> "Record":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Record(*(a + b for a, b in pairs))

    def __sub__(self, other: "Record") -> "Record":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Record(*(a - b for a, b in pairs))

    @property
    def accepted_per_call(self) -> float | None:
        """Tokens that a row got from a step with drafts; None if there was none."""
        return self.tokens / self.rows if self.rows else None

    @property
    def speedup(self) -> float | None:
        """`time_without` / `time`, both estimated by `price`; None if no drafts could be made."""
        return self.time_without / self.time if self.time else None


class Auto:
    """Makes drafts where they are expected to pay by `price`, from what has become of drafts before.

    It begins without drafts. Without them some are made and only compared, in each chunk at first and then seldom. What
    it knows of one rollout it uses in the next.
    """

    def __init__(self):
        self.record = Record()
        self._tried, self._right = np.zeros(KINDS), np.zeros(KINDS)
        self._matches = np.zeros(LONGEST_MATCH + 1)
        self._positions, self._chunks_without = 0, 0

    def odds(self) -> np.ndarray:
        """See `Control`."""
        return ((self._right + 1) / (self._tried + _BELIEF)).astype(np.float32)

    def positions(self, slots: int, live: int) -> int | None:
        """See `Control`."""
        is_known = self._tried.sum() >= _EVIDENCE
        self._positions = self._best(slots, live) if live and is_known else 0
        if self._positions:
            return self._positions
        self._chunks_without += 1
        is_begin = not is_known and self._chunks_without <= _MOST_AT_FIRST
        return 0 if is_begin or self._chunks_without % _SELDOM == 0 else None

    def learn(self, slots: int, positions: int | None, outcome: Outcome, tokens: int) -> None:
        """See `Control`."""
        self.record.add(slots, positions, outcome, tokens)
        if positions is None:
            return
        # A chunk of one row compares few tokens: what was known before stays for longer.
        kept = _KEPT ** min(1.0, outcome.tried.sum() / _EVIDENCE)
        for held, new in (
            (self._tried, outcome.tried),
            (self._right, outcome.right),
            (self._matches, outcome.matches),
        ):
            held *= kept
            held += new

    def _best(self, slots: int, live: int) -> int:
        """The tokens of a step that bring most for their price: those of the last chunk if no others are much better."""
        rates = {n: self._expected(live, n) / price(slots, n) for n in _STEPS if n >= slots}
        rates[0] = live / price(slots)
        best = max(rates, key=rates.get)
        is_better = rates[best] > _GAIN * rates.get(self._positions, 0)
        return best if is_better else self._positions

    def _expected(self, live: int, positions: int) -> float:
        """Tokens that so many rows are expected to get from a step that runs so many tokens."""
        odds, matches = self.odds(), np.arange(1, LONGEST_MATCH + 1)
        behind = np.minimum(matches[:, None] + np.arange(MOST), LONGEST_MATCH)
        chances = np.cumprod(odds[[[int(m).bit_length() for m in row] for row in behind]], axis=1)
        rows = live * self._matches[1:] / max(1.0, self._matches.sum())
        chances, rows = chances.ravel(), np.repeat(rows, MOST)
        order = np.argsort(-chances, kind="stable")
        # How much of each, the likeliest first, there is room for.
        room = np.clip(positions - live - (np.cumsum(rows[order]) - rows[order]), 0, rows[order])
        return live + float(room @ chances[order])


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How an engine makes drafts.

    Attributes:
        control: Makes the `Control` of a device's rows.
        most_rows: With more rows there are no drafts.
        least_limit: Rows that may get fewer tokens have none either: compiling would take longer than drafts save.
        most_positions: The most tokens that a step may run.
    """

    control: Callable[[], Control] = Auto
    most_rows: int = 32
    least_limit: int = 512
    most_positions: int = _STEPS[-1]

    def tokens_of_a_step(self, limit: int) -> int:
        """The most tokens that a step may run where rows may get as many as the limit; 0 if there are no drafts then."""
        return self.most_positions if limit >= self.least_limit else 0
