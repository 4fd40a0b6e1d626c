"""Kafka's exactly-once mode (G4, G6): what `read_committed` readers see, whatever is killed, fenced or lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from relay import config
from relay.embedded import KafkaServer
from relay.errors import SetupError, SinkUnavailable
from relay.event import Event
from relay.sink import kafka_topics
from relay.sink.kafka_exactly_once import ExactlyOnceKafkaSink
from relay.sink.kafka_topics import setting
from tests.fix_kafka import Kafka
from tests.kafka_raw import hang
from tests.relays import create_topic
from tests.sinks import (
    Stored,
    batch_of,
    batches_of,
    make_event,
    order_per_key,
    publish_as_pipeline,
    publish_overlapping,
    read_kafka,
)

ORIGIN = "tests:1"
OpenSink = Callable[..., Awaitable[ExactlyOnceKafkaSink]]


def event(seq: int, topic: str, *, keys: int = 5, body: bytes = b"{}", origin: str = ORIGIN) -> Event:
    return make_event(
        seq, topic=topic, key=b"k%d" % (seq % keys), body=body, headers={"relay-position": b"%b:1:x" % origin.encode()}
    )


@pytest.fixture
async def open_sink(kafka: Kafka, prefix: str) -> AsyncIterator[OpenSink]:
    sinks: list[ExactlyOnceKafkaSink] = []

    async def open_one(
        marks: dict[str, int] | None = None,
        *,
        options: dict[str, Any] | None = None,
        **section: Any,
    ) -> ExactlyOnceKafkaSink:
        section = {"create_topics": True, "partitions": 4, "transactional_id": prefix, **section}
        section.setdefault("position_topic", f"{prefix}-positions")
        addresses = {"bootstrap.servers": kafka.bootstrap, **(options or {})}
        sink = ExactlyOnceKafkaSink(config.Kafka(mode="exactly-once", options=addresses, **section))
        sinks.append(sink)
        sink.resume(marks or {}, ORIGIN)
        await sink.open()
        return sink

    yield open_one
    for sink in sinks:
        await sink.close()


async def committed(kafka: Kafka, topic: str) -> list[Stored]:
    return await asyncio.to_thread(read_kafka, kafka.bootstrap, topic)


def ends_of(kafka: Kafka, topic: str) -> dict[str, int]:
    options = {"bootstrap.servers": kafka.bootstrap}
    return kafka_topics.ends(options, [(topic, number) for number in range(4)], 60)


async def positions(kafka: Kafka, prefix: str) -> list[dict[str, Any]]:
    return [orjson.loads(item.body or b"{}") for item in await committed(kafka, f"{prefix}-positions")]


@pytest.mark.guarantee("G4")
async def test_a_topic_that_we_make_again_begins_anew(kafka: Kafka, open_sink: OpenSink, prefix: str) -> None:
    """Marks of the one that was deleted would pass what the new one holds: stored twice, or refused later."""
    old = {f"{prefix}/{n}": 1_000_000 for n in range(4)}
    sink = await open_sink(old)
    batches = batches_of([event(seq, prefix) for seq in range(100)], 20)
    await publish_overlapping(sink, batches)
    marks = dict(old)
    for batch in batches:
        marks |= batch.marks
    ends = ends_of(kafka, prefix)
    assert all(marks[name] <= end for name, end in ends.items())

    successor = await open_sink({**marks, **dict.fromkeys(ends, 0)})  # nothing was saved meanwhile
    assert await publish_overlapping(successor, batches) == []
    assert successor.duplicates == 100
    assert len(await committed(kafka, prefix)) == 100


@pytest.mark.guarantee("G4")
async def test_what_is_stored_beyond_the_marks_is_not_stored_again(
    kafka: Kafka, open_sink: OpenSink, prefix: str
) -> None:
    sink = await open_sink(topics=(prefix,))
    begin = sink.marks
    assert begin == {f"{prefix}/{n}": 0 for n in range(4)}
    batches = batches_of([event(seq, prefix) for seq in range(200)], 20)
    await publish_overlapping(sink, batches)
    marks: dict[str, int] = dict(begin)
    for batch in batches:
        marks |= batch.marks
    await publish_overlapping(sink, batches_of([event(seq, prefix) for seq in range(200, 300)], 20))

    successor = await open_sink(marks)  # the checkpoint has seen the first 200
    again = batches_of([event(seq, prefix) for seq in range(200, 400)], 20)
    assert await publish_overlapping(successor, again) == []
    assert successor.duplicates == 100
    stored = await committed(kafka, prefix)
    assert order_per_key(stored) == {b"k%d" % n: list(range(n, 400, 5)) for n in range(5)}


@pytest.mark.guarantee("G6")
async def test_the_older_of_two_is_refused_and_its_transaction_never_shows(
    kafka: Kafka, open_sink: OpenSink, prefix: str
) -> None:
    zombie = await open_sink(topics=(prefix,))
    await zombie.publish(batch_of([event(0, prefix)]))
    successor = await open_sink()
    late = batch_of([event(1, prefix)])
    with pytest.raises(SinkUnavailable, match="took over") as caught:
        await zombie.publish(late)
    assert "relay.name" in caught.value.hint
    assert len(late.events) == 1
    await successor.publish(batch_of([event(2, prefix)]))
    assert [item.seq for item in await committed(kafka, prefix)] == [0, 2]


async def test_an_opening_that_was_given_up_fences_nobody(kafka: Kafka, prefix: str) -> None:
    """As at the first start: an empty recovery ends before its sink is open, and the stream opens it at once again."""

    async def one(number: int) -> None:
        name, options = f"{prefix}-{number}", {"bootstrap.servers": kafka.bootstrap}
        section = config.Kafka(
            mode="exactly-once",
            create_topics=True,
            topics=(prefix,),
            transactional_id=name,
            position_topic=f"{prefix}-positions",
            options=options,
        )
        sink = ExactlyOnceKafkaSink(section)
        sink.resume({}, ORIGIN)
        opening = asyncio.ensure_future(sink.open())
        await asyncio.sleep(0.005 * number)
        opening.cancel()
        await asyncio.wait((opening,))
        await sink.open()
        await asyncio.sleep(1.5)  # what was given up could take over meanwhile
        await sink.publish(batch_of([event(number, prefix)]))
        await sink.close()

    await asyncio.to_thread(create_topic, kafka.bootstrap, prefix)
    await asyncio.gather(*map(one, range(20)))
    assert len(await committed(kafka, prefix)) == 20


async def test_marks_do_not_pass_what_may_still_come(kafka: Kafka, open_sink: OpenSink, prefix: str) -> None:
    """A recovery asks in another order: what it has not asked for yet must be found again after another crash."""
    sink = await open_sink(topics=(prefix,), partitions=1)
    begin = sink.marks
    await sink.publish(batch_of([event(seq, prefix) for seq in range(10)]))
    second = await open_sink(begin)
    backwards = batch_of([event(9, prefix), event(20, prefix)])
    await second.publish(backwards)
    assert backwards.marks == {f"{prefix}/0": 0}
    third = await open_sink({**begin, **backwards.marks})
    settled = batch_of([event(seq, prefix) for seq in (0, 1, 2, 20, 21)])
    await third.publish(settled)
    assert settled.marks == {f"{prefix}/0": 3}
    last = batch_of([event(22, prefix)])
    last.settled = True
    await third.publish(last)
    assert last.marks[f"{prefix}/0"] > 10
    assert sorted(item.seq for item in await committed(kafka, prefix)) == [*range(10), 20, 21, 22]


async def test_topics_seen_first_in_publish_are_found_after_a_crash(
    kafka: Kafka, open_sink: OpenSink, prefix: str
) -> None:
    """No checkpoint knows of them: where they begin is in the position record of the same transaction."""
    topics = [f"{prefix}-{n}" for n in range(3)]
    stranger = Producer({"bootstrap.servers": kafka.bootstrap})
    await asyncio.to_thread(create_topic, kafka.bootstrap, topics[0])
    for number in range(50):
        stranger.produce(topics[0], b"not ours", b"k%d" % number, headers=[("id", b"x%d" % number), ("seq", b"0")])
    assert stranger.flush(60) == 0
    sink = await open_sink()
    assert sink.marks == {}
    events = [make_event(seq, topic=topics[seq % 3], headers={"relay-position": b"tests:1:x"}) for seq in range(30)]
    for each in batches_of(events, 10):
        await sink.publish(each)
    successor = await open_sink()
    assert {name.rpartition("/")[0] for name in successor.marks} == set(topics)
    assert await publish_overlapping(successor, batches_of(events, 10)) == []
    assert successor.duplicates == 30
    for topic in topics:
        ids = [item.id for item in await committed(kafka, topic)]
        assert len(ids) == len(set(ids))


@pytest.mark.guarantee("G4")
async def test_where_a_topic_begins_is_remembered_by_later_sessions(
    kafka: Kafka, open_sink: OpenSink, prefix: str
) -> None:
    """The checkpoint knew the topic; what a recovery looks behind is older, and does not."""
    new, other = f"{prefix}-new", f"{prefix}-other"
    position = {"relay-position": b"tests:1:x"}
    events = [make_event(seq, topic=new, headers=position) for seq in range(20)]
    first = await open_sink(topics=(other,))
    before = dict(first.marks)
    for each in batches_of(events, 10):
        await first.publish(each)
    known = await asyncio.to_thread(ends_of, kafka, new)
    second = await open_sink(before | known, topics=(other,))
    await second.publish(batch_of([make_event(100, topic=other, headers=position)]))
    third = await open_sink(before, topics=(other,))
    assert await publish_overlapping(third, batches_of(events, 10)) == []
    assert third.duplicates == 20
    assert sorted(item.seq for item in await committed(kafka, new)) == list(range(20))


async def test_partitions_that_were_added(kafka: Kafka, open_sink: OpenSink, prefix: str) -> None:
    sink = await open_sink(topics=(prefix,), partitions=1, options={"topic.metadata.refresh.interval.ms": 100})
    begin = sink.marks
    await sink.publish(batch_of([event(0, prefix)]))
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    await asyncio.to_thread(admin.create_partitions([NewPartitions(prefix, 6)])[prefix].result, 60)
    marks: dict[str, int] = {}
    seq = 0
    async with asyncio.timeout(90):
        while len(marks) < 3:  # until the producer has noticed
            seq += 1
            batch = batch_of([event(seq, prefix, keys=1000)])
            await sink.publish(batch)
            marks |= batch.marks
    successor = await open_sink(begin)
    events = [event(0, prefix), *(event(each, prefix, keys=1000) for each in range(1, seq + 1))]
    await publish_overlapping(successor, batches_of(events, 10))
    assert len(await committed(kafka, prefix)) == seq + 1


async def test_transactions_grow_with_the_load(kafka: Kafka, open_sink: OpenSink, prefix: str) -> None:
    sink = await open_sink(topics=(prefix,), transaction_events=5000)
    await sink.publish(batch_of([event(0, prefix)]))
    await publish_overlapping(sink, batches_of([event(seq, prefix) for seq in range(1, 12001)], 100))
    sizes = [each["events"] for each in await positions(kafka, prefix)]
    assert sizes[0] == 1
    assert max(sizes) == 5000
    assert sum(sizes) == 12001
    last = (await positions(kafka, prefix))[-1]
    assert last["relay-position"] == "tests:1:1:x"
    assert sum(last["marks"].values()) >= 7001  # of what was committed before


@pytest.mark.guarantee("G9")
async def test_a_refused_event_takes_nothing_with_it(kafka: Kafka, open_sink: OpenSink, prefix: str) -> None:
    """The broker, not the client, finds it too large: the transaction is aborted, and sent again in halves."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    topic = NewTopic(prefix, num_partitions=2, replication_factor=1, config={"max.message.bytes": "20000"})
    await asyncio.to_thread(admin.create_topics([topic])[prefix].result, 60)
    sink = await open_sink(options={"batch.size": 15000})
    events = [event(seq, prefix, keys=10) for seq in range(500)]
    events[333] = event(333, prefix, keys=10, body=os.urandom(30_000))
    rejected = await publish_overlapping(sink, batches_of(events, 50))
    assert rejected[0].event == events[333]
    assert {item.event.transaction.xid for item in rejected} == set(range(333, 500, 10))
    order = order_per_key(await committed(kafka, prefix))
    assert order == {b"k%d" % n: list(range(n, 500 if n != 3 else 333, 10)) for n in range(10)}


