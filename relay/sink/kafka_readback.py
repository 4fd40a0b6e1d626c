"""What Kafka holds of this relay beyond the checkpoint: read after the transactional id was taken over.

From then on nobody else can commit under our id, and what a predecessor left open is aborted. So what a
`read_committed` consumer sees between a mark and the partition's end is the whole truth: an event whose id is there is
stored, any other is not. LSNs and counts are not asked: they are issued again after a restore, ids are not.

Other writers may use the topics; their records are passed over. A transaction that *they* left open hides what is
behind it until it ends: then we wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import orjson
import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from relay.errors import SinkUnavailable
from relay.sink.kafka_marks import Held
from relay.sink.kafka_policy import Option, translate
from relay.sink.kafka_topics import destination, parsed

log = structlog.get_logger(__name__)

_PATIENCE = 30.0  # without progress; a foreign transaction may be open for longer: then we try again
_SLICE = 0.2
_TAIL = 256

# Of a producer: a consumer would warn that it does not know them.
_PRODUCERS = (
    *("acks", "request.required.", "enable.idempotence", "enable.gapless", "transactional.", "transaction.", "linger."),
    *("queue.buffering.", "batch.", "compression.", "partitioner", "delivery.", "message.timeout", "message.send"),
    *("retries", "retry.", "sticky.", "max.in.flight"),
)


def consumer_options(user: Mapping[str, Option], origin: str) -> dict[str, Any]:
    kept = {name: value for name, value in user.items() if not name.startswith(_PRODUCERS)}
    return {
        **kept,
        "group.id": f"{origin} read-back",  # never joined: partitions are assigned, and nothing is committed
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        "fetch.wait.max.ms": 50,
    }


def read(
    options: Mapping[str, Any],
    spans: Mapping[str, tuple[int, int]],
    visit: Callable[[Any, str], None],
    waiting: Callable[[Mapping[str, int]], None],
) -> None:
    """Visit the committed records of each destination from the span's beginning up to its end.

    `waiting` is told again and again, while nothing comes, which ends are not reached; it may raise.
    """
    left = {name: end for name, (begin, end) in spans.items() if begin < end}
    if not left:
        return
    consumer = Consumer(dict(options))
    try:
        consumer.assign([TopicPartition(*parsed(name), spans[name][0]) for name in left])
        moved = time.monotonic()
        while left:
            waiting(left)
            if time.monotonic() - moved > _PATIENCE:
                raise SinkUnavailable(
                    f"Kafka: {next(iter(left))} cannot be read up to its end",
                    hint="another writer of this topic has a transaction open; it ends by itself at its timeout",
                )
            for message in consumer.consume(1000, timeout=_SLICE):
                name = destination(cast("str", message.topic()), cast("int", message.partition()))
                offset, error = message.offset() or 0, message.error()
                if error is None:
                    moved = time.monotonic()
                    if name in left and offset < left[name]:
                        visit(message, name)
                        offset += 1
                elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001
                    if error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:  # of the group we only have the name
                        raise translate(error, f"Kafka: {name} cannot be read back")
                    continue
                if offset >= left.get(name, offset + 1):
                    del left[name]
    except KafkaException as exc:
        raise translate(exc.args[0], "Kafka cannot be read back") from None
    finally:
        consumer.close()


def read_ids(
    options: Mapping[str, Any],
    spans: Mapping[str, tuple[int, int]],
    origin: str,
    waiting: Callable[[Mapping[str, int]], None],
) -> Held:
    """Ids of the events that are ours; a replay's copies are not what the relay published."""
    held: Held = {}
    ours = f"{origin}:".encode()

    def visit(message: Any, name: str) -> None:
        headers = dict(cast("list[tuple[str, bytes]]", message.headers() or []))
        replayed = "relay-replayed" in headers
        if (headers.get("relay-position") or b"").startswith(ours) and "id" in headers and not replayed:
            held[headers["id"]] = name, message.offset()

    read(options, spans, visit, waiting)
    return held


def read_position(
    options: Mapping[str, Any], topic: str, end: int, origin: str, waiting: Callable[[Mapping[str, int]], None]
) -> dict[str, Any]:
    """The newest committed record of our key in the position topic; empty if there is none."""
    found: list[bytes] = []
    name, key = destination(topic, 0), origin.encode()

    def visit(message: Any, _name: str) -> None:
        if message.key() == key and message.value():
            found.append(message.value())

    begin, upto = end, end
    while begin > 0 and not found:  # from the end: other relays' records may be many
        begin = max(0, upto - max(_TAIL, 4 * (end - upto)))
        read(options, {name: (begin, upto)}, visit, waiting)
        upto = begin
    try:
        record = orjson.loads(found[-1]) if found else {}
    except orjson.JSONDecodeError:
        record = None
    if not isinstance(record, dict):
        log.warning("kafka position is not ours to read", topic=topic)
        return {}
    return record
