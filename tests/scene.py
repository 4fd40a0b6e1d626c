"""A database, a JetStream stream, a ledger, and the configuration that joins them; and copies of a whole server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import psycopg

from relay.embedded import PostgresServer
from tests.fix_postgres import KeptSession
from tests.ledger import Ledger
from tests.relays import RelayProcess, eventually, jetstream, prepare, settings, write_config
from tests.sinks import Stored, read_jetstream


class Scene:
    """Everything that a test of the whole relay needs; `sections` are the configuration until `configure`."""

    def __init__(self, dsn: str, url: str, name: str, folder: Path, **sections: Any) -> None:
        self.dsn, self.url, self.name, self.folder = dsn, url, name, folder
        source = {"slot": name, **sections.pop("source", {})}
        self.sections = settings(dsn, jetstream(url, name), source=source, **sections)
        self.path = folder / "relay.toml"
        self.ledger: Ledger
        self._session = KeptSession()

    async def set_up(self) -> Scene:
        self.path = await prepare(self.folder, self.sections)
        self.ledger = Ledger(self.dsn, f"{self.name}.orders")
        return self

    def configure(self, **sections: dict[str, Any]) -> None:
        """Change the configuration for the next start."""
        for name, values in sections.items():
            self.sections[name] = {**self.sections.get(name, {}), **values}
        write_config(self.folder, self.sections)

    async def read(self) -> list[Stored]:
        return await read_jetstream(self.url, self.name)

    async def settled(self, relay: RelayProcess, *, duplicates: int = 0) -> list[Stored]:
        stored = await self.ledger.arrived(self.read, relay)
        self.ledger.check(stored, duplicates=duplicates)
        return stored

    async def complete(self, relay: RelayProcess) -> None:
        """As `settled`, but for order: rows that the stream lacked come behind later ones of their key."""
        findings = self.ledger.compare(await self.ledger.arrived(self.read, relay))
        assert (findings.lost, findings.phantom) == ([], [])

    async def covered(self) -> None:
        """Wait until the checkpoint's snapshot sees every row of the table."""
        await eventually(
            lambda: (
                not self.query(
                    "SELECT EXISTS (SELECT FROM outbox_events, outbox_relay_checkpoint"
                    " WHERE NOT pg_visible_in_snapshot(xid, snap))"
                )[0]
            ),
            "the checkpoint covers the table",
        )

    def query(self, statement: str, *values: object) -> tuple[Any, ...]:
        row = self._session.at(self.dsn).execute(statement.encode(), values).fetchone()
        assert row is not None
        return row

    def execute(self, statement: str, *values: object) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(statement.encode(), values or None)

    def drop_slot(self) -> None:
        self.query("SELECT pg_drop_replication_slot(%s)", self.name)

    @property
    def slot(self) -> dict[str, Any] | None:
        statement = "SELECT to_jsonb(s) FROM pg_replication_slots s WHERE slot_name = %s"
        row = self._session.at(self.dsn).execute(statement, (self.name,)).fetchone()
        return None if row is None else row[0]


def copy_of(primary: PostgresServer, *options: str, **settings: str) -> PostgresServer:
    """A base backup with a port of its own, not started: what `pg_basebackup` makes (with `-R`: a standby)."""
    copy = PostgresServer(primary.version, durable=False)
    account = copy._account
    if account.uid is not None and account.gid is not None:
        os.chown(copy.folder, account.uid, account.gid)
    command = [str(copy.bindir / "pg_basebackup"), "-d", primary.dsn(), "-D", str(copy.data), "-X", "stream"]
    subprocess.run(
        [*command, "-c", "fast", "--no-sync", *options],
        check=True,
        capture_output=True,
        cwd="/",
        user=account.uid,
        group=account.gid,
        extra_groups=account.groups,
    )
    with (copy.data / "postgresql.conf").open("a") as conf:
        for name in ("port", "unix_socket_directories"):
            conf.write(f"{name} = '{copy._settings[name]}'\n")
        for name, value in settings.items():
            conf.write(f"{name} = '{value}'\n")
    return copy
