"""Tests the checks that a run makes of itself."""

import numpy as np
import pytest

from qerl_jax.rl import adapter_check, rollouts
from qerl_jax.tracking.logger import read_metrics
from qerl_jax.training import trainer
from tests.faults import harness
from tests.test_tiny_run import small


def test_the_share_is_the_slope_of_what_was_sampled_on_what_the_adapter_does():
    rng = np.random.default_rng(0)
    without, effect = rng.normal(size=(2, 4, 50))
    mask = rng.random((4, 50)) < 0.8
    noise = 0.1 * rng.normal(size=(4, 50))
    for share in (0, 0.5, 1):
        sampled = without + share * effect + noise
        found = adapter_check.adapter_share(without + effect, without, sampled, mask)
        assert found.known and abs(found.share - share) < 4 * found.error
        assert found.error == pytest.approx(0.1 / np.sqrt(mask.sum()), rel=0.3)
    # What lies outside of the mask does not count; an adapter that does nothing tells nothing.
    sampled[~mask] = 1e9
    assert adapter_check.adapter_share(without + effect, without, sampled, mask) == found
    assert not adapter_check.adapter_share(without, without, sampled, mask).known


def test_an_adapter_that_changes_less_than_rounding_tells_nothing():
    """Rounding is in the trainer's numbers alone, or in all; many tokens make neither into knowledge."""
    rng = np.random.default_rng(0)
    base, *roundings = rng.normal(size=(4, 8, 500))
    mask = np.ones((8, 500), bool)
    adapter, without, sampled = (base + 1e-6 * rounding for rounding in roundings)
    assert adapter_check.adapter_share(adapter, base, sampled, mask).error < 0.1
    assert not adapter_check.adapter_share(adapter, base, sampled, mask).known
    assert not adapter_check.adapter_share(adapter, without, sampled, mask).known


def test_a_few_tokens_that_rounding_changed_tell_nothing():
    """A policy is sure of most tokens; at two others the trainer's rounding with the adapter is large by chance."""
    rng = np.random.default_rng(0)
    without, effect, *roundings = 1e-3 * rng.standard_t(2, size=(4, 8, 20))
    mask, sampled = np.ones((8, 20), bool), without + roundings[0]
    effect[3, 7], effect[5, 2] = 0.5, -0.3
    assert not adapter_check.adapter_share(without + effect, without, sampled, mask).known
    effect += 0.1 * rng.normal(size=(8, 20))  # an adapter, of which the sampler knows nothing
    found = adapter_check.adapter_share(without + effect, without, sampled, mask)
    assert found.known and found.share + 3 * found.error < 0.5


def test_one_group_in_which_the_adapter_sampled_is_believed(monkeypatch):
    """A chance in one group must not end a run."""
    shares = ((0.1, 0.01, 0.1), (1.02, 0.01, 0.1), (0.1, 0.01, 0.2))
    without, whole, unclear = (adapter_check.AdapterShare(*share) for share in shares)
    monkeypatch.setattr(adapter_check, "_share_of", lambda *args: args[-1])
    check = lambda *groups: adapter_check.check_adapter(None, None, None, None, groups)
    assert check(whole, without) == check(without, whole) == {"sampling/adapter_share": 1.02}
    assert check(unclear, without) == check(without, unclear) == {}
    with pytest.raises(RuntimeError, match=r"the sampler shows 0.10 \+- 0.01"):
        check(without, without, without)


@pytest.mark.slow
def test_a_run_says_that_its_sampler_has_the_whole_adapter(tmp_path):
    trainer.train(small(tmp_path, max_steps=3), quiet=True)
    shares = [row.get("sampling/adapter_share") for row in read_metrics(tmp_path)]
    assert shares[0] is None  # before anything is learned
    assert shares[1] == pytest.approx(1, abs=0.05) and shares[2] == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_a_run_that_samples_without_its_adapter_ends(tmp_path, monkeypatch):
    collect = rollouts.collect

    def without(sampler, variables, *args, **options):
        variables = {k: v for k, v in variables.items() if k != "params"}
        return collect(sampler, variables, *args, **options)

    monkeypatch.setattr(rollouts, "collect", without)
    cfg = harness.tiny(tmp_path, max_steps=3)
    unlike = lambda completion_ids, **_: [sum(ids) % 7 / 7 for ids in completion_ids]
    with pytest.raises(RuntimeError, match="sampled without the adapter that is trained"):
        trainer.train(cfg, reward_functions=[unlike], quiet=True)
