"""Which rows a replay takes, and how they are read: by pages, in `seq` order, table by table. Only reads.

A selection is plain values that go through JSON: the command makes it, the active relay may have to carry it out.
Membership is decided by snapshots, as in `poll`; rows that the relay has not published yet are never part of it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from collections.abc import Mapping as Dict
from dataclasses import asdict, dataclass
from typing import Any, LiteralString, NamedTuple

from psycopg import sql

from relay.config import Routing
from relay.event import Event, HeaderNames, Rejected
from relay.outbox import CREATED_AT, FIELDS, ID, PARTITION_KEY, SEQ, Binding, Mapping
from relay.routing import Router
from relay.source.poll import TableRows
from relay.source.session import Session

PAGE = 1000


def page_size(rate: float | None) -> int:
    """Events per page: of a replay that is held to a rate no more than it may publish in a second."""
    return PAGE if rate is None else max(1, min(PAGE, int(rate)))


_UNSEEN: LiteralString = """
    AND ({xid} >= pg_snapshot_xmax(%(since)s::pg_snapshot)
        OR {xid} = ANY(ARRAY(SELECT pg_snapshot_xip(%(since)s::pg_snapshot))))"""
# Rows from before the table had the column are NULL.
_SEEN: LiteralString = """
    AND ({xid} IS NULL OR ({xid} < pg_snapshot_xmax(%(until)s::pg_snapshot)
        AND NOT {xid} = ANY(ARRAY(SELECT pg_snapshot_xip(%(until)s::pg_snapshot)))))"""


@dataclass(frozen=True, slots=True)
class Cut:
    """A point: everything committed before the LSN, and everything that the snapshot sees."""

    lsn: str
    snap: str | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the WAL, for an exact replay: from `begin` up to `stop`, and which transactions of it count."""

    begin: str
    stop: str
    cuts: tuple[Cut, ...]  # only what is before all of these
    seen: str | None = None  # not what this snapshot sees
    since: float | None = None  # committed from then on (Unix time)
    until: float | None = None  # … up to then

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Window:
        return cls(**{**saved, "cuts": tuple(Cut(**cut) for cut in saved["cuts"])})


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows that `until` sees and `since` does not, narrowed by the rest; and what is done with them."""

    until: str
    since: str | None = None
    first_seq: int | None = None
    last_seq: int | None = None
    key: str | None = None
    ids: tuple[str, ...] | None = None
    table: str | None = None  # only this one
    topic: str | None = None  # publish there instead
    rate: float | None = None  # events per second, at most
    wal: Window | None = None  # exactly, from the WAL instead of the table
    claimed: str | None = None  # rows are claimed since this snapshot: of later ones, the table says what is published

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Selection:
        ids = tuple(saved["ids"]) if saved.get("ids") is not None else None
        wal = Window.of(saved["wal"]) if saved.get("wal") else None
        return cls(**{**saved, "ids": ids, "wal": wal, "claimed": saved.get("claimed") or None})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def ordered(self) -> bool:
        """Whether it needs tables that know transactions and order."""
        return not (self.ids or self.key) or bool(self.since) or self.first_seq is not None or self.last_seq is not None


class Place(NamedTuple):
    """How far a replay is: tables before this ordinal, and this one's rows up to `seq`, are done."""

    table: int = 0
    seq: int | None = None


class Page(NamedTuple):
    events: list[Event]
    rejected: list[Rejected]
    size: int
    place: Place


