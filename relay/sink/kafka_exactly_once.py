"""The Kafka sink, exactly-once mode: `read_committed` readers see each event once, in order per key (G4).

Events and a record of the position travel in one transaction. The transactional id belongs to the relay: whoever opens
the sink takes it over, and a zombie is refused by the broker from then on. After taking over, the ids that the topics
hold beyond the checkpoint's marks are read back, and those events are not sent again. That is true after a crash, a
commit without an answer, a lost slot and a restored database alike.

This module opens, closes and remembers; the work is on the thread of `kafka_transactions`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import structlog

from relay import config
from relay.errors import SinkUnavailable
from relay.event import Batch, Rejected
from relay.sink.kafka_policy import producer_options, transactional_id, transactional_options
from relay.sink.kafka_transactions import Transactions

log = structlog.get_logger(__name__)

_BATCH_SIZE = 1_000_000  # librdkafka's default


class ExactlyOnceKafkaSink:
    """See the seam (`relay.sink.Sink`)."""

    def __init__(self, section: config.Kafka) -> None:
        self._section = section
        self._user = section.librdkafka()
        self._options = producer_options(self._user)
        self._marks: dict[str, int] = {}
        self._origin = ""
        self._duplicates = 0
        self._session: Transactions | None = None

    def resume(self, marks: Mapping[str, int], origin: str) -> None:
        # What is not a partition is for others.
        self._marks, self._origin = {name: mark for name, mark in marks.items() if "/" in name}, origin

    @property
    def marks(self) -> dict[str, int]:
        return dict(self._marks)

    @property
    def duplicates(self) -> int:
        """Events that Kafka already had, since the start."""
        return self._duplicates + (self._session.marks.duplicates if self._session else 0)

    async def open(self) -> None:
        await self.close()
        name = self._section.transactional_id or transactional_id(self._origin)
        options = transactional_options(self._options, self._user, name)
        session = self._session = Transactions(self._section, self._user, options, self._marks, self._origin)
        try:
            await session.opened
        except BaseException:
            await self.close()
            raise
        self._marks = dict(session.marks.known)

    async def publish(self, batch: Batch) -> Sequence[Rejected]:
        session = self._session
        if session is None:
            raise SinkUnavailable("Kafka sink is not open")
        flight = session.submit(batch)
        try:
            return await flight.future
        except asyncio.CancelledError:
            # Whether it becomes durable nobody would know: the next session reads it back.
            session.fail(SinkUnavailable("Kafka: publishing was cancelled"))
            raise

    async def close(self) -> None:
        session = self._session
        if session is None:
            return
        await session.close()  # cancelled here, it is still ours: the next `open` waits for its end
        if self._session is session:
            self._session = None
            self._duplicates += session.marks.duplicates
            if session.shrink:
                size = int(self._options.get("batch.size", _BATCH_SIZE))
                self._options["batch.size"] = max(size // 2, 1024)
                log.info("batch_size.halved", batch_size=self._options["batch.size"])
