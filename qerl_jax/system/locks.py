"""Locks a folder for one process; the lock is released when the process ends, however it ends."""

import contextlib
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import IO

from qerl_jax.system.files import Busy, lock, writing

# The lock file stays in the folder; the lock itself ends with its process.
NAME = ".lock"


@contextlib.contextmanager
def held(folder: str | pathlib.Path) -> Iterator[str | None]:
    """Locks an existing folder for the block.

    The lock is a `flock` on `.lock` in the folder: the kernel releases it when the process ends, even by SIGKILL. On
    a network drive that supports locks it is valid for all machines.

    Yields:
        None, or a warning if the file system has no locks.

    Raises:
        Busy: If another process, or another call in this one, holds the lock.
        DiskError: If the lock file cannot be written.
    """
    path = pathlib.Path(folder) / NAME
    with writing(path):
        file = path.open("a+")
    with file:
        try:
            is_locked = lock(file)
        except BlockingIOError as error:
            raise Busy(
                f"{folder}: another run works in this folder ({_read(file)}): wait for it or stop it, or "
                "choose another output_dir"
            ) from error
        warning = f"warning: the file system of {folder} has no locks: make sure that no other run works in this folder"
        with writing(path):
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
            file.flush()
        yield None if is_locked else warning


def _read(file: IO[str]) -> str:
    """Returns the holder of the lock, which is written in the lock file."""
    file.seek(0)
    return file.read(200).strip() or "unknown process"
