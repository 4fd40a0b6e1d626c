"""Row → Event: topic, key, headers and body. Pure.

What cannot be routed is not dropped: `Unroutable` carries the reason, and the caller turns it into a rejected event.
`Router.event` runs once per event: keep it flat.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson

from relay.body import Body, Pieces, bare, content_type, envelope, pieces, rfc3339
from relay.config import Routing
from relay.errors import ConfigError
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
    PARTITION_KEY,
    PAYLOAD,
    SEQ,
    STREAM,
    TIMESTAMPTZ,
    UUID,
    Binding,
    Cell,
    Row,
)
from relay.schema import Check, load_schemas

_PARTS = {"type": EVENT_TYPE, "aggregate-type": AGGREGATE_TYPE, "aggregate-id": AGGREGATE_ID, "seq": SEQ}
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110 token: what NATS and HTTP take
_RESERVED = ("nats-", "relay-")
_TEMPLATE = re.compile(r"\{(\w+)\}")
_CACHED = 10_000
_EXACT = (str, bool, int, type(None))  # header values that orjson reads without loss
_UNCHANGED = "!#$&'()*+,/:;<=>?@[\\]^_`{|}~-."  # printable ASCII but space, quote and percent: as in HTTP headers

Values = Callable[[bytes, Row, bytes], tuple[Cell, ...]]
"""event id, row, position → values of the relay's own headers, None where the row has none."""


EVENT_ID, POSITION = -1, -2  # in a recipe, among the places of header values


class Recipe(NamedTuple):
    """What `Router.event` does, as data, where the table and the routing are usual ones. For relay/_hot.c."""

    id: int
    row_headers: int  # only rows that have none are usual
    key: int
    otherwise: int  # the key where that cell is NULL or empty
    names: HeaderNames
    table: str
    topics: dict[Any, str]  # topics that are known, by the cell, or the cells, at:
    topic_places: tuple[int, ...]
    values: tuple[bytes | int, ...]
    body: Pieces


class Unroutable(Exception):
    """This row can never become an event; says why."""


