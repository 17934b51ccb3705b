"""Reads recorded arrays: safetensors files under tests/golden."""

import json
import pathlib

import ml_dtypes
import numpy as np

GOLDEN = pathlib.Path(__file__).parent / "golden"

_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
}


def load(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a safetensors file by name, read-only; a relative path starts at tests/golden.

    The numpy loader of safetensors cannot read float8_e4m3fn, hence this one.
    """
    data = (GOLDEN / path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)

    def array(entry: dict) -> np.ndarray:
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[start + begin : start + end], _DTYPES[entry["dtype"]])
        return values.reshape(entry["shape"])

    return {name: array(entry) for name, entry in header.items()}
