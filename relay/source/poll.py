"""The poll source: rows of the outbox tables → batches, for closing a gap. No UPDATE, no DELETE, no lock.

A gap is the rows visible in a later snapshot E and not in an earlier one S. It is read in short keyset pages by
(table, `seq`) with S and E as predicates, never in one long transaction: a broker outage would pin the database's xmin.
Nothing is lost under concurrent writers, because membership is decided by snapshots and not by the order of ids.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from psycopg import sql

from relay.checkpoint import Snapshot
from relay.event import Batch, Event, Rejected, Transaction
from relay.lsn import LSN
from relay.outbox import SEQ, Binding, Mapping
from relay.progress import Progress
from relay.routing import Router, Unroutable
from relay.source.session import Session, translated

# "Not visible in S" as a range plus a short list: an index condition whose cost a long transaction does not change.
# Aliased results keep their place; `visible in E` is only needed for what is at or above S's horizon.
_GAP = """
    ({xid} >= pg_snapshot_xmax(%(since)s::pg_snapshot)
        OR {xid} = ANY(ARRAY(SELECT pg_snapshot_xip(%(since)s::pg_snapshot))))
    AND {xid} < pg_snapshot_xmax(%(until)s::pg_snapshot)
    AND NOT {xid} = ANY(ARRAY(SELECT pg_snapshot_xip(%(until)s::pg_snapshot)))
"""


class GapSource:
    """The rows visible in `until` and not in `since`, after the place `after` = (table ordinal, seq).

    Rows have no LSN: `end_lsn` of its batches counts the rows handed on, and `reached` translates that back.
    """

    def __init__(
        self,
        session: Session,
        mappings: Sequence[Mapping],
        route: Callable[[Binding], Router],
        *,
        since: Snapshot,
        until: Snapshot,
        after: tuple[int, int],
        stamp: bytes,
        progress: Progress,
        only: dict[str, sql.Composable] | None = None,
        page: int = 2000,
    ) -> None:
        """`only`: a further condition on the rows of a table, by its name."""
        self._session = session
        self._mappings = mappings
        self._route = route
        self._bounds = {"since": str(since), "until": str(until)}
        self._after = after
        self._stamp = stamp
        self._progress = progress
        self._only = only or {}
        self._page = page
        self._places: deque[tuple[int, tuple[int, int]]] = deque([(0, after)])
        self._handed = 0

    async def batches(self) -> AsyncIterator[Batch]:
        ordinal, seq = self._after
        for mapping in self._mappings:
            if mapping.ordinal < ordinal:  # not the index: tables that cannot be recovered are not in the list
                continue
            after = seq if mapping.ordinal == ordinal else None
            async for batch in self._table(mapping, after):
                yield batch

    async def confirm(self, lsn: LSN) -> None:
        """Nothing to confirm: the table keeps its rows."""

    def reached(self, acknowledged: LSN) -> tuple[int, int]:
        """The place up to which everything is acknowledged."""
        while len(self._places) > 1 and self._places[1][0] <= acknowledged:
            self._places.popleft()
        return self._places[0][1]

    async def count(self) -> int:
        """How many rows the gap has: for the log, before closing it."""
        total = 0
        for mapping in self._mappings:
            query = sql.SQL("SELECT count(*) FROM {table} WHERE " + _GAP + " AND {only}").format(**self._names(mapping))
            with translated():
                row = await (await self._session.execute(query, self._bounds)).fetchone()
            total += row[0] if row else 0
        return total

    async def _table(self, mapping: Mapping, after: int | None) -> AsyncIterator[Batch]:
        names = list(dict.fromkeys(column for column in mapping.columns if column))
        query = sql.SQL(
            "SELECT {columns} FROM {table} WHERE "
            + _GAP
            + " AND {only} AND (%(after)s::bigint IS NULL OR {seq} > %(after)s::bigint) ORDER BY {seq} LIMIT %(page)s"
        ).format(columns=sql.SQL(", ").join(map(sql.Identifier, names)), **self._names(mapping))
        stamp = b"%b%d:" % (self._stamp, mapping.ordinal)
        transaction = Transaction(0, 0, 0.0, stamp)
        router: Router | None = None
        binding: Binding | None = None
        while True:
            with translated():
                cursor = await self._session.execute(query, {**self._bounds, "after": after, "page": self._page})
            result = cursor.pgresult
            assert result is not None and cursor.description is not None
            if router is None or binding is None:
                binding = mapping.bind([(column.name, column.type_code) for column in cursor.description])
                router = self._route(binding)
            if not result.ntuples:
                return
            events: list[Event] = []
            rejected: list[Rejected] = []
            size, seq = 0, 0
            for i in range(result.ntuples):
                row: list[bytes | None] = [None] * binding.width
                for place, slot in enumerate(binding.slots):
                    value = row[slot] = result.get_value(i, place)
                    size += len(value) if value else 0
                seq = int(row[SEQ] or 0)
                try:
                    events.append(router.event(row, transaction, seq))
                except Unroutable as exc:
                    rejected.append(Rejected(router.rejected(row, transaction, seq), str(exc)))
            self._handed += result.ntuples
            self._places.append((self._handed, (mapping.ordinal, seq)))
            self._progress.received_events += result.ntuples
            self._progress.recovered_events += result.ntuples
            yield Batch(events, LSN(self._handed), size, time.monotonic(), rejected)
            if result.ntuples < self._page:
                return
            after = seq

    def _names(self, mapping: Mapping) -> dict[str, sql.Composable]:
        schema, _, table = mapping.table.partition(".")
        return {
            "table": sql.Identifier(schema, table),
            "xid": sql.Identifier(mapping.xid_column),
            "seq": sql.Identifier(mapping.columns[SEQ]),
            "only": self._only.get(mapping.table, sql.SQL("true")),
        }
