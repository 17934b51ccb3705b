"""Tests which groups a step takes when rows go on in the next rollout."""

import collections
import dataclasses
import types

import jax
import pytest

from qerl_jax import config
from qerl_jax.rl.dynamic_sampling import Supply
from qerl_jax.training import gather
from qerl_jax.training.trace import Trace
from tests.qerl_jax.rl import test_open_groups as opened
from tests.qerl_jax.rl import test_rollouts as rolled

P, G = 2, rolled.GROUP


def run_with(**rollout):
    """Returns what sampling needs of a run: P problems a step, which repeat."""
    section = {"num_generations": G, "generation_batch_size": P * G, **rollout}
    cfg = types.SimpleNamespace(
        rollout=config.RolloutConfig(**section), generation_batch_size=P * G, prompts_per_rollout=P
    )
    problem = lambda position: rolled.PROBLEMS[position % len(rolled.PROBLEMS)]
    sampler = dataclasses.replace(opened.sampler(), max_concurrent=8)
    task = types.SimpleNamespace(tokenizer=rolled.tokens())
    return types.SimpleNamespace(cfg=cfg, problem=problem, sampler=sampler, task=task)


def steps(run, count, complete):
    """Yields the rollout, the positions and the supply of steps; each has another policy."""
    supply, texts = Supply(), collections.Counter()
    begins = lambda problems: lambda row, text: texts.update([text])
    for step in range(count):
        key, variables = jax.random.key(step), opened.policy(1 + step % 2)
        trace = Trace(step, count)
        sampled, positions, supply = complete(run, variables, trace, begins, supply, key, 0)
        yield sampled, positions.tolist(), supply, trace


def test_each_step_takes_the_oldest_whole_groups_and_each_group_is_taken_once():
    run, taken, known = run_with(carry=3), [], 0
    for step, (sampled, positions, supply, trace) in enumerate(steps(run, 4, gather._go_on)):
        # P + carry groups are begun first, and then P in each step.
        assert supply.drawn == 3 + P * (step + 1) and supply.scored == P * (step + 1)
        assert len(positions) == P and positions == sorted(positions)
        assert all(row is not None for row in sampled.stopped) and len(sampled.texts) == P * G
        whole = [group.position for group in supply.open_groups if not group.unfinished]
        assert not whole or max(positions) < min(whole)
        assert sum(len(group.unfinished) for group in supply.open_groups) <= 3
        taken += positions
        now = sum(group.num_tokens for group in supply.open_groups)
        assert trace.sampled_tokens == now - known + sampled.lengths.sum()
        known = now
    left = [group.position for group in supply.open_groups]
    assert sorted(taken + left) == [*range(3 + P * 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("share", "most"), [(0.5, 2), (0.99, 0)])
def test_a_share_of_the_rows_must_end(share, most):
    (sampled, positions, supply, _), *_ = steps(run_with(stop_share=share), 1, gather._from_start)
    assert (positions, supply.drawn) == ([0, 1], 2)
    unended = [len(ids) < opened.LONGEST for ids in sampled.completion_ids]
    left = [short and not stopped for short, stopped in zip(unended, sampled.stopped, strict=True)]
    assert sum(left) <= most and (sum(left) > 0) == (most > 0)
