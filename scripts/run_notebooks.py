"""Runs the notebooks from top to bottom on this machine: `python -m scripts.run_notebooks [NAME ...] [--write]`.

Each notebook runs in an empty folder with its own kernel; all share compiled programs. Without names it runs all but those
that need weights that are not in the package (`SMOLLM2=FOLDER python -m scripts.run_notebooks smollm2`). The
exit status is 1 if a cell failed, or if all notebooks took more than ten minutes of processor time, which does not
depend on other work on the machine. A cell may take twice that in wall time. `--write` saves the new outputs in the
notebooks, with paths of this machine replaced by neutral ones.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import resource
import sys
import tempfile
import time

import nbclient
import nbformat

NOTEBOOKS = pathlib.Path(__file__).parents[1] / "notebooks"
BUDGET = 600  # seconds of processor time


def run(notebook: nbformat.NotebookNode, folder: str, seconds: float) -> None:
    """Runs all cells in a folder. The notebook then has their outputs. A cell that fails or takes too long raises."""
    how = {"record_timing": False, "coalesce_streams": True, "timeout": seconds}
    resources = {"metadata": {"path": folder}}
    nbclient.NotebookClient(notebook, resources=resources, **how).execute()


def neutral(notebook: nbformat.NotebookNode, folder: str) -> None:
    """Removes what differs from machine to machine from the outputs of a notebook."""
    places = {folder: "", str(NOTEBOOKS.parent): "", sys.prefix: "", str(pathlib.Path.home()): "~"}

    def without_places(text: str) -> str:
        for position, name in places.items():
            text = text.replace(f"{position}/", f"{name}/" if name else "")
        return re.sub(r"/tmp/ipykernel_\d+/", "", text)

    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "text" in output:
                output.text = without_places(output.text)
            # The view of a run is data, not text.
            data = output.get("data", {})
            data |= {kind: without_places(data[kind]) for kind in data if kind.startswith("text/")}
    notebook.metadata["language_info"] = {"name": "python"}


def main(argv: list[str] | None = None) -> int:
    """Runs notebooks and prints how long each took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "names such as quickstart; default: all that CI runs"
    parser.add_argument("names", nargs="*", help=text)
    parser.add_argument("--write", action="store_true", help="save the new outputs")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as programs:
        # Most time is compilation, and the notebooks train the same small model.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", programs)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        run_all(options.names, write=options.write)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = used.ru_utime + used.ru_stime
    print(f"{took:.0f} s of processor time in total; at most {BUDGET} s are allowed")
    return int(took > BUDGET and not options.names)


def run_all(names: list[str], write: bool) -> None:
    """Runs the notebooks of these names, or all that CI runs, and prints how long each took."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        if path.stem not in names and (names or notebook.metadata["qerl"]["by_hand"]):
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, folder, 2 * BUDGET)
            neutral(notebook, folder)
        print(f"{path.name}: {time.monotonic() - started:.0f} s", flush=True)
        if write:
            nbformat.write(notebook, path)


if __name__ == "__main__":
    sys.exit(main())
