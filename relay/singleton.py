"""One active relay per database and name: an advisory lock, held by the session that also saves the checkpoint.

A second relay stands by and tries again twice a second (waiting inside `pg_advisory_lock` would hold back the
database's xmin). A frozen process loses the lock by `idle_session_timeout`; losing the session stops the publishing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from relay.config import Config
from relay.errors import SetupError, SourceUnavailable
from relay.progress import Progress
from relay.source.session import Session, connect, translated

log = structlog.get_logger("relay.singleton")

STANDBY_INTERVAL = 0.5
_LOCK = "SELECT pg_try_advisory_lock(hashtextextended('outbox_relay:' || %s, 0))"
# `relay takeover` holds this one while it looks for a successor: whoever was active before lets others go first.
TAKEOVER = "hashtextextended('outbox_relay_takeover:' || %s, 0)"
_ASIDE = f"SELECT NOT (pg_try_advisory_lock_shared({TAKEOVER}) AND pg_advisory_unlock_shared({TAKEOVER}))"


@asynccontextmanager
async def hold_lock(config: Config, progress: Progress, stopping: asyncio.Event) -> AsyncIterator[Session | None]:
    """The session that holds the lock; None when told to stop while standing by."""
    session = await connect(
        config.database,
        config.relay.name,
        options=f"-c idle_session_timeout={int(config.source.wal_sender_timeout * 1000)} -c synchronous_commit=on",
    )
    try:
        await _refuse_strangers(session)
        while not stopping.is_set():
            if progress.epoch and await _step_aside(session, config.relay.name):
                if progress.enter("standby"):
                    log.info("relay.standing_by", reason="an operator asked for a takeover")
                await pause(stopping, STANDBY_INTERVAL)
                continue
            with translated():
                row = await (await session.execute(_LOCK, (config.relay.name,))).fetchone()
            if row and row[0]:
                yield session
                return
            if progress.enter("standby"):
                log.info("relay.standing_by", reason="another relay of this name holds the lock")
            await pause(stopping, STANDBY_INTERVAL)
        yield None
    finally:
        await session.close()


async def _step_aside(session: Session, relay: str) -> bool:
    with translated():
        row = await (await session.execute(_ASIDE, (relay, relay))).fetchone()
    return bool(row and row[0])


async def _refuse_strangers(session: Session) -> None:
    """Locks need the same backend for ever, and snapshots of a standby do not list running transactions."""
    with translated():
        row = await (await session.execute("SELECT pg_backend_pid(), pg_is_in_recovery()")).fetchone()
    assert row is not None
    if row[0] != session.info.backend_pid:
        raise SetupError(
            "a connection pooler stands between the relay and Postgres: locks and replication need a session",
            hint="let database.dsn reach Postgres directly",
        )
    if row[1]:
        raise SourceUnavailable(
            "this server is a standby: events are read from the primary",
            hint="let database.dsn name the primary, or all servers with target_session_attrs=read-write",
        )


async def pause(stopping: asyncio.Event, seconds: float) -> None:
    """Sleep, but not longer than until we are told to stop."""
    try:
        await asyncio.wait_for(stopping.wait(), seconds)
    except TimeoutError:
        return
