"""Checkpoints of a run: written during training, and verified and restored when the run resumes."""

import contextlib
import dataclasses
import logging
import pathlib
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from qerl_jax.system import files

# The contents of a checkpoint besides its checksums: arrays as orbax writes them, and plain numbers.
_STATE, _SUPPLY = "state", "supply.json"
# The file beside the checkpoints with the step after which the run has ended.
_ENDED = "ended"
_OPTIONAL = ("entropy",)


class StateFiles:
    """The checkpoints of a run folder, `checkpoints/<step>/`, each written completely or not at all.

    Each holds the size and the SHA-256 of its files, which are verified before it is read. A checkpoint whose files
    have changed is skipped, and the one before it is used.

    Attributes:
        notes: Lines about checkpoints that were skipped.
    """

    def __init__(self, run_folder: str | pathlib.Path, keep: int | None):
        """Opens the checkpoints of a run; creates nothing.

        Args:
            run_folder: The run folder.
            keep: Number of checkpoints that `save` keeps, the newest ones; None keeps all.
        """
        self._folder = pathlib.Path(run_folder).absolute() / "checkpoints"
        self._keep = keep
        self.notes: list[str] = []

    def save(self, state: Any, supply: dict[str, Any] | None = None) -> None:
        """Writes a checkpoint, and removes old ones.

        Checkpoints of later steps are removed too: a run that writes this one has restarted before them.

        Args:
            state: A dataclass of arrays with a field `step`, which names the checkpoint.
            supply: Plain numbers to write beside it; must be JSON.

        Raises:
            DiskError: If it cannot be written; earlier checkpoints are unchanged.
        """
        step = int(state.step)
        folder = self._path(step)
        with files.writing(folder):
            if folder.exists() and not (folder / files.SEAL).is_file():
                shutil.rmtree(folder)
            with files.whole_folder(folder, files.SEAL, "checkpoint") as partial:
                fields = _fields(state)
                if jax.process_count() > 1:
                    # Each process has the whole state, and only the first writes it: of arrays on devices orbax would
                    # assume that each process has only a part.
                    fields = jax.device_get(fields)
                with _quiet_threads(), contextlib.closing(_arrays()) as arrays:
                    arrays.save(partial / _STATE, args=_orbax().args.StandardSave(fields))
                files.write_whole(partial / _SUPPLY, files.to_line(supply or {}))
                files.seal(partial)
            steps = self.steps()
            retained = [saved for saved in steps if saved <= step][-(self._keep or 0) :]
            for saved in set(steps) - set(retained):
                shutil.rmtree(self._path(saved))

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints in ascending order, including damaged ones."""
        names = [path.name for path in self._folder.glob("[0-9]*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal() and name == f"{int(name)}")

    def newest(self) -> int | None:
        """Returns the step of the newest undamaged checkpoint; None if there is no checkpoint.

        Raises:
            ValueError: If there are checkpoints and all of them are damaged.
        """
        damaged = []
        for step in reversed(self.steps()):
            damage = files.damage(self._path(step))
            if damage is None:
                rule = f"it is skipped, and the run goes on from checkpoint {step}"
                self.notes += [f"warning: {text}; {rule}" for text in damaged]
                return step
            damaged.append(f"{self._path(step)} is damaged: {damage}")
        if damaged:
            raise ValueError(
                f"no checkpoint in {self._folder} can be read ({'; '.join(damaged)}): restore one "
                "from a copy, or remove that folder, and the run starts again from step 0"
            )
        return None

    def restore(self, like: Any, step: int | None = None) -> Any | None:
        """Returns the state of a checkpoint, or None if there is no checkpoint.

        Args:
            like: A state with the same shapes, dtypes and shardings, of arrays or from `placement`.
            step: A step that `newest` has returned; None means the newest.

        Raises:
            ValueError: If the checkpoint cannot be read, or all are damaged.
        """
        step = self.newest() if step is None else step
        if step is None:
            return None
        fields = _fields(placement(like))
        form = lambda x: x if x.sharding else _on_one_device(x)
        if jax.process_count() > 1:
            form = lambda x: np.empty(x.shape, x.dtype)
        restored = self._read(step, jax.tree.map(form, fields))
        leaves, tree = jax.tree.flatten(restored)
        del restored
        for index, at in enumerate(jax.tree.leaves(fields)):
            # One by one, because with full training the device cannot hold two states.
            leaves[index] = _placed(leaves[index], at)
        return dataclasses.replace(like, **jax.tree.unflatten(tree, leaves))

    def params(self, step: int | None = None) -> tuple[int, Any]:
        """Returns the step and the `params` of a checkpoint: of the given step, or of the newest.

        Raises:
            FileNotFoundError: If there is no such checkpoint.
            ValueError: If it is damaged.
        """
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            rule = f"no checkpoint of step {step} in {self._folder}"
            raise FileNotFoundError(f"{rule}; there are {steps}")
        if step is None:
            step = self.newest()
        elif damage := files.damage(self._path(step)):
            raise ValueError(f"{self._path(step)} is damaged: {damage}; there are {steps}")
        return step, self._read(step)["params"]

    def supply(self, step: int | None = None) -> dict[str, Any] | None:
        """Returns the plain numbers beside the state of a step, or of the newest; None if there is no checkpoint."""
        step = self.newest() if step is None else step
        return None if step is None else files.read_json(self._path(step) / _SUPPLY)

    def end(self, step: int) -> None:
        """Records that the run has ended after a saved step, and that all that it has trained is written."""
        files.write_whole(self._folder / _ENDED, f"{step}\n")

    def has_ended(self, step: int) -> bool:
        """Whether `end` was called last for this step."""
        path = self._folder / _ENDED
        return path.is_file() and path.read_bytes() == f"{step}\n".encode()

    def _path(self, step: int) -> pathlib.Path:
        return self._folder / str(step)

    def _read(self, step: int, like: Any = None) -> Any:
        """Reads the arrays of a step, with the placement of `like`, or all on one device.

        Raises:
            ValueError: If orbax cannot read them so; the error is one line.
        """
        folder = self._path(step) / _STATE
        try:
            with contextlib.closing(_arrays()) as arrays:
                if like is None:
                    like = jax.tree.map(_on_one_device, arrays.metadata(folder).item_metadata.tree)
                return arrays.restore(folder, args=_orbax().args.StandardRestore(like))
        except Exception as error:
            (line, *_) = str(error).strip().splitlines() or [""]
            why = f"cannot be read as the state of this run: {type(error).__name__}: {line[:300]}"
            raise ValueError(f"{self._path(step)}: {why}") from error


def placement(state: Any) -> Any:
    """Returns what `StateFiles.restore` needs to know of a state: shapes, dtypes and, of committed arrays, shardings.

    JAX compiles a program anew if an argument is committed to a device that was not. So a resumed run finds the programs
    of its first process in the compilation cache only if its state is committed where that of a new run is.
    """

    def described(x):
        is_free = isinstance(x, jax.Array) and not x.committed
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if is_free else x.sharding)

    return jax.tree.map(described, state)


def _on_one_device(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns how to restore an array onto one device. By default orbax would look for the devices that wrote it."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _placed(x: jax.Array | np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array with a sharding, or uncommitted if `like` has none. One that is committed is copied for that."""
    return jax.device_put(x, like.sharding) if like.sharding else jax.device_put(np.asarray(x))


def _fields(state: Any) -> dict[str, Any]:
    """Returns the fields of a state by name, without optional ones that are None: earlier versions lack them."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: x for name, x in fields.items() if name not in _OPTIONAL or x is not None}


def _orbax() -> Any:
    import orbax.checkpoint  # slow to import, and the first steps of a run do not need it

    return orbax.checkpoint


def _arrays() -> Any:
    ocp, options = _orbax(), {}
    if jax.process_count() > 1:
        index = jax.process_index()
        this_process = ocp.options.MultiprocessingOptions(
            primary_host=index, active_processes={index}
        )
        options = {"multiprocessing_options": this_process}
    return ocp.Checkpointer(ocp.StandardCheckpointHandler(**options), **options)


@contextlib.contextmanager
def _quiet_threads() -> Iterator[None]:
    """Suppresses errors that orbax's threads would print or log, since they are also raised in the caller."""
    log = logging.getLogger("absl")
    shown, level = threading.excepthook, log.level
    threading.excepthook = lambda failure: None
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        threading.excepthook = shown
        log.setLevel(level)
