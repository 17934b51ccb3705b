"""What the commands share: printing lines, calling a function with options, and reading a config with options."""

import copy
import dataclasses
import functools
import inspect
import json
import pathlib
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import tyro

from qerl_jax import config
from qerl_jax.cli import options
from qerl_jax.config import ConfigError, MeshConfig, RunConfig
from qerl_jax.system.checked import Count, require

# The optional sections of a run's config, and those that every run has.
_SECTIONS = {
    name: next(kind for kind in typing.get_args(hint) if dataclasses.is_dataclass(kind))
    for name, hint in typing.get_type_hints(RunConfig).items()
    if any(map(dataclasses.is_dataclass, typing.get_args(hint)))
}
_NEEDED = [
    name
    for name, hint in typing.get_type_hints(RunConfig).items()
    if dataclasses.is_dataclass(hint)
]
# Options of which the section `tools` needs one, each with values that stand for it.
_TOOLS: dict[str, dict[str, Any]] = {
    "--tools.functions": {"functions": ("calculator",)},
    "--tools.environment": {"environment": "guess_number"},
    "--tools.environments": {"environments": {"one": "guess_number"}},
}
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
    """Calls a command with its options, which are the function's parameters; `--help` shows its docstring.

    Args:
        function: The command. Its docstring may end with a part "Examples:". A parameter `*fields` gets the options
            that are not among its others, with their values.
        argv: Its arguments.
        prog: The command's name in the help.

    Returns:
        What the command returns: its exit status, or None for 0.
    """
    summary, examples = texts(function)
    signature = inspect.signature(function, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_POSITIONAL]
    known, fields = options.of_function(function), []
    if len(own) < len(signature.parameters):
        argv, fields = options.divide(argv, known)

    def made(*arguments: Any, **given: Any) -> Callable:
        # tyro only parses here. The command runs later, when stderr is no longer captured.
        return functools.partial(function, *arguments, *fields, **given)

    shown = [
        each.replace(annotation=_shown(each.annotation, each.default, each.name)) for each in own
    ]
    made.__signature__ = signature.replace(parameters=shown)
    made.__annotations__ = {each.name: each.annotation for each in shown}
    # A parameter's description is shown with its line breaks.
    made.__doc__ = inspect.getdoc(function).replace("\n    " + 4 * " ", " ").split("\nExamples:")[0]
    command = options.parse(
        made,
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
    """The type of a parameter, changed so that the help shows neither None and () as a default, nor True of --no-NAME."""
    if typing.get_origin(hint) is tuple and default is inspect.Parameter.empty:
        # At least one, which the command checks: its error has an example.
        return Annotated[
            hint,
            tyro.conf.arg(metavar=f"{name.upper().removesuffix('S')} ...", help_behavior_hint=""),
        ]
    if default is True:
        return Annotated[hint, tyro.conf.arg(help_behavior_hint="")]
    if default not in (None, ()):
        return hint
    words = {int: "INT", float: "FLOAT", str: "TEXT", pathlib.Path: "PATH", bool: "{True,False}"}
    # What is annotated already, with a name of the option, keeps that.
    bare = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    kinds = [kind for kind in typing.get_args(bare) if kind is not type(None)]
    metavar = words.get(kinds[0]) if default is None and len(kinds) == 1 else None
    if kinds and typing.get_origin(kinds[0]) is typing.Literal and default is None:
        metavar = "{" + ",".join(map(str, typing.get_args(kinds[0]))) + "}"
    if kinds and typing.get_origin(kinds[0]) is dict:
        metavar = "KEY VALUE ..."
    return Annotated[hint, tyro.conf.arg(metavar=metavar, help_behavior_hint="")]


_FIELDS = """The fields of a run follow: each option changes what the config file says.
If one of --max-steps and --num-train-epochs is given, it takes the place of the other."""


def run_config(
    command: str, argv: list[str], own: Sequence[str] = (), about: Callable | None = None
) -> RunConfig:
    """The config file that comes first, changed by the options after it.

    Each field has an option. `--noise None`, `--eval None` and `--tools None` switch a section off. An option of an
    absent section switches it on. `--max-steps` replaces `num_train_epochs`, and the reverse.

    Args:
        command: Name of the command, for errors.
        argv: Its arguments.
        own: Options of the command that the caller has read already. A misspelt option may mean one of them.
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
    for name in (*_SECTIONS, *_NEEDED):
        parser.add_argument(f"--{name}")
    off, rest = parser.parse_known_args(argv[1:])
    optional = ", ".join(f"--{name}" for name in _SECTIONS)
    for name in _NEEDED:
        value = getattr(off, name)
        rule = f"every run has this section, with fields --{name}.FIELD; None switches off only {optional}"
        require(value is None, f"--{name}", value, rule)
    given = {word.partition("=")[0].replace("_", "-") for word in rest}
    for name, section in _SECTIONS.items():
        is_asked_for = any(word.startswith(f"--{name}.") for word in given)
        value = getattr(off, name)
        rule = f"must be None, which switches it off; its fields are --{name}.FIELD"
        require(value in (None, "None"), f"--{name}", value, rule)
        if value or getattr(cfg, name) is None:
            # Tools must have one; the option replaces it.
            one = next((fields for option, fields in _TOOLS.items() if option in given), {})
            begun = section(**one if name == "tools" else {}) if is_asked_for else None
            # It is checked with all options: without a section others may be needed.
            cfg = copy.copy(cfg)
            object.__setattr__(cfg, name, begun)
    if len(lengths := _LENGTHS - given) == 1:
        rest += [*lengths, "None"]
    kinds = options.of_class(RunConfig)
    kinds |= dict.fromkeys([*(f"--{name}" for name in _SECTIONS), *own], Literal["None"])
    return options.parse(
        RunConfig,
        rest,
        options.Options(kinds),
        default=cfg,
        prog=f"qerl {command} {argv[0]}",
        description=f"{inspect.getdoc(about).partition('\n\n')[2]}\n\n{_FIELDS}"
        if about
        else _FIELDS,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
    )


def require_unicode(value: Any, where: str) -> None:
    """Refuses half characters (lone surrogates), which JSON and a command line may hold, but not a file."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"{where}: holds {half!r}, half a character; must be Unicode text"
        ) from error
