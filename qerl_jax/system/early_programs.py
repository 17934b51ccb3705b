"""Compiles the programs of a run in threads, in the order in which the run needs them, while its base is read."""

import collections
import concurrent.futures
import dataclasses
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from qerl_jax.system.checked import tell


@dataclasses.dataclass(frozen=True)
class Listed:
    """A program that a run calls.

    Attributes:
        name: The name of the jitted function.
        key: What its callers name it by, see `EarlyPrograms.wait`.
        lower: Traces and lowers it, with shapes instead of arrays: returns a `jax.stages.Lowered`. A call of the function
            with arrays of these shapes then finds the compiled program in JAX's caches.
    """

    name: str
    key: tuple[Hashable, ...]
    lower: Callable[[], jax.stages.Lowered] = dataclasses.field(compare=False)


class EarlyPrograms:
    """Programs that threads compile before they are called.

    On a CPU there are no threads, because the run itself needs the processors: programs compile when they are called. An
    error of a thread is shown as a line: the call of the function compiles it again, and raises what is wrong.
    """

    def __init__(self):
        self._pending: dict[tuple[Hashable, ...], concurrent.futures.Future[Any]] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, programs: Sequence[Listed]) -> None:
        """Starts to compile programs, the first ones first."""
        waiting = collections.deque((program, concurrent.futures.Future()) for program in programs)
        count = min(workers(), len(waiting))
        if count:
            self._pending |= {program.key: future for program, future in waiting}

        def work() -> None:
            while waiting:
                try:
                    program, future = waiting.popleft()
                except IndexError:  # another thread took the last one
                    return
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(program.lower().compile())
                    except BaseException as error:
                        future.set_exception(error)

        for _ in range(count):
            self._threads.append(threading.Thread(target=work, daemon=True, name="compile"))
            self._threads[-1].start()

    def wait(self, *key: Hashable) -> None:
        """Waits until the program with this key is compiled; returns at once if none is listed."""
        if (future := self._pending.get(key)) is None:
            return
        error = None if future.cancelled() else future.exception()
        if error is not None:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            tell(f"a program could not be compiled early, and is compiled again: {why}")

    @property
    def counts(self) -> tuple[int, int]:
        """How many programs are compiled, and how many there are."""
        return sum(future.done() for future in self._pending.values()), len(self._pending)

    def end(self) -> None:
        """Begins no further programs, and waits for the threads: compiling while the interpreter exits would crash."""
        for future in self._pending.values():
            future.cancel()
        for thread in self._threads:
            thread.join()


def workers() -> int:
    """Returns the number of threads that compile: one fewer than there are processors; none on a CPU."""
    return max(1, len(os.sched_getaffinity(0)) - 1) if jax.default_backend() == "gpu" else 0
