"""Handles signals that ask a run to end: it ends between two units of work, and saves its state.

A signal handler must not raise here, because Python runs it between any two instructions of the main thread. An
exception inside a callback of the garbage collector, of a weak reference or of a `__del__` is printed and lost, so
that the run continues; one inside a callback of JAX's C++ code kills the process. So the handler only records the
signal, and the loop checks it (`Stop.poll`) at points where it can end.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from qerl_jax.distributed.hosts import Hosts

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Raised when a run ends because of a signal.

    Attributes:
        signal: The signal.
    """

    def __init__(self, number: int, text: str = ""):
        """Takes the number of the signal, and the text of the error, such as what was saved."""
        super().__init__(text or f"stopped by {signal.Signals(number).name}")
        self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """The exit code, 128 plus the number of the signal as in shells: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signal


class Stop:
    """Records whether a signal has asked the run to end.

    Attributes:
        signal: The number of the signal; None if there was none.
        saves: Whether there is a state to save, so that a signal takes effect at the next `poll`. As long as it is
            False, a signal has the effect that it had before `listening`, and is also recorded: if its exception is
            lost, the first `poll` ends the run.
    """

    def __init__(self, hosts: Hosts = Hosts()):
        """Does not handle signals until `listening` is entered. A signal to one of the `hosts` ends all of them."""
        self.signal: int | None = None
        self.saves = False
        self._hosts = hosts
        self._before: dict[int, Any] = {}

    def poll(self) -> None:
        """Raises `Stopped` if a signal has arrived, here or in another process. The others are told first."""
        if self.signal is not None:
            self._hosts.ask(self.signal)
            raise Stopped(self.signal)
        if (number := self._hosts.asked()) is not None:
            raise Stopped(number)

    def poll_together(self) -> None:
        """Raises `Stopped` in all processes if a signal has arrived in any of them. All processes must call it."""
        for number in self._hosts.gathered(self.signal):
            if number is not None:
                raise Stopped(number)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Records SIGINT and SIGTERM inside the block. A second signal also has the effect that it had before the
        block.

        Outside of the main thread Python delivers no signals, and nothing is recorded.
        """
        with _handled(self._hear) as self._before:
            yield

    def _hear(self, number: int, frame: FrameType | None) -> None:
        is_first, self.signal = self.signal is None, number
        if is_first and self.saves:
            name = signal.Signals(number).name
            # Python's file objects are not used, because the signal may have interrupted a write to one.
            _say(
                f"{name}: the run ends after what it is doing, and saves; a second one ends it at once"
            )
            return
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, before or signal.SIG_DFL)
            signal.raise_signal(number)


@contextlib.contextmanager
def ending_at_once(command: str) -> Iterator[None]:
    """Makes SIGINT and SIGTERM end the process inside the block, with one line and the exit code 130 or 143.

    It is for a command line that has nothing to save yet; its name begins the line. Exit handlers and destructors do
    not run, because libraries may hang or abort in them.
    """

    def end(number: int, frame: FrameType | None) -> None:
        _say(f"{command}: ended by {signal.Signals(number).name}; what was saved before is intact")
        os._exit(128 + number)

    with _handled(end):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[dict[int, Any]]:
    """Handles SIGINT and SIGTERM in a block of the main thread, and gives it the handlers that were there before."""
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _say(text: str) -> None:
    # A live view may have hidden the cursor.
    shown = "\x1b[?25h" if os.isatty(2) else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{shown}{text}\n".encode())
