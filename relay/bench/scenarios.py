"""How a scenario is measured: a fresh database, every contender prepared, then the scenario's own way of looking.

The tool runs as a process of its own; everything is read from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from relay.bench.arena import Arena, Round
from relay.bench.contest import Contender
from relay.bench.drain import drain
from relay.bench.kill import kill
from relay.bench.meter import peak_rss
from relay.bench.paced import burst, steady, writers
from relay.bench.result import Measurement, footprint
from relay.bench.task import Entry, Task, used

Measure = Callable[[Task, Round, Sequence[Entry]], Awaitable[list[Measurement]]]


async def measure(arena: Arena, task: Task, group: Sequence[Contender]) -> list[Measurement]:
    """One group in one database; both are gone afterwards, and so are the destinations."""
    scenario = task.scenario
    async with contextlib.AsyncExitStack() as stack:
        base = await stack.enter_async_context(arena.database(group[0].sink))
        entries = []
        for number, contender in enumerate(group):
            place = await stack.enter_async_context(base.destination(number, contender.sink, scenario.broker_delay))
            entries.append(Entry(place, contender.make(place, task.folder), number))
        for entry in entries:
            task.say(f"preparing {entry.tool.name} {entry.tool.mode}")
            await entry.tool.prepare()
        found = await MEASURES[scenario.kind](task, base, entries)
        for contender, entry in zip(group, entries, strict=True):
            task.tools[contender.label] = entry.tool.facts
        return found


async def idle(task: Task, base: Round, entries: Sequence[Entry]) -> list[Measurement]:  # noqa: ARG001
    """A tool with nothing to do."""
    (entry,) = entries
    scenario, place, tool = task.scenario, entry.place, entry.tool
    with tool.process() as child:
        await tool.ready(child)
        task.say(f"nothing happens for {scenario.warmup + scenario.seconds:g} s")
        await asyncio.sleep(scenario.warmup)
        state, retained = await place.state(), []
        started, before = time.monotonic(), await place.costs(child.pid, tool.slot)
        while (spent := time.monotonic() - started) < scenario.seconds:
            retained.append(await place.retained(tool.slot))
            await asyncio.sleep(min(1.0, scenario.seconds - spent))
        after = await place.costs(child.pid, tool.slot)
        spent = time.monotonic() - started
        peak = peak_rss(child.pid)
        child.stop()
    return [
        task.measurement(
            entry,
            rows=0,
            stored=await place.stored() if tool.stores and not place.sink.transactions else None,
            seconds=round(spent, 3),
            cores=used(before, after).divided_by(spent),
            peak_rss_bytes=peak,
            footprint=footprint(state, await place.state(), retained, None),
        )
    ]


MEASURES: Mapping[str, Measure] = {
    "drain": drain,
    "kill": kill,
    "steady": steady,
    "burst": burst,
    "writers": writers,
    "idle": idle,
}
