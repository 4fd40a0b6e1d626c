"""`relay check` on real servers: quiet when all is well; each fault is found, and its remedy cures it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from relay.check import Finding, check, exit_code
from relay.config import Config
from relay.embedded import PostgresServer
from relay.errors import ContractError
from relay.setup import setup
from tests.fix_postgres import Database


@pytest.fixture(params=["database15", "database16", "database"])
def any_database(request: pytest.FixtureRequest) -> Database:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Database)
    return found


@pytest.fixture
def role(database: Database, prefix: str) -> Iterator[str]:
    database.execute(f"CREATE ROLE {prefix} LOGIN")
    yield prefix
    database.execute(f"DROP OWNED BY {prefix}; DROP ROLE {prefix}")


def config_of(database: Database, slot: str = "outbox_relay", **sections: Any) -> Config:
    return Config.model_validate({"database": {"dsn": database.dsn}, "source": {"slot": slot}, **sections})


async def bad(config: Config) -> list[Finding]:
    """What is wrong, without what is true of every test server."""
    findings = await check(config, broker=False)
    assert all(finding.remedy for finding in findings if finding.level != "ok")
    usual = {"max_slot_wal_keep_size", "transactions"}
    return [finding for finding in findings if finding.level != "ok" and finding.subject not in usual]


async def test_all_is_well(any_database: Database, prefix: str) -> None:
    config = config_of(any_database, prefix)
    await setup(config)
    findings = await check(config, broker=False)
    assert exit_code(findings) == 0
    assert await bad(config) == []
    assert any("creates it" in finding.message for finding in findings)


async def test_all_is_well_with_partitions(any_database: Database, prefix: str) -> None:
    config = config_of(any_database, prefix)
    await setup(config, partitioned=True)
    assert await bad(config) == []


async def test_nothing_was_set_up(any_database: Database, prefix: str) -> None:
    findings = await bad(config_of(any_database, prefix))
    assert exit_code(findings) == 3
    assert {finding.subject for finding in findings} == {
        "public.outbox_events",
        "outbox_relay_checkpoint",
        "outbox_relay_history",
        "outbox_dead_letters",
        "outbox_relay_bookmarks",
        "outbox_relay_requests",
        "publication outbox_relay",
    }


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"preset": "debezium"}, 'remove preset = "debezium"'),
        ({"table": "mine", "columns": {"id": "number"}}, "create it with the columns"),
        ({"table": "mine", "header_columns": {"tenant": "tenant"}}, "create it with the columns"),
    ],
)
async def test_a_table_that_setup_cannot_make(database: Database, block: dict[str, Any], says: str) -> None:
    config = config_of(database, outbox=[block])
    [finding] = [finding for finding in await bad(config) if finding.subject == config.outbox[0].table]
    assert finding.message == "the table does not exist"
    assert says in finding.remedy
    assert not finding.remedy.startswith("run `relay setup`")
    with pytest.raises(ContractError) as refused:
        await setup(config)
    assert refused.value.hint == finding.remedy


FAULTS = [
    ("ALTER PUBLICATION outbox_relay DROP TABLE outbox_events", "does not contain"),
    ("ALTER PUBLICATION outbox_relay SET (publish = 'delete')", "does not publish inserts"),
    ("ALTER PUBLICATION outbox_relay SET (publish = 'insert, update')", "also publishes update"),
    ("ALTER PUBLICATION outbox_relay SET TABLE outbox_events WHERE (topic = 'x')", "row filter"),
    ("ALTER PUBLICATION outbox_relay SET TABLE outbox_events (id)", "column list"),
    ("DROP PUBLICATION outbox_relay", "does not exist"),
    ("DROP INDEX outbox_events_xid_idx", "no index"),
    ("ALTER TABLE outbox_events DROP COLUMN xid", "no column xid"),
    ("ALTER TABLE outbox_events ALTER xid DROP DEFAULT", "default"),
    ("ALTER TABLE outbox_events DROP CONSTRAINT outbox_events_id_key", "not unique"),
    ("ALTER TABLE outbox_events ALTER id DROP NOT NULL", "NULL"),
    ("ALTER TABLE outbox_events ALTER seq DROP IDENTITY", "identity"),
]


async def test_a_fault_is_found_and_its_remedy_cures_it(any_database: Database, prefix: str) -> None:
    """One after the other: the remedy leaves the database as it was."""
    config = config_of(any_database, prefix)
    await setup(config)
    for fault, says in FAULTS:
        any_database.execute(fault)
        findings = await bad(config)
        assert [says in finding.message for finding in findings] == [True], (fault, findings)
        remedy = findings[0].remedy.removeprefix("run `relay setup`, or: ").partition("  or set")[0]
        for statement in remedy.split(";"):  # one by one: CREATE INDEX CONCURRENTLY wants no transaction
            if statement.strip() not in ("", "BEGIN", "COMMIT"):
                any_database.execute(statement)
        assert await bad(config) == [], fault


async def test_a_generated_column_is_not_streamed(any_database: Database, prefix: str) -> None:
    config = config_of(any_database, prefix)
    await setup(config)
    any_database.execute(
        "ALTER TABLE outbox_events DROP COLUMN topic,"
        " ADD COLUMN topic text GENERATED ALWAYS AS ('t.' || event_type) STORED,"
        " ADD COLUMN unread text GENERATED ALWAYS AS ('t.' || event_type) STORED"
    )
    [finding] = await bad(config)
    assert (finding.level, finding.message) == ("error", "topic is a generated column: it is not streamed")
    any_database.execute(finding.remedy.partition(";")[0])
    assert await bad(config) == []


async def test_a_partitioned_table_under_the_names_of_its_partitions(any_database: Database, prefix: str) -> None:
    config = config_of(any_database, prefix)
    await setup(config, partitioned=True)
    any_database.execute("ALTER PUBLICATION outbox_relay SET (publish_via_partition_root = false)")
    [finding] = await bad(config)
    assert "instead of the table" in finding.message
    any_database.execute(finding.remedy)
    assert await bad(config) == []


async def test_columns_that_the_config_names_wrongly(database: Database, prefix: str) -> None:
    await setup(config_of(database))
    columns = {"aggregate_id": "nope", "headers": "topic", "created_at": "payload", "seq": "topic", "xid": ""}
    outbox = [{"table": "outbox_events", "columns": columns, "header_columns": {"tenant": "tenant_id"}}]
    found = {(f.level, f.message.partition(":")[0]) for f in await bad(config_of(database, prefix, outbox=outbox))}
    assert found == {
        ("error", "has no column nope"),
        ("error", "has no column tenant_id"),
        ("error", "topic is text, not json or jsonb"),
        ("error", "payload is jsonb, not timestamptz"),
        ("error", "topic is text, not an integer"),
        ("warning", "has no column xid"),
    }


@pytest.mark.parametrize(
    ("fault", "says"),
    [("ALTER TABLE outbox_events SET UNLOGGED", "unlogged"), ("ALTER TABLE outbox_events RENAME TO x", "not a table")],
)
async def test_a_table_that_is_not_in_the_wal(database: Database, prefix: str, fault: str, says: str) -> None:
    config = config_of(database, prefix)
    await setup(config)
    database.execute("DROP PUBLICATION outbox_relay; " + fault)
    if "RENAME" in fault:
        database.execute("CREATE VIEW outbox_events AS SELECT * FROM x")
    assert any(says in finding.message for finding in await bad(config))


async def test_a_role_without_rights(database: Database, role: str) -> None:
    await setup(config_of(database))
    database.execute("ALTER TABLE outbox_events ENABLE ROW LEVEL SECURITY")
    config = Config.model_validate({"database": {"dsn": database.dsn_for(role)}, "source": {"slot": role}})
    findings = await bad(config)
    assert {f.subject for f in findings} == {
        "replication",
        "public.outbox_events",
        "outbox_relay_checkpoint",
        "outbox_relay_history",
        "outbox_dead_letters",
        "outbox_relay_bookmarks",
        "outbox_relay_requests",
    }
    for finding in findings:
        if finding.subject == "replication":
            database.execute(f"ALTER ROLE {role} REPLICATION")
        else:
            database.execute(finding.remedy)
    assert await bad(config) == []


async def test_slots_of_others(database15: Database, prefix: str) -> None:
    # The one of these servers that has a second plugin.
    config = config_of(database15, prefix)
    await setup(config)
    database15.query("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", prefix)
    [finding] = await bad(config)
    assert "test_decoding" in finding.message
    database15.execute(finding.remedy.partition("drop it: ")[2])
    database15.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", prefix)
    assert await bad(config) == []


async def test_a_slot_that_is_gone_or_moved(any_database: Database, prefix: str) -> None:
    config = config_of(any_database, prefix)
    await setup(config)
    any_database.execute(
        "INSERT INTO outbox_relay_checkpoint (relay, epoch, system_identifier, timeline, slot, lsn, snap, snap_lsn)"
        " VALUES ('outbox_relay', 1, '1', 1, 's', '0/1', pg_current_snapshot(), '0/1')"
    )
    [finding] = await bad(config)
    assert (finding.level, "does not exist" in finding.message) == ("warning", True)  # the next run cures it
    any_database.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", prefix)
    [finding] = await bad(config)
    assert "moved" in finding.message
    config = config.model_copy(update={"source": config.source.model_copy(update={"mode": "stream"})})
    assert [finding.level for finding in await bad(config)] == ["error"]


async def test_a_prepared_transaction_delays_the_first_run(start_postgres: Callable[..., PostgresServer]) -> None:
    server = start_postgres("15", settings={"max_prepared_transactions": 2, "wal_level": "replica"})
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(b"BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'it''s'")
        findings = await check(Config.model_validate({"database": {"dsn": server.dsn()}}), broker=False)
        [blocked] = [finding for finding in findings if finding.subject == "transactions"]
        [level] = [finding for finding in findings if finding.subject == "wal_level"]
        assert "prepared transaction it's" in blocked.message
        assert (level.level, "ALTER SYSTEM" in level.remedy) == ("error", True)
        connection.execute(blocked.remedy.rpartition("or  ")[2].encode())


async def test_polling_needs_nothing_that_only_a_stream_needs(start_postgres: Callable[..., PostgresServer]) -> None:
    settings = {"wal_level": "replica", "max_replication_slots": 0, "max_wal_senders": 0}
    server = start_postgres("15", settings=settings)
    config = Config.model_validate({"database": {"dsn": server.dsn()}, "source": {"mode": "poll"}})
    await setup(config)
    server.execute("DROP PUBLICATION outbox_relay; CREATE ROLE poller LOGIN")
    server.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO poller")
    dsn = server.dsn(user="poller")
    findings = await check(Config.model_validate({"database": {"dsn": dsn}, "source": {"mode": "poll"}}), broker=False)
    assert [finding for finding in findings if finding.level != "ok"] == []
    assert {"version", "primary", "connection", "public.outbox_events"} <= {finding.subject for finding in findings}
    streamed = await check(Config.model_validate({"database": {"dsn": dsn}}), broker=False)
    assert {"wal_level", "replication", "publication outbox_relay", "max_wal_senders"} <= {
        finding.subject for finding in streamed if finding.level == "error"
    }


async def test_a_table_without_xid_or_seq_is_judged_by_what_is_done_with_it(database: Database, prefix: str) -> None:
    await setup(config_of(database))
    database.execute("ALTER TABLE outbox_events DROP COLUMN xid, DROP COLUMN seq")

    def polling(strategy: str) -> Config:
        poll = {"source": {"slot": prefix, "mode": "poll"}, "poll": {"strategy": strategy}}
        return Config.model_validate({"database": {"dsn": database.dsn}, **poll})

    [snapshot] = await bad(polling("snapshot"))
    assert (snapshot.level, snapshot.message) == (
        "error",
        "has no column seq and xid: it cannot be polled by snapshots",
    )
    assert "setup --adopt" in snapshot.remedy and 'poll.strategy = "claim"' in snapshot.remedy
    [claim] = await bad(polling("claim"))
    assert (claim.level, "claimed" in claim.message) == ("warning", True)
    [stream] = await bad(config_of(database, prefix))
    assert (stream.level, "it streams" in stream.message) == ("warning", True)
    await setup(polling("snapshot"), adopt=True)
    assert await bad(polling("snapshot")) == []
    emptied = {**polling("snapshot").model_dump(), "outbox": [{"table": "outbox_events", "columns": {"seq": ""}}]}
    [finding] = await bad(Config.model_validate(emptied))
    assert (finding.level, "has no column seq" in finding.message) == ("error", True)
    assert "outbox.columns.seq" in finding.remedy


async def test_a_slot_that_polling_does_not_need_keeps_wal(database: Database, prefix: str) -> None:
    config = config_of(database)
    await setup(config)
    database.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", prefix)
    polling = Config.model_validate({"database": {"dsn": database.dsn}, "source": {"slot": prefix, "mode": "poll"}})
    [finding] = await bad(polling)
    assert (finding.level, "keeps WAL" in finding.message) == ("warning", True)
    database.execute(finding.remedy.partition("needs it: ")[2])
    assert await bad(polling) == []


async def test_the_settings_of_18(start_postgres: Callable[..., PostgresServer]) -> None:
    settings = {"idle_replication_slot_timeout": "5min", "max_slot_wal_keep_size": "1GB"}
    server = start_postgres("18", settings=settings)
    findings = {
        f.subject: f for f in await check(Config.model_validate({"database": {"dsn": server.dsn()}}), broker=False)
    }
    assert "300 s" in findings["idle_replication_slot_timeout"].message
    assert findings["max_slot_wal_keep_size"].level == "ok"


async def test_postgres_cannot_be_reached(unused_tcp_port: int) -> None:
    dsn = f"postgresql://postgres@127.0.0.1:{unused_tcp_port}/postgres"
    [finding] = await check(Config.model_validate({"database": {"dsn": dsn}}), broker=False)
    assert (finding.level, finding.subject) == ("error", "postgres")
    assert finding.remedy


async def test_the_broker_cannot_be_reached(database: Database, unused_tcp_port: int) -> None:
    sink = {"kind": "jetstream", "jetstream": {"servers": [f"nats://127.0.0.1:{unused_tcp_port}"]}}
    finding = (await check(config_of(database, sink=sink)))[-1]
    assert (finding.level, finding.subject) == ("error", "broker")
    assert finding.remedy


async def test_the_broker_is_there(database: Database) -> None:
    assert (await check(config_of(database, sink={"kind": "console"})))[-1].level == "ok"
