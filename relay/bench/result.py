"""The figures: one `Measurement` per tool, scenario and repetition, and what several of them say together. Pure.

All of it is data of the standard library, so that a result file can be read back as what it was.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from relay.bench.plan import Plan
from relay.errors import ConfigError

FORMAT = 2  # of the JSON
LIMIT = "pg_recvlogical"
_STOLEN = 0.03  # so much of the CPU makes no great difference
# The quantiles that draw the curve of all latencies.
QUANTILES = (*(n / 20 for n in range(20)), 0.96, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)


@dataclass(frozen=True, slots=True)
class Latency:
    """Commit → arrival at a subscriber. The clock starts inside the INSERT, so the commit's own time is in it."""

    events: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    curve_ms: tuple[float, ...] = ()  # at QUANTILES


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
class State:
    """What Postgres has written so far, in bytes, and what the outbox table is like."""

    lsn: int
    table_bytes: int
    index_bytes: int
    dead_tuples: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the tool left in the database: beyond the load, from its start to its end."""

    wal_bytes_per_event: float | None  # None: others wrote meanwhile
    wal_retained_bytes: int | None  # the most that its slot held; None: no slot
    dead_tuples: int  # that no vacuum has taken yet
    table_growth_bytes: int
    index_growth_bytes: int


def footprint(before: State, after: State, retained: Sequence[int | None], events: int | None) -> Footprint:
    held = [each for each in retained if each is not None]
    return Footprint(
        round((after.lsn - before.lsn) / events, 1) if events else None,
        max(held) if held else None,
        after.dead_tuples,
        after.table_bytes - before.table_bytes,
        after.index_bytes - before.index_bytes,
    )


@dataclass(frozen=True, slots=True)
class Writers:
    """Transactions a second that writers at full speed had, alone (before and after) and beside the tool."""

    alone_per_second: float
    beside_per_second: float
    share: float


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
    duplicates_seen: int | None = None  # by a reader of the broker, by the row's number
    missing: int | None = None  # likewise
    start_to_first_seconds: float | None = None
    seconds: float | None = None  # first to last event, or the window
    events_per_second: float | None = None  # None also when it was over too soon to be timed
    second_half_events_per_second: float | None = None
    ratio_to_limit: float | None = None  # events/s against the limit's in the same round
    against_baseline: Mapping[str, float] = field(default_factory=dict)  # figure → ratio, in the same repetition
    latency: Latency | None = None
    cpu_seconds: Cpu | None = None
    cpu_us_per_event: Cpu | None = None
    cores: Cpu | None = None
    peak_rss_bytes: int | None = None
    wal_load_bytes_per_event: float | None = None
    footprint: Footprint | None = None
    writers: Writers | None = None
    killed: bool = False
    stolen_share: float | None = None  # of the machine's CPU time, by its hypervisor, meanwhile

    @property
    def correct(self) -> bool:
        """Every row arrived; none twice, unless the tool was killed: then that is the figure."""
        if self.missing is not None:
            return not self.missing and (self.killed or not self.duplicates_seen)
        return self.stored is None or self.stored == self.rows


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
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # version, configuration, command
    left_open: Mapping[str, str] = field(default_factory=dict)  # scenario and peer → why there are no figures
    set_aside: Sequence[Measurement] = field(default_factory=list)  # of rounds that were not calm, and measured again

    @property
    def correct(self) -> bool:
        return all(measurement.correct for measurement in (*self.measurements, *self.set_aside))

    @property
    def doubts(self) -> list[str]:
        """Why the figures may say more of the machine than of the tools."""
        found = []
        load = self.environment["load_average_at_start"][0]
        if load > 0.5:
            found.append(f"The machine was busy before the run (load {load:.1f}): take the ratios, not the figures.")
        stolen = max((each.stolen_share or 0.0 for each in self.measurements), default=0.0)
        if stolen > _STOLEN:
            found.append(
                f"The hypervisor gave up to {stolen:.0%} of the machine's CPU to others while a tool was measured: "
                "take the ratios of rounds that had the same, not the figures."
            )
        if self.set_aside:
            shares = [each.stolen_share or 0.0 for each in self.set_aside]
            found.append(
                f"{len(shares)} further measurements are not in these figures, only in the file of --save, because "
                f"{min(shares):.1%} to {max(shares):.1%} was stolen while they or their neighbours were made (--calm)."
            )
        return found


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
        return round(1e3 * ordered[max(math.ceil(share * len(ordered)), 1) - 1], 3)

    curve = tuple(rank(share) for share in QUANTILES)
    return Latency(len(ordered), rank(0.50), rank(0.95), rank(0.99), rank(1.0), curve)


def summarise(measurements: Sequence[Measurement]) -> list[Summary]:
    """Medians and spread per scenario, sink, tool and mode, in the order of their first appearance."""
    groups: dict[tuple[str, str, str, str], list[Measurement]] = {}
    for each in measurements:
        groups.setdefault((each.scenario, each.sink, each.tool, each.mode), []).append(each)
    summaries = []
    for key, group in groups.items():
        found = [figures(each) for each in group]
        spreads: dict[str, Spread] = {}
        for name in dict.fromkeys(name for each in found for name in each):
            values = [value for each in found if (value := each.get(name)) is not None]
            if values:
                spreads[name] = Spread(statistics.median(values), min(values), max(values))
        summaries.append(Summary(*key, len(group), all(each.correct for each in group), spreads))
    return summaries


def figures(each: Measurement) -> dict[str, float | None]:
    """The figures of one measurement by name, flat."""
    found: dict[str, float | None] = {
        "events_per_second": each.events_per_second,
        "second_half_events_per_second": each.second_half_events_per_second,
        "ratio_to_limit": each.ratio_to_limit,
        "start_to_first_seconds": each.start_to_first_seconds,
        "peak_rss_bytes": each.peak_rss_bytes,
        "wal_load_bytes_per_event": each.wal_load_bytes_per_event,
        "duplicates_seen": each.duplicates_seen if each.killed else None,
        "stolen_share": each.stolen_share,
    }
    for label, cpu in (("cpu_us_per_event", each.cpu_us_per_event), ("cores", each.cores)):
        if cpu is not None:
            found |= {f"{label}.{part}": getattr(cpu, part) for part in ("tool", "walsender", "postgres", "broker")}
    if each.latency is not None:
        found |= {name: getattr(each.latency, name) for name in ("p50_ms", "p95_ms", "p99_ms", "max_ms")}
        found |= {f"curve.{n}": value for n, value in enumerate(each.latency.curve_ms)}
    for part in (each.footprint, each.writers):
        if part is not None:
            prefix = "writers." if part is each.writers else ""
            found |= {f"{prefix}{name}": getattr(part, name) for name in part.__slots__}
    found |= {f"baseline.{name}": ratio for name, ratio in each.against_baseline.items()}
    return found


def read_report(path: Path) -> Report:
    """A result file. Raises ConfigError when it is none."""
    try:
        report = TypeAdapter(Report).validate_json(path.read_bytes())
    except OSError as exc:
        raise ConfigError([f"{path} cannot be read: {exc}"]) from None
    except ValidationError as exc:
        raise ConfigError(
            [f"{path} is not a result of this version's `relay bench` ({exc.error_count()} faults)"]
        ) from None
    if report.format != FORMAT:
        raise ConfigError([f"{path} has format {report.format}, this version reads {FORMAT}"])
    return report
