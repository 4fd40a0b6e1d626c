"""Parts that tests can steer: a sink, a source, a walsender, a checkpoint store; and pgoutput written by hand.

Only for what a real server cannot be made to do on demand: orders of completion, lost acknowledgements, corrupt bytes.
The sink keeps the contract of relay/sink/__init__.py (test_pipeline.py checks that).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from struct import pack
from typing import Literal, NamedTuple

import pytest

from relay.checkpoint import CheckpointStore, Sample
from relay.errors import RelayError, SinkUnavailable, SourceUnavailable
from relay.event import Batch, Event, Rejected
from relay.lsn import LSN
from relay.source.replication import WalSender
from relay.source.wal2json import Wal2jsonDecoder


class Act(NamedTuple):
    """What the sink does with one call of `publish`, after `turns` turns of the event loop."""

    kind: Literal["store", "hold", "reject", "refuse", "part", "lose"] = "store"
    # store: durable and acknowledged         hold: durable, acknowledged when released
    # reject: the first event never fits      refuse: fails before anything is written
    # part: half is acknowledged, then fails  lose: all is written, the acknowledgement is lost
    turns: int = 0


class FaultySink:
    """Stores in the order of the calls, and does as its acts say; without acts it is simply a good sink."""

    def __init__(
        self, acts: Iterable[Act] = (), *, opens: Iterable[RelayError | None] = (), fatal: RelayError | None = None
    ) -> None:
        self.stored: list[Event] = []  # what a consumer would read, duplicates included
        self.acknowledged: set[bytes] = set()  # ids that we said are durable
        self.duplicates = 0
        self.opened = 0
        self.held: list[asyncio.Future[None]] = []
        self.calls: list[list[bytes]] = []
        self._acts = deque(acts)
        self._opens = deque(opens)
        self._fatal = fatal  # raised in place of SinkUnavailable
        self._failure: RelayError | None = SinkUnavailable("not open")
        self._blocked: set[bytes | None] = set()  # keys behind a rejected event
        self.marks: dict[str, int] = {}  # no fence

    def resume(self, marks: Mapping[str, int], origin: str) -> None:
        """Without a fence there is nothing to resume."""
        self._last = asyncio.Event()

    async def open(self) -> None:
        outcome = self._opens.popleft() if self._opens else None
        if outcome is not None:
            raise outcome
        self.opened += 1
        self._failure = None
        self._blocked.clear()
        self._last = asyncio.Event()
        self._last.set()

    async def publish(self, batch: Batch) -> Sequence[Rejected]:
        if self._failure is not None:
            raise self._failure
        act = self._acts.popleft() if self._acts else Act()
        self.calls.append([event.id for event in batch.events])
        before, mine = self._last, asyncio.Event()
        self._last = mine
        try:
            await before.wait()
            for _ in range(act.turns):
                await asyncio.sleep(0)
            rejected = self._write(act, batch)
            mine.set()
            if act.kind == "hold":
                await self._hold()
        finally:
            mine.set()
        self.acknowledged.update({event.id for event in batch.events} - {event.id for event, _ in rejected})
        return rejected

    async def close(self) -> None:
        self._fail(SinkUnavailable("closed"))

    def release(self, index: int = 0) -> None:
        """Let one held call return."""
        self.held.pop(index % len(self.held)).set_result(None)

    def first_occurrences(self) -> list[Event]:
        """What a consumer that dedupes by id sees."""
        seen: dict[bytes, Event] = {}
        for event in self.stored:
            seen.setdefault(event.id, event)
        return list(seen.values())

    def _write(self, act: Act, batch: Batch) -> list[Rejected]:
        if self._failure is not None:
            raise self._failure
        events, rejected = batch.events, []
        if act.kind == "reject":
            self._blocked.add(events[0].key)
            rejected.append(Rejected(events[0], "too large"))
            events = events[1:]
        elif act.kind == "refuse":
            events = []
        elif act.kind == "part":
            events = events[: (len(events) + 1) // 2]
        for event in events:
            if event.key in self._blocked:
                rejected.append(Rejected(event, "behind a rejected one"))
            else:
                self.stored.append(event)
        if act.kind == "part":
            self.acknowledged.update(event.id for event in events)
            del batch.events[: len(events)]
        if act.kind in ("refuse", "part", "lose"):
            raise self._fail(self._fatal or SinkUnavailable(f"the broker went away: {act.kind}"))
        return rejected

    async def _hold(self) -> None:
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.held.append(gate)
        await gate

    def _fail(self, failure: RelayError) -> RelayError:
        self._failure = failure
        for gate in self.held:
            if not gate.done():
                gate.set_exception(failure)
        self.held.clear()
        return failure


class ListSource:
    """Yields batches from a list; then fails, ends, or stays silent until it is stopped."""

    def __init__(self, batches: Iterable[Batch], *, failure: RelayError | None = None, ends: bool = False) -> None:
        self._batches = list(batches)
        self._failure = failure
        self._ends = ends
        self.handed: list[Batch] = []
        self.confirmed: list[LSN] = []

    async def batches(self) -> AsyncIterator[Batch]:
        for batch in self._batches:
            self.handed.append(batch)
            yield batch
            await asyncio.sleep(0)
        if self._failure is not None:
            raise self._failure
        if not self._ends:
            await asyncio.get_running_loop().create_future()

    async def confirm(self, lsn: LSN) -> None:
        self.confirmed.append(lsn)


class Status(NamedTuple):
    received: LSN
    confirmed: LSN
    reply: bool


class ScriptedWalSender(WalSender):
    """A walsender whose socket yields prepared chunks of CopyData; at their end Postgres is silent, or gone."""

    def __init__(self, chunks: Iterable[Sequence[bytes]], *, silent: bool = False) -> None:
        self._chunks = deque(chunks)
        self._inbox: deque[bytes] = deque()
        self._mute = silent
        self._more = False
        self.exhausted = False
        self.statuses: list[Status] = []

    def take(self, max_messages: int, max_bytes: int) -> tuple[list[bytes], int]:
        if self._more:
            self._more = False
            self._inbox.extend(self._chunks.popleft())
        messages: list[bytes] = []
        while self._inbox and len(messages) < max_messages and sum(map(len, messages)) < max_bytes:
            messages.append(self._inbox.popleft())
        self.exhausted = not self._inbox
        return messages, sum(map(len, messages))

    async def readable(self, timeout: float) -> bool:
        if not self._chunks and not self._mute:
            raise SourceUnavailable("the script is over")
        self._more = bool(self._chunks)
        return self._more

    def narrow(self) -> None:
        pass

    def send_status(self, received: LSN, confirmed: LSN, *, reply: bool) -> None:
        self.statuses.append(Status(received, confirmed, reply))


class TricklingWalSender(ScriptedWalSender):
    """The next chunk is there as soon as somebody looks again, without waiting for it to be readable."""

    def take(self, max_messages: int, max_bytes: int) -> tuple[list[bytes], int]:
        self._more = self._more or (not self._inbox and bool(self._chunks))
        return super().take(max_messages, max_bytes)


class RecordingStore(CheckpointStore):
    """A checkpoint store in memory. `journal` is shared with whoever else wants the order of things recorded."""

    def __init__(self, samples: Iterable[Sample], journal: list[tuple[str, LSN]]) -> None:
        self.samples = deque(samples)
        self.journal = journal
        self.saved: list[tuple[LSN, Sample]] = []
        self.unseen: list[dict[int, int]] = []
        self.failure: RelayError | None = None

    async def sample(self) -> Sample:
        return self.samples.popleft() if len(self.samples) > 1 else self.samples[0]

    async def save(
        self,
        lsn: LSN,
        sample: Sample,
        unseen: Mapping[int, int] | None = None,
        *,
        marks: Mapping[str, int] | None = None,
        readback: Mapping[str, int] | None = None,
    ) -> None:
        if self.failure is not None:
            raise self.failure
        await asyncio.sleep(0)
        self.saved.append((lsn, sample))
        self.unseen.append(dict(unseen or {}))
        self.journal.append(("save", lsn))

    async def remember(self, lsn: LSN, sample: Sample, keep: float) -> None:
        self.journal.append(("remember", lsn))


# pgoutput, protocol 1, as the PostgreSQL manual has it ("Logical Replication Message Formats").


def begin(final_lsn: int, xid: int, microseconds: int = 0) -> bytes:
    return pack(">cQqI", b"B", final_lsn, microseconds, xid)


def commit(commit_lsn: int, end_lsn: int, microseconds: int = 0) -> bytes:
    return pack(">cBQQq", b"C", 0, commit_lsn, end_lsn, microseconds)


def relation(oid: int, schema: str, table: str, columns: Sequence[tuple[str, int]]) -> bytes:
    head = pack(">cI", b"R", oid) + schema.encode() + b"\0" + table.encode() + b"\0" + pack(">cH", b"d", len(columns))
    return head + b"".join(pack(">B", 0) + name.encode() + b"\0" + pack(">Ii", oid, -1) for name, oid in columns)


def insert(oid: int, cells: Sequence[bytes | None]) -> bytes:
    row = b"".join(b"n" if cell is None else pack(">cI", b"t", len(cell)) + cell for cell in cells)
    return pack(">cIcH", b"I", oid, b"N", len(cells)) + row


def xlog_data(message: bytes, lsn: int = 0, sent: int = 0) -> bytes:
    return pack(">cQQq", b"w", lsn, lsn, sent) + message


def keepalive(end_lsn: int, *, reply: bool = False, sent: int = 0) -> bytes:
    return pack(">cQqB", b"k", end_lsn, sent, reply)


def left_to_python(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """wal2json's rows that C leaves to Python, from now on."""
    slow: list[bytes] = []
    whole = Wal2jsonDecoder._insert

    def counted(self: Wal2jsonDecoder, data: bytes, events: list[Event], rejected: list[Rejected]) -> None:
        slow.append(data)
        whole(self, data, events, rejected)

    monkeypatch.setattr(Wal2jsonDecoder, "_insert", counted)
    return slow
