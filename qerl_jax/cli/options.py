"""Options of a command as Python values. What tyro refuses is an error of one line, like every other error.

tyro draws a box around its errors, with Python's names of types in it. So its text is kept back, and the options are
looked at once more to say what is wrong with them.
"""

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

import tyro

from qerl_jax.config.tiers import tier_text
from qerl_jax.system.checked import ConfigError, require, sections


class Parser(argparse.ArgumentParser):
    """Reads the options of a command that no field of a config has; an error is a `ConfigError`."""

    def __init__(self):
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises the error that argparse would print."""
        raise ConfigError(message.removeprefix("argument "))


@dataclasses.dataclass(frozen=True)
class Options:
    """What a command takes.

    Attributes:
        kinds: The type of each option's value, by the option's name with hyphens.
        flags: Options without a value.
        arguments: Names of what is given without an option, in capitals; one that is repeated ends with " ...".
        needed: The options and arguments that must be given.
        renamed: What earlier names of options are called now.
    """

    kinds: dict[str, Any]
    flags: frozenset[str] = frozenset()
    arguments: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    renamed: Mapping[str, str] = types.MappingProxyType({})


def of_class(cls: type, prefix: str = "--") -> dict[str, Any]:
    """The options of a dataclass and of the sections in it, with their types."""
    kinds = {}
    hints, inner = typing.get_type_hints(cls), sections(cls)
    for field in dataclasses.fields(cls):
        option, name = prefix + field.name.replace("_", "-"), field.name
        is_section = name in inner
        kinds |= of_class(inner[name], f"{option}.") if is_section else {option: hints[name]}
    return kinds


def of_function(function: Callable) -> Options:
    """The options of a command that are the parameters of a function, or the fields of one that is a dataclass."""
    kinds, flags, arguments, needed = {}, set(), [], []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            is_repeated = typing.get_origin(parameter.annotation) is tuple
            arguments.append(name.upper() + " ..." * is_repeated)
            needed += [name.upper()] * (parameter.default is parameter.empty and not is_repeated)
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:  # gets the options that are not its own
            continue
        fields = [(name, parameter.annotation, parameter.default)]
        (kind, *_) = members(parameter.annotation)
        notes = getattr(parameter.annotation, "__metadata__", ())
        if dataclasses.is_dataclass(kind):
            hints, section = typing.get_type_hints(kind), "" if notes else f"{name}."
            inner = dataclasses.fields(kind)
            fields = [(section + f.name, hints[f.name], f.default) for f in inner]
        elif notes:  # the name of the option, if it is not that of the parameter
            fields = [(notes[0].name or name, parameter.annotation, parameter.default)]
        for field, hint, default in fields:
            option = f"--{'no-' if default is True else ''}{field}".replace("_", "-")
            kinds[option] = hint
            flags |= {option} if hint is bool else set()
            needed += [option] * (default is inspect.Parameter.empty)
    renamed = without_batches("--max-concurrent") if "--max-concurrent" in kinds else {}
    return Options(kinds, frozenset(flags), tuple(arguments), tuple(needed), renamed)


def without_batches(option: str) -> dict[str, str]:
    """What earlier options for a number of rows are called now, if `option` is the number that is sampled at a time."""
    new = f"{option}, the completions at a time: all are sampled as one queue"
    return dict.fromkeys(("--batch", "--batch-size"), new)


def divide(argv: Sequence[str], options: Options) -> tuple[list[str], list[str]]:
    """The arguments of a command: those for its own options, and those for others, each option with its values."""
    ours, others = [], []
    current = ours
    for word in argv:
        if re.match(r"--[a-zA-Z]", word):
            option = word.partition("=")[0].replace("_", "-")
            current = ours if option in (*options.kinds, "--help") else others
        current.append(word)
    return ours, others


def parse(target: Any, argv: Sequence[str], options: Options, *, prog: str, **settings: Any) -> Any:
    """What tyro makes of the arguments of a command; `target`, `prog` and more settings are those of `tyro.cli`.

    Raises:
        ConfigError: For an option that there is not, a value that it cannot have, or something that is missing.
        SystemExit: After the help, with status 0.
    """
    _prepare_texts(target)
    argv = _with_pythons_truth(argv, options)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(target, args=argv, prog=prog, **settings)
    except SystemExit as ended:
        if not ended.code:
            sys.stdout.flush()  # what fails at the interpreter's end cannot be handled
            raise
        # tyro's own text without the lines of its box, which are dashes where the output takes no others.
        plain = " ".join(re.sub(r"[\u2500-\u257f]|-{3,}", " ", printed.getvalue()).split())
        rule = _broken_rule(ended) or _fault(argv, options, prog)
        raise ConfigError(rule or plain) from None


def _prepare_texts(target: Any) -> None:
    """Joins the lines of each description in the docstrings of dataclasses, and begins it with the field's tier.

    tyro joins them too, but not where the second begins with a quotation mark or a bracket.
    """
    if inspect.isclass(target):
        for cls in filter(dataclasses.is_dataclass, target.__mro__):
            text = re.sub(r"\n {8,}", " ", inspect.cleandoc(cls.__doc__))
            for field in dataclasses.fields(cls):
                if "tier" in field.metadata:
                    name, tier = field.name, tier_text(field)
                    text = re.sub(rf"(?m)^    {name}: (?!\[)", rf"    {name}: [{tier}] ", text)
            cls.__doc__ = text
    for hint in typing.get_type_hints(target).values():
        for kind in filter(dataclasses.is_dataclass, members(hint)):
            _prepare_texts(kind)


def _with_pythons_truth(argv: Sequence[str], options: Options) -> list[str]:
    """The arguments with True for the true of a config file, which tyro does not read, where an option takes it."""
    changed = []
    for before, word in itertools.pairwise(["", *argv]):
        name, equals, value = word.partition("=") if "=" in word else (before, "", word)
        option = name.replace("_", "-")
        is_flag = option in options.flags
        # tyro would take the value for an argument.
        require(not (is_flag and equals), name, value, "this option has no value")
        takes_it = bool in members(options.kinds.get(option)) and not is_flag
        is_truth = takes_it and value in ("true", "false")
        changed.append(f"{name}=" * bool(equals) + value.title() if is_truth else word)
    return changed


def _broken_rule(ended: BaseException) -> str | None:
    """What a dataclass said about its values, if tyro ended because of that."""
    cause = ended.__context__
    while cause is not None and not isinstance(cause, ConfigError):
        cause = cause.__context__
    return None if cause is None else str(cause)


def _fault(argv: Sequence[str], options: Options, prog: str) -> str | None:
    """The first thing that is wrong with arguments that tyro has refused; None if all look right here."""
    words, places, present = [*argv], [], set()
    help_ = f"{prog} --help"
    while words:
        word = words.pop(0)
        if not re.match(r"--?[a-zA-Z]", word):
            places.append(word)
            continue
        name, equals, value = word.partition("=")
        option = name.replace("_", "-")
        if option in options.renamed and option not in options.kinds:
            return f"{name}: is now {options.renamed[option]}"
        if option not in options.kinds:
            return f"{name}: no such option{_meant(option, options) or f'; {help_} lists them'}"
        present.add(option)
        if option in options.flags:
            continue
        kind = options.kinds[option]
        values = [value] if equals else [*itertools.takewhile(lambda w: w[:2] != "--", words)]
        takes_several = any(typing.get_origin(member) in (tuple, dict) for member in members(kind))
        values = values if takes_several else values[:1]
        words = words if equals else words[len(values) :]
        rule = _rule(kind, values)
        if rule is not None:
            got = f"got {' '.join(values)!r}" if values else "needs a value"
            return f"{name}: {got}; {rule}" if rule else f"{name}: {got}"
    missing = [name for name in options.arguments if name in options.needed][len(places) :]
    missing += [name for name in options.needed if name.startswith("--") and name not in present]
    if missing:
        return f"missing {', '.join(missing)}; {help_} explains"
    stray = places[len(options.arguments) :]
    if stray and not any(name.endswith("...") for name in options.arguments):
        takes = f"takes {' '.join(options.arguments)} and options" if options.arguments else ""
        return f"got {stray[0]!r}; {takes or 'each option begins with --, as in --seed 1'}"
    return None


# Names that other libraries have for our options.
_ELSEWHERE = {
    "lr": ("learning-rate",),
    "batch-size": ("per-device-train-batch-size",),
    "epochs": ("num-train-epochs",),
    "max-new-tokens": ("max-completion-length", "max-tokens"),
    "max-length": ("max-completion-length", "max-tokens"),
}


def _meant(option: str, options: Options) -> str:
    """The end of an error about an unknown option: those whose last parts are most like it, of its section if any."""
    if option.startswith("--resume"):
        return "; the command that was stopped resumes if it is given again"
    last = lambda name: name.rpartition(".")[2].removeprefix("--")
    known = {*map(last, options.kinds)}
    near = difflib.get_close_matches(last(option), known, 1, cutoff=0.7)
    near = near or [name for name in _ELSEWHERE.get(last(option), ()) if name in known]
    fits = [name for name in options.kinds if last(name) in near]
    section = option[: -len(last(option))]
    beside = [name for name in fits if name == section + last(name)]
    return f"; did you mean {' or '.join(beside or fits)}?" if fits else ""


def _rule(kind: Any, values: Sequence[str]) -> str | None:
    """What the values of an option must be, if they are not that; "" where any one value would do."""
    (kind, *_) = [member for member in members(kind) if member is not types.NoneType]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if list(values) == ["None"]:
        return None
    if origin is tuple:
        return next((rule for value in values if (rule := _rule(args[0], [value]))), None)
    if origin is dict and args[1] not in (str, *_READERS):
        return "must be given in a config file or from Python: its values may have any type"
    if origin is dict:
        wrong = len(values) % 2 or any(_rule(args[1], [value]) for value in values[1::2])
        rule = f"must be pairs of a name and {_WORDS.get(args[1], 'a value')}"
        if wrong and any("=" in value for value in values):
            rule += f", with a space between them: {' '.join(values).replace('=', ' ')}"
        return rule if wrong else None
    if origin is Literal:
        shown = f"must be one of {', '.join(map(repr, args))}"
        return None if values and values[0] in map(str, args) else shown
    try:
        _READERS.get(kind, str)(values[0])
    except (ValueError, KeyError, IndexError):
        return f"must be {_WORDS[kind]}" if kind in _WORDS else ""
    return None


_READERS = {int: int, float: float, bool: {"True": True, "False": False}.__getitem__}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def members(hint: Any) -> tuple[Any, ...]:
    """The types that a hint allows, without what is said about them."""
    if isinstance(hint, typing.TypeAliasType):
        return members(hint.__value__)
    if typing.get_origin(hint) is Annotated:
        return members(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return tuple(kind for member in typing.get_args(hint) for kind in members(member))
    return (hint,)
