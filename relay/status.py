"""`relay status`: how the relay stands, from Postgres alone; so it works while the relay is down, or not set up yet.

It only reads. What it cannot know is None, never a guess: `pending` of a table without xid, `lag_bytes` without a slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import sql

from relay import __version__
from relay.backlog import backlog
from relay.config import Config
from relay.errors import AuthError
from relay.lsn import LSN
from relay.source.session import Session, connect, refuse_standby
from relay.source.slot import ServerInfo, SlotInfo, fetch, server_info, slot_info, table_info

if TYPE_CHECKING:
    from rich.console import RenderableType

_CHECKPOINT = "public.outbox_relay_checkpoint"
_DEAD_LETTERS = "public.outbox_dead_letters"
_PHASES = {
    "stream": "streaming",
    "poll": "polling",
    "claim": "polling",
    "recover": "recovering",
    "new": "recovering",
    "parked": "parked",
}
_STYLES = {"streaming": "green", "polling": "yellow", "recovering": "yellow", "stopped": "red", "parked": "red"}


async def status(config: Config) -> dict[str, Any]:
    """The face of `relay status --json`; raises when Postgres cannot be reached, or does not let us see."""
    # Counting a huge backlog must not keep the answer waiting for ever.
    async with await connect(config.database, "relay status", options="-c statement_timeout=30s") as session:
        await refuse_standby(session)
        await _refuse_blindness(session)
        return await read(session, config)


async def _refuse_blindness(session: Session) -> None:
    """A table that we may not read would look like one that is not there: the relay would seem never to have run."""
    found = [(table, await table_info(session, table)) for table in (_CHECKPOINT, _DEAD_LETTERS)]
    hidden = [table for table, info in found if info is not None and not info.can_select]
    if hidden:
        ((user,),) = await fetch(session, "SELECT current_user::text")
        role = sql.Identifier(user).as_string(None)
        raise AuthError(
            f"{user} may not read {', '.join(hidden)}",
            hint=f"GRANT USAGE ON SCHEMA public TO {role}; GRANT SELECT ON {', '.join(hidden)} TO {role};",
        )


async def read(session: Session, config: Config) -> dict[str, Any]:
    """The same, on a session that is there already."""
    server = await server_info(session)
    slot, anchor = await slot_info(session, config.source.slot), config.source.anchor.slot
    checkpoint = await _checkpoint(session, config.relay.name)
    waiting = await backlog(session, config, checkpoint)
    return {
        "relay": config.relay.name,
        "version": __version__,
        "server": {"version": server.version, "database": server.database, "timeline": server.timeline},
        "state": state_of(
            locked=await _locked(session, config.relay.name),
            slot_active=slot is not None and slot.active,
            phase=checkpoint["phase"] if checkpoint else None,
        ),
        **_lag(server, slot, checkpoint),
        "lag_seconds": waiting.oldest,
        "pending": waiting.pending,
        "average_pending_age_seconds": waiting.average,
        "dead_letters": _sum(await _dead_letters(session, config.relay.name), waiting.failed),
        "slot": _slot(server, slot, config.source.slot),
        "anchor": _slot(server, await slot_info(session, anchor), anchor) if anchor else None,
        "checkpoint": {key: checkpoint[key] for key in ("lsn", "epoch", "updated_at", "phase")} if checkpoint else None,
    }


def state_of(*, locked: bool, slot_active: bool, phase: str | None) -> str:
    """What the relay is doing, from the lock that it holds, its slot, and the phase that it saved. Pure."""
    if not locked:
        # Somebody else streams from our slot, or a dead relay's connection was not noticed yet: a new one stands by.
        return "standby" if slot_active else "stopped"
    state = _PHASES.get(phase or "new", "recovering")
    # It holds the lock but does not stream: connecting, waiting for the broker, or making its slot.
    return "recovering" if state == "streaming" and not slot_active else state


def _lag(server: ServerInfo, slot: SlotInfo | None, checkpoint: dict[str, Any] | None) -> dict[str, Any]:
    confirmed = slot.confirmed_flush_lsn if slot else None
    if confirmed is None and checkpoint is not None and checkpoint["phase"] != "new":
        confirmed = LSN.parse(checkpoint["lsn"])  # the slot is gone, but this much is published
    return {
        "confirmed_lsn": None if confirmed is None else str(confirmed),
        "lag_bytes": None if confirmed is None else max(0, server.wal_lsn - confirmed),
    }


def _slot(server: ServerInfo, slot: SlotInfo | None, name: str) -> dict[str, Any]:
    if slot is None:
        keys = ("wal_status", "safe_wal_size", "active", "restart_lsn", "retained_bytes", "invalidation_reason")
        return {"name": name, "exists": False, **dict.fromkeys(keys)}
    return {
        "name": name,
        "exists": True,
        "wal_status": slot.wal_status,
        "safe_wal_size": slot.safe_wal_size,
        "active": slot.active,
        "restart_lsn": None if slot.restart_lsn is None else str(slot.restart_lsn),
        "retained_bytes": None if slot.restart_lsn is None else max(0, server.wal_lsn - slot.restart_lsn),
        "invalidation_reason": slot.invalidation_reason,
    }


async def _checkpoint(session: Session, relay: str) -> dict[str, Any] | None:
    if not await _readable(session, _CHECKPOINT):
        return None
    rows = await fetch(
        session,
        """
        SELECT to_jsonb(c) || jsonb_build_object('lsn', c.lsn::text, 'snap', c.snap::text)
        FROM public.outbox_relay_checkpoint c WHERE relay = %s
        """,
        relay,
    )
    found: dict[str, Any] | None = rows[0][0] if rows else None
    return found


async def _locked(session: Session, relay: str) -> bool:
    # A bigint key is shown in halves, with objsubid 1.
    rows = await fetch(
        session,
        """
        SELECT EXISTS (
            SELECT FROM pg_locks, hashtextextended('outbox_relay:' || %s, 0) AS key
            WHERE locktype = 'advisory' AND granted AND objsubid = 1
              AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
              AND classid::bigint = (key >> 32) & 4294967295 AND objid::bigint = key & 4294967295)
        """,
        relay,
    )
    return bool(rows[0][0])


def _sum(*counts: int | None) -> int | None:
    """Of what is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


