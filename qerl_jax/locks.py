"""One process per folder: a lock that ends when its process ends, for whatever reason."""

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import IO

from qerl_jax.files import writing

# The file stays in the folder; the lock on it does not outlive its process.
NAME = ".lock"
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Busy(OSError):
    """Another process uses the folder; the message names both and the remedy."""


@contextlib.contextmanager
def held(folder: str | pathlib.Path) -> Iterator[str | None]:
    """Locks an existing folder for the block.

    The lock is `flock` on `.lock` in the folder: the kernel releases it when the process ends, even by SIGKILL. On
    a network drive that supports locks it holds for all machines.

    Args:
        folder: The folder, which exists.

    Yields:
        None, or a warning where the file system has no locks.

    Raises:
        Busy: When another process, or another call in this one, holds the lock.
        DiskError: When the lock file cannot be made.
    """
    path = pathlib.Path(folder) / NAME
    with writing(path):
        file = path.open("a+")
    with file:
        warning = None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Busy(
                f"{folder}: another run works in this folder ({_read(file)}): wait for it or stop it, or "
                "choose another output_dir"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warning = (
                f"warning: the file system of {folder} has no locks: make sure that no other run works "
                "in this folder"
            )
        with writing(path):
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
            file.flush()
        yield warning


def _read(file: IO[str]) -> str:
    """The holder of the lock, as written in its file; the kernel knows only that it is held."""
    file.seek(0)
    return file.read(200).strip() or "unknown process"
