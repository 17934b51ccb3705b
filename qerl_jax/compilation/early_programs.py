"""Traces and compiles the programs of a run, in the order in which the run needs them, while its base is read."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from qerl_jax.compilation.kernel_modules import KernelModules
from qerl_jax.compilation.program_process import ProgramProcess, Request
from qerl_jax.compilation.program_store import ProgramStore, Traced, key_of
from qerl_jax.system.checked import require, tell

# Device memory that a process takes beside its parent's, for CUDA's libraries, in bytes; and the most processes.
_PROCESS_BYTES, _MOST_PROCESSES = 1e9, 8
# Programs that compile at the same time before the first step ends; then one by one. With more of them the program that is
# needed first would be ready later (docs/tried-and-rejected.md, row 83).
_AT_ONCE = 2


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

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The arrays without values and devices, which another process can be sent."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.arrays)


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

    What an earlier run traced is read from the `ProgramStore`; other programs are traced by processes (`ProgramProcess`).
    Threads then compile their Pallas kernels (`KernelModules`) and the programs. On a CPU there are none, because the run
    itself needs the processors: programs compile when they are called. So does a program whose process failed, which is
    shown as a line.

    Args:
        patient: `unready` is empty. What a run computes then depends on no time.
    """

    def __init__(self, *, patient: bool = False):
        self._patient = patient
        self._pending: dict[tuple[Hashable, ...], concurrent.futures.Future[Any]] = {}
        self._threads: list[threading.Thread] = []
        self._processes: list[ProgramProcess] = []
        self._kernels = KernelModules()
        # The programs that the first step does not need, and whether they may be compiled.
        self._others: set[tuple[Hashable, ...]] = set()
        self._goes_on = threading.Event()
        # One thread at a time uses Python's lock, so that the programs that are needed first are ready first.
        self._lock = threading.Lock()

    def prepare(self, imports: str) -> None:
        """Starts the processes, which import a module, if this run is the first one: there it will take all of them."""
        if (store := ProgramStore.beside_xla()) and store.is_new:
            self._processes = [ProgramProcess() for _ in range(workers())]
            for process in self._processes:
                process.start(imports)

    def begin(self, first: Sequence[Listed], others: Sequence[Listed] = ()) -> None:
        """Starts to compile programs, in this order.

        Args:
            first: What a run needs before its first step ends.
            others: The other programs. In the first run they are traced and compiled after `go_on`, or when one of them is
                called: before, they would take processors from the first ones, and the device, on which XLA times
                products. In later runs, which find most of them, they follow at once.
        """
        programs = [*first, *others]
        store, futures = ProgramStore.beside_xla(), [concurrent.futures.Future() for _ in programs]
        count = min(workers(), len(programs)) if store else 0
        if not count:
            return
        keys = [program.key for program in programs]
        self._pending |= dict(zip(keys, futures, strict=True))
        self._others |= {program.key for program in others}
        if not store.is_new:
            self.go_on()
        self._processes += [ProgramProcess() for _ in range(count - len(self._processes))]
        traced = [concurrent.futures.Future() for _ in programs]
        # The numbers of the first programs and of the others that no thread has begun to trace, and to compile.
        parts = range(len(first)), range(len(first), len(programs))
        untraced, uncompiled = ([collections.deque(part) for part in parts] for _ in range(2))

        def wait() -> None:
            """Until the others may use processors and device."""
            concurrent.futures.wait(futures[: len(first)])
            self._goes_on.wait()

        def trace_all(process: ProgramProcess, numbers: collections.deque[int]) -> None:
            with contextlib.suppress(IndexError):  # another thread took the last one
                while True:
                    number, result = numbers.popleft(), None
                    if not futures[number].cancelled():
                        result = self._traced(programs[number], store, process)
                    traced[number].set_result(result)

        def trace(process: ProgramProcess) -> None:
            trace_all(process, untraced[0])
            if untraced[1]:
                wait()
            trace_all(process, untraced[1])
            process.end()

        def compile_all(numbers: collections.deque[int]) -> None:
            with contextlib.suppress(IndexError):
                while True:
                    # In the order of the list, even if another one is traced: it would take the processors first.
                    number = numbers.popleft()
                    result = traced[number].result()
                    if futures[number].set_running_or_notify_cancel():
                        self._compile(programs[number], result, futures[number])

        def compile_others() -> None:
            wait()
            compile_all(uncompiled[1])

        work = [*((trace, process) for process in self._processes)]
        work += [*[(compile_all, uncompiled[0])] * _AT_ONCE, (compile_others,)]
        threads = [threading.Thread(target=do, args=of, daemon=True) for do, *of in work]
        for thread in threads:
            thread.start()
        self._threads += threads

    def go_on(self) -> None:
        """Begins to compile the programs that the first step did not need."""
        self._goes_on.set()

    @property
    def unready(self) -> set[tuple[Hashable, ...]]:
        """The keys of the programs that a call would wait for, so that another program should do their work."""
        if self._patient:
            return set()
        return {key for key, future in self._pending.items() if not future.done()}

    def call(self, key: tuple[Hashable, ...], function: functools.partial, *arrays: Any) -> Any:
        """Calls a function of arrays; if it is listed with this key, waits until it is compiled.

        If it is listed with other shapes, it is compiled for these ones, with a line: the list is at fault then.
        """
        program = self._program(key)
        if program is None:
            return function(*arrays)
        leaves = jax.tree.leaves(arrays)
        if program.takes(leaves):
            return jax.tree.unflatten(program.results, program.function(*leaves))
        tell("a program has other shapes than it was listed with, and is compiled now")
        del self._pending[key]
        return function(*arrays)

    @property
    def counts(self) -> tuple[int, int]:
        """How many programs are compiled, and how many there are."""
        return sum(future.done() for future in self._pending.values()), len(self._pending)

    def end(self) -> None:
        """Begins no further programs, and ends the processes."""
        for future in self._pending.values():
            future.cancel()
        self.go_on()
        for process in self._processes:
            process.end()
        self._kernels.end()
        for thread in self._threads:  # compiling while the interpreter exits would crash
            thread.join()

    def _program(self, key: tuple[Hashable, ...]) -> Compiled | None:
        """Returns a listed program when it is compiled; None if it is not listed, or could not be compiled."""
        future = self._pending.get(key)
        if future is None or future.cancelled():
            return None
        if key in self._others:
            self.go_on()
        if (error := future.exception()) is None:
            return future.result()
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        tell(f"a program could not be compiled early, and is compiled now: {why}")
        del self._pending[key]
        return None

    def _traced(
        self, program: Listed, store: ProgramStore, process: ProgramProcess
    ) -> tuple[Traced, bool] | BaseException:
        """Returns a program, and whether it was traced now, since the store did not have it; or what went wrong."""
        try:
            with self._lock:
                key = key_of(program.function, program.arrays)
                traced = store.read(key)
            if traced is not None:
                return traced, False
            if error := process.make(Request(key, program.function, program.shapes)):
                raise RuntimeError(error)
            with self._lock:
                traced = store.read(key)
            if traced is None:
                raise RuntimeError("what a process wrote is gone")
            return traced, True
        except BaseException as error:
            return error

    def _compile(
        self,
        program: Listed,
        result: tuple[Traced, bool] | BaseException,
        future: concurrent.futures.Future,
    ) -> None:
        try:
            if isinstance(result, BaseException):
                raise result
            traced, is_new = result
            place = SingleDeviceSharding(jax.local_devices()[0])
            with self._lock:
                lowered = traced.lowered(place, program.function.func.compiler_options)
            if is_new:
                self._kernels.compile(lowered)
            shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(program.arrays)]
            future.set_result(Compiled(shapes, lowered.compile(), traced.results))
        except BaseException as error:
            future.set_exception(error)


def workers() -> int:
    """Returns the number of processes that trace: as processors and device memory allow; none on a CPU.

    The environment variable QERL_TRACE_PROCESSES, if set, replaces it on a GPU.

    Raises:
        ConfigError: If the variable is no number.
    """
    if jax.default_backend() != "gpu":
        return 0
    if named := os.environ.get("QERL_TRACE_PROCESSES"):
        require(named.isdecimal(), "QERL_TRACE_PROCESSES", named, "must be a number: 0, 1, ...")
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
