"""Checks the input of a run, and decides all that can be decided before anything expensive starts."""

import dataclasses
import datetime
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from qerl_jax import config
from qerl_jax.aqn import exploration
from qerl_jax.checkpoint import hf_folder, peft, run_state
from qerl_jax.compilation.early_programs import EarlyPrograms
from qerl_jax.config import rules as config_rules
from qerl_jax.data import datasets, tokenizer
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.evaluation.evaluator import Evaluator
from qerl_jax.planning import memory
from qerl_jax.rewards import stock
from qerl_jax.rl import adapter_check, optimizer
from qerl_jax.system.checked import require
from qerl_jax.tools import environments
from qerl_jax.tracking import trackers
from qerl_jax.training import devices, run_folder, sources
from qerl_jax.training.position import schedule_step
from qerl_jax.training.random_streams import EVAL, NOISE, stream_key
from qerl_jax.training.stopping import Stop
from qerl_jax.training.task import Task, make_task


@dataclasses.dataclass(frozen=True)
class CheckedRun:
    """A run whose input was checked. Nothing was written yet, and no weights were loaded.

    Attributes:
        cfg: The config.
        plan: The memory that the run needs, and the config with what the plan chose.
        replicas: The replicas of the policy, and their devices.
        task: The problems, rewards and tools, and the policy without its weights.
        adapter: The folder of the adapter to start from; None for a new adapter.
        aqn: The noise of the sampling policy.
        evaluator: Measures held-out accuracy; None without evaluations.
        files: The checkpoints of the run folder.
        resumed: The step of the checkpoint from which the run continues; None for a new run.
        stored: What that checkpoint holds beside the state, see `Position.to_table`; empty for a new run.
        has_ended: Whether nothing is left to do: all steps are done, and what the run has trained is written.
        sources: Hashes of the user's code of rewards and tools when the run began, see `sources.hashes`.
        stop: Tells whether a signal has asked the run to end.
        early: The programs that are compiled before they are called.
        notes: Lines to show at the start of the run.
        began: Start of the check, in seconds of the monotonic clock.
        earlier_peak: Peak device memory of this process before the run, in bytes.
    """

    cfg: config.RunConfig
    plan: memory.Plan
    replicas: Replicas
    task: Task
    adapter: pathlib.Path | None
    aqn: exploration.Exploration
    evaluator: Evaluator | None
    files: run_state.StateFiles
    resumed: int | None
    stored: dict[str, Any]
    has_ended: bool
    sources: Mapping[str, str]
    stop: Stop
    early: EarlyPrograms
    notes: list[str]
    began: float
    earlier_peak: int

    def problem(self, position: int) -> datasets.Problem:
        """Returns the problem at a position in the order of the data, which repeats the problems in endless epochs."""
        problems, seed = self.task.problems, self.cfg.seed
        return datasets.batch(problems, position, batch_size=1, seed=seed)[0]


