"""The values that travel: Event, Batch, and where they come from.

They are made once per event on the hot path, so they are tuples of bytes: nothing here parses, copies or formats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from relay.lsn import LSN


class Transaction(NamedTuple):
    """The committed transaction an event came with. `stamp` is its part of the `relay-position` header."""

    xid: int
    commit_lsn: int
    committed_at: float  # Unix time
    stamp: bytes


class HeaderNames:
    """The header names of many events: made once, shared by all events that have the same ones."""

    __slots__ = ("block", "names", "prefixes")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.block = "".join(f"{name.replace('%', '%%')}: %b\r\n" for name in names).encode()
        """`block % values` renders the headers line by line, as NATS and HTTP want them."""
        self.prefixes = tuple(f"{name}: ".encode() for name in names)  # of these lines

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(names: tuple[str, ...]) -> HeaderNames:
        return HeaderNames(names)


class Event(NamedTuple):
    """One outbox row as it will be published."""

    id: bytes
    topic: str
    key: bytes | None
    header_names: HeaderNames
    header_values: tuple[bytes, ...]
    body: bytes | None  # None: a NULL payload in a bare body, a tombstone where the broker knows such a thing
    table: str
    transaction: Transaction
    ordinal: int  # among the transaction's events; (timeline, commit LSN, ordinal) is the Position

    def headers(self) -> list[tuple[str, bytes]]:
        return list(zip(self.header_names.names, self.header_values, strict=True))


class Rejected(NamedTuple):
    """An event that the sink can never take, and why."""

    event: Event
    reason: str


@dataclass(slots=True)
class Batch:
    """Consecutive events that travel together, and how far the WAL is closed once they are acknowledged.

    `end_lsn` is the end of the last transaction that is complete with this batch (or of a keepalive, then `events` may
    be empty). A batch cut inside a transaction carries the end of the one before: only whole ones are confirmed.
    A sink that fails leaves in `events` only those it does not know to be durable.
    """

    events: list[Event]
    end_lsn: LSN
    size_bytes: int = 0
    received_at: float = 0.0  # monotonic
    rejected: list[Rejected] = field(default_factory=list)  # rows that could not be routed
    transactions: list[tuple[int, int, int]] = field(default_factory=list)
    """(commit LSN, xid, events) of the transactions that end with this batch: the audit counts them."""
    marks: dict[str, int] = field(default_factory=dict)
    """Set by a sink with a fence: how far each destination of the broker is covered once this batch is complete."""
    settled: bool = False
    """Whatever the broker held when the sink was opened has come by now, or never will."""
    count: int = field(init=False)  # events received, also when `events` shrinks through a retry

    def __post_init__(self) -> None:
        self.count = len(self.events)
