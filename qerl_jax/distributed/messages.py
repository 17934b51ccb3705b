"""Serializes messages between the processes of a run.

Messages consist of numbers, texts, bytes, arrays, lists, tuples, dictionaries, and instances of registered classes
(`sent`). Decoding runs no code from a message, unlike pickle.
"""

import dataclasses
from typing import Any

import msgpack
import numpy as np

_PLAIN = (bool, int, float, str, bytes, type(None))
_classes: dict[str, type] = {}


def sent[T](cls: type[T]) -> type[T]:
    """Registers a dataclass or named tuple whose instances can be sent (a decorator); its name must be unique."""
    _classes[cls.__name__] = cls
    return cls


def encode(value: Any) -> bytes:
    """Encodes a value as bytes; arrays on a device are copied to the host.

    Raises:
        TypeError: For a value of another type than those that the module's docstring lists.
    """
    return msgpack.packb(_as_plain(value), unicode_errors="surrogatepass")


def decode(data: bytes) -> Any:
    """Decodes bytes that `encode` returned; arrays become NumPy arrays.

    Raises:
        ValueError: If they are not from `encode`, or contain an unknown class.
    """
    return _restored(msgpack.unpackb(data, unicode_errors="surrogatepass"))


def _as_plain(value: Any) -> Any:
    if type(value) is int and not -(2**63) <= value < 2**64:
        return ["int", hex(value)]
    if type(value) in _PLAIN:
        return value
    name = type(value).__name__
    if _classes.get(name) is type(value):
        parts = value
        if dataclasses.is_dataclass(value):
            parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return ["class", name, [_as_plain(part) for part in parts]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_as_plain(item) for item in value]]
    if type(value) is dict:
        return ["dict", [[_as_plain(key), _as_plain(item)] for key, item in value.items()]]
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if not array.dtype.hasobject:
            return ["array", array.dtype.name, list(array.shape), array.tobytes()]
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _restored(plain: Any) -> Any:
    match plain:
        case ["int", str(digits)]:
            return int(digits, 16)
        case ["array", str(name), list(shape), bytes(data)]:
            return np.frombuffer(data, np.dtype(name)).reshape(shape).copy()
        case ["list", list(items)]:
            return [_restored(item) for item in items]
        case ["tuple", list(items)]:
            return tuple(_restored(item) for item in items)
        case ["dict", list(items)]:
            return {_restored(key): _restored(item) for key, item in items}
        case ["class", str(name), list(parts)] if name in _classes:
            return _classes[name](*map(_restored, parts))
        case _ if type(plain) in _PLAIN:
            return plain
    raise ValueError(f"no message of another process: {str(plain)[:100]}")
