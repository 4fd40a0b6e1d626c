"""PostgreSQL for tests: servers that a session shares, a database for each test, and servers that a test may break."""

from __future__ import annotations

import contextlib
import secrets
import select
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, LiteralString
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from relay.embedded import PostgresServer
from relay.embedded.process import wait_until
from tests.fix_services import container, given, in_docker, loudly

_SETTINGS = "-c wal_level=logical -c max_replication_slots=20 -c max_wal_senders=20 -c fsync=off"
# The official images have no wal2json: the one for 15 is built from docker/ and must exist.
_IMAGES = {"18": "postgres:18", "16": "postgres:16", "15": "pg-outbox-relay-postgres:15"}


@dataclass(frozen=True, slots=True)
class Postgres:
    """A running server, by the DSN of its superuser."""

    version: str
    superuser_dsn: str

    def dsn(self, dbname: str = "postgres", user: str | None = None) -> str:
        parts = urlsplit(self.superuser_dsn)
        address = parts.netloc if user is None else f"{user}@{parts.netloc.rpartition('@')[2]}"
        return urlunsplit(parts._replace(netloc=address, path=f"/{dbname}"))


class KeptSession:
    """One session for many questions, in autocommit mode: a test that waits asks often, and connecting is dear."""

    def __init__(self) -> None:
        self._dsn = ""
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None

    def at(self, dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
        """The session; another one when the server has ended it, or is another."""
        if self._connection is None or self._dsn != dsn or _ended(self._connection):
            self.close()
            self._dsn, self._connection = dsn, psycopg.connect(dsn, autocommit=True)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    __del__ = close


def _ended(connection: psycopg.Connection[tuple[Any, ...]]) -> bool:
    """Between two questions a server says nothing, but when it ends the session."""
    if connection.closed:
        return True
    readable, _, _ = select.select([connection.fileno()], [], [], 0)
    return bool(readable)


@dataclass(frozen=True, slots=True)
class Database:
    """A fresh database on a shared server; gone after the test, together with its slots."""

    server: Postgres
    name: str
    session: KeptSession = field(default_factory=KeptSession)

    @property
    def dsn(self) -> str:
        return self.server.dsn(self.name)

    def dsn_for(self, user: str) -> str:
        return self.server.dsn(self.name, user)

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection in autocommit mode; use it as a context manager."""
        return psycopg.connect(self.dsn, autocommit=True)

    def execute(self, statement: str) -> None:
        """Run one or more statements, in a session of their own: they may change its settings."""
        with self.connect() as connection:
            connection.execute(statement.encode())

    def query(self, statement: LiteralString, *values: object) -> list[tuple[Any, ...]]:
        return self.session.at(self.dsn).execute(statement, values).fetchall()


def _answers(address: str) -> bool:
    with contextlib.suppress(psycopg.OperationalError):
        psycopg.connect(f"postgresql://postgres@{address}/postgres", connect_timeout=5).close()
        return True
    return False


@contextlib.contextmanager
def _server(version: str) -> Iterator[Postgres]:
    number = "" if version == "18" else version
    if dsn := given(f"POSTGRES{number}_DSN"):
        yield Postgres(version, dsn)
    elif in_docker():
        image = given(f"POSTGRES{number}_IMAGE") or _IMAGES[version]
        environment = {"POSTGRES_HOST_AUTH_METHOD": "trust"}
        command = f"postgres {_SETTINGS}"
        with container(image, 5432, _answers, command=command, environment=environment) as address:
            yield Postgres(version, f"postgresql://postgres@{address}/postgres")
    else:
        with loudly(), PostgresServer(version, durable=False) as server:
            yield Postgres(version, server.dsn())


@contextlib.contextmanager
def _database(server: Postgres) -> Iterator[Database]:
    database = Database(server, f"t{secrets.token_hex(4)}")
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {database.name}".encode())
    try:
        yield database
    finally:
        database.session.close()
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            _drop(admin, database.name)


def _drop(admin: psycopg.Connection[tuple[Any, ...]], name: str) -> None:
    """A slot that is in use, and a database that has a slot, cannot be dropped: end the walsenders first."""

    def slots_gone() -> bool:
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        with contextlib.suppress(psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
            of_it = "FROM pg_replication_slots WHERE database = %s AND NOT active"
            admin.execute(f"SELECT pg_drop_replication_slot(slot_name) {of_it}".encode(), (name,))
        left = admin.execute("SELECT FROM pg_replication_slots WHERE database = %s", (name,))
        return left.fetchone() is None

    if not wait_until(slots_gone, 90.0, 0.05):
        pytest.fail(f"the slots of database {name} cannot be dropped: somebody keeps using them")
    admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """PostgreSQL 18, shared."""
    with _server("18") as server:
        yield server


@pytest.fixture(scope="session")
def postgres16() -> Iterator[Postgres]:
    """PostgreSQL 16, shared."""
    with _server("16") as server:
        yield server


@pytest.fixture(scope="session")
def postgres15() -> Iterator[Postgres]:
    """PostgreSQL 15 with wal2json, shared."""
    with _server("15") as server:
        yield server


@pytest.fixture
def database(postgres: Postgres) -> Iterator[Database]:
    with _database(postgres) as fresh:
        yield fresh


@pytest.fixture
def database16(postgres16: Postgres) -> Iterator[Database]:
    with _database(postgres16) as fresh:
        yield fresh


@pytest.fixture
def database15(postgres15: Postgres) -> Iterator[Database]:
    with _database(postgres15) as fresh:
        yield fresh


@pytest.fixture
def start_postgres() -> Iterator[Callable[..., PostgresServer]]:
    """Start servers with settings of the test's own (arguments of PostgresServer); closed after the test."""
    with ExitStack() as stack:

        def start(version: str = "18", **options: Any) -> PostgresServer:
            with loudly():
                return stack.enter_context(PostgresServer(version, **{"durable": False, **options}))

        yield start


@pytest.fixture
def own_postgres(start_postgres: Callable[..., PostgresServer]) -> PostgresServer:
    """A PostgreSQL 18 that the test may stop, kill, freeze."""
    return start_postgres()
