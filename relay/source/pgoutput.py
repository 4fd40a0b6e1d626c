"""pgoutput (protocol 1, text format): bytes → messages → events. Pure.

Follows the "Logical Replication Message Formats" chapter of the PostgreSQL manual. A truncated or corrupt message is a
ProtocolError, never a wrong event; message types that do not concern an insert-only reader are not decoded at all.
The functions take the whole CopyData buffer and the offset where the message starts, so that nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as struct_error
from typing import Any, NamedTuple

from relay.errors import ProtocolError
from relay.event import Event, Rejected, Transaction
from relay.hot import Reader, reader, walk
from relay.lsn import LSN
from relay.routing import Router, Unroutable
from relay.source.decoder import HEADER, XLOGDATA, Decoder, unix_time

BEGIN, COMMIT, RELATION, INSERT, MESSAGE = b"BCRIM"

_BEGIN = Struct(">QqI")  # final_lsn, commit time, xid
_COMMIT = Struct(">BQQq")  # flags, commit_lsn, end_lsn, commit time
_COLUMN = Struct(">Ii")  # type OID, type modifier
_OID = Struct(">I")
_COUNT = Struct(">H")


class Begin(NamedTuple):
    final_lsn: int  # the commit record's LSN: the transaction's identity, known before its rows
    committed_at: float  # Unix time
    xid: int  # 32 bits


class Commit(NamedTuple):
    commit_lsn: int
    end_lsn: int  # what may be confirmed once the transaction is acknowledged


class Column(NamedTuple):
    name: str
    type_oid: int


class Relation(NamedTuple):
    oid: int
    schema: str
    table: str
    columns: tuple[Column, ...]


def decode_begin(data: bytes, start: int) -> Begin:
    if len(data) != start + 21:
        raise ProtocolError(f"pgoutput Begin has {len(data) - start} bytes, expected 21")
    final_lsn, time, xid = _BEGIN.unpack_from(data, start + 1)
    return Begin(final_lsn, unix_time(time), xid)


def decode_commit(data: bytes, start: int) -> Commit:
    if len(data) != start + 26:
        raise ProtocolError(f"pgoutput Commit has {len(data) - start} bytes, expected 26")
    _flags, commit_lsn, end_lsn, _time = _COMMIT.unpack_from(data, start + 1)
    return Commit(commit_lsn, end_lsn)


def decode_relation(data: bytes, start: int) -> Relation:
    try:
        (oid,) = _OID.unpack_from(data, start + 1)
        schema, pos = _text(data, start + 5)
        table, pos = _text(data, pos)
        (count,) = _COUNT.unpack_from(data, pos + 1)  # after the replica identity
        pos += 3
        columns = []
        for _ in range(count):
            name, pos = _text(data, pos + 1)  # after the flags
            type_oid, _modifier = _COLUMN.unpack_from(data, pos)
            pos += 8
            columns.append(Column(name, type_oid))
    except (struct_error, UnicodeDecodeError) as exc:
        raise ProtocolError(f"pgoutput Relation cannot be read: {exc}") from exc
    if pos != len(data):
        raise ProtocolError(f"pgoutput Relation {schema}.{table} has {len(data) - pos} bytes too many")
    return Relation(oid, schema or "pg_catalog", table, tuple(columns))


def decode_insert(data: bytes, start: int, slots: Sequence[int], width: int) -> list[bytes | None]:
    """The row's values in text form, column i in place `slots[i]` of a list of `width` (-1: not wanted)."""
    if data[start + 5 : start + 8] != b"N" + len(slots).to_bytes(2, "big"):
        raise ProtocolError(f"pgoutput Insert does not announce {len(slots)} columns as its Relation did")
    cells: list[bytes | None] = [None] * width
    pos = start + 8
    length = _OID.unpack_from  # a Struct: half of what int.from_bytes of a slice costs
    try:
        for slot in slots:
            kind = data[pos]
            if kind == 116:  # t: text
                begin = pos + 5
                pos = begin + length(data, pos + 1)[0]
                if slot >= 0:
                    cells[slot] = data[begin:pos]
            elif kind == 110:  # n: NULL
                pos += 1
            else:
                raise ProtocolError(f"pgoutput Insert has a value of unknown kind {chr(kind)!r}")
    except (IndexError, struct_error):
        raise ProtocolError("pgoutput Insert is truncated") from None
    if pos != len(data):
        raise ProtocolError(f"pgoutput Insert is {len(data) - start} bytes long, its columns need {pos - start}")
    return cells


