"""Makes the checked config of a run from what a user gives."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qerl_jax import config as configs
from qerl_jax.config import MeshConfig, RunConfig, ToolsConfig
from qerl_jax.rewards.stock import RewardFunction
from qerl_jax.system.checked import ConfigError, from_table, pythons, require, sections, to_table
from qerl_jax.tools.environments import Tool

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

type Config = RunConfig | Mapping[str, Any] | str | os.PathLike
type Mesh = MeshConfig | Mapping[str, Any]

# The value of `data.dataset` where the rows are given and the config names no set.
_ROWS = "rows"
_LENGTHS = ("max_steps", "num_train_epochs")


def run_config(
    config: Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    has_rows: bool = False,
    functions: Sequence[str | RewardFunction] | None = None,
    tools: Sequence[Tool] | None = None,
    environment: Tool | Mapping[str, Tool] | None = None,
) -> RunConfig:
    """Makes the checked config of a run from a config, a table or a path.

    Args:
        config: A config, a table, or a path.
        overrides: Fields that take another value; a table changes a section, None removes it.
        has_rows: Whether the problems are given, so that the config need not name a set.
        functions: The rewards, where they are given.
        tools: The tools, where they are given.
        environment: The environment's class, or several by name, where it is given.

    Raises:
        ConfigError: For an impossible config.
    """
    table, overrides = _table(config), overrides or {}
    lengths = [name for name in _LENGTHS if overrides.get(name) is not None]
    if len(lengths) == 1 and lengths[0] not in table:  # it takes the other's place
        table = {key: item for key, item in table.items() if key not in _LENGTHS}
    for name, value in overrides.items():
        _change(RunConfig, table, name, value)
    if has_rows:
        _section(table, "data").setdefault("dataset", _ROWS)
    if functions is not None:
        _section(table, "rewards")["functions"] = list(map(_name_of, functions))
    elif environment is not None and "rewards" not in table:
        table["rewards"] = {"functions": []}
    if tools is not None or environment is not None:
        table["tools"] = tools_table(_section(table, "tools"), tools, environment)
    cfg = from_table(RunConfig, table)
    needs_set = has_rows and cfg.data.dataset == _ROWS and cfg.eval is not None
    rule = "must name the set to evaluate on where rows to train on are given (or set eval=None)"
    require(not needs_set or cfg.eval.dataset is not None, "eval.dataset", None, rule)
    return cfg


def options_of[Options: "DataclassInstance"](
    cls: type[Options], options: Options | None, name: str, changes: Mapping[str, Any]
) -> Options:
    """Returns options, an instance of a dataclass, with changes; None means the defaults.

    `name` is that of the argument that holds the instance, for errors.

    Raises:
        ConfigError: For something else than an instance, an unknown field, or an invalid value.
    """
    is_instance = options is None or isinstance(options, cls)
    require(is_instance, name, options, f"must be {cls.__name__}")
    known = [field.name for field in dataclasses.fields(cls)]
    if unknown := [field for field in changes if field not in known]:
        raise ConfigError(f"{unknown[0]}: unknown option; {cls.__name__} has {', '.join(known)}")
    return dataclasses.replace(options or cls(), **pythons(dict(changes)))


def mesh_of(mesh: Mesh | None, default: MeshConfig) -> MeshConfig:
    """The devices that a user gives as a section [mesh] or as a table of its fields; else the default.

    Raises:
        ConfigError: For anything else, or an impossible mesh.
    """
    if mesh is None:
        return default
    if isinstance(mesh, Mapping):
        return from_table(MeshConfig, dict(mesh), "mesh.")
    require(isinstance(mesh, MeshConfig), "mesh", mesh, "must be a MeshConfig or a table")
    return mesh


def divide_tools(
    tools: Tool | Sequence[Tool] | Mapping[str, Any] | ToolsConfig | None,
) -> tuple[dict[str, Any], list[Tool] | None]:
    """Splits what a user gives as tools into fields of the section `tools` and the tools, or None."""
    if isinstance(tools, ToolsConfig):
        return to_table(tools), None
    if not isinstance(tools, Mapping):
        return {}, None if tools is None else several(tools, "tools")
    section = {name: value for name, value in tools.items() if name != "functions"}
    return section, divide_tools(tools.get("functions"))[1]


def tools_table(
    section: Mapping[str, Any],
    tools: Sequence[Tool] | None,
    environment: Tool | Mapping[str, Tool] | None,
) -> dict[str, Any]:
    """The table of the section `tools`, in which the given tools and environments replace those that it names."""
    table = dict(section)
    if tools is not None:
        table["functions"] = list(map(_name_of, tools))
    if environment is None:
        return table
    table = {k: v for k, v in table.items() if k not in ("environment", "environments")}
    if isinstance(environment, Mapping):
        return table | {"environments": {key: _name_of(cls) for key, cls in environment.items()}}
    return table | {"environment": _name_of(environment)}


def several(value: Any, name: str) -> list:
    """A list of what is given: one thing, or a list of them."""
    if value is None:
        return []
    if isinstance(value, str) or callable(value):
        value = [value]
    require(isinstance(value, list | tuple), name, value, "must be a function, or a list of them")
    return list(value)


def _table(config: Config) -> dict[str, Any]:
    """A config as a table that may be changed; what it holds is not checked."""
    if isinstance(config, str | os.PathLike):
        return configs.read_table(config)
    if isinstance(config, RunConfig):
        return to_table(config)
    rule = "must be a RunConfig, a table of its sections, or the path of a TOML file"
    require(isinstance(config, Mapping), "config", config, rule)
    table: dict[str, Any] = {}
    for name, value in config.items():
        _change(RunConfig, table, str(name), value)
    return table


def _change(cls: type, table: dict[str, Any], name: str, value: Any) -> None:
    """Gives a field of `cls` another value; a section given as a table is changed in the fields that it has."""
    section_type = sections(cls).get(name)
    if value is None:
        table.pop(name, None)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        table[name] = to_table(value)
    elif section_type and isinstance(value, Mapping):
        section = _section(table, name)
        for field, item in value.items():
            _change(section_type, section, field, item)
    else:
        table[name] = value


def _section(table: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of a table: a copy, which the table then holds."""
    section = table.get(name, {})
    require(isinstance(section, Mapping), name, section, "must be a section")
    table[name] = dict(section)
    return table[name]


def _name_of(function: str | RewardFunction) -> str:
    """The text that stands for a function in a config: its name, or where it was defined."""
    if isinstance(function, str):
        return function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"
