"""Metrics sent to TensorBoard, Weights & Biases or Trackio, beside `metrics.jsonl`.

Each tracker has `write(step, row)` and `close()`. A resumed run goes on under its name.
"""

import importlib.util
import os
import pathlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


class Tracker(Protocol):
    """A service that takes the metrics of a run."""

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Takes the metrics of a step."""

    def close(self) -> None:
        """Ends the run in the service."""


def require(names: Sequence[str]) -> None:
    """Checks that the packages of trackers are there, before any work is done.

    Raises:
        ValueError: If one is missing; it says which, and how to get it.
    """
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ValueError(
                f"report_to: got {name!r}; needs the package {_PACKAGES[name]}: "
                f"pip install 'qerl-jax[{name}]'"
            )


def start(
    names: Sequence[str],
    run_folder: str | pathlib.Path,
    *,
    step: int,
    run_name: str | None,
    settings: Mapping[str, Any],
) -> list[Tracker]:
    """Starts the trackers of those names for a run that stands at `step`.

    Args:
        names: Names of trackers: "tensorboard", "wandb", "trackio".
        run_folder: Folder of the run. TensorBoard's files go into its `tensorboard/`; `tracker_id`
            keeps the run's identity with the others.
        step: Number of optimizer steps done; 0 begins anew, anything else goes on.
        run_name: Name that is shown; absent means the folder's name.
        settings: Config of the run.
    """
    folder = pathlib.Path(run_folder)
    if not names:
        return []
    path = folder / "tracker_id"
    if step == 0 or not path.is_file():
        path.write_text(f"{folder.resolve().name}-{uuid.uuid4().hex[:8]}")
    identity, kinds = path.read_text(), {"wandb": _Wandb, "trackio": _Trackio}
    return [
        _TensorBoard(folder, step)
        if name == "tensorboard"
        else kinds[name](
            folder, identity, run_name or folder.resolve().name, step > 0, dict(settings)
        )
        for name in names
    ]


class _TensorBoard:
    def __init__(self, folder: pathlib.Path, step: int):
        import tensorboardX

        # Rows beyond the checkpoint will come again; so will the one of step 0.
        self._writer = tensorboardX.SummaryWriter(
            os.fspath(folder / "tensorboard"), purge_step=step + 1 if step else 0
        )

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(
        self, folder: pathlib.Path, identity: str, name: str, resumed: bool, settings: dict
    ):
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "qerl"),
            id=identity,
            name=name,
            dir=os.fspath(folder),
            config=settings,
            resume="allow" if resumed else "never",
        )
        # Its own counter refuses to go back to a checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        self._run.log({**row, "step": step})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(
        self, folder: pathlib.Path, identity: str, name: str, resumed: bool, settings: dict
    ):
        import trackio

        self._trackio = trackio
        # A name is the only identity of a run here.
        trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "qerl"),
            name=f"{name}-{identity[-8:]}",
            config=settings,
            resume="allow" if resumed else "never",
        )

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        self._trackio.log({k: v for k, v in row.items() if k != "step"}, step=step)

    def close(self) -> None:
        self._trackio.finish()
