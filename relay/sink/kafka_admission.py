"""Topics that a transactional session knows; no event goes to another one before it is admitted.

librdkafka would wait 30 s for a missing topic, and then lose the event. Topics that exist are never changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from relay import config
from relay.errors import RelayError, SetupError, SinkUnavailable
from relay.sink import kafka_topics
from relay.sink.kafka_client import Client
from relay.sink.kafka_marks import Marks
from relay.sink.kafka_policy import topic_missing
from relay.sink.kafka_topics import destination

_POSITIONS = {"cleanup.policy": "compact", "segment.bytes": "16777216", "min.cleanable.dirty.ratio": "0.1"}


class Admission:
    """Of one session. `options` are those of a client that asks and makes topics."""

    def __init__(self, client: Client, section: config.Kafka, options: Mapping[str, Any]) -> None:
        self._client = client
        self._section = section
        self._options = options
        self.topics: dict[str, int] = {}  # how many partitions each has

    def refresh(self) -> None:
        timeout = min(self._section.connect_timeout, 5.0)
        self.topics = kafka_topics.partition_counts(self._client.producer, timeout)

    def make_position_topic(self) -> None:
        section, topic = self._section, self._section.position_topic
        if topic in self.topics:
            policy = kafka_topics.setting(self._options, topic, "cleanup.policy", section.connect_timeout)
            if policy is not None and "compact" not in policy:
                raise SetupError(
                    f"topic {topic} is not compacted (cleanup.policy={policy}): it would forget positions",
                    hint=f"kafka-configs.sh --bootstrap-server … --alter --entity-type topics --entity-name {topic} "
                    "--add-config cleanup.policy=compact; or name another topic in sink.kafka.position_topic",
                )
            return
        try:
            kafka_topics.create_topics(
                self._options,
                [topic],
                partitions=1,
                replication_factor=section.replication_factor,
                timeout=section.connect_timeout,
                settings=_POSITIONS,
            )
        except (SinkUnavailable, SetupError):  # it says itself what to change
            raise
        except RelayError as exc:
            raise SetupError(
                f"Kafka has no topic {topic}, which exactly-once mode needs, and does not let us create it: {exc}",
                hint=f"create it: kafka-topics.sh --bootstrap-server … --create --topic {topic} --partitions 1 "
                "--config cleanup.policy=compact; with ACLs, allow DESCRIBE, READ and WRITE",
            ) from None
        self._listed([topic])

    def _listed(self, topics: Iterable[str]) -> None:
        deadline = time.monotonic() + self._section.connect_timeout
        while missing := [topic for topic in topics if topic not in self.topics]:
            if time.monotonic() > deadline:
                raise SinkUnavailable(f"Kafka created {', '.join(missing)} but does not list it yet")
            self.refresh()

    def admit(self, topics: Iterable[str]) -> list[str]:
        """Make sure that topics exist: librdkafka would wait 30 s for a missing one, and then lose the event.

        Returns those that it made.
        """
        section = self._section
        if missing := sorted(set(topics) - self.topics.keys()):
            self.refresh()
        missing = [topic for topic in missing if topic not in self.topics]
        if missing and not section.create_topics:
            raise topic_missing(missing)
        made: list[str] = []
        if missing:
            made = kafka_topics.create_topics(
                self._options,
                missing,
                partitions=section.partitions,
                replication_factor=section.replication_factor,
                timeout=section.connect_timeout,
            )
            self._listed(missing)
        return made

    def welcome(self, topic: str, marks: Marks) -> None:
        """A topic that this session did not know: note where it begins, before the first event goes there."""
        made = self.admit([topic])
        spots = [(topic, number) for number in range(self.topics[topic])]
        # What we made ourselves has nothing of what a topic of this name once had: marks of that one hold no more.
        unknown = [spot for spot in spots if made or destination(*spot) not in marks.known]
        marks.first_seen(kafka_topics.ends(self._options, unknown, self._section.connect_timeout))
