"""Writes files and folders completely or not at all, computes their hashes, and stores results of resumable jobs."""

import concurrent.futures
import contextlib
import errno
import fcntl
import glob
import hashlib
import itertools
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

# Suffixes of the files in a model or adapter folder.
_MADE_OF = (".safetensors", ".gguf", ".json", ".jinja", ".txt", ".model")

# Remedies for a disk that cannot be written to.
_REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there",
    errno.EFBIG: "allow larger files there (ulimit -f), or choose another folder",
    errno.EROFS: "make the file system writable, or choose another folder",
    errno.EACCES: "allow this user to write there, or choose another folder",
    errno.EPERM: "allow this user to write there, or choose another folder",
    errno.EIO: "check the disk (the kernel's log says more), or choose another folder",
    errno.ESTALE: "check the network drive, or choose another folder",
}


class DiskError(OSError):
    """Raised if a file could not be written; its text names the path, the reason and the remedy in one line.

    Args:
        path: The file or folder that was written.
        number: The `errno` of the failure; None if it is unknown.
        reason: The reason in words; None means the text of `number`.
    """

    def __init__(self, path: str | os.PathLike, number: int | None, reason: str | None = None):
        reason = reason or (os.strerror(number) if number else "unknown reason")
        remedy = _REMEDIES.get(number, "correct that, or choose another folder")
        super().__init__(
            f"{os.fspath(path)}: could not be written: {reason}; {remedy}, then start the command "
            "again: what was saved before is intact"
        )
        self.errno = number


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Turns errors inside the block, in which a path is written, into a `DiskError`.

    Errors of files in other folders, which the block reads, stay as they are, and so do those with their own text.

    Raises:
        DiskError: For an `OSError`, and for a library's error that says that the disk is full.
    """
    try:
        yield
    except OSError as error:
        has_text = error.errno is None and type(error) is not OSError
        names = [name for name in (error.filename, error.filename2) if isinstance(name, str)]
        is_of_path = not names or any(_is_part(pathlib.Path(name), path) for name in names)
        if isinstance(error, DiskError) or has_text or not is_of_path:
            raise
        raise DiskError(path, error.errno, error.strerror or str(error)) from error
    except Exception as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise DiskError(path, errno.ENOSPC) from error


def _is_part(name: pathlib.Path, path: str | os.PathLike) -> bool:
    """Whether a name is a path, is in it or in a temporary folder of it, or is one of its parents."""
    name, path = name.absolute(), pathlib.Path(path).absolute()
    inside = name.relative_to(path.parent).parts if name.is_relative_to(path.parent) else ()
    first = inside[0] if inside else ""
    return path.is_relative_to(name) or first == path.name or first.startswith(f".{path.name}.")


def cache_folder(name: str) -> pathlib.Path:
    """Returns the folder of a kind of files that can be made again, in ~/.cache/qerl_jax (or XDG_CACHE_HOME)."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return cache / "qerl_jax" / name


