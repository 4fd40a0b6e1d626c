"""Claim polling: workers that lock rows, publish them, mark them, and commit. The second strategy of `mode = "poll"`.

One relay process (the singleton's lock), `poll.workers` sessions in it. A worker publishes one batch at a time and
waits for its acknowledgement inside the transaction that locks the rows; that time is bounded, and a frozen process
loses its locks by `idle_in_transaction_session_timeout`. At least once: a crash between the acknowledgement and the
commit publishes the batch again under the same ids.

A broker that is away costs no row an attempt: the batch's locks are let go, and the workers wait until it is back.
Only an event that the broker refuses is counted, waits, and at `poll.max_attempts` is left to a person.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

import structlog

from relay.backoff import Backoff, retry_delay
from relay.config import Config
from relay.errors import SinkUnavailable, SourceUnavailable, Superseded, TransientError
from relay.event import Batch, Rejected
from relay.lsn import NOWHERE
from relay.metrics import Metrics
from relay.pipeline import Pipeline
from relay.progress import Progress
from relay.sink import BEHIND, Sink
from relay.source.claim import Claimed, ClaimTable, Row
from relay.source.session import LASTING, Session, connect, oldest_xid, translated

log = structlog.get_logger("relay.claim")

_PUBLISH = 60.0  # seconds that a batch may take; the sinks' own bounds are shorter
# Only a plain look along an index passes over the rows marked since the last VACUUM without reading them again; and
# where Postgres thinks that few rows are open, reading and sorting all of them must not seem to cost as little.
_PLANS = "-c enable_bitmapscan=off -c random_page_cost=1.1"
_OPTIONS = f"{LASTING} {_PLANS} -c idle_in_transaction_session_timeout=90s -c lock_timeout=10s"


@dataclass(slots=True, eq=False)
class _Flight:
    batch: Batch
    committed: bool = False


@dataclass(slots=True)
class _Door:
    """The sink that the workers share: opened once, and again after a failure when nobody is in it."""

    sink: Sink
    pipeline: Pipeline
    config: Config
    progress: Progress
    metrics: Metrics
    up: asyncio.Event = field(default_factory=asyncio.Event)
    shut: asyncio.Event = field(default_factory=asyncio.Event)  # it must be opened again
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    failure: TransientError | None = None
    over: bool = False  # nobody needs it any more; client libraries swallow a cancellation now and then
    inside: int = 0
    flights: deque[_Flight] = field(default_factory=deque)  # in the order of publishing, until committed
    idle: set[int] = field(default_factory=set)  # workers that found nothing since it was opened

    async def keep_open(self) -> None:
        delivery, progress = self.config.delivery, self.progress
        backoff = Backoff(delivery.backoff_initial, delivery.backoff_max)
        while True:
            try:
                # The next rows are not the ones that would have come: what the broker holds beyond the marks is read.
                await self.sink.close()  # a round by snapshots may have left it open
                self.pipeline.coverage.same_order = False
                self.flights.clear()
                self.idle.clear()
                self.shut.clear()
                await self.pipeline.open()
                if self.over:
                    return
                progress.sink_down_since = None
                log.info("sink.opened")
                self.up.set()
                await self.shut.wait()
                self.up.clear()
                self._tell()
                await self.empty.wait()
                await self.sink.close()
                failure, self.failure = self.failure, None
                if failure is not None:
                    raise failure
                backoff.reset()
            except (Superseded, SourceUnavailable):
                raise
            except TransientError as exc:
                progress.sink_down_since = progress.sink_down_since or time.monotonic()
                await self.sink.close()
                if self.over:
                    return
                wait = backoff.next(random.random())  # noqa: S311  spreading, not secrecy
                progress.sink_reconnects += 1
                progress.last_error, progress.last_hint = str(exc), exc.hint
                self.metrics.failed(exc)
                log.warning("sink.failed", error=exc, attempt=backoff.attempt, wait_seconds=round(wait, 3))
                await asyncio.sleep(wait)

    def renew(self, failure: TransientError | None = None) -> None:
        """Open the sink anew when nobody is in it: it failed, or it still blocks the key of a row that now waits."""
        self.failure = self.failure or failure
        self.up.clear()
        self.shut.set()
        self._tell()

    async def publish(self, batch: Batch, workers: int) -> tuple[Sequence[Rejected], _Flight]:
        """Returns what was rejected, and the flight to be committed."""
        if not self.up.is_set():
            raise SinkUnavailable("the sink is being opened again")
        self.inside += 1
        self.empty.clear()
        flight = _Flight(batch)
        self.flights.append(flight)
        batch.settled = len(self.idle) == workers
        try:
            async with asyncio.timeout(_PUBLISH):
                return await self.sink.publish(batch), flight
        except TimeoutError:
            late = SinkUnavailable(f"the broker has not acknowledged a batch for {_PUBLISH:g} s")
            self.renew(late)
            raise late from None
        except TransientError as exc:
            self.renew(exc)
            raise
        finally:
            self.inside -= 1
            self._tell()

    def committed(self, flight: _Flight) -> None:
        """The broker's marks may pass a batch when it and all before it are marked in the table."""
        flight.committed = True
        while self.flights and self.flights[0].committed:
            self.pipeline.coverage.note(self.flights.popleft().batch.marks)

    def _tell(self) -> None:
        if self.inside == 0:
            self.empty.set()


