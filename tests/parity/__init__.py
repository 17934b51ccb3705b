"""Comparisons with libraries that need torch. They run in a process with an interpreter that has it."""

import functools
import importlib.util
import os
import subprocess
import sys


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
