"""Recovery: closing the gap from the table when there is no slot to trust. The first start is a recovery, too.

    1  slot      a healthy slot is kept, a lost one of ours replaced; P := where it begins to stream
    2  barrier   burn a transaction id A; wait until every transaction older than A is over
    3  round     take a snapshot E; persist (S, E) before anything is published
    4  publish   the rows visible in E and not in S, through the ordinary pipeline
    5  done      checkpoint := (P, E); stream from P, skipping transactions that E sees

Steps 1 and 2 may wait for other people's transactions; meanwhile the table is polled, round after round (S → E → S …).

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

import structlog

from relay.config import Config
from relay.errors import SetupError, SlotLost
from relay.lsn import LSN
from relay.source.replication import WalSender
from relay.source.session import LASTING, Session, burn_xid, connect, oldest_xid, translated
from relay.source.slot import SlotInfo, publication_info, slot_fault, slot_info

log = structlog.get_logger("relay.recovery")


async def make_slot(config: Config, session: Session, wal: WalSender, database: str, *, ours: bool) -> LSN:
    """Steps 1 and 2: a slot to stream from, and P. `ours`: we have streamed from a slot of this name before."""
    name, plugin = config.source.slot, config.source.plugin
    slot = await slot_info(session, name)
    fault = slot_fault(slot, plugin=plugin, database=database, checkpoint_lsn=None, name=name)
    if fault is None:
        assert slot is not None and slot.confirmed_flush_lsn is not None
        start = slot.confirmed_flush_lsn
        log.info("slot.kept", slot=name, lsn=start)
    else:
        if slot is not None:
            if not isinstance(fault, SlotLost) and not (ours and _replaceable(slot, database)):
                raise fault
            await drop_slot(session, name, reason=str(fault))
        started = time.monotonic()
        start = await wal.create_slot(name, plugin, failover=config.source.failover)
        log.info("slot.created", slot=name, plugin=plugin, lsn=start, seconds=round(time.monotonic() - started, 3))
    await _barrier(session)
    return start


def _replaceable(slot: SlotInfo, database: str) -> bool:
    """A slot of ours with another plugin: the configuration has changed. What somebody uses is never touched."""
    return slot.slot_type == "logical" and slot.database == database and not slot.active


async def drop_slot(session: Session, name: str, *, reason: str) -> None:
    """Drop it if it is a logical slot of this database that nobody uses; another one is not ours."""
    with translated():
        cursor = await session.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE slot_name = %s AND NOT active AND slot_type = 'logical' AND database = current_database()",
            (name,),
        )
    if cursor.rowcount:
        log.warning("slot.dropped", slot=name, reason=reason)


async def check_publication(session: Session, config: Config) -> None:
    """Since PostgreSQL 18 a missing publication streams nothing and says nothing: refuse it before."""
    if config.source.plugin != "pgoutput":
        return
    name = config.source.publication
    publication = await publication_info(session, name)
    if not publication.exists:
        raise SetupError(f"the publication {name} does not exist", hint="run `relay setup`")
    if not publication.insert:
        raise SetupError(
            f"the publication {name} does not publish inserts",
            hint=f"ALTER PUBLICATION {name} SET (publish = 'insert');",
        )
    for outbox in config.outbox:
        published = publication.tables.get(outbox.table)
        if published is None and not publication.all_tables:
            raise SetupError(
                f"the publication {name} does not contain {outbox.table}",
                hint=f"run `relay setup`, or: ALTER PUBLICATION {name} ADD TABLE {outbox.table};",
            )
        if published is not None and published.row_filter:
            raise SetupError(
                f"the publication {name} has a row filter on {outbox.table}: it hides events",
                hint=f"ALTER PUBLICATION {name} SET TABLE {outbox.table};",
            )


async def _barrier(session: Session) -> None:
    """Wait until every transaction that runs now is over: then a snapshot sees all commits up to now."""
    burnt, started, told = await burn_xid(session), time.monotonic(), 0.0
    while await oldest_xid(session) < burnt:
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


async def making_session(config: Config) -> Session:
    """A session for steps 1 and 2: they may wait long, and the lock's session must go on giving signs of life."""
    return await connect(config.database, f"{config.relay.name} recovery", options=LASTING)
