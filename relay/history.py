"""Points in the past, and the snapshots that go with them: from an LSN, a time or a bookmark to "what it did not see".

A row of history says: everything that its snapshot sees was published, and committed before its LSN and its time. So a
replay from a point begins with the last row at or before it, and over-delivers by at most the interval between two. One
that ends at a point needs a snapshot that was taken behind it. Pure, but for reading the rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from relay.errors import ConfigError, SetupError
from relay.lsn import LSN
from relay.source.session import Session
from relay.source.slot import fetch

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Point(NamedTuple):
    at: datetime
    lsn: LSN
    snap: str
    snap_lsn: LSN | None = None  # where the WAL ended when the snapshot was taken
    wal_lsn: LSN | None = None  # … and when the row was written

    @property
    def behind(self) -> LSN:
        """Behind everything that the snapshot sees. While polling, the checkpoint's LSN stands still."""
        return self.lsn if self.snap_lsn is None else max(self.lsn, self.snap_lsn)


class Known(NamedTuple):
    """The points of one relay, oldest first; the last one is the checkpoint."""

    history: Sequence[Point]
    now: Point
    claimed: str | None = None  # the snapshot that claiming began with; `now` sees everything, published or not


async def known_points(session: Session, relay: str) -> Known:
    """Raises SetupError when the relay has not published anything yet."""
    rows = await fetch(
        session,
        # Claiming says in the table what is published, and leaves the checkpoint's LSN and snapshot alone.
        "SELECT CASE WHEN claimed THEN now() ELSE updated_at END,"
        " CASE WHEN claimed THEN pg_current_wal_insert_lsn() ELSE lsn END::text,"
        " CASE WHEN claimed THEN pg_current_snapshot() ELSE snap END::text,"
        " CASE WHEN claimed THEN pg_current_wal_insert_lsn() ELSE snap_lsn END::text, NULL,"
        " CASE WHEN claimed THEN snap END::text"
        " FROM public.outbox_relay_checkpoint, LATERAL (SELECT phase = 'claim' AS claimed) c"
        " WHERE relay = %s AND phase <> 'new'",
        relay,
    )
    if not rows:
        raise SetupError(
            f"the relay {relay!r} has not published anything yet: there is nothing to replay",
            hint="start it with `relay run`; or name the right one under [relay] name",
        )
    history = await fetch(
        session,
        "SELECT at, lsn::text, snap::text, snap_lsn::text, wal_lsn::text FROM public.outbox_relay_history"
        " WHERE relay = %s ORDER BY at",
        relay,
    )
    *now, claimed = rows[0]
    return Known([_point(*row) for row in history], _point(*now), claimed)


def _point(at: datetime, lsn: str, snap: str, snap_lsn: str | None, wal_lsn: str | None) -> Point:
    return Point(
        at, LSN.parse(lsn), snap, LSN.parse(snap_lsn) if snap_lsn else None, LSN.parse(wal_lsn) if wal_lsn else None
    )


def start(known: Known, *, lsn: LSN | None = None, at: datetime | None = None) -> Point:
    """The last point at or before; raises SetupError when history does not reach back that far."""
    points = [*known.history, known.now]
    for point in reversed(points):
        if (lsn is not None and point.behind <= lsn) or (at is not None and point.at <= at):
            return point
    oldest = points[0]
    raise SetupError(
        f"the history does not reach back to {lsn if lsn is not None else shown(at)}; "
        f"the earliest point is {oldest.behind} ({shown(oldest.at)})",
        hint=f"replay from there (--from-lsn {oldest.behind}), or by --seq what the table still holds; how long the "
        "history is kept says checkpoint.history_retention",
    )


def end(known: Known, *, lsn: LSN | None = None, at: datetime | None = None) -> Point:
    """The first point whose snapshot was taken behind it; the checkpoint, if none was."""
    if at is not None:
        # At that time the WAL was at most as long as when the next row was written.
        lsn = next((point.wal_lsn for point in known.history if point.at >= at and point.wal_lsn), None)
    if lsn is not None:
        for point in known.history:
            if point.snap_lsn is not None and point.snap_lsn >= lsn:
                return point
    return known.now


def parse_time(text: str, now: datetime) -> datetime:
    """ISO 8601 (without a zone: UTC), or how long ago: 90s, 15m, 2h, 3d."""
    try:
        if match := re.fullmatch(r"(\d+)([smhd])", text.strip()):
            return now - timedelta(seconds=int(match[1]) * _UNITS[match[2]])
        at = datetime.fromisoformat(text.strip())
        at.astimezone(UTC)
    except (ValueError, OverflowError):  # also a time before the first year, or behind the last
        raise ConfigError(
            [f"not a time: {text!r}"], hint="write 2026-11-16T12:00:00Z, or how long ago: 90s, 15m, 2h, 3d"
        ) from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def parse_lsn(text: str) -> LSN:
    try:
        return LSN.parse(text)
    except ValueError as exc:
        raise ConfigError([str(exc)]) from None


def shown(at: datetime | None) -> str:
    return "" if at is None else at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
