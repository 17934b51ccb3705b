"""Renders one HTML page that needs no network, no other files and no script."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from qerl_jax.tracking import charts

TEMPLATE = pathlib.Path(__file__).parents[1] / "assets" / "page.html"
_DARK = ("#56b4e9", "#f0894a", "#3fc99c", "#dd8cc4", "#d8b93c", "#8fc7ea")


def render(
    title: str,
    subtitle: str,
    figures: Mapping[str, str],
    tables: Sequence[Mapping[str, Any]],
    sections: Mapping[str, Sequence[charts.Chart]],
    passages: Mapping[str, Sequence[tuple[str, str]]],
) -> str:
    """Renders the page as HTML text.

    Args:
        title: Title of the page.
        subtitle: A line below the title.
        figures: The most important values, by label.
        tables: Tables that follow the figures. Each has a `title`, `columns`, `rows` of texts, of which
            the first is the row's name, and a `note` below it, or None; a table without rows is left out.
        sections: Charts by heading; a heading without charts is left out.
        passages: Collapsed texts by heading, at the end of the page: pairs of a title to click, and the text.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        title=title,
        subtitle=subtitle,
        figures=figures,
        tables=tables,
        sections=sections,
        passages=passages,
        light=charts.COLOURS,
        dark=_DARK,
        dashes=charts.DASHES,
        svg=charts.svg,
        extremes=charts.extremes,
        number=charts.number,
    )