class SelectedRows:
    """The rows of a selection in one table."""

    def __init__(
        self,
        mapping: Mapping,
        types: Dict[str, str],
        route: Callable[[Binding], Router],
        routing: Routing,
        selection: Selection,
        unpublished: sql.Composable | None = None,
    ) -> None:
        """`unpublished`: a condition; such rows are left out, unless they were published before claiming began."""
        self.mapping = mapping
        self._rows = TableRows(mapping, route, None)
        self._parts: dict[str, sql.Composable] = {}
        self.ids: dict[str, str] = {}  # of those that were asked for, what this table can have
        self._values: dict[str, Any] = {"until": selection.until, "since": selection.since}
        self._where: LiteralString = "true"
        columns = mapping.columns
        if unpublished is not None:
            self._where += " AND (({unpublished}) IS NOT TRUE"
            if mapping.recoverable:  # a stream, or rounds, published these without a mark in the table
                self._where += " OR pg_visible_in_snapshot({xid}, %(claimed)s::pg_snapshot)"
                self._values["claimed"] = selection.claimed
            self._where += ")"
            self._parts["unpublished"] = unpublished
        if mapping.recoverable:
            self._where += _SEEN
            if selection.since is not None:
                self._where += _UNSEEN
        for name, value in (("first", selection.first_seq), ("last", selection.last_seq)):
            if value is not None:
                self._where += " AND {seq} >= %(first)s" if name == "first" else " AND {seq} <= %(last)s"
                self._values[name] = value
        if selection.key is not None:
            self._where += " AND {key} = %(key)s"
            self._values["key"] = selection.key
            self._parts["key"] = key_expression(routing.key, mapping)
        if selection.ids is not None:
            id_type = types[columns[ID]]
            # Of a type that we do not know Postgres could not read any text: what was published is how it writes it.
            as_it_is = id_type == "uuid" or id_type in _INTEGERS or id_type.startswith(_TEXTS)
            self._where += (
                " AND {id} = ANY(%(ids)s::text[]::{id_type}[])" if as_it_is else " AND {id}::text = ANY(%(ids)s)"
            )
            self.ids = own_ids(selection.ids, mapping, id_type)
            self._values["ids"] = list(self.ids.values())
            self._parts["id"], self._parts["id_type"] = sql.Identifier(columns[ID]), sql.SQL(id_type)

    async def count(self, session: Session, after: int | None) -> int:
        where, values = self._from(after)
        found = await self._rows.query(
            session, "SELECT count(*) FROM {table} WHERE " + where, {**self._values, **values}, **self._parts
        )
        return int(found.get_value(0, 0) or 0)

    async def pages(self, session: Session, after: int | None, stamp: bytes, size: int) -> AsyncIterator[Page]:
        """Everything from behind `after` on. Between two pages no transaction is open."""
        rows, ordinal = self._rows, self.mapping.ordinal
        if not self.mapping.columns[SEQ]:  # by id or by key: they are few
            order = self.mapping.columns[CREATED_AT] or self.mapping.columns[ID]
            query: LiteralString = "SELECT {columns} FROM {table} WHERE " + self._where + " ORDER BY {order}"
            result = await rows.query(session, query, self._values, order=sql.Identifier(order), **self._parts)
            if result.ntuples:
                events, rejected, bytes_, _ = rows.events(result, range(result.ntuples), stamp)
                yield Page(events, rejected, bytes_, Place(ordinal + 1))
            return
        where, values = self._from(after)
        # Found by their transactions first: along seq from the beginning of a big table it would take long.
        bounds = await rows.query(
            session,
            "SELECT min({seq}), max({seq}), count(*) FROM {table} WHERE " + where,
            {**self._values, **values},
            **self._parts,
        )
        if bounds.get_value(0, 0) is None:
            return
        place, last = int(bounds.get_value(0, 0) or 0) - 1, int(bounds.get_value(0, 1) or 0)
        query = "SELECT {columns} FROM {table} WHERE " + self._where
        query += " AND {seq} > %(after)s AND {seq} <= %(end)s ORDER BY {seq} LIMIT %(limit)s"
        while place < last:
            result = await rows.query(
                session, query, {**self._values, "after": place, "end": last, "limit": size}, **self._parts
            )
            if not result.ntuples:
                return
            events, rejected, bytes_, place = rows.events(result, range(result.ntuples), stamp)
            yield Page(events, rejected, bytes_, Place(ordinal, place))

    def _from(self, after: int | None) -> tuple[LiteralString, dict[str, Any]]:
        if after is None or not self.mapping.columns[SEQ]:
            return self._where, {}
        return self._where + " AND {seq} > %(after)s", {"after": after}


def key_expression(template: str, mapping: Mapping) -> sql.Composable:
    """The key of a row, as `Router` makes it, in SQL."""
    parts: list[sql.Composable] = []
    for i, part in enumerate(re.split(r"\{(\w+)\}", template)):
        if i % 2 == 0:
            parts += [sql.Literal(part)] if part else []
        elif part == "table":
            parts.append(sql.Literal(mapping.table))
        else:
            parts.append(_text(mapping.columns[FIELDS.index(part)]))
    rendered = sql.SQL(" || ").join(parts) if parts else sql.SQL("NULL")
    return sql.SQL("coalesce({}, {})").format(_text(mapping.columns[PARTITION_KEY]), rendered)


def _text(column: str) -> sql.Composable:
    return sql.SQL("nullif({}::text, '')").format(sql.Identifier(column)) if column else sql.SQL("NULL::text")


_INTEGERS = {"smallint": 15, "integer": 31, "bigint": 63}
_TEXTS = ("text", "character", "citext")


def own_ids(ids: Sequence[str], mapping: Mapping, id_type: str) -> dict[str, str]:
    """Those that this table can have, as it has them: with several tables those that are no UUIDs bear its name."""
    prefix = f"{mapping.table}:" if mapping.several and id_type != "uuid" else ""
    own = {each: each.removeprefix(prefix) for each in ids if each.startswith(prefix)}
    return {each: value for each, value in own.items() if _fits(value, id_type)}


def _fits(value: str, id_type: str) -> bool:
    """Whether Postgres could read it; other types are compared as texts."""
    if id_type == "uuid":
        return re.fullmatch(r"\{?([0-9a-fA-F]{4}-?){7}[0-9a-fA-F]{4}\}?", value) is not None
    if id_type in _INTEGERS:
        limit = 1 << _INTEGERS[id_type]
        return re.fullmatch(r"[+-]?[0-9]{1,20}", value) is not None and -limit <= int(value) < limit
    return True


def replayed(events: Sequence[Event], run: str, topic: str | None, *, key: bytes | None = None) -> list[Event]:
    """The events as a replay publishes them: a message id of their own, the event's own id in header and body.

    `key`: instead of theirs, where it is not sent and only says what an event that is refused holds up.
    """
    suffix, value = f":replay:{run}".encode(), run.encode()
    made: list[Event] = []
    for event in events:
        names, values = event.header_names.names, event.header_values
        if topic is not None and "Nats-Expected-Stream" in names:
            at = names.index("Nats-Expected-Stream")
            names, values = names[:at] + names[at + 1 :], values[:at] + values[at + 1 :]
        if "id" not in names:
            names, values = (*names, "id"), (*values, event.id)
        made.append(
            event._replace(
                id=event.id + suffix,
                topic=event.topic if topic is None else topic,
                key=key or event.key,
                header_names=HeaderNames.of((*names, "relay-replayed")),
                header_values=(*values, value),
            )
        )
    return made


def original_id(event: Event) -> str:
    """Of an event as a replay publishes it, the id that its row has."""
    return event.id.rpartition(b":replay:")[0].decode(errors="replace")
