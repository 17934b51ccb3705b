"""Tests calls that start before their results are needed."""

import subprocess
import sys
import threading

import pytest

from qerl_jax.system.early_calls import Ahead


def test_results_come_in_order_and_equal_calls_are_made_once():
    made = []

    def square(x):
        made.append(x)
        return x * x

    assert Ahead(square, 3).map([3, 1, 3, 2, 3]) == [9, 1, 9, 4, 9]
    assert sorted(made) == [1, 2, 3]


def test_what_was_begun_is_taken_up_and_then_forgotten():
    began, go_on, made = threading.Event(), threading.Event(), []

    def slow(x):
        made.append(x)
        began.set()
        go_on.wait(10)
        return -x

    calls = Ahead(slow, 2)
    calls.begin([1])
    calls.begin([1])
    assert began.wait(10)  # it runs though nobody has asked
    go_on.set()
    assert calls.map([1, 2]) == [-1, -2]
    assert sorted(made) == [1, 2]
    assert calls.map([1]) == [-1] and sorted(made) == [1, 1, 2]


def test_what_a_call_raises_is_raised_where_it_is_asked_for():
    calls = Ahead(lambda x: 1 // x, 1)
    calls.begin([0])
    assert calls.map([2]) == [0]
    with pytest.raises(ZeroDivisionError):
        calls.map([0])


def test_the_interpreter_ends_though_calls_are_under_way():
    program = "import time; from qerl_jax.system.early_calls import Ahead;"
    program += "Ahead(time.sleep, 1).begin([60, 61]); print('over')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30)
    assert done.returncode == 0 and done.stdout == b"over\n"
