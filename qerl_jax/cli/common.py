"""What the commands share: lines of output, and a run's config from a file and the command line."""

import argparse
import dataclasses
import json
import sys
from typing import Any

import tyro

from qerl_jax import config
from qerl_jax.config import ConfigError, EvalConfig, NoiseConfig, RunConfig

# Sections that a run may have or not.
_SECTIONS = {"noise": NoiseConfig, "eval": EvalConfig}
# Options of which a run needs exactly one.
_LENGTHS = {"--max-steps", "--num-train-epochs"}


def log(*lines: str) -> None:
    """Writes lines to the standard output at once."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def use_compilation_cache() -> None:
    """Keeps compiled programs for later calls; jax, which it imports, takes too long for `qerl --help`."""
    from pallas_kernels import runtime

    runtime.use_compilation_cache()


def run_config(command: str, argv: list[str]) -> RunConfig:
    """The config file that comes first, changed by the options after it.

    Beside the fields' own options, `--noise None` and `--eval None` switch a section off, an option of an
    absent section switches it on, and of `--max-steps` and `--num-train-epochs` the one that is given
    takes the other's place.

    Args:
        command: Name of the command, for errors.
        argv: Its arguments.

    Raises:
        ConfigError: For a missing file or an impossible config.
    """
    if not argv or argv[0].startswith("-"):
        raise ConfigError(
            f"missing the config file: qerl {command} CONFIG.toml [--section.field VALUE ...]"
        )
    cfg = config.load(argv[0])
    parser = argparse.ArgumentParser(prog=f"qerl {command}", add_help=False, allow_abbrev=False)
    for name in _SECTIONS:
        parser.add_argument(f"--{name}", choices=["None"])
    off, options = parser.parse_known_args(argv[1:])
    given = {word.partition("=")[0].replace("_", "-") for word in options}
    for name, section in _SECTIONS.items():
        is_asked_for = any(word.startswith(f"--{name}.") for word in given)
        if getattr(off, name) or getattr(cfg, name) is None:
            cfg = dataclasses.replace(cfg, **{name: section() if is_asked_for else None})
    if len(lengths := _LENGTHS - given) == 1:
        options += [*lengths, "None"]
    return tyro.cli(
        RunConfig,
        args=options,
        default=cfg,
        prog=f"qerl {command} {argv[0]}",
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
    )


def require_unicode(value: Any, where: str) -> None:
    """Refuses halves of characters, which JSON and a command line may hold, but no tokenizer and no file."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"{where}: holds {half!r}, half a character; must be Unicode text"
        ) from error
