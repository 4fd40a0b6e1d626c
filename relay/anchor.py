"""The anchor: a second slot, kept behind on purpose, so that what was streamed can be read from the WAL again.

The active relay makes it (a copy of its own slot: at once, without waiting for anybody) and moves it on: to what is
older than `retention`, and further when it holds more WAL than it may. It gives way before it can endanger the
primary's disk: near the server's own limit it is dropped, and made anew when there is room. Nothing depends on it but
`relay replay --exact`; it is never streamed from, only copied. A slot that is not ours is never touched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import structlog

from relay.config import Anchor, Config
from relay.errors import RelayError, SetupError, SlotBusy, SlotLost
from relay.history import Known, Point, shown
from relay.lsn import LSN
from relay.observer import danger
from relay.recovery import drop_slot
from relay.source.selection import Cut, Window
from relay.source.session import LASTING, Session, connect
from relay.source.slot import ServerInfo, SlotInfo, fetch, server_info, slot_info

log = structlog.get_logger("relay.anchor")

# ------------------------------------------------------------------------------------------------------- keeping it


@dataclass(frozen=True, slots=True)
class Decision:
    action: Literal["nothing", "create", "advance", "drop", "refuse"]
    reason: str = ""
    to: LSN | None = None


def decide(
    anchor: SlotInfo | None, main: SlotInfo | None, server: ServerInfo, aged: LSN | None, settings: Anchor
) -> Decision:
    """What to do with the anchor now. `aged`: the newest LSN that is older than the retention. Pure."""
    end = server.wal_lsn
    if anchor is None:
        usable = main is not None and main.confirmed_flush_lsn is not None and main.wal_status != "lost"
        return Decision("create") if usable and main is not None and not _endangered(main, end) else Decision("nothing")
    if anchor.slot_type != "logical" or anchor.database != server.database:
        return Decision("refuse", f"the slot {anchor.name} is not a logical one of this database")
    if anchor.wal_status == "lost" or anchor.invalidation_reason:
        return Decision("drop", f"it was invalidated: {anchor.invalidation_reason or 'its WAL was removed'}")
    if anchor.active or anchor.confirmed_flush_lsn is None or anchor.restart_lsn is None:
        return Decision("nothing")  # somebody is just making, copying or advancing it
    if _endangered(anchor, end):
        return Decision("drop", "Postgres is about to remove the WAL that it needs")
    bound = min(settings.max_wal, (server.max_slot_wal_keep_size or 2 * settings.max_wal) // 2)
    goal, reason = anchor.confirmed_flush_lsn, ""
    if aged is not None and aged > goal:
        goal, reason = aged, "age"
    if end - anchor.restart_lsn > bound and end - bound > goal:
        goal, reason = LSN(end - bound), "size"
    if main is not None and main.confirmed_flush_lsn is not None:  # ahead of it there is nothing to replay
        goal = max(anchor.confirmed_flush_lsn, min(goal, main.confirmed_flush_lsn))
    # Also to where it is: that lets restart_lsn follow, and tells an idle_replication_slot_timeout that it is in use.
    return Decision("advance", reason, goal)


def _endangered(slot: SlotInfo, end: LSN) -> bool:
    retained = None if slot.restart_lsn is None else max(0, end - slot.restart_lsn)
    return bool(
        danger({"wal_status": slot.wal_status, "safe_wal_size": slot.safe_wal_size, "retained_bytes": retained})
    )


async def keep(config: Config) -> None:
    """Look after the anchor until cancelled; raises when Postgres goes away, as the other sessions do."""
    settings = config.source.anchor
    interval = min(60.0, max(0.2, settings.retention / 20))
    refused = ""
    async with await connect(config.database, f"{config.relay.name} anchor", options=LASTING) as session:
        while True:
            try:
                refused = await _look_after(session, config, refused)
            except (SetupError, SlotBusy, SlotLost) as exc:  # no free slot, no right, somebody was faster
                if str(exc) != refused:
                    log.warning("anchor.failed", slot=settings.slot, error=exc)
                refused = str(exc)
            await asyncio.sleep(interval)


async def _look_after(session: Session, config: Config, refused: str) -> str:
    """One look; returns what it refused to touch, and why: said once."""
    settings, name = config.source.anchor, config.source.anchor.slot
    await fetch(session, _REMEMBER, config.relay.name)
    ((aged,),) = await fetch(session, _AGED, config.relay.name, settings.retention)
    decision = decide(
        await slot_info(session, name),
        await slot_info(session, config.source.slot),
        await server_info(session),
        None if aged is None else LSN.parse(aged),
        settings,
    )
    match decision.action:
        case "create":
            await fetch(session, COPY, config.source.slot, name)
            log.info("anchor.created", slot=name)
        case "drop":
            await drop_slot(session, name, reason=decision.reason)
        case "advance":
            await fetch(session, "SELECT pg_replication_slot_advance(%s, %s::pg_lsn)", name, str(decision.to))
            if decision.reason:
                log.debug("anchor.advanced", slot=name, lsn=decision.to, reason=decision.reason)
        case "refuse" if decision.reason != refused:
            log.warning("anchor.refused", slot=name, reason=decision.reason, hint="name another in source.anchor.slot")
    return decision.reason if decision.action == "refuse" else ""


COPY = "SELECT pg_copy_logical_replication_slot(%s, %s)"

# The history is the log of (time, LSN). While the outbox is idle and others write, the relay adds nothing to it: here
# the checkpoint is added, if it has moved. What it says is true of it, whoever wrote it down.
_REMEMBER = """
    INSERT INTO public.outbox_relay_history (relay, at, lsn, snap, snap_lsn, wal_lsn)
    SELECT relay, now(), lsn, snap, snap_lsn, pg_current_wal_insert_lsn() FROM public.outbox_relay_checkpoint c
    WHERE relay = %s AND phase = 'stream'
      AND NOT EXISTS (SELECT FROM public.outbox_relay_history h WHERE h.relay = c.relay AND h.lsn >= c.lsn)
    RETURNING relay
