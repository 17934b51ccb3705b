"""Tests that runs on two processes, joined by JAX as on two hosts, equal those on one, and what happens if one dies."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys

import pytest

from qerl_jax import config
from qerl_jax.checkpoint.run_state import StateFiles
from qerl_jax.tracking import logger
from tests import test_tiny_run as tiny
from tests.faults import harness
from tests.qerl_jax.rl import test_update as updates
from tests.test_several_devices import assert_same_steps, flags
from tests.test_tools_learn import THINKS

pytestmark = [pytest.mark.slow, pytest.mark.process]
# Of a busy machine, in seconds.
PATIENCE = 600


def written(folder, replicas, fsdp=1, length=32, carry=0, **changes):
    """Writes a config whose runs depend on the number of devices only by rounding."""
    rollout = {"num_generations": 4, "max_completion_length": length}
    fixed = {"compact": False, "max_concurrent": 4, "carry": carry}
    if carry:  # some rows are then long
        fixed |= {"ignore_eos": True, "stop": ("7",)}
    options = {
        "optim": tiny.BATCH | {"max_tokens_per_microbatch": 400},
        "grpo": {"reference": {"beta": 0.01}},
        "model": {"gradient_checkpointing": "products"},
        "eval": config.EvalConfig(num_problems=16, eval_steps=2),
    }
    mesh = {"data": replicas, "fsdp": fsdp}
    cfg = tiny.small(folder, rollout=rollout | fixed, mesh=mesh, **(options | changes))
    return harness.written(cfg)


def start(*paths, devices=1):
    """Starts a process for each config, with so many devices, joined by the variables of docs/scale.md."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    names = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": f"{len(paths)}"}
    before = os.environ | {"JAX_PLATFORMS": "cpu"} | flags(devices)
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = []
    for index, path in enumerate(paths):
        more = names | {"JAX_PROCESS_ID": f"{index}"} if len(paths) > 1 else {}
        command = [sys.executable, "-m", "qerl_jax", "train", str(path)]
        processes.append(subprocess.Popen(command, cwd=harness.ROOT, env=before | more, **how))
    return processes


def ended(processes):
    """Returns exit codes and output."""
    said = [each.communicate(timeout=PATIENCE)[0] for each in processes]
    return [each.returncode for each in processes], said


def start_until(step, folder, path):
    processes = start(path, path)
    harness.wait_for_step(processes[0], folder, step, PATIENCE)
    assert all(each.poll() is None for each in processes), ended(processes)
    assert harness.last_step(folder) >= step
    return processes


def assert_same(folder, other):
    """Checks that two runs sampled the same, and have the same weights but for rounding."""
    assert_same_steps(folder, other)
    found, expected = (StateFiles(each, None).params() for each in (folder, other))
    assert found[0] == expected[0]
    updates.assert_close(found[1], expected[1], rtol=1e-2, atol=1e-3)


def test_two_processes_do_what_one_does_and_go_on_when_one_was_killed(tmp_path):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    codes, said = ended(start(written(alone, 1)))
    assert codes == [0], said

    path = written(killed, 2)
    processes = start_until(3, killed, path)
    processes[1].kill()
    codes, said = ended(processes)
    assert codes == [4, -signal.SIGKILL], said
    last = said[0].strip().splitlines()[-1]
    # By which of the two ways it learns of it depends on what it was doing.
    assert last.startswith("qerl") and ("its last checkpoint" in last or "is saved" in last), last
    assert not (killed / "adapter").exists()
    assert StateFiles(killed, None).steps()

    # It goes on on other devices: two for each process, which share a base.
    path = written(killed, 2, fsdp=2)
    codes, said = ended(start(path, path, devices=2))
    assert codes == [0, 0], said
    assert "resumed: " in said[0] and "reward" not in said[1]
    assert (killed / "adapter").is_dir() and (killed / "report.md").is_file()
    assert_same(killed, alone)


def test_rows_of_two_processes_go_on_in_the_next_rollout_also_after_a_kill(tmp_path):
    """Two processes leave other rows than one would; the same two leave the same ones."""
    options = {"length": 100, "carry": 6, "save_steps": 1, "max_steps": 4, "eval": None}
    options["rewards"] = {"functions": ("token_hash_reward",)}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    path = written(whole, 2, **options)
    codes, said = ended(start(path, path))
    assert codes == [0, 0], said
    rows = logger.read_metrics(whole)
    assert max(row["carry/rows"] for row in rows) > 0 < rows[-1]["carry/age_max"]
    path = written(killed, 2, **options)
    processes = start_until(2, killed, path)
    processes[1].kill()
    ended(processes)
    codes, said = ended(start(path, path))
    assert codes == [0, 0], said
    assert harness.results(killed) == harness.results(whole)


def test_the_first_process_runs_the_tools_of_two(tmp_path):
    """A signal stops both, and they continue with groups that the last rollout did not need."""
    environment = "tests.qerl_jax.tools.environments_for_tests:AskedInTheFirst"
    tools = dataclasses.replace(THINKS, functions=(), environment=environment)
    grpo = {"reference": {"beta": 0.01}, "dynamic_sampling": {"max_rounds": 2}}
    options = {"length": 80, "tools": tools, "grpo": grpo, "save_steps": 1}
    alone, both = tmp_path / "alone", tmp_path / "both"
    codes, said = ended(start(written(alone, 1, **options)))
    assert codes == [0], said
    path = written(both, 2, **options)
    processes = start_until(2, both, path)
    processes[1].terminate()
    codes, said = ended(processes)
    assert codes == [143, 143], said
    codes, said = ended(start(path, path))
    assert codes == [0, 0], said
    assert_same(both, alone)
    rows, others = logger.read_metrics(both), logger.read_metrics(alone)
    same = ("tools/call_frequency", "tools/failure_frequency", "tools/tokens", "turns/mean")
    same += ("rewards/AskedInTheFirst/mean",)
    for row, expected in zip(rows, others, strict=True):
        assert {k: row.get(k) for k in same} == {k: expected.get(k) for k in same}
    assert any(row.get("rewards/AskedInTheFirst/mean") for row in rows)


def test_a_signal_to_one_of_two_ends_both_and_saves(tmp_path):
    folder = tmp_path / "run"
    processes = start_until(1, folder, written(folder, 2, max_steps=400))
    processes[1].terminate()
    codes, said = ended(processes)
    assert codes == [143, 143], said
    assert "stopped by SIGTERM after step" in said[0]
    steps = [row["step"] for row in logger.read_metrics(folder)]
    assert StateFiles(folder, None).steps()[-1] == steps[-1]


def test_processes_with_different_configs_say_so_and_end(tmp_path):
    folder = tmp_path / "run"
    paths = written(folder, 2), written(tmp_path / "other", 2, seed=7)
    codes, said = ended(start(*paths))
    assert set(codes) <= {2, 4} and 2 in codes
    assert any("config of process" in each for each in said)
    assert not folder.exists()
