"""The checkpoint: what is done, what may be confirmed, and where that is saved.

Every second or so the primary is sampled: (S, L) = (pg_current_snapshot(), pg_current_wal_insert_lsn()), in this order.
A transaction visible in S has its commit record before L (the WAL insert precedes the removal from the list of running
transactions). So when everything before L is acknowledged, everything visible in S is published: S is *promoted*.

Saved are the acknowledged LSN and the newest promoted S, in one row of the same database, so that both travel with
failover and point-in-time recovery. Only then is the LSN confirmed: slot.confirmed_flush_lsn <= checkpoint.lsn always.
Nothing here may run on a standby: snapshots taken there do not list running transactions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, LiteralString, NamedTuple

import orjson

from relay.errors import SetupError, Superseded
from relay.lsn import LSN
from relay.source.session import Session, burn_xid, translated


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pg_snapshot: which transactions (64-bit ids) were over when it was taken."""

    xmin: int
    xmax: int
    running: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        try:
            xmin, xmax, running = text.split(":")
            return cls(int(xmin), int(xmax), frozenset(int(x) for x in running.split(",") if x))
        except ValueError:
            raise ValueError(f"not a pg_snapshot: {text!r}") from None

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(str(x) for x in sorted(self.running))}"

    def sees(self, xid: int) -> bool:
        return xid < self.xmin or (xid < self.xmax and xid not in self.running)

    def widen(self, xid: int) -> int:
        """The 64-bit id of a 32-bit one that is at most two thousand million away from this snapshot."""
        wide = (self.xmax & ~0xFFFFFFFF) | xid
        if wide - self.xmax > 0x7FFFFFFF:
            return wide - 0x100000000
        return wide if self.xmax - wide <= 0x7FFFFFFF else wide + 0x100000000


EMPTY = Snapshot(3, 3)
"""Sees nothing: 3 is the first transaction id a database hands out."""


class Sample(NamedTuple):
    snapshot: Snapshot
    lsn: LSN


Unseen = dict[int, int]
"""xid → events published before the checkpoint's LSN, of transactions that its snapshot does not see: for the audit.

Under 0 stand together those that a newer sample saw when it was saved: every snapshot from then on sees them.
"""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The saved row."""

    epoch: int
    system_identifier: str
    timeline: int
    slot: str
    lsn: LSN  # everything committed before this is published
    snap: Snapshot  # every transaction visible here is published
    snap_lsn: LSN  # end of WAL when snap was taken: behind it no transaction can be visible in snap
    phase: str  # new | recover | poll | stream
    recovery: dict[str, Any] | None  # the round of polling that is under way
    unseen: Unseen = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)  # how far the broker's destinations are covered by `lsn`
    readback: dict[str, int] = field(default_factory=dict)  # … by `snap`: what a recovery has to look behind


_COLUMNS = (
    "epoch, system_identifier, timeline, slot, lsn::text, snap::text, snap_lsn::text, phase, recovery::text,"
    " unseen::text, sink::text, readback::text"
)


class CheckpointStore:
    """The row of one relay. Every write is fenced by the epoch: a relay that was superseded saves nothing."""

    def __init__(self, session: Session, relay: str) -> None:
        self._session = session
        self._relay = relay
        self.epoch = 0

    def on(self, session: Session) -> CheckpointStore:
        """The same row and epoch, on another session: for what must not wait until the lock's session is free."""
        store = CheckpointStore(session, self._relay)
        store.epoch = self.epoch
        return store

    async def claim(self, system_identifier: str, timeline: int, slot: str) -> Checkpoint:
        """Become the writer: raise the epoch, so that whoever wrote before cannot any more."""
        with translated():
            cursor = await self._session.execute(
                "INSERT INTO public.outbox_relay_checkpoint AS c"
                " (relay, epoch, system_identifier, timeline, slot, lsn, snap, snap_lsn, phase)"
                " VALUES (%s, 1, %s, %s, %s, '0/0', %s::pg_snapshot, '0/0', 'new')"
                f" ON CONFLICT (relay) DO UPDATE SET epoch = c.epoch + 1, updated_at = now() RETURNING {_COLUMNS}",
                (self._relay, system_identifier, timeline, slot, str(EMPTY)),
            )
            row = await cursor.fetchone()
        assert row is not None
        checkpoint = _read(row)
        self.epoch = checkpoint.epoch
        return checkpoint

    async def sample(self) -> Sample:
        """(S, L) of now. One statement: its snapshot is taken before the LSN is read."""
        with translated():
            cursor = await self._session.execute(
                "SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text"
            )
            row = await cursor.fetchone()
        assert row is not None
        return Sample(Snapshot.parse(row[0]), LSN.parse(row[1]))

    async def burn(self) -> int:
        """A transaction id that is newer than those of all transactions so far."""
        return await burn_xid(self._session)

    async def save(
        self,
        lsn: LSN,
        sample: Sample,
        unseen: Mapping[int, int] | None = None,
        *,
        marks: Mapping[str, int] | None = None,
        readback: Mapping[str, int] | None = None,
    ) -> None:
        """While streaming: everything before `lsn` is published, and everything that the sample sees.

        In the broker everything up to `marks` is before `lsn`, and everything up to `readback` is seen by the sample.
        """
        await self._update(
            "lsn = %s, snap = %s::pg_snapshot, snap_lsn = %s, unseen = %s::jsonb, phase = 'stream', recovery = NULL,"
            " sink = coalesce(%s::jsonb, sink), readback = coalesce(%s::jsonb, readback)",
            (
                str(lsn),
                str(sample.snapshot),
                str(sample.lsn),
                _json({str(xid): n for xid, n in (unseen or {}).items()}),
                _marks(marks),
                _marks(readback),
            ),
        )

    async def save_marks(self, marks: Mapping[str, int]) -> None:
        """Add marks: where destinations begin that nothing went to yet. The others stay with the LSN they belong to."""
        await self._update(
            "sink = coalesce(sink, '{}'::jsonb) || %s::jsonb, readback = coalesce(readback, '{}'::jsonb) || %s::jsonb",
            (_marks(marks), _marks(marks)),
        )

    async def prove(self) -> None:
        """Raise Superseded if somebody took over: before anything more is published."""
        await self._update("epoch = epoch", ())

    async def save_round(self, phase: str, recovery: dict[str, Any]) -> None:
        """While polling: a round is under way; what it publishes is not in `snap` yet."""
        await self._update("phase = %s, recovery = %s::jsonb", (phase, _json(recovery)))

    async def save_polled(self, phase: str, sample: Sample, *, marks: Mapping[str, int] | None = None) -> None:
        """While polling: a round is over; everything that the sample sees is published. No LSN is known."""
        await self._update(
            "snap = %s::pg_snapshot, snap_lsn = %s, unseen = '{}', phase = %s, recovery = NULL,"
            " sink = coalesce(%s::jsonb, sink), readback = coalesce(%s::jsonb, readback)",
            (str(sample.snapshot), str(sample.lsn), phase, _marks(marks), _marks(marks)),
        )

    async def adopt(self, system_identifier: str, timeline: int, slot: str) -> None:
        """Note where we run now: a new timeline after a promotion, a slot of another name."""
        await self._update("system_identifier = %s, timeline = %s, slot = %s", (system_identifier, timeline, slot))

    async def remember(self, lsn: LSN, sample: Sample, keep: float) -> None:
        """A row of history, from which any later point can be replayed; old ones go.

        The newest of the old ones stays: points that are not too old begin with it, when nothing came in between.
        """
        await self._write_history(lsn, sample, "true")
        with translated():
            await self._session.execute(
                "DELETE FROM public.outbox_relay_history WHERE relay = %(relay)s AND at <"
                " (SELECT max(at) FROM public.outbox_relay_history"
                " WHERE relay = %(relay)s AND at < now() - make_interval(secs => %(keep)s))",
                {"relay": self._relay, "keep": keep},
            )

    async def begin_history(self, lsn: LSN, sample: Sample) -> None:
        """The first row, where there is none: whoever notes an LSN from now on can replay from it."""
        await self._write_history(
            lsn, sample, "NOT EXISTS (SELECT FROM public.outbox_relay_history h WHERE h.relay = %(relay)s)"
        )

    async def _write_history(self, lsn: LSN, sample: Sample, condition: LiteralString) -> None:
        with translated():
            await self._session.execute(
                "INSERT INTO public.outbox_relay_history (relay, at, lsn, snap, snap_lsn, wal_lsn)"
                " SELECT %(relay)s::text, now(), %(lsn)s::pg_lsn, %(snap)s::pg_snapshot, %(snap_lsn)s::pg_lsn,"
                f" pg_current_wal_insert_lsn() WHERE {condition}",
                {
                    "relay": self._relay,
                    "lsn": str(lsn),
                    "snap": str(sample.snapshot),
                    "snap_lsn": str(sample.lsn),
                },
            )

    async def _update(self, assignments: str, values: tuple[Any, ...]) -> None:
        with translated():
            cursor = await self._session.execute(
                f"UPDATE public.outbox_relay_checkpoint SET {assignments}, updated_at = now()"
                " WHERE relay = %s AND epoch = %s".encode(),
                (*values, self._relay, self.epoch),
            )
        if cursor.rowcount != 1:
            raise Superseded(f"another relay named {self._relay!r} took over (our epoch was {self.epoch})")


