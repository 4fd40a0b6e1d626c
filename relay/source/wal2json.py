"""wal2json (format version 2, with transaction markers): JSON texts → events. Pure; an equal of pgoutput.

The differences that matter: values come as JSON (so they are brought into Postgres' text form here, byte for byte what
pgoutput sends), every foreign transaction sends an empty B/C pair (skipped unread), and partitions appear under their
own names (the `Catalogue` leads them back to their table). Numbers are never read as floats: exact or not at all.
What wal2json itself does not say cannot be published: it sends NaN and infinities as NULL.

Usual rows are read in C where it was built: wal2json's text is always laid out in the same way, so of a known table
only the values are unknown. What is laid out differently is not read there; then this decoder looks at it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

import orjson

from relay.errors import ContractError, ProtocolError, SourceUnavailable
from relay.event import Event, Rejected, Transaction
from relay.hot import Reader, json_reader
from relay.lsn import LSN
from relay.outbox import Binding
from relay.routing import Router, Unroutable
from relay.source.decoder import HEADER, XLOGDATA, Decoder

_ACTION = HEADER + len('{"action":"')
_BEGIN, _COMMIT, _INSERT = b"BCI"
_BYTEA = 17
_INEXACT = frozenset({700, 701, 1700})  # real, double precision, numeric: JSON numbers that a float would round
_TABLE, _COLUMNS = b',"schema":', b',"columns":['  # what names the table in a row's message is between them
_SPECIAL = re.compile(r"([\\',.*\s])")


class Catalogue(NamedTuple):
    """What was known of partitioned outbox tables, and of the schemas that are read whole for them, at `lsn`."""

    lsn: LSN
    leaves: Mapping[str, str]  # partition → its table
    others: frozenset[str]  # all other tables of these schemas
    partitioned: tuple[str, ...]  # the outbox tables that have, or will have, partitions


class _Reading(NamedTuple):
    """How to read one table's rows."""

    router: Router
    binding: Binding
    columns: tuple[tuple[str, int, int], ...]  # of a message: name, type OID, place in the row (-1: not wanted)
    exact: tuple[tuple[bytes, int], ...]  # numbers that orjson would round: what stands before them, place in the row


