"""Tests that the places named in docs/where-is.md hold what the page says."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PLACES = re.findall(
    r"^\| \d+ \| (.+?) \| `(\w+)` in `(.+?)` \|$",
    (ROOT / "docs" / "where-is.md").read_text(),
    re.MULTILINE,
)


def test_there_are_twenty_things():
    assert len(PLACES) == 20


@pytest.mark.parametrize(("what", "name", "path"), PLACES)
def test_a_thing_is_where_the_page_says(what, name, path):
    assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), what