async def test_message_sets_too_large_for_the_topic_are_nobodys_fault(
    kafka: Kafka, open_sink: OpenSink, prefix: str
) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    topic = NewTopic(prefix, num_partitions=2, replication_factor=1, config={"max.message.bytes": "20000"})
    await asyncio.to_thread(admin.create_topics([topic])[prefix].result, 60)
    sink = await open_sink(options={"batch.size": 60_000, "linger.ms": 50})
    events = [event(seq, prefix, body=os.urandom(1000)) for seq in range(300)]
    async for rejected in publish_as_pipeline(sink, batches_of(events, 50)):
        assert rejected == []
    assert order_per_key(await committed(kafka, prefix)) == {b"k%d" % n: list(range(n, 300, 5)) for n in range(5)}


@pytest.mark.parametrize(
    ("options", "section", "key"),
    [
        ({"transaction.timeout.ms": 2_000_000}, {}, "transaction.timeout.ms"),
        ({}, {"replication_factor": 30}, "sink.kafka.replication_factor"),
    ],
)
async def test_what_the_broker_never_grants_is_not_tried_again(
    open_sink: OpenSink, options: dict[str, Any], section: dict[str, Any], key: str
) -> None:
    with pytest.raises(SetupError) as caught:
        await open_sink(options=options, **section)
    assert key in caught.value.hint


