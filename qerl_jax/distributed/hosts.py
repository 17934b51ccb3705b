"""The processes of a run on several hosts: how they find each other, exchange messages, and end.

Messages are sent through JAX's coordination service, which runs in the first process. No device is used, so a waiting
process can be told why its wait will not end. Sums of gradients are not sent this way, see `mesh`.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from qerl_jax.distributed import messages
from qerl_jax.system.checked import require

# The exit code of a process whose run has lost another one.
LOST = 4
# Seconds of silence after which a process counts as dead.
_SILENCE = 30
# Milliseconds between two checks whether the awaited process has ended. A chunk of a message must arrive within it.
_LOOK = 1000
# Bytes of a chunk of a message. On a network below one megabyte per second, no chunk would arrive in time.
_PIECE = 1 << 20
_NUMBER_BYTES = 4
# Seconds that the first process, which serves the others, stays after an error, so that they can read the reason.
_FAREWELL = 3
_ADDRESS, _COUNT, _INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_ENDED, _ASKED = "qerl/ended", "qerl/asked"
_numbers = itertools.count()


class HostLost(RuntimeError):
    """Raised if another process of the run has ended, or cannot be reached.

    Attributes:
        exit_code: The exit code of a command line for this error.
    """

    exit_code = LOST


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The processes of a run, which all run the same program, each on its own devices.

    Attributes:
        index: The number of this process.
        count: The number of processes.
    """

    index: int = 0
    count: int = 1

    @classmethod
    def all(cls) -> Self:
        """Returns the processes that have joined; only this process if none have."""
        import jax  # slow to import, here and below: the command line imports this module for its help

        if not jax.distributed.is_initialized():
            return cls()
        # `jax.process_index` would initialize devices, and compiler options cannot be set after that.
        return cls(_state().process_id, _state().num_processes)

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files, computes rewards, runs tools and prints."""
        return self.index == 0

    def gathered(self, value: Any) -> list[Any]:
        """Sends a value to all processes, and returns those of all, in the order of processes (an all-gather).

        All processes must call this, with a value that `messages.encode` accepts.

        Raises:
            HostLost: If a process does not call this because it has ended.
        """
        if self.count == 1:
            return [value]
        number, client = next(_numbers), _service()
        _put(f"qerl/{number}/{self.index}", messages.encode(value))
        values = [
            value if host == self.index else messages.decode(_awaited(f"qerl/{number}/{host}"))
            for host in range(self.count)
        ]
        if number:
            # All processes are here, so all have read the earlier messages.
            with _reaching():
                client.key_value_delete(f"qerl/{number - 1}/{self.index}")
        return values

    def told[Result](self, work: Callable[[], Result]) -> Result:
        """Broadcasts the result of `work`, which only the first process calls. All processes must call this."""
        return self.gathered(work() if self.leads else None)[0]

    def together[Result](
        self, work: Callable[[], Result], poll: Callable[[], None]
    ) -> list[Result]:
        """Calls `work` in each process, and returns the results of all. All processes must call this.

        If a signal ends `work` in one process, this call ends in all: `poll` raises the signal of another process.

        Raises:
            HostLost: If another process was interrupted, and `poll` did not raise, or has ended.
        """
        try:
            values = (work(),)
        except KeyboardInterrupt:
            self.gathered(None)
            raise
        everyones = self.gathered(values)
        if any(value is None for value in everyones):
            poll()
            raise HostLost("another process was interrupted")
        return [result for (result,) in everyones]

    def send(self, name: str, value: Any) -> None:
        """Sends a value to the process that asks for this name, which can be used only once in a run.

        Raises:
            HostLost: If the first process cannot be reached.
        """
        _put(f"qerl/{name}", messages.encode(value))

    def received(self, name: str, is_over: Callable[[], bool] = lambda: False) -> tuple[Any] | None:
        """Waits for a value that another process sends, and removes it; any thread may call this.

        Args:
            name: See `send`.
            is_over: Whether to stop waiting; called about once a second.

        Returns:
            The value, in a tuple of length 1; None if `is_over` returned True.

        Raises:
            HostLost: If a process has ended with an error, or the first one cannot be reached.
        """
        data = _awaited(f"qerl/{name}", is_over)
        if data is None:
            return None
        with _reaching():
            _service().key_value_delete(f"qerl/{name}")
        return (messages.decode(data),)

    def ask(self, number: int) -> None:
        """Tells all processes that a signal asks the run to end."""
        if self.count > 1:
            _say_once(_ASKED, str(number))

    def asked(self) -> int | None:
        """Returns the signal that asked any process to end the run; None if there was none."""
        number = _read(_ASKED) if self.count > 1 else None
        return None if number is None else int(number)

    @contextlib.contextmanager
    def farewell(self) -> Iterator[None]:
        """Tells the other processes about an error in the block, so that they do not wait for this one."""
        try:
            yield
        except HostLost:
            raise
        except Exception as error:
            if self.count > 1:
                text = " ".join(str(error).split())[:300]
                _say_once(_ENDED, f"{self._name} has ended by {type(error).__name__}: {text}")
            raise

    @property
    def _name(self) -> str:
        return f"process {self.index} of {self.count} ({socket.gethostname()})"


def join(environment: Mapping[str, str] = os.environ) -> None:
    """Joins this process to the others of its run, if the environment names any.

    The environment has JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or is that of a Slurm step with
    several tasks. This must be called before anything is computed.

    Raises:
        ConfigError: For variables that are missing or invalid.
        HostLost: If the other processes cannot be reached.
    """
    import jax

    options = _named(environment)
    if options is None or jax.distributed.is_initialized():
        return
    # JAX's own signal handling would replace ours.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**options, heartbeat_timeout_seconds=_SILENCE)
    except (RuntimeError, ValueError, OSError) as error:
        text = " ".join(str(error).split())[:300]
        where = options.get("coordinator_address", "the first host of the Slurm step")
        raise HostLost(f"the other processes cannot be reached at {where}: {text}") from error
    # JAX aborts a process if another one has been silent too long, because it may wait for that one in a device call.
    # A Python handler would run too late: C code raises the signal.
    ctypes.CDLL(None).signal(ctypes.c_int(signal.SIGABRT), _aborted)


def leave(code: int) -> None:
    """Ends this process at once with an exit code, without waiting for others; does nothing if it is alone.

    The first process, which serves the others, waits some seconds before, unless another one was lost.
    """
    hosts = Hosts.all()
    if hosts.count == 1:
        return
    if hosts.leads and code != LOST:
        time.sleep(_FAREWELL)
    os._exit(code)


def _named(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the arguments of `jax.distributed.initialize`; None if this process is alone."""
    if any(name in environment for name in (_ADDRESS, _COUNT, _INDEX)):
        rule = f"must be set together with {_ADDRESS}, {_COUNT} and {_INDEX}"
        for name in (_ADDRESS, _COUNT, _INDEX):
            require(bool(environment.get(name)), name, environment.get(name), rule)
        count, index = (_number(environment, name) for name in (_COUNT, _INDEX))
        address = environment[_ADDRESS]
        has_port = address.rpartition(":")[2].isdecimal()
        require(has_port, _ADDRESS, address, "must be HOST:PORT of the first process")
        rule = f"must be from 0 to {_COUNT} - 1 = {count - 1}, another one for each process"
        require(index < count, _INDEX, index, rule)
        if count == 1:
            return None
        cards = {} if "JAX_LOCAL_DEVICE_IDS" in environment else _ALL_CARDS
        return {"coordinator_address": address, "num_processes": count, "process_id": index} | cards
    if all(name in environment for name in _SLURM) and environment["SLURM_NTASKS"] != "1":
        # With several tasks per node, JAX gives each task its own card.
        alone = environment.get("SLURM_STEP_NUM_NODES") == environment["SLURM_NTASKS"]
        return _ALL_CARDS if alone else {}
    return None


