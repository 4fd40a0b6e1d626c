"""Moving in a life: the pipeline runs to its end, and beside it what must go on meanwhile.

That is ticks, which save what is done and hear when Postgres stops; write-back; requests; whoever looks at the slots.
No failure of theirs goes unheard, and none may leave the walsender open: Postgres, stopping, would wait for it (G11).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence

import structlog

from relay.admin.status import progress_line
from relay.anchor import keep
from relay.errors import RelayError
from relay.life_frame import Frame
from relay.log import PROGRESS_INTERVAL
from relay.observer import observe
from relay.requests import Injector, Requests
from relay.sink import UNCOUNTABLE
from relay.source import Source
from relay.source.session import translated
from relay.writeback import PATIENCE

log = structlog.get_logger("relay.life")

_STEP = 0.1  # seconds between two looks at how much was published since the last checkpoint, at most
_SHORT = 0.01  # … and at least


async def move(
    frame: Frame, source: Source, tick: Callable[[], Awaitable[None]], *beside: Coroutine[None, None, None]
) -> None:
    """Run the pipeline to its end, and beside it what must go on meanwhile."""
    async with asyncio.TaskGroup() as group:
        if frame.write_back is not None:
            beside = (*beside, frame.write_back.run())
        tasks = [group.create_task(_letting_go(frame, each)) for each in (ticking(frame, tick), *beside)]
        try:
            await _run_and_mark(frame, source)
        finally:
            for task in tasks:
                task.cancel()


async def _run_and_mark(frame: Frame, source: Source) -> None:
    """Run the pipeline; then, unless we are cancelled, let write-back finish what it has."""
    try:
        await frame.pipeline.run(source)
    except Exception:
        await _marked(frame)
        raise
    await _marked(frame)


async def _marked(frame: Frame) -> None:
    if frame.write_back is None:
        return
    stopping = frame.stopping.is_set()
    done = await frame.write_back.caught_up(frame.config.delivery.shutdown_timeout if stopping else PATIENCE)
    if stopping and not done:
        log.warning("write_back.left", rows=frame.write_back.queued, hint="these rows stay as they are")


async def _letting_go(frame: Frame, task: Coroutine[None, None, None]) -> None:
    """Whichever session fails first: Postgres may be stopping, and waits for our walsender. Let go of it now.

    The rest is cancelled, and may take long to end: then nobody would hear that Postgres stops (G11).
    """
    try:
        await task
    except RelayError:
        if frame.wal is not None:
            frame.wal.close()
        raise


async def ticking(frame: Frame, tick: Callable[[], Awaitable[None]]) -> None:
    reported = time.monotonic()
    while True:
        await tick()
        if time.monotonic() - reported > PROGRESS_INTERVAL:
            reported = time.monotonic()
            log.info("relay.progress", **progress_line(frame.metrics, clock=time.time()))
        await _pause(frame)


async def _pause(frame: Frame) -> None:
    """Until the next tick: the interval. Without a fence also a window of events: more would come twice (G4)."""
    pipeline, window = frame.pipeline, frame.config.delivery.max_in_flight_events
    began, published, interval = time.monotonic(), pipeline.published, frame.config.checkpoint.interval
    step = interval if frame.coverage.marks else min(interval, _SHORT)
    while (left := began + interval - time.monotonic()) > 0:
        # Not a plain sleep: this hears at once when Postgres ends the session (57P01), and then everything stops.
        with translated():
            async for _ in frame.session.notifies(timeout=min(step, left)):
                pass
        done = pipeline.published - published
        if done >= window:
            return
        if not frame.coverage.marks:  # when the window is full, at this rate
            step = next_look(window - done, done / (time.monotonic() - began))


def next_look(events: int, rate: float) -> float:
    """Seconds until so many events are published, at so many a second; in bounds."""
    return min(_STEP, max(_SHORT, events / rate)) if rate else _STEP


def attendants(frame: Frame) -> list[Coroutine[None, None, None]]:
    """Who looks at the slots from outside."""
    anchored = frame.config.source.anchor.slot and frame.config.source.mode != "poll"
    return [observe(frame.config, frame.metrics), *([keep(frame.config)] if anchored else [])]


def requests(frame: Frame, injector: Injector | None = None) -> Sequence[Coroutine[None, None, None]]:
    """Serve requests, if ours is a sink that nobody else may write to."""
    if not Requests.needed(frame.config):
        return ()

    async def distrust_counts() -> None:
        if frame.coverage.marks:
            await frame.store.save_marks({UNCOUNTABLE: 1})

    def stamp(run: str) -> bytes:
        return frame.stamp("replay", run)

    holder = injector or frame.pipeline
    return (Requests(frame.config, holder, frame.progress, stamp, distrust_counts).run(),)