async def test_a_topic_that_was_made_again(kafka: Kafka, open_sink: OpenSink, prefix: str) -> None:
    with pytest.raises(SetupError, match="stored events up to 700") as caught:
        await open_sink({f"{prefix}/0": 700}, topics=(prefix,))
    assert "outbox_relay_checkpoint" in caught.value.hint


async def test_the_position_topic_is_made_compacted_and_another_one_is_refused(
    kafka: Kafka, open_sink: OpenSink, prefix: str
) -> None:
    options = {"bootstrap.servers": kafka.bootstrap}
    sink = await open_sink(topics=(prefix,))
    await sink.publish(batch_of([event(1, prefix)]))
    await sink.close()
    made = await asyncio.to_thread(setting, options, f"{prefix}-positions", "cleanup.policy", 10)
    assert made == "compact"
    await open_sink(topics=(prefix,))  # as it was left
    await asyncio.to_thread(create_topic, kafka.bootstrap, f"{prefix}-other")
    with pytest.raises(SetupError, match="not compacted"):
        await open_sink(topics=(prefix,), position_topic=f"{prefix}-other")


# --- the whole relay


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("acknowledged", [False, True])
async def test_a_transaction_that_the_broker_forgot_to_end(acknowledged: bool) -> None:
    """Nobody could read past it, and neither could the relay. What the checkpoint covers is committed, else aborted."""
    section = {"mode": "exactly-once", "topics": ("t",), "partitions": 1, "create_topics": True}
    with KafkaServer({"transaction.partition.verification.enable": "false"}) as server:
        kafka = config.Kafka(**section, transactional_id="x", options={"bootstrap.servers": server.bootstrap})

        async def opened(marks: dict[str, int]) -> ExactlyOnceKafkaSink:
            sink = ExactlyOnceKafkaSink(kafka)
            sink.resume(marks, ORIGIN)
            await sink.open()
            return sink

        sink = await opened({})
        batch = batch_of([event(seq, "t") for seq in range(3)])
        await sink.publish(batch)
        await sink.close()
        await asyncio.to_thread(hang, server.bootstrap, "x", 0, [event(seq, "t") for seq in (3, 4)])
        marks = {"t/0": batch.marks["t/0"] + (2 if acknowledged else 0)}
        sink = await opened(marks)
        assert await sink.publish(batch_of([event(seq, "t") for seq in ((5,) if acknowledged else (3, 4, 5))])) == []
        await sink.close()
        stored = await asyncio.to_thread(read_kafka, server.bootstrap, "t")
        ids = [item.id for item in stored]
        assert list(dict.fromkeys(ids)) == [event(seq, "t").id for seq in range(6)]
        # Kafka ends a transaction in a partition only behind a record: the newest one of it, once more.
        assert len(ids) == (7 if acknowledged else 6)
