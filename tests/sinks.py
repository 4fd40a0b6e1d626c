"""Making events for sinks, publishing as the pipeline does, and reading back with real clients."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import nats
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from relay.errors import TransientError
from relay.event import Batch, Event, HeaderNames, Rejected, Transaction
from relay.lsn import LSN
from relay.sink import Sink

_NAMES = ("id", "type", "aggregate-id", "seq")
_PATIENCE = 60.0
ORIGIN = "conformance:1"
"""The beginning of every `relay-position`."""


class Stored(NamedTuple):
    """An event as a consumer sees it."""

    topic: str
    key: bytes | None
    headers: dict[str, bytes]
    body: bytes | None
    partition: int = 0

    @property
    def id(self) -> bytes:
        return self.headers["id"]

    @property
    def seq(self) -> int:
        return int(self.headers["seq"])


def make_event(
    seq: int,
    *,
    topic: str = "events.test",
    key: bytes | None = b"k",
    body: bytes | None = b"{}",
    headers: Mapping[str, bytes] | None = None,
) -> Event:
    """An event with a stable id: the same seq is the same event."""
    extra = {"relay-position": b"%b:1:stream:1:%X:0" % (ORIGIN.encode(), seq)} | dict(headers or {})
    event_id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{topic}/{seq}")).encode()
    return Event(
        id=event_id,
        topic=topic,
        key=key,
        header_names=HeaderNames.of((*_NAMES, *extra)),
        header_values=(event_id, b"test.made", key or b"", b"%d" % seq, *extra.values()),
        body=body,
        table="public.outbox_events",
        transaction=Transaction(xid=seq, commit_lsn=seq, committed_at=0.0, stamp=b"0/%X" % seq),
        ordinal=0,
    )


def batch_of(events: Iterable[Event]) -> Batch:
    listed = list(events)
    return Batch(listed, LSN(listed[-1].transaction.commit_lsn), sum(len(event.body or b"") for event in listed))


def batches_of(events: Sequence[Event], size: int) -> list[Batch]:
    return [batch_of(events[at : at + size]) for at in range(0, len(events), size)]


async def publish_overlapping(sink: Sink, batches: Sequence[Batch]) -> list[Rejected]:
    """All at once, in order; what a sink may rely on."""
    results = await asyncio.gather(*(sink.publish(batch) for batch in batches))
    return [rejected for result in results for rejected in result]


async def publish_as_pipeline(
    sink: Sink, batches: Iterable[Batch], *, window: int = 8
) -> AsyncIterator[list[Rejected]]:
    """A bounded window, completed first-in first-out; on a transient error open again, resubmit the rest in order.

    Gives what was rejected, per round, so that the caller can break something in between.
    """
    todo = list(batches)
    marks = dict(sink.marks)
    while todo:
        now = todo[:window]
        results = await asyncio.gather(*(sink.publish(batch) for batch in now), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, TransientError):
                raise failure
        unfinished = [batch for batch, result in zip(now, results, strict=True) if isinstance(result, BaseException)]
        todo = unfinished + todo[window:]
        for batch, result in zip(now, results, strict=True):
            if isinstance(result, BaseException):
                break
            marks |= batch.marks
        yield [rejected for result in results if not isinstance(result, BaseException) for rejected in result]
        if failures:
            sink.resume(marks, ORIGIN)
            await open_at_last(sink)


async def open_at_last(sink: Sink) -> None:
    """As the pipeline does: again, while that may help."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return await sink.open()
        except TransientError:
            if time.monotonic() > deadline:  # also ends a loop whose cancellation a client library has swallowed
                raise
            await asyncio.sleep(0.05)  # the pipeline's backoff, shortened


def first_occurrences(stored: Iterable[Stored]) -> list[Stored]:
    """What a consumer that dedupes by id sees."""
    seen: dict[bytes, Stored] = {}
    for item in stored:
        seen.setdefault(item.id, item)
    return list(seen.values())


def order_per_key(stored: Iterable[Stored]) -> dict[bytes, list[int]]:
    order: dict[bytes, list[int]] = defaultdict(list)
    for item in stored:
        order[item.headers["aggregate-id"]].append(item.seq)
    return dict(order)


_NO_LEADER = {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.UNKNOWN_TOPIC_OR_PART}


def _end_of(consumer: Consumer, spot: TopicPartition, deadline: float) -> int:
    """Where the partition ends. A partition made a moment ago may not have its leader yet."""
    while True:
        try:
            return int(consumer.get_watermark_offsets(spot, timeout=max(1.0, deadline - time.monotonic()))[1])
        except KafkaException as exc:
            if exc.args[0].code() not in _NO_LEADER or time.monotonic() > deadline:
                raise
            consumer.poll(0.05)


def read_kafka(bootstrap: str, topic: str, *, timeout: float = 90.0) -> list[Stored]:
    """Everything that is committed in the topic at this moment, partition by partition."""
    options = {"bootstrap.servers": bootstrap, "group.id": "reader", "fetch.wait.max.ms": 10}
    consumer = Consumer(
        {**options, "enable.auto.commit": False, "enable.partition.eof": True, "isolation.level": "read_committed"}
    )
    # Where the partitions end, whether that is committed or not: a commit that was acknowledged shows a moment later.
    watcher = Consumer({**options, "isolation.level": "read_uncommitted"})
    deadline = time.monotonic() + timeout
    stored: list[Stored] = []
    try:
        for partition in consumer.list_topics(topic, timeout=timeout).topics[topic].partitions:
            spot = TopicPartition(topic, partition, 0)
            end = _end_of(watcher, spot, deadline)
            consumer.assign([spot])
            position = 0
            while position < end:
                assert time.monotonic() < deadline, f"{topic}/{partition}: {position} of {end} read"
                for message in consumer.consume(1000, timeout=0.2):
                    if message.partition() != partition:  # the end of the one before, said a moment later
                        continue
                    position = message.offset() or 0
                    if (error := message.error()) is not None:  # the end; markers of transactions take places, too
                        assert error.code() == KafkaError._PARTITION_EOF, error
                        continue
                    pairs = cast("list[tuple[str, bytes]]", message.headers() or [])
                    headers = dict(pairs)
                    stored.append(Stored(topic, message.key(), headers, message.value(), partition))
                    position += 1
    finally:
        consumer.close()
        watcher.close()
    return stored


async def read_jetstream(url: str, stream: str) -> list[Stored]:
    """Everything that the stream holds at this moment."""
    client = await nats.connect(url)
    try:
        js = client.jetstream(timeout=60)  # the consumer may be placed on a server that has just come back
        total = (await js.stream_info(stream)).state.messages
        stored: list[Stored] = []
        if not total:
            return stored
        subscription = await js.subscribe(
            "", stream=stream, ordered_consumer=True, config=ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
        )
        while len(stored) < total:
            message = await subscription.next_msg(timeout=60)
            headers = {name: value.encode() for name, value in (message.headers or {}).items()}
            stored.append(Stored(message.subject, None, headers, message.data))
        return stored
    except NotFoundError:
        return []
    finally:
        await client.close()
