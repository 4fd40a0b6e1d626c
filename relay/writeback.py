"""Write-back: sets a row's status once the broker has acknowledged its event, for readers that expect it.

Batched UPDATEs on a session of its own, after the fact. The stream does not wait for them, except that reading pauses
when too many ids wait (G8), and that a checkpoint gives them a moment before it is saved: so after a crash what was not
marked is usually marked by redelivery. Nothing is decided by these columns, the checkpoint is what the relay trusts;
and the stream does not see the UPDATEs, it carries inserts only.

A row that is not visible yet (its transaction waits for a synchronous standby) or that somebody has locked is tried
again, and given up after a minute: a producer that deletes the row in the inserting transaction never shows it to us.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

import structlog
from psycopg import sql

from relay.config import Config, Outbox
from relay.errors import ContractError, SetupError, SourceUnavailable
from relay.event import Event
from relay.progress import Progress
from relay.source.session import LASTING, Session, connect, translated
from relay.source.slot import split

log = structlog.get_logger("relay.writeback")

MAX_QUEUED = 200_000  # ids; beyond it reading pauses
PATIENCE = 2.0  # seconds that a checkpoint waits for the rows before it
_HURRY = 150_000  # queued ids from which on write-back no longer leaves the time to the stream
_SHARE = 4  # times the last UPDATE's duration is left to the stream while events are in flight
_MIN_ROWS, _MAX_ROWS = 100, 5000  # of one UPDATE
_FAST, _SLOW = 0.05, 0.25  # seconds of one UPDATE: below it may grow, above it shrinks
_FIRST_RETRY, _LAST_RETRY = 0.02, 2.0
_FRESH = 4  # tries during which a checkpoint still waits for a late row
_GIVE_UP = 60.0
_MAX_LATE = 100_000
_QUOTED = str.maketrans({"\\": "\\\\", '"': '\\"'})


@dataclass(slots=True)
class _Queue:
    """The acknowledged ids of one table, oldest first."""

    table: str
    prefix: int = 0  # characters of "<table>:" in front of the event id
    update: sql.Composed | None = None
    update_unlocked: sql.Composed | None = None
    ids: deque[bytes] = field(default_factory=deque)
    added: int = 0
    taken: int = 0  # ids that an UPDATE was tried for


@dataclass(slots=True, order=True)
class _Late:
    """Ids whose rows an UPDATE did not find."""

    due: float
    number: int
    since: float = field(compare=False)
    tries: int = field(compare=False)
    queue: _Queue = field(compare=False)
    ids: list[bytes] = field(compare=False)


class WriteBack:
    """One per relay: its queue outlives the sessions with Postgres."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._queues = [_Queue(outbox.table) for outbox in config.outbox if outbox.write_back]
        self._late: list[_Late] = []  # a heap
        self._numbers = 0
        self._rows = _MIN_ROWS * 5
        self._running = False
        self._work = asyncio.Event()
        self._moved = asyncio.Event()
        self._gave_up = 0
        self._told = float("-inf")
        self.rows = 0  # marked since start

    @classmethod
    def of(cls, config: Config, progress: Progress) -> WriteBack | None:
        return cls(config, progress) if any(outbox.write_back for outbox in config.outbox) else None

    @property
    def queued(self) -> int:
        return sum(len(queue.ids) for queue in self._queues)

    def acknowledged(self, events: Sequence[Event]) -> None:
        """The broker has these. Called once per batch, before the checkpoint may pass it."""
        for queue in self._queues:
            found = [event.id for event in events if event.table == queue.table]
            queue.ids.extend(found)
            queue.added += len(found)
        self._work.set()

    async def room(self) -> None:
        """Return when not too many ids wait."""
        while self.queued >= MAX_QUEUED:
            self._moved.clear()
            await self._moved.wait()

    async def caught_up(self, patience: float = PATIENCE) -> bool:
        """Wait until what is queued now has been written, but not for long, and not when nobody writes."""
        wanted = [(queue, queue.added) for queue in self._queues]
        deadline = time.monotonic() + patience
        taken_at = 0.0

        def behind() -> bool:
            nonlocal taken_at
            if any(queue.taken < added for queue, added in wanted):
                return True
            taken_at = taken_at or time.monotonic()
            return any(late.since <= taken_at and late.tries < _FRESH for late in self._late)

        while behind():
            left = deadline - time.monotonic()
            if left <= 0 or not self._running:
                return False
            self._moved.clear()
            # Not wait_for: on Python 3.11 it swallows a cancellation that comes together with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._moved.wait()
        return True

    async def bind(self, session: Session, table: str, columns: Mapping[str, str]) -> None:
        """Check the table's write-back against its columns (name → type), and prepare the statements."""
        outbox = next(outbox for outbox in self._config.outbox if outbox.table == table)
        queue = next((queue for queue in self._queues if queue.table == table), None)
        if queue is None:
            return
        await _check(session, outbox, columns)
        id_column = sql.Identifier(outbox.columns.id)
        id_type = columns[outbox.columns.id]
        several = len(self._config.outbox) > 1
        queue.prefix = len(f"{table}:".encode()) if several and id_type != "uuid" else 0
        parts = {
            "table": sql.Identifier(*split(table)),
            "id": id_column,
            "ids": sql.SQL("%s::{}[]").format(sql.SQL(id_type)),  # as the catalogue spells it
            "values": sql.SQL(", ").join(
                sql.SQL("{} = {}").format(sql.Identifier(name), _value(value))
                for name, value in outbox.write_back.items()
            ),
        }
        queue.update = sql.SQL("UPDATE {table} SET {values} WHERE {id} = ANY({ids}) RETURNING {id}::text").format(
            **parts
        )
        queue.update_unlocked = sql.SQL(
            "UPDATE {table} SET {values} WHERE {id} = ANY(ARRAY(SELECT {id} FROM {table} WHERE {id} = ANY({ids})"
            " FOR NO KEY UPDATE SKIP LOCKED)) RETURNING {id}::text"
        ).format(**parts)

    async def run(self) -> None:
        """Write until cancelled; raises when Postgres goes away, as the other sessions do."""
        # Losing the last marks with the server's memory is no loss: a checkpoint's own commit flushes all before it.
        options = f"{LASTING} -c lock_timeout=300ms -c synchronous_commit=off"
        session = await connect(self._config.database, f"{self._config.relay.name} write-back", options=options)
        async with session:
            self._running = True
            try:
                while True:
                    await self._turn(session)
            finally:
                self._running = False
                self._moved.set()

    async def _turn(self, session: Session) -> None:
        """One UPDATE, or one wait."""
        now = time.monotonic()
        added = sum(queue.added for queue in self._queues)
        if self._late and self._late[0].due <= now:
            spent = await self._again(session, now)
        elif queue := max(self._queues, key=lambda each: len(each.ids)) if self.queued else None:
            spent = await self._next(session, queue)
        else:
            self._work.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._late[0].due - now if self._late else None):
                    await self._work.wait()
            return
        self._moved.set()
        busy = self._progress.in_flight_events or added != sum(queue.added for queue in self._queues)
        if busy and self.queued < _HURRY:
            await asyncio.sleep(spent * _SHARE)

    async def _next(self, session: Session, queue: _Queue) -> float:
        ids = list(islice(queue.ids, self._rows))
        started = time.monotonic()
        missing = await self._update(session, queue, ids)
        spent = time.monotonic() - started
        # Only now: a cancelled or failed UPDATE leaves the queue as it was.
        for _ in ids:
            queue.ids.popleft()
        queue.taken += len(ids)
        if spent > _SLOW:
            self._rows = max(_MIN_ROWS, self._rows // 2)
        elif spent < _FAST and len(ids) == self._rows:
            self._rows = min(_MAX_ROWS, self._rows * 2)
        self._postpone(queue, missing, started, tries=1)
        return spent

    async def _again(self, session: Session, now: float) -> float:
        """Try the rows that are due once more."""
        queue = self._late[0].queue
        due: list[_Late] = []
        count = 0
        while self._late and self._late[0].due <= now and self._late[0].queue is queue and count < self._rows:
            due.append(heapq.heappop(self._late))
            count += len(due[-1].ids)
        try:
            missing = set(await self._update(session, queue, [each for late in due for each in late.ids]))
        except BaseException:
            for late in due:
                heapq.heappush(self._late, late)
            raise
        for late in due:
            left = [each for each in late.ids if each in missing]
            if left and now - late.since > _GIVE_UP:
                self._abandon(queue, len(left))
            else:
                self._postpone(queue, left, late.since, late.tries + 1)
        return time.monotonic() - now

    def _postpone(self, queue: _Queue, ids: list[bytes], since: float, tries: int) -> None:
        if not ids:
            return
        if sum(len(late.ids) for late in self._late) + len(ids) > _MAX_LATE:
            self._abandon(queue, len(ids))
            return
        self._numbers += 1
        due = time.monotonic() + min(_LAST_RETRY, _FIRST_RETRY * 2**tries)
        heapq.heappush(self._late, _Late(due, self._numbers, since, tries, queue, ids))

    def _abandon(self, queue: _Queue, count: int) -> None:
        self._gave_up += count
        now = time.monotonic()
        if now - self._told > _GIVE_UP:
            log.warning(
                "write_back.given_up",
                table=queue.table,
                rows=self._gave_up,
                hint="their events are published; the rows are gone or stay locked. If the producer deletes them in "
                "the inserting transaction, set outbox.write_back = {}",
            )
            self._told, self._gave_up = now, 0

    async def _update(self, session: Session, queue: _Queue, ids: Sequence[bytes]) -> list[bytes]:
        """Mark the rows; returns the ids that have none to mark now."""
        assert queue.update is not None and queue.update_unlocked is not None
        wanted = {each[queue.prefix :].decode(): each for each in ids}
        array = "{" + ",".join(f'"{each.translate(_QUOTED)}"' for each in wanted) + "}"
        try:
            with translated():
                cursor = await session.execute(queue.update, (array,))
        except SourceUnavailable:
            if session.closed:
                raise
            # Somebody holds a row (lock_timeout), or waits for one of ours (deadlock): mark the others.
            with translated():
                cursor = await session.execute(queue.update_unlocked, (array,))
        self.rows += max(0, cursor.rowcount)
        if cursor.rowcount == len(wanted):
            return []
        for (found,) in await cursor.fetchall():
            wanted.pop(found, None)
        return list(wanted.values())


async def _check(session: Session, outbox: Outbox, columns: Mapping[str, str]) -> None:
    unknown = [name for name in outbox.write_back if name not in columns]
    if unknown:
        raise ContractError(
            f"{outbox.table} has no column {', '.join(unknown)} to write back (it has {', '.join(columns)})",
            hint="correct outbox.write_back, or set it to {} if nobody reads such a column",
        )
    for name, value in outbox.write_back.items():
        if value in ("now()", "NULL"):
            continue
        query = sql.SQL("SELECT CAST({} AS {})").format(
            _value(value),
            sql.SQL(columns[name]),
        )
        try:
            with translated():
                await session.execute(query)
        except SetupError as exc:
            raise ContractError(
                f"{outbox.table}: {value!r} is no value for {name}, which is {columns[name]}: {exc}",
                hint="correct outbox.write_back",
            ) from exc


def _value(value: bool | str) -> sql.Composable:
    if value == "now()":
        return sql.SQL("now()")
    return sql.SQL("NULL") if value == "NULL" else sql.Literal(value)
