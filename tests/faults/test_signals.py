"""Tests of SIGINT and SIGTERM: a run stops between steps, saves, and resumes as if it had never stopped."""

import concurrent.futures
import random
import re
import signal
import time
import weakref

import pytest

from qerl_jax.checkpoint import base_model
from qerl_jax.checkpoint.run_state import StateFiles
from qerl_jax.evaluation import evaluator
from qerl_jax.rl import rollouts, update
from qerl_jax.tracking import logger
from qerl_jax.training import stopping
from qerl_jax.training.trainer import train
from tests.faults import harness, trial

SIGNALS = {130: signal.SIGINT, 143: signal.SIGTERM}


def watched(folder):
    """Makes a run that saves only at its end, and is evaluated at steps 0, 2 and 4."""
    cfg = {"max_steps": 4, "save_steps": 100}
    return harness.tiny(folder, eval={"num_problems": 8, "eval_steps": 2}, **cfg)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(watched(folder), quiet=True)
    return folder


# A signal is heard within the step that it comes in, and in an evaluation before its next chunk or after it.
PLACES = {
    **{(evaluator, "judged", 0): 0, (evaluator, "judged", 1): 2},
    **{(rollouts, "score", step): step for step in range(4)},
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_signal_in_any_part_of_a_step_saves_the_last_whole_one(
    place, whole, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(stopping.Stopped) as stopped:
        harness.before_call(patch, *place, harness.send)
        train(watched(folder), quiet=True)
    assert_stopped(stopped, folder, PLACES[place])
    train(watched(folder), quiet=True)
    assert_same_run(folder, whole)


def assert_stopped(stopped, folder, done):
    assert StateFiles(folder, keep=None).steps() == ([done] if done else [])
    saved = f"after step {done} of 4, which is saved in {folder}: the same command"
    text = saved if done else "before the first step was done: nothing to save"
    assert f"stopped by SIGTERM {text}" in str(stopped.value)
    assert stopped.value.exit_code == 143 and isinstance(stopped.value, KeyboardInterrupt)


def assert_same_run(folder, whole):
    assert harness.results(folder) == harness.results(whole)
    for name in ("best.json", "best/adapter_model.safetensors"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def test_a_step_and_an_evaluation_that_are_interrupted_are_done_again_and_the_run_is_the_same(
    whole, tmp_path, monkeypatch
):
    """The step before each is saved, and is not repeated; the row of the evaluation is whole."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(stopping.Stopped) as stopped:
        harness.before_call(patch, rollouts, "score", 1, harness.send)
        train(watched(folder), quiet=True)
    assert_stopped(stopped, folder, 1)
    with monkeypatch.context() as patch, pytest.raises(stopping.Stopped):
        # After step 2, before the first chunk of its evaluation.
        interrupt = lambda: harness.send(signal.SIGINT)
        harness.before_call(patch, evaluator, "judged", 0, interrupt)
        train(watched(folder), quiet=True)
    assert StateFiles(folder, keep=None).newest() == 2
    assert [row["step"] for row in logger.read_metrics(folder)] == [0, 1]
    train(watched(folder), quiet=True)
    assert_same_run(folder, whole)


# Of a rollout's two optimizer steps, each of several micro-batches: which is running, and what is saved then.
@pytest.mark.parametrize(("optimizer_step", "saved"), [(1, []), (2, [2]), (3, [2])])
@pytest.mark.slow
def test_an_update_is_left_until_it_has_changed_the_state(
    optimizer_step, saved, tmp_path, monkeypatch
):
    """A signal waits for a micro-batch, or for the optimizer steps that follow the first one."""
    shape = {
        "grpo": {"reference": {"beta": 0.01}},  # so that all rows learn
        "rollout": {"num_generations": 2, "generation_batch_size": 8, "max_completion_length": 8},
        "optim": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
        | {"max_tokens_per_microbatch": 64},
        **{"max_steps": 4, "save_steps": 100},
    }
    whole, folder = (harness.tiny(tmp_path / name, **shape) for name in ("whole", "left"))
    train(whole, quiet=True)
    with monkeypatch.context() as patch, pytest.raises(stopping.Stopped):
        within = lambda: harness.before_call(patch, update, "accumulate", 0, harness.send)
        harness.before_call(patch, update, "summed_gradient", optimizer_step - 1, within)
        train(folder, quiet=True)
    assert StateFiles(tmp_path / "left", keep=None).steps() == saved
    train(folder, quiet=True)
    assert harness.results(tmp_path / "left") == harness.results(tmp_path / "whole")


@pytest.mark.parametrize("number", stopping.SIGNALS)
@pytest.mark.parametrize("has_state", [False, True])
def test_a_second_signal_or_one_before_there_is_a_state_does_what_it_did_before(number, has_state):
    heard = []
    before = signal.signal(number, lambda *_: heard.append(number))
    try:
        stop = stopping.Stop()
        with stop.listening():
            stop.poll()
            if has_state:
                stop.saves = True
                signal.raise_signal(number)
                assert heard == [] and stop.signal == number
            signal.raise_signal(number)
            assert heard == [number]
            with pytest.raises(stopping.Stopped):
                stop.poll()
        signal.raise_signal(number)
        assert heard == [number, number]
    finally:
        signal.signal(number, before)


def interrupt_where_exceptions_are_forgotten():
    """Sends SIGINT within a weak reference's callback: Python only prints exceptions that are raised there."""
    referent = lambda: None
    reference = weakref.ref(referent, lambda _: signal.raise_signal(signal.SIGINT))
    del referent
    assert reference() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("module", "name"), [(base_model, "load_weights"), (rollouts, "score")])
def test_an_interrupt_that_falls_into_a_callback_is_not_lost(module, name, tmp_path, monkeypatch):
    """One of 54 was lost in a WeakSet of JAX, and the run continued to its end."""
    harness.before_call(monkeypatch, module, name, 0, interrupt_where_exceptions_are_forgotten)
    with pytest.raises(stopping.Stopped, match="before the first step was done: nothing to save"):
        train(harness.tiny(tmp_path / "run"), quiet=True)


def test_outside_of_the_main_thread_a_run_can_be_started_too():
    def listen():
        with stopping.Stop().listening():
            return "heard"

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(listen).result() == "heard"


@pytest.mark.process
@pytest.mark.parametrize("code", [130, pytest.param(143, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_command_ends_with_its_documented_code_and_one_line_beside_the_notice(code, tmp_path):
    folder = tmp_path / "run"
    path = harness.write_config(folder, max_steps=2000, save_steps=1000)
    process = harness.start(path)
    try:
        harness.wait_for_step(process, folder, 3)
        process.send_signal(SIGNALS[code])
        _, shown = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, shown
    name = SIGNALS[code].name
    notice, last = shown.splitlines()
    assert notice.startswith(f"{name}: the run ends after what it is doing")
    text = rf"qerl train: stopped by {name} after step (\d+) of 2000, .*"
    step = int(re.fullmatch(text, last)[1])
    assert StateFiles(folder, keep=None).newest() == step >= 3
    assert logger.read_metrics(folder)[-1]["step"] == step


@pytest.mark.process
@pytest.mark.parametrize("seconds", [1.0, pytest.param(2.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("code", SIGNALS)
def test_a_signal_before_the_first_step_ends_the_command_at_once_too(code, seconds, tmp_path):
    """Python itself ends it while modules are imported; later the command does."""
    path = harness.write_config(tmp_path / "run")
    process = harness.start(path)
    try:
        time.sleep(seconds)
        process.send_signal(SIGNALS[code])
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in (code, -SIGNALS[code])


@pytest.mark.slow
@pytest.mark.process
def test_faults_at_random_moments_one_after_the_other_change_nothing(tmp_path):
    """This tries a few faults; `python -m tests.faults.trial` tries a hundred."""
    steps = {"max_steps": 40, "save_steps": 7}
    train(harness.tiny(tmp_path / "whole", **steps), quiet=True)
    folder = tmp_path / "run"
    path = harness.write_config(folder, **steps)
    for fault in harness.disturb(path, folder, random.Random(1), count=8):
        assert trial.wrong(fault) is None, fault
    assert harness.qerl("train", path).returncode == 0
    assert harness.results(folder) == harness.results(tmp_path / "whole")
