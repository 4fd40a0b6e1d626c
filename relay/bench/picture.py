"""Which plots a result deserves: throughput, CPU of everybody, latency, memory, what writers lose, what comes twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relay.bench import svg
from relay.bench.figures import BY_NAME
from relay.bench.result import LIMIT, QUANTILES, Report, Summary
from relay.errors import ConfigError

_PARTS = ("tool", "walsender", "postgres", "broker")
_LEGEND = ("the tool", "walsender", "rest of Postgres", "broker")


@dataclass(frozen=True, slots=True)
class _Bars:
    figure: str
    title: str


_PLAIN = (
    _Bars("events_per_second", "events per second"),
    _Bars("p50_ms", "commit to arrival, p50, ms"),
    _Bars("p99_ms", "commit to arrival, p99, ms"),
    _Bars("peak_rss_bytes", "peak memory, MB"),
    _Bars("wal_bytes_per_event", "WAL that the tool causes, bytes per event"),
    _Bars("writers.share", "throughput of the writers beside it, share of what they have alone"),
    _Bars("duplicates_seen", "redelivered after one SIGKILL"),
)
_STACKS = (_Bars("cpu_us_per_event", "CPU per event, µs"), _Bars("cores", "CPU, cores"))


def plots(summaries: Sequence[Summary], wanted: Sequence[str] = ()) -> list[str]:
    """The plots of one scenario: those whose figures it has, or of them only the wanted."""
    drawn = {each.figure: _bars(each, summaries) for each in _PLAIN}
    drawn["curve"] = _curves(summaries)
    drawn |= {each.figure: _stack(each, summaries) for each in _STACKS}
    return [plot for name, plot in drawn.items() if plot and (not wanted or name in wanted)]


def picture(report: Report, scenario: str) -> str:
    """One picture for a page: how fast and how dear, or how late."""
    summaries = [each for each in report.summaries if each.scenario == scenario]
    wanted = ("events_per_second", "cpu_us_per_event", "writers.share", "duplicates_seen")
    if any("p50_ms" in each.figures for each in summaries):
        wanted = ("p50_ms", "p99_ms", "curve", "cores")
    found = plots(summaries, wanted)
    if not found:
        known = ", ".join(dict.fromkeys(each.scenario for each in report.summaries))
        raise ConfigError([f"the result has nothing to draw of {scenario}; it has {known}"])
    return svg.stacked(found)


def label(each: Summary, among: Sequence[Summary]) -> str:
    """As short as it can be while the others differ."""
    modes = {other.mode for other in among if other.tool == "relay"}
    words = [each.mode if each.tool == "relay" and len(modes) > 1 else each.tool]
    if each.tool == LIMIT:
        words.append(each.mode.removeprefix("stream-"))
    elif len({other.sink for other in among}) > 1:
        words.append(each.sink)
    return ", ".join(words)


def _bars(what: _Bars, summaries: Sequence[Summary]) -> str:
    figure = BY_NAME[what.figure]
    found = []
    for each in summaries:
        spread = each.figures.get(what.figure)
        if spread is not None:
            colour = svg.COLOURS[{"relay": 0, LIMIT: 1}.get(each.tool, 3)]
            shown = figure.shown(spread.median)
            found.append(svg.Bar(label(each, summaries), (spread.median,), shown, spread.low, spread.high, colour))
    return svg.bars(what.title, found) if found else ""


def _stack(what: _Bars, summaries: Sequence[Summary]) -> str:
    found = []
    for each in summaries:
        spreads = [each.figures.get(f"{what.figure}.{part}") for part in _PARTS]
        if spreads[0] is None:
            continue
        tool, walsender, postgres, broker = (spread.median if spread else 0.0 for spread in spreads)
        parts = (tool, walsender, max(postgres - walsender, 0.0), broker)
        shown = BY_NAME[f"{what.figure}.tool"].shown(sum(parts))
        found.append(svg.Bar(label(each, summaries), parts, shown))
    return svg.bars(what.title, found, legend=_LEGEND) if found else ""


def _curves(summaries: Sequence[Summary]) -> str:
    lines = []
    for each in summaries:
        points = tuple(
            (each.figures[f"curve.{n}"].median, share)
            for n, share in enumerate(QUANTILES)
            if f"curve.{n}" in each.figures
        )
        if points:
            lines.append(svg.Line(label(each, summaries), points))
    return svg.curves("commit to arrival: share of the events", lines, unit="ms") if lines else ""
