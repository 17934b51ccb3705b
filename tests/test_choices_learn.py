"""Tests options of noise and of ratio bounds in whole runs on the embedded base: each learns and resumes exactly."""

import jax
import numpy as np
import pytest

from qerl_jax.tracking import logger
from qerl_jax.training.trainer import train
from tests.faults import harness
from tests.faults.harness import quickstart
from tests.test_tiny_run import small

# Enough to learn something within a few steps.
SHORT = {
    "rollout": {"num_generations": 8, "max_completion_length": 33},
    "optim": {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1},
    "data": {"num_problems": 2000},
    "log_completions": False,
}
RECOMPUTE = {"old_logprobs": "recompute", "epsilon_high": None}
LOUD = {"sigma_start": 5e-2, "sigma_end": 2e-2, "num_stages": 4}
TWO = {"functions": ("correct_and_well_formed_reward", "accuracy_reward")}
# What differs from the quickstart with loud noise.
CHOICES = {
    "noise per group": {"noise": LOUD | {"per": "group"}},
    "noise per group, on both sides": {"noise": LOUD | {"per": "group", "scope": "both"}},
    "noise per sequence": {"noise": LOUD | {"per": "sequence"}},
    "noise per token": {"noise": LOUD | {"per": "token"}},
    "the published estimator": {"noise": LOUD | {"estimator": "published"}},
    "sigma follows entropy": {"noise": LOUD | {"adaptive": {"metric": "entropy", "target": 0.1}}},
    "sigma follows the divergence": {
        "noise": LOUD | {"sigma_end": 1e-3, "adaptive": {"metric": "kl", "target": 1e-4}}
    },
    "sigma follows the reward": {"noise": LOUD | {"adaptive": {"metric": "reward", "target": 0.6}}},
    "GSPO": {
        "grpo": RECOMPUTE
        | {"loss_type": "grpo", "importance_sampling_level": "sequence"}
        | {"epsilon": 3e-4, "epsilon_high": 4e-4}
    },
    "dual clip": {"grpo": {"delta": 1.5}},
    "IcePop": {
        "grpo": RECOMPUTE
        | {"mismatch": {"correction": {"mode": "token_mask", "clip_min": 0.5, "clip_max": 5.0}}}
    },
    "mask of tokens": {"grpo": {"mismatch": {"mask": {"level": "token", "ratio_max": 1.2}}}},
    "mask of rows by the geometric mean": {
        "grpo": {"mismatch": {"mask": {"level": "geometric", "ratio_max": 1.02}}}
    },
    "groups chosen by one reward": {
        "grpo": {"dynamic_sampling": {"metric": "accuracy_reward"}},
        **{"rewards": TWO | {"weights": (1.0, 0.0)}, "noise": {}},
    },
    "epochs of dynamic sampling": {
        "grpo": {"dynamic_sampling": {}},
        **{"max_steps": None, "num_train_epochs": 1, "data": {"num_problems": 96}},
    },
    "CISPO": {"grpo": {"loss_type": "cispo", "epsilon_high": 5.0}},
    "SAPO": {"grpo": {"loss_type": "sapo"}},
    "LUSPO": {"grpo": RECOMPUTE | {"loss_type": "luspo", "importance_sampling_level": "sequence"}},
    "VESPO": {"grpo": RECOMPUTE | {"loss_type": "vespo", "mismatch": {"correction": {}}}},
    "each reward by itself": {
        "grpo": {"multi_objective_aggregation": "normalize_then_sum"},
        "rewards": TWO | {"weights": (1.0, 0.5)},
    },
    "tokens of high entropy": {"grpo": {"top_entropy_quantile": 0.2}},
    "entropy bonus": {"grpo": {"entropy": {"adaptive": True, "coef": 0.01, "target": 0.3}}},
    "an adapter of several shapes": {
        "lora": {
            **{"rank": 4, "alpha": 16.0, "alpha_pattern": {"v_proj": 32.0}, "use_rslora": True},
            "target_modules": ("q_proj", "v_proj", "gate_proj", "down_proj"),
            "rank_pattern": {"down_proj": 16, "layers.0.self_attn.q_proj": 2},
        },
    },
    "off-policy sequence mask": {"grpo": {"mismatch": {"off_policy_threshold": 0.01}}},
}


