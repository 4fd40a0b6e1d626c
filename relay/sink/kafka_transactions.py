"""One transactional Kafka producer from its making to its end, on a thread of its own.

The thread takes over the transactional id (which fences whoever had it), reads back what is stored beyond the marks,
and then moves transaction after transaction: whatever was submitted while one was being committed is the next one. So
a transaction is as small as the load allows, and never open for want of events.

It never commits a part of what it began, never begins with something later than what failed, and after a failure that
leaves the outcome open it ends: only a new session, after taking over again, can know what is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping

from confluent_kafka import KafkaException

from relay import config
from relay.errors import RelayError, SinkUnavailable
from relay.event import Batch
from relay.sink.kafka_admission import Admission
from relay.sink.kafka_attempt import Attempt
from relay.sink.kafka_blocking import Blocked
from relay.sink.kafka_client import GRACE, Client
from relay.sink.kafka_delivery import Delivery
from relay.sink.kafka_marks import Marks
from relay.sink.kafka_opening import Opening
from relay.sink.kafka_parts import Flight
from relay.sink.kafka_policy import Option, translate_transaction
from relay.sink.kafka_readback import consumer_options

_IDLE = 0.5


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
        self._cap = section.transaction_events
        self.marks = Marks(marks)
        self.shrink = False  # message sets were refused and nobody was the culprit
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.ended = asyncio.Event()
        self._queue: deque[Flight] = deque()
        self._flying: list[Flight] = []  # of the transaction that is under way
        self._client = client = Client(options, self.opened.done)
        asking = {**user_options, "logger": client.logs}
        reader = {**consumer_options(user_options, origin), "logger": client.logs}
        blocked: Blocked = {}
        self._admission = Admission(client, section, asking)
        self._opening = Opening(client, section, asking, reader, origin)
        self._delivery = Delivery(
            Attempt(client, section, origin, self._admission, self.marks, blocked), self.marks, blocked
        )
        threading.Thread(target=self._run, name="relay-kafka-transactions", daemon=True).start()

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def submit(self, batch: Batch) -> Flight:
        flight = Flight(batch, self._loop.create_future())
        with self._client.gate:
            self._client.check()
            self._queue.append(flight)
            self._client.gate.notify()
        return flight

    def fail(self, error: RelayError) -> None:
        self._client.fail(error)

    async def close(self) -> None:
        """Ends within moments, whatever the broker does; the thread is a daemon and outlives us at worst a little.

        Else the producer is gone then: while it lived it could take over from the next session's.
        """
        self.fail(SinkUnavailable("Kafka sink was closed"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), 2 * GRACE)
        self._settle()

    def _settle(self) -> None:
        error = self._client.error or SinkUnavailable("Kafka sink was closed")
        flights, self._flying = [*self._flying, *self._queue], []
        self._queue.clear()
        for flight in flights:
            flight.fail(error)
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()

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
        client = self._client
        try:
            self._opening.run(self._admission, self.marks)
            self._post(self._set_opened)
            while flights := self._next():
                self._carry(flights)
        except RelayError as exc:
            client.note(exc)
            _forget(exc)
        except KafkaException as exc:
            client.note(translate_transaction(exc.args[0], "Kafka client"))
            _forget(exc)
        except Exception as exc:  # noqa: BLE001  whatever it is: the batches must learn of it
            client.note(SinkUnavailable(f"Kafka client failed: {exc!r}"))
            _forget(exc)
        client.let_go()
        self._post(self._settle)
        del client.producer  # joins librdkafka's threads: here, not on the loop
        self._post(self.ended.set)

    def _next(self) -> list[Flight]:
        """Whole batches, up to the cap; waits until there is one. Empty: we shall end."""
        queue, flights, cap, client = self._queue, self._flying, self._cap, self._client
        with client.gate:
            while not queue and not client.ending:
                if not client.gate.wait(_IDLE):
                    client.producer.poll(0)
            events = 0
            while queue and not client.ending and (not flights or events + len(queue[0].todo) <= cap):
                events += len(queue[0].todo)
                flights.append(queue.popleft())
        return [] if client.ending else flights

    def _carry(self, flights: list[Flight]) -> None:
        """Make everything of these durable, but what is rejected."""
        marks, delivery = self.marks, self._delivery
        if marks.held:
            if any(flight.batch.settled for flight in flights):
                marks.settle()
            for flight in flights:
                flight.todo = [event for event in flight.todo if not marks.is_held(event.id)]
        delivery.culprits = 0
        split = delivery.deliver([(flight, flight.todo) for flight in flights if flight.todo])
        flights[-1].marks = marks.take()
        self._flying = []
        self._post(self._finish, flights)
        if split and not delivery.culprits:
            self.shrink = True
            raise SinkUnavailable("Kafka: message sets are too large for the topic; smaller ones from now on")


def _forget(error: BaseException | None) -> None:
    """Empty the frames that an error has come through: they hold the producer, and it would live as long as the error.

    A producer that is left alone goes on in the background: it may take over the transactional id from its successor.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
