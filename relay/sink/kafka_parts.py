"""What transactions carry: batches on their way, and the part of each that one transaction holds.

A batch never forgets an event that is not known to be durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relay.errors import RelayError
from relay.event import Batch, Event, Rejected


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


Part = tuple[Flight, list[Event]]

Rejections = list[tuple[Flight, Rejected]]
"""What one transaction does not carry; said to the flights when it is committed."""


def regroup(pairs: Sequence[tuple[Flight, Event]]) -> list[Part]:
    parts: list[Part] = []
    for flight, event in pairs:
        if parts and parts[-1][0] is flight:
            parts[-1][1].append(event)
        else:
            parts.append((flight, [event]))
    return parts
