"""Loads a policy from a hub name, a PEFT folder or a run folder into variables on the device."""

import contextlib
import dataclasses
import datetime
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, Self

import jax

from pallas_kernels import runtime
from qerl_jax import config
from qerl_jax.checkpoint import base_model, hf_folder, peft
from qerl_jax.checkpoint.run_state import StateFiles
from qerl_jax.data import datasets
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.model.transformer import Transformer, init_params
from qerl_jax.system.checked import require, tell
from qerl_jax.system.files import read_json
from qerl_jax.tracking import terminal

# A mesh of one device, however many there are.
ALONE = config.MeshConfig(data=1)


@dataclasses.dataclass(frozen=True)
class PolicySource:
    """The base and the adapter of a policy, and the run that they come from.

    Attributes:
        model: Config of the base.
        adapter: A PEFT folder, or the checkpoint of a run that has not ended; None for the bare base.
        step: The step of that checkpoint; None for a PEFT folder.
        run: The config of the run that trained the policy, or None.
        folder: The run folder, or None.
    """

    model: config.ModelConfig
    adapter: pathlib.Path | None = None
    run: config.RunConfig | None = None
    folder: pathlib.Path | None = None
    step: int | None = None

    @property
    def apply_chat_template(self) -> bool:
        """Whether a text is a message of the user, as it was when the policy was trained."""
        # A system prompt makes a chat of a text.
        data = self.run and self.run.data
        return data is None or data.apply_chat_template or bool(datasets.system_prompt(data))

    def frozen_date(self) -> dict[str, str]:
        """Returns today's date as a setting, for a job that may be continued later; {} if the date does not matter.

        It matters if the chat template writes the date, and the config does not state it.
        """
        name = self.model.tokenizer_name_or_path or self.model.model_name_or_path
        folder = hf_folder.local_folder(name, weights=False)
        files = (folder / name for name in ("tokenizer_config.json", "chat_template.jinja"))
        is_dated = any(
            f.is_file() and "strftime_now" in f.read_text("utf-8", "replace") for f in files
        )
        is_open = is_dated and self.model.chat_template_date is None
        return (
            {"chat_template_date": f"{datetime.datetime.now(datetime.UTC):%F}"} if is_open else {}
        )

    @property
    def name(self) -> str:
        """A short name that can name a folder: the last part of the path of adapter or model.

        It is "checkpoint-<step>" for a run that has not ended, and "base" for the policy of a run before training.
        """
        if self.step is not None:
            return f"checkpoint-{self.step}"
        if self.adapter is not None:
            return self.adapter.resolve().name
        model = pathlib.PurePath(self.model.model_name_or_path)
        is_before_training = self.folder is not None and not model.is_relative_to(self.folder)
        return "base" if is_before_training else model.name


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedPolicy:
    """A policy on one or several devices.

    Attributes:
        model: The Linen model.
        variables: The collections `frozen` (the base) and, with an adapter, `params`.
        tokenizer: The tokenizer of the base.
        source: Base, adapter and run of the policy.
        replicas: The devices that hold it.
    """

    model: Transformer
    variables: dict[str, Any]
    tokenizer: Tokenizer
    source: PolicySource
    replicas: Replicas = Replicas()

    def dated(self, settings: Mapping[str, Any]) -> Self:
        """Returns the policy with the date of `PolicySource.frozen_date` in its chat template, if the settings have it."""
        if (date := settings.get("chat_template_date")) is None:
            return self
        return dataclasses.replace(self, tokenizer=self.tokenizer.at_date(date))

    @property
    def apply_chat_template(self) -> bool:
        """Whether a text is a message of the user; else the policy continues it as it is."""
        return self.source.apply_chat_template and bool(self.tokenizer.chat_template)


