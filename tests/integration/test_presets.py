"""Each table that people have, with the DDL they have: streamed, marked as its readers expect, adopted, recovered."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson
import pytest

from relay.check import check
from relay.config import Config
from relay.embedded import NatsServer
from relay.errors import EventRejected
from relay.setup import setup
from tests.fix_kafka import Kafka
from tests.fix_postgres import Database
from tests.relays import config_of, create_topic, eventually, settings
from tests.relays import kafka as kafka_sink
from tests.sinks import Stored, read_jetstream, read_kafka
from tests.tables import ddl, nats_sink, published, running

PROJECT, USER = "11111111-0000-4000-8000-000000000001", "22222222-0000-4000-8000-000000000002"


class Case(NamedTuple):
    """A table with its preset, a way to write a row, and what is expected of it."""

    section: str
    preset: str
    table: str
    insert: str  # %s: the id, made from a number
    topic: str
    headers: dict[str, str]
    marked: str  # condition on rows that were written back
    body: str = "envelope"
    write_back: bool = True

    @property
    def subjects(self) -> str:
        return self.topic.partition(".")[0] + ".>"


CASES = [
    Case(
        "S0",
        "event_outbox",
        "public.event_outbox",
        "INSERT INTO event_outbox (id, aggregate_type, aggregate_id, user_id, project_id, event_type, payload, status,"
        f" created_at) VALUES (%s, 'chat', %s, '{USER}', '{PROJECT}', 'message.sent', '{{\"n\": 1}}', 'pending',"
        " now())",
        "events.chat.message.sent",
        {"type": "message.sent", "aggregate-type": "chat", "user-id": USER, "project-id": PROJECT},
        "status = 'published' AND published_at IS NOT NULL AND retry_count = 0 AND last_error IS NULL",
    ),
    Case(
        "S1",
        "outbox",
        "public.outbox",
        "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, status, attempt_cnt, created_at)"
        " VALUES (%s, 'order', %s, 'created', '{\"n\": 1}', 'pending', 0, now())",
        "events.order.created",
        {"type": "created", "aggregate-type": "order"},
        "status = 'sent' AND updated_at IS NOT NULL AND attempt_cnt = 0",
    ),
    Case(
        "S3",
        "stream_outbox",
        "public.outbox_events",
        "INSERT INTO outbox_events (id, stream, topic, payload)"
        " VALUES (%s::text, 'EVENTS', 'payout.generated', jsonb_build_object('n', 1, 'of', %s::text))",
        "payout.generated",
        {"type": "payout.generated", "Nats-Expected-Stream": "EVENTS"},
        "processed AND processed_at IS NOT NULL AND error IS NULL",
    ),
    Case(
        "S4",
        "service_outbox",
        "orders.outbox_events",
        "INSERT INTO orders.outbox_events (id, aggregate_type, aggregate_id, event_type, payload)"
        " VALUES (%s, 'order', %s, 'shipped', '{\"n\": 1}')",
        "events.order.shipped",
        {"type": "shipped", "aggregate-type": "order"},
        "published_at IS NOT NULL AND retry_count = 0",
    ),
    Case(
        "D",
        "debezium",
        "public.outboxevent",
        "INSERT INTO outboxevent (id, aggregatetype, aggregateid, type, payload)"
        " VALUES (%s, 'Order', %s, 'OrderCreated', '{\"n\": 1}')",
        "outbox.event.Order",
        {},
        "true",
        body="payload",
        write_back=False,
    ),
]


@pytest.fixture(params=CASES, ids=lambda case: case.preset)
def case(request: pytest.FixtureRequest) -> Case:
    found = request.param
    assert isinstance(found, Case)
    return found


def create(database: Database, case: Case) -> None:
    schema = case.table.partition(".")[0]
    database.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}; SET search_path TO {schema}; {ddl(case.section)}")


def event_id(number: int) -> str:
    return f"00000000-0000-7000-8000-{number:012d}"


def write(database: Database, case: Case, *numbers: int) -> None:
    with database.connect() as connection, connection.transaction():
        for number in numbers:
            connection.execute(case.insert.encode(), (event_id(number), event_id(number % 3)))


def configured(database: Database, case: Case, sink: dict[str, Any], prefix: str, **outbox: Any) -> Config:
    block = {"preset": case.preset, "table": case.table, **outbox}
    return config_of(settings(database.dsn, sink, source={"slot": prefix}) | {"outbox": [block]})


async def marked(database: Database, case: Case, count: int) -> None:
    query = f"SELECT count(*) FROM {case.table} WHERE {case.marked}"
    with database.connect() as connection:

        def enough() -> bool:
            row = connection.execute(query.encode()).fetchone()
            return row is not None and row[0] == count

        await eventually(enough, f"{count} rows marked")


def ids(stored: list[Stored]) -> list[str]:
    return [each.id.decode() for each in stored]


def drop_slot(database: Database, slot: str) -> None:
    database.execute(f"SELECT pg_drop_replication_slot('{slot}')")


async def test_a_table_is_served_as_it_stands(
    database: Database, own_nats: NatsServer, prefix: str, case: Case
) -> None:
    create(database, case)
    config = configured(database, case, nats_sink(own_nats.url, case.subjects), prefix)
    await setup(config)
    found = [finding for finding in await check(config, broker=False) if finding.subject == case.table]
    assert not [finding for finding in found if finding.level == "error"], found
    assert [finding for finding in found if "not audited" in finding.message], found
    async with running(config) as relay:
        write(database, case, 1, 2, 3)
        await published(relay, 3)
        await marked(database, case, 3)
    stored = await read_jetstream(own_nats.url, "EVENTS")
    assert ids(stored) == [event_id(1), event_id(2), event_id(3)]
    first = stored[0]
    assert first.topic == case.topic
    for name, value in case.headers.items():
        assert first.headers[name] == value.encode(), name
    assert first.headers["Nats-Msg-Id"].decode() == event_id(1)
    body = orjson.loads(first.body or b"")
    if case.body == "envelope":
        assert body["event_id"] == event_id(1)
        assert body["payload"]["n"] == 1
    else:
        assert body == {"n": 1}
        assert set(first.headers) == {"id", "Nats-Expected-Last-Sequence", "Nats-Msg-Id", "relay-position"}


async def test_an_adopted_table_survives_the_loss_of_its_slot(
    database: Database, own_nats: NatsServer, prefix: str, case: Case
) -> None:
    """G5: with the DDL unchanged but for what --adopt adds."""
    create(database, case)
    config = configured(database, case, nats_sink(own_nats.url, case.subjects), prefix)
    write(database, case, 1, 2)  # before anything of the relay exists: unpublished by their status
    steps = await setup(config, adopt=True)
    assert any(step.subject.startswith("adoption") and step.action == "altered" for step in steps)
    assert {step.action for step in await setup(config, adopt=True)} == {"present"}
    old = 2 if case.write_back else 0  # Debezium's table has no status: its old rows count as published
    write(database, case, 3)
    async with running(config) as relay:
        await published(relay, old + 1)
        write(database, case, 4)
        await published(relay, old + 2)
    drop_slot(database, prefix)
    write(database, case, 5, 6)
    async with running(config) as relay:
        before = relay.progress.published_events  # 5, 6, and what was not behind the checkpoint
        write(database, case, 7)
        await published(relay, before + 1)
        assert relay.progress.recoveries == 1
        if case.write_back:
            await marked(database, case, 7)
    stored = await read_jetstream(own_nats.url, "EVENTS")
    assert list(dict.fromkeys(ids(stored))) == [event_id(n) for n in range(1 if old else 3, 8)]
    assert not [finding for finding in await check(config, broker=False) if "not audited" in finding.message]


@pytest.mark.parametrize("name", ["outbox", "debezium"])
async def test_to_kafka(database: Database, kafka: Kafka, prefix: str, name: str) -> None:
    case = next(case for case in CASES if case.preset == name)
    create(database, case)
    routing = {"topic": prefix, "format": case.body, **({"headers": ["id"]} if name == "debezium" else {})}
    create_topic(kafka.bootstrap, prefix)
    config = configured(database, case, kafka_sink(kafka.bootstrap), prefix, routing=routing)
    await setup(config)
    async with running(config) as relay:
        write(database, case, 1, 2)
        await published(relay, 2)
        await marked(database, case, 2)
    stored = sorted(read_kafka(kafka.bootstrap, prefix), key=lambda each: each.id)
    assert ids(stored) == [event_id(1), event_id(2)]
    assert [each.key for each in stored] == [event_id(1).encode(), event_id(2).encode()]
    if name == "debezium":
        assert set(stored[0].headers) == {"id", "relay-position"}
        assert stored[0].body == b'{"n": 1}'


async def test_a_row_that_names_the_wrong_stream_is_refused(
    database: Database, own_nats: NatsServer, prefix: str
) -> None:
    case = next(case for case in CASES if case.preset == "stream_outbox")
    create(database, case)
    config = configured(database, case, nats_sink(own_nats.url, case.subjects), prefix)
    await setup(config)

    async def refused() -> None:
        async with running(config) as relay:
            database.execute("INSERT INTO outbox_events VALUES ('p1', 'STREAM_PAYOUT', 'payout.generated', '{}')")
            await relay.wait()

    with pytest.raises(EventRejected, match=r"event 'p1' of public.outbox_events .*expected stream does not match"):
        await refused()
    assert database.query("SELECT processed FROM outbox_events") == [(False,)]


async def test_several_tables_with_ids_that_are_not_uuids(
    database: Database, own_nats: NatsServer, prefix: str
) -> None:
    """Event ids carry the table's name then; the rows' ids do not."""
    streams = next(case for case in CASES if case.preset == "stream_outbox")
    create(database, streams)
    database.execute("CREATE TABLE notes (id bigserial PRIMARY KEY, body text, done bool)")
    note = {
        "table": "public.notes",
        "columns": {
            "payload": "body",
            **dict.fromkeys(("aggregate_type", "aggregate_id", "event_type", "topic"), ""),
            **dict.fromkeys(("partition_key", "headers", "created_at"), ""),
        },
        "routing": {"topic": "payout.note", "key": "{id}", "format": "payload"},
        "write_back": {"done": True},
    }
    sections = settings(database.dsn, nats_sink(own_nats.url, "payout.>"), source={"slot": prefix})
    config = config_of(sections | {"outbox": [{"preset": "stream_outbox"}, note]})
    await setup(config)
    async with running(config) as relay:
        database.execute("INSERT INTO outbox_events VALUES ('it''s \"1\"', 'EVENTS', 'payout.generated', '{}')")
        database.execute("INSERT INTO notes (body) VALUES ('a note')")
        await published(relay, 2)
        await marked(database, streams, 1)
        await marked(database, Case("", "", "public.notes", "", "", {}, "done"), 1)
    stored = await read_jetstream(own_nats.url, "EVENTS")
    assert ids(stored) == ['public.outbox_events:it\'s "1"', "public.notes:1"]


async def test_shadow_mode_then_switch_over(database: Database, own_nats: NatsServer, prefix: str) -> None:
    """The relay publishes beside the old publisher, elsewhere; then it takes over what the old one left."""
    case = next(case for case in CASES if case.preset == "event_outbox")
    create(database, case)
    shadow = configured(
        database,
        case,
        nats_sink(own_nats.url, "shadow.>", stream="SHADOW"),
        f"{prefix}_shadow",
        write_back={},
        routing={"topic": "shadow.{event_type}"},
    )
    shadow = shadow.model_copy(update={"relay": shadow.relay.model_copy(update={"name": "shadow"})})
    await setup(shadow, adopt=True)
    async with running(shadow) as relay:
        write(database, case, 1, 2, 3)
        await published(relay, 3)
    # The old publisher has done two of them, and is switched off.
    database.execute("UPDATE event_outbox SET status = 'published' WHERE id::text < '" + event_id(3) + "'")
    config = configured(database, case, nats_sink(own_nats.url, case.subjects), prefix)
    await setup(config)
    async with running(config) as relay:
        await published(relay, 1)
        write(database, case, 4)
        await published(relay, 2)
    assert ids(await read_jetstream(own_nats.url, "SHADOW")) == [event_id(1), event_id(2), event_id(3)]
    assert ids(await read_jetstream(own_nats.url, "EVENTS")) == [event_id(3), event_id(4)]
