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


# What a recipe may change of the paper's experiment of its name: none of it changes how a token is learned from.
CHANGED = {
    "output_dir": None,
    "model": {"block_scales"},
    "rollout": {"max_completion_length", "max_concurrent"},
    "eval": {"num_problems", "eval_steps"},
}
SMALL = ("quickstart", "smollm2_arithmetic", "calculator_arithmetic", "guess_number_qwen2.5_7b")


def test_the_page_of_recipes_lists_every_config_but_those_of_a_benchmark_and_a_study():
    assert {*LISTED} == {*config.packaged()} - {"accuracy_1.5b", "bench_7b", "gsm8k_study", "study"}


@pytest.mark.parametrize("name", [name for name in LISTED if name.startswith("paper/")])
def test_a_recipe_of_the_paper_has_its_numbers_and_its_twin_differs_only_in_what_it_waits_for(name):
    cfg, twin = config.load(name), config.load(name.removeprefix("paper/"))
    assert (cfg.rollout.carry, cfg.rollout.stop_share, cfg.rollout.max_concurrent) == (
        0,
        None,
        None,
    )
    assert cfg.rollout.max_completion_length == (4096 if "gsm8k" in name else 8192)
    assert cfg.model.weights in config.DENSE or cfg.model.block_scales == "maximum"
    assert cfg.eval.num_problems == (1319 if "gsm8k" in name else 500)
    tables = [config.to_table(each) for each in (cfg, twin)]
    for section, fields in CHANGED.items():
        for table in tables:
            of_section = table.pop(section)
            table[section] = fields and {k: v for k, v in of_section.items() if k not in fields}
    assert tables[0] == tables[1]


@pytest.mark.parametrize("name", [n for n in LISTED if "paper/" not in n and n not in SMALL])
def test_a_recipe_waits_for_its_last_rows_and_evaluates_at_its_ends(name):
    cfg = config.load(name)
    assert cfg.rollout.carry == 0  # with it learning is not shown to be equal
    assert cfg.rollout.max_concurrent == 128
    assert cfg.eval is None or cfg.eval.eval_steps == 0


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
    assert times["quickstart"] == "1 to 2 min on two CPU cores"
    amount = r"[\d.]+ (min|h)"
    pattern = re.compile(rf"(not .+|({amount} to |\d+ to )?{amount}(, (estimated|scaled))?)")
    assert all(pattern.fullmatch(times[name]) for name in times if name != "quickstart")
