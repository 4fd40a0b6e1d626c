"""The demo's books: what the shop committed, what the consumer got, and whether both agree. Pure: time is passed in.

An event counts as owed from the moment its COMMIT is sent: it may arrive before the shop hears that it is committed.
The consumer's dedupe is here too. A real consumer keeps the ids it has seen in its own database, in the transaction of
its effect; this one remembers the newest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log
from typing import NamedTuple

from relay.inbox import MemoryInbox

STEPS = ("placed", "paid", "shipped")  # of an order, in this order

_RECENT = 2_000  # latencies, for the view
_GRAIN = log(1.02)  # latencies of the whole run are kept to 2 %
_SHORTEST = 1e-5


class Arrival(NamedTuple):
    """An event as the consumer got it."""

    id: str
    type: str
    aggregate_id: str
    at: float  # monotonic


class Delivered(NamedTuple):
    """An event that arrived for the first time, for the view."""

    arrival: Arrival
    latency: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from sending COMMIT to the consumer having the event."""

    p50: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What the demo counted. `ok`: nothing lost, nothing invented, nothing out of order."""

    ok: bool
    seconds: float
    committed: int
    rolled_back: int
    delivered: int
    lost: int  # committed, and not delivered after waiting
    duplicates: int  # that reached the consumer, which dropped them by id
    dropped_by_broker: int  # published again after a kill, recognised by id; at least so many
    uncommitted_delivered: int  # delivered, and never committed
    out_of_order: int  # first deliveries out of their order's order
    kills: int
    latency_seconds: Latency | None


@dataclass(slots=True)
class Ledger:
    """Counts. One thread writes it."""

    committed: int = 0
    rolled_back: int = 0
    delivered: int = 0
    duplicates: int = 0
    uncommitted_delivered: int = 0
    out_of_order: int = 0
    last: deque[Delivered] = field(default_factory=lambda: deque(maxlen=50))
    last_arrival: float = 0.0  # monotonic
    _owed: dict[str, float] = field(default_factory=dict)  # id → when its COMMIT was sent
    _inbox: MemoryInbox = field(default_factory=MemoryInbox)  # as any consumer would, to process each event once
    _next_step: dict[str, int] = field(default_factory=dict)  # of orders that are under way
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _all: Counter[int] = field(default_factory=Counter)
    _longest: float = 0.0

    @property
    def owed(self) -> int:
        """Events that were committed (or are being committed) and have not arrived."""
        return len(self._owed)

    def commit_sent(self, event_id: str, now: float) -> None:
        self._owed[event_id] = now

    def commit_done(self) -> None:
        self.committed += 1

    def rollback_done(self) -> None:
        self.rolled_back += 1

    def arrived(self, arrival: Arrival) -> None:
        self.last_arrival = arrival.at
        if not self._inbox.is_new(arrival.id):
            self.duplicates += 1
            return
        sent = self._owed.pop(arrival.id, None)
        if sent is None:
            self.uncommitted_delivered += 1
            return
        self.delivered += 1
        self._check_order(arrival)
        latency = max(_SHORTEST, arrival.at - sent)
        self._recent.append(latency)
        self._all[ceil(log(latency) / _GRAIN)] += 1
        self._longest = max(self._longest, latency)
        self.last.append(Delivered(arrival, latency))

    def _check_order(self, arrival: Arrival) -> None:
        step = STEPS.index(arrival.type)
        if step != self._next_step.pop(arrival.aggregate_id, 0):
            self.out_of_order += 1
        if step + 1 < len(STEPS):
            self._next_step[arrival.aggregate_id] = step + 1

    def recent_latency(self) -> Latency | None:
        """Of the newest events."""
        found = sorted(self._recent)
        return Latency(_rank(found, 0.5), _rank(found, 0.99), found[-1]) if found else None

    def latency(self) -> Latency | None:
        """Of the whole run."""
        if not self.delivered:
            return None
        buckets = sorted(self._all.items())
        return Latency(self._quantile(buckets, 0.5), self._quantile(buckets, 0.99), self._longest)

    def _quantile(self, buckets: Sequence[tuple[int, int]], q: float) -> float:
        wanted = ceil(q * self.delivered)
        for bucket, count in buckets:
            wanted -= count
            if wanted <= 0:
                return min(self._longest, (1.02) ** bucket)
        return self._longest

    def summary(self, *, seconds: float, kills: int, dropped_by_broker: int) -> Summary:
        """The verdict; call it after waiting for what is owed."""
        return Summary(
            ok=not (self.owed or self.uncommitted_delivered or self.out_of_order),
            seconds=round(seconds, 3),
            committed=self.committed,
            rolled_back=self.rolled_back,
            delivered=self.delivered,
            lost=self.owed,
            duplicates=self.duplicates,
            dropped_by_broker=dropped_by_broker,
            uncommitted_delivered=self.uncommitted_delivered,
            out_of_order=self.out_of_order,
            kills=kills,
            latency_seconds=self.latency(),
        )


def _rank(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, floor(q * len(ordered)))]
