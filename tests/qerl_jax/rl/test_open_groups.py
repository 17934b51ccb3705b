"""Tests rows that go on in the next rollout: each token is of the policy that sampled it, and nothing is sampled twice."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.aqn.draw import norm_noise
from qerl_jax.generation.engine import Engine, EngineSpec
from qerl_jax.generation.sampler import Sampler, row_keys
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.model.transformer import init_params, noise_shapes
from qerl_jax.rl import dynamic_sampling, grpo, open_groups, rollouts, update_metrics
from qerl_jax.rl.dynamic_sampling import Supply
from qerl_jax.rl.experience import PackedRows, make_experience
from qerl_jax.rl.objective import token_logps
from qerl_jax.rl.open_groups import OpenGroup
from tests.experiences import in_one_batch
from tests.qerl_jax.rl import test_rollouts as rolled

LONGEST, PROMPTS = 20, 3
ROWS = PROMPTS * rolled.GROUP


@functools.cache
def sampler(stops=rolled.STOPS[:8]):
    """Returns a sampler whose rows are looked at after every second token."""
    spec = EngineSpec(rolled.tokens().num_tokens, chunk=2, entropies=True)
    engine = Engine(rolled.policy_model(), spec, stop_tokens=stops, carries=True)
    params = SamplingParams(n=rolled.GROUP, max_tokens=LONGEST)
    return Sampler(engine, rolled.tokens(), params, rolled.PROMPT_WIDTH, max_concurrent=ROWS)


@functools.cache
def policy(number):
    """Returns variables with an adapter and noise of their own."""
    frozen = rolled.policy()[1]["frozen"]
    fresh = init_params(rolled.policy_model(), frozen, jax.random.key(number))
    shift = lambda x: x + 0.2 * jax.random.normal(jax.random.key(number), x.shape)
    noise = norm_noise(jax.random.key(number), 0.2, noise_shapes(rolled.ARCH))
    return {"params": jax.tree.map(shift, fresh), "frozen": frozen, "noise": noise}


def new():
    keys = row_keys(jax.random.key(0), PROMPTS, rolled.GROUP)
    return [OpenGroup.new(i, rolled.PROBLEMS[i], keys[i]) for i in range(PROMPTS)]


def sample(number, groups, version, leave, **options):
    return open_groups.sample(
        *(sampler(), policy(number), groups, version),
        leave=leave,
        rows=ROWS,
        num_prompts=PROMPTS,
        **options,
    )


@functools.cache
def over_two_policies():
    """Returns groups after a rollout that leaves rows, and after the next one, which has another policy."""
    first = sample(1, new(), 0, leave=4)
    return first, sample(2, first, 6, leave=0)


def rows_of(groups):
    return [row for group in groups for row in group.rows]


@pytest.mark.slow
def test_a_rollout_ends_when_few_enough_rows_are_left_and_the_next_one_ends_them():
    first, second = over_two_policies()
    left = [row for group in first for row in group.unfinished]
    assert 1 <= len(left) <= 4
    assert not any(group.unfinished for group in second)
    for before, after in zip(rows_of(first), rows_of(second), strict=True):
        np.testing.assert_array_equal(after.tokens[: len(before.tokens)], before.tokens)
        assert (len(after.tokens) > len(before.tokens)) == (before.ended is None)
    for before, after in zip(first, second, strict=True):
        pairs = zip(before.rows, after.versions, strict=True)
        for row, versions in pairs:
            new = len(versions) - len(row.tokens)
            assert versions.tolist() == [0] * len(row.tokens) + [6] * new


@pytest.mark.slow
def test_each_token_has_the_log_probability_of_the_policy_that_sampled_it():
    """That is computed by the trainer's forward pass over whole rows, for both policies."""
    rollout = open_groups.to_rollout(over_two_policies()[1], rolled.tokens())
    experience = make_experience(rollout, np.zeros((PROMPTS, rolled.GROUP)))
    scale = {"temperature": 1.0, "num_tokens": rolled.tokens().num_tokens}
    of_policies = [
        token_logps(rolled.policy_model(), policy(number), in_one_batch(experience), **scale)[0]
        for number in (1, 2)
    ]
    first, second = (np.asarray(logps)[: rollout.lengths.sum()] for logps in of_policies)
    versions = np.concatenate(rollout.versions)
    assert 0 < np.count_nonzero(versions) < len(versions)
    expected, other = np.where(versions == 0, (first, second), (second, first))
    sampled = np.concatenate(rollout.behaviour_logps)
    np.testing.assert_allclose(sampled, expected, atol=1e-4)
    assert np.abs(sampled - other).max() > 0.1  # the policies differ
    np.testing.assert_array_equal(experience.versions, versions)


