"""What the commands share: printing lines, calling a function with options, and reading a config with options."""

import copy
import dataclasses
import functools
import inspect
import pathlib
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import tyro

from qerl_jax import config
from qerl_jax.cli import options
from qerl_jax.config import ConfigError, MeshConfig, RunConfig
from qerl_jax.config.rules import RENAMED
from qerl_jax.system.checked import Count, all_sections, require

# Options of which a run needs exactly one.
_LENGTHS = {"--max-steps", "--num-train-epochs"}


def log(*lines: str) -> None:
    """Writes lines to the standard output at once."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


@dataclasses.dataclass(frozen=True)
class Devices(MeshConfig, section="mesh."):
    """The devices of a command that samples (docs/scale.md).

    Attributes:
        data: Replicas of the policy, which share the completions: devices, or groups of `fsdp` or `tensor`. Absent
            means all devices that this process sees, but no more replicas than completions.
    """

    data: Annotated[Count | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None


# All of them.
DEVICES = Devices()


def use_compilation_cache() -> None:
    """Keeps compiled programs for later calls. It imports jax, which would make `qerl --help` slow."""
    from pallas_kernels import runtime

    runtime.use_compilation_cache()


def call(function: Callable, argv: list[str], prog: str) -> int | None:
    """Calls a command with its options, which are the function's parameters, and returns its exit status, or None for 0.

    `--help` shows its docstring, which may end with a part "Examples:", and calls the command `prog`. A parameter
    `*fields` gets the options that are not among its others, with their values.
    """
    summary, examples = texts(function)
    signature = inspect.signature(function, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_POSITIONAL]
    known, fields = options.of_function(function), []
    if len(parameters) < len(signature.parameters):
        argv, fields = options.divide(argv, known)

    def bound(*arguments: Any, **keywords: Any) -> Callable:
        # tyro only parses here. The command runs later, when stderr is no longer captured.
        return functools.partial(function, *arguments, *fields, **keywords)

    shown = [p.replace(annotation=_shown(p.annotation, p.default, p.name)) for p in parameters]
    bound.__signature__ = signature.replace(parameters=shown)
    bound.__annotations__ = {p.name: p.annotation for p in shown}
    # A parameter's description is shown with its line breaks.
    bound.__doc__ = inspect.getdoc(function).replace("\n        ", " ").split("\nExamples:")[0]
    command = options.parse(
        bound,
        argv,
        known,
        prog=prog,
        description=f"{summary}\n\nExamples:\n{examples}" if examples else summary,
        config=(tyro.conf.PositionalMetavarFromFieldName, tyro.conf.FlagCreatePairsOff),
    )
    return command()


def texts(function: Callable) -> tuple[str, str]:
    """The part of a command's docstring before its arguments, and its examples."""
    text, _, examples = inspect.getdoc(function).partition("\nExamples:\n")
    return text.partition("\n\nArgs:")[0].strip(), examples.rstrip()


def _shown(hint: Any, default: Any, name: str) -> Any:
    """The type of a parameter, changed so that the help shows neither None and () as a default, nor True of --no-NAME.

    Of a dataclass whose fields are options without a prefix, the types of the fields are changed.
    """
    (bare, *_), notes = options.members(hint), getattr(hint, "__metadata__", ())
    if dataclasses.is_dataclass(bare) and notes:
        return Annotated[_with_shown_fields(bare), *notes]
    words = {int: "INT", float: "FLOAT", str: "TEXT", pathlib.Path: "PATH", bool: "{True,False}"}
    (kind, *others) = [kind for kind in options.members(hint) if kind is not type(None)]
    metavar, origin = None, typing.get_origin(kind)
    if typing.get_origin(hint) is tuple and default is inspect.Parameter.empty:
        # At least one, which the command checks: its error has an example.
        metavar = f"{name.upper().removesuffix('S')} ..."
    elif default not in (None, (), True):
        return hint
    elif origin is dict:
        metavar = "KEY VALUE ..."
    elif origin is Literal and default is None:
        metavar = "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    elif default is None and not others:
        metavar = words.get(kind)
    return Annotated[hint, tyro.conf.arg(metavar=metavar, help_behavior_hint="")]


