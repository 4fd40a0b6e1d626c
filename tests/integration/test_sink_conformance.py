"""What every sink promises the pipeline (the seam in `relay/sink/__init__.py`), on real brokers.

A sink that keeps these keeps G1 and G2 as far as a sink can: it returns when events are durable, it never reorders a
key, and what it raises leaves exactly the work that is left.
"""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
import pytest

from relay import config
from relay.embedded.process import free_port
from relay.errors import SetupError, SinkUnavailable
from relay.event import Event
from relay.sink import Sink, console, kafka_session
from tests.sinks import (
    Stored,
    batch_of,
    batches_of,
    first_occurrences,
    make_event,
    order_per_key,
    publish_as_pipeline,
    publish_overlapping,
    read_jetstream,
    read_kafka,
)

TOO_LARGE = b"x" * (2 << 20)  # more than either broker takes by default


_ORIGIN = "conformance:1"


class Server(Protocol):
    """What the embedded servers have in common."""

    def kill(self) -> None: ...
    def restart(self) -> None: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...


@dataclass(slots=True)
class Broker:
    """One kind of sink, where its events go, and how to read them back."""

    kind: str
    topic: str
    sink: Sink
    again: Callable[[], Sink]
    """A second sink to the same broker."""
    tombstone: bytes | None
    server: Server | None = None
    stream: io.BytesIO | None = None
    address: str = ""
    exactly_once: bool = False

    def event(self, seq: int, key: bytes | None = b"k", body: bytes | None = b"{}", **headers: bytes) -> Event:
        if self.exactly_once:
            headers["relay-position"] = b"%b:1" % _ORIGIN.encode()
        return make_event(seq, topic=self.topic, key=key, body=body, headers=headers)

    async def read(self) -> list[Stored]:
        if self.kind == "kafka":
            return await asyncio.to_thread(read_kafka, self.address, self.topic)
        if self.kind == "jetstream":
            return await read_jetstream(self.address, self.topic.replace(".", "_"))
        assert self.stream is not None
        return [_read_line(line) for line in self.stream.getvalue().splitlines()]


def _read_line(line: bytes) -> Stored:
    def bytes_of(value: Any) -> bytes | None:
        if value is None:
            return None
        if isinstance(value, dict) and "base64" in value:
            return base64.b64decode(value["base64"])
        return value.encode() if isinstance(value, str) else orjson.dumps(value)

    shown = orjson.loads(line)
    headers = {name: bytes_of(value) or b"" for name, value in shown["headers"].items()}
    return Stored(shown["topic"], bytes_of(shown["key"]), headers, bytes_of(shown["body"]))


def kafka_sink(bootstrap: str, topic: str, *, create: bool = True, mode: str = "idempotent", **options: Any) -> Sink:
    from relay.sink.kafka import KafkaSink
    from relay.sink.kafka_exactly_once import ExactlyOnceKafkaSink

    made: Sink = (ExactlyOnceKafkaSink if mode == "exactly-once" else KafkaSink)(
        config.Kafka(
            transactional_id=topic,
            create_topics=create,
            topics=(topic,),
            partitions=4,
            connect_timeout=options.pop("connect_timeout", 30.0),
            options={"bootstrap.servers": bootstrap, **options},
        )
    )
    made.resume({}, _ORIGIN)
    return made


def jetstream_sink(
    url: str, topic: str, *, create: bool = True, connect_timeout: float = 20.0, mode: str = "shared"
) -> Sink:
    from relay.sink.jetstream import JetStreamSink

    stream = config.Stream(name=topic.replace(".", "_"), subjects=(topic,), create=create)
    mode, _, way = mode.partition(" ")
    settings: dict[str, Any] = {"servers": (url,), "streams": (stream,), "ack_timeout": 10.0, "mode": mode}
    settings["atomic"] = way == "atomic"
    # No predecessor can have anything on the wire: one answer speaks for a run of events from the first one on.
    made = JetStreamSink(config.JetStream(**settings, connect_timeout=connect_timeout), direct=way != "slow", reach=0)
    made.resume({}, _ORIGIN)
    return made


