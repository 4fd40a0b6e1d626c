"""History while claiming: points to replay from, although the snapshot of the checkpoint stands still.

A point is a snapshot of which everything is published. Here the table says what is: a snapshot is taken, and remembered
when none of the rows that it sees is open any more. A row that waits for its next attempt delays that; one that was
left for good does not. Only for tables with an xid column: without it nobody knows what a snapshot sees.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from relay.checkpoint import CheckpointStore, Snapshot
from relay.config import Config
from relay.progress import Progress
from relay.source.claim import ClaimTable
from relay.source.session import LASTING, Session, connect

_SHARE = 0.02  # of the time at most is spent on looking


async def keep_history(
    config: Config, store: CheckpointStore, tables: Sequence[ClaimTable], progress: Progress
) -> None:
    """Until cancelled; raises when Postgres goes away, as the other sessions do."""
    settings, remembered = config.checkpoint, 0
    async with await connect(config.database, f"{config.relay.name} history", options=LASTING) as session:
        clerk = store.on(session)
        sample = await clerk.sample()
        await _published(session, tables, sample.snapshot, settings.interval)
        await clerk.begin_history(sample.lsn, sample)
        while True:
            await asyncio.sleep(settings.history_interval)
            published = progress.published_events
            if published == remembered:
                continue
            sample = await clerk.sample()
            await _published(session, tables, sample.snapshot, settings.interval)
            await clerk.remember(sample.lsn, sample, settings.history_retention)
            remembered = published


async def _published(session: Session, tables: Sequence[ClaimTable], snapshot: Snapshot, interval: float) -> None:
    """Wait until none of the rows that the snapshot sees is open."""
    for table in tables:
        started = time.monotonic()
        while await table.open_in(session, snapshot):
            await asyncio.sleep(max(interval, (time.monotonic() - started) / _SHARE))
            started = time.monotonic()
