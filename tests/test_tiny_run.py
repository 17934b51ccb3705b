"""Whole runs on the embedded base: they learn, they survive a kill, and bad input leaves nothing behind."""

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from qerl_jax import checkpoint, cli, config, log
from qerl_jax.model import LoRA
from qerl_jax.train import train

ROOT = pathlib.Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.toml"


def quickstart(folder, **sections):
    """The quickstart config with changed fields, given as section={field: value} or field=value."""
    cfg = config.load(QUICKSTART)
    changes = {
        name: dataclasses.replace(getattr(cfg, name), **value) if isinstance(value, dict) else value
        for name, value in sections.items()
    }
    return dataclasses.replace(cfg, output_dir=str(folder), **changes)


def small(folder, **sections):
    """Seconds instead of minutes: 8 prompts x 4, six steps, a checkpoint every two."""
    defaults = {
        "max_steps": 6,
        "save_steps": 2,
        "data": {"num_problems": 200},
        "rollout": {"num_generations": 4},
        "optim": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
        "eval": None,
    }
    return quickstart(folder, **(defaults | sections))


def accuracies(folder):
    return [row["eval/accuracy"] for row in log.read_metrics(folder) if "eval/accuracy" in row]


def without_times(rows):
    return [
        {k: v for k, v in row.items() if not k.startswith("perf/") and k != "step_time"}
        for row in rows
    ]


