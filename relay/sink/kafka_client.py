"""The transactional producer as its thread uses it, and whether and why the session shall end.

A call of the transactional API is repeated while it may still succeed, and given up when the session shall end. The
error that says most is remembered. Nobody but the session keeps the producer: it is destroyed where the thread ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from relay.errors import RelayError, SinkUnavailable
from relay.sink.kafka_policy import CONSEQUENCES, Option, translate, translate_transaction
from relay.sink.kafka_producer import Logs, make_producer

SLICE = 0.25  # how soon the thread notices that it shall end, while it waits for the broker
GRACE = 1.0  # how long closing waits for an open transaction to be aborted, or for a take-over to be answered


class Client:
    """Of one session. `worked` tells whether it was opened."""

    def __init__(self, options: Mapping[str, Option], worked: Callable[[], bool]) -> None:
        self.error: RelayError | None = None
        self.ending = False
        self._vague = False  # `error` is only the consequence of another one
        self._worked = worked
        self.gate = threading.Condition()  # nothing is submitted when the end has begun
        self.begun = False  # a transaction is open
        self.logs = Logs(chatty="debug" in options)
        self.producer = make_producer(options, self._complained, self.logs)

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def fail(self, error: RelayError) -> None:
        with self.gate:
            self.error = self.error or error
            self.ending = True
            self.gate.notify()

    # -- on the thread -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises when the session shall end."""
        if self.ending:
            raise self.error or SinkUnavailable("Kafka sink was closed")

    def note(self, error: RelayError, *, vague: bool = False) -> None:
        with self.gate:
            if self.error is None or (self._vague and not vague):
                self.error, self._vague = error, vague
            self.ending = True

    def _complained(self, error: Any) -> None:
        """error_cb: most is information (librdkafka goes on by itself); fatal errors and refused logins are not."""
        if error.code() == KafkaError._AUTHENTICATION:  # noqa: SLF001
            failure: RelayError = translate(error, "Kafka")
            if self._worked():  # it worked before: let `open` judge again
                failure = SinkUnavailable(str(failure), hint=failure.hint)
            self.note(failure)
        elif error.fatal():
            self.note(translate_transaction(error, "Kafka"), vague=error.code() in CONSEQUENCES)

    def ask(self, call: Callable[[float], object], patience: float, grace: float = 0.0) -> None:
        """A call of the transactional API, repeated while it may still succeed.

        `grace`: how long it may go on when the session shall end.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                call(SLICE)
                return
            except KafkaException as exc:
                error = exc.args[0]
                if not error.retriable() or time.monotonic() > deadline:
                    raise
            if self.ending:
                grace -= SLICE
                if grace < 0:
                    self.check()
            self.producer.poll(0)

    def begin(self) -> None:
        """A transaction, unless there is one."""
        if not self.begun:
            self.producer.begin_transaction()
            self.begun = True

    def commit(self, patience: float) -> None:
        self.ask(self.producer.commit_transaction, patience)
        self.begun = False

    def abort(self, patience: float) -> None:
        self.ask(self.producer.abort_transaction, patience)
        self.begun = False

    def let_go(self) -> None:
        """Abort what is open, so that readers need not wait for its timeout; whether that works is not asked."""
        deadline = time.monotonic() + GRACE
        with contextlib.suppress(Exception):
            while self.begun and time.monotonic() < deadline:
                try:
                    self.producer.abort_transaction(SLICE)
                    break
                except KafkaException as exc:
                    if not exc.args[0].retriable():
                        break
            self.producer.purge()
            self.producer.poll(0)
