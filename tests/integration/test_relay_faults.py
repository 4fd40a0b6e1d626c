"""The relay on real servers while they fail: nothing lost, nothing invented, order kept, and Postgres never held up."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psycopg
import pytest

from relay.depth import LEAST
from relay.embedded import KafkaServer, NatsServer, PostgresServer
from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.fix_proxy import Proxy
from tests.ledger import Ledger
from tests.relays import RelayProcess, create_topic, eventually, more_than, prepare, settings
from tests.relays import kafka as kafka_sink
from tests.scene import Scene
from tests.sinks import read_kafka

StartProxy = Callable[[str], Awaitable[Proxy]]
MANY = (
    "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, topic, payload)"
    " SELECT 'order', 'k' || i %% 50, 'made', %s, jsonb_build_object('i', i) FROM generate_series(1, %s) i"
)


@pytest.fixture
async def scene(database: Database, nats: Nats, prefix: str, tmp_path: Path) -> Scene:
    return await Scene(database.dsn, nats.url, prefix, tmp_path).set_up()


# --- starting and stopping, when all is well


@pytest.mark.guarantee("G3")
async def test_a_clean_stop_delivers_nothing_twice(scene: Scene) -> None:
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        with scene.ledger.writing():
            await eventually(lambda: len(scene.ledger.journal) > 200, "events are written")
            await relay.stopped()
    with RelayProcess(scene.path) as relay:
        await scene.settled(relay)
        await relay.ready()
        assert relay.counter("duplicate_events") == 0, relay.output
        await relay.stopped()


@pytest.mark.guarantee("G4")
async def test_without_a_fence_the_checkpoint_follows_the_window(
    database: Database, nats: Nats, prefix: str, tmp_path: Path
) -> None:
    """Else a kill would repeat whatever was published since the last interval, here an hour."""
    patient = {"checkpoint": {"interval": 3600}, "source": {"slot": prefix, "wal_sender_timeout": 20_000}}
    scene = Scene(database.dsn, nats.url, prefix, tmp_path, delivery={"max_in_flight_events": 50}, **patient)
    scene.sections["sink"]["jetstream"]["mode"] = "shared"
    await scene.set_up()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        before = scene.query("SELECT lsn FROM outbox_relay_checkpoint")[0]
        scene.ledger.write(300)
        await scene.settled(relay)
        await eventually(
            lambda: scene.query("SELECT lsn > %s FROM outbox_relay_checkpoint", before)[0], "the checkpoint is saved"
        )
        await relay.stopped()


@pytest.mark.parametrize("broker_frozen", [False, True])
async def test_a_second_signal_aborts(
    database: Database, own_nats: NatsServer, prefix: str, tmp_path: Path, broker_frozen: bool
) -> None:
    scene = await Scene(database.dsn, own_nats.url, prefix, tmp_path, delivery={"shutdown_timeout": "60s"}).set_up()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        await relay.says("sink.opened")
        if broker_frozen:
            own_nats.freeze()
        else:
            own_nats.kill()
        scene.ledger.write(5)
        await eventually(lambda: relay.status.get("in_flight", {}).get("events"), "events in flight")
        relay.terminate()
        await relay.says("relay.draining")
        relay.terminate()
        assert await relay.ended() == 1
        assert "Traceback" not in relay.output, relay.output
    own_nats.thaw()
    own_nats.start()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        await scene.settled(relay)
        await relay.stopped()


async def test_a_stop_is_heard_while_an_old_transaction_is_waited_for(scene: Scene) -> None:
    with psycopg.connect(scene.dsn) as old, RelayProcess(scene.path) as relay:
        old.execute("SELECT pg_current_xact_id()")
        await relay.says("recovery.started")
        await relay.stopped()


@pytest.mark.guarantee("G5")
async def test_the_first_start_publishes_what_the_table_holds(scene: Scene) -> None:
    """And rows committed while it starts are neither lost nor doubled."""
    scene.ledger.write(50, 3)
    with scene.ledger.writing(), RelayProcess(scene.path) as relay:
        await relay.streaming()
        streamed = len(scene.ledger.journal)
        await eventually(lambda: len(scene.ledger.journal) > streamed + 50, "some more")
        await relay.stopped()
    with RelayProcess(scene.path) as relay:
        await scene.settled(relay)
        assert relay.counter("duplicate_events") == 0
        await relay.stopped()


async def test_from_now_leaves_the_table_alone(scene: Scene) -> None:
    scene.ledger.write(10)
    scene.ledger.journal.clear()
    with RelayProcess(scene.path, "--from-now") as relay:
        await relay.streaming()
        scene.ledger.write(10, seed=2)
        await scene.settled(relay)
        await relay.stopped()


@pytest.mark.guarantee("G2")
async def test_stored_order_is_commit_order(scene: Scene) -> None:
    """Writers that lock their aggregate; few keys, many writers, short transactions, some roll back."""
    scene.ledger.keys = scene.ledger.keys[:3]
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        with scene.ledger.writing(writers=6, pause=0):
            await eventually(lambda: len(scene.ledger.journal) > 1500, "events are written")
        await scene.settled(relay)
        assert scene.ledger.rolled_back
        await relay.stopped()


# --- Postgres fails


@pytest.mark.guarantee("G5")
async def test_a_slot_dropped_while_the_relay_is_down(scene: Scene) -> None:
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(20)
        await scene.settled(relay)
        await relay.stopped()
    scene.ledger.write(20, seed=2)
    scene.query("SELECT pg_drop_replication_slot(%s)", scene.name)
    scene.ledger.write(20, seed=3)
    with scene.ledger.writing(), RelayProcess(scene.path) as relay:
        line = await relay.says("recovery.started")
        assert "does not exist" in line["reason"]
        await relay.streaming()
        await relay.stopped()
    with RelayProcess(scene.path) as relay:
        await scene.settled(relay)
        await relay.stopped()


@pytest.mark.guarantee("G1")
async def test_a_walsender_that_is_terminated(scene: Scene) -> None:
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        with scene.ledger.writing():
            for round_ in range(1, 4):
                await more_than(scene.ledger.journal, 100 * round_, "events are written")
                scene.query(
                    "SELECT count(pg_terminate_backend(active_pid)) FROM pg_replication_slots WHERE slot_name = %s",
                    scene.name,
                )
                await relay.says_again("stream.started", round_)
        await scene.settled(relay)
        await relay.stopped()


@pytest.mark.guarantee("G1")
async def test_postgres_restarted(own_postgres: PostgresServer, nats: Nats, prefix: str, tmp_path: Path) -> None:
    scene = await Scene(own_postgres.dsn(), nats.url, prefix, tmp_path).set_up()
    fast, immediate = (lambda: own_postgres.restart("fast")), (lambda: own_postgres.restart("immediate"))
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        with scene.ledger.writing():
            for round_, restart in enumerate((fast, immediate), start=1):
                await more_than(scene.ledger.journal, 150 * round_, "events are written")
                await asyncio.to_thread(restart)
                await relay.says_again("stream.started", round_)
        await scene.settled(relay)
        await relay.ready()
        await relay.stopped()


@pytest.mark.guarantee("G1")
async def test_the_network_to_postgres_is_cut_without_a_sign(
    database: Database, nats: Nats, prefix: str, tmp_path: Path, proxy: StartProxy
) -> None:
    cable = await proxy(database.dsn)
    scene = await Scene(database.dsn, nats.url, prefix, tmp_path).set_up()
    scene.sections["database"]["dsn"] = cable.url
    scene.sections["source"]["wal_sender_timeout"] = "3s"
    scene.path = await prepare(tmp_path, scene.sections)
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        await asyncio.to_thread(scene.ledger.write, 20)
        await scene.settled(relay)
        cable.stall()
        await asyncio.to_thread(scene.ledger.write, 20, seed=2)
        await relay.says("source.failed")
        await cable.cut()  # what hung in the cable is gone; the old sessions die on the server's side by themselves
        await cable.resume()
        await scene.settled(relay)
        await relay.stopped()


# --- the broker fails


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("how", ["kill", "stall"])
async def test_nats_goes_and_comes_back(
    database: Database, own_nats: NatsServer, prefix: str, tmp_path: Path, proxy: StartProxy, how: str
) -> None:
    cable = await proxy(own_nats.url)
    scene = await Scene(database.dsn, own_nats.url, prefix, tmp_path).set_up()
    scene.sections["sink"]["jetstream"]["servers"] = [cable.url]
    scene.path = await prepare(tmp_path, scene.sections)
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        with scene.ledger.writing():
            for round_ in range(1, 3):
                await more_than(scene.ledger.journal, 150 * round_, "events are written")
                failures = len(relay.said("sink.failed"))
                if how == "kill":
                    own_nats.kill()
                else:
                    cable.stall()
                await relay.says_again("sink.failed", failures)
                own_nats.start()
                await cable.resume()
        await scene.settled(relay)
        await relay.ready()
        await relay.stopped()


@pytest.mark.guarantee("G1")
async def test_kafka_goes_and_comes_back(
    database: Database, own_kafka: KafkaServer, prefix: str, tmp_path: Path
) -> None:
    path = await prepare(tmp_path, settings(database.dsn, kafka_sink(own_kafka.bootstrap), source={"slot": prefix}))
    await asyncio.to_thread(create_topic, own_kafka.bootstrap, prefix)
    ledger = Ledger(database.dsn, prefix)
    with RelayProcess(path) as relay:
        await relay.streaming()
        with ledger.writing():
            await eventually(lambda: len(ledger.journal) > 150, "events are written")
            await eventually(lambda: relay.counter("published_events") > 100, "flows", context=lambda: relay.output)
            await asyncio.to_thread(own_kafka.kill)
            written = len(ledger.journal)
            await eventually(lambda: len(ledger.journal) > written + 100, "events are written")
            await asyncio.to_thread(own_kafka.start)
        stored = await ledger.arrived(lambda: asyncio.to_thread(read_kafka, own_kafka.bootstrap, prefix), relay)
        ledger.check(stored, duplicates=len(stored))
        await relay.ready()
        await relay.stopped()


# --- WAL and memory


@pytest.mark.guarantee("G8")
async def test_only_what_the_round_trip_needs_is_read_while_kafka_does_not_answer(
    database: Database, own_kafka: KafkaServer, prefix: str, tmp_path: Path
) -> None:
    path = await prepare(tmp_path, settings(database.dsn, kafka_sink(own_kafka.bootstrap), source={"slot": prefix}))
    await asyncio.to_thread(create_topic, own_kafka.bootstrap, prefix)
    ledger = Ledger(database.dsn, prefix)
    with RelayProcess(path) as relay:
        await relay.streaming()
        ledger.write(10)
        await relay.has_published(len(ledger.journal))
        own_kafka.freeze()
        ledger.write(70, 100)
        in_flight: list[int] = []

        def reading_has_stopped() -> bool:
            in_flight.append(relay.status["in_flight"]["events"])
            return in_flight[-1] > 500 and len(in_flight) > 5 and len(set(in_flight[-5:])) == 1

        await eventually(reading_has_stopped, "reading has stopped", context=lambda: relay.output)
        own_kafka.thaw()
        assert LEAST <= in_flight[-1] < LEAST + 500
        stored = await ledger.arrived(lambda: asyncio.to_thread(read_kafka, own_kafka.bootstrap, prefix), relay)
        ledger.check(stored, duplicates=len(stored))


@pytest.mark.guarantee("G10")
async def test_settings_of_the_role_do_not_hold_it_up(scene: Scene, database: Database) -> None:
    """Made for people and applications: queries that are cut off, sessions that may not rest, nothing written."""
    scene.sections["outbox"] = [{"write_back": {"published_at": "now()"}}]  # has a session that rests
    scene.configure(database={"dsn": database.dsn_for(scene.name)})
    scene.execute(
        f"CREATE ROLE {scene.name} LOGIN SUPERUSER; ALTER ROLE {scene.name} SET statement_timeout = '1ms';"
        f" ALTER ROLE {scene.name} SET idle_session_timeout = '500ms';"
        f" ALTER ROLE {scene.name} SET default_transaction_read_only = on"
    )
    try:
        with RelayProcess(scene.path) as relay:
            await relay.streaming()
            scene.ledger.write(50)
            await scene.settled(relay)
            await asyncio.sleep(2)
            scene.ledger.write(50, seed=2)
            await scene.settled(relay)
            assert not relay.said("source.failed"), relay.output
            await relay.stopped()
    finally:
        scene.execute(f"DROP OWNED BY {scene.name}; DROP ROLE {scene.name}")


@pytest.mark.guarantee("G7")
async def test_an_idle_outbox_with_busy_neighbours_retains_no_wal(scene: Scene) -> None:
    scene.execute("CREATE TABLE neighbour (id bigint, pad text)")
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(5)
        await scene.settled(relay)
        for _ in range(4):
            scene.execute("INSERT INTO neighbour SELECT i, repeat('x', 500) FROM generate_series(1, 10000) i")
        (end,) = scene.query("SELECT pg_current_wal_lsn()::text")

        def followed() -> bool:
            scene.execute("CHECKPOINT")  # writes the record at which restart_lsn may move
            return bool(
                scene.query(
                    "SELECT confirmed_flush_lsn >= %s::pg_lsn - 2000000 AND restart_lsn >= %s::pg_lsn - 2000000"
                    " FROM pg_replication_slots WHERE slot_name = %s",
                    end,
                    end,
                    scene.name,
                )[0]
            )

        await eventually(followed, "the slot follows", context=lambda: relay.output)
        await relay.stopped()


@pytest.mark.guarantee("G7")
async def test_an_idle_relay_writes_no_checkpoints(scene: Scene) -> None:
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(5)
        await scene.settled(relay)
        saved = "SELECT xmin::text FROM outbox_relay_checkpoint"

        def quiet() -> bool:
            """No new version of the row during ten intervals."""
            before, until = scene.query(saved), time.monotonic() + 2
            while time.monotonic() < until:
                if scene.query(saved) != before:
                    return False
            return True

        await eventually(quiet, "the checkpoint comes to rest")
        await relay.stopped()


@pytest.mark.guarantee("G8")
async def test_a_big_transaction_in_bounded_memory(scene: Scene) -> None:
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        await asyncio.to_thread(scene.execute, MANY, f"{scene.name}.orders", 120_000)
        highest = 0

        def done() -> bool:
            nonlocal highest
            highest = max(highest, relay.resident_bytes)
            return relay.counter("published_events") >= 120_000

        await eventually(done, "all is published", context=lambda: relay.output)
        assert highest < 150 * 2**20, f"{highest / 2**20:.0f} MB"
        relay.signal(signal.SIGINT)
        assert await relay.ended() == 0
