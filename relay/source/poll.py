"""The poll source: rows of the outbox tables → batches. No UPDATE, no DELETE, no lock in the writers' way.

A round publishes the rows visible in a snapshot E and not in an earlier one S, then S := E. Membership is decided by
snapshots, not by the order of ids, so nothing is lost under concurrent writers (`id > last` loses rows). A round is
persisted before its first row is published and closed after its last is acknowledged: a crash repeats or continues it.
Rows are read in short queries with S and E as predicates, never in one long transaction: a broker outage would pin the
database's xmin.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, LiteralString, Protocol, cast

import psycopg
from psycopg import pq, sql

from relay.checkpoint import EMPTY, Sample, Snapshot
from relay.event import Batch, Event, Rejected, Transaction
from relay.lsn import LSN
from relay.outbox import SEQ, Binding, Mapping
from relay.progress import Progress
from relay.routing import Router, Unroutable
from relay.source.session import Session, translated

_SMALL = 5000  # rows that one query may bring
_PAGE = 2000
_BATCH = 500

# "Not visible in S" as a range plus a short list: an index condition whose cost a long transaction does not change.
GAP: LiteralString = """
    ({xid} >= pg_snapshot_xmax(%(since)s::pg_snapshot)
        OR {xid} = ANY(ARRAY(SELECT pg_snapshot_xip(%(since)s::pg_snapshot))))
    AND {xid} < pg_snapshot_xmax(%(until)s::pg_snapshot)
    AND NOT {xid} = ANY(ARRAY(SELECT pg_snapshot_xip(%(until)s::pg_snapshot)))
