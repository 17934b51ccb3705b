"""The schedule between two chunks: waiting prompts, rows in slots, and the pages that they hold.

Plain Python on small arrays, which the host goes through while the device samples. The sizes that a
batch can have, and the lengths to which prompts are padded, are few and fixed: each is a program.
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

# Tokens of one prefill: enough that products are bound by arithmetic, not by memory.
_PREFILL_TOKENS = 8192
_SMALLEST_BUCKET = 64
# With fewer rows than this, reading the weights bounds a decode step: a smaller batch is not faster.
_SMALLEST_BATCH = 8
# A chunk with drafts ends when rows that have ended in it have been idle for this part of its slots' steps together, if
# rows wait. See `scripts/replay_chunks.py`.
_IDLE = 0.25
# Of a chunk that no such reason ends.
_NEVER = 2**30
# Chunks for which a row has pages: the one under way, the one after it, and as many again before it asks for more.
# These are enough for one with drafts, too.
_AHEAD = CHUNKS


@dataclasses.dataclass(frozen=True)
class QueuedPrompt:
    """A prompt and the completions that are wanted of it.

    Attributes:
        tokens: int32 [T], at least one.
        keys: uint32 [G, ...], the key data of each completion's randomness.
        limit: Most tokens of each completion.
        noise: int32 [G], the number of each completion's noise where rows have their own; the prompt
            runs under that of the first. See `model.noise.RowNoise`.
        earlier: Completions of the prompt that are known from before, int32 [n] each, for drafts.
    """

    tokens: np.ndarray
    keys: np.ndarray
    limit: int
    noise: np.ndarray | None = None
    earlier: Sequence[np.ndarray] = ()

    def shared_pages(self, page_size: int) -> int:
        """Whole pages of all tokens but the last, which its completions have in common; 0 if it has one completion."""
        return (len(self.tokens) - 1) // page_size if len(self.keys) > 1 else 0


# Called with a row's number and its tokens so far when its turn has ended. Returns None if the row ends there,
# otherwise a future of the tokens that come next. These are given, not sampled; an empty list ends the row.
type TurnTaker = Callable[[int, Sequence[int]], "concurrent.futures.Future[Sequence[int]] | None"]


@dataclasses.dataclass(frozen=True)
class RowTokens:
    """Tokens of a row: those of a chunk, or all of them.

    Attributes:
        row: Number of the row; rows are counted through all prompts.
        tokens: int32 [n].
        logps: float32 [n]; 0 of given tokens.
        ended: Why the row ended: a stop token or string ("stop"), or its limit; None while it goes on.
        entropies: float32 [n], of the distribution of each token (0 of given ones); None where nobody asked.
        given: bool [n], tokens that were not sampled but given by a `TurnTaker`; None where there is none.
        is_own: Whether this process sampled the row; False for a row that another host has sent.
    """

    row: int
    tokens: np.ndarray
    logps: np.ndarray
    ended: Literal["stop", "length"] | None
    entropies: np.ndarray | None = None
    given: np.ndarray | None = None
    is_own: bool = True


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
        given: int32 [B, n], tokens that a row takes next in a chunk instead of sampled ones, -1 where it samples;
            None where rows have one turn.
        shared: int32 [B], whole pages of each row's prompt that attention reads once for it and its siblings; None
            where it reads all pages for each row.
        texts: Where drafts are looked for, with `history`; None where there are no drafts.
        span: int32, with drafts: the chunk ends when a row has got so many tokens.
        patience: int32, with drafts: the chunk ends when rows that have ended in it have been idle for so many steps
            together.
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
    given: Any = None
    shared: Any = None
    texts: Texts | None = None
    span: Any = None
    patience: Any = None


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes of a run, all that is compiled.

    Attributes:
        page_size: S.
        chunk: Most tokens of a row between two looks of the host, without drafts.
        table_width: W.
        history: Most tokens of a row, prompt included.
        longest_prefill: Most tokens of a prompt but its last.
        most_prompts: Prompts that can be prefilled at a time: these, or as many as there are slots.
        sizes: Rows that a batch can have, largest first.
        least_shared: Pages of a prompt from which on attention reads them once for several of its rows; 0 if it never does.
        drafted: The most rows that have drafts; 0 for no drafts.
        ended: P, tokens of a row's group that have ended and in which drafts are looked for.
        stop_strings: Whether texts end rows, which the host finds between two chunks.
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

    def stride(self, rows: int) -> int:
        """The most tokens that a row of a batch of so many gets between two looks of the host."""
        return self.chunk * (CHUNKS if rows <= self.drafted else 1)

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
    """The smallest power of two that is not less."""
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
    """A prompt, the pages that hold it until the last of its rows has begun, and its completions that have ended here."""

    prompt: QueuedPrompt
    first_row: int
    rows_left: int
    pages: list[int] = dataclasses.field(default_factory=list)
    ended: list[np.ndarray] = dataclasses.field(default_factory=list)
    # How many had ended when `ended_texts` was last called, its argument, and what it gave.
    _known: tuple[int, int, np.ndarray] | None = None

    @property
    def filled(self) -> int:
        """Tokens that are prefilled."""
        return len(self.prompt.tokens) - 1

    def ended_texts(self, most: int) -> np.ndarray:
        """Completions that are known, each behind the prompt's last tokens and before a -1: where a row begins, too, there
        is a match. int32 [n], as much of the last ones as fits into `most`.
        """
        if self._known is None or self._known[:2] != (len(self.ended), most):
            self._known = len(self.ended), most, self._last_texts(most)
        return self._known[2]

    def _last_texts(self, most: int) -> np.ndarray:
        begin = self.prompt.tokens[-LONGEST_MATCH:]
        texts: list[np.ndarray] = [np.zeros(0, np.int32)]
        for text in (*reversed(self.ended), *reversed(self.prompt.earlier)):
            room = most - sum(map(len, texts))
            if room <= 1:
                break
            text = np.concatenate([begin, text])[: room - 1]
            texts.insert(0, np.append(text, np.int32(-1)))
        return np.concatenate(texts)


@dataclasses.dataclass(eq=False)
class Move:
    """Pages of a row whose contents go to the host, or come back.

    Attributes:
        pages: Where they are on the device, or will be.
        contents: What they hold, of whatever kind; set by who brings it to the host.
        skipped: Pages at the beginning of the contents that need not come back.
    """

    pages: list[int]
    contents: Any = None
    skipped: int = 0


@dataclasses.dataclass(eq=False)
class _Row:
    """One completion: `made` are its tokens so far.

    Between two turns it keeps its slot and its pages, and waits for `reply`. `given` are tokens of a reply
    that are not in `made` yet; the present turn begins, or will begin, with token number `begun`. While it is
    `parked` it has neither slot nor pages. `turn` is its place in the order in which rows began.
    """

    cached: _Cached
    index: int
    key: np.ndarray
    noise: int | None
    turn: int = 0
    parked: Move | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    made: list[int] = dataclasses.field(default_factory=list)
    reply: concurrent.futures.Future | None = None
    given: list[int] = dataclasses.field(default_factory=list)
    begun: int = 0
    _text: np.ndarray | None = None

    def text(self) -> np.ndarray:
        """The tokens of prompt and completion, int32 [n]."""
        if self._text is None:
            self._text = self.cached.prompt.tokens
        # A list of tokens is slow to read: only those that are new are taken from it.
        if new := len(self.cached.prompt.tokens) + len(self.made) - len(self._text):
            self._text = np.concatenate([self._text, np.array(self.made[-new:], np.int32)])
        return self._text


def _ending(row: int, why: Literal["stop", "length"]) -> RowTokens:
    """The end of a row behind its last token."""
    none = np.zeros(0, np.float32)
    return RowTokens(row, np.zeros(0, np.int32), none, why, none, np.zeros(0, bool))


def distribute(
    prompts: Sequence[QueuedPrompt], places: int = 1, lengths: Sequence[float] | None = None
) -> work_queues.WorkQueues:
    """Distributes prompts among devices, for a `Schedule` each.

    All completions of a prompt go to one device, except for at most `places - 1` prompts that are split to balance
    the load. If completions of a prompt have different noise, no prompt is split, because a prompt is prefilled
    with the noise of its first completion.

    Args:
        prompts: Any number.
        places: How many devices there are.
        lengths: Tokens that are expected of a completion of each prompt; None means as many of all.
    """
    sizes = [len(prompt.keys) for prompt in prompts]
    firsts = list(itertools.accumulate(sizes, initial=0))
    whole = any(each.noise is not None and len(set(each.noise.tolist())) > 1 for each in prompts)

    def piece(group: int, start: int, end: int) -> _Cached:
        prompt = prompts[group]
        if end - start < sizes[group]:
            noise = None if prompt.noise is None else prompt.noise[start:end]
            prompt = dataclasses.replace(prompt, keys=prompt.keys[start:end], noise=noise)
        return _Cached(prompt, firsts[group] + start, end - start)

    spans = work_queues.spans(sizes, places, whole=whole, lengths=lengths)
    return work_queues.WorkQueues([[piece(*each) for each in part] for part in spans])


class Schedule:
    """The state of a queue: waiting prompts, rows whose prompt is cached, rows in slots, and their pages.

    A row has pages for its next tokens only, and takes more as it grows. If no page is free, the row that began
    last is parked: its pages are copied to the host, and copied back before another row begins. A prompt is
    prefilled only if no cached prompt has a row left to begin, no row is parked, and enough pages stay free for the
    longest row. So the row that began first can always continue. (vLLM also preempts the latest row, but computes
    its pages again, arXiv 2309.06180.)
    """

    def __init__(
        self,
        shapes: Shapes,
        num_pages: int,
        queues: work_queues.WorkQueues,
        turns: TurnTaker | None = None,
        *,
        place: int = 0,
        ended: Callable[[np.ndarray, np.ndarray], None] = lambda prompt, completion: None,
    ):
        """Begins nothing.

        Args:
            shapes: What is compiled.
            num_pages: Pages of the pool.
            queues: Prompts that wait, from `distribute`, here and on other devices.
            turns: Answers rows whose turn has ended.
            place: Number of the queue that is the schedule's own.
            ended: Is told each prompt and completion that have ended, where there are drafts.
        """
        self.num_pages = num_pages
        self._turns, self._ended = turns, ended
        self._shapes, self._pages = shapes, Pages(num_pages)
        self._queues, self.place = queues, place
        self._ready: collections.deque[_Row] = collections.deque()
        self._slots: list[_Row | None] = [None] * shapes.sizes[0]
        self._copies: list[tuple[int, int]] = []
        # In the order in which they began.
        self._parked: list[_Row] = []
        self._returns: list[Move] = []
        self._begun = 0
        self.times_parked = 0
        # Which prompts have rows in slots and how many completions of each have ended, and `Slots.texts` of these.
        self._texts: tuple[list, Texts] | None = None
        # Whether the device takes a row for alive that a stop string has ended.
        self._overtaken = False
        # Whether a chunk with drafts of the slots that were given last ends early when rows end.
        self._is_impatient = False

    def unfinished(self) -> bool:
        """Whether any row has not ended."""
        return bool(self._waits() or any(self._slots))

    def leaving(self) -> list[Move]:
        """Allocates pages for the next tokens of running rows. If too few are free, the rows that began last are parked.

        Returns:
            A `Move` for each parked row. Read its contents before anything else writes to the pool, because its pages
            are already free for other rows.
        """
        left: list[Move] = []
        rows = sorted((row for _, row in self._running()), key=lambda row: row.turn)
        # Where nobody waits for a page, rows take all they can need, and the device goes on without the host.
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
        """What parked rows get back before the next chunk: where it goes, and the contents."""
        moves, self._returns = self._returns, []
        return moves

    def next_prefill(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
        """Fills the slots from prompts in the cache; where that is not enough, the next to put there.

        Returns:
            Tokens [R, T] and tables of the prompts to prefill now, and numbers [R] of their noise or
            None; None when nothing is left to do before the next chunk.
        """
        self._admit()
        if self._ready or self._parked or not self._queues.any() or all(self._slots):
            return None
        chosen = self._queues.take(self.place, self._choose)
        if not chosen:
            return None
        bucket, together = self._prefill_shape(chosen[0])
        tokens = np.zeros((together, bucket), np.int32)
        tables = np.zeros((together, self._ceil(bucket)), np.int32)
        noise = None if chosen[0].prompt.noise is None else np.zeros(together, np.int32)
        for line, cached in enumerate(chosen):
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
        return tokens, tables, noise

    @property
    def has_drafts(self) -> bool:
        """Whether drafts are looked for where rows are few."""
        return self._shapes.drafted > 0

    @property
    def live(self) -> int:
        """How many rows in slots have something to do."""
        return sum(row.reply is None for _, row in self._running())

    def take_replies(self) -> list[RowTokens]:
        """Takes in the replies that have come: rows go on with them, and those that do not are given back.

        A reply that leaves no room for a token of the row's own ends it at its limit.

        Raises:
            Exception: What a `TurnTaker` raised.
        """
        ended = []
        for slot, row in self._running():
            if row.reply is None or not row.reply.done():
                continue
            given, row.reply = list(row.reply.result()), None
            fits = len(row.made) + len(given) < row.cached.prompt.limit
            if given and fits:
                row.given, row.begun = given, len(row.made) + len(given)
                continue
            self._free(slot)
            ended.append(_ending(row.index, "length" if given else "stop"))
        return ended

    def wait(self, seconds: float) -> None:
        """Waits for a reply, but no longer than that."""
        replies = [row.reply for _, row in self._running() if row.reply is not None]
        concurrent.futures.wait(replies, seconds, concurrent.futures.FIRST_COMPLETED)

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
        drafts = size <= self._shapes.drafted
        patience = self._patience(size)
        self._is_impatient = drafts and patience < _NEVER
        if size < len(self._slots):
            self._slots = rows + [None] * (size - len(rows))
        slots = Slots(
            tables=np.zeros((size, self._shapes.table_width), np.int32),
            ends=np.zeros(size, np.int32),
            token=np.zeros(size, np.int32),
            step=np.zeros(size, np.int32),
            limit=np.zeros(size, np.int32),
            live=np.array([row is not None and row.reply is None for row in self._slots]),
            keys=np.zeros((size, *rows[0].key.shape), np.uint32),
            history=np.full((size, self._shapes.history), -1, np.int32)
            if with_history or drafts
            else None,
            noise=None if rows[0].noise is None else np.zeros(size, np.int32),
            given=None
            if self._turns is None
            else np.full((size, self._shapes.stride(size)), -1, np.int32),
            shared=np.zeros(size, np.int32) if self._shapes.least_shared else None,
            texts=self._known_texts() if drafts else None,
            span=np.int32(self._span(size)) if drafts else None,
            patience=np.int32(patience) if drafts else None,
        )
        for slot, row in self._running():
            prompt = row.cached.prompt
            slots.tables[slot, : len(row.pages)] = row.pages
            slots.ends[slot] = row.cached.filled + len(row.made)
            slots.token[slot] = row.made[-1] if row.made else prompt.tokens[-1]
            slots.step[slot] = len(row.made)
            slots.limit[slot] = prompt.limit
            slots.keys[slot] = row.key
            if slots.shared is not None:
                # Also of a row whose siblings have ended: how its pages are cut must not depend on them.
                pages = prompt.shared_pages(self._shapes.page_size)
                slots.shared[slot] = pages if pages >= self._shapes.least_shared else 0
            if row.noise is not None:
                slots.noise[slot] = row.noise
            if row.given:
                now = row.given[: self._shapes.stride(size)]
                slots.given[slot, : len(now)] = now
            if slots.history is not None:
                text = row.text()
                slots.history[slot, : len(text)] = text
        return slots

    def _span(self, size: int) -> int:
        """Tokens of a row after which a chunk with drafts ends. What comes after a stop string is not used."""
        return self._shapes.chunk if self._shapes.stop_strings else self._shapes.stride(size)

    def _patience(self, size: int) -> int:
        """See `Slots`. A row that has ended gives its slot to one that waits, or waits for a reply itself."""
        # With one row no other is there to go on without it.
        if not self._waits() and (self._turns is None or self.live == 1):
            return _NEVER
        return max(1, int(_IDLE * size))

    def _known_texts(self) -> Texts:
        """Where the rows in slots find drafts; the same object as long as that is the same."""
        all_cached = [None if row is None else row.cached for row in self._slots]
        of = [(each.first_row, len(each.ended)) if each else None for each in all_cached]
        if self._texts is None or self._texts[0] != of:
            size = len(of)
            texts = Texts(
                np.full((size, self._shapes.ended), -1, np.int32), np.full(size, -1, np.int32)
            )
            for slot, cached in enumerate(all_cached):
                if cached is not None:
                    ended = cached.ended_texts(self._shapes.ended)
                    texts.ended[slot, : len(ended)] = ended
                    texts.group[slot] = cached.first_row
            self._texts = of, texts
        return self._texts[1]

    def can_run_ahead(self, *, drafts: bool = False) -> bool:
        """Whether the next chunk can start before the host has read the current one.

        True if no row waits for a slot, a reply or given tokens; every running row has pages for two chunks; the batch
        size stays the same; some row can get more tokens than one chunk; and the device knows all rows that have ended.

        Args:
            drafts: Whether the current chunk makes drafts. If it may end early because rows end, the next chunk waits
                for the host: otherwise the ended rows would be idle for all of it.
        """
        stride = self._shapes.stride(len(self._slots))
        return (
            not (drafts and self._is_impatient)
            and not any(row.reply or row.given for _, row in self._running())
            and not (self._waits() or self._overtaken)
            and all(self._soon(row, 2 * stride) <= len(row.pages) for _, row in self._running())
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
    ) -> Iterator[RowTokens]:
        """Takes the results of a chunk of n tokens for B slots, and frees the slots and pages of rows that ended.

        A row whose turn has ended by a stop waits in its slot, unless its `TurnTaker` ends it there.

        Args:
            tokens: int32 [B, n].
            logps: float32 [B, n], nats.
            lengths: int32 [B], how many tokens each row got.
            live: bool [B], which rows have not ended.
            stop_tokens: int32 [k].
            stop_strings: Strings that end a row, or None.
            entropies: float32 [B, n], nats, or None.

        Returns:
            The tokens of each row. Slots and pages are free at once; the arrays are cut when the iterator is read, so
            the next chunk can begin first.
        """
        taken = []
        for slot, row in self._running():
            if row.reply is not None:
                continue
            seen, length = len(row.made), int(lengths[slot])
            given = min(length, len(row.given))
            row.given = row.given[given:]
            row.made += tokens[slot, :length].tolist()
            ended = None if live[slot] else "stop" if row.made[-1] in stop_tokens else "length"
            if stop_strings is not None and length > given:
                own, before = row.made[row.begun :], max(0, seen - row.begun)
                if (kept := stop_strings.kept(own, before)) is not None:
                    length, ended = row.begun + kept - seen, "stop"
                    row.made = row.made[: seen + length]
            if ended == "stop" and self._turns is not None:
                row.reply = self._turns(row.index, row.made)
                ended = "stop" if row.reply is None else None
            self._overtaken |= bool(live[slot]) and (ended is not None or row.reply is not None)
            taken.append((row.index, slot, length, given, ended))
            if ended:
                self._free(slot)
        return (
            RowTokens(
                row,
                tokens[slot, :length],
                logps[slot, :length],
                ended,
                None if entropies is None else entropies[slot, :length],
                None if self._turns is None else np.arange(length) < given,
            )
            for row, slot, length, given, ended in taken
        )

    def _free(self, slot: int) -> None:
        row = self._slots[slot]
        if self._shapes.drafted:
            row.cached.ended.append(np.array(row.made, np.int32))
            self._ended(row.cached.prompt.tokens, row.cached.ended[-1])
        self._pages.give_back(row.pages)
        self._slots[slot] = None

    def _waits(self) -> bool:
        """Whether a row waits for a slot."""
        return bool(self._queues.any() or self._ready or self._parked)

    def _park(self, row: _Row) -> Move:
        """Takes slot and pages from a row until there is room for it again."""
        row.parked, row.pages = Move(row.pages), []
        self._slots[self._slots.index(row)] = None
        self._pages.give_back(row.parked.pages)
        bisect.insort(self._parked, row, key=lambda each: each.turn)
        self.times_parked += 1
        return row.parked

    def _most(self, row: _Row) -> int:
        """Pages that a row can need."""
        return self._ceil(row.cached.filled + row.cached.prompt.limit)

    def _grows(self, row: _Row) -> bool:
        """Whether a row may ask for more pages than it has."""
        return len(row.pages) < self._most(row)

    def _soon(self, row: _Row, ahead: int) -> int:
        """Pages that a row needs for so many tokens more."""
        tokens = min(len(row.made) + ahead, row.cached.prompt.limit)
        return self._ceil(row.cached.filled + tokens)

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
        # Compiling another program does not pay for less than a chunk's work.
        if not self._waits() and self._left() <= self._shapes.chunk:
            return len(self._slots)
        # Rows may wait for pages while there are slots: these would cost as much as rows.
        return min(size for size in self._shapes.sizes if size >= len(self._running()))

    def _ceil(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self._shapes.page_size)

    def _prefill_shape(self, cached: _Cached) -> tuple[int, int]:
        """The length to which a prompt is padded, and how many of that length are prefilled together."""
        bucket = self._shapes.bucket(cached.filled)
        return bucket, prefilled_together(self._shapes.most_prompts, bucket)

    def _choose(self, waiting: Sequence[_Cached]) -> list[_Cached]:
        """Prompts to prefill together: the next, and those after it that are padded to the same length."""
        bucket, count = self._prefill_shape(waiting[0])
        chosen, held = [], 0
        # Rows that began have no prompt in the cache any more: all their pages are their own.
        begins = max((self._most(row) for _, row in self._running()), default=0)
        for cached in (c for c in waiting if self._shapes.bucket(c.filled) == bucket):
            pages = self._ceil(cached.filled)
            begins = max(begins, self._needs(cached))
            # What prompts hold leaves room for the longest row, even if it is the only one.
            fits = held + pages <= min(self._pages.free, self.num_pages - 1 - begins)
            if len(chosen) == count or not fits:
                break
            held += pages
            chosen.append(cached)
        return chosen

    def _admit(self) -> None:
        """Gives free slots to parked rows, then to rows whose prompt is cached, in order, while there are pages."""
        if self._waits():
            self._slots += [None] * (self._shapes.sizes[0] - len(self._slots))
        if None not in self._slots:
            return
        # A page for each row that will ask for one, so that none has to leave at once.
        spare = sum(self._grows(row) for _, row in self._running())
        while None in self._slots and (waiting := self._parked or self._ready):
            shared, own = self._begins_with(row := waiting[0])
            if own + spare > self._pages.free:
                return
            self._slots[self._slots.index(None)] = row
            if row.parked is None:
                self._ready.popleft()
                self._begin(row, shared, self._pages.take(own))
            else:
                self._parked.pop(0)
                self._return(row, shared, self._pages.take(own))
            spare += self._grows(row)

    def _begins_with(self, row: _Row) -> tuple[list[int], int]:
        """Pages of its prompt that a row takes over or shares, and how many more it takes for its next tokens."""
        cached, total = row.cached, self._soon(row, _AHEAD * self._shapes.chunk)
        whole = cached.pages[: cached.filled // self._shapes.page_size]
        if row.parked is None:
            shared = whole if cached.rows_left > 1 else cached.pages
        else:
            shared, total = whole if cached.rows_left else [], max(total, len(row.parked.pages))
        return shared, total - len(shared)

    def _begin(self, row: _Row, shared: list[int], own: list[int]) -> None:
        cached = row.cached
        row.turn, self._begun = self._begun, self._begun + 1
        cached.rows_left -= 1
        if cached.rows_left:
            self._pages.share(shared)
            if len(shared) < len(cached.pages):
                self._copies.append((cached.pages[-1], own[0]))
        row.pages = shared + own

    def _return(self, row: _Row, shared: list[int], own: list[int]) -> None:
        self._pages.share(shared)
        count = len(row.parked.pages) - len(shared)
        self._returns.append(Move(own[:count], row.parked.contents, len(shared)))
        row.pages, row.parked = shared + own, None

    def _needs(self, cached: _Cached) -> int:
        """The most pages that the next row of a prompt takes, beside those of the prompt."""
        filled = cached.filled
        inherited = filled // self._shapes.page_size if cached.rows_left > 1 else self._ceil(filled)
        return self._ceil(filled + cached.prompt.limit) - inherited
