"""What the tool does in a stretch of time: rows at a fixed rate, in bursts, as fast as writers can, or none at all."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

from relay.bench.arena import Round
from relay.bench.load import pgbench_script
from relay.bench.meter import Stolen, peak_rss
from relay.bench.process import BenchError, Child, postgres_tool
from relay.bench.result import Cpu, Measurement, State, Writers, footprint, latency
from relay.bench.task import Entry, Task, listener, passed_on, pipe_listener, settled, taken, used

_CLIENTS = 4
_COMMITS_PER_CLIENT = 500  # a second, at most: each waits for its commit's fsync
_WARM_UP = 10_000  # rows that a tool moves before the steady rate begins
_TPS = re.compile(r"^tps = ([\d.]+)", re.MULTILINE)


class _Window:
    """The measured stretch of time: costs at its ends, WAL that is retained within."""

    def __init__(self, entry: Entry, child: Child) -> None:
        self._place, self._slot, self._pid = entry.place, entry.tool.slot, child.pid
        self.retained: list[int | None] = []

    async def begin(self) -> None:
        self.state: State = await self._place.state()
        self.wall, self._began = time.time(), time.monotonic()
        self._before, self._stolen = await self._place.costs(self._pid, self._slot), Stolen()

    async def last(self, seconds: float) -> None:
        """Let time pass, until so much is over since the beginning."""
        while (left := self._began + seconds - time.monotonic()) > 0:
            self.retained.append(await self._place.retained(self._slot))
            await asyncio.sleep(min(0.5, left))

    async def end(self) -> None:
        after = await self._place.costs(self._pid, self._slot)
        self.seconds = time.monotonic() - self._began
        self.cores: Cpu = used(self._before, after).divided_by(self.seconds)
        self.stolen_share = self._stolen.share()

    def within(self, at: float) -> bool:
        return 0 <= at - self.wall < self.seconds


async def steady(task: Task, base: Round, entries: Sequence[Entry]) -> list[Measurement]:
    """pgbench writes at a fixed rate (Poisson), a subscriber notes arrivals."""
    (entry,) = entries
    scenario, tool = task.scenario, entry.tool
    notes, script = _files(task, base)
    listening = pipe_listener(tool.pipe, notes) if tool.pipe else listener(_outlet(entry, base), notes)
    with tool.process() as child, listening as subscriber:
        await tool.ready(child)
        # A JVM that has only just started falls behind, and the window would show how it catches up.
        await base.insert(_WARM_UP, 100, task.plan.keys)
        await _all_through(entry, child, _WARM_UP)
        before = scenario.warmup + _warming(entry)
        task.say(f"{scenario.rate:,} rows per second for {before + scenario.seconds:g} s")
        seconds = before + scenario.seconds + 1  # beyond the window's end
        with Child("pgbench", _pgbench(base, script, seconds, scenario.rate / scenario.per_transaction)) as writer:
            await asyncio.sleep(before)
            window = _Window(entry, child)
            await window.begin()
            await window.last(scenario.seconds)
            await window.end()
            await writer.wait(60.0)
        return [await _heard(task, base, entry, child, subscriber, window, notes)]


async def burst(task: Task, base: Round, entries: Sequence[Entry]) -> list[Measurement]:
    """Many rows at once, then silence; a subscriber notes arrivals."""
    (entry,) = entries
    scenario, tool = task.scenario, entry.tool
    notes, _ = _files(task, base)
    with tool.process() as child, listener(_outlet(entry, base), notes) as subscriber:
        await tool.ready(child)
        count = max(1, round(scenario.seconds / scenario.every))
        task.say(f"{count} times {scenario.rows:,} rows at once")
        window = _Window(entry, child)
        await window.begin()
        for number in range(count):
            await base.insert(scenario.rows, scenario.per_transaction, task.plan.keys)
            await window.last((number + 1) * scenario.every)
        await window.end()
        return [await _heard(task, base, entry, child, subscriber, window, notes)]


async def idle(task: Task, base: Round, entries: Sequence[Entry]) -> list[Measurement]:  # noqa: ARG001
    """A tool with nothing to do."""
    (entry,) = entries
    scenario, place, tool = task.scenario, entry.place, entry.tool
    with tool.process() as child:
        await tool.ready(child)
        task.say(f"nothing happens for {scenario.warmup + scenario.seconds:g} s")
        await asyncio.sleep(scenario.warmup)
        window = _Window(entry, child)
        await window.begin()
        await window.last(scenario.seconds)
        await window.end()
        peak = peak_rss(child.pid)
        child.stop()
    return [
        task.measurement(
            entry,
            rows=0,
            stored=await place.stored() if tool.stores and not place.sink.transactions else None,
            seconds=round(window.seconds, 3),
            cores=window.cores,
            peak_rss_bytes=peak,
            footprint=footprint(window.state, await place.state(), window.retained, None),
            stolen_share=window.stolen_share,
        )
    ]


def _warming(entry: Entry) -> float:
    """What the broker's first paced load has to last longer: its JVM would be measured compiling itself."""
    if not entry.tool.stores:
        return 0.0
    broker = entry.place.broker
    seconds, broker.cold = broker.cold, 0.0
    return seconds


