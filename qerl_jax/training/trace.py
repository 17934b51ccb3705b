"""The times of one iteration of the training loop, and what reward functions log in it."""

import dataclasses
import time
import types
from typing import Any

import numpy as np

from pallas_kernels import runtime
from qerl_jax.generation.draft_control import Record
from qerl_jax.rewards import scoring
from qerl_jax.rl import rollouts


@dataclasses.dataclass
class Trace:
    """Timing and records of one iteration, which are filled in while it runs.

    Attributes:
        step: Optimizer steps done before it.
        total_steps: Optimizer steps of the whole run.
        records: Logs of the reward functions, one record per sampling round.
        started: Clock time at its start, in seconds.
        laps: Seconds spent in each phase.
        parked: How often a row was preempted (moved to the host) because the cache was full.
        drafted: Statistics of drafts.
        sampled_tokens: Number of tokens that were sampled.
    """

    step: int
    total_steps: int
    records: list[scoring.Record] = dataclasses.field(default_factory=list)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    laps: dict[str, float] = dataclasses.field(default_factory=dict)
    parked: int = 0
    drafted: Record = dataclasses.field(default_factory=Record)
    sampled_tokens: int = 0

    @property
    def extras(self) -> dict[str, Any]:
        """The extra arguments of reward functions, as in TRL."""
        state = types.SimpleNamespace(global_step=self.step, max_steps=self.total_steps)
        return {"trainer_state": state}

    def lap(self, phase: str) -> None:
        """Adds the time since the last lap to a phase."""
        elapsed = time.perf_counter() - self.started - sum(self.laps.values())
        self.laps[phase] = self.laps.get(phase, 0.0) + elapsed

    def metrics(self, learned: rollouts.Rollout) -> dict[str, float]:
        """Returns times, token rates of sampling and update, and the metrics that reward functions logged."""
        peak = (runtime.memory_stats() or {}).get("peak_bytes_in_use")
        optional = {
            "drafts/accepted_per_call": self.drafted.accepted_per_call,
            "drafts/speedup": self.drafted.speedup,
            "perf/peak_memory_gb": None if peak is None else peak / 1e9,
        }
        return {
            **self._logged(),
            "step_time": sum(self.laps.values()),
            **{f"perf/{phase}_time": seconds for phase, seconds in self.laps.items()},
            "perf/rollout_tokens_per_second": self.sampled_tokens / self.laps["rollout"],
            "perf/update_tokens_per_second": learned.num_tokens / self.laps["update"],
            "perf/parked_rows": self.parked,
            **{name: value for name, value in optional.items() if value is not None},
        }

    def columns(self) -> dict[str, list]:
        """Returns the columns that reward functions added, for all sampled rows; None for rows without a value."""
        columns: dict[str, list] = {name: [] for record in self.records for name in record.columns}
        for record in self.records:
            for name, values in columns.items():
                values += record.columns.get(name, [None] * record.rows)
        return columns

    def _logged(self) -> dict[str, float]:
        """Returns the mean of the values that reward functions logged under a name.

        Names of evaluation metrics are dropped: a logged eval/accuracy could be mistaken for the run's own.
        """
        logged: dict[str, list[float]] = {}
        for record in self.records:
            for name, values in record.values.items():
                logged.setdefault(name, []).extend(values)
        means = {name: float(np.mean(values)) for name, values in logged.items()}
        return {name: mean for name, mean in means.items() if not name.startswith("eval/")}