def write_whole(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file atomically: readers find either the old file or the complete new one.

    If several processes write it at once, the content of one of them is there in the end.

    Raises:
        DiskError: If it cannot be written.
    """
    partial = _partial(path)
    with writing(path):
        try:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def _partial(path: pathlib.Path) -> pathlib.Path:
    """Returns a new path beside another, which no other process uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")


# Error numbers of file systems without locks; NFS gives EBADF for folders.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


class Busy(OSError):
    """Raised if another process uses a folder or a file; the message names it and the remedy."""


def lock(file: IO | int, *, wait: bool = False) -> bool:
    """Locks an open file or folder (`flock`) until it is closed or the process ends, however it ends.

    Args:
        file: The file, or a descriptor.
        wait: Whether to wait while another process, or another call in this one, has the lock.

    Returns:
        Whether it is locked now; False if its file system has no locks.

    Raises:
        BlockingIOError: If another has the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


@contextlib.contextmanager
def _opened(folder: pathlib.Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole_folder(
    folder: str | pathlib.Path, marker: str, kind: str, *, first_wins: bool = False
) -> Iterator[pathlib.Path]:
    """Yields a temporary folder to fill, which replaces `folder` when the block ends without an error.

    Several processes may make the same folder at once: each fills a temporary folder of its own. Those that killed
    processes have left are removed.

    Args:
        folder: The final folder; it may exist only if it is empty or contains `marker`.
        marker: Name of a file that every folder of this kind contains.
        kind: The kind of folder, for the error.
        first_wins: Whether a folder that another process has finished in the meantime stays, as in a cache, where
            others may read it already.

    Raises:
        DiskError: If it cannot be written.
        FileExistsError: If the folder has other files.
    """
    folder = pathlib.Path(folder).resolve()
    partial, previous = _partial(folder), folder.with_name(f".{folder.name}.previous")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with writing(folder), _locked(folder.parent):
            if previous.exists() and not folder.exists():
                # The process was killed between the two renames below.
                os.replace(previous, folder)
            if folder.exists() and not (folder / marker).is_file() and any(folder.iterdir()):
                rule = f"holds files, but no {kind}; they would be deleted: choose another folder"
                raise FileExistsError(f"{folder}: {rule}")
            _remove_abandoned(folder)
            partial.mkdir()
            stack.callback(shutil.rmtree, partial, ignore_errors=True)
            _partials.add(partial)
            stack.callback(_partials.discard, partial)
            lock(stack.enter_context(_opened(partial)))
        stack.enter_context(writing(folder))
        yield partial
        with _locked(folder.parent):
            if folder.exists() and not first_wins:
                shutil.rmtree(previous, ignore_errors=True)
                os.replace(folder, previous)
            try:
                os.replace(partial, folder)
            except OSError:  # a folder that is not empty is never replaced
                if not (first_wins and (folder / marker).is_file()):
                    raise
            shutil.rmtree(previous, ignore_errors=True)


# The temporary folders that this process fills. It has locked them, and would wait for itself.
_partials: set[pathlib.Path] = set()


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Locks a folder for the block, and waits for the lock; without locks, nothing is done."""
    if folder in _partials:
        yield
        return
    with _opened(folder) as descriptor:
        lock(descriptor, wait=True)
        yield


def _remove_abandoned(folder: pathlib.Path) -> None:
    """Removes the temporary folders of killed processes: nobody has locked them. The parent must be locked."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*partial"):
        with contextlib.suppress(OSError), _opened(path) as descriptor:
            if lock(descriptor):
                shutil.rmtree(path)


# The file in a sealed folder with sizes and hashes of the others.
SEAL = "checksums.json"


def seal(folder: pathlib.Path) -> None:
    """Writes `checksums.json` with size and SHA-256 of every file in a folder; `damage` compares them."""
    write_whole(folder / SEAL, json.dumps(_contents(folder), indent=1, sort_keys=True))


def damage(folder: pathlib.Path) -> str | None:
    """Returns a text about the first file of a sealed folder that has changed; None if all are unchanged.

    All files are read completely, and their contents are not trusted.
    """
    try:
        sealed, contents = read_json(folder / SEAL), _contents(folder)
    except FileNotFoundError as error:
        return f"{pathlib.Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    for name in changes(sealed, contents):
        return f"{name} is {'not as it was written' if name in contents else 'missing'}"
    return None


def _contents(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns size and SHA-256 of all files below a folder except the seal, by their paths in it."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:  # hashing releases the GIL
        hashes = threads.map(digest, paths)
        return {
            name: {"bytes": path.stat().st_size, "sha256": digest_}
            for name, path, digest_ in zip(names, paths, hashes, strict=True)
            if name != SEAL
        }


# No JSON file of a model, a data set or a run is nested deeper. Deeper values would overflow the stack of later code.
DEEPEST = 64


def is_shallow(value: Any) -> bool:
    """Whether a value's lists and tables are nested at most `DEEPEST` deep."""
    level = [value]  # all values at one depth
    for _ in range(DEEPEST + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        parts = (item.values() if type(item) is dict else item for item in containers)
        level = [*itertools.chain.from_iterable(parts)]
    return not containers


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text that this process did not write.

    Raises:
        ValueError: If it is not JSON, or nested more than `DEEPEST` deep.
    """
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    with contextlib.suppress(RecursionError):
        value = json.loads(text)
        # With few brackets it cannot be nested deeper, and is not walked.
        if sum(map(text.count, brackets)) <= DEEPEST or is_shallow(value):
            return value
    raise ValueError(f"lists and tables nest more than {DEEPEST} deep")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON file with one object.

    Raises:
        ValueError: If the file is not JSON, or not an object; the message names the file.
    """
    try:
        table = parse_json(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f"{path}: not a JSON object but a {type(table).__name__}")
    return table


def digest(path: pathlib.Path) -> str | None:
    """Returns the SHA-256 of a file in hexadecimal digits; None if there is no such file."""
    path = path.expanduser()
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(folder: pathlib.Path) -> str | None:
    """Returns a SHA-256 over names, sizes and 16 chunks of 64 KiB of each file of a model or adapter.

    So tens of GB need not be read; new weights under the same name differ in nearly every chunk. Files of at most
    1 MiB, such as configs and templates, are read completely. The hash is in hexadecimal digits; None if there is no
    such folder, which may also be a single file.
    """
    folder = folder.expanduser()
    inside = folder.iterdir() if folder.is_dir() else [folder]
    if not folder.exists():
        return None
    digest = hashlib.sha256()
    for path in sorted(path for path in inside if path.suffix in _MADE_OF):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for chunk in range(16):
                file.seek(chunk * size // 16)
                digest.update(file.read(1 << 16))
    return digest.hexdigest()


def content_hashes(
    folders: Mapping[str, Any], files: Mapping[str, Any] | None = None
) -> dict[str, str | None]:
    """Returns hashes of the folders and files that a job depends on, as `<name>.sha256`.

    Args:
        folders: Paths or None by name, see `fingerprint`. The name of a model of the hub is not a path; its hash is None,
            like that of another path that does not exist.
        files: Paths or None by name, see `digest`.
    """
    kinds = (fingerprint, folders), (digest, files or {})
    return {
        f"{name}.sha256": None if path is None else content_hash(pathlib.Path(path))
        for content_hash, paths in kinds
        for name, path in paths.items()
    }


# The default error for a file of a call with other settings.
_OTHER_SETTINGS = (
    "{path} is from a call with other settings ({changed}): choose another file, or remove that one"
)


class Progress(contextlib.ExitStack):
    """The results of a resumable job, one per line of a .jsonl file, and the settings that they depend on.

    A later call of the same job reads `values` and continues after the last of them. Use it as a context manager: the
    file is locked until it is closed, because two processes would mix their results.

    Args:
        path: The file; it is created if it does not exist.
        identity: All that a result depends on, as a JSON value.
        frozen: Further settings, which a later call takes over from the first one instead of its own.
        settings: A file for the identity; None puts it into the first line of `path`.
        refusal: The error for different settings; `{path}`, `{folder}` and `{changed}` are filled in.

    Attributes:
        values: The results so far, as they are read from the file.
        identity: The identity as it is read from the file.

    Raises:
        Busy: If another process works on the job.
        ValueError: If the file is not of such a job, or has results of other settings.
    """

    def __init__(
        self,
        path: pathlib.Path,
        identity: dict[str, Any],
        *,
        frozen: Mapping[str, Any] | None = None,
        settings: pathlib.Path | None = None,
        refusal: str = _OTHER_SETTINGS,
    ):
        super().__init__()
        self._frozen = dict(frozen or {})
        self.path, self.identity = path, json.loads(to_line(identity | self._frozen))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.enter_context(path.open("ab"))
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            try:
                lock(self._file)
            except BlockingIOError as error:
                rule = "wait for it or stop it, or choose another name"
                raise Busy(f"{path}: another process writes its results there: {rule}") from error
            self._begin(settings, refusal)
            stack.pop_all()

    def _begin(self, settings: pathlib.Path | None, refusal: str) -> None:
        """Reads what an earlier call has written, and writes the identity and whole lines."""
        path, lines = self.path, whole_lines(self.path)
        if settings is None:
            before, *self.values = lines or [self.identity]
        else:
            before = read_json(settings) if lines and settings.is_file() else self.identity
            self.values = lines
        if not isinstance(before, dict) or before.keys().isdisjoint(self.identity):
            raise ValueError(f"{path}: is not the file of an earlier call: choose another name")
        if self.values:
            self.identity |= {name: before.get(name) for name in self._frozen}
        # Other settings are accepted while there is no result: the first call may have been a mistake.
        if (changed := ", ".join(changes(before, self.identity))) and self.values:
            raise ValueError(refusal.format(path=path, folder=path.parent, changed=changed))
        if settings is not None:
            write_whole(settings, json.dumps(self.identity, indent=2, ensure_ascii=False) + "\n")
        with writing(path):
            # The file stays the same one, since it is locked: only what a killed process left at its end goes.
            whole = path.read_bytes().rfind(b"\n") + 1
            self._file.truncate(whole if self.values else 0)
            if not self.values and settings is None:
                self._write(to_line(self.identity))

    def _write(self, text: str) -> None:
        self._file.write(text.encode())
        self._file.flush()

    def add(self, values: Iterable[Any]) -> None:
        """Appends results.

        Raises:
            DiskError: If they cannot be written.
        """
        lines = [to_line(value) for value in values]
        with writing(self.path):
            self._write("".join(lines))
        self.values += map(json.loads, lines)


def whole_lines(path: pathlib.Path) -> list[Any]:
    """Returns the values in a .jsonl file; none if there is no such file.

    A last line without a newline is left out, because the process may have been killed while writing it.

    Raises:
        ValueError: For a line that is not JSON.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    try:
        return [parse_json(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path}: is not the file of an earlier call: {error}") from error


def changes(before: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    """Returns the names of the settings that differ between two calls, sorted."""
    return sorted(k for k in before | identity if before.get(k) != identity.get(k))


def to_line(value: Any, default: Callable[[Any], Any] = str) -> str:
    """Returns a line of a .jsonl file; `default` converts what JSON does not support, such as paths."""
    line = json.dumps(value, ensure_ascii=False, default=default)
    # Lone surrogates cannot be written in UTF-8, and are written as escapes, which are valid JSON.
    return line.encode(errors="backslashreplace").decode() + "\n"
