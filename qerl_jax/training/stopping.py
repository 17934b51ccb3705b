"""Signals that ask a run to end: it ends where nothing is half done, and saves what it has.

A handler that raises is not safe here. Python runs it between any two instructions of the main thread: an
exception that falls into a callback of the garbage collector, of a weak reference or of a `__del__` is printed
and forgotten, so that the run goes on; one that falls into a callback of JAX's C++ code ends the process there. So
the handler only takes note, and the loop asks (`Stop.poll`) where it can end.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from qerl_jax.hosts import Hosts

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A run that has ended because a signal asked for it.

    Attributes:
        signal: The signal.
    """

    def __init__(self, number: int, text: str = ""):
        """Takes the number of the signal, and a line that says what was saved."""
        super().__init__(text or f"stopped by {signal.Signals(number).name}")
        self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """128 and the number of the signal, as shells have it: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signal


class Stop:
    """Whether a signal has asked the run to end.

    Attributes:
        signal: The signal; None as long as there was none.
        saves: Whether there is a state to save, so that a signal waits for the next `poll`. Until then it does
            what it did before `listening`, and is remembered: should its exception be lost, the first `poll` ends
            the run.
    """

    def __init__(self, hosts: Hosts = Hosts()):
        """Hears nothing yet; see `listening`. A signal to one of the processes ends all of them."""
        self.signal: int | None = None
        self.saves = False
        self._hosts = hosts
        self._before: dict[int, Any] = {}

    def poll(self) -> None:
        """Ends what this process does here, if a signal has asked for it.

        Where there are several, the others must learn of it before they wait for this one.

        Raises:
            Stopped: The signal has come, to this process or to another.
        """
        if self.signal is not None:
            self._hosts.ask(self.signal)
            raise Stopped(self.signal)
        if (asked := self._hosts.asked()) is not None:
            raise Stopped(asked)

    def poll_together(self) -> None:
        """Ends the run here in all processes, which must all come here, if a signal has asked any of them for it.

        Raises:
            Stopped: The signal has come.
        """
        asked = [each for each in self._hosts.gathered(self.signal) if each is not None]
        if asked:
            raise Stopped(asked[0])

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes note of SIGINT and SIGTERM in the block; a second one also does what it did before the block.

        Outside of the main thread, where Python has no signals, nothing is heard.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        is_first, self.signal = self.signal is None, number
        if is_first and self.saves:
            name = signal.Signals(number).name
            # Not through Python's file objects: the signal may have come while one was written to.
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
    """Makes SIGINT and SIGTERM end the process in the block, with one line and the code 130 or 143.

    For a command line that has nothing to save yet: neither exit handlers nor destructors run, in which
    libraries may hang or abort.

    Args:
        command: Stands before the line.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        _say(f"{command}: ended by {signal.Signals(number).name}; what was saved before is unhurt")
        os._exit(128 + number)

    before = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    # A live view may have hidden the cursor.
    shown = "\x1b[?25h" if os.isatty(2) else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{shown}{text}\n".encode())
