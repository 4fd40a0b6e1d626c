"""What every output plugin's decoder shares: transactions, what to skip, keepalives. Pure: bytes in, events out.

A Decoder is fed the CopyData messages of one walsender session, in order, many at a time. It keeps `end`, the LSN up to
which everything was decoded completely: it moves at a commit or a keepalive, never inside a transaction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from struct import Struct

from relay.checkpoint import Sample
from relay.errors import ProtocolError
from relay.event import Event, Rejected, Transaction
from relay.lsn import LSN
from relay.outbox import Binding
from relay.routing import Router

XLOGDATA, KEEPALIVE = b"wk"
HEADER = 25  # of XLogData: 'w', start LSN, end LSN, server time; then the plugin's message

_SENT = Struct(">q")  # microseconds since 2000
EPOCH = 946_684_800  # 2000-01-01 in Unix time: Postgres counts microseconds from there
_KEEPALIVE = Struct(">QQB")  # end of WAL, server time, reply requested

Bind = Callable[[str, Sequence[tuple[str, int]]], tuple[Router, Binding] | None]
"""How to read a table's rows, given its name and its columns (name, type OID); None for a table that is not ours."""


def unix_time(microseconds: int) -> float:
    return EPOCH + microseconds / 1_000_000


def sent_at(message: bytes) -> float:
    """When Postgres sent this message, which was decoded before, by Postgres' clock (Unix time)."""
    return unix_time(_SENT.unpack_from(message, 17 if message[0] == XLOGDATA else 9)[0])


class Decoder(ABC):
    """Turns the messages of one session into events."""

    def __init__(self, *, start: LSN, skip: Sample | None, bind: Bind, stamp: bytes) -> None:
        self.end = start
        self.reply_due = False  # Postgres asked for a sign of life
        self.transactions: list[tuple[int, int, int]] = []
        """(commit LSN, xid, events) of those that ended since somebody last took the list away."""
        self.skipped = 0  # events of transactions that the checkpoint's snapshot sees, likewise
        self.commit_lsn = start  # of the newest transaction that was looked into
        self._skip = skip
        self._skipping = False
        self._bind = bind
        self._stamp = stamp
        self._transaction: Transaction | None = None
        self._ordinal = 0

    @property
    def unfinished(self) -> int:
        """Rows so far of the transaction whose end has not come yet."""
        return self._ordinal if self._transaction is not None else 0

    @abstractmethod
    def decode(self, messages: list[bytes], rejected: list[Rejected]) -> list[Event]:
        """The events of these messages, in order; rows that can never be events go to `rejected`."""

    def _begin(self, commit_lsn: int, xid: int, committed_at: float) -> Transaction:
        self.commit_lsn = LSN(commit_lsn)
        skip = self._skip
        if skip is not None:
            if commit_lsn >= skip.lsn:
                self._skip = None
            else:
                # By Begin's xid, once per transaction; never by the row's column, which INSERT … SELECT may copy.
                self._skipping = skip.snapshot.sees(skip.snapshot.widen(xid))
        stamp = b"%b%X/%X:" % (self._stamp, commit_lsn >> 32, commit_lsn & 0xFFFFFFFF)
        return Transaction(xid, commit_lsn, committed_at, stamp)

    def _commit(self, end_lsn: int) -> None:
        self.end = LSN(end_lsn)
        transaction = self._transaction
        if transaction is not None and self._ordinal and not self._skipping:
            self.transactions.append((transaction.commit_lsn, transaction.xid, self._ordinal))
        self._skipping, self._transaction = False, None

    def _other(self, data: bytes) -> None:
        """A message that is not the plugin's: a keepalive, which is a position in the same order as the commits."""
        if data[:1] != b"k" or len(data) != 18:
            raise ProtocolError(f"unknown replication message {data[:1]!r} of {len(data)} bytes")
        end, _time, reply = _KEEPALIVE.unpack_from(data, 1)
        if end > self.end:
            self.end = LSN(end)
        self.reply_due |= bool(reply)
