"""Bookmarks: named points of a relay, to replay from. A bookmark outlives the history, and is exact."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from relay.config import Config
from relay.errors import ConfigError, SetupError
from relay.history import known_points, parse_lsn, parse_time, start
from relay.lsn import LSN
from relay.source.session import Session, connect
from relay.source.slot import fetch


@dataclass(frozen=True, slots=True)
class Bookmark:
    name: str
    at: datetime
    lsn: LSN
    snap: str


async def add(config: Config, name: str, *, lsn: str | None = None, at: str | None = None) -> Bookmark:
    """Name the point of now, that is everything that the checkpoint covers; or the last one before a point."""
    if lsn is not None and at is not None:
        raise ConfigError(["give --lsn or --at, not both"])
    if not name.strip():
        raise ConfigError(["a bookmark needs a name"])
    async with await connect(config.database, "relay bookmark") as session:
        known = await known_points(session, config.relay.name)
        point = known.now
        if lsn is not None:
            point = start(known, lsn=parse_lsn(lsn))
        elif at is not None:
            point = start(known, at=parse_time(at, datetime.now(UTC)))
        elif known.claimed:  # its newest point of which everything is published
            if not known.history:
                raise SetupError(
                    "while claiming, only the history knows points, and it has none yet",
                    hint="wait for checkpoint.history_interval; tables without an xid column have no history",
                )
            point = known.history[-1]
        rows = await fetch(
            session,
            "INSERT INTO public.outbox_relay_bookmarks (relay, name, at, lsn, snap)"
            " VALUES (%s, %s, %s, %s, %s::pg_snapshot) ON CONFLICT (relay, name) DO NOTHING RETURNING at",
            config.relay.name,
            name,
            point.at,
            str(point.lsn),
            point.snap,
        )
    if not rows:
        raise ConfigError(
            [f"there is a bookmark {name!r} already"], hint=f"take another name, or `relay bookmark remove {name}`"
        )
    return Bookmark(name, point.at, point.lsn, point.snap)


async def listed(config: Config) -> list[Bookmark]:
    async with await connect(config.database, "relay bookmark") as session:
        return await _read(session, config.relay.name)


async def remove(config: Config, name: str) -> None:
    async with await connect(config.database, "relay bookmark") as session:
        await find(session, config.relay.name, name)
        await fetch(
            session,
            "DELETE FROM public.outbox_relay_bookmarks WHERE relay = %s AND name = %s RETURNING name",
            config.relay.name,
            name,
        )


async def find(session: Session, relay: str, name: str) -> Bookmark:
    bookmarks = await _read(session, relay)
    for bookmark in bookmarks:
        if bookmark.name == name:
            return bookmark
    names = ", ".join(bookmark.name for bookmark in bookmarks) or "none"
    raise SetupError(f"there is no bookmark {name!r} (there are: {names})", hint="`relay bookmark list` shows them")


async def _read(session: Session, relay: str) -> list[Bookmark]:
    rows = await fetch(
        session,
        "SELECT name, at, lsn::text, snap::text FROM public.outbox_relay_bookmarks WHERE relay = %s ORDER BY at, name",
        relay,
    )
    return [Bookmark(name, at, LSN.parse(lsn), snap) for name, at, lsn, snap in rows]
