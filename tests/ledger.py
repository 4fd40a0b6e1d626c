"""An independent check of what a relay did.

`Ledger` writes events in transactions and keeps its own journal of what was committed; afterwards it compares that with
what the broker holds. It does not look into the relay's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, NamedTuple

import psycopg

from tests.relays import RelayProcess
from tests.sinks import Stored


class Entry(NamedTuple):
    """A committed event as the writer knows it."""

    id: str
    key: str
    version: int  # grows by one per commit of the key: the aggregate's row is locked until then


class Findings(NamedTuple):
    """What the broker has, against the journal."""

    lost: list[Entry]
    phantom: list[str]
    duplicates: list[str]
    disorder: list[str]


_AGGREGATES = "CREATE TABLE IF NOT EXISTS aggregates (id text PRIMARY KEY, version bigint NOT NULL DEFAULT 0)"
_NEXT = "UPDATE aggregates SET version = version + %s WHERE id = %s RETURNING version"
_INSERT = (
    "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, topic, payload)"
    " SELECT 'order', %s, 'changed', %s, jsonb_build_object('version', v, 'pad', repeat('x', 60))"
    " FROM generate_series(%s::bigint, %s::bigint) v ORDER BY v RETURNING id::text, (payload->>'version')::bigint"
)


class Ledger:
    """Writers that lock their aggregate, and the journal of what they committed. `dsn` may change while it runs."""

    def __init__(self, dsn: str, topic: str, *, keys: int = 8) -> None:
        self.dsn = dsn
        self.topic = topic
        self.keys = [f"k{number}" for number in range(keys)]
        self.journal: list[Entry] = []
        self.rolled_back: set[str] = set()
        self._uncertain: list[Entry] = []
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(_AGGREGATES)
            connection.cursor().executemany(
                "INSERT INTO aggregates (id) VALUES (%s) ON CONFLICT DO NOTHING", [(key,) for key in self.keys]
            )

    def write(self, transactions: int, events: int = 1, *, seed: int = 1) -> None:
        """So many transactions, here and now, in one session; every seventh rolls back."""
        with psycopg.connect(self.dsn) as connection:
            chance = random.Random(seed)
            for number in range(transactions):
                self._transaction(connection, chance.choice(self.keys), events, rollback=number % 7 == 6)

    @contextlib.contextmanager
    def writing(self, writers: int = 3, events: int = 3, *, pause: float = 0.002) -> Iterator[None]:
        """Writers in the background until the block ends; they connect again whatever happens to Postgres."""
        self._over.clear()
        self._threads = [
            threading.Thread(target=self._keep_writing, args=(seed, events, pause)) for seed in range(writers)
        ]
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(30)

    def _keep_writing(self, seed: int, events: int, pause: float) -> None:
        chance = random.Random(seed)
        while not self._over.is_set():
            try:
                with psycopg.connect(self.dsn, connect_timeout=5) as connection:
                    for number in itertools.count():
                        if self._over.wait(pause):
                            return
                        key, many = chance.choice(self.keys), chance.randint(1, events)
                        self._transaction(connection, key, many, rollback=number % 7 == 6)
            except psycopg.Error:
                self._over.wait(0.05)

    def _transaction(
        self, connection: psycopg.Connection[tuple[Any, ...]], key: str, events: int, *, rollback: bool
    ) -> None:
        row = connection.execute(_NEXT, (events, key)).fetchone()
        assert row is not None
        last = int(row[0])
        rows = connection.execute(_INSERT, (key, self.topic, last - events + 1, last)).fetchall()
        entries = [Entry(event_id, key, version) for event_id, version in rows]
        if rollback:
            connection.rollback()
            self.rolled_back.update(entry.id for entry in entries)
            return
        try:
            connection.commit()
        except psycopg.Error:
            self._uncertain += entries  # Postgres died under the commit: the table will tell
            raise
        self.journal += entries

    def settle(self) -> None:
        """Ask the table about commits that nobody answered."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            found = connection.execute(
                "SELECT id::text FROM outbox_events WHERE id = ANY(%s::uuid[])",
                ([entry.id for entry in self._uncertain],),
            ).fetchall()
        known = {row[0] for row in found}
        self.journal += [entry for entry in self._uncertain if entry.id in known]
        self._uncertain = []

    @property
    def ids(self) -> set[str]:
        return {entry.id for entry in self.journal}

    def compare(self, stored: Iterable[Stored]) -> Findings:
        """`stored` in the order of the broker (for Kafka: of each partition; a key has one)."""
        self.settle()
        first: dict[str, Stored] = {}
        duplicates: list[str] = []
        for item in stored:
            event_id = item.id.decode()
            if event_id in first:
                duplicates.append(event_id)
                assert item.body == first[event_id].body, f"{event_id} came again with another body"
            else:
                first[event_id] = item
        known = {entry.id: entry for entry in self.journal}
        order: dict[str, list[int]] = defaultdict(list)
        for event_id in first:
            if event_id in known:
                order[known[event_id].key].append(known[event_id].version)
        disorder = [key for key, versions in order.items() if versions != sorted(versions)]
        lost = [entry for entry in self.journal if entry.id not in first]
        return Findings(lost, [event_id for event_id in first if event_id not in known], duplicates, disorder)

    def check(self, stored: Iterable[Stored], *, duplicates: int = 0) -> Findings:
        """Nothing lost, nothing invented, order kept, and at most so many duplicates."""
        findings = self.compare(stored)
        assert not findings.lost, f"lost {len(findings.lost)} of {len(self.journal)}: {findings.lost[:3]}"
        invented = [event_id for event_id in findings.phantom if event_id in self.rolled_back]
        assert not findings.phantom, f"phantom {len(findings.phantom)}, rolled back {len(invented)}"
        assert not findings.disorder, f"order broken for {findings.disorder}"
        assert len(findings.duplicates) <= duplicates, f"{len(findings.duplicates)} duplicates"
        return findings

    async def arrived(
        self, read: Callable[[], Awaitable[list[Stored]]], relay: RelayProcess | None = None, timeout: float = 90.0
    ) -> list[Stored]:
        """Wait until the broker holds all that the journal has; what it holds then."""
        self.settle()
        deadline, stored = time.monotonic() + timeout, await read()
        while not self.ids <= {item.id.decode() for item in stored}:
            missing = len(self.ids - {item.id.decode() for item in stored})
            output = relay.output if relay else ""
            assert time.monotonic() < deadline, f"{missing} of {len(self.journal)} not there in time\n{output}"
            assert relay is None or relay.running, f"the relay ended; {missing} missing\n{output}"
            await asyncio.sleep(0.1)
            stored = await read()
        return stored
