"""The report as a table for people. Medians; the spread stands beside them when there were repetitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from relay.bench.plan import Scenario
from relay.bench.result import LIMIT, Report, Spread, Summary


@dataclass(frozen=True, slots=True)
class _Row:
    title: str
    figure: str
    shown: Callable[[float], str]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _one(value: float) -> str:
    return f"{value:.1f}"


def _two(value: float) -> str:
    return f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.0f}"


_ROWS = (
    _Row("events/s", "events_per_second", _count),
    _Row("events/s, second half", "second_half_events_per_second", _count),
    _Row("share of the limit", "ratio_to_limit", _percent),
    _Row("start to first event, s", "start_to_first_seconds", _two),
    _Row("commit to arrival p50, ms", "p50_ms", _two),
    _Row("p95, ms", "p95_ms", _two),
    _Row("p99, ms", "p99_ms", _two),
    _Row("max, ms", "max_ms", _two),
    _Row("CPU per event, µs", "cpu_us_per_event.tool", _one),
    _Row("  walsender", "cpu_us_per_event.walsender", _one),
    _Row("  Postgres, walsender included", "cpu_us_per_event.postgres", _one),
    _Row("  broker", "cpu_us_per_event.broker", _one),
    _Row("CPU, share of a core", "cores.tool", _percent),
    _Row("  walsender", "cores.walsender", _percent),
    _Row("  Postgres, walsender included", "cores.postgres", _percent),
    _Row("  broker", "cores.broker", _percent),
    _Row("peak memory, MB", "peak_rss_bytes", _megabytes),
)


def render(report: Report) -> RenderableType:
    """One table per scenario, with the figures that it has."""
    facts = report.environment
    head = f"relay {facts['relay']}, PostgreSQL {facts['postgres']}, {facts['broker']}, {facts['cores']} cores"
    tables = [
        _table(scenario, [each for each in report.summaries if each.scenario == scenario.name])
        for scenario in report.plan.scenarios
    ]
    parts: list[RenderableType] = [Text(head, style="dim"), *tables]
    load = facts["load_average_at_start"][0]
    if load > 0.5:
        parts.append(Text(f"The machine was busy before the run (load {load:.1f}): take the ratios, not the figures."))
    return Group(*parts)


def _table(scenario: Scenario, summaries: list[Summary]) -> Table:
    """A column per tool: there are more figures than fit side by side."""
    title = f"{scenario.name}: {_size(scenario)}, {summaries[0].sink}, runs: {summaries[0].repetitions}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for each in summaries:
        table.add_column(f"{each.tool}\n{each.mode}", justify="right")
    for row in _ROWS:
        if any(row.figure in each.figures for each in summaries):
            table.add_row(row.title, *(_cell(row, each.figures.get(row.figure)) for each in summaries))
    table.add_row("every row arrived once", *(_complete(each) for each in summaries))
    return table


def _size(scenario: Scenario) -> str:
    if scenario.kind == "drain":
        return f"{scenario.rows:,} rows, {scenario.per_transaction or scenario.rows:,} in a transaction"
    return f"{scenario.rate:,} rows/s for {scenario.seconds:g} s" if scenario.rate else f"{scenario.seconds:g} s"


def _complete(summary: Summary) -> RenderableType:
    if summary.tool == LIMIT:
        return ""
    return "yes" if summary.correct else Text("NO", style="bold red")


def _cell(row: _Row, spread: Spread | None) -> str:
    if spread is None:
        return ""
    shown = row.shown(spread.median)
    return shown if spread.low == spread.high else f"{shown}  ({row.shown(spread.low)} … {row.shown(spread.high)})"
