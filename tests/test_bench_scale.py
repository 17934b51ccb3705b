"""Tests the benchmark of several devices: each row sees its devices, and rows that must agree are compared."""

import json
import os
import subprocess
import sys

import pytest

from scripts import bench_scale


def test_a_row_sees_so_many_of_the_devices_that_are_offered(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    assert bench_scale.environment(False, 2)["CUDA_VISIBLE_DEVICES"] == "3,5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert bench_scale.environment(False, 4)["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert "device_count=4" in bench_scale.environment(True, 4)["XLA_FLAGS"]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, None),
        ({"sampled": 9}, "9 tokens"),
        ({"mismatch": 0.3}, "differ by 0.3 nats instead of 0.1"),
        ({"mismatch": 0.11}, None),
    ],
)
def test_rows_that_do_not_compute_the_same_are_found(changes, found):
    first = {"sampled": 8, "mismatch": 0.1}
    text = bench_scale.disagreement(first | changes, first)
    assert (text is None) if found is None else found in text


@pytest.mark.slow
@pytest.mark.process
def test_rows_of_one_and_two_virtual_devices_agree(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "scripts.bench_scale", "--tiny", "--devices", "1", "2"]
    command += ["--how", "strong", "--rollouts", "3", "--timeout", "900", "--out", str(out)]
    done = subprocess.run(
        command, cwd=bench_scale.ROOT, env=os.environ | {}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    one, two = map(json.loads, out.read_text().splitlines())
    assert (one["devices"], two["devices"]) == (1, 2) and two["sampled"] == one["sampled"]
    assert two["all_reduce_s"] > 0 and two["tokens_per_s"] > 0


@pytest.mark.slow
@pytest.mark.process
def test_decoding_is_timed_on_one_and_on_two_virtual_devices(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "scripts.bench_scale", "--tiny", "--devices", "1", "2"]
    command += ["--mesh", "tensor", "--rows", "2", "--out", str(out)]
    done = subprocess.run(command, cwd=bench_scale.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    one, two = map(json.loads, out.read_text().splitlines())
    assert (one["devices"], two["devices"]) == (1, 2) and one["reduce_s"] == 0 < two["reduce_s"]
    assert two["times"] == pytest.approx(one["step_s"] / two["step_s"])
