"""Who takes part in a round, and what several measurements of one repetition say against each other. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from relay.bench.arena import Round
from relay.bench.modes import SINKS, Kind, Sink, parse_mode
from relay.bench.plan import Plan, Scenario
from relay.bench.result import LIMIT, Measurement
from relay.bench.tools import RecvLogical, RelayTool, Tool

Maker = Callable[[Round, Path], Tool]

# What is set against the baseline: events and CPU of everybody, what a user waits for, what a machine must have.
_RATIOS: Mapping[str, Callable[[Measurement], float | None]] = {
    "events_per_second": lambda each: each.events_per_second,
    "cpu_us_per_event": lambda each: each.cpu_us_per_event.tool if each.cpu_us_per_event else None,
    "p50_ms": lambda each: each.latency.p50_ms if each.latency else None,
    "p99_ms": lambda each: each.latency.p99_ms if each.latency else None,
    "peak_rss_bytes": lambda each: each.peak_rss_bytes,
}


@dataclass(frozen=True, slots=True)
class Contender:
    """One tool in one way of reading and writing; `alone`: it changes the rows, or may."""

    label: str
    sink: Sink
    make: Maker
    alone: bool
    peer: bool = False  # what goes wrong with it leaves its figures open, and ends nothing


def contenders(plan: Plan, scenario: Scenario, kind: Kind, peers: Mapping[str, Maker]) -> list[Contender]:
    """Everybody who is measured with this broker in this scenario."""
    sinks = [sink for sink in plan.sinks if sink.kind == kind]
    found = [
        Contender(f"relay {mode.name}, {sink.name}", sink, _relay(mode.name), alone=mode.marks)
        for sink in sinks
        for mode in plan.modes
    ]
    # A rival has its own ideas of how to write: it is measured once per broker.
    found += [Contender(f"{name}, {kind}", SINKS[kind], peers[name], alone=True, peer=True) for name in plan.peers]
    if plan.limit and scenario.limit and scenario.kind in {"drain", "steady"}:
        heard = scenario.kind == "steady"  # how late it is, not how fast
        found += [
            Contender(f"{LIMIT} {mode.plugin}", SINKS[kind], _limit(mode.name, heard=heard), alone=False)
            for mode in plan.limits
        ]
    return found


def groups(found: Sequence[Contender], scenario: Scenario, repetition: int) -> list[list[Contender]]:
    """Who shares a database: in a drain those who only read, each from a place of its own. Who begins alternates."""
    order = list(found)
    for _ in range(repetition % max(len(order), 1)):
        order.append(order.pop(0))
    shared = [each for each in order if not each.alone and scenario.kind == "drain"]
    apart = [[each] for each in order if each not in shared]
    together = [shared] if shared else []
    return together + apart if repetition % 2 == 0 else apart + together


def compared(plan: Plan, measurements: Sequence[Measurement]) -> list[Measurement]:
    """Ratios within one repetition of one scenario: what the machine did at that time touches both sides."""
    limits = {each.mode: each.events_per_second for each in measurements if each.tool == LIMIT and not each.latency}
    return [_compared(plan, each, limits, measurements) for each in measurements]


def _compared(
    plan: Plan, each: Measurement, limits: Mapping[str, float | None], others: Sequence[Measurement]
) -> Measurement:
    mode = next((mode for mode in plan.modes if mode.name == each.mode), None)
    limit = limits.get(mode.limit if mode else each.mode) or limits.get("stream-pgoutput")
    if limit and each.events_per_second:
        each = replace(each, ratio_to_limit=round(each.events_per_second / limit, 3))
    base = _baseline(plan.baseline, each.sink, others)
    if base is None:
        return each
    ratios = {
        name: round(mine / theirs, 4)
        for name, figure in _RATIOS.items()
        if (mine := figure(each)) is not None and (theirs := figure(base))
    }
    return replace(each, against_baseline=ratios)


def _baseline(name: str, sink: str, found: Sequence[Measurement]) -> Measurement | None:
    """A mode or a tool; of the same sink if it was measured with it."""
    fitting = [each for each in found if name and name in {each.mode, each.tool}]
    if name != LIMIT:  # its mode is one of the relay's, too
        fitting = [each for each in fitting if each.tool != LIMIT]
    same = [each for each in fitting if each.sink == sink]
    return next(iter(same or fitting), None)


def _relay(mode: str) -> Maker:
    return lambda place, folder: RelayTool(place, parse_mode(mode), folder)


def _limit(mode: str, *, heard: bool) -> Maker:
    return lambda place, folder: RecvLogical(place, parse_mode(mode), folder / f"{place.name}.pipe" if heard else None)