# Makes all cards of the host visible; by default JAX would give a Slurm task one card.
_ALL_CARDS: dict[str, Any] = {"local_device_ids": []}


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment[name]
    require(value.isascii() and value.isdecimal(), name, value, "must be a whole number")
    return int(value)


def _state() -> Any:
    """Returns JAX's state of distributed processes, which has no public name."""
    from jax._src import distributed

    return distributed.global_state


def _service() -> Any:
    """Returns the client of JAX's coordination service."""
    return _state().client


def _put(key: str, data: bytes) -> None:
    """Writes a message in chunks. The first one, which begins with the number of the others, is written last."""
    first, *others = (data[start : start + _PIECE] for start in range(0, len(data) or 1, _PIECE))
    with _reaching():
        for number, piece in enumerate(others, 1):
            _service().key_value_set_bytes(f"{key}/{number}", piece)
        _service().key_value_set_bytes(key, len(others).to_bytes(_NUMBER_BYTES) + first)


def _awaited(key: str, is_over: Callable[[], bool] = lambda: False) -> bytes | None:
    """Waits for the message that another process writes under a key; returns None if `is_over` returns True."""
    if (head := _awaited_piece(key, is_over)) is None:
        return None
    count = int.from_bytes(head[:_NUMBER_BYTES])
    others = [_awaited_piece(f"{key}/{number}") for number in range(1, count + 1)]
    return b"".join([head[_NUMBER_BYTES:], *others])


def _awaited_piece(key: str, is_over: Callable[[], bool] = lambda: False) -> bytes | None:
    client = _service()
    while not is_over():
        with _reaching():
            try:
                return client.blocking_key_value_get_bytes(key, _LOOK)
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        if (reason := _read(_ENDED)) is not None:
            raise HostLost(reason)
    return None


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    """Turns errors of calls to the service, which ends with the first process, into `HostLost`."""
    try:
        yield
    except RuntimeError as error:
        reason = f"the first process of the run cannot be reached: {str(error).splitlines()[0]}"
        raise HostLost(reason) from error


def _say_once(key: str, text: str) -> None:
    """Writes a message for all processes, unless it exists already. Errors are ignored: the run is ending anyway."""
    with contextlib.suppress(RuntimeError):
        _service().key_value_set(key, text)


def _read(key: str) -> str | None:
    try:
        return _service().key_value_try_get(key)
    except RuntimeError:
        return None


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(number: int) -> None:
    line = (
        b"qerl: another process of this run has ended, or cannot be reached (the lines above are JAX's). Start all "
        b"processes again: the run goes on from its last checkpoint\n"
    )
    os.write(2, line)
    os._exit(LOST)