@pytest.mark.parametrize("leave", [2, 5])
def test_under_one_policy_rows_that_are_left_and_go_on_are_the_rows_that_never_were(leave):
    """The position of a row's key goes on."""
    groups, calls = new(), 0
    while any(group.unfinished for group in groups):
        groups, calls = sample(1, groups, calls, leave=leave if calls < 2 else 0), calls + 1
    assert calls > 1
    alone = rollouts.collect(sampler(), policy(1), rolled.PROBLEMS, jax.random.key(0))
    rollout = open_groups.to_rollout(groups, rolled.tokens())
    assert (rollout.texts, rollout.stopped) == (alone.texts, alone.stopped)
    for name in ("prompt_ids", "completion_ids"):
        jax.tree.map(np.testing.assert_array_equal, getattr(rollout, name), getattr(alone, name))
    np.testing.assert_allclose(rollout.entropies, alone.entropies, rtol=1e-4)


def test_texts_of_rows_are_whole_and_come_once_when_they_have_ended():
    texts = {}
    first = sample(1, new(), 0, leave=4, on_text=texts.__setitem__)
    ended = [index for index, row in enumerate(rows_of(first)) if row.ended]
    assert sorted(texts) == ended
    second = sample(1, first, 1, leave=0, on_text=texts.__setitem__)
    assert [texts[i] for i in range(ROWS)] == [
        rolled.tokens().decode(row.tokens) for row in rows_of(second)
    ]


def test_open_groups_survive_being_written_as_json_bit_for_bit():
    first, second = over_two_policies()
    rollout = open_groups.to_rollout(second, rolled.tokens())
    rewards = np.zeros((PROMPTS, rolled.GROUP), np.float32)
    scored = rollouts.Scored(
        rollout, np.arange(PROMPTS, dtype=np.int32), rewards, rewards.reshape(-1, 1)
    )
    supply = Supply(9, dynamic_sampling.choose(scored, [2, 0]), tuple(first))
    assert supply.scored == 9 - PROMPTS
    table = json.loads(json.dumps(supply.to_table(), allow_nan=False))
    restored = Supply.from_table(table, rolled.PROBLEMS.__getitem__, rolled.tokens())
    assert restored.to_table() == supply.to_table()
    for ours, theirs in zip(restored.open_groups, first, strict=True):
        assert (ours.position, ours.problem) == (theirs.position, theirs.problem)
        np.testing.assert_array_equal(ours.keys, theirs.keys)
        for name in ("rows", "versions"):
            for a, b in zip(getattr(ours, name), getattr(theirs, name), strict=True):
                parts = [vars(x).values() if name == "rows" else [x] for x in (a, b)]
                for x, y in zip(*parts, strict=True):
                    np.testing.assert_array_equal(x, y)
                    assert getattr(x, "dtype", None) == getattr(y, "dtype", None)
    # What goes on is the same.
    again = sample(2, restored.open_groups, 6, leave=0)
    for ours, theirs in zip(rows_of(again), rows_of(second), strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.behaviour_logps, theirs.behaviour_logps)


def test_metrics_count_what_is_left_and_how_old_the_learned_tokens_are():
    first, second = over_two_policies()
    learned = open_groups.to_rollout(second, rolled.tokens())
    found = open_groups.metrics(first, learned, 10)
    rows = [group.rows[i] for group in first for i in group.unfinished]
    ages = 10 - np.concatenate(learned.versions)
    assert found == {
        "carry/rows": len(rows),
        "carry/tokens": sum(len(row.tokens) for row in rows),
        "carry/groups_waiting": sum(not group.unfinished for group in first),
        "carry/age": pytest.approx(ages.mean()),
        "carry/age_max": 10,
    }


def test_ratios_are_averaged_by_the_age_of_tokens_and_the_oldest_are_one_class():
    ages = np.array([0, 0, 1, 3, 7, 9], np.float32)
    ratios = np.array([1, 2, 3, 4, 6, 50])
    mask = jnp.array([True] * 5 + [False])
    batch = PackedRows(None, None, mask, jnp.zeros(6), None, {"ages": ages})
    drift = jax.device_get(update_metrics.drift(jnp.log(jnp.array(ratios, jnp.float32)), batch))
    counts = grpo.RowMetrics(np.ones(1), np.ones(1), None, None, None)
    _, joined, _ = update_metrics.joined([(counts, drift, 0.0)] * 2, 2)
    found = update_metrics.of_sampling(joined)
    name = "sampling/importance_sampling_ratio/age_"
    by_age = {key.removeprefix(name): value for key, value in found.items() if name in key}
    assert by_age == {"0": pytest.approx(1.5), "1": pytest.approx(3), "3": pytest.approx(5)}
