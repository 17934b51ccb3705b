"""Tests a step with an infinite advantage: it is skipped, kept, and explained by a replay."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from qerl_jax import config
from qerl_jax.api import settings
from qerl_jax.aqn import exploration
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.model.transformer import trainable
from qerl_jax.planning import memory
from qerl_jax.rl import update
from qerl_jax.rl.experience import Experience
from qerl_jax.training import replay

QUICKSTART = pathlib.Path(__file__).parents[3] / "configs" / "quickstart.toml"


def prepared(folder, **sections):
    """Writes a run's config into its folder, and returns it with the run's model, parameters and tokenizer."""
    optim = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    sections |= {"optim": optim, "rollout": {"num_generations": 2}}
    cfg = settings.run_config(config.load(QUICKSTART), sections)
    cfg = dataclasses.replace(cfg, output_dir=str(folder), grpo=config.GrpoConfig())
    config.write_run(folder, cfg)
    model, frozen, tokenizer = load_base(cfg.model, cfg.lora, cfg.seed)
    return cfg, model, *trainable(model, frozen, jax.random.key(0)), tokenizer


def experience():
    rng = np.random.default_rng(0)
    return Experience(
        prompts=rng.integers(0, 64, 9, np.int32),
        prompt_offsets=np.array([0, 3, 5, 8, 9]),
        completions=rng.integers(0, 64, 32, np.int32),
        offsets=np.arange(0, 33, 4),
        mask=np.ones(32, bool),
        behaviour_logps=np.full(32, -1, np.float32),
        advantages=np.array([1, -1, 1, -1, 1, np.inf, 1, -1], np.float32),
    )


@pytest.mark.slow
def test_a_skipped_step_is_written_and_runs_once_more(tmp_path):
    cfg, model, params, frozen, tokenizer = prepared(tmp_path)
    cfg, written = memory.plan(cfg, model.arch).cfg, []
    write = lambda failure: written.append(replay.write(tmp_path, failure))
    improve = update.make_updater(cfg, model, tokenizer.num_tokens, 4, on_non_finite=write)
    state = update.init_state(params, cfg.optim)
    state, metrics = improve(state, frozen, experience(), None, jax.random.key(1))
    # Two steps of two prompts: the one with the infinite advantage is skipped, the other is not.
    assert (int(state.step), int(state.skipped), metrics["updates/non_finite"]) == (2, 1, 1)

    (path,) = written
    assert path.parent == tmp_path / "non_finite" and path.stem in ("step_000000", "step_000001")
    lines = replay.run(path)
    assert lines[0].startswith(f"step {int(path.stem[5:])}: loss ") and "grad_norm nan" in lines[0]
    assert "gradient not finite: ['layers']['down']['down_proj']['b']" in lines
    assert sum("advantages not finite" in line for line in lines) == 1
    assert not any("weight" in line or "logps" in line for line in lines)


@pytest.mark.slow
def test_a_step_under_noise_of_each_groups_own_runs_once_more(tmp_path):
    cfg, model, params, *_ = prepared(tmp_path, noise={"per": "group", "scope": "both"})
    noise = exploration.make_exploration(cfg.noise, model, jax.random.key(3), 10)
    vectors = noise(5, 5, None).vectors
    rows = dataclasses.replace(experience(), noise=np.array([4, 0, 2, 7], np.int32))
    failure = update.NonFinite(5, params, rows, {}, vectors)
    lines = replay.run(replay.write(tmp_path, failure))
    assert lines[0].startswith("step 5: loss ")
    assert sum("advantages not finite" in line for line in lines) == 1


def test_only_the_first_three_steps_of_a_run_are_written(tmp_path):
    failure = update.NonFinite(0, {"a": np.ones(2)}, experience(), {}, None)
    failures = [dataclasses.replace(failure, step=step) for step in (3, 4, 5, 6)]
    paths = [replay.write(tmp_path, failure) for failure in failures]
    assert paths[3] is None
    assert sorted(tmp_path.glob("non_finite/*")) == paths[:3]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file: .*step_1\.npz"):
        replay.run(tmp_path / "step_1.npz")