def _json(value: dict[str, Any]) -> str:
    return orjson.dumps(value).decode()


def _marks(marks: Mapping[str, int] | None) -> str | None:
    return None if marks is None else orjson.dumps(dict(marks)).decode()


def _read(row: tuple[Any, ...]) -> Checkpoint:
    epoch, system_identifier, timeline, slot, lsn, snap, snap_lsn, phase, recovery, unseen, marks, readback = row
    return Checkpoint(
        epoch=epoch,
        system_identifier=system_identifier,
        timeline=timeline,
        slot=slot,
        lsn=LSN.parse(lsn),
        snap=Snapshot.parse(snap),
        snap_lsn=LSN.parse(snap_lsn),
        phase=phase,
        recovery=orjson.loads(recovery) if recovery else None,
        unseen={int(xid): events for xid, events in orjson.loads(unseen).items()},
        marks=orjson.loads(marks) if marks else {},
        readback=orjson.loads(readback or marks or b"{}"),
    )


def guard(checkpoint: Checkpoint, system_identifier: str, now: Sample) -> None:
    """Refuse a checkpoint that does not belong to this server, or that is from its future."""
    if checkpoint.phase == "new":
        return
    if checkpoint.system_identifier != system_identifier:
        raise SetupError(
            f"the checkpoint is of another server (system {checkpoint.system_identifier}, this is {system_identifier})",
            hint="after pg_upgrade, or a move by physical copy: `relay adopt-timeline`; after a dump and restore: "
            "`relay adopt-timeline --published nothing` (publishes the whole table) or `--published everything` (only "
            "what comes)",
        )
    if checkpoint.lsn > now.lsn or checkpoint.snap.xmax > now.snapshot.xmax:
        raise SetupError(
            f"the checkpoint ({checkpoint.lsn}, {checkpoint.snap}) is ahead of the server ({now.lsn}, {now.snapshot})",
            hint="the row was copied from another server or edited: `relay adopt-timeline --published nothing` "
            "publishes the whole table anew, `--published everything` only what comes",
        )
