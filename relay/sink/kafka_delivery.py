"""Events become durable in transactions, and who is refused is found.

When the broker refuses an event, it refuses the message set around it. The transaction is aborted and sent again in
halves, until the culprit is alone; the rest becomes durable in order. It never goes on to the second half before the
first is durable or rejected, and what an attempt blocked is forgotten with it.
"""

from __future__ import annotations

from relay.errors import SinkUnavailable
from relay.event import Rejected
from relay.sink.kafka_attempt import Attempt
from relay.sink.kafka_blocking import Blocked, block
from relay.sink.kafka_marks import Marks
from relay.sink.kafka_parts import Part, Rejections, regroup
from relay.sink.kafka_topics import destination

_TRIES = 3


class Delivery:
    """Of one session. `culprits` counts whom the broker refused, until somebody sets it back."""

    def __init__(self, attempt: Attempt, marks: Marks, blocked: Blocked) -> None:
        self._attempt = attempt
        self._marks = marks
        self._blocked = blocked  # the same as the attempt's
        self.culprits = 0

    def deliver(self, parts: list[Part]) -> bool:
        """Send, in halves if the broker refuses; True if that was necessary."""
        blocked = dict(self._blocked)
        rejected: Rejections = []
        reason: str | None = None
        for _ in range(_TRIES):
            rejected.clear()
            reason = self._attempt.run(parts, rejected)
            if reason is not None:
                break
            self._blocked.clear()
            self._blocked.update(blocked)
        if reason is None:
            raise SinkUnavailable("Kafka: the producer does not find back to its sequence")
        if not reason:
            self._durable(parts, rejected)
            return False
        self._blocked.clear()
        self._blocked.update(blocked)
        pairs = [(flight, event) for flight, events in parts for event in events]
        if len(pairs) == 1:
            (flight, event) = pairs[0]
            self.culprits += 1
            block(self._blocked, event)
            flight.rejected.append(Rejected(event, reason))
            flight.todo = [other for other in flight.todo if other is not event]
            return False
        half = len(pairs) // 2
        self.deliver(regroup(pairs[:half]))
        self.deliver(regroup(pairs[half:]))
        return True

    def _durable(self, parts: list[Part], rejected: Rejections) -> None:
        for flight, item in rejected:
            flight.rejected.append(item)
        for (topic, partition), offset in self._attempt.offsets.items():
            self._marks.reach(destination(topic, partition), offset + 1)
        for flight, events in parts:
            if flight.todo is events:
                flight.todo = []
            else:
                done = {id(event) for event in events}
                flight.todo = [event for event in flight.todo if id(event) not in done]
