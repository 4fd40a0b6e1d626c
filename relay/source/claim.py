"""Claiming: the queries of one worker on one table. Rows are locked, and skipped where somebody else has locked them.

All of it happens in the caller's transaction: lock, then (the events are published meanwhile) mark or note the failure,
commit. A crash in between leaves the rows as they were, so they come again under the same ids.

Order per key: a key belongs to one worker; a row that waits for its next attempt holds back its key; so does an
earlier row that is locked by somebody else.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psycopg import sql

from relay.adopt import condition
from relay.checkpoint import EMPTY, Snapshot
from relay.config import Poll, Routing
from relay.event import Event, Transaction
from relay.outbox import CREATED_AT, FIELDS, ID, PARTITION_KEY, SEQ, Binding, Cell, ClaimColumns
from relay.outbox import Mapping as TableMapping
from relay.routing import Router, Unroutable
from relay.source.session import Session, translated
from relay.source.slot import split

_FIELD = re.compile(r"\{(\w+)\}")
_ERROR = 2000  # characters of a reason that are kept
_PLAN = 0.2  # seconds: one that was as good as another when all rows were open may read all that were marked since


@dataclass(slots=True)
class Row:
    """A row that we have locked."""

    id: str  # as the table has it
    event: Event
    lane: Cell  # its key; None: no order
    attempts: int
    fault: str = ""  # why it can never become an event


@dataclass(slots=True)
class Claimed:
    rows: list[Row] = field(default_factory=list)
    size: int = 0
    full: bool = False  # there may be more
    age: float | None = None  # seconds since the oldest of them was written, by the clock of Postgres


@dataclass(slots=True)
class _Held:
    """A rejected row of a table that has no column to note it in."""

    lane: str | None
    attempts: int
    due: float  # monotonic


class ClaimTable:
    """One table, as one worker sees it."""

    def __init__(
        self,
        mapping: TableMapping,
        columns: ClaimColumns,
        types: Mapping[str, str],
        routing: Routing,
        settings: Poll,
        route: Callable[[Binding], Router],
        *,
        since: Snapshot,
        worker: int,
        stamp: bytes,
    ) -> None:
        """`types`: of the table's columns. `since`: rows that it sees were published before claiming began."""
        self._mapping = mapping
        self._columns = columns
        self._settings = settings
        self._route = route
        self._router: Router | None = None
        self._binding: Binding | None = None
        self._transaction = Transaction(0, 0, 0.0, stamp)
        self._held: dict[str, _Held] = {}
        self._full = False  # the last look found as many rows as a batch may have
        self._planned_at = 0.0
        self.table = mapping.table
        name = mapping.columns[ID]
        self._names = list(dict.fromkeys(column for column in mapping.columns if column))
        self._table = _text(sql.Identifier(*split(mapping.table)))
        self._id = _text(sql.Identifier(name))
        self._ids = f"%(ids)s::text[]::{types[name].replace('%', '%%')}[]"
        created_at = mapping.columns[CREATED_AT]
        self._aged = created_at if types.get(created_at, "").startswith("timestamp") else ""
        self._open = self._open_condition(since)
        self._query = self._claim_query(_key(routing, mapping), worker)
        self._mark_query = (
            f"UPDATE {self._table} SET {_assigned(columns.write_back)} WHERE {self._id} = ANY({self._ids})"
        )

    def _open_condition(self, since: Snapshot) -> str:
        columns = self._columns
        open_ = _text(condition(columns.unpublished))
        if columns.attempts and not columns.failed:
            open_ += f" AND coalesce({_name(columns.attempts)}, 0) < {self._settings.max_attempts}"
        if self._mapping.xid_column and since != EMPTY:
            open_ += f" AND {_unseen(self._mapping.xid_column, since)}"
        return open_

    async def open_in(self, session: Session, snapshot: Snapshot) -> bool:
        """Whether rows that the snapshot sees are still to be published, by any worker."""
        xid = _name(self._mapping.xid_column)
        query = (
            f"SELECT FROM {self._table} WHERE {self._open}"
            f" AND ({xid} IS NULL OR pg_visible_in_snapshot({xid}, %(snapshot)s::pg_snapshot)) LIMIT 1"
        )
        with translated():
            cursor = await session.execute(query.encode(), {"snapshot": str(snapshot)})
        return cursor.rowcount > 0

    def _claim_query(self, key: str, worker: int) -> bytes:
        columns, settings, held, open_ = self._columns, self._settings, "", self._open
        places = [self._mapping.columns[SEQ]] if self._mapping.columns[SEQ] else []
        places = places or [
            column for column in (self._mapping.columns[CREATED_AT], self._mapping.columns[ID]) if column
        ]
        order = ", ".join(_text(sql.Identifier(column)) for column in places)
        newest = ", ".join(f"{_text(sql.Identifier(column))} DESC" for column in places)
        if settings.workers > 1:
            share = f"abs(mod(hashtextextended(coalesce({key}, {self._id}::text), 0), {settings.workers}))"
            # Behind coalesce the planner takes it for half of the rows. A bare one would be a two-hundredth: so few
            # that it would read and sort all that are open, for each batch, instead of the first along the index.
            open_ += f" AND coalesce({share} = {worker}, false)"
        waiting = "SELECT NULL::text AS relay_key WHERE false"
        due = "true"
        if columns.next_attempt:
            next_attempt = _name(columns.next_attempt)
            due = f"({next_attempt} IS NULL OR {next_attempt} <= now())"
            waiting = f"SELECT DISTINCT {key} AS relay_key FROM {self._table} WHERE {open_} AND {next_attempt} > now()"
        else:
            held = f" AND {self._id} <> ALL({self._ids})"
            waiting = "SELECT unnest(%(keys)s::text[]) AS relay_key"
        listed = ", ".join(map(_name, self._names))
        attempts = f"coalesce({_name(columns.attempts)}, 0)" if columns.attempts else "0"
        age = f"extract(epoch FROM clock_timestamp() - {_name(self._aged)})" if self._aged else "NULL"
        # NOT IN is a filter, whatever the planner believes; a join with those that wait might cost the index's order.
        query = f"""
            WITH waiting AS MATERIALIZED ({waiting}),
            claimed AS MATERIALIZED (
                SELECT {listed}, {key} AS relay_key, {attempts} AS relay_attempts FROM {self._table}
                WHERE {open_} AND {due}{held}
                AND ({key} NOT IN (SELECT relay_key FROM waiting WHERE relay_key IS NOT NULL)) IS NOT FALSE
                ORDER BY {order} LIMIT {settings.batch} FOR UPDATE SKIP LOCKED),
            locked AS MATERIALIZED (
                SELECT {key} AS other_key, ROW({order}) AS place FROM {self._table}
                WHERE {open_} AND ({order}) < (SELECT {order} FROM claimed ORDER BY {newest} LIMIT 1)
                AND {key} IN (SELECT relay_key FROM claimed) AND {self._id} NOT IN (SELECT {self._id} FROM claimed))
            SELECT {listed}, relay_key, relay_attempts, EXISTS (
                SELECT FROM locked WHERE other_key = relay_key AND place < ROW({order})) AS relay_behind,
                {age} AS relay_age
            FROM claimed ORDER BY {order}
        """
        return query.encode()

    async def claim(self, session: Session) -> Claimed:
        """Lock the next rows that are ours, but for those behind a row of their key that others have locked."""
        values: dict[str, Any] = {}
        if not self._columns.next_attempt:
            now = time.monotonic()
            waiting = {each: held for each, held in self._held.items() if held.due > now}
            values = {"ids": list(waiting), "keys": [held.lane for held in waiting.values() if held.lane is not None]}
        with translated():
            if not self._full or time.monotonic() - self._planned_at > _PLAN:
                await session.execute(b"DISCARD PLANS")
                self._planned_at = time.monotonic()
            cursor = await session.execute(self._query, values)
        result, description = cursor.pgresult, cursor.description
        assert result is not None and description is not None
        width = len(self._names)
        if self._router is None:
            self._binding = self._mapping.bind([(each.name, each.type_code) for each in description[:width]])
            self._router = self._route(self._binding)
        self._full = result.ntuples >= self._settings.batch
        claimed = Claimed(full=self._full)
        faulty: set[bytes] = set()  # keys behind a row that cannot be routed
        for i in range(result.ntuples):
            lane = result.get_value(i, width)
            if result.get_value(i, width + 2) == b"t" or (lane is not None and lane in faulty):
                continue
            cells = [result.get_value(i, place) for place in range(width)]
            row = self._row(cells, lane, int(result.get_value(i, width + 1) or 0))
            if row.fault and lane is not None:
                faulty.add(lane)
            claimed.rows.append(row)
            claimed.size += sum(map(len, filter(None, cells)))
            if (age := result.get_value(i, width + 3)) is not None:
                claimed.age = max(claimed.age or 0.0, float(age))
        return claimed

    def _row(self, cells: Sequence[Cell], lane: Cell, attempts: int) -> Row:
        binding, router = self._binding, self._router
        assert binding is not None and router is not None
        row: list[Cell] = [None] * binding.width
        for slot, cell in zip(binding.slots, cells, strict=True):
            row[slot] = cell
        id_ = (row[ID] or b"").decode()
        if id_ in self._held:
            attempts = max(attempts, self._held[id_].attempts)
        seq = int(row[SEQ] or 0)
        try:
            return Row(id_, router.event(row, self._transaction, seq), lane, attempts)
        except Unroutable as exc:
            return Row(id_, router.rejected(row, self._transaction, seq), lane, attempts, str(exc))

    async def mark(self, session: Session, ids: Collection[str]) -> None:
        """These are published."""
        if ids:
            with translated():
                await session.execute(self._mark_query.encode(), {"ids": list(ids)})
            for each in ids:
                self._held.pop(each, None)

    async def reject(self, session: Session, row: Row, reason: str, delay: float) -> bool:
        """Note a failed attempt; True when it was the last one."""
        columns = self._columns
        attempts = row.attempts + 1
        last = attempts >= self._settings.max_attempts
        sets = []
        if columns.attempts:
            sets.append(f"{_name(columns.attempts)} = %(attempts)s")
        if columns.next_attempt:
            sets.append(f"{_name(columns.next_attempt)} = now() + make_interval(secs => %(delay)s)")
        if columns.last_error:
            sets.append(f"{_name(columns.last_error)} = %(error)s")
        if last and columns.failed:
            sets.append(_assigned(columns.failed))
        if sets:
            values = {"attempts": attempts, "delay": delay, "error": reason[:_ERROR], "ids": [row.id]}
            query = f"UPDATE {self._table} SET {', '.join(sets)} WHERE {self._id} = ANY({self._ids})"
            with translated():
                await session.execute(query.encode(), values)
        noted = columns.next_attempt or (last and (columns.failed or columns.attempts))
        if noted:
            self._held.pop(row.id, None)
        else:
            lane = None if row.lane is None else row.lane.decode()
            self._held[row.id] = _Held(lane, attempts, time.monotonic() + delay)
        return last


