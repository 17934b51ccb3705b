"""Who runs where between two chunks: prompts that wait, rows in slots, and the pages that they hold.

Plain Python on small arrays, which the host goes through while the device samples. The sizes that a
batch can have, and the lengths to which prompts are padded, are few and fixed: each is a program.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from qerl_jax.generation.page_pool import Pages
from qerl_jax.generation.stop_strings import StopStrings

# Tokens that one prefill holds: enough for products to be bound by arithmetic.
_PREFILL_TOKENS = 8192
_SMALLEST_BUCKET = 64
# Below so many rows a decode step is bound by the weights: a smaller batch would not be faster.
_SMALLEST_BATCH = 8


@dataclasses.dataclass(frozen=True)
class QueuedPrompt:
    """A prompt and the completions that are wanted of it.

    Attributes:
        tokens: int32 [T], at least one.
        keys: uint32 [G, ...], the key data of each completion's randomness.
        limit: Most tokens of each completion.
        noise: int32 [G], the number of each completion's noise where rows have their own; the prompt
            runs under that of the first. See `model.noise.RowNoise`.
    """

    tokens: np.ndarray
    keys: np.ndarray
    limit: int
    noise: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class RowTokens:
    """Tokens of a row: what a chunk brought, or all of them.

    Attributes:
        row: Number of the row; rows are counted through all prompts.
        tokens: int32 [n].
        logps: float32 [n].
        ended: Why the row ended: a stop token or string ("stop"), or its limit; None while it goes on.
        entropies: float32 [n], of the distribution of each token; None where nobody asked.
    """

    row: int
    tokens: np.ndarray
    logps: np.ndarray
    ended: Literal["stop", "length"] | None
    entropies: np.ndarray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """The rows of a chunk.

    Attributes:
        tables: int32 [B, W].
        ends: int32 [B], tokens in the cache.
        token: int32 [B], the last token, which the cache does not hold yet.
        step: int32 [B], tokens sampled before.
        limit: int32 [B].
        live: bool [B].
        keys: uint32 [B, ...], key data.
        history: int32 [B, T], tokens of prompt and completion, -1 where there is none; None where
            nothing asks.
        noise: int32 [B], numbers of the rows' noise; None where they have none of their own.
    """

    tables: Any
    ends: Any
    token: Any
    step: Any
    limit: Any
    live: Any
    keys: Any
    history: Any
    noise: Any = None


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes of a run, all that is compiled.

    Attributes:
        page_size: S.
        chunk: Most tokens between two looks of the host.
        table_width: W.
        history: Most tokens of a row, prompt included.
        longest_prefill: Most tokens of a prompt but its last.
        most_prompts: Prompts that can be prefilled at a time: these, or as many as there are slots.
        sizes: Rows that a batch can have, largest first.
    """

    page_size: int
    chunk: int
    table_width: int
    history: int
    longest_prefill: int
    most_prompts: int
    sizes: tuple[int, ...]

    def bucket(self, length: int) -> int:
        """The length to which a prompt is padded: a power of two, or the longest's."""
        return min(_widest(self.longest_prefill), max(_SMALLEST_BUCKET, _power_of_two(length)))