def _broker(kind: str, server: Any, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Broker:
    topic = f"{prefix}.orders"
    if kind == "kafka slow":
        monkeypatch.setattr(kafka_session, "tally", lambda: None)
    kind, _, mode = kind.partition(" ")
    if kind == "kafka":
        address = server.bootstrap

        def make() -> Sink:
            return kafka_sink(address, topic, mode=mode)
    else:
        address = server.url

        def make() -> Sink:
            return jetstream_sink(address, topic, mode=mode)

    return Broker(
        kind,
        topic,
        make(),
        make,
        None if kind == "kafka" else b"",
        server=server,
        address=address,
        exactly_once=mode == "exactly-once",
    )


BROKERS = (
    *("kafka", "kafka slow", "kafka exactly-once"),  # slow: in Python alone
    *("jetstream shared", "jetstream fenced", "jetstream fenced atomic"),
)


@pytest.fixture(params=[*BROKERS, "jetstream fenced slow", "console"])
async def broker(request: pytest.FixtureRequest, prefix: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    if request.param == "console":
        stream = io.BytesIO()

        def make() -> Sink:
            return console.ConsoleSink(stream)

        made = Broker("console", f"{prefix}.orders", make(), make, None, stream=stream)
    else:
        fixture = "nats" if request.param.startswith("jetstream") else "kafka"
        made = _broker(request.param, request.getfixturevalue(fixture), prefix, monkeypatch)
    await made.sink.open()
    yield made
    await made.sink.close()


@pytest.fixture(params=BROKERS)
async def fragile(
    request: pytest.FixtureRequest, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Broker]:
    """A broker of the test's own, to break."""
    fixture = "own_nats" if request.param.startswith("jetstream") else "own_kafka"
    made = _broker(request.param, request.getfixturevalue(fixture), prefix, monkeypatch)
    await made.sink.open()
    yield made
    await made.sink.close()


@pytest.mark.guarantee("G2")
async def test_order_per_key_across_overlapping_publishes(broker: Broker) -> None:
    events = [broker.event(seq, key=b"k%d" % (seq % 7)) for seq in range(2000)]
    assert await publish_overlapping(broker.sink, batches_of(events, 50)) == []
    stored = await broker.read()
    assert len(stored) == len(events)
    assert order_per_key(stored) == {b"k%d" % n: list(range(n, 2000, 7)) for n in range(7)}


@pytest.mark.guarantee("G1")
async def test_durable_when_publish_returns(broker: Broker) -> None:
    for seq in range(3):
        assert not await broker.sink.publish(batch_of([broker.event(seq)]))
        assert [item.seq for item in await broker.read()] == list(range(seq + 1))


@pytest.mark.guarantee("G3")
async def test_bytes_arrive_as_they_were(broker: Broker) -> None:
    bodies = [b'{"price":1.10}', b"\x00\xff\x00 no text", "\u00e4\u20ac\U0001f600".encode(), b"[1, 2]", b"x" * 100_000]
    events = [broker.event(seq, body=body, traceparent=b"00-abc-def-01") for seq, body in enumerate(bodies)]
    await broker.sink.publish(batch_of(events))
    stored = await broker.read()
    if broker.kind != "console":  # it shows JSON as JSON
        assert [item.body for item in stored] == bodies
    for event, item in zip(events, stored, strict=True):
        assert item.topic == event.topic
        assert item.headers.items() >= dict(event.headers()).items()
        if broker.kind != "jetstream":  # NATS knows no key
            assert item.key == event.key


async def test_a_body_of_none(broker: Broker) -> None:
    await broker.sink.publish(batch_of([broker.event(1, body=None), broker.event(2, body=b"")]))
    stored = await broker.read()
    assert [item.body for item in stored] == [broker.tombstone, b""]


async def test_an_event_without_a_key(broker: Broker) -> None:
    await broker.sink.publish(batch_of([broker.event(seq, key=None) for seq in range(10)]))
    assert {item.seq for item in await broker.read()} == set(range(10))


@pytest.mark.guarantee("G1")
async def test_events_without_a_key_in_many_batches_to_a_new_topic(broker: Broker) -> None:
    """A partition that has just been made turns requests away; one behind must not be taken in their place."""
    batches = [batch_of([broker.event(seq, key=None)]) for seq in range(40)]
    await asyncio.gather(*map(broker.sink.publish, batches))
    assert sorted(item.seq for item in await broker.read()) == list(range(40))


async def test_an_empty_batch(broker: Broker) -> None:
    batch = batch_of([broker.event(1)])
    batch.events = []
    assert not await broker.sink.publish(batch)


@pytest.mark.guarantee("G2")
@pytest.mark.guarantee("G9")
async def test_a_rejected_event_stops_only_its_own_key(broker: Broker) -> None:
    """What is behind it comes back with it, unsent; submitted again (here: corrected) it goes first."""
    if broker.kind == "console":
        return  # takes everything
    events = [broker.event(seq, key=b"k%d" % (seq % 5)) for seq in range(300)]
    sent = [event._replace(body=TOO_LARGE) if event.transaction.xid in {7, 153} else event for event in events]
    back = [event for event in sent if event.transaction.xid in {*range(7, 300, 5), *range(153, 300, 5)}]

    rejected = await publish_overlapping(broker.sink, batches_of(sent, 50))
    assert [item.event for item in rejected] == back
    assert all(item.reason for item in rejected)
    expected = {b"k%d" % n: list(range(n, 300, 5)) for n in range(5)} | {b"k2": [2], b"k3": list(range(3, 153, 5))}
    assert order_per_key(await broker.read()) == expected

    corrected = [events[item.event.transaction.xid] for item in rejected]
    assert await publish_overlapping(broker.sink, batches_of(corrected, 20)) == []
    stored = await broker.read()
    assert order_per_key(stored) == {b"k%d" % n: list(range(n, 300, 5)) for n in range(5)}
    assert {item.id for item in stored} == {event.id for event in events}


async def test_nothing_but_rejected_events(broker: Broker) -> None:
    if broker.kind == "console":
        return
    batch = batch_of([broker.event(seq, key=b"%d" % seq, body=TOO_LARGE) for seq in range(2)])
    assert [item.event for item in await broker.sink.publish(batch)] == batch.events
    assert not await broker.sink.publish(batch_of([broker.event(3)]))


async def test_reopen_after_close(broker: Broker) -> None:
    await broker.sink.publish(batch_of([broker.event(1)]))
    await broker.sink.close()
    await broker.sink.close()
    await broker.sink.open()
    await broker.sink.publish(batch_of([broker.event(2)]))
    await broker.sink.open()  # without close, as after a failure
    await broker.sink.publish(batch_of([broker.event(3)]))
    assert [item.seq for item in await broker.read()] == [1, 2, 3]


async def test_close_before_open(broker: Broker) -> None:
    other = broker.again()
    await other.close()
    if broker.kind != "console":
        with pytest.raises(SinkUnavailable):
            await other.publish(batch_of([broker.event(1)]))


@pytest.mark.guarantee("G1")
async def test_closing_leaves_the_unfinished_to_the_pipeline(fragile: Broker) -> None:
    """Also: close() waits for nobody. The broker is frozen, and only its own return ends this test in time."""
    assert fragile.server is not None
    done = batch_of([fragile.event(seq, key=b"k%d" % (seq % 3)) for seq in range(10)])
    await fragile.sink.publish(done)
    fragile.server.freeze()
    try:
        waiting = batches_of([fragile.event(seq, key=b"k%d" % (seq % 3)) for seq in range(10, 40)], 10)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_outcome(fragile.sink, batch)) for batch in waiting]
            await asyncio.sleep(0)
            await asyncio.wait_for(fragile.sink.close(), 60.0)
        assert all(isinstance(task.result(), SinkUnavailable) for task in tasks)
        assert [len(batch.events) for batch in waiting] == [10, 10, 10]
    finally:
        fragile.server.thaw()
    await fragile.sink.open()
    # What the thawed broker finds in its sockets may come between us and our own, and be refused then.
    assert [item async for part in publish_as_pipeline(fragile.sink, waiting) for item in part] == []
    stored = first_occurrences(await fragile.read())
    assert order_per_key(stored) == {b"k%d" % n: list(range(n, 40, 3)) for n in range(3)}


