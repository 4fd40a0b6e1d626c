"""One life with Postgres: from the lock to whatever ends the session. It streams; when it cannot, it polls (G5).

    first start, slot lost, interrupted recovery  →  recover: poll until a slot is ready  →  stream
    the audit found rows that the stream lacked   →  heal: publish those from the table    →  stream
    source.mode = "poll"                          →  poll for ever, by snapshots or by claims

What one life learns for the next is in `Memory`; everything that must survive a crash is in the checkpoint.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import structlog
from psycopg import sql

from relay.admin.status import progress_line
from relay.adopt import condition
from relay.anchor import keep
from relay.checkpoint import Checkpoint, CheckpointStore, Sample, guard
from relay.checkpointer import Checkpointer
from relay.claim import Claims
from relay.claim_history import keep_history
from relay.config import Checkpoint as CheckpointSection
from relay.config import Config
from relay.depth import depth_of
from relay.errors import (
    AuthError,
    ContractError,
    EventRejected,
    RelayError,
    SetupError,
    SlotGivenUp,
    SlotLost,
    SourceUnavailable,
    StreamIncomplete,
    decisive,
)
from relay.log import PROGRESS_INTERVAL
from relay.lsn import LSN, NOWHERE
from relay.metrics import Metrics
from relay.observer import observe
from relay.outbox import Binding, ClaimColumns, Mapping, mappings
from relay.pipeline import Pipeline
from relay.progress import Progress
from relay.recovery import check_publication, drop_slot, make_slot, making_session
from relay.requests import Injector, Requests
from relay.routing import Router
from relay.sink import ROUTING, UNCOUNTABLE, Sink
from relay.source import Source
from relay.source.claim import ClaimTable
from relay.source.decoder import Decoder
from relay.source.notify import listen
from relay.source.plugin import choose_decoder
from relay.source.poll import Gap, PollSource
from relay.source.replication import WalSender
from relay.source.session import Session, connect, translated
from relay.source.slot import Identity, identity_of, slot_fault, slot_info, table_columns
from relay.source.stream import StreamSource
from relay.writeback import PATIENCE, WriteBack

log = structlog.get_logger("relay.life")

_STEP = 0.1  # seconds between two looks at how much was published since the last checkpoint


@dataclass(slots=True)
class Memory:
    """What a life leaves to the next one."""

    lost: RelayError | None = None  # why streaming from the slot is not possible although it exists
    gave_up: bool = False  # the slot held too much WAL: catch up before making a new one
    incomplete: StreamIncomplete | None = None  # what the audit found
    failed_audits: int = 0  # in a row


class Life:
    """Uses the lock's session until it ends. `stop` drains."""

    def __init__(
        self,
        config: Config,
        session: Session,
        sink: Sink,
        progress: Progress,
        metrics: Metrics,
        stopping: asyncio.Event,
        memory: Memory,
        write_back: WriteBack | None,
    ) -> None:
        self._config = config
        self._session = session
        self._sink = sink
        self._progress = progress
        self._metrics = metrics
        self._stopping = stopping
        self._memory = memory
        self._write_back = write_back
        self._store = CheckpointStore(session, config.relay.name)
        self._pipeline = Pipeline(
            sink,
            config.delivery,
            progress,
            metrics,
            NOWHERE,
            write_back,
            opened=self._sink_opened,
            opening=self._prove,
            depth=depth_of(config),
        )
        self._begun: set[str] = set()  # destinations whose beginning is saved
        self._opened_before = False
        self._wal: WalSender | None = None
        self._rerouted = False  # the marks were made with another routing
        self._mappings: Sequence[Mapping] = ()
        self._columns: dict[str, dict[str, str]] = {}  # table → column → type
        self._identity = Identity("", 0, NOWHERE, "", 0)

    def stop(self) -> None:
        self._progress.enter("draining")
        self._pipeline.stop()

    async def run(self, *, from_now: bool) -> None:
        config, progress, store, memory = self._config, self._progress, self._store, self._memory
        self._mappings = await self._look_at_tables()
        identity = self._identity = await identity_of(self._session)
        checkpoint = await store.claim(identity.system_identifier, identity.timeline, config.source.slot)
        progress.epoch = checkpoint.epoch
        self._begun = set(checkpoint.marks)
        self._pipeline.marks = dict(checkpoint.readback)
        self._pipeline.origin = f"{config.relay.name}:{identity.system_identifier}-{identity.database_oid}"
        self._pipeline.routing = _fingerprint(config)
        self._rerouted = bool(checkpoint.marks) and checkpoint.marks.get(ROUTING) != self._pipeline.routing
        guard(checkpoint, identity.system_identifier, await store.sample())
        if config.source.mode == "poll":
            poll = self._claim if config.poll.strategy == "claim" else self._poll
            await poll(checkpoint, from_now=from_now and checkpoint.phase == "new")
            return
        if memory.incomplete is not None:
            # Another relay may have been at work meanwhile, and have found the same.
            if checkpoint.phase == "stream" and str(checkpoint.snap) == memory.incomplete.since:
                checkpoint = await self._heal(checkpoint, memory.incomplete)
            memory.incomplete = None
        else:
            self._pipeline.same_order = checkpoint.marks.get(ROUTING) == self._pipeline.routing
        if self._stopping.is_set():
            return
        try:
            if (fault := await self._fault(checkpoint)) is not None:
                self._pipeline.same_order = False
                checkpoint = await self._recover(checkpoint, fault, from_now=from_now and checkpoint.phase == "new")
        except (RelayError, BaseExceptionGroup) as exc:
            self._learn(decisive(exc))
            raise
        if not self._opened_before:  # straight to the stream: it goes on exactly where the LSN is
            self._pipeline.marks = dict(checkpoint.marks)
        if not self._stopping.is_set():
            await store.adopt(identity.system_identifier, identity.timeline, config.source.slot)
            await self._stream(checkpoint)

    async def _prove(self) -> None:
        """Before the sink is opened again: see that nobody took over meanwhile. At first we have just claimed it."""
        if self._opened_before:
            try:
                async with self._clerk() as store:
                    await store.prove()
            except RelayError:
                if self._wal is not None:
                    self._wal.close()  # as in _letting_go
                raise

    @asynccontextmanager
    async def _clerk(self) -> AsyncIterator[CheckpointStore]:
        """The checkpoint on a session of its own: the lock's one waits for notifications, up to a second at a time."""
        async with await connect(self._config.database, f"{self._config.relay.name} clerk") as session:
            yield self._store.on(session)

    async def _sink_opened(self) -> None:
        """Before anything is published: note where new destinations begin."""
        marks = self._pipeline.marks
        new = {name: mark for name, mark in marks.items() if name not in self._begun and name != UNCOUNTABLE}
        if self._rerouted:
            self._rerouted = False
            new[UNCOUNTABLE] = 1
        if marks:
            async with self._clerk() as store:
                if new:
                    self._begun |= new.keys()
                    await store.save_marks(new)
                # Whoever wrote to the broker before us had received it by now, so it was committed before this.
                self._pipeline.settled_at = (await store.sample()).lsn
        self._opened_before = True

    async def _look_at_tables(self) -> Sequence[Mapping]:
        """The mappings as the tables are now: one may have been adopted while we were away."""
        found = []
        for mapping in mappings(self._config.outbox):
            columns = await table_columns(self._session, mapping.table)
            if columns is None:
                raise ContractError(
                    f"the table {mapping.table} does not exist (or this role may not see its schema)",
                    hint="run `relay setup`, or name the right table in [[outbox]]",
                )
            self._columns[mapping.table] = columns
            if self._write_back is not None:
                await self._write_back.bind(self._session, mapping.table, columns)
            mapping.within(columns).bind([(name, 0) for name in columns])  # every column that the config names
            found.append(mapping.within(columns))
        return tuple(found)

    async def _fault(self, checkpoint: Checkpoint) -> SlotLost | None:
        """Why streaming cannot simply go on from the checkpoint, if recovery can cure it; raises what it cannot."""
        config, memory = self._config, self._memory
        if checkpoint.phase == "new":
            await check_publication(self._session, config)
            return SlotLost("this is the first start")
        slot = await slot_info(self._session, config.source.slot)
        fault = slot_fault(
            slot,
            plugin=config.source.plugin,
            database=self._identity.database,
            checkpoint_lsn=checkpoint.lsn if checkpoint.phase == "stream" else None,
            name=config.source.slot,
        )
        if config.source.mode == "stream" and checkpoint.phase == "stream":
            await check_publication(self._session, config)
            if fault is not None:
                raise fault
            return None
        if isinstance(fault, SlotLost):
            return fault
        if isinstance(fault, SetupError) and slot is not None and slot.plugin != config.source.plugin:
            return SlotLost(f"the configuration asks for another plugin: {fault}")
        if fault is not None:
            raise fault
        if checkpoint.phase != "stream":
            return SlotLost(f"it was interrupted while in phase {checkpoint.phase!r}")
        if memory.lost is not None:
            return SlotLost(str(memory.lost), hint=memory.lost.hint)
        if memory.failed_audits >= 2:
            return SlotLost("the stream lacked rows twice in a row")
        try:
            await check_publication(self._session, config)
        except SetupError as exc:
            return SlotLost(str(exc), hint=exc.hint)
        return None

    async def _recover(self, checkpoint: Checkpoint, fault: SlotLost, *, from_now: bool) -> Checkpoint:
        """Close the gap from the table, and make sure of a slot; returns the checkpoint to stream from."""
        config, progress, memory = self._config, self._progress, self._memory
        first = checkpoint.phase == "new"
        blind = [mapping.table for mapping in self._mappings if not mapping.recoverable]
        if blind and not first:
            raise SlotLost(
                f"{fault}; the gap cannot be closed from {', '.join(blind)}, which has no xid and seq columns",
                hint="publish again what was written since the checkpoint, then delete the row of "
                f"outbox_relay_checkpoint where relay = '{config.relay.name}' and start with --from-now; "
                "`relay setup --adopt` prevents this",
            )
        progress.enter("recovering")
        progress.recoveries += not first
        log.info("recovery.started", reason=str(fault), since=str(checkpoint.snap))
        if memory.lost is not None:
            if memory.gave_up:
                await self._drop_slots(str(memory.lost))
            else:
                await drop_slot(self._session, config.source.slot, reason=str(memory.lost))
            memory.lost = None
        started: list[LSN] = []
        before = progress.recovered_events
        source = await self._rounds(
            checkpoint,
            "recover",
            lambda source: self._get_ready(source, started, first=first),
            from_now=from_now,
            interval=config.poll.interval,
        )
        if self._stopping.is_set() or not started:
            return checkpoint
        marks = self._pipeline.marks
        await self._store.save(started[-1], source.since, marks=marks, readback=marks)
        memory.gave_up = False
        progress.last_error = progress.last_hint = ""
        log.info("recovery.done", events=progress.recovered_events - before, lsn=started[-1])
        return replace(
            checkpoint,
            lsn=started[-1],
            snap=source.since.snapshot,
            snap_lsn=source.since.lsn,
            phase="stream",
            recovery=None,
            unseen={},
        )

    async def _get_ready(self, source: PollSource, started: list[LSN], *, first: bool) -> None:
        """Get a slot to stream from, however long it takes; then let the polling finish."""
        config, progress = self._config, self._progress
        if self._memory.gave_up:
            await source.caught_up.wait()
        if self._memory.failed_audits > 1 and config.source.mode == "auto":
            await self._distrust(source)
        while True:
            try:
                async with await making_session(config) as session:
                    await check_publication(session, config)
                    wal = await self._walsender()
                    try:
                        started.append(await make_slot(config, session, wal, self._identity.database, ours=not first))
                    finally:
                        wal.close()
                source.finish()
                return
            except SourceUnavailable as exc:
                # Most often lock_timeout: slot creation waits for transactions that run in any database.
                log.warning("slot.waiting", error=exc)
                await asyncio.sleep(1.0)
            except (SetupError, AuthError, SlotLost) as exc:
                if first or config.source.mode != "auto":
                    raise
                progress.last_error, progress.last_hint = str(exc), exc.hint
                self._metrics.failed(exc)
                log.error("stream.unavailable", error=exc, retry_seconds=config.source.retry)  # noqa: TRY400  no traceback
                await asyncio.sleep(config.source.retry)
            if source.caught_up.is_set():
                progress.enter("polling")

    async def _distrust(self, source: PollSource) -> None:
        """The stream lacked rows again and again, and its publication may look right: poll for a while."""
        error = SlotLost(
            "the stream lacked rows of the table twice in a row: the table is polled",
            hint="find out what hides rows from the stream: `relay check`; a trigger or a producer that sets the xid "
            'column itself; until then source.mode = "poll" is quieter',
        )
        self._progress.last_error, self._progress.last_hint = str(error), error.hint
        log.error("stream.distrusted", error=error, retry_seconds=self._config.source.distrust)
        await source.caught_up.wait()
        self._progress.enter("polling")
        await asyncio.sleep(self._config.source.distrust)

    async def _poll(self, checkpoint: Checkpoint, *, from_now: bool) -> None:
        """source.mode = "poll": no slot, so none may hold WAL for us."""
        config = self._config
        blind = [mapping.table for mapping in self._mappings if not mapping.recoverable]
        if blind:
            raise ContractError(
                f"{', '.join(blind)} cannot be polled by snapshots: it has no xid and seq columns",
                hint='`relay setup --adopt` adds them; or set poll.strategy = "claim"',
            )
        if checkpoint.phase != "new":
            await self._drop_slots("source.mode is poll")
        self._progress.enter("polling")
        log.info("poll.started", interval=config.poll.interval, since=str(checkpoint.snap))
        await self._rounds(checkpoint, "poll", None, from_now=from_now, interval=config.poll.interval)

    async def _claim(self, checkpoint: Checkpoint, *, from_now: bool) -> None:
        """poll.strategy = "claim": the table says what is unpublished, of what the checkpoint does not see."""
        config, store, pipeline = self._config, self._store, self._pipeline
        outboxes = {outbox.table: outbox for outbox in config.outbox}
        claims = {table: ClaimColumns.of(outbox, self._columns[table]) for table, outbox in outboxes.items()}
        if from_now and (blind := [mapping.table for mapping in self._mappings if not mapping.xid_column]):
            raise ContractError(
                f"{', '.join(blind)} has no xid column, so --from-now cannot tell old rows from new ones",
                hint="mark the old rows as published, then start without --from-now; or `relay setup --adopt`",
            )
        since = Sample(checkpoint.snap, checkpoint.snap_lsn)
        if checkpoint.recovery is not None:  # a round by snapshots was begun: what it published is marked nowhere
            since = (await self._rounds(checkpoint, "poll", None, from_now=False, interval=0, single=True)).since
            if self._stopping.is_set():
                return
        elif from_now:
            since = await store.sample()
        await store.save_polled("claim", since)
        if checkpoint.phase != "new":
            await self._drop_slots("source.mode is poll")

        def tables(worker: int) -> list[ClaimTable]:
            return [
                ClaimTable(
                    mapping,
                    claims[mapping.table],
                    self._columns[mapping.table],
                    outboxes[mapping.table].routing or config.routing,
                    config.poll,
                    self._route,
                    since=since.snapshot,
                    worker=worker,
                    stamp=self._stamp("claim", str(mapping.ordinal)),
                )
                for mapping in self._mappings
            ]

        saved = dict(pipeline.marks)

        async def note() -> None:
            nonlocal saved
            self._progress.server_lsn = (await store.sample()).lsn  # a sign of life
            if pipeline.marks != saved:
                saved = dict(pipeline.marks)
                await store.save_polled("claim", since, marks=saved)

        workers = Claims(config, self._sink, pipeline, self._progress, self._metrics, self._stopping, tables)
        self._progress.enter("polling")
        log.info("poll.started", strategy="claim", workers=config.poll.workers, since=str(since.snapshot))
        beside = [self._tick(note), observe(config, self._metrics), *self._requests(workers)]
        if all(mapping.xid_column for mapping in self._mappings):
            beside.append(keep_history(config, store, tables(0), self._progress))
        if config.poll.notify:
            beside.append(listen(config, workers.wake))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in beside]
            try:
                await workers.run()
            finally:
                for task in tasks:
                    task.cancel()
        with suppress(RelayError):
            await note()

    async def _drop_slots(self, reason: str) -> None:
        """Let go of all WAL that is kept for us."""
        for name in (self._config.source.slot, self._config.source.anchor.slot):
            if name:
                await drop_slot(self._session, name, reason=reason)

    def _unpublished(self, *, claimed: bool) -> dict[str, sql.Composable]:
        """What a table's status says of its rows, where it has one; after claiming every table has one."""
        found = {each.table: each.unpublished for each in self._config.outbox}
        if claimed:
            found = {
                each.table: ClaimColumns.of(each, self._columns[each.table]).unpublished for each in self._config.outbox
            }
        return {table: condition(values) for table, values in found.items() if values}

    async def _heal(self, checkpoint: Checkpoint, found: StreamIncomplete) -> Checkpoint:
        """Publish from the table what the stream lacked; then go on where the stream was."""
        self._progress.enter("recovering")
        gap = Gap(found.since, found.until, found.until_lsn, xids=found.xids)
        await self._store.save_round("recover", gap.to_json())
        before = self._progress.recovered_events
        await self._rounds(
            replace(checkpoint, recovery=gap.to_json()), "recover", None, from_now=False, interval=0, single=True
        )
        if self._stopping.is_set():
            return checkpoint
        unseen = {**checkpoint.unseen, 0: checkpoint.unseen.get(0, 0) - found.counted}
        await self._store.save(checkpoint.lsn, gap.sample, unseen)
        log.warning("audit.healed", events=self._progress.recovered_events - before)
        return replace(checkpoint, snap=gap.sample.snapshot, snap_lsn=gap.sample.lsn, unseen=unseen, recovery=None)

    async def _rounds(
        self,
        checkpoint: Checkpoint,
        phase: str,
        beside: Callable[[PollSource], Coroutine[None, None, None]] | None,
        *,
        from_now: bool,
        interval: float,
        single: bool = False,
    ) -> PollSource:
        """Poll, and beside it get ready for something better; returns the source when it has ended."""
        store, pipeline = self._store, self._pipeline
        since = checkpoint.snap
        if from_now:  # durable before a slot is made: what is committed from now on is published
            sample = await store.sample()
            await store.save_polled(phase, sample)
            since = sample.snapshot
        pipeline.begin(NOWHERE)
        resumed = Gap.of(checkpoint.recovery) if checkpoint.recovery else None
        claimed = checkpoint.phase == "claim"
        options = "-c synchronous_commit=on"  # rounds are saved here: the lock's session waits for notifications
        async with await connect(self._config.database, f"{self._config.relay.name} poll", options=options) as reading:
            source = PollSource(
                reading,
                [mapping for mapping in self._mappings if mapping.recoverable],
                self._route,
                _Rounds(
                    store.on(reading), pipeline, phase, self._write_back, self._config.checkpoint, complete=not single
                ),
                self._progress,
                since=since,
                resumed=resumed,
                stamp=lambda round_: self._stamp("recovery", round_),
                interval=interval,
                single=single,
                # At the first start a table with a status says itself which of its rows nobody has published.
                only=self._unpublished(claimed=claimed or (resumed is not None and resumed.claimed)),
                claimed=claimed,
            )
            noted: Gap | None = None

            async def note_place() -> None:
                nonlocal noted
                reached = source.reached(pipeline.acknowledged)
                if reached is not None and source.persisted and reached != noted:
                    noted = reached
                    await store.save_round(phase, reached.to_json())
                else:
                    self._progress.server_lsn = (await store.sample()).lsn  # a sign of life

            more = [*self._requests()] if beside is None and not single else []
            if beside is not None:
                more.append(beside(source))
            if self._config.poll.notify and not single:
                more.append(listen(self._config, source.wake))
            if not self._stopping.is_set():
                await self._move(source, note_place, *more, *self._attendants())
                with suppress(RelayError):
                    await note_place()
            else:
                for each in more:
                    each.close()
        return source

    async def _stream(self, checkpoint: Checkpoint) -> None:
        config, progress = self._config, self._progress
        sample = Sample(checkpoint.snap, checkpoint.snap_lsn)
        decoder: Decoder | None = None
        try:
            wal = self._wal = await self._walsender()
            try:
                decoder, options = await choose_decoder(
                    self._session,
                    config,
                    start=checkpoint.lsn,
                    skip=sample if sample.lsn > checkpoint.lsn else None,
                    bind=self._bind,
                    stamp=self._stamp("stream", str(self._identity.timeline)),
                )
                await wal.start(config.source.slot, checkpoint.lsn, options)
                source = StreamSource(
                    wal,
                    decoder,
                    progress,
                    max_batch_events=config.delivery.max_batch_events,
                    silence=config.source.wal_sender_timeout,
                )
                await self._stream_from(source, checkpoint, sample)
            finally:
                wal.close()
        except (RelayError, BaseExceptionGroup) as exc:
            failure = decisive(exc)
            if isinstance(failure, EventRejected) and self._pipeline.marks:
                with suppress(RelayError):  # what is stored behind the rejected event is not one event per place
                    await self._store.save_marks({UNCOUNTABLE: 1})
            if isinstance(failure, ContractError) and decoder and decoder.commit_lsn < self._identity.end_lsn:
                failure = await self._outgrown(failure)
            self._learn(failure)
            ours = isinstance(failure, SlotLost | SetupError | AuthError) and failure is not self._pipeline.sink_failure
            if config.source.mode == "auto" and ours:
                # It streamed before, or a recovery got it ready: the table is polled until it streams again.
                self._memory.lost = failure if isinstance(failure, SlotLost) else None
                raise SourceUnavailable(str(failure), hint=failure.hint) from exc
            raise

    async def _outgrown(self, failure: ContractError) -> RelayError:
        """The WAL shows a table as it was. If it fits the configuration as it is now, its rows are taken from it."""
        try:
            await self._look_at_tables()
        except RelayError:
            return failure
        return SlotLost(f"the table was altered since these events were written: {failure}", hint=failure.hint)

    def _learn(self, failure: RelayError) -> None:
        if isinstance(failure, StreamIncomplete):
            self._memory.incomplete = failure
            self._memory.failed_audits += 1
        elif isinstance(failure, SlotGivenUp):
            self._memory.lost, self._memory.gave_up = failure, True

    async def _stream_from(self, source: StreamSource, checkpoint: Checkpoint, sample: Sample) -> None:
        config, progress, pipeline = self._config, self._progress, self._pipeline
        audited = self._mappings if all(mapping.recoverable for mapping in self._mappings) else ()
        checkpointer = Checkpointer(
            self._session,
            self._store,
            pipeline,
            source,
            progress,
            config.checkpoint,
            audited=audited if config.checkpoint.audit else (),
            saved=(checkpoint.lsn, sample, checkpoint.unseen),
            write_back=self._write_back,
        )
        pipeline.begin(checkpoint.lsn, checkpointer.audit)
        progress.received_lsn = progress.acknowledged_lsn = progress.confirmed_lsn = checkpoint.lsn
        progress.last_heard = time.monotonic()
        progress.last_error = progress.last_hint = ""
        progress.enter("streaming")
        log.info("stream.started", slot=config.source.slot, lsn=checkpoint.lsn, epoch=checkpoint.epoch)
        if self._stopping.is_set():  # told while we connected: `stop` found nothing to stop
            return

        async def tick() -> None:
            await checkpointer.tick()
            if checkpointer.agreed:
                self._memory.failed_audits = 0

        try:
            await self._move(source, tick, source.attend(), *self._attendants(), *self._requests())
        finally:
            # Whatever ended it: what is acknowledged shall not come again. If this fails, too, it will: no harm done.
            with suppress(RelayError):
                await checkpointer.save()

    def _attendants(self) -> list[Coroutine[None, None, None]]:
        """Who looks at the slots from outside."""
        anchored = self._config.source.anchor.slot and self._config.source.mode != "poll"
        return [observe(self._config, self._metrics), *([keep(self._config)] if anchored else [])]

    def _requests(self, injector: Injector | None = None) -> Sequence[Coroutine[None, None, None]]:
        """Serve requests, if ours is a sink that nobody else may write to."""
        if not Requests.needed(self._config):
            return ()

        async def distrust_counts() -> None:
            if self._pipeline.marks:
                await self._store.save_marks({UNCOUNTABLE: 1})

        def stamp(run: str) -> bytes:
            return self._stamp("replay", run)

        holder = injector or self._pipeline
        return (Requests(self._config, holder, self._progress, stamp, distrust_counts).run(),)

    async def _move(
        self, source: Source, tick: Callable[[], Awaitable[None]], *beside: Coroutine[None, None, None]
    ) -> None:
        """Run the pipeline to its end, and beside it what must go on meanwhile."""
        async with asyncio.TaskGroup() as group:
            if self._write_back is not None:
                beside = (*beside, self._write_back.run())
            tasks = [group.create_task(self._letting_go(each)) for each in (self._tick(tick), *beside)]
            try:
                await self._run_and_mark(source)
            finally:
                for task in tasks:
                    task.cancel()

    async def _run_and_mark(self, source: Source) -> None:
        """Run the pipeline; then, unless we are cancelled, let write-back finish what it has."""
        try:
            await self._pipeline.run(source)
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

    async def _letting_go(self, task: Coroutine[None, None, None]) -> None:
        """Whichever session fails first: Postgres may be stopping, and waits for our walsender. Let go of it now.

        The rest is cancelled, and may take long to end: then nobody would hear that Postgres stops (G11).
        """
        try:
            await task
        except RelayError:
            if self._wal is not None:
                self._wal.close()
            raise

    async def _tick(self, tick: Callable[[], Awaitable[None]]) -> None:
        reported = time.monotonic()
        while True:
            await tick()
            if time.monotonic() - reported > PROGRESS_INTERVAL:
                reported = time.monotonic()
                log.info("relay.progress", **progress_line(self._metrics, clock=time.time()))
            await self._pause()

    async def _pause(self) -> None:
        """Until the next tick: the interval. Without a fence also a window of events: more would come twice (G4)."""
        interval, published = self._config.checkpoint.interval, self._pipeline.published
        due = time.monotonic() + interval
        step = interval if self._pipeline.marks else min(interval, _STEP)
        while (left := due - time.monotonic()) > 0:
            # Not a plain sleep: this hears at once when Postgres ends the session (57P01), and then everything stops.
            with translated():
                async for _ in self._session.notifies(timeout=min(step, left)):
                    pass
            if self._pipeline.published - published >= self._config.delivery.max_in_flight_events:
                return

    async def _walsender(self) -> WalSender:
        source = self._config.source
        return await WalSender.connect(
            self._config.database,
            f"{self._config.relay.name} stream",
            timeout=source.wal_sender_timeout,
            lock_timeout=source.wal_sender_timeout,
        )

    def _bind(self, table: str, columns: Sequence[tuple[str, int]]) -> tuple[Router, Binding] | None:
        for mapping in self._mappings:
            if mapping.table == table:
                binding = mapping.bind(columns)
                return self._route(binding), binding
        return None

    def _route(self, binding: Binding) -> Router:
        routing = self._config.outbox[binding.mapping.ordinal].routing or self._config.routing
        return Router(routing, binding, sink=self._config.sink.kind)

    def _stamp(self, phase: str, detail: str) -> bytes:
        """The part of `relay-position` that a whole phase shares: relay, system, epoch, phase, timeline or round."""
        name, epoch = self._config.relay.name, self._progress.epoch
        identity = self._identity
        return f"{name}:{identity.system_identifier}-{identity.database_oid}:{epoch}:{phase}:{detail}:".encode()