async def _all_through(entry: Entry, child: Child, rows: int) -> None:
    if entry.tool.stores:
        await settled(entry.place, child, rows)
    else:
        await passed_on(entry, child, rows)


async def _heard(
    task: Task, base: Round, entry: Entry, child: Child, subscriber: Child, window: _Window, notes: Path
) -> Measurement:
    """What the subscriber noted, once everything is there."""
    rows = int(await base.value("SELECT count(*) FROM outbox_events"))
    await _all_through(entry, child, rows)
    subscriber.stop(120.0)
    peak = peak_rss(child.pid)
    child.stop()
    heard = taken(notes)
    times = zip(heard["written"], heard["arrived"], strict=True)
    late = [(arrived - written) / 1e6 for written, arrived in times if window.within(written / 1e6)]
    return task.measurement(
        entry,
        rows=rows,
        stored=heard["events"],
        duplicates_seen=heard["events"] - heard["distinct"],
        missing=rows - heard["distinct"],
        seconds=round(window.seconds, 3),
        events_per_second=round(len(late) / window.seconds, 1),
        latency=latency(late),
        cores=window.cores,
        peak_rss_bytes=peak,
        footprint=footprint(window.state, await base.state(), window.retained, None),
        stolen_share=window.stolen_share,
    )


async def writers(task: Task, base: Round, entries: Sequence[Entry]) -> list[Measurement]:
    """pgbench at full speed: alone, beside the tool, alone. What drifts meanwhile touches both sides."""
    (entry,) = entries
    scenario, place, tool = task.scenario, entry.place, entry.tool
    _, script = _files(task, base)
    speeds = [await _full_speed(task, base, script, "alone")]
    with tool.process() as child:
        await tool.ready(child)
        # What was written meanwhile would be drained beside the writers, as after a rest that nobody takes.
        await settled(place, child, int(await base.value("SELECT count(*) FROM outbox_events")))
        window = _Window(entry, child)
        await window.begin()
        speeds.append(await _full_speed(task, base, script, f"beside {tool.name} {tool.mode}"))
        await window.end()
        window.retained.append(await place.retained(tool.slot))
        rows = int(await base.value("SELECT count(*) FROM outbox_events"))
        stored = await settled(place, child, rows)
        peak = peak_rss(child.pid)
        child.stop()
    speeds.append(await _full_speed(task, base, script, "alone again"))
    alone = (speeds[0] + speeds[2]) / 2
    return [
        task.measurement(
            entry,
            rows=rows,
            stored=None if place.sink.transactions else stored,
            seconds=scenario.seconds,
            cores=window.cores,
            peak_rss_bytes=peak,
            footprint=footprint(window.state, await base.state(), window.retained, None),
            writers=Writers(round(alone, 1), round(speeds[1], 1), round(speeds[1] / alone, 4)),
            stolen_share=window.stolen_share,
        )
    ]


async def _full_speed(task: Task, base: Round, script: Path, how: str) -> float:
    task.say(f"writers at full speed for {task.scenario.seconds:g} s, {how}")
    with Child("pgbench", _pgbench(base, script, task.scenario.seconds)) as writer:
        await writer.wait(task.scenario.seconds + 60.0)
        found = _TPS.search(writer.log_path.read_text())
    if found is None:
        raise BenchError("pgbench told no rate")
    return float(found[1])


def _outlet(entry: Entry, base: Round) -> Round:
    """Where a subscriber listens: at the tool's destination, but never behind the proxy that slows the tool."""
    return Round(base.arena, entry.place.name, base.dsn, base.session, entry.place.sink)


def _files(task: Task, base: Round) -> tuple[Path, Path]:
    script = task.folder / f"{base.name}.sql"
    script.write_text(pgbench_script(task.plan.keys, task.scenario.per_transaction))
    return task.folder / f"{base.name}.json", script


def _pgbench(base: Round, script: Path, seconds: float, rate: float = 0.0) -> Sequence[str]:
    clients = str(max(_CLIENTS, int(rate) // _COMMITS_PER_CLIENT))
    command = [postgres_tool("pgbench", base.arena.bindir), "-n", "-M", "prepared", "-f", str(script), "-c", clients]
    command += ["-R", f"{rate:g}"] if rate else []
    return [*command, "-T", str(math.ceil(seconds)), "-d", base.dsn]
