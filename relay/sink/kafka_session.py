"""One Kafka producer from its making to its end: it hands over in order, counts acknowledgements, and fails as a whole.

The thread here only serves delivery reports and owns the producer's end; everything else runs on the loop. After the
first failure nothing is handed over any more, and every flight learns exactly what was not acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from confluent_kafka import KafkaException, Producer

from relay.errors import AuthError, ConfigError, EventRejected, RelayError, SinkUnavailable
from relay.event import Batch, Event, Rejected
from relay.sink.kafka_partition import HASHES
from relay.sink.kafka_policy import CONSEQUENCES, Option, legal_topic, translate

log = structlog.get_logger(__name__)

Content = tuple[str, bytes | None, bytes | None]  # topic, key, body: what a delivery report tells of an event

Lane = tuple[str, bytes]  # topic and key: what has an order

_AFTER = re.compile(r" \(after \d+ms.*")
_TICK = 0.1  # how soon the report thread notices that it shall end
_GRACE = 1.0  # how long events that are already on the wire may still be acknowledged after a failure


class Logs:
    """librdkafka's log lines into ours. Also the only witness of the moment when the producer id is there."""

    def __init__(self, chatty: bool) -> None:
        self.chatty = chatty
        self.has_producer_id = False
        self._said: set[str] = set()

    def log(self, level: int, _form: str, facility: str, _client: str, text: str) -> None:
        if facility == "GETPID" and "Acquired PID" in text:
            self.has_producer_id = True
        if facility == "CONFWARN" and "enable.gapless.guarantee" in text:
            return  # our own default, which librdkafka calls experimental
        if level <= logging.DEBUG and not self.chatty:
            return
        # It tries again many times a second, and says each time the same; whether it is an error, is for us to judge.
        gist = _AFTER.sub("", text)
        if self.chatty or gist not in self._said:
            self._said.add(gist)
            log.log(min(level, logging.WARNING), "librdkafka.said", facility=facility, text=text)


class Flight:
    """One batch on its way: how many acknowledgements are in, and what was not delivered.

    The report thread writes `acked` and reads `target`, the loop the other way round; whoever sees them equal finishes.
    """

    __slots__ = ("acked", "at", "batch", "failed", "future", "lost", "rejected", "session", "target")

    def __init__(self, session: Session, batch: Batch) -> None:
        self.session = session
        self.batch = batch
        self.at = 0  # events handed to librdkafka, or rejected
        self.target = len(batch.events)
        self.acked = 0
        self.failed = 0
        self.rejected: list[Rejected] = []
        self.lost: set[Content] = set()
        self.future: asyncio.Future[Sequence[Rejected]] = session.loop.create_future()

    def delivered(self, error: Any, message: Any) -> None:
        """Delivery report; runs on the report thread, once per event."""
        if error is None:
            self.acked += 1
            if self.acked == self.target:
                self.session.post(self.finish)
        else:
            self.failed += 1
            content = (message.topic(), message.key(), message.value())
            self.lost.add(content)
            self.session.undelivered(self, error, content)

    def reject(self, event: Event, reason: str) -> None:
        self.rejected.append(Rejected(event, reason))
        self.target -= 1
        self.session.block(event)

    def finish(self) -> None:
        if not self.future.done():
            self.future.set_result(self.rejected)
        self.session.flights.discard(self)

    def fail(self, error: RelayError) -> None:
        """Keep what is not known to be durable: reported as lost, rejected (to be said again), or never handed over."""
        if not self.future.done():
            events = self.batch.events
            if self.acked + self.failed == self.at - len(self.rejected):  # else reports are missing: all is unknown
                refused = {id(item.event) for item in self.rejected}
                kept = [e for e in events[: self.at] if id(e) in refused or (e.topic, e.key, e.body) in self.lost]
                self.batch.events = kept + events[self.at :]
            self.future.set_exception(error)
            self.future.exception()  # the publisher may be gone; then nobody else asks
        self.session.flights.discard(self)


