"""The audit: does the stream deliver what the table holds? Pure bookkeeping; the counting query is the store's.

For two promoted snapshots S1 and S2 the rows visible in S2 and not in S1 must be as many as the stream brought for
those transactions. It catches what is silent otherwise: a publication that lost its table, a row filter, a forgotten
partition. More rows in the table than in the stream is a loss, and is healed from the table; fewer is not (producers
may delete their rows).

Counts are kept per transaction as long as they are few, so that only what is missing is published again; in a long
catch-up only the total is kept. A transaction can be acknowledged before any snapshot sees it (it waits for a
synchronous standby): it is carried, by its id, from window to window and through restarts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from relay.checkpoint import Sample, Snapshot, Unseen
from relay.lsn import LSN

_FEW = 50_000  # transactions that are remembered one by one


@dataclass(slots=True)
class Window:
    """What the stream brought of the transactions that `until` sees and `since` does not."""

    since: Snapshot
    until: Sample
    total: int = 0
    counts: dict[int, int] | None = field(default_factory=dict)  # per xid; None: too many to remember
    blind: bool = False  # too much came between two samples to be counted: it cannot be judged

    def add(self, xid: int, events: int) -> None:
        self.total += events
        if self.counts is not None:
            self.counts[xid] = self.counts.get(xid, 0) + events
            if len(self.counts) > _FEW:
                self.counts = None

    def agrees(self, rows: int, xids: int) -> bool:
        """Whether the table holds nothing that did not come, by the number of its rows and the sum of their xids.

        By the sum, too: as many rows may have been deleted as did not come. It is asked only where `missing` can tell
        the two apart.
        """
        if self.counts is None or not rows:
            return rows <= self.total
        return rows == self.total and xids == sum(xid * count for xid, count in self.counts.items())

    def missing(self, rows: Mapping[int, int]) -> list[int] | None:
        """The transactions of which the table holds more rows than came; None: cannot be told apart."""
        if self.counts is None:
            return None
        return sorted(xid for xid, count in rows.items() if count > self.counts.get(xid, 0))


class Audit:
    """Counts transactions as they are acknowledged, window after window."""

    def __init__(self, since: Sample, unseen: Unseen) -> None:
        """`unseen`: as it was saved with the checkpoint."""
        self._since = since.snapshot
        self._newest = since.snapshot
        self._surely = unseen.get(0, 0)  # events of before a restart that every sample from now on sees
        self._window: Window | None = None
        self._later: list[tuple[int, int, int]] = []  # (commit LSN, xid, events) behind the window's end
        self._carried = {xid: events for xid, events in unseen.items() if xid}
        """Acknowledged before the last window's end, but not visible in its snapshot."""
        self._uncounted = 0  # events behind the window's end that came when `_later` was full

    def acknowledged(self, transactions: Iterable[tuple[int, int, int]]) -> None:
        """(commit LSN, 32-bit xid, events) of transactions, in commit order."""
        window = self._window
        for commit_lsn, xid, events in transactions:
            if window is not None and commit_lsn < window.until.lsn:
                self._place(window, window.until.snapshot.widen(xid), events)
            elif len(self._later) < 4 * _FEW:
                self._later.append((commit_lsn, xid, events))
            else:
                self._uncounted += events

    def waiting(self) -> list[int]:
        """Acknowledged transactions (32-bit xids) of which no passed or open window has seen that they are visible."""
        return [xid for _, xid, _ in self._later] + [xid & 0xFFFFFFFF for xid in self._carried]

    def sampled(self, sample: Sample) -> bool:
        """A sample was taken; True if it ends a window, which it does if none is open."""
        self._newest = sample.snapshot
        if self._window is not None:
            return False
        window = self._window = Window(self._since, sample, blind=self._uncounted > 0)
        window.total += self._surely + self._uncounted
        if window.total:
            window.counts = None
        self._surely = self._uncounted = 0
        carried, self._carried = self._carried, {}
        for xid, events in carried.items():
            self._place(window, xid, events)
        later, self._later = self._later, []
        self.acknowledged(later)
        return True

    def due(self, acknowledged: LSN) -> Window | None:
        """The window, if everything up to its end is acknowledged: compare it with the table, then `passed` it."""
        window = self._window
        return window if window is not None and acknowledged >= window.until.lsn else None

    def passed(self) -> Sample:
        """The window was judged: its end is the next one's beginning."""
        window = self._window
        assert window is not None
        self._since, self._window = window.until.snapshot, None
        return window.until

    @property
    def unseen(self) -> Unseen:
        """Events of acknowledged transactions that the last passed snapshot does not see: saved with the checkpoint."""
        newest = self._newest
        surely = self._surely + self._uncounted + (self._window.total if self._window is not None else 0)
        unseen: Unseen = {}
        for xid, events in [*self._carried.items(), *((newest.widen(xid), events) for _, xid, events in self._later)]:
            if newest.sees(xid):
                surely += events
            else:
                unseen[xid] = unseen.get(xid, 0) + events
        return {0: surely, **unseen} if surely else unseen

    def _place(self, window: Window, xid: int, events: int) -> None:
        if window.until.snapshot.sees(xid):
            window.add(xid, events)
        else:
            self._carried[xid] = self._carried.get(xid, 0) + events
