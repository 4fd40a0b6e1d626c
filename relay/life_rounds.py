"""Rounds by snapshots in a life: to poll for ever, to heal what an audit found, and while a recovery gets a slot.

They go through the same pipeline as the stream. A place in a round is saved only up to where it is acknowledged, and a
round is never closed before all of it is: what a round is, and why it loses nothing, is in source/poll.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace

import structlog

from relay.checkpoint import Checkpoint, CheckpointStore
from relay.config import Checkpoint as CheckpointSection
from relay.errors import ContractError, RelayError, StreamIncomplete
from relay.life_frame import Frame
from relay.life_move import attendants, move, requests
from relay.lsn import NOWHERE
from relay.pipeline import Pipeline
from relay.source.notify import listen
from relay.source.poll import Gap, PollSource
from relay.source.session import LASTING, connect
from relay.writeback import WriteBack

log = structlog.get_logger("relay.life")


async def poll(frame: Frame, checkpoint: Checkpoint, *, from_now: bool) -> None:
    """source.mode = "poll": no slot, so none may hold WAL for us."""
    config = frame.config
    blind = [mapping.table for mapping in frame.tables.mappings if not mapping.recoverable]
    if blind:
        raise ContractError(
            f"{', '.join(blind)} cannot be polled by snapshots: it has no xid and seq columns",
            hint='`relay setup --adopt` adds them; or set poll.strategy = "claim"',
        )
    if checkpoint.phase != "new":
        await frame.drop_slots("source.mode is poll")
    frame.progress.enter("polling")
    log.info("poll.started", interval=config.poll.interval, since=str(checkpoint.snap))
    await rounds(frame, checkpoint, "poll", None, from_now=from_now, interval=config.poll.interval)


async def heal(frame: Frame, checkpoint: Checkpoint, found: StreamIncomplete) -> Checkpoint:
    """Publish from the table what the stream lacked; then go on where the stream was."""
    frame.progress.enter("recovering")
    gap = Gap(found.since, found.until, found.until_lsn, xids=found.xids)
    await frame.store.save_round("recover", gap.to_json())
    before = frame.progress.recovered_events
    await rounds(
        frame, replace(checkpoint, recovery=gap.to_json()), "recover", None, from_now=False, interval=0, single=True
    )
    if frame.stopping.is_set():
        return checkpoint
    unseen = {**checkpoint.unseen, 0: checkpoint.unseen.get(0, 0) - found.counted}
    await frame.store.save(checkpoint.lsn, gap.sample, unseen)
    log.warning("audit.healed", events=frame.progress.recovered_events - before)
    return replace(checkpoint, snap=gap.sample.snapshot, snap_lsn=gap.sample.lsn, unseen=unseen, recovery=None)


async def rounds(
    frame: Frame,
    checkpoint: Checkpoint,
    phase: str,
    beside: Callable[[PollSource], Coroutine[None, None, None]] | None,
    *,
    from_now: bool,
    interval: float,
    single: bool = False,
) -> PollSource:
    """Poll, and beside it get ready for something better; returns the source when it has ended."""
    store, pipeline = frame.store, frame.pipeline
    since = checkpoint.snap
    if from_now:  # durable before a slot is made: what is committed from now on is published
        sample = await store.sample()
        await store.save_polled(phase, sample)
        since = sample.snapshot
    pipeline.begin(NOWHERE)
    resumed = Gap.of(checkpoint.recovery) if checkpoint.recovery else None
    claimed = checkpoint.phase == "claim"
    # Rounds are saved here: the lock's session waits for notifications.
    options = f"{LASTING} -c synchronous_commit=on"
    async with await connect(frame.config.database, f"{frame.config.relay.name} poll", options=options) as reading:
        ours = _Rounds(
            store.on(reading), pipeline, phase, frame.write_back, frame.config.checkpoint, complete=not single
        )
        source = PollSource(
            reading,
            [mapping for mapping in frame.tables.mappings if mapping.recoverable],
            frame.tables.route,
            ours,
            frame.progress,
            since=since,
            resumed=resumed,
            stamp=lambda round_: frame.stamp("recovery", round_),
            interval=interval,
            single=single,
            # At the first start a table with a status says itself which of its rows nobody has published.
            only=frame.tables.unpublished(claimed=claimed or (resumed is not None and resumed.claimed)),
            claimed=claimed,
        )
        noted: Gap | None = None

        async def note_place() -> None:
            nonlocal noted
            async with ours.saving:
                reached = source.reached(pipeline.acknowledged)
                if reached is not None and source.persisted and reached != noted:
                    await store.save_round(phase, reached.to_json())
                    noted = reached
                    return
            frame.progress.server_lsn = (await store.sample()).lsn  # a sign of life

        async def begin_history() -> None:
            await source.caught_up.wait()
            await store.begin_history(source.since.lsn, source.since)

        more = [*requests(frame)] if beside is None and not single else []
        if not single:
            more.append(begin_history())
        if beside is not None:
            more.append(beside(source))
        if frame.config.poll.notify and not single:
            more.append(listen(frame.config, source.wake))
        if not frame.stopping.is_set():
            await move(frame, source, note_place, *more, *attendants(frame))
            with suppress(RelayError):
                await note_place()
        else:
            for each in more:
                each.close()
    return source


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
        # Two sessions write: a place that is saved behind its round's end would open the round again.
        self.saving = asyncio.Lock()

    async def begin(self, gap: Gap) -> None:
        await self._store.save_round(self._phase, gap.to_json())

    async def drained(self) -> None:
        await self._pipeline.drained()

    async def done(self, gap: Gap) -> None:
        if self._write_back is not None:
            await self._write_back.caught_up()
        async with self.saving:  # to the end: when it is let go, the source is between rounds
            await self._store.save_polled(self._phase, gap.sample, marks=self._pipeline.coverage.marks)
            if self._complete:
                now = time.monotonic()
                if now - self._remembered_at >= self._history.history_interval:
                    self._remembered_at = now
                    await self._store.remember(gap.sample.lsn, gap.sample, self._history.history_retention)
                self._pipeline.coverage.settle(gap.sample.snapshot.xmin)
