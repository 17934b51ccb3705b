"""Continuous batching: prompts wait in a queue, rows run in slots, keys and values are stored in pages.

The device runs one jitted loop per chunk of tokens. Between chunks the host reads the results, and gives slots and
pages of ended rows to waiting ones; if none waits, the next chunk starts before that. A prompt is prefilled once, all
but its last token, which its rows decode first. They share the pages that it fills; a last page that is partly filled
is copied for each row except the last that begins, which takes it over.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import decode_attention, runtime
from qerl_jax.aqn import draw as noise
from qerl_jax.compilation.early_programs import EarlyPrograms, Listed
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.generation import device_pool, draft_control, kv_capacity
from qerl_jax.generation.decoding import EngineSpec, decode, prefill
from qerl_jax.generation.draft_control import MOST_ENDED, Drafting
from qerl_jax.generation.draft_search import LONGEST_MATCH
from qerl_jax.generation.packed import Packed
from qerl_jax.generation.recall import Recall
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.generation.scheduler import (
    QueuedPrompt,
    RowTokens,
    Schedule,
    Shapes,
    TurnTaker,
    batch_sizes,
    distribute,
)
from qerl_jax.generation.stop_strings import StopStrings
from qerl_jax.model import fused_decode, kv_cache
from qerl_jax.model.transformer import Transformer
from qerl_jax.system.checked import require

# Seconds between two calls of `poll` while all rows wait for replies.
_REPLY_SECONDS = 0.5

# Makes a context for a call that may compile. The arguments are the device and values that identify the program.
type CompilesOnce = Callable[..., contextlib.AbstractContextManager]


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of a call on one replica, as far as the shapes of programs depend on them.

    Attributes:
        rows: Number of rows.
        prompts: Number of their prompts.
        group: Most rows of a prompt.
        limit: Most tokens of a completion.
        max_prompt_length: Most tokens of a prompt.
        max_concurrent: Slots; None means what `kv_capacity.Demand.slots` chooses.
        has_adapter: Whether the policy has an adapter.
        own_noise: Whether rows have noise of their own.
    """

    rows: int
    prompts: int
    group: int
    limit: int
    max_prompt_length: int
    max_concurrent: int | None = None
    has_adapter: bool = True
    own_noise: bool = False


