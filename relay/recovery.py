"""Recovery: closing the gap from the table when there is no slot to trust. The first start is a recovery, too.

    1  slot      a healthy slot is kept, a lost one replaced; P := where it begins to stream
    2  barrier   burn a transaction id A; wait until every transaction older than A is over
    3  gap       take a snapshot E; persist (id, S, E, P) before anything is published
    4  publish   the rows visible in E and not in S, through the ordinary pipeline
    5  done      checkpoint := (P, E); stream from P, skipping transactions that E sees

Why nothing is lost. Take any committed transaction T. If S sees it, it was published before (checkpoint.py). Else if
E sees it, step 4 publishes it. Else T left the list of running transactions after E was taken; were its commit record
before P, its id would be below A, and by the barrier E would see it: so its commit is after P, the slot delivers it,
and it is not skipped because E does not see it. (`pg_snapshot_xmax` in place of the barrier is wrong: transactions
that wait for a synchronous standby are in the WAL before they are visible.) Duplicates: only what was published after
S was promoted, or between a crash and the last persisted place. Every step can be repeated after a crash.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from relay.checkpoint import Checkpoint, CheckpointStore, Sample, Snapshot
from relay.config import Config
from relay.errors import SlotLost
from relay.lsn import LSN
from relay.source.replication import WalSender
from relay.source.session import Session, translated
from relay.source.slot import slot_fault, slot_info

log = structlog.get_logger("relay.recovery")


@dataclass(frozen=True, slots=True)
class Gap:
    """A recovery under way, as it is persisted."""

    id: str
    since: str  # S
    until: str  # E
    until_lsn: str
    start: str  # P
    table: int = 0  # the place up to which rows are acknowledged
    seq: int | None = None

    @property
    def sample(self) -> Sample:
        return Sample(Snapshot.parse(self.until), LSN.parse(self.until_lsn))

    @property
    def after(self) -> tuple[int, int]:
        return self.table, -(1 << 63) if self.seq is None else self.seq

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


async def open_gap(
    config: Config,
    session: Session,
    store: CheckpointStore,
    wal: WalSender,
    checkpoint: Checkpoint,
    database: str,
    *,
    from_now: bool,
) -> Gap:
    """Steps 1 to 3, or what is left of them after a restart."""
    since = (await store.sample()).snapshot if from_now else checkpoint.snap
    persisted = Gap(**checkpoint.recovery) if checkpoint.recovery else None
    slot = await slot_info(session, config.source.slot)
    trusted = LSN.parse(persisted.start) if persisted else None
    fault = slot_fault(
        slot, plugin=config.source.plugin, database=database, checkpoint_lsn=trusted, name=config.source.slot
    )
    if persisted and fault is None:
        log.info("recovery.resumed", recovery=persisted.id, table=persisted.table, seq=persisted.seq)
        return persisted
    start = await _slot(config, session, wal, database)
    await _barrier(session)
    sample = await store.sample()
    gap = Gap(uuid.uuid4().hex[:12], str(since), str(sample.snapshot), str(sample.lsn), str(start))
    await store.save_recovery(gap.to_json())
    return gap


async def _slot(config: Config, session: Session, wal: WalSender, database: str) -> LSN:
    name, plugin = config.source.slot, config.source.plugin
    slot = await slot_info(session, name)
    fault = slot_fault(slot, plugin=plugin, database=database, checkpoint_lsn=None, name=name)
    if fault is None:
        assert slot is not None and slot.confirmed_flush_lsn is not None
        return slot.confirmed_flush_lsn
    if not isinstance(fault, SlotLost):
        raise fault
    if slot is not None:
        with translated():
            await session.execute("SELECT pg_drop_replication_slot(%s)", (name,))
        log.warning("slot.dropped", slot=name, reason=str(fault))
    started = time.monotonic()
    start = await wal.create_slot(name, plugin)
    log.info("slot.created", slot=name, plugin=plugin, lsn=start, seconds=round(time.monotonic() - started, 3))
    return start


async def _barrier(session: Session) -> None:
    """Wait until every transaction that runs now is over: then a snapshot sees all commits up to now."""
    with translated():
        row = await (await session.execute("SELECT pg_current_xact_id()::text")).fetchone()
    assert row is not None
    burnt, started, told = int(row[0]), time.monotonic(), 0.0
    while True:
        with translated():
            cursor = await session.execute("SELECT pg_snapshot_xmin(pg_current_snapshot())::text")
            row = await cursor.fetchone()
        assert row is not None
        if int(row[0]) >= burnt:
            return
        waited = time.monotonic() - started
        if waited - told > 5:
            told = waited
            log.warning(
                "recovery.waiting",
                seconds=round(waited),
                hint="an old transaction is still open: SELECT pid, xact_start, query FROM pg_stat_activity "
                "WHERE backend_xid IS NOT NULL ORDER BY xact_start; SELECT * FROM pg_prepared_xacts;",
            )
        await asyncio.sleep(min(0.5, 0.01 + waited / 4))
