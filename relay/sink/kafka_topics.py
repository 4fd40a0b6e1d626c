"""Topics of Kafka, asked and made: blocking calls, each with a time limit. Errors are translated here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import structlog
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from relay.errors import SetupError, SinkUnavailable
from relay.sink.kafka_policy import translate

log = structlog.get_logger(__name__)

_AGAIN = 0.05


def destination(topic: str, partition: int) -> str:
    """The name of a partition in marks. A topic's name has no slash."""
    return f"{topic}/{partition}"


def parsed(name: str) -> tuple[str, int]:
    topic, _, partition = name.rpartition("/")
    return topic, int(partition)


def partition_counts(producer: Producer, timeout: float) -> dict[str, int]:
    """How many partitions each topic has, of those that are shown to us."""
    try:
        topics = producer.list_topics(timeout=timeout).topics
    except KafkaException as exc:
        raise translate(exc.args[0], "Kafka metadata") from None
    return {name: len(topic.partitions) for name, topic in topics.items() if topic.partitions}


def create_topics(
    options: Mapping[str, Any],
    topics: Iterable[str],
    *,
    partitions: int,
    replication_factor: int,
    timeout: float,
    settings: Mapping[str, str] | None = None,
) -> list[str]:
    """Make topics; one that exists already is as good as made. Returns those that did not exist."""
    admin = AdminClient(dict(options))
    new = [
        NewTopic(name, num_partitions=partitions, replication_factor=replication_factor, config=dict(settings or {}))
        for name in topics
    ]
    futures = admin.create_topics(new, operation_timeout=timeout, request_timeout=timeout)
    made: list[str] = []
    for topic, future in futures.items():
        try:
            future.result()
            log.info("topic.created", topic=topic)
            made.append(topic)
        except KafkaException as exc:
            error = exc.args[0]
            if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise translate(error, f"Kafka did not create topic {topic}") from None
    return made


def setting(options: Mapping[str, Any], topic: str, name: str, timeout: float) -> str | None:
    """A topic's setting; None if Kafka does not let us see it."""
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    admin = AdminClient(dict(options))  # it must outlive the answer
    (future,) = admin.describe_configs([resource], request_timeout=timeout).values()
    try:
        return str(future.result()[name].value)
    except (KafkaException, KeyError) as exc:
        log.info("topic.setting_unknown", topic=topic, setting=name, reason=str(exc))
        return None


def ends(
    options: Mapping[str, Any], partitions: Iterable[tuple[str, int]], timeout: float, *, stable: bool = False
) -> dict[str, int]:
    """Where each partition ends now, open transactions included; `stable`: where `read_committed` readers end."""
    isolation = IsolationLevel.READ_COMMITTED if stable else IsolationLevel.READ_UNCOMMITTED
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    asked = {TopicPartition(topic, partition): latest for topic, partition in partitions}
    if not asked:
        return {}
    admin = AdminClient(dict(options))
    deadline = time.monotonic() + timeout
    found: dict[str, int] = {}
    while asked:
        futures = admin.list_offsets(asked, isolation_level=isolation, request_timeout=timeout)
        for spot, future in futures.items():
            try:
                found[destination(spot.topic, spot.partition)] = future.result().offset
                del asked[spot]
            except KafkaException as exc:
                failure = translate(exc.args[0], f"Kafka does not say where {spot.topic} ends")
                # A topic that was made a moment ago, or a leader that moved: it will be known soon.
                if not isinstance(failure, SinkUnavailable | SetupError) or time.monotonic() > deadline:
                    raise failure from None
                time.sleep(_AGAIN)
    return found
