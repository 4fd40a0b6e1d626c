"""`relay status` from Postgres alone: before setup, while the relay is down, and while it holds its lock."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import closing
from io import StringIO
from pathlib import Path

import psycopg
import pytest
from rich.console import Console

from relay.config import Config
from relay.embedded import PostgresServer
from relay.errors import AuthError, SetupError, SourceUnavailable
from relay.setup import setup
from relay.status import render, status
from relay.takeover import takeover
from tests.fix_postgres import Database
from tests.scene import copy_of


@pytest.fixture(params=["database15", "database16", "database"])
def any_database(request: pytest.FixtureRequest) -> Database:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Database)
    return found


@pytest.fixture
def config(any_database: Database, prefix: str) -> Config:
    return Config.model_validate({"database": {"dsn": any_database.dsn}, "source": {"slot": prefix}})


def shown(found: dict[str, object]) -> str:
    out = StringIO()
    Console(file=out, width=120).print(render(found))
    return out.getvalue()


def printed(arguments: list[str]) -> str:
    done = subprocess.run([sys.executable, "-m", "relay", *arguments], capture_output=True, check=True, timeout=60)
    return done.stdout.decode()


INSERT = "INSERT INTO outbox_events (topic) VALUES ('t')"
CHECKPOINT = """
    INSERT INTO outbox_relay_checkpoint (relay, epoch, system_identifier, timeline, slot, lsn, snap, snap_lsn)
    VALUES ('outbox_relay', 3, '1', 1, 's', pg_current_wal_lsn(), pg_current_snapshot(), pg_current_wal_insert_lsn())