def load_policy(
    source: PolicySource,
    seed: int = 0,
    *,
    lora: config.LoraConfig | None = None,
    mesh: config.MeshConfig = ALONE,
    rows: int = 1,
    quiet: bool = True,
) -> LoadedPolicy:
    """Reads a base and its adapter onto the device, or onto several devices of this process.

    Args:
        source: The result of `find_policy`, or one made from a model and an adapter.
        seed: Random seed for a random base, and for a fresh adapter.
        lora: The shape of a fresh adapter; only for a source without an adapter.
        mesh: The devices.
        rows: Number of rows that will be sampled; unless `mesh.data` is set, there are at most as many replicas.
        quiet: Whether to show no progress on the standard error while the base is read.

    Raises:
        ConfigError: If there are too few devices, or the model cannot be divided among them.
        FileNotFoundError, SafetensorsError, ValueError, NotImplementedError: See `load_base`, `peft.read_lora` and
            `peft.import_adapter`.
    """
    is_fresh = lora is not None
    if source.step is not None:
        lora = source.run.lora
        if not quiet:
            note = f"its checkpoint of step {source.step} is taken"
            sys.stderr.write(f"{source.folder} has not ended: {note}\n")
    elif source.adapter is not None:
        lora = peft.read_lora(source.adapter)
    # Only the devices of this process are used: other processes may do something else at the same time.
    replicas = Replicas.of(mesh, rows, Hosts())
    if replicas.devices:
        runtime.use_several_devices()
    model, tokenizer = base_model.describe_base(source.model, lora, mesh)
    frozen = read_base(source.model, model, seed, replicas, quiet=quiet, stderr=True)
    variables, params = {"frozen": replicas.hold(frozen)}, None
    if source.step is not None:
        _, params = StateFiles(source.folder, keep=None).params(source.step)
    elif source.adapter is not None:
        params = peft.import_adapter(source.adapter, model)
        for line in peft.about_template(source.adapter, tokenizer.chat_template):
            tell(line)
    elif is_fresh:
        params = init_params(model, variables["frozen"], jax.random.key(seed))
    if params is not None:
        variables["params"] = replicas.hold(params)
    loaded = LoadedPolicy(model, variables, tokenizer, source, replicas)
    if not quiet and loaded.apply_chat_template:
        sys.stderr.writelines(f"{note}\n" for note in tokenizer.notes)
    return loaded


def load_base(
    cfg: config.ModelConfig, lora: config.LoraConfig | None, seed: int = 0
) -> tuple[Transformer, Any, Tokenizer]:
    """Reads a base onto one device, for an adapter that the caller has.

    Args:
        cfg: Names the base, and the storage format of its linears.
        lora: Config of the model's adapter, or None for the bare base.
        seed: Random seed for a random base.

    Returns:
        The model, its `frozen` tree on the device, and the tokenizer.

    Raises:
        FileNotFoundError, SafetensorsError: If files are missing or cut short; before any weight is read.
        ValueError, NotImplementedError: If the model or its tokenizer is not supported, or not with the kernels that
            the config names.
    """
    model, tokenizer = base_model.describe_base(cfg, lora)
    return model, read_base(cfg, model, seed), tokenizer


def read_base(
    cfg: config.ModelConfig,
    model: Transformer,
    seed: int,
    replicas: Replicas = Replicas(),
    *,
    quiet: bool = True,
    stderr: bool = False,
) -> Any:
    """Reads the weights of a base that `base_model.describe_base` has described.

    Args:
        cfg: Names the base.
        model: The model.
        seed: Random seed for a random base.
        replicas: The devices; weights that a group of them shares are divided while they are read.
        quiet: Whether to show no progress.
        stderr: Whether progress is shown on the standard error.

    Returns:
        The `frozen` tree: of groups of devices as the first group has it, else on the first device.
    """
    places = replicas.places_of if replicas.group > 1 else None
    with terminal.loading(cfg, quiet=quiet, stderr=stderr) as move:
        return base_model.load_weights(cfg, model, seed, move, places)


