"""Tests that an error is one line with field, value, rule and remedy, or with the file of its traceback."""

import dataclasses
import pathlib
import re
from unittest import mock

import jax
import pytest

from qerl_jax import config
from qerl_jax.checkpoint import base_model
from qerl_jax.cli import main
from qerl_jax.planning import memory
from qerl_jax.rl import rollouts
from qerl_jax.training import trainer
from tests.faults import harness

ABSURD = {
    "steps as a float": ("--max-steps", "1e26"),
    "steps": ("--max-steps", str(10**26), "max_steps", "must be at least 1 and below 2**31"),
    "epochs": ("--num-train-epochs", "1e300", "num_train_epochs", "32 bits"),
    "rate": ("--optim.learning-rate", "1e308", "optim.learning_rate", "at most 1"),
    "infinite rate": ("--optim.learning-rate", "inf", "optim.learning_rate", "at most 1"),
    "weight": ("--optim.weight-decay", "1e308", "optim.weight_decay", "32 bits"),
    "rank": ("--lora.rank", "1000000000", "lora.rank", "must be at least 1 and at most 8192"),
    "noise": ("--noise.sigma-start", "1e300", "noise.sigma_start", "32 bits"),
    "top-k": ("--rollout.top-k", str(10**30), "rollout.top_k", "between -2**32 and 2**32"),
    "rows": ("--optim.per-device-train-batch-size", str(2**30), "optim.per_device", "at most 1048"),
}


@pytest.mark.parametrize("case", ABSURD)
def test_an_absurd_value_is_refused_at_the_door(case, capsys):
    option, value, *said = ABSURD[case]
    shown = harness.refused(capsys, "plan", "quickstart", option, value)
    assert all(part in shown for part in said), shown


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"output_dir": "runs/\0"}, "output_dir: got 'runs/\\x00'; must not hold a NUL character"),
        ({"run_name": "\0"}, "run_name: got '\\x00'; must not hold a NUL character"),
        ({"max_steps": 10**26}, f"max_steps: got {10**26}; must be at least 1 and"),
        ({"max_steps": 1e26}, "max_steps: got 1e+26; must be of type int"),
        (
            {"rewards": {"functions": ["a"], "options": {"a": {"x": [1e300]}}}},
            "rewards.options: got {'a': {'x': [1e+300]}}; must be a number that 32 bits can hold",
        ),
        ({"rewards": {"functions": ["a\0"]}}, "rewards.functions: got ('a\\x00',); must not hold"),
    ],
)
def test_values_that_nothing_can_use_are_refused_in_files_too(table, message):
    plain = config.to_table(harness.tiny("runs/x"))
    with pytest.raises(config.ConfigError) as error:
        config.from_table(config.RunConfig, plain | table)
    assert str(error.value).startswith(message)


def test_epochs_that_make_too_many_steps_are_refused():
    cfg = dataclasses.replace(harness.tiny("x"), max_steps=None, num_train_epochs=1e30)
    with pytest.raises(config.ConfigError, match="problems make .* must be fewer than 2"):
        cfg.total_steps(40)


def run_with(monkeypatch, tmp_path, error, *options):
    """Runs training with an error in the third call of the reward, and returns the exit code."""

    def failing():
        raise error

    harness.before_call(monkeypatch, rollouts, "score", 2, failing)
    path = harness.write_config(tmp_path / "run")
    return main.main(["train", str(path), *options])


@pytest.mark.slow
def test_an_unforeseen_error_says_what_was_running_and_names_a_file_with_the_rest(
    tmp_path, monkeypatch, capsys
):
    assert run_with(monkeypatch, tmp_path, KeyError("left_over\nsecond line")) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "Traceback" not in shown
    assert shown.startswith("qerl train: unexpected KeyError in the rewards of step 3 of 6: ")
    path = pathlib.Path(re.search(r"traceback and versions: (\S+);", shown)[1])
    assert path.parent == tmp_path / "run" and "--debug shows it here" in shown
    text, versions = path.read_text(), (f"jax {jax.__version__}", "device 0: cpu")
    assert text.startswith(f"qerl train {tmp_path}/run.toml\n")
    for part in ("Traceback (most recent call last):", "in failing", *versions):
        assert part in text


