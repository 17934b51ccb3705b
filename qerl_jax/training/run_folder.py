"""The folder of a run: locked for one process, and checked before a run in it is resumed."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, Self

from qerl_jax import config
from qerl_jax.system import files, locks
from qerl_jax.system.checked import require

# Settings that change only how much of a run is on a device at a time, and so its rounding. They may change when a
# run is resumed.
_OF_DEVICES = (
    ("model", "gradient_checkpointing"),
    ("optim", "max_tokens_per_microbatch"),
    ("rollout", "max_concurrent"),
    ("rollout", "kv_cache_tokens"),
    ("rollout", "kv_cache_fraction"),
)


# The date of a chat template, which stays what it was where the config has none.
_DATE = "chat_template_date"


class RunFolder(contextlib.ExitStack):
    """The folder of a run, as a context manager that holds its lock.

    Only the first process of a run reads and writes the folder; in others this does nothing. An existing folder is
    locked from the start, because it is read while the input is checked. A new one is not made before `begin`.
    """

    def __init__(self, path: str, *, leads: bool):
        """Does nothing yet; `leads` says whether this is the first process of the run."""
        super().__init__()
        self._path, self._leads = pathlib.Path(path), leads
        self._warning: str | None = None

    def __enter__(self) -> Self:
        """Locks the folder if it exists; raises `Busy` if another run uses it."""
        super().__enter__()
        self._is_new = self._leads and not self._path.is_dir()
        if self._leads and not self._is_new:
            self._warning = self.enter_context(locks.held(self._path))
        return self

    def begin(self) -> list[str]:
        """Makes and locks a new folder, and returns a warning if its file system has no locks.

        Raises:
            Busy: If another run uses the folder.
            ConfigError: If another run has begun in it since it was looked for.
            DiskError: If it cannot be made.
        """
        if self._is_new:
            with files.writing(self._path):
                self._path.mkdir(parents=True, exist_ok=True)
            self._warning = self.enter_context(locks.held(self._path))
            rule = (
                "another run has begun there in the meantime: start the command again to go on with it, or choose "
                "another folder"
            )
            is_free = not (self._path / "config.toml").exists()
            require(is_free, "output_dir", str(self._path), rule)
        return [] if self._warning is None else [self._warning]


def trained(cfg: config.RunConfig) -> pathlib.Path:
    """Returns the folder for what a run has trained: its adapter, or the whole model."""
    return pathlib.Path(cfg.output_dir) / ("model" if cfg.model.trainable == "full" else "adapter")


def earlier_run(cfg: config.RunConfig) -> config.RunConfig | None:
    """Returns the config of the run in the folder that can be resumed; None if there is none to resume.

    The run may be made longer, and it may continue on other devices, or with other settings of `_OF_DEVICES`.

    Raises:
        ConfigError: If the folder's run differs in anything else, or its folder has another format.
    """
    folder = pathlib.Path(cfg.output_dir)
    # A run that failed before its first checkpoint has nothing to resume: its config may change.
    saved = [folder / "adapter", folder / "model", *folder.glob("checkpoints/[0-9]*")]
    if not (folder / "config.toml").exists() or not any(path.is_dir() for path in saved):
        return None
    earlier = config.load_run(folder)
    before, now = config.to_table(earlier), config.to_table(cfg)
    now["model"] = {k: v for k, v in before["model"].items() if k == _DATE} | now["model"]
    free = {"output_dir", "report_to", "run_name", "mesh"}
    for table in (before, now):
        for section, field in _OF_DEVICES:
            table[section].pop(field, None)
    free |= {
        name
        for name in ("max_steps", "num_train_epochs")
        if name in before and name in now and before[name] < now[name]
    }
    changed = [name for name in files.changes(before, now) if name not in free]
    fields = [field for name in changed for field in _differences(name, before, now)]
    rule = (
        f"it holds a run with another {', '.join(fields)}: choose another folder, or remove that one "
        "(in the same folder max_steps or num_train_epochs may only be raised; mesh, memory settings and report_to may "
        "change)"
    )
    require(not changed, "output_dir", cfg.output_dir, rule)
    return earlier


def with_date(cfg: config.RunConfig, earlier: Mapping[str, Any] | None, today: str) -> Any:
    """Returns the config with the date that its chat template writes: its own, that of the earlier run, or today's."""
    date = (earlier or {}).get("model", {}).get(_DATE, today)
    model = dataclasses.replace(cfg.model, chat_template_date=cfg.model.chat_template_date or date)
    return dataclasses.replace(cfg, model=model)


def _differences(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the differences of two configs under a name: the field, or a section's fields, with their values."""
    pair = [table.get(name) for table in (before, now)]
    if not all(isinstance(value, Mapping) for value in pair):
        shown = ("a section" if isinstance(value, Mapping) else repr(value) for value in pair)
        return [f"{name} ({' there, '.join(shown)} here)"]
    return [f"{name}.{x}" for field in files.changes(*pair) for x in _differences(field, *pair)]
