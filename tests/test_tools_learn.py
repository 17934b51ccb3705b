"""Whole runs with tools on the embedded base."""

import dataclasses
import json

import numpy as np
import pytest

from qerl_jax import config
from qerl_jax.config import ToolsConfig
from qerl_jax.tracking import logger
from qerl_jax.training.trainer import train
from scripts import teach_calls
from tests.test_tiny_run import ROOT, small, without_times


@pytest.mark.slow
def test_a_policy_learns_to_call_a_calculator_for_what_it_cannot_compute(tmp_path):
    """It begins with calls in a quarter of its answers, as it was taught."""
    teach_calls.teach().save_pretrained(tmp_path / "calls")
    cfg = config.load(ROOT / "configs" / "calculator_arithmetic.toml")
    model = dataclasses.replace(cfg.model, adapter_name_or_path=str(tmp_path / "calls"))
    folder = tmp_path / "run"
    train(
        dataclasses.replace(cfg, output_dir=str(folder), model=model, max_steps=8, save_steps=8),
        quiet=True,
    )
    rows = logger.read_metrics(folder)
    calls = [row["tools/call_frequency"] for row in rows]
    rewards = [row["reward"] for row in rows]
    assert calls[0] < 0.4 < 0.6 < np.mean(calls[-3:])
    assert np.mean(rewards[-3:]) > rewards[0] + 0.1
    log = (folder / "completions" / "step_000008.jsonl").read_text().splitlines()
    talks = [json.loads(line) for line in log]
    called = [talk for talk in talks if len(talk["turns"]) > 1]
    assert called and all("[calculator] " in talk["completion"] for talk in called)


# The base writes "<think>3+4=": a call that it makes without being taught.
THINKS = ToolsConfig(
    ("calculator",),
    call_pattern="<think>(?P<argument>[^=]*)=",
    max_tool_calling_iterations=2,
    max_reply_tokens=4,
)


@pytest.mark.slow
def test_a_run_with_tools_scores_what_it_sampled_and_goes_on_after_an_interruption(tmp_path):
    """Sampler, with a cache that rows of several turns continue in, and trainer agree on every token."""
    options = {
        "max_steps": 4,
        "save_steps": 1,
        "tools": THINKS,
        "noise": None,
        "rollout": {"num_generations": 4, "max_completion_length": 80, "max_concurrent": 12},
        "grpo": {"dynamic_sampling": True, "max_sampling_rounds": 2},
        "eval": None,
    }
    train(small(tmp_path / "whole", **options), quiet=True)
    resumed = small(tmp_path / "resumed", **options)
    train(resumed, quiet=True, on_step=lambda step, _: step < 2)
    train(resumed, quiet=True)
    found = [without_times(logger.read_metrics(tmp_path / name)) for name in ("whole", "resumed")]
    assert found[0] == found[1] and len(found[0]) == 4
    for row in found[0]:
        assert row["turns/mean"] > 1.3 and row["turns/max"] == 3
        assert 0 < row["tools/tokens"] < row["completions/max_length"]
        assert row["sampling/sampling_logp_difference/max"] < 1e-3
        assert 0 < row["sampling/entropy"] < 3
