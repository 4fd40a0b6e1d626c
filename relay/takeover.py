"""`relay takeover`: make the active relay let go, so that a stand-by becomes active. Nothing is lost by it.

It ends the sessions of the active relay in Postgres: the one that holds the lock, and the one that streams. A healthy
relay then comes back as a stand-by; a frozen one finds itself superseded when it wakes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from psycopg import sql

from relay.config import Config
from relay.errors import AuthError
from relay.singleton import TAKEOVER
from relay.source.session import Session, connect, refuse_standby
from relay.source.slot import fetch

_PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A session that was ended."""

    pid: int
    role: str  # lock | stream
    application_name: str | None
    client: str | None


async def takeover(config: Config) -> list[Ended]:
    """End the sessions of the active relay; empty if there is none."""
    async with await connect(config.database, "relay takeover") as session:
        await refuse_standby(session)
        await fetch(session, f"SELECT pg_try_advisory_lock({TAKEOVER})", config.relay.name)
        ended = []
        for pid, role, name, client in await fetch(session, _SESSIONS, config.relay.name, config.source.slot):
            # Waits until it is gone. False: it went by itself, as the stream does when the lock is lost.
            try:
                await fetch(session, "SELECT pg_terminate_backend(%s, 5000)", pid)
            except AuthError as exc:
                raise AuthError(str(exc), hint=await _allowance(session, str(exc))) from exc
            ended.append(Ended(pid, role, name, client))
        deadline = time.monotonic() + _PATIENCE
        while ended and time.monotonic() < deadline:  # until a stand-by has it; without any, the old one comes back
            pids = {row[0] for row in await fetch(session, _SESSIONS, config.relay.name, config.source.slot)}
            if pids - {each.pid for each in ended}:
                break
            await asyncio.sleep(0.05)
    return ended


async def _allowance(session: Session, refusal: str) -> str:
    if "pg_signal_backend" not in refusal:  # a superuser's session: that right does not reach it
        return "the relay runs as a superuser: run this as one, too, or let the relay have a role of its own"
    ((user,),) = await fetch(session, "SELECT current_user::text")
    return f"GRANT pg_signal_backend TO {sql.Identifier(user).as_string(None)};"


_SESSIONS = """
    SELECT DISTINCT s.pid, s.role, a.application_name, host(a.client_addr)
    FROM (SELECT l.pid, 'lock' AS role
          FROM pg_locks l, hashtextextended('outbox_relay:' || %s, 0) AS key
          WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
            AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND l.classid::bigint = (key >> 32) & 4294967295 AND l.objid::bigint = key & 4294967295
          UNION ALL
          SELECT active_pid, 'stream' FROM pg_replication_slots WHERE slot_name = %s AND active) s
    LEFT JOIN pg_stat_activity a ON a.pid = s.pid
"""
