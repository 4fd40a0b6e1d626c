"""The Kafka sink, idempotent mode: one librdkafka producer, and one thread that serves its delivery reports.

It never lets a later event of a key become durable before an earlier one, never gives up on a broker that is down, and
never waits for a broker when closing. A producer that saw one delivery error is finished: what it did not deliver goes
back to the pipeline, and `open` makes a new one.

Acknowledgements are counted per batch. Only when something failed does it matter which events were delivered: then the
rest is purged, librdkafka reports every event that was not acknowledged, and a batch keeps exactly those (and twins
with the same topic, key and body: sent again with the same id rather than lost).

A broker refuses a whole message set because of one event in it. Its events are *suspects*: the next session sends
the batches that hold them one event at a time, returns the culprits as rejected, and then hands over to a normal
session.

A rejected event blocks its key: what comes behind it is returned as rejected too ("behind …") and never sent, until
that very event (same id) is submitted again or the sink is opened anew. Events without a key go to random partitions
and have no order among themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from relay import config
from relay.errors import ConfigError, EventRejected, RelayError, SinkUnavailable
from relay.event import Batch, Event, Rejected
from relay.sink.kafka_policy import CONSEQUENCES, Option, legal_topic, producer_options, topic_missing, translate

log = structlog.get_logger(__name__)

Content = tuple[str, bytes | None, bytes | None]  # topic, key, body: what a delivery report tells of an event

Lane = tuple[str, bytes]  # topic and key: what has an order

_TICK = 0.1  # how soon the report thread notices that it shall end
_ROOM = 0.005  # how often a full queue is tried again
_BATCH_SIZE = 1_000_000  # librdkafka's default
_GRACE = 1.0  # how long events that are already on the wire may still be acknowledged after a failure


class _Logs:
    """librdkafka's log lines into ours. Also the only witness of the moment when the producer id is there."""

    def __init__(self, chatty: bool) -> None:
        self.chatty = chatty
        self.has_producer_id = False

    def log(self, level: int, _form: str, facility: str, _client: str, text: str) -> None:
        if facility == "GETPID" and "Acquired PID" in text:
            self.has_producer_id = True
        if facility == "CONFWARN" and "enable.gapless.guarantee" in text:
            return  # our own default, which librdkafka calls experimental
        if level > logging.DEBUG or self.chatty:
            log.log(level, "kafka client", facility=facility, text=text)


class _Flight:
    """One batch on its way: how many acknowledgements are in, and what was not delivered.

    The report thread writes `acked` and reads `target`, the loop the other way round; whoever sees them equal finishes.
    """

    __slots__ = ("acked", "at", "batch", "failed", "future", "lost", "rejected", "session", "target")

    def __init__(self, session: _Session, batch: Batch) -> None:
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


