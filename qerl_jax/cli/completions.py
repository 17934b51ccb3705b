"""Shell completion of commands, recipes and options: tyro makes the script from the functions that it calls."""

import contextlib
import dataclasses
import inspect
import io
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import tyro

from qerl_jax import config
from qerl_jax.config import RunConfig, ToolsConfig

# Not fish: there tyro runs its program as one argument, which Linux limits to 128 KiB. Ours is longer.
SHELLS = ("bash", "zsh")
# Changes of what tyro writes: where nothing else fits, complete file names.
_IF_NONE = ('if [[ "$completions" == ', 'if [[ -z "$completions" || "$completions" == ')
_FILES = {
    # Bash completes file names by itself if there are no completions. tyro gives an empty one, and names folders
    # without a slash.
    "bash": (
        ("complete -F ", "complete -o default -F "),
        _IF_NONE,
        ('COMPREPLY=($(compgen -f -- "$cur"))', "COMPREPLY=()"),
    ),
    "zsh": (_IF_NONE,),
}
# Commands whose config may be named without its folder. tyro completes no arguments, so these names are added as
# sub-commands with the same options.
_BY_NAME = """
for _command in ('train', 'plan', 'filter'):
    _spec = COMPLETION_SPEC['subcommands'][_command]
    _named = {**_spec, 'description': 'a config of the package'}
    _spec['subcommands'] = dict.fromkeys({names}, _named)"""


def script(shell: str, commands: Mapping[str, Callable]) -> str:
    """The script of a shell that completes commands, their options and values, configs by name, and paths.

    Args:
        shell: One of `SHELLS`.
        commands: The commands by their names. Those that read their arguments themselves say so by a docstring
            that begins with "usage:".
    """
    quickstart = config.load(config.packaged()["quickstart"])
    # Has every section, so that all options are known.
    full = dataclasses.replace(quickstart, tools=ToolsConfig(functions=("calculator",)))
    stand_ins = {"train": _train, "plan": _plan, "completion": _completion}
    functions = {}
    for name, command in commands.items():
        reads_itself = inspect.getdoc(command).startswith("usage:")
        shown = stand_ins.get(name, _paths) if reads_itself else command
        functions[name] = _with_fields(shown, full)
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(
            functions,
            prog="qerl",
            args=["--tyro-print-completion", shell],
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
        )
    names = [*config.packaged()]
    by_name = _BY_NAME.replace("{names}", str(names))
    # Descriptions of several lines would be taken for several words.
    extended = lambda spec: spec[0].replace(r"\n", " ") + by_name
    text = re.sub(r"(?m)^COMPLETION_SPEC = .*$", extended, written.getvalue())
    for change in _FILES[shell]:
        text = text.replace(*change)
    return text


type _Fields = Annotated[RunConfig, tyro.conf.arg(name="")]


def _with_fields(command: Callable, full: RunConfig) -> Callable:
    """A command whose `*fields`, if it has them, are the options of a config's fields."""
    signature = inspect.signature(command, eval_str=True)
    taken = {"kind": inspect.Parameter.KEYWORD_ONLY, "annotation": _Fields, "default": full}
    parameters = signature.parameters.values()
    shown = [p.replace(**taken) if p.kind is p.VAR_POSITIONAL else p for p in parameters]

    def command_with_fields() -> None:
        """Is never called."""

    command_with_fields.__signature__ = signature.replace(parameters=shown)
    command_with_fields.__annotations__ = {p.name: p.annotation for p in shown}
    command_with_fields.__doc__ = command.__doc__
    return command_with_fields


def _train(path: pathlib.Path, /, *fields) -> None:
    """Trains an adapter, or resumes the run in output_dir."""


def _plan(
    path: pathlib.Path, /, *fields, device: str = "", device_memory: str = "", compile: bool = False
) -> None:
    """Says what the run will hold in memory, and whether it fits."""


def _completion(shell: Literal["bash", "zsh"], /) -> None:
    """Prints a script that completes commands and options."""


def _paths(paths: tuple[pathlib.Path, ...] = (), /) -> None:
    """Takes paths, or nothing."""
