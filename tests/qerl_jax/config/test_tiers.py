"""Tests the tiers of a config's fields, and where a user sees them."""

import dataclasses
import pathlib
import tomllib
import typing

import pytest

from qerl_jax import config
from qerl_jax.api import settings
from qerl_jax.cli import common
from qerl_jax.config import RunConfig, tiers
from qerl_jax.system.checked import all_sections, sections

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
QUICKSTART = CONFIGS / "quickstart.toml"
FIELDS = {
    f"{section}.{field.name}".lstrip("."): field
    for section, kind in ({"": RunConfig} | all_sections(RunConfig)).items()
    for field in dataclasses.fields(kind)
    if field.name not in sections(kind)
}


def named_in(table, prefix=""):
    for name, value in table.items():
        yield prefix + name, value
        if isinstance(value, dict):
            yield from named_in(value, f"{prefix}{name}.")


SET = [
    pair for path in CONFIGS.rglob("*.toml") for pair in named_in(tomllib.loads(path.read_text()))
]


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_has_a_tier_and_is_core_only_if_a_recipe_sets_it(name):
    metadata = FIELDS[name].metadata
    assert metadata["tier"] in typing.get_args(tiers.Tier.__value__)
    assert metadata["tier"] != "core" or name in dict(SET)


def test_values_with_a_tier_of_their_own_are_values_of_the_field():
    values = {name: field.metadata.get("experimental") for name, field in FIELDS.items()}
    for name, listed in values.items():
        if listed:
            section, _, field = name.rpartition(".")
            hint = typing.get_type_hints(all_sections(RunConfig)[section])[field]
            assert set(listed) < set(typing.get_args(hint))
            assert FIELDS[name].default not in listed


BEYOND = (
    "fields beyond the core (docs/configuration.md#tiers): experimental (effect not measured): "
    "noise.per = 'group'; verified: optim.optimizer = 'adamw_8bit'"
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"lora": {"rank": 4}, "noise": None}, []),
        ({"noise": {"per": "group"}, "optim": {"optimizer": "adamw_8bit"}}, [BEYOND]),
        # A value of a core field, and a table with its own defaults.
        ({"grpo": {"loss_type": "sapo", "sapo": {}}}, ["loss_type = 'sapo', grpo.sapo"]),
        ({"grpo": {"dynamic_sampling": {"max_rounds": 3}}}, [": grpo.dynamic_sampling.max_rounds"]),
    ],
)
def test_a_run_names_what_it_sets_beyond_the_core(changes, words):
    lines = config.about_tiers(settings.run_config(QUICKSTART, changes))
    assert len(lines) == len(words)
    assert all(part in line for part, line in zip(words, lines, strict=True))


def test_the_help_shows_the_tier_of_each_option(capsys):
    with pytest.raises(SystemExit):
        common.run_config("train", ["quickstart", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    assert "[core] Rank R of A and B." in shown and "[verified] AdamW with" in shown
    assert "[experimental] Probability of dropping" in shown
    # Three fields are no options: tables whose values may have any type.
    marks = sum(shown.count(f"[{tier}") for tier in ("core", "verified", "experimental"))
    assert marks == len(FIELDS) - 3
