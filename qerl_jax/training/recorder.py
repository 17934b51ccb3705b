"""Writes metrics, evaluations, the best adapter and checkpoints during a run, and handles its end."""

import json
import pathlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from qerl_jax.checkpoint import hf_folder, peft
from qerl_jax.model.transformer import as_computed
from qerl_jax.planning import memory
from qerl_jax.rewards.scoring import RewardError
from qerl_jax.rl import dynamic_sampling, update
from qerl_jax.system.files import write_whole, writing
from qerl_jax.tracking import health
from qerl_jax.tracking.logger import Logger, plain, read_metrics
from qerl_jax.training import guards, metrics
from qerl_jax.training.setup import PreparedRun
from qerl_jax.training.stopping import Stopped

type Callback = Callable[[int, dict[str, Any]], bool | None]


class Recorder:
    """Records the steps of a run.

    As a context manager it handles the end of the run. When a signal stops the run (`Stopped`), the state of the
    last complete step is saved. An unfinished step is dropped, and repeated when the run resumes; so is an
    interrupted evaluation.

    Attributes:
        trace: The current step; None before the first.
        health: Finds problems in the metrics so far.
    """

    def __init__(self, run: PreparedRun, logger: Logger, on_step: Callback | None):
        """Continues from the progress in the checkpoint; for an older checkpoint, from the metrics file."""
        self._run, self._logger, self._on_step = run, logger, on_step
        self._state, self._supply, self._sigma = run.state, run.supply, run.sigma
        self._saved = int(run.state.step)
        rows = read_metrics(run.cfg.output_dir) if run.leads else []
        self._best = max((row.get("eval/accuracy", -1.0) for row in rows), default=-1.0)
        self._best = run.progress.get("best", self._best)
        logger.num_tokens = run.progress.get("num_tokens", logger.num_tokens)
        self._pending = run.progress.get("pending")
        if run.hosts.told(lambda: any(row["step"] == self._saved for row in rows)):
            self._pending = None
        self.trace: metrics.Trace | None = None
        self.health = health.Health.of(run.cfg, rows)

    def begin(self) -> bool:
        """Does the work before the first step, and returns whether to continue.

        This is the evaluation of the untrained policy, or one that was interrupted when the run was stopped.
        """
        if self._pending is not None:
            return self.record(self._state, self._supply, self._pending, self._sigma)
        if self._run.evaluator and self._state.step == 0:
            return self.record(self._state, self._supply, {}, self._sigma)
        return True

    def record(
        self,
        state: update.TrainState,
        supply: dynamic_sampling.Supply,
        row: dict[str, Any],
        sigma: float | None,
    ) -> bool:
        """Writes the metrics of a step, with an evaluation if one is due, and returns whether to continue.

        It also writes `best` and `best.json` if held-out accuracy is the highest so far, and a checkpoint if one is
        due. An adaptive sigma is the only part of the noise in a checkpoint: all else follows from the step.

        Args:
            state: The state after the step.
            supply: The position in the data after it.
            row: Metrics of the step.
            sigma: The next sigma of an adaptive schedule; None for other schedules.
        """
        run, cfg, step = self._run, self._run.cfg, int(state.step)
        self._state, self._supply, self._pending, self._sigma = state, supply, row, sigma
        over = run.place(step, supply) >= run.total_steps
        every = cfg.eval.eval_steps if cfg.eval else 0
        if run.evaluator and (step == 0 or over or crosses(run, step, every)):
            began = time.perf_counter()
            row = row | run.evaluator(variables(run, state.params))
            row["perf/eval_time"] = time.perf_counter() - began
        row = {name: plain(value) for name, value in row.items()}
        self._logger.write(step, row)
        if run.leads and every and row.get("eval/accuracy", -1.0) > self._best:
            self._best = row["eval/accuracy"]
            folder = pathlib.Path(cfg.output_dir)
            export(run, folder / "best", state.params)
            table = {"step": step} | {k: v for k, v in row.items() if k.startswith("eval/")}
            write_whole(folder / "best.json", json.dumps(table, indent=2) + "\n")
        for warning in self.health.see(row | {"step": step}):
            self._logger.note(warning)
        self._pending = None
        goes_on = run.hosts.told(
            lambda: self._on_step is None or self._on_step(step, row) is not False
        )
        ends = over or not goes_on
        if step > 0 and (ends or crosses(run, step, cfg.save_steps)):
            self._save(ends=ends)
        return goes_on

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
        if isinstance(error, Exception):
            error.add_note(self._doing())
            step = int(self._state.step)
            # The state is still that of the last step. On several hosts the others have not stopped at the same place.
            if isinstance(error, RewardError) and self._run.hosts.count == 1 and step > self._saved:
                self._save()
            if self._saved:
                error.add_note(f"step {self._saved} is saved: the same command goes on from there")
            is_exhausted, asked = memory.exhausted(error)
            if is_exhausted and not isinstance(error, OSError):
                plan = self._run.memory or memory.estimate(self._run.cfg)
                limit = memory.device_memory()
                raise MemoryError(plan.about_exhaustion(self._phase(), asked, limit)) from error
        if not isinstance(error, Stopped):
            return
        step, cfg = int(self._state.step), self._run.cfg
        name = error.signal.name
        if step == 0:
            raise Stopped(
                error.signal, f"stopped by {name} before the first step was done: nothing to save"
            ) from error
        if step != self._saved:
            self._save()
        raise Stopped(
            error.signal,
            f"stopped by {name} after step {step} of {self._run.total_steps}, which is saved in "
            f"{cfg.output_dir}: the same command goes on from there",
        ) from error

    def _phase(self) -> memory.Phase:
        """Returns the phase of the device, from the finished phases of the step."""
        if self.trace is None or self._pending is not None:
            return "evaluation"
        return "update" if "reward" in self.trace.laps else "rollout"

    def _doing(self) -> str:
        """Returns in words what the run was doing."""
        if self.trace is None:
            return "before the first step"
        last = next(reversed(self.trace.laps), "start")
        after = {"start": "rollout", "rollout": "rewards", "reward": "update", "update": "log"}
        doing = "evaluation" if self._pending is not None else after[last]
        return f"in the {doing} of step {self.trace.step + 1} of {self._run.total_steps}"

    def _save(self, *, ends: bool = False) -> None:
        """Writes a checkpoint of the last complete step: its state, and the run's progress.

        Args:
            ends: Whether the run ends here, so that what it exports is of this step.
        """
        progress = {"num_tokens": self._logger.num_tokens, "best": self._best, "ends": ends}
        if self._run.sources:
            progress["sources"] = self._run.sources
        if self._pending is not None:
            progress["pending"] = {name: plain(value) for name, value in self._pending.items()}
        noise = {} if self._sigma is None else {"sigma": self._sigma}
        table = self._supply.to_table() | noise | {"progress": progress}
        guards.require_finite(learned_state(self._state), int(self._state.step))
        if self._run.leads:
            self._run.files.save(self._state, table)
        self._saved = int(self._state.step)


def learned_state(state: update.TrainState) -> dict[str, Any]:
    """Returns the parts of a state that updates change: parameters and optimizer state."""
    return {"params": state.params, "opt_state": state.opt_state}


def variables(run: PreparedRun, params: Any) -> dict[str, Any]:
    """Returns the variables for sampling, with `params` in the dtype of the model."""
    return {"params": as_computed(params, run.model.dtype), "frozen": run.frozen}


def crosses(run: PreparedRun, step: int, every: int) -> bool:
    """Whether one of the optimizer steps of the rollout that ended at `step` was a multiple of `every`."""
    stride = run.cfg.updates_per_rollout
    return every > 0 and step // every > (step - stride) // every


def export(run: PreparedRun, folder: pathlib.Path, params: Any) -> None:
    """Writes the trained weights: a PEFT adapter, or a whole model."""
    source = run.cfg.model.model_name_or_path
    with writing(folder):
        if run.model.lora:
            peft.export_adapter(folder, params, run.model.lora, source)
        else:
            hf_folder.export_model(
                folder,
                run.model,
                run.frozen | params,
                hf_folder.local_folder(source, weights=False),
            )
