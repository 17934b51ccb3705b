"""Reads safetensors files through a memory map, after checking them completely, and writes them tensor by tensor.

The safetensors package checks that the tensors of a file cover its data without gaps, so their offsets follow from
their order and sizes. The package cannot read float8 into NumPy, and writes only tensors that are all in memory. So
this module reads and writes the bytes itself.
"""

import json
import math
import mmap
import pathlib
import re
import reprlib
from collections.abc import Callable, Mapping

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from qerl_jax.checkpoint.checksum import to_device
from qerl_jax.system.files import read_json

# By the names that the files have for them.
DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_TYPES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_WRITTEN_AT_ONCE = 2**26


class SafetensorsError(ValueError):
    """Raised for a checkpoint file that is missing, cut short, or differs from its index."""


class Tensors(dict[str, np.ndarray]):
    """The tensors of a folder's safetensors file, or of its shards with an index, by name.

    Each is a view of a memory-mapped file, so its bytes are read from disk on use. To ask for a tensor that is not
    there raises a SafetensorsError.
    """

    def __init__(self, folder: str | pathlib.Path, stem: str = "model"):
        """Opens every file and checks that all tensors are there.

        Args:
            folder: A folder with STEM.safetensors, or else with STEM.safetensors.index.json and its shards.
            stem: STEM, the first part of the file names; other files in the folder are ignored.

        Raises:
            SafetensorsError: If a file is missing, broken or differs from the index; the error names it.
        """
        super().__init__()
        self._files: dict[str, str] = {}
        self._folder = pathlib.Path(folder)
        single = pathlib.Path(folder) / f"{stem}.safetensors"
        index = single.with_name(f"{single.name}.index.json")
        # The single file comes first: transformers leaves an old index when it saves a model over one with shards.
        if single.is_file():
            self._open(single)
        elif index.is_file():
            self._open_shards(index)
        else:
            pickled = [*single.parent.glob("*.bin"), *single.parent.glob("*.pt*")]
            more = "; pickled weights are not read" if pickled else ""
            raise SafetensorsError(f"no {single.name}, nor an index of shards, in {folder}{more}")

    def __missing__(self, name: str) -> np.ndarray:
        others = f"; it has {min(self)} and {len(self) - 1} more" if self else ""
        raise SafetensorsError(f"{self._folder}: has no tensor {name}{others}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, without reading it."""
        return self[name].shape

    def type(self, name: str) -> str:
        """Returns safetensors' name of a tensor's dtype, such as "BF16"."""
        return _TYPES[self[name].dtype]

    def path(self, name: str) -> pathlib.Path:
        """Returns the file that holds a tensor."""
        return self._folder / self._files[name]

    def on_device(self, name: str) -> jax.Array:
        """Returns a tensor on the device; on a CPU it may be the mapped file itself."""
        return to_device(self[name], name)

    def _open_shards(self, index: pathlib.Path) -> None:
        """Opens the files of an index, and checks that each holds the tensors that the index lists for it."""
        try:
            weight_map = read_json(index)["weight_map"]
            files = sorted(set(weight_map.values()), key=str)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SafetensorsError(f"{index}: not an index with a weight_map: {error!r}") from error
        for file in files:
            if not re.fullmatch(r"[^/\\\0]{1,200}\.safetensors", str(file)):
                rule = "which is no safetensors file of its own folder"
                raise SafetensorsError(f"{index}: names {reprlib.repr(file)}, {rule}")
        paths = [index.with_name(name) for name in files]
        if missing := [path.name for path in paths if not path.is_file()]:
            names = f"{len(missing)} of {len(paths)} shards are missing: {', '.join(missing[:4])}"
            raise SafetensorsError(f"{index}: {names}")
        for path in paths:
            self._open(path)
        if absent := sorted(weight_map.keys() - self.keys()):
            more = f"({len(absent)} tensors are missing)"
            raise SafetensorsError(f"{index}: no shard holds {absent[0]} {more}")
        for name, file in sorted(weight_map.items()):
            if self._files[name] != file:
                raise SafetensorsError(f"{index}: {name} is in {self._files[name]}, not in {file}")

    def _open(self, path: pathlib.Path) -> None:
        """Maps a file into memory, and adds its tensors, which are stored without gaps."""
        try:
            with safe_open(path, framework="numpy") as file:
                slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
                header = [(name, s.get_dtype(), s.get_shape()) for name, s in slices]
        except SafetensorError as error:
            raise SafetensorsError(
                f"{path}: {path.stat().st_size} bytes, truncated or not a safetensors file: {error}"
            ) from error
        data = np.memmap(path, mode="r")
        end = 8 + int(data[:8].view("<u8")[0])  # a length, the header, then the tensors
        for name, dtype, shape in header:
            if dtype not in DTYPES:
                known = f"known are {', '.join(DTYPES)}"
                raise SafetensorsError(f"{path}: {name} has the type {dtype}; {known}")
            if name in self:
                raise SafetensorsError(f"{path}: {name} is in {self._files[name]} too")
            self[name] = np.ndarray(shape, DTYPES[dtype], data, end)
            self._files[name] = path.name
            end += self[name].nbytes


def write(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file, completely or not at all.

    Args:
        path: The new file; an existing one is replaced.
        tensors: Arrays by name.

    Raises:
        ValueError: If the format does not support the dtype of an array.
    """
    partial = path.with_name(f".{path.name}.partial")
    table = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    _write_file(partial, table, tensors.__getitem__)
    partial.replace(path)


def write_shards(
    folder: str | pathlib.Path,
    table: dict[str, tuple[np.dtype, tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
    *,
    stem: str = "model",
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes tensors one by one, in the order of the table, to STEM.safetensors, or to shards with an index.

    Host memory holds one tensor at a time.

    Args:
        folder: An existing folder without files of that stem.
        table: Dtype and shape of each tensor by name.
        read: Maps a name to its tensor; called once for each.
        stem: STEM, the first part of the file names.
        shard_bytes: Maximum bytes of the tensors in a file, unless a single tensor is larger.

    Raises:
        ValueError: If a tensor differs from the table, or the format does not support its dtype.
    """
    sizes = {n: math.prod(shape) * np.dtype(dtype).itemsize for n, (dtype, shape) in table.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(map(sizes.get, shards[-1])) + size > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    index = pathlib.Path(folder) / f"{stem}.safetensors.index.json"
    if len(shards) == 1:
        _write_file(index.with_name(f"{stem}.safetensors"), table, read)
        return
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(index.with_name(file), {name: table[name] for name in names}, read)
        weight_map |= dict.fromkeys(names, file)
    total = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    index.write_text(json.dumps(total, indent=2) + "\n")


def _write_file(path, table, read) -> None:
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in table.items():
        if np.dtype(dtype) not in _TYPES:
            raise ValueError(f"{name}: safetensors files hold no {np.dtype(dtype)}")
        start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        offsets, dtype_name = [start, end], _TYPES[np.dtype(dtype)]
        header[name] = {"dtype": dtype_name, "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, shape) in table.items():
            tensor = np.asarray(read(name), order="C")
            if (tensor.dtype, tensor.shape) != (np.dtype(dtype), tuple(shape)):
                rule = f"the table says {dtype} of {shape}"
                raise ValueError(f"{name}: got {tensor.dtype} of shape {tensor.shape}; {rule}")
            data = tensor.reshape(-1).view(np.uint8)
            for first in range(0, data.size, _WRITTEN_AT_ONCE):
                file.write(data[first : first + _WRITTEN_AT_ONCE].data)
                _let_go(data)


def _let_go(array) -> None:
    """Releases the memory pages of a mapped file, which would count as memory of this process."""
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "base", None)
    if array is not None:
        array.madvise(mmap.MADV_DONTNEED)
