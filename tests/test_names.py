"""Tests that names are the terms of the field: few are the short words that CONTRIBUTING lists as forbidden."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
TREES = ("qerl_jax", "pallas_kernels", "scripts", "examples")
# The rows of CONTRIBUTING's table of forbidden names.
FORBIDDEN = "each found place own given kept cut held made asked said".split()
# How many such names there may be. Lower it when there are fewer.
LIMIT = 23


def bindings(tree):
    """Yields every name that a module binds: of functions, classes, arguments, variables, fields and imports."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name


def forbidden(root=ROOT, trees=TREES):
    """Returns the forbidden names that are bound, with the path of each."""
    return [
        (str(path.relative_to(root)), name)
        for tree in trees
        for path in sorted((root / tree).rglob("*.py"))
        for name in bindings(ast.parse(path.read_text()))
        if name in FORBIDDEN
    ]


def test_bindings_of_every_kind_are_counted(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "module.py").write_text(
        "def found(own, *, cut=(given := 1)): pass\n"
        "class held:\n    kept: int\n"
        "self.place = [each for each in range(3)]\n"
        "made, (asked, other) = 1, (2, 3)\n"
        "print(said, self.own)\n"  # uses, which bind nothing
    )
    names = [name for _, name in forbidden(tmp_path, ("tree",))]
    assert sorted(names) == sorted({*FORBIDDEN} - {"said"})


def test_contributing_lists_the_forbidden_names():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("| not | but |\n| --- | --- |\n")[2].partition("\n\n")[0]
    assert re.findall(r"(?m)^\| `(\w+)` \| .+ \|$", table) == FORBIDDEN


def test_few_names_are_forbidden_ones():
    names = forbidden()
    assert len(names) <= LIMIT, names
