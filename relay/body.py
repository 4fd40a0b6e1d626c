"""The body of an event, in the form that `routing.format` names. Pure.

    envelope      {"event_id": …, "payload": <the payload's bytes, spliced>}     the default
    payload       the payload alone; what describes it is in the headers
    cloudevents   the payload alone; CloudEvents attributes are in the headers (binary mode)

The payload is never parsed and never re-encoded: JSON keeps its digits and its spaces, bytea its bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson

from relay.outbox import (
    AGGREGATE_ID,
    AGGREGATE_TYPE,
    BYTEA,
    CREATED_AT,
    EVENT_TYPE,
    ID,
    JSON,
    JSONB,
    NUMBERS,
    PAYLOAD,
    SEQ,
    TIMESTAMP,
    TIMESTAMPTZ,
    UUID,
    Binding,
    Cell,
    Row,
)

Quote = Callable[[Cell], bytes]
Body = Callable[[bytes, Row], bytes | None]
"""event id, row → body; None is a tombstone."""

_ENVELOPE = (
    b'{"event_id":%b,"event_type":%b,"aggregate_type":%b,"aggregate_id":%b,"seq":%b,"occurred_at":%b,"payload":%b}'
)
_USUAL = (
    b'{"event_id":"%b","event_type":%b,"aggregate_type":%b,"aggregate_id":%b,"seq":%b,"occurred_at":"%bT%bZ",'
    b'"payload":%b}'
)
_CACHED = 10_000

RAW, TEXT, TIME = range(3)  # how a cell enters the body: as it is, as a JSON string, as an RFC 3339 time in quotes
Pieces = tuple[tuple[bytes, int, int], ...]
"""A body as data: bytes, then the cell of a place (-1: none), in one of the ways above. For relay/_hot.c."""


def envelope(binding: Binding, *, prefixed: bool) -> Body:
    """`prefixed`: ids carry the table's name, so they are text whatever the column's type."""
    types = binding.types
    quote_id = quoter(0 if prefixed else types[ID])
    quote_event_type = _cached(quoter(types[EVENT_TYPE]))
    quote_aggregate_type = _cached(quoter(types[AGGREGATE_TYPE]))
    quote_aggregate_id = quoter(types[AGGREGATE_ID])
    quote_seq = quoter(types[SEQ])
    quote_time = time_quoter(types[CREATED_AT])
    quote_payload = _payload_quoter(types[PAYLOAD])

    def body(event_id: bytes, row: Row) -> bytes:
        """Whatever the columns are."""
        return _ENVELOPE % (
            quote_id(event_id),
            quote_event_type(row[EVENT_TYPE]),
            quote_aggregate_type(row[AGGREGATE_TYPE]),
            quote_aggregate_id(row[AGGREGATE_ID]),
            quote_seq(row[SEQ]),
            quote_time(row[CREATED_AT]),
            quote_payload(row[PAYLOAD]),
        )

    if prefixed or types[ID] != UUID or types[SEQ] not in NUMBERS or types[CREATED_AT] != TIMESTAMPTZ:
        return body
    if types[PAYLOAD] not in (JSON, JSONB):
        return body

    def usual(event_id: bytes, row: Row) -> bytes:
        """The same for the table that `relay setup` makes: one expression, at half the cost."""
        seq, created_at, payload = row[SEQ], row[CREATED_AT], row[PAYLOAD]
        if (
            seq is None
            or payload is None
            or created_at is None
            or created_at[10:11] != b" "
            or created_at[-3:] != b"+00"
        ):
            return body(event_id, row)
        return _USUAL % (
            event_id,
            quote_event_type(row[EVENT_TYPE]),
            quote_aggregate_type(row[AGGREGATE_TYPE]),
            quote_aggregate_id(row[AGGREGATE_ID]),
            seq,
            created_at[:10],
            created_at[11:-3],
            payload,
        )

    return usual


def pieces(binding: Binding, format_: str, *, prefixed: bool) -> Pieces | None:
    """The usual body as data; None where it takes more than that."""
    types = binding.types
    if types[PAYLOAD] not in (JSON, JSONB):
        return None
    if format_ != "envelope":
        return ((b"", PAYLOAD, RAW),)
    if prefixed or types[ID] != UUID or types[SEQ] not in NUMBERS or types[CREATED_AT] != TIMESTAMPTZ:
        return None
    texts = (EVENT_TYPE, AGGREGATE_TYPE, AGGREGATE_ID)
    if any(quoter(types[place]) is not _text for place in texts):
        return None
    return (
        (b'{"event_id":"', ID, RAW),
        (b'","event_type":', EVENT_TYPE, TEXT),
        (b',"aggregate_type":', AGGREGATE_TYPE, TEXT),
        (b',"aggregate_id":', AGGREGATE_ID, TEXT),
        (b',"seq":', SEQ, RAW),
        (b',"occurred_at":', CREATED_AT, TIME),
        (b',"payload":', PAYLOAD, RAW),
        (b"}", -1, RAW),
    )


def bare(binding: Binding) -> Body:
    """The payload alone: its text, or a bytea's bytes."""
    if binding.types[PAYLOAD] == BYTEA:
        return lambda _id, row: _unhex(row[PAYLOAD])
    return lambda _id, row: row[PAYLOAD]


def content_type(binding: Binding, format_: str) -> bytes:
    """What the body is; the application may know better and say so in the row's headers."""
    oid = binding.types[PAYLOAD]
    if format_ == "envelope" or oid in (JSON, JSONB):
        return b"application/json"
    return b"application/octet-stream" if oid == BYTEA else b"text/plain; charset=utf-8"


def quoter(type_oid: int) -> Quote:
    """How a column's text becomes JSON."""
    if type_oid == UUID:
        return _plain
    return _number if type_oid in NUMBERS else _text


def time_quoter(type_oid: int) -> Quote:
    """Timestamps in the form that every JSON library reads; other types as they are."""
    if type_oid == TIMESTAMPTZ:
        return lambda cell: b"null" if cell is None else b'"%b"' % rfc3339(cell)
    if type_oid == TIMESTAMP:
        return lambda cell: b"null" if cell is None else b'"%b"' % cell.replace(b" ", b"T", 1)
    return quoter(type_oid)


def rfc3339(cell: bytes) -> bytes:
    """`2026-11-16 04:13:30.12+00`, as a session in UTC prints it, with T and Z; infinity and BC stay as they are."""
    if cell[10:11] == b" " and cell[-3:] == b"+00":
        return b"%bT%bZ" % (cell[:10], cell[11:-3])
    return cell


def _plain(cell: Cell) -> bytes:
    return b"null" if cell is None else b'"%b"' % cell


def _number(cell: Cell) -> bytes:
    return cell or b"null"


def _text(cell: Cell) -> bytes:
    return b"null" if cell is None else orjson.dumps(cell.decode())


def _payload_quoter(type_oid: int) -> Quote:
    if type_oid in (JSON, JSONB):
        return _number  # JSON already
    return _text  # text, and bytea in its \x form


def _unhex(cell: Cell) -> bytes | None:
    return None if cell is None else bytes.fromhex(cell[2:].decode())


def _cached(quote: Quote) -> Quote:
    """For columns with few different values."""
    known: dict[Cell, bytes] = {}

    def cached(cell: Cell) -> bytes:
        found = known.get(cell)
        if found is None:
            if len(known) >= _CACHED:
                known.clear()
            found = known[cell] = quote(cell)
        return found

    return cached
