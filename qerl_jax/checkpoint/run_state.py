"""The state of a run: written as it goes, restored when it resumes."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp


class StateFiles:
    """The checkpoints of a run folder, `checkpoints/<step>/`, each written whole or not at all (orbax)."""

    def __init__(self, run_folder: str | pathlib.Path, keep: int | None):
        """Opens the folder; `keep` newest checkpoints stay, or all."""
        self._manager = ocp.CheckpointManager(
            pathlib.Path(run_folder).absolute() / "checkpoints",
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, enable_async_checkpointing=False
            ),
        )

    def save(self, state: Any, supply: dict[str, Any] | None = None) -> None:
        """Writes the state under its step, and plain numbers beside it."""
        args = ocp.args
        both = args.Composite(state=args.StandardSave(state), supply=args.JsonSave(supply or {}))
        self._manager.save(int(state.step), args=both, force=True)

    def restore(self, like: Any) -> Any | None:
        """The newest state, with the shapes and types of `like`; None when there is none."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._read(self._manager.latest_step(), state=ocp.args.StandardRestore(abstract))

    def params(self, step: int | None = None) -> tuple[int, Any]:
        """The step, and what was trained by then: of a given step, or of the newest.

        Raises:
            FileNotFoundError: When there is no such checkpoint.
        """
        found = self._manager.all_steps()
        if not found or (step is not None and step not in found):
            raise FileNotFoundError(
                f"no checkpoint of step {step} in {self._manager.directory}; there are {sorted(found)}"
            )
        step = max(found) if step is None else step
        return step, self._read(step, state=ocp.args.StandardRestore())["params"]

    def supply(self) -> dict[str, Any] | None:
        """What was written beside the newest state; None when there is none."""
        return self._read(self._manager.latest_step(), supply=ocp.args.JsonRestore())

    def _read(self, step: int | None, **item: Any) -> Any | None:
        """One item of a step, by its name and how it is read; None when there is no step."""
        if step is None:
            return None
        (read,) = self._manager.restore(step, args=ocp.args.Composite(**item)).values()
        return read

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.close()