class Engine:
    """Samples completions of any number of prompts on one device.

    Args:
        model: The policy.
        spec: Sampling options.
        stop_tokens: Ids that end a completion; if empty, a row ends only by a stop string or its limit.
        stop_strings: Texts that end a completion; the host checks for them between chunks.
        compact: Whether the batch shrinks when rows end and none waits. In both cases a row's tokens depend only on
            its prompt and key, unless rounding decides between two tokens. If False, the last bits of its
            log-probabilities do not depend on the other rows either, if slots, `max_prompt_length` and the largest
            limit stay the same.
        kv_cache_tokens: Capacity of the cache in tokens; None means what all slots can need.
        kv_cache_fraction: Capacity as a fraction of the device memory that is free at the first call. If neither is
            given and the device reports its memory, the capacity is at most nine tenths of the free memory that
            `kv_capacity.Demand.workspace` leaves.
        page_size: S, tokens of a page; None chooses by device.
        poll: Called before each chunk; an exception that it raises ends the sampling.
        drafts: Options of drafting; None for no drafts. Without `compact` there are none either, because the steps
            with drafts round log-probabilities differently.
        carries: Whether prompts may come with completions that have begun: a prefill may then be as long as a row.
        row_lengths: For benchmarks: the number of tokens after which each row ends, as if by a stop token; stop
            tokens themselves are ignored. They are used in the order of the rows of all calls, and then again from
            the first. None lets rows end as they do.
        free: Bytes that a device has for the cache and for what sampling needs beside it; None means what is free at the
            first call. Shapes depend on it, so a run has it from its plan.
        early: The programs that are compiled before they are called.
    """

    def __init__(
        self,
        model: Transformer,
        spec: EngineSpec,
        *,
        stop_tokens: Sequence[int] = (),
        stop_strings: StopStrings | None = None,
        compact: bool = True,
        kv_cache_tokens: int | None = None,
        kv_cache_fraction: float | None = None,
        page_size: int | None = None,
        poll: Callable[[], None] | None = None,
        drafts: Drafting | None = None,
        carries: bool = False,
        row_lengths: Sequence[int] | None = None,
        free: int | None = None,
        early: EarlyPrograms | None = None,
    ):
        self._model, self._spec, self._carries = model, spec, carries
        self._drafts = drafts if compact else None
        self.poll = poll or (lambda: None)
        self._row_lengths = None if row_lengths is None else itertools.cycle(row_lengths)
        # By the bytes of rows' keys: a row that a call has left goes on in the next one.
        self._length_of: dict[bytes, int] = {}
        self._free, self._early = free, early or EarlyPrograms()
        stop_tokens = stop_tokens if row_lengths is None else ()
        # Padded to at least eight with ids that are never sampled, so that calls with and without stop tokens have
        # arrays of one shape and share a program.
        self._stop_tokens = np.array([*stop_tokens, *[-1] * (8 - len(stop_tokens))], np.int32)
        self._stop_strings = stop_strings
        self._compact = compact
        self._budget = kv_cache_tokens, kv_cache_fraction
        # On a CPU small pages are faster: unfilled tokens of a page cost time.
        self._page_size = page_size or (kv_cache.PAGE_SIZE if runtime.platform() == "gpu" else 32)
        self._itemsize = jnp.dtype(model.dtype).itemsize
        # One number per finished schedule; a list, because several threads append to it.
        self._parked: list[int] = []
        # By the index of the device, because each device has its own rows.
        self._controls: dict[int, draft_control.Auto] = {}
        self._recall = Recall()

    @property
    def times_parked(self) -> int:
        """The number of preemptions: rows whose pages were moved to the host because the cache was full."""
        return sum(self._parked)

    @property
    def drafted(self) -> draft_control.Record:
        """Statistics of the drafts so far."""
        records = [control.record for control in self._controls.values()]
        return sum(records, draft_control.Record())

    @classmethod
    def of(
        cls,
        model: Transformer,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        chunk: int = 32,
        entropies: bool = False,
        **options: Any,
    ) -> Self:
        """Makes an engine from sampling options.

        Args:
            model: The policy.
            tokenizer: The policy's tokenizer; it has the number of ids and the stop tokens.
            params: Truncation, penalty, what ends a completion, and whether drafts are used.
            chunk: See `EngineSpec`, as for `entropies`.
            entropies: See there.
            **options: Further arguments of the engine.
        """
        # Step times have only been measured with the Hopper kernels.
        drafts = None if runtime.unless_hopper() else Drafting.named(params.drafts)
        return cls(
            model,
            EngineSpec(tokenizer.num_tokens, params, chunk, entropies),
            stop_tokens=(
                *(() if params.ignore_eos else tokenizer.stop_tokens),
                *params.stop_token_ids,
            ),
            stop_strings=StopStrings(tuple(params.stop), tokenizer.decode) if params.stop else None,
            drafts=drafts,
            **options,
        )

    def stream(
        self,
        variables: dict[str, Any],
        prompts: Sequence[QueuedPrompt],
        temperature: float | jax.Array,
        **options: Any,
    ) -> Iterator[list[RowTokens]]:
        """Samples all rows, and yields new tokens after each chunk.

        Args:
            variables: `params`, `frozen` and, under AQN, `noise`: vectors for all rows, or `RowNoise`.
            prompts: Any number of prompts; with `RowNoise` each has the numbers of its rows' noise.
            temperature: Scalar; 0 takes the likeliest token.
            **options: `max_prompt_length`, `max_concurrent`, `rows`, `num_prompts`, `leave` and `turns` of
                `schedules`.

        Returns:
            An iterator over lists of `RowTokens`, one list per chunk.

        Raises:
            ValueError: See `schedules`; before anything runs.
        """
        if not prompts:
            return iter(())
        (schedule,) = self.schedules(variables, prompts, **options)
        return self.run(variables, schedule, temperature)

    def schedules(
        self,
        variables: dict[str, Any],
        prompts: Sequence[QueuedPrompt],
        *,
        max_prompt_length: int,
        max_concurrent: int | None = None,
        rows: int | None = None,
        num_prompts: int | None = None,
        leave: int = 0,
        turns: TurnTaker | None = None,
        replicas: int = 1,
        local: range = range(1),
        lengths: Sequence[float] | None = None,
    ) -> list[Schedule]:
        """Checks prompts, and distributes them: one schedule per replica of this host, all of the same shapes.

        Args:
            variables: See `stream`.
            prompts: At least one prompt.
            max_prompt_length: The most tokens of a prompt. Use the same value in all calls: shapes depend on it.
            max_concurrent: Slots of each device; None means what `kv_capacity.Demand.slots` chooses.
            rows: The number of rows for which shapes are chosen; None means those of the prompts.
            num_prompts: The number of prompts for which shapes are chosen; None means that of `prompts`.
            leave: How many rows may be left unfinished, in equal parts of all replicas: sampling ends when no row waits,
                and a replica has no more than its part. So that the same rows are left each time, replicas then take
                no rows from each other.
            turns: Answers rows whose turn has ended; None for single-turn rows. While a row waits for its answer it
                keeps its slot and its pages, and the other rows continue. Then it takes the answer's tokens, one per
                decoding step, and samples again. They count against its limit.
            replicas: Number of replicas (devices, or groups of devices) on all hosts. With several, none has more slots
                than its share of the rows.
            local: Indices of this host's replicas; they take rows only from each other.
            lengths: See `distribute`.

        Returns:
            A schedule for each index in `local`.

        Raises:
            ValueError: If a prompt is empty or longer than `max_prompt_length`, or a row does not fit into the cache.
        """
        own_noise = noise.has_own(variables)
        for index, prompt in enumerate(prompts):
            if own_noise and (prompt.noise is None or len(prompt.noise) != len(prompt.keys)):
                raise ValueError(
                    f"prompt {index}: rows have noise of their own; must have its number for each of "
                    f"{len(prompt.keys)} completions"
                )
            if not 0 < len(prompt.tokens) <= max_prompt_length:
                raise ValueError(
                    f"prompt {index}: got {len(prompt.tokens)} tokens; must have 1 to {max_prompt_length=}"
                )
        num_rows = sum(len(prompt.keys) for prompt in prompts)
        batch = Batch(
            rows=-(-(rows or num_rows) // replicas),
            prompts=-(-(num_prompts or len(prompts)) // replicas),
            group=max(len(prompt.keys) for prompt in prompts),
            limit=max(prompt.limit for prompt in prompts),
            max_prompt_length=max_prompt_length,
            max_concurrent=max_concurrent,
            has_adapter="params" in variables,
            own_noise=own_noise,
        )
        shapes, num_pages, capacity = self._shapes(batch)
        if capacity is not None:
            self._require_space(capacity, prompts)
        is_ready = functools.partial(self._is_ready, variables, num_pages)
        options: dict[str, Any] = {"row_lengths": self._lengths(prompts), "is_ready": is_ready}
        if shapes.drafted:
            recalled = self._recall.completions
            prompts = [dataclasses.replace(p, earlier=recalled(p.tokens)) for p in prompts]
            options["ended"] = functools.partial(self._recall.add, self._recall.begin())
        queues = distribute(prompts, replicas, lengths).of(local)
        part = lambda replica: leave * replica // replicas
        return [
            Schedule(
                *(shapes, num_pages, queues.only(index) if leave else queues, turns),
                replica=index,
                leave=part(replica + 1) - part(replica),
                **options,
            )
            for index, replica in enumerate(local)
        ]

    def _shapes(self, batch: Batch) -> tuple[Shapes, int, int | None]:
        """Returns the shapes of the programs for a batch, the pages of the pool, and the cache's capacity in tokens."""
        size, model = self._page_size, self._model.own_part
        positions = self._drafts.tokens_of_a_step(batch.limit) if self._drafts else 0
        demand = kv_capacity.Demand(
            model.arch,
            rows=batch.rows,
            prompts=batch.prompts,
            max_prompt_length=batch.max_prompt_length,
            row_tokens=batch.max_prompt_length - 1 + batch.limit,
            page_size=size,
            compact=self._compact,
            itemsize=self._itemsize,
            carries=self._carries,
            positions=positions,
            fused_rows=fused_decode.most_rows(
                model, adapter=batch.has_adapter, own_noise=batch.own_noise
            ),
        )
        capacity = lambda slots: self._capacity(sum(demand.workspace(slots).values()))
        most = batch.max_concurrent and min(batch.max_concurrent, batch.rows)
        slots = demand.slots(most, capacity)
        if most is None and capacity(slots) is None:
            fit = kv_capacity.rows_that_fit(demand.arch, None, demand.row_tokens, self._itemsize)
            slots = min(slots, fit)
        num_pages = demand.pages(slots)
        if (tokens := capacity(slots)) is not None:
            num_pages = min(num_pages, kv_capacity.pages_for(tokens, size))
        shapes = Shapes(
            size,
            self._spec.chunk,
            table_width=-(-demand.row_tokens // size),
            history=demand.row_tokens + 1,
            longest_prefill=demand.max_prompt_length - 1,
            most_prompts=demand.prefilled(slots),
            sizes=batch_sizes(slots) if self._compact else (slots,),
            least_shared=self._least_shared(batch),
            drafted=self._drafts.most_rows if positions else 0,
            # Enough for the completions of the previous round and of this one.
            ended=min(2 * batch.group * (batch.limit + LONGEST_MATCH + 1), MOST_ENDED),
            stop_strings=self._stop_strings is not None,
            carries=self._carries,
        )
        return shapes, num_pages, tokens

    def programs(self, variables: dict[str, Any], batch: Batch, place: Any) -> list[Listed]:
        """Lists the programs that sample a batch without turns on one device, in the order in which they are needed.

        Nothing is traced. The order: a chunk of all slots; prefills, of the longest prompts and of the longest rows that go
        on first; then smaller batches.

        Args:
            variables: See `stream`; shapes (`jax.ShapeDtypeStruct`) are enough.
            batch: The rows.
            place: The sharding of arrays on the device.
        """
        model, spec, (shapes, num_pages, _) = self._model, self._spec, self._shapes(batch)
        on_device = lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype, sharding=place)
        shape = kv_cache.pool_shape(model.arch, num_pages, self._page_size)
        pool = (jax.ShapeDtypeStruct(shape, model.dtype, sharding=place),) * 2
        own_noise, listed = noise.has_own(variables), []
        for arrays in shapes.prefills(own_noise):
            function = functools.partial(prefill.of(model), model=model)
            key = self._key(variables, shape, arrays[0].shape)
            listed.append(Listed("prefill", key, function, (variables, pool, *arrays)))
        always = jax.tree.map(on_device, (np.float32(1), self._stop_tokens))
        with_history = spec.params.repetition_penalty != 1
        for size in shapes.sizes:
            slots = shapes.empty_slots(size, with_history, own_noise)
            rows = Packed.of(dataclasses.replace(slots, texts=None))
            arrays = (dataclasses.replace(rows, words=on_device(rows.words)), *always)
            steps: list[int | None] = [None]
            if slots.texts is not None:
                control = self._drafts.control()
                texts = jax.tree.map(on_device, slots.texts)
                arrays = (*arrays, texts, control.odds(), np.bool_(False))
                steps.append(control.size(size))
            for positions in steps:
                static = {"model": model, "spec": spec, "positions": positions}
                function = functools.partial(decode.of(model), **static)
                key = self._key(variables, shape, size, positions)
                listed.append(Listed("decode", key, function, (variables, pool, *arrays)))
        first = next(at for at, program in enumerate(listed) if program.name == "decode")
        return listed[first : first + 1] + listed[:first] + listed[first + 1 :]

    def _key(self, variables: dict[str, Any], *shapes: Hashable) -> tuple[Hashable, ...]:
        """Returns the key of a program: the policy may have noise in some calls, and the engine's options differ."""
        return (self._spec, "noise" in variables, *shapes)

    def _is_ready(
        self, variables: dict[str, Any], num_pages: int, shape: int | tuple[int, int]
    ) -> bool:
        """Whether the programs of a batch size, or of a prefill's rows and length, are compiled or not listed."""
        if not (unready := self._early.unready):
            return True
        pool = kv_cache.pool_shape(self._model.arch, num_pages, self._page_size)
        programs: list[tuple[Hashable, ...]] = [(shape,)]
        if isinstance(shape, int):
            steps = (None,) if self._drafts is None else (None, self._drafts.control().size(shape))
            programs = [(shape, positions) for positions in steps]
        return unready.isdisjoint(self._key(variables, pool, *of) for of in programs)

    def _lengths(self, prompts: Sequence[QueuedPrompt]) -> Sequence[int] | None:
        """Returns the lengths of all rows; None if rows end as they do."""
        if self._row_lengths is None:
            return None
        for prompt in prompts:
            if prompt.begun is None:
                names = (key.tobytes() for key in prompt.keys)
                self._length_of |= zip(names, self._row_lengths, strict=False)
        return [self._length_of[key.tobytes()] for prompt in prompts for key in prompt.keys]

    def _least_shared(self, batch: Batch) -> int:
        """Returns `Shapes.least_shared`: 0 if attention cannot share pages, or if no prompt can have enough of them."""
        arch = self._model.own_part.arch
        if decode_attention.supports_sharing(arch.num_heads, arch.num_kv_heads) is not None:
            return 0
        full_pages = (batch.max_prompt_length - 1) // self._page_size
        least = decode_attention.LEAST_SHARED
        return least if batch.group > 1 and full_pages >= least else 0

    def completions(
        self, variables: dict[str, Any], prompts: Sequence[QueuedPrompt], *temperature, **options
    ) -> Iterator[RowTokens]:
        """Samples all rows as `stream` does, and yields each complete row when it ends; at last those that are left."""
        return whole(self.stream(variables, prompts, *temperature, **options), prompts)

    def run(
        self,
        variables: dict[str, Any],
        schedule: Schedule,
        temperature: float | jax.Array,
        *,
        poll: Callable[[], None] | None = None,
        compiles: CompilesOnce = lambda *program: contextlib.nullcontext(),
    ) -> Iterator[list[RowTokens]]:
        """Samples the rows of a schedule on the device of the variables, and yields the results of each chunk.

        Args:
            variables: See `stream`.
            schedule: A schedule from `schedules`.
            temperature: See `stream`.
            poll: Called before each chunk instead of the engine's `poll`.
            compiles: Makes the context of each call that may compile.
        """
        poll, device = poll or self.poll, _Device(self, variables, schedule, temperature, compiles)
        # Results of the last chunk. They are yielded when the next chunk is running, so that the device does not wait
        # for the caller.
        harvested: Iterator[RowTokens] = iter(())
        try:
            while schedule.unfinished():
                try:
                    poll()
                except BaseException:
                    # Tokens that were already sampled are not lost.
                    if rows := list(harvested):
                        yield rows
                    raise
                over: list[RowTokens] = []
                if device.chunks or not (over := schedule.take_replies()):
                    device.start_chunks()
                if rows := [*harvested, *over]:
                    yield rows
                if device.chunks:
                    harvested = device.harvest()
                elif not over:
                    schedule.wait(_REPLY_SECONDS)
            while device.chunks and schedule.live:  # chunks of rows that are left
                harvested = itertools.chain(harvested, device.harvest())
            if rows := list(harvested):
                yield rows
        finally:
            # An error's traceback keeps the variables of this frame alive; in a notebook, until the next error.
            del device.pool
        self._parked.append(schedule.times_parked)

    def _control(self, schedule: Schedule) -> draft_control.Auto | None:
        """Returns the draft control of a schedule's device, which knows its earlier drafts; None without drafts."""
        return self._drafts and self._controls.setdefault(schedule.replica, self._drafts.control())

    def _require_space(self, tokens: int, prompts: Sequence[QueuedPrompt]) -> None:
        """Checks that each row fits into a cache with space for so many tokens."""
        size = self._page_size
        offered = kv_capacity.pages_for(tokens, size)
        for index, prompt in enumerate(prompts):
            needed = len(prompt.tokens) - 1 + prompt.limit
            if offered < kv_capacity.pages_for(needed, size):
                raise ValueError(
                    f"prompt {index}: the KV cache has space for {tokens} tokens; a row may need {needed}: raise "
                    "kv_cache_tokens or kv_cache_fraction, or shorten prompts or completions"
                )

    @functools.cached_property
    def _memory(self) -> dict[str, int] | None:
        # Read once: programs are compiled for the number of pages.
        return runtime.memory_stats()

    def _capacity(self, beside: int) -> int | None:
        """Returns the capacity of the cache in tokens if sampling needs `beside` more bytes; None for no bound."""
        tokens, fraction = self._budget
        if tokens is not None:
            return tokens
        if self._free is None and self._memory is None:
            rule = "this device does not report its memory: give kv_cache_tokens"
            require(fraction is None, "kv_cache_fraction", fraction, rule)
            return None
        free = self._free
        if free is None:
            free = self._memory["bytes_limit"] - self._memory["bytes_in_use"]
        return kv_capacity.capacity(
            self._model.own_part.arch, free, fraction, beside, self._itemsize
        )


class _Device:
    """The device's side of a run: the pool of keys and values, and the chunks that have started and were not read.

    A chunk has the tokens of a step with drafts (see `draft_control.Auto.positions`), and the results.
    """

    def __init__(
        self,
        engine: Engine,
        variables: dict[str, Any],
        schedule: Schedule,
        temperature: float | jax.Array,
        compiles: CompilesOnce,
    ):
        self._engine, self._variables, self._schedule = engine, variables, schedule
        self._model, self._spec = engine._model, engine._spec
        # Commit all inputs to the device. Otherwise rows from the host and rows from the previous chunk would
        # compile two programs.
        leaf = jax.tree.leaves(variables["frozen"])[0]
        device, *others = sorted(leaf.devices(), key=lambda device: device.id)
        self._where = NamedSharding(leaf.sharding.mesh, PartitionSpec()) if others else device
        self.pool = device_pool.allocate(
            self._model, schedule.num_pages, engine._page_size, device, self._where
        )
        self._always = jax.device_put((np.float32(temperature), engine._stop_tokens), self._where)
        # The form is computed once, because the policy has many arrays and does not change.
        self._compiles = functools.partial(compiles, device, self._model, _form(variables))
        self._control = engine._control(schedule)
        self.chunks: collections.deque = collections.deque()
        # The inputs of the next chunk, and the rows on the host that they began with.
        self._rows, self._slots = None, None
        # The texts in which drafts are searched, on the host and on the device: they are large and seldom change.
        self._texts, self._device_texts = None, None

    def start_chunks(self) -> None:
        """Starts the next chunk, unless all rows wait, and one more if no row waits.

        In that case the device continues while the host reads the results.
        """
        if not self.chunks:
            self._move_pages()
            if not self._schedule.live:
                return
            self._take_slots()
            self._start_chunk()
        while len(self.chunks) == 1 and self._schedule.can_run_ahead(
            drafts=bool(self.chunks[0][0])
        ):
            self._start_chunk()

    def harvest(self) -> Iterator[RowTokens]:
        """Reads the results of the first chunk."""
        positions, results = self.chunks.popleft()
        *results, entropies, outcome = jax.device_get(results).tree()
        if outcome is not None:
            _, _, lengths, live = results
            self._control.learn(len(live), positions, outcome, int(lengths.sum()))
        engine = self._engine
        return self._schedule.harvest(
            *results, engine._stop_tokens, engine._stop_strings, entropies=entropies
        )

    def _move_pages(self) -> None:
        """Parks and returns rows, and prefills prompts, as the schedule says."""
        schedule, model = self._schedule, self._model
        for move in schedule.leaving():
            move.contents = device_pool.taken(self.pool, move.pages, model)
        while (fresh := schedule.next_prefill()) is not None:
            key = self._engine._key(self._variables, self.pool[0].shape, fresh[0].shape)
            function = functools.partial(prefill, model=model)
            with self._compiles(_form(self.pool, fresh)):
                arrays = self._variables, self.pool, *fresh
                self.pool = self._engine._early.call(key, function, *arrays)
        for move in schedule.returning():
            self.pool = device_pool.returned(self.pool, move, model)
        if (copies := schedule.copies()) is not None:
            self.pool = device_pool.copied(self.pool, *copies, model=model)

    def _take_slots(self) -> None:
        """Copies the schedule's rows to the device, and texts that have changed."""
        self._slots = self._schedule.slots(self._spec.params.repetition_penalty != 1)
        rows, texts = Packed.of(dataclasses.replace(self._slots, texts=None)), self._slots.texts
        if texts is self._texts:
            self._rows = jax.device_put(rows, self._where)
        else:
            self._texts = texts
            self._rows, self._device_texts = jax.device_put((rows, texts), self._where)

    def _start_chunk(self) -> None:
        """Starts a chunk; the rows that it returns are the inputs of the next one."""
        positions, drafting = None, ()
        if self._slots.texts is not None:
            positions = self._control.positions(len(self._slots.live), self._schedule.live)
            drafting = self._device_texts, self._control.odds(), np.bool_(positions == 0)
        form = _form(self.pool, self._rows, drafting)
        of = self._variables, self.pool[0].shape, len(self._slots.live), positions or None
        key = self._engine._key(*of)
        with self._compiles(self._spec, positions or None, form):
            arrays = self._variables, self.pool, self._rows, *self._always, *drafting
            static = {"model": self._model, "spec": self._spec, "positions": positions or None}
            function = functools.partial(decode, **static)
            self.pool, results, self._rows = self._engine._early.call(key, function, *arrays)
        self.chunks.append((positions, results))


def _form(*arrays: Any) -> Hashable:
    """Returns what identifies a program besides its static arguments: the tree of its arrays, and their shapes."""
    leaves, structure = jax.tree.flatten(arrays)
    return structure, tuple(map(np.shape, leaves))


def whole(
    chunks: Iterator[list[RowTokens]], prompts: Sequence[QueuedPrompt] = ()
) -> Iterator[RowTokens]:
    """Joins the parts of each row, and yields the complete row when it ends; at last those that have not ended.

    The first part of a row may be what its prompt's completion has begun with.
    """
    rows: dict[int, list[RowTokens]] = collections.defaultdict(list)
    firsts = itertools.accumulate((len(prompt.keys) for prompt in prompts), initial=0)
    for row, prompt in zip(firsts, prompts, strict=False):
        if prompt.begun is not None:
            rows[row].append(dataclasses.replace(prompt.begun, row=row))
    for part in itertools.chain.from_iterable(chunks):
        rows[part.row].append(part)
        if part.ended:
            yield _joined(rows.pop(part.row))
    yield from map(_joined, rows.values())


def _joined(parts: Sequence[RowTokens]) -> RowTokens:
    """Joins the parts of a row; the result is like the last one in all else."""
    arrays = {}
    for name in ("tokens", "behaviour_logps", "entropies", "given"):
        if getattr(parts[0], name) is not None:
            arrays[name] = np.concatenate([getattr(part, name) for part in parts])
    return dataclasses.replace(parts[-1], **{"entropies": None} | arrays)