def prefilled_together(prompts: int, length: int) -> int:
    """Lines of a prefill of so many prompts that are padded to one length; the rest follows."""
    at_once = max(1, _PREFILL_TOKENS // length)
    return min(_power_of_two(prompts), _power_of_two(at_once + 1) // 2)


def most_prefilled(prompts: int, length: int) -> int:
    """Tokens of the largest prefill of so many prompts of at most a length."""
    widest = _widest(length - 1)
    buckets = {widest, *(1 << n for n in range(widest.bit_length()) if 1 << n >= _SMALLEST_BUCKET)}
    return max(prefilled_together(prompts, bucket) * bucket for bucket in buckets)


def _widest(longest: int) -> int:
    """To what the longest prompts are padded."""
    return max(1, -(-longest // 16)) * 16


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << max(0, number - 1).bit_length()


def batch_sizes(slots: int) -> tuple[int, ...]:
    """Batch sizes, each half of the one before, in numbers that decoding kernels take without filling up.

    Every one is a program to compile, when rows are so few for the first time.
    """
    half = max(_SMALLEST_BATCH, -(-slots // 2))
    half += -half % (32 if half > 32 else 8)
    return (slots, *(batch_sizes(half) if half < slots else ()))


@dataclasses.dataclass(eq=False)
class _Cached:
    """A prompt, and the pages that hold it until the last of its rows has begun."""

    prompt: QueuedPrompt
    first_row: int
    rows_left: int
    pages: list[int] = dataclasses.field(default_factory=list)

    @property
    def filled(self) -> int:
        """Tokens that are prefilled."""
        return len(self.prompt.tokens) - 1


@dataclasses.dataclass(eq=False)
class _Row:
    """One completion: `made` are its tokens so far."""

    cached: _Cached
    index: int
    key: np.ndarray
    noise: int | None
    pages: list[int] = dataclasses.field(default_factory=list)
    made: list[int] = dataclasses.field(default_factory=list)


class Schedule:
    """Who runs where: prompts that wait, rows whose prompt is cached, rows in slots; and their pages.

    A row is admitted with all the pages that it can need, so a row that runs never waits. Prompts
    are prefilled only when no cached one has a row left to begin, and only so many that the pages
    they hold leave room for a row: so there is always one that can go on.
    """

    def __init__(self, shapes: Shapes, num_pages: int, prompts: Sequence[QueuedPrompt]):
        self.num_pages = num_pages
        self._shapes, self._pages = shapes, Pages(num_pages)
        counts = [len(prompt.keys) for prompt in prompts]
        firsts = itertools.accumulate(counts, initial=0)
        self._waiting = [_Cached(*each) for each in zip(prompts, firsts, counts, strict=False)]
        self._ready: collections.deque[_Row] = collections.deque()
        self._slots: list[_Row | None] = [None] * shapes.sizes[0]
        self._copies: list[tuple[int, int]] = []
        # Whether the device takes a row for alive that a stop string has ended.
        self._overtaken = False

    def unfinished(self) -> bool:
        """Whether any row has not ended."""
        return bool(self._waiting or self._ready or any(self._slots))

    def next_prefill(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
        """Fills the slots from prompts in the cache; where that is not enough, the next to put there.

        Returns:
            Tokens [R, T] and tables of the prompts to prefill now, and numbers [R] of their noise or
            None; None when nothing is left to do before the next chunk.
        """
        self._admit()
        if self._ready or not self._waiting or all(self._slots):
            return None
        bucket = self._shapes.bucket(self._waiting[0].filled)
        together = prefilled_together(self._shapes.most_prompts, bucket)
        tokens = np.zeros((together, bucket), np.int32)
        tables = np.zeros((together, self._ceil(bucket)), np.int32)
        chosen = self._choose(bucket, together)
        noise = None if self._waiting[0].prompt.noise is None else np.zeros(together, np.int32)
        for line, cached in enumerate(chosen):
            self._waiting.remove(cached)
            cached.pages = self._pages.take(self._ceil(cached.filled))
            tokens[line, : cached.filled] = cached.prompt.tokens[:-1]
            tables[line, : len(cached.pages)] = cached.pages
            numbers = cached.prompt.noise
            if noise is not None:
                noise[line] = numbers[0]
            self._ready.extend(
                _Row(
                    cached,
                    cached.first_row + index,
                    key,
                    noise=None if numbers is None else int(numbers[index]),
                )
                for index, key in enumerate(cached.prompt.keys)
            )
        return (tokens, tables, noise) if chosen else None

    def copies(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Pages to copy before the next chunk, from and to: int32 [slots] each; None for none."""
        if not self._copies:
            return None
        pairs = np.zeros((self._shapes.sizes[0], 2), np.int32)
        pairs[: len(self._copies)] = self._copies
        self._copies.clear()
        return pairs[:, 0], pairs[:, 1]

    def slots(self, with_history: bool) -> Slots:
        """The next chunk's rows, after moving them into as small a batch as will do."""
        self._overtaken = False
        size, rows = self._size(), [row for _, row in self._running()]
        if size < len(self._slots):
            self._slots = rows + [None] * (size - len(rows))
        slots = Slots(
            tables=np.zeros((size, self._shapes.table_width), np.int32),
            ends=np.zeros(size, np.int32),
            token=np.zeros(size, np.int32),
            step=np.zeros(size, np.int32),
            limit=np.zeros(size, np.int32),
            live=np.array([row is not None for row in self._slots]),
            keys=np.zeros((size, *rows[0].key.shape), np.uint32),
            history=np.full((size, self._shapes.history), -1, np.int32) if with_history else None,
            noise=None if rows[0].noise is None else np.zeros(size, np.int32),
        )
        for slot, row in self._running():
            prompt = row.cached.prompt
            slots.tables[slot, : len(row.pages)] = row.pages
            slots.ends[slot] = row.cached.filled + len(row.made)
            slots.token[slot] = row.made[-1] if row.made else prompt.tokens[-1]
            slots.step[slot] = len(row.made)
            slots.limit[slot] = prompt.limit
            slots.keys[slot] = row.key
            if row.noise is not None:
                slots.noise[slot] = row.noise
            if with_history:
                before = [*prompt.tokens, *row.made]
                slots.history[slot, : len(before)] = before
        return slots

    def goes_on(self) -> bool:
        """Whether the chunk after the one under way takes nothing from the host.

        So it is when no row waits, the batch stays as large as it is, a row has more to go than the
        chunk under way, and the device knows of all rows that have ended.
        """
        return (
            not (self._ready or self._waiting or self._overtaken)
            and self._left() > self._shapes.chunk
            and self._size() == len(self._slots)
        )

    def harvest(
        self,
        tokens: np.ndarray,
        logps: np.ndarray,
        lengths: np.ndarray,
        live: np.ndarray,
        stop_tokens: np.ndarray,
        stop_strings: StopStrings | None,
        entropies: np.ndarray | None = None,
    ) -> list[RowTokens]:
        """Takes in what a chunk brought, and frees the slots and pages of rows that ended."""
        brought = []
        for slot, row in self._running():
            length = int(lengths[slot])
            row.made += tokens[slot, :length].tolist()
            ended = None if live[slot] else "stop" if row.made[-1] in stop_tokens else "length"
            if stop_strings is not None:
                seen = len(row.made) - length
                if (kept := stop_strings.kept(row.made, seen)) is not None:
                    length, ended = kept - seen, "stop"
            part = None if entropies is None else entropies[slot, :length]
            made = tokens[slot, :length], logps[slot, :length]
            brought.append(RowTokens(row.index, *made, ended, part))
            if ended:
                self._overtaken |= bool(live[slot])
                self._pages.give_back(row.pages)
                self._slots[slot] = None
        return brought

    def _running(self) -> list[tuple[int, _Row]]:
        """The rows in slots, each behind the number of its slot."""
        return [(slot, row) for slot, row in enumerate(self._slots) if row is not None]

    def _left(self) -> int:
        """Most tokens that a row may still make."""
        return max(
            (row.cached.prompt.limit - len(row.made) for _, row in self._running()), default=0
        )

    def _size(self) -> int:
        """Rows of the smallest batch that will do."""
        # For less than a chunk's work a further program is not worth compiling.
        if self._ready or self._waiting or self._left() <= self._shapes.chunk:
            return len(self._slots)
        return min(size for size in self._shapes.sizes if size >= len(self._running()))

    def _ceil(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self._shapes.page_size)

    def _choose(self, bucket: int, count: int) -> list[_Cached]:
        """Prompts to prefill together: the next, and those after it that are padded to the same length."""
        chosen, held, begins = [], 0, 0
        for cached in (c for c in self._waiting if self._shapes.bucket(c.filled) == bucket):
            pages = self._ceil(cached.filled)
            begins = max(begins, self._needs(cached))
            # What prompts hold leaves room for a row to begin, even if it is the only one.
            fits = held + pages <= min(self._pages.free, self.num_pages - 1 - begins)
            if len(chosen) == count or not fits:
                break
            held += pages
            chosen.append(cached)
        return chosen

    def _admit(self) -> None:
        """Gives free slots to rows whose prompt is cached, in order, while there are pages."""
        while None in self._slots and self._ready:
            if self._pages.free < self._needs(self._ready[0].cached):
                return
            self._slots[self._slots.index(None)] = self._begin(self._ready.popleft())

    def _needs(self, cached: _Cached) -> int:
        """Pages that the next row of a prompt takes when it begins."""
        filled = cached.filled
        inherited = filled // self._shapes.page_size if cached.rows_left > 1 else self._ceil(filled)
        return self._ceil(filled + cached.prompt.limit) - inherited

    def _begin(self, row: _Row) -> _Row:
        cached, own = row.cached, self._pages.take(self._needs(row.cached))
        cached.rows_left -= 1
        inherited = cached.pages
        if cached.rows_left:
            inherited = cached.pages[: cached.filled // self._shapes.page_size]
            self._pages.share(inherited)
            if len(inherited) < len(cached.pages):
                self._copies.append((cached.pages[-1], own[0]))
        row.pages = inherited + own
        return row
