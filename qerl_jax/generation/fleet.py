"""Samples the rows of one rollout on several devices, each with its own schedule, slots and pages.

Each device has its own thread, so that none waits for another between chunks of tokens. Each host drives its own
devices, and sends their rows to the other hosts when all its rows have ended.
"""

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from qerl_jax.distributed import messages
from qerl_jax.distributed.hosts import HostLost
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.generation.draft_control import Record
from qerl_jax.generation.engine import Engine, whole
from qerl_jax.generation.scheduler import QueuedPrompt, RowTokens, Schedule

messages.sent(RowTokens)

# Seconds between two calls of `poll` while no device returns anything.
_LOOK_SECONDS = 0.5
# The most prompts whose completion lengths are kept; the prompts that were sampled longest ago are dropped.
_MOST_LENGTHS = 1 << 16


class Fleet:
    """Samples completions on several devices, as `Engine` does on one: an engine runs on each replica."""

    def __init__(self, engine: Engine, replicas: Replicas):
        self._engine, self._replicas = engine, replicas
        # Mean completion length in tokens of each prompt when it was last sampled. The key is the bytes of the
        # prompt's tokens; the latest prompts come last.
        self._lengths: dict[bytes, float] = {}

    @property
    def times_parked(self) -> int:
        """See `Engine.times_parked`; for this host's devices."""
        return self._engine.times_parked

    @property
    def drafted(self) -> Record:
        """See `Engine.drafted`; for this host's devices."""
        return self._engine.drafted

    def stream(
        self,
        variables: dict[str, Any],
        prompts: Sequence[QueuedPrompt],
        temperature: float | jax.Array,
        **options: Any,
    ) -> Iterator[list[RowTokens]]:
        """Samples all rows as `Engine.stream` does, and yields the tokens of each device's chunks as they arrive.

        Rows of other hosts arrive complete, after all rows of this host. Rows are distributed by expected length:
        the mean completion length of their prompt when it was last sampled, or for a new prompt the mean of the
        others; but evenly with `leave`, because which rows are left must not depend on what earlier calls have sampled.
        Variables are as the replicas hold them, and `turns` is called from the devices' threads.

        Raises:
            ValueError: See `Engine.stream`.
            HostLost: While iterating, if another host fails or is interrupted.
        """
        if not prompts:
            return iter(())
        options |= {"replicas": len(self._replicas), "local": self._replicas.own}
        lengths = None if options.get("leave") else self._expected(prompts)
        schedules = self._engine.schedules(variables, prompts, lengths=lengths, **options)
        chunks = self._exchanged(self._run(self._replicas.each(variables), schedules, temperature))
        return chunks if lengths is None else self._remembered(prompts, chunks)

    def completions(
        self, variables: dict[str, Any], prompts: Sequence[QueuedPrompt], *temperature, **options
    ) -> Iterator[RowTokens]:
        """Samples all rows as `stream` does, and yields each complete row when it ends; at last those that are left."""
        return whole(self.stream(variables, prompts, *temperature, **options), prompts)

    def _expected(self, prompts: Sequence[QueuedPrompt]) -> list[float]:
        """Returns the expected completion length of each prompt, in tokens."""
        lengths = [self._lengths.get(prompt.tokens.tobytes()) for prompt in prompts]
        known = [length for length in lengths if length is not None]
        mean = sum(known) / len(known) if known else 1.0
        return [mean if length is None else length for length in lengths]

    def _remembered(
        self, prompts: Sequence[QueuedPrompt], chunks: Iterator[list[RowTokens]]
    ) -> Iterator[list[RowTokens]]:
        """Yields the chunks, and stores the completion lengths at the end."""
        lengths = np.zeros(sum(len(prompt.keys) for prompt in prompts))
        for rows in chunks:
            for row in rows:
                lengths[row.row] += len(row.tokens)
            yield rows
        ends = np.cumsum([len(prompt.keys) for prompt in prompts])
        for prompt, of_prompt in zip(prompts, np.split(lengths, ends[:-1]), strict=True):
            key = prompt.tokens.tobytes()
            self._lengths.pop(key, None)
            self._lengths[key] = float(of_prompt.mean())
        for key in [*self._lengths][:-_MOST_LENGTHS]:
            del self._lengths[key]

    def _exchanged(self, chunks: Iterator[list[RowTokens]]) -> Iterator[list[RowTokens]]:
        """Yields the chunks, and then the rows of other hosts.

        If a signal interrupts sampling on one host, that host tells the others, which then stop, too.
        """
        hosts = self._replicas.hosts
        if hosts.count == 1:
            yield from chunks
            return
        local: list[RowTokens] = []
        try:
            for rows in chunks:
                local += rows
                yield rows
        except KeyboardInterrupt:
            hosts.gathered(None)
            raise
        gathered = hosts.gathered(list(whole(iter([local]))))
        if any(rows is None for rows in gathered):
            self._engine.poll()
            raise HostLost("another process was interrupted")
        for host, rows in enumerate(gathered):
            if host != hosts.index:
                yield [dataclasses.replace(row, is_own=False) for row in rows]

    def _run(
        self, policies: Sequence[dict[str, Any]], schedules: Sequence[Schedule], temperature
    ) -> Iterator[list[RowTokens]]:
        # Entries are rows, None when a device has finished, or an exception.
        results: queue.SimpleQueue = queue.SimpleQueue()
        ended = threading.Event()

        def leave_if_ended():
            if ended.is_set():
                raise CancelledError  # another device has failed, or the caller has stopped

        def drive(policy: dict[str, Any], schedule: Schedule) -> None:
            options = {"poll": leave_if_ended, "compiles": self._replicas.compiling}
            try:
                for rows in self._engine.run(policy, schedule, temperature, **options):
                    results.put(rows)
                results.put(None)
            except BaseException as error:
                results.put(error)

        running = len(schedules)
        with ThreadPoolExecutor(running, thread_name_prefix="engine") as threads:
            try:
                for policy, schedule in zip(policies, schedules, strict=True):
                    threads.submit(drive, policy, schedule)
                while running:
                    self._engine.poll()
                    with contextlib.suppress(queue.Empty):
                        result = results.get(timeout=_LOOK_SECONDS)
                        if isinstance(result, BaseException):
                            raise result
                        if result is None:
                            running -= 1
                        else:
                            yield result
            finally:
                ended.set()


def engine_of(engine: Engine, replicas: Replicas) -> Engine | Fleet:
    """Returns the engine, or with several devices a fleet that runs it on each replica."""
    return Fleet(engine, replicas) if len(replicas) * replicas.group > 1 else engine