"""


async def test_nothing_was_set_up(config: Config, prefix: str) -> None:
    found = await status(config)
    assert found["state"] == "stopped"
    nothing = ("confirmed_lsn", "lag_bytes", "lag_seconds", "pending", "dead_letters", "checkpoint")
    assert [found[key] for key in nothing] == [None] * 6
    assert (found["slot"]["name"], found["slot"]["exists"], found["slot"]["wal_status"]) == (prefix, False, None)
    assert "stopped" in shown(found)


async def test_before_the_first_run_every_row_is_pending(any_database: Database, config: Config) -> None:
    await setup(config)
    any_database.execute(f"{INSERT}; {INSERT}")
    found = await status(config)
    assert (found["state"], found["pending"], found["dead_letters"]) == ("stopped", 2, 0)


async def test_pending_is_what_the_snapshot_did_not_see(any_database: Database, config: Config, prefix: str) -> None:
    await setup(config)
    any_database.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", prefix)
    any_database.execute(INSERT)
    with psycopg.connect(any_database.dsn) as open_transaction:
        open_transaction.execute(b"INSERT INTO outbox_events (topic) SELECT 't' FROM generate_series(1, 3)")
        any_database.execute(INSERT)
        any_database.execute(CHECKPOINT)  # sees two rows; the three commit later, with a lower xid than the second
        assert (await status(config))["pending"] == 0
    any_database.execute(INSERT)
    any_database.execute(
        "INSERT INTO outbox_dead_letters (relay, event_id, table_name, topic, position, reason, error_class, state)"
        " VALUES ('outbox_relay', '1', 't', 't', 'p', 'r', 'e', 'dead'), ('outbox_relay', '2', 't', 't', 'p', 'r', 'e',"
        " 'resolved'), ('other', '1', 't', 't', 'p', 'r', 'e', 'dead')"
    )
    found = await status(config)
    assert (found["state"], found["pending"], found["dead_letters"]) == ("stopped", 4, 1)
    assert found["lag_bytes"] > 0
    assert found["lag_seconds"] >= 0
    assert found["slot"]["wal_status"] == "reserved"
    assert found["slot"]["retained_bytes"] >= found["lag_bytes"]
    assert (found["checkpoint"]["epoch"], found["checkpoint"]["phase"]) == (3, "stream")
    assert prefix in shown(found)


async def test_the_lock_shows_who_is_alive(any_database: Database, config: Config) -> None:
    await setup(config)
    any_database.execute(CHECKPOINT)
    with any_database.connect() as relay:
        relay.execute("SELECT pg_try_advisory_lock(hashtextextended('outbox_relay:outbox_relay', 0))")
        relay.execute("UPDATE outbox_relay_checkpoint SET phase = 'poll'")
        assert (await status(config))["state"] == "polling"
        relay.execute("UPDATE outbox_relay_checkpoint SET phase = 'recover'")
        assert (await status(config))["state"] == "recovering"
    any_database.execute("SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory'")
    assert (await status(config))["state"] == "stopped"


async def test_streaming(any_database: Database, config: Config, prefix: str) -> None:
    await setup(config)
    any_database.execute(CHECKPOINT)
    any_database.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", prefix)
    options = "proto_version '1', publication_names 'outbox_relay'"
    with (
        any_database.connect() as relay,
        closing(psycopg.connect(any_database.dsn, replication="database", autocommit=True)) as walsender,
    ):
        walsender.pgconn.send_query(f"START_REPLICATION SLOT {prefix} LOGICAL 0/0 ({options})".encode())
        assert walsender.pgconn.get_result() is not None  # it has begun
        assert (await status(config))["state"] == "standby"
        relay.execute("SELECT pg_try_advisory_lock(hashtextextended('outbox_relay:outbox_relay', 0))")
        found = await status(config)
        assert (found["state"], found["slot"]["active"]) == ("streaming", True)


async def test_a_table_without_xid_cannot_tell(database: Database) -> None:
    database.execute("CREATE TABLE plain (id uuid PRIMARY KEY, payload jsonb)")
    names = (
        "seq",
        "xid",
        "aggregate_type",
        "aggregate_id",
        "event_type",
        "topic",
        "partition_key",
        "headers",
        "created_at",
    )
    outbox = [{"table": "plain", "columns": dict.fromkeys(names, "")}]
    found = await status(Config.model_validate({"database": {"dsn": database.dsn}, "outbox": outbox}))
    assert (found["pending"], found["lag_seconds"]) == (None, None)


async def test_postgres_cannot_be_reached(unused_tcp_port: int) -> None:
    dsn = f"postgresql://postgres@127.0.0.1:{unused_tcp_port}/postgres"
    with pytest.raises(SourceUnavailable):
        await status(Config.model_validate({"database": {"dsn": dsn}}))


@pytest.mark.parametrize(("mode", "says"), [("poll", 'none: source.mode is "poll"'), ("auto", "does not exist")])
async def test_a_relay_that_polls_has_no_slot(database: Database, tmp_path: Path, mode: str, says: str) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(f'[database]\ndsn = "{database.dsn}"\n[source]\nmode = "{mode}"\n')
    [line] = [line for line in printed(["status", "-c", str(path)]).splitlines() if line.startswith("slot")]
    assert says in line
    assert ("the first `relay run` makes it" in line) == (mode == "auto")


async def test_a_role_that_may_not_look_is_told_so(any_database: Database, config: Config, prefix: str) -> None:
    """It does not see a relay that never ran."""
    await setup(config)
    any_database.execute(CHECKPOINT)
    any_database.execute(f"CREATE ROLE {prefix} LOGIN; REVOKE USAGE ON SCHEMA public FROM PUBLIC")
    try:
        source = {"slot": prefix}
        theirs = Config.model_validate({"database": {"dsn": any_database.dsn_for(prefix)}, "source": source})
        tables = "public.outbox_relay_checkpoint, public.outbox_dead_letters"
        with pytest.raises(AuthError, match=f"{prefix} may not read {tables}") as refused:
            await status(theirs)
        any_database.execute(refused.value.hint)
        found = await status(theirs)
        assert (found["checkpoint"]["epoch"], found["dead_letters"]) == (3, 0)
        assert found["pending"] is None  # the outbox table is another matter: what it does not know it calls unknown
    finally:
        any_database.execute(f"DROP OWNED BY {prefix}; DROP ROLE {prefix}")


async def test_a_standby_cannot_tell(own_postgres: PostgresServer) -> None:
    await setup(Config.model_validate({"database": {"dsn": own_postgres.dsn()}}))
    standby = await asyncio.to_thread(copy_of, own_postgres, "-R")
    try:
        await asyncio.to_thread(standby.start)
        config = Config.model_validate({"database": {"dsn": standby.dsn()}})
        for command in (status, takeover):
            with pytest.raises(SetupError, match="this server is a standby") as refused:
                await command(config)
            assert refused.value.hint == "point database.dsn at the primary"
    finally:
        standby.close()
