"""Row → Event: topic, key, headers and body. Pure.

The payload's bytes are spliced into the body, never parsed. What cannot be routed is not dropped: `Unroutable` carries
the reason, and the caller turns it into a rejected event. `Router.event` runs once per event: keep it flat.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import orjson

from relay.config import Routing
from relay.event import Event, HeaderNames, Transaction
from relay.outbox import (
    AGGREGATE_ID,
    AGGREGATE_TYPE,
    BYTEA,
    CREATED_AT,
    EVENT_TYPE,
    FIELDS,
    HEADERS,
    ID,
    JSON,
    JSONB,
    NUMBERS,
    PARTITION_KEY,
    PAYLOAD,
    SEQ,
    TIMESTAMPTZ,
    UUID,
    Binding,
    Row,
)

CONTENT_TYPE = b"application/json"
OWN_HEADERS = ("id", "type", "aggregate-type", "aggregate-id", "seq", "content-type", "relay-position")

_ENVELOPE = (
    b'{"event_id":%b,"event_type":%b,"aggregate_type":%b,"aggregate_id":%b,"seq":%b,"occurred_at":%b,"payload":%b}'
)
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110 token: what NATS and HTTP take
_RESERVED = ("nats-", "relay-")
_TEMPLATE = re.compile(r"\{(\w+)\}")
_CACHED = 10_000

Cell = bytes | None
Quote = Callable[[Cell], bytes]


class Unroutable(Exception):
    """This row can never become an event; says why."""


class Router:
    """Turns the rows of one bound table into events."""

    def __init__(self, routing: Routing, binding: Binding) -> None:
        mapping = binding.mapping
        self._table = mapping.table
        self._own = HeaderNames.of(OWN_HEADERS)
        self._extra_names = mapping.header_names
        self._topic = _topic(routing, self._table)
        self._key = _fields(routing.key, self._table)
        self._copies = binding.copies
        self._id_prefix = f"{self._table}:".encode() if mapping.several and binding.types[ID] != UUID else b""
        types = binding.types
        self._quote_id = _quoter(0 if self._id_prefix else types[ID])
        self._quote_event_type = _cached(_quoter(types[EVENT_TYPE]))
        self._quote_aggregate_type = _cached(_quoter(types[AGGREGATE_TYPE]))
        self._quote_aggregate_id = _quoter(types[AGGREGATE_ID])
        self._quote_seq = _quoter(types[SEQ])
        self._quote_time = _rfc3339 if types[CREATED_AT] == TIMESTAMPTZ else _quoter(0)
        self._quote_payload = _payload(types[PAYLOAD])

    def event(self, row: list[Cell], transaction: Transaction, ordinal: int) -> Event:
        """The event of a row; raises Unroutable."""
        for source, place in self._copies:
            row[place] = row[source]
        event_id = row[ID]
        if not event_id:
            raise Unroutable("the event id is NULL or empty")
        if self._id_prefix:
            event_id = self._id_prefix + event_id
        event_type, aggregate_type = row[EVENT_TYPE], row[AGGREGATE_TYPE]
        aggregate_id, seq = row[AGGREGATE_ID], row[SEQ]
        position = transaction.stamp + b"%d" % ordinal
        values: tuple[Cell, ...] = (event_id, event_type, aggregate_type, aggregate_id, seq, CONTENT_TYPE, position)
        if row[HEADERS] is None and not self._extra_names and None not in values:
            names = self._own
        else:
            names, values = self._with_row_headers(row, values)
        return Event(
            event_id,
            self._topic(row),
            row[PARTITION_KEY] or self._key(row),
            names,
            values,  # type: ignore[arg-type]  # no None is left in it
            _ENVELOPE
            % (
                self._quote_id(event_id),
                self._quote_event_type(event_type),
                self._quote_aggregate_type(aggregate_type),
                self._quote_aggregate_id(aggregate_id),
                self._quote_seq(seq),
                self._quote_time(row[CREATED_AT]),
                self._quote_payload(row[PAYLOAD]),
            ),
            self._table,
            transaction,
            ordinal,
        )

    def rejected(self, row: list[Cell], transaction: Transaction, ordinal: int) -> Event:
        """What can be said of a row that is unroutable: enough to keep it and to show it."""
        return Event(
            row[ID] or b"",
            "",
            row[AGGREGATE_ID],
            HeaderNames.of(()),
            (),
            row[PAYLOAD],
            self._table,
            transaction,
            ordinal,
        )

    def _with_row_headers(self, row: list[Cell], own: tuple[Cell, ...]) -> tuple[HeaderNames, tuple[bytes, ...]]:
        """Ours first, then the mapped columns, then the row's own headers; ours are never overridden."""
        headers = {name: value for name, value in zip(OWN_HEADERS, own, strict=True) if value is not None}
        for name, value in zip(self._extra_names, row[len(FIELDS) :], strict=True):
            if value is not None:
                headers.setdefault(name, value)
        taken = {name.lower() for name in (*headers, *OWN_HEADERS)}
        headers |= {name: value for name, value in _row_headers(row[HEADERS]) if name.lower() not in taken}
        return HeaderNames.of(tuple(headers)), tuple(headers.values())


