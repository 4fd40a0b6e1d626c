"""One batch on its way through Kafka: how many of its events are acknowledged, and which are known not to be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from relay.errors import RelayError
from relay.event import Batch, Event, Rejected
from relay.sink.kafka_blocking import block
from relay.sink.kafka_policy import fault

if TYPE_CHECKING:
    from relay.sink.kafka_session import Session

Content = tuple[str, bytes | None, bytes | None]  # topic, key, body: what a delivery report tells of an event


class Flight:
    """Of one session: `acked` are the events that had a report of their own, `counted` those that C has counted.

    The report thread writes `acked` where C does not count, the loop everything else. Who sees that nothing is missing
    any more finishes.
    """

    __slots__ = (
        "acked",
        "at",
        "batch",
        "counted",
        "failed",
        "future",
        "lost",
        "missing",
        "rejected",
        "session",
        "slot",
        "target",
    )

    def __init__(self, session: Session, batch: Batch, slot: int) -> None:
        self.session = session
        self.batch = batch
        self.slot = slot  # in the session's tally
        self.at = 0  # events handed to librdkafka, or rejected
        self.target = len(batch.events)
        self.acked = 0
        self.counted = 0
        self.failed = 0
        self.rejected: list[Rejected] = []
        self.lost: set[Content] = set()  # what was not delivered, where only reports tell
        self.missing: set[int] = set()  # … where C does: places in the batch
        self.future: asyncio.Future[Sequence[Rejected]] = session.loop.create_future()

    @property
    def complete(self) -> bool:
        return self.acked + self.counted == self.target

    def delivered(self, error: Any, message: Any) -> None:
        """Delivery report; runs on the report thread, once per event."""
        error = fault(error, message)
        if error is None:
            self.acked += 1
            if self.complete:
                self.session.post(self.finish)
        else:
            self.failed += 1
            content = (message.topic(), message.key(), message.value())
            self.lost.add(content)
            self.session.undelivered(self, error, content)

    def reject(self, event: Event, reason: str) -> None:
        self.rejected.append(Rejected(event, reason))
        self.target -= 1
        block(self.session.blocked, event)

    def finish(self) -> None:
        if not self.future.done():
            self.future.set_result(self.rejected)
        self.session.land(self)

    def fail(self, error: RelayError) -> None:
        """Keep what is not known to be durable: reported as lost, rejected (to be said again), or never handed over."""
        if not self.future.done():
            events = self.batch.events
            reported = self.acked + self.failed + self.counted + len(self.missing) + len(self.rejected)
            if reported == self.at:  # else reports are missing: all is unknown
                kept_ids = {id(item.event) for item in self.rejected} | {id(events[at]) for at in self.missing}
                kept = [e for e in events[: self.at] if id(e) in kept_ids or (e.topic, e.key, e.body) in self.lost]
                self.batch.events = kept + events[self.at :]
            self.future.set_exception(error)
            self.future.exception()  # the publisher may be gone; then nobody else asks
        self.session.land(self)
