"""The door that workers share while they claim: it ends when nobody needs it, whatever a client's library does."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from relay.claim import _Door
from relay.config import Config, Delivery
from relay.lsn import NOWHERE
from relay.metrics import Metrics
from relay.pipeline import Pipeline
from relay.progress import Progress
from tests.fakes import FaultySink


class _DeafOpening(FaultySink):
    """Opening it does not hear that it is cancelled, as happens in clients' libraries, and succeeds afterwards."""

    def __init__(self) -> None:
        super().__init__([])
        self.opening, self.freed = asyncio.Event(), asyncio.Event()

    async def open(self) -> None:
        self.opening.set()
        while not self.freed.is_set():
            with suppress(asyncio.CancelledError):
                await self.freed.wait()


async def test_a_door_that_nobody_needs_any_more_closes_although_its_opening_swallowed_that() -> None:
    sink, progress = _DeafOpening(), Progress()
    metrics = Metrics(progress, relay_name="t", stalled_after=30.0)
    pipeline = Pipeline(sink, Delivery(), progress, metrics, NOWHERE)
    door = _Door(sink, pipeline, Config(), progress, metrics)
    task = asyncio.ensure_future(door.keep_open())
    await sink.opening.wait()
    door.over = True
    task.cancel()
    await asyncio.sleep(0)
    sink.freed.set()
    await asyncio.wait((task,), timeout=60)
    assert task.done()
