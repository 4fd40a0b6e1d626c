"""Claiming in a life: what the workers of claim.py are given, what is saved meanwhile, and what goes on beside them.

The snapshot of the checkpoint stands still. What it sees is done, whatever the table says of it, and is never claimed.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from relay.checkpoint import Checkpoint, Sample
from relay.claim import Claims
from relay.claim_history import keep_history
from relay.errors import ContractError, RelayError
from relay.life_frame import Frame
from relay.life_move import requests, ticking
from relay.life_rounds import rounds
from relay.observer import observe
from relay.outbox import ClaimColumns
from relay.source.claim import ClaimTable
from relay.source.notify import listen

log = structlog.get_logger("relay.life")


async def claim(frame: Frame, checkpoint: Checkpoint, *, from_now: bool) -> None:
    """poll.strategy = "claim": the table says what is unpublished, of what the checkpoint does not see."""
    config, store, pipeline = frame.config, frame.store, frame.pipeline
    outboxes = {outbox.table: outbox for outbox in config.outbox}
    claims = {table: ClaimColumns.of(outbox, frame.tables.columns[table]) for table, outbox in outboxes.items()}
    if from_now and (blind := [mapping.table for mapping in frame.tables.mappings if not mapping.xid_column]):
        raise ContractError(
            f"{', '.join(blind)} has no xid column, so --from-now cannot tell old rows from new ones",
            hint="mark the old rows as published, then start without --from-now; or `relay setup --adopt`",
        )
    since = Sample(checkpoint.snap, checkpoint.snap_lsn)
    if checkpoint.recovery is not None:  # a round by snapshots was begun: what it published is marked nowhere
        since = (await rounds(frame, checkpoint, "poll", None, from_now=False, interval=0, single=True)).since
        if frame.stopping.is_set():
            return
    elif from_now:
        since = await store.sample()
    await store.save_polled("claim", since)
    if checkpoint.phase != "new":
        await frame.drop_slots("source.mode is poll")

    def tables(worker: int) -> list[ClaimTable]:
        return [
            ClaimTable(
                mapping,
                claims[mapping.table],
                frame.tables.columns[mapping.table],
                outboxes[mapping.table].routing or config.routing,
                config.poll,
                frame.tables.route,
                since=since.snapshot,
                worker=worker,
                stamp=frame.stamp("claim", str(mapping.ordinal)),
            )
            for mapping in frame.tables.mappings
        ]

    saved = dict(frame.coverage.marks)

    async def note() -> None:
        nonlocal saved
        frame.progress.server_lsn = (await store.sample()).lsn  # a sign of life
        if frame.coverage.marks != saved:
            marks = dict(frame.coverage.marks)
            await store.save_polled("claim", since, marks=marks)
            saved = marks

    workers = Claims(config, frame.sink, pipeline, frame.progress, frame.metrics, frame.stopping, tables)
    frame.progress.enter("polling")
    log.info("poll.started", strategy="claim", workers=config.poll.workers, since=str(since.snapshot))
    beside = [ticking(frame, note), observe(config, frame.metrics), *requests(frame, workers)]
    if all(mapping.xid_column for mapping in frame.tables.mappings):
        beside.append(keep_history(config, store, tables(0), frame.progress))
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
