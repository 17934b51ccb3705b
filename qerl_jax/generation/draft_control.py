"""Decides on the host, between two chunks, how many drafted tokens to verify in a step.

The decision depends only on the rows and not on measured times, so a repeated run makes the same steps.
"""

import dataclasses
import operator
from collections.abc import Callable

import numpy as np

from qerl_jax.generation.draft_search import KINDS, LONGEST_MATCH, MOST, Outcome

# Time of a step by the number of its tokens, in units of a step of at most 8 rows without drafts, measured with 7B on
# an H200. Steps with drafts were measured with 8 rows; the time to find drafts is included. They have become cheaper
# since attention reads a row's pages once. But rows that have ended are idle until their chunk ends, and with these
# prices the estimated gain is near the measured one (docs/tried-and-rejected.md).
_PRICES = {8: 1.0, 32: 1.28, 64: 1.76, 128: 2.73}
_PRICES_WITH_DRAFTS = {8: 1.22, 16: 1.33, 32: 1.46, 64: 1.65}
# Tokens of a step with drafts: of at most `_FEW_ROWS` rows, and of more. A program is compiled for each batch size.
_FEW_ROWS, _STEP_OF_FEW, _STEP = 8, 32, 64
# The most tokens of a group's ended completions in which drafts are searched.
MOST_ENDED = 1 << 15
# Tokens per time that steps with drafts, or without, must gain, as a factor, before they replace the others; and the
# number of compared tokens that is needed before drafts are used.
_GAIN, _EVIDENCE = 1.05, 32
# Comparing takes a millisecond or two. While drafts do not pay, one chunk of `_SELDOM` compares them. At the start
# every chunk does, until `_EVIDENCE` tokens have been compared, but at most `_MOST_AT_FIRST` chunks.
_SELDOM, _MOST_AT_FIRST = 8, 16
# Decay of earlier counts when a chunk compares at least `_EVIDENCE` tokens; the prior: one right token of `_BELIEF`.
_DECAY, _BELIEF = 0.75, 4.0


def price(rows: int, positions: int = 0) -> float:
    """Estimates the time of a step, in units of a step of at most 8 rows without drafts.

    `positions` are the tokens that the step runs for its rows, those of drafts included; 0 for a step without drafts.
    """
    at = lambda number, prices: float(np.interp(number, [*prices], [*prices.values()]))
    plain = at(rows, _PRICES)
    if not positions:
        return plain
    # Finding drafts takes at least as long as with 8 rows.
    return max(at(positions, _PRICES_WITH_DRAFTS), plain + _PRICES_WITH_DRAFTS[8] - 1)


@dataclasses.dataclass
class Record:
    """Statistics of what drafts have gained.

    Attributes:
        rows: Number of rows that had not ended, summed over all steps with drafts.
        tokens: Tokens that these rows got.
        time: Estimated time (`price`) of all steps in which drafts were possible.
        time_without: Estimated time of the same tokens without drafts.
    """

    rows: int = 0
    tokens: int = 0
    time: float = 0.0
    time_without: float = 0.0

    def add(self, slots: int, positions: int | None, outcome: Outcome, tokens: int) -> None:
        """Adds a chunk; arguments as for `Auto.learn`."""
        calls, rows = int(outcome.calls), int(outcome.rows)
        if not rows:
            return
        self.time += calls * price(slots, positions or 0)
        if positions:
            self.rows += rows
            self.tokens += tokens
        # Without drafts the same mean number of rows would get one token each per step.
        self.time_without += (tokens * calls / rows if positions else calls) * price(slots)

    def __add__(self, other: "Record") -> "Record":
        return Record(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "Record") -> "Record":
        return Record(*map(operator.sub, vars(self).values(), vars(other).values()))

    @property
    def accepted_per_call(self) -> float | None:
        """The mean number of tokens that a row got from a step with drafts; None if there was no such step."""
        return self.tokens / self.rows if self.rows else None

    @property
    def speedup(self) -> float | None:
        """The ratio `time_without` / `time`, both estimated by `price`; None if no drafts were possible."""
        return self.time_without / self.time if self.time else None


