"""Compiles the programs of a run in other processes, in the order in which the run needs them, while its base is read."""

import collections
import concurrent.futures
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from qerl_jax.compilation.program_process import ProgramProcess, Request
from qerl_jax.compilation.program_store import ProgramStore, key_of
from qerl_jax.system.checked import require, tell

# Device memory that a process takes beside its parent's, mostly for CUDA's libraries, in bytes; and the most processes.
_PROCESS_BYTES, _MOST_PROCESSES = 1.5e9, 12


@dataclasses.dataclass(frozen=True)
class Listed:
    """A program that a run calls.

    Attributes:
        name: The name of the function.
        key: What its callers name it by, see `EarlyPrograms.call`.
        function: The jitted function (`Jitted`) with its static arguments.
        arrays: The other arguments; shapes (`jax.ShapeDtypeStruct`) are enough.
    """

    name: str
    key: tuple[Hashable, ...]
    function: functools.partial = dataclasses.field(compare=False)
    arrays: tuple[Any, ...] = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program that is ready to be called.

    Attributes:
        shapes: Shape and dtype of each leaf of its arguments.
        function: Computes the leaves of the result from those of the arguments.
        results: The structure of the result.
    """

    shapes: list[tuple[Any, Any]]
    function: Callable[..., Any]
    results: Any

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether the leaves of arguments have the shapes and dtypes that were listed."""
        return [(np.shape(x), getattr(x, "dtype", None)) for x in leaves] == self.shapes


class EarlyPrograms:
    """Programs that are compiled before they are called.

    What was traced by an earlier run is read from the `ProgramStore`; other programs are traced and compiled by processes
    (`ProgramProcess`). On a CPU there are none, because the run itself needs the processors: programs compile when they
    are called. So does a program whose process failed, which is shown as a line.
    """

    def __init__(self):
        self._pending: dict[tuple[Hashable, ...], concurrent.futures.Future[Any]] = {}
        self._threads: list[threading.Thread] = []
        self._processes: list[ProgramProcess] = []
        self._tracing = threading.Lock()

    def prepare(self, imports: str) -> None:
        """Starts the processes, which import a module, if this run is the first one: there it will take all of them."""
        if (store := ProgramStore.beside_xla()) and store.is_new:
            self._processes = [ProgramProcess() for _ in range(workers())]
            for process in self._processes:
                process.start(imports)

    def begin(self, programs: Sequence[Listed]) -> None:
        """Starts to compile programs, the first ones first."""
        store = ProgramStore.beside_xla()
        waiting = collections.deque((program, concurrent.futures.Future()) for program in programs)
        count = min(workers(), len(waiting)) if store else 0
        self._processes += [ProgramProcess() for _ in range(count - len(self._processes))]
        if count:
            self._pending |= {program.key: future for program, future in waiting}

        def work(process: ProgramProcess) -> None:
            while waiting:
                try:
                    program, future = waiting.popleft()
                except IndexError:  # another thread took the last one
                    break
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(self._compiled(program, store, process))
                    except BaseException as error:
                        future.set_exception(error)
            process.end()

        for process in self._processes[:count]:
            self._threads.append(
                threading.Thread(target=work, args=(process,), daemon=True, name="compile")
            )
            self._threads[-1].start()

    def call(self, key: tuple[Hashable, ...], function: functools.partial, *arrays: Any) -> Any:
        """Calls a function of arrays; if it is listed with this key, waits until it is compiled."""
        program = self._program(key)
        if program is not None:
            leaves = jax.tree.leaves(arrays)
            if program.takes(leaves):
                return jax.tree.unflatten(program.results, program.function(*leaves))
        return function(*arrays)

    @property
    def counts(self) -> tuple[int, int]:
        """How many programs are compiled, and how many there are."""
        return sum(future.done() for future in self._pending.values()), len(self._pending)

    def end(self) -> None:
        """Begins no further programs, and ends the processes."""
        for future in self._pending.values():
            future.cancel()
        for process in self._processes:
            process.end()
        for thread in self._threads:
            thread.join()

    def _program(self, key: tuple[Hashable, ...]) -> Compiled | None:
        """Returns a listed program when it is compiled; None if it is not listed, or could not be compiled."""
        future = self._pending.get(key)
        if future is None or future.cancelled():
            return None
        if (error := future.exception()) is None:
            return future.result()
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        tell(f"a program could not be compiled early, and is compiled now: {why}")
        del self._pending[key]
        return None

    def _compiled(self, program: Listed, store: ProgramStore, process: ProgramProcess) -> Compiled:
        key, options = (
            key_of(program.function, program.arrays),
            program.function.func.compiler_options,
        )
        with self._tracing:  # so that the programs that are needed first are ready first
            traced = store.read(key)
        if traced is None:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.arrays)
            if error := process.make(Request(key, program.function, shapes)):
                raise RuntimeError(error)
            with self._tracing:
                traced = store.read(key)
            if traced is None:
                raise RuntimeError("what a process wrote is gone")
        with self._tracing:
            lowered = traced.lowered(SingleDeviceSharding(jax.local_devices()[0]), options)
        shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(program.arrays)]
        return Compiled(shapes, lowered.compile(), traced.results)


def workers() -> int:
    """Returns the number of processes that compile: as processors and device memory allow; none on a CPU.

    The environment variable QERL_COMPILE_PROCESSES, if set, replaces it on a GPU.

    Raises:
        ConfigError: If the variable is no number.
    """
    if jax.default_backend() != "gpu":
        return 0
    if named := os.environ.get("QERL_COMPILE_PROCESSES"):
        require(named.isdecimal(), "QERL_COMPILE_PROCESSES", named, "must be a number: 0, 1, ...")
        return int(named)
    processors = len(os.sched_getaffinity(0)) - 1
    return max(1, min(processors, _MOST_PROCESSES, int(_unreserved_bytes() / _PROCESS_BYTES)))


def _unreserved_bytes() -> float:
    """Returns the device memory that this process did not reserve when it started, in bytes; 6e9 if it is not known."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats or os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") == "false":
        return 6e9
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)  # JAX's default
    return stats["bytes_limit"] * (1 / share - 1)
