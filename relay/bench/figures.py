"""How every figure is called and written, for tables, CSV, comparisons and plots alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    title: str
    shown: Callable[[float], str]
    better: Literal["more", "less", ""] = "less"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _one(value: float) -> str:
    return f"{value:,.1f}"


def _two(value: float) -> str:
    return f"{value:,.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _times(value: float) -> str:
    return f"{value:.2f} x"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f}" if abs(value) < 1e7 else f"{value / 1e6:,.0f}"


FIGURES = (
    Figure("events_per_second", "events/s", _count, "more"),
    Figure("second_half_events_per_second", "events/s, second half", _count, "more"),
    Figure("ratio_to_limit", "share of the limit", _percent, "more"),
    Figure("start_to_first_seconds", "start to first event, s", _two),
    Figure("p50_ms", "commit to arrival p50, ms", _two),
    Figure("p95_ms", "  p95, ms", _two),
    Figure("p99_ms", "  p99, ms", _two),
    Figure("max_ms", "  max, ms", _two),
    Figure("cpu_us_per_event.tool", "CPU per event, µs", _one),
    Figure("cpu_us_per_event.walsender", "  walsender", _one),
    Figure("cpu_us_per_event.postgres", "  Postgres with walsender", _one),
    Figure("cpu_us_per_event.broker", "  broker", _one),
    Figure("cores.tool", "CPU, share of a core", _percent),
    Figure("cores.walsender", "  walsender", _percent),
    Figure("cores.postgres", "  Postgres with walsender", _percent),
    Figure("cores.broker", "  broker", _percent),
    Figure("peak_rss_bytes", "peak memory, MB", _megabytes),
    Figure("wal_load_bytes_per_event", "WAL of the load, B/event", _count, ""),
    Figure("wal_bytes_per_event", "WAL of the tool, B/event", _one),
    Figure("wal_retained_bytes", "WAL retained, peak MB", _megabytes),
    Figure("dead_tuples", "dead rows left", _count),
    Figure("table_growth_bytes", "table grew, MB", _megabytes),
    Figure("index_growth_bytes", "indexes grew, MB", _megabytes),
    Figure("writers.alone_per_second", "writers alone, tps", _count, ""),
    Figure("writers.beside_per_second", "writers beside it, tps", _count, "more"),
    Figure("writers.share", "  share", _percent, "more"),
    Figure("duplicates_seen", "redelivered", _count),
    Figure("stolen_share", "machine: CPU stolen", _percent, ""),
    Figure("baseline.events_per_second", "to baseline: events/s", _times, "more"),
    Figure("baseline.cpu_us_per_event", "  CPU per event", _times),
    Figure("baseline.p50_ms", "  p50", _times),
    Figure("baseline.p99_ms", "  p99", _times),
    Figure("baseline.peak_rss_bytes", "  peak memory", _times),
)
BY_NAME = {figure.name: figure for figure in FIGURES}
