"""Tests that the committed notebooks are ready for Colab, ran from top to bottom, and hold no personal paths.

`make notebooks` runs them.
"""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ADDRESS = r"(?m)^repo_url: https://github\.com/(\S+)$"
REPOSITORY = re.search(ADDRESS, (ROOT / "mkdocs.yml").read_text())[1]
EVERY = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path):
    return json.loads(path.read_text())["cells"]


def source(cell):
    return "".join(cell["source"])


def test_there_are_four():
    assert len(NOTEBOOKS) == 4


@EVERY
def test_a_notebook_begins_with_a_badge_what_it_needs_and_an_install_cell(path):
    head, install = cells(path)[:2]
    place = f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/notebooks/{path.name}"
    assert place in source(head) and "memory" in source(head)
    assert "not run there" in source(head)
    assert f"git+https://github.com/{REPOSITORY}" in source(install)


@EVERY
def test_a_notebook_was_run_from_top_to_bottom_and_no_cell_failed(path):
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not [out for cell in code for out in cell["outputs"] if out["output_type"] == "error"]


@EVERY
def test_no_output_names_a_place_on_somebodys_machine(path):
    outputs = [out for cell in cells(path) for out in cell.get("outputs", ())]
    parts = [part for out in outputs for part in (out, out.get("data", {}))]
    values = [value for part in parts for value in part.values()]
    texts = ["".join(value) for value in values if isinstance(value, list | str)]
    assert not [text for text in texts if re.search(r"(^|[\s'\">(])/(home|root|tmp|work)/", text)]
