"""Safetensors files: read tensor by tensor through a memory map, checked whole before the first is read; and written.

The safetensors package reads neither bfloat16 nor float8 into numpy; the format is a length, a JSON
header and bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import shutil
import struct
from collections.abc import Mapping

import ml_dtypes
import numpy as np

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "I8": np.int8,
    "BOOL": np.bool_,
}


class SafetensorsError(ValueError):
    """A checkpoint file that is missing, cut short or not what its index says."""


class Tensors:
    """The tensors of a folder's safetensors file, or of its shards with an index, by name, read on demand."""

    def __init__(self, folder: str | pathlib.Path, stem: str = "model"):
        """Opens every file and checks that all of its tensors are there.

        Args:
            folder: Holds STEM.safetensors, or STEM.safetensors.index.json and what it names.
            stem: Other files of the folder are left alone.

        Raises:
            SafetensorsError: Naming the file, what was expected and what was found.
        """
        folder = pathlib.Path(folder)
        self._entries: dict[str, tuple[np.memmap, str, tuple[int, ...], int, int]] = {}
        index = folder / f"{stem}.safetensors.index.json"
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
            except (ValueError, TypeError, KeyError) as error:
                raise SafetensorsError(
                    f"{index}: not an index with a weight_map: {error!r}"
                ) from error
            paths = [folder / name for name in sorted(set(weight_map.values()))]
        else:
            paths = [folder / f"{stem}.safetensors"]
            if not paths[0].is_file():
                raise SafetensorsError(
                    f"no {stem}.safetensors, nor an index of shards, in {folder}"
                )
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise SafetensorsError(
                f"{index}: {len(missing)} of {len(paths)} shards are missing: {', '.join(missing[:4])}"
            )
        for path in paths:
            self._open(path)
        if index.is_file():
            absent = sorted(set(weight_map) - set(self._entries))
            if absent:
                raise SafetensorsError(
                    f"{index}: no shard holds {absent[0]} ({len(absent)} tensors are missing)"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self):
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._entry(name)[2]

    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor; its bytes are read from disk when they are used."""
        data, dtype, shape, start, end = self._entry(name)
        return data[start:end].view(_DTYPES[dtype]).reshape(shape)

    def _entry(self, name):
        if name not in self._entries:
            raise SafetensorsError(f"the checkpoint has no tensor {name}")
        return self._entries[name]

    def _open(self, path: pathlib.Path) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (size,)
            if 8 + length > size:
                raise SafetensorsError(
                    f"{path}: {size} bytes; its header alone needs {8 + length}: truncated"
                )
            try:
                header = json.loads(file.read(length))
                header.pop("__metadata__", None)
                entries = [
                    (
                        name,
                        entry["dtype"],
                        tuple(entry["shape"]),
                        8 + length + start,
                        8 + length + end,
                    )
                    for name, entry in header.items()
                    for start, end in [entry["data_offsets"]]
                ]
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise SafetensorsError(f"{path}: not a safetensors file: {error!r}") from error
        data = np.memmap(path, mode="r")
        for name, dtype, shape, start, end in entries:
            if dtype not in _DTYPES:
                raise SafetensorsError(
                    f"{path}: {name} has the type {dtype}; known are {', '.join(_DTYPES)}"
                )
            if end > size:
                raise SafetensorsError(
                    f"{path}: {size} bytes, but {name} ends at byte {end}: truncated"
                )
            if end - start != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
                raise SafetensorsError(
                    f"{path}: {name} of shape {shape} and type {dtype} does not fill its bytes"
                )
            self._entries[name] = (data, dtype, shape, start, end)


def write(path: str | pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a file whose bytes go from the arrays to the disk uncopied; it appears whole or not at all.

    Raises:
        ValueError: When an array has a type that the format does not know.
    """
    names, header, end = {np.dtype(value): key for key, value in _DTYPES.items()}, {}, 0
    for name, array in tensors.items():
        if array.dtype not in names:
            raise ValueError(f"{name}: safetensors files hold no {array.dtype}")
        header[name] = {
            "dtype": names[array.dtype],
            "shape": array.shape,
            "data_offsets": (end, end + array.nbytes),
        }
        end += array.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)
    path = pathlib.Path(path)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    os.replace(partial, path)


@contextlib.contextmanager
def whole_folder(folder: str | pathlib.Path, marker: str, kind: str):
    """A folder to fill, which takes the place of `folder` when the block ends without an error."""
    folder = pathlib.Path(folder).resolve()
    if folder.exists() and not (folder / marker).is_file() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: holds something that is no {kind}; it would be deleted")
    partial, previous = (
        folder.with_name(f".{folder.name}.{suffix}") for suffix in ("partial", "previous")
    )
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(previous, ignore_errors=True)
        if folder.exists():
            os.replace(folder, previous)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(previous, ignore_errors=True)
