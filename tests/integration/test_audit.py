"""The audit on real servers: rows that the stream does not bring are published from the table, without an operator."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.relays import RelayProcess, eventually, more_than
from tests.scene import Scene


@pytest.fixture(params=["database15", "database"])
async def scene(request: pytest.FixtureRequest, nats: Nats, prefix: str, tmp_path: Path) -> Scene:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Database)
    return await Scene(found.dsn, nats.url, prefix, tmp_path, poll={"interval": "100ms"}).set_up()


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G5")
@pytest.mark.parametrize(
    ("scene", "fault", "remedy"),
    [
        (
            "database15",
            "ALTER PUBLICATION outbox_relay DROP TABLE outbox_events",
            "ALTER PUBLICATION outbox_relay ADD TABLE outbox_events",
        ),
        (
            "database",
            "ALTER PUBLICATION outbox_relay SET TABLE outbox_events WHERE (seq < 0)",
            "ALTER PUBLICATION outbox_relay SET TABLE outbox_events",
        ),
    ],
    ids=["table dropped", "row filter"],
    indirect=["scene"],
)
async def test_a_publication_that_hides_rows_under_load(scene: Scene, fault: str, remedy: str) -> None:
    """Found by counting, healed from the table, polled until somebody repairs it; then it streams again."""
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        with scene.ledger.writing():
            await more_than(scene.ledger.journal, 50, "events are written")
            scene.execute(fault)
            hidden = len(scene.ledger.journal)
            line = await relay.says("audit.failed")
            assert line["hint"]
            await relay.says("audit.healed")
            told = await relay.says("stream.unavailable")
            assert "ALTER PUBLICATION" in told["hint"]
            await more_than(scene.ledger.journal, hidden + 100, "events are written")
            await eventually(lambda: relay.status.get("state") == "polling", "it polls")
            streams = len(relay.said("stream.started"))
            scene.execute(remedy)
            await relay.says_again("stream.started", streams)
            await more_than(scene.ledger.journal, len(scene.ledger.journal) + 50, "events are written")
        await scene.settled(relay)
        assert relay.counter("audit_failures") >= 1
        await relay.ready()
        await relay.stopped()


@pytest.mark.guarantee("G1")
async def test_a_publication_repaired_before_anybody_noticed(scene: Scene) -> None:
    """Only the rows of that moment come from the table; nobody is needed, and the stream goes on."""
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(10)
        await scene.complete(relay)
        with psycopg.connect(scene.dsn) as connection:
            connection.execute("ALTER PUBLICATION outbox_relay DROP TABLE outbox_events")
            connection.commit()
            scene.ledger.write(10, seed=2)
            connection.execute("ALTER PUBLICATION outbox_relay ADD TABLE outbox_events")
            connection.commit()
        scene.ledger.write(10, seed=3)
        await scene.complete(relay)
        assert relay.said("audit.failed")
        await relay.says_again("stream.started", 1)
        scene.ledger.write(10, seed=4)
        await scene.complete(relay)
        await scene.covered()
        await relay.stopped()


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G5")
async def test_a_table_that_is_replaced_by_an_empty_one(scene: Scene) -> None:
    """The publication keeps the old one. As many rows as are missed went away with it, in the same window."""
    scene.configure(checkpoint={"interval": "2s"})
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        with psycopg.connect(scene.dsn) as connection:
            scene.ledger.write(20)
            connection.execute("ALTER TABLE outbox_events RENAME TO outbox_before")
            connection.execute("CREATE TABLE outbox_events (LIKE outbox_before INCLUDING ALL)")
            connection.execute("ALTER TABLE outbox_events ALTER seq RESTART 1000")
            connection.commit()
            scene.ledger.write(20, seed=2)
        await relay.says("audit.healed")
        await scene.complete(relay)
        scene.execute("ALTER PUBLICATION outbox_relay SET TABLE outbox_events")
        await relay.says_again("stream.started", 1)
        await relay.stopped()


@pytest.mark.guarantee("G1")
async def test_killed_while_it_heals(scene: Scene) -> None:
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.execute("ALTER PUBLICATION outbox_relay DROP TABLE outbox_events")
        scene.ledger.write(20)
        scene.execute("ALTER PUBLICATION outbox_relay ADD TABLE outbox_events")
        await relay.says("audit.failed")
        relay.kill()
    scene.ledger.write(10, seed=2)
    with RelayProcess(scene.path) as relay:
        await scene.complete(relay)
        await relay.streaming()
        await relay.stopped()


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G5")
async def test_a_stream_that_lacks_rows_twice_in_a_row_is_not_trusted_for_a_while(scene: Scene) -> None:
    """Somebody stamps rows anew: the publication looks right, and the stream has no such inserts."""
    scene.configure(source={"distrust": "3s"})
    stamp = "UPDATE outbox_events SET xid = pg_current_xact_id()"
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(10)
        await scene.complete(relay)
        await scene.covered()  # in one window with the inserts it would not be noticed, and would do no harm
        scene.execute(stamp)
        await relay.says("audit.healed")
        await relay.says_again("stream.started", 1)
        await scene.covered()
        assert not relay.said("stream.distrusted")
        scene.execute(stamp)
        line = await relay.says("stream.distrusted")
        assert (line["retry_seconds"], "relay check" in line["hint"]) == (3, True), line
        await eventually(lambda: relay.status.get("state") == "polling", "it polls", context=lambda: relay.output)
        scene.ledger.write(10, seed=2)
        await scene.complete(relay)  # meanwhile from the table
        await relay.says_again("stream.started", 2)
        scene.ledger.write(10, seed=3)
        await scene.complete(relay)
        await scene.covered()
        assert len(relay.said("stream.distrusted")) == 1
        await relay.stopped()


@pytest.mark.guarantee("G3")
async def test_restarts_between_windows_raise_no_alarm(scene: Scene) -> None:
    """Killed and stopped in turn, under load: what was counted before counts afterwards."""
    failures = recovered = 0
    with scene.ledger.writing(writers=2, pause=0.01):
        for number in range(4):
            with RelayProcess(scene.path) as relay:
                await relay.streaming()
                before = relay.counter("audits")
                await eventually(lambda r=relay, b=before: r.counter("audits") > b + 1, "windows are judged")  # type: ignore[misc]
                failures += relay.counter("audit_failures")
                if number:
                    recovered += relay.counter("recovered_events")
                if number % 2:
                    relay.kill()
                else:
                    await relay.stopped()
    with RelayProcess(scene.path) as relay:
        await scene.settled(relay)
        await scene.covered()
        failures += relay.counter("audit_failures")
        await relay.stopped()
    assert (failures, recovered) == (0, 0)


@pytest.mark.guarantee("G1")
async def test_wal2json_with_a_new_partition(database15: Database, nats: Nats, prefix: str, tmp_path: Path) -> None:
    scene = Scene(database15.dsn, nats.url, prefix, tmp_path, poll={"interval": "100ms"}, source={"plugin": "wal2json"})
    await scene.set_up()
    scene.execute(
        "ALTER TABLE outbox_events RENAME TO old_events;"
        "CREATE TABLE outbox_events (LIKE old_events INCLUDING DEFAULTS INCLUDING IDENTITY) PARTITION BY RANGE (seq);"
        "CREATE TABLE events_1 PARTITION OF outbox_events FOR VALUES FROM (0) TO (30);"
        "CREATE INDEX ON outbox_events (xid); CREATE INDEX ON outbox_events (seq)"
    )
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(20)
        await scene.settled(relay)
        scene.execute("CREATE TABLE events_2 PARTITION OF outbox_events FOR VALUES FROM (30) TO (100000)")
        scene.ledger.write(40, seed=2)
        await scene.settled(relay)
        await scene.covered()
        assert relay.counter("audits") > 0
        await relay.stopped()
