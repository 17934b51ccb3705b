"""Tests whole runs whose rollouts end before their last rows do: `rollout.carry` and `rollout.stop_share`."""

import functools

import jax
import numpy as np
import pytest

from qerl_jax.generation.engine import Engine
from qerl_jax.tracking import logger
from qerl_jax.training.trainer import train
from tests import test_tiny_run as tiny
from tests.faults import harness


@pytest.fixture
def short_chunks(monkeypatch):
    """Rows are looked at after every second token, so that some are left of short completions."""
    of = functools.partial(Engine.of.__func__, chunk=2)
    monkeypatch.setattr(Engine, "of", classmethod(of))


def cfg_of(folder, length=24, **rollout):
    """Returns a config of four steps, each with 2 groups of 4."""
    rollout = {"num_generations": 4, "max_completion_length": length, **rollout}
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    noise = {"num_stages": 3}
    return harness.tiny(
        folder, rollout=rollout, optim=batch, noise=noise, max_steps=4, save_steps=1
    )


@pytest.mark.slow
@pytest.mark.usefixtures("short_chunks")
def test_a_run_stops_between_two_rollouts_and_goes_on_as_if_it_never_had(tmp_path):
    """Rows that were left, whole groups that waited, and the age of each token are in the checkpoint."""
    state = train(cfg_of(tmp_path / "whole", carry=4), quiet=True)
    rows = logger.read_metrics(tmp_path / "whole")
    assert all(0 <= row["carry/rows"] <= 4 and row["carry/groups_waiting"] <= 4 for row in rows)
    last = next(row["step"] for row in rows if row["carry/rows"])  # so there is something to lose
    assert rows[0]["carry/age_max"] == 0 < rows[-1]["carry/age"] <= rows[-1]["carry/age_max"]
    # P = 2 whole groups are learned from in each step.
    assert [row["epoch"] for row in rows] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    # Only tokens of groups that learn have a ratio.
    assert any("sampling/importance_sampling_ratio/age_1" in row for row in rows)
    stopped = cfg_of(tmp_path / "stopped", carry=4)
    train(stopped, quiet=True, on_step=lambda step, _: step < last)
    resumed = train(stopped, quiet=True)
    assert harness.results(tmp_path / "stopped") == harness.results(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, resumed, state)


@pytest.mark.slow
@pytest.mark.usefixtures("short_chunks")
def test_a_rollout_that_ends_with_a_share_of_its_rows_counts_the_others_as_truncated(tmp_path):
    """Without the field all rows end: by themselves, or at the limit."""
    train(cfg_of(tmp_path / "all", length=64), quiet=True, on_step=lambda *_: False)
    train(
        cfg_of(tmp_path / "most", length=64, stop_share=0.5), quiet=True, on_step=lambda *_: False
    )
    (every,), (most,) = (logger.read_metrics(tmp_path / name) for name in ("all", "most"))
    assert 0 < most["completions/clipped_ratio"] <= 0.5
    assert most["completions/mean_length"] < every["completions/mean_length"]
    texts = [
        [
            row["completion"]
            for row in harness.json_lines(tmp_path / name / "completions" / "step_000001.jsonl")
        ]
        for name in ("all", "most")
    ]
    assert all(whole.startswith(text) for whole, text in zip(*texts, strict=True))


@pytest.mark.slow
@pytest.mark.process
def test_a_run_that_is_killed_while_rows_go_on_loses_none_of_them(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = {
        # Some rows are then long.
        "rollout": {"num_generations": 4, "max_completion_length": 100, "carry": 8}
        | {"ignore_eos": True, "stop": ("7",)},
        "grpo": {"dynamic_sampling": {"max_rounds": 2}},
        "rewards": {"functions": ("token_hash_reward",)},
        **{"eval": None, "max_steps": 5, "save_steps": 1},
    }
    final = train(tiny.small(whole, **options), quiet=True)
    rows = logger.read_metrics(whole)
    assert max(row["carry/rows"] for row in rows) > 0 and rows[-1]["carry/age_max"] > 0
    process = harness.start(harness.written(tiny.small(killed, **options)))
    harness.wait_for_step(process, killed, 3, timeout=600)
    process.kill()
    process.communicate()
    resumed = train(tiny.small(killed, **options), quiet=True)
    assert harness.results(killed) == harness.results(whole)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, final.params)
