"""Where a run happens: Postgres and a broker for the whole run, and for each round a database of its own.

A fresh database, with everything that a tool needs made before the rows, gives every tool the same rows to read.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from relay.bench.broker import BROKERS, Broker, topic
from relay.bench.load import FUNCTIONS
from relay.bench.meter import cpu, tree_cpu
from relay.bench.modes import Kind, Sink
from relay.bench.plan import PAYLOAD_BYTES, Plan, Scenario
from relay.bench.process import BenchError, until
from relay.bench.result import Cpu, State
from relay.config import Config
from relay.embedded import PostgresServer
from relay.setup import setup

Connection = psycopg.AsyncConnection[tuple[Any, ...]]
Say = Callable[[str], None]

# As in the measurements of other tools that ours are compared with.
_SETTINGS: dict[str, str | int] = {"shared_buffers": "512MB", "max_wal_size": "8GB", "min_wal_size": "1GB"}
_SEGMENTS = 40  # of WAL, 16 MB each: what ten thousand rows a second fill in more than a minute


@dataclass(frozen=True, slots=True)
class Arena:
    """Servers for one run."""

    broker: Broker
    dsn: str  # of a database to create others from
    postgres_pid: int | None  # None: not ours, so its CPU is not visible
    bindir: Path | None
    postgres_version: str

    @contextlib.asynccontextmanager
    async def database(self, sink: Sink) -> AsyncIterator[Round]:
        """A fresh database with an empty outbox, gone afterwards."""
        name = f"relay_bench_{secrets.token_hex(4)}"
        async with await _connect(self.dsn) as admin:
            await admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            try:
                dsn = make_conninfo(self.dsn, dbname=name)
                await setup(Config.model_validate({"database": {"dsn": dsn}}))
                async with await _connect(dsn) as session:
                    await session.execute(FUNCTIONS.encode())
                    yield Round(self, name, dsn, session, sink)
            finally:
                await _drop(admin, name)


@dataclass(frozen=True, slots=True)
class Round:
    """One database, and a destination in the broker; those who share the database have a destination each."""

    arena: Arena
    name: str
    dsn: str
    session: Connection
    sink: Sink

    @property
    def broker(self) -> Broker:
        return self.arena.broker

    @property
    def topic(self) -> str:
        """Subject or topic of every event."""
        return topic(self.name)

    @contextlib.asynccontextmanager
    async def destination(self, number: int, sink: Sink, delay: float = 0.0) -> AsyncIterator[Round]:
        """The same database for one tool, with a destination of its own; `delay` holds the broker back."""
        name = f"{self.name}_{number}"
        async with contextlib.AsyncExitStack() as stack:
            broker = await stack.enter_async_context(self.broker.slow(delay)) if delay else self.broker
            await self.broker.create(name)
            try:
                yield replace(self, name=name, sink=sink, arena=replace(self.arena, broker=broker))
            finally:
                await self.broker.drop(name)

    async def stored(self) -> int:
        return await self.broker.stored(self.name)

    async def value(self, query: LiteralString, *values: object) -> Any:
        row = await (await self.session.execute(query, values)).fetchone()
        return row[0] if row else None

    async def load(self, scenario: Scenario, keys: int) -> float:
        """Fill the table, and leave Postgres nothing to do that a measurement would see. Returns WAL bytes per row."""
        before = await self.state()
        await self.session.execute("SET synchronous_commit = off")
        await self.insert(scenario.rows, scenario.per_transaction, keys, scenario.neighbours)
        await self.session.execute("RESET synchronous_commit")
        written = (await self.state()).lsn - before.lsn
        await self.session.execute("VACUUM ANALYZE outbox_events")
        await self.session.execute("CHECKPOINT")
        size = await self.value("SELECT octet_length(payload::text) FROM outbox_events LIMIT 1")
        if size != PAYLOAD_BYTES:
            raise BenchError(f"the payloads have {size} bytes instead of {PAYLOAD_BYTES}")
        return round(written / scenario.rows, 1)

    async def insert(self, rows: int, per_transaction: int, keys: int, neighbours: float = 0.0) -> None:
        await self.session.execute(f"CALL bench_load({rows}, {per_transaction or rows}, {keys}, {neighbours})".encode())

    async def walsender(self, slot: str) -> int | None:
        """The process that serves the slot."""
        pid = await self.value("SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", slot)
        return int(pid) if pid is not None else None

    async def state(self) -> State:
        """How much was written, and what the table has become."""
        row = await (
            await self.session.execute(
                """
                SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn, pg_table_size(c.oid), pg_indexes_size(c.oid),
                       pg_stat_get_dead_tuples(c.oid)
                FROM pg_class c WHERE c.oid = 'outbox_events'::regclass
                """
            )
        ).fetchone()
        assert row is not None
        return State(*(int(value) for value in row))

    async def retained(self, slot: str) -> int | None:
        """Bytes of WAL that Postgres keeps for the slot."""
        if not slot:
            return None
        found = await self.value(
            "SELECT pg_current_wal_lsn() - restart_lsn FROM pg_replication_slots WHERE slot_name = %s", slot
        )
        return int(found) if found is not None else None

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
async def open_arena(plan: Plan, kind: Kind, say: Say) -> AsyncIterator[Arena]:
    """Start what the user did not give."""
    with contextlib.ExitStack() as stack:
        pid, bindir, dsn = None, None, plan.dsn
        if dsn is None:
            say(f"starting PostgreSQL {plan.postgres}")
            server = stack.enter_context(PostgresServer(plan.postgres, settings=_SETTINGS))
            pid, bindir, dsn = server.pid, server.bindir, server.dsn()
        async with await _connect(dsn) as session:
            if pid is not None and not plan.quick:
                await _age(session)
            row = await (await session.execute("SHOW server_version")).fetchone()
        async with BROKERS[kind](plan, say) as broker:
            yield Arena(broker, dsn, pid, bindir, row[0] if row else "")


async def _connect(dsn: str) -> Connection:
    try:
        return await psycopg.AsyncConnection.connect(dsn, autocommit=True, application_name="relay bench")
    except psycopg.OperationalError as exc:
        raise BenchError(f"PostgreSQL cannot be reached: {exc}", hint="see --dsn") from exc


async def _age(session: Connection) -> None:
    """Segments of WAL to write over, as every server has after a while; a new one fills each with zeros beforehand.

    All commits wait for that.
    """
    for _ in range(_SEGMENTS):
        await session.execute("SELECT pg_logical_emit_message(false, 'relay bench', ''), pg_switch_wal()")
    await session.execute("CHECKPOINT")


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
