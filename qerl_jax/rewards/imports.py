"""Imports Python objects by path, and finds the path of an object."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import sysconfig
import traceback
from types import ModuleType
from typing import Any

from qerl_jax.system import files
from qerl_jax.system.checked import require

# Folders of this package and of libraries: code elsewhere is the user's.
_OURS = str(pathlib.Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


def require_file(path: str, field: str, value: str) -> None:
    """Checks that a path that ends in .py is an existing file.

    Raises:
        ConfigError: If it is not; the error names the field and its value.
    """
    is_there = not path.endswith(".py") or os.path.isfile(path)
    require(is_there, field, value, f"there is no file {os.path.abspath(path)}")


def module(path: str) -> ModuleType:
    """Imports "package.module" or "folder/file.py".

    Raises:
        Exception: Whatever the import raises.
    """
    if not path.endswith(".py"):
        return importlib.import_module(path)
    # The module's name is the file's path, so that a file math.py does not hide another module of that name. Dots
    # would mean packages.
    spec = importlib.util.spec_from_file_location(os.path.abspath(path).replace(".", "_"), path)
    assert spec is not None and spec.loader is not None, path  # as for every path that ends in .py
    loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def attribute(path: str) -> Any:
    """Returns the object that "package.module:name" or "folder/file.py:name" names.

    Raises:
        ValueError: If there is no such object, or it cannot be imported.
    """
    file, _, name = path.rpartition(":")
    try:
        return functools.reduce(getattr, name.split("."), module(file))
    except Exception as error:
        raise ValueError(f"could not import {path!r}: {type(error).__name__}: {error}") from error


def path_of(thing: Any) -> str | None:
    """Returns the path from which another process can import a function or class; None if it cannot."""
    name = getattr(thing, "__qualname__", "<")
    module_name = getattr(thing, "__module__", "__main__")
    # The module of a file has an absolute path as name, which cannot be imported. Importing the file again would
    # make another object.
    if "<" in name or module_name == "__main__" or os.path.isabs(module_name):
        return None
    try:
        return f"{module_name}:{name}" if attribute(f"{module_name}:{name}") is thing else None
    except ValueError:
        return None


def source_hash(path: str) -> str | None:
    """Returns the SHA-256 of the user's file that defines "package.module:name" or "folder/file.py:name".

    It is of the whole file, because a function may call others in it. It is None for code of this package or of a
    library, for a stock name, and for an object defined in a script or a notebook.
    """
    file_name, _, _ = path.rpartition(":")
    of_module = getattr(sys.modules.get(file_name), "__file__", None)
    file = file_name if file_name.endswith(".py") else of_module
    if file is None or file_name == "__main__":
        return None
    absolute = pathlib.Path(file).absolute()
    is_users = not any(map(absolute.is_relative_to, (_OURS, *_LIBRARIES)))
    return files.digest(absolute) if is_users else None


def code_hash(thing: Any) -> str | None:
    """Returns the SHA-256 of the source of a function that a script or a notebook defines; None if it cannot be read.

    Other functions that it calls are not part of it.
    """
    try:
        return hashlib.sha256(inspect.getsource(thing).encode()).hexdigest()
    except (OSError, TypeError):  # a built-in, or typed into a shell
        return None


def place_of(error: BaseException) -> str | None:
    """Returns the last line of user code in an error's traceback, as "file.py:12, in name"; None if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_OURS, *_LIBRARIES, "<frozen")):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None
