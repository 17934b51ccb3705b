"""Dataclasses whose values are checked when they are built, and tables of plain values for them.

What a single value may be stands in its field's annotation:

    @dataclasses.dataclass(frozen=True)
    class LoraConfig(Checked, section="lora."):
        rank: Count = 32

An impossible value, a wrong type or an unknown key is one `ConfigError` that names the field, the
value and the rule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NoReturn


class ConfigError(ValueError):
    """A configuration that cannot be run."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What holds of every value of a field, beside its type.

    Attributes:
        holds: Says whether a value keeps the rule.
        text: The rule in words, as the error says it.
    """

    holds: Callable[[Any], bool]
    text: str


Count = Annotated[int, Rule(lambda n: n >= 1, "must be at least 1")]
Positive = Annotated[float, Rule(lambda x: x > 0, "must be positive")]
NotNegative = Annotated[float, Rule(lambda x: x >= 0, "must not be negative")]
Closed01 = Annotated[float, Rule(lambda x: 0 <= x <= 1, "must be in [0, 1]")]
HalfOpen01 = Annotated[float, Rule(lambda x: 0 <= x < 1, "must be in [0, 1)")]
Open01 = Annotated[float, Rule(lambda x: 0 < x < 1, "must be in (0, 1)")]
NotEmpty = Annotated[str, Rule(bool, "must not be empty")]


def is_seed(value: Any) -> bool:
    """JAX's keys keep only the low 32 bits of a seed, and orders of the data take no negative one."""
    return isinstance(value, numbers.Integral) and 0 <= value < 2**32


class Checked:
    """Base of dataclasses that check themselves; `section` stands before the names in errors."""

    section = ""

    def __init_subclass__(cls, section: str = "", **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.section = section

    def __post_init__(self):
        for name, optional, rule in _rules(type(self)):
            value = getattr(self, name)
            if not (optional and value is None or rule.holds(value)):
                self._refuse(name, rule.text)
        self._check_across()

    def _check_across(self) -> None:
        """Refuses values by the rules across fields."""

    def _refuse(self, names: str, rule: str, *values: Any) -> NoReturn:
        """Raises the error about a field, or about several with a comma; `values` says another value."""
        (value,) = values or (operator.attrgetter(*names.split(", "))(self),)
        raise ConfigError(f"{self.section}{names}: got {value!r}; {rule}")


@functools.cache
def _rules(cls: type) -> list[tuple[str, bool, Rule]]:
    """The rules in the annotations of a class: the field, whether it may be None, the rule."""
    found = []
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        members = typing.get_args(hint) if _is_union(hint) else (hint,)
        for member in members:
            rules = [rule for rule in getattr(member, "__metadata__", ()) if isinstance(rule, Rule)]
            found += [(name, types.NoneType in members, rule) for rule in rules]
    return found


def from_table(cls: type, table: dict[str, Any], prefix: str = "") -> Any:
    """Builds a dataclass from a TOML table, checking names and types."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    where = f"[{prefix.rstrip('.')}]" if prefix else "the top level"
    for key in table:
        if key not in fields:
            raise ConfigError(f"{prefix}{key}: unknown field; {where} has {', '.join(fields)}")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in table:
            raise ConfigError(f"{prefix}{name}: missing; {where} needs it")
    return cls(**{key: _value(hints[key], value, prefix + key) for key, value in table.items()})


def to_table(cfg: Any) -> dict[str, Any]:
    """The TOML table of a dataclass; `from_table` of it gives an equal one."""
    table = {}
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if dataclasses.is_dataclass(value):
            table[field.name] = to_table(value)
        elif value is not None:
            table[field.name] = list(value) if isinstance(value, tuple) else value
    return table


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _value(hint: Any, value: Any, name: str) -> Any:
    """A value of a table as a type hint wants it; a whole number will do for a float."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    got = f"{name}: got {value!r};"
    if hint is Any:
        return value
    if _is_union(hint):
        (hint,) = [arg for arg in args if arg is not types.NoneType]
        return _value(hint, value, name)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{got} must be one of {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{got} must be a list")
        return tuple(_value(args[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint) or origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{got} must be a section")
        if origin is dict:
            return {key: _value(args[1], item, f"{name}.{key}") for key, item in value.items()}
        return from_table(hint, value, f"{name}.")
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        raise ConfigError(f"{got} must be of type {hint.__name__}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{got} must be finite")
    return value