@pytest.mark.slow
def test_a_run_that_goes_on_from_an_adapter_learns_and_stays_near_it(tmp_path):
    """The reference is that adapter, so the KL starts at 0."""
    short = SHORT | {"max_steps": 4, "eval": None}
    train(quickstart(tmp_path / "first", **short), quiet=True)
    short["model"] = {"adapter_name_or_path": str(tmp_path / "first" / "adapter")}
    short["grpo"] = {"reference": {"beta": 0.01}}
    train(quickstart(tmp_path / "second", **short), quiet=True)
    first, second = (logger.read_metrics(tmp_path / name) for name in ("first", "second"))
    assert second[0]["kl"] == 0 and second[-1]["kl"] > 0
    assert second[-1]["reward"] > first[0]["reward"] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_learns(choice, tmp_path):
    """Each makes eight updates; shuffled rewards teach nothing, as `test_tiny_run.py` shows."""
    short = SHORT | {"max_steps": 8, "eval": None, "noise": LOUD}
    train(quickstart(tmp_path / "run", **(short | CHOICES[choice])), quiet=True)
    rows = logger.read_metrics(tmp_path / "run")
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-2:]) - np.mean(rewards[:2]) > 0.1
    assert all(np.isfinite(row["loss"]) for row in rows)
    noisy = [row for row in rows if row["aqn/sigma"] > 0]
    # Where noise acts on one side the two policies differ, and the tail is longer than the mean.
    for row in noisy:
        apart = row["sampling/kl_k3"] > 1e-6
        assert apart == ("both sides" not in choice)
        found = [row[f"sampling/sampling_logp_difference/{x}"] for x in ("mean", "p99", "max")]
        assert found == sorted(found)
    assert all(0 < row["entropy"] < 3 for row in rows)
    if "mask" in choice or choice == "IcePop":
        assert all(0 <= row["sampling/masked_mean"] < 1 for row in rows)
    if choice == "entropy bonus":
        assert len({row["entropy_coef"] for row in rows}) > 2
    if "mask of" in choice:
        assert max(row["sampling/masked_mean"] for row in rows) > 0
    if "follows" in choice:
        assert len({row["aqn/sigma"] for row in noisy}) > 1


ADAPTIVE = {"adaptive": {"target": 0.01}, "num_stages": 4}
KL = {"sigma_start": 0.5, "adaptive": {"target": 1e-3, "metric": "kl"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "grpo"),
    [
        (ADAPTIVE, {}),
        ({"per": "group", "scope": "both", "sigma_start": 5e-2, "num_stages": 4}, {}),
        (ADAPTIVE | KL, {"entropy": {"adaptive": True, "coef": 0.01, "target": 1.0}}),
    ],
    ids=["adaptive", "per group", "divergence, entropy bonus"],
)
def test_noise_goes_on_after_an_interruption_as_if_there_had_been_none(noise, grpo, tmp_path):
    options = {"max_steps": 5, "save_steps": 1, "noise": noise}
    options["grpo"] = {"num_iterations": 1} | grpo
    whole = train(small(tmp_path / "whole", **options), quiet=True)
    resumed = small(tmp_path / "resumed", **options)
    train(resumed, quiet=True, on_step=lambda step, _: step < 3)
    assert len(logger.read_metrics(tmp_path / "resumed")) == 3
    state = train(resumed, quiet=True)
    rows, *_ = results = harness.results(tmp_path / "whole")
    assert results == harness.results(tmp_path / "resumed") and len(rows) == 5
    assert len({row["aqn/sigma"] for row in rows}) > 2
    jax.tree.map(np.testing.assert_array_equal, state, whole)