"""
_AGED = """
    SELECT max(lsn)::text FROM public.outbox_relay_history
    WHERE relay = %s AND at <= now() - make_interval(secs => %s)
"""


# ------------------------------------------------------------------------------------------------------ reading it


@dataclass(frozen=True, slots=True)
class Bounds:
    """A wish for an exact replay: one beginning, at most one end; points as they are in the history."""

    lsn: LSN | None = None
    at: datetime | None = None
    mark: Point | None = None
    to_lsn: LSN | None = None
    until: datetime | None = None
    to_mark: Point | None = None


def window(known: Known, held: LSN, bounds: Bounds) -> Window:
    """The part of the WAL to read, and which transactions of it count; `held` is where the anchor is. Pure.

    Raises SetupError for a window that begins before the anchor, naming the earliest point that is possible.
    """
    published = _cut(known.now)
    stop = max(known.now.lsn, known.now.snap_lsn or known.now.lsn)
    cuts = [published]
    if bounds.to_lsn is not None:
        cuts.append(Cut(str(bounds.to_lsn)))
        stop = min(stop, bounds.to_lsn)
    if bounds.to_mark is not None:
        cuts.append(_cut(bounds.to_mark))
    if bounds.until is not None:  # at that time the WAL was at most as long as when the next row was written
        later = (point.wal_lsn for point in known.history if point.at >= bounds.until and point.wal_lsn)
        stop = min(stop, next(later, stop))
    begin = _begin(known.history, held, bounds)
    return Window(
        str(begin),
        str(stop),
        tuple(cuts),
        seen=bounds.mark.snap if bounds.mark is not None else None,
        since=bounds.at.timestamp() if bounds.at is not None else None,
        until=bounds.until.timestamp() if bounds.until is not None else None,
    )


def _cut(point: Point) -> Cut:
    return Cut(str(point.lsn), point.snap)


def _begin(history: Sequence[Point], held: LSN, bounds: Bounds) -> LSN:
    # What was committed before a row's LSN was committed before its time. So rows from the anchor on date the WAL.
    dated = [point for point in history if point.lsn >= held]
    if bounds.at is not None:
        before = [point.lsn for point in dated if point.at <= bounds.at]
        if before:
            return max(before)
        wanted = shown(bounds.at)
    else:
        lsn = bounds.lsn if bounds.lsn is not None else bounds.mark.lsn if bounds.mark is not None else held
        if lsn >= held:
            return lsn
        wanted = str(lsn)
    since = f" ({shown(dated[0].at)})" if dated else ""
    raise SetupError(
        f"the anchor does not reach back to {wanted}; the earliest point is {held}{since}",
        hint=f"replay from there (--exact --from-lsn {held}), or without --exact from the table; how far the anchor "
        "stays behind say source.anchor.retention and max_wal",
    )


async def exact_window(session: Session, config: Config, known: Known, bounds: Bounds) -> Window:
    """The same, after a look at the anchor; raises SetupError when there is none to read from."""
    name = config.source.anchor.slot
    anchor = await slot_info(session, name)
    fault: RelayError | None = None
    if anchor is None:
        fault = SetupError(f"the anchor slot {name} does not exist", hint="the relay makes it while it streams")
    elif anchor.wal_status == "lost" or anchor.invalidation_reason:
        fault = SetupError(f"the anchor slot {name} is lost", hint="the active relay makes it anew; raise the limit")
    elif anchor.slot_type != "logical" or anchor.confirmed_flush_lsn is None:
        fault = SetupError(f"the slot {name} cannot be an anchor", hint="name another in source.anchor.slot")
    if fault is not None:
        raise fault
    assert anchor is not None and anchor.confirmed_flush_lsn is not None
    return window(known, anchor.confirmed_flush_lsn, bounds)