async def _outcome(sink: Sink, batch: Any) -> BaseException | None:
    try:
        await sink.publish(batch)
    except SinkUnavailable as exc:
        return exc
    return None


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G2")
async def test_broker_killed_in_the_middle(fragile: Broker) -> None:
    assert fragile.server is not None
    events = [fragile.event(seq, key=b"k%d" % (seq % 20), body=b"%0200d" % seq) for seq in range(6000)]
    rounds, one_at_a_time = 0, threading.Lock()

    def break_it(server: Server) -> None:
        with one_at_a_time:
            server.kill()
            server.restart()

    async with asyncio.TaskGroup() as group:
        async for rejected in publish_as_pipeline(fragile.sink, batches_of(events, 50)):
            assert rejected == []
            rounds += 1
            if rounds in {3, 6}:
                group.create_task(asyncio.to_thread(break_it, fragile.server))
    stored = await fragile.read()
    assert {item.id for item in stored} == {event.id for event in events}
    once = first_occurrences(stored)
    assert order_per_key(once) == {b"k%d" % n: list(range(n, 6000, 20)) for n in range(20)}
    assert {item.id: item.body for item in stored} == {event.id: event.body for event in events}


@pytest.mark.parametrize("kind", ["kafka", "kafka exactly-once", "jetstream"])
async def test_broker_down_at_open(kind: str, prefix: str) -> None:
    port = free_port()
    sink = (
        kafka_sink(f"127.0.0.1:{port}", f"{prefix}.orders", mode=kind[6:], connect_timeout=1.0)
        if kind != "jetstream"
        else jetstream_sink(f"nats://127.0.0.1:{port}", f"{prefix}.orders", connect_timeout=1.0)
    )
    with pytest.raises(SinkUnavailable):
        await asyncio.wait_for(sink.open(), 60.0)
    await sink.close()


@pytest.mark.parametrize("kind", ["kafka", "kafka exactly-once", "jetstream"])
async def test_destination_missing_at_open(kind: str, prefix: str, request: pytest.FixtureRequest) -> None:
    topic = f"{prefix}.nowhere"
    if kind != "jetstream":
        sink = kafka_sink(request.getfixturevalue("kafka").bootstrap, topic, mode=kind[6:], create=False)
    else:
        sink = jetstream_sink(request.getfixturevalue("nats").url, topic, create=False)
    with pytest.raises(SetupError, match=f"{prefix}.nowhere") as caught:
        await sink.open()
    assert "create" in caught.value.hint
    await sink.close()


async def test_destination_missing_at_publish(broker: Broker) -> None:
    if broker.kind == "console":
        return
    sink = broker.sink
    if broker.kind == "kafka":
        mode = "exactly-once" if broker.exactly_once else "idempotent"
        sink = kafka_sink(broker.address, broker.topic, mode=mode, create=False)
        await sink.open()
    lost = batch_of([make_event(2, topic=f"{broker.topic}.nowhere.at.all")])
    with pytest.raises(SetupError, match="nowhere") as caught:
        await sink.publish(lost)
    assert caught.value.hint
    assert len(lost.events) == 1
    await sink.close()
