"""Streaming in a life: from the checkpoint on until something ends it, and what the next life learns from that.

The walsender is closed on every way out. Nothing is confirmed here: that is the checkpointer's.
"""

from __future__ import annotations

import time
from contextlib import suppress

import structlog

from relay.checkpoint import Checkpoint, Sample
from relay.checkpointer import Checkpointer
from relay.errors import (
    AuthError,
    ContractError,
    EventRejected,
    RelayError,
    SetupError,
    SlotLost,
    SourceUnavailable,
    decisive,
)
from relay.life_frame import Frame
from relay.life_memory import Memory
from relay.life_move import attendants, move, requests
from relay.sink import UNCOUNTABLE
from relay.source.decoder import Decoder
from relay.source.plugin import choose_decoder
from relay.source.stream import StreamSource

log = structlog.get_logger("relay.life")


async def stream(frame: Frame, memory: Memory, checkpoint: Checkpoint) -> None:
    config, progress = frame.config, frame.progress
    sample = Sample(checkpoint.snap, checkpoint.snap_lsn)
    decoder: Decoder | None = None
    try:
        wal = frame.wal = await frame.walsender()
        try:
            decoder, options = await choose_decoder(
                frame.session,
                config,
                start=checkpoint.lsn,
                skip=sample if sample.lsn > checkpoint.lsn else None,
                bind=frame.tables.bind,
                stamp=frame.stamp("stream", str(frame.identity.timeline)),
            )
            await wal.start(config.source.slot, checkpoint.lsn, options)
            source = StreamSource(
                wal,
                decoder,
                progress,
                max_batch_events=config.delivery.max_batch_events,
                silence=config.source.wal_sender_timeout,
            )
            await _stream_from(frame, memory, source, checkpoint, sample)
        finally:
            wal.close()
    except (RelayError, BaseExceptionGroup) as exc:
        failure = decisive(exc)
        if isinstance(failure, EventRejected) and frame.coverage.marks:
            with suppress(RelayError):  # what is stored behind the rejected event is not one event per place
                await frame.store.save_marks({UNCOUNTABLE: 1})
        if isinstance(failure, ContractError) and decoder and decoder.commit_lsn < frame.identity.end_lsn:
            failure = await _outgrown(frame, failure)
        memory.learn(failure)
        ours = isinstance(failure, SlotLost | SetupError | AuthError) and failure is not frame.pipeline.sink_failure
        if config.source.mode == "auto" and ours:
            # It streamed before, or a recovery got it ready: the table is polled until it streams again.
            memory.lost = failure if isinstance(failure, SlotLost) else None
            raise SourceUnavailable(str(failure), hint=failure.hint) from exc
        raise


async def _stream_from(
    frame: Frame, memory: Memory, source: StreamSource, checkpoint: Checkpoint, sample: Sample
) -> None:
    config, progress, pipeline = frame.config, frame.progress, frame.pipeline
    audited = frame.tables.mappings if all(mapping.recoverable for mapping in frame.tables.mappings) else ()
    checkpointer = Checkpointer(
        frame.session,
        frame.store,
        pipeline,
        source,
        progress,
        config.checkpoint,
        audited=audited if config.checkpoint.audit else (),
        saved=(checkpoint.lsn, sample, checkpoint.unseen),
        write_back=frame.write_back,
    )
    pipeline.begin(checkpoint.lsn, checkpointer.audit)
    progress.received_lsn = progress.acknowledged_lsn = progress.confirmed_lsn = checkpoint.lsn
    progress.last_heard = time.monotonic()
    progress.last_error = progress.last_hint = ""
    progress.unstreamed(None)
    progress.enter("streaming")
    log.info("stream.started", slot=config.source.slot, lsn=checkpoint.lsn, epoch=checkpoint.epoch)
    await checkpointer.begin()
    if frame.stopping.is_set():  # told while we connected: `stop` found nothing to stop
        return

    async def tick() -> None:
        await checkpointer.tick()
        if checkpointer.agreed:
            memory.failed_audits = 0

    try:
        await move(frame, source, tick, source.attend(), *attendants(frame), *requests(frame))
    finally:
        # Whatever ended it: what is acknowledged shall not come again. If this fails, too, it will: no harm done.
        with suppress(RelayError):
            await checkpointer.save()


async def _outgrown(frame: Frame, failure: ContractError) -> RelayError:
    """The WAL shows a table as it was. If it fits the configuration as it is now, its rows are taken from it."""
    try:
        await frame.tables.look(frame.session)
    except RelayError:
        return failure
    return SlotLost(f"the table was altered since these events were written: {failure}", hint=failure.hint)
