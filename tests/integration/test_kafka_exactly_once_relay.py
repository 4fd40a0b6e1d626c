"""The whole relay in Kafka's exactly-once mode (G4, G5, G6): whatever is killed, frozen or lost, each event once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from relay.embedded import KafkaServer
from tests.fix_kafka import Kafka
from tests.fix_postgres import Database
from tests.ledger import Ledger
from tests.relays import RelayProcess, create_topic, eventually, more_than, prepare, settings
from tests.relays import kafka as kafka_section
from tests.sinks import (
    Stored,
    read_kafka,
)


async def committed(kafka: Kafka, topic: str) -> list[Stored]:
    return await asyncio.to_thread(read_kafka, kafka.bootstrap, topic)


def exactly_once(bootstrap: str) -> dict[str, Any]:
    return kafka_section(bootstrap, mode="exactly-once")


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("kills", [5, pytest.param(60, marks=[pytest.mark.chaos, pytest.mark.timeout(900)])])
async def test_the_relay_killed_again_and_again(
    database: Database, kafka: Kafka, prefix: str, tmp_path: Path, kills: int
) -> None:
    path = await prepare(tmp_path, settings(database.dsn, exactly_once(kafka.bootstrap), source={"slot": prefix}))
    await asyncio.to_thread(create_topic, kafka.bootstrap, prefix)
    ledger = Ledger(database.dsn, prefix)
    chance = random.Random(kills)
    with ledger.writing(writers=3, pause=0.005):
        for _ in range(kills):
            with RelayProcess(path) as relay:
                goal = chance.choice((0, 1, 50, 150, 300))
                await (relay.has_published(goal) if goal else relay.says("relay.started"))
                relay.kill()
    with RelayProcess(path) as relay:
        stored = await ledger.arrived(lambda: committed(kafka, prefix), relay)
        await relay.stopped()
    ledger.check(stored)


@pytest.mark.guarantee("G4")
async def test_killed_inside_large_transactions(database: Database, kafka: Kafka, prefix: str, tmp_path: Path) -> None:
    """Batches end inside transactions: what the checkpoint's LSN does not cover, its marks must not cover."""
    sections = settings(
        database.dsn,
        exactly_once(kafka.bootstrap),
        source={"slot": prefix},
        checkpoint={"interval": "20ms"},
        delivery={"max_batch_events": 20, "max_in_flight_events": 100},
    )
    path = await prepare(tmp_path, sections)
    await asyncio.to_thread(create_topic, kafka.bootstrap, prefix)
    ledger = Ledger(database.dsn, prefix)
    with ledger.writing(writers=2, events=500, pause=0.05):
        for _ in range(4):
            with RelayProcess(path) as relay:
                await relay.streaming()
                await relay.has_published(relay.counter("published_events") + 700)
                relay.kill()
    with RelayProcess(path) as relay:
        stored = await ledger.arrived(lambda: committed(kafka, prefix), relay)
        await relay.stopped()
    ledger.check(stored)


@pytest.mark.guarantee("G4")
@pytest.mark.guarantee("G5")
async def test_the_slot_dropped_while_the_relay_is_down(
    database: Database, kafka: Kafka, prefix: str, tmp_path: Path
) -> None:
    path = await prepare(tmp_path, settings(database.dsn, exactly_once(kafka.bootstrap), source={"slot": prefix}))
    await asyncio.to_thread(create_topic, kafka.bootstrap, prefix)
    ledger = Ledger(database.dsn, prefix)
    with ledger.writing(writers=3, pause=0.005):
        for _ in range(3):
            with RelayProcess(path) as relay:
                await relay.streaming()  # and saved several checkpoints
                await relay.has_published(relay.counter("published_events") + 300)
                relay.kill()
            await asyncio.to_thread(_drop_slot, database, prefix)
    with RelayProcess(path) as relay:
        stored = await ledger.arrived(lambda: committed(kafka, prefix), relay)
        await relay.streaming()
        await relay.stopped()
    ledger.check(stored)


@pytest.mark.guarantee("G4")
async def test_killed_before_what_an_audit_found_was_healed(
    database: Database, kafka: Kafka, prefix: str, tmp_path: Path
) -> None:
    """The round that the next life resumes is older than what the stream had stored: that is not forgotten with it."""
    path = await prepare(
        tmp_path,
        settings(database.dsn, exactly_once(kafka.bootstrap), source={"slot": prefix}, poll={"interval": "100ms"}),
    )
    await asyncio.to_thread(create_topic, kafka.bootstrap, prefix)
    ledger = Ledger(database.dsn, prefix)
    database.execute("""
        CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_sleep(2); RETURN new; END $$;
        CREATE TRIGGER linger BEFORE UPDATE ON outbox_relay_checkpoint FOR EACH ROW
            WHEN (old.phase = 'stream' AND new.phase = 'recover') EXECUTE FUNCTION linger()
    """)
    with RelayProcess(path) as relay:
        await relay.streaming()
        with ledger.writing():
            await more_than(ledger.journal, 100, "events are written")
            database.execute("ALTER PUBLICATION outbox_relay DROP TABLE outbox_events")
            await more_than(ledger.journal, len(ledger.journal) + 10, "events are hidden")
            database.execute("ALTER PUBLICATION outbox_relay ADD TABLE outbox_events")
            await relay.says("audit.failed")
        lingers = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
        await eventually(lambda: database.query(lingers), "the round is being saved", context=lambda: relay.output)
        relay.kill()
    there = "SELECT FROM outbox_relay_checkpoint WHERE recovery IS NOT NULL"
    await eventually(lambda: database.query(there), "the round is saved")
    database.execute("DROP TRIGGER linger ON outbox_relay_checkpoint")
    ledger.write(5, seed=7)
    with RelayProcess(path) as relay:
        await relay.streaming()
        ledger.write(5, seed=8)
        stored = await ledger.arrived(lambda: committed(kafka, prefix), relay)
        await relay.stopped()
    findings = ledger.compare(stored)
    assert (findings.lost, findings.phantom, findings.duplicates) == ([], [], [])


