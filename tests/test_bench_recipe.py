"""Tests the benchmark of recipes: completions have the lengths of the file, and a whole run gives a row."""

import argparse
import dataclasses
import json

import numpy as np
import pytest

from qerl_jax import config
from qerl_jax.generation import engine
from qerl_jax.model import architecture
from qerl_jax.rl import rollouts
from scripts import bench_recipe, recipe_timeline
from tests.test_tiny_run import QUICKSTART


def test_a_share_of_the_recorded_lengths_runs_into_the_limit():
    for sigma in ("0.5", "1"):
        free = bench_recipe.completion_lengths(sigma, 0.0, 4096)
        assert 230 < np.mean(free) < 270 and max(free) < 4096
        assert np.std(np.log(free)) == pytest.approx(float(sigma), rel=0.1)
        cut = bench_recipe.completion_lengths(sigma, 0.01, 4096)
        assert cut.count(4096) == 11 and len(cut) == 1024
    assert max(bench_recipe.completion_lengths("1", 0.0, 300)) == 300


def test_rewards_are_drawn_with_the_chance_of_the_problem():
    texts = [str(n) for n in range(4000)]
    for chance in ("0", "0.3", "1"):
        found = bench_recipe.reward(texts, [chance] * len(texts))
        assert np.mean(found) == pytest.approx(float(chance), abs=0.03)


def test_a_field_of_a_recipe_can_be_changed():
    cfg = config.load(QUICKSTART)
    changed = bench_recipe.with_field(cfg, "rollout.max_concurrent", "3")
    assert changed.rollout.max_concurrent == 3
    assert (
        bench_recipe.with_field(changed, "rollout.max_concurrent", "null").rollout.max_concurrent
        is None
    )
    assert bench_recipe.with_field(cfg, "model.weights", "nf4").model.weights == "nf4"


def test_a_timeline_is_drawn(tmp_path):
    found = {
        "seconds": 3.0,
        "spans": [("sample", 0.0, 1.0, 8), ("host", 1.0, 1.1, 8), ("update", 1.2, 3.0, 512)],
        "busy": [(0.5, 1.0), (2.0, 0.9)],
    }
    recipe_timeline.draw(found, tmp_path / "step.svg")
    assert "live rows" in (tmp_path / "step.svg").read_text()


def test_a_timeline_knows_the_last_rollout_and_when_nothing_ran():
    line = recipe_timeline.Timeline(
        spans=[("sample", 1.0, 2.0, 4), ("update", 5.5, 6.0, 64)],
        busy=[(1.0, 1.0), (5.2, 0.5), (5.8, 0.0)],
        marks=[5.0, 7.0],
    )
    assert line.last() == {
        "seconds": 2.0,
        "spans": [("update", 0.5, 1.0, 64)],
        "busy": [(0.2, 0.5), (0.8, 0.0)],
    }
    assert line.idle(5.0, 7.0) == 0.75 and line.idle(3.0, 4.0) is None


@pytest.mark.slow
@pytest.mark.parametrize("update", [False, True])
def test_a_recipe_runs_to_a_row_with_the_lengths_it_was_given(update, monkeypatch, tmp_path):
    arch = architecture.Architecture("qwen2", 512, 64, 96, 2, 4, 2, 16)
    monkeypatch.setitem(architecture.KNOWN, "tiny-shape", arch)
    for owner, name in ((engine, "Schedule"), (rollouts, "collect"), (rollouts, "make_sampler")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    cfg = config.load(QUICKSTART)
    cfg = dataclasses.replace(
        cfg,
        data=dataclasses.replace(cfg.data, max_prompt_length=256),
        rollout=dataclasses.replace(cfg.rollout, max_completion_length=40, max_concurrent=8),
        optim=dataclasses.replace(
            cfg.optim, per_device_train_batch_size=8, gradient_accumulation_steps=2
        ),
    )
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.toml").write_text(config.dump(cfg))
    (tmp_path / "qerl_jax").symlink_to(bench_recipe.ROOT / "qerl_jax")
    monkeypatch.setattr(bench_recipe, "ROOT", tmp_path)
    monkeypatch.setitem(bench_recipe.RECIPES, "tiny-shape", "tiny")
    given = [5, 9, 40, 7] * 4
    monkeypatch.setattr(bench_recipe, "completion_lengths", lambda *_: given)
    arguments = argparse.Namespace(
        shape="tiny-shape",
        sigma=["0.5"],
        truncated=[0.25],
        rollouts=3,
        rows=None,
        smollm2=None,
        set=["rollout.max_concurrent=4"],
        child="now",
        timeline=tmp_path / "timeline.json",
        profile=False,
    )
    told = [bench_recipe.measure_update(arguments)] if update else []
    if not update:
        arguments.rollouts = 4
        bench_recipe.measure(arguments, told.append)
        assert [row["rollouts"] for row in told] == [1, 2]
    row = told[-1]
    recorded = json.loads((tmp_path / "timeline.json").read_text())
    lanes = {lane for lane, *_ in recorded["spans"]}
    assert lanes == ({"update"} if update else set(recipe_timeline.LANES))
    assert all(0 <= start <= end <= recorded["seconds"] for _, start, end, _ in recorded["spans"])
    assert row["mean_length"] == np.mean(given) and row["truncated"] == 0.25
    assert 0 <= row["padding"] < 1 and row["programs"] > 0
    phases = sum(row[f"{phase}_s"] for phase in bench_recipe.PHASES)
    assert row["step_s"] == pytest.approx(phases + row["other_s"])
