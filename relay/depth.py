"""How deep the window is: enough events in flight for the broker's round trip, not all that are allowed.

What is in flight is memory, and with Kafka three times as much as elsewhere: its client has copies. A broker that
answers within milliseconds is kept busy by a thousand events or so, one that is far away needs more. As in TCP's BBR,
the depth is somewhat more than the rate times the round trip, and that is the shortest wait for an acknowledgement of
late: behind a broker that is merely busy the waits differ, and the shortest is far below what the window makes of
them; at a distance they are all alike, and the depth grows until the rate does not. It never exceeds what the user
allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relay.config import Config

LEAST = 1_250
GAIN = 1.5
_PERIOD = 0.1  # seconds that a rate is measured over


class Depth:
    """Fixed at `most`, unless it `follows` the round trip."""

    def __init__(self, most: int, *, follows: bool = False) -> None:
        self._most = most
        self._follows = follows
        self._trip = _Best(min, 10.0)
        self._rate = _Best(max, 1.0)
        self._counted = 0
        self._since = 0.0
        self.events = min(most, LEAST) if follows else most

    def answered(self, events: int, seconds: float, now: float) -> None:
        """The broker acknowledged a batch so long after it was submitted."""
        if not self._follows:
            return
        self._counted += events
        trip = self._trip.of_late(seconds, now)
        if now - self._since >= _PERIOD:
            rate = self._rate.of_late(self._counted / (now - self._since), now)
            self._counted, self._since = 0, now
            self.events = min(self._most, max(LEAST, int(GAIN * rate * trip)))


class _Best:
    """The best value of the last period and of the one before it."""

    def __init__(self, better: Callable[[float, float], float], period: float) -> None:
        self._better = better
        self._period = period
        self._since = -period
        self._now: float | None = None
        self._before: float | None = None

    def of_late(self, value: float, now: float) -> float:
        if self._now is None or now - self._since >= self._period:
            self._before, self._now, self._since = self._now, value, now
        else:
            self._now = self._better(self._now, value)
        return self._now if self._before is None else self._better(self._now, self._before)


def depth_of(config: Config) -> Depth:
    """It follows the round trip in one case: elsewhere events weigh less, or waiting ones make the rate.

    In a transaction of Kafka they share one commit; in a shared stream of JetStream a key's next event waits for the
    one before, so that the keys in the window are the rate.
    """
    return Depth(
        config.delivery.max_in_flight_events,
        follows=config.sink.kind == "kafka" and config.sink.kafka.mode == "idempotent",
    )