class Claims:
    """All workers of one session with Postgres."""

    def __init__(
        self,
        config: Config,
        sink: Sink,
        pipeline: Pipeline,
        progress: Progress,
        metrics: Metrics,
        stopping: asyncio.Event,
        tables: Callable[[int], Sequence[ClaimTable]],
    ) -> None:
        """`tables`: those of a worker, by its number."""
        self._config = config
        self._progress = progress
        self._metrics = metrics
        self._stopping = stopping
        self._tables = tables
        self._door = _Door(sink, pipeline, config, progress, metrics)
        self._woken = [asyncio.Event() for _ in range(config.poll.workers)]
        self._in_flight: dict[int, tuple[float, int, int]] = {}  # worker → its batch: since when, events, bytes

    def wake(self) -> None:
        """Look at the table now."""
        for woken in self._woken:
            woken.set()

    async def run(self) -> None:
        """Until told to stop; what is under way then gets `delivery.shutdown_timeout`."""
        async with asyncio.TaskGroup() as group:
            door = group.create_task(self._door.keep_open())
            workers = [group.create_task(self._work(number)) for number in range(self._config.poll.workers)]
            try:
                await self._stopping.wait()
                self.wake()
                _, left = await asyncio.wait(workers, timeout=self._config.delivery.shutdown_timeout)
                if left:
                    log.warning("batches.abandoned", events=self._progress.in_flight_events)
            finally:
                self._door.over = True
                for task in (door, *workers):
                    task.cancel()
                self._in_flight.clear()
                self._count()

    def injecting(self) -> AbstractContextManager[None]:
        return self._door.pipeline.injecting()

    async def inject(self, batch: Batch) -> Sequence[Rejected]:
        """Publish a batch that no worker claimed, beside theirs; waits for the sink, and for its acknowledgement."""
        door = self._door
        while batch.events:
            if not door.up.is_set():
                await self._until_up()
            if self._stopping.is_set():
                await asyncio.get_running_loop().create_future()  # until cancelled
            try:
                rejected, flight = await door.publish(batch, self._config.poll.workers)
            except SinkUnavailable:
                continue
            door.committed(flight)
            return rejected
        return ()

    async def _work(self, number: int) -> None:
        config, door, poll = self._config, self._door, self._config.poll
        wait = poll.min_interval
        name = f"{config.relay.name} claim {number}"
        tables = self._tables(number)
        async with await connect(config.database, name, options=_OPTIONS) as session:
            while not self._stopping.is_set():
                if not door.up.is_set():
                    await self._until_up()
                    continue
                self._woken[number].clear()
                published, full = 0, False
                alone = number not in door.idle and await self._alone(session)
                try:
                    for table in tables:
                        count, more = await self._turn(session, table, number)
                        published += count
                        full |= more and count > 0
                except TransientError as exc:
                    if not isinstance(exc, SinkUnavailable):
                        raise
                    continue  # the door knows, and waits
                if full:
                    continue
                if published:
                    wait = poll.min_interval
                elif alone:
                    door.idle.add(number)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._woken[number].wait()
                        wait = poll.min_interval
                        continue
                wait = poll.min_interval if published else min(wait * 2, poll.max_interval)

    async def _alone(self, session: Session) -> bool:
        """Whether nobody who was at work when the sink was opened still is: rows that he locked are skipped.

        That may be the backend of a relay that died: his rows are stored, and come when he lets go of them.
        """
        horizon = self._door.pipeline.coverage.horizon
        if horizon is None:  # no marks: nobody asks
            return False
        return await oldest_xid(session) >= horizon

    async def _until_up(self) -> None:
        """Wait for the sink, or for the end."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._door.up, self._stopping)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    async def _turn(self, session: Session, table: ClaimTable, number: int) -> tuple[int, bool]:
        """One batch: (published, whether there may be more). Raises after what is known to be durable was marked."""
        failure: TransientError | None = None
        published = 0
        flight: _Flight | None = None
        try:
            with translated():
                async with session.transaction():
                    claimed = await table.claim(session)
                    self._progress.received_events += len(claimed.rows)
                    if not claimed.rows:
                        return 0, False
                    self._in_flight[number] = (time.monotonic(), len(claimed.rows), claimed.size)
                    self._count()
                    try:
                        published, culprits, flight = await self._publish(session, table, claimed)
                    except SinkUnavailable as exc:
                        failure, culprits = exc, []
                    for row, reason in culprits:
                        await self._reject(session, table, row, reason)
        finally:
            self._in_flight.pop(number, None)
            self._count()
        if flight is not None:
            self._door.committed(flight)
        if any(not row.fault for row, _ in culprits):
            self._door.renew()  # it blocks their keys; from now on the table does
        if failure is not None:
            raise failure
        return published, claimed.full

    async def _publish(
        self, session: Session, table: ClaimTable, claimed: Claimed
    ) -> tuple[int, list[tuple[Row, str]], _Flight | None]:
        """Publish and mark; returns how many, the rows that cannot be, and why."""
        progress, door = self._progress, self._door
        culprits = [(row, row.fault) for row in claimed.rows if row.fault]
        rows = {row.event.id: row for row in claimed.rows if not row.fault}
        if not rows:
            return 0, culprits, None
        started, age = time.monotonic(), claimed.age
        batch = Batch([row.event for row in rows.values()], NOWHERE, claimed.size, started)
        progress.publish_attempts += batch.count
        try:
            rejected, flight = await door.publish(batch, self._config.poll.workers)
        except SinkUnavailable:
            progress.publish_failures += len(batch.events)
            left = {event.id for event in batch.events}
            durable = [row.id for event_id, row in rows.items() if event_id not in left]
            await table.mark(session, durable)
            progress.published_events += len(durable)
            raise
        refused = {item.event.id for item in rejected}
        culprits += [(rows[item.event.id], item.reason) for item in rejected if not item.reason.startswith(BEHIND)]
        done = [row.id for event_id, row in rows.items() if event_id not in refused]
        await table.mark(session, done)
        progress.published_events += len(done)
        progress.published_bytes += claimed.size
        progress.duplicate_events = door.sink.duplicates
        if not culprits and progress.last_error:
            progress.last_error = progress.last_hint = ""
        took = time.monotonic() - started
        self._metrics.observe(None if age is None else age + took, took)
        return len(done), culprits, flight

    async def _reject(self, session: Session, table: ClaimTable, row: Row, reason: str) -> None:
        poll = self._config.poll
        delay = retry_delay(row.attempts + 1, poll.retry_initial, poll.retry_max, random.random())  # noqa: S311
        last = await table.reject(session, row, reason, delay)
        self._progress.rejected_events += 1
        event_id = row.event.id.decode(errors="replace")
        if last:
            log.error(
                "event.failed",
                id=event_id,
                table=table.table,
                attempts=row.attempts + 1,
                reason=reason,
                hint="it is passed over: correct what the reason names, then reset the row (docs/polling.md)",
            )
        else:
            wait = round(delay, 3)
            log.warning(
                "event.rejected",
                id=event_id,
                table=table.table,
                attempt=row.attempts + 1,
                reason=reason,
                wait_seconds=wait,
            )

    def _count(self) -> None:
        """What is in flight, for the gauges."""
        progress, flying = self._progress, self._in_flight.values()
        progress.in_flight_events = sum(events for _, events, _ in flying)
        progress.in_flight_bytes = sum(size for _, _, size in flying)
        progress.oldest_in_flight = min((since for since, _, _ in flying), default=None)
