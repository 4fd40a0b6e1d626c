"""Starting `relay run` on real servers with something wrong: a clear message with a remedy, the right exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.embedded import NatsServer, PostgresServer
from relay.embedded.process import free_port
from tests.fix_kafka import Kafka
from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.ledger import Ledger
from tests.relays import RelayProcess, create_topic, eventually, jetstream, prepare, settings, write_config
from tests.relays import (
    kafka as kafka_sink,
)
from tests.sinks import read_jetstream, read_kafka


@pytest.fixture(params=["database15", "database"])
def any_database(request: pytest.FixtureRequest) -> Database:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Database)
    return found


@pytest.fixture
def sections(database: Database, nats: Nats, prefix: str) -> dict[str, Any]:
    return settings(database.dsn, jetstream(nats.url, prefix), source={"slot": prefix})


@pytest.fixture
def any_sections(any_database: Database, nats: Nats, prefix: str) -> dict[str, Any]:
    return settings(any_database.dsn, jetstream(nats.url, prefix), source={"slot": prefix})


# --- the DSN


async def test_all_faults_of_the_configuration_at_once(tmp_path: Path) -> None:
    sections = settings("host=", {"kind": "rabbit"}, delivery={"max_batch_events": 0}, nonsense={"a": 1})
    sections["database"]["dsn"] = "postgresql://relay:hunter2@[db/shop"
    with RelayProcess(write_config(tmp_path, sections)) as relay:
        told = await relay.refuses(2, "database.dsn", "sink.kind", "delivery.max_batch_events", "nonsense")
    assert "hunter2" not in told


async def test_no_configuration_file(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "nowhere.toml") as relay:
        await relay.refuses(2, "nowhere.toml", "no such file")


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
async def test_postgres_that_cannot_be_reached_is_tried_again(tmp_path: Path, nats: Nats, host: str) -> None:
    sections = settings(f"postgresql://postgres@{host}:{free_port()}/x", jetstream(nats.url, "never"))
    with RelayProcess(write_config(tmp_path, sections)) as relay:
        line = await relay.says("source.failed", attempt=2)
        assert line["error_class"] == "SourceUnavailable"
        code, answer = relay.http("/readyz")
        assert code == 503 and answer["reason"]
        await relay.stopped()


async def test_wrong_password(tmp_path: Path, nats: Nats, start_postgres: Callable[..., PostgresServer]) -> None:
    server = start_postgres(hba=["host all guarded 127.0.0.1/32 scram-sha-256"])
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute("CREATE ROLE guarded LOGIN REPLICATION PASSWORD 'right'")
    dsn = server.dsn(user="guarded").replace("guarded@", "guarded:wrong@")
    with RelayProcess(write_config(tmp_path, settings(dsn, jetstream(nats.url, "never")))) as relay:
        told = await relay.refuses(3, "password authentication failed", "pg_hba.conf")
    assert "wrong" not in told


@pytest.mark.parametrize(
    "dsn", ["postgresql://postgres@127.0.0.1:x/d", "host=127.0.0.1 sslmode=nope", "host=a,b port=1,2,3"]
)
async def test_a_dsn_that_libpq_cannot_use(tmp_path: Path, nats: Nats, dsn: str) -> None:
    with RelayProcess(write_config(tmp_path, settings(dsn, jetstream(nats.url, "never")))) as relay:
        await relay.refuses(3, "database.dsn")


async def test_no_such_database(tmp_path: Path, database: Database, nats: Nats) -> None:
    dsn = database.server.dsn("no_such_database")
    with RelayProcess(write_config(tmp_path, settings(dsn, jetstream(nats.url, "never")))) as relay:
        await relay.refuses(3, "no_such_database", "database.dsn")


async def test_nothing_was_set_up(tmp_path: Path, any_sections: dict[str, Any]) -> None:
    with RelayProcess(write_config(tmp_path, any_sections)) as relay:
        await relay.refuses(3, "relay setup")


# --- rights and settings of the server


async def test_no_replication_right(tmp_path: Path, any_database: Database, nats: Nats, prefix: str) -> None:
    sections = settings(any_database.dsn, jetstream(nats.url, prefix), source={"slot": prefix})
    await prepare(tmp_path, sections)
    any_database.execute(
        f"CREATE ROLE {prefix} LOGIN; GRANT USAGE ON SCHEMA public TO {prefix};"
        f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {prefix}"
    )
    sections["database"]["dsn"] = any_database.dsn_for(prefix)
    try:
        with RelayProcess(write_config(tmp_path, sections)) as relay:
            await relay.refuses(3, "ALTER ROLE", "REPLICATION")
    finally:
        any_database.execute(f"DROP OWNED BY {prefix}; DROP ROLE {prefix}")


async def test_wal_level_too_low(
    tmp_path: Path, nats: Nats, prefix: str, start_postgres: Callable[..., PostgresServer]
) -> None:
    server = start_postgres(settings={"wal_level": "replica"})
    path = await prepare(tmp_path, settings(server.dsn(), jetstream(nats.url, prefix)))
    with RelayProcess(path) as relay:
        await relay.refuses(3, "wal_level", "ALTER SYSTEM SET wal_level = 'logical'")


# --- the slot


async def test_a_slot_of_another_plugin(tmp_path: Path, database15: Database, nats: Nats, prefix: str) -> None:
    path = await prepare(tmp_path, settings(database15.dsn, jetstream(nats.url, prefix), source={"slot": prefix}))
    database15.query("SELECT pg_create_logical_replication_slot(%s, 'wal2json')", prefix)
    with RelayProcess(path) as relay:
        await relay.refuses(3, prefix, "wal2json", "source.slot")


async def test_a_physical_slot(tmp_path: Path, database: Database, sections: dict[str, Any], prefix: str) -> None:
    path = await prepare(tmp_path, sections)
    database.query("SELECT pg_create_physical_replication_slot(%s)", prefix)
    try:
        with RelayProcess(path) as relay:
            await relay.refuses(3, prefix, "physical", "source.slot")
    finally:
        database.query("SELECT pg_drop_replication_slot(%s)", prefix)


async def test_a_slot_of_another_database(
    tmp_path: Path, database: Database, sections: dict[str, Any], prefix: str
) -> None:
    path = await prepare(tmp_path, sections)
    with psycopg.connect(database.server.dsn(), autocommit=True) as other:
        other.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (prefix,))
        try:
            with RelayProcess(path) as relay:
                await relay.refuses(3, prefix, "belongs to database postgres", "source.slot")
        finally:
            other.execute("SELECT pg_drop_replication_slot(%s)", (prefix,))


@pytest.mark.guarantee("G6")
async def test_a_slot_in_use_is_waited_for(
    tmp_path: Path, database: Database, sections: dict[str, Any], nats: Nats, prefix: str
) -> None:
    path = await prepare(tmp_path, sections)
    ledger = Ledger(database.dsn, f"{prefix}.orders")
    with RelayProcess(path) as relay:
        await relay.streaming()
        await relay.stopped()
    ledger.write(10)
    foreign = await psycopg.AsyncConnection.connect(database.dsn, autocommit=True, replication="database")
    await foreign.execute(
        f"START_REPLICATION SLOT {prefix} LOGICAL 0/0 (proto_version '1', publication_names 'outbox_relay')".encode()
    )
    try:
        with RelayProcess(path) as relay:
            line = await relay.says("relay.standing_by")
            assert prefix in line["reason"] and "in use" in line["reason"]
            code, answer = relay.http("/readyz")
            assert (code, answer["state"]) == (503, "standby")
            foreign.pgconn.finish()
            await relay.streaming()
            ledger.check(await ledger.arrived(lambda: read_jetstream(nats.url, prefix), relay))
            await relay.stopped()
    finally:
        foreign.pgconn.finish()


# --- publication and table


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("DROP PUBLICATION outbox_relay", "does not exist"),
        ("ALTER PUBLICATION outbox_relay DROP TABLE outbox_events", "does not contain public.outbox_events"),
        ("ALTER PUBLICATION outbox_relay SET (publish = 'delete')", "does not publish inserts"),
    ],
)
async def test_a_publication_that_is_not_right(
    tmp_path: Path, any_database: Database, any_sections: dict[str, Any], fault: str, says: str
) -> None:
    path = await prepare(tmp_path, any_sections)
    any_database.execute(fault)
    with RelayProcess(path) as relay:
        await relay.refuses(3, says, "setup" if "inserts" not in says else "ALTER PUBLICATION")


@pytest.mark.guarantee("G1")
async def test_a_publication_that_goes_while_the_relay_runs(
    tmp_path: Path, any_database: Database, any_sections: dict[str, Any], nats: Nats, prefix: str
) -> None:
    """Rows written without a publication come from the table; after `relay setup` it streams again."""
    path = await prepare(tmp_path, any_sections)
    ledger = Ledger(any_database.dsn, f"{prefix}.orders")
    with RelayProcess(path) as relay:
        await relay.streaming()
        any_database.execute("DROP PUBLICATION outbox_relay")
        ledger.write(5)
        ledger.check(await ledger.arrived(lambda: read_jetstream(nats.url, prefix), relay))
        assert "relay setup" in (await relay.says("stream.unavailable"))["hint"]
        ledger.write(2, seed=3)
        ledger.check(await ledger.arrived(lambda: read_jetstream(nats.url, prefix), relay))
        assert "publication" in relay.status["last_error"]  # polling works, and still it should stream
        assert "relay setup" in relay.status["hint"]
        await prepare(tmp_path, any_sections)
        await relay.says_again("stream.started", 1)
        assert relay.status["last_error"] == ""
        ledger.write(5, seed=2)
        ledger.check(await ledger.arrived(lambda: read_jetstream(nats.url, prefix), relay))
        await relay.stopped()


async def test_in_stream_mode_a_publication_that_goes_stops_it(
    tmp_path: Path, any_database: Database, any_sections: dict[str, Any], prefix: str
) -> None:
    any_sections["source"]["mode"] = "stream"
    path = await prepare(tmp_path, any_sections)
    ledger = Ledger(any_database.dsn, f"{prefix}.orders")
    with RelayProcess(path) as relay:
        await relay.streaming()
        any_database.execute("DROP PUBLICATION outbox_relay")
        ledger.write(5)
        await relay.refuses(3, "outbox_relay", "relay setup")


async def test_a_column_that_the_table_does_not_have(
    tmp_path: Path, any_database: Database, any_sections: dict[str, Any]
) -> None:
    await prepare(tmp_path, any_sections)
    any_sections["outbox"] = [{"table": "public.outbox_events", "columns": {"aggregate_id": "customer"}}]
    with RelayProcess(write_config(tmp_path, any_sections)) as relay:
        await relay.refuses(3, "public.outbox_events", "customer", "[outbox.columns]")


async def test_a_table_that_does_not_exist(tmp_path: Path, database: Database, sections: dict[str, Any]) -> None:
    path = await prepare(tmp_path, sections)
    database.execute("DROP TABLE outbox_events")
    with RelayProcess(path) as relay:
        await relay.refuses(3, "outbox_events", "relay setup")


# --- the broker


@pytest.mark.guarantee("G1")
async def test_no_stream_for_a_subject(
    tmp_path: Path, database: Database, sections: dict[str, Any], nats: Nats, prefix: str
) -> None:
    path = await prepare(tmp_path, sections)
    ledger = Ledger(database.dsn, f"elsewhere{prefix}.orders")
    ledger.write(3)
    with RelayProcess(path) as relay:
        await relay.refuses(3, f"elsewhere{prefix}.orders", "subjects")
    stream = sections["sink"]["jetstream"]["streams"][0]
    sections["sink"]["jetstream"]["streams"].append(
        {**stream, "name": f"{prefix}b", "subjects": [f"elsewhere{prefix}.>"]}
    )
    with RelayProcess(write_config(tmp_path, sections)) as relay:
        ledger.check(await ledger.arrived(lambda: read_jetstream(nats.url, f"{prefix}b"), relay))
        await relay.stopped()


@pytest.mark.guarantee("G10")
async def test_no_stream_for_a_subject_while_streaming(
    tmp_path: Path, database: Database, sections: dict[str, Any], prefix: str
) -> None:
    """What the broker lacks is for a person: polling the table would not cure it."""
    path = await prepare(tmp_path, sections)
    with RelayProcess(path) as relay:
        await relay.streaming()
        Ledger(database.dsn, f"elsewhere{prefix}.orders").write(3)
        await relay.refuses(3, f"elsewhere{prefix}.orders", "subjects")


async def test_a_stream_that_does_not_exist(tmp_path: Path, sections: dict[str, Any], prefix: str) -> None:
    sections["sink"]["jetstream"]["streams"][0]["create"] = False
    with RelayProcess(await prepare(tmp_path, sections)) as relay:
        await relay.refuses(3, f"stream {prefix} does not exist", "nats stream add")


@pytest.mark.guarantee("G1")
async def test_a_topic_that_does_not_exist(tmp_path: Path, database: Database, kafka: Kafka, prefix: str) -> None:
    path = await prepare(tmp_path, settings(database.dsn, kafka_sink(kafka.bootstrap), source={"slot": prefix}))
    ledger = Ledger(database.dsn, prefix)
    ledger.write(3)
    with RelayProcess(path) as relay:
        await relay.refuses(3, prefix, "create")
    await asyncio.to_thread(create_topic, kafka.bootstrap, prefix)
    with RelayProcess(path) as relay:
        stored = await ledger.arrived(lambda: asyncio.to_thread(read_kafka, kafka.bootstrap, prefix), relay)
        ledger.check(stored)
        await relay.stopped()


@pytest.mark.guarantee("G10")
async def test_a_broker_that_comes_later(tmp_path: Path, database: Database, prefix: str) -> None:
    server = NatsServer()  # its port is known, it does not run yet
    try:
        sections = settings(
            database.dsn, jetstream(server.url, prefix), source={"slot": prefix}, delivery={"stalled_after": "500ms"}
        )
        path = await prepare(tmp_path, sections)
        ledger = Ledger(database.dsn, f"{prefix}.orders")
        ledger.write(10)
        with RelayProcess(path) as relay:
            await relay.says("sink.failed", attempt=2)
            answer = (await eventually(lambda: (a := relay.http("/readyz"))[0] == 503 and a, "unready"))[1]
            assert "broker" in answer["reason"]
            server.start()
            ledger.write(10, seed=2)
            ledger.check(await ledger.arrived(lambda: read_jetstream(server.url, prefix), relay))
            await relay.ready()
            await relay.stopped()
    finally:
        server.close()


# --- the second relay


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
async def test_a_second_relay_stands_by_and_takes_over(
    tmp_path: Path, database: Database, sections: dict[str, Any], nats: Nats, prefix: str, end: str
) -> None:
    path = await prepare(tmp_path, sections)
    ledger = Ledger(database.dsn, f"{prefix}.orders")
    with RelayProcess(path) as first, RelayProcess(path) as second:
        await eventually(lambda: first.said("stream.started") or second.said("stream.started"), "one streams")
        active, passive = (first, second) if first.said("stream.started") else (second, first)
        await passive.says("relay.standing_by")
        code, answer = passive.http("/readyz")
        assert (code, answer["state"]) == (503, "standby")
        ledger.write(20)
        if end == "SIGTERM":
            await active.stopped()
        else:
            active.kill()
        await passive.streaming()
        ledger.write(20, seed=2)
        ledger.check(await ledger.arrived(lambda: read_jetstream(nats.url, prefix), passive))
        await passive.ready()
        await passive.stopped()
