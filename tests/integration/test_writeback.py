"""Write-back on real servers: every row marked, also when it is late, locked, or when the relay is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.app import Relay
from relay.check import check
from relay.config import Config
from relay.embedded import NatsServer
from relay.errors import ContractError
from relay.setup import setup
from tests.fix_postgres import Database
from tests.relays import RelayProcess, config_of, eventually, settings, write_config
from tests.sinks import read_jetstream
from tests.tables import ddl, nats_sink, published, running

INSERT = (
    "INSERT INTO orders.outbox_events (id, aggregate_type, aggregate_id, event_type, payload)"
    " SELECT gen_random_uuid(), 'order', i::text, 'created', '{}' FROM generate_series(1, %s) i"
)


@pytest.fixture
def sections(database: Database, own_nats: NatsServer, prefix: str) -> dict[str, Any]:
    database.execute("CREATE SCHEMA orders; SET search_path TO orders;" + ddl("S4"))
    block = {"preset": "service_outbox", "table": "orders.outbox_events"}
    return settings(database.dsn, nats_sink(own_nats.url, "events.>"), source={"slot": prefix}) | {"outbox": [block]}


@pytest.fixture
async def config(sections: dict[str, Any]) -> Config:
    config = config_of(sections)
    await setup(config)
    return config


def insert(database: Database, count: int) -> None:
    with database.connect() as connection:
        connection.execute(INSERT, (count,))


def unmarked(database: Database) -> int:
    return int(database.query("SELECT count(*) FROM orders.outbox_events WHERE published_at IS NULL")[0][0])


async def all_marked(database: Database) -> None:
    await eventually(lambda: unmarked(database) == 0, "every row is marked")


async def test_a_backlog_is_marked_and_the_updates_are_not_published(database: Database, config: Config) -> None:
    async with running(config) as relay:
        insert(database, 20_000)
        await published(relay, 20_000)
        await all_marked(database)
        insert(database, 1)
        await published(relay, 20_001)
        await all_marked(database)
        assert relay.progress.published_events == 20_001


async def test_a_clean_stop_leaves_no_row_unmarked(database: Database, config: Config) -> None:
    async with running(config) as relay:
        insert(database, 5000)
        await published(relay, 5000)
    assert unmarked(database) == 0


async def test_a_locked_row_is_marked_later_and_holds_up_nothing(database: Database, config: Config) -> None:
    async with running(config) as relay:
        insert(database, 10)
        await published(relay, 10)
        await all_marked(database)
        with psycopg.connect(database.dsn) as other:
            with database.connect() as connection:
                row = connection.execute(INSERT.replace("%s", "3").encode() + b" RETURNING id").fetchone()
                assert row is not None
                other.execute("SELECT FROM orders.outbox_events WHERE id = %s FOR UPDATE", row)
                connection.execute("UPDATE orders.outbox_events SET published_at = NULL WHERE id <> %s", row)
            insert(database, 5)
            await published(relay, 18)
            insert(database, 5)
            await published(relay, 23)
            await eventually(
                lambda: database.query("SELECT 1 FROM outbox_relay_checkpoint WHERE phase = 'stream'"), "checkpoint"
            )
            other.rollback()
        await eventually(
            lambda: database.query("SELECT published_at FROM orders.outbox_events WHERE id = %s", row[0]) != [(None,)],
            "the locked row is marked in the end",
        )


async def test_rows_that_the_producer_deletes_disturb_nobody(database: Database, config: Config) -> None:
    async with running(config) as relay:
        with database.connect() as connection, connection.transaction():
            connection.execute(INSERT, (100,))
            connection.execute("DELETE FROM orders.outbox_events")
        ((behind,),) = database.query("SELECT pg_current_wal_lsn()::text")
        insert(database, 10)
        await published(relay, 110)
        await all_marked(database)
        await eventually(
            lambda: database.query("SELECT FROM outbox_relay_checkpoint WHERE lsn >= %s::pg_lsn", behind),
            "the checkpoint goes on",
        )


async def test_a_killed_relay_leaves_no_row_unmarked(
    database: Database, own_nats: NatsServer, sections: dict[str, Any], config: Config, tmp_path: Path
) -> None:
    """What was not marked is behind no checkpoint: it is delivered again, deduped by its id, and marked."""
    path = write_config(tmp_path, sections)
    with RelayProcess(path) as relay:
        await relay.streaming()
        insert(database, 3000)
        await eventually(lambda: relay.counter("published_events") > 0, "something is published")
        relay.kill()
    with RelayProcess(path) as relay:
        await relay.streaming()
        await all_marked(database)
        await relay.stopped()
    assert len(await read_jetstream(own_nats.url, "EVENTS")) == 3000


@pytest.mark.parametrize(
    ("write_back", "says"),
    [({"sent_at": "now()"}, "has no column sent_at to write back"), ({"retry_count": "soon"}, "is no value for")],
)
async def test_what_cannot_be_written_back_is_said_at_start(
    sections: dict[str, Any], config: Config, write_back: dict[str, str], says: str
) -> None:
    sections["outbox"][0]["write_back"] = write_back
    wrong = config_of(sections)

    async def start() -> None:
        async with Relay(wrong) as relay:
            await relay.wait()

    with pytest.raises(ContractError, match=says):
        await start()


async def test_the_role_gets_the_right_to_write_back(database: Database, sections: dict[str, Any], prefix: str) -> None:
    config = config_of(sections)
    await setup(config, role=prefix)
    again = await setup(config, role=prefix)
    try:
        assert {step.action for step in again} == {"present"}
        sections["database"]["dsn"] = database.dsn_for(prefix)
        own = config_of(sections)
        assert not [finding for finding in await check(own, broker=False) if finding.level == "error"]
        async with running(own) as relay:
            insert(database, 2)
            await published(relay, 2)
            await all_marked(database)
        database.execute(f"REVOKE UPDATE (published_at) ON orders.outbox_events FROM {prefix}")
        (finding,) = [finding for finding in await check(own, broker=False) if finding.level == "error"]
        assert "may not write back" in finding.message
        database.execute(finding.remedy)
        assert not [finding for finding in await check(own, broker=False) if finding.level == "error"]
    finally:
        database.execute(f"DROP OWNED BY {prefix}; DROP ROLE {prefix}")