"""
_AFTER: LiteralString = " AND ({seq} > %(after)s)"


@dataclass(frozen=True, slots=True)
class Gap:
    """A round, as it is persisted: rows visible in `until` and not in `since`."""

    since: str
    until: str
    until_lsn: str  # also the round's identity: it grows with every round
    table: int = 0  # the place up to which rows are acknowledged
    seq: int | None = None
    xids: tuple[int, ...] | None = None  # only these transactions: what an audit found missing
    claimed: bool = False  # rows were claimed since `since`: the table says which of them are unpublished

    @classmethod
    def between(cls, since: Snapshot, until: Sample, *, claimed: bool = False) -> Gap:
        return cls(str(since), str(until.snapshot), str(until.lsn), claimed=claimed)

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Gap:
        return cls(**{**saved, "xids": tuple(saved["xids"]) if saved.get("xids") is not None else None})

    @property
    def sample(self) -> Sample:
        return Sample(Snapshot.parse(self.until), LSN.parse(self.until_lsn))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Rounds(Protocol):
    """What a poll source needs to know and to tell; the pipeline and the checkpoint store, in fact."""

    async def begin(self, gap: Gap) -> None:
        """Persist the round: its first row is about to be published."""

    async def drained(self) -> None:
        """Return when everything that was handed on is acknowledged."""

    async def done(self, gap: Gap) -> None:
        """Persist that S := E."""


class PollSource:
    """Round after round until `finish`. Rows have no LSN: `end_lsn` of its batches counts the rows handed on."""

    def __init__(
        self,
        session: Session,
        mappings: Sequence[Mapping],
        route: Callable[[Binding], Router],
        rounds: Rounds,
        progress: Progress,
        *,
        since: Snapshot,
        resumed: Gap | None,
        stamp: Callable[[str], bytes],
        interval: float,
        single: bool = False,
        only: dict[str, sql.Composable] | None = None,
        claimed: bool = False,
    ) -> None:
        """`resumed`: a round that was begun before; with `single` it is the only one.

        `only`: a further condition on a table's rows, by its name: what nobody has published before the first start.
        `claimed`: it holds for the first round, too, because rows were published by claiming them.
        """
        self._single = single
        self._claimed = claimed
        self._session = session
        self._tables = [TableRows(mapping, route, (only or {}).get(mapping.table)) for mapping in mappings]
        self._rounds = rounds
        self._progress = progress
        self._stamp = stamp
        self._interval = interval
        self._gap = resumed
        self._places: deque[tuple[int, tuple[int, int | None]]] = deque()
        if resumed is not None:  # asked before the first batch is
            self._places.append((0, (resumed.table, resumed.seq)))
        self._handed = 0
        self._finishing = False
        self._woken = asyncio.Event()
        self.since = Sample(since, LSN(0))  # everything visible in it is published
        self.caught_up = asyncio.Event()  # after the first round
        self.persisted = resumed is not None  # the round under way

    def finish(self) -> None:
        """One more round, with a snapshot taken from now on; then the source ends."""
        self._finishing = True
        self._woken.set()

    def wake(self) -> None:
        """Begin the next round now."""
        self._woken.set()

    async def batches(self) -> AsyncIterator[Batch]:
        while True:
            self._woken.clear()  # before the snapshot: a wake-up from now on may be about what it does not see
            last = self._finishing and self._gap is None
            gap = self._gap or Gap.between(self.since.snapshot, await self.sample(), claimed=self._claimed)
            self._claimed = False
            found = self.persisted = self._gap is not None  # a round that was begun must be closed
            self._gap = gap
            self._places.clear()
            self._places.append((self._handed, (gap.table, gap.seq)))
            async for batch in self._round(gap):
                if not found:
                    await self._rounds.begin(gap)
                    found = self.persisted = True
                yield batch
            if found:
                await self._rounds.drained()
                await self._rounds.done(gap)
            self._gap, self.since, self.persisted = None, gap.sample, False
            self.caught_up.set()
            if last or self._single:
                return
            if not self._finishing:
                await self._wait()

    async def confirm(self, lsn: LSN) -> None:
        """Nothing to confirm: the table keeps its rows."""

    def reached(self, acknowledged: LSN) -> Gap | None:
        """The round under way, with the place up to which everything is acknowledged; None between rounds."""
        if self._gap is None or not self._places:  # between rounds, or a resumed one that was not begun again yet
            return None
        while len(self._places) > 1 and self._places[1][0] <= acknowledged:
            self._places.popleft()
        table, seq = self._places[0][1]
        return replace(self._gap, table=table, seq=seq)

    async def sample(self) -> Sample:
        with translated():
            cursor = await self._session.execute(
                "SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text"
            )
            row = await cursor.fetchone()
        assert row is not None
        return Sample(Snapshot.parse(row[0]), LSN.parse(row[1]))

    async def _wait(self) -> None:
        if self._finishing:
            return
        # Not wait_for: on Python 3.11 it swallows a cancellation that comes together with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._interval):
                await self._woken.wait()

    async def _round(self, gap: Gap) -> AsyncIterator[Batch]:
        for table in self._tables:
            ordinal = table.mapping.ordinal
            if ordinal < gap.table:
                continue
            stamp = b"%b%d:" % (self._stamp(gap.until_lsn), ordinal)
            after = gap.seq if ordinal == gap.table else None
            async for result in table.results(self._session, gap, after):
                # In small batches: each that is acknowledged is a place that a restart does not go behind.
                for first in range(0, result.ntuples, _BATCH):
                    rows = range(first, min(first + _BATCH, result.ntuples))
                    events, rejected, size, seq = table.events(result, rows, stamp)
                    self._handed += len(rows)
                    self._places.append((self._handed, (ordinal, seq)))
                    self._progress.received_events += len(rows)
                    self._progress.recovered_events += len(rows)
                    yield Batch(events, LSN(self._handed), size, time.monotonic(), rejected)


class TableRows:
    """The queries and the rows of one table."""

    def __init__(self, mapping: Mapping, route: Callable[[Binding], Router], only: sql.Composable | None) -> None:
        self.mapping = mapping
        self._only = only
        self._route = route
        self._binding: Binding | None = None
        self._router: Router | None = None
        schema, _, name = mapping.table.partition(".")
        names = list(dict.fromkeys(column for column in mapping.columns if column))
        self._parts: dict[str, sql.Composable] = {
            "columns": sql.SQL(", ").join(map(sql.Identifier, names)),
            "table": sql.Identifier(schema, name),
            "xid": sql.Identifier(mapping.xid_column),
            "seq": sql.Identifier(mapping.columns[SEQ]),
            "only": sql.SQL("true") if only is None else only,
        }

    async def results(self, session: Session, gap: Gap, after: int | None) -> AsyncIterator[pq.abc.PGresult]:
        """The gap's rows by `seq`: in one query if they are few, page by page if they are many."""
        values: dict[str, Any] = {"since": gap.since, "until": gap.until, "after": after}
        further: LiteralString = ""
        if gap.xids is not None:
            further += " AND {xid} = ANY(%(xids)s::text[]::xid8[])"
            values["xids"] = [str(xid) for xid in gap.xids]
        if self._only is not None and (gap.claimed or gap.since == str(EMPTY)):
            further += " AND {only}"
        where: LiteralString = GAP + further if after is None else GAP + _AFTER + further
        # The inner query finds them by their transactions, whatever the planner thinks of ORDER BY … LIMIT.
        few = await self.query(
            session,
            "WITH gap AS MATERIALIZED (SELECT {columns} FROM {table} WHERE " + where + " LIMIT %(limit)s)"
            " SELECT {columns} FROM gap ORDER BY {seq}",
            {**values, "limit": _SMALL + 1},
        )
        if few.ntuples <= _SMALL:
            if few.ntuples:
                yield few
            return
        query: LiteralString = (
            "SELECT {columns} FROM {table} WHERE " + GAP + _AFTER + further + " ORDER BY {seq} LIMIT %(limit)s"
        )
        lowest = await self.query(session, "SELECT min({seq}) - 1 FROM {table} WHERE " + where, values)
        first = lowest.get_value(0, 0)
        after = int(first) if first is not None else 0
        with translated():  # many rows: along the index on seq, not all of them per page
            await session.execute("SET enable_sort = off")
        try:
            page = await self.query(session, query, {**values, "after": after, "limit": _PAGE})
            while page.ntuples:
                # The next page is fetched while this one is being published.
                following = asyncio.ensure_future(
                    self.query(session, query, {**values, "after": self.last_seq(page), "limit": _PAGE})
                )
                try:
                    yield page
                    page = await following
                finally:
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
        finally:
            with suppress(psycopg.Error):  # whatever ended the session is on its way up already
                await session.execute("RESET enable_sort")

    async def query(
        self, session: Session, query: LiteralString, values: dict[str, Any], **parts: sql.Composable
    ) -> pq.abc.PGresult:
        """Run it; `{columns}`, `{table}`, `{xid}` and `{seq}` in it are this table's."""
        with translated():
            cursor = await session.execute(sql.SQL(query).format(**self._parts, **parts), values)
        assert cursor.pgresult is not None and cursor.description is not None
        if self._binding is None and query.lstrip().startswith(("SELECT {columns}", "WITH gap")):
            self._binding = self.mapping.bind([(column.name, column.type_code) for column in cursor.description])
            self._router = self._route(self._binding)
        return cursor.pgresult

    def events(
        self, result: pq.abc.PGresult, rows: range, stamp: bytes
    ) -> tuple[list[Event], list[Rejected], int, int]:
        binding, router = self._binding, self._router
        assert binding is not None and router is not None
        transaction = Transaction(0, 0, 0.0, stamp)
        events: list[Event] = []
        rejected: list[Rejected] = []
        size, seq = 0, 0
        get, slots, width = result.get_value, list(enumerate(binding.slots)), binding.width
        for i in rows:
            row: list[bytes | None] = [None] * width
            for place, slot in slots:
                value = row[slot] = get(i, place)
                if value is not None:
                    size += len(value)
            seq = int(row[SEQ] or 0)
            try:
                events.append(router.event(row, transaction, seq))
            except Unroutable as exc:
                rejected.append(Rejected(router.rejected(row, transaction, seq), str(exc)))
        return events, rejected, size, seq

    def last_seq(self, page: pq.abc.PGresult) -> int:
        assert self._binding is not None
        value = page.get_value(page.ntuples - 1, self._binding.slots.index(SEQ))
        return int(cast("bytes", value))
