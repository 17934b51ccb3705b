"""Tests run folders in another format: they are refused with one line, and what they have trained can be used."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import qerl_jax
from qerl_jax import config
from qerl_jax.checkpoint import peft
from qerl_jax.checkpoint.policy import find_policy, load_base
from qerl_jax.model.transformer import init_params
from qerl_jax.training.check import check
from tests.faults import harness


def folder_of(folder, run_format):
    """A run folder with an adapter and a row of metrics, as a version with this format leaves it."""
    cfg = harness.tiny(folder)
    folder.mkdir()
    config.write_run(folder, cfg)
    path = folder / "config.toml"
    text = path.read_text()
    path.write_text(
        text.replace(f"run_format = {config.RUN_FORMAT}\n", f"run_format = {run_format}\n")
    )
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    model, frozen, _ = load_base(cfg.model, cfg.lora)
    params = init_params(model, frozen, jax.random.key(0))
    params = jax.tree.map(lambda x: x + np.float32(0.01), params)
    peft.export_adapter(folder / "adapter", params, model.lora, "qerl-tiny")
    return folder


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("old") / "run", 1)


@pytest.fixture(scope="module")
def newer(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("newer") / "run", config.RUN_FORMAT + 1)


COMMANDS = (
    *("train RUN/config.toml --output-dir RUN", "report RUN", "export RUN RUN/../out --to peft"),
    *("generate 1+1 --adapter RUN", "generate 1+1 --tools RUN", "eval arithmetic --adapter RUN"),
    "replay RUN/non_finite/step_000001.npz",
)


@pytest.mark.parametrize("text", COMMANDS)
def test_a_folder_in_another_format_is_refused_wherever_it_is_opened(text, old, newer, capsys):
    for folder, words in (
        (
            old,
            rf"an older version of qerl-jax .* \(run_format 1; this .* by {re.escape(str(old / 'adapter'))}, and",
        ),
        (newer, "a newer version of qerl-jax .*: update qerl-jax, or choose another folder"),
    ):
        (folder / "non_finite").mkdir(exist_ok=True)
        (folder / "non_finite" / "step_000001.npz").touch()
        command = [word.replace("RUN", str(folder)) for word in text.split()]
        assert re.search(words, harness.refused(capsys, *command))


def test_python_refuses_it_too(old, newer):
    for folder in (old, newer):
        for call in (qerl_jax.load_run, qerl_jax.load, qerl_jax.report):
            with pytest.raises(config.ConfigError, match="run folder: got"):
                call(folder)


def test_a_run_that_has_trained_nothing_names_no_adapter(tmp_path):
    (tmp_path / "config.toml").write_text(config.dump(harness.tiny(tmp_path)))
    with pytest.raises(config.ConfigError, match="use that version, and choose another folder"):
        config.load_run(tmp_path)


def test_its_config_starts_a_new_run(old, tmp_path):
    for folder in (old, folder_of(tmp_path / "run", config.RUN_FORMAT)):
        assert config.load(folder / "config.toml") == harness.tiny(folder)


@pytest.mark.slow
def test_its_adapter_can_be_started_from_asked_and_exported(old, newer, tmp_path):
    for number, folder in enumerate((old, newer)):
        adapter = folder / "adapter"
        cfg = harness.tiny(tmp_path / "new")
        model = dataclasses.replace(cfg.model, adapter_name_or_path=str(adapter))
        assert check(dataclasses.replace(cfg, model=model)).adapter == adapter
        source = find_policy(None, adapter)
        assert source.run is None and source.model.model_name_or_path == "qerl-tiny"
        out = tmp_path / str(number)
        report = qerl_jax.export(adapter, out, to="peft")
        assert report["base"] == "qerl-tiny" and report["mean_effect_of_training"] > 0
        name = "adapter_model.safetensors"
        assert (out / name).read_bytes() == (adapter / name).read_bytes()


def test_options_of_a_base_are_for_an_adapter_without_its_run(old, tmp_path):
    now = folder_of(tmp_path / "run", config.RUN_FORMAT)
    for name, value in (("model", "qerl-tiny"), ("weights", "nf4")):
        text = f"{name}: got '{value}'; .* config of the run"
        with pytest.raises(config.ConfigError, match=text):
            qerl_jax.export(now, tmp_path / "out", to="peft", **{name: value})
    with pytest.raises(config.ConfigError, match="step: got 2; .* holds no checkpoints"):
        qerl_jax.export(old / "adapter", tmp_path / "out", to="peft", step=2)