def _with_shown_fields(cls: type) -> type:
    """A subclass of a dataclass with the same fields, of types that `_shown` has changed."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [
        (field.name, _shown(hints[field.name], field.default, field.name), field)
        for field in dataclasses.fields(cls)
    ]
    subclass = dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), frozen=True)
    subclass.__doc__ = cls.__doc__
    return subclass


_SECTIONS = all_sections(RunConfig)
# Those that every run has.
_NEEDED = {
    name for name, hint in typing.get_type_hints(RunConfig).items() if hint in _SECTIONS.values()
}


def _option(name: str) -> str:
    """The option of a field or section."""
    return f"--{name.replace('_', '-')}"


def _get(cfg: Any, name: str) -> Any:
    """The section at a dotted name; None if it or one around it is absent."""
    for part in name.split("."):
        cfg = cfg and getattr(cfg, part)
    return cfg


def _with(cfg: Any, name: str, section: Any) -> Any:
    """A config with another section at a dotted name. Nothing is checked: that is done with all options."""
    outer, _, inner = name.partition(".")
    cfg = copy.copy(cfg)
    object.__setattr__(cfg, outer, _with(getattr(cfg, outer), inner, section) if inner else section)
    return cfg


def _begun(kind: type) -> Any:
    """A section with its defaults, to which options are added. What it needs is missing, and nothing is checked."""
    begun = object.__new__(kind)
    for field in dataclasses.fields(kind):
        is_needed = field.default is dataclasses.MISSING
        object.__setattr__(begun, field.name, tyro.MISSING if is_needed else field.default)
    return begun


_FIELDS = """The fields of a run follow: each option changes what the config file says.
A section that the config file lacks is off; an option of it switches it on.
If one of --max-steps and --num-train-epochs is given, it takes the place of the other."""


def run_config(
    command: str, argv: list[str], read: Sequence[str] = (), about: Callable | None = None
) -> RunConfig:
    """The config file that comes first, changed by the options after it, as `_FIELDS` says.

    `--noise None` switches a section off that a run need not have, and so does `--grpo.entropy None`.

    Args:
        command: Name of the command, for errors.
        argv: Its arguments.
        read: Options of the command that the caller has read already. A misspelt option may mean one of them.
        about: The function whose docstring the help shows before the fields, without the usage in its first paragraph.

    Raises:
        ConfigError: For a missing file or an impossible config.
    """
    if not argv or argv[0].startswith("-"):
        raise ConfigError(
            f"missing the config file: qerl {command} CONFIG.toml [--section.field VALUE ...]; "
            f"`qerl {command} quickstart` takes the one in the package"
        )
    cfg = config.load(argv[0])
    parser = options.Parser()
    for name in _SECTIONS:
        parser.add_argument(*{_option(name), f"--{name}"}, dest=name)
    off, rest = parser.parse_known_args(argv[1:])
    present = {word.partition("=")[0].replace("_", "-") for word in rest}
    for name, kind in _SECTIONS.items():
        option, value = _option(name), getattr(off, name)
        if name in _NEEDED:
            others = [_option(s) for s in _SECTIONS if s not in _NEEDED and "." not in s]
            rule = f"every run has this section, with fields {option}.FIELD; None switches off only {', '.join(others)}"
        else:
            rule = f"must be None, which switches it off; its fields are {option}.FIELD"
        rule = f"is now {RENAMED[name]}" if name in RENAMED else rule
        is_off = value == "None" and name not in _NEEDED
        require(value is None or is_off, option, value, rule)
        is_used = any(word.startswith(f"{option}.") for word in present) or "--help" in present
        outer, _, _ = name.rpartition(".")
        is_possible = not outer or _get(cfg, outer) is not None
        if is_possible and (is_off or _get(cfg, name) is None):
            cfg = _with(cfg, name, _begun(kind) if is_used else None)
    needed = [
        f"{_option(name)}.{field.replace('_', '-')}"
        for name in _SECTIONS
        if (section := _get(cfg, name)) is not None
        for field, value in vars(section).items()
        if value is tyro.MISSING
    ]
    if len(lengths := _LENGTHS - present) == 1:
        rest += [*lengths, "None"]
    kinds = options.of_class(RunConfig)
    kinds |= dict.fromkeys([*map(_option, _SECTIONS), *read], Literal["None"])
    renamed = {_option(name): new for name, new in RENAMED.items()}
    renamed |= options.without_batches("--rollout.max-concurrent") if read else {}
    description = [inspect.getdoc(about).partition("\n\n")[2]] if about else []
    return options.parse(
        RunConfig,
        rest,
        options.Options(kinds, needed=tuple(needed), renamed=renamed),
        default=cfg,
        prog=f"qerl {command} {argv[0]}",
        description="\n\n".join([*description, _FIELDS]),
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
    )
