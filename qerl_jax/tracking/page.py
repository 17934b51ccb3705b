"""One HTML page that needs nothing else: no network, no files beside it, no script for what matters."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence

from qerl_jax.tracking import charts
from qerl_jax.tracking.charts import Chart

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
    """The page.

    Args:
        title: Of the page.
        subtitle: A line below.
        figures: What matters most: a label and a value each.
        tables: After the figures.
        sections: Headings and their charts; one without charts is left out.
        passages: Headings and their texts, last.
    """
    body = [f"<h1>{_text(title)}</h1><p class=quiet>{_text(subtitle)}</p>"]
    if figures:
        cards = "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in figures)
        body.append(f"<dl class=figures>{cards}</dl>")
    body += [_table(table) for table in tables if table.rows]
    for heading, each in sections:
        if each:
            body.append(f"<h2>{_text(heading)}</h2><div class=charts>")
            body += [*map(_chart, each), "</div>"]
    for heading, each in passages:
        if each:
            body.append(f"<h2>{_text(heading)}</h2>")
            body += [
                f"<details><summary>{_text(p.title)}</summary><pre>{_text(p.text)}</pre></details>"
                for p in each
            ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        # Nothing may be fetched, whatever a completion holds.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{_text(title)}</title>'
        f"<style>{_style()}</style></head><body><main>\n"
        + "\n".join(body)
        + f"\n</main><script>{_SCRIPT}</script></body></html>\n"
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


def _chart(chart: Chart) -> str:
    unit = f" <span class=quiet>{_text(chart.unit)}</span>" if chart.unit else ""
    legend = "".join(
        f"<li>{charts.swatch(index)}{_text(line.label)}</li>"
        for index, line in enumerate(chart.lines)
    )
    legend = f"<ul class=legend>{legend}</ul>" if len(chart.lines) > 1 else ""
    return (
        f"<figure><figcaption><h3>{_text(chart.title)}{unit}</h3>{legend}</figcaption>"
        f"{charts.svg(chart)}<p class=readout aria-live=polite>&nbsp;</p>"
        f'<script type="application/json">{charts.data(chart)}</script></figure>'
    )


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
svg{display:block;width:100%;height:auto;font-size:12px;font-variant-numeric:tabular-nums}
svg:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
svg text{fill:var(--quiet)}.grid,.cursor{stroke:var(--rule);fill:none}.cursor{stroke:var(--quiet)}
.line,.raw{fill:none!important;stroke-width:1.8;stroke-linejoin:round}
.raw{stroke-width:.8;opacity:.35}.band{stroke:none!important;opacity:.18}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:4px 0 0;padding:0;font-size:.8rem}
.swatch{display:inline-block;width:26px;height:8px;margin-right:5px}
.readout{margin:0;min-height:1.6em;font-size:.8rem;color:var(--quiet);font-variant-numeric:tabular-nums}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 10px;border-bottom:1px solid var(--rule);vertical-align:top}
.wide{overflow-x:auto}
thead th{color:var(--quiet);font-weight:600;font-size:.8rem}
details{background:var(--card);border-radius:8px;padding:8px 14px;margin:8px 0}
summary{cursor:pointer;overflow-wrap:anywhere}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:.85rem/1.45 ui-monospace,monospace;margin:.6rem 0}
@media(max-width:700px){thead{position:absolute;clip-path:inset(50%);width:1px;height:1px;overflow:hidden}
table,tbody,tr,th[scope=row],td{display:block;width:auto;overflow-wrap:anywhere}th[scope=row]{border:0;padding:10px 0 2px}
td{display:flex;justify-content:space-between;gap:16px;border:0;padding:1px 0;text-align:right}
td::before{content:attr(data-label);color:var(--quiet);text-align:left}
tr{border-bottom:1px solid var(--rule);padding-bottom:8px}}
@media print{figure,details{break-inside:avoid}}
"""
# Values under the pointer, or at the place that the arrow keys move to.
_SCRIPT = """
for (const figure of document.querySelectorAll('figure')) {
  const chart = JSON.parse(figure.querySelector('script').textContent);
  const svg = figure.querySelector('svg[role=img]'), cursor = svg.querySelector('.cursor');
  const readout = figure.querySelector('.readout');
  const steps = [...new Set(chart.lines.flatMap(line => line.steps))].sort((a, b) => a - b);
  let place = steps.length - 1;
  const show = () => {
    const step = steps[place], share = (step - chart.low) / (chart.high - chart.low);
    const x = chart.left + share * (chart.right - chart.left);
    cursor.setAttribute('transform', `translate(${x})`);
    cursor.setAttribute('visibility', 'visible');
    const values = chart.lines.filter(line => line.steps.includes(step)).map(line =>
      (chart.lines.length > 1 ? line.label + ' ' : '') + line.values[line.steps.indexOf(step)]);
    readout.textContent = `step ${step}: ${values.join(', ')} ${chart.unit}`;
  };
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), width = svg.viewBox.baseVal.width;
    const x = (event.clientX - box.left) / box.width * width;
    const step = chart.low + (x - chart.left) / (chart.right - chart.left) * (chart.high - chart.low);
    place = steps.reduce((best, each, i) =>
      Math.abs(each - step) < Math.abs(steps[best] - step) ? i : best, 0);
    show();
  });
  svg.addEventListener('keydown', event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    event.preventDefault();
    place = Math.min(Math.max(place + move, 0), steps.length - 1);
    show();
  });
}
"""
