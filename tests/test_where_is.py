"""Tests that the files named in docs/where-is.md define what the page says."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "where-is.md").read_text()
THINGS = re.findall(r"^\| (\d+) \| (.+?) \| `(\w+)` in `(.+?)` \|$", PAGE, re.MULTILINE)


def test_every_thing_is_numbered():
    assert [int(number) for number, *_ in THINGS] == list(range(1, 1 + len(THINGS)))
    assert len(THINGS) == PAGE.count("\n| ") - 2 >= 30


@pytest.mark.parametrize(("what", "name", "path"), [thing[1:] for thing in THINGS])
def test_a_thing_is_defined_where_the_page_says(what, name, path):
    defined = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                defined.add(node.name)
            case (
                ast.Assign(targets=[ast.Name(id=target)])
                | ast.AnnAssign(target=ast.Name(id=target))
            ):
                defined.add(target)
    assert name in defined, what
