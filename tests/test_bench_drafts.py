"""Tests the arithmetic of scripts/bench_drafts.py, and that it runs."""

import json
import sys

import numpy as np
import pytest

from qerl_jax.generation.scheduler import RowTokens
from scripts import bench_drafts


def row(tokens, logps):
    return RowTokens(0, np.array(tokens), np.array(logps, np.float32), "stop")


def test_differences_are_counted_up_to_the_first_other_token():
    expected = {0: row([1, 2, 3], [-1, -2, -3]), 1: row([4, 5], [-1, -1]), 2: row([1], [-1])}
    found = {
        0: row([1, 2, 3], [-1, -2.5, -3]),
        1: row([4, 6], [-1.25, -9]),
        2: row([1, 2], [-1, -1]),
    }
    said = bench_drafts.differences(found, expected)
    assert said == {
        "rows_that_differ": 2 / 3,
        "equal_before": 1.0,
        "mean_difference": pytest.approx(0.15),  # .5 and .25 of five tokens
        "largest_difference": 0.5,
    }
    assert bench_drafts.differences(expected, expected)["rows_that_differ"] == 0


@pytest.mark.slow
def test_the_trial_runs_on_a_cpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_drafts, "watchdog", lambda seconds: None)
    out = tmp_path / "rows.jsonl"
    options = "--least-limit 1 --limit 24 --rows 4 --groups 2 --generations 2 --repeats 1"
    command = ["bench_drafts", *options.split(), "--dtype", "float32", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    bench_drafts.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(each["rows"], each["arm"]) for each in rows] == [(4, arm) for arm in bench_drafts.ARMS]
    assert all(each["rows_that_differ"] == 0 and each["relative"] > 0 for each in rows)
    assert "| 4 | again |" in capsys.readouterr().out
