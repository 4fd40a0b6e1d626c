"""What the relay counts beside `Progress`: how long batches took, which errors came, what only a query can tell.

Plain numbers, bumped once per batch; admin/exposition.py gives them their public names when somebody asks. Nobody
decides anything by them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import get_args

from relay.lsn import LSN
from relay.progress import Progress, State

STATES: tuple[str, ...] = get_args(State)
WAL_STATUSES = ("reserved", "extended", "unreserved", "lost")
STAGES = ("received", "acknowledged", "confirmed", "server")

# From half a millisecond (an idle relay beside its broker) to a minute; 5 s and 30 s are thresholds of alerts.
BUCKETS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip


@dataclass(slots=True)
class Gauges:
    """What only a query can tell; the supervisor refreshes it every few seconds. None: not known, not exported."""

    pending_events: int | None = None  # rows that the checkpoint's snapshot does not see
    oldest_pending_age_seconds: float | None = None
    average_pending_age_seconds: float | None = None
    dead_letters: int | None = None
    parked_events: int | None = None  # waiting behind a dead letter of their key
    slot_name: str | None = None
    slot_active: bool | None = None
    slot_wal_status: str | None = None
    slot_retained_bytes: int | None = None  # WAL that Postgres keeps for the slot
    slot_safe_wal_bytes: int | None = None  # WAL that may still be written before the slot is lost
    anchor_retained_bytes: int | None = None  # WAL that Postgres keeps for exact replays


class Histogram:
    """How often a value fell into each of the buckets; a bound belongs to the bucket below it."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.total += value


class Metrics:
    """The numbers of one relay."""

    def __init__(self, progress: Progress, *, relay_name: str, service: str = "", stalled_after: float = 30.0) -> None:
        self.progress = progress
        self.gauges = Gauges()
        self.relay_name = relay_name
        self.stalled_after = stalled_after
        self.labels = {"relay": relay_name, "service": service or relay_name}
        self.delivery = Histogram()  # seconds from commit to acknowledgement, of each batch's oldest event
        self.publish = Histogram()  # seconds from handing a batch to the sink to its acknowledgement
        self.errors: Counter[str] = Counter()  # by class, which is the decision

    def observe(self, delivery: float | None, publish: float) -> None:
        """A batch was acknowledged: so many seconds after its oldest event's commit, and after the sink got it."""
        if delivery is not None:
            self.delivery.observe(max(0.0, delivery))  # two machines, two clocks
        self.publish.observe(publish)

    def failed(self, error: BaseException) -> None:
        self.errors[type(error).__name__] += 1


def lag_bytes(progress: Progress) -> dict[str, int]:
    """WAL between the server's end and each of our three stages; a stage that has no LSN yet is left out."""
    lag: dict[str, int] = {}
    for stage in STAGES[:3]:
        lsn: LSN = getattr(progress, f"{stage}_lsn")
        if lsn and progress.server_lsn:
            lag[stage] = max(0, progress.server_lsn - lsn)  # the sample of the end may be older than what came since
    return lag


def lag_seconds(progress: Progress, gauges: Gauges, now: float) -> float:
    """Age of the oldest event that is not acknowledged (`now` is Unix time); 0 if there is none.

    While events move it is the oldest received one. While they do not, those that wait in Postgres count too; they are
    left out otherwise, because the query sees what no checkpoint covers yet, acknowledged or not.
    """
    lag = 0.0 if progress.oldest_commit_at is None else max(0.0, now - progress.oldest_commit_at)
    if progress.state not in ("streaming", "polling", "recovering"):
        lag = max(lag, gauges.oldest_pending_age_seconds or 0.0)
    return lag
