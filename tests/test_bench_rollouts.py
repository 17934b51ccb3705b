"""Tests the scripts that time rollouts and steps: several rows at a time, and the share of a card's memory."""

import json
import subprocess
import sys
import types

import pytest

from scripts import bench_rollouts, bench_step
from tests.test_bench_drafts import SMALL


@pytest.mark.slow
def test_rows_compile_together_and_one_that_fails_costs_only_itself(tmp_path, monkeypatch, capfd):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    out = tmp_path / "rows.jsonl"
    options = ["--rank", "2", "4", "--arms", "nvfp4", "bfloat16", "--batch", "2", "--together", "3"]
    models = ["--model", str(tmp_path), str(tmp_path / "nowhere")]
    argv = ["bench_rollouts", *models, *options, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    assert bench_rollouts.main() == 1
    rows = list(map(json.loads, out.read_text().splitlines()))
    assert [(row["rank"], row["arm"]) for row in rows] == [
        (2, "nvfp4"),
        (2, "bfloat16"),
        (4, "nvfp4"),
        (4, "bfloat16"),
    ]
    assert all(row["step"] > 0 and row["together"] == 3 for row in rows)
    said = capfd.readouterr().out
    assert "nowhere, rank 4, bfloat16 2: failed" in said
    assert "rank 2, nvfp4 at 2: " in said and "times as fast as bfloat16" in said


@pytest.mark.slow
def test_mixed_lengths_are_measured_for_each_number_of_slots_and_rows(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    out = tmp_path / "rows.jsonl"
    options = ["--mixed", "--slots", "8", "16", "--rows", "16", "24", "--rank", "2", "--together"]
    argv = ["bench_rollouts", "--model", str(tmp_path), *options, "2", "--arms", "nvfp4"]
    monkeypatch.setattr(sys, "argv", [*argv, "--out", str(out)])
    assert bench_rollouts.main() == 0
    rows = list(map(json.loads, out.read_text().splitlines()))
    assert [(row["slots"], row["rows"]) for row in rows] == [(8, 16), (8, 24), (16, 16), (16, 24)]
    assert all(row["mixed_tok_s"] > 0 and row["equal_tok_s"] > 0 for row in rows)


def test_a_row_that_takes_too_long_is_killed(monkeypatch):
    real = subprocess.Popen
    monkeypatch.setattr(
        bench_rollouts.subprocess,
        "Popen",
        lambda command, **traits: real(["sleep", "60"], **traits),
    )
    cases = [bench_rollouts.Case("7b", 32, "nvfp4", "8")]
    (done,) = bench_rollouts.measured(cases, timeout=0.2)
    assert done == (cases[0], [], -9)


@pytest.mark.parametrize(
    ("mebibytes", "share"),
    [(143771, 0.558), (81559, bench_step.MOST_SHARE)],  # an H200, an H100
)
def test_a_pool_is_a_share_of_this_cards_memory(monkeypatch, mebibytes, share):
    said = types.SimpleNamespace(stdout=f"{mebibytes}\n{mebibytes}\n")
    monkeypatch.setattr(bench_step.subprocess, "run", lambda *_, **__: said)
    assert bench_step.pool_share(78) == pytest.approx(share, abs=5e-4)
