"""How a scenario is measured. The tool runs as a process of its own; everything is read from outside.

Each function gets a round (fresh database, fresh destination) and returns measurements without their place in the run.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import orjson

from relay.bench.arena import PGBENCH, Round, Say
from relay.bench.meter import cpu, peak_rss
from relay.bench.plan import Plan, Scenario
from relay.bench.process import BenchError, Child, postgres_tool, until
from relay.bench.result import Cpu, Flow, Measurement, Sample, flow, latency
from relay.bench.tools import RecvLogical, RelayTool, Tool

_STALLED = 30.0  # without any progress
_CLIENTS = 4
_ROWS_PER_CLIENT = 500  # a second, at most: each waits for its commit's fsync


async def drain(
    place: Round, plan: Plan, scenario: Scenario, repetition: int, folder: Path, say: Say
) -> list[Measurement]:
    """Every tool drains the same rows from a slot of its own; who begins alternates."""
    tools: list[Tool] = [RelayTool(place, plan.mode, folder), RecvLogical(place, plan.mode)]
    for tool in tools:
        await tool.prepare()
    say(f"loading {scenario.rows:,} rows")
    await place.load(scenario.rows, scenario.per_transaction)
    measurements = []
    for turn, tool in enumerate(tools if repetition % 2 == 0 else tools[::-1]):
        say(f"{tool.name} drains them")
        measurements.append(await _drain(place, plan, scenario, tool, repetition, turn))
    return measurements


async def _drain(place: Round, plan: Plan, scenario: Scenario, tool: Tool, repetition: int, turn: int) -> Measurement:
    before = await place.costs(None, tool.slot)
    started = time.monotonic()
    with tool.process() as child:
        samples = await _watch(child, tool, scenario.rows)
        after = await place.costs(child.pid, tool.slot)
        peak = peak_rss(child.pid)
        child.stop()
    seen = flow(samples, started, scenario.rows)
    return Measurement(
        scenario=scenario.name,
        sink=plan.sink,
        tool=tool.name,
        mode=tool.mode,
        repetition=repetition,
        turn=turn,
        rows=scenario.rows,
        stored=await place.stored() if tool.stores else None,  # after its end: what came twice is in it
        start_to_first_seconds=None if seen.start is None else round(seen.start, 3),
        seconds=round(seen.seconds, 3),
        events_per_second=seen.events_per_second,
        second_half_events_per_second=seen.second_half,
        cpu_seconds=(spent := Cpu(seen.tool_cpu, after.walsender, *_servers(before, after))).divided_by(1),
        cpu_us_per_event=_per_event(spent, seen, scenario.rows),
        peak_rss_bytes=peak,
    )


async def _watch(child: Child, tool: Tool, rows: int) -> list[Sample]:
    """Look at the tool until it has finished, or until it has stood still for too long (then rows are missing)."""
    samples: list[Sample] = []
    grew = time.monotonic()
    while not await tool.finished(samples, rows):
        await asyncio.sleep(tool.interval)
        child.must_run()
        sample = Sample(time.monotonic(), await tool.moved(), cpu(child.pid))
        if sample.moved > (samples[-1].moved if samples else 0):
            grew = sample.at
        samples.append(sample)
        if sample.at - grew > _STALLED:
            break
    return samples


def _servers(before: Cpu, after: Cpu) -> tuple[float | None, float | None]:
    def spent(first: float | None, last: float | None) -> float | None:
        return None if first is None or last is None else last - first

    return spent(before.postgres, after.postgres), spent(before.broker, after.broker)


def _per_event(spent: Cpu, seen: Flow, rows: int) -> Cpu | None:
    """Microseconds. The tool's belong to the events of the timed part, the servers' to all."""
    if not seen.events:
        return None
    tool = Cpu(
        spent.tool * 1e6 / seen.events * rows, *(_scaled(x) for x in (spent.walsender, spent.postgres, spent.broker))
    )
    return tool.divided_by(rows)


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


async def steady(
    place: Round, plan: Plan, scenario: Scenario, repetition: int, folder: Path, say: Say
) -> list[Measurement]:
    """pgbench writes at a fixed rate (Poisson), a subscriber notes arrivals."""
    tool = RelayTool(place, plan.mode, folder)
    await tool.prepare()
    notes = folder / f"{place.name}.json"
    script = folder / f"{place.name}.sql"
    script.write_text(PGBENCH)
    listen = [sys.executable, "-m", "relay.bench.subscriber", plan.sink, place.broker.address, place.name, str(notes)]
    with tool.process() as relay, Child("subscriber", listen, ready="ready") as subscriber:
        await tool.streaming(relay)
        say(f"{scenario.rate:,} rows per second for {scenario.warmup + scenario.seconds:g} s")
        with Child("pgbench", _pgbench(place, scenario, script)) as writer:
            await asyncio.sleep(scenario.warmup)
            window, before = time.time(), await place.costs(relay.pid, tool.slot)
            await asyncio.sleep(scenario.seconds)
            after = await place.costs(relay.pid, tool.slot)
            spent = time.time() - window
            await writer.wait(60.0)
        rows = int(await place.value("SELECT count(*) FROM outbox_events"))
        stored = await _settled(place, relay, rows)
        subscriber.stop()
        peak = peak_rss(relay.pid)
        relay.stop()
    heard = orjson.loads(notes.read_bytes())
    times = zip(heard["written"], heard["arrived"], strict=True)
    late = [(arrived - written) / 1e6 for written, arrived in times if 0 <= written / 1e6 - window < spent]
    return [
        Measurement(
            scenario=scenario.name,
            sink=plan.sink,
            tool=tool.name,
            mode=tool.mode,
            repetition=repetition,
            turn=0,
            rows=rows,
            stored=stored,
            duplicates_seen=len(heard["arrived"]) - heard["distinct"],
            seconds=round(spent, 3),
            events_per_second=round(len(late) / spent, 1),
            latency=latency(late),
            cores=_window(before, after).divided_by(spent),
            peak_rss_bytes=peak,
        )
    ]


def _pgbench(place: Round, scenario: Scenario, script: Path) -> Sequence[str]:
    clients = str(max(_CLIENTS, scenario.rate // _ROWS_PER_CLIENT))
    seconds = str(math.ceil(scenario.warmup + scenario.seconds) + 1)  # beyond the window's end
    command = [postgres_tool("pgbench", place.arena.bindir), "-n", "-M", "prepared", "-f", str(script), "-c", clients]
    return [*command, "-R", str(scenario.rate), "-T", seconds, "-d", place.dsn]


async def _settled(place: Round, relay: Child, rows: int) -> int:
    """Wait until the broker has all rows; if that never happens, what it has is the finding."""

    async def all_stored() -> bool:
        relay.must_run()
        return await place.stored() >= rows

    try:
        await until(all_stored, _STALLED, "not all rows were stored", 0.05)
    except BenchError:
        relay.must_run()
    return await place.stored()


def _window(before: Cpu, after: Cpu) -> Cpu:
    walsender = None
    if before.walsender is not None and after.walsender is not None:
        walsender = after.walsender - before.walsender
    return Cpu(after.tool - before.tool, walsender, *_servers(before, after))


async def idle(
    place: Round, plan: Plan, scenario: Scenario, repetition: int, folder: Path, say: Say
) -> list[Measurement]:
    """A relay with nothing to do."""
    tool = RelayTool(place, plan.mode, folder)
    await tool.prepare()
    with tool.process() as relay:
        await tool.streaming(relay)
        say(f"nothing happens for {scenario.warmup + scenario.seconds:g} s")
        await asyncio.sleep(scenario.warmup)
        started, before = time.monotonic(), await place.costs(relay.pid, tool.slot)
        await asyncio.sleep(scenario.seconds)
        after = await place.costs(relay.pid, tool.slot)
        spent = time.monotonic() - started
        peak = peak_rss(relay.pid)
        relay.stop()
    return [
        Measurement(
            scenario=scenario.name,
            sink=plan.sink,
            tool=tool.name,
            mode=tool.mode,
            repetition=repetition,
            turn=0,
            rows=0,
            stored=await place.stored(),
            seconds=round(spent, 3),
            cores=_window(before, after).divided_by(spent),
            peak_rss_bytes=peak,
        )
    ]


Measure = Callable[[Round, Plan, Scenario, int, Path, Say], Awaitable[list[Measurement]]]
MEASURES: Mapping[str, Measure] = {"drain": drain, "steady": steady, "idle": idle}