@pytest.mark.slow
def test_an_error_in_a_run_says_in_which_step_and_what_is_saved(tmp_path, monkeypatch, capsys):
    assert run_with(monkeypatch, tmp_path, ValueError("rewards: nothing fits")) == 2
    where = "in the rewards of step 3 of 6; step 2 is saved: the same command goes on from there"
    assert capsys.readouterr().err == f"qerl train: rewards: nothing fits ({where})\n"


def test_debug_shows_the_traceback_of_any_error(tmp_path, capsys):
    assert main.main(["train", "--debug", "nowhere.toml"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last):" in shown
    assert shown.endswith("qerl train: config file: got 'nowhere.toml'; no such file\n")
    assert "Traceback" not in harness.refused(capsys, "train", "nowhere.toml")


def test_a_bare_message_of_a_library_that_computes_is_no_answer(tmp_path, monkeypatch, capsys):
    """A ValueError of flax or JAX is not about the input, while ours are."""

    monkeypatch.setattr(trainer, "check", lambda cfg, **_: jax.numpy.zeros(3).reshape(2))
    path = harness.write_config(tmp_path / "run")
    assert main.main(["train", str(path)]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("qerl train: unexpected TypeError in the preparation of the run: ")
    kept = pathlib.Path(re.search(r"traceback and versions: (\S+);", shown)[1])
    assert "reshape" in kept.read_text()
    kept.unlink()  # there is no run folder: it is in the system's temporary one
    assert not (tmp_path / "run").exists()


OOM = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345678901 bytes."


@pytest.mark.slow
def test_out_of_memory_names_the_line_of_the_plan_and_the_setting(tmp_path, monkeypatch, capsys):
    error = jax.errors.JaxRuntimeError(OOM)
    assert run_with(monkeypatch, tmp_path, error) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    text = "qerl train: memory: the device ran out of memory in the rollout when it asked for 12.35 GB."
    assert shown.startswith(text)
    items = memory.plan(harness.tiny("x")).items
    name, field = re.search(r"of which '(.*)' \(.*\) is .*: change (\S+)", shown).groups()
    assert [x.field for x in items if (x.name, x.phase) == (name, "rollout")] == [field]


@pytest.mark.parametrize(
    ("phase", "line", "setting"),
    [
        ("rollout", "'scores' (1.25 GB) is an estimate, and was too low", "rollout.max_concurrent"),
        ("update", "workspace of a layer, or of the head' (", "optim.max_tokens_per_microbatch"),
        ("always", "'optimizer' (0.65 GB) is the largest", 'optim.optimizer to "adamw_8bit"'),
    ],
)
def test_a_plan_knows_which_of_its_lines_may_be_wrong(phase, line, setting, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    arch = memory.architecture.KNOWN["qwen2.5-7b"]
    plan = memory.plan(config.load("paper/gsm8k_qwen2.5_7b"), arch, limit=80 * 10**9)
    text = str(plan.exhaustion(RuntimeError("RESOURCE_EXHAUSTED"), phase))
    assert line in text and f"change {setting}" in text and "\n" not in text
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    text = str(plan.exhaustion(RuntimeError("RESOURCE_EXHAUSTED"), phase))
    assert f"unset XLA_PYTHON_CLIENT_PREALLOCATE, or change {setting}" in text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (OOM, (True, 12345678901)),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 1.50GiB (1610612736B)", (True, None)),
        ("Out of memory allocating 4096 bytes.", (True, 4096)),
        ("INTERNAL: something else", (False, None)),
    ],
)
def test_exhausted_memory_is_told_from_other_errors(text, found):
    assert memory.exhausted(RuntimeError(text)) == found


def test_weights_that_do_not_fit_are_out_of_memory_too(tmp_path, monkeypatch, capsys):
    loading = mock.Mock(side_effect=jax.errors.JaxRuntimeError(OOM))
    monkeypatch.setattr(base_model, "load_weights", loading)
    shown = harness.refused(capsys, "train", harness.write_config(tmp_path / "run"))
    assert "ran out of memory in the preparation" in shown
