"""Starts calls before their results are needed, while a device still samples other rows."""

import collections
import queue
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

# The most results that are kept until they are fetched; the oldest are dropped. After an interrupted rollout, some
# never are fetched.
_MOST_KEPT = 1 << 16


class Ahead[Arguments: Hashable, Result]:
    """A function of one argument whose calls run in threads, and can be started before their results are needed.

    Equal calls of one `map` are made once. At most `workers` calls run at the same time. Running calls do not prevent
    the interpreter from exiting.
    """

    def __init__(self, function: Callable[[Arguments], Result], workers: int):
        self._function, self._workers = function, workers
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._begun: collections.OrderedDict[Arguments, Future] = collections.OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self._jobs, workers)

    def begin(self, calls: Sequence[Arguments]) -> None:
        """Starts calls whose results a later `map` returns; a call that was started already is not repeated."""
        with self._lock:
            for arguments in calls:
                if arguments not in self._begun:
                    self._begun[arguments] = self._submit(arguments)
            while len(self._begun) > _MOST_KEPT:
                self._begun.popitem(last=False)

    def map(self, calls: Sequence[Arguments]) -> list[Result]:
        """Returns the results of calls, in their order; started calls are not repeated. Raises what a call raised."""
        with self._lock:
            requested = {
                arguments: self._begun.pop(arguments, None) or self._submit(arguments)
                for arguments in dict.fromkeys(calls)
            }
        return [requested[arguments].result() for arguments in calls]

    def _submit(self, arguments: Arguments) -> Future:
        if len(self._threads) < self._workers:
            # A ThreadPoolExecutor is not used, because the interpreter would wait for its threads at exit.
            thread = threading.Thread(target=_work, args=(self._jobs, self._function), daemon=True)
            self._threads.append(thread)
            thread.start()
        future: Future = Future()
        self._jobs.put((future, arguments))
        return future


def _work(jobs: queue.SimpleQueue, function: Callable[[Any], Any]) -> None:
    while (job := jobs.get()) is not None:
        future, arguments = job
        try:
            future.set_result(function(arguments))
        except BaseException as error:
            future.set_exception(error)


def _end(jobs: queue.SimpleQueue, workers: int) -> None:
    for _ in range(workers):
        jobs.put(None)
