"""`relay adopt-timeline`: an operator's decision, when the checkpoint does not belong to the server that is there now.

The relay never decides this by itself: after a dump and restore, the transaction ids in the table mean nothing, and a
checkpoint that is ahead of the server would make new events look published. It changes the checkpoint's row only, and
only when there is something to decide: on the server that the checkpoint is of, it would throw away what is pending.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relay.checkpoint import EMPTY, Snapshot
from relay.config import Config
from relay.errors import SetupError, SlotBusy
from relay.lsn import LSN
from relay.source.session import connect, refuse_standby, translated
from relay.source.slot import fetch, server_info

Published = Literal["checkpoint", "nothing", "everything"]
PUBLISHED: dict[str, Published] = {"checkpoint": "checkpoint", "nothing": "nothing", "everything": "everything"}


@dataclass(frozen=True, slots=True)
class Adopted:
    """What was written."""

    relay: str
    before: str  # system identifier
    system_identifier: str
    timeline: int
    published: Published
    snapshot: str


async def adopt_timeline(config: Config, published: Published) -> Adopted:
    """Let the checkpoint belong to this server. `published`: what to believe of the rows in the table.

    checkpoint   the saved snapshot still holds (pg_upgrade, a move by physical copy)
    nothing      publish the whole table again (dump and restore)
    everything   publish nothing of what is there now, only what comes (dump and restore, consumers are up to date)
    """
    async with await connect(config.database, "relay adopt-timeline") as session:
        await refuse_standby(session)
        if not (await fetch(session, _LOCK, config.relay.name))[0][0]:
            raise SlotBusy(
                f"the relay {config.relay.name} is running (it holds its lock)",
                hint="stop it before, with all stand-bys",
            )
        rows = await fetch(session, _SAVED, config.relay.name)
        if not rows:
            raise SetupError(
                f"there is no checkpoint of the relay {config.relay.name}",
                hint="nothing to adopt: `relay run` begins as if for the first time",
            )
        before, timeline, lsn, snap, undecided = rows[0]
        saved = Snapshot.parse(snap)
        server = await server_info(session)
        now = Snapshot.parse((await fetch(session, "SELECT pg_current_snapshot()::text"))[0][0])
        ahead = LSN.parse(lsn) > server.wal_lsn or saved.xmax > now.xmax  # copied or edited: `run` refuses it
        if (before, timeline) == (server.system_identifier, server.timeline) and not ahead and not undecided:
            raise SetupError(
                "nothing to adopt: the checkpoint is of this server",
                hint="`relay run` goes on from it; to publish again what the table holds: `relay replay`",
            )
        snapshot = _believed(published, saved, now)
        with translated():
            await session.execute(_WRITE, (server.system_identifier, server.timeline, str(snapshot), config.relay.name))
    return Adopted(config.relay.name, before, server.system_identifier, server.timeline, published, str(snapshot))


def _believed(published: Published, saved: Snapshot, now: Snapshot) -> Snapshot:
    if published == "nothing":
        return EMPTY
    if published == "everything":
        return now
    if saved.xmax > now.xmax:
        raise SetupError(
            f"the checkpoint's snapshot {saved} is ahead of this server ({now}): new events would look published",
            hint="choose --published nothing (publishes the whole table) or --published everything (only new events)",
        )
    return saved


_LOCK = "SELECT pg_try_advisory_lock(hashtextextended('outbox_relay:' || %s, 0))"
# The last column: as _WRITE leaves it. Until the relay has run, the operator may decide otherwise.
_SAVED = """
    SELECT system_identifier, timeline, lsn::text, snap::text,
           phase = 'recover' AND snap_lsn = '0/0' AND recovery IS NULL
    FROM public.outbox_relay_checkpoint WHERE relay = %s
"""
# The phase sends the next start through a recovery: it closes the gap from the table, and makes sure of a slot. Marks
# in the broker stay: they are the broker's truth, not the server's.
_WRITE = """
    UPDATE public.outbox_relay_checkpoint
    SET system_identifier = %s, timeline = %s, snap = %s::pg_snapshot, snap_lsn = '0/0', lsn = '0/1', phase = 'recover',
        unseen = '{}', recovery = NULL, epoch = epoch + 1, updated_at = now()
    WHERE relay = %s
"""
