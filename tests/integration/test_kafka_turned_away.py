"""An event that Kafka turns away while it takes the one behind it: librdkafka calls both stored, and one is not (G1).

A broker that does not know the producer takes whatever comes first. Here the first request arrives garbled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from relay import config
from relay.embedded import KafkaServer
from relay.embedded.process import free_port
from relay.event import Event
from relay.sink import kafka_session
from relay.sink.kafka import KafkaSink
from relay.sink.kafka_exactly_once import ExactlyOnceKafkaSink
from tests.fix_proxy import Proxy
from tests.sinks import batch_of, make_event, order_per_key, publish_as_pipeline, read_kafka

ORIGIN = "tests:1"


@pytest.fixture
async def behind() -> AsyncIterator[tuple[KafkaServer, Proxy]]:
    """A broker, and the wire that the relay reaches it by."""
    server, port = KafkaServer(), free_port()
    link = Proxy(f"127.0.0.1:{port}")
    server._properties["listeners"] += f",LINK://127.0.0.1:{port}"
    server._properties["advertised.listeners"] += f",LINK://127.0.0.1:{link.port}"
    server._properties["listener.security.protocol.map"] += ",LINK:PLAINTEXT"
    server._properties["transaction.partition.verification.enable"] = "false"  # as before Kafka 3.6
    with server:
        await link.resume()
        yield server, link
        await link.refuse()


def events(topic: str) -> list[Event]:
    position = {"relay-position": b"%b:1:x" % ORIGIN.encode()}
    return [make_event(n, topic=topic, key=b"k", body=b'"event %d"' % n, headers=position) for n in range(4)]


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("mode", ["c", "python", "exactly-once"])
async def test_what_is_acknowledged_without_an_offset_is_sent_again(
    behind: tuple[KafkaServer, Proxy], prefix: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    server, link = behind
    options = {"bootstrap.servers": link.url, "compression.type": "none", "batch.num.messages": 1}
    section = {"options": options, "topics": (prefix,), "create_topics": True, "partitions": 1}
    if mode == "python":
        monkeypatch.setattr(kafka_session, "tally", lambda: None)
    sink: KafkaSink | ExactlyOnceKafkaSink
    if mode == "exactly-once":
        sink = ExactlyOnceKafkaSink(config.Kafka.model_validate({**section, "mode": "exactly-once"}))
        sink.resume({}, ORIGIN)
    else:
        sink = KafkaSink(config.Kafka.model_validate(section))
    await sink.open()
    if isinstance(sink, KafkaSink):
        # As with a partition that was added since, or whose new leader has forgotten us: nobody goes ahead alone.
        assert sink._session is not None
        sink._session.ready[prefix] = None
    link.garble = b"event 0"
    made = events(prefix)
    batches = [batch_of(made[:2]), batch_of(made[2:])]
    assert not any([rejected async for rejected in publish_as_pipeline(sink, batches)])
    assert not link.garble
    stored = await asyncio.to_thread(read_kafka, server.bootstrap, prefix)
    assert {item.id for item in stored} == {event.id for event in made}
    if mode == "exactly-once":
        assert order_per_key(stored) == {b"k": [0, 1, 2, 3]}
    await sink.close()
