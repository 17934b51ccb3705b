"""Runs functions that may hang in processes that can be killed; requests and replies are lines of JSON.

Workers are fresh interpreters, not forks, which would share the threads and device memory of JAX. The limit of a call
is on CPU time, so that it does not depend on the load of the machine; a limit on wall-clock time, five times as long,
ends calls that only wait. A worker ends with its parent, however that ends: an idle one reads the end of its input, and
a busy one has an alarm, which the kernel delivers whatever Python is doing.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Literal

from qerl_jax.system.checked import require
from qerl_jax.system.early_calls import Ahead

# Long enough to import sympy on a machine that is busy compiling.
_START_SECONDS = 120.0
# Seconds of wall-clock time per second of CPU time, because on a busy machine a call gets only a share of a CPU.
_PATIENCE = 5
# Environment variables for paths and locale that workers get; others may be secrets.
_PASSED_ON = "HOME LANG LC_ALL LC_CTYPE LD_LIBRARY_PATH PATH PYTHONHASHSEED TMPDIR TZ".split()
# An integer like 10**10**10 needs more than any ordinary answer.
_MEMORY_BYTES = 4 << 30


@dataclasses.dataclass(frozen=True)
class Failure:
    """The result of a call that returned no value.

    The reason is "timeout" if it was killed at its limit, "died" if its process ended (in a `Pool` twice) or the worker
    was stopped, and "raised" for an exception.
    """

    reason: Literal["timeout", "died", "raised"]
    detail: str = ""  # the exception's type and text


class Pool:
    """Worker processes that call functions of one module; they start when they are first needed.

    Args:
        module: Import path of the module whose functions are called.
        workers: Most processes at a time.
        seconds: Limit of a call, in seconds of CPU time; in wall-clock time it is five times as long.
        memory_bytes: Limit of a process's address space, in bytes.

    Raises:
        ValueError: If a number is not positive.
    """

    def __init__(
        self, module: str, *, workers: int, seconds: float, memory_bytes: int = _MEMORY_BYTES
    ):
        arguments = (workers, seconds)
        require(workers >= 1 and seconds > 0, "workers and seconds", arguments, "must be positive")
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        members = [Worker(module, seconds, memory_bytes) for _ in range(workers)]
        for worker in members:
            self._idle.put(worker)
        self._calls = Ahead(functools.partial(_call, self._idle), workers)
        self.close = weakref.finalize(self, _stop_all, members)

    def start(self) -> None:
        """Starts a process before the first call, in a thread."""
        self._calls.begin([_key("", ())])

    def map(self, function: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls the named function with each tuple of arguments, in parallel; equal calls are made once.

        Arguments and results must be JSON values. The results are in the order of the calls, with a `Failure` for each
        call that returned none.

        Raises:
            RuntimeError: If a worker cannot start; the message has the reason.
        """
        return self._calls.map([_key(function, arguments) for arguments in calls])

    def begin(self, function: str, calls: Sequence[Sequence[Any]]) -> None:
        """Starts calls whose results a later `map` returns."""
        self._calls.begin([_key(function, arguments) for arguments in calls])


def _key(function: str, arguments: Sequence[Any]) -> str:
    return json.dumps([function, list(arguments)])


def _call(idle: queue.SimpleQueue, request: str) -> Any:
    worker = idle.get()
    try:
        reply = worker.call(request)
        # Something else may have killed it, such as the kernel when memory is low: the call is repeated once.
        return worker.call(request) if reply == Failure("died") else reply
    finally:
        idle.put(worker)


class Worker:
    """One worker process, which starts at its first call, and again after a call that ended it.

    With `is_trusted` (a user's module) it gets the whole environment.
    """

    def __init__(
        self, module: str, seconds: float, memory_bytes: int = _MEMORY_BYTES, *, is_trusted=False
    ):
        names = os.environ if is_trusted else _PASSED_ON
        self._environment = {name: os.environ[name] for name in names if name in os.environ}
        limits = str(seconds), str(memory_bytes)
        self._command = [sys.executable, "-m", __name__, module, *limits]
        self._module, self._seconds = module, seconds
        self._process: subprocess.Popen | None = None
        self._is_stopped = False
        # Reentrant, because a finalizer may stop the worker in a thread that is inside a call.
        self._calling = threading.RLock()

    def call(self, request: str) -> Any:
        with self._calling:
            if self._process is None or self._process.poll() is not None:
                self._start()
            if self._is_stopped:
                return Failure("died")
            # Raised if the worker has died, which the missing reply will show.
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(request + "\n")
                self._process.stdin.flush()
            return self._reply(_PATIENCE * self._seconds)

    def stop(self) -> None:
        """Ends the process permanently; a concurrent call of another thread fails."""
        self._is_stopped = True
        _kill(self._process)
        with self._calling:  # acquired soon: a running call has lost its process, or will end it
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError), process:
                _kill(process)

    def _start(self) -> None:
        self._end()
        if self._is_stopped:
            return
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # The worker can import what the parent can, and does not get the parent's Ctrl-C.
            env=self._environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        # `stop` may have been called before there was a process to kill.
        failure = Failure("died") if self._is_stopped else self._reply(_START_SECONDS)
        if failure is None:
            return
        self._end()
        if not self._is_stopped:
            why = failure.detail or failure.reason
            raise RuntimeError(f"a worker process could not import {self._module}: {why}")

    def _reply(self, seconds: float) -> Any:
        """Waits for a call's reply, and returns its value or a `Failure`; without a reply it ends the process."""
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        line = self._process.stdout.readline() if poll.poll(1000 * seconds) else None
        if line is None or not line.endswith("\n"):
            is_late = line is None or self._ended_by() == signal.SIGPROF
            self._end()
            return Failure("timeout" if is_late else "died")
        reply = json.loads(line)
        return Failure("raised", reply["error"]) if "error" in reply else reply["value"]

    def _ended_by(self) -> int | None:
        """Returns the signal that ended the process, whose output has ended; None if it is still running."""
        try:
            return -self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return None


def _kill(process: subprocess.Popen | None) -> None:
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _stop_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.stop()


def _serve(module: str, seconds: float, memory_bytes: int) -> None:
    """Answers requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # Standard output is redirected, so that the module's prints are not read as replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(name: str | None = None, arguments: Sequence[Any] = ()) -> None:
        try:
            functions = importlib.import_module(module)
            message = {"value": getattr(functions, name)(*arguments) if name else None}
        except Exception as error:
            message = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    def limit(seconds: float, wall_seconds: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, wall_seconds)

    answer()  # whether the module can be imported
    for line in sys.stdin:
        limit(seconds, _PATIENCE * seconds + 1)  # later than the parent's own
        answer(*json.loads(line))
        limit(0, 0)


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
