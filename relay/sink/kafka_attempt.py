"""One transaction with Kafka: events and their position go in, and it is committed or aborted.

It never commits a part of what it was given, but without what is rejected on the way; and where the outcome is open it
raises: only a new session, after taking over again, can know what is stored.
"""

from __future__ import annotations

import time
from typing import Any

import orjson
from confluent_kafka import KafkaError, KafkaException

from relay import config
from relay.config.sink import legal_topic
from relay.errors import EventRejected
from relay.event import Event, Rejected
from relay.sink.kafka_admission import Admission
from relay.sink.kafka_blocking import Blocked, behind, block
from relay.sink.kafka_client import GRACE, SLICE, Client
from relay.sink.kafka_marks import Marks
from relay.sink.kafka_parts import Flight, Part, Rejections
from relay.sink.kafka_policy import CONSEQUENCES, fault, translate_transaction
from relay.sink.kafka_topics import destination

_TRIES = 3


class Attempt:
    """Of one session, tried again and again; `offsets` are the last attempt's."""

    def __init__(
        self,
        client: Client,
        section: config.Kafka,
        origin: str,
        admission: Admission,
        marks: Marks,
        blocked: Blocked,
    ) -> None:
        self._client = client
        self._section = section
        self._origin = origin
        self._admission = admission
        self._marks = marks
        self._blocked = blocked
        self._known: set[str] = set()  # topics whose beginnings are noted
        self.offsets: dict[tuple[str, int], int] = {}  # of the transaction: the last of each partition
        self._errors: list[Any] = []

    def run(self, parts: list[Part], rejected: Rejections) -> str | None:
        """One transaction. "" if it is committed, the broker's reason if it was refused and is aborted; else raises.

        None: aborted as well, and nobody's fault. After a refusal librdkafka goes on with sequence numbers that the
        broker does not expect, and gets a new epoch only when that failed, too.
        """
        self.offsets.clear()
        self._errors.clear()
        last: Event | None = None
        sent = 0
        try:
            for flight, events in parts:
                before = len(rejected)
                self._produce(flight, events, rejected)
                sent += len(events) - (len(rejected) - before)
                last = events[-1]
            if last is None or not sent:  # a transaction that has begun waits for the next events: nobody knows of it
                return ""
            self._tell(last, sent)
            self._flush()
            if not self._errors and (grown := self._grown()):
                self._marks.first_seen(grown)
                self._tell(last, sent)
                self._flush()
            if not self._errors:
                self._client.commit(self._section.connect_timeout * 3)
                return ""
        except KafkaException as exc:
            error = exc.args[0]
            # A transaction that failed takes nothing more (_STATE). What failed is in reports that may be late; without
            # one it is nobody's fault: aborted, it is tried again.
            if error.fatal() or not (error.txn_requires_abort() or self._stopped(error)):
                raise translate_transaction(error, "Kafka transaction") from None
            self._errors.append(error)
        return self._abort()

    def _stopped(self, error: Any) -> bool:
        """Whether librdkafka knows that the transaction failed; it may know before it has reported why."""
        deadline = time.monotonic() + GRACE
        stopped = bool(error.code() == KafkaError._STATE)  # noqa: SLF001
        while stopped and not self._errors and time.monotonic() < deadline:
            self._client.producer.poll(SLICE / 10)
        return stopped or bool(self._errors)

    def _abort(self) -> str | None:
        """After delivery errors: see `run`."""
        failures = [
            translate_transaction(error, "Kafka did not take an event")
            for error in self._errors
            if error.code() not in CONSEQUENCES and error.code() != KafkaError._STATE  # noqa: SLF001
        ]
        refusal = next((failure for failure in failures if isinstance(failure, EventRejected)), None)
        lost = any(error.code() == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER for error in self._errors)
        if failures and refusal is None and not lost:
            raise failures[0]
        try:
            self._client.abort(self._section.connect_timeout)
        except KafkaException as exc:  # it says what the reports do not
            raise translate_transaction(exc.args[0], "Kafka transaction") from None
        return None if refusal is None else str(refusal)

    # handing over

    def _produce(self, flight: Flight, events: list[Event], rejected: Rejections) -> None:
        produce, report, known, blocked = self._client.producer.produce, self._delivered, self._known, self._blocked
        if events:
            self._client.begin()
        for event in events:
            _id, topic, key, names, values, body, _table, _transaction, _ordinal = event
            if topic not in known and not self._meet(flight, event, rejected):
                continue
            if blocked and (reason := behind(blocked, event)) is not None:
                rejected.append((flight, Rejected(event, reason)))
                continue
            while True:
                try:
                    produce(topic, body, key, -1, report, None, 0, list(zip(names.names, values)))  # noqa: B905
                    break
                except BufferError:
                    self._wait_for_room()
                except KafkaException as exc:
                    failure = translate_transaction(exc.args[0], "Kafka did not take an event")
                    if not isinstance(failure, EventRejected):
                        raise
                    self._reject(flight, event, str(failure), rejected)
                    break
                except ValueError as exc:  # a NUL or a lone surrogate in a name
                    self._reject(flight, event, f"cannot be written to Kafka: {exc}", rejected)
                    break

    def _meet(self, flight: Flight, event: Event, rejected: Rejections) -> bool:
        if not legal_topic(event.topic):
            self._reject(flight, event, f"{event.topic!r} is not a legal topic name", rejected)
            return False
        self._admission.welcome(event.topic, self._marks)
        self._known.add(event.topic)
        return True

    def _reject(self, flight: Flight, event: Event, reason: str, rejected: Rejections) -> None:
        rejected.append((flight, Rejected(event, reason)))
        block(self._blocked, event)

    def _wait_for_room(self) -> None:
        self._client.producer.poll(0.01)
        self._client.check()

    # the position

    def _tell(self, last: Event, events: int) -> None:
        """The position, in the same transaction: for people, and where new destinations begin."""
        names = last.header_names.names
        position = last.header_values[names.index("relay-position")] if "relay-position" in names else b""
        record: dict[str, Any] = {
            "relay-position": position.decode(errors="replace"),
            "events": events,
            "time": time.time(),
            "marks": self._marks.known,
        }
        if self._marks.begins:
            record["begins"] = self._marks.begins
        self._client.producer.produce(
            self._section.position_topic, orjson.dumps(record), self._origin.encode(), 0, self._noted
        )

    def _grown(self) -> dict[str, int]:
        """Partitions that were added to a topic since we met it: they begin before our first event there."""
        unknown = [spot for spot in self.offsets if destination(*spot) not in self._marks.known]
        if not unknown:
            return {}
        for topic, _ in unknown:
            self._known.discard(topic)
        return dict.fromkeys((destination(*spot) for spot in unknown), 0)

    # acknowledgements

    def _flush(self) -> None:
        """Until everything is acknowledged, or something is not; librdkafka gives up at the transaction's timeout."""
        while self._flush_some() and not self._errors:
            self._client.check()

    def _flush_some(self) -> int:
        """How many are not acknowledged yet. A fatal error makes confluent-kafka stumble: then the reports tell."""
        for _ in range(_TRIES):
            try:
                return self._client.producer.flush(SLICE)
            except SystemError:
                if self._errors or self._client.ending:
                    return 1
        return self._client.producer.flush(SLICE)

    def _delivered(self, error: Any, message: Any) -> None:
        """Delivery report, once per event."""
        error = fault(error, message)
        if error is None:
            self.offsets[message.topic(), message.partition()] = message.offset()
        else:
            self._errors.append(error)

    def _noted(self, error: Any, message: Any) -> None:
        error = fault(error, message)
        if error is not None:
            self._errors.append(error)
