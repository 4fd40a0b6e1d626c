"""What is Kafka's own: partitions as Java clients choose them, topics, options, refusals by the broker, logins."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from relay import config
from relay.embedded import KafkaServer
from relay.embedded.process import free_port
from relay.errors import AuthError, ConfigError, OperatorError, SetupError, SinkUnavailable
from relay.event import Batch, Event
from relay.sink import kafka_session, kafka_tally
from relay.sink.kafka import KafkaSink
from relay.sink.kafka_flight import Flight
from tests.fix_kafka import Kafka
from tests.sinks import (
    batch_of,
    batches_of,
    first_occurrences,
    make_event,
    order_per_key,
    publish_as_pipeline,
    publish_overlapping,
    read_kafka,
)

OpenSink = Callable[..., Awaitable[KafkaSink]]


@pytest.fixture(params=["c", "python"])
async def open_sink(
    kafka: Kafka, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[OpenSink]:
    """Opens sinks on the shared broker; closes them after the test, and looks whether a thread stayed behind."""
    if request.param == "python":
        monkeypatch.setattr(kafka_session, "tally", lambda: None)
    sinks: list[KafkaSink] = []

    async def open_one(options: dict[str, Any] | None = None, **section: Any) -> KafkaSink:
        section.setdefault("create_topics", True)
        sink = KafkaSink(config.Kafka(options={"bootstrap.servers": kafka.bootstrap, **(options or {})}, **section))
        sinks.append(sink)
        await sink.open()
        return sink

    yield open_one
    for sink in sinks:
        await sink.close()
    async with asyncio.timeout(60):
        while any(thread.name == "relay-kafka-reports" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)


def create_topic(bootstrap: str, topic: str, **settings: str) -> str:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    settings = {name.replace("_", "."): value for name, value in settings.items()}
    admin.create_topics([NewTopic(topic, num_partitions=4, replication_factor=1, config=settings)])[topic].result(60)
    return topic


def murmur2(data: bytes) -> int:
    """Java's `org.apache.kafka.common.utils.Utils.murmur2`, written down from its definition."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(data)
    whole = len(data) & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    if tail := data[whole:]:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def test_murmur2_is_javas() -> None:
    """Vectors from Kafka's own `UtilsTest`."""
    vectors = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536, b"abc": 479470107}
    assert {key: murmur2(key) for key in vectors} == {key: value & 0xFFFFFFFF for key, value in vectors.items()}


async def test_partitions_are_those_of_java_clients(kafka: Kafka, open_sink: OpenSink, prefix: str) -> None:
    sink = await open_sink(topics=(prefix,), partitions=7)
    keys = [b"21", b"foobar", b"", b"\x00\xff", "ä".encode(), *(b"order-%d" % n for n in range(200))]
    await sink.publish(batch_of([make_event(seq, topic=prefix, key=key) for seq, key in enumerate(keys)]))
    stored = {item.key: item.partition for item in await asyncio.to_thread(read_kafka, kafka.bootstrap, prefix)}
    assert stored == {key: (murmur2(key) & 0x7FFFFFFF) % 7 for key in keys}


