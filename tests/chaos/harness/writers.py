"""Writers, and their journal of what they committed.

A writer locks its aggregates before it inserts, so that the order of commits of a key is the order of its numbers. The
number of a key grows by one per committed event and never has a gap: what is rolled back gives its numbers back. The
body of an event follows from its id, key and number alone, so that it can be checked without being kept.

A COMMIT that nobody answered is neither committed nor lost here: in the end the table tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, LiteralString, NamedTuple

import psycopg
from psycopg import sql

Connection = psycopg.AsyncConnection[tuple[Any, ...]]

_CREATE: LiteralString = (
    "CREATE TABLE IF NOT EXISTS aggregates (id text PRIMARY KEY, version bigint NOT NULL DEFAULT 0)"
)
_LOCK: LiteralString = "SELECT id, version FROM aggregates WHERE id = ANY(%s) ORDER BY id FOR UPDATE"
_ADVANCE: LiteralString = "UPDATE aggregates SET version = %s WHERE id = %s"
_COLUMNS: LiteralString = "id, aggregate_type, aggregate_id, event_type, topic, payload"
_ONE: LiteralString = f"INSERT INTO outbox_events ({_COLUMNS}) VALUES (%s, 'order', %s, 'changed', %s, %s)"
_MANY: LiteralString = (
    f"INSERT INTO outbox_events ({_COLUMNS}) SELECT id, 'order', key, 'changed', topic, body"
    " FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::jsonb[]) WITH ORDINALITY AS t (id, key, topic, body, n)"
    " ORDER BY n"
)
_COPY: LiteralString = f"COPY outbox_events ({_COLUMNS}) FROM STDIN"
_TABLE: LiteralString = "SELECT id, aggregate_id, (payload->>'n')::bigint FROM outbox_events"


class Entry(NamedTuple):
    """An event as its writer knows it."""

    id: uuid.UUID
    key: str
    number: int


def body_of(entry: Entry) -> dict[str, Any]:
    """The payload: everything in it follows from the entry."""
    return {"n": entry.number, "key": entry.key, "pad": entry.id.hex * (entry.id.bytes[-1] % 6), "id": str(entry.id)}


def stream_of(key: str) -> str:
    """A key has one stream (topic) of two for ever: by the parity of its last digit."""
    return "chaos_b" if key[-1] in "13579" else "chaos_a"


class Journal:
    """What the writers know: committed, rolled back, and nobody knows."""

    def __init__(self) -> None:
        self.committed: set[uuid.UUID] = set()
        self.rolled_back: set[uuid.UUID] = set()
        self.unanswered: set[uuid.UUID] = set()
        self.transactions = 0
        self.times: list[float] = []  # of commits, at most one per 10 ms
        self.per_second: dict[int, int] = {}
        self.probes: list[Callable[[uuid.UUID, float], None]] = []

    def commit(self, entries: list[Entry]) -> None:
        now = time.monotonic()
        self.transactions += 1
        self.committed.update(entry.id for entry in entries)
        self.per_second[int(now)] = self.per_second.get(int(now), 0) + len(entries)
        if not self.times or now - self.times[-1] > 0.01:
            self.times.append(now)
        if entries and self.probes:
            probes, self.probes = self.probes, []
            for probe in probes:
                probe(entries[-1].id, now)

    @contextlib.contextmanager
    def committing(self, entries: list[Entry]) -> Iterator[None]:
        """Around a COMMIT."""
        try:
            yield
        except (psycopg.Error, asyncio.CancelledError):
            self.unanswered.update(entry.id for entry in entries)
            raise
        self.commit(entries)


class Pace:
    """So many events a second over all writers, and none while the relay is too far behind."""

    def __init__(self, rate: float, total: int, held_back: Callable[[], bool]) -> None:
        self._rate, self._total, self._held_back = rate, total, held_back
        self._next = time.monotonic()
        self.written = 0
        self.over = asyncio.Event()

    async def turn(self, events: int) -> bool:
        """Wait for one's turn to write so many; False when it is over."""
        while self._held_back() and not self.over.is_set():
            await asyncio.sleep(0.1)
        now = time.monotonic()
        self._next = max(self._next, now - 1.0) + events / self._rate  # an outage is not made up for by a burst
        if self._next > now:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), self._next - now)
        return not self.over.is_set()

    def wrote(self, events: int) -> None:
        self.written += events

    @property
    def done(self) -> bool:
        return self.written >= self._total


async def prepare(dsn: str, keys: list[str]) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(_CREATE)
        await connection.cursor().executemany("INSERT INTO aggregates (id) VALUES (%s)", [(key,) for key in keys])


async def table(dsn: str) -> list[Entry]:
    """What was really committed."""
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        cursor = await connection.execute(_TABLE)
        return [Entry(*row) for row in await cursor.fetchall()]


async def dead_letters(dsn: str) -> int:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        row = await (await connection.execute("SELECT count(*) FROM outbox_dead_letters")).fetchone()
        return int(row[0]) if row else 0


