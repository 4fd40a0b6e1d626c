"""wal2json (format version 2, with transaction markers): JSON texts → events. Pure; an equal of pgoutput.

The differences that matter: values come as JSON (so they are brought into Postgres' text form here, byte for byte what
pgoutput sends), every foreign transaction sends an empty B/C pair (skipped unread), and partitions appear under their
own names (the `Catalogue` leads them back to their table). Numbers are never read as floats: exact or not at all.
What wal2json itself does not say cannot be published: it sends NaN and infinities as NULL.
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
from relay.lsn import LSN
from relay.outbox import Binding
from relay.routing import Router, Unroutable
from relay.source.decoder import HEADER, XLOGDATA, Decoder

_ACTION = HEADER + len('{"action":"')
_BEGIN, _COMMIT, _INSERT = b"BCI"
_BYTEA = 17
_INEXACT = frozenset({700, 701, 1700})  # real, double precision, numeric: JSON numbers that a float would round
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
    size: int  # columns of a message
    wanted: tuple[tuple[int, str, int, int], ...]  # index in the message, name, type OID, place in the row
    exact: tuple[tuple[bytes, int], ...]  # numbers that orjson would round: what stands before them, place in the row


class Wal2jsonDecoder(Decoder):
    """Decodes a session that was started with `options`."""

    def __init__(self, *, catalogue: Catalogue, **shared: Any) -> None:
        super().__init__(**shared)
        self._catalogue = catalogue
        self._tables: dict[tuple[str, str], _Reading | None] = {}
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
        try:
            for data in messages:
                if data[0] != XLOGDATA:
                    self._other(data)
                    continue
                action = data[_ACTION]
                if action == _INSERT:
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
                self._tables[name] = None
                return None
            # It could be a partition. The catalogue knows, if it was read after this transaction.
            if self._transaction.commit_lsn >= self._catalogue.lsn:
                raise SourceUnavailable(f"is {table} a new partition? Reading the catalogue again")
            if table in self._catalogue.others:
                return None  # not kept in _tables: it may be attached at any time
            # Dropped or renamed since. Better once too often than lost.
        router, binding = bound
        wanted = tuple(
            (index, column, oid, place)
            for index, ((column, oid), place) in enumerate(zip(described, binding.slots, strict=True))
            if place >= 0
        )
        exact = tuple(
            (b'{"name":%b,"typeoid":%d,"value":' % (orjson.dumps(column), oid), place)
            for _, column, oid, place in wanted
            if oid in _INEXACT
        )
        reading = self._tables[name] = _Reading(router, binding, len(columns), wanted, exact)
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
        if len(columns) != reading.size:
            return None
        row: list[bytes | None] = [None] * reading.binding.width
        for index, name, oid, place in reading.wanted:
            column = columns[index]
            if column["name"] != name or column["typeoid"] != oid:
                return None
            value = column["value"]
            if type(value) is str:
                row[place] = value.encode() if oid != _BYTEA else b"\\x" + value.encode()
            elif value is not None:
                row[place] = _text(value)
        return row


def _text(value: Any) -> bytes:
    if isinstance(value, bool):
        return b"t" if value else b"f"
    return str(value).encode()


def _escaped(part: str) -> str:
    return _SPECIAL.sub(r"\\\1", part)
