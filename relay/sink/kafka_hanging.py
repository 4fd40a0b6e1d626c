"""Transactions of our own that Kafka forgot to end, found and ended when the sink is opened.

A broker that restarts while the leaders of partitions are not known yet takes a transaction that it had decided as
complete without writing its end into them (seen with Kafka 4.3 and one replica). The records stay open for ever: no
`read_committed` reader gets past them, and neither does our read-back. Nobody but a producer with the same
transactional id can end them: the end of its next transaction in that partition ends everything that is open there.

Records that the checkpoint does not cover are aborted, since their events come again. Those that it covers were
acknowledged and must become visible: they are committed, together with a copy of the newest of them, because a
transaction without a record has no end in the partition. So that one event is stored twice, with the same id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from confluent_kafka import Consumer, KafkaException, TopicPartition

from relay.errors import SinkUnavailable
from relay.sink.kafka_policy import translate
from relay.sink.kafka_topics import destination, parsed

_KEY = b"relay"  # of a record that nobody will see; compacted topics take none without a key


class Hanging(NamedTuple):
    """An open transaction of ours in one partition, although no transaction of ours can be under way."""

    name: str  # destination
    begin: int  # offset of its first record
    newest: Any  # its last record


def find(
    options: Mapping[str, Any],
    begins: Mapping[str, int],
    ends: Mapping[str, int],
    ours: Callable[[Any], bool],
    timeout: float,
) -> list[Hanging]:
    """Of the partitions, open from `begins` on, those whose first open record is ours. `options`: of a consumer."""
    if not begins:
        return []
    consumer = Consumer({**options, "isolation.level": "read_uncommitted"})
    try:
        consumer.assign([TopicPartition(*parsed(name), begin) for name, begin in begins.items()])
        first: dict[str, bool] = {}
        newest: dict[str, Any] = {}
        left, deadline = set(begins), time.monotonic() + timeout
        while left and time.monotonic() < deadline:
            for message in consumer.consume(1000, timeout=0.1):
                name = destination(cast("str", message.topic()), cast("int", message.partition()))
                if message.error() is None:
                    first.setdefault(name, ours(message))
                    if first[name] and ours(message):
                        newest[name] = message
                if (message.offset() or 0) + 1 >= ends[name] or message.error() is not None:
                    left.discard(name)
        return [Hanging(name, begins[name], message) for name, message in newest.items()]
    except KafkaException as exc:
        raise translate(exc.args[0], "Kafka cannot be read back") from None
    finally:
        consumer.close()


def end(
    producer: Any,
    found: list[Hanging],
    ask: Callable[[Callable[[float], object]], None],
    *,
    commit: bool,
    timeout: float,
) -> None:
    """End them, all in one transaction; see the module."""
    producer.begin_transaction()
    for name, _, newest in found:
        topic, partition = parsed(name)
        if commit:
            producer.produce(topic, newest.value(), newest.key(), partition, headers=newest.headers())
        else:
            producer.produce(topic, None, _KEY, partition)
    if producer.flush(timeout):  # else abort would purge them, and the transaction not reach the partitions
        raise SinkUnavailable("Kafka: a transaction that hangs could not be ended in time")
    ask(producer.commit_transaction if commit else producer.abort_transaction)