class Writer:
    """One session that writes until the pace says that it is over, and connects again whatever happens."""

    def __init__(self, dsn: str, keys: list[str], journal: Journal, pace: Pace, seed: int) -> None:
        self._dsn, self._keys, self._journal, self._pace = dsn, keys, journal, pace
        self._chance = random.Random(seed)

    async def run(self) -> None:
        while not self._pace.over.is_set():
            try:
                async with await psycopg.AsyncConnection.connect(self._dsn, connect_timeout=3) as connection:
                    while await self._pace.turn(events := self._chance.randint(1, 20)):
                        self._pace.wrote(await self._transaction(connection, events))
            except psycopg.Error:
                await asyncio.sleep(0.1)

    async def _transaction(self, connection: Connection, events: int) -> int:
        chance, journal = self._chance, self._journal
        keys = chance.sample(self._keys, 2 if chance.random() < 0.3 else 1)
        versions = {row[0]: row[1] for row in await (await connection.execute(_LOCK, (keys,))).fetchall()}
        entries = await self._insert(connection, versions, events)
        gone: list[Entry] = []
        if chance.random() < 0.25:  # a savepoint; half of them are rolled back
            await connection.execute("SAVEPOINT one")
            before = dict(versions)
            more = await self._insert(connection, versions, chance.randint(1, 5))
            if chance.random() < 0.5:
                await connection.execute("ROLLBACK TO SAVEPOINT one")
                versions, gone = before, more
                entries += await self._insert(connection, versions, chance.randint(0, 3))
            else:
                await connection.execute("RELEASE SAVEPOINT one")
                entries += more
        for key, version in versions.items():
            await connection.execute(_ADVANCE, (version, key))
        journal.rolled_back.update(entry.id for entry in gone)
        if chance.random() < 0.12:
            journal.rolled_back.update(entry.id for entry in entries)
            await connection.rollback()
            return 0
        with journal.committing(entries):
            await connection.commit()
        return len(entries)

    async def _insert(self, connection: Connection, versions: dict[str, int], events: int) -> list[Entry]:
        """So many events of these keys, in turn; `versions` grows."""
        chance = self._chance
        entries = []
        for number in range(events):
            key = list(versions)[number % len(versions)]
            versions[key] += 1
            entries.append(Entry(uuid.UUID(int=chance.getrandbits(128), version=4), key, versions[key]))
        await insert(connection, entries, chance.choice((_COPY, _MANY, _MANY, _ONE)))
        return entries


async def insert(connection: Connection, entries: list[Entry], how: LiteralString = _MANY) -> None:
    rows = [(entry.id, entry.key, f"{stream_of(entry.key)}.events", json.dumps(body_of(entry))) for entry in entries]
    if not rows:
        return
    if how == _COPY:
        async with connection.cursor().copy(_COPY) as copy:
            for event_id, key, where, body in rows:
                await copy.write_row((event_id, "order", key, "changed", where, body))
    elif how == _ONE:
        for row in rows:
            await connection.execute(_ONE, row)
    else:
        await connection.execute(_MANY, tuple(map(list, zip(*rows, strict=True))))


async def slow_transaction(dsn: str, journal: Journal, key: str, seconds: float, chance: random.Random) -> None:
    """Events of a key of its own, in a transaction that stays open for a while; fails when Postgres does."""
    entries = [Entry(uuid.UUID(int=chance.getrandbits(128), version=4), key, number) for number in range(1, 6)]
    async with await psycopg.AsyncConnection.connect(dsn, connect_timeout=3) as connection:
        await insert(connection, entries[:3])
        await asyncio.sleep(seconds)
        await insert(connection, entries[3:])
        with journal.committing(entries):
            await connection.commit()


async def prepared_transaction(dsn: str, journal: Journal, key: str, seconds: float, chance: random.Random) -> None:
    """The same in two phases: it outlives the session and the server, and somebody must end it."""
    entries = [Entry(uuid.UUID(int=chance.getrandbits(128), version=4), key, number) for number in range(1, 6)]
    async with await psycopg.AsyncConnection.connect(dsn, connect_timeout=3) as connection:
        await insert(connection, entries)
        with journal.committing([]):
            await connection.execute(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(key)))
    await asyncio.sleep(seconds)
    await end_prepared(dsn)
    journal.unanswered.update(entry.id for entry in entries)


async def end_prepared(dsn: str) -> None:
    """Commit every prepared transaction there is; tries for a while, because Postgres may be down."""
    for _ in range(100):
        try:
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, connect_timeout=3) as connection:
                for (gid,) in await (await connection.execute("SELECT gid FROM pg_prepared_xacts")).fetchall():
                    with contextlib.suppress(
                        psycopg.errors.UndefinedObject, psycopg.errors.ObjectNotInPrerequisiteState
                    ):
                        await connection.execute(sql.SQL("COMMIT PREPARED {}").format(sql.Literal(gid)))
                return
        except psycopg.Error:
            await asyncio.sleep(0.2)