def _text(part: sql.Composable) -> str:
    """As text of a query that has placeholders: a percent sign in a name or a value is not one."""
    return part.as_string(None).replace("%", "%%")


def _name(column: str) -> str:
    return _text(sql.Identifier(column))


def _assigned(values: Mapping[str, bool | str]) -> str:
    special = {"now()": "now()", "NULL": "NULL", "{error}": "%(error)s"}
    return ", ".join(
        f"{_name(column)} = {special.get(str(value)) or _text(sql.Literal(value))}" for column, value in values.items()
    )


def _unseen(xid: str, since: Snapshot) -> str:
    """Not visible in the snapshot, as a range plus a short list (see poll.py)."""
    snapshot = _text(sql.Literal(str(since)))
    return (
        f"({_name(xid)} >= pg_snapshot_xmax({snapshot}::pg_snapshot)"
        f" OR {_name(xid)} = ANY(ARRAY(SELECT pg_snapshot_xip({snapshot}::pg_snapshot))))"
    )


def _key(routing: Routing, mapping: TableMapping) -> str:
    """The routing's key as SQL, text: NULL where the router says None."""

    def cell(place: int) -> str:
        column = mapping.columns[place]
        return f"nullif({_name(column)}::text, '')" if column else "NULL::text"

    parts = []
    for i, part in enumerate(_FIELD.split(routing.key)):
        if i % 2 == 0:
            parts += [_text(sql.Literal(part))] if part else []
        else:
            parts.append(_text(sql.Literal(mapping.table)) if part == "table" else cell(FIELDS.index(part)))
    template = " || ".join(parts) or "NULL::text"
    return f"coalesce({cell(PARTITION_KEY)}, {template})::text"