def test_a_killed_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    final = train(small(whole), quiet=True)

    path = tmp_path / "small.toml"
    path.write_text(config.dump(small(killed)))
    process = subprocess.Popen(
        [sys.executable, "-m", "qerl_jax.cli", "train", str(path)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while not any(row["step"] >= 3 for row in log.read_metrics(killed)):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, "the run did not reach step 3"
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (killed / "adapter").exists()

    resumed = train(small(killed), quiet=True)
    assert int(resumed.step) == 6
    assert without_times(log.read_metrics(killed)) == without_times(log.read_metrics(whole))
    for ours, theirs in zip(
        jax.tree.leaves(resumed.params), jax.tree.leaves(final.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert sorted(p.name for p in (killed / "completions").iterdir()) == [
        f"step_{s:06d}.jsonl" for s in range(1, 7)
    ]

    rows = log.read_metrics(whole)
    assert rows[0]["aqn/sigma"] == 0.0 and rows[-1]["aqn/sigma"] > 0.0
    # Without noise sampler and trainer are one function of one base; float32 leaves rounding only.
    assert rows[0]["sampling/sampling_logp_difference/max"] < 1e-4

    model = checkpoint.load_policy(small(whole).model, small(whole).lora)[0]
    adapter = checkpoint.import_adapter(whole / "adapter", model)
    for ours, theirs in zip(jax.tree.leaves(adapter), jax.tree.leaves(final.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_several_updates_of_one_rollout_train_norms_and_reference_in_one_run(tmp_path):
    cfg = small(
        tmp_path / "run",
        max_steps=8,
        lora={"train_norms": True, "dropout": 0.1},
        grpo={
            "num_iterations": 2,
            "beta": 0.04,
            "old_logprobs": "recompute",
            "importance_sampling_correction": True,
        },
        noise={"scope": "both", "final_norm": True},
        rollout={"num_generations": 4, "generation_batch_size": 64},
        rewards={
            "functions": ("correct_and_well_formed_reward", "format_reward"),
            "weights": (1.0, 0.2),
        },
    )
    state = train(cfg, quiet=True)
    rows = log.read_metrics(cfg.output_dir)
    assert [row["step"] for row in rows] == [4, 8]
    assert rows[0]["kl"] > 0 and rows[1]["clip_ratio/region_mean"] >= 0
    lora = checkpoint.read_lora(tmp_path / "run" / "adapter")
    assert lora.train_norms
    model = checkpoint.load_policy(cfg.model, lora)[0]
    assert model.lora == LoRA(16, 16.0, 0.0, True)
    norms = checkpoint.import_adapter(tmp_path / "run" / "adapter", model)["layers"][
        "input_layernorm"
    ]["scale"]
    np.testing.assert_array_equal(norms, state.params["layers"]["input_layernorm"]["scale"])
    base = checkpoint.load_policy(cfg.model, lora)[1]["layers"]["input_layernorm"]["scale"]
    assert np.abs(np.asarray(norms) - np.asarray(base, np.float32)).max() > 0


@pytest.mark.slow
def test_quickstart_learns_and_shuffled_rewards_do_not(tmp_path):
    train(quickstart(tmp_path / "right"), quiet=True)
    before, after = accuracies(tmp_path / "right")
    assert after - before >= 0.25
    control = {"functions": ("tests.reward_controls:shuffled",)}
    train(quickstart(tmp_path / "shuffled", rewards=control, max_steps=30), quiet=True)
    before_control, after_control = accuracies(tmp_path / "shuffled")
    assert before_control == before
    # Twice the standard error of 512 problems is 0.04.
    assert after_control - before_control < 0.08


def test_a_short_run_learns_and_shuffled_rewards_do_not(tmp_path):
    short = {
        "max_steps": 16,
        "eval": {"num_problems": 256},
        "rollout": {"num_generations": 8},
        "optim": {"per_device_train_batch_size": 128, "gradient_accumulation_steps": 1},
        "data": {"num_problems": 2000},
        "log_completions": False,
    }
    train(quickstart(tmp_path / "right", **short), quiet=True)
    before, after = accuracies(tmp_path / "right")
    assert after - before >= 0.15
    short["rewards"] = {"functions": ("tests.reward_controls:shuffled",)}
    train(quickstart(tmp_path / "shuffled", **short), quiet=True)
    before_control, after_control = accuracies(tmp_path / "shuffled")
    assert before_control == before
    assert after_control - before_control < 0.1


BAD_RUNS = {
    "missing model": ({"model": {"model_name_or_path": "/nowhere/model"}}, "/nowhere/model"),
    "missing data": ({"data": {"dataset": "/nowhere/data.jsonl"}}, "/nowhere/data.jsonl"),
    "unknown reward": ({"rewards": {"functions": ("acuracy_reward",)}}, "acuracy_reward"),
    "raising reward": ({"rewards": {"functions": ("tests.reward_controls:raising",)}}, "KeyError"),
    "short reward": (
        {"rewards": {"functions": ("tests.reward_controls:one_short",)}},
        "1 values for 2 rows",
    ),
    "long prompt": (
        {"data": {"num_problems": 200, "max_prompt_length": 20}},
        "data.max_prompt_length",
    ),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_bad_input_is_one_error_before_a_run_folder_exists(case, tmp_path, capsys):
    changes, named = BAD_RUNS[case]
    path = tmp_path / "bad.toml"
    path.write_text(config.dump(small(tmp_path / "run", **changes)))
    assert cli.main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_another_config_may_not_resume_a_run(tmp_path):
    cfg = small(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(config.dump(cfg))
    with pytest.raises(config.ConfigError, match="holds a run whose optim, seed differ"):
        train(
            dataclasses.replace(
                cfg, seed=7, optim=dataclasses.replace(cfg.optim, learning_rate=1e-3)
            )
        )


def test_generate_prints_a_completion_of_each_prompt(capsys):
    assert (
        cli.main(
            [
                "generate",
                "What is (5-3)*3?",
                "What is 4+4+4?",
                "--temperature",
                "0",
                "--max-tokens",
                "40",
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out
    assert lines.count("<answer>") == 2


def test_env_names_versions_and_devices(capsys):
    assert cli.main(["env"]) == 0
    shown = capsys.readouterr().out
    assert f"jax {jax.__version__}" in shown and "device 0: cpu" in shown


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem
)
def test_every_config_loads_and_round_trips(path, tmp_path):
    cfg = config.load(path)
    (tmp_path / "again.toml").write_text(config.dump(cfg))
    assert config.load(tmp_path / "again.toml") == cfg


def test_completions_are_logged_with_their_rewards(tmp_path):
    cfg = small(tmp_path / "run", max_steps=1)
    train(cfg, quiet=True)
    lines = (tmp_path / "run" / "completions" / "step_000001.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 32
    mean = log.read_metrics(tmp_path / "run")[0]["reward"]
    assert np.isclose(np.mean([row["reward"] for row in rows]), mean)
