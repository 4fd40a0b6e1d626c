"""The stream source: WAL → batches of events, in commit order.

Rows arrive only after their transaction committed (protocol 1, streaming off), so they are handed on as they come; a
transaction is never buffered. Batches form by themselves: what the socket has, up to a cap, never waiting to fill one.
A keepalive is a position in the same order as the commits, so an idle outbox lets Postgres forget its WAL (G7).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from struct import Struct

from relay.checkpoint import Sample
from relay.errors import ProtocolError, SourceUnavailable
from relay.event import Batch, Event, Rejected, Transaction
from relay.lsn import LSN
from relay.progress import Progress
from relay.routing import Router, Unroutable
from relay.source.pgoutput import (
    BEGIN,
    COMMIT,
    INSERT,
    RELATION,
    Relation,
    decode_begin,
    decode_commit,
    decode_insert,
    decode_relation,
    relation_oid,
)
from relay.source.replication import WalSender

_KEEPALIVE = Struct(">QQB")  # end of WAL, server time, reply requested
_XLOGDATA, _PRIMARY_KEEPALIVE = b"wk"
_HEADER = 25  # 'w', start LSN, end LSN, server time

Bind = Callable[[Relation], tuple[Router, tuple[int, ...], int] | None]
"""How to read a relation's rows: router, slots, width; None for a table that is not ours."""


class StreamSource:
    """Reads one started walsender session until it ends or is closed."""

    def __init__(
        self,
        wal: WalSender,
        *,
        start: LSN,
        skip: Sample | None,
        bind: Bind,
        stamp: bytes,
        progress: Progress,
        max_batch_events: int,
        silence: float,
    ) -> None:
        self._wal = wal
        self._skip = skip
        self._bind = bind
        self._stamp = stamp
        self._progress = progress
        self._max_events = max_batch_events
        self._max_bytes = 1 << 20
        self._silence = silence
        self._relations: dict[int, tuple[Router, tuple[int, ...], int] | None] = {}
        self._transaction: Transaction | None = None
        self._skipping = False
        self._ordinal = 0
        self._end = start  # everything before it was handed on
        self._confirmed = start
        self._reply_due = False

    async def batches(self) -> AsyncIterator[Batch]:
        """Batches in commit order, until the session fails. A silent server is a lost one."""
        while True:
            batch = self._gather()
            if self._reply_due:
                self._reply_due = False
                self._wal.send_status(self._end, self._confirmed, reply=False)
            if batch is not None:
                self._progress.last_heard = batch.received_at
                yield batch
                await asyncio.sleep(0)  # let acknowledgements in, also while the socket always has more
            elif not await self._wal.readable(self._silence):
                raise SourceUnavailable(
                    f"Postgres was silent for {self._silence:.0f} s: the network is cut, or it hangs"
                )

    async def confirm(self, lsn: LSN) -> None:
        if lsn > self._confirmed:
            self._confirmed = lsn
            self._wal.send_status(self._end, lsn, reply=False)

    async def attend(self) -> None:
        """Keep the session alive, also while nobody reads: say where we are, and ask for a sign of life."""
        while True:
            self._wal.send_status(self._end, self._confirmed, reply=True)
            await asyncio.sleep(min(10.0, self._silence / 3))

    def _gather(self) -> Batch | None:
        """What is there now, at most a batch; None when there is nothing."""
        receive, pump = self._wal.receive, self._wal.pump
        events: list[Event] = []
        rejected: list[Rejected] = []
        add = events.append
        relations = self._relations
        transaction, ordinal = self._transaction, self._ordinal
        size, messages, skipped, transactions, pumped = 0, 0, 0, 0, False
        while len(events) < self._max_events and size < self._max_bytes:
            data = receive()
            if data is None:
                if pumped:
                    break
                pump()
                pumped = True
                continue
            pumped = False
            messages += 1
            size += len(data)
            if data[0] == _XLOGDATA:
                kind = data[_HEADER]
                if kind == INSERT:
                    reading = relations.get(relation_oid(data, _HEADER))
                    if reading is None:
                        if relation_oid(data, _HEADER) not in relations:
                            raise ProtocolError("pgoutput Insert for a relation that was not announced")
                        continue
                    if transaction is None:
                        raise ProtocolError("pgoutput Insert outside of a transaction")
                    if self._skipping:
                        skipped += 1
                        ordinal += 1
                        continue
                    router, slots, width = reading
                    row = decode_insert(data, _HEADER, slots, width)
                    try:
                        add(router.event(row, transaction, ordinal))
                    except Unroutable as exc:
                        rejected.append(Rejected(router.rejected(row, transaction, ordinal), str(exc)))
                    ordinal += 1
                elif kind == BEGIN:
                    transaction, ordinal = self._begin(data), 0
                elif kind == COMMIT:
                    self._end = LSN(decode_commit(data, _HEADER).end_lsn)
                    transaction, self._skipping = None, False
                    transactions += 1
                elif kind == RELATION:
                    relation = decode_relation(data, _HEADER)
                    relations[relation.oid] = self._bind(relation)
                # Everything else (types, origins, truncates, messages, what is yet to be invented) is not an insert.
            elif data[0] == _PRIMARY_KEEPALIVE and len(data) == 18:
                end, _time, reply = _KEEPALIVE.unpack_from(data, 1)
                self._end = max(self._end, LSN(end))
                self._reply_due |= bool(reply)
            else:
                raise ProtocolError(f"unknown replication message {data[:1]!r} of {len(data)} bytes")
        self._transaction, self._ordinal = transaction, ordinal
        if not messages:
            return None
        progress = self._progress
        progress.received_events += len(events) + len(rejected)
        progress.received_transactions += transactions
        progress.skipped_events += skipped
        progress.received_lsn = self._end
        return Batch(events, self._end, size, time.monotonic(), rejected)

    def _begin(self, data: bytes) -> Transaction:
        begin = decode_begin(data, _HEADER)
        skip = self._skip
        if skip is not None:
            if begin.final_lsn >= skip.lsn:
                self._skip = None
            else:
                # By Begin's xid, once per transaction; never by the row's column, which INSERT … SELECT may copy.
                self._skipping = skip.snapshot.sees(skip.snapshot.widen(begin.xid))
        lsn = begin.final_lsn
        stamp = b"%b%X/%X:" % (self._stamp, lsn >> 32, lsn & 0xFFFFFFFF)
        return Transaction(begin.xid, lsn, begin.committed_at, stamp)
