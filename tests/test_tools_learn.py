"""Tests whole runs with tools on the embedded base."""

import dataclasses
import json

import numpy as np
import pytest

import qerl_jax
from examples import teach_calls
from qerl_jax import config
from qerl_jax.config import ToolsConfig
from qerl_jax.evaluation import pass_rates
from qerl_jax.tracking import logger
from qerl_jax.training.trainer import train
from tests.faults import harness
from tests.faults.harness import json_lines
from tests.test_tiny_run import completions_of, small


@pytest.mark.slow
def test_a_policy_learns_to_call_a_calculator_for_what_it_cannot_compute(tmp_path):
    """As it was taught, it starts with calls in a quarter of its answers."""
    teach_calls.teach().save_pretrained(tmp_path / "calls")
    cfg = config.load("calculator_arithmetic")
    model = dataclasses.replace(cfg.model, adapter_name_or_path=str(tmp_path / "calls"))
    folder = tmp_path / "run"
    changes = {"output_dir": str(folder), "max_steps": 8, "save_steps": 8}
    train(dataclasses.replace(cfg, model=model, **changes), quiet=True)
    rows = logger.read_metrics(folder)
    calls, rewards = ([row[x] for row in rows] for x in ("tools/call_frequency", "reward"))
    assert calls[0] < 0.4 < 0.6 < np.mean(calls[-3:])
    assert np.mean(rewards[-3:]) > rewards[0] + 0.1
    called = [talk for talk in completions_of(folder, 8) if len(talk["turns"]) > 1]
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
    """Rows of several turns continue in the cache, and sampler and trainer agree on every token."""
    options = {
        **{"max_steps": 4, "save_steps": 1, "tools": THINKS, "noise": None},
        "rollout": {"num_generations": 4, "max_completion_length": 80, "max_concurrent": 12},
        "grpo": {"dynamic_sampling": {"max_rounds": 2}},
    }
    train(small(tmp_path / "whole", **options), quiet=True)
    resumed = small(tmp_path / "resumed", **options)
    train(resumed, quiet=True, on_step=lambda step, _: step < 2)
    train(resumed, quiet=True)
    rows, *_ = results = harness.results(tmp_path / "whole")
    assert results == harness.results(tmp_path / "resumed") and len(rows) == 4
    for row in rows:
        assert row["turns/mean"] > 1.3 and row["turns/max"] == 3
        assert 0 < row["tools/tokens"] < row["completions/max_length"]
        assert row["sampling/sampling_logp_difference/max"] < 1e-3
        assert 0 < row["entropy"] < 3


@pytest.mark.slow
def test_a_policy_is_evaluated_and_filtered_with_the_environments_that_it_trained_in(tmp_path):
    """Rows name one of two environments. Sampling is greedy, so that the run and `qerl eval` sample alike."""
    here = "tests.qerl_jax.tools.environments_for_tests"
    names = ["asked", "silent"] * 8
    data = tmp_path / "rows.jsonl"
    with data.open("w") as file:
        for n, name in enumerate(names):
            row = {"question": f"What is {3 + n}+{20 - n}?", "answer": 23, "environment": name}
            file.write(json.dumps(row) + "\n")
    environments = {"asked": f"{here}:Asked", "silent": f"{here}:Silent"}
    held_out = {"dataset": str(data), "num_problems": 16, "reward": "Asked", "temperature": 0.0}
    run = qerl_jax.train(
        small(
            tmp_path / "run",
            max_steps=1,
            tools=dataclasses.replace(THINKS, functions=(), environments=environments),
            noise=None,
            data={"dataset": str(data), "name": None, "num_problems": None},
            rollout={"num_generations": 4, "max_completion_length": 60},
            eval=held_out,
        ),
        quiet=True,
    )
    logged = run.metrics.iloc[-1]
    assert logged["rewards/Asked/mean"] > 0 and 0 < logged["eval/accuracy"] <= 0.5
    before = qerl_jax.evaluate(run, str(data), split="train", quiet=True)["rows"]
    assert before["estimates"][0]["value"] == pytest.approx(logged["eval/accuracy"])
    assert before["protocol"]["tools"]["environments"] == environments
    (problems,) = (tmp_path / "run" / "eval").rglob("problems.jsonl")
    records = json_lines(problems)
    told = [any(m["role"] == "tool" for m in record["turns"][0]) for record in records]
    asked = [name == "asked" for name in names]
    assert [r["right"][0] for r in records] == [t and a for t, a in zip(told, asked, strict=True)]
    assert sum(told) > sum(record["right"][0] for record in records)
    # A protocol that is not the run's has no tools, unless the policy itself has some.
    options = {"protocol": "paper", "split": "train", "max_tokens": 60, "quiet": True}
    options |= {"samples": 1, "temperature": 0.0, "num_problems": 4, "reward": "accuracy_reward"}
    paper = qerl_jax.evaluate(run, str(data), output_dir=tmp_path / "paper", **options)["rows"]
    assert paper["protocol"]["tools"] is None
    able = run.policy().with_tools(run.config.tools)
    found = qerl_jax.evaluate(able, str(data), output_dir=tmp_path / "able", **options)["rows"]
    assert found["protocol"]["tools"] == before["protocol"]["tools"]
    band = {"low": 0.1, "high": 1, "samples": 2, "reward": "Asked"}
    kept, total = pass_rates.select(run.config, tmp_path / "kept.jsonl", **band)
    chosen = json_lines(tmp_path / "kept.jsonl")
    assert kept == len(chosen) > 0 and total == 16
    assert {row["environment"] for row in chosen} == {"asked"}
