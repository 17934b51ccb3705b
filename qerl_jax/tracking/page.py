"""One HTML page that needs nothing else: no network, no files beside it, no script."""

import dataclasses
import html
import itertools
from collections.abc import Sequence

from qerl_jax.tracking import charts
from qerl_jax.tracking.charts import Chart, Line

# Columns of the table under a chart.
_ENDS = ("first", "lowest", "highest", "last")
_DARK = ("#56b4e9", "#f0894a", "#3fc99c", "#dd8cc4", "#d8b93c", "#8fc7ea")


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a heading; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Passage:
    """A text under a line that can be clicked to open it."""

    title: str
    text: str


def render(
    title: str,
    subtitle: str,
    figures: Sequence[tuple[str, str]],
    tables: Sequence[Table],
    sections: Sequence[tuple[str, Sequence[Chart]]],
    passages: Sequence[tuple[str, Sequence[Passage]]],
) -> str:
    """Renders the page.

    Args:
        title: Title of the page.
        subtitle: A line below the title.
        figures: What matters most: a label and a value each.
        tables: Tables that follow the figures.
        sections: Headings and their charts; a heading without charts is left out.
        passages: Headings and their texts, at the end of the page.

    Returns:
        The HTML text.
    """
    body = [f"<h1>{_text(title)}</h1><p class=quiet>{_text(subtitle)}</p>"]
    if figures:
        cards = "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in figures)
        body.append(f"<dl class=figures>{cards}</dl>")
    body += [_table(table) for table in tables if table.rows]
    number = itertools.count()
    for heading, each in sections:
        if each:
            drawn = "\n".join(_chart(chart, f"chart{next(number)}-") for chart in each)
            body.append(f"<h2>{_text(heading)}</h2><div class=charts>{drawn}</div>")
    for heading, each in passages:
        if each:
            body.append(f"<h2>{_text(heading)}</h2>")
            body += [
                f"<details><summary>{_text(p.title)}</summary><pre>{_text(p.text)}</pre></details>"
                for p in each
            ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        # Nothing may be fetched and no script may run, whatever a completion holds.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{_text(title)}</title>'
        f"<style>{_style()}</style></head><body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _text(value: str) -> str:
    return html.escape(str(value))


def _table(table: Table) -> str:
    head = "".join(f"<th scope=col>{_text(name)}</th>" for name in table.columns)
    rows = "".join(
        f"<tr><th scope=row>{_text(row[0])}</th>"
        + "".join(
            f'<td data-label="{_text(name)}">{_text(cell)}</td>'
            for name, cell in zip(table.columns[1:], row[1:], strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    note = f"<p class=quiet>{_text(table.note)}</p>" if table.note else ""
    return (
        f"<h2>{_text(table.title)}</h2><div class=wide><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _chart(chart: Chart, prefix: str) -> str:
    """A chart over a table of its lines, which is its legend and tells their values."""
    unit = f" <span class=quiet>{_text(chart.unit)}</span>" if chart.unit else ""
    rows = "".join(_values(index, line) for index, line in enumerate(chart.lines))
    head = "".join(f"<th scope=col>{name}</th>" for name in ("", *_ENDS))
    return (
        f"<figure><figcaption><h3>{_text(chart.title)}{unit}</h3></figcaption>"
        f"{charts.svg(chart, prefix)}"
        f"<table class=values><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></figure>"
    )


def _values(index: int, line: Line) -> str:
    """The row of a line: how it is drawn, its label and its values, whose steps are shown on hover."""
    found = charts.extremes(line.steps, line.values)
    cells = "".join(
        f'<td title="step {step}">{charts.number(value)}</td>'
        for step, value in (found[name] for name in _ENDS)
    )
    dashes = " ".join(map(str, charts.DASHES[index % len(charts.DASHES)]))
    swatch = (
        f'<svg class="swatch" viewBox="0 0 26 8" aria-hidden="true"><path d="M1 4H25" '
        f'stroke="var(--c{index % len(charts.COLOURS)})" stroke-dasharray="{dashes}"/></svg>'
    )
    return f"<tr><th scope=row>{swatch}{_text(line.label)}</th>{cells}</tr>"


def _style() -> str:
    light = ";".join(f"--c{i}:{colour}" for i, colour in enumerate(charts.COLOURS))
    dark = ";".join(f"--c{i}:{colour}" for i, colour in enumerate(_DARK))
    return _STYLE.replace("LIGHT", light).replace("DARK", dark)


_STYLE = """
:root{LIGHT;--page:#fff;--card:#f6f7f9;--text:#1c2128;--quiet:#57606a;--rule:#d5dae0}
@media(prefers-color-scheme:dark){:root{DARK;--page:#14181d;--card:#1d232b;--text:#e4e8ed;
--quiet:#a2acb8;--rule:#38414c}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,sans-serif}
main{max-width:1280px;margin:auto;padding:24px 16px 48px}
h1{margin:0;font-size:1.6rem;overflow-wrap:anywhere}h2{margin:2rem 0 .6rem;font-size:1.2rem}
h3{margin:0;font-size:.95rem}.quiet{color:var(--quiet);font-weight:400;font-size:.875rem}
p.quiet{margin:.3rem 0}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:1.2rem 0}
.figures div{background:var(--card);border-radius:8px;padding:10px 14px}
dt{color:var(--quiet);font-size:.8rem}dd{margin:0;font-size:1.2rem;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:14px}
figure{margin:0;background:var(--card);border-radius:8px;padding:12px 12px 4px;min-width:0}
svg{display:block;width:100%;height:auto;font-variant-numeric:tabular-nums;stroke-linejoin:round}
svg text{font-family:system-ui,sans-serif!important}
.swatch{display:inline-block;width:26px;height:8px;margin-right:5px;stroke-width:1.8;flex:none}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 10px;border-bottom:1px solid var(--rule);vertical-align:top}
.wide{overflow-x:auto}
thead th{color:var(--quiet);font-weight:600;font-size:.8rem}
.values{font-size:.8rem;margin:4px 0}.values th,.values td{padding:1px 0 1px 8px;border:0;font-weight:400}
.values td,.values thead th+th{text-align:right;white-space:nowrap}.values th[scope=row]{padding-left:0;overflow-wrap:anywhere}
details{background:var(--card);border-radius:8px;padding:8px 14px;margin:8px 0}
summary{cursor:pointer;overflow-wrap:anywhere}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:.85rem/1.45 ui-monospace,monospace;margin:.6rem 0}
@media(max-width:700px){.wide thead{position:absolute;clip-path:inset(50%);width:1px;height:1px;overflow:hidden}
.wide :where(table,tbody,tr,th[scope=row],td){display:block;width:auto;overflow-wrap:anywhere}
.wide th[scope=row]{border:0;padding:10px 0 2px}
.wide td{display:flex;justify-content:space-between;gap:16px;border:0;padding:1px 0;text-align:right}
.wide td::before{content:attr(data-label);color:var(--quiet);text-align:left}
.wide tr{border-bottom:1px solid var(--rule);padding-bottom:8px}}
@media print{figure,details{break-inside:avoid}}
"""
