"""The hall: source → sink → checkpoint → confirm. One straight line; its last part is in checkpointer.py.

Batches are published in order and overlap in a bounded window; they complete first-in first-out. Acknowledged is a
prefix: it ends where the oldest unfinished batch begins. A full window stops the reading, nothing else (G8).
When the sink fails, it is opened again, with backoff, and the unfinished batches are submitted again in order; the
source stays connected meanwhile. Nothing is ever acknowledged past an event that the sink has not (G1).
"""

from __future__ import annotations

import asyncio
import bisect
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager

import structlog

from relay.audit import Audit
from relay.backoff import Backoff
from relay.config import Delivery
from relay.coverage import Coverage
from relay.depth import Depth
from relay.errors import EventRejected, RelayError, SourceUnavailable, Superseded, TransientError
from relay.event import Batch, Event, Rejected
from relay.lsn import LSN
from relay.metrics import Metrics
from relay.progress import Progress
from relay.sink import Sink
from relay.source import Source
from relay.writeback import WriteBack

log = structlog.get_logger("relay.pipeline")


class _Pending:
    """A batch that is not acknowledged yet, and what will tell that it is (None: not submitted)."""

    __slots__ = ("batch", "events", "injected", "last_commit", "submitted_at", "task")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.task: asyncio.Future[Sequence[Rejected]] | None = None
        self.submitted_at = 0.0
        self.last_commit = batch.events[-1].transaction.commit_lsn
        self.events: Sequence[Event] = ()  # all of them, for write-back: a retry leaves fewer in the batch
        self.injected: asyncio.Future[Sequence[Rejected]] | None = None  # it is not the source's


