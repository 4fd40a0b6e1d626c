"""librdkafka's producer, and the thread that serves its delivery reports and owns its end.

It connects, listens, and remembers the error that says most. At the end it lets go in order: whatever was handed over
gets its report, nothing is handed over any more, and the producer is destroyed here, never on the loop. It knows
nothing of batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import KafkaException

from relay.errors import AuthError, RelayError, SinkUnavailable
from relay.sink.kafka_policy import CONSEQUENCES, Option, translate
from relay.sink.kafka_producer import Logs, make_producer
from relay.sink.kafka_topics import partition_counts

_TICK = 0.1  # how soon the report thread notices that it shall end
GRACE = 1.0  # how long events that are already on the wire may still be acknowledged after a failure


class ReportThread:
    """Of one session: made on the loop, begins when `start` is called. Not reused."""

    def __init__(self, options: Mapping[str, Option], connect_timeout: float, logs: Logs) -> None:
        self.loop = asyncio.get_running_loop()
        self._connect_timeout = connect_timeout
        self.topics: dict[str, int] = {}  # how many partitions each has
        self.error: RelayError | None = None
        self._vague = False  # `error` is only the consequence of another one
        self.ending = False
        self.gate = threading.Lock()  # nothing is handed over while, or after, the session lets go
        self.shut = False
        self.abrupt = False  # closed: nobody waits for what is on the wire
        self._said = ""  # the last thing librdkafka complained about
        self._logs = logs
        self.opened: asyncio.Future[None] = self.loop.create_future()
        self.producer = make_producer(options, self._complained, logs)

    def start(self, settle: Callable[[], None]) -> None:
        """`settle` is called on the loop when everything is over."""
        threading.Thread(target=self._run, args=(settle,), name="relay-kafka-reports", daemon=True).start()

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _run(self, settle: Callable[[], None]) -> None:
        try:
            self.topics = self._connect()
            self.post(self._set_opened)
            while not self.ending:
                self.producer.poll(_TICK)
        except RelayError as exc:
            self.note(exc)
        except KafkaException as exc:
            self.note(translate(exc.args[0], "Kafka client"))
        except Exception as exc:  # noqa: BLE001  poll raises SystemError when librdkafka fails inside a callback
            self.note(SinkUnavailable(f"Kafka client failed: {exc!r}"))
        self._let_go()
        self.post(settle)
        del self.producer  # joins librdkafka's threads: here, not on the loop

    def _connect(self) -> dict[str, int]:
        """Metadata, then the producer id: librdkafka asks for it by itself, about 0.5 s after its start."""
        deadline = time.monotonic() + self._connect_timeout
        topics: dict[str, int] | None = None
        while not self.ending:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = "no metadata" if topics is None else "no producer id"
                raise SinkUnavailable(
                    f"Kafka: {missing} within {self._connect_timeout:g} s, brokers down?"
                    + (f" ({self._said})" if self._said else ""),
                    hint='is "bootstrap.servers" right, and can the relay reach the brokers\' advertised addresses?',
                )
            if topics is None:
                with contextlib.suppress(SinkUnavailable):  # why, is what error_cb says
                    topics = self.list_topics(min(left, 0.5))
            self.producer.poll(0 if topics is None else min(left, 0.02))
            if topics is not None and self._logs.has_producer_id:
                return topics
        raise self.error or SinkUnavailable("Kafka: closed while connecting")

    def list_topics(self, timeout: float) -> dict[str, int]:
        try:
            return partition_counts(self.producer, timeout)
        except AttributeError:  # asked from the loop, and the session ended meanwhile
            raise SinkUnavailable("Kafka sink was closed") from None

    def _complained(self, error: Any) -> None:
        """error_cb: most is information (librdkafka goes on by itself); fatal errors and refused logins are not."""
        self._said = error.str()
        failure = translate(error, "Kafka")
        if isinstance(failure, AuthError):
            if self.opened.done():  # it worked before: let `open` judge again
                failure = SinkUnavailable(str(failure), hint=failure.hint)
            self.note(failure)
        elif error.fatal():
            self.note(failure, consequence=error.code() in CONSEQUENCES)

    def note(self, error: RelayError, *, consequence: bool = False) -> None:
        """Remember the error that says most, and end."""
        if self.error is None or (self._vague and not consequence):
            self.error, self._vague = error, consequence
        self.ending = True

    def _let_go(self) -> None:
        """Purge what is queued, wait a little for what is on the wire, purge that too: every event gets its report."""
        with self.gate:
            self.shut = True
        deadline = time.monotonic() + GRACE
        with contextlib.suppress(Exception):  # nothing more can be learned from this producer
            self.producer.purge(in_queue=True, in_flight=False)
            while len(self.producer) and not self.abrupt and time.monotonic() < deadline:
                self._serve()
            self.producer.purge()
            deadline = time.monotonic() + GRACE
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

    def fail(self, error: RelayError) -> None:
        if self.error is None:
            self.error = error
        self.ending = True
