"""Compares two evaluations of the same problems by paired differences."""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from qerl_jax.evaluation import intervals
from qerl_jax.evaluation.summary import statistics
from qerl_jax.system import files


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of two policies on one set.

    Attributes:
        differences: For each estimate ("mean", "pass@4", ...) that of the first policy minus that of the second.
        changed: Names of the settings in which the two evaluations differ; only the policy should.
    """

    differences: dict[str, intervals.Interval]
    changed: list[str]


def compare(ours: str | pathlib.Path, theirs: str | pathlib.Path) -> dict[str, Comparison]:
    """Computes paired differences of two evaluations, on every set that both have finished.

    Args:
        ours: A folder that `benchmark.run` wrote, or that of one set in it.
        theirs: Another such folder.

    Raises:
        FileNotFoundError: If a folder holds no finished evaluation.
        ValueError: If they have no set in common, or a common set has other problems.
    """
    first, second = _finished(ours), _finished(theirs)
    common = [name for name in first if name in second]
    if not common:
        raise ValueError(f"no set in common: {sorted(first)} and {sorted(second)}")
    return {name: _compare(name, first[name], second[name]) for name in common}


def _records(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the record of each problem from the folder of a set."""
    path = folder / "problems.jsonl"
    records = files.whole_lines(path)
    for number, record in enumerate(records, 1):
        right = record.get("right") if isinstance(record, dict) else None
        if not isinstance(right, list) or not right or "gold" not in record:
            raise ValueError(f"{path}, row {number}: is not the result of an evaluation")
    if not records:
        raise ValueError(f"{path}: is not the result of an evaluation: it is empty")
    return records


def _compare(name: str, ours: pathlib.Path, theirs: pathlib.Path) -> Comparison:
    settings = [files.read_json(folder / "settings.json") for folder in (ours, theirs)]
    records = [_records(folder) for folder in (ours, theirs)]
    golds = [[record["gold"] for record in rows] for rows in records]
    if golds[0] != golds[1]:
        raise ValueError(f"{name}: {ours} and {theirs} are not of the same problems")
    samples = [len(rows[0]["right"]) for rows in records]
    first, second = map(statistics, records)
    differences = {}
    for kind, k in first:
        if (kind, k) in second:
            name = kind if kind == "mean" else f"{kind}@{k}"
            pair = (
                both[kind, k](np.arange(n))
                for both, n in zip((first, second), samples, strict=True)
            )
            differences[name] = intervals.paired_difference(*pair, samples=min(samples) // k)
    return Comparison(differences, files.changes(*settings))


def _finished(folder: str | pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the folders of finished sets, by name."""
    folder = pathlib.Path(os.path.abspath(folder))  # "." has no name
    summaries = [*folder.glob("summary.json")] or sorted(folder.glob("*/summary.json"))
    if not summaries:
        raise FileNotFoundError(f"no finished evaluation in {folder}")
    return {path.parent.name: path.parent for path in summaries}