class Session:
    """One producer from its making to its end, and its thread. Not reused: after a failure there is a new one."""

    def __init__(
        self, options: dict[str, Option], connect_timeout: float, blocked: dict[Lane, bytes], *, careful: bool
    ) -> None:
        self.blocked = blocked  # keys behind a rejected event: its id
        self.loop = asyncio.get_running_loop()
        self.careful = careful  # sends one event at a time, so that a refusal hits nobody else
        self.connect_timeout = connect_timeout
        self.flights: set[Flight] = set()
        self.topics: dict[str, int] = {}  # how many partitions each has
        self.ready: set[str] = set()  # topics of which every partition has acknowledged something in this session
        self._contacts: dict[
            str, dict[int, bool]
        ] = {}  # of the others: partitions that got, or acknowledged, their first
        self._hash = HASHES[str(options["partitioner"])]
        self.moved = asyncio.Event()
        self.error: RelayError | None = None
        self._vague = False  # `error` is only the consequence of another one
        self.ending = False
        self._gate = threading.Lock()  # nothing is handed over while, or after, the session lets go
        self._shut = False
        self.abrupt = False  # closed: nobody waits for what is on the wire
        self.said = ""  # the last thing librdkafka complained about
        self.refused: set[Content] = set()
        self.logs = Logs(chatty="debug" in options)
        self.opened: asyncio.Future[None] = self.loop.create_future()
        self.ended = asyncio.Event()
        options = dict(options)
        options["debug"] = ",".join(filter(None, (str(options.get("debug", "")), "eos")))
        if careful:
            options["enable.gapless.guarantee"] = False  # one at a time leaves no gaps, and a refusal is not the end
        try:
            self.producer = Producer({**options, "error_cb": self._complained, "logger": self.logs})
        except (KafkaException, TypeError, ValueError) as exc:
            reason = exc.args[0].str() if isinstance(exc, KafkaException) else str(exc)
            raise ConfigError([f"sink.kafka.options: {reason}"]) from None
        self.thread = threading.Thread(target=self._run, name="relay-kafka-reports", daemon=True)
        self.thread.start()

    # -- on the report thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.topics = self._connect()
            self.post(self._set_opened)
            while not self.ending:
                self.producer.poll(_TICK)
        except RelayError as exc:
            self._note(exc)
        except KafkaException as exc:
            self._note(translate(exc.args[0], "Kafka client"))
        except Exception as exc:  # noqa: BLE001  poll raises SystemError when librdkafka fails inside a callback
            self._note(SinkUnavailable(f"Kafka client failed: {exc!r}"))
        self._let_go()
        self.post(self._settle)
        del self.producer  # joins librdkafka's threads: here, not on the loop

    def _connect(self) -> dict[str, int]:
        """Metadata, then the producer id: librdkafka asks for it by itself, about 0.5 s after its start."""
        deadline = time.monotonic() + self.connect_timeout
        topics: dict[str, int] | None = None
        while not self.ending:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = "no metadata" if topics is None else "no producer id"
                raise SinkUnavailable(
                    f"Kafka: {missing} within {self.connect_timeout:g} s, brokers down?"
                    + (f" ({self.said})" if self.said else ""),
                    hint='is "bootstrap.servers" right, and can the relay reach the brokers\' advertised addresses?',
                )
            if topics is None:
                with contextlib.suppress(SinkUnavailable):  # why, is what error_cb says
                    topics = self.list_topics(min(left, 0.5))
            self.producer.poll(0 if topics is None else min(left, 0.02))
            if topics is not None and self.logs.has_producer_id:
                return topics
        raise self.error or SinkUnavailable("Kafka: closed while connecting")

    def list_topics(self, timeout: float) -> dict[str, int]:
        try:
            topics = self.producer.list_topics(timeout=timeout).topics
            return {name: len(topic.partitions) for name, topic in topics.items() if topic.partitions}
        except KafkaException as exc:
            raise translate(exc.args[0], "Kafka metadata") from None
        except AttributeError:  # asked from the loop, and the session ended meanwhile
            raise SinkUnavailable("Kafka sink was closed") from None

    def _complained(self, error: Any) -> None:
        """error_cb: most is information (librdkafka goes on by itself); fatal errors and refused logins are not."""
        self.said = error.str()
        failure = translate(error, "Kafka")
        if isinstance(failure, AuthError):
            if self.opened.done():  # it worked before: let `open` judge again
                failure = SinkUnavailable(str(failure), hint=failure.hint)
            self._note(failure)
        elif error.fatal():
            self._note(failure, consequence=error.code() in CONSEQUENCES)

    def undelivered(self, flight: Flight, error: Any, content: Content) -> None:
        failure = translate(error, "Kafka did not take an event")
        if isinstance(failure, EventRejected):
            self.refused.add(content)
            if self.careful:
                self.post(flight.fail, failure)
                return
            # Innocent neighbours are among them: the next session finds the culprit.
            failure = SinkUnavailable(f"{failure}; looking for the culprit", hint=failure.hint)
        self._note(failure, consequence=error.code() in CONSEQUENCES)

    def _note(self, error: RelayError, *, consequence: bool = False) -> None:
        """Remember the error that says most, and end."""
        if self.error is None or (self._vague and not consequence):
            self.error, self._vague = error, consequence
        self.ending = True

    def _let_go(self) -> None:
        """Purge what is queued, wait a little for what is on the wire, purge that too: every event gets its report."""
        with self._gate:
            self._shut = True
        deadline = time.monotonic() + _GRACE
        with contextlib.suppress(Exception):  # nothing more can be learned from this producer
            self.producer.purge(in_queue=True, in_flight=False)
            while len(self.producer) and not self.abrupt and time.monotonic() < deadline:
                self._serve()
            self.producer.purge()
            deadline = time.monotonic() + _GRACE
            while len(self.producer) and time.monotonic() < deadline:
                self._serve()

    def _serve(self) -> None:
        with contextlib.suppress(KafkaException, SystemError):  # the error is noted; the reports still come
            self.producer.poll(0.02)

    def post(self, call: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(call, *args)

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _set_opened(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def _settle(self) -> None:
        error = self.error or SinkUnavailable("Kafka sink was closed")
        self.error = error
        for flight in list(self.flights):
            flight.fail(error)
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()
        self.ended.set()
        self.moved.set()

    def fail(self, error: RelayError) -> None:
        if self.error is None:
            self.error = error
        self.ending = True

    async def close(self) -> None:
        """Ends within moments, whatever the broker does; the thread is a daemon and outlives us at worst a little."""
        self.abrupt = self.ending = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), 2 * _GRACE)

    def launch(self, batch: Batch) -> Flight:
        if self.ended.is_set():
            raise self.error or SinkUnavailable("Kafka sink was closed")
        flight = Flight(self, batch)
        self.flights.add(flight)
        return flight

    def produce(self, flight: Flight) -> str:
        """Hand over what librdkafka takes, in order. Returns "" when that is all, else what is in the way."""
        with self._gate:
            if self._shut:
                return "session"
            obstacle = self._hand_over(flight)
        if not obstacle and flight.acked == flight.target:
            flight.finish()
        return obstacle

    def _hand_over(self, flight: Flight) -> str:
        produce, report, ready, blocked = self.producer.produce, flight.delivered, self.ready, self.blocked
        for event in flight.batch.events[flight.at :] if flight.at else flight.batch.events:
            _id, topic, key, names, values, body, _table, _transaction, _ordinal = event
            try:
                if topic not in ready:
                    if obstacle := self._first_contact(flight, event):
                        return obstacle
                elif not blocked or not self._behind(flight, event):
                    produce(topic, body, key, -1, report, None, 0, list(zip(names.names, values)))  # noqa: B905
            except BufferError:
                return "room"
            except KafkaException as exc:
                failure = translate(exc.args[0], "Kafka did not take an event")
                if not isinstance(failure, EventRejected):
                    self.fail(failure)
                    return "session"
                flight.reject(event, str(failure))
            except ValueError as exc:  # a NUL or a lone surrogate in a name
                flight.reject(event, f"cannot be written to Kafka: {exc}")
            flight.at += 1
        return ""

    def _first_contact(self, flight: Flight, event: Event) -> str:
        """The same for topics that are new to this session: the first event to a partition travels alone."""
        topic, key, report = event.topic, event.key, flight.delivered
        partitions = self.topics.get(topic)
        if partitions is None and legal_topic(topic):
            return "topic"
        if partitions is None:
            flight.reject(event, f"{topic!r} is not a legal topic name")
            return ""
        if self.blocked and self._behind(flight, event):
            return ""
        contacts = self._contacts.setdefault(topic, {})
        partition = -1
        if key is not None:
            partition = self._hash(key) % partitions
            known = contacts.get(partition)
            if known is False:
                return "contact"
            if known is None:
                contacts[partition] = False
                report = functools.partial(self._contacted, flight, topic, partition)
        try:
            self.producer.produce(topic, event.body, key, -1, report, None, 0, [*event.headers()])
        except BaseException:
            if contacts.get(partition) is False:
                del contacts[partition]
            raise
        return ""

    def _contacted(self, flight: Flight, topic: str, partition: int, error: Any, message: Any) -> None:
        """Delivery report of the first event to a partition; on the report thread."""
        if error is None:
            contacts = self._contacts[topic]
            contacts[partition] = True
            if len(contacts) >= self.topics[topic] and all(contacts.values()):
                self.ready.add(topic)
        elif self.careful:
            del self._contacts[topic][partition]  # refused, and the session goes on: the next one is the first
        self.post(self.moved.set)
        flight.delivered(error, message)

    def block(self, event: Event) -> None:
        if event.key is not None:
            self.blocked.setdefault((event.topic, event.key), event.id)

    def _behind(self, flight: Flight, event: Event) -> bool:
        """True (and rejected) if the event's key is blocked; the culprit itself, submitted again, lifts the block."""
        if event.key is None:
            return False
        lane = event.topic, event.key
        culprit = self.blocked.get(lane)
        if culprit == event.id:
            del self.blocked[lane]
        elif culprit is not None:
            flight.reject(event, f"behind rejected event {culprit.decode(errors='replace')} of the same key")
            return True
        return False
