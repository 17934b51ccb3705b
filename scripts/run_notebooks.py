"""Runs the notebooks from top to bottom on this machine: `python -m scripts.run_notebooks [NAME ...] [--write]`.

Each runs in an empty folder and a kernel of its own. Without names these are all but those that are run by hand (which
need weights that are not in the package). The exit status is 1 if a cell failed or all took more than ten minutes of the
processor, which other work on the machine does not change; a cell may take twice that on the clock.
`--write` keeps the new outputs in the notebooks; paths of this machine in them are made neutral.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import resource
import sys
import tempfile
import time

import nbclient
import nbformat

NOTEBOOKS = pathlib.Path(__file__).parents[1] / "notebooks"
BUDGET = 600  # seconds of the processor


def by_hand(notebook: nbformat.NotebookNode) -> bool:
    """Whether a notebook is run by a person, and not by CI."""
    return notebook.metadata["qerl"]["by_hand"]


def run(notebook: nbformat.NotebookNode, folder: str, seconds: float) -> None:
    """Runs all cells in a folder; the notebook has their outputs then.

    Raises:
        nbclient.exceptions.CellExecutionError: When a cell fails.
        TimeoutError: When a cell takes longer than the seconds.
    """
    client = nbclient.NotebookClient(
        notebook,
        timeout=seconds,
        resources={"metadata": {"path": folder}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()


def neutral(notebook: nbformat.NotebookNode, folder: str) -> None:
    """Takes what differs from machine to machine out of a notebook that has run."""
    places = {folder: "", str(NOTEBOOKS.parent): "", sys.prefix: "", str(pathlib.Path.home()): "~"}
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "text" in output:
                for place, name in places.items():
                    output.text = output.text.replace(f"{place}/", f"{name}/" if name else "")
                output.text = re.sub(r"/tmp/ipykernel_\d+/", "", output.text)
    notebook.metadata["language_info"] = {"name": "python"}


def main(argv: list[str] | None = None) -> int:
    """Runs notebooks, and says how long each took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", help="such as quickstart; absent means all that CI runs"
    )
    parser.add_argument("--write", action="store_true", help="keep the new outputs")
    options = parser.parse_args(argv)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        if path.stem not in options.names and (options.names or by_hand(notebook)):
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, folder, 2 * BUDGET)
            neutral(notebook, folder)
        print(f"{path.name}: {time.monotonic() - started:.0f} s", flush=True)
        if options.write:
            nbformat.write(notebook, path)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = used.ru_utime + used.ru_stime
    print(f"in all {took:.0f} s of the processor, of {BUDGET}")
    return int(took > BUDGET and not options.names)


if __name__ == "__main__":
    sys.exit(main())
