"""A process that traces programs for another one: `python -m qerl_jax.compilation.program_process FD`.

In one process programs are traced and lowered one after the other, however many threads there are, because that holds
Python's lock. The process gets requests from its parent over a pipe, and writes what it traced to the `ProgramStore`.

Both ends of the pipe are this program, so requests are pickled. No file is, and nothing else can write to the pipe.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
import subprocess
import sys
import threading
from multiprocessing import connection
from typing import Any

import jax

from pallas_kernels import runtime
from qerl_jax.compilation import program_store

# Options of JAX that a program may set, which change programs or where they are kept.
_OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_default_matmul_precision",
    "jax_enable_x64",
)


@dataclasses.dataclass(frozen=True)
class Request:
    """A program to trace.

    Attributes:
        key: Its key in the store.
        function: See `Traced.of`.
        arrays: Likewise, with shapes only.
        kernels: The chosen kernels.
    """

    key: str
    function: functools.partial
    arrays: tuple[Any, ...]
    kernels: runtime.Kernels = dataclasses.field(default_factory=runtime.chosen_kernels)


class ProgramProcess:
    """The parent's side: starts the process, has it trace programs, and can end it from another thread."""

    def __init__(self):
        """Nothing is started before `start`, or before the first program."""
        self._process: subprocess.Popen | None = None
        self._pipe: connection.Connection | None = None
        self._has_ended = False
        self._lock = threading.Lock()

    def make(self, request: Request) -> str | None:
        """Has a program traced, and waits for it; returns what went wrong, in a line."""
        try:
            self.start()
            if self._pipe is None:
                return "ended"
            self._pipe.send(request)
            return self._pipe.recv()
        except (OSError, EOFError) as error:
            return f"the process ended ({type(error).__name__})"

    def end(self) -> None:
        """Ends the process at once; a call of `make` in another thread returns."""
        with self._lock:
            self._has_ended = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def start(self, imports: str | None = None) -> None:
        """Starts the process, if it has not started; it may import a module before its first program."""
        with self._lock:
            if self._process is not None or self._has_ended:
                return
            self._pipe, theirs = connection.Pipe()
            # It keeps no memory of the device that it does not need: its parent takes most of it at once.
            memory = {"PREALLOCATE": "false", "ALLOCATOR": "platform"}
            options = {f"XLA_PYTHON_CLIENT_{name}": value for name, value in memory.items()}
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | options,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            theirs.close()
            options = {name: getattr(jax.config, name) for name in _OPTIONS}
            self._pipe.send((options, imports))


def _serve(pipe: connection.Connection) -> None:
    """Makes what the parent asks for, until it closes the pipe."""
    options, imports = pipe.recv()
    for name, value in options.items():
        jax.config.update(name, value)
    store = program_store.ProgramStore.beside_xla()
    jax.local_devices()  # takes seconds
    if imports is not None:
        importlib.import_module(imports)
    while True:
        request = pipe.recv()
        try:
            runtime.use_kernels(request.kernels)
            store.write(request.key, program_store.Traced.of(request.function, request.arrays))
            pipe.send(None)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):
        _serve(connection.Connection(int(sys.argv[1])))
