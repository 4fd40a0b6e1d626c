"""Rows that wait are drained: how fast, at what cost, and what it leaves behind in the database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from relay.bench.arena import Round
from relay.bench.meter import Stolen, cpu, peak_rss
from relay.bench.process import Child
from relay.bench.result import Cpu, Flow, Measurement, Sample, flow, footprint
from relay.bench.task import STALLED, Entry, Task, read_back, used
from relay.bench.tools import Tool

_LOOK = 0.5  # between two looks at the WAL that is retained
_TELL = 10.0  # between two words about the progress


async def drain(task: Task, base: Round, entries: Sequence[Entry]) -> list[Measurement]:
    """Every tool of the group drains the same rows, one after another."""
    rows = task.scenario.rows
    task.say(f"loading {rows:,} rows")
    loaded = await base.load(task.scenario, task.plan.keys)
    found = []
    for entry in entries:
        task.say(f"{entry.tool.name} {entry.tool.mode} drains them")
        found.append(await _drain(task, entry, loaded))
    return found


async def _drain(task: Task, entry: Entry, loaded: float) -> Measurement:
    place, tool, rows = entry.place, entry.tool, task.scenario.rows
    state, retained = await place.state(), [await place.retained(tool.slot)]
    before = await place.costs(None, tool.slot)
    started, stolen = time.monotonic(), Stolen()
    with tool.process() as child:
        samples = await watch(task, place, child, tool, rows, retained)
        after, stolen_share = await place.costs(child.pid, tool.slot), stolen.share()
        peak = peak_rss(child.pid)
        child.stop()
    seen = flow(samples, started, rows)
    spent = used(before, after)
    spent = Cpu(seen.tool_cpu, after.walsender, spent.postgres, spent.broker)
    stored = await place.stored() if tool.stores else None  # after its end: what came twice is in it
    missing = duplicates = None
    if place.sink.transactions and tool.stores:  # the broker's count has markers in it
        heard = await read_back(place, task.folder)
        stored, missing, duplicates = heard["events"], rows - heard["distinct"], heard["events"] - heard["distinct"]
    return task.measurement(
        entry,
        rows=rows,
        stored=stored,
        missing=missing,
        duplicates_seen=duplicates,
        start_to_first_seconds=None if seen.start is None else round(seen.start, 3),
        seconds=round(seen.seconds, 3),
        events_per_second=seen.events_per_second,
        second_half_events_per_second=seen.second_half,
        cpu_seconds=spent.divided_by(1),
        cpu_us_per_event=_per_event(spent, seen, rows),
        peak_rss_bytes=peak,
        wal_load_bytes_per_event=loaded,
        footprint=footprint(state, await place.state(), retained, rows),
        stolen_share=stolen_share,
    )


async def watch(
    task: Task, place: Round, child: Child, tool: Tool, rows: int, retained: list[int | None], until: float = 1.0
) -> list[Sample]:
    """Look at the tool until it has finished, or until it has stood still for too long (then rows are missing).

    `until` ends it earlier: when so much of the rows has moved.
    """
    samples: list[Sample] = []
    grew = looked = told = time.monotonic()
    while not await tool.finished(samples, rows):
        await asyncio.sleep(tool.interval)
        child.must_run()
        sample = Sample(time.monotonic(), await tool.moved(), cpu(child.pid))
        if not samples or sample.moved > samples[-1].moved:
            grew = sample.at
        samples.append(sample)
        if until < 1.0 and sample.moved >= rows * until:
            break
        if sample.at - looked > _LOOK:
            looked = sample.at
            retained.append(await place.retained(tool.slot))
        if tool.stores and sample.at - told > _TELL:
            told = sample.at
            task.say(f"{tool.name} {tool.mode}: {sample.moved / rows:.0%}")
        if sample.at - grew > STALLED:
            task.say(f"{tool.name} stands still at {sample.moved:,}; its log ends with\n{child.log_tail()}")
            break
    return samples


def _per_event(spent: Cpu, seen: Flow, rows: int) -> Cpu | None:
    """Microseconds. The tool's belong to the events of the timed part, the servers' to all."""
    if not seen.events:
        return None

    def each(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1e6 / rows, 3)

    tool = round(spent.tool * 1e6 / seen.events, 3)
    return Cpu(tool, each(spent.walsender), each(spent.postgres), each(spent.broker))
