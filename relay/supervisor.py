"""The supervisor: stand by → recover → stream, again and again, until told to stop.

It owns the one retry loop on the Postgres side, and the states. What it does not know it does not retry.
When the lock's session hears that Postgres shuts down, everything stops and the walsender is closed at once: a
walsender that waits for a broker would keep Postgres from stopping (G11).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import structlog
from psycopg import sql

from relay.admin.status import progress_line
from relay.adopt import condition
from relay.backoff import Backoff
from relay.checkpoint import EMPTY, Checkpoint, CheckpointStore, Sample, Snapshot, guard
from relay.config import Config
from relay.errors import (
    ContractError,
    OperatorError,
    RelayError,
    SetupError,
    SlotBusy,
    SlotLost,
    SourceUnavailable,
    Superseded,
    TransientError,
)
from relay.lsn import LSN, NOWHERE
from relay.metrics import Metrics
from relay.observer import observe
from relay.outbox import Binding, mappings
from relay.pipeline import Checkpointer, Pipeline
from relay.progress import Progress
from relay.recovery import open_gap
from relay.routing import Router
from relay.singleton import STANDBY_INTERVAL, hold_lock, pause
from relay.sink import Sink
from relay.source import Source
from relay.source.plugin import choose_decoder
from relay.source.poll import GapSource
from relay.source.replication import Identity, WalSender
from relay.source.session import Session, connect, translated
from relay.source.slot import publication_info, slot_fault, slot_info, table_columns
from relay.source.stream import StreamSource
from relay.writeback import PATIENCE, WriteBack

log = structlog.get_logger("relay.supervisor")

_PROGRESS_INTERVAL = 30.0

T = TypeVar("T")


class Supervisor:
    """Runs one relay. `run` returns after `stop`, and raises what only a person can cure."""

    def __init__(
        self, config: Config, sink: Sink, progress: Progress, metrics: Metrics, *, from_now: bool = False
    ) -> None:
        self._config = config
        self._sink = sink
        self._progress = progress
        self._metrics = metrics
        self._from_now = from_now
        self._mappings = mappings(config.outbox)
        self._stopping = asyncio.Event()
        self._pipeline: Pipeline | None = None
        self._write_back = WriteBack.of(config, progress)
        self._lost: SlotLost | None = None  # what a stream told us: the slot exists, and cannot be used any more

    def stop(self) -> None:
        """Drain, checkpoint, confirm, and return from `run`."""
        self._stopping.set()
        if self._pipeline is not None:
            self._progress.enter("draining")
            self._pipeline.stop()

    async def run(self) -> None:
        delivery = self._config.delivery
        backoff = Backoff(delivery.backoff_initial, delivery.backoff_max)
        try:
            while not self._stopping.is_set():
                started = time.monotonic()
                try:
                    await self._session()
                except (RelayError, BaseExceptionGroup) as exc:
                    failure = decisive(exc)
                    if not isinstance(failure, TransientError):
                        self._metrics.failed(failure)
                        raise failure from exc
                    # A session that lived for a while was healthy: this failure is a new story.
                    if time.monotonic() - started > 2 * delivery.backoff_initial:
                        backoff.reset()
                    await self._wait_after(failure, backoff)
        finally:
            await self._sink.close()
            self._progress.enter("stopped")

    async def _wait_after(self, failure: TransientError, backoff: Backoff) -> None:
        progress = self._progress
        progress.last_error, progress.last_hint = str(failure), failure.hint
        self._metrics.failed(failure)
        if isinstance(failure, SlotBusy | Superseded):
            if progress.enter("standby"):
                log.info("relay.standing_by", reason=str(failure))
            wait = STANDBY_INTERVAL
        else:
            progress.source_reconnects += 1
            progress.enter("connecting")
            wait = backoff.next(random.random())  # noqa: S311  spreading, not secrecy
            log.warning("source.failed", error=failure, attempt=backoff.attempt, wait_seconds=round(wait, 3))
        await pause(self._stopping, wait)

    async def _session(self) -> None:
        """One life with Postgres: lock, checkpoint, recover if needed, stream until something ends it."""
        config = self._config
        async with hold_lock(config, self._progress, self._stopping) as session:
            if session is None:
                return
            await self._look_at_tables(session)
            if config.source.plugin == "pgoutput":
                await self._check_publication(session)
            wal = await WalSender.connect(
                config.database,
                f"{config.relay.name} stream",
                timeout=config.source.wal_sender_timeout,
                lock_timeout=config.source.wal_sender_timeout,
            )
            try:
                identity = await wal.identify()
                store = CheckpointStore(session, config.relay.name)
                checkpoint = await store.claim(identity.system_identifier, identity.timeline, config.source.slot)
                self._progress.epoch = checkpoint.epoch
                guard(checkpoint, identity.system_identifier, await store.sample())
                fault = await self._fault(session, checkpoint, identity)
                if fault is not None:
                    checkpoint = await self._recover(session, store, wal, checkpoint, identity, fault)
                if not self._stopping.is_set():
                    await store.adopt(identity.system_identifier, identity.timeline, config.source.slot)
                    await self._stream(session, store, wal, checkpoint, identity)
            finally:
                wal.close()

    async def _look_at_tables(self, session: Session) -> None:
        """Which of the columns that recovery needs are there: a table may be adopted while we are away."""
        found = []
        for mapping in mappings(self._config.outbox):
            columns = await table_columns(session, mapping.table)
            if columns is None:
                raise ContractError(
                    f"the table {mapping.table} does not exist (or this role may not see its schema)",
                    hint="run `relay setup`, or name the right table in [[outbox]]",
                )
            mapping.within(columns).bind([(name, 0) for name in columns])  # every column that the config names
            found.append(mapping.within(columns))
            if self._write_back is not None:
                await self._write_back.bind(session, mapping.table, columns)
        self._mappings = tuple(found)

    async def _check_publication(self, session: Session) -> None:
        """Since PostgreSQL 18 a missing publication streams nothing and says nothing: refuse it before."""
        name = self._config.source.publication
        publication = await publication_info(session, name)
        if not publication.exists:
            raise SetupError(f"the publication {name} does not exist", hint="run `relay setup`")
        if not publication.insert:
            raise SetupError(
                f"the publication {name} does not publish inserts",
                hint=f"ALTER PUBLICATION {name} SET (publish = 'insert');",
            )
        for mapping in self._mappings:
            if mapping.table not in publication.tables and not publication.all_tables:
                raise SetupError(
                    f"the publication {name} does not contain {mapping.table}",
                    hint=f"run `relay setup`, or: ALTER PUBLICATION {name} ADD TABLE {mapping.table};",
                )

    async def _fault(self, session: Session, checkpoint: Checkpoint, identity: Identity) -> SlotLost | None:
        """Why streaming cannot simply go on from the checkpoint, if recovery can cure it; raises what it cannot."""
        if checkpoint.phase == "new":
            return SlotLost("this is the first start")
        if checkpoint.phase != "stream":
            return SlotLost("a recovery was interrupted")
        source = self._config.source
        fault = slot_fault(
            await slot_info(session, source.slot),
            plugin=source.plugin,
            database=identity.database,
            checkpoint_lsn=checkpoint.lsn,
            name=source.slot,
        )
        if isinstance(fault, SlotLost) and source.mode == "auto":
            return fault
        if fault is not None:
            raise fault
        return self._lost

    async def _recover(
        self,
        session: Session,
        store: CheckpointStore,
        wal: WalSender,
        checkpoint: Checkpoint,
        identity: Identity,
        fault: SlotLost,
    ) -> Checkpoint:
        """Close the gap from the table; returns the checkpoint to stream from."""
        config, progress = self._config, self._progress
        first = checkpoint.phase == "new"
        blind = [mapping.table for mapping in self._mappings if not mapping.recoverable]
        if blind and not first:
            raise SlotLost(
                f"{fault}; the gap cannot be closed from {', '.join(blind)}, which has no xid and seq columns",
                hint="publish again what was written since the checkpoint, then delete the row of "
                f"outbox_relay_checkpoint where relay = '{config.relay.name}' and start with --from-now",
            )
        if self._lost is not None:
            with translated():
                await session.execute(
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
                    (config.source.slot,),
                )
            log.warning("slot.dropped", slot=config.source.slot, reason=str(self._lost))
            self._lost = None
        progress.enter("recovering")
        progress.recoveries += not first
        log.info("recovery.started", reason=str(fault), since=str(checkpoint.snap))
        from_now = first and self._from_now
        # It waits for the oldest transaction of the server, for ever if need be: a stop must not wait with it.
        gap = await self._unless_stopped(
            open_gap(config, session, store, wal, checkpoint, identity.database, from_now=from_now)
        )
        if gap is None:
            return checkpoint
        before = progress.recovered_events
        async with await connect(config.database, f"{config.relay.name} poll") as reading:
            source = GapSource(
                reading,
                [mapping for mapping in self._mappings if mapping.recoverable],
                self._route,
                since=Snapshot.parse(gap.since),
                until=gap.sample.snapshot,
                after=gap.after,
                stamp=self._stamp(identity, "recovery", gap.id),
                progress=progress,
                only=self._unpublished() if Snapshot.parse(gap.since) == EMPTY else None,
            )
            pipeline = Pipeline(self._sink, config.delivery, progress, self._metrics, NOWHERE, self._write_back)

            async def note_place() -> None:
                table, seq = source.reached(pipeline.acknowledged)
                if self._write_back is not None:
                    await self._write_back.caught_up()
                await store.save_recovery(replace(gap, table=table, seq=seq).to_json())

            if not self._stopping.is_set():  # told while we connected: `stop` found no pipeline to stop
                await self._move(pipeline, source, session, note_place)
        if self._stopping.is_set():
            await note_place()
            return checkpoint
        start = LSN.parse(gap.start)
        await store.save(start, gap.sample)
        log.info("recovery.done", events=progress.recovered_events - before, lsn=start)
        return replace(checkpoint, lsn=start, snap=gap.sample.snapshot, snap_lsn=gap.sample.lsn, phase="stream")

    def _unpublished(self) -> dict[str, sql.Composable]:
        """At the first start a table with a status says itself which of its rows nobody has published."""
        return {outbox.table: condition(outbox.unpublished) for outbox in self._config.outbox if outbox.unpublished}

    async def _stream(
        self, session: Session, store: CheckpointStore, wal: WalSender, checkpoint: Checkpoint, identity: Identity
    ) -> None:
        config, progress = self._config, self._progress
        sample = Sample(checkpoint.snap, checkpoint.snap_lsn)
        decoder, options = await choose_decoder(
            session,
            config,
            start=checkpoint.lsn,
            skip=sample if sample.lsn > checkpoint.lsn else None,
            bind=self._bind,
            stamp=self._stamp(identity, "stream", str(identity.timeline)),
        )
        await wal.start(config.source.slot, checkpoint.lsn, options)
        if self._stopping.is_set():  # told while we connected: `stop` found no pipeline to stop
            return
        source = StreamSource(
            wal,
            decoder,
            progress,
            max_batch_events=config.delivery.max_batch_events,
            silence=config.source.wal_sender_timeout,
        )
        pipeline = Pipeline(self._sink, config.delivery, progress, self._metrics, checkpoint.lsn, self._write_back)
        checkpointer = Checkpointer(
            store, pipeline, source, progress, config.checkpoint, (checkpoint.lsn, sample), self._write_back
        )
        progress.received_lsn = progress.acknowledged_lsn = progress.confirmed_lsn = checkpoint.lsn
        progress.last_heard = time.monotonic()
        progress.last_error = progress.last_hint = ""
        progress.enter("streaming")
        log.info("stream.started", slot=config.source.slot, lsn=checkpoint.lsn, epoch=checkpoint.epoch)
        try:
            await self._move(
                pipeline, source, session, checkpointer.tick, source.attend(), observe(config, self._metrics)
            )
        except (RelayError, BaseExceptionGroup) as exc:
            failure = decisive(exc)
            if isinstance(failure, ContractError) and decoder.commit_lsn < identity.end_lsn:
                failure = await self._outgrown(session, failure)
            if not isinstance(failure, SlotLost) or config.source.mode != "auto":
                raise
            self._lost = failure  # the next session replaces the slot and closes the gap from the table
            raise SourceUnavailable(str(failure), hint=failure.hint) from exc
        finally:
            # Whatever ended it: what is acknowledged shall not come again. If this fails, too, it will: no harm done.
            with suppress(RelayError):
                await checkpointer.save()

    async def _outgrown(self, session: Session, failure: ContractError) -> RelayError:
        """The WAL shows a table as it was. If it fits the configuration as it is now, its rows are taken from it."""
        try:
            await self._look_at_tables(session)
        except RelayError:
            return failure
        return SlotLost(f"the table was altered since these events were written: {failure}", hint=failure.hint)

    async def _move(
        self,
        pipeline: Pipeline,
        source: Source,
        session: Session,
        tick: Callable[[], Awaitable[None]],
        *beside: Coroutine[None, None, None],
    ) -> None:
        """Run the pipeline to its end, and beside it what must go on meanwhile."""
        self._pipeline = pipeline
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in (self._tick(session, tick), *beside)]
                if self._write_back is not None:
                    tasks.append(group.create_task(self._write_back.run()))
                try:
                    await self._run_and_mark(pipeline, source)
                finally:
                    for task in tasks:
                        task.cancel()
        finally:
            self._pipeline = None

    async def _run_and_mark(self, pipeline: Pipeline, source: Source) -> None:
        """Run the pipeline; then, unless we are cancelled, let write-back finish what it has."""
        try:
            await pipeline.run(source)
        except Exception:
            await self._marked()
            raise
        await self._marked()

    async def _marked(self) -> None:
        if self._write_back is None:
            return
        stopping = self._stopping.is_set()
        done = await self._write_back.caught_up(self._config.delivery.shutdown_timeout if stopping else PATIENCE)
        if stopping and not done:
            log.warning("write_back.left", rows=self._write_back.queued, hint="these rows stay as they are")

    async def _tick(self, session: Session, tick: Callable[[], Awaitable[None]]) -> None:
        reported = time.monotonic()
        while True:
            await tick()
            if time.monotonic() - reported > _PROGRESS_INTERVAL:
                reported = time.monotonic()
                log.info("relay.progress", **progress_line(self._metrics, clock=time.time()))
            # Not a plain sleep: this hears at once when Postgres ends the session (57P01), and then everything stops.
            with translated():
                async for _ in session.notifies(timeout=self._config.checkpoint.interval):
                    pass

    async def _unless_stopped(self, work: Coroutine[None, None, T]) -> T | None:
        """What it returns; None if we are told to stop before."""
        async with asyncio.TaskGroup() as group:
            task, stop = group.create_task(work), group.create_task(self._stopping.wait())
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            task.cancel()
            stop.cancel()
        return None if task.cancelled() else task.result()

    def _bind(self, table: str, columns: Sequence[tuple[str, int]]) -> tuple[Router, Binding] | None:
        for mapping in self._mappings:
            if mapping.table == table:
                binding = mapping.bind(columns)
                return self._route(binding), binding
        return None

    def _route(self, binding: Binding) -> Router:
        routing = self._config.outbox[binding.mapping.ordinal].routing or self._config.routing
        return Router(routing, binding, sink=self._config.sink.kind)

    def _stamp(self, identity: Identity, phase: str, detail: str) -> bytes:
        """The part of `relay-position` that a whole phase shares: relay, system, epoch, phase, timeline or gap."""
        name, epoch = self._config.relay.name, self._progress.epoch
        return f"{name}:{identity.system_identifier}:{epoch}:{phase}:{detail}:".encode()


def decisive(exc: BaseException) -> RelayError:
    """Of errors that happened together the one that decides. What is not ours is a bug, and goes up as it is."""
    leaves: list[BaseException] = []
    stack = [exc]
    while stack:
        each = stack.pop()
        if isinstance(each, BaseExceptionGroup):
            stack.extend(each.exceptions)
        else:
            leaves.append(each)
    ours = [leaf for leaf in leaves if isinstance(leaf, RelayError)]
    if len(ours) < len(leaves):
        raise exc
    return max(ours, key=_severity)


def _severity(failure: RelayError) -> int:
    if not isinstance(failure, TransientError):
        return 3 if isinstance(failure, OperatorError) else 4
    return 2 if isinstance(failure, Superseded) else 1
