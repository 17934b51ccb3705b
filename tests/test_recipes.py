"""Tests that the page of recipes has every config, the memory of its plan, and the times that follow from measured rates."""

import pathlib
import re

import pytest

from qerl_jax import config
from qerl_jax.model import architecture
from qerl_jax.planning import cards, memory

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
ROWS = re.findall(r"(?m)^\| `qerl train (\S+)` \| .+ \| (\d*) ?\| (.*?) ?\|$", PAGE)
# Recipe -> GB of the page, "" where it gives none.
LISTED = {name: gigabytes for name, gigabytes, _ in ROWS}
# The default tests plan for the largest model only: a plan takes a sixth of a second.
PLANNED = [
    pytest.param(name, gigabytes, marks=[] if "72b" in name else pytest.mark.slow, id=name)
    for name, gigabytes in LISTED.items()
    if gigabytes
]


def test_the_page_of_recipes_lists_every_config_but_those_of_a_benchmark_and_a_study():
    configs = {path.stem for path in (ROOT / "configs").glob("*.toml")}
    assert {*LISTED} == configs - {"bench_7b", "study"}


@pytest.mark.parametrize(("name", "gigabytes"), PLANNED)
def test_a_recipe_fits_an_h100_with_the_memory_that_the_page_says(name, gigabytes):
    cfg, limit = config.load(name), cards.named("H100").limit
    plan = memory.plan(cfg, architecture.known(cfg.model.model_name_or_path), limit=limit)
    plan.require()
    assert round(plan.peak / 1e9) == int(gigabytes)


def test_the_page_gives_memory_for_every_recipe_of_a_published_shape():
    shape = lambda name: architecture.known(config.load(name).model.model_name_or_path)
    assert {name for name in LISTED if shape(name)} == {n for n, size in LISTED.items() if size}


def test_the_page_gives_the_time_of_every_recipe_or_says_why_it_gives_none():
    times = {name: time for name, _, time in ROWS}
    assert times["quickstart"] == "80 s on two CPU cores"
    amount = r"[\d.]+ (min|h)"
    pattern = re.compile(rf"(not .+|({amount} to |\d+ to )?{amount}(, (estimated|scaled))?)")
    assert all(pattern.fullmatch(times[name]) for name in times if name != "quickstart")