def check(
    cfg: config.RunConfig,
    *,
    problems: Sequence[datasets.Problem] | None = None,
    reward_functions: Sequence[stock.RewardFunction] | None = None,
    tools: Sequence[environments.Tool] | None = None,
    environment: environments.Tool | Mapping[str, environments.Tool] | None = None,
    stop: Stop | None = None,
    early: EarlyPrograms | None = None,
) -> CheckedRun:
    """Checks config, data, rewards, tools, memory and run folder; reads no weights, and writes nothing.

    Args:
        cfg: The run.
        problems: As for `trainer.train`.
        reward_functions: As for `trainer.train`.
        tools: As for `trainer.train`.
        environment: The `environment_factory` of `trainer.train`.
        stop: Tells whether a signal has asked the run to end; sampling checks it between chunks of tokens.
        early: What the run's programs will be compiled by. On a GPU it may start processes here, which the caller ends.

    Raises:
        ConfigError: If a field, the data or the folder's earlier run does not fit. It is a ValueError.
        RewardError: If a reward function fails on the first problems.
    """
    began, stop, hosts = time.monotonic(), stop or Stop(), Hosts.all()
    trackers.require(cfg.report_to)
    tokenizer.begin()
    if problems is None:
        datasets.begin(cfg.data)
    earlier = hosts.told(
        lambda: (before := run_folder.earlier_run(cfg)) and config.to_table(before)
    )
    replicas = devices.choose(cfg, hosts)
    plan, fraction = memory.plan(cfg, limit=memory.device_memory()), cfg.rollout.kv_cache_fraction
    rule = "this device does not report its memory: give rollout.kv_cache_tokens"
    can_divide = plan.limit is not None or fraction is None
    require(can_divide, "rollout.kv_cache_fraction", fraction, rule)
    plan.require()
    early = early or EarlyPrograms()
    if not replicas.devices:
        early.prepare(adapter_check.__name__)  # which imports the sampler and the updater, too
    earlier_peak = memory.peak_memory()
    adapter = _starting_adapter(cfg)
    # Hosts may be in several time zones, and a run may be resumed on another day.
    today = hosts.told(lambda: f"{datetime.datetime.now(datetime.UTC):%F}")
    dated = run_folder.with_date(cfg, earlier, today)
    task = make_task(dated, hosts, problems, reward_functions, tools, environment)
    notes = [*devices.about(cfg, replicas), *config_rules.advice(cfg), *config.about_tiers(cfg)]
    notes += [f"update: {plan.about_update}", *task.notes]
    if adapter is not None:
        notes += peft.about_template(adapter, task.tokenizer.chat_template)
    if "strftime_now" in task.tokenizer.chat_template:
        cfg = dated
    model, key = task.model, stream_key(cfg, EVAL)
    evaluator = Evaluator.of_run(
        *(cfg, model, task.tokenizer, key, notes.append, stop.poll, task.tools, replicas),
        free=plan.free,
        early=early,
    )
    notes += devices.about_slow_sampling(cfg, model)
    key = stream_key(cfg, NOISE)
    aqn = exploration.make_exploration(cfg.noise, model, key, task.total_steps)

    files = run_state.StateFiles(cfg.output_dir, cfg.save_total_limit)
    resumed = hosts.told(files.newest)
    stored = {} if resumed is None else hosts.told(lambda: files.supply(resumed))
    notes += files.notes
    hashes = hosts.told(lambda: sources.hashes(cfg, reward_functions))
    began_with = stored.get("progress", {}).get("sources", hashes)
    notes += sources.about_changes(cfg, began_with, hashes)
    has_ended = False
    if resumed is not None and earlier is not None:
        scored = stored["drawn"] - len(stored.get("open_groups", ()))
        now = schedule_step(cfg, resumed, scored)
        notes += _about_resuming(cfg, task, resumed, now, earlier)
        trained = run_folder.trained(cfg)
        is_written = hosts.told(lambda: trained.is_dir() and files.has_ended(resumed))
        has_ended = now >= task.total_steps and is_written
    return CheckedRun(
        *(cfg, plan, replicas, task, adapter, aqn, evaluator, files, resumed, stored, has_ended),
        *(began_with, stop, early, notes, began, earlier_peak),
    )


def _starting_adapter(cfg: config.RunConfig) -> pathlib.Path | None:
    """Returns the folder of the adapter to start from, or None; refuses one of another shape or scaling."""
    if cfg.model.adapter_name_or_path is None:
        return None
    folder = hf_folder.local_folder(cfg.model.adapter_name_or_path)
    lora = peft.read_lora(folder)
    for field in ("rank", "alpha", "train_norms", *peft.SHAPE_FIELDS):
        ours, theirs = getattr(cfg.lora, field), getattr(lora, field)
        require(ours == theirs, f"lora.{field}", ours, f"the adapter in {folder} needs {theirs!r}")
    return folder


def _about_resuming(
    cfg: config.RunConfig, task: Task, step: int, now: int, earlier: Mapping[str, Any]
) -> list[str]:
    """Returns lines about the step after which a run continues, and about its schedules if it was made longer.

    `now` is the position on the schedules.
    """
    total = task.total_steps
    line = f"resumed: the run in {cfg.output_dir} goes on after step {step} of {total}"
    if now >= total:
        line = (
            f"nothing left to do: the run in {cfg.output_dir} has ended after all of its {step} steps. Raise max_steps "
            "to continue it, or choose another output_dir"
        )
    before = config.from_table(config.RunConfig, earlier).total_steps(len(task.problems))
    if before == total:
        return [line]
    last = float(optimizer.learning_rate(cfg.optim, before)(max(0, now - 1)))
    rate = float(optimizer.learning_rate(cfg.optim, total)(now))
    follow = "learning rate and noise now follow" if cfg.noise else "the learning rate now follows"
    return [
        line,
        f"this run was planned for {before} optimizer steps, and now for {total}: {follow} the schedule "
        f"of {total} steps (the next rate is {rate:.3g}, the last one was {last:.3g})",
    ]
