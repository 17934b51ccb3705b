"""Unexpected errors: the file that keeps the details, and the one line that names it."""

import contextlib
import itertools
import os
import pathlib
import re
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence

from qerl_jax.system.files import write_whole

# Libraries that compute: their errors do not help a user. Other libraries read the user's input, and say what is
# wrong with it.
_COMPUTING = ("jax", "jaxlib", "flax", "optax", "orbax", "numpy", "scipy", "ml_dtypes")
# JAX removes its own frames from a traceback, and adds this note.
_FILTERED = "JAX has removed its internal frames"
# Characters that are shown of a long error's start, and of its end.
_SHOWN = 1500
_EXPECTED = (ValueError, OSError, OverflowError, NotImplementedError)


def is_expected(error: Exception) -> bool:
    """Whether an error says what is wrong with the input, the disk or the memory, in words for its user."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, _EXPECTED) and not _is_of_computing(error)


def is_of_output(error: Exception) -> bool:
    """Whether an error came because nobody reads the standard output any more, as in `qerl --help | head`."""
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    with contextlib.suppress(OSError):  # an output that is no file
        poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def drop_output() -> None:
    """Drops what is still written to the standard output, at the interpreter's end too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def in_one_line(error: BaseException) -> str:
    """The text of an error without its line breaks, or its type where it has no text.

    An error of the system names its path first.
    The middle of a very long text is left out.
    """
    if isinstance(error, MemoryError) and not str(error):
        return "this machine has no memory left"
    if isinstance(error, OSError) and error.filename is not None:  # from the system
        names = " to ".join(map(str, filter(None, (error.filename, error.filename2))))
        return f"{names}: could not be used: {error.strerror}; what was saved before is intact"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} [...] {text[-_SHOWN:]}"


def in_what(error: BaseException) -> str:
    """What a run was doing when the error came, and what is saved, in brackets; "" if the run had not begun."""
    notes = getattr(error, "__notes__", ())
    told = [note for note in notes if re.match(r"in the (?!prep)|before |step \d+ is saved", note)]
    return f" ({'; '.join(told)})" if told else ""


def describe(error: Exception, path: pathlib.Path | None) -> str:
    """One line about an unexpected error: its type, what was running, the start of its text, the file."""
    notes = (
        note for note in getattr(error, "__notes__", ()) if note.startswith(("in ", "before "))
    )
    kind = " ".join([type(error).__name__, *itertools.islice(notes, 1)])
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no text")
    report = f"traceback and versions: {path}" if path else "its traceback could not be written"
    return (
        f"unexpected {kind}: {first[:300]} ({report}; --debug shows it here). This is "
        "a fault of the program or of a library: please report it with that file"
    )


def keep(
    error: Exception, argv: Sequence[str], versions: Iterable[str], folders: Iterable[str | None]
) -> pathlib.Path | None:
    """Writes traceback, command and versions to a file in the first folder that can be written to.

    The system's temporary folder comes after `folders`; missing ones are skipped. `versions` are lines of `qerl env`.

    Returns:
        The file; None if it could be written to no folder.
    """
    head = (f"qerl {' '.join(argv)}", time.strftime("%Y-%m-%d %H:%M:%S"), "")
    text = "\n".join((*head, "".join(traceback.format_exception(error)), *versions, ""))
    name = time.strftime("error-%Y%m%d-%H%M%S.txt")
    for folder in (*folders, tempfile.gettempdir()):
        if folder and "\0" not in folder and pathlib.Path(folder).is_dir():
            with contextlib.suppress(OSError):
                path = pathlib.Path(folder) / name
                write_whole(path, text)
                return path
    return None


def _is_of_computing(error: Exception) -> bool:
    """Whether it was raised inside a library that computes."""
    notes = " ".join(getattr(error, "__notes__", ()))
    if _FILTERED in notes or type(error).__module__.split(".")[0] in _COMPUTING:
        return True
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)[-1:]]
    libraries = [re.search(r"(?:site|dist)-packages[/\\](\w+)", file) for file in files]
    return any(library and library[1] in _COMPUTING for library in libraries)
