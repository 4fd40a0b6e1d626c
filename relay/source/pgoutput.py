"""pgoutput (protocol 1, text format): bytes → messages. Pure.

Follows the "Logical Replication Message Formats" chapter of the PostgreSQL manual. A truncated or corrupt message is a
ProtocolError, never a wrong event; message types that do not concern an insert-only reader are not decoded at all.
All functions take the whole CopyData buffer and the offset where the message starts, so that nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as struct_error
from typing import NamedTuple

from relay.errors import ProtocolError

BEGIN, COMMIT, RELATION, INSERT, MESSAGE = b"BCRIM"

_BEGIN = Struct(">QqI")  # final_lsn, commit time, xid
_COMMIT = Struct(">BQQq")  # flags, commit_lsn, end_lsn, commit time
_COLUMN = Struct(">Ii")  # type OID, type modifier
_OID = Struct(">I")
_COUNT = Struct(">H")
_EPOCH = 946_684_800  # 2000-01-01 in Unix time: Postgres counts microseconds from there


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


def unix_time(microseconds: int) -> float:
    return _EPOCH + microseconds / 1_000_000


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


def relation_oid(data: bytes, start: int) -> int:
    """Which relation an Insert concerns."""
    return int.from_bytes(data[start + 1 : start + 5], "big")


def decode_insert(data: bytes, start: int, slots: Sequence[int], width: int) -> list[bytes | None]:
    """The row's values in text form, column i in place `slots[i]` of a list of `width` (-1: not wanted)."""
    if data[start + 5 : start + 8] != b"N" + len(slots).to_bytes(2, "big"):
        raise ProtocolError(f"pgoutput Insert does not announce {len(slots)} columns as its Relation did")
    cells: list[bytes | None] = [None] * width
    pos = start + 8
    try:
        for slot in slots:
            kind = data[pos]
            if kind == 116:  # t: text
                begin = pos + 5
                pos = begin + int.from_bytes(data[pos + 1 : begin], "big")
                if slot >= 0:
                    cells[slot] = data[begin:pos]
            elif kind == 110:  # n: NULL
                pos += 1
            else:
                raise ProtocolError(f"pgoutput Insert has a value of unknown kind {chr(kind)!r}")
    except IndexError:
        raise ProtocolError("pgoutput Insert is truncated") from None
    if pos != len(data):
        raise ProtocolError(f"pgoutput Insert is {len(data) - start} bytes long, its columns need {pos - start}")
    return cells


def _text(data: bytes, start: int) -> tuple[str, int]:
    end = data.find(b"\0", start)
    if end < 0:
        raise ProtocolError("pgoutput message is truncated inside a name")
    return data[start:end].decode(), end + 1