def _fingerprint(config: Config) -> int:
    """Of everything that decides which events go where."""
    parts = [config.routing, *config.outbox, *config.sink.jetstream.streams]
    return zlib.crc32("".join(part.model_dump_json() for part in parts).encode())


class _Rounds:
    """What a poll source needs of the pipeline and of the store."""

    def __init__(
        self,
        store: CheckpointStore,
        pipeline: Pipeline,
        phase: str,
        write_back: WriteBack | None,
        history: CheckpointSection,
        *,
        complete: bool,
    ) -> None:
        """`complete`: its rounds show all that is committed, not only certain transactions."""
        self._complete = complete
        self._store = store
        self._pipeline = pipeline
        self._phase = phase
        self._write_back = write_back
        self._history = history
        self._remembered_at = time.monotonic()

    async def begin(self, gap: Gap) -> None:
        await self._store.save_round(self._phase, gap.to_json())

    async def drained(self) -> None:
        await self._pipeline.drained()

    async def done(self, gap: Gap) -> None:
        if self._write_back is not None:
            await self._write_back.caught_up()
        await self._store.save_polled(self._phase, gap.sample, marks=self._pipeline.marks)
        if self._complete:
            now = time.monotonic()
            if now - self._remembered_at >= self._history.history_interval:
                self._remembered_at = now
                await self._store.remember(gap.sample.lsn, gap.sample, self._history.history_retention)
            self._pipeline.settle()  # everything that was committed when the round began has been shown