class Router:
    """Turns the rows of one bound table into events."""

    def __init__(self, routing: Routing, binding: Binding, *, sink: str = "jetstream") -> None:
        """`sink` is `sink.kind`: the brokers' bindings of CloudEvents name the attributes differently."""
        mapping = binding.mapping
        self._table = mapping.table
        self._topic, self._topics, self._topic_places = _topic(routing, self._table)
        self._key = _fields(routing.key, self._table)
        self._copies = binding.copies
        self._id_prefix = f"{self._table}:".encode() if mapping.several and binding.types[ID] != UUID else b""
        prefixed = bool(self._id_prefix)
        self._body = envelope(binding, prefixed=prefixed) if routing.format == "envelope" else bare(binding)
        names, self._values, places = _own_headers(routing, binding, sink)
        self._own = HeaderNames.of(names)
        self._taken = frozenset(name.lower() for name in names)
        if content_type(binding, routing.format) != b"application/json":
            self._taken -= {"content-type"}  # of other payloads only the application knows what they are
        self._extra_names = mapping.header_names
        if routing.schemas:
            if binding.types[PAYLOAD] == BYTEA:
                reason = f"{self._table}: routing.schemas needs a JSON payload, and {mapping.columns[PAYLOAD]} is bytea"
                raise ConfigError([reason], hint="leave routing.schemas out, for this table in [outbox.routing]")
            self._body = _valid(load_schemas(routing.schemas), self._body)
        self.recipe = self._recipe(routing, binding, places)

    def _recipe(self, routing: Routing, binding: Binding, values: tuple[bytes | int, ...] | None) -> Recipe | None:
        source = {place: at for at, place in binding.copies}  # where a shared column's cell really is
        key = _TEMPLATE.fullmatch(routing.key)
        body = pieces(binding, routing.format, prefixed=bool(self._id_prefix))
        if self._id_prefix or self._extra_names or routing.schemas or values is None or body is None:
            return None
        if key is None or key[1] == "table" or not self._topic_places:
            return None
        otherwise = FIELDS.index(key[1])
        return Recipe(
            id=source.get(ID, ID),
            row_headers=source.get(HEADERS, HEADERS),
            key=source.get(PARTITION_KEY, PARTITION_KEY),
            otherwise=source.get(otherwise, otherwise),
            names=self._own,
            table=self._table,
            topics=self._topics,
            topic_places=tuple(source.get(place, place) for place in self._topic_places),
            values=tuple(source.get(value, value) if isinstance(value, int) else value for value in values),
            body=tuple((text, source.get(place, place), kind) for text, place, kind in body),
        )

    def event(self, row: list[Cell], transaction: Transaction, ordinal: int) -> Event:
        """The event of a row; raises Unroutable."""
        for source, place in self._copies:
            row[place] = row[source]
        event_id = row[ID]
        if not event_id:
            raise Unroutable("the event id is NULL or empty")
        if self._id_prefix:
            event_id = self._id_prefix + event_id
        values = self._values(event_id, row, transaction.stamp + b"%d" % ordinal)
        if row[HEADERS] is None and not self._extra_names and None not in values:
            names = self._own
        else:
            names, values = self._with_row_headers(row, values)
        try:
            return Event(
                event_id,
                self._topic(row),
                row[PARTITION_KEY] or self._key(row),
                names,
                values,  # type: ignore[arg-type]  # no None is left in it
                self._body(event_id, row),
                self._table,
                transaction,
                ordinal,
            )
        except UnicodeDecodeError as exc:  # a database in SQL_ASCII stores, and sends, any bytes
            raise Unroutable(f"a text of the row is not UTF-8: {exc.object[:40]!r}") from None

    def rejected(self, row: list[Cell], transaction: Transaction, ordinal: int) -> Event:
        """What can be said of a row that is unroutable: enough to keep it and to show it."""
        key, names = row[PARTITION_KEY] or self._key(row), HeaderNames.of(())
        event_id = row[ID] or b""
        return Event(
            event_id and self._id_prefix + event_id, "", key, names, (), row[PAYLOAD], self._table, transaction, ordinal
        )

    def _with_row_headers(self, row: list[Cell], own: tuple[Cell, ...]) -> tuple[HeaderNames, tuple[bytes, ...]]:
        """Ours first, then the mapped columns, then the row's own; ours are never overridden."""
        headers = {name: value for name, value in zip(self._own.names, own, strict=True) if value is not None}
        for name, value in zip(self._extra_names, row[len(FIELDS) :], strict=True):
            if value is not None:
                headers.setdefault(name, value)
        taken = self._taken | {name.lower() for name in self._extra_names}
        for name, value in _row_headers(row[HEADERS]):
            lowered = name.lower()
            if lowered == "content-type" and lowered not in taken:
                headers |= {known: value for known in ("content-type", "ce-datacontenttype") if known in headers}
            elif lowered not in taken:
                headers[name] = value
        return HeaderNames.of(tuple(headers)), tuple(headers.values())


def _valid(schemas: Mapping[bytes, Check], body: Body) -> Body:
    """The body of payloads that fit their event type's schema; a NULL (a tombstone) has no payload to judge."""

    def checked(event_id: bytes, row: Row) -> bytes | None:
        payload, check = row[PAYLOAD], schemas.get(row[EVENT_TYPE] or b"")
        if check is not None and payload is not None:
            reason = check(payload)
            if reason:
                raise Unroutable(reason)
        return body(event_id, row)

    return checked


def _own_headers(
    routing: Routing, binding: Binding, sink: str
) -> tuple[tuple[str, ...], Values, tuple[bytes | int, ...] | None]:
    """Names and values of the headers that describe the event; the values also as a recipe has them, if it can."""
    described = content_type(binding, routing.format)
    constants = {"content-type": described}
    places = {name: _PARTS.get(name) for name in routing.headers}
    if binding.mapping.columns[STREAM]:
        # JetStream then refuses to store the event in any other stream; elsewhere it is information.
        places["Nats-Expected-Stream" if sink == "jetstream" else "stream"] = STREAM
    if routing.format == "cloudevents":
        prefix = "ce-" if sink == "jetstream" else "ce_"
        # A URI reference, so a table's name in it must be made one.
        source = quote(routing.source.replace("{table}", binding.mapping.table), safe="/:?#[]@!$&'()*+,;=%~")
        source = quote(source, safe=_UNCHANGED) if sink == "jetstream" else source
        constants |= {f"{prefix}specversion": b"1.0", f"{prefix}source": source.encode()}
        places |= dict.fromkeys((f"{prefix}specversion", f"{prefix}id", f"{prefix}source"))
        places |= {f"{prefix}type": EVENT_TYPE, f"{prefix}subject": AGGREGATE_ID}
        if sink == "jetstream":
            constants[f"{prefix}datacontenttype"] = described
            places[f"{prefix}datacontenttype"] = None
        if binding.types[CREATED_AT] == TIMESTAMPTZ:  # others are not points in time
            places[f"{prefix}time"] = CREATED_AT
    names = (*places, "relay-position")
    # (constant or None for the id, or place in the row) of each header, in order
    steps = [(constants.get(name), place) for name, place in places.items()]
    fixed = [constant or (EVENT_ID if place is None else place) for constant, place in steps]
    recipe = (*fixed, POSITION)
    if routing.format != "cloudevents" and tuple(places) == ("id", *_PARTS, "content-type"):

        def usual(event_id: bytes, row: Row, position: bytes) -> tuple[Cell, ...]:
            event_type, aggregate_type = row[EVENT_TYPE], row[AGGREGATE_TYPE]
            return event_id, event_type, aggregate_type, row[AGGREGATE_ID], row[SEQ], described, position

        return names, usual, recipe
    if routing.format == "cloudevents":
        attributes = frozenset(at for at, name in enumerate(places) if name.startswith("ce"))
        return names, _cloudevent(steps, attributes, encoded=sink == "jetstream"), None

    def values(event_id: bytes, row: Row, position: bytes) -> tuple[Cell, ...]:
        found: list[Cell] = []
        for constant, place in steps:
            value = event_id if place is None else row[place]
            if constant is not None:
                value = constant
            found.append(value)
        return (*found, position)

    return names, values, recipe


