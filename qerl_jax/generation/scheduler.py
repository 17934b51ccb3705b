"""The scheduler, which runs between two chunks: waiting prompts, rows in slots, and the pages that they hold.

It is plain Python on small arrays, and can run on the host while the device samples. Batch sizes and padded prompt
lengths come from short, fixed lists, because a program is compiled for each.
"""

import bisect
import collections
import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from qerl_jax.generation import work_queues
from qerl_jax.generation.draft_search import CHUNKS, LONGEST_MATCH, Texts
from qerl_jax.generation.page_pool import Pages
from qerl_jax.generation.stop_strings import StopStrings
from qerl_jax.model.fused_decode import MAX_ROWS
from qerl_jax.system.checked import NOT_FINITE, NotFinite

# The most tokens of one prefill: enough that matrix products are compute-bound, not memory-bound.
_PREFILL_TOKENS = 8192
# The least length to which a prompt is padded, unless the longest is padded to more than `2**_HALVINGS` times as many.
_SMALLEST_BUCKET, _HALVINGS = 64, 3
# Batch sizes below the number of slots. With fewer rows than the smallest, reading the weights bounds a decode step: a
# smaller batch is not faster.
_SIZES = (256, MAX_ROWS, 32, 8)
# While other rows wait, a chunk with drafts ends when its ended rows have been idle for `_IDLE` x slots row-steps in
# total. A replay of recorded lengths chose the value.
_IDLE = 0.25
# The patience (see `Slots`) of a chunk that does not end early.
_NEVER = 2**30
# Number of chunks without drafts for which a row gets pages: the running one, the next one, and two more before it
# has to ask again. A chunk with drafts needs as many.
_AHEAD = CHUNKS


@dataclasses.dataclass(frozen=True)
class QueuedPrompt:
    """A prompt and its completions to sample.

    Attributes:
        tokens: int32 [T], at least one.
        keys: uint32 [G, ...], PRNG key data of each completion.
        limit: Most tokens of each completion.
        noise: int32 [G], the number of each completion's noise if rows have their own; the prompt is prefilled with
            that of the first. See `aqn.draw.RowNoise`.
        earlier: Completions of the prompt from earlier rounds, int32 [n] each, in which drafts are searched.
        begun: What an earlier call has sampled of the completion, which must be the only one; it is prefilled with the
            prompt, and its next token is drawn with the random numbers of its position. None for new completions.
    """

    tokens: np.ndarray
    keys: np.ndarray
    limit: int
    noise: np.ndarray | None = None
    earlier: Sequence[np.ndarray] = ()
    begun: "RowTokens | None" = None

    @property
    def known(self) -> np.ndarray:
        """The tokens before the next one that is sampled, int32 [n]; all but the last are prefilled."""
        return self.tokens if self.begun is None else np.append(self.tokens, self.begun.tokens)

    def shared_pages(self, page_size: int) -> int:
        """Returns the number of full pages of the prefilled tokens if several completions share them, else 0."""
        return (len(self.tokens) - 1) // page_size if len(self.keys) > 1 else 0


# Why a row ended: a stop token or string, or its limit.
type Ending = Literal["stop", "length"]

# Called with a row's number and its tokens so far when its turn has ended. Returns None if the row ends there,
# otherwise a future of the tokens that follow. The row is forced to take them; an empty list ends it.
type TurnTaker = Callable[[int, Sequence[int]], "concurrent.futures.Future[Sequence[int]] | None"]


