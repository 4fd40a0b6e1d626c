"""Rows → events: topic, key, headers, envelope. The other body formats have tests of their own."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.body import _CACHED as BODY_CACHED
from relay.body import _cached, rfc3339
from relay.config import Outbox, Routing
from relay.event import Event, Transaction
from relay.outbox import FIELDS, Mapping
from relay.routing import _CACHED, Router, Unroutable, _topic

ORIGIN = Transaction(700, 0x100000010, 0.0, b"relay:7:1:stream:1:1/10:")
TYPES = {
    "seq": 20,
    "id": 2950,
    "aggregate_type": 25,
    "aggregate_id": 25,
    "event_type": 25,
    "topic": 25,
    "partition_key": 25,
    "payload": 3802,
    "headers": 3802,
    "created_at": 1184,
}
ROW: dict[str, bytes | None] = {
    "seq": b"42",
    "id": b"0199b2c4-5d6e-7f80-8123-456789abcdef",
    "aggregate_type": b"order",
    "aggregate_id": b"o-1",
    "event_type": b"created",
    "topic": None,
    "partition_key": None,
    "payload": b'{"total": 1.50}',
    "headers": None,
    "created_at": b"2026-11-16 04:13:30.12+00",
}
OWN = {
    "id": ROW["id"],
    "type": b"created",
    "aggregate-type": b"order",
    "aggregate-id": b"o-1",
    "seq": b"42",
    "content-type": b"application/json",
    "relay-position": ORIGIN.stamp + b"3",
}

# Everything that a text column can hold: no NUL, no lone surrogates.
TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30)
CELL = st.none() | TEXT.map(str.encode)


def router(
    routing: Routing | None = None, outbox: Outbox | None = None, *, several: bool = False, **types: int
) -> Router:
    outbox = outbox or Outbox()
    columns = {**TYPES, **types, **dict.fromkeys(outbox.header_columns.values(), 25), "xid": 5069}
    mapping = Mapping.of(outbox, 0, several=several)
    return Router(routing or Routing(), mapping.bind(list(columns.items())))


def cells(**changes: bytes | None) -> list[bytes | None]:
    row = {**ROW, **changes}
    return [row.pop(field, None) for field in FIELDS] + list(row.values())


def event(route: Router | None = None, **changes: bytes | None) -> Event:
    return (route or router()).event(cells(**changes), ORIGIN, 3)


def headers(made: Event) -> dict[str, bytes]:
    pairs = made.headers()
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def body(made: Event) -> dict[str, Any]:
    assert made.body is not None
    parsed: dict[str, Any] = json.loads(made.body, parse_float=Decimal)
    return parsed


# --------------------------------------------------------------------------------------------------------- envelope


@given(CELL, CELL, CELL, CELL, st.integers(-(2**63), 2**63 - 1))
def test_the_envelope_is_json_for_whatever_the_row_holds(
    aggregate_type: bytes | None, aggregate_id: bytes | None, event_type: bytes | None, key: bytes | None, seq: int
) -> None:
    made = event(
        topic=b"t",
        aggregate_type=aggregate_type,
        aggregate_id=aggregate_id,
        event_type=event_type,
        partition_key=key,
        seq=b"%d" % seq,
    )

    def text(cell: bytes | None) -> str | None:
        return None if cell is None else cell.decode()

    assert body(made) == {
        "event_id": "0199b2c4-5d6e-7f80-8123-456789abcdef",
        "event_type": text(event_type),
        "aggregate_type": text(aggregate_type),
        "aggregate_id": text(aggregate_id),
        "seq": seq,
        "occurred_at": "2026-11-16T04:13:30.12Z",
        "payload": {"total": Decimal("1.50")},
    }
    assert made.key == (key or aggregate_id or None)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=8,
)


@given(JSON_VALUES, st.sampled_from([None, 1]), st.booleans())
def test_the_payload_is_spliced_byte_by_byte(value: Any, indent: int | None, ascii_only: bool) -> None:
    payload = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    made = event(payload=payload)
    assert made.body is not None
    assert made.body.endswith(b',"payload":' + payload + b"}")
    assert body(made)["payload"] == value


@pytest.mark.parametrize("payload", [b"1.50", b"12345678901234567890123", b"1e400", b'{"a": 1, "a": 2}', b'"\\u0000"'])
def test_what_a_json_library_would_change_is_kept(payload: bytes) -> None:
    for oid in (114, 3802):
        made = event(router(payload=oid), payload=payload)
        assert made.body is not None
        assert made.body.endswith(b',"payload":' + payload + b"}")


def test_nulls() -> None:
    made = event(topic=b"t", **dict.fromkeys(("seq", "aggregate_type", "aggregate_id", "event_type", "created_at")))
    parsed = body(made)
    assert [parsed[name] for name in ("seq", "aggregate_type", "aggregate_id", "event_type", "occurred_at")] == [
        None
    ] * 5
    assert headers(made) == {name: OWN[name] for name in ("id", "content-type", "relay-position")}
    assert made.key is None
    assert body(event(payload=None))["payload"] is None


@given(TEXT)
def test_payloads_that_are_not_json_become_strings(text: str) -> None:
    assert body(event(router(payload=25), payload=text.encode()))["payload"] == text


def test_payloads_in_bytea_keep_their_hex() -> None:
    assert body(event(router(payload=17), payload=b"\\xdeadbeef"))["payload"] == "\\xdeadbeef"


@pytest.mark.parametrize(
    ("oid", "cell", "value"),
    [(20, b"9007199254740993", 9007199254740993), (25, b"7", "7"), (5069, b"700", 700), (1700, b"1.50", "1.50")],
)
def test_ids_keep_their_kind(oid: int, cell: bytes, value: object) -> None:
    made = event(router(id=oid), id=cell)
    assert body(made)["event_id"] == value
    assert made.id == cell


# ------------------------------------------------------------------------------------------------------------- times


@given(st.datetimes(min_value=datetime(1, 1, 1), max_value=datetime(9999, 12, 31)))  # noqa: DTZ001  UTC is added
def test_times_are_rfc_3339(moment: datetime) -> None:
    fraction = f".{moment.microsecond:06d}".rstrip("0") if moment.microsecond else ""
    cell = f"{moment:%H:%M:%S}{fraction}+00"
    cell = f"{moment.year:04d}-{moment:%m-%d} {cell}"  # strftime pads years before 1000 differently on each system
    rendered = body(event(created_at=cell.encode()))["occurred_at"]
    assert "T" in rendered and rendered.endswith("Z")
    whole, _, digits = rendered[:-1].partition(".")
    exact = f"{whole}.{digits.ljust(6, '0')}+00:00"  # Python 3.11 reads any number of digits, but let us not rely on it
    assert datetime.fromisoformat(exact) == moment.replace(tzinfo=UTC)


@pytest.mark.parametrize(
    "cell", [b"infinity", b"-infinity", b"0044-03-15 12:00:00+00 BC", b"10000-01-01 00:00:00+00", b""]
)
def test_times_that_rfc_3339_does_not_know_stay_as_postgres_writes_them(cell: bytes) -> None:
    assert rfc3339(cell) == cell
    assert body(event(created_at=cell))["occurred_at"] == cell.decode()


def test_times_without_a_zone_get_none() -> None:
    made = event(router(created_at=1114), created_at=b"2026-11-16 04:13:30")
    assert body(made)["occurred_at"] == "2026-11-16T04:13:30"


# --------------------------------------------------------------------------------------------------------------- id


@pytest.mark.guarantee("G3")
def test_ids_of_several_tables_cannot_collide() -> None:
    made = event(router(several=True, id=20), id=b"7")
    assert made.id == headers(made)["id"] == b"public.outbox_events:7"
    assert body(made)["event_id"] == "public.outbox_events:7"
    assert event(router(several=True)).id == ROW["id"]  # a UUID is unique by itself
    assert event(router(id=20), id=b"7").id == b"7"


@pytest.mark.guarantee("G3")
def test_a_rejected_row_keeps_its_identity() -> None:
    route = router(several=True, id=20)
    row = cells(id=b"7", partition_key=b"p")
    made = route.rejected(row, ORIGIN, 3)
    assert (made.id, made.key, made.body, made.ordinal) == (b"public.outbox_events:7", b"p", ROW["payload"], 3)
    assert route.rejected(cells(id=None), ORIGIN, 0).id == b""


@pytest.mark.parametrize("missing", [None, b""])
def test_without_an_id_there_is_no_event(missing: bytes | None) -> None:
    with pytest.raises(Unroutable, match="event id"):
        event(id=missing)


@pytest.mark.parametrize("column", ["aggregate_id", "aggregate_type", "event_type", "topic", "headers"])
def test_text_that_is_not_utf_8_rejects_the_row_and_nothing_else(column: str) -> None:
    """A database in SQL_ASCII stores any bytes, and no client encoding converts them."""
    with pytest.raises(Unroutable):
        event(None, **{column: b"caf\xe9"})
    event()


# ------------------------------------------------------------------------------------------------------ topic and key


def test_the_rows_topic_comes_first_then_the_fallback() -> None:
    route = router()
    assert event(route, topic=b"explicit").topic == "explicit"
    assert event(route).topic == event(route, topic=b"").topic == "events.order.created"
    assert event(route, aggregate_type="käse".encode()).topic == "events.käse.created"


def test_templates() -> None:
    route = router(Routing(topic="{table}/{aggregate_type}-{id}", key="{aggregate_type}:{aggregate_id}"))
    made = event(route)
    assert made.topic == "public.outbox_events/order-0199b2c4-5d6e-7f80-8123-456789abcdef"
    assert made.key == b"order:o-1"
    assert event(router(Routing(topic="fixed"))).topic == "fixed"
    # A field that is NULL: the whole template is.
    assert event(route, aggregate_id=None).key is None


def test_no_topic_at_all() -> None:
    with pytest.raises(Unroutable, match="no topic"):
        event(aggregate_type=None)
    with pytest.raises(Unroutable, match="no topic"):
        event(router(Routing(topic="", fallback_topic="")))


def test_the_partition_key_overrides_the_key() -> None:
    assert event(partition_key=b"p").key == b"p"
    assert event(partition_key=b"").key == event().key == b"o-1"
    assert event(aggregate_id=b"").key is None


@given(st.lists(st.tuples(CELL, CELL, CELL), max_size=20))
def test_cached_topics_are_those_of_a_fresh_router(rows: list[tuple[bytes | None, bytes | None, bytes | None]]) -> None:
    shared = router()
    for topic, aggregate_type, event_type in rows * 2:
        changes = {"topic": topic, "aggregate_type": aggregate_type, "event_type": event_type}
        outcomes = []
        for route in (shared, router()):
            try:
                outcomes.append(event(route, **changes).topic)
            except Unroutable as exc:
                outcomes.append(str(exc))
        assert outcomes[0] == outcomes[1]


@pytest.mark.guarantee("G8")
def test_caches_are_bounded() -> None:
    topic, known, _ = _topic(Routing(topic="{aggregate_id}"), "public.o")
    quote = _cached(lambda cell: cell or b"")
    (quoted,) = [cell.cell_contents for cell in quote.__closure__ or () if isinstance(cell.cell_contents, dict)]
    for number in range(25_000):
        assert topic(cells(aggregate_id=b"%d" % number)) == str(number)
        assert quote(b"%d" % number) == b"%d" % number
        assert len(known) <= _CACHED and len(quoted) <= BODY_CACHED


# ----------------------------------------------------------------------------------------------------------- headers


def test_our_headers() -> None:
    assert headers(event()) == OWN


HEADER_TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=10)
LEGAL = st.text(
    "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", min_size=1, max_size=12
)


@given(st.dictionaries(LEGAL | st.sampled_from(["ID", "Type", "seq", "Content-Type", "traceparent"]), HEADER_TEXT))
def test_the_rows_headers_pass_and_never_override_ours(given_headers: dict[str, str]) -> None:
    cell = json.dumps(given_headers).encode()
    if any(name.lower().startswith(("nats-", "relay-")) for name in given_headers):
        with pytest.raises(Unroutable, match="reserved"):
            event(headers=cell)
        return
    passed = {name: value.encode() for name, value in given_headers.items() if name.lower() not in OWN}
    assert headers(event(headers=cell)) == {**OWN, **passed}


@given(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.lists(st.integers(0, 9)) | st.text("äé✓", max_size=5)
)
def test_header_values_that_are_not_strings_are_json(value: Any) -> None:
    found = headers(event(headers=json.dumps({"x": value}).encode())).get("x")
    if value is None:
        assert found is None
    elif isinstance(value, str):
        assert found == value.encode()
    else:
        assert found is not None and json.loads(found) == value


@pytest.mark.parametrize(
    "number", ["12345678901234567890123456789", "-99999999999999999999", "1.10", "1e400", "0.1000", "9" * 5000]
)
def test_numbers_in_headers_keep_every_digit(number: str) -> None:
    """`numeric` in jsonb has more of them than a double."""
    found = headers(event(headers=f'{{"x": {number}, "y": ["a", {number}], "z": "text"}}'.encode()))
    assert (found["x"], found["y"], found["z"]) == (number.encode(), f'["a",{number}]'.encode(), b"text")


@pytest.mark.parametrize("value", ['"\\ud800"', '["\\ud800"]'])
def test_half_a_surrogate_pair_is_no_header(value: str) -> None:
    """Postgres keeps it in json, though not in jsonb."""
    with pytest.raises(Unroutable, match="not Unicode"):
        event(headers=f'{{"x": {value}}}'.encode())


@pytest.mark.parametrize("name", ["Nats-Rollup", "nats-msg-id", "NATS-X", "relay-position", "Relay-Replayed"])
def test_reserved_names_are_rejected(name: str) -> None:
    """Nats-Rollup would purge a stream."""
    with pytest.raises(Unroutable, match="reserved"):
        event(headers=json.dumps({name: "all"}).encode())


@pytest.mark.parametrize("name", ["", " ", "a b", "a:b", "a\r\nb", "ä", "a\n", "x\u0000"])
def test_illegal_names_are_rejected(name: str) -> None:
    with pytest.raises(Unroutable, match="not a legal header name"):
        event(headers=json.dumps({name: "x"}).encode())


@pytest.mark.parametrize("cell", [b"[]", b'"x"', b"1", b"{", b"", b"\xff", b'{"x": NaN}', b"[1.5]"])
def test_headers_that_are_no_object_are_rejected(cell: bytes) -> None:
    with pytest.raises(Unroutable, match="headers are not"):
        event(headers=cell)


@pytest.mark.parametrize("cell", [None, b"null", b"{}", b'{"x": null}'])
def test_no_headers(cell: bytes | None) -> None:
    assert headers(event(headers=cell)) == OWN


def test_mapped_columns_become_headers_and_win_over_the_rows() -> None:
    route = router(outbox=Outbox(header_columns={"X-Tenant": "tenant", "x-region": "region"}))
    made = event(route, tenant=b"acme", region=None, headers=b'{"x-tenant": "other", "X-Region": "eu", "y": "z"}')
    assert headers(made) == {**OWN, "X-Tenant": b"acme", "y": b"z"}
    assert headers(event(route, tenant=None, region=b"eu")) == {**OWN, "x-region": b"eu"}


def test_trace_context_passes() -> None:
    context = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1,b=2"}
    made = headers(event(headers=json.dumps(context).encode()))
    assert {name: made[name].decode() for name in context} == context


def test_a_column_in_several_parts() -> None:
    outbox = Outbox(columns={"aggregate_id": "id"}, header_columns={"x-id": "id"})
    columns = {name: oid for name, oid in TYPES.items() if name != "aggregate_id"}
    binding = Mapping.of(outbox, 0, several=False).bind([*columns.items(), ("xid", 5069)])
    row: list[bytes | None] = [None] * binding.width
    for (name, _), slot in zip([*columns.items(), ("xid", 0)], binding.slots, strict=True):
        if slot >= 0:
            row[slot] = ROW[name]
    made = Router(Routing(), binding).event(row, ORIGIN, 0)
    assert made.key == ROW["id"]
    assert headers(made)["aggregate-id"] == headers(made)["x-id"] == ROW["id"]
    assert body(made)["aggregate_id"] == (ROW["id"] or b"").decode()