def _cloudevent(
    steps: Sequence[tuple[bytes | None, int | None]], attributes: Container[int], *, encoded: bool
) -> Values:
    """As `values`, where the steps that are `attributes` obey the specification (`encoded`: of the NATS binding)."""

    def values(event_id: bytes, row: Row, position: bytes) -> tuple[Cell, ...]:
        if not row[EVENT_TYPE]:
            raise Unroutable("a CloudEvent has a type, and this row's event type is NULL or empty")
        found: list[Cell] = []
        for at, (constant, place) in enumerate(steps):
            value = event_id if place is None else row[place]
            if constant is not None:
                value = constant
            elif value is not None and at in attributes:
                if place == CREATED_AT:
                    value = rfc3339(value)
                    value = value if value.endswith(b"Z") else b""  # infinity, or a year that RFC 3339 cannot write
                elif encoded:
                    value = quote(value, safe=_UNCHANGED).encode()
                value = value or None  # no attribute may be empty
            found.append(value)
        return (*found, position)

    return values


def _row_headers(cell: Cell) -> list[tuple[str, bytes]]:
    if cell is None or cell == b"null":
        return []
    try:
        parsed = orjson.loads(cell)
        if isinstance(parsed, dict) and not all(isinstance(each, _EXACT) for each in parsed.values()):
            parsed = _as_written(cell)
    except orjson.JSONDecodeError as exc:
        try:
            parsed = _as_written(cell)  # it may be JSON all the same, with a number that is too large for a double
        except (ValueError, RecursionError):
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
            try:
                result.append((name, value.encode() if isinstance(value, str) else orjson.dumps(value)))
            except (UnicodeEncodeError, orjson.JSONEncodeError):  # half of a surrogate pair
                raise Unroutable(f"the header {name!r} is not Unicode text") from None
    return result


def _as_written(cell: bytes) -> Any:
    """The JSON with every number as it stands there: a double would lose digits, and zeros at the end."""
    return json.loads(cell, parse_float=orjson.Fragment, parse_int=orjson.Fragment, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


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


def _topic(routing: Routing, table: str) -> tuple[Callable[[Row], str], dict[Any, str], tuple[int, ...]]:
    """The row's topic. Rows with the same routing fields share one string: topics are few, rows are many.

    Also what is known of topics, and the places of the cells that it is known by.
    """
    wanted, fallback = _fields(routing.topic, table), _fields(routing.fallback_topic, table)
    names = _TEMPLATE.findall(routing.topic + routing.fallback_topic)
    places = sorted({FIELDS.index(name) for name in names if name != "table"})
    known: dict[Any, str] = {}  # by the cells, one or several

    cells_of = itemgetter(*places) if places else lambda _row: ()

    def topic(row: Row) -> str:
        cells = cells_of(row)
        found = known.get(cells)
        if found is None:
            rendered = wanted(row) or fallback(row)
            if not rendered:
                raise Unroutable(
                    f"no topic: fields of {routing.topic!r} and of {routing.fallback_topic!r} are NULL in this row"
                )
            if len(known) >= _CACHED:
                known.clear()
            found = known[cells] = rendered.decode()
        return found

    return topic, known, tuple(places)
