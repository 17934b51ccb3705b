"""Gathers the groups of a step: samples and scores them, chooses those to learn from, and computes advantages."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from qerl_jax import config
from qerl_jax.aqn.exploration import StepNoise
from qerl_jax.data import datasets
from qerl_jax.rewards import scoring
from qerl_jax.rl import dynamic_sampling, grpo, rollouts
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
        functools.partial(_sample, run, variables, trace, row_ended),
        position.supply,
        max_rounds=_max_rounds(run, position.schedule_step),
        informative=run.task.informative,
    )
    advantages = _advantages(run.cfg.grpo, chosen, run.task.weights)
    if run.cfg.grpo.dynamic_sampling:
        # Completions of a group that only fills the batch may still differ in form or length.
        advantages = np.where(run.task.informative(chosen)[:, None], advantages, 0)
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
    variables: dict[str, Any],
    trace: Trace,
    row_ended: Callable[[], None],
    drawn: int,
    sampling_round: int,
) -> rollouts.Scored:
    """Samples and scores the problems from position `drawn` on; the rounds of a step share its key."""
    cfg, count = run.cfg, run.cfg.prompts_per_rollout
    problems = datasets.batch(run.task.problems, drawn // count, batch_size=count, seed=cfg.seed)
    functions = run.task.functions if run.leads else []
    begin = scoring.beginner(functions, problems, cfg.rollout.num_generations)

    def on_text(row: int, text: str) -> None:
        row_ended()
        if begin is not None:
            begin(row, text)

    parked, drafted = run.sampler.engine.times_parked, run.sampler.engine.drafted
    key = jax.random.fold_in(stream_key(cfg, SAMPLE), trace.step)
    positions = np.arange(drawn, drawn + count, dtype=np.int32)
    rollout = rollouts.collect(
        *(run.sampler, variables, problems, key),
        first_row=sampling_round * count * cfg.rollout.num_generations,
        groups=positions,
        on_text=on_text,
    )
    trace.parked += run.sampler.engine.times_parked - parked
    trace.drafted += run.sampler.engine.drafted - drafted
    run.stop.poll_together()
    trace.lap("rollout")
    record = scoring.Record(len(rollout.texts))
    combined, per_function = rollouts.score(
        rollout, run.task.functions, run.task.weights, trace.extras, record, run.hosts
    )
    run.stop.poll_together()
    trace.records.append(record)
    trace.lap("reward")
    return rollouts.Scored(rollout, positions, combined, per_function)


def _advantages(
    cfg: config.GrpoConfig, scored: rollouts.Scored, weights: Sequence[float]
) -> jax.Array:
    """Computes the advantage of each completion [P, G] over the others of its prompt."""
    options = {"scale": cfg.scale_rewards, "estimator": cfg.advantage_estimator}
    if cfg.multi_objective_aggregation == "sum_then_normalize":
        return grpo.group_advantages(scored.rewards, **options)
    per_function = np.asarray(scored.per_function).reshape(*scored.rewards.shape, -1)
    return grpo.decoupled_advantages(per_function, np.asarray(weights, np.float32), **options)