class PgoutputDecoder(Decoder):
    """Decodes a session that was started with the options below."""

    def __init__(self, **shared: Any) -> None:
        super().__init__(**shared)
        self._relations: dict[int, tuple[Router, tuple[int, ...], int] | None] = {}
        self._readers: dict[int, Reader] = {}  # of those that C can read

    @staticmethod
    def options(publication: str) -> dict[str, str]:
        """Of START_REPLICATION. Streaming stays off: rows then come only after their transaction committed."""
        quoted = publication.replace('"', '""')
        return {"proto_version": "1", "publication_names": f'"{quoted}"'}

    def decode(self, messages: list[bytes], rejected: list[Rejected]) -> list[Event]:
        try:
            return self._decode(messages, rejected)
        except (IndexError, UnicodeDecodeError) as exc:
            raise ProtocolError(f"pgoutput message is truncated or is not UTF-8: {exc}") from exc

    def _decode(self, messages: list[bytes], rejected: list[Rejected]) -> list[Event]:
        events: list[Event] = []
        relations = self._relations
        transaction, ordinal = self._transaction, self._ordinal
        at, end = 0, len(messages)
        while at < end:
            if walk is not None and self._skip is None and not self._skipping:
                at, transaction, ordinal, begun, ended = walk(
                    *(messages, at, self._readers, Transaction, self._stamp, transaction, ordinal, events),
                    self.transactions,
                )
                if begun is not None:
                    self.commit_lsn = LSN(begun)
                if ended is not None:
                    self.end = LSN(ended)
                if at == end:
                    break
            data = messages[at]
            at += 1
            if data[0] != XLOGDATA:
                self._other(data)
                continue
            kind = data[HEADER]
            if kind == INSERT:
                oid = int.from_bytes(data[HEADER + 1 : HEADER + 5], "big")
                reading = relations.get(oid)
                if reading is None:
                    if oid not in relations or len(data) < HEADER + 8:
                        raise ProtocolError("pgoutput Insert for a relation that was not announced")
                    continue
                if transaction is None:
                    raise ProtocolError("pgoutput Insert outside of a transaction")
                if self._skipping:
                    self.skipped += 1
                    ordinal += 1
                    continue
                router, slots, width = reading
                row = decode_insert(data, HEADER, slots, width)
                try:
                    events.append(router.event(row, transaction, ordinal))
                except Unroutable as exc:
                    rejected.append(Rejected(router.rejected(row, transaction, ordinal), str(exc)))
                ordinal += 1
            elif kind == BEGIN:
                begin = decode_begin(data, HEADER)
                transaction, ordinal = self._begin(begin.final_lsn, begin.xid, begin.committed_at), 0
            elif kind == COMMIT:
                self._transaction, self._ordinal = transaction, ordinal
                self._commit(decode_commit(data, HEADER).end_lsn)
                transaction = None
            elif kind == RELATION:
                self._announce(decode_relation(data, HEADER))
            # Everything else (types, origins, truncates, messages, what is yet to be invented) is not an insert.
        self._transaction, self._ordinal = transaction, ordinal
        return events

    def _announce(self, relation: Relation) -> None:
        self._readers.pop(relation.oid, None)
        bound = self._bind(f"{relation.schema}.{relation.table}", relation.columns)
        if bound is None:
            self._relations[relation.oid] = None
            return
        router, binding = bound
        self._relations[relation.oid] = (router, binding.slots, binding.width)
        quick = reader(relation.oid, binding, router.recipe)
        if quick is not None:
            self._readers[relation.oid] = quick


def _text(data: bytes, start: int) -> tuple[str, int]:
    end = data.find(b"\0", start)
    if end < 0:
        raise ProtocolError("pgoutput message is truncated inside a name")
    return data[start:end].decode(), end + 1
