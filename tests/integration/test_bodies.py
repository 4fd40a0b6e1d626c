"""Bodies end to end: a row, the relay, a real broker, and a client that reads what arrived.

CloudEvents are judged by the CloudEvents SDK. What can never be sent stops the relay with a message that says which
event and why, before it reaches the broker.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from cloudevents.core.bindings import http as http_binding
from cloudevents.core.bindings import kafka as kafka_binding
from cloudevents.core.formats.json import JSONFormat

from relay.app import Relay
from relay.config import Config
from relay.errors import EventRejected
from relay.setup import setup
from tests.fix_kafka import Kafka
from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.relays import create_topic, eventually, jetstream, settings
from tests.relays import kafka as kafka_section
from tests.sinks import Stored, read_jetstream, read_kafka

INSERT = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, headers, topic) VALUES "
ODD = 'an ödd % "subject" 😀'


class Place(Protocol):
    """A broker with one destination."""

    kind: str
    topic: str
    sink: dict[str, Any]

    async def read(self) -> list[Stored]: ...


class JetStreamPlace:
    kind = "jetstream"

    def __init__(self, url: str, prefix: str) -> None:
        self.topic = f"{prefix}.orders"
        self.sink = jetstream(url, prefix)
        self._url, self._stream = url, prefix

    async def read(self) -> list[Stored]:
        return await read_jetstream(self._url, self._stream)


class KafkaPlace:
    kind = "kafka"

    def __init__(self, bootstrap: str, prefix: str) -> None:
        create_topic(bootstrap, prefix, 1)
        self.topic = prefix
        self.sink = kafka_section(bootstrap)
        self._bootstrap = bootstrap

    async def read(self) -> list[Stored]:
        return await asyncio.to_thread(read_kafka, self._bootstrap, self.topic)


@pytest.fixture
def nats_place(nats: Nats, prefix: str) -> JetStreamPlace:
    return JetStreamPlace(nats.url, prefix)


@pytest.fixture
def kafka_place(kafka: Kafka, prefix: str) -> KafkaPlace:
    return KafkaPlace(kafka.bootstrap, prefix)


@pytest.fixture(params=["nats_place", "kafka_place"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found


def config_of(database: Database, place: Place, name: str, **sections: Any) -> Config:
    own = {"relay": {"name": name}, "source": {"slot": name}}
    return Config.model_validate(settings(database.dsn, place.sink, **{**own, **sections}))


@asynccontextmanager
async def relayed(config: Config, count: int) -> AsyncIterator[Relay]:
    """A relay that streams; leaves when it has published so many."""
    async with Relay(config) as relay:
        await eventually(lambda: relay.progress.state == "streaming", "streaming")
        yield relay
        await eventually(lambda: relay.progress.published_events >= count, f"{count} published")


def write(database: Database, *rows: tuple[Any, ...]) -> None:
    with database.connect() as connection:
        for row in rows:
            connection.execute(f"{INSERT} ({', '.join(['%s'] * 6)})".encode(), row)


async def test_envelope(database: Database, place: Place, prefix: str) -> None:
    config = config_of(database, place, prefix)
    await setup(config)
    async with relayed(config, 1):
        write(database, ("order", "o-1", "created", '{"total": 1.50}', '{"traceparent": "00-1-2-01"}', place.topic))
    (stored,) = await place.read()
    ((row_id, seq, at),) = database.query("SELECT id::text, seq, created_at FROM outbox_events")
    assert stored.body is not None and stored.body.endswith(b'"payload":{"total": 1.50}}')
    body = json.loads(stored.body)
    assert (body["event_id"], body["event_type"], body["aggregate_type"], body["aggregate_id"], body["seq"]) == (
        row_id, "created", "order", "o-1", seq)  # fmt: skip
    assert body["occurred_at"].endswith("Z") and body["occurred_at"][:19] == at.isoformat()[:19]
    assert stored.headers["content-type"] == b"application/json"
    assert stored.headers["traceparent"] == b"00-1-2-01"
    assert stored.id.decode() == row_id


async def test_payload_alone(database: Database, place: Place, prefix: str) -> None:
    config = config_of(database, place, prefix, routing={"format": "payload"})
    await setup(config)
    database.execute("ALTER TABLE outbox_events ALTER COLUMN payload DROP NOT NULL")
    async with relayed(config, 2):
        write(database, ("order", "o-1", "created", '{"total": 1.50}', None, place.topic))
        write(database, ("order", "o-1", "deleted", None, None, place.topic))
    created, deleted = await place.read()
    assert created.body == b'{"total": 1.50}'
    assert created.headers["content-type"] == b"application/json"
    assert (created.headers["type"], created.headers["aggregate-type"], created.headers["aggregate-id"]) == (
        b"created", b"order", b"o-1")  # fmt: skip
    assert deleted.headers["type"] == b"deleted"
    if place.kind == "kafka":
        assert (deleted.key, deleted.body) == (b"o-1", None)  # a tombstone
    else:
        assert deleted.body == b""


async def test_bytes_untouched(database: Database, place: Place, prefix: str) -> None:
    """Avro, Protobuf, anything: the application may say what it is."""
    config = config_of(database, place, prefix, routing={"format": "payload"})
    await setup(config)
    database.execute("ALTER TABLE outbox_events DROP COLUMN payload, ADD COLUMN payload bytea")
    body = b"\0\0\0\0\x07" + bytes(range(256))
    async with relayed(config, 2):
        write(database, ("order", "o-1", "created", body, '{"Content-Type": "avro/binary"}', place.topic))
        write(database, ("order", "o-1", "created", body, None, place.topic))
    said, unsaid = await place.read()
    assert said.body == unsaid.body == body
    assert said.headers["content-type"] == b"avro/binary"
    assert unsaid.headers["content-type"] == b"application/octet-stream"


@pytest.mark.parametrize("subject", ["o-1", ODD])
async def test_cloudevents(database: Database, place: Place, prefix: str, subject: str) -> None:
    config = config_of(database, place, prefix, routing={"format": "cloudevents", "source": "/shop/{table}"})
    await setup(config)
    async with relayed(config, 1):
        write(database, ("order", subject, "order.created", '{"total": 1.50}', '{"note": "x"}', place.topic))
    (stored,) = await place.read()
    assert stored.body == b'{"total": 1.50}'
    if place.kind == "kafka":
        message = kafka_binding.KafkaMessage(stored.headers, stored.key, stored.body)
        event = kafka_binding.from_binary(message, JSONFormat())
        assert event.get_extension("partitionkey") == subject
    else:
        headers = {name: value.decode() for name, value in stored.headers.items()}
        event = http_binding.from_binary(http_binding.HTTPMessage(headers, stored.body), JSONFormat())
    ((row_id, at),) = database.query("SELECT id::text, created_at FROM outbox_events")
    assert event.get_specversion() == "1.0"
    assert event.get_id() == row_id == stored.id.decode()
    assert event.get_source() == "/shop/public.outbox_events"
    assert event.get_type() == "order.created"
    assert event.get_subject() == subject
    assert event.get_time() == at
    assert event.get_datacontenttype() == "application/json"
    assert event.get_data() == {"total": 1.5}
    assert stored.headers["aggregate-id"].decode() == subject  # only attributes are encoded


# --- what can never be sent


async def rejected(database: Database, config: Config, *row: Any) -> str:
    """How the relay stops for this row."""
    relay = Relay(config)
    with pytest.raises(EventRejected) as failure:  # noqa: PT012  leaving the block raises it
        async with relay:
            await eventually(lambda: relay.progress.state == "streaming", "streaming")
            write(database, row)
            await relay.wait()
    told = str(failure.value)
    ((row_id,),) = database.query("SELECT id::text FROM outbox_events ORDER BY seq DESC LIMIT 1")
    assert row_id in told, told
    assert failure.value.hint
    return told


BAD_ROWS = {
    "line break": ("order", "o\r\nNats-Rollup: all", "created", "{}", None, "{topic}"),
    "space or control": ("order", "o", "created", "{}", None, "{topic}.a b"),
    "wildcard": ("order", "o", "created", "{}", None, "{topic}.>"),
    "max_payload": ("order", "o", "created", json.dumps("x" * 1_100_000), None, "{topic}"),
    "reserved": ("order", "o", "created", "{}", '{"Nats-Rollup": "all"}', "{topic}"),
    "not a legal header name": ("order", "o", "created", "{}", '{"a b": "x"}', "{topic}"),
}


@pytest.mark.parametrize("reason", BAD_ROWS)
async def test_jetstream_limits(database: Database, nats_place: JetStreamPlace, prefix: str, reason: str) -> None:
    config = config_of(database, nats_place, prefix)
    await setup(config)
    row = [value.replace("{topic}", nats_place.topic) if value else value for value in BAD_ROWS[reason]]
    told = await rejected(database, config, *row)
    assert reason in told
    assert len(told) < 1000  # not the payload
    assert await nats_place.read() == []


@pytest.mark.parametrize(("topic", "size"), [("no topic!", 10), (None, 1_100_000)])
async def test_kafka_limits(
    database: Database, kafka_place: KafkaPlace, prefix: str, topic: str | None, size: int
) -> None:
    config = config_of(database, kafka_place, prefix)
    await setup(config)
    payload = json.dumps("".join(chr(33 + at * 7919 % 90) for at in range(size)))
    told = await rejected(database, config, "order", "o", "created", payload, None, topic or kafka_place.topic)
    assert ("legal topic" if topic else "arge") in told
    assert len(told) < 1000
    assert await kafka_place.read() == []


async def test_a_payload_that_does_not_fit_its_schema(
    database: Database, nats_place: JetStreamPlace, prefix: str, tmp_path: Path
) -> None:
    schema = tmp_path / "order.json"
    schema.write_text('{"type": "object", "required": ["total"], "properties": {"total": {"type": "number"}}}')
    config = config_of(database, nats_place, prefix, routing={"schemas": {"order.created": str(schema)}})
    await setup(config)
    async with relayed(config, 2):
        write(database, ("order", "o", "order.created", '{"total": 9007199254740993}', None, nats_place.topic))
        write(database, ("order", "o", "order.other", '{"total": "anything"}', None, nats_place.topic))
    row = ("order", "o", "order.created", '{"total": "a lot", "secret": "s3cret"}', None, nats_place.topic)
    told = await rejected(database, config, *row)
    assert "does not fit its schema: at $.total: 'a lot' is not of type 'number'" in told
    assert "s3cret" not in told
    assert len(await nats_place.read()) == 2


async def test_a_cloudevent_without_a_type(database: Database, nats_place: JetStreamPlace, prefix: str) -> None:
    config = config_of(database, nats_place, prefix, routing={"format": "cloudevents"})
    await setup(config)
    told = await rejected(database, config, "order", "o", "", "{}", None, nats_place.topic)
    assert "a CloudEvent has a type" in told
