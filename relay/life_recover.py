"""Recovering in a life: the table is polled until there is a slot to stream from. The argument is in recovery.py.

However long the slot takes, rows are published meanwhile. Where the gap cannot be closed from the table, nothing is
skipped: it stops. At the first start, and with source.mode = "stream", what a person must cure stops it, too.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from relay.checkpoint import Checkpoint
from relay.errors import AuthError, SetupError, SlotLost, SourceUnavailable
from relay.life_frame import Frame
from relay.life_memory import Memory
from relay.life_rounds import rounds
from relay.lsn import LSN
from relay.recovery import check_publication, drop_slot, make_slot, making_session
from relay.source.poll import PollSource

log = structlog.get_logger("relay.life")


async def recover(
    frame: Frame, memory: Memory, checkpoint: Checkpoint, fault: SlotLost, *, from_now: bool
) -> Checkpoint:
    """Close the gap from the table, and make sure of a slot; returns the checkpoint to stream from."""
    config, progress = frame.config, frame.progress
    first = checkpoint.phase == "new"
    blind = [mapping.table for mapping in frame.tables.mappings if not mapping.recoverable]
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
            await frame.drop_slots(str(memory.lost))
        else:
            await drop_slot(frame.session, config.source.slot, reason=str(memory.lost))
        memory.lost = None
    started: list[LSN] = []
    before = progress.recovered_events
    source = await rounds(
        frame,
        checkpoint,
        "recover",
        lambda source: _get_ready(frame, memory, source, started, first=first),
        from_now=from_now,
        interval=config.poll.interval,
    )
    if frame.stopping.is_set() or not started:
        return checkpoint
    marks = frame.coverage.marks
    await frame.store.save(started[-1], source.since, marks=marks, readback=marks)
    memory.gave_up = False
    progress.last_error = progress.last_hint = ""
    progress.unstreamed(None)
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


async def _get_ready(frame: Frame, memory: Memory, source: PollSource, started: list[LSN], *, first: bool) -> None:
    """Get a slot to stream from, however long it takes; then let the polling finish."""
    config, progress = frame.config, frame.progress
    if memory.gave_up:
        await source.caught_up.wait()
    if memory.failed_audits > 1 and config.source.mode == "auto":
        await _distrust(frame, source)
    while True:
        try:
            async with await making_session(config) as session:
                await check_publication(session, config)
                wal = await frame.walsender()
                try:
                    started.append(await make_slot(config, session, wal, frame.identity.database, ours=not first))
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
            progress.unstreamed(exc)
            frame.metrics.failed(exc)
            log.error("stream.unavailable", error=exc, retry_seconds=config.source.retry)  # noqa: TRY400  no traceback
            await asyncio.sleep(config.source.retry)
        if source.caught_up.is_set():
            progress.enter("polling")


async def _distrust(frame: Frame, source: PollSource) -> None:
    """The stream lacked rows again and again, and its publication may look right: poll for a while."""
    error = SlotLost(
        "the stream lacked rows of the table twice in a row: the table is polled",
        hint="find out what hides rows from the stream: `relay check`; a trigger or a producer that sets the xid "
        'column itself; until then source.mode = "poll" is quieter',
    )
    frame.progress.unstreamed(error)
    log.error("stream.distrusted", error=error, retry_seconds=frame.config.source.distrust)
    await source.caught_up.wait()
    frame.progress.enter("polling")
    await asyncio.sleep(frame.config.source.distrust)
