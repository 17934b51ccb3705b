"""Dataclasses that check their values when they are built, and conversion from and to tables of plain values.

The rule for a single value is in the annotation of its field, such as `rank: Count = 32`. An invalid value, a wrong type
or an unknown key raises a `ConfigError` that names the field, the value and the rule.
"""

import dataclasses
import difflib
import functools
import json
import math
import numbers
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Literal


class ConfigError(ValueError):
    """Raised for an invalid configuration."""


# The likely causes of numbers that are not finite where all weights are.
NOT_FINITE = (
    "All weights were finite when they were read, so numbers of base, adapter or noise are too large for the dtype "
    "of the model, or the device computes wrongly"
)


class NotFinite(ValueError):
    """Raised when a policy gives numbers that are not finite; the message says where they were seen first."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule for the values of a field, besides its type: whether a value satisfies it, and the words of the error."""

    holds: Callable[[Any], object]
    text: str

    def __call__(self, value: Any) -> bool:
        """Whether a value satisfies the rule; False if the rule cannot be applied to its type."""
        try:
            return bool(self.holds(value))
        except (TypeError, ValueError, AttributeError, re.error):
            return False

    def __repr__(self) -> str:
        """Returns only the words, because the command line shows a field's type if a value cannot be parsed."""
        return self.text


# Steps, rows and lengths are counted in 32 bits on the device.
Count = Annotated[int, Rule(lambda n: 1 <= n < 2**31, "must be at least 1 and below 2**31")]
Positive = Annotated[float, Rule(lambda x: x > 0, "must be positive")]
NotNegative = Annotated[float, Rule(lambda x: x >= 0, "must not be negative")]
Closed01 = Annotated[float, Rule(lambda x: 0 <= x <= 1, "must be in [0, 1]")]
HalfOpen01 = Annotated[float, Rule(lambda x: 0 <= x < 1, "must be in [0, 1)")]
Open01 = Annotated[float, Rule(lambda x: 0 < x < 1, "must be in (0, 1)")]
NotEmpty = Annotated[str, Rule(bool, "must not be empty")]


def is_seed(value: Any) -> bool:
    """Whether a value is a valid seed: JAX's keys use only 32 bits, and NumPy's generators take no negative seed."""
    return isinstance(value, numbers.Integral) and 0 <= value < 2**32


SEED_RULE = "must be an integer in [0, 2**32)"
Seed = Annotated[int, Rule(is_seed, SEED_RULE)]


@functools.cache
def tell(line: str) -> None:
    """Writes a line to the standard error, once in a process."""
    sys.stderr.write(f"{line}\n")


def require(
    holds: object, name: str, value: Any, rule: str, error: type[Exception] = ConfigError
) -> None:
    """Raises `error` unless `holds`, with the name, the value and the rule."""
    if not holds:
        shown = " ".join(map(str.strip, repr(value).split("\n")))  # tables and arrays have several
        raise error(f"{name}: got {shown}; {rule}")


def require_seed(value: Any, name: str = "seed") -> None:
    """Raises `ConfigError` unless a value is a valid seed."""
    require(is_seed(value), name, value, SEED_RULE)