class _Session:
    """One producer from its making to its end, and its thread. Not reused: after a failure there is a new one."""

    def __init__(
        self, options: dict[str, Option], connect_timeout: float, blocked: dict[Lane, bytes], *, careful: bool
    ) -> None:
        self.blocked = blocked  # keys behind a rejected event: its id
        self.loop = asyncio.get_running_loop()
        self.careful = careful  # sends one event at a time, so that a refusal hits nobody else
        self.connect_timeout = connect_timeout
        self.flights: set[_Flight] = set()
        self.topics: set[str] = set()
        self.error: RelayError | None = None
        self._vague = False  # `error` is only the consequence of another one
        self.ending = False
        self._gate = threading.Lock()  # nothing is handed over while, or after, the session lets go
        self._shut = False
        self.abrupt = False  # closed: nobody waits for what is on the wire
        self.said = ""  # the last thing librdkafka complained about
        self.refused: set[Content] = set()
        self.logs = _Logs(chatty="debug" in options)
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

    def _connect(self) -> set[str]:
        """Metadata, then the producer id: librdkafka asks for it by itself, about 0.5 s after its start."""
        deadline = time.monotonic() + self.connect_timeout
        topics: set[str] | None = None
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

    def list_topics(self, timeout: float) -> set[str]:
        try:
            return set(self.producer.list_topics(timeout=timeout).topics)
        except KafkaException as exc:
            raise translate(exc.args[0], "Kafka metadata") from None
        except AttributeError:  # asked from the loop, and the session ended meanwhile
            raise SinkUnavailable("Kafka sink was closed") from None

    def _complained(self, error: Any) -> None:
        """error_cb: most is information (librdkafka goes on by itself); fatal errors and refused logins are not."""
        self.said = error.str()
        failure = translate(error, "Kafka")
        if error.code() == KafkaError._AUTHENTICATION:  # noqa: SLF001
            if self.opened.done():  # it worked before: let `open` judge again
                failure = SinkUnavailable(str(failure), hint=failure.hint)
            self._note(failure)
        elif error.fatal():
            self._note(failure, consequence=error.code() in CONSEQUENCES)

    def undelivered(self, flight: _Flight, error: Any, content: Content) -> None:
        failure = translate(error, "Kafka did not take an event")
        if isinstance(failure, EventRejected):
            self.refused.add(content)
            if self.careful:
                self.post(flight.fail, failure)
                return
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
        if isinstance(error, EventRejected):  # innocent neighbours are among them: the next session finds the culprit
            error = SinkUnavailable(f"{error}; looking for the culprit", hint=error.hint)
        self.error = error
        for flight in list(self.flights):
            flight.fail(error)
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()
        self.ended.set()

    def fail(self, error: RelayError) -> None:
        if self.error is None:
            self.error = error
        self.ending = True

    async def close(self) -> None:
        """Ends within moments, whatever the broker does; the thread is a daemon and outlives us at worst a little."""
        self.abrupt = self.ending = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), 2 * _GRACE)

    def launch(self, batch: Batch) -> _Flight:
        if self.ended.is_set():
            raise self.error or SinkUnavailable("Kafka sink was closed")
        flight = _Flight(self, batch)
        self.flights.add(flight)
        return flight

    def produce(self, flight: _Flight) -> str:
        """Hand over what librdkafka takes, in order. Returns "" when that is all, else what is in the way."""
        with self._gate:
            if self._shut:
                return "session"
            obstacle = self._hand_over(flight)
        if not obstacle and flight.acked == flight.target:
            flight.finish()
        return obstacle

    def _hand_over(self, flight: _Flight) -> str:
        produce, report, topics, blocked = self.producer.produce, flight.delivered, self.topics, self.blocked
        for event in flight.batch.events[flight.at :] if flight.at else flight.batch.events:
            _id, topic, key, names, values, body, _table, _transaction, _ordinal = event
            try:
                if topic not in topics:
                    if legal_topic(topic):
                        return "topic"
                    flight.reject(event, f"{topic!r} is not a legal topic name")
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

    def block(self, event: Event) -> None:
        if event.key is not None:
            self.blocked.setdefault((event.topic, event.key), event.id)

    def _behind(self, flight: _Flight, event: Event) -> bool:
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


