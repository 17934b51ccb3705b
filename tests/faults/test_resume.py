"""Tests that a checkpoint holds the whole state of a run, so that files which may be lost are not needed."""

import contextlib
import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import qerl_jax
from qerl_jax import config
from qerl_jax.checkpoint.run_state import StateFiles
from qerl_jax.rl import rollouts
from qerl_jax.tracking import logger
from qerl_jax.training import stopping
from qerl_jax.training.trainer import train
from tests.faults import harness


def remembering(folder, **sections):
    """Makes a run with all that outlives a step: noise, sampling rounds, a moving reference, the best adapter."""
    reference = {"beta": 0.02, "policy": "synced", "sync_steps": 2}
    return harness.tiny(
        folder,
        grpo={"dynamic_sampling": {"max_rounds": 3}, "reference": reference},
        rewards={"functions": ("format_reward", "accuracy_reward"), "soft_punish_cache": 7},
        eval={"num_problems": 8, "eval_steps": 2, "reward": "format_reward"},
        **sections,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, train(remembering(folder), quiet=True)


def assert_same_run(folder, state, whole):
    expected_folder, expected = whole
    assert harness.results(folder) == harness.results(expected_folder)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    for name in ("best.json", "best/adapter_model.safetensors"):
        assert (folder / name).read_bytes() == (expected_folder / name).read_bytes()


@pytest.mark.slow
def test_a_run_that_is_stopped_in_every_step_is_the_same_bit_for_bit(whole, tmp_path, monkeypatch):
    folder, state = tmp_path / "run", None
    for _ in range(20):
        with monkeypatch.context() as patch, contextlib.suppress(stopping.Stopped):
            # In the second step: three rounds make a step.
            harness.before_call(patch, rollouts, "score", 4, harness.send)
            state = train(remembering(folder), quiet=True)
            break
    assert state is not None, "the run did not end"
    assert_same_run(folder, state, whole)


@pytest.mark.slow
def test_tokens_and_the_best_so_far_outlive_the_log(whole, tmp_path):
    """Both are in the checkpoint: if the log is lost, only its rows are lost."""
    folder = harness.copy_of(whole[0], tmp_path / "run")
    harness.back_to(folder, 4)
    lost = logger.read_metrics(folder)
    (folder / "metrics.jsonl").unlink()
    state = train(remembering(folder), quiet=True)
    rows = logger.read_metrics(folder)
    assert [row["step"] for row in rows] == [5, 6]
    assert [row["num_tokens"] for row in rows] == [row["num_tokens"] for row in lost[-2:]]
    assert (folder / "best.json").read_bytes() == (whole[0] / "best.json").read_bytes()
    jax.tree.map(np.testing.assert_array_equal, state, whole[1])


@pytest.mark.slow
def test_a_run_whose_newest_checkpoint_is_damaged_is_the_same_from_the_one_before(
    whole, tmp_path, capsys
):
    folder = harness.copy_of(whole[0], tmp_path / "run")
    harness.back_to(folder, 4)
    paths = harness.files_of(folder / "checkpoints" / "4" / "state")
    harness.flip(max(paths, key=lambda path: path.stat().st_size), 12_345)
    state = train(remembering(folder))
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("is damaged: ") == 1
    assert "it is skipped, and the run goes on from checkpoint 2" in shown
    assert_same_run(folder, state, whole)


def judged_by_a_file(folder, code, steps):
    """Makes a run of so many steps whose first reward is written into a file beside its folder."""
    file = folder.parent / "my_rewards.py"
    file.write_text(f"def judge(completions, **_):\n    return [{code} for _ in completions]\n")
    functions = (f"{file}:judge", "format_reward")
    # A learning rate that no other test has, so that the optimizer's program is compiled here.
    optim = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    return harness.tiny(
        folder,
        max_steps=steps,
        rewards={"functions": functions},
        optim=optim | {"learning_rate": 2.5e-3},
        eval={"num_problems": 4, "eval_steps": 1},
    )


@pytest.mark.slow
def test_a_resumed_run_remembers_uses_its_programs_and_says_that_the_code_of_its_reward_has_changed(
    tmp_path, capsys, caplog
):
    folder = tmp_path / "run"

    def shown(code, steps):
        train(judged_by_a_file(folder, code, steps))
        return " ".join(capsys.readouterr().out.split())

    warning = f"warning: the code of {tmp_path}/my_rewards.py:judge has changed since the run in {folder} began: its "
    warning += "steps so far are kept as they are. To train with the new code from the start, choose another "
    warning += f"output_dir, or remove {folder}"
    assert "warning: the code" not in shown("0.0", 2)

    rows = logger.read_metrics(folder)
    progress = StateFiles(folder, keep=None).supply()["progress"]
    best = max(row["eval/accuracy"] for row in rows)
    tokens = rows[-1]["num_tokens"]
    hashes = progress.pop("sources")
    assert progress == {"num_tokens": tokens, "best": best, "ends": True}
    assert list(hashes) == [f"{tmp_path}/my_rewards.py:judge"]
    assert json.loads((folder / "best.json").read_text())["eval/accuracy"] == best

    over = shown("1.0", 2)
    assert "nothing left to do" in over and warning in over
    with jax.log_compiles():
        longer = shown("1.0", 3)
    assert "goes on after step 2 of 3" in longer and warning in longer
    compiled = set(re.findall(r"XLA compilation of jit\((\w+)\)", caplog.text))
    # The optimizer's program depends on the number of steps.
    assert "apply" in compiled and not compiled & {"prefill", "decode", "accumulate"}
    # The checkpoint of the longer run knows the code of its first step.
    over = shown("0.0", 3)
    assert "nothing left to do" in over and "warning: the code" not in over


@pytest.mark.slow
def test_a_run_says_that_the_code_of_a_scripts_reward_has_changed(tmp_path, capsys):
    def zeros(completions, **_):
        return [0.0] * len(completions)

    def ones(completions, **_):
        return [1.0] * len(completions)

    rows = [{"prompt": f"What is 1+{b}?", "answer": b + 1} for b in range(9)]
    settings = config.to_table(harness.tiny(tmp_path / "run", max_steps=1)) | {"eval": None}

    def shown(function):
        # Both are what a script calls "mine", before and after a change.
        function.__module__, function.__qualname__ = "__main__", "mine"
        qerl_jax.train(settings, rows, function)
        return " ".join(capsys.readouterr().out.split())

    warning = "warning: the code of __main__:mine has changed since the run in"
    assert warning not in shown(zeros)
    again = shown(zeros)
    assert "nothing left to do" in again and warning not in again
    assert warning in shown(ones)


@pytest.mark.slow
def test_a_warning_about_a_run_is_given_once_and_not_again_when_it_is_resumed(tmp_path, capsys):
    def zero(completions, **_):
        return [0.0] * len(completions)

    for steps in (3, 4):
        train(harness.tiny(tmp_path, max_steps=steps), reward_functions=[zero])
        shown = " ".join(capsys.readouterr().out.split())
        assert shown.count("warning: step 3: nothing was learned in the first 3") == (steps == 3)
        assert f"warning: this run has learned nothing in {steps} steps. In no group" in shown
    assert not qerl_jax.load_run(tmp_path).has_learned


@pytest.mark.slow
@pytest.mark.process
def test_load_changes_no_bit(tmp_path):
    """A run gives the same bits alone and beside processes that keep all cores busy."""
    alone, beside = (harness.write_config(tmp_path / name) for name in ("alone", "beside"))
    assert harness.qerl("train", alone).returncode == 0
    command, count = [sys.executable, "-c", "while True: pass"], 2 * (os.cpu_count() or 1)
    busy = [subprocess.Popen(command) for _ in range(count)]
    try:
        assert harness.qerl("train", beside).returncode == 0
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert harness.results(tmp_path / "beside") == harness.results(tmp_path / "alone")
