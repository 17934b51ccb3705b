"""Which model and adapter are meant, from what a user names: a hub name, a PEFT folder, a run folder."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from qerl_jax import config
from qerl_jax.checkpoint import base_model, peft
from qerl_jax.config import ModelConfig, RunConfig
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.files import read_json
from qerl_jax.model.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Policy:
    """A base with or without an adapter, and where it comes from.

    Attributes:
        model: The base.
        adapter: A PEFT folder; None for the bare base.
        run: The config of the run that it comes from, if that is known.
        folder: Where the run folder is, if there is one.
    """

    model: ModelConfig
    adapter: pathlib.Path | None = None
    run: RunConfig | None = None
    folder: pathlib.Path | None = None

    @property
    def name(self) -> str:
        """Short, for a folder: what distinguishes it within its run, or the last part of its path."""
        if self.adapter is not None:
            return self.adapter.resolve().name
        model = pathlib.PurePath(self.model.model_name_or_path)
        is_before_training = self.folder is not None and not model.is_relative_to(self.folder)
        return "base" if is_before_training else model.name


def find(
    model: str | None, adapter: str | pathlib.Path | None, *, base: bool = False, **held: str | None
) -> Policy:
    """The policy that a model and an adapter name.

    Args:
        model: A folder or hub name; absent means the adapter's base, or the one in the package.
        adapter: A PEFT folder, or a run folder: then its exported adapter (or model) and its config.
        base: Leave the adapter away: the policy before training, under the same prompt.
        **held: `weights` and `dtype`, where they are not to be the run's.

    Raises:
        FileNotFoundError: When the folder is neither.
    """
    run = folder = None
    if adapter is not None:
        adapter = pathlib.Path(adapter)
        is_run = (adapter / "config.toml").is_file()
        is_of_run = (
            adapter.name in ("adapter", "best") and (adapter.parent / "config.toml").is_file()
        )
        if is_run or is_of_run:
            folder = adapter if is_run else adapter.parent
            run = config.load(folder / "config.toml")
        if is_run and run.model.trainable == "full":
            model, adapter = model or (None if base else str(folder / "model")), None
        elif is_run:
            adapter = folder / "adapter"
        if adapter is not None and not (adapter / "adapter_config.json").is_file():
            raise FileNotFoundError(f"no adapter_config.json in {adapter}, nor is it a run folder")
    if model is None and adapter is not None and run is None:
        model = read_json(adapter / "adapter_config.json").get("base_model_name_or_path")
        if model is None:
            raise ValueError(
                f"{adapter}: its adapter_config.json says no base_model_name_or_path: give --model"
            )
    table = {} if run is None else config.to_table(run.model) | {"trainable": "lora"}
    given = {"model_name_or_path": model, **held}
    table |= {name: value for name, value in given.items() if value is not None}
    table.setdefault("model_name_or_path", "qerl-tiny")
    return Policy(
        config.from_table(ModelConfig, table, "model."), None if base else adapter, run, folder
    )


def load(policy: Policy, seed: int = 0) -> tuple[Transformer, dict[str, Any], Tokenizer]:
    """The model, its variables on the device, and the tokenizer; `seed` is a random base's."""
    lora = None if policy.adapter is None else peft.read_lora(policy.adapter)
    model, frozen, tokenizer = base_model.load_policy(policy.model, lora, seed)
    variables = {"frozen": frozen}
    if policy.adapter is not None:
        variables["params"] = peft.import_adapter(policy.adapter, model)
    return model, variables, tokenizer
