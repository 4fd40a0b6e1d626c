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
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from relay import config
from relay.config.sink import legal_topic
from relay.errors import EventRejected, RelayError, SinkUnavailable
from relay.event import Batch, Rejected
from relay.sink import failed
from relay.sink.kafka_blocking import Blocked, block
from relay.sink.kafka_flight import Content, Flight
from relay.sink.kafka_policy import producer_options, topic_missing
from relay.sink.kafka_producer import Logs
from relay.sink.kafka_session import Session
from relay.sink.kafka_topics import create_topics

log = structlog.get_logger(__name__)

_ROOM = 0.005  # how often a full queue is tried again
_BATCH_SIZE = 1_000_000  # librdkafka's default


@dataclass(slots=True, eq=False)
class _Turn:
    """A publish that waits."""

    flight: Flight | None  # what was handed over of it already
    opening: int


class KafkaSink:
    """See the seam (`relay.sink.Sink`). `publish` hands over synchronously while nothing is in the way."""

    duplicates = 0  # Kafka has no dedupe by id: it never says so
    marks: Mapping[str, int] = {}  # no fence

    def resume(self, marks: Mapping[str, int], origin: str) -> None:
        """Without a fence there is nothing to resume."""

    def __init__(self, section: config.Kafka) -> None:
        self._section = section
        self._user_options = section.librdkafka()
        self._options = producer_options(self._user_options)
        self._session: Session | None = None
        self._waiting: deque[_Turn] = deque()  # publishes that could not hand over at once; others queue behind them
        self._lock = asyncio.Lock()
        self._suspects: set[Content] = set()
        self._culprits = 0
        self._blocked: Blocked = {}
        self._opening = 0  # a publish that began before the sink was opened or closed again must not send afterwards

    async def open(self) -> None:
        await self.close()
        self._blocked.clear()
        await self._connect(careful=bool(self._suspects))

    async def close(self) -> None:
        self._opening += 1
        await self._drop()

    async def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            if not session.careful:
                self._suspects |= session.refused

    def publish(self, batch: Batch) -> Awaitable[Sequence[Rejected]]:
        flight = None
        try:
            session = self._usable()
            if not self._waiting and not session.careful:
                flight = session.launch(batch)
                if not session.produce(flight):
                    return flight.future
        except RelayError as exc:
            return failed(exc)
        turn = _Turn(flight, self._opening)
        self._waiting.append(turn)
        task = session.loop.create_task(self._publish_in_turn(turn, batch))
        task.add_done_callback(lambda _: self._end(turn))
        return task

    async def _publish_in_turn(self, turn: _Turn, batch: Batch) -> Sequence[Rejected]:
        """Something is in the way: hand over when it is our turn."""
        flight = turn.flight
        async with self._lock:
            while (before := self._waiting[0]) is not turn:
                self._end(before)  # it was cancelled, perhaps before it began
            if flight is None:
                session = self._usable(turn.opening)
                if session.careful and any((e.topic, e.key, e.body) in self._suspects for e in batch.events):
                    rejected = await self._publish_singly(session, batch)
                    self._waiting.popleft()
                    return rejected
                if session.careful:
                    session = await self._go_normal(turn.opening)
                flight = session.launch(batch)
            await self._hand_over(flight)
            self._waiting.popleft()
        return await flight.future

    def _end(self, turn: _Turn) -> None:
        """If it was not handed over wholly, nothing that comes behind it may be sent by this session."""
        if turn in self._waiting:
            self._waiting.remove(turn)
            if self._session is not None and turn.opening == self._opening:
                self._session.thread.fail(SinkUnavailable("Kafka: publishing was cancelled"))

    def _usable(self, opening: int | None = None) -> Session:
        session = self._session
        if session is None or opening not in (None, self._opening):
            raise SinkUnavailable("Kafka sink is not open")
        if session.thread.ending:
            raise session.thread.error or SinkUnavailable("Kafka sink was closed")
        return session

    async def _hand_over(self, flight: Flight) -> None:
        """The slow way: wait for room, ask for topics. When the session fails meanwhile, so does the flight."""
        session = flight.session
        try:
            while obstacle := session.produce(flight):
                if obstacle == "session":
                    return
                if obstacle == "room":
                    await asyncio.sleep(_ROOM)
                elif obstacle == "contact":
                    session.moved.clear()
                    obstacle = session.produce(flight)
                    if not obstacle:
                        return
                    if obstacle == "contact":
                        await session.moved.wait()
                else:
                    rest = flight.batch.events[flight.at :]
                    await self._admit(session, {event.topic for event in rest if legal_topic(event.topic)})
        except RelayError as exc:
            session.thread.fail(exc)

    async def _publish_singly(self, session: Session, batch: Batch) -> Sequence[Rejected]:
        rejected: list[Rejected] = []
        events = batch.events
        for at, event in enumerate(events):
            try:
                flight = session.launch(Batch([event], batch.end_lsn))
                await self._hand_over(flight)
                rejected += await flight.future
            except EventRejected as exc:
                rejected.append(Rejected(event, str(exc)))
                block(session.blocked, event)
                self._culprits += 1
            except RelayError:
                batch.events = [item.event for item in rejected] + events[at:]
                raise
        return rejected

    async def _go_normal(self, opening: int) -> Session:
        """The suspects are behind us. If all were innocent, the message set as a whole was too big for the topic."""
        if not self._culprits:
            size = int(self._options.get("batch.size", _BATCH_SIZE))
            self._options["batch.size"] = max(size // 2, 1024)
            log.info("batch_size.halved", batch_size=self._options["batch.size"])
        self._suspects.clear()
        await self._drop()
        if opening != self._opening:
            raise SinkUnavailable("Kafka sink was closed")
        return await self._connect(careful=False)

    async def _connect(self, *, careful: bool) -> Session:
        self._culprits = 0
        session = self._session = Session(self._options, self._section.connect_timeout, self._blocked, careful=careful)
        try:
            await session.opened
            await self._admit(session, self._section.topics)
        except BaseException:
            self._session = None
            await session.close()
            raise
        return session

    async def _admit(self, session: Session, topics: Iterable[str]) -> None:
        """Make sure that the topics exist: librdkafka would wait 30 s for a missing one, and then lose the event."""
        missing = sorted(set(topics) - session.thread.topics.keys())
        if not missing:
            return
        await self._refresh(session)
        missing = [topic for topic in missing if topic not in session.thread.topics]
        if missing and not self._section.create_topics:
            raise topic_missing(missing)
        if missing:
            await self._create(missing)
            deadline = session.loop.time() + self._section.connect_timeout
            while not session.thread.topics.keys() >= set(missing):
                if session.loop.time() > deadline:
                    raise SinkUnavailable(f"Kafka created {', '.join(missing)} but does not list it yet")
                await self._refresh(session)

    async def _refresh(self, session: Session) -> None:
        thread = session.thread
        thread.topics = await asyncio.to_thread(thread.list_topics, min(self._section.connect_timeout, 5.0))

    async def _create(self, topics: Sequence[str]) -> None:
        await asyncio.to_thread(
            create_topics,
            {**self._user_options, "logger": Logs(chatty=False)},
            topics,
            partitions=self._section.partitions,
            replication_factor=self._section.replication_factor,
            timeout=self._section.connect_timeout,
        )
