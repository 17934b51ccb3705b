"""Sends metrics to TensorBoard, Weights & Biases or Trackio, in addition to `metrics.jsonl`.

A resumed run continues under its name.
"""

import dataclasses
import importlib.util
import os
import pathlib
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


@dataclasses.dataclass(frozen=True)
class Tracker:
    """A service that records the metrics of a run.

    Attributes:
        write: Records the metrics of a step: write(step, metrics).
        close: Ends the run in the service.
    """

    write: Callable[[int, Mapping[str, Any]], Any]
    close: Callable[[], None]


def require(names: Sequence[str]) -> None:
    """Checks that the packages of trackers are installed, before any work is done.

    Raises:
        ValueError: If one is missing; the message says which, and how to install it.
    """
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ValueError(
                f"report_to: got {name!r}; needs a package: pip install {_PACKAGES[name]}"
            )


def start(
    names: Sequence[str],
    run_folder: str | pathlib.Path,
    *,
    step: int,
    run_name: str | None,
    settings: Mapping[str, Any],
) -> list[Tracker]:
    """Starts trackers ("tensorboard", "wandb", "trackio") for a run that has done `step` steps; 0 starts a new run.

    TensorBoard's files are in `tensorboard/` of the run folder; its file `tracker_id` has the id of the run in the
    other trackers. They show `run_name`, or else the folder's name, and the config, `settings`.
    """
    folder = pathlib.Path(run_folder)
    if not names:
        return []
    path = folder / "tracker_id"
    if step == 0 or not path.is_file():
        # Weights & Biases refuses ids with : / \ # ? or %, or with more than 128 characters.
        project = re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name)[:100]
        path.write_text(f"{project}-{uuid.uuid4().hex[:8]}")
    kinds = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
    name = run_name or folder.resolve().name
    return [kinds[kind](folder, path.read_text(), name, step, dict(settings)) for kind in names]


def _tensorboard(folder: pathlib.Path, identity: str, name: str, step: int, settings: dict):
    import tensorboardX

    # Rows after the checkpoint are purged, because they will be written again.
    writer = tensorboardX.SummaryWriter(
        os.fspath(folder / "tensorboard"), purge_step=step + 1 if step else 0
    )

    def write(step: int, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(write, writer.close)


def _wandb(folder: pathlib.Path, identity: str, name: str, step: int, settings: dict):
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "qerl"),
        id=identity,
        name=name,
        dir=os.fspath(folder),
        config=settings,
        resume="allow" if step else "never",
    )
    # wandb's own step counter cannot go back to a checkpoint.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return Tracker(lambda step, row: run.log({**row, "step": step}), run.finish)


def _trackio(folder: pathlib.Path, identity: str, name: str, step: int, settings: dict):
    import trackio

    # Trackio identifies a run only by its name.
    trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", "qerl"),
        name=f"{name}-{identity[-8:]}",
        config=settings,
        resume="allow" if step else "never",
    )
    without_step = lambda row: {key: value for key, value in row.items() if key != "step"}
    return Tracker(lambda step, row: trackio.log(without_step(row), step=step), trackio.finish)