def require_unicode(value: Any, where: str) -> None:
    """Refuses half characters (lone surrogates), which JSON, Python and a command line may hold, but not a file."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ConfigError(
            f"{where}: holds {half!r}, half a character; must be Unicode text"
        ) from error


def meant(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """Returns the end of an error about an unknown name: a question with the most similar known name, or "".

    `least` is the smallest similarity, from 0 to 1.
    """
    near = difflib.get_close_matches(name, [*known], 1, least)
    return f"; did you mean {near[0]}?" if near else ""


class Checked:
    """Base of dataclasses that check themselves.

    Attributes:
        section: Prefix of field names in errors.
        names: Names that errors use instead of a field's own name.
        renamed: What earlier names of fields, with their section, are called now.
    """

    section: ClassVar[str] = ""
    names: ClassVar[dict[str, str]] = {}
    renamed: ClassVar[dict[str, str]] = {}

    def __init_subclass__(
        cls,
        section: str = "",
        names: dict[str, str] | None = None,
        renamed: dict[str, str] | None = None,
    ):
        cls.section, cls.names, cls.renamed = section, names or {}, renamed or {}

    def __post_init__(self):
        for name, optional, rule in _rules(type(self)):
            value = getattr(self, name)
            self._require(optional and value is None or rule(value), name, rule.text)
        for field in dataclasses.fields(self):
            rule = unusable(getattr(self, field.name))
            self._require(rule is None, field.name, rule)
        for holds, name, text in self._across():
            self._require(holds, name, text)

    def _across(self) -> Iterable[tuple[bool, str, str]]:
        """Returns or yields rules across fields: whether each holds, the field (or several, comma-separated), the rule."""
        return []

    def _require(self, holds: bool, field: str, rule: str) -> None:
        """Raises the error about a field, or several (comma-separated), unless `holds`."""
        if holds:
            return
        value = operator.attrgetter(*field.split(", "))(self)
        value = to_table(value) if dataclasses.is_dataclass(value) else value
        require(False, self.section + self.names.get(field, field), value, rule)


# The largest float32, the type of all arithmetic.
_LARGEST = 3.4028235e38


def unusable(value: Any) -> str | None:
    """Returns why no field can have a value, alone or within a list or table; None if the value is usable."""
    if isinstance(value, str):
        return "must not hold a NUL character" if "\0" in value else None
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, numbers.Integral):
        return None if abs(value) <= 2**32 else "must lie between -2**32 and 2**32"
    if isinstance(value, numbers.Real):
        holds = abs(value) <= _LARGEST  # False for NaN, too
        return None if holds else "must be a number that 32 bits can hold"
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    items = value if isinstance(value, list | tuple) else ()
    return next((rule for item in items if (rule := unusable(item))), None)


@functools.cache
def _rules(cls: type) -> list[tuple[str, bool, Rule]]:
    """Returns the rules in the annotations of a class: the field, whether it may be None, the rule."""
    rules = []
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        is_noted = typing.get_origin(hint) is Annotated
        members = _members(typing.get_args(hint)[0] if is_noted else hint)
        for part in (hint, *members) if is_noted else members:
            notes = [note for note in getattr(part, "__metadata__", ()) if isinstance(note, Rule)]
            rules += [(name, types.NoneType in members, rule) for rule in notes]
    return rules


def from_table(cls: type, table: dict[str, Any], prefix: str = "") -> Any:
    """Builds a dataclass from a TOML table, and checks names and types.

    Args:
        cls: The dataclass.
        table: Values by field name; sections are tables.
        prefix: Prefix of field names in errors.

    Raises:
        ConfigError: For an unknown or missing field, or an invalid value.
    """
    for name, value in table.items():  # some earlier names of fields are now those of sections
        new = getattr(cls, "renamed", {}).get(f"{cls.section}{name}")
        if new is not None and not isinstance(value, dict):
            raise ConfigError(f"{cls.section}{name}: is now {new}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    where = f"[{prefix.rstrip('.')}]" if prefix else "the top level"
    for name in table:
        if name not in fields:
            known = f"unknown field; {where} has {', '.join(fields)}"
            raise ConfigError(f"{prefix}{name}: {known}{_meant_field(name, cls, prefix)}")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in table:
            raise ConfigError(f"{prefix}{name}: missing; {where} needs it")
    return cls(**{key: _value(hints[key], value, prefix + key) for key, value in table.items()})


@functools.cache
def sections(cls: type) -> dict[str, type]:
    """Returns the fields of a dataclass that are dataclasses themselves, or None, with their types."""
    return {
        name: kind
        for name, hint in typing.get_type_hints(cls).items()
        for kind in _members(hint)
        if dataclasses.is_dataclass(kind)
    }


def all_sections(cls: type, prefix: str = "") -> dict[str, type]:
    """Returns all sections in a dataclass by their dotted names, the outer ones first, with their types."""
    classes = {}
    for name, kind in sections(cls).items():
        classes |= {prefix + name: kind} | all_sections(kind, f"{prefix}{name}.")
    return classes


def _meant_field(name: str, cls: type, prefix: str) -> str:
    """Does what `meant` does, but prefers a field of this name in a section to a field with a similar name."""
    names = lambda kind: [field.name for field in dataclasses.fields(kind)]
    for section, kind in sections(cls).items():
        if name in names(kind):
            return f"; did you mean {prefix}{section}.{name}?"
    return meant(name, names(cls))


def to_table(cfg: Any) -> dict[str, Any]:
    """Returns the TOML table of a dataclass, from which `from_table` builds an equal one."""
    plain = lambda value: list(value) if isinstance(value, tuple) else value
    section = lambda fields: {name: plain(value) for name, value in fields if value is not None}
    return dataclasses.asdict(cfg, dict_factory=section)


def _members(hint: Any) -> tuple[Any, ...]:
    """Returns the types that a type hint allows."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def pythons(value: Any) -> Any:
    """Replaces NumPy scalars within a value by Python numbers; they come from loops over settings."""
    if isinstance(value, dict):
        return {name: pythons(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(pythons, value))
    return value.item() if getattr(value, "shape", None) == () else value


def _value(hint: Any, value: Any, name: str) -> Any:
    """Converts a value of a table to the type of a hint; integers are accepted for floats, and NumPy scalars, too."""
    value = pythons(value)
    (hint,) = [member for member in _members(hint) if member is not types.NoneType]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        require(value in args, name, value, f"must be one of {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        require(isinstance(value, list | tuple), name, value, "must be a list")
        return tuple(_value(args[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint) or origin is dict:
        require(isinstance(value, dict), name, value, "must be a section")
        if origin is dict:
            return {key: _value(args[1], item, f"{name}.{key}") for key, item in value.items()}
        return from_table(hint, value, f"{name}.")
    if hint is float and type(value) is int:
        value = float(value)
    require(type(value) is hint, name, value, f"must be of type {hint.__name__}")
    require(hint is not float or math.isfinite(value), name, value, "must be finite")
    return value
