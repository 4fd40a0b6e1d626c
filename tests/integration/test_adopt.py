"""`relay setup --adopt`: least locking, old rows left alone, unpublished ones published once and in order."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from relay.config import Config
from relay.embedded import NatsServer
from relay.errors import SetupError
from relay.setup import script, setup
from tests.fix_postgres import Database
from tests.relays import config_of, settings
from tests.sinks import read_jetstream
from tests.tables import ddl, nats_sink, published, running


@pytest.fixture(params=["database15", "database"])
def any_database(request: pytest.FixtureRequest) -> Database:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Database)
    return found


def config_for(database: Database, nats: NatsServer, slot: str) -> Config:
    sections = settings(database.dsn, nats_sink(nats.url, "events.>"), source={"slot": slot})
    return config_of(sections | {"outbox": [{"preset": "outbox"}]})


def event_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def insert(database: Database, number: int, status: str, created_at: str = "now()") -> None:
    database.execute(
        "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, status, created_at) VALUES"
        f" ('{event_id(number)}', 'order', '{event_id(1)}', 'created', '{{}}', '{status}', {created_at})"
    )


async def test_old_rows_are_left_alone_and_unpublished_ones_come_first(
    any_database: Database, own_nats: NatsServer, prefix: str
) -> None:
    database = any_database
    database.execute(ddl("S1"))
    insert(database, 3, "pending", "now() - interval '1 hour'")
    insert(database, 2, "pending", "now() - interval '2 hours'")
    insert(database, 4, "pending", "NULL")
    insert(database, 9, "sent", "now() - interval '3 hours'")
    ((before,),) = database.query("SELECT pg_relation_filenode('outbox')")
    config = config_for(database, own_nats, prefix)
    text = script(await setup(config, adopt=True, dry_run=True))
    assert "CREATE INDEX CONCURRENTLY" in text.partition("COMMIT;")[2]
    assert "ACCESS EXCLUSIVE" in text
    assert database.query(
        "SELECT count(*) FROM pg_attribute WHERE attrelid = 'outbox'::regclass AND attname = 'xid'"
    ) == [(0,)]
    await setup(config, adopt=True)
    assert database.query("SELECT pg_relation_filenode('outbox')") == [(before,)], "the table was rewritten"
    insert(database, 5, "pending")
    rows = database.query("SELECT right(id::text, 1)::int, xid IS NULL FROM outbox ORDER BY seq NULLS LAST")
    assert rows == [(2, False), (3, False), (4, False), (5, False), (9, True)]
    async with running(config) as relay:
        await published(relay, 4)
    stored = await read_jetstream(own_nats.url, "EVENTS")
    assert [each.id.decode() for each in stored] == [event_id(number) for number in (2, 3, 4, 5)]
    assert all(int(each.headers["seq"]) > 0 for each in stored)


async def test_a_writer_without_rights_on_the_sequence_goes_on(
    database: Database, own_nats: NatsServer, prefix: str
) -> None:
    database.execute(ddl("S1") + f"CREATE ROLE {prefix} LOGIN; GRANT INSERT ON outbox TO {prefix};")
    try:
        await setup(config_for(database, own_nats, prefix), adopt=True)
        with psycopg.connect(database.dsn_for(prefix)) as writer:
            writer.execute("INSERT INTO outbox (id, payload) VALUES (gen_random_uuid(), '{}')")
        assert database.query("SELECT seq, xid IS NULL FROM outbox") == [(1, False)]
    finally:
        database.execute(f"DROP OWNED BY {prefix}; DROP ROLE {prefix}")


async def test_it_waits_for_a_writer_and_does_not_queue_the_others(
    database: Database, own_nats: NatsServer, prefix: str
) -> None:
    """A transaction holds the table for longer than the lock is asked for: it is asked for again."""
    database.execute(ddl("S1"))
    with psycopg.connect(database.dsn) as holder:
        holder.execute("LOCK TABLE outbox IN ROW EXCLUSIVE MODE")
        adopting = asyncio.create_task(setup(config_for(database, own_nats, prefix), adopt=True))
        with database.connect() as watcher:
            refused = b"SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"
            seen = 0
            while seen < 2:  # the request comes, goes, and comes again
                waiting = watcher.execute(refused).fetchone() != (0,)
                if waiting == (seen % 2 == 0):
                    seen += 1
                await asyncio.sleep(0.01)
            insert(database, 1, "pending")  # passes between two requests, or right behind one
        holder.rollback()
    await adopting
    assert database.query("SELECT count(*) FROM pg_index WHERE indrelid = 'outbox'::regclass AND indisvalid") == [(5,)]


async def test_an_index_that_failed_is_made_anew(database: Database, own_nats: NatsServer, prefix: str) -> None:
    database.execute(ddl("S1"))
    config = config_for(database, own_nats, prefix)
    await setup(config, adopt=True)
    database.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outbox_xid_idx'::regclass")
    steps = await setup(config, adopt=True)
    assert [step.action for step in steps if "outbox_xid_idx" in step.subject] == ["altered", "created"]
    assert {step.action for step in await setup(config, adopt=True)} == {"present"}


async def test_a_table_with_half_of_it_is_left_to_a_person(
    database: Database, own_nats: NatsServer, prefix: str
) -> None:
    database.execute(ddl("S1"))
    await setup(config_for(database, own_nats, prefix))
    with psycopg.connect(database.dsn) as holder:
        holder.execute("ALTER TABLE outbox ADD COLUMN xid xid8")
        holder.commit()
    steps = await setup(config_for(database, own_nats, prefix), adopt=True)
    (step,) = [step for step in steps if step.subject.startswith("adoption")]
    assert step.action == "warning"
    assert "no seq" in step.note


async def test_a_table_that_stays_locked_is_given_up_with_a_reason(
    database: Database, own_nats: NatsServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.setup.ATTEMPTS", 2)
    database.execute(ddl("S1"))
    with psycopg.connect(database.dsn) as holder:
        holder.execute("LOCK TABLE outbox IN ROW EXCLUSIVE MODE")
        with pytest.raises(SetupError, match=r"adoption of public.outbox: .*lock timeout"):
            await setup(config_for(database, own_nats, prefix), adopt=True)