async def _dead_letters(session: Session, relay: str) -> int | None:
    if not await _readable(session, _DEAD_LETTERS):
        return None
    query = "SELECT count(*) FROM public.outbox_dead_letters WHERE relay = %s AND state <> 'resolved'"
    return int((await fetch(session, query, relay))[0][0])


async def _readable(session: Session, table: str) -> bool:
    info = await table_info(session, table)
    return info is not None and info.can_select


def render(status: dict[str, Any], *, polls: bool = False) -> RenderableType:
    """For people. `polls`: by its configuration the relay has no slot."""
    from rich.table import Table  # noqa: PLC0415  the running relay reads the status, too, and shows it to nobody
    from rich.text import Text  # noqa: PLC0415

    slot, checkpoint = status["slot"], status["checkpoint"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("relay", f"{status['relay']} (version {status['version']})")
    table.add_row("state", Text(status["state"], style=_STYLES.get(status["state"], "")))
    table.add_row("confirmed", _shown(status["confirmed_lsn"]))
    table.add_row("lag", f"{_bytes(status['lag_bytes'])}, oldest event {_seconds(status['lag_seconds'])}")
    table.add_row("pending", _shown(status["pending"]))
    table.add_row("dead letters", _shown(status["dead_letters"]))
    if slot["exists"]:
        lost = f", lost: {slot['invalidation_reason']}" if slot["invalidation_reason"] else ""
        use = "in use" if slot["active"] else "not in use"
        table.add_row("slot", f"{slot['name']}, {use}, WAL {_shown(slot['wal_status'])}{lost}")
        table.add_row("WAL kept", f"{_bytes(slot['retained_bytes'])}, until lost {_bytes(slot['safe_wal_size'])}")
    elif polls:
        table.add_row("slot", 'none: source.mode is "poll"')
    else:
        table.add_row("slot", f"{slot['name']} does not exist (the first `relay run` makes it)")
    if anchor := status["anchor"]:
        kept = f"keeps {_bytes(anchor['retained_bytes'])}" if anchor["exists"] else "does not exist"
        table.add_row("anchor", f"{anchor['name']} {kept}")
    if checkpoint:
        at = (
            f"{checkpoint['lsn']}, epoch {checkpoint['epoch']}, phase {checkpoint['phase']}, {checkpoint['updated_at']}"
        )
        table.add_row("checkpoint", at)
    else:
        table.add_row("checkpoint", "none yet")
    return table


def _shown(value: object) -> str:
    return "unknown" if value is None else str(value)


def _bytes(count: int | None) -> str:
    if count is None:
        return "unknown"
    for unit, factor in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} s"
