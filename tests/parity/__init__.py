"""Comparisons with libraries that need torch. They run in a process with an interpreter that has it."""

import functools
import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest


@functools.cache
def torch_python(*modules: str) -> str | None:
    """Returns the interpreter of QERL_TORCH_PYTHON, or this one, if it has torch, transformers and `modules`."""
    wanted = ("torch", "transformers", *modules)
    if not (named := os.environ.get("QERL_TORCH_PYTHON")):
        return sys.executable if all(map(importlib.util.find_spec, wanted)) else None
    find = (
        "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
    )
    return named if subprocess.run([named, "-c", find, *wanted]).returncode == 0 else None


def needs(library: str) -> None:
    """Skips the test if no interpreter with torch and a library is known."""
    if torch_python(library) is None:
        pytest.skip(f"no interpreter with torch and {library} is known")


def run(library: str, script: str, *paths: pathlib.Path) -> None:
    """Runs a script of this folder with the interpreter that has a library."""
    path = pathlib.Path(__file__).with_name(script)
    subprocess.run([torch_python(library), path, *map(str, paths)], check=True)


def transformers_logits(
    library: str, folder: pathlib.Path, tokens: np.ndarray, scratch: pathlib.Path
) -> np.ndarray:
    """Returns the logits that transformers, with a library that unpacks the weights, computes from a model folder."""
    np.save(scratch / "ids.npy", tokens.astype(np.int64))
    run(library, "model_logits.py", folder, scratch / "ids.npy", scratch / "out.npy")
    return np.load(scratch / "out.npy")