@pytest.mark.skipif(kafka_tally.LIBRARY is None, reason="the C part was not built: there is no C compiler")
async def test_events_are_counted_in_c_without_a_report_in_python(
    kafka: Kafka, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests of the C part would be tests of Python."""
    monkeypatch.delattr(Flight, "delivered")
    sink = KafkaSink(
        config.Kafka(options={"bootstrap.servers": kafka.bootstrap}, topics=(prefix,), partitions=4, create_topics=True)
    )
    await sink.open()
    try:
        session = sink._session
        assert session is not None
        assert session.tally is not None
        events = [make_event(seq, topic=prefix, key=b"k%d" % (seq % 40)) for seq in range(2000)]
        assert await publish_overlapping(sink, batches_of(events, 100)) == []
        assert session.ready == {prefix: None}
        assert session.tally.launch() == 0  # all slots are free again
    finally:
        await sink.close()
    stored = await asyncio.to_thread(read_kafka, kafka.bootstrap, prefix)
    assert order_per_key(stored) == {b"k%d" % n: list(range(n, 2000, 40)) for n in range(40)}
    assert {item.id: item.headers for item in stored} == {event.id: dict(event.headers()) for event in events}


async def test_few_keys_do_not_reach_all_partitions_and_are_counted_in_c_too(
    kafka: Kafka, open_sink: OpenSink, prefix: str
) -> None:
    sink = await open_sink(topics=(prefix,), partitions=8)
    keys: list[bytes | None] = [b"a", b"b"]
    events = [make_event(seq, topic=prefix, key=keys[seq % 2]) for seq in range(400)]
    assert await publish_overlapping(sink, batches_of(events, 50)) == []
    assert sink._session is not None
    assert sink._session.ready == {prefix: {b"a", b"b"}}
    keys = [b"a", b"b", None]  # those without a key are the first to the other partitions
    events += [make_event(seq, topic=prefix, key=keys[seq % 3]) for seq in range(400, 1000)]
    assert await publish_overlapping(sink, batches_of(events[400:], 50)) == []
    assert sink._session.ready == {prefix: None}
    stored = await asyncio.to_thread(read_kafka, kafka.bootstrap, prefix)
    assert sorted(item.id for item in stored) == sorted(event.id for event in events)
    order = order_per_key(stored)
    for key in (b"a", b"b"):
        assert order[key] == [seq for seq, event in enumerate(events) if event.key == key]


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("key", [None, b"k"])
async def test_the_first_event_to_a_partition_travels_alone(
    open_sink: OpenSink, prefix: str, key: bytes | None
) -> None:
    sink = await open_sink(topics=(prefix,), partitions=1)
    batches = [batch_of([make_event(seq, topic=prefix, key=key)]) for seq in range(3)]
    tasks = [asyncio.ensure_future(sink.publish(batch)) for batch in batches]
    await asyncio.sleep(0)  # all have begun; no answer can be here yet
    assert sink._session is not None
    assert sum(flight.at for flight in sink._session.flights) == 1
    assert await asyncio.gather(*tasks) == [[], [], []]


async def test_topics_seen_first_in_publish(kafka: Kafka, open_sink: OpenSink, prefix: str) -> None:
    sink = await open_sink()
    topics = [f"{prefix}-{n}" for n in range(3)]
    events = [make_event(seq, topic=topics[seq % 3], key=b"k%d" % (seq % 5)) for seq in range(300)]
    assert await publish_overlapping(sink, batches_of(events, 20)) == []
    for n, topic in enumerate(topics):
        stored = await asyncio.to_thread(read_kafka, kafka.bootstrap, topic)
        assert sorted(item.seq for item in stored) == list(range(n, 300, 3))
        assert all(seqs == sorted(seqs) for seqs in order_per_key(stored).values())


@pytest.mark.parametrize("may_create", [True, False])
async def test_a_topic_that_is_deleted_meanwhile(
    kafka: Kafka, open_sink: OpenSink, prefix: str, may_create: bool
) -> None:
    """It is made anew if the sink may, else it is named."""
    create_topic(kafka.bootstrap, prefix)
    notice = {"topic.metadata.propagation.max.ms": 100, "topic.metadata.refresh.interval.ms": 200}
    sink = await open_sink(notice, create_topics=may_create)
    assert await sink.publish(batch_of([make_event(1, topic=prefix)])) == []
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.delete_topics([prefix])[prefix].result(60)
    later = [batch_of([make_event(seq, topic=prefix, key=b"k")]) for seq in range(2, 20)]
    if may_create:
        assert [item async for found in publish_as_pipeline(sink, later) for item in found] == []
        stored = await asyncio.to_thread(read_kafka, kafka.bootstrap, prefix)
        assert order_per_key(first_occurrences(stored)) == {b"k": list(range(2, 20))}
    else:
        with pytest.raises(SetupError, match=prefix):
            _ = [found async for found in publish_as_pipeline(sink, later)]


async def test_missing_topic_fails_the_window_at_once(kafka: Kafka, open_sink: OpenSink, prefix: str) -> None:
    known = create_topic(kafka.bootstrap, prefix)
    sink = await open_sink(create_topics=False, topics=(known,))
    before = batch_of([make_event(1, topic=known)])
    missing = batch_of([make_event(2, topic=known, key=b"other"), make_event(3, topic=f"{prefix}-missing")])
    behind = batch_of([make_event(4, topic=known)])
    results = await asyncio.gather(*(sink.publish(b) for b in (before, missing, behind)), return_exceptions=True)
    assert isinstance(results[1], SetupError)
    assert f"{prefix}-missing" in str(results[1])
    assert isinstance(results[2], OperatorError)
    assert [event.topic for event in missing.events][-1] == f"{prefix}-missing"
    assert len(behind.events) == 1
    with pytest.raises(SetupError):
        await sink.publish(behind)  # until it is opened again

    create_topic(kafka.bootstrap, f"{prefix}-missing")
    await sink.open()
    unfinished = [b for b, r in zip((before, missing, behind), results, strict=True) if isinstance(r, BaseException)]
    assert await publish_overlapping(sink, unfinished) == []
    stored = first_occurrences(await asyncio.to_thread(read_kafka, kafka.bootstrap, known))
    assert order_per_key(stored) == {b"k": [1, 4], b"other": [2]}


async def test_more_replicas_than_brokers(open_sink: OpenSink, prefix: str) -> None:
    with pytest.raises(SetupError, match=prefix) as caught:
        await open_sink(topics=(prefix,), create_topics=True, replication_factor=30)
    assert "sink.kafka.replication_factor" in caught.value.hint


async def test_an_illegal_topic_name_is_the_events_fault(open_sink: OpenSink, prefix: str) -> None:
    sink = await open_sink(topics=(prefix,))
    bad = make_event(1, topic="no topic!", key=b"a")
    rejected = await sink.publish(batch_of([make_event(0, topic=prefix), bad, make_event(2, topic=prefix)]))
    assert [item.event for item in rejected] == [bad]
    assert "no topic!" in rejected[0].reason


async def test_a_full_queue_waits_and_keeps_order(kafka: Kafka, open_sink: OpenSink, prefix: str) -> None:
    """Also shows that options reach librdkafka."""
    sink = await open_sink({"queue.buffering.max.messages": 20}, topics=(prefix,))
    events = [make_event(seq, topic=prefix, key=b"k%d" % (seq % 3)) for seq in range(600)]
    assert await publish_overlapping(sink, batches_of(events, 100)) == []
    stored = await asyncio.to_thread(read_kafka, kafka.bootstrap, prefix)
    assert order_per_key(stored) == {b"k%d" % n: list(range(n, 600, 3)) for n in range(3)}


async def test_an_option_librdkafka_does_not_know(open_sink: OpenSink) -> None:
    with pytest.raises(ConfigError, match=r"no\.such\.option"):
        await open_sink({"no.such.option": "1"})


async def publish_all(sink: KafkaSink, events: list[Event], size: int = 50) -> list[Event]:
    """As the pipeline does; gives the events that came back as rejected."""
    rounds = publish_as_pipeline(sink, batches_of(events, size))
    return [item.event async for rejected in rounds for item in rejected]


@pytest.mark.guarantee("G9")
async def test_broker_refuses_an_event_among_innocent_neighbours(
    kafka: Kafka, open_sink: OpenSink, prefix: str
) -> None:
    topic = create_topic(kafka.bootstrap, prefix, max_message_bytes="20000")
    sink = await open_sink({"batch.size": 15000})
    await sink.publish(batch_of([make_event(1_000_000 + n, topic=topic, key=b"w%d" % n) for n in range(50)]))
    events = [make_event(seq, topic=topic, key=b"k%d" % (seq % 10)) for seq in range(1000)]
    events[333] = events[333]._replace(body=os.urandom(30_000))
    events[517] = events[517]._replace(body=os.urandom(30_000))
    rejected = await publish_all(sink, events)
    # The culprits come first of their keys; what the sink had to hold back behind them is rejected with them.
    assert rejected[0] == events[333]
    assert events[517] in rejected
    assert {event.key for event in rejected} == {b"k3", b"k7"}
    stored = first_occurrences(await asyncio.to_thread(read_kafka, kafka.bootstrap, topic))
    order = order_per_key([item for item in stored if item.seq < 1_000_000])
    back = {event.transaction.xid for event in rejected}
    assert order == {b"k%d" % n: [seq for seq in range(n, 1000, 10) if seq not in back] for n in range(10)}


async def test_a_message_set_too_large_for_the_topic_is_nobodys_fault(
    kafka: Kafka, open_sink: OpenSink, prefix: str
) -> None:
    """The topic takes each event, but not as many at once as librdkafka packs: it learns to send less."""
    topic = create_topic(kafka.bootstrap, prefix, max_message_bytes="20000")
    sink = await open_sink({"batch.size": 60_000, "linger.ms": 50})
    events = [make_event(seq, topic=topic, key=b"k%d" % (seq % 3), body=os.urandom(1000)) for seq in range(300)]
    assert await publish_all(sink, events) == []
    stored = first_occurrences(await asyncio.to_thread(read_kafka, kafka.bootstrap, topic))
    assert {item.id for item in stored} == {event.id for event in events}
    assert order_per_key(stored) == {b"k%d" % n: list(range(n, 300, 3)) for n in range(3)}


@pytest.mark.parametrize("culprits", [{5}, {3, 5, 6, 7}], ids=["one", "several"])  # the broker answers differently
async def test_a_compacted_topic_refuses_an_event_without_a_key(
    kafka: Kafka, open_sink: OpenSink, prefix: str, culprits: set[int]
) -> None:
    topic = create_topic(kafka.bootstrap, prefix, cleanup_policy="compact")
    sink = await open_sink()
    events = [make_event(seq, topic=topic, key=None if seq in culprits else b"k%d" % seq) for seq in range(10)]
    assert await publish_all(sink, events) == [events[seq] for seq in sorted(culprits)]
    stored = await asyncio.to_thread(read_kafka, kafka.bootstrap, topic)
    assert {item.seq for item in stored} == set(range(10)) - culprits


async def test_cancelled_publish_leaves_no_gap(open_sink: OpenSink, kafka: Kafka, prefix: str) -> None:
    """A publish that is cancelled half-way ends the session: nothing behind it may be sent first."""
    sink = await open_sink({"queue.buffering.max.messages": 5}, topics=(prefix,))
    first = batch_of([make_event(seq, topic=prefix) for seq in range(100)])
    behind = batch_of([make_event(seq, topic=prefix) for seq in range(100, 110)])
    tasks: list[asyncio.Task[Any]] = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_swallow(sink, first)), group.create_task(_swallow(sink, behind))]
        await asyncio.sleep(0)
        tasks[0].cancel()
    assert isinstance(tasks[1].result(), SinkUnavailable)
    seqs = [item.seq for item in await asyncio.to_thread(read_kafka, kafka.bootstrap, prefix)]
    assert seqs == list(range(len(seqs)))


async def test_a_first_event_that_nobody_waits_for_holds_nobody_up(own_kafka: KafkaServer, prefix: str) -> None:
    """Its publish is cancelled while it travels alone; the sink stays open, and goes on when it was acknowledged."""
    sink = KafkaSink(
        config.Kafka(options={"bootstrap.servers": own_kafka.bootstrap}, topics=(prefix,), create_topics=True)
    )
    await sink.open()
    own_kafka.freeze()
    first = asyncio.ensure_future(sink.publish(batch_of([make_event(0, topic=prefix, key=b"k")])))
    await asyncio.sleep(0)
    assert not first.done()
    first.cancel()
    await asyncio.wait((first,))
    own_kafka.thaw()
    async with asyncio.timeout(60):
        assert await sink.publish(batch_of([make_event(seq, topic=prefix, key=b"k") for seq in range(1, 10)])) == []
    assert sink._session is not None
    assert not sink._session.flights
    await sink.close()
    assert [item.seq for item in await asyncio.to_thread(read_kafka, own_kafka.bootstrap, prefix)] == list(range(10))


async def _swallow(sink: KafkaSink, batch: Batch) -> BaseException | None:
    try:
        await sink.publish(batch)
    except (SinkUnavailable, OperatorError) as exc:
        return exc
    return None


@pytest.mark.guarantee("G1")
async def test_a_long_outage_is_waited_out(own_kafka: KafkaServer, prefix: str) -> None:
    """Nothing raises: librdkafka keeps what it has, in order, for as long as it takes."""
    sink = KafkaSink(
        config.Kafka(options={"bootstrap.servers": own_kafka.bootstrap}, topics=(prefix,), create_topics=True)
    )
    await sink.open()
    await sink.publish(batch_of([make_event(0, topic=prefix, key=b"k0")]))
    await asyncio.to_thread(own_kafka.kill)
    events = [make_event(seq, topic=prefix, key=b"k%d" % (seq % 3)) for seq in range(1, 300)]
    async with asyncio.TaskGroup() as group:
        published = group.create_task(publish_overlapping(sink, batches_of(events, 30)))
        await asyncio.to_thread(own_kafka.restart)
    assert published.result() == []
    stored = await asyncio.to_thread(read_kafka, own_kafka.bootstrap, prefix)
    assert order_per_key(stored) == {b"k%d" % n: list(range(n, 300, 3)) for n in range(3)}
    await sink.close()


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("own_key", [False, True], ids=["other key", "own key"])
@pytest.mark.parametrize("warm", [False, True], ids=["first contact", "known producer"])
async def test_nothing_overtakes_a_refused_message_set(
    own_kafka: KafkaServer, prefix: str, warm: bool, own_key: bool
) -> None:
    """The broker wakes up with several message sets before it, of which it refuses the first."""
    topic = create_topic(own_kafka.bootstrap, prefix, max_message_bytes="20000")
    options: dict[str, Any] = {"bootstrap.servers": own_kafka.bootstrap, "batch.num.messages": 2}
    sink = KafkaSink(config.Kafka(options=options))
    await sink.open()
    partition = murmur2(b"k") % 4
    elsewhere, culprits = (
        next(key for key in (b"c%d" % n for n in range(1000)) if (murmur2(key) % 4 == partition) is same)
        for same in (False, True)
    )
    await sink.publish(batch_of([make_event(1000, topic=topic, key=culprits if warm else elsewhere)]))
    events = [make_event(seq, topic=topic, key=b"k", body=b"%d" % seq) for seq in range(100)]
    events[0] = make_event(0, topic=topic, key=b"k" if own_key else culprits, body=os.urandom(30_000))
    own_kafka.freeze()
    asyncio.get_running_loop().call_later(0.5, own_kafka.thaw)
    rejected = await publish_all(sink, events, 20)
    stored = first_occurrences(await asyncio.to_thread(read_kafka, own_kafka.bootstrap, topic))
    assert rejected[0] == events[0]
    if own_key:  # then nothing goes before it
        assert order_per_key(stored).get(b"k", []) == []
    else:
        assert len(rejected) == 1
        assert order_per_key(stored)[b"k"] == list(range(1, 100))
    await sink.close()


async def test_a_refused_login(prefix: str) -> None:
    server, port = KafkaServer(), free_port()
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    properties = server._properties
    for name in ("listeners", "advertised.listeners"):
        properties[name] += f",LOGIN://127.0.0.1:{port}"
    properties["listener.security.protocol.map"] += ",LOGIN:SASL_PLAINTEXT"
    properties["listener.name.login.sasl.enabled.mechanisms"] = "PLAIN"
    properties["listener.name.login.plain.sasl.jaas.config"] = f'{module} required user_relay="right";'

    def sink(password: str) -> KafkaSink:
        options: dict[str, Any] = {
            "bootstrap.servers": f"127.0.0.1:{port}",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "relay",
            "sasl.password": password,
        }
        return KafkaSink(config.Kafka(options=options, topics=(prefix,), create_topics=True))

    with server:
        right = sink("right")
        await right.open()
        assert await right.publish(batch_of([make_event(1, topic=prefix)])) == []
        await right.close()
        with pytest.raises(AuthError) as caught:
            await sink("wrong").open()
        assert "sasl" in caught.value.hint
        assert "wrong" not in str(caught.value)
