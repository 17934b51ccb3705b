"""Tests the script that runs the kernels' tests under compute-sanitizer, with a tool that only pretends to look."""

import stat

import pytest

from scripts import sanitize_kernels
from tests.faults.harness import json_lines

PASSED = "1 passed in 3.21s\n========= "
FAILED = "Internal Sanitizer Error: it failed."
TOOL = """#!/bin/sh
[ "$2" = racecheck ] && kill -SEGV $$
echo "1 passed in 0.1s"
case "$*" in *broken*) echo "========= ERROR SUMMARY: 2 errors"; exit 9;; esac
echo "========= ERROR SUMMARY: 0 errors"
"""


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (0, PASSED + "ERROR SUMMARY: 0 errors\n", "clean"),
        (0, PASSED + "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "clean"),
        (9, PASSED + "ERROR SUMMARY: 3 errors\n", "3 found"),
        (0, PASSED + "RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n", "1 found"),
        (0, PASSED, "the tool has no summary: status 0"),
        (0, "1 skipped\n========= ERROR SUMMARY: 0 errors", "the test did not pass: status 0"),
        (-11, "", "the test did not pass: status -11"),
        (None, PASSED, "ended: no time left"),
        (
            9,
            f"========= {FAILED}\n========= RACECHECK SUMMARY: 1 hazard",
            f"the tool failed: {FAILED}",
        ),
    ],
)
def test_a_test_is_clean_only_if_it_passed_and_the_tool_has_looked(status, text, expected):
    assert sanitize_kernels.verdict(status, text) == expected


def test_each_test_runs_under_each_tool_and_one_that_breaks_the_tool_costs_only_itself(
    tmp_path, monkeypatch, capsys
):
    tool, out = tmp_path / "tool", tmp_path / "rows.jsonl"
    tool.write_text(TOOL)
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sanitize_kernels, "collected", lambda *_: ["a.py::good", "a.py::broken"])
    assert sanitize_kernels.main(["--program", str(tool), "--out", str(out), "--jobs", "2"]) == 1
    found = {(row["tool"], row["test"]): row["found"] for row in json_lines(out)}
    assert found == {
        ("memcheck", "a.py::good"): "clean",
        ("memcheck", "a.py::broken"): "2 found",
        ("racecheck", "a.py::good"): "the test did not pass: status -11",
        ("racecheck", "a.py::broken"): "the test did not pass: status -11",
    }
    assert "memcheck: 1 of 2 tests are clean" in capsys.readouterr().out
    good = ["--program", str(tool), "--tools", "memcheck"]
    monkeypatch.setattr(sanitize_kernels, "collected", lambda *_: ["a.py::good"])
    assert sanitize_kernels.main(good) == 0
    assert sanitize_kernels.main([*good, "--seconds", "0"]) == 1


def test_a_tool_that_is_not_installed_is_an_error_at_the_door(capsys):
    with pytest.raises(SystemExit):
        sanitize_kernels.main(["--program", "no-such-checker"])
    assert "no-such-checker: no such program" in capsys.readouterr().err


@pytest.mark.slow
def test_every_nth_test_for_a_gpu_of_each_file_is_chosen():
    files = ["tests/pallas_kernels/test_nvfp4_decode.py"]
    whole = sanitize_kernels.collected(files, "180-208", 1)
    assert len(whole) > 2 and all("180-208" in test for test in whole)
    assert sanitize_kernels.collected(files, "180-208", 2) == whole[::2]
