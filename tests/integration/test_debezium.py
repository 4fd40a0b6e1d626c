"""Taking over from Debezium: what it emitted, the relay emits; and its slot is continued without a gap."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.checkpoint import EMPTY
from relay.config import Config, load
from relay.debezium import convert
from relay.debezium_options import ROUTER
from relay.embedded import NatsServer
from relay.errors import ConfigError, SetupError
from relay.setup import setup
from tests.fix_kafka import Kafka
from tests.fix_postgres import Database
from tests.relays import config_of, eventually, settings
from tests.sinks import Stored, read_jetstream, read_kafka
from tests.tables import FIXTURES, ddl, nats_sink, published, running

CASES: list[dict[str, Any]] = json.loads((FIXTURES / "debezium" / "router.json").read_text())
# What the relay says that it cannot translate: the body then is the bare payload, the key decides the partition.
UNTRANSLATED = {"additional envelope": "type:envelope:eventType", "additional partition": "shard:partition"}


def converted(database: Database, kafka: Kafka, case: dict[str, Any], folder: Path, slot: str) -> tuple[Config, str]:
    options = {f"transforms.outbox.{name}": value for name, value in case["options"].items()}
    connector = {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "table.include.list": "public.outboxevent",
        "plugin.name": "pgoutput",
        "transforms": "outbox",
        "transforms.outbox.type": ROUTER,
        "key.converter": "org.apache.kafka.connect.storage.StringConverter",
        "value.converter": "org.apache.kafka.connect.storage.StringConverter",
        **options,
    }
    text = convert([("connector.json", json.dumps({"name": "shop", "config": connector}))])
    path = folder / "relay.toml"
    path.write_text(text)
    environment = {
        "RELAY_DATABASE__DSN": database.dsn,
        "RELAY_SOURCE__SLOT": slot,
        "RELAY_SINK__KAFKA__OPTIONS": json.dumps({"bootstrap.servers": kafka.bootstrap}),
        "RELAY_SINK__KAFKA__CREATE_TOPICS": "true",
        "RELAY_ADMIN__LISTEN": "127.0.0.1:0",
    }
    return load(path, environment), text


def insert(database: Database, case: dict[str, Any]) -> None:
    columns = case["columns"]
    values = ", ".join("decode(%s, 'base64')" if kind == "bytea" else f"%s::{kind}" for kind in columns.values())
    with database.connect() as connection, connection.transaction():
        for row in case["rows"]:
            connection.execute(f"INSERT INTO outboxevent VALUES ({values})".encode(), list(row.values()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
async def test_the_same_as_debezium(
    database: Database, kafka: Kafka, prefix: str, tmp_path: Path, case: dict[str, Any]
) -> None:
    """Topic, key, headers and body against the recorded output of Debezium's own router (fixtures/debezium)."""
    columns = ", ".join(f"{name} {kind}" for name, kind in case["columns"].items())
    database.execute(f"CREATE TABLE outboxevent ({columns})")
    config, text = converted(database, kafka, case, tmp_path, prefix)
    await setup(config)
    async with running(config) as relay:
        insert(database, case)
        await published(relay, len(case["rows"]))
    assert (UNTRANSLATED.get(case["case"], "") in text) and (case["case"] in UNTRANSLATED) == ("placement = " in text)
    for row, expected in zip(case["rows"], case["published"], strict=True):
        wanted = str(next(iter(row.values()))).encode()
        (found,) = [each for each in read_kafka(kafka.bootstrap, expected["topic"]) if each.id == wanted]
        assert found.key == expected["key"].encode()
        headers = {
            name: value.encode() for name, value in expected["headers by SimpleHeaderConverter"].items() if value
        }
        assert {name: value for name, value in found.headers.items() if name != "relay-position"} == headers
        if case["case"] not in UNTRANSLATED or case["case"] == "additional partition":
            compare_bodies(found, expected, case)


def compare_bodies(found: Stored, expected: dict[str, Any], case: dict[str, Any]) -> None:
    if "value by BinaryDataConverter, base64" in expected:
        assert found.body == base64.b64decode(expected["value by BinaryDataConverter, base64"])
    elif case["case"] == "expanded":  # Connect writes the JSON anew, without the blanks
        assert json.loads(found.body or b"") == json.loads(expected["value by JsonConverter"])
    else:
        value = expected["value by StringConverter"]
        assert found.body == (None if value is None else value.encode())


