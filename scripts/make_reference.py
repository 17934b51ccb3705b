"""Writes docs/configuration.md and docs/cli.md from the code: `python -m scripts.make_reference`.

The fields of a config come from the dataclasses of `qerl_jax.config`: name, type, default, rule, and the text of the
docstring, which `qerl train CONFIG --help` shows too. The commands come from their docstrings and signatures. A test
compares the committed pages with the output of this script.
"""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import inspect
import json
import pathlib
import re
import sys
import types
import typing

from qerl_jax import config
from qerl_jax.cli import common
from qerl_jax.cli.main import COMMANDS
from qerl_jax.config.tiers import tier_text
from qerl_jax.system.checked import Count, Rule, all_sections, sections

DOCS = pathlib.Path(__file__).parents[1] / "docs"
_COUNT = typing.get_args(Count)[1].text
SECTIONS = {"": config.RunConfig} | all_sections(config.RunConfig)


def described(text: str, heading: str) -> dict[str, str]:
    """Returns the entries of a docstring section ("Attributes", "Args") by name, each as one line."""
    part = re.search(rf"(?ms)^{heading}:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(text))
    if part is None:
        return {}
    entries = re.split(r"(?m)^    (?=\*{0,2}\w+:)", part[1])[1:]
    return {
        name.strip("* "): re.sub(r"^\[[^]]*\] ", "", " ".join(words.split()))
        for name, _, words in (entry.partition(":") for entry in entries)
    }


def linked(text: str) -> str:
    """Makes links of pages that a text names, such as "docs/scale.md" or "docs/rewards.md#using-it"."""
    return re.sub(r"\bdocs/([\w-]+\.md(?:#[\w-]+)?)", r"[docs/\1](\1)", text)


def cell(text: str) -> str:
    """Formats a text as a table cell. What looks like HTML or a placeholder becomes code, a page's name a link."""
    text = linked(text)
    text = re.sub(r"(?<!`)(</?\w+>)(?!`)", r"`\1`", text)
    return text.replace("|", "&#124;").replace("*", r"\*") if "`" not in text else _outside(text)


def _outside(text: str) -> str:
    """Escapes text outside of code spans, and bars inside, which would end the cell."""
    parts = text.split("`")
    parts[::2] = [part.replace("|", "&#124;").replace("*", r"\*") for part in parts[::2]]
    parts[1::2] = [part.replace("|", r"\|") for part in parts[1::2]]
    return "`".join(parts)


def kind(hint: typing.Any) -> tuple[str, list[str]]:
    """Returns the words for a type, and the rules that its annotations add."""
    rules: list[str] = []
    if isinstance(hint, typing.TypeAliasType):
        hint = hint.__value__
    if typing.get_origin(hint) is typing.Annotated:
        hint, *notes = typing.get_args(hint)
        rules += [note.text for note in notes if isinstance(note, Rule)]
        if hint is int and _COUNT in rules:  # the rule of all counts
            return "integer above 0", []
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        results = [kind(item) for item in args if item is not types.NoneType]
        return " or ".join(words for words, _ in results), rules + sum((r for _, r in results), [])
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(item)}`" for item in args), rules
    if origin in (tuple, collections.abc.Sequence):
        words, more = kind(args[0])
        is_plural = words.startswith("`") or words == "any value"
        return f"list of {words}{'' if is_plural else 's'}", rules + more
    if origin is dict or hint is dict:
        return "table", rules
    names = {int: "integer", float: "number", str: "text", bool: "true or false"}
    return names.get(hint, "path" if hint is pathlib.Path else "any value"), rules


def value(given: typing.Any) -> str:
    """Formats a default as in TOML; nothing for None."""
    if given is None or given == ():
        return ""
    if isinstance(given, pathlib.PurePath | str):
        return f"`{json.dumps(str(given))}`"
    if isinstance(given, bool):
        return f"`{json.dumps(given)}`"
    return f"`{given:g}`" if isinstance(given, float) else f"`{given}`"


