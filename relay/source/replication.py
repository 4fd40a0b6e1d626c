"""A walsender session: the streaming replication protocol on psycopg's `pq` level (psycopg 3 has no API for it).

It moves bytes and knows nothing of events. It never confirms by itself: `send_status` says exactly what it is told.
Protocol: "Streaming Replication Protocol" in the PostgreSQL manual.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from struct import Struct
from struct import error as StructError  # noqa: N812  it is a class

import psycopg
from psycopg import AsyncConnection, pq
from psycopg.errors import Diagnostic, error_from_result
from psycopg.rows import TupleRow

from relay.config import Database
from relay.errors import AuthError, RelayError, SourceUnavailable
from relay.lsn import LSN
from relay.source.decoder import EPOCH
from relay.source.session import hanging_up, options_of, publication_missing, translate, translated

_STATUS = Struct(">cQQQqB")  # 'r', written, flushed, applied, client time, reply requested

_FULL = 1 << 20  # bytes that the kernel takes from a near Postgres that nobody reads from
_NEAR = 1000  # microseconds of a round trip: from further away, the rate would suffer
_ROUND_TRIP = Struct("=148xI")  # tcpi_min_rtt in Linux' struct tcp_info


class WalSender:
    """One replication connection. After `start` it is in COPY BOTH mode until it is closed."""

    def __init__(self, connection: AsyncConnection[TupleRow]) -> None:
        self._connection = connection
        self._pgconn: pq.abc.PGconn = connection.pgconn
        self._fault: RelayError | None = None
        self.exhausted = False  # the last `take` ended because nothing more was there
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[bool] | None = None
        self._watched: int | None = None  # the socket that the loop looks at
        self._deadline = 0.0  # of who waits
        self._timer: asyncio.TimerHandle | None = None
        connection.add_notice_handler(self._noticed)

    @classmethod
    async def connect(
        cls, database: Database, application_name: str, *, timeout: float, lock_timeout: float
    ) -> WalSender:
        """Connect; `timeout` becomes wal_sender_timeout, so that Postgres frees the slot of a frozen relay."""
        limits = f"-c wal_sender_timeout={int(timeout * 1000)} -c lock_timeout={int(lock_timeout * 1000)}"
        with translated():
            try:
                with hanging_up():
                    connection = await AsyncConnection.connect(
                        database.conninfo(),
                        autocommit=True,
                        prepare_threshold=None,
                        replication="database",
                        connect_timeout=max(1, round(database.connect_timeout)),
                        application_name=application_name,
                        options=options_of(database, limits),
                        keepalives_idle=10,
                        keepalives_interval=5,
                        keepalives_count=3,
                        tcp_user_timeout=30_000,
                    )
            except psycopg.OperationalError as exc:
                if "replication role" in str(exc) or "permission denied to start WAL sender" in str(exc):
                    raise AuthError(
                        " ".join(str(exc).split()), hint="as a superuser: ALTER ROLE <the relay's role> REPLICATION;"
                    ) from exc
                raise
        return cls(connection)

    async def create_slot(self, slot: str, plugin: str, *, failover: bool = False) -> LSN:
        """Create the slot; returns its consistent point P: every commit from P on will be streamed.

        Waits for all transactions that run now, in any database; `lock_timeout` bounds the wait (SourceUnavailable).
        """
        options = "(SNAPSHOT 'nothing', FAILOVER true)" if failover else "NOEXPORT_SNAPSHOT"
        with translated():
            cursor = await self._connection.execute(
                f'CREATE_REPLICATION_SLOT "{slot}" LOGICAL "{plugin}" {options}'.encode()
            )
            row = await cursor.fetchone()
        assert row is not None
        return LSN.parse(row[1])

    async def start(self, slot: str, lsn: LSN, options: dict[str, str]) -> None:
        """Begin to stream commits from `lsn` on. The caller has checked it: Postgres skips silently past its end."""
        pairs = ", ".join(f"\"{key}\" '{value.replace(chr(39), chr(39) * 2)}'" for key, value in options.items())
        with translated():
            await self._connection.execute(f'START_REPLICATION SLOT "{slot}" LOGICAL {lsn} ({pairs})'.encode())
        if self._pgconn.transaction_status != pq.TransactionStatus.ACTIVE:
            raise SourceUnavailable("Postgres did not start the stream")
        self._pgconn.nonblocking = 1

    def take(self, max_messages: int, max_bytes: int) -> tuple[list[bytes], int]:
        """The CopyData messages that are there now, at most so many, and their size; never waits."""
        get, consume = self._pgconn.get_copy_data, self._pgconn.consume_input
        messages: list[bytes] = []
        add = messages.append
        total, pumped = 0, False
        self.exhausted = False
        try:
            while len(messages) < max_messages and total < max_bytes:
                size, data = get(1)
                if size > 0:
                    add(bytes(data))  # it is bytes already where psycopg is compiled
                    total += size
                    pumped = False
                elif size < 0:
                    raise self._fault or self._end()
                elif pumped:
                    self.exhausted = True
                    break
                else:
                    consume()
                    pumped = True
        except psycopg.Error as exc:
            raise self._failed(exc) from exc
        if self._fault is not None:
            raise self._fault  # before the data: a keepalive behind it would pass rows that were skipped
        return messages, total

    def narrow(self) -> None:
        """Keep the socket small: it is soon full while nobody reads. The kernel forgets it with every look."""
        with contextlib.suppress(psycopg.Error):  # closed: `take` says why
            narrow(self._pgconn.socket)

    def _end(self) -> RelayError:
        result = self._pgconn.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            return translate(error_from_result(result))
        return SourceUnavailable("Postgres ended the stream: it is shutting down, or the slot was dropped")

    async def readable(self, timeout: float) -> bool:
        """Wait until the socket has something; False after `timeout` seconds."""
        # Reader and timer outlive the wait: making them anew cost 14 µs, for every event that comes alone.
        loop = self._loop
        self._waiting = loop.create_future()
        self._deadline = loop.time() + timeout
        if self._watched is None:
            self._watched = self._pgconn.socket
            loop.add_reader(self._watched, self._arrived)
        if self._timer is None or self._timer.when() > self._deadline:
            self._stop_timer()
            self._timer = loop.call_at(self._deadline, self._silent)
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def _arrived(self) -> None:
        if self._waiting is None:  # back-pressure: do not let it wake the loop for ever
            self._watch_no_more()
        else:
            self._settle(True)

    def _silent(self) -> None:
        self._timer = None
        if self._waiting is not None and self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._silent)
        else:
            self._settle(False)

    def send_status(self, received: LSN, confirmed: LSN, *, reply: bool) -> None:
        """Tell Postgres how far we are; `confirmed` is what it may forget. With `reply` it answers at once."""
        now = int((time.time() - EPOCH) * 1_000_000)
        try:
            # A full send buffer drops this status; the next one, some seconds later, says it all again.
            self._pgconn.put_copy_data(_STATUS.pack(b"r", received, confirmed, confirmed, now, reply))
            self._pgconn.flush()
        except psycopg.Error as exc:
            raise self._failed(exc) from exc

    def close(self) -> None:
        """Drop the connection at once. Postgres frees the slot; what was not confirmed comes again."""
        self._watch_no_more()
        self._stop_timer()
        self._settle(True)  # whoever waits finds it closed
        self._pgconn.finish()

    def _failed(self, exc: psycopg.Error) -> RelayError:
        """Ours for psycopg's, while nobody else can have the number of the socket: libpq may have closed it."""
        self._watch_no_more()
        return translate(exc)

    def _watch_no_more(self) -> None:
        """Also before the socket is closed: a moment later its number may be that of another connection."""
        if self._watched is not None:
            self._loop.remove_reader(self._watched)
            self._watched = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settle(self, value: bool) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(value)

    def _noticed(self, notice: Diagnostic) -> None:
        # Since PostgreSQL 18 a missing publication is only a warning: rows would be skipped silently, for ever.
        if "skipped loading publication" in (notice.message_primary or ""):
            self._fault = publication_missing(notice.message_primary or "")


def narrow(fd: int) -> None:
    """Have the kernel take less from a near Postgres than it would, so that the socket is soon full (ADR 0022).

    It takes more and more from whoever reads much, up to tens of megabytes, and so it has to be told again.
    """
    if sys.platform != "linux":
        return
    tcp = socket.IPPROTO_TCP
    # Without TCP it is small anyway; an older kernel does not know its shortest round trip.
    with contextlib.suppress(OSError, StructError), socket.socket(fileno=os.dup(fd)) as connection:
        (round_trip,) = _ROUND_TRIP.unpack(connection.getsockopt(tcp, socket.TCP_INFO, _ROUND_TRIP.size))
        if round_trip < _NEAR:
            connection.setsockopt(tcp, socket.TCP_WINDOW_CLAMP, _FULL)
