"""The position of a run: all that changes from step to step, and that a checkpoint keeps."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from qerl_jax.aqn.exploration import Exploration
from qerl_jax.config import RunConfig
from qerl_jax.rl import dynamic_sampling, update
from qerl_jax.training.groups import Groups


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a run has done so far, beyond what it has learned.

    Attributes:
        sources: Hashes of the user's files with rewards and tools when the run began, by the paths that the config
            names.
        num_tokens: Tokens of all rows that were sampled, with their prompts.
        best: The highest held-out accuracy; -1 before the first evaluation.
        pending: Metrics of the last step if they are not written yet, because its evaluation has not ended.
    """

    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    num_tokens: int = 0
    best: float = -1.0
    pending: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Position:
    """The position of a run between two steps.

    Attributes:
        cfg: The run.
        state: What is trained; the next update donates its buffers.
        supply: The position in the data.
        sigma: The next sigma of an adaptive noise; None for other noise. All else of the noise follows from the step.
        progress: What was done so far.
        step: The number of optimizer steps that were done. It is read from `state` at once, since an update donates
            the buffers of the state that it gets.
    """

    cfg: RunConfig
    state: update.TrainState
    supply: dynamic_sampling.Supply
    sigma: float | None
    progress: Progress
    step: int

    @property
    def schedule_step(self) -> int:
        """The position on the run's schedules, in optimizer steps; see `schedule_step`."""
        return schedule_step(self.cfg, self.step, self.supply.scored)

    def after(
        self, aqn: Exploration, groups: Groups, state: update.TrainState, row: Mapping[str, Any]
    ) -> Self:
        """Returns the position after a step with these groups, state and metrics; `aqn` adapts its sigma."""
        sigma = aqn.adapted(self.sigma, self.schedule_step, row)
        progress = dataclasses.replace(self.progress, num_tokens=row["num_tokens"])
        step = int(state.step)
        return type(self)(self.cfg, state, groups.supply, sigma, progress, step)

    def with_progress(self, **changes: Any) -> Self:
        """Returns the same position with other values in `progress`."""
        return dataclasses.replace(self, progress=dataclasses.replace(self.progress, **changes))

    def to_table(self, *, ends: bool) -> dict[str, Any]:
        """Returns all but the state for a checkpoint, as plain JSON values.

        Args:
            ends: Whether the run ends here, so that what it exports is of this step.
        """
        progress = {name: value for name, value in vars(self.progress).items() if value is not None}
        sigma = {} if self.sigma is None else {"sigma": self.sigma}
        return self.supply.to_table() | sigma | {"progress": progress | {"ends": ends}}


def schedule_step(cfg: RunConfig, step: int, scored: int) -> int:
    """Returns a run's position on its schedules, in optimizer steps; the run ends at `total_steps`.

    With `max_steps` this is the number of steps that were done. With `num_train_epochs` it is the step that a run
    without dynamic sampling would have reached with the problems `scored` so far.
    """
    if cfg.num_train_epochs is None:
        return step
    return scored // cfg.prompts_per_rollout * cfg.updates_per_rollout