class Pipeline:
    """Moves batches from a source into the sink. One per session with Postgres."""

    def __init__(
        self,
        sink: Sink,
        delivery: Delivery,
        progress: Progress,
        metrics: Metrics,
        start: LSN,
        write_back: WriteBack | None = None,
        opened: Callable[[], Awaitable[None]] | None = None,
        opening: Callable[[], Awaitable[None]] | None = None,
        depth: Depth | None = None,
    ) -> None:
        """`opening` is awaited before the sink is opened: opening may fence others off, so we must be the one.

        `opened` is awaited after it was opened and before anything is published: a last look at the fence.
        """
        self._sink = sink
        self._delivery = delivery
        self._progress = progress
        self._metrics = metrics
        self._write_back = write_back
        self._opened = opened
        self._opening = opening
        self._depth = depth or Depth(delivery.max_in_flight_events)
        self._window: deque[_Pending] = deque()
        self._filled = asyncio.Event()  # the window has something
        self._emptied = asyncio.Event()  # the window has nothing
        self._room = asyncio.Event()  # the window is not full
        self._up = False  # the sink is open
        self._over = False  # nobody waits for the sink any more
        self.sink_failure: RelayError | None = None  # what of the sink's only a person can cure
        self._reader: asyncio.Task[TransientError | None] | None = None
        self._emptied.set()
        self._room.set()
        self.coverage = Coverage()
        self._running = False
        self._ending = False  # nothing is injected any more
        self.injections = 0  # batches that were injected and acknowledged
        self.begin(start)

    def begin(self, start: LSN, audit: Audit | None = None) -> None:
        """Ready for a source that begins at `start`. The sink stays open from one source to the next."""
        self.acknowledged = start  # everything before it is durable in the broker
        self.last_event_lsn = start  # end of the newest acknowledged batch that had events
        self.published = 0  # events of this source
        self.audit = audit
        self.coverage.begin()

    async def drained(self) -> None:
        """Return when everything that was handed on is acknowledged."""
        await self._emptied.wait()

    def injecting(self) -> AbstractContextManager[None]:
        """Around any number of `inject`."""
        return self.coverage.injecting()

    async def inject(self, batch: Batch) -> Sequence[Rejected]:
        """Publish a batch that is not the source's, between its batches; returns when it is acknowledged.

        It has no position: nothing is confirmed, audited or written back for it, and what the sink rejects of it is
        returned. Within the same bounds as the others. When the pipeline ends, it waits to be cancelled.
        """
        await self._wait_for_room()
        if self._ending or not self._running:
            await asyncio.get_running_loop().create_future()
        pending = _Pending(batch)
        pending.injected = asyncio.get_running_loop().create_future()
        self._append(pending)
        return await pending.injected

    async def run(self, source: Source) -> None:
        """Until the source ends, fails, or `stop` is called; then drains the window before it returns or raises."""
        try:
            await self._run(source)
        finally:
            # What is left comes again from the source, and then counts anew.
            progress = self._progress
            progress.in_flight_events = progress.in_flight_bytes = 0
            progress.oldest_in_flight = progress.oldest_commit_at = None
            self._running = False
            for pending in self._window:
                if pending.injected is not None:
                    pending.injected.cancel()
            self._window.clear()
            self._emptied.set()

    async def _run(self, source: Source) -> None:
        self._over = self._ending = False
        async with asyncio.TaskGroup() as group:
            self._running = True
            completer = group.create_task(self._complete())
            self._reader = group.create_task(self._read(source.batches()))
            try:
                await asyncio.wait((self._reader,))
                failure = None if self._reader.cancelled() else self._reader.result()
                # What was handed on before the source ended shall not come twice: wait for its acknowledgements.
                try:
                    await asyncio.wait_for(self._emptied.wait(), self._delivery.shutdown_timeout)
                except TimeoutError:
                    log.warning("window.abandoned", events=self._progress.in_flight_events)
            finally:
                # Client libraries swallow a cancellation now and then (nats-py while it flushes): the flag survives it.
                self._over = True
                completer.cancel()
                await self._abandon()
            if failure is not None:
                raise failure

    async def _abandon(self) -> None:
        tasks = [pending.task for pending in self._window if pending.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and not isinstance(task.exception(), RelayError | None):
                task.result()  # a fault of ours

    def stop(self) -> None:
        """Read no more; `run` drains and returns."""
        self._ending = True
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self, batches: AsyncIterator[Batch]) -> TransientError | None:
        """Hand on what the source has; a source that went away is returned, not raised: the window drains first."""
        try:
            try:
                await self._hand_on(batches)
            finally:
                self._ending = True
            # A source that has no more is done when everything is acknowledged, however long the broker is away: the
            # recovery takes our return as "all published". `stop` ends it all the same.
            await self._emptied.wait()
        except TransientError as exc:
            return exc
        return None

    async def _hand_on(self, batches: AsyncIterator[Batch]) -> None:
        window = self._window
        async for batch in self._whole(batches):
            if batch.rejected:
                self._reject(batch.rejected)
            if not batch.events:
                # A position without events takes effect with whatever stands before it.
                if window:
                    last = window[-1].batch
                    last.end_lsn = batch.end_lsn
                    last.transactions += batch.transactions
                else:
                    self._advance(batch)
                continue
            await self._wait_for_room()
            pending = _Pending(batch)
            if self._write_back is not None:
                pending.events = batch.events[:]
                await self._write_back.room()
            self._append(pending)

    async def _wait_for_room(self) -> None:
        progress, depth, most_bytes = self._progress, self._depth, self._delivery.max_in_flight_bytes
        while progress.in_flight_events >= depth.events or progress.in_flight_bytes >= most_bytes:
            self._room.clear()
            await self._room.wait()

    def _append(self, pending: _Pending) -> None:
        progress, batch = self._progress, pending.batch
        if not self._window:
            progress.oldest_in_flight = batch.received_at
            progress.oldest_commit_at = _oldest(batch)
            self._emptied.clear()
            self._filled.set()
        self._window.append(pending)
        progress.in_flight_events += batch.count
        progress.in_flight_bytes += batch.size_bytes
        if self._up:
            self._submit(pending)

    async def _whole(self, batches: AsyncIterator[Batch]) -> AsyncIterator[Batch]:
        """For a sink with marks: what belongs to the LSN, and the beginning of the next transaction, apart.

        Then each LSN that is saved has marks that cover exactly the events before it.
        """
        async for batch in batches:
            events, end = batch.events, batch.end_lsn
            if self.coverage.marks and self.audit is not None and events and events[-1].transaction.commit_lsn >= end:
                at = bisect.bisect_left(events, int(end), key=lambda event: event.transaction.commit_lsn)
                if at:
                    size = batch.size_bytes * at // len(events)
                    yield Batch(events[:at], end, size, batch.received_at, batch.rejected, batch.transactions)
                    batch = Batch(events[at:], end, batch.size_bytes - size, batch.received_at)  # noqa: PLW2901
            yield batch

    def _submit(self, pending: _Pending) -> None:
        pending.submitted_at = time.monotonic()
        pending.batch.settled = self.coverage.settled
        pending.task = asyncio.ensure_future(self._sink.publish(pending.batch))
        self._progress.publish_attempts += len(pending.batch.events)

    async def _complete(self) -> None:
        """Open the sink, then finish batches first-in first-out; after a failure begin again."""
        backoff = Backoff(self._delivery.backoff_initial, self._delivery.backoff_max)
        while True:
            try:
                if not self._up:
                    await self.open()
                    if self._over:
                        return
                    self._up = True
                    self._progress.sink_down_since = None
                    log.info("sink.opened")
                for pending in self._window:
                    if pending.task is None:
                        self._submit(pending)
                await self._finish(backoff)
                return
            except (Superseded, SourceUnavailable):
                raise  # said by `opening` or `opened`, not by the sink: opening it again would not help
            except TransientError as exc:
                self._up = False
                self._progress.sink_down_since = self._progress.sink_down_since or time.monotonic()
                await self._settle()
                await self._sink.close()
                if self._over:
                    return
                wait = backoff.next(random.random())  # noqa: S311  spreading, not secrecy
                self._progress.sink_reconnects += 1
                self._progress.last_error, self._progress.last_hint = str(exc), exc.hint
                self._metrics.failed(exc)
                log.warning(
                    "sink.failed",
                    error=exc,
                    attempt=backoff.attempt,
                    wait_seconds=round(wait, 3),
                    unfinished_events=self._progress.in_flight_events,
                )
                await asyncio.sleep(wait)
            except RelayError as exc:
                self.sink_failure = exc
                raise

    async def open(self) -> None:
        """Open the sink: nobody may have taken over before and after it."""
        coverage = self.coverage
        if self._opening is not None:
            await self._opening()
        coverage.hand_to(self._sink)
        await self._sink.open()
        coverage.opened(self._sink.marks)
        if self._opened is not None:
            await self._opened()
        coverage.same_order = True  # opened again, it is given the same batches again

    async def _finish(self, backoff: Backoff) -> None:
        progress, metrics, window = self._progress, self._metrics, self._window
        while not self._over:  # a cancellation goes to the publish that we await, which may swallow it and succeed
            while not window:
                self._filled.clear()
                await self._filled.wait()
            pending = window[0]
            assert pending.task is not None
            try:
                outcome = await pending.task
            except RelayError:
                progress.publish_failures += len(pending.batch.events)
                raise
            if outcome and pending.injected is None:
                self._reject(outcome)
            if self._write_back is not None:
                self._write_back.acknowledged(pending.events)
            window.popleft()
            batch = pending.batch
            progress.in_flight_events -= batch.count
            progress.in_flight_bytes -= batch.size_bytes
            if pending.injected is None:
                progress.published_events += batch.count
            progress.published_bytes += batch.size_bytes
            progress.duplicate_events = self._sink.duplicates
            if backoff.attempt or progress.last_error:
                backoff.reset()
                progress.last_error = progress.last_hint = ""
            committed_at = batch.events[0].transaction.committed_at if batch.events else 0.0
            delivery = time.time() - committed_at if committed_at else None
            now = time.monotonic()
            metrics.observe(delivery, now - pending.submitted_at)
            self._depth.answered(batch.count, now - pending.submitted_at, now)
            if pending.injected is None:
                self.coverage.acknowledged(batch.marks, pending.last_commit)
                self.last_event_lsn = batch.end_lsn
                self.published += batch.count
            else:
                self.coverage.injected(batch.marks)
                self.injections += 1
                if not pending.injected.done():
                    pending.injected.set_result(outcome)
            self._advance(batch)
            if window:
                head = window[0].batch
                progress.oldest_in_flight = head.received_at
                progress.oldest_commit_at = _oldest(head)
            else:
                progress.oldest_in_flight = progress.oldest_commit_at = None
                self._emptied.set()
            self._room.set()

    async def _settle(self) -> None:
        """Wait until no publish is under way; batches that finished meanwhile stay finished."""
        tasks = [pending.task for pending in self._window if pending.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        for pending in self._window:
            if pending.task is not None and isinstance(pending.task.exception(), RelayError):
                pending.task = None

    def _advance(self, batch: Batch) -> None:
        self.coverage.advance(batch.end_lsn)
        if batch.transactions and self.audit is not None:
            self.audit.acknowledged(batch.transactions)
        if batch.end_lsn > self.acknowledged:
            self.acknowledged = batch.end_lsn
            if self.audit is not None:  # a stream: elsewhere it is a count of rows
                self._progress.acknowledged_lsn = batch.end_lsn
                self.coverage.reached(batch.end_lsn)

    def _reject(self, rejected: Sequence[Rejected]) -> None:
        """The policy for what the sink can never take: stop, and name it. Nothing after it is confirmed."""
        self._progress.rejected_events += len(rejected)
        event, reason = rejected[0]
        more = f" (and {len(rejected) - 1} more)" if len(rejected) > 1 else ""
        raise EventRejected(
            f"event {event.id.decode(errors='replace')!r} of {event.table} cannot be published: {reason}{more}",
            hint="correct what the reason names (a larger limit of the broker, the routing, the configuration), then "
            "start the relay again: it continues with this event; if the row itself is wrong, docs/operations.md "
            "(EventRejected) says how to give it up",
        )


def _oldest(batch: Batch) -> float | None:
    """When the batch's first event was committed (Unix time), where that is known: of rows of a table it is not."""
    return (batch.events[0].transaction.committed_at or None) if batch.events else None
