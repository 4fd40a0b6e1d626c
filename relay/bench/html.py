"""The report as one HTML file that needs nothing else: plots as inline SVG, every figure in tables, how it was made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from relay.bench.figures import FIGURES
from relay.bench.picture import plots
from relay.bench.plan import Scenario
from relay.bench.render import size
from relay.bench.result import LIMIT, Report, Summary
from relay.bench.svg import ticks

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1e293b; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { margin-top: 2.5rem; border-top: 1px solid #cbd5e1; padding-top: 1rem; }
figure { margin: 1rem 0; overflow-x: auto; } div.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tr { border-bottom: 1px solid #e2e8f0; }
td small { color: #64748b; } .no { color: #dc2626; font-weight: 600; }
pre { overflow-x: auto; background: #f8fafc; padding: .7rem; }
"""


def to_html(report: Report) -> str:
    facts = report.environment
    parts = [
        "<h1>relay bench</h1>",
        f"<p>{escape(_sentence(report))}</p>",
        f"<pre>{escape(str(facts.get('command', '')))}</pre>",
    ]
    parts += [f"<p><b>{escape(doubt)}</b></p>" for doubt in report.doubts]
    for scenario in report.plan.scenarios:
        found = [each for each in report.summaries if each.scenario == scenario.name]
        if found:
            parts.append(_scenario(scenario, found))
    parts += [f"<p>Left open: {escape(what)}: {escape(why)}</p>" for what, why in report.left_open.items()]
    parts.append(_made(report))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>relay bench</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _sentence(report: Report) -> str:
    facts = report.environment
    return (
        f"{facts['at']}: relay {facts['relay']}, PostgreSQL {facts['postgres']}, {facts['broker']}; "
        f"{facts['machine']}, {facts.get('processor', '')}, {facts['cores']} cores. "
        f"Payloads of {facts['payload_bytes']} bytes, {facts['keys']} keys. "
        f"Repetitions: {report.plan.repeat}; medians, with the spread behind them."
    )


def _scenario(scenario: Scenario, summaries: Sequence[Summary]) -> str:
    drawn = "".join(f"<figure>{each}</figure>" for each in plots(summaries))
    heads = "".join(
        f"<th>{escape(each.tool)}<br/>{escape(each.mode)}<br/>{escape(each.sink)}</th>" for each in summaries
    )
    rows = []
    for figure in FIGURES:
        if not any(figure.name in each.figures for each in summaries):
            continue
        cells = []
        for each in summaries:
            spread = each.figures.get(figure.name)
            cell = ""
            if spread is not None:
                range_ = escape(ticks(figure.shown, spread.low, spread.high))
                cell = escape(figure.shown(spread.median)) + (f"<small>{range_}</small>" if range_ else "")
            cells.append(f"<td>{cell}</td>")
        rows.append(f"<tr><td>{escape(figure.title)}</td>{''.join(cells)}</tr>")
    rows.append(f"<tr><td>every row arrived</td>{''.join(_complete(each) for each in summaries)}</tr>")
    return (
        f"<h2>{escape(scenario.name)}</h2><p>{escape(scenario.title)}: {escape(size(scenario))}</p>{drawn}"
        f'<div class="scroll"><table><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _complete(each: Summary) -> str:
    if each.tool == LIMIT:
        return "<td></td>"
    return "<td>yes</td>" if each.correct else '<td class="no">NO</td>'


def _made(report: Report) -> str:
    """What took part, with version and configuration, and on what."""
    tools = json.dumps(report.tools, indent=2, ensure_ascii=False, default=str)
    facts = json.dumps(dict(report.environment), indent=2, ensure_ascii=False, default=str)
    return f"<h2>How it was made</h2><pre>{escape(facts)}</pre><pre>{escape(tools)}</pre>"
