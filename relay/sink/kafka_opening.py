"""The opening of a transactional session: taking over the transactional id, then reading back what is stored.

Taking over fences whoever had the id; only then is it known what is stored beyond the marks. It never goes on where a
topic has lost what was acknowledged, and ends a transaction that hangs only if that is our own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from confluent_kafka import KafkaException

from relay import config
from relay.errors import SetupError, SinkUnavailable
from relay.sink import kafka_hanging, kafka_topics
from relay.sink.kafka_admission import Admission
from relay.sink.kafka_client import GRACE, Client
from relay.sink.kafka_marks import Marks
from relay.sink.kafka_policy import translate_transaction
from relay.sink.kafka_readback import read_ids, read_position
from relay.sink.kafka_topics import destination, parsed

log = structlog.get_logger(__name__)

_STUCK = 1.0  # how long committed readers may be held back by others before we look whether it is by ourselves


class Opening:
    """Of one session, done once. `options` are those of a client that asks, `reader` those of a consumer."""

    def __init__(
        self,
        client: Client,
        section: config.Kafka,
        options: Mapping[str, Any],
        reader: Mapping[str, Any],
        origin: str,
    ) -> None:
        self._client = client
        self._section = section
        self._options = options
        self._reader = reader
        self._origin = origin

    def run(self, admission: Admission, marks: Marks) -> None:
        """Afterwards the configured topics are admitted, and the marks say what is stored."""
        section = self._section
        self._take_over()
        self._client.check()
        admission.refresh()
        admission.make_position_topic()
        admission.admit(section.topics)
        topic = section.position_topic
        end = kafka_topics.ends(self._options, [(topic, 0)], section.connect_timeout)[destination(topic, 0)]
        record = read_position(self._reader, topic, end, self._origin, self._patiently(marks))
        # Kept in later records: a checkpoint's `readback`, which a recovery asks for, is older than its marks.
        marks.begins |= record.get("begins", {})
        begins = {name: offset for name, offset in record.get("begins", {}).items() if name not in marks.known}
        wanted = {*section.topics, *(parsed(name)[0] for name in (*marks.known, *begins))}
        gone = sorted(wanted - admission.topics.keys())
        if gone:
            log.warning("kafka topics are gone", topics=gone)
        asked = [(name, number) for name in wanted - set(gone) for number in range(admission.topics[name])]
        found = kafka_topics.ends(self._options, asked, section.connect_timeout)
        spans: dict[str, tuple[int, int]] = {}
        for name, upto in found.items():
            mark = marks.known.setdefault(name, min(begins.get(name, upto), upto))
            if mark > upto:
                raise SetupError(
                    f"{name} ends at offset {upto}, but this relay has stored events up to {mark}",
                    hint="the topic was deleted and made again, or has lost records: what it lost is not published "
                    "again by itself. Remove its entries from the column sink of outbox_relay_checkpoint to go on",
                )
            spans[name] = mark, upto
        held = read_ids(self._reader, spans, self._origin, self._patiently(marks))
        if held:
            log.info("topics.read_back", events=len(held))
        marks.held = held

    def _take_over(self) -> None:
        section = self._section
        try:
            # A request that is left alone may reach the broker after the next session's, and fence that one.
            self._client.ask(self._client.producer.init_transactions, section.connect_timeout, GRACE)
        except KafkaException as exc:
            error = exc.args[0]
            if error.retriable():
                raise SinkUnavailable(
                    f"Kafka: no transactional id within {section.connect_timeout:g} s, brokers down? ({error.str()})",
                    hint='is "bootstrap.servers" right, and can the relay reach the brokers\' advertised addresses?',
                ) from None
            raise translate_transaction(error, "Kafka does not give the transactional id") from None

    def _patiently(self, marks: Marks) -> Callable[[Mapping[str, int]], None]:
        """What to do while read-back waits for the ends of partitions: if that takes long, end what hangs there."""
        begun = time.monotonic()
        done = False

        def waiting(ends: Mapping[str, int]) -> None:
            nonlocal done
            if self._client.ending:
                raise SinkUnavailable("Kafka sink was closed")
            if not done and time.monotonic() - begun > _STUCK:
                done = True
                self._end_hanging(ends, marks)

        return waiting

    def _end_hanging(self, ends: Mapping[str, int], marks: Marks) -> None:
        section, origin = self._section, self._origin.encode()

        def ours(message: Any) -> bool:
            if message.topic() == section.position_topic:
                return bool(message.key() == origin)
            return (dict(message.headers() or []).get("relay-position") or b"").startswith(origin + b":")

        def ask(call: Callable[[float], object]) -> None:
            self._client.ask(call, section.connect_timeout * 3)

        spots = [parsed(name) for name in ends]
        stable = kafka_topics.ends(self._options, spots, section.connect_timeout, stable=True)
        begins = {name: begin for name, begin in stable.items() if begin < ends[name]}
        found = kafka_hanging.find(self._reader, begins, ends, ours, section.connect_timeout)
        for commit in (False, True):
            chosen = [item for item in found if self._acknowledged(item, marks) is commit]
            if chosen:
                log.warning("transaction.hangs", partitions=[item.name for item in chosen], acknowledged=commit)
                try:
                    kafka_hanging.end(
                        self._client.producer, chosen, ask, commit=commit, timeout=section.connect_timeout
                    )
                except KafkaException as exc:
                    raise translate_transaction(exc.args[0], "Kafka transaction") from None

    def _acknowledged(self, item: kafka_hanging.Hanging, marks: Marks) -> bool:
        """Whether the checkpoint covers it; a position is kept in any case, the beginnings of new topics are in it."""
        return parsed(item.name)[0] == self._section.position_topic or item.begin < marks.known.get(item.name, 0)
