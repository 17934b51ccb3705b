"""Tests that two runs never share a folder, and that a killed run leaves no lock behind."""

import concurrent.futures
import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from qerl_jax import config
from qerl_jax.system import locks
from qerl_jax.tracking import logger
from qerl_jax.training import trainer
from qerl_jax.training.check import check
from tests.faults import harness

HOLD = """
import sys, time
from qerl_jax.system import locks
with locks.held(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts another process that holds the lock of `tmp_path`."""
    how = {"cwd": harness.ROOT, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], **how)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_told_who_holds_the_folder_and_a_kill_gives_it_back(holder, tmp_path):
    with pytest.raises(locks.Busy) as error, locks.held(tmp_path):
        pass
    text, process = str(error.value), rf"\(process {holder.pid} on \S+ since "
    assert re.match(f"{tmp_path}: another run works in this folder {process}", text)
    assert "choose another output_dir" in text and "\n" not in text
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locks.held(tmp_path) as warning:
        assert warning is None
    with locks.held(tmp_path):  # and a run that has ended has given it back, too
        assert (tmp_path / locks.NAME).read_text().startswith(f"process {os.getpid()} on ")


def test_a_second_call_in_one_process_is_refused_too(tmp_path):
    with locks.held(tmp_path), pytest.raises(locks.Busy), locks.held(tmp_path):
        pass


def test_where_there_are_no_locks_a_warning_says_so(tmp_path, monkeypatch):
    without = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(fcntl, "flock", without)
    with locks.held(tmp_path) as warning:
        assert f"the file system of {tmp_path} has no locks" in warning


def test_train_refuses_a_folder_in_use_before_it_reads_or_writes_there(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "check", lambda *_, **__: pytest.fail("it went on"))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with locks.held(tmp_path), pytest.raises(locks.Busy):
        trainer.train(harness.tiny(tmp_path))
    assert logger.read_metrics(tmp_path) == [{"step": 1}]


def test_of_two_new_runs_the_one_that_comes_second_is_refused(tmp_path, monkeypatch):
    """The other run begins and ends while this one still checks its data."""
    folder = tmp_path / "run"

    def meanwhile(cfg, **options):
        checked = check(cfg, **options)
        folder.mkdir()
        config.write_run(folder, cfg)
        return checked

    monkeypatch.setattr(trainer, "check", meanwhile)
    monkeypatch.setattr(trainer, "load", lambda *_, **__: pytest.fail("it went on"))
    with pytest.raises(config.ConfigError, match="another run has begun there in the meantime"):
        trainer.train(harness.tiny(folder))


@pytest.mark.slow
def test_of_two_runs_started_at_once_one_is_refused_and_the_other_is_undisturbed(tmp_path):
    trainer.train(harness.tiny(tmp_path / "alone"), quiet=True)
    path = harness.write_config(tmp_path / "shared")
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first = threads.submit(harness.qerl, "train", path)
        time.sleep(1)
        second = threads.submit(harness.qerl, "train", path)
        ended = sorted((first.result(), second.result()), key=lambda each: each.returncode)
    assert [each.returncode for each in ended] == [0, 2]
    assert ended[1].stderr.count("\n") == 1 and "output_dir" in ended[1].stderr
    assert harness.results(tmp_path / "shared") == harness.results(tmp_path / "alone")
