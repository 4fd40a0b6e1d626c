"""How a scenario is measured: a fresh database, every contender prepared, then the scenario's own way of looking.

The tool runs as a process of its own; everything is read from outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from relay.bench.arena import Arena, Round
from relay.bench.contest import Contender
from relay.bench.drain import drain
from relay.bench.kill import kill
from relay.bench.paced import burst, idle, steady, writers
from relay.bench.result import Measurement
from relay.bench.task import Entry, Task

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


MEASURES: Mapping[str, Measure] = {
    "drain": drain,
    "kill": kill,
    "steady": steady,
    "burst": burst,
    "writers": writers,
    "idle": idle,
}
