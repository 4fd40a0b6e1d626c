"""source.mode = "poll" on real servers: nothing lost under concurrent writers, no slot, no WAL of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import psycopg
import pytest

from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.ledger import Entry
from tests.relays import RelayProcess, eventually, more_than
from tests.scene import Scene


@pytest.fixture(params=["database15", "database"])
async def scene(request: pytest.FixtureRequest, nats: Nats, prefix: str, tmp_path: Path) -> Scene:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Database)
    made = Scene(found.dsn, nats.url, prefix, tmp_path, poll={"interval": "50ms"}, source={"mode": "poll"})
    return await made.set_up()


SAVED = "SELECT xmin::text, ctid::text"


def at_rest(scene: Scene, query: str) -> bool:
    """The same answer during many rounds."""
    before, until = scene.query(query), time.monotonic() + 1
    while time.monotonic() < until:
        if scene.query(query) != before:
            return False
    return True


class Slow(threading.Thread):
    """Transactions that draw their seq early and commit late: what kills `id > last`."""

    def __init__(self, scene: Scene, number: int) -> None:
        super().__init__()
        self.scene, self.key, self.over = scene, f"slow{number}", threading.Event()
        self.entries: list[Entry] = []

    def run(self) -> None:
        with psycopg.connect(self.scene.dsn) as connection:
            version = 0
            while not self.over.is_set():
                version += 1
                row = connection.execute(
                    "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, topic, payload)"
                    " VALUES ('order', %s, 'made', %s, '{}') RETURNING id::text",
                    (self.key, self.scene.ledger.topic),
                ).fetchone()
                assert row is not None
                self.over.wait(0.2)
                connection.commit()
                self.entries.append(Entry(row[0], self.key, version))


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G2")
async def test_nothing_is_lost_under_writers_that_commit_late(scene: Scene) -> None:
    slow = [Slow(scene, number) for number in range(4)]
    with RelayProcess(scene.path) as relay:
        await relay.says("poll.started")
        for each in slow:
            each.start()
        with scene.ledger.writing(writers=3):
            await more_than(scene.ledger.journal, 400, "events are written")
            await eventually(lambda: all(len(each.entries) > 4 for each in slow), "slow ones, too")
        for each in slow:
            each.over.set()
        for each in slow:
            await asyncio.to_thread(each.join)
            scene.ledger.journal += each.entries
        stored = await scene.settled(relay)
        assert len(stored) == len(scene.ledger.journal)
        assert relay.counter("duplicate_events") == 0
        assert relay.status["state"] == "polling"
        await relay.ready()
        await relay.stopped()
    assert scene.slot is None


@pytest.mark.guarantee("G1")
async def test_killed_while_polling(scene: Scene) -> None:
    with scene.ledger.writing(writers=2, pause=0.02):
        for goal in (1, 50):
            with RelayProcess(scene.path) as relay:
                await relay.has_published(goal)
                relay.kill()
    with RelayProcess(scene.path) as relay:
        await scene.settled(relay)
        await relay.stopped()


@pytest.mark.guarantee("G8")
async def test_a_backlog_is_read_in_pages(scene: Scene) -> None:
    scene.execute(
        "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, topic, payload)"
        " SELECT 'order', 'k' || i %% 50, 'made', %s, jsonb_build_object('i', i) FROM generate_series(1, 12000) i",
        scene.ledger.topic,
    )
    with RelayProcess(scene.path) as relay:
        await relay.has_published(12_000)
        await eventually(lambda: relay.counter("published_events") == 12_000, "once")
        await relay.stopped()
    stored = await scene.read()
    assert len({item.id for item in stored}) == len(stored) == 12_000
    assert [item.seq for item in stored] == sorted(item.seq for item in stored)


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("strategy", ["snapshot", "claim"])
async def test_idle_polling_writes_no_wal(scene: Scene, strategy: str) -> None:
    scene.configure(poll={"strategy": strategy, "min_interval": "20ms", "max_interval": "50ms"})
    with RelayProcess(scene.path) as relay:
        scene.ledger.write(5)
        await scene.settled(relay)
        # A new version of the row, or a transaction id that somebody took.
        saved = (
            "SELECT xmin::text, ctid::text, pg_snapshot_xmax(pg_current_snapshot())::text FROM outbox_relay_checkpoint"
        )

        def quiet() -> bool:
            """Nothing of the kind during many rounds."""
            before, until = scene.query(saved), time.monotonic() + 1
            while time.monotonic() < until:
                if scene.query(saved) != before:
                    return False
            return True

        await eventually(quiet, "it comes to rest")
        await relay.stopped()


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("strategy", ["snapshot", "claim"])
async def test_an_idle_outbox_with_busy_neighbours_keeps_nothing(scene: Scene, strategy: str) -> None:
    """Neither WAL (no slot), nor dead rows (no old snapshot), nor checkpoints of its own."""
    scene.configure(poll={"strategy": strategy, "min_interval": "20ms", "max_interval": "50ms"})
    scene.execute("CREATE TABLE neighbour (id bigint, pad text)")
    with RelayProcess(scene.path) as relay:
        scene.ledger.write(5)
        await scene.settled(relay)
        saved = f"{SAVED} FROM outbox_relay_checkpoint"
        await eventually(lambda: at_rest(scene, saved), "it comes to rest")
        rest = scene.query(saved)
        (busy,) = scene.query("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")
        for _ in range(20):
            scene.execute("INSERT INTO neighbour SELECT i, repeat('x', 500) FROM generate_series(1, 1000) i")

        def moved_on() -> bool:
            """All sessions of the relay have looked since, and hold nothing older."""
            held = scene.query(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'outbox_relay%%'"
                " AND age(backend_xmin) > age(%s::xid8::xid)",
                busy,
            )
            return held == (0,)

        await eventually(moved_on, "no old snapshot is held", context=lambda: relay.output)
        assert scene.slot is None
        assert scene.query(saved) == rest
        await relay.stopped()


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G3")
async def test_switching_between_stream_and_poll_republishes_nothing(scene: Scene) -> None:
    published = 0
    for seed, mode in enumerate(("auto", "poll", "auto", "poll"), start=1):
        scene.configure(source={"mode": mode})
        with RelayProcess(scene.path) as relay:
            await relay.says("stream.started" if mode == "auto" else "poll.started")
            assert (scene.slot is None) == (mode == "poll")
            scene.ledger.write(20, seed=seed)
            await scene.settled(relay)
            await scene.covered()
            published += relay.counter("published_events")
            assert relay.counter("duplicate_events") == 0
            await relay.stopped()
        scene.ledger.write(5, seed=seed + 50)
    with RelayProcess(scene.path) as relay:
        await scene.settled(relay)
        published += relay.counter("published_events")
        await relay.stopped()
    assert published == len(scene.ledger.journal)


@pytest.mark.guarantee("G4")
async def test_a_place_is_never_saved_behind_the_end_of_its_round(scene: Scene) -> None:
    """Places and ends of rounds are saved on two sessions: the slower one must not open the round again."""
    scene.configure(checkpoint={"interval": "100ms"})
    scene.execute("""
        CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_sleep(0.5); RETURN new; END $$;
        CREATE TRIGGER linger BEFORE UPDATE ON outbox_relay_checkpoint FOR EACH ROW
            WHEN (old.recovery IS NOT NULL AND new.recovery IS NULL) EXECUTE FUNCTION linger()
    """)
    with RelayProcess(scene.path) as relay:
        await relay.says("poll.started")
        for seed in range(3):
            scene.ledger.write(20, seed=seed)
            await scene.settled(relay)
            await scene.covered()
            assert scene.query("SELECT recovery FROM outbox_relay_checkpoint") == (None,)
        await relay.stopped()
    assert scene.query("SELECT recovery FROM outbox_relay_checkpoint") == (None,)


async def test_stopped_while_a_place_is_saved(scene: Scene) -> None:
    """That save is given up, so the last one has to do it: else the next start publishes the round again."""
    scene.configure(checkpoint={"interval": "100ms"})
    scene.sections["outbox"] = [{"table": "public.outbox_events", "write_back": {"published_at": "now()"}}]
    scene.configure()
    # Write-back keeps the round open; the tick saves a place meanwhile.
    scene.execute("""
        CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_sleep(tg_argv[0]::float); RETURN new; END $$;
        CREATE TRIGGER linger BEFORE UPDATE ON outbox_events FOR EACH STATEMENT EXECUTE FUNCTION linger(0.5);
        CREATE TRIGGER linger BEFORE UPDATE ON outbox_relay_checkpoint FOR EACH ROW
            WHEN (new.recovery->>'seq' IS NOT NULL) EXECUTE FUNCTION linger(1)
    """)
    published = 0
    scene.ledger.write(20)
    saving = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event = 'PgSleep' AND query LIKE '%%recovery = %%'"
    )
    with RelayProcess(scene.path) as relay:
        await eventually(lambda: scene.query(saving) != (0,), "a place is saved", context=lambda: relay.output)
        published += relay.counter("published_events")
        await relay.stopped()
    with RelayProcess(scene.path) as relay:
        await scene.settled(relay)
        scene.ledger.write(5, seed=2)
        await scene.settled(relay)
        published += relay.counter("published_events")
        await relay.stopped()
    assert published == len(scene.ledger.journal)


async def test_from_now_leaves_the_table_alone(scene: Scene) -> None:
    scene.ledger.write(10)
    scene.ledger.journal.clear()
    with RelayProcess(scene.path, "--from-now") as relay:
        await relay.says("poll.started")
        await eventually(lambda: scene.query("SELECT phase FROM outbox_relay_checkpoint") == ("poll",), "it has begun")
        scene.ledger.write(10, seed=2)
        await scene.settled(relay)
        await relay.stopped()


async def test_a_table_without_xid_is_refused(scene: Scene) -> None:
    scene.sections["outbox"] = [{"table": "public.outbox_events", "columns": {"xid": ""}}]
    scene.configure()
    with RelayProcess(scene.path) as relay:
        await relay.refuses(3, "cannot be polled", "adopt")