class KafkaSink:
    """See the seam (`relay.sink.Sink`). `publish` hands over synchronously while nothing is in the way."""

    duplicates = 0  # Kafka has no dedupe by id: it never says so

    def __init__(self, section: config.Kafka) -> None:
        self._section = section
        self._user_options = section.librdkafka()
        self._options = producer_options(self._user_options)
        self._session: _Session | None = None
        self._waiting = 0  # publishes that could not hand over at once; later ones queue behind them
        self._turn = asyncio.Lock()
        self._suspects: set[Content] = set()
        self._culprits = 0
        self._blocked: dict[Lane, bytes] = {}

    async def open(self) -> None:
        await self.close()
        self._blocked.clear()
        await self._connect(careful=bool(self._suspects))

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            if not session.careful:
                self._suspects |= session.refused

    async def publish(self, batch: Batch) -> Sequence[Rejected]:
        session = self._usable()
        flight = None
        if not self._waiting and not session.careful:
            flight = session.launch(batch)
            if not session.produce(flight):
                return await flight.future
        self._waiting += 1
        try:
            async with self._turn:
                if flight is None:
                    session = self._usable()
                    if session.careful and any((e.topic, e.key, e.body) in self._suspects for e in batch.events):
                        return await self._publish_singly(session, batch)
                    if session.careful:
                        session = await self._go_normal()
                    flight = session.launch(batch)
                await self._hand_over(session, flight)
        finally:
            self._waiting -= 1
        return await flight.future

    def _usable(self) -> _Session:
        session = self._session
        if session is None:
            raise SinkUnavailable("Kafka sink is not open")
        if session.ending:
            raise session.error or SinkUnavailable("Kafka sink was closed")
        return session

    async def _hand_over(self, session: _Session, flight: _Flight) -> None:
        """The slow way: wait for room, ask for topics. When the session fails meanwhile, so does the flight."""
        try:
            while obstacle := session.produce(flight):
                if obstacle == "session":
                    return
                if obstacle == "room":
                    await asyncio.sleep(_ROOM)
                else:
                    rest = flight.batch.events[flight.at :]
                    await self._admit(session, {event.topic for event in rest if legal_topic(event.topic)})
        except RelayError as exc:
            session.fail(exc)
        except BaseException:  # cancelled half-way: what comes behind must not be sent before the rest of it
            session.fail(SinkUnavailable("Kafka: publishing was cancelled"))
            raise

    async def _publish_singly(self, session: _Session, batch: Batch) -> Sequence[Rejected]:
        rejected: list[Rejected] = []
        events = batch.events
        for at, event in enumerate(events):
            try:
                flight = session.launch(Batch([event], batch.end_lsn))
                await self._hand_over(session, flight)
                rejected += await flight.future
            except EventRejected as exc:
                rejected.append(Rejected(event, str(exc)))
                session.block(event)
                self._culprits += 1
            except RelayError:
                batch.events = [item.event for item in rejected] + events[at:]
                raise
        return rejected

    async def _go_normal(self) -> _Session:
        """The suspects are behind us. If all were innocent, the message set as a whole was too big for the topic."""
        if not self._culprits:
            size = int(self._options.get("batch.size", _BATCH_SIZE))
            self._options["batch.size"] = max(size // 2, 1024)
            log.info("kafka batch size halved", batch_size=self._options["batch.size"])
        self._suspects.clear()
        await self.close()
        return await self._connect(careful=False)

    async def _connect(self, *, careful: bool) -> _Session:
        self._culprits = 0
        session = self._session = _Session(self._options, self._section.connect_timeout, self._blocked, careful=careful)
        try:
            await session.opened
            await self._admit(session, self._section.topics)
        except BaseException:
            self._session = None
            await session.close()
            raise
        return session

    async def _admit(self, session: _Session, topics: Iterable[str]) -> None:
        """Make sure that the topics exist: librdkafka would wait 30 s for a missing one, and then lose the event."""
        missing = sorted(set(topics) - session.topics)
        if not missing:
            return
        await self._refresh(session)
        missing = [topic for topic in missing if topic not in session.topics]
        if missing and not self._section.create_topics:
            raise topic_missing(missing)
        if missing:
            await self._create(missing)
            deadline = session.loop.time() + self._section.connect_timeout
            while not session.topics.issuperset(missing):
                if session.loop.time() > deadline:
                    raise SinkUnavailable(f"Kafka created {', '.join(missing)} but does not list it yet")
                await self._refresh(session)

    async def _refresh(self, session: _Session) -> None:
        session.topics = await asyncio.to_thread(session.list_topics, min(self._section.connect_timeout, 5.0))

    async def _create(self, topics: Sequence[str]) -> None:
        section = self._section
        options: dict[str, Any] = {**self._user_options, "logger": _Logs(chatty=False)}
        admin = AdminClient(options)
        new = [
            NewTopic(t, num_partitions=section.partitions, replication_factor=section.replication_factor)
            for t in topics
        ]
        futures = admin.create_topics(
            new, operation_timeout=section.connect_timeout, request_timeout=section.connect_timeout
        )
        for topic, future in futures.items():
            try:
                await asyncio.wrap_future(future)
                log.info("kafka topic created", topic=topic)
            except KafkaException as exc:
                error = exc.args[0]
                if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise translate(error, f"Kafka did not create topic {topic}") from None