def _row_headers(cell: Cell) -> list[tuple[str, bytes]]:
    if cell is None or cell == b"null":
        return []
    try:
        parsed = orjson.loads(cell)
    except orjson.JSONDecodeError as exc:
        raise Unroutable(f"the headers are not JSON: {exc}") from None
    if not isinstance(parsed, dict):
        raise Unroutable("the headers are not a JSON object")
    result = []
    for name, value in parsed.items():
        if name.lower().startswith(_RESERVED):
            raise Unroutable(f"the header {name!r} is reserved (Nats-* and relay-* steer the broker and the relay)")
        if not _HEADER_NAME.fullmatch(name):
            raise Unroutable(f"{name!r} is not a legal header name")
        if value is not None:
            result.append((name, value.encode() if isinstance(value, str) else orjson.dumps(value)))
    return result


def _fields(template: str, table: str) -> Callable[[Row], bytes | None]:
    """Renders a template from a row; None when a field of it is NULL or empty."""
    parts: list[bytes | int] = []
    for i, part in enumerate(_TEMPLATE.split(template)):
        if i % 2 == 0:
            if part:
                parts.append(part.encode())
        elif part == "table":
            parts.append(table.encode())
        else:
            parts.append(FIELDS.index(part))
    if len(parts) == 1 and isinstance(parts[0], int):
        place = parts[0]
        return lambda row: row[place] or None

    def render(row: Row) -> bytes | None:
        pieces = [row[part] if isinstance(part, int) else part for part in parts]
        return None if not all(pieces) else b"".join(pieces)  # type: ignore[arg-type]

    return render


def _topic(routing: Routing, table: str) -> Callable[[Row], str]:
    """The row's topic. Rows with the same routing fields share one string: topics are few, rows are many."""
    wanted, fallback = _fields(routing.topic, table), _fields(routing.fallback_topic, table)
    names = _TEMPLATE.findall(routing.topic + routing.fallback_topic)
    places = sorted({FIELDS.index(name) for name in names if name != "table"})
    known: dict[tuple[Cell, ...], str] = {}

    def topic(row: Row) -> str:
        cells = tuple([row[place] for place in places])
        found = known.get(cells)
        if found is None:
            rendered = wanted(row) or fallback(row)
            if rendered is None:
                raise Unroutable(
                    f"no topic: fields of {routing.topic!r} and of {routing.fallback_topic!r} are NULL in this row"
                )
            if len(known) >= _CACHED:
                known.clear()
            found = known[cells] = rendered.decode()
        return found

    return topic


def _null_or_text(cell: Cell) -> bytes:
    return b"null" if cell is None else orjson.dumps(cell.decode())


def _null_or_plain(cell: Cell) -> bytes:
    return b"null" if cell is None else b'"%b"' % cell


def _null_or_number(cell: Cell) -> bytes:
    return cell or b"null"


def _quoter(type_oid: int) -> Quote:
    if type_oid == UUID:
        return _null_or_plain
    return _null_or_number if type_oid in NUMBERS else _null_or_text


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


def _rfc3339(cell: Cell) -> bytes:
    """`2026-11-16 04:13:30.12+00`, as a session in UTC prints it, in the form that every JSON library reads."""
    if cell is None:
        return b"null"
    if cell[10:11] == b" " and cell[-3:] == b"+00":
        return b'"%bT%bZ"' % (cell[:10], cell[11:-3])
    return _null_or_text(cell)  # infinity, BC


def _payload(type_oid: int) -> Quote:
    if type_oid in (JSON, JSONB):
        return lambda cell: b"null" if cell is None else cell
    if type_oid == BYTEA:
        return lambda cell: b"null" if cell is None else orjson.dumps(cell.decode())
    return _null_or_text