@dataclasses.dataclass(frozen=True)
class RowTokens:
    """Tokens of a row: those of a chunk, or all of them.

    Attributes:
        row: Number of the row; rows are numbered through all prompts.
        tokens: int32 [n].
        behaviour_logps: float32 [n], in nats; 0 for given tokens.
        ended: Why the row ended; None if it has not ended.
        entropies: float32 [n], the entropy of each token's distribution in nats, 0 for given tokens; None if they
            were not asked for.
        given: bool [n], marks tokens that were given by a `TurnTaker` and not sampled; None without one.
        is_own: Whether this process sampled the row; False for a row that another host has sent.
    """

    row: int
    tokens: np.ndarray
    behaviour_logps: np.ndarray
    ended: Ending | None
    entropies: np.ndarray | None = None
    given: np.ndarray | None = None
    is_own: bool = True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """The rows of a chunk.

    Attributes:
        tables: int32 [B, W], the pages of each row.
        ends: int32 [B], tokens in the cache.
        token: int32 [B], the last token, which is not in the cache yet.
        step: int32 [B], tokens of the completion so far, forced ones included.
        limit: int32 [B], most tokens of the completion.
        live: bool [B], rows that have not ended and do not wait for a reply.
        keys: uint32 [B, ...], PRNG key data.
        history: int32 [B, T], tokens of prompt and completion, -1 after the last; None if neither a repetition
            penalty nor drafts need it.
        noise: int32 [B], numbers of the rows' noise; None if rows do not have their own.
        forced: int32 [B, n], tokens that a row takes in this chunk instead of sampled ones, -1 where it samples;
            None for single-turn rows.
        shared: int32 [B], full pages of each row's prompt that attention reads once for it and its siblings; None if
            attention reads all pages for each row.
        texts: Texts in which drafts are searched, in addition to `history`; None without drafts.
        span: int32 scalar, with drafts: the chunk ends when a row has got this many tokens.
        patience: int32 scalar, with drafts: the chunk ends when rows that have ended in it have been idle for this
            many row-steps in total.
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
    forced: Any = None
    shared: Any = None
    texts: Texts | None = None
    span: Any = None
    patience: Any = None


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes for which programs are compiled.

    Attributes:
        page_size: S, tokens of a page.
        chunk: Most tokens of a row in a chunk without drafts.
        table_width: W, most pages of a row.
        history: Most tokens of a row, prompt included.
        longest_prefill: Most tokens of a prompt without its last one. With a completion that has begun it may have
            up to `history` - 2.
        most_prompts: Number of prompts for which a prefill has rows, see `prefilled_together`.
        sizes: Possible batch sizes, largest first.
        least_shared: Smallest number of a prompt's full pages that attention reads once for several rows; 0 if it
            never shares pages.
        drafted: The largest batch size with drafts; 0 for no drafts.
        ended: P, capacity in tokens for the ended completions of a row's group, in which drafts are searched.
        stop_strings: Whether there are stop strings, which the host finds between two chunks.
        carries: Whether prompts may come with completions that have begun.
    """

    page_size: int
    chunk: int
    table_width: int
    history: int
    longest_prefill: int
    most_prompts: int
    sizes: tuple[int, ...]
    least_shared: int = 0
    drafted: int = 0
    ended: int = 0
    stop_strings: bool = False
    carries: bool = False

    def stride(self, rows: int) -> int:
        """Returns the most tokens that a row gets in a chunk, given the batch size."""
        return self.chunk * (CHUNKS if rows <= self.drafted else 1)

    def bucket(self, length: int) -> int:
        """Returns the length to which a prompt is padded: that of the longest prompt, or a power of two.

        A prompt with a completion that has begun may be longer: then the longest row takes the longest prompt's place.
        """
        return self.buckets_for(length)[-1]

    def buckets_for(self, length: int) -> list[int]:
        """Returns the lengths to which such a prompt can be padded, longest first; `bucket` is the last one."""
        prompts, *rows = self.buckets()
        return [n for n in (rows[0] if length > prompts[0] else prompts) if n >= length]

    def buckets(self) -> list[list[int]]:
        """Returns all results of `bucket`, longest first, at most four: those of prompts, and those of longer rows."""
        prompts = _buckets(self.longest_prefill)
        if not self.carries:
            return [prompts]
        # Few rows go on, so they may be padded more.
        rows = [n for n in _buckets(self.history - 2) if n > prompts[0]]
        return [prompts[:2], rows[:3:2]]

    def prefills(self, own_noise: bool) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """Returns what `Schedule.next_prefill` can return, without prompts: one for each length, the longest first."""
        prefills = []
        longest_first = itertools.chain.from_iterable(itertools.zip_longest(*self.buckets()))
        for bucket in dict.fromkeys(n for n in longest_first if n is not None):
            rows = prefilled_together(self.most_prompts, bucket)
            tables = np.zeros((rows, -(-bucket // self.page_size)), np.int32)
            numbers = np.zeros(rows, np.int32) if own_noise else None
            prefills.append((np.zeros((rows, bucket), np.int32), tables, numbers))
        return prefills

    def empty_slots(self, rows: int, with_history: bool, own_noise: bool) -> Slots:
        """Returns what `Schedule.slots` returns for single-turn rows, for a batch size, without rows."""
        drafts, zeros = rows <= self.drafted, lambda *shape: np.zeros(shape, np.int32)
        return Slots(
            zeros(rows, self.table_width),
            *(zeros(rows) for _ in range(4)),
            live=np.zeros(rows, bool),
            keys=np.zeros((rows, 2), np.uint32),
            history=zeros(rows, self.history) if with_history or drafts else None,
            noise=zeros(rows) if own_noise else None,
            shared=zeros(rows) if self.least_shared else None,
            texts=Texts(zeros(rows, self.ended), zeros(rows)) if drafts else None,
            span=np.int32(0) if drafts else None,
            patience=np.int32(0) if drafts else None,
        )


def prefilled_together(prompts: int, length: int) -> int:
    """Returns the rows of one prefill, a power of two, given the number of prompts and their padded length.

    If there are more prompts than rows, further prefills follow.
    """
    at_once = max(1, _PREFILL_TOKENS // length)
    return min(power_of_two(prompts), power_of_two(at_once + 1) // 2)


def most_prefilled(prompts: int, length: int) -> int:
    """Returns the padded tokens of the largest prefill, given the number of prompts and their greatest length."""
    return max(prefilled_together(prompts, bucket) * bucket for bucket in _buckets(length - 1))


def _buckets(longest: int) -> list[int]:
    """Returns the lengths to which prompts are padded, at most four, given that of the longest; longest first."""
    widest = _widest(longest)
    halves = (power_of_two(widest) >> n for n in range(1, _HALVINGS + 1))
    return [widest, *(n for n in halves if _SMALLEST_BUCKET <= n < widest)]


def _widest(longest: int) -> int:
    """Returns the length to which the longest prompts are padded: a multiple of 16."""
    return max(1, -(-longest // 16)) * 16


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def batch_sizes(slots: int) -> tuple[int, ...]:
    """Returns batch sizes, largest first: the slots, and those of `_SIZES` that are at most half of them.

    The largest that fused layers decode is there for any greater number of slots. A program is compiled for each, so
    there are few: with 128 slots, three sizes instead of five make a rollout of 7B 1.5 % longer (simulated, no script
    kept).
    """
    smaller = (size for size in _SIZES if 2 * size <= slots or size == MAX_ROWS < slots)
    return (slots, *smaller)


@dataclasses.dataclass(eq=False)
class _Cached:
    """A prompt, its pages until the last of its rows has begun, and its completions that ended on this device."""

    prompt: QueuedPrompt
    first_row: int
    rows_left: int
    pages: list[int] = dataclasses.field(default_factory=list)
    ended: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def filled(self) -> int:
        """The number of tokens of the prompt that are in the cache before its last one is decoded."""
        return len(self.prompt.tokens) - 1

    @property
    def prefilled(self) -> int:
        """The number of tokens that are prefilled: also those of a completion that has begun."""
        return len(self.prompt.known) - 1

    def ended_texts(self, most: int) -> np.ndarray:
        """Returns the known completions in which drafts are searched, int32 [n], n <= `most`.

        Each follows the prompt's last tokens, so that a row that begins finds a match, and is followed by -1. If not
        all fit, the latest are kept.
        """
        begin = self.prompt.tokens[-LONGEST_MATCH:]
        texts: list[np.ndarray] = [np.zeros(0, np.int32)]
        for text in (*reversed(self.ended), *reversed(self.prompt.earlier)):
            space = most - sum(map(len, texts))
            if space <= 1:
                break
            text = np.concatenate([begin, text])[: space - 1]
            texts.insert(0, np.append(text, np.int32(-1)))
        return np.concatenate(texts)


@dataclasses.dataclass(eq=False)
class Move:
    """Pages of a row whose contents move to the host, or back to the device."""

    pages: list[int]  # on the device, to read from or to write to
    contents: Any = None  # on the host, in the format of `device_pool.taken`; the engine sets them
    skipped: int = 0  # number of pages at the beginning of the contents that are not written back


@dataclasses.dataclass(eq=False)
class _Row:
    """A completion that has not ended: `tokens` are those so far.

    Between two turns it keeps its slot and its pages, and waits for `reply`. `forced` are tokens of a reply that
    are not in `tokens` yet; the current turn begins, or will begin, at token index `begun`. While it is `parked`
    (preempted), it has neither slot nor pages. `turn` is its index in the order in which rows began.
    """

    cached: _Cached
    index: int
    key: np.ndarray
    noise: int | None
    turn: int = 0
    parked: Move | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    reply: concurrent.futures.Future | None = None
    forced: list[int] = dataclasses.field(default_factory=list)
    begun: int = 0
    _text: np.ndarray | None = None

    @property
    def limit(self) -> int:
        """The most tokens of the completion."""
        return self.cached.prompt.limit

    def text(self) -> np.ndarray:
        """Returns the tokens of prompt and completion, int32 [n]."""
        if self._text is None:
            self._text = self.cached.prompt.tokens
        # Converting a list is slow, so only new tokens are converted.
        if new := len(self.cached.prompt.tokens) + len(self.tokens) - len(self._text):
            self._text = np.concatenate([self._text, np.array(self.tokens[-new:], np.int32)])
        return self._text


def distribute(
    prompts: Sequence[QueuedPrompt], replicas: int = 1, lengths: Sequence[float] | None = None
) -> work_queues.WorkQueues:
    """Distributes prompts among devices, which have a `Schedule` each.

    All completions of a prompt go to one device, except for at most `replicas - 1` prompts that are split to balance
    the load. If completions of a prompt have different noise, no prompt is split, because a prompt is prefilled
    with the noise of its first completion. Prompts whose completion has begun are divided evenly, too, since long ones
    are among them.

    Args:
        prompts: Any number of prompts, those with a completion that has begun first.
        replicas: Number of devices.
        lengths: Expected tokens of a completion of each prompt; None means the same number for all.

    Returns:
        One queue per device.
    """
    sizes = [len(prompt.keys) for prompt in prompts]
    firsts = list(itertools.accumulate(sizes, initial=0))
    whole = any(p.noise is not None and len(set(p.noise.tolist())) > 1 for p in prompts)

    def piece(group: int, start: int, end: int) -> _Cached:
        prompt = prompts[group]
        if end - start < sizes[group]:
            noise = None if prompt.noise is None else prompt.noise[start:end]
            prompt = dataclasses.replace(prompt, keys=prompt.keys[start:end], noise=noise)
        return _Cached(prompt, firsts[group] + start, end - start)

    begun = sum(prompt.begun is not None for prompt in prompts)
    parts: list[list[_Cached]] = [[] for _ in range(replicas)]
    for start, end in ((0, begun), (begun, len(prompts))):
        expected = lengths and lengths[start:end]
        spans = work_queues.spans(sizes[start:end], replicas, whole=whole, lengths=expected)
        for part, of_part in zip(parts, spans, strict=True):
            part += [piece(start + group, *rows) for group, *rows in of_part]
    return work_queues.WorkQueues(parts)


class Schedule:
    """The state of one device's rows: waiting prompts, rows whose prompt is cached, rows in slots, and their pages.

    A row has pages for its next tokens only, and takes more as it grows. If no page is free, the row that began
    last is parked: its pages are copied to the host, and copied back before another row begins. A prompt is
    prefilled only if no cached prompt has a row left to begin, no row is parked, and enough pages stay free for the
    longest row. So the row that began first can always continue. (vLLM also preempts the latest row, but computes
    its pages again, arXiv 2309.06180.)

    Args:
        shapes: The shapes for which programs are compiled.
        num_pages: Pages of the pool.
        queues: Waiting prompts of this and other devices, from `distribute`.
        turns: Answers rows whose turn has ended; None for single-turn rows.
        replica: Index of this device's queue.
        leave: The number of rows that may be left unfinished when no other row waits.
        row_lengths: The number of tokens after which each row ends, as if by a stop token; None lets rows end as they
            do.
        ended: Called as ended(prompt, completion) with the tokens of each row that ends, if there are drafts.
        is_ready: Whether the programs of a batch size, or of the rows and the length of a prefill, are compiled. While
            one is not, a larger one takes its place, unless that is not compiled either.
    """

    def __init__(
        self,
        shapes: Shapes,
        num_pages: int,
        queues: work_queues.WorkQueues,
        turns: TurnTaker | None = None,
        *,
        replica: int = 0,
        leave: int = 0,
        row_lengths: Sequence[int] | None = None,
        ended: Callable[[np.ndarray, np.ndarray], None] = lambda prompt, completion: None,
        is_ready: Callable[[int | tuple[int, int]], bool] = lambda shape: True,
    ):
        self.num_pages = num_pages
        self._turns, self._ended, self._row_lengths = turns, ended, row_lengths
        self._shapes, self._pages = shapes, Pages(num_pages)
        # Batch sizes, and shapes of prefills, whose programs are not compiled; of the sizes never the largest.
        self._is_ready = is_ready
        prefills = (self._prefill_shape(n) for of in shapes.buckets() for n in of)
        self._unready: set[int | tuple[int, int]] = {*shapes.sizes[1:], *prefills}
        self._look()
        self._queues, self.replica, self._leave = queues, replica, leave
        self._ready: collections.deque[_Row] = collections.deque()
        self._slots: list[_Row | None] = [None] * shapes.sizes[0]
        self._copies: list[tuple[int, int]] = []
        # Sorted by the order in which they began.
        self._parked: list[_Row] = []
        self._returns: list[Move] = []
        self._begun = self.times_parked = 0
        # Cache of `Slots.texts`, and its key: the prompt of each slot and the number of its ended completions.
        self._texts: tuple[list, Texts] | None = None
        # Whether the device continues a row that the host has ended or paused (by a stop string, or for a reply).
        self._overtaken = False
        # Whether a chunk with drafts ends early when rows end, for the slots that were last returned.
        self._is_impatient = False

    def unfinished(self) -> bool:
        """Whether a row waits, or more rows have not ended than may be left."""
        return self._waits() or len(self._running()) > self._leave

    def leaving(self) -> list[Move]:
        """Allocates pages for the next tokens of running rows; if too few are free, parks the rows that began last.

        Returns:
            A `Move` for each parked row. Read its contents before anything else writes to the pool, because its pages
            are already free for other rows.
        """
        self._look()
        left: list[Move] = []
        rows = sorted((row for _, row in self._running()), key=lambda row: row.turn)
        # If nothing waits and there are enough pages, rows get all that they can need, so that chunks can run ahead.
        missing = (self._most(row) - len(row.pages) for row in rows)
        is_enough = not self._waits() and sum(missing) <= self._pages.free
        going = [row for row in rows if row.reply is None]
        ahead = _AHEAD * self._shapes.stride(self._size())
        while going:
            row = going.pop(0)
            wanted = (self._most(row) if is_enough else self._soon(row, ahead)) - len(row.pages)
            while wanted > self._pages.free and row.parked is None:
                last = going.pop() if going else row
                left.append(self._park(last))
            if row.parked is None and wanted > 0:
                row.pages += self._pages.take(wanted)
        return left

    def returning(self) -> list[Move]:
        """Returns the moves of parked rows back to the device, to be made before the next chunk."""
        moves, self._returns = self._returns, []
        return moves

    def next_prefill(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
        """Fills free slots with rows whose prompt is cached; if slots are still free, chooses prompts to prefill.

        Returns:
            Tokens int32 [R, T] and page tables int32 [R, pages] of the prompts to prefill now, and numbers int32 [R]
            of their noise or None. None if there is nothing to prefill before the next chunk.
        """
        self._admit()
        if self._ready or self._parked or not self._queues.any() or all(self._slots):
            return None
        chosen = self._queues.take(self.replica, self._choose)
        if not chosen:
            return None
        together, bucket = self._prefill_shape(self._bucket(chosen[0]))
        tokens = np.zeros((together, bucket), np.int32)
        tables = np.zeros((together, self._ceil(bucket)), np.int32)
        noise = None if chosen[0].prompt.noise is None else np.zeros(together, np.int32)
        for line, cached in enumerate(chosen):
            prompt, cached.pages = cached.prompt, self._pages.take(self._ceil(cached.prefilled))
            tokens[line, : cached.prefilled] = prompt.known[:-1]
            tables[line, : len(cached.pages)] = cached.pages
            numbers = [None] * len(prompt.keys)
            if noise is not None:
                numbers = prompt.noise.tolist()
                noise[line] = numbers[0]
            rows = zip(itertools.count(cached.first_row), prompt.keys, numbers, strict=False)
            begun = () if prompt.begun is None else prompt.begun.tokens.tolist()
            self._ready.extend(_Row(cached, *row, tokens=[*begun]) for row in rows)
        return tokens, tables, noise

    @property
    def live(self) -> int:
        """The number of rows in slots that do not wait for a reply."""
        return sum(row.reply is None for _, row in self._running())

    def take_replies(self) -> list[RowTokens]:
        """Takes the replies that are ready: their rows continue, or end.

        An empty reply ends a row. So does a reply after which no token could be sampled within the limit.

        Returns:
            The ends of the rows that ended, without further tokens.

        Raises:
            Exception: An error that a `TurnTaker` raised.
        """
        ended, none = [], np.zeros(0, np.float32)
        for slot, row in self._running():
            if row.reply is None or not row.reply.done():
                continue
            reply, row.reply = list(row.reply.result()), None
            if reply and len(row.tokens) + len(reply) < row.limit:
                row.forced, row.begun = reply, len(row.tokens) + len(reply)
                continue
            self._free(slot)
            why: Ending = "length" if reply else "stop"
            ended.append(
                RowTokens(row.index, none.astype(np.int32), none, why, none, none.astype(bool))
            )
        return ended

    def wait(self, seconds: float) -> None:
        """Waits until a reply is ready, for at most `seconds`."""
        replies = [row.reply for _, row in self._running() if row.reply is not None]
        concurrent.futures.wait(replies, seconds, concurrent.futures.FIRST_COMPLETED)

    def copies(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the pages to copy before the next chunk: sources and targets, int32 [slots] each; None for none."""
        if not self._copies:
            return None
        pairs = np.zeros((self._shapes.sizes[0], 2), np.int32)
        pairs[: len(self._copies)] = self._copies
        self._copies.clear()
        return pairs[:, 0], pairs[:, 1]

    def slots(self, with_history: bool) -> Slots:
        """Returns the next chunk's rows, moved into the smallest batch that holds them.

        `with_history` asks for their history even without drafts.
        """
        shapes, self._overtaken = self._shapes, False
        size, rows = self._size(), [row for _, row in self._running()]
        stride, drafts, patience = shapes.stride(size), size <= shapes.drafted, self._patience(size)
        self._is_impatient = drafts and patience < _NEVER
        if size < len(self._slots):
            self._slots = rows + [None] * (size - len(rows))

        def numbers(of: Callable[[_Row], int]) -> np.ndarray:
            return np.array([0 if row is None else of(row) for row in self._slots], np.int32)

        def lists(of: Callable[[_Row], Sequence[int] | np.ndarray], width: int, fill: int = 0):
            array = np.full((size, width), fill, np.int32)
            for slot, row in self._running():
                values = of(row)
                array[slot, : len(values)] = values
            return array

        def shared(row: _Row) -> int:
            # Also for a row whose siblings have ended: how attention splits its pages, which affects rounding,
            # must not depend on them.
            pages = row.cached.prompt.shared_pages(shapes.page_size)
            return pages if pages >= shapes.least_shared else 0

        ends, no_key = self._row_lengths, np.zeros_like(rows[0].key)
        return Slots(
            tables=lists(lambda row: row.pages, shapes.table_width),
            ends=numbers(lambda row: row.cached.filled + len(row.tokens)),
            token=numbers(lambda row: (row.tokens or row.cached.prompt.tokens)[-1]),
            step=numbers(lambda row: len(row.tokens)),
            limit=numbers(
                lambda row: row.limit if ends is None else min(row.limit, ends[row.index])
            ),
            live=np.array([row is not None and row.reply is None for row in self._slots]),
            keys=np.array([no_key if row is None else row.key for row in self._slots]),
            history=lists(_Row.text, shapes.history, -1) if with_history or drafts else None,
            noise=None if rows[0].noise is None else numbers(lambda row: row.noise),
            forced=None
            if self._turns is None
            else lists(lambda row: row.forced[:stride], stride, -1),
            shared=numbers(shared) if shapes.least_shared else None,
            texts=self._known_texts() if drafts else None,
            # With stop strings chunks are short, because tokens after a stop string are not used.
            span=np.int32(shapes.chunk if shapes.stop_strings else stride) if drafts else None,
            patience=np.int32(patience) if drafts else None,
        )

    def _patience(self, size: int) -> int:
        """Returns `Slots.patience`: a chunk ends early only if a slot can be reused, or a turn can be answered."""
        # A single row's chunk ends with it anyway.
        if not self._waits() and (self._turns is None or self.live == 1):
            return _NEVER
        return max(1, int(_IDLE * size))

    def _known_texts(self) -> Texts:
        """Returns the texts in which drafts are searched; the same object as long as they have not changed."""
        of = [(row.cached.first_row, len(row.cached.ended)) if row else None for row in self._slots]
        if self._texts is None or self._texts[0] != of:
            size, most = len(of), self._shapes.ended
            texts = Texts(np.full((size, most), -1, np.int32), np.full(size, -1, np.int32))
            known = {
                cached: cached.ended_texts(most)
                for cached in {row.cached for _, row in self._running()}
            }
            for slot, row in self._running():
                ended = known[row.cached]
                texts.ended[slot, : len(ended)] = ended
                texts.group[slot] = row.cached.first_row
            self._texts = of, texts
        return self._texts[1]

    def can_run_ahead(self, *, drafts: bool = False) -> bool:
        """Whether the next chunk can start before the host has read the current one.

        True if no row waits for a slot or a reply, or has forced tokens left; every running row has pages for two
        chunks; the batch size stays the same; some row can get more tokens than one chunk; and the device knows all
        rows that have ended. If the current chunk makes `drafts` and may end early because rows end, the next chunk
        waits for the host: otherwise the ended rows would be idle for all of it.
        """
        self._look()
        stride = self._shapes.stride(len(self._slots))
        return (
            not (drafts and self._is_impatient)
            and not any(row.reply or row.forced for _, row in self._running())
            and not (self._waits() or self._overtaken)
            and all(self._soon(row, 2 * stride) <= len(row.pages) for _, row in self._running())
            and self._left() > self._shapes.chunk
            and self._size() == len(self._slots)
        )

    def harvest(
        self,
        tokens: np.ndarray,
        behaviour_logps: np.ndarray,
        lengths: np.ndarray,
        live: np.ndarray,
        stop_tokens: np.ndarray,
        stop_strings: StopStrings | None,
        entropies: np.ndarray | None = None,
    ) -> Iterator[RowTokens]:
        """Takes the results of a chunk of n tokens for B slots, and frees the slots and pages of rows that ended.

        A row whose turn has ended by a stop waits in its slot, unless its `TurnTaker` ends it there.

        Args:
            tokens: int32 [B, n].
            behaviour_logps: float32 [B, n], in nats.
            lengths: int32 [B], the number of tokens that each row got.
            live: bool [B], which rows have not ended.
            stop_tokens: int32 [k].
            stop_strings: Strings that end a row, or None.
            entropies: float32 [B, n], in nats, or None.

        Returns:
            The tokens of each row. Slots and pages are freed at once. The arrays are sliced only when the iterator is
            read, so the next chunk can start before that.

        Raises:
            NotFinite: If a log-probability is NaN.
        """
        has_nan = bool(np.isnan(behaviour_logps).any())
        taken = []
        for slot, row in self._running():
            if row.reply is not None:
                continue
            seen, length = len(row.tokens), int(lengths[slot])
            if has_nan and (bad := np.isnan(behaviour_logps[slot, :length])).any():
                raise NotFinite(
                    f"sampling: token {seen + int(bad.argmax())} of row {row.index} has the log-probability nan: the "
                    f"logits are not finite. {NOT_FINITE}"
                )
            forced = min(length, len(row.forced))
            row.forced = row.forced[forced:]
            row.tokens += tokens[slot, :length].tolist()
            stopped = row.tokens[-1] in stop_tokens or len(row.tokens) < row.limit
            ended = None if live[slot] else "stop" if stopped else "length"
            if stop_strings is not None and length > forced:
                turn, before = row.tokens[row.begun :], max(0, seen - row.begun)
                if (end := stop_strings.end(turn, before)) is not None:
                    length, ended = row.begun + end - seen, "stop"
                    row.tokens = row.tokens[: seen + length]
            if ended == "stop" and self._turns is not None:
                row.reply = self._turns(row.index, row.tokens)
                ended = "stop" if row.reply is None else None
            self._overtaken |= bool(live[slot]) and (ended is not None or row.reply is not None)
            taken.append((row.index, slot, length, forced, ended))
            if ended:
                self._free(slot)
        return (
            RowTokens(
                row,
                tokens[slot, :length],
                behaviour_logps[slot, :length],
                ended,
                None if entropies is None else entropies[slot, :length],
                None if self._turns is None else np.arange(length) < forced,
            )
            for row, slot, length, forced, ended in taken
        )

    def _free(self, slot: int) -> None:
        row = self._slots[slot]
        if self._shapes.drafted:
            row.cached.ended.append(np.array(row.tokens, np.int32))
            self._ended(row.cached.prompt.tokens, row.cached.ended[-1])
        self._pages.give_back(row.pages)
        self._slots[slot] = None

    def _waits(self) -> bool:
        """Whether a row waits for a slot."""
        return bool(self._queues.any() or self._ready or self._parked)

    def _park(self, row: _Row) -> Move:
        """Takes slot and pages from a row until there are enough free pages for it again."""
        row.parked, row.pages = Move(row.pages), []
        self._slots[self._slots.index(row)] = None
        self._pages.give_back(row.parked.pages)
        bisect.insort(self._parked, row, key=lambda row: row.turn)
        self.times_parked += 1
        return row.parked

    def _most(self, row: _Row) -> int:
        """Returns the most pages that a row can need."""
        return self._soon(row, row.limit)

    def _grows(self, row: _Row) -> bool:
        """Whether a row may ask for more pages than it has."""
        return len(row.pages) < self._most(row)

    def _soon(self, row: _Row, ahead: int) -> int:
        """Returns the pages that a row needs for its next `ahead` tokens, at most up to its limit."""
        return self._ceil(row.cached.filled + min(len(row.tokens) + ahead, row.limit))

    def _running(self) -> list[tuple[int, _Row]]:
        """Returns the rows in slots, as pairs (slot, row)."""
        return [(slot, row) for slot, row in enumerate(self._slots) if row is not None]

    def _left(self) -> int:
        """Returns the most tokens that any row in a slot may still get."""
        return max((row.limit - len(row.tokens) for _, row in self._running()), default=0)

    def _size(self) -> int:
        """Returns the size of the smallest batch that holds the rows; the current one if all end within a chunk."""
        # Compiling another program does not pay for less than a chunk's work.
        if not self._waits() and self._left() <= self._shapes.chunk:
            return len(self._slots)
        # Only rows count, not slots: if rows wait for pages, empty slots would cost as much as rows.
        sizes = (size for size in self._shapes.sizes if size not in self._unready)
        return min(size for size in sizes if size >= len(self._running()))

    def _look(self) -> None:
        """Looks which programs are compiled now. Between two looks the sizes of batches and prefills stay the same."""
        self._unready = {shape for shape in self._unready if not self._is_ready(shape)}

    def _ceil(self, tokens: int) -> int:
        """Returns the number of pages that hold `tokens` tokens."""
        return -(-tokens // self._shapes.page_size)

    def _bucket(self, cached: _Cached) -> int:
        """Returns the length to which a prompt is padded: the least one whose program is compiled, else the longest."""
        buckets = self._shapes.buckets_for(cached.prefilled)
        ready = (n for n in buckets if self._prefill_shape(n) not in self._unready)
        return min(ready, default=buckets[0])

    def _prefill_shape(self, bucket: int) -> tuple[int, int]:
        """Returns the number of prompts in a prefill, and the length to which they are padded."""
        return prefilled_together(self._shapes.most_prompts, bucket), bucket

    def _choose(self, waiting: Sequence[_Cached]) -> list[_Cached]:
        """Returns prompts to prefill together: the next one, and later ones that are padded to the same length."""
        count, bucket = self._prefill_shape(self._bucket(waiting[0]))
        chosen, reserved = [], 0
        # No cached prompt has rows left to begin, so all pages of a running row count as its own.
        begins = max((self._most(row) for _, row in self._running()), default=0)
        for cached in (c for c in waiting if self._bucket(c) == bucket):
            filled, size = cached.filled, self._shapes.page_size
            pages = self._ceil(cached.prefilled)
            # The next row needs pages besides the prompt's; if it is the last one, it takes these over.
            inherited = filled // size if cached.rows_left > 1 else pages
            begins = max(begins, self._ceil(filled + cached.prompt.limit) - inherited)
            # Beside the pages of these prompts, the longest row must fit, even if all others are parked.
            fits = reserved + pages <= min(self._pages.free, self.num_pages - 1 - begins)
            if len(chosen) == count or not fits:
                break
            reserved += pages
            chosen.append(cached)
        return chosen

    def _admit(self) -> None:
        """Gives free slots to parked rows, then to rows whose prompt is cached, in order, while there are pages."""
        if self._waits():
            self._slots += [None] * (self._shapes.sizes[0] - len(self._slots))
        # Keeps a page for each row that will need more, so that no row has to be parked at once.
        spare = sum(self._grows(row) for _, row in self._running())
        while None in self._slots and (waiting := self._parked or self._ready):
            shared, more = self._begins_with(row := waiting[0])
            if more + spare > self._pages.free:
                return
            self._slots[self._slots.index(None)] = row
            private = self._pages.take(more)
            row.pages = shared + private
            if row.parked is None:
                self._begin(self._ready.popleft(), shared, private)
            else:
                count = len(row.parked.pages) - len(shared)
                self._pages.share(shared)
                self._returns.append(Move(private[:count], row.parked.contents, len(shared)))
                self._parked.pop(0).parked = None
            spare += self._grows(row)

    def _begins_with(self, row: _Row) -> tuple[list[int], int]:
        """Returns the prompt's pages that a row shares or takes over, and the number of further pages it needs."""
        cached, total = row.cached, self._soon(row, _AHEAD * self._shapes.chunk)
        whole = cached.pages[: cached.filled // self._shapes.page_size]
        if row.parked is None:
            shared = whole if cached.rows_left > 1 else cached.pages
        else:
            shared, total = whole if cached.rows_left else [], max(total, len(row.parked.pages))
        return shared, total - len(shared)

    def _begin(self, row: _Row, shared: list[int], private: list[int]) -> None:
        cached = row.cached
        row.turn, self._begun = self._begun, self._begun + 1
        cached.rows_left -= 1
        if cached.rows_left:
            self._pages.share(shared)
            if len(shared) < len(cached.pages):
                self._copies.append((cached.pages[-1], private[0]))
