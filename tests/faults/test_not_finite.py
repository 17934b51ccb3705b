"""Tests of NaN and infinity in a run: each costs one update, is counted, and can be replayed."""

import dataclasses
import functools
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qerl_jax
from qerl_jax.checkpoint.hf_folder import TINY
from qerl_jax.checkpoint.safetensors import Tensors
from qerl_jax.cli import main
from qerl_jax.rl import grpo, update
from qerl_jax.tracking import logger
from qerl_jax.training import groups, load, replay, trainer
from tests.faults import harness
from tests.model_folders import copy


def with_nan(tree):
    """Returns the tree with a NaN in its last leaf."""
    *leaves, last = jax.tree.leaves(tree)
    broken = last.at[(0,) * last.ndim].set(jnp.nan)
    return jax.tree.unflatten(jax.tree.structure(tree), [*leaves, broken])


def in_step(number, change, function):
    """A function that `change` calls, with its arguments, when it is called the nth time."""
    calls = itertools.count(1)
    changed = functools.partial(change, function)
    return lambda *given, **more: (changed if next(calls) == number else function)(*given, **more)


def of_rewards(advantages, rewards, **options):
    return advantages(np.where(np.arange(rewards.shape[1]) == 0, np.inf, rewards), **options)


def of_logps(experience, *arguments):
    made = experience(*arguments)
    logps = np.where(made.mask, np.nan, made.behaviour_logps).astype(np.float32)
    return dataclasses.replace(made, behaviour_logps=logps)


def of_gradients(gradient, *arguments):
    (loss, grads), counts = gradient(*arguments)
    return (loss, with_nan(grads)), counts


def of_weights(gradient, updater, policy, *arguments):
    params, *rest = policy
    return gradient(updater, (with_nan(params), *rest), *arguments)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """A run of six steps: into the 2nd to the 5th comes a NaN."""
    folder = tmp_path_factory.mktemp("run")
    places = (
        (grpo, "group_advantages", 2, of_rewards),
        (groups, "to_experience", 3, of_logps),
        (update, "summed_gradient", 4, of_gradients),
        (update, "summed_gradient", 5, of_weights),
    )
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        for module, name, number, change in places:
            patch.setattr(module, name, in_step(number, change, getattr(module, name)))
        # Weights that are not finite cannot show whether the sampler has the adapter.
        patch.setattr(trainer.guards, "is_due", lambda *_: False)
        cfg = harness.tiny(folder)
        see = update.Updater.__call__

        def seeing(self, state, *arguments):
            after, learned = see(self, state, *arguments)
            kept.append(jax.device_get((after.params, after.opt_state)))
            return after, learned

        patch.setattr(update.Updater, "__call__", seeing)
        state = trainer.train(cfg, quiet=True, reward_functions=[lengths])
    return folder, state, kept


def lengths(completion_ids, **_):
    return [sum(ids) % 7 / 7 for ids in completion_ids]


@pytest.mark.slow
def test_each_costs_one_update_and_is_counted(disturbed):
    folder, state, _ = disturbed
    rows = logger.read_metrics(folder)
    assert [row["updates/non_finite"] for row in rows] == [0, 1, 1, 1, 1, 0]
    assert [row["updates/skipped"] for row in rows] == [0, 1, 2, 3, 4, 4]
    assert (int(state.step), int(state.skipped)) == (6, 4)


@pytest.mark.slow
def test_weights_and_moments_are_as_they_were_before(disturbed):
    _, _, kept = disturbed
    for before, after in itertools.pairwise(kept[:5]):
        jax.tree.map(np.testing.assert_array_equal, before, after)
    for tree in kept:
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))
    changed = jax.tree.map(lambda a, b: (a != b).any(), kept[4][0], kept[5][0])
    assert any(jax.tree.leaves(changed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "said"),
    [
        (1, "row 0: advantages not finite"),
        pytest.param(2, "row 0: behaviour_logps not finite", marks=pytest.mark.slow),
        (3, "all is finite now: what was not came from the device"),
    ],
)
def test_each_is_kept_and_replayed_with_its_cause(step, said, disturbed):
    path = disturbed[0] / "non_finite" / f"step_{step:06d}.npz"
    lines = replay.run(path)
    assert lines[0].startswith(f"step {step}: loss ")
    assert any(line.startswith(said) for line in lines), lines
    assert any("gradient not finite" in line for line in lines) == (step < 3)


@pytest.mark.slow
def test_weights_that_stay_broken_end_the_run_before_anything_is_saved(
    tmp_path, monkeypatch, capsys
):
    def of_state(apply, state, *arguments, **options):
        after, learned = apply(state, *arguments, **options)
        return dataclasses.replace(after, params=with_nan(after.params)), learned

    path = harness.write_config(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(update, "apply", in_step(3, of_state, update.apply))
        patch.setattr(trainer.guards, "is_due", lambda *_: False)
        shown = harness.refused(capsys, "train", path)
    assert "is not finite after step 3, which no update" in shown
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
    assert main.main(["train", str(path)]) == 0
    whole = tmp_path / "whole"
    trainer.train(harness.tiny(whole), quiet=True)
    assert harness.results(tmp_path / "run") == harness.results(whole)


@pytest.fixture(scope="module")
def too_large(tmp_path_factory):
    """A base of finite numbers whose products overflow."""
    folder = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(TINY, folder)
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("up", "down")]
    tensors = {name: np.full_like(Tensors(TINY)[name], 9e29) for name in names}
    return copy(TINY, folder, tensors=tensors)


@pytest.mark.slow
def test_a_base_that_gives_nan_is_named_when_it_samples_and_scores(too_large):
    policy = qerl_jax.load(too_large, weights="bfloat16", quiet=True)
    with pytest.raises(ValueError, match="sampling: token 0 of row 0 has the log-probability nan"):
        policy.generate(["What is 2+3?"], max_tokens=4)
    with pytest.raises(ValueError, match="logprobs: completion 0 has the log-probability nan"):
        policy.logprobs(["What is 2+3?"], ["5"])


def test_a_run_stops_where_its_base_first_gives_nan(too_large, tmp_path, capsys):
    base = {"model_name_or_path": str(too_large), "weights": "bfloat16"}
    line = harness.refused(capsys, "train", harness.write_config(tmp_path / "run", model=base))
    assert "the logits are not finite" in line and "in the rollout of step 1" in line
    assert "cut off" not in line


def test_a_run_whose_base_is_overwritten_after_it_was_read_names_the_array(
    tmp_path, monkeypatch, capsys
):
    read = load.read_base

    def overwritten(*arguments, **options):
        base = read(*arguments, **options)
        return base | {"norm": {"scale": base["norm"]["scale"].at[3].set(jnp.nan)}}

    monkeypatch.setattr(load, "read_base", overwritten)
    line = harness.refused(capsys, "train", harness.write_config(tmp_path / "run"))
    assert "base: ['norm']['scale'] is not finite, though all numbers were" in line


@pytest.mark.slow
def test_a_run_whose_first_update_is_not_finite_stops(tmp_path, monkeypatch):
    gradient = in_step(1, of_gradients, update.summed_gradient)
    monkeypatch.setattr(update, "summed_gradient", gradient)
    message = "update: loss .*, grad_norm nan, .*: the first update"
    with pytest.raises(ValueError, match=message) as e:
        trainer.train(harness.tiny(tmp_path / "run"), quiet=True, reward_functions=[lengths])
    assert e.value.__notes__[0].startswith("in the update of step 1 ")
