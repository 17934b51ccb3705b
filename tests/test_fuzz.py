"""Tests the fuzzing script: a sample of each target passes, and the script sees the faults that it looks for."""

import os
import random
import subprocess
import sys

import pytest

from tests.faults import fuzz


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_a_sample_of_inputs_is_read_or_refused_in_one_line(name):
    result = fuzz.trial(name, fuzz.TARGETS[name], 0, range(300))
    assert result.faults == {} and 5 < result.read <= 300


def raises(_):
    raise KeyError("left over")


def loops(_):
    while True:
        pass


def writes(_):
    with open(os.devnull, "w"):
        pass


def reads_elsewhere(_):
    with open("/etc/hostname"):
        pass


FAULTS = {
    raises: "KeyError: 'left over' (test_fuzz.py:",
    loops: "was not finished after 0.04 s",
    writes: "did open('/dev/null'",
    reads_elsewhere: "did open('/etc/hostname'",
    lambda _: eval("1"): "did ",
    lambda _: exec("1"): "did ",
    lambda _: subprocess.run(["true"], check=True): "did ",
}


@pytest.mark.parametrize("feed", FAULTS)
def test_a_fault_is_seen(feed):
    target = fuzz.Target(random.Random.random, feed, seconds=0.02)
    (fault,) = fuzz.trial("broken", target, 0, [3]).faults.values()
    assert FAULTS[feed] in fault


def test_what_one_input_did_is_not_held_against_the_next():
    target = fuzz.Target(lambda rng: rng.random() < 0.5, lambda given: given and writes(given))
    result = fuzz.trial("half", target, 0, range(40))
    assert 5 < len(result.faults) < 35 and result.read == 40 - len(result.faults)


def test_an_input_is_a_function_of_its_number():
    for target in fuzz.TARGETS.values():
        first, again = (target.make(random.Random("0/x/7")) for _ in range(2))
        assert first == again


def test_a_fault_ends_the_script_with_an_error_and_the_number_of_its_input(monkeypatch, capsys):
    broken = fuzz.Target(lambda rng: rng.random() < 0.5, lambda given: given and raises(given))
    monkeypatch.setattr(fuzz, "TARGETS", {"broken": broken})
    monkeypatch.setattr(sys, "argv", ["fuzz", "--count", "10"])
    assert fuzz.main() == 1
    shown = capsys.readouterr().out
    assert "| broken | 10 |" in shown and "  broken " in shown and "KeyError" in shown
    assert fuzz._folder().is_dir()
