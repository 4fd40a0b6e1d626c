"""For consumers: process every event once, although the broker may deliver it more often.

The relay redelivers with the same event id (header `id`; `event_id` in the envelope). A consumer that writes to
Postgres remembers the ids in the same transaction as its own changes: either both are committed, or neither.

    inbox = Inbox("billing")
    async with connection.transaction():
        if await inbox.is_new(connection, event_id):
            ...                                   # your changes, on this connection
    await message.ack()                           # after the commit, for a duplicate as well

A consumer without a database may use `MemoryInbox`: it forgets on restart, and what is older than its capacity.
This module never commits, rolls back or opens anything: the transaction is the consumer's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import LiteralString

from psycopg import AsyncConnection, Connection, sql
from psycopg.rows import TupleRow

_CREATE: LiteralString = """
    CREATE TABLE IF NOT EXISTS {table} (
        consumer     text NOT NULL,
        event_id     text NOT NULL,
        processed_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (consumer, event_id)
    );
    CREATE INDEX IF NOT EXISTS {index} ON {table} (processed_at);
"""
# Two deliveries at once: the second waits for the first one's commit or rollback, and then knows.
_CLAIM: LiteralString = "INSERT INTO {table} (consumer, event_id) VALUES (%s, %s) ON CONFLICT DO NOTHING"
_PRUNE: LiteralString = """
    DELETE FROM {table} WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM {table} WHERE consumer = %s AND processed_at < now() - make_interval(secs => %s) LIMIT %s))
"""


class Inbox:
    """The ids that one consumer has processed, in a table of the consumer's own database.

    `consumer` tells several consumers apart that share the table. Keep ids for longer than anything can be
    redelivered: the broker's retention, or the longest replay that you would ask for.
    """

    def __init__(self, consumer: str, *, table: str = "public.processed_events") -> None:
        self._consumer = consumer
        parts = table.split(".")
        names: dict[str, sql.Composable] = {
            "table": sql.Identifier(*parts),
            "index": sql.Identifier(f"{parts[-1]}_processed_at_idx"),
        }
        self._create = sql.SQL(_CREATE).format(**names)
        self._claim = sql.SQL(_CLAIM).format(**names)
        self._prune = sql.SQL(_PRUNE).format(**names)

    @property
    def ddl(self) -> str:
        """The table, for your migrations."""
        return self._create.as_string(None)

    async def is_new(self, connection: AsyncConnection[TupleRow], event_id: str) -> bool:
        """True the first time. Call it inside the transaction that makes the event's changes."""
        cursor = await connection.execute(self._claim, (self._consumer, event_id))
        return cursor.rowcount == 1

    def is_new_sync(self, connection: Connection[TupleRow], event_id: str) -> bool:
        """The same, on a blocking connection."""
        return connection.execute(self._claim, (self._consumer, event_id)).rowcount == 1

    async def prune(self, connection: AsyncConnection[TupleRow], *, keep_seconds: float, batch: int = 10_000) -> int:
        """Forget ids that are older than `keep_seconds`, at most `batch` at once; returns how many."""
        cursor = await connection.execute(self._prune, (self._consumer, keep_seconds, batch))
        return cursor.rowcount


class MemoryInbox:
    """The newest `capacity` ids, in memory. Enough against redelivery within one run; nothing survives a restart."""

    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[str, None] = OrderedDict()

    def is_new(self, event_id: str) -> bool:
        """True the first time, as far as it is remembered. Call `forget` if processing then fails."""
        if event_id in self._seen:
            self._seen.move_to_end(event_id)
            return False
        self._seen[event_id] = None
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return True

    def forget(self, event_id: str) -> None:
        """The event was not processed after all: let its redelivery through."""
        self._seen.pop(event_id, None)

    def __len__(self) -> int:
        return len(self._seen)
