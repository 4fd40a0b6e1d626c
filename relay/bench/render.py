"""The report as tables for people, readable in 100 columns. Medians; with repetitions the spread stands beside them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from relay.bench.figures import FIGURES, Figure
from relay.bench.modes import SINKS
from relay.bench.plan import Scenario
from relay.bench.result import LIMIT, Report, Spread, Summary

_WIDTH = 100
_TITLES = 29  # of the figures' column, with its frame


def render(report: Report) -> RenderableType:
    """One table per scenario and broker, with the figures that it has; a wide one goes on below."""
    facts = report.environment
    head = f"relay {facts['relay']}, PostgreSQL {facts['postgres']}, {facts['broker']}, {facts['cores']} cores"
    parts: list[RenderableType] = [Text(head, style="dim")]
    for scenario in report.plan.scenarios:
        found = [each for each in report.summaries if each.scenario == scenario.name]
        for kind in dict.fromkeys(SINKS[each.sink].kind for each in found):
            parts += _tables(scenario, [each for each in found if SINKS[each.sink].kind == kind])
    parts += [Text(f"Left open: {what}: {why}") for what, why in report.left_open.items()]
    if report.plan.baseline:
        parts.append(Text(f"Baseline: {report.plan.baseline}, in the same repetition.", style="dim"))
    return Group(*parts, *map(Text, report.doubts))


def size(scenario: Scenario) -> str:
    """How much of it there was."""
    if scenario.kind in {"drain", "kill"}:
        each = scenario.per_transaction or scenario.rows
        return f"{scenario.rows:,} rows, {each:,} in a transaction"
    if scenario.kind == "burst":
        return f"{scenario.rows:,} rows at once, every {scenario.every:g} s"
    if scenario.rate:
        together = f", {scenario.per_transaction:,} in a transaction" if scenario.per_transaction > 1 else ""
        return f"{scenario.rate:,} rows/s for {scenario.seconds:g} s{together}"
    return f"{scenario.seconds:g} s"


def _tables(scenario: Scenario, summaries: Sequence[Summary]) -> list[Table]:
    """A column per tool: there are more figures than fit side by side. As many columns as fit stand in one table."""
    figures = [figure for figure in FIGURES if any(figure.name in each.figures for each in summaries)]
    sinks = dict.fromkeys(each.sink for each in summaries if each.tool != LIMIT)
    titles = [figure.title for figure in figures] + ["every row arrived"]
    tables: list[Table] = []
    for chunk in _fitting([_column(each, figures, several=len(sinks) > 1) for each in summaries]):
        more = ", continued" if tables else ""
        title = f"{scenario.name}: {size(scenario)}, {', '.join(sinks)}, runs: {summaries[0].repetitions}{more}"
        # Said, not found out: where there is no terminal it would be squeezed into 80 columns.
        width = 4 + max(map(len, titles)) + sum(map(_width, chunk))
        table = Table("", *(column[0] for column in chunk), title=title, title_justify="left", width=width)
        for column in table.columns[1:]:
            column.justify = "right"
            column.no_wrap = True
        for number, name in enumerate(titles, start=1):
            cells = [column[number] for column in chunk]
            table.add_row(name, *(Text(cell, style="bold red" if cell == "NO" else "") for cell in cells))
        tables.append(table)
    return tables


def _fitting(columns: Sequence[Sequence[str]]) -> list[list[Sequence[str]]]:
    chunks: list[list[Sequence[str]]] = []
    room = 0
    for column in columns:
        width = _width(column)
        if not chunks or room < width:
            chunks.append([])
            room = _WIDTH - _TITLES - 1
        chunks[-1].append(column)
        room -= width
    return chunks


def _width(column: Sequence[str]) -> int:
    return max(len(line) for cell in column for line in cell.split("\n")) + 3


def _column(summary: Summary, figures: Sequence[Figure], *, several: bool) -> list[str]:
    complete = "" if summary.tool == LIMIT else "yes" if summary.correct else "NO"
    cells = [_cell(figure, summary.figures.get(figure.name)) for figure in figures]
    sink = f"\n{summary.sink}" if several and summary.tool != LIMIT else ""
    return [f"{summary.tool}\n{summary.mode}{sink}", *cells, complete]


def _cell(figure: Figure, spread: Spread | None) -> str:
    if spread is None:
        return ""
    shown = figure.shown(spread.median)
    low, high = figure.shown(spread.low), figure.shown(spread.high)
    return shown if low == high else f"{shown} ({low}…{high})"
