"""Bodies and headers of all formats, from rows as Postgres prints them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relay.body import rfc3339
from relay.config import Config
from relay.event import Event, Transaction
from relay.outbox import BYTEA, JSON, JSONB, TIMESTAMP, TIMESTAMPTZ, UUID, mappings
from relay.routing import Router, Unroutable

TEXT = 25
TRANSACTION = Transaction(7, 0x100, 0.0, b"relay:1:1:stream:1:0/100:")
ID = "01890000-0000-7000-8000-000000000001"


def event(sink: str = "jetstream", routing: dict[str, Any] | None = None, **row: Any) -> Event:
    """The event of a row; a value is a text, or (text, type OID)."""
    usual = {"seq": ("5", 20), "id": (ID, UUID), "aggregate_type": "order", "aggregate_id": "o-1"}
    usual |= {"event_type": "created", "topic": "a.b", "partition_key": None, "payload": ("{}", JSONB)}  # type: ignore[dict-item]
    usual |= {"headers": (None, JSONB), "created_at": ("2026-11-16 04:13:30.12+00", TIMESTAMPTZ)}  # type: ignore[dict-item]
    cells = [value if isinstance(value, tuple) else (value, TEXT) for value in (usual | row).values()]
    config = Config.model_validate({"routing": routing or {}})
    binding = mappings(config.outbox)[0].bind([*zip(usual, [oid for _, oid in cells], strict=True), ("xid", 5069)])
    values: list[bytes | None] = [None] * binding.width
    for slot, (text, _) in zip(binding.slots, cells, strict=False):
        values[slot] = None if text is None else str(text).encode()
    return Router(config.routing, binding, sink=sink).event(values, TRANSACTION, 3)


def headers(made: Event) -> dict[str, str]:
    return {name: value.decode() for name, value in made.headers()}


def test_envelope() -> None:
    made = event(payload=('{"a": 1.50}', JSONB))
    assert made.body == (
        b'{"event_id":"%b","event_type":"created","aggregate_type":"order","aggregate_id":"o-1","seq":5,'
        b'"occurred_at":"2026-11-16T04:13:30.12Z","payload":{"a": 1.50}}' % ID.encode()
    )
    assert headers(made) == {
        "id": ID, "type": "created", "aggregate-type": "order", "aggregate-id": "o-1", "seq": "5",
        "content-type": "application/json", "relay-position": "relay:1:1:stream:1:0/100:3",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("payload", "oid", "member"),
    [
        (' {"b":1 , "b":2}\n', JSON, b' {"b":1 , "b":2}\n'),
        ("9007199254740993", JSONB, b"9007199254740993"),
        (None, JSONB, b"null"),
        ('say "ö"', TEXT, '"say \\"ö\\""'.encode()),
        ("", TEXT, b'""'),
        ("\\x00ff", BYTEA, b'"\\\\x00ff"'),
    ],
)
def test_payload_in_the_envelope(payload: str | None, oid: int, member: bytes) -> None:
    made = event(payload=(payload, oid))
    assert made.body is not None
    assert made.body.partition(b'"payload":')[2] == member + b"}"
    json.loads(made.body)


@pytest.mark.parametrize(
    ("payload", "oid", "body", "described"),
    [
        (' {"b":1 }\n', JSON, b' {"b":1 }\n', "application/json"),
        ("text", TEXT, b"text", "text/plain; charset=utf-8"),
        ("\\x00ff5c78", BYTEA, b"\x00\xff\\x", "application/octet-stream"),
        ("\\x", BYTEA, b"", "application/octet-stream"),
        (None, BYTEA, None, "application/octet-stream"),
        (None, JSONB, None, "application/json"),
    ],
)
@pytest.mark.parametrize("format_", ["payload", "cloudevents"])
def test_bare_payload(format_: str, payload: str | None, oid: int, body: bytes | None, described: str) -> None:
    made = event(routing={"format": format_}, payload=(payload, oid))
    assert made.body == body
    assert headers(made)["content-type"] == described


def test_cloudevents_on_both_brokers() -> None:
    routing = {"format": "cloudevents", "headers": []}
    attributes = {"specversion": "1.0", "id": ID, "source": "/public.outbox_events", "type": "created"}
    attributes |= {"subject": "o-1", "time": "2026-11-16T04:13:30.12Z"}
    nats, kafka = (headers(event(sink, routing)) for sink in ("jetstream", "kafka"))
    assert nats.pop("relay-position") == kafka.pop("relay-position")
    assert nats == {f"ce-{name}": value for name, value in attributes.items()} | {
        "ce-datacontenttype": "application/json"
    }
    assert kafka == {f"ce_{name}": value for name, value in attributes.items()}


def test_cloudevents_attributes_are_encoded_for_nats_alone() -> None:
    routing = {"format": "cloudevents"}
    nats, kafka = (headers(event(sink, routing, aggregate_id='ö "50 %"')) for sink in ("jetstream", "kafka"))
    assert nats["ce-subject"] == "%C3%B6%20%2250%20%25%22"
    assert kafka["ce_subject"] == nats["aggregate-id"] == 'ö "50 %"'


@pytest.mark.parametrize("time", [("infinity", TIMESTAMPTZ), (None, TIMESTAMPTZ), ("2026-01-01 00:00:00", TIMESTAMP)])
def test_cloudevents_leave_out_what_the_specification_does_not_allow(time: tuple[str | None, int]) -> None:
    made = headers(event(routing={"format": "cloudevents"}, created_at=time, aggregate_id=""))
    assert "ce-time" not in made and "ce-subject" not in made


@pytest.mark.parametrize("event_type", [None, ""])
def test_a_cloudevent_has_a_type(event_type: str | None) -> None:
    with pytest.raises(Unroutable, match="has a type"):
        event(routing={"format": "cloudevents"}, event_type=event_type)


def test_the_application_knows_what_its_bytes_are() -> None:
    said = ('{"Content-Type": "avro/binary"}', JSONB)
    made = headers(event(routing={"format": "cloudevents"}, payload=("\\x00", BYTEA), headers=said))
    assert made["content-type"] == made["ce-datacontenttype"] == "avro/binary"
    assert "Content-Type" not in made
    assert headers(event(headers=said))["content-type"] == "application/json"  # the envelope is JSON, whatever is in it


@pytest.mark.parametrize(
    ("printed", "written"),
    [
        ("2026-11-16 04:13:30+00", "2026-11-16T04:13:30Z"),
        ("2026-11-16 04:13:30.123456+00", "2026-11-16T04:13:30.123456Z"),
        ("infinity", "infinity"),
        ("0044-03-15 00:00:00+00 BC", "0044-03-15 00:00:00+00 BC"),
        ("10000-01-01 00:00:00+00", "10000-01-01 00:00:00+00"),
    ],
)
def test_times(printed: str, written: str) -> None:
    assert rfc3339(printed.encode()) == written.encode()
