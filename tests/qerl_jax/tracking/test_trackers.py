"""Tests trackers: what is sent, under which name, and the error for a missing package."""

import importlib.util
import re
import sys
import types
from unittest import mock

import pytest

from qerl_jax import config
from qerl_jax.cli import main
from qerl_jax.tracking import logger as log
from qerl_jax.tracking import trackers


class Recorder(mock.MagicMock):
    """Stands in for a package, and keeps every call."""

    def named(self, name):
        return [(call.args, call.kwargs) for call in getattr(self, name).call_args_list]


@pytest.fixture
def packages(monkeypatch):
    """Puts recorders in place of the three packages."""
    recorders = {name: Recorder() for name in ("tensorboardX", "wandb", "trackio")}
    for name, recorder in recorders.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
        recorder.init.return_value = recorder.SummaryWriter.return_value = recorder
        for function in ("SummaryWriter", "init", "log", "finish"):
            setattr(module, function, getattr(recorder, function))
        monkeypatch.setitem(sys.modules, name, module)
    return recorders


def write(folder, step, rows):
    options = {"report_to": ("tensorboard", "wandb", "trackio"), "settings": {"seed": 1}}
    logger = log.Logger(folder, total_steps=4, step=step, quiet=True, **options)
    for at, row in rows:
        logger.write(at, row)
    logger.close()


def test_numbers_of_every_step_reach_every_tracker(packages, tmp_path):
    trackers.require(["tensorboard", "wandb", "trackio"])
    write(tmp_path, 0, [(1, {"reward": 0.5, "note": "text"}), (2, {"reward": 1.0})])
    scalars = packages["tensorboardX"].named("add_scalar")
    assert scalars == [(("reward", 0.5, 1), {}), (("reward", 1.0, 2), {})]
    first, second = packages["wandb"].named("log")
    assert first[0] == ({"step": 1, "reward": 0.5, "note": "text"},)
    assert packages["trackio"].named("log")[1] == (({"reward": 1.0},), {"step": 2})
    for package, end in (("tensorboardX", "close"), ("wandb", "finish"), ("trackio", "finish")):
        assert len(packages[package].named(end)) == 1
    assert packages["wandb"].named("init")[0][1]["config"] == {"seed": 1}


def test_a_resumed_run_goes_on_under_its_name_and_a_new_one_does_not(packages, tmp_path):
    write(tmp_path, 0, [(1, {"reward": 0.5}), (2, {"reward": 0.6})])
    write(tmp_path, 1, [(2, {"reward": 0.6})])
    write(tmp_path, 0, [])
    ids = [options["id"] for _, options in packages["wandb"].named("init")]
    assert ids[0] == ids[1] != ids[2]
    for package in ("wandb", "trackio"):
        asked = [options["resume"] for _, options in packages[package].named("init")]
        assert asked == ["never", "allow", "never"]
    names = [options["name"] for _, options in packages["trackio"].named("init")]
    assert names[0] == names[1] != names[2]
    purged = [o["purge_step"] for _, o in packages["tensorboardX"].named("SummaryWriter")]
    assert purged == [0, 2, 0]


def test_a_folder_may_have_a_name_that_no_tracker_takes_as_an_id(packages, tmp_path):
    write(tmp_path / ("12:30 50% #1?" + 150 * "x"), 0, [])
    ((_, options),) = packages["wandb"].named("init")
    assert re.fullmatch(r"12-30-50---1-x+-[0-9a-f]{8}", options["id"]) and len(options["id"]) < 128
    assert options["name"].startswith("12:30 50% #1?")


def test_a_missing_package_is_one_line_before_a_run_folder_exists(tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "wandb" else find(n))
    path = tmp_path / "run.toml"
    cfg = config.load("configs/quickstart.toml")
    path.write_text(config.dump(cfg).replace("report_to = []", 'report_to = ["wandb"]'))
    assert main.main(["train", str(path), "--output-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "report_to: got 'wandb'; needs a package: pip install wandb" in error
    assert error.count("\n") == 1 and not (tmp_path / "run").exists()