@pytest.mark.guarantee("G4")
async def test_rows_that_a_dead_relay_still_locks_are_not_stored_again(
    database: Database, kafka: Kafka, prefix: str, tmp_path: Path
) -> None:
    """Claiming skips them, so nothing seems to be open; they come when its backend is gone, and were stored before."""
    poll = {"strategy": "claim", "min_interval": "20ms", "max_interval": "50ms"}
    source = {"slot": prefix, "mode": "poll"}
    sections = settings(database.dsn, exactly_once(kafka.bootstrap), source=source, poll=poll)
    path = await prepare(tmp_path, sections)
    await asyncio.to_thread(create_topic, kafka.bootstrap, prefix)
    ledger = Ledger(database.dsn, prefix, keys=2)
    other = Ledger(database.dsn, prefix, keys=4)
    other.keys = other.keys[2:]
    with RelayProcess(path) as relay:
        await relay.says("poll.started")
        ledger.write(5)
        await ledger.arrived(lambda: committed(kafka, prefix), relay)
        database.execute("""
            CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN PERFORM pg_sleep(6); RETURN new; END $$;
            CREATE TRIGGER linger BEFORE UPDATE ON outbox_events FOR EACH STATEMENT EXECUTE FUNCTION linger()
        """)
        ledger.write(3, seed=5)
        await ledger.arrived(lambda: committed(kafka, prefix), relay)
        relay.kill()
    with RelayProcess(path) as relay:
        await relay.says("sink.opened")
        open_ = "SELECT count(*) FROM outbox_events WHERE published_at IS NULL"
        other.write(3, seed=6)  # published while the first rows are locked
        await other.arrived(lambda: committed(kafka, prefix), relay)
        assert database.query(open_) > [(0,)]
        await eventually(lambda: database.query(open_) == [(0,)], "all are marked")
        await relay.stopped()
    stored = await committed(kafka, prefix)
    assert len(stored) == len({item.id for item in stored}) == len(ledger.journal) + len(other.journal)


def _drop_slot(database: Database, slot: str) -> None:
    with database.connect() as connection:
        while True:
            row = connection.execute(
                "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", (slot,)
            ).fetchone()
            if row is None:
                return
            if row[0] is None:
                connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
                return
            connection.execute("SELECT pg_terminate_backend(%s)", (row[0],))


@pytest.mark.guarantee("G4")
async def test_the_broker_killed_under_the_relay(
    database: Database, own_kafka: KafkaServer, prefix: str, tmp_path: Path
) -> None:
    broker = Kafka(own_kafka.bootstrap)
    path = await prepare(tmp_path, settings(database.dsn, exactly_once(broker.bootstrap), source={"slot": prefix}))
    await asyncio.to_thread(create_topic, broker.bootstrap, prefix)
    ledger = Ledger(database.dsn, prefix)
    with RelayProcess(path) as relay:
        with ledger.writing(writers=3, pause=0.005):
            await relay.has_published(100)
            for _ in range(2):
                await asyncio.to_thread(own_kafka.kill)
                await asyncio.to_thread(own_kafka.restart)
                await relay.has_published(relay.counter("published_events") + 100)
        stored = await ledger.arrived(lambda: committed(broker, prefix), relay)
        await relay.stopped()
    ledger.check(stored)


@pytest.mark.guarantee("G4")
@pytest.mark.guarantee("G6")
async def test_a_frozen_relay_wakes_up_behind_its_successor(
    database: Database, kafka: Kafka, prefix: str, tmp_path: Path
) -> None:
    sections = settings(
        database.dsn, exactly_once(kafka.bootstrap), source={"slot": prefix, "wal_sender_timeout": "3s"}
    )
    path = await prepare(tmp_path, sections)
    await asyncio.to_thread(create_topic, kafka.bootstrap, prefix)
    ledger = Ledger(database.dsn, prefix)
    with RelayProcess(path) as zombie, ledger.writing(writers=3, pause=0.005):
        await zombie.has_published(100)
        zombie.freeze()
        await asyncio.to_thread(_end_sessions, database)
        with RelayProcess(path) as relay:
            await relay.has_published(100)
            zombie.thaw()
            await relay.has_published(relay.counter("published_events") + 200)
            await zombie.says("relay.standing_by")
            relay.kill()
        await zombie.streaming()
        await asyncio.to_thread(ledger.write, 20, 2)
    with RelayProcess(path) as relay:
        stored = await ledger.arrived(lambda: committed(kafka, prefix), relay)
        await relay.stopped()
    ledger.check(stored)


def _end_sessions(database: Database) -> None:
    with database.connect() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'outbox_relay%'"
        )
