"""Tests that the project does not outgrow its budget of lines of Python; `make lines` prints them.

Whoever raises a number gives the reason in the commit.
"""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# The numbers of "The house, smaller"; what "Right for every checkpoint" added to them (rules for every tensor, end and
# message, rotations, judges, locks); and what "From the command to the result" did (rows that go on in the next rollout,
# evaluations as one queue that continues, programs that are stored and traced by other processes, kernels that compile
# before them, GGUF on the device, accuracies compared by seed); "The RL and the noise" (doses, estimators, streams); the
# comparison of a base on the device with its files; rows in several tiles and W4A8's numbers; the study on a real Qwen2.5.
BUDGET = {
    "qerl_jax": 31_000 + 1_700 + 2_300 + 500 + 200,
    "pallas_kernels": 12_350 + 300,
    "scripts and examples": 7_200 + 300 + 200 + 1_800,
    "tests": 32_000 + 1_700 + 1_200 + 700 + 1_100,
    "all": 83_000 + 3_400 + 3_700 + 1_400 + 3_300,
}


def lines():
    """Returns the lines of Python of each tree, by the names of the budget."""
    counts = dict.fromkeys(BUDGET, 0)
    for name in BUDGET:
        for tree in name.split(" and "):
            for path in (ROOT / tree).rglob("*.py"):
                counts[name] += len(path.read_text().splitlines())
    return counts | {"all": sum(counts.values())}


@pytest.mark.parametrize("tree", BUDGET)
def test_a_tree_is_within_its_budget(tree):
    assert lines()[tree] <= BUDGET[tree]


@pytest.mark.parametrize("tree", ["qerl_jax", "scripts", "examples", "pallas_kernels"])
def test_no_function_is_longer_than_100_lines_and_none_of_kernels_than_120(tree):
    most = 120 if tree == "pallas_kernels" else 100
    for path in (ROOT / tree).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < most, f"{path}: {node.name}"


if __name__ == "__main__":
    for tree, count in lines().items():
        sys.stdout.write(f"{tree:22}{count:8,} lines of {BUDGET[tree]:,}\n")