class Auto:
    """Uses drafts if they are expected to pay by `price`, given how often earlier drafts were right.

    It begins without drafts. Then drafts are made and only compared, at first in every chunk and later in few. The
    statistics, `record`, are kept from one rollout to the next.
    """

    def __init__(self):
        self.record = Record()
        self._tried, self._right = np.zeros(KINDS), np.zeros(KINDS)
        self._matches = np.zeros(LONGEST_MATCH + 1)
        self._positions, self._chunks_without = 0, 0

    def odds(self) -> np.ndarray:
        """Returns the chance that a drafted token is right, by the kind of its match: float32 [KINDS]."""
        return ((self._right + 1) / (self._tried + _BELIEF)).astype(np.float32)

    def size(self, slots: int) -> int:
        """Returns the tokens of a step with drafts, given the batch size."""
        return _STEP_OF_FEW if slots <= _FEW_ROWS else _STEP

    def positions(self, slots: int, live: int) -> int | None:
        """Returns the tokens per step of the next chunk, at least one per row.

        0 means one token per row, and drafts are compared but not used. None means one token per row, and no drafts.
        Of the batch's rows (`slots`), `live` have not ended.
        """
        is_known = self._tried.sum() >= _EVIDENCE
        self._positions = self._best(slots, live) if live and is_known else 0
        if self._positions:
            return self._positions
        self._chunks_without += 1
        is_begin = not is_known and self._chunks_without <= _MOST_AT_FIRST
        return 0 if is_begin or self._chunks_without % _SELDOM == 0 else None

    def learn(self, slots: int, positions: int | None, outcome: Outcome, tokens: int) -> None:
        """Updates the statistics with the results of a chunk.

        Args:
            slots: Rows of its batch.
            positions: What `positions` returned for it.
            outcome: Statistics of its drafts.
            tokens: Tokens that all rows got together.
        """
        self.record.add(slots, positions, outcome, tokens)
        if positions is None:
            return
        # A chunk of one row compares few tokens, so earlier counts decay less.
        decay = _DECAY ** min(1.0, outcome.tried.sum() / _EVIDENCE)
        self._tried = decay * self._tried + outcome.tried
        self._right = decay * self._right + outcome.right
        self._matches = decay * self._matches + outcome.matches

    def _best(self, slots: int, live: int) -> int:
        """Returns the tokens of a step with drafts, or 0 if plain steps give about as many tokens per time, or more.

        What was used last stays in use unless the other is clearly better.
        """
        size, plain = self.size(slots), live / price(slots)
        drafted = self._expected(live, size) / price(slots, size)
        if self._positions:
            return 0 if plain > _GAIN * drafted else size
        return size if drafted > _GAIN * plain else 0

    def _expected(self, live: int, positions: int) -> float:
        """Returns the expected number of tokens that `live` rows get from a step of `positions` tokens."""
        odds, matches = self.odds(), np.arange(1, LONGEST_MATCH + 1)
        behind = np.minimum(matches[:, None] + np.arange(MOST), LONGEST_MATCH)
        chances = np.cumprod(odds[[[int(m).bit_length() for m in row] for row in behind]], axis=1)
        rows = live * self._matches[1:] / max(1.0, self._matches.sum())
        chances, rows = chances.ravel(), np.repeat(rows, MOST)
        order = np.argsort(-chances, kind="stable")
        # The step verifies the likeliest drafted tokens first, until its positions are used up.
        space = np.clip(positions - live - (np.cumsum(rows[order]) - rows[order]), 0, rows[order])
        return live + float(space @ chances[order])


class Always(Auto):
    """Uses drafts in every chunk, however few are right; a step has `tokens` tokens, by default two for each row."""

    def __init__(self, tokens: int | None = None):
        super().__init__()
        self._tokens = tokens

    def size(self, slots: int) -> int:
        """See `Auto`."""
        return max(self._tokens or 2 * slots, slots)

    def positions(self, slots: int, live: int) -> int:
        """See `Auto`."""
        return self.size(slots)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """Options of drafting: what creates the control of a device's rows, and the largest batch that has drafts.

    Completions have drafts if their limit is at least `least_limit` tokens: for shorter ones compiling would take longer
    than drafts save.
    """

    control: Callable[[], Auto] = Auto
    most_rows: int = 32
    least_limit: int = 512

    @classmethod
    def named(cls, name: str) -> "Drafting | None":
        """Returns the options that a value of `rollout.drafts` stands for; None for no drafts."""
        return {"auto": cls(), "always": cls(Always, least_limit=1), "off": None}[name]

    def tokens_of_a_step(self, limit: int) -> int:
        """Returns the most tokens that a step may run, given the rows' limit in tokens; 0 for no drafts."""
        return _STEP if limit >= self.least_limit else 0