def table(head: tuple[str, ...], rows: typing.Iterable[tuple[str, ...]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def section(name: str, cls: type) -> str:
    """Returns the part of the page about one section of a config."""
    hints, inner = typing.get_type_hints(cls, include_extras=True), sections(cls)
    texts = described(cls.__doc__, "Attributes")
    rows = []
    for field in dataclasses.fields(cls):
        if field.name in inner:
            continue
        words, rules = kind(hints[field.name])
        is_needed = field.default is dataclasses.MISSING
        meaning = texts[field.name] + "".join(f" The value {rule}." for rule in rules)
        default = "needed" if is_needed else value(field.default)
        rows.append((f"`{field.name}`", words, default, cell(tier_text(field)), cell(meaning)))
    summary = inspect.cleandoc(cls.__doc__).partition("\n\nAttributes:")[0].strip()
    title = f"[{name}]" if name else "The run"
    head = ("field", "type", "default", "tier", "meaning")
    return f"## {title}\n\n{linked(summary)}\n\n{table(head, rows)}"


def _rows(function: typing.Callable) -> tuple[list[str], list[tuple[str, ...]]]:
    """Returns the names of a command's positional arguments, and a row for each of its options."""
    texts = described(function.__doc__, "Args")
    positions, rows = [], []
    for name, item in inspect.signature(function, eval_str=True).parameters.items():
        default = dataclasses.MISSING if item.default is item.empty else item.default
        hint, shown = item.annotation, name
        if item.kind is inspect.Parameter.POSITIONAL_ONLY:
            shown, needed = name.upper(), "needed" if default is dataclasses.MISSING else ""
            many = typing.get_origin(hint) is tuple
            positions.append(f"{shown.removesuffix('S')} ..." if many else shown)
            rows.append((f"`{shown}`", kind(hint)[0], needed, cell(texts[name])))
        elif item.kind is inspect.Parameter.VAR_POSITIONAL:
            rows.append(("`--section.field`", "", "", cell(texts[name])))
        elif dataclasses.is_dataclass(hint):
            rows += _fields(hint, f"{name}.")
        else:
            if typing.get_origin(hint) is typing.Annotated:
                inner, note = typing.get_args(hint)[:2]
                if dataclasses.is_dataclass(inner):  # options without a prefix
                    rows += _fields(inner)
                    continue
                shown = note.name or name
            rows.append(_option(shown, hint, default, texts[name]))
    return positions, rows


def _fields(cls: type, prefix: str = "") -> list[tuple[str, ...]]:
    """Returns a row for each field of a dataclass whose fields are options. A class may extend its base's docstring."""
    texts = described(cls.__base__.__doc__, "Attributes") | described(cls.__doc__, "Attributes")
    hints = typing.get_type_hints(cls, include_extras=True)
    shown = lambda f: f.name if isinstance(f.default, bool) else prefix + f.name
    fields = dataclasses.fields(cls)
    return [_option(shown(f), hints[f.name], f.default, texts[f.name]) for f in fields]


def _option(name: str, hint: typing.Any, default: typing.Any, text: str) -> tuple[str, ...]:
    """Returns the row of an option. One of a truth value has no value: it changes the default to the opposite."""
    shown = name.replace("_", "-")
    if isinstance(default, bool):
        return f"`--{'no-' * default}{shown}`", "no value", "", cell(text)
    needed = "needed" if default is dataclasses.MISSING else value(default)
    return f"`--{shown}`", kind(hint)[0], needed, cell(text)


def command(name: str, function: typing.Callable) -> str:
    """Returns the part of the page about one command."""
    text = inspect.getdoc(function)
    if text.startswith("usage:"):
        return f"## qerl {name}\n\n```text\n{text}\n```"
    positions, rows = _rows(function)
    summary, examples = common.texts(function)
    usage = " ".join(["qerl", name, *positions, "[OPTIONS]"])
    parts = [f"## qerl {name}", linked(summary), f"`{usage}`"]
    parts.append(table(("argument", "type", "default", "meaning"), rows))
    if examples:
        parts.append(f"```sh\n{inspect.cleandoc(examples)}\n```")
    return "\n\n".join(parts)


def configuration() -> str:
    """Returns docs/configuration.md."""
    return _page("configuration", [section(*item) for item in SECTIONS.items()])


def cli() -> str:
    """Returns docs/cli.md."""
    return _page("cli", [command(*item) for item in COMMANDS.items()])


def _page(name: str, parts: list[str]) -> str:
    """Returns a page: the fixed text beside this script, with parts in the place of its last line."""
    text = pathlib.Path(__file__).with_name(f"{name}_page.md").read_text()
    return re.sub(r"\{\{\w+\}\}", lambda _: "\n\n".join(parts), text)


PAGES = {DOCS / "configuration.md": configuration, DOCS / "cli.md": cli}


def main(argv: list[str] | None = None) -> int:
    """Writes the pages. With `--check` it only says whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "write nothing; fail if a page is out of date"
    parser.add_argument("--check", action="store_true", help=text)
    is_check, is_stale = parser.parse_args(argv).check, False
    for path, make in PAGES.items():
        page = make()
        if not is_check:
            path.write_text(page)
        elif not path.is_file() or path.read_text() != page:
            print(f"{path.name} is out of date: run python -m scripts.make_reference")
            is_stale = True
    return int(is_stale)


if __name__ == "__main__":
    sys.exit(main())