def find_policy(
    model: str | None,
    adapter: str | pathlib.Path | None,
    *,
    base: bool = False,
    **changes: str | None,
) -> PolicySource:
    """Finds the policy that a model and an adapter name; reads only configs.

    Args:
        model: A folder or hub name; None means the adapter's base, or without an adapter "qerl-tiny".
        adapter: A PEFT folder, or a run folder, whose exported adapter (or model) and config are used. Of a run that
            has not ended it is the newest undamaged checkpoint; one that trains the whole base must have ended.
        base: Whether to leave out the adapter, which gives the policy before training.
        **changes: `weights` and `dtype`, to replace those of the run; None keeps the run's.

    Raises:
        FileNotFoundError: If `adapter` is neither a PEFT folder nor a run folder, or the run has saved nothing.
        ValueError: If all checkpoints of the run are damaged.
        ConfigError: If the adapter does not name its base and `model` is None.
    """
    run = folder = step = None
    if adapter is not None:
        adapter = pathlib.Path(adapter)
        # An adapter may be inside its run folder.
        folders = [adapter, adapter.parent] if adapter.name in ("adapter", "best") else [adapter]
        folder = next((path for path in folders if (path / "config.toml").is_file()), None)
        if folder != adapter and not config.can_load_run(adapter.parent):
            folder = None  # the adapter of another version's run is read without that run
        run = None if folder is None else config.load_run(folder)
        if adapter == folder and run.model.trainable == "full":
            adapter = None
            if model is None and not base:
                model = str(trained_model(folder, "adapter"))
        elif adapter == folder:
            adapter, step = (None, None) if base else saved(folder)
    if adapter is not None and step is None and not (adapter / "adapter_config.json").is_file():
        rule = "has no adapter_config.json, nor is it a run folder"
        require(False, "adapter", str(adapter), rule, FileNotFoundError)
    if model is None and adapter is not None and run is None:
        path, field = adapter / "adapter_config.json", "base_model_name_or_path"
        model = read_json(path).get(field)
        require(model is not None, f"{path}: {field}", model, "give --model")
    table = {} if run is None else config.to_table(run.model) | {"trainable": "lora"}
    changes |= {"model_name_or_path": model}
    table |= {name: value for name, value in changes.items() if value is not None}
    table.setdefault("model_name_or_path", "qerl-tiny")
    if model is not None:  # a named model has weights, even if the run's base was random
        table["random_base"] = False
    cfg = config.from_table(config.ModelConfig, table, "model.")
    if base:
        adapter = step = None
    return PolicySource(cfg, adapter, run, folder, step)


def saved(folder: pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """Returns the adapter of a run, or the newest undamaged checkpoint and its step if the run has not ended.

    A run that goes on after its end still has the adapter of that end, until it ends again.

    Raises:
        FileNotFoundError: If the run has saved nothing.
        ValueError: If all checkpoints are damaged.
    """
    files = StateFiles(folder, keep=None)
    if (folder / "adapter").is_dir() and not _goes_on(files):
        return folder / "adapter", None
    step = files.newest()
    rule = "this run has saved nothing yet, neither an adapter nor a checkpoint"
    require(step is not None, "run folder", str(folder), rule, FileNotFoundError)
    return folder / "checkpoints" / str(step), step


def trained_model(folder: pathlib.Path, name: str = "run") -> pathlib.Path:
    """Returns the model of a run that trained the whole base.

    Args:
        folder: The run folder.
        name: What names the folder, for the errors.

    Raises:
        FileNotFoundError: If the run has not ended, or goes on after an end, of which it still has the model.
    """
    model = folder / "model"
    when = "a run that trains the whole base can be asked when it has ended"
    require(model.is_dir(), name, str(folder), f"has no model: {when}", FileNotFoundError)
    rule = f"goes on since it wrote {model}: {when}, and that model by its own folder"
    goes_on = _goes_on(StateFiles(folder, keep=None))
    require(not goes_on, name, str(folder), rule, FileNotFoundError)
    return model


def _goes_on(files: StateFiles) -> bool:
    """Whether the newest checkpoint says that the run goes on after it; false if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        steps = files.steps()
        # Earlier versions did not write it.
        return bool(steps) and not files.supply(steps[-1]).get("progress", {}).get("ends", True)
    return False
