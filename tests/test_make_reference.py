"""Tests the pages that `scripts/make_reference.py` makes from dataclasses and commands."""

import pytest

from qerl_jax.data import datasets
from scripts import make_reference


@pytest.mark.parametrize("page", make_reference.PAGES, ids=lambda page: page.name)
def test_committed_reference_is_what_the_code_makes(page):
    assert page.read_text() == make_reference.PAGES[page]()


def test_every_field_of_a_config_is_on_its_page():
    page = make_reference.configuration()
    assert "| `output_dir` | text | needed |" in page
    assert (
        "| `beta` | number | `0.04` | verified | Weight of the KL to the reference policy." in page
    )
    assert '| `scope` | `"rollout"`, `"both"` | `"rollout"` |' in page


@pytest.mark.parametrize("page", [make_reference.cli, make_reference.configuration])
def test_the_system_messages_that_have_names_are_named(page):
    (text,) = {line for line in page().splitlines() if "the name of one" in line and "none" in line}
    assert all(f'"{name}"' in text for name in datasets.SYSTEM_PROMPTS)


def test_options_are_shown_as_the_command_line_takes_them():
    page = make_reference.cli()
    # Of a nested dataclass, and without a value.
    assert "| `--top-k` | integer | `0` |" in page and "| `--from` |" in page
    assert "| `--ignore-eos` | no value |" in page and "| `--no-double-quant` | no value |" in page


def test_a_bar_or_a_star_in_a_text_does_not_end_its_cell():
    assert make_reference.cell("a | b * c, `x | y`") == r"a &#124; b \* c, `x \| y`"
