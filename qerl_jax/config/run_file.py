"""The TOML file of a run: read from a path or by a packaged name, and written into the run folder."""

import os
import pathlib
import re
import tomllib
from typing import Any

from qerl_jax.config.sections import RunConfig
from qerl_jax.system.checked import ConfigError, from_table, meant, require, to_table
from qerl_jax.system.files import DEEPEST, is_shallow, write_whole

# The format of run folders: of their config, checkpoints and logs. It rises when an older folder cannot be read, or
# when its run would not go on as it began: since 2, streams of random numbers are folded into the seed's key.
RUN_FORMAT = 2
# The key of config.toml that has it.
_FORMAT_KEY = "run_format"


def load(path: str | os.PathLike) -> RunConfig:
    """Reads and checks a TOML file, or a config of the package by its name, such as "quickstart"."""
    return from_table(RunConfig, read_table(path))


def load_run(folder: str | pathlib.Path) -> RunConfig:
    """Reads the config of a run from its folder.

    Raises:
        ConfigError: If another version has written the folder in another format, or the config is invalid.
    """
    folder = pathlib.Path(folder)
    table = _parsed(_find(folder / "config.toml"))
    written = table.pop(_FORMAT_KEY, None)
    if written != RUN_FORMAT:
        raise ConfigError(_about_format(folder, written))
    return from_table(RunConfig, table)


def can_load_run(folder: str | pathlib.Path) -> bool:
    """Whether a folder is of a run, in the format of this version."""
    path = pathlib.Path(folder) / "config.toml"
    return path.is_file() and _parsed(path).get(_FORMAT_KEY) == RUN_FORMAT


def _about_format(folder: pathlib.Path, written: Any) -> str:
    """Returns the error for a run folder in another format."""
    is_newer = isinstance(written, int) and written > RUN_FORMAT
    message = (
        f"run folder: got {str(folder)!r}, which {'a newer' if is_newer else 'an older'} version of qerl-jax has written "
        f"(run_format {written}; this version reads {RUN_FORMAT}): "
    )
    if is_newer:
        return message + "update qerl-jax, or choose another folder"
    trained = [name for name in ("adapter", "model") if (folder / name).is_dir()]
    use = (
        f"start from, ask or export what it has trained by {folder / trained[0]}" if trained else ""
    )
    return message + f"{use or 'use that version'}, and choose another folder for new runs"


# In a checkout the same files as configs/.
_PACKAGED = pathlib.Path(__file__).parents[1] / "assets" / "configs"
# Far above any config; the time of reading grows with the square of a hostile one.
_LONGEST_FILE = 2**20
# A key of that many parts; each makes a table, in time that grows with the square of their number.
_DEEP_KEY = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{DEEPEST}}}"""
)


def packaged() -> dict[str, pathlib.Path]:
    """Returns the configs of the package by their names; those of the paper's experiments begin with "paper/"."""
    files = [*sorted(_PACKAGED.glob("*.toml")), *sorted(_PACKAGED.glob("paper/*.toml"))]
    return {file.relative_to(_PACKAGED).with_suffix("").as_posix(): file for file in files}


def read_table(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a TOML file, or a config of the package by its name; nothing is checked but that it is TOML.

    The config of a run folder is read as any other: a new run can be started from it.
    """
    table = _parsed(_find(path))
    table.pop(_FORMAT_KEY, None)
    return table


def _parsed(path: pathlib.Path) -> dict[str, Any]:
    """Returns the tables of a TOML file, which may be hostile."""
    rule = f"must be at most {_LONGEST_FILE} bytes long"
    require(path.stat().st_size <= _LONGEST_FILE, str(path), path.stat().st_size, rule)
    try:
        text = path.read_bytes().decode()
        table = None if _DEEP_KEY.search(text) else tomllib.loads(text)
    except RecursionError:
        table = None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    if table is None or not is_shallow(table):
        raise ConfigError(f"{path}: lists and tables must nest at most {DEEPEST} deep")
    return table


def _find(path: str | os.PathLike) -> pathlib.Path:
    """The file of a path, or of the name of a config in the package."""
    path = pathlib.Path(path)
    if path.is_file():
        return path
    known, name = packaged(), path.as_posix()
    if path.suffix != ".toml" and path.parts[:-1] in ((), ("paper",)):
        if name in known:
            return known[name]
        hint = meant(name, known) or f"; these are {', '.join(known)}"
        rule = f"no such file, nor a config of the package{hint}"
        require(path.is_dir(), "config file", str(path), rule)
    rule = "no such file: it is a folder; name a file in it" if path.is_dir() else "no such file"
    name = f"paper/{path.stem}" if path.parent.name == "paper" else path.stem
    if name in known:
        rule += f"; the package has it as {name}"
    elif not path.is_dir():
        beside = [file.name for file in path.parent.glob("*.toml") if file.is_file()]
        rule += meant(path.name, beside)
    raise ConfigError(f"config file: got {str(path)!r}; {rule}")


def write_run(folder: str | pathlib.Path, cfg: RunConfig, given_rows: int | None = None) -> None:
    """Writes `config.toml` of a run folder: the format of the folder, and the config as `dump` returns it.

    A comment says how many rows were passed in Python instead of `cfg.data`.

    Raises:
        DiskError: If it cannot be written.
    """
    comment = _GIVEN.format(given_rows) if given_rows is not None else ""
    text = f"{comment}{_FORMAT_KEY} = {RUN_FORMAT}\n{dump(cfg)}"
    write_whole(pathlib.Path(folder) / "config.toml", text)


# The comment at the top of a run's config.toml if its rows are not those of [data].
_GIVEN = "# Trained on {} rows from Python, not on [data].\n"


def dump(cfg: RunConfig) -> str:
    """Returns the config as TOML text, every default written out."""
    import tomli_w

    return tomli_w.dumps(to_table(cfg))


def given_rows(run_folder: str | pathlib.Path) -> int | None:
    """Returns how many rows were passed to a run in Python; None if it was trained on its config's data."""
    with (pathlib.Path(run_folder) / "config.toml").open() as file:
        match = re.fullmatch(re.escape(_GIVEN).replace(r"\{\}", r"(\d+)"), file.readline())
    return int(match[1]) if match else None