# --- the slot


def outbox(database: Database, number: int, *, and_delete: bool = False) -> None:
    with database.connect() as connection, connection.transaction():
        connection.execute(
            "INSERT INTO outboxevent VALUES (%s, 'Order', '1', 'OrderCreated', '{\"n\": 1}')", (event_id(number),)
        )
        if and_delete:
            connection.execute("DELETE FROM outboxevent")


def event_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


@pytest.fixture
def config(database: Database, own_nats: NatsServer, prefix: str) -> Config:
    """As Debezium leaves it: its table, its publication of all tables, its slot."""
    database.execute(ddl("D"))
    database.execute("CREATE PUBLICATION dbz_publication FOR ALL TABLES")
    database.execute(f"SELECT pg_create_logical_replication_slot('{prefix}', 'pgoutput')")
    source = {"slot": prefix, "publication": "dbz_publication"}
    sections = settings(database.dsn, nats_sink(own_nats.url, "outbox.>"), source=source)
    return config_of(sections | {"outbox": [{"preset": "debezium"}]})


async def test_an_existing_slot_is_continued_without_a_gap(
    database: Database, own_nats: NatsServer, prefix: str, config: Config
) -> None:
    """G1: what Debezium confirmed is not repeated, what it did not confirm is not lost, though the rows are gone."""
    outbox(database, 1, and_delete=True)
    outbox(database, 2)
    database.execute(f"SELECT pg_replication_slot_advance('{prefix}', pg_current_wal_lsn())")  # Debezium had these
    outbox(database, 3, and_delete=True)
    outbox(database, 4)
    steps = await setup(config, from_slot=prefix, publication="dbz_publication")
    assert any(step.subject.startswith("checkpoint of") and step.action == "created" for step in steps)
    query = (
        "SELECT phase, snap::text, lsn = (SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s)"
    )
    assert database.query(f"{query} FROM outbox_relay_checkpoint", prefix) == [("stream", str(EMPTY), True)]
    again = await setup(config, from_slot=prefix)
    assert {step.action for step in again if step.subject.startswith("checkpoint of")} == {"present"}
    outbox(database, 5)
    async with running(config) as relay:
        await published(relay, 3)
        assert relay.progress.recoveries == 0

        def promoted() -> bool:
            return database.query("SELECT snap::text FROM outbox_relay_checkpoint") != [(str(EMPTY),)]

        await eventually(promoted, "a snapshot is promoted by itself")
    stored = await read_jetstream(own_nats.url, "EVENTS")
    assert [each.id.decode() for each in stored] == [event_id(3), event_id(4), event_id(5)]


async def test_slots_that_cannot_be_continued(database: Database, prefix: str, config: Config) -> None:
    with pytest.raises(ConfigError, match=r"source.slot is .* not 'other'"):
        await setup(config, from_slot="other")
    with pytest.raises(ConfigError, match=r"source.publication is 'dbz_publication' .* not 'p'"):
        await setup(config, from_slot=prefix, publication="p")
    with psycopg.connect(database.dsn, autocommit=True) as admin:
        admin.execute("SELECT pg_drop_replication_slot(%s)", (prefix,))
        with pytest.raises(SetupError, match="does not exist"):
            await setup(config, from_slot=prefix)
        admin.execute("SELECT pg_create_physical_replication_slot(%s)", (prefix,))
        with pytest.raises(SetupError, match="is a physical one: it cannot be continued"):
            await setup(config, from_slot=prefix)
        admin.execute("SELECT pg_drop_replication_slot(%s)", (prefix,))
    assert database.query("SELECT count(*) FROM pg_class WHERE relname = 'outbox_relay_checkpoint'") == [(0,)]


async def test_a_slot_that_is_in_use_is_left_alone(database: Database, prefix: str, config: Config) -> None:
    await setup(config)
    async with running(config.model_copy(update={"relay": config.relay.model_copy(update={"name": "other"})})):
        with pytest.raises(SetupError, match="in use by process"):
            await setup(config, from_slot=prefix)


async def test_a_relay_with_a_checkpoint_of_its_own_is_not_moved(
    database: Database, prefix: str, config: Config
) -> None:
    await setup(config)
    async with running(config):
        pass
    database.execute("UPDATE outbox_relay_checkpoint SET slot = 'another'")
    with pytest.raises(SetupError, match="has a checkpoint already"):
        await setup(config, from_slot=prefix)