class Wal2jsonDecoder(Decoder):
    """Decodes a session that was started with `options`."""

    def __init__(self, *, catalogue: Catalogue, **shared: Any) -> None:
        super().__init__(**shared)
        self._catalogue = catalogue
        self._tables: dict[tuple[str, str], _Reading | None] = {}
        self._quick: dict[bytes, Reader | None] = {}  # of the same tables, by the bytes that name them
        self._begin_message = b""

    @staticmethod
    def options(tables: Iterable[str], schemas: Iterable[str] = ()) -> dict[str, str]:
        """Of START_REPLICATION. `schemas` are taken whole: wal2json knows partitions, not their table."""
        names = [".".join(_escaped(part) for part in table.split(".", 1)) for table in tables]
        names += [f"{_escaped(schema)}.*" for schema in schemas]
        return {
            "format-version": "2",
            "include-transaction": "1",
            "include-xids": "1",
            "include-timestamp": "1",
            "include-lsn": "1",
            "include-types": "0",
            "include-type-oids": "1",
            "actions": "insert",
            "add-tables": ",".join(names),
        }

    def decode(self, messages: list[bytes], rejected: list[Rejected]) -> list[Event]:
        events: list[Event] = []
        at, end = 0, len(messages)
        try:
            while at < end:
                data = messages[at]
                at += 1
                if data[0] != XLOGDATA:
                    self._other(data)
                    continue
                action = data[_ACTION]
                if action == _INSERT:
                    stopped = self._insert_quickly(messages, at - 1, events)
                    if stopped >= at:
                        at = stopped
                    else:
                        self._insert(data, events, rejected)
                elif action == _BEGIN:
                    # Read only when a row follows: most transactions have none of ours.
                    self._begin_message, self._transaction, self._ordinal = data, None, 0
                elif action == _COMMIT:
                    # A commit's message starts, in the WAL, where the commit ends (`nextlsn`).
                    self._commit(int.from_bytes(data[1:9], "big"))
                    self._begin_message = b""
        except (KeyError, IndexError, TypeError, ValueError) as exc:  # JSONDecodeError is a ValueError
            raise ProtocolError(f"wal2json sent something else than expected: {type(exc).__name__}: {exc}") from exc
        return events

    def _insert_quickly(self, messages: list[bytes], at: int, events: list[Event]) -> int:
        """Read the rows from `at` on in C; returns where it stopped, which is `at` when the row is not for C."""
        data = messages[at]
        quick = self._quick.get(data[data.find(_TABLE, HEADER) : data.find(_COLUMNS, HEADER)])
        if quick is None:
            return at
        if self._transaction is None:
            self._transaction = self._opened()
        if self._skipping:
            return at
        stopped = quick.read(messages, at, self._transaction, self._transaction.stamp, self._ordinal, events)
        self._ordinal += stopped - at
        return stopped

    def _insert(self, data: bytes, events: list[Event], rejected: list[Rejected]) -> None:
        message = orjson.loads(memoryview(data)[HEADER:])
        columns = message["columns"]
        name = (message["schema"], message["table"])
        reading = self._tables.get(name) if name in self._tables else self._announce(name, columns)
        if reading is None:
            return
        if self._transaction is None:
            self._transaction = self._opened()
        if self._skipping:
            self.skipped += 1
            self._ordinal += 1
            return
        row = self._row(reading, columns)
        if row is None:  # the table was altered
            reading = self._announce(name, columns)
            if reading is None:
                return
            row = self._row(reading, columns)
            assert row is not None
        for before, place in reading.exact:
            # Not inside of a text: there every quote has a backslash before it.
            begin = data.index(before, HEADER) + len(before)
            value = data[begin : data.index(b"}", begin)]
            row[place] = None if value == b"null" else value
        try:
            events.append(reading.router.event(row, self._transaction, self._ordinal))
        except Unroutable as exc:
            rejected.append(Rejected(reading.router.rejected(row, self._transaction, self._ordinal), str(exc)))
        self._ordinal += 1

    def _opened(self) -> Transaction:
        if not self._begin_message:
            raise ProtocolError("wal2json sent a row outside of a transaction")
        begin = orjson.loads(memoryview(self._begin_message)[HEADER:])
        committed_at = datetime.fromisoformat(begin["timestamp"]).timestamp()
        return self._begin(LSN.parse(begin["lsn"]), begin["xid"], committed_at)

    def _announce(self, name: tuple[str, str], columns: list[dict[str, Any]]) -> _Reading | None:
        self._transaction = self._transaction or self._opened()
        described = [(column["name"], column["typeoid"]) for column in columns]
        table = ".".join(name)
        bound = self._bind(self._catalogue.leaves.get(table, table), described)
        if bound is None:
            bound = self._partition(described)
            if bound is None:
                self._tables[name] = self._quick[_named(name)] = None
                return None
            # It could be a partition. The catalogue knows, if it was read after this transaction.
            if self._transaction.commit_lsn >= self._catalogue.lsn:
                raise SourceUnavailable(f"is {table} a new partition? Reading the catalogue again")
            if table in self._catalogue.others:
                return None  # not kept in _tables: it may be attached at any time
            # Dropped or renamed since. Better once too often than lost.
        router, binding = bound
        known = tuple((column, oid, place) for (column, oid), place in zip(described, binding.slots, strict=True))
        exact = tuple((_before(column, oid), place) for column, oid, place in known if place >= 0 and oid in _INEXACT)
        reading = self._tables[name] = _Reading(router, binding, known, exact)
        self._quick[_named(name)] = _quick_reader(name, reading)
        return reading

    def _partition(self, columns: list[tuple[str, int]]) -> tuple[Router, Binding] | None:
        """How to read a table with these columns if it is a partition of ours; None when it cannot be one."""
        for table in self._catalogue.partitioned:
            with suppress(ContractError):
                return self._bind(table, columns)
        return None

    @staticmethod
    def _row(reading: _Reading, columns: list[dict[str, Any]]) -> list[bytes | None] | None:
        """The row in Postgres' text form; None when the columns are not those that we know."""
        if len(columns) != len(reading.columns):
            return None
        row: list[bytes | None] = [None] * reading.binding.width
        for column, (name, oid, place) in zip(columns, reading.columns, strict=True):
            # Those that are not wanted too: C knows a message by all of them, and would read this table no more.
            if column["name"] != name or column["typeoid"] != oid:
                return None
            if place < 0:
                continue
            value = column["value"]
            if type(value) is str:
                row[place] = value.encode() if oid != _BYTEA else b"\\x" + value.encode()
            elif value is not None:
                row[place] = _text(value)
        return row


def _quick_reader(name: tuple[str, str], reading: _Reading) -> Reader | None:
    """Reads the table's rows in C; None where what is wanted of them takes more than the values' own bytes."""
    if any(place >= 0 and (oid == _BYTEA or oid in _INEXACT) for _, oid, place in reading.columns):
        return None
    # As `options` has them: xid, timestamp and lsn are values too, which nobody wants.
    between = [b'{"action":"I","xid":', b',"timestamp":', b',"lsn":', _named(name) + _COLUMNS]
    for column, oid, _ in reading.columns:
        between[-1] += _before(column, oid)
        between.append(b"},")
    between[-1] = b"}]}"
    slots = (-1, -1, -1, *reading.binding.slots)
    return json_reader(tuple(between), slots, reading.binding, reading.router.recipe)


def _named(name: tuple[str, str]) -> bytes:
    schema, table = map(orjson.dumps, name)
    return b'%b%b,"table":%b' % (_TABLE, schema, table)


def _before(column: str, oid: int) -> bytes:
    """What stands before a column's value."""
    return b'{"name":%b,"typeoid":%b,"value":' % (orjson.dumps(column), orjson.dumps(oid))


def _text(value: Any) -> bytes:
    if isinstance(value, bool):
        return b"t" if value else b"f"
    return str(value).encode()


def _escaped(part: str) -> str:
    return _SPECIAL.sub(r"\\\1", part)
