"""One Kafka producer from its making to its end: it hands over in order, counts acknowledgements, and fails as a whole.

Its thread (`kafka_thread`) only serves librdkafka's callbacks and owns the producer's end; everything else runs on the
loop. Where there is a tally (`kafka_tally`), batches are handed over and acknowledgements are counted in C; elsewhere
every event has a delivery report. After the first failure nothing is handed over any more, and every flight learns
exactly what was not acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from relay.config.sink import legal_topic
from relay.errors import EventRejected, SinkUnavailable
from relay.event import Batch, Event
from relay.sink.kafka_blocking import Blocked, behind
from relay.sink.kafka_contacts import Contact, Contacts
from relay.sink.kafka_flight import Content, Flight
from relay.sink.kafka_partition import HASHES
from relay.sink.kafka_policy import CONSEQUENCES, Option, fault, session_options, translate_event
from relay.sink.kafka_producer import Logs
from relay.sink.kafka_tally import LIBRARY, Tally, tally
from relay.sink.kafka_thread import GRACE, ReportThread

_NONE: set[bytes] = set()


class Session:
    """One producer from its making to its end, and its thread. Not reused: after a failure there is a new one."""

    def __init__(
        self, options: Mapping[str, Option], connect_timeout: float, blocked: Blocked, *, careful: bool
    ) -> None:
        self.blocked = blocked  # keys behind a rejected event: its id
        self.loop = asyncio.get_running_loop()
        self.careful = careful  # sends one event at a time, so that a refusal hits nobody else
        self.flights: set[Flight] = set()
        self._contacts = Contacts(HASHES[str(options["partitioner"])])
        self.ready = self._contacts.ready
        self.moved = asyncio.Event()
        self.refused: set[Content] = set()
        self.ended = asyncio.Event()
        self.tally: Tally | None = None if careful else tally()
        self._slots: dict[int, tuple[Flight, Contact | None]] = {}
        plugin = None
        if self.tally is not None:
            plugin = LIBRARY
            self.tally.arm()
        logs = Logs(chatty="debug" in options)
        self.thread = ReportThread(session_options(options, careful=careful, plugin=plugin), connect_timeout, logs)
        self._gate = self.thread.gate
        self.opened = self.thread.opened
        self.post = self.thread.post
        if self.tally is not None and self.tally.armed():
            self.loop.add_reader(self.tally.fileno(), self._hear)
        else:
            self.tally = None
        self.thread.start(self._settle)

    # -- on the loop, or the report thread -----------------------------------------------------------------------------

    def undelivered(self, flight: Flight, error: Any, content: Content) -> None:
        failure = translate_event(error, content[0])
        if isinstance(failure, EventRejected):
            self.refused.add(content)
            if self.careful:
                self.post(flight.fail, failure)
                return
            # Innocent neighbours are among them: the next session finds the culprit.
            failure = SinkUnavailable(f"{failure}; looking for the culprit", hint=failure.hint)
        self.thread.note(failure, consequence=error.code() in CONSEQUENCES)

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        error = self.thread.error or SinkUnavailable("Kafka sink was closed")
        self.thread.error = error
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

    async def close(self) -> None:
        """Ends within moments, whatever the broker does; the thread is a daemon and outlives us at worst a little."""
        self.thread.abrupt = self.thread.ending = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), 2 * GRACE)

    def launch(self, batch: Batch) -> Flight:
        if self.ended.is_set():
            raise self.thread.error or SinkUnavailable("Kafka sink was closed")
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
            self._contacts.establish(contact, self.thread.topics[contact.topic])
            self._leave(slot)
            self.moved.set()
        if flight.complete:
            flight.finish()

    def produce(self, flight: Flight) -> str:
        """Hand over what librdkafka takes, in order. Returns "" when that is all, else what is in the way."""
        with self._gate:
            if self.thread.shut:
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
            produce = self.thread.producer.produce
            produce(event.topic, event.body, event.key, partition, report, None, 0, [*event.headers()])
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
        failure = translate_event(error, event.topic)
        if isinstance(failure, EventRejected):
            flight.reject(event, str(failure))
            return ""
        self.thread.fail(failure)
        return "session"

    def _first_contact(self, flight: Flight, event: Event) -> str:
        """The same for topics that are new to this session: the first event to a partition travels alone."""
        topic = event.topic
        partitions = self.thread.topics.get(topic)
        if partitions is None and legal_topic(topic):
            return "topic"
        if partitions is None:
            flight.reject(event, f"{topic!r} is not a legal topic name")
            return ""
        if self.blocked and self._behind(flight, event):
            return ""
        obstacle, contact = self._contacts.meet(topic, event.key, partitions)
        if obstacle or contact is None:
            return obstacle or self._send(flight, event)
        rejected = len(flight.rejected)
        obstacle = self._send(flight, event, contact)
        if obstacle or len(flight.rejected) > rejected:  # it was not sent
            self._contacts.forget(contact)
        return obstacle

    def _contacted(self, flight: Flight, contact: Contact, error: Any, message: Any) -> None:
        """Delivery report of the first event to a partition; on the report thread."""
        if fault(error, message) is None:
            self._contacts.establish(contact, self.thread.topics[contact.topic])
        elif self.careful:
            self._contacts.forget(contact)  # refused, and the session goes on: the next is first
        self.post(self.moved.set)
        flight.delivered(error, message)

    def _behind(self, flight: Flight, event: Event) -> bool:
        """True (and rejected) if the event's key is blocked."""
        reason = behind(self.blocked, event)
        if reason is None:
            return False
        flight.reject(event, reason)
        return True
