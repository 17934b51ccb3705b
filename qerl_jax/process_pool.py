"""Functions that may hang, in processes that can be killed.

A `Pool` keeps processes that have imported one module and answer calls of its functions, each under
a time limit. They are fresh interpreters, not forks: JAX is in the parent, whose threads and device
memory a fork would share, and the parent's main module is not run again. Requests and replies are
lines of JSON.

The limit is on processor time. So whether an answer is judged in time does not depend on what else the machine is
doing, and a run can be repeated. A limit on the clock, five times as long, ends calls that only wait.

A worker ends with its parent, however the parent ends: an idle one reads the end of its input, and a
busy one has an alarm, which the kernel delivers whatever Python is doing.
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

from qerl_jax.ahead import Ahead
from qerl_jax.checked import require

# Long enough to import sympy on a machine that is busy compiling.
_START_SECONDS = 120.0
# Seconds on the clock for each of the processor's: on a busy machine a call gets a share of it.
_PATIENCE = 5
# Variables that say where things are and how texts look; others may be keys.
_PASSED_ON = (
    *("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "PYTHONHASHSEED"),
    *("TMPDIR", "TZ"),
)
# An integer like 10**10**10 needs more than any ordinary answer.
_MEMORY_BYTES = 4 << 30


@dataclasses.dataclass(frozen=True)
class Failure:
    """A call without a value.

    Attributes:
        reason: "timeout" if it was killed at its limit, "died" if its process ended twice or the worker was
            stopped, "raised" for an exception.
        detail: The exception's type and text.
    """

    reason: Literal["timeout", "died", "raised"]
    detail: str = ""


class Pool:
    """Processes that call functions of one module; they start when they are first needed."""

    def __init__(
        self, module: str, *, workers: int, seconds: float, memory_bytes: int = _MEMORY_BYTES
    ):
        """Starts nothing yet.

        Args:
            module: Import path of the module whose functions are called.
            workers: Most processes at a time.
            seconds: Longest call, in seconds of the processor; on the clock five times as long.
            memory_bytes: Address space of a process.

        Raises:
            ValueError: If a number is not positive.
        """
        given = (workers, seconds)
        require(workers >= 1 and seconds > 0, "workers and seconds", given, "must be positive")
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        members = [Worker(module, seconds, memory_bytes) for _ in range(workers)]
        for worker in members:
            self._idle.put(worker)
        self._calls = Ahead(functools.partial(_call, self._idle), workers)
        self.close = weakref.finalize(self, _stop_all, members)

    def map(self, function: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls `function` with each tuple of arguments, side by side; equal calls are made once.

        Args:
            function: Name of a function of the module.
            calls: Arguments of each call; they and the values must be plain JSON.

        Returns:
            Values in the order of the calls, a `Failure` for each call without one.

        Raises:
            RuntimeError: If a worker cannot start, with its reason.
        """
        return self._calls.map([_key(function, arguments) for arguments in calls])

    def begin(self, function: str, calls: Sequence[Sequence[Any]]) -> None:
        """Starts calls that `map` will be asked for later."""
        self._calls.begin([_key(function, arguments) for arguments in calls])


def _key(function: str, arguments: Sequence[Any]) -> str:
    return json.dumps([function, list(arguments)])


def _call(idle: queue.SimpleQueue, request: str) -> Any:
    worker = idle.get()
    try:
        reply = worker.call(request)
        # Something else may have killed it, such as the kernel for lack of memory: a second try tells.
        return worker.call(request) if reply == Failure("died") else reply
    finally:
        idle.put(worker)


class Worker:
    """One process, replaced after every call that it did not survive."""

    def __init__(
        self,
        module: str,
        seconds: float,
        memory_bytes: int = _MEMORY_BYTES,
        *,
        is_trusted: bool = False,
    ):
        """Starts nothing yet; a module that is trusted, as a user's own is, sees the whole environment."""
        names = os.environ if is_trusted else _PASSED_ON
        self._environment = {name: os.environ[name] for name in names if name in os.environ}
        limits = str(seconds), str(memory_bytes)
        self._command = [sys.executable, "-m", __name__, module, *limits]
        self._module, self._seconds = module, seconds
        self._process: subprocess.Popen | None = None
        self._is_stopped = False
        # A finalizer may stop the worker in the thread that is within a call.
        self._calling = threading.RLock()

    def call(self, request: str) -> Any:
        with self._calling:
            if self._process is None or self._process.poll() is not None:
                self._start()
            if self._is_stopped:
                return Failure("died")
            with contextlib.suppress(
                BrokenPipeError
            ):  # the worker has died, which the missing reply will show
                self._process.stdin.write(request + "\n")
                self._process.stdin.flush()
            return self._reply(_PATIENCE * self._seconds)

    def stop(self) -> None:
        """Ends the process for good; a call that another thread makes meanwhile fails."""
        self._is_stopped = True
        _kill(self._process)
        with self._calling:  # soon, since the call has lost its process, or will end it itself
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
            # What the parent can import, and no Ctrl-C that is meant for it.
            env=self._environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        # `stop` may have come before there was a process that it could kill.
        failure = Failure("died") if self._is_stopped else self._reply(_START_SECONDS)
        if failure is None:
            return
        self._end()
        if not self._is_stopped:
            why = failure.detail or failure.reason
            raise RuntimeError(f"a worker process could not import {self._module}: {why}")

    def _reply(self, seconds: float) -> Any:
        """The value of a call, or why there is none; without a reply the process is ended."""
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
        """The signal that has ended the process, after the end of its output; None for none."""
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
    # What the module prints must not look like a reply.
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

    answer()  # whether the module can be imported
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE * seconds + 1)  # later than the parent's own
        answer(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
