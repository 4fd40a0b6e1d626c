"""One Kafka producer from its making to its end: it hands over in order, counts acknowledgements, and fails as a whole.

The thread here only serves librdkafka's callbacks and owns the producer's end; everything else runs on the loop. Where
there is a tally (`kafka_tally`), batches are handed over and acknowledgements are counted in C; elsewhere every event
has a delivery report. After the first failure nothing is handed over any more, and every flight learns exactly what was
not acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from relay.errors import AuthError, ConfigError, EventRejected, RelayError, SinkUnavailable
from relay.event import Batch, Event
from relay.sink.kafka_flight import Content, Flight
from relay.sink.kafka_partition import HASHES
from relay.sink.kafka_policy import CONSEQUENCES, Option, fault, legal_topic, translate
from relay.sink.kafka_tally import LIBRARY, Ready, Tally, tally

log = structlog.get_logger(__name__)

Lane = tuple[str, bytes]  # topic and key: what has an order

_AFTER = re.compile(r" \(after \d+ms.*")
_TICK = 0.1  # how soon the report thread notices that it shall end
_KEYS = 10_000  # of a topic that is not wholly ready; those beyond take the longer way
_NONE: set[bytes] = set()
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


class Contact(NamedTuple):
    """The first event to a partition in a session: until it is acknowledged, it travels alone.

    A broker that does not know the producer yet takes whatever comes first. If the first of two requests is turned
    away (the partition's leader is not ready yet) and the second is taken, the first is a duplicate to the broker when
    it comes again: acknowledged, and never stored.
    """

    topic: str
    partition: int


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
        self.ready: Ready = {}  # topics of which every partition has acknowledged something; else keys that go to one
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
        self.tally: Tally | None = None
        self._slots: dict[int, tuple[Flight, Contact | None]] = {}
        if careful:
            options["enable.gapless.guarantee"] = False  # one at a time leaves no gaps, and a refusal is not the end
        else:
            self.tally = tally()
        if self.tally is not None:
            plugins = (options.get("plugin.library.paths"), LIBRARY)
            options["plugin.library.paths"] = ";".join(str(path) for path in plugins if path)
            self.tally.arm()
        try:
            self.producer = Producer({**options, "error_cb": self._complained, "logger": self.logs})
        except (KafkaException, TypeError, ValueError) as exc:
            reason = exc.args[0].str() if isinstance(exc, KafkaException) else str(exc)
            raise ConfigError([f"sink.kafka.options: {reason}"]) from None
        if self.tally is not None and self.tally.armed():
            self.loop.add_reader(self.tally.fileno(), self._hear)
        else:
            self.tally = None
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
        if self.tally is not None:
            self.loop.remove_reader(self.tally.fileno())
            for slot in list(self._slots):
                self._look(slot)
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
        flight = Flight(self, batch, -1 if self.tally is None else self.tally.launch())
        self.flights.add(flight)
        if self.tally is not None:
            self._slots[flight.slot] = flight, None
        return flight

    def land(self, flight: Flight) -> None:
        """It is over."""
        self.flights.discard(flight)
        self._leave(flight.slot)

    def _leave(self, slot: int) -> None:
        """The slot is free for another one, unless there may still be reports for it."""
        if self.tally is not None and self._slots.pop(slot, None) is not None:
            with contextlib.suppress(ValueError):
                self.tally.clear(slot)

    def _hear(self) -> None:
        assert self.tally is not None
        for slot in self.tally.news():
            self._look(slot)

    def _look(self, slot: int) -> None:
        """What C has counted, and what it knows to have failed; also where nobody waits for the flight any more."""
        assert self.tally is not None
        flight, contact = self._slots.get(slot, (None, None))
        if flight is None:
            return
        acked, failures = self.tally.report(slot)
        for at, code in failures:
            if at not in flight.missing:
                flight.missing.add(at)
                event = flight.batch.events[at]
                self.undelivered(flight, KafkaError(code), (event.topic, event.key, event.body))
        if contact is None:
            flight.counted = acked
        elif acked:
            flight.acked += 1
            self._established(contact)
            self._leave(slot)
            self.moved.set()
        if flight.complete:
            flight.finish()

    def produce(self, flight: Flight) -> str:
        """Hand over what librdkafka takes, in order. Returns "" when that is all, else what is in the way."""
        with self._gate:
            if self._shut:
                return "session"
            obstacle = self._hand_over(flight)
        if not obstacle and self.tally is not None:
            self.tally.seal(flight.slot)
        if not obstacle and flight.complete:
            flight.finish()
        return obstacle

    def _hand_over(self, flight: Flight) -> str:
        events = flight.batch.events
        while flight.at < len(events):
            if self.tally is not None and not self.blocked:
                flight.at, _ = self.tally.produce(flight.slot, events, flight.at, len(events), self.ready)
                if flight.at == len(events):
                    break
            event = events[flight.at]  # not ready, or it will be told why not
            obstacle = ""
            if self.ready.get(event.topic, _NONE) is not None:
                obstacle = self._first_contact(flight, event)
            elif not self.blocked or not self._behind(flight, event):
                obstacle = self._send(flight, event)
            if obstacle:
                return obstacle
            flight.at += 1
        return ""

    def _send(self, flight: Flight, event: Event, contact: Contact | None = None) -> str:
        """Hand over one event: the one at `flight.at`."""
        partition = contact.partition if contact is not None and event.key is None else -1
        if self.tally is not None:
            return self._send_counted(self.tally, flight, event, contact, partition)
        report = flight.delivered if contact is None else functools.partial(self._contacted, flight, contact)
        try:
            self.producer.produce(event.topic, event.body, event.key, partition, report, None, 0, [*event.headers()])
        except BufferError:
            return "room"
        except KafkaException as exc:
            return self._not_taken(flight, event, exc.args[0])
        except ValueError as exc:  # a NUL or a lone surrogate in a name
            flight.reject(event, f"cannot be written to Kafka: {exc}")
        return ""

    def _send_counted(self, tally: Tally, flight: Flight, event: Event, contact: Contact | None, partition: int) -> str:
        """The same through C; a contact has a slot of its own, so that its acknowledgement is news."""
        slot = flight.slot if contact is None else tally.launch()
        at, code = tally.produce(slot, flight.batch.events, flight.at, flight.at + 1, {event.topic: None}, partition)
        if contact is not None and at == flight.at:
            tally.clear(slot)
        elif contact is not None:
            self._slots[slot] = flight, contact
            tally.seal(slot)
        if code:
            return self._not_taken(flight, event, KafkaError(code))
        if at == flight.at:
            flight.reject(event, "cannot be written to Kafka: a name in it is not a text without NUL")
        return ""

    def _not_taken(self, flight: Flight, event: Event, error: Any) -> str:
        """By librdkafka itself, before any broker saw it."""
        if error.code() == KafkaError._QUEUE_FULL:  # noqa: SLF001  part of the public interface
            return "room"
        failure = translate(error, "Kafka did not take an event")
        if isinstance(failure, EventRejected):
            flight.reject(event, str(failure))
            return ""
        self.fail(failure)
        return "session"

    def _first_contact(self, flight: Flight, event: Event) -> str:
        """The same for topics that are new to this session: the first event to a partition travels alone."""
        topic, key = event.topic, event.key
        partitions = self.topics.get(topic)
        if partitions is None and legal_topic(topic):
            return "topic"
        if partitions is None:
            flight.reject(event, f"{topic!r} is not a legal topic name")
            return ""
        if self.blocked and self._behind(flight, event):
            return ""
        contacts = self._contacts.setdefault(topic, {})
        if key is not None:
            partition = self._hash(key) % partitions
        else:  # where nobody was yet; when all are established, librdkafka chooses
            partition = next((number for number in range(partitions) if number not in contacts), -1)
        if partition < 0 or contacts.get(partition) is False:
            return "contact"
        if key is not None and partition in contacts:
            keys = self.ready[topic]
            if keys is not None and len(keys) < _KEYS:
                keys.add(key)
            return self._send(flight, event)
        contacts[partition] = False
        rejected = len(flight.rejected)
        obstacle = self._send(flight, event, Contact(topic, partition))
        if obstacle or len(flight.rejected) > rejected:  # it was not sent
            del contacts[partition]
        return obstacle

    def _contacted(self, flight: Flight, contact: Contact, error: Any, message: Any) -> None:
        """Delivery report of the first event to a partition; on the report thread."""
        if fault(error, message) is None:
            self._established(contact)
        elif self.careful:
            del self._contacts[contact.topic][contact.partition]  # refused, and the session goes on: the next is first
        self.post(self.moved.set)
        flight.delivered(error, message)

    def _established(self, contact: Contact) -> None:
        contacts = self._contacts[contact.topic]
        contacts[contact.partition] = True
        if len(contacts) >= self.topics[contact.topic] and all(contacts.values()):
            self.ready[contact.topic] = None
        else:
            self.ready.setdefault(contact.topic, set())

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
