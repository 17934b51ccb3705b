"""Gathers the groups of a step: samples and scores them, chooses those to learn from, and computes advantages."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from qerl_jax import config
from qerl_jax.aqn.exploration import StepNoise
from qerl_jax.data import datasets
from qerl_jax.generation.sampler import row_keys
from qerl_jax.rewards import scoring
from qerl_jax.rl import dynamic_sampling, grpo, open_groups, rollouts
from qerl_jax.rl.open_groups import OpenGroup
from qerl_jax.training.groups import Groups
from qerl_jax.training.load import PreparedRun
from qerl_jax.training.position import Position
from qerl_jax.training.random_streams import SAMPLE, stream_key
from qerl_jax.training.trace import Trace


def gather(
    run: PreparedRun,
    position: Position,
    noise: StepNoise,
    trace: Trace,
    row_ended: Callable[[], None],
) -> Groups:
    """Samples and scores groups of completions until there are enough to learn from.

    `trace` gets the times and what reward functions log, and `row_ended` is called when a row has ended, in any thread.
    """
    variables = run.variables(position.state.params) | noise.variables
    chosen, sampled, supply, metrics = dynamic_sampling.gather(
        functools.partial(_sample, run, position, variables, trace, row_ended),
        position.supply,
        max_rounds=_max_rounds(run, position.schedule_step),
        # An update with noise has that of one rollout.
        carries_over=not noise.in_updates,
        informative=run.task.informative,
    )
    advantages = _advantages(run.cfg.grpo, chosen, run.task.weights)
    if run.cfg.grpo.dynamic_sampling:
        # Completions of a group that only fills the batch may still differ in form or length.
        advantages = np.where(run.task.informative(chosen)[:, None], advantages, 0)
    if run.cfg.rollout.carry:
        metrics |= open_groups.metrics(supply.open_groups, chosen.rollout, position.step)
    return Groups(sampled, chosen, advantages, supply, metrics)


def _max_rounds(run: PreparedRun, schedule_step: int) -> int | None:
    """Returns the most rounds of dynamic sampling for a rollout; None without it."""
    if not run.cfg.grpo.dynamic_sampling:
        return None
    most = run.cfg.grpo.dynamic_sampling.max_rounds
    if run.cfg.num_train_epochs is None:
        return most
    # The last epoch has only this many problems left.
    return min(most, (run.task.total_steps - schedule_step) // run.cfg.updates_per_rollout)


def _sample(
    run: PreparedRun,
    position: Position,
    variables: dict[str, Any],
    trace: Trace,
    row_ended: Callable[[], None],
    supply: dynamic_sampling.Supply,
) -> tuple[rollouts.Scored, dynamic_sampling.Supply]:
    """Samples and scores P groups; the rounds of a step share its key.

    `position` is that of the step; returns also the supply after the round.
    """
    engine, complete = run.sampler.engine, _from_start if run.cfg.rollout.carry == 0 else _go_on
    parked, drafted = engine.times_parked, engine.drafted
    key = jax.random.fold_in(stream_key(run.cfg, SAMPLE), trace.step)
    first_row = (supply.drawn - position.supply.drawn) * run.cfg.rollout.num_generations
    begins = functools.partial(_on_text, run, row_ended)
    rollout, positions, supply = complete(run, variables, trace, begins, supply, key, first_row)
    trace.parked += engine.times_parked - parked
    trace.drafted += engine.drafted - drafted
    run.stop.poll_together()
    trace.lap("rollout")
    record = scoring.Record(len(rollout.texts))
    combined, per_function = rollouts.score(
        rollout, run.task.functions, run.task.weights, trace.extras, record, run.hosts
    )
    run.stop.poll_together()
    trace.records.append(record)
    trace.lap("reward")
    return rollouts.Scored(rollout, positions, combined, per_function), supply


def _on_text(
    run: PreparedRun, row_ended: Callable[[], None], problems: Sequence[datasets.Problem]
) -> Callable[[int, str], None]:
    """Returns the function to call when a row of these problems has ended."""
    functions = run.task.functions if run.leads else []
    begin = scoring.beginner(functions, problems, run.cfg.rollout.num_generations)

    def on_text(row: int, text: str) -> None:
        row_ended()
        if begin is not None:
            begin(row, text)

    return on_text


# What samples a round: P whole groups, their positions, and the supply after it.
type _Round = tuple[rollouts.Rollout, np.ndarray, dynamic_sampling.Supply]


def _from_start(run, variables, trace, begins, supply, key, first_row) -> _Round:
    """Samples the next P problems, until all rows have ended or `rollout.stop_share` of them."""
    rollout, count = run.cfg.rollout, run.cfg.prompts_per_rollout
    positions = np.arange(supply.drawn, supply.drawn + count, dtype=np.int32)
    problems, limits = [run.problem(position) for position in positions.tolist()], {}
    if rollout.stop_share is not None:
        # The sum keeps 1 - 0.99 of 100 rows from being none.
        limits["leave"] = int(run.cfg.generation_batch_size * (1 - rollout.stop_share) + 1e-6)
    options = {"first_row": first_row, "groups": positions, "on_text": begins(problems)}
    sampled = rollouts.collect(run.sampler, variables, problems, key, **options, **limits)
    trace.sampled_tokens += int(sampled.sampled_lengths.sum())
    return sampled, positions, dataclasses.replace(supply, drawn=supply.drawn + count)


def _go_on(run, variables, trace, begins, supply, key, first_row) -> _Round:
    """Samples open groups and new ones, P + `rollout.carry` in all, until at most `carry` rows have not ended.

    A group has one unfinished row or more, so at least P groups are then whole; the oldest are taken.
    """
    cfg, count, carry = run.cfg, run.cfg.prompts_per_rollout, run.cfg.rollout.carry
    drawn = supply.drawn + count + carry - len(supply.open_groups)
    positions = range(supply.drawn, drawn)
    keys = row_keys(key, len(positions), cfg.rollout.num_generations, first_row)
    new = [
        OpenGroup.new(position, run.problem(position), keys_of_group)
        for position, keys_of_group in zip(positions, keys, strict=True)
    ]
    groups = [*supply.open_groups, *new]
    limits = {"leave": carry, "rows": cfg.generation_batch_size + carry, "num_prompts": count}
    on_text, known = begins([group.problem for group in groups]), sum(g.num_tokens for g in groups)
    groups = open_groups.sample(
        run.sampler, variables, groups, trace.step, on_text=on_text, **limits
    )
    trace.sampled_tokens += sum(group.num_tokens for group in groups) - known
    whole = [group for group in groups if not group.unfinished][:count]
    left = tuple(group for group in groups if group not in whole)
    rollout = open_groups.to_rollout(whole, run.task.tokenizer)
    supply = dataclasses.replace(supply, drawn=drawn, open_groups=left)
    return rollout, np.array([group.position for group in whole], np.int32), supply


def _advantages(
    cfg: config.GrpoConfig, scored: rollouts.Scored, weights: Sequence[float]
) -> jax.Array:
    """Computes the advantage of each completion [P, G] over the others of its prompt."""
    options = {"scale": cfg.scale_rewards, "estimator": cfg.advantage_estimator}
    if cfg.multi_objective_aggregation == "sum_then_normalize":
        return grpo.group_advantages(scored.rewards, **options)
    per_function = np.asarray(scored.per_function).reshape(*scored.rewards.shape, -1)
    return grpo.decoupled_advantages(per_function, np.asarray(weights, np.float32), **options)
