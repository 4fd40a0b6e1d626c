"""One scenario in one repetition: what the measuring functions share."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from relay.bench.arena import Round, Say
from relay.bench.plan import Plan, Scenario
from relay.bench.process import Child, until
from relay.bench.result import Cpu, Measurement, Sample
from relay.bench.tools import Tool

STALLED = 120.0  # seconds without any progress; a JVM on a busy machine takes most of them to start


@dataclass(frozen=True, slots=True)
class Entry:
    """A prepared tool in its place; `turn`: when in its group it runs, 0 is first."""

    place: Round
    tool: Tool
    turn: int


@dataclass(frozen=True, slots=True)
class Task:
    plan: Plan
    scenario: Scenario
    repetition: int
    folder: Path
    say: Say
    tools: dict[str, Mapping[str, Any]]  # facts of the tools, by label; filled

    def measurement(self, entry: Entry, **figures: Any) -> Measurement:
        return Measurement(
            scenario=self.scenario.name,
            sink=entry.place.sink.name,
            tool=entry.tool.name,
            mode=entry.tool.mode,
            repetition=self.repetition,
            turn=entry.turn,
            **figures,
        )


def used(before: Cpu, after: Cpu) -> Cpu:
    """What was spent between two looks."""
    return Cpu(
        after.tool - before.tool,
        _spent(before.walsender, after.walsender),
        _spent(before.postgres, after.postgres),
        _spent(before.broker, after.broker),
    )


def _spent(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None else last - first


def listener(place: Round, notes: Path, how: str = "live") -> Child:
    """A subscriber of the round's destination."""
    return _subscriber(place.broker.kind, place.broker.address, place.name, str(notes), how)


def pipe_listener(pipe: Path, notes: Path) -> Child:
    """The same for a tool that only reads."""
    os.mkfifo(pipe)
    return _subscriber("pipe", str(pipe), "", str(notes), "live")


def _subscriber(*arguments: str) -> Child:
    return Child("subscriber", [sys.executable, "-m", "relay.bench.subscriber", *arguments], ready="ready")


async def read_back(place: Round, folder: Path) -> dict[str, int]:
    """How many events a reader finds in the destination, and how many different rows they are."""
    notes = folder / f"{place.name}.read.json"
    with listener(place, notes, "stored") as reader:

        def written() -> bool:
            reader.must_run()
            return notes.exists()

        await until(written, 3600.0, "the destination could not be read", 0.1)
        reader.stop()
    heard = taken(notes)
    return {"events": heard["events"], "distinct": heard["distinct"]}


def taken(notes: Path) -> dict[str, Any]:
    """What a subscriber noted; the file is gone afterwards, for it may be large."""
    heard: dict[str, Any] = orjson.loads(notes.read_bytes())
    notes.unlink()
    return heard


async def passed_on(entry: Entry, child: Child, rows: int) -> None:
    """Wait until a tool that only reads has handed on all rows."""
    samples: list[Sample] = []

    async def done() -> bool:
        child.must_run()
        samples.append(Sample(time.monotonic(), await entry.tool.moved(), 0.0))
        return await entry.tool.finished(samples, rows)

    await until(done, STALLED, f"{entry.tool.name} did not read everything", entry.tool.interval)


async def settled(place: Round, child: Child, rows: int) -> int:
    """Wait until the broker has all rows; if that never happens, what it has is the finding."""
    count, grew = 0, time.monotonic()
    while True:
        child.must_run()
        now = await place.stored()
        if now > count:
            count, grew = now, time.monotonic()
        # Offsets of transactions count markers, too: there, and only there, silence must follow.
        quiet = time.monotonic() - grew
        if (count >= rows and (not place.sink.transactions or quiet > 1.0)) or quiet > STALLED:
            return count
        await asyncio.sleep(0.05)
