"""One transactional Kafka producer from its making to its end, on a thread of its own.

The thread takes over the transactional id (which fences whoever had it), reads back what is stored beyond the marks,
and then moves transaction after transaction: whatever was submitted while one was being committed is the next one. So
a transaction is as small as the load allows, and never open for want of events.

It never commits a part of what it began, never begins with something later than what failed, and after a failure that
leaves the outcome open it ends: only a new session, after taking over again, can know what is stored.

When the broker refuses an event, it refuses the message set around it. The transaction is aborted and sent again in
halves, until the culprit is alone; the rest becomes durable in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import orjson
import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from relay import config
from relay.errors import ConfigError, EventRejected, RelayError, SetupError, SinkUnavailable
from relay.event import Batch, Event, Rejected
from relay.sink import kafka_hanging, kafka_topics
from relay.sink.kafka_blocking import Lane
from relay.sink.kafka_policy import (
    CONSEQUENCES,
    Option,
    fault,
    legal_topic,
    topic_missing,
    translate,
    translate_transaction,
)
from relay.sink.kafka_producer import Logs
from relay.sink.kafka_readback import Held, consumer_options, read_ids, read_position
from relay.sink.kafka_topics import destination, parsed

log = structlog.get_logger(__name__)

_SLICE = 0.25  # how soon the thread notices that it shall end, while it waits for the broker
_GRACE = 1.0  # how long closing waits for an open transaction to be aborted
_IDLE = 0.5
_STUCK = 1.0  # how long committed readers may be held back by others before we look whether it is by ourselves
_TRIES = 3
_POSITIONS = {"cleanup.policy": "compact", "segment.bytes": "16777216", "min.cleanable.dirty.ratio": "0.1"}

Part = tuple["Flight", list[Event]]


class Flight:
    """One batch on its way. `todo` are the events that are not known to be durable."""

    __slots__ = ("batch", "future", "marks", "rejected", "todo")

    def __init__(self, batch: Batch, future: asyncio.Future[Sequence[Rejected]]) -> None:
        self.batch = batch
        self.future = future
        self.todo = batch.events
        self.rejected: list[Rejected] = []
        self.marks: dict[str, int] = {}  # only the last batch of a transaction has them: they are about all of it

    def finish(self) -> None:
        self.batch.marks = self.marks
        if not self.future.done():
            self.future.set_result(self.rejected)

    def fail(self, error: RelayError) -> None:
        """Leave in the batch what must be submitted again: the unfinished, and the rejected, to be said again."""
        if not self.future.done():
            left = {id(event) for event in self.todo} | {id(item.event) for item in self.rejected}
            self.batch.events = [event for event in self.batch.events if id(event) in left]
            self.future.set_exception(error)
            self.future.exception()  # the publisher may be gone; then nobody else asks


class Transactions:
    """Not reused: after a failure there is a new one."""

    def __init__(
        self,
        section: config.Kafka,
        user_options: Mapping[str, Option],
        options: Mapping[str, Option],
        marks: Mapping[str, int],
        origin: str,
    ) -> None:
        self._section = section
        self._user = user_options
        self._origin = origin
        self.marks = dict(marks)  # after `opened`: with the beginning of what is seen for the first time
        self.duplicates = 0
        self.shrink = False  # message sets were refused and nobody was the culprit
        self.error: RelayError | None = None
        self.ending = False
        self._vague = False
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.ended = asyncio.Event()
        self._gate = threading.Condition()
        self._queue: deque[Flight] = deque()
        self._flying: list[Flight] = []  # of the transaction that is under way
        self._begun = False
        self._begins: dict[str, int] = {}  # where destinations begin that this session saw first
        self._topics: dict[str, int] = {}  # how many partitions each has
        self._known: set[str] = set()  # topics whose beginnings are noted
        self._held: Held = {}  # what was stored when we opened, and did not come again yet
        self._reached: dict[str, int] = {}  # marks for the pipeline, when the transaction is committed
        self._blocked: dict[Lane, bytes] = {}  # keys behind a rejected event: its id
        self._offsets: dict[tuple[str, int], int] = {}  # of the transaction: the last of each partition
        self._errors: list[Any] = []
        self._culprits = 0
        self._logs = Logs(chatty="debug" in options)
        try:
            self._producer = Producer({**options, "error_cb": self._complained, "logger": self._logs})
        except (KafkaException, TypeError, ValueError) as exc:
            reason = exc.args[0].str() if isinstance(exc, KafkaException) else str(exc)
            raise ConfigError([f"sink.kafka.options: {reason}"]) from None
        threading.Thread(target=self._run, name="relay-kafka-transactions", daemon=True).start()

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def submit(self, batch: Batch) -> Flight:
        flight = Flight(batch, self._loop.create_future())
        with self._gate:
            if self.ending:
                raise self.error or SinkUnavailable("Kafka sink was closed")
            self._queue.append(flight)
            self._gate.notify()
        return flight

    def fail(self, error: RelayError) -> None:
        with self._gate:
            self.error = self.error or error
            self.ending = True
            self._gate.notify()

    async def close(self) -> None:
        """Ends within moments, whatever the broker does; the thread is a daemon and outlives us at worst a little."""
        self.fail(SinkUnavailable("Kafka sink was closed"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), 2 * _GRACE)
        self._settle()

    def _settle(self) -> None:
        error = self.error or SinkUnavailable("Kafka sink was closed")
        flights, self._flying = [*self._flying, *self._queue], []
        self._queue.clear()
        for flight in flights:
            flight.fail(error)
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()
        self.ended.set()

    def _set_opened(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def _finish(self, flights: list[Flight]) -> None:
        for flight in flights:
            flight.finish()

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _post(self, call: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call, *args)

    def _run(self) -> None:
        try:
            self._open()
            self._post(self._set_opened)
            while flights := self._next():
                self._carry(flights)
        except RelayError as exc:
            self._note(exc)
        except KafkaException as exc:
            self._note(translate_transaction(exc.args[0], "Kafka client"))
        except Exception as exc:  # noqa: BLE001  whatever it is: the batches must learn of it
            self._note(SinkUnavailable(f"Kafka client failed: {exc!r}"))
        self._let_go()
        self._post(self._settle)
        del self._producer  # joins librdkafka's threads: here, not on the loop

    def _note(self, error: RelayError, *, vague: bool = False) -> None:
        with self._gate:
            if self.error is None or (self._vague and not vague):
                self.error, self._vague = error, vague
            self.ending = True

    def _complained(self, error: Any) -> None:
        """error_cb: most is information (librdkafka goes on by itself); fatal errors and refused logins are not."""
        if error.code() == KafkaError._AUTHENTICATION:  # noqa: SLF001
            failure: RelayError = translate(error, "Kafka")
            if self.opened.done():  # it worked before: let `open` judge again
                failure = SinkUnavailable(str(failure), hint=failure.hint)
            self._note(failure)
        elif error.fatal():
            self._note(translate_transaction(error, "Kafka"), vague=error.code() in CONSEQUENCES)

    def _let_go(self) -> None:
        """Abort what is open, so that readers need not wait for its timeout; whether that works is not asked."""
        deadline = time.monotonic() + _GRACE
        with contextlib.suppress(Exception):
            while self._begun and time.monotonic() < deadline:
                try:
                    self._producer.abort_transaction(_SLICE)
                    break
                except KafkaException as exc:
                    if not exc.args[0].retriable():
                        break
            self._producer.purge()
            self._producer.poll(0)

    def _ask(self, call: Callable[[float], object], patience: float) -> None:
        """A call of the transactional API, repeated while it may still succeed."""
        deadline = time.monotonic() + patience
        while True:
            try:
                call(_SLICE)
                return
            except KafkaException as exc:
                error = exc.args[0]
                if not error.retriable() or time.monotonic() > deadline:
                    raise
            if self.ending:
                raise self.error or SinkUnavailable("Kafka sink was closed")
            self._producer.poll(0)

    # opening

    def _open(self) -> None:
        section = self._section
        try:
            self._ask(self._producer.init_transactions, section.connect_timeout)
        except KafkaException as exc:
            error = exc.args[0]
            if error.retriable():
                raise SinkUnavailable(
                    f"Kafka: no transactional id within {section.connect_timeout:g} s, brokers down? ({error.str()})",
                    hint='is "bootstrap.servers" right, and can the relay reach the brokers\' advertised addresses?',
                ) from None
            raise translate_transaction(error, "Kafka does not give the transactional id") from None
        self._refresh()
        self._make_position_topic()
        self._admit(section.topics)
        options = {**self._user, "logger": self._logs}
        reader = {**consumer_options(self._user, self._origin), "logger": self._logs}
        topic = section.position_topic
        end = kafka_topics.ends(options, [(topic, 0)], section.connect_timeout)[destination(topic, 0)]
        record = read_position(reader, topic, end, self._origin, self._patiently(reader))
        begins = {name: offset for name, offset in record.get("begins", {}).items() if name not in self.marks}
        wanted = {*section.topics, *(parsed(name)[0] for name in (*self.marks, *begins))}
        gone = sorted(wanted - self._topics.keys())
        if gone:
            log.warning("kafka topics are gone", topics=gone)
        asked = [(name, number) for name in wanted - set(gone) for number in range(self._topics[name])]
        found = kafka_topics.ends(options, asked, section.connect_timeout)
        spans: dict[str, tuple[int, int]] = {}
        for name, upto in found.items():
            mark = self.marks.setdefault(name, min(begins.get(name, upto), upto))
            if mark > upto:
                raise SetupError(
                    f"{name} ends at offset {upto}, but this relay has stored events up to {mark}",
                    hint="the topic was deleted and made again, or has lost records: what it lost is not published "
                    "again by itself. Remove its entries from the column sink of outbox_relay_checkpoint to go on",
                )
            spans[name] = mark, upto
        held = read_ids(reader, spans, self._origin, self._patiently(reader))
        if held:
            log.info("topics.read_back", events=len(held))
        self._held = held

    def _patiently(self, reader: Mapping[str, Any]) -> Callable[[Mapping[str, int]], None]:
        """What to do while read-back waits for the ends of partitions: if that takes long, end what hangs there."""
        begun = time.monotonic()
        done = False

        def waiting(ends: Mapping[str, int]) -> None:
            nonlocal done
            if self.ending:
                raise SinkUnavailable("Kafka sink was closed")
            if not done and time.monotonic() - begun > _STUCK:
                done = True
                self._end_hanging(reader, ends)

        return waiting

    def _end_hanging(self, reader: Mapping[str, Any], ends: Mapping[str, int]) -> None:
        section, origin = self._section, self._origin.encode()

        def ours(message: Any) -> bool:
            if message.topic() == section.position_topic:
                return bool(message.key() == origin)
            return (dict(message.headers() or []).get("relay-position") or b"").startswith(origin + b":")

        def ask(call: Callable[[float], object]) -> None:
            self._ask(call, section.connect_timeout * 3)

        options, spots = {**self._user, "logger": self._logs}, [parsed(name) for name in ends]
        stable = kafka_topics.ends(options, spots, section.connect_timeout, stable=True)
        begins = {name: begin for name, begin in stable.items() if begin < ends[name]}
        found = kafka_hanging.find(reader, begins, ends, ours, section.connect_timeout)
        for commit in (False, True):
            chosen = [item for item in found if self._acknowledged(item) is commit]
            if chosen:
                log.warning("transaction.hangs", partitions=[item.name for item in chosen], acknowledged=commit)
                try:
                    kafka_hanging.end(self._producer, chosen, ask, commit=commit, timeout=section.connect_timeout)
                except KafkaException as exc:
                    raise translate_transaction(exc.args[0], "Kafka transaction") from None

    def _acknowledged(self, item: kafka_hanging.Hanging) -> bool:
        """Whether the checkpoint covers it; a position is kept in any case, the beginnings of new topics are in it."""
        return parsed(item.name)[0] == self._section.position_topic or item.begin < self.marks.get(item.name, 0)

    def _refresh(self) -> None:
        try:
            topics = self._producer.list_topics(timeout=min(self._section.connect_timeout, 5.0)).topics
        except KafkaException as exc:
            raise translate(exc.args[0], "Kafka metadata") from None
        self._topics = {name: len(topic.partitions) for name, topic in topics.items() if topic.partitions}

    def _make_position_topic(self) -> None:
        section, topic = self._section, self._section.position_topic
        options = {**self._user, "logger": self._logs}
        if topic in self._topics:
            policy = kafka_topics.setting(options, topic, "cleanup.policy", section.connect_timeout)
            if policy is not None and "compact" not in policy:
                raise SetupError(
                    f"topic {topic} is not compacted (cleanup.policy={policy}): it would forget positions",
                    hint=f"kafka-configs.sh --bootstrap-server … --alter --entity-type topics --entity-name {topic} "
                    "--add-config cleanup.policy=compact; or name another topic in sink.kafka.position_topic",
                )
            return
        try:
            kafka_topics.create_topics(
                options,
                [topic],
                partitions=1,
                replication_factor=section.replication_factor,
                timeout=section.connect_timeout,
                settings=_POSITIONS,
            )
        except SinkUnavailable:
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
        while missing := [topic for topic in topics if topic not in self._topics]:
            if time.monotonic() > deadline:
                raise SinkUnavailable(f"Kafka created {', '.join(missing)} but does not list it yet")
            self._refresh()

    def _admit(self, topics: Iterable[str]) -> None:
        """Make sure that topics exist: librdkafka would wait 30 s for a missing one, and then lose the event."""
        section = self._section
        if missing := sorted(set(topics) - self._topics.keys()):
            self._refresh()
        missing = [topic for topic in missing if topic not in self._topics]
        if missing and not section.create_topics:
            raise topic_missing(missing)
        if missing:
            kafka_topics.create_topics(
                {**self._user, "logger": self._logs},
                missing,
                partitions=section.partitions,
                replication_factor=section.replication_factor,
                timeout=section.connect_timeout,
            )
            self._listed(missing)

    def _welcome(self, topic: str) -> None:
        """A topic that this session did not know: note where it begins, before the first event goes there."""
        self._admit([topic])
        unknown = [(topic, number) for number in range(self._topics[topic])]
        unknown = [spot for spot in unknown if destination(*spot) not in self.marks]
        options = {**self._user, "logger": self._logs}
        self._first_seen(kafka_topics.ends(options, unknown, self._section.connect_timeout))

    def _first_seen(self, begins: Mapping[str, int]) -> None:
        self.marks |= begins
        self._begins |= begins
        self._reached |= begins

    # transactions

    def _next(self) -> list[Flight]:
        """Whole batches, up to the cap; waits until there is one. Empty: we shall end."""
        queue, flights, cap = self._queue, self._flying, self._section.transaction_events
        with self._gate:
            while not queue and not self.ending:
                if not self._gate.wait(_IDLE):
                    self._producer.poll(0)
            events = 0
            while queue and not self.ending and (not flights or events + len(queue[0].todo) <= cap):
                events += len(queue[0].todo)
                flights.append(queue.popleft())
        return [] if self.ending else flights

    def _carry(self, flights: list[Flight]) -> None:
        """Make everything of these durable, but what is rejected."""
        if self._held:
            if any(flight.batch.settled for flight in flights):
                self._reached |= {name: self.marks[name] for name, _ in self._held.values()}
                self._held.clear()
            for flight in flights:
                flight.todo = [event for event in flight.todo if not self._is_held(event)]
        self._culprits = 0
        split = self._deliver([(flight, flight.todo) for flight in flights if flight.todo])
        flights[-1].marks, self._reached = self._capped(self._reached), {}
        self._flying = []
        self._post(self._finish, flights)
        if split and not self._culprits:
            self.shrink = True
            raise SinkUnavailable("Kafka: message sets are too large for the topic; smaller ones from now on")

    def _is_held(self, event: Event) -> bool:
        found = self._held.pop(event.id, None)
        if found is None:
            return False
        name, offset = found
        self._reach(name, offset + 1)
        self.duplicates += 1
        return True

    def _reach(self, name: str, mark: int) -> None:
        self.marks[name] = self._reached[name] = max(mark, self.marks.get(name, 0))

    def _capped(self, marks: dict[str, int]) -> dict[str, int]:
        """No mark passes an event that is stored and may still come: after a crash it must be found again."""
        for name, offset in self._held.values():
            if offset < marks.get(name, 0):
                marks[name] = offset
        return marks

    def _deliver(self, parts: list[Part]) -> bool:
        """Send, in halves if the broker refuses; True if that was necessary."""
        blocked = dict(self._blocked)
        rejected: list[tuple[Flight, Rejected]] = []
        reason: str | None = None
        for _ in range(_TRIES):
            rejected.clear()
            reason = self._attempt(parts, rejected)
            if reason is not None:
                break
            self._blocked.clear()
            self._blocked.update(blocked)
        if reason is None:
            raise SinkUnavailable("Kafka: the producer does not find back to its sequence")
        if not reason:
            for flight, item in rejected:
                flight.rejected.append(item)
            for (topic, partition), offset in self._offsets.items():
                self._reach(destination(topic, partition), offset + 1)
            for flight, events in parts:
                if flight.todo is events:
                    flight.todo = []
                else:
                    done = {id(event) for event in events}
                    flight.todo = [event for event in flight.todo if id(event) not in done]
            return False
        self._blocked.clear()
        self._blocked.update(blocked)
        pairs = [(flight, event) for flight, events in parts for event in events]
        if len(pairs) == 1:
            (flight, event) = pairs[0]
            self._culprits += 1
            self._block(event)
            flight.rejected.append(Rejected(event, reason))
            flight.todo = [other for other in flight.todo if other is not event]
            return False
        half = len(pairs) // 2
        self._deliver(_regroup(pairs[:half]))
        self._deliver(_regroup(pairs[half:]))
        return True

    def _attempt(self, parts: list[Part], rejected: list[tuple[Flight, Rejected]]) -> str | None:
        """One transaction. "" if it is committed, the broker's reason if it was refused and is aborted; else raises.

        None: aborted as well, and nobody's fault. After a refusal librdkafka goes on with sequence numbers that the
        broker does not expect, and gets a new epoch only when that failed, too.
        """
        self._offsets.clear()
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
                self._first_seen(grown)
                self._tell(last, sent)
                self._flush()
            if not self._errors:
                self._ask(self._producer.commit_transaction, self._section.connect_timeout * 3)
                self._begun = False
                return ""
        except KafkaException as exc:
            error = exc.args[0]
            if error.fatal() or not (error.txn_requires_abort() or self._reported(error)):
                raise translate_transaction(error, "Kafka transaction") from None
            self._errors.append(error)
        return self._abort()

    def _reported(self, error: Any) -> bool:
        """Whether there are delivery reports that say what is wrong; librdkafka may know before we have asked it."""
        deadline = time.monotonic() + _GRACE
        while not self._errors and error.code() == KafkaError._STATE and time.monotonic() < deadline:  # noqa: SLF001
            self._producer.poll(_SLICE / 10)
        return bool(self._errors)

    def _abort(self) -> str | None:
        """After delivery errors: see `_attempt`."""
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
            self._ask(self._producer.abort_transaction, self._section.connect_timeout)
        except KafkaException as exc:  # it says what the reports do not
            raise translate_transaction(exc.args[0], "Kafka transaction") from None
        self._begun = False
        return None if refusal is None else str(refusal)

    def _produce(self, flight: Flight, events: list[Event], rejected: list[tuple[Flight, Rejected]]) -> None:
        produce, report, known, blocked = self._producer.produce, self._delivered, self._known, self._blocked
        if not self._begun and events:
            self._producer.begin_transaction()
            self._begun = True
        for event in events:
            _id, topic, key, names, values, body, _table, _transaction, _ordinal = event
            if topic not in known and not self._meet(flight, event, rejected):
                continue
            if blocked and self._behind(flight, event, rejected):
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

    def _meet(self, flight: Flight, event: Event, rejected: list[tuple[Flight, Rejected]]) -> bool:
        if not legal_topic(event.topic):
            self._reject(flight, event, f"{event.topic!r} is not a legal topic name", rejected)
            return False
        self._welcome(event.topic)
        self._known.add(event.topic)
        return True

    def _wait_for_room(self) -> None:
        self._producer.poll(0.01)
        if self.ending:
            raise self.error or SinkUnavailable("Kafka sink was closed")

    def _flush(self) -> None:
        """Until everything is acknowledged, or something is not; librdkafka gives up at the transaction's timeout."""
        while self._flush_some() and not self._errors:
            if self.ending:
                raise self.error or SinkUnavailable("Kafka sink was closed")

    def _flush_some(self) -> int:
        """How many are not acknowledged yet. A fatal error makes confluent-kafka stumble: then the reports tell."""
        for _ in range(_TRIES):
            try:
                return self._producer.flush(_SLICE)
            except SystemError:
                if self._errors or self.ending:
                    return 1
        return self._producer.flush(_SLICE)

    def _delivered(self, error: Any, message: Any) -> None:
        """Delivery report, once per event."""
        error = fault(error, message)
        if error is None:
            self._offsets[message.topic(), message.partition()] = message.offset()
        else:
            self._errors.append(error)

    def _noted(self, error: Any, message: Any) -> None:
        error = fault(error, message)
        if error is not None:
            self._errors.append(error)

    def _grown(self) -> dict[str, int]:
        """Partitions that were added to a topic since we met it: they begin before our first event there."""
        unknown = [spot for spot in self._offsets if destination(*spot) not in self.marks]
        if not unknown:
            return {}
        for topic, _ in unknown:
            self._known.discard(topic)
        return dict.fromkeys((destination(*spot) for spot in unknown), 0)

    def _tell(self, last: Event, events: int) -> None:
        """The position, in the same transaction: for people, and where new destinations begin."""
        names = last.header_names.names
        position = last.header_values[names.index("relay-position")] if "relay-position" in names else b""
        record: dict[str, Any] = {
            "relay-position": position.decode(errors="replace"),
            "events": events,
            "time": time.time(),
            "marks": self.marks,
        }
        if self._begins:
            record["begins"] = self._begins
        self._producer.produce(
            self._section.position_topic, orjson.dumps(record), self._origin.encode(), 0, self._noted
        )

    # what is rejected

    def _reject(self, flight: Flight, event: Event, reason: str, rejected: list[tuple[Flight, Rejected]]) -> None:
        rejected.append((flight, Rejected(event, reason)))
        self._block(event)

    def _block(self, event: Event) -> None:
        if event.key is not None:
            self._blocked.setdefault((event.topic, event.key), event.id)

    def _behind(self, flight: Flight, event: Event, rejected: list[tuple[Flight, Rejected]]) -> bool:
        """True (and rejected) if the event's key is blocked; the culprit itself, submitted again, lifts the block."""
        if event.key is None:
            return False
        lane = event.topic, event.key
        culprit = self._blocked.get(lane)
        if culprit == event.id:
            del self._blocked[lane]
        elif culprit is not None:
            reason = f"behind rejected event {culprit.decode(errors='replace')} of the same key"
            rejected.append((flight, Rejected(event, reason)))
            return True
        return False


def _regroup(pairs: Sequence[tuple[Flight, Event]]) -> list[Part]:
    parts: list[Part] = []
    for flight, event in pairs:
        if parts and parts[-1][0] is flight:
            parts[-1][1].append(event)
        else:
            parts.append((flight, [event]))
    return parts
