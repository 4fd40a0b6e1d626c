"""Where a run happens: Postgres and a broker for the whole run, and for each round a database of its own.

A fresh database, with a slot per tool that is made before the rows, gives every tool the same rows to read.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from relay.bench.broker import BROKERS, Broker
from relay.bench.meter import cpu, tree_cpu
from relay.bench.plan import KEYS, PAYLOAD_BYTES, Plan
from relay.bench.process import BenchError, until
from relay.bench.result import Cpu
from relay.config import Config
from relay.embedded import PostgresServer
from relay.setup import setup

Connection = psycopg.AsyncConnection[tuple[Any, ...]]
Say = Callable[[str], None]

# As in the measurements of other tools that ours are compared with.
_SETTINGS: dict[str, str | int] = {"shared_buffers": "512MB", "max_wal_size": "8GB"}

# "t" is when the row was written, for latencies. All parts have a fixed width, so every payload has the same size.
_LINES = '[{"sku": "A-100", "count": 2}, {"sku": "B-7", "count": 1}]'
_HEAD = f'{{"t": %s, "item": "%s", "state": "created", "lines": {_LINES}, "note": "'
_NOTE = "x" * (PAYLOAD_BYTES - len(_HEAD) - len('"}') + len("%s%s") - 16 - 9)
_FUNCTIONS = f"""
CREATE FUNCTION bench_payload(n bigint) RETURNS jsonb LANGUAGE sql VOLATILE AS $$
    SELECT format('{_HEAD}{_NOTE}"}}', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
                  lpad(n::text, 9, '0'))::jsonb
$$;
CREATE PROCEDURE bench_load(total bigint, per_transaction bigint) LANGUAGE plpgsql AS $$
BEGIN
    FOR start_at IN 1..total BY per_transaction LOOP
        INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
        SELECT 'order', 'key-' || (n % {KEYS}), 'created', bench_payload(n)
        FROM generate_series(start_at, least(start_at + per_transaction - 1, total)) AS n;
        COMMIT;
    END LOOP;
END $$;
"""
PGBENCH = f"""\\set n random(1, 999999999)
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
VALUES ('order', 'key-' || (:n % {KEYS})::text, 'created', bench_payload(:n));
"""


@dataclass(frozen=True, slots=True)
class Arena:
    """Servers for one run."""

    broker: Broker
    dsn: str  # of a database to create others from
    postgres_pid: int | None  # None: not ours, so its CPU is not visible
    bindir: Path | None
    postgres_version: str

    @contextlib.asynccontextmanager
    async def round(self) -> AsyncIterator[Round]:
        """A fresh database and a fresh destination, both gone afterwards."""
        name = f"relay_bench_{secrets.token_hex(4)}"
        async with await _connect(self.dsn) as admin:
            await admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            try:
                dsn = make_conninfo(self.dsn, dbname=name)
                async with await _connect(dsn) as session:
                    await self.broker.create(name)
                    yield Round(self, name, dsn, session)
            finally:
                await self.broker.drop(name)
                await _drop(admin, name)


@dataclass(frozen=True, slots=True)
class Round:
    """One database, and a destination of the same name in the broker."""

    arena: Arena
    name: str
    dsn: str
    session: Connection

    @property
    def broker(self) -> Broker:
        return self.arena.broker

    async def stored(self) -> int:
        return await self.broker.stored(self.name)

    async def value(self, query: LiteralString, *values: object) -> Any:
        row = await (await self.session.execute(query, values)).fetchone()
        return row[0] if row else None

    async def set_up(self, config: Config) -> None:
        await setup(config)
        await self.session.execute(_FUNCTIONS.encode())

    async def load(self, rows: int, per_transaction: int) -> None:
        """Fill the table, and leave Postgres nothing to do that a measurement would see."""
        await self.session.execute("SET synchronous_commit = off")
        await self.session.execute(f"CALL bench_load({rows}, {per_transaction or rows})".encode())
        await self.session.execute("RESET synchronous_commit")
        await self.session.execute("VACUUM ANALYZE outbox_events")
        await self.session.execute("CHECKPOINT")
        size = await self.value("SELECT max(octet_length(payload::text)) FROM outbox_events")
        if size != PAYLOAD_BYTES:
            raise BenchError(f"the payloads have {size} bytes instead of {PAYLOAD_BYTES}")

    async def walsender(self, slot: str) -> int | None:
        """The process that serves the slot."""
        pid = await self.value("SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", slot)
        return int(pid) if pid is not None else None

    async def costs(self, tool: int | None, slot: str) -> Cpu:
        """What everybody has used so far. A walsender lives as long as its client, so its own start is its zero."""
        postgres, broker = self.arena.postgres_pid, self.broker.pid
        walsender = await self.walsender(slot)
        return Cpu(
            tool=cpu(tool) if tool is not None else 0.0,
            walsender=cpu(walsender) if walsender is not None and postgres is not None else None,
            postgres=tree_cpu(postgres) if postgres is not None else None,
            broker=cpu(broker) if broker is not None else None,
        )


@contextlib.asynccontextmanager
async def open_arena(plan: Plan, say: Say) -> AsyncIterator[Arena]:
    """Start what the user did not give."""
    with contextlib.ExitStack() as stack:
        pid, bindir, dsn = None, None, plan.dsn
        if dsn is None:
            say("starting PostgreSQL 18")
            server = stack.enter_context(PostgresServer("18", settings=_SETTINGS))
            pid, bindir, dsn = server.pid, server.bindir, server.dsn()
        async with await _connect(dsn) as session:
            row = await (await session.execute("SHOW server_version")).fetchone()
        async with BROKERS[plan.sink](plan, say) as broker:
            yield Arena(broker, dsn, pid, bindir, row[0] if row else "")


async def _connect(dsn: str) -> Connection:
    try:
        return await psycopg.AsyncConnection.connect(dsn, autocommit=True, application_name="relay bench")
    except psycopg.OperationalError as exc:
        raise BenchError(f"PostgreSQL cannot be reached: {exc}", hint="see --dsn") from exc


async def _drop(admin: Connection, name: str) -> None:
    """A database with a slot cannot be dropped, nor a slot in use."""

    async def dropped() -> bool:
        await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        query = (
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s AND NOT active"
        )
        with contextlib.suppress(psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
            await admin.execute(query, (name,))
        left = await admin.execute("SELECT FROM pg_replication_slots WHERE database = %s", (name,))
        return await left.fetchone() is None

    await until(dropped, 20.0, f"the slots of database {name} could not be dropped")
    await admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
