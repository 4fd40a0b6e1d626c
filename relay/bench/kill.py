"""SIGKILL in the middle of a backlog, a new start, and a count of what came twice or never."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from relay.bench.arena import Round
from relay.bench.drain import watch
from relay.bench.meter import Stolen, peak_rss
from relay.bench.process import until
from relay.bench.result import Measurement
from relay.bench.task import STALLED, Entry, Task, read_back

_AT = 0.4
_STANDS = 0.3  # seconds after which nothing of the killed process is on its way any more
_QUIET = 3.0  # nothing more comes: the count of a tool that repeats is full before its last event


async def kill(task: Task, base: Round, entries: Sequence[Entry]) -> list[Measurement]:
    """One tool, killed once."""
    (entry,) = entries
    place, tool, rows = entry.place, entry.tool, task.scenario.rows
    task.say(f"loading {rows:,} rows")
    loaded = await base.load(task.scenario, task.plan.keys)
    task.say(f"{tool.name} {tool.mode} drains them, and is killed")
    with tool.process() as child:
        await watch(task, place, child, tool, rows, [], _AT)
        child.kill()
    count = await _standing(place)
    started = grew = time.monotonic()
    first, stolen = 0.0, Stolen()
    with tool.process() as child:

        async def quiet() -> bool:
            nonlocal count, grew, first
            child.must_run()
            now = await place.stored()
            if now > count:
                count, grew = now, time.monotonic()
                first = first or grew
            still = time.monotonic() - grew
            return (count >= rows and still > _QUIET) or still > STALLED

        await until(quiet, 3600.0, "it did not come to an end", 0.05)
        if count < rows:
            task.say(f"{tool.name} stands still at {count:,}; its log ends with\n{child.log_tail()}")
        peak, stolen_share = peak_rss(child.pid), stolen.share()
        child.stop()
    heard = await read_back(place, task.folder)
    return [
        task.measurement(
            entry,
            rows=rows,
            stored=heard["events"],
            duplicates_seen=heard["events"] - heard["distinct"],
            missing=rows - heard["distinct"],
            killed=True,
            start_to_first_seconds=round(first - started, 3) if first else None,
            peak_rss_bytes=peak,
            wal_load_bytes_per_event=loaded,
            stolen_share=stolen_share,
        )
    ]


async def _standing(place: Round) -> int:
    """How much is stored once the broker has taken what the killed process had sent."""
    count, since = await place.stored(), time.monotonic()
    while time.monotonic() - since < _STANDS:
        await asyncio.sleep(0.05)
        now = await place.stored()
        if now != count:
            count, since = now, time.monotonic()
    return count
