"""Writes metrics, evaluations, the best adapter and checkpoints during a run, and handles its end."""

import contextlib
import importlib.metadata
import json
import pathlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from qerl_jax import config
from qerl_jax.checkpoint import checksum, hf_folder, peft
from qerl_jax.planning import memory
from qerl_jax.rewards.scoring import RewardError
from qerl_jax.rl import rollouts
from qerl_jax.system.files import write_whole, writing
from qerl_jax.tracking import health, terminal
from qerl_jax.tracking.logger import Logger, Unheard, plain, read_metrics
from qerl_jax.training import dose, guards, metrics, run_folder
from qerl_jax.training.groups import Groups
from qerl_jax.training.load import PreparedRun
from qerl_jax.training.position import Position
from qerl_jax.training.stopping import Stopped
from qerl_jax.training.trace import Trace

type Callback = Callable[[int, dict[str, Any]], bool | None]


def open_log(run: PreparedRun, *, quiet: bool) -> Logger | Unheard:
    """Writes the config into the run folder, and opens its log; only the first process does so."""
    if not run.leads:
        return Unheard()
    cfg, folder = run.cfg, pathlib.Path(run.cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    config.write_run(folder, cfg, run.task.given_rows)
    names = ("log_completions", "report_to", "run_name")
    return Logger(
        folder,
        total_steps=run.task.total_steps,
        step=run.start.step,
        quiet=quiet,
        settings=config.to_table(cfg),
        **{name: getattr(cfg, name) for name in names},
    )


class Recorder:
    """Records the steps of a run.

    As a context manager it handles the end of the run. When a signal stops the run (`Stopped`), the last complete
    position is saved. An unfinished step is dropped, and repeated when the run resumes; so is an interrupted
    evaluation.

    Attributes:
        goes_on: Whether the run continues; false after `on_step` has returned False.
    """

    def __init__(self, run: PreparedRun, logger: Logger | Unheard, on_step: Callback | None):
        """Continues from the position at which the run starts."""
        self._run, self._logger, self._on_step = run, logger, on_step
        self._position, self._saved = run.start, run.start.step
        self._checksum = checksum.of_tree(run.frozen)
        self._trace: Trace | None = None
        self._has_warned, self.goes_on = False, True
        rows = read_metrics(run.cfg.output_dir) if run.leads else []
        if run.hosts.told(lambda: any(row["step"] == self._saved for row in rows)):
            self._position = self._position.with_progress(pending=None)
        self._health = health.Health.of(run.cfg, rows, run.task.tokenizer.unused_ends)
        run.notes.extend(dose.acted_before(run.cfg, rows))

    def begin(self) -> Position:
        """Evaluates the untrained policy, or repeats an evaluation that was stopped; returns the run's position."""
        position, pending = self._position, self._position.progress.pending
        if position.schedule_step < self._run.task.total_steps:
            self._logger.compiling(lambda: self._run.early.counts)
        if pending is not None or (self._run.evaluator and position.step == 0):
            return self._record(position, dict(pending or {}))
        return position

    def begin_step(self) -> Trace:
        """Begins a step, and returns its times, which are filled in while it runs."""
        self._logger.begin_step(self._run.cfg.generation_batch_size)
        self._trace = Trace(self._position.step, self._run.task.total_steps)
        return self._trace

    def __call__(self, position: Position, row: dict[str, Any], groups: Groups) -> Position:
        """Writes completions and metrics of a step, and what is due: an evaluation, a checkpoint.

        Takes the position after the step, and returns it with the best accuracy so far.
        """
        if row["completions/without_reward"] and not self._has_warned:
            self._has_warned = True
            self._run.notes.append(_about_unjudged(position.step, groups.sampled))
            self._logger.note(self._run.notes[-1])
        rows = metrics.completion_rows(
            groups.sampled, groups.chosen, groups.advantages, self._trace.columns()
        )
        self._logger.write_completions(position.step, rows)
        position = self._record(position, row)
        for line in dose.acted(self._run.cfg, self._health):
            self._run.notes.append(line)
            self._logger.note(line)
        return position

    def _record(self, position: Position, row: dict[str, Any]) -> Position:
        """Writes metrics, `best` and `best.json` if held-out accuracy is the highest so far, and what is due."""
        run, cfg, step = self._run, self._run.cfg, position.step
        self._position = position.with_progress(pending=row)
        over = position.schedule_step >= run.task.total_steps
        every = cfg.eval.eval_steps if cfg.eval else 0
        if run.evaluator and (step == 0 or over or _crosses(cfg, step, every)):
            began = time.perf_counter()
            self._logger.begin_step(run.evaluator.num_rows, "evaluation")
            variables = run.variables(position.state.params)
            row = row | run.evaluator(variables, self._logger.row_ended)
            row["perf/eval_time"] = time.perf_counter() - began
        row = {name: plain(value) for name, value in row.items()}
        self._logger.write(step, row)
        position = position.with_progress(pending=None)
        if run.leads and every and row.get("eval/accuracy", -1.0) > position.progress.best:
            position = position.with_progress(best=row["eval/accuracy"])
            folder = pathlib.Path(cfg.output_dir)
            export(run, folder / "best", position.state.params)
            table = {"step": step} | {k: v for k, v in row.items() if k.startswith("eval/")}
            write_whole(folder / "best.json", json.dumps(table, indent=2) + "\n")
        for warning in self._health.see(row | {"step": step}):
            self._logger.note(warning)
        self._position = position
        self.goes_on = run.hosts.told(
            lambda: self._on_step is None or self._on_step(step, row) is not False
        )
        ends = over or not self.goes_on
        if step > 0 and (ends or _crosses(cfg, step, cfg.save_steps)):
            self._save(ends=ends)
        return position

    def end(self) -> None:
        """Writes what the run has trained, and its report, and shows lines about them."""
        run, params = self._run, self._position.state.params
        if not run.leads:
            return
        folder = run_folder.trained(run.cfg)
        export(run, folder, params)
        self._logger.note(f"{folder.name} in {folder}")
        if closing := self._health.closing():
            self._logger.note(closing)
        self._write_report()
        if self._position.step:
            run.files.end(self._position.step)

    def _write_report(self) -> None:
        """Writes report.md and the page into the run folder, and shows a line about each."""
        from qerl_jax.tracking import card, report  # slow to import: the page draws charts

        run, folder = self._run, self._run.cfg.output_dir
        used = jax.tree.leaves(self._position.state.params)[0].sharding.device_set
        machine = card.Machine(
            next(iter(used)).device_kind,
            len(used) * run.hosts.count,
            {name: _version(name) for name in ("qerl-jax", "jax", "jaxlib")},
            time.monotonic() - run.began,
        )
        # A run whose metrics were removed has nothing to report.
        with contextlib.suppress(FileNotFoundError):
            path = card.write(folder, machine, run.notes, given_rows=run.task.given_rows)
            self._logger.note(f"report card in {path}")
            self._logger.note(f"page in {report.write([folder], with_pictures=False)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Saves the state if a signal or a reward's error has ended the run, and adds notes to an error.

        Raises:
            Stopped: If a signal has stopped the run, with a line about its progress.
            MemoryError: If the device ran out of memory, with the line of the memory plan and its setting.
        """
        run, step = self._run, self._position.step
        if isinstance(error, Exception):
            error.add_note(self._doing())
            # The position is still that of the last step; on several hosts it may not be that of the others.
            if isinstance(error, RewardError) and run.hosts.count == 1 and step > self._saved:
                self._save()
            if self._saved:
                error.add_note(f"step {self._saved} is saved: the same command goes on from there")
            if exhausted := run.plan.exhaustion(error, self._phase()):
                raise exhausted from error
        if isinstance(error, Stopped):
            if step not in (0, self._saved):
                self._save()
            saved = (
                f"after step {step} of {run.task.total_steps}, which is saved in {run.cfg.output_dir}: the same "
                "command goes on from there"
            )
            when = saved if step else "before the first step was done: nothing to save"
            raise Stopped(error.signal, f"stopped by {error.signal.name} {when}") from error

    def _phase(self) -> memory.Phase:
        """Returns the phase of the device, from the finished phases of the step."""
        if self._trace is None or self._position.progress.pending is not None:
            return "evaluation"
        return "update" if "reward" in self._trace.laps else "rollout"

    def _doing(self) -> str:
        """Returns in words what the run was doing."""
        if self._trace is None:
            return "before the first step"
        last = next(reversed(self._trace.laps), "start")
        after = {"start": "rollout", "rollout": "rewards", "reward": "update", "update": "log"}
        doing = "evaluation" if self._position.progress.pending is not None else after[last]
        return f"in the {doing} of step {self._trace.step + 1} of {self._run.task.total_steps}"

    def _save(self, *, ends: bool = False) -> None:
        """Writes a checkpoint of the last complete position; `ends` as for `Position.to_table`."""
        position, pending = self._position, self._position.progress.pending
        if pending is not None:
            position = position.with_progress(pending={k: plain(v) for k, v in pending.items()})
        guards.require_finite(position.state)
        guards.require_unchanged_base(self._run.frozen, self._checksum)
        if self._run.leads:
            self._run.files.save(position.state, position.to_table(ends=ends))
        self._saved = position.step


def _crosses(cfg: config.RunConfig, step: int, every: int) -> bool:
    """Whether one of the optimizer steps of the rollout that ended at `step` was a multiple of `every`."""
    stride = cfg.updates_per_rollout
    return every > 0 and step // every > (step - stride) // every


def export(run: PreparedRun, folder: pathlib.Path, params: Any) -> None:
    """Writes the trained weights: a PEFT adapter, or a whole model."""
    source, model = run.cfg.model.model_name_or_path, run.task.model
    with writing(folder):
        if model.lora:
            peft.export_adapter(folder, params, model.lora, source)
        else:
            base = hf_folder.local_folder(source, weights=False)
            hf_folder.export_model(folder, model, run.frozen | params, base)
            rollout = run.cfg.rollout
            hf_folder.state_ends(folder, rollout.stop_token_ids or (), rollout.stop or ())


def _about_unjudged(step: int, scored: rollouts.Scored) -> str:
    """Returns a warning about completions without a reward, which is shown once per run."""
    unjudged = np.flatnonzero(np.isnan(scored.rewards))
    row, group = unjudged[0], unjudged[0] // scored.rollout.num_generations
    prompt, text = scored.rollout.problems[group].prompt, scored.rollout.texts[row]
    return (
        f"warning: in step {step} every reward function returned None for {len(unjudged)} of {scored.rewards.size} "
        "completions. They are left out of baseline and loss; completions/without_reward counts them in every step. "
        f"The first one answers {terminal.asked(prompt)[:200]!r} with {text[:200]!r}."
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
