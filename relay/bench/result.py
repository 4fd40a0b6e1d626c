"""The figures: one `Measurement` per tool, scenario and repetition, and what several of them say together. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relay.bench.plan import Plan

LIMIT = "pg_recvlogical"


@dataclass(frozen=True, slots=True)
class Latency:
    """Commit → arrival at a subscriber. The clock starts inside the INSERT, so the commit's own time is in it."""

    events: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Cpu:
    """User and system time of all threads. None: not visible from here (a server of the user's own)."""

    tool: float
    walsender: float | None
    postgres: float | None  # the whole cluster, the walsender included
    broker: float | None

    def divided_by(self, amount: float) -> Cpu:
        def part(value: float | None) -> float | None:
            return None if value is None else round(value / amount, 5)

        return Cpu(round(self.tool / amount, 5), part(self.walsender), part(self.postgres), part(self.broker))


@dataclass(frozen=True, slots=True)
class Measurement:
    """One tool, once. What a scenario does not measure is None.

    In a drain the tool's CPU is counted from its first event to its last, the servers' from the tool's start, because
    decoding runs ahead of the tool. In steady and idle everything is counted over the window.
    """

    scenario: str
    sink: str
    tool: str
    mode: str
    repetition: int
    turn: int  # when in its round it ran: 0 is first
    rows: int
    stored: int | None  # None: the tool stores nothing (the limit)
    duplicates_seen: int | None = None  # by the subscriber, by event id
    start_to_first_seconds: float | None = None
    seconds: float | None = None  # first to last event, or the window
    events_per_second: float | None = None  # None also when it was over too soon to be timed
    second_half_events_per_second: float | None = None
    ratio_to_limit: float | None = None  # events/s against the limit's in the same round
    latency: Latency | None = None
    cpu_seconds: Cpu | None = None
    cpu_us_per_event: Cpu | None = None
    cores: Cpu | None = None
    peak_rss_bytes: int | None = None

    @property
    def correct(self) -> bool:
        """Every row arrived, none twice."""
        return self.stored is None or (self.stored == self.rows and not self.duplicates_seen)


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Summary:
    """All repetitions of one tool in one scenario."""

    scenario: str
    sink: str
    tool: str
    mode: str
    repetitions: int
    correct: bool
    figures: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class Report:
    """What one run of `relay bench` found, and on what."""

    format: int
    environment: Mapping[str, Any]
    plan: Plan
    summaries: Sequence[Summary]
    measurements: Sequence[Measurement]

    @property
    def correct(self) -> bool:
        return all(measurement.correct for measurement in self.measurements)


@dataclass(frozen=True, slots=True)
class Sample:
    """How far a tool was, and what it had cost: `moved` counts events or bytes, whatever the tool shows."""

    at: float
    moved: int
    tool_cpu: float


@dataclass(frozen=True, slots=True)
class Flow:
    """What the samples of a drain say."""

    start: float | None  # seconds from the tool's start to the first sample that shows something
    seconds: float
    events: float  # that moved within `seconds`
    events_per_second: float | None
    second_half: float | None
    tool_cpu: float


def flow(samples: Sequence[Sample], started: float, rows: int) -> Flow:
    """From the first sample that shows something to the last that shows more; what came before is not counted."""
    moving = [
        s for before, s in zip([None, *samples], samples, strict=False) if s.moved > (before.moved if before else 0)
    ]
    if not moving:
        return Flow(None, 0.0, 0.0, None, None, 0.0)
    first, last = moving[0], moving[-1]
    per_moved = rows / last.moved
    half = next(s for s in moving if s.moved * 2 >= last.moved)
    return Flow(
        start=first.at - started,
        seconds=last.at - first.at,
        events=(last.moved - first.moved) * per_moved,
        events_per_second=_rate(first, last, per_moved),
        second_half=_rate(half, last, per_moved),
        tool_cpu=last.tool_cpu - first.tool_cpu,
    )


def _rate(first: Sample, last: Sample, per_moved: float) -> float | None:
    if last.at <= first.at:
        return None
    return round((last.moved - first.moved) * per_moved / (last.at - first.at), 1)


def latency(seconds: Sequence[float]) -> Latency | None:
    """Percentiles by nearest rank."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def rank(share: float) -> float:
        return round(1e3 * ordered[math.ceil(share * len(ordered)) - 1], 3)

    return Latency(len(ordered), rank(0.50), rank(0.95), rank(0.99), round(1e3 * ordered[-1], 3))


def summarise(measurements: Sequence[Measurement]) -> list[Summary]:
    """Medians and spread per scenario, sink, tool and mode, in the order of their first appearance."""
    groups: dict[tuple[str, str, str, str], list[Measurement]] = {}
    for each in measurements:
        groups.setdefault((each.scenario, each.sink, each.tool, each.mode), []).append(each)
    summaries = []
    for key, group in groups.items():
        figures: dict[str, Spread] = {}
        for name in _figures(group[0]) | _figures(group[-1]):
            values = [value for each in group if (value := _figures(each).get(name)) is not None]
            if values:
                figures[name] = Spread(statistics.median(values), min(values), max(values))
        summaries.append(Summary(*key, len(group), all(each.correct for each in group), figures))
    return summaries


def _figures(each: Measurement) -> dict[str, float | None]:
    found: dict[str, float | None] = {
        "events_per_second": each.events_per_second,
        "second_half_events_per_second": each.second_half_events_per_second,
        "ratio_to_limit": each.ratio_to_limit,
        "start_to_first_seconds": each.start_to_first_seconds,
        "peak_rss_bytes": each.peak_rss_bytes,
    }
    for label, cpu in (("cpu_us_per_event", each.cpu_us_per_event), ("cores", each.cores)):
        if cpu is not None:
            found |= {
                f"{label}.tool": cpu.tool,
                f"{label}.walsender": cpu.walsender,
                f"{label}.postgres": cpu.postgres,
                f"{label}.broker": cpu.broker,
            }
    if each.latency is not None:
        late = each.latency
        found |= {"p50_ms": late.p50_ms, "p95_ms": late.p95_ms, "p99_ms": late.p99_ms, "max_ms": late.max_ms}
    return found
