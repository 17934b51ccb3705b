"""Tests that batches of measurements run, and that their commands exist."""

import re
import subprocess
import sys

import pytest

from scripts import measure_batch
from scripts.measure_batch import BATCHES, Command


@pytest.fixture
def batch(monkeypatch):
    """A batch of commands that end well, badly, and not at all."""
    lines = "print(2 + 2)", "import nowhere", "import time; time.sleep(60)"
    commands = [
        Command(1 if "sleep" in line else 20, f'timeit -n 1 -r 1 "{line}"') for line in lines
    ]
    monkeypatch.setitem(BATCHES, "gates", commands)


def test_every_command_runs_whatever_became_of_the_last(batch, tmp_path, capsys):
    assert measure_batch.main(["gates", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().out
    assert re.findall(r"status (\d|ended)", said) == ["0", "1", "ended"]
    assert (tmp_path / "out/1.log").read_text().startswith("4")
    assert measure_batch.main(["gates", "--out", str(tmp_path / "out"), "--only", "1"]) == 0


def test_the_list_shows_the_variables_of_a_command(monkeypatch, capsys):
    monkeypatch.setitem(BATCHES, "gates", [Command(9, "timeit -n 1 pass", {"A_NAME": "1"})])
    assert measure_batch.main(["gates", "--list"]) == 0
    assert "1.   9 s  A_NAME=1 timeit -n 1 pass" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHES)
def test_every_option_of_a_command_exists(name):
    for command in BATCHES[name]:
        module, *rest = command.line.split()
        words = [rest[0]] if module == "qerl_jax" else []
        ask = [sys.executable, "-m", module, *words, *(rest[1:2] if words else []), "--help"]
        said = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
        for option in re.findall(r"--[a-z][\w.-]*", command.line):
            assert option in said, f"{module} {option}"
