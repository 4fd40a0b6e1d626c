"""Slot loss on real servers, every way it happens: nothing lost, nothing invented, order kept, back to streaming."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.embedded import PostgresServer
from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.fix_proxy import Proxy
from tests.ledger import Entry, Ledger
from tests.relays import RelayProcess, eventually, more_than
from tests.scene import Scene, copy_of
from tests.sinks import read_jetstream

StartProxy = Callable[[str], Awaitable[Proxy]]
QUICK: dict[str, Any] = {"poll": {"interval": "100ms"}}
WITHOUT_ROOM = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB", "wal_keep_size": "0"}


@pytest.fixture(params=["database15", "database16", "database"])
async def scene(request: pytest.FixtureRequest, nats: Nats, prefix: str, tmp_path: Path) -> Scene:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Database)
    return await Scene(found.dsn, nats.url, prefix, tmp_path, **QUICK).set_up()


@pytest.fixture
async def scene18(database: Database, nats: Nats, prefix: str, tmp_path: Path) -> Scene:
    return await Scene(database.dsn, nats.url, prefix, tmp_path, **QUICK).set_up()


async def first_run(scene: Scene) -> None:
    """Stream a little, and stop."""
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(10)
        await scene.settled(relay)
        await relay.stopped()


def end_streams(scene: Scene) -> None:
    scene.query(
        "SELECT count(pg_terminate_backend(active_pid)) FROM pg_replication_slots WHERE slot_name = %s", scene.name
    )


def drop_under_fire(scene: Scene) -> None:
    """Terminate and drop until it is gone; the relay reconnects as fast as it can."""
    while scene.slot is not None:
        end_streams(scene)
        with contextlib.suppress(psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
            scene.drop_slot()


# --- ways to lose a slot


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G2")
async def test_dropped_while_streaming_again_and_again(scene: Scene) -> None:
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        with scene.ledger.writing():
            for round_ in range(1, 3):
                await more_than(scene.ledger.journal, 100 * round_, "events are written")
                await asyncio.to_thread(drop_under_fire, scene)
                await relay.says_again("stream.started", round_)
        await scene.settled(relay)
        assert relay.counter("recoveries") >= 2
        assert relay.counter("audit_failures") == 0, relay.output
        await relay.stopped()


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("version", ["15", "18"])
async def test_wal_removed(
    start_postgres: Callable[..., PostgresServer], nats: Nats, prefix: str, tmp_path: Path, version: str
) -> None:
    """Postgres says `lost`, and ends the stream of a relay whose broker is slow or that is down."""
    server = start_postgres(version, settings=WITHOUT_ROOM)
    scene = await Scene(server.dsn(), nats.url, prefix, tmp_path, **QUICK).set_up()
    await first_run(scene)
    scene.ledger.write(20, seed=2)

    def lost() -> bool:
        scene.execute("SELECT pg_switch_wal(); CREATE TABLE IF NOT EXISTS x (); DROP TABLE x")
        scene.execute("CHECKPOINT")
        return (scene.slot or {}).get("wal_status") == "lost"

    await eventually(lost, "the slot is lost")
    scene.ledger.write(20, seed=3)
    with RelayProcess(scene.path) as relay:
        line = await relay.says("recovery.started")
        assert "invalidated" in line["reason"]
        await relay.says("slot.dropped")
        await relay.streaming()
        await scene.settled(relay)
        done = await relay.says("recovery.done")
        assert done["events"] >= 30
        await relay.stopped()


@pytest.mark.guarantee("G5")
async def test_idle_timeout(
    start_postgres: Callable[..., PostgresServer], nats: Nats, prefix: str, tmp_path: Path
) -> None:
    server = start_postgres("18", settings={"idle_replication_slot_timeout": "1s"})
    scene = await Scene(server.dsn(), nats.url, prefix, tmp_path, **QUICK).set_up()
    await first_run(scene)
    scene.ledger.write(10, seed=2)

    def invalidated() -> bool:
        scene.execute("CHECKPOINT")
        return (scene.slot or {}).get("invalidation_reason") == "idle_timeout"

    await eventually(invalidated, "the slot is invalidated")
    with RelayProcess(scene.path) as relay:
        assert "idle_timeout" in (await relay.says("recovery.started"))["reason"]
        await relay.streaming()
        await scene.settled(relay)
        await relay.stopped()


@pytest.mark.guarantee("G5")
async def test_made_anew_by_somebody_at_a_later_position(scene18: Scene) -> None:
    scene = scene18
    await first_run(scene)
    scene.drop_slot()
    scene.ledger.write(10, seed=2)
    scene.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", scene.name)
    scene.ledger.write(10, seed=3)
    with RelayProcess(scene.path) as relay:
        assert "made anew" in (await relay.says("recovery.started"))["reason"]
        await relay.says("slot.kept")
        await relay.streaming()
        await scene.settled(relay)
        await relay.stopped()


@pytest.mark.guarantee("G5")
async def test_another_plugin_in_the_configuration(
    database15: Database, nats: Nats, prefix: str, tmp_path: Path
) -> None:
    scene = await Scene(database15.dsn, nats.url, prefix, tmp_path, **QUICK).set_up()
    await first_run(scene)
    for seed, plugin in enumerate(("wal2json", "pgoutput"), start=2):
        scene.ledger.write(10, seed=seed)
        scene.configure(source={"plugin": plugin})
        with RelayProcess(scene.path) as relay:
            assert "plugin" in (await relay.says("recovery.started"))["reason"]
            await relay.streaming()
            scene.ledger.write(10, seed=10 + seed)
            await scene.settled(relay)
            assert (scene.slot or {})["plugin"] == plugin
            await relay.stopped()


@pytest.mark.guarantee("G5")
async def test_a_slot_of_another_database_is_never_touched(scene18: Scene, database: Database) -> None:
    await first_run(scene18)
    scene18.drop_slot()
    with psycopg.connect(database.server.dsn(), autocommit=True) as other:
        other.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (scene18.name,))
        try:
            with RelayProcess(scene18.path) as relay:
                await relay.refuses(3, "belongs to database postgres")
            scene18.configure(source={"mode": "poll"})
            with RelayProcess(scene18.path) as relay:
                scene18.ledger.write(5, seed=2)
                await scene18.settled(relay)
                await relay.stopped()
            assert (scene18.slot or {})["database"] == "postgres"
        finally:
            other.execute("SELECT pg_drop_replication_slot(%s)", (scene18.name,))


# --- other servers


@pytest.mark.guarantee("G5")
async def test_a_standby_without_the_slot_is_promoted_under_load(
    own_postgres: PostgresServer, nats: Nats, prefix: str, tmp_path: Path
) -> None:
    scene = await Scene(own_postgres.dsn(), nats.url, prefix, tmp_path, **QUICK).set_up()
    standby = await asyncio.to_thread(copy_of, own_postgres, "-R")
    try:
        await asyncio.to_thread(standby.start)
        hosts = f"127.0.0.1:{own_postgres.port},127.0.0.1:{standby.port}"
        both = f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"
        scene.configure(database={"dsn": both})
        own_postgres.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")  # no commit is lost by the failover
        own_postgres.execute("SELECT pg_reload_conf()")
        scene.ledger.dsn = scene.dsn = both
        with RelayProcess(scene.path) as relay:
            await relay.streaming()
            with scene.ledger.writing():
                await more_than(scene.ledger.journal, 150, "events are written")
                own_postgres.kill()
                standby.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
                standby.execute("SELECT pg_reload_conf()")
                standby.execute("SELECT pg_promote()")
                await relay.says_again("stream.started", 1)
                await more_than(scene.ledger.journal, 300, "events are written")
            assert "does not exist" in relay.said("recovery.started")[-1]["reason"]
            # JetStream's window swallows what is repeated; a commit that nobody answered is settled by the table.
            await scene.settled(relay)
            assert scene.query("SELECT timeline FROM outbox_relay_checkpoint") == (2,)
            await relay.stopped()
    finally:
        standby.close()


@pytest.mark.guarantee("G5")
async def test_point_in_time_recovery_to_before_the_last_published_event(
    start_postgres: Callable[..., PostgresServer], nats: Nats, prefix: str, tmp_path: Path
) -> None:
    """LSNs and transaction ids are handed out again: the checkpoint travelled back with the data."""
    server = start_postgres()
    archive = server.folder / "archive"
    server.execute(f"ALTER SYSTEM SET archive_command = 'mkdir -p {archive} && cp %p {archive}/%f'")
    server.execute("ALTER SYSTEM SET archive_mode = 'on'")
    server.restart()
    scene = await Scene(server.dsn(), nats.url, prefix, tmp_path, **QUICK).set_up()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(20)
        await scene.settled(relay)
        copy = await asyncio.to_thread(copy_of, server)
        try:
            scene.ledger.write(20, seed=2)
            await scene.settled(relay)
            (target,) = scene.query("SELECT pg_current_wal_insert_lsn()::text")
            scene.ledger.write(20, seed=3)
            await scene.settled(relay)
            await relay.stopped()
            (last,) = scene.query("SELECT pg_walfile_name(pg_switch_wal())")
            await eventually((archive / last).exists, "the WAL is archived")
            await asyncio.to_thread(server.stop)
            with (copy.data / "postgresql.conf").open("a") as conf:
                conf.write(f"restore_command = 'cp {archive}/%f %p'\nrecovery_target_lsn = '{target}'\n")
                conf.write("recovery_target_action = 'promote'\narchive_mode = 'off'\n")
            (copy.data / "recovery.signal").touch()
            await asyncio.to_thread(copy.start)
            scene.dsn = copy.dsn()
            scene.configure(database={"dsn": copy.dsn()})
            await eventually(lambda: scene.query("SELECT NOT pg_is_in_recovery()")[0], "it is a primary")
            assert scene.query("SELECT count(*) < %s FROM outbox_events", len(scene.ledger.journal)) == (True,)
            fresh = Ledger(copy.dsn(), f"{prefix}.fresh", keys=4)
            with RelayProcess(scene.path) as again:
                await again.says("recovery.started")
                await asyncio.to_thread(fresh.write, 400, 3)
                assert len(fresh.journal) >= 1000
                await again.streaming()

                async def read() -> list[Any]:
                    stored = await read_jetstream(nats.url, prefix)
                    return [item for item in stored if item.topic == fresh.topic]

                fresh.check(await fresh.arrived(read, again))
                await again.stopped()
        finally:
            copy.close()


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("mode", ["auto", "poll"])
async def test_a_checkpoint_of_another_system_is_for_a_person(scene18: Scene, mode: str) -> None:
    await first_run(scene18)
    (ours,) = scene18.query("UPDATE outbox_relay_checkpoint SET system_identifier = '7' RETURNING 1")
    assert ours == 1
    scene18.configure(source={"mode": mode})
    with RelayProcess(scene18.path) as relay:
        await relay.refuses(3, "of another server", "pg_upgrade", "restore")


# --- while the new slot is waited for


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("prepared", [False, True])
async def test_events_flow_while_an_old_transaction_holds_the_slot_up(
    start_postgres: Callable[..., PostgresServer], nats: Nats, prefix: str, tmp_path: Path, prepared: bool
) -> None:
    server = start_postgres("18", settings={"max_prepared_transactions": "5"})
    scene = await Scene(server.dsn(), nats.url, prefix, tmp_path, **QUICK, source={"wal_sender_timeout": "2s"}).set_up()
    await first_run(scene)
    scene.drop_slot()
    with psycopg.connect(server.dsn()) as old:
        scene.ledger.keys.append("old")
        scene.execute("INSERT INTO aggregates (id) VALUES ('old')")
        _insert(scene, old)
        if prepared:
            old.execute("PREPARE TRANSACTION 'old'")
        with RelayProcess(scene.path) as relay:
            await relay.says("recovery.started")
            scene.ledger.keys.remove("old")
            scene.ledger.write(20, seed=2)
            await scene.settled(relay)  # all that can be seen
            await relay.says("slot.waiting")
            scene.ledger.write(20, seed=3)
            await scene.settled(relay)
            await eventually(lambda: relay.status.get("state") == "polling", "it polls")
            await relay.ready()
            assert not relay.said("stream.started")
            if prepared:
                old.rollback()
                scene.execute("COMMIT PREPARED 'old'")
            else:
                old.commit()
            scene.ledger.journal.append(_old(scene))
            await relay.streaming()
            scene.ledger.write(20, seed=4)
            await scene.settled(relay)
            await relay.stopped()


def _insert(scene: Scene, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
    connection.execute(
        "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, topic, payload)"
        " VALUES ('order', 'old', 'made', %s, '{}')",
        (scene.ledger.topic,),
    )


def _old(scene: Scene) -> Entry:
    return Entry(scene.query("SELECT id::text FROM outbox_events WHERE aggregate_id = 'old'")[0], "old", 1)


@contextlib.contextmanager
def nobody_answers(server: PostgresServer) -> Iterator[None]:
    """A synchronous standby that does not exist. Only the writer waits for it: others' waits are cancelled."""
    over = threading.Event()

    def cancel() -> None:
        with psycopg.connect(server.dsn(), autocommit=True, application_name="canceller") as connection:
            while not over.wait(0.02):
                connection.execute(
                    "SELECT pg_cancel_backend(pid) FROM pg_stat_activity"
                    " WHERE wait_event = 'SyncRep' AND application_name <> 'waits'"
                )

    thread = threading.Thread(target=cancel)
    server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    server.execute("SELECT pg_reload_conf()")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        server.execute("ALTER SYSTEM RESET synchronous_standby_names")
        server.execute("SELECT pg_reload_conf()")


@pytest.mark.guarantee("G5")
async def test_a_commit_that_waits_for_a_synchronous_standby_while_the_slot_is_made(
    own_postgres: PostgresServer, nats: Nats, prefix: str, tmp_path: Path
) -> None:
    """It is in the WAL before the slot, and in no snapshot. Making a slot waits for it; nothing is done meanwhile."""
    scene = await Scene(
        own_postgres.dsn(), nats.url, prefix, tmp_path, **QUICK, source={"wal_sender_timeout": "2s"}
    ).set_up()
    await first_run(scene)
    scene.drop_slot()

    def write() -> None:
        with psycopg.connect(own_postgres.dsn(), application_name="waits") as connection:
            _insert(scene, connection)

    writer = threading.Thread(target=write)
    with RelayProcess(scene.path) as relay:
        with nobody_answers(own_postgres):
            writer.start()
            waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name = 'waits'"
            await eventually(lambda: scene.query(waits) == (1,), "it waits")
            await relay.says("recovery.started")
            await eventually(lambda: relay.said("slot.waiting") or relay.said("recovery.waiting"), "the relay waits")
            assert not relay.said("recovery.done")
            assert scene.query("SELECT count(*) FROM outbox_events WHERE aggregate_id = 'old'") == (0,)
        await asyncio.to_thread(writer.join)
        scene.ledger.journal.append(_old(scene))
        await relay.streaming()
        await scene.settled(relay)
        await relay.stopped()


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("version", ["15", "18"])
async def test_only_the_barrier_keeps_a_commit_that_waits_for_a_synchronous_standby(
    start_postgres: Callable[..., PostgresServer], nats: Nats, prefix: str, tmp_path: Path, version: str
) -> None:
    """A slot that is kept makes nobody wait: somebody moved it past a commit that is in the WAL, and in no snapshot.

    The stream will not bring it, and a snapshot that is taken now does not see it. Postgres 15 and 18 both wait for
    such a commit when a slot is made, so a kept one is the case in which only the barrier does. Without the audit,
    which would find and heal it later.
    """
    server = start_postgres(version)
    checkpoint = {"interval": "200ms", "audit": False}
    scene = await Scene(server.dsn(), nats.url, prefix, tmp_path, **QUICK, checkpoint=checkpoint).set_up()
    await first_run(scene)

    def write() -> None:
        with psycopg.connect(server.dsn(), application_name="waits") as connection:
            _insert(scene, connection)

    writer = threading.Thread(target=write)
    with RelayProcess(scene.path) as relay:
        relay.freeze()
        with nobody_answers(server):
            writer.start()
            waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name = 'waits'"
            await eventually(lambda: scene.query(waits) == (1,), "it waits")
            scene.query("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", prefix)
            relay.thaw()
            assert "made anew" in (await relay.says("recovery.started"))["reason"]
            await relay.says("slot.kept")
            await relay.says("recovery.waiting")
            assert not relay.said("recovery.done")
            assert scene.query("SELECT count(*) FROM outbox_events WHERE aggregate_id = 'old'") == (0,)
        await asyncio.to_thread(writer.join)
        scene.ledger.journal.append(_old(scene))
        await relay.streaming()
        await scene.settled(relay)
        await relay.stopped()


# --- killed at every step


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G3")
async def test_killed_at_every_step(
    database: Database, nats: Nats, prefix: str, tmp_path: Path, proxy: StartProxy
) -> None:
    """The steps are those of relay/recovery.py; each attempt leaves the next one whatever it leaves."""
    scene = await Scene(database.dsn, nats.url, prefix, tmp_path, **QUICK).set_up()
    await first_run(scene)
    cable = await proxy(nats.url)
    servers = {"direct": [nats.url], "cable": [cable.url]}

    def use(which: str) -> None:
        scene.sections["sink"]["jetstream"]["servers"] = servers[which]
        scene.configure()

    async def round_is_persisted(relay: RelayProcess) -> None:
        saved = "SELECT recovery IS NOT NULL FROM outbox_relay_checkpoint"
        await eventually(lambda: scene.query(saved)[0], "the round is saved", context=lambda: relay.output)

    async def some_is_published(relay: RelayProcess) -> None:
        await relay.has_published(1)

    def said(event: str) -> Callable[[RelayProcess], Awaitable[Any]]:
        return lambda relay: relay.says(event)

    steps: list[tuple[str, str, Callable[[RelayProcess], Awaitable[Any]]]] = [
        ("before the slot", "direct", said("recovery.started")),
        ("1: the slot is there", "direct", said("slot.created")),
        ("3: the round is persisted, nothing is published", "cable", round_is_persisted),
        ("4: something is published", "direct", some_is_published),
        ("5: done", "direct", said("recovery.done")),
        ("streaming", "direct", said("stream.started")),
    ]
    cable.stall()
    for seed, (_, which, reached) in enumerate(steps, start=2):
        with contextlib.suppress(psycopg.errors.UndefinedObject, psycopg.errors.ObjectInUse):
            scene.drop_slot()
        await asyncio.to_thread(scene.ledger.write, 100, 5, seed=seed)
        use(which)
        with RelayProcess(scene.path) as relay:
            await reached(relay)
            relay.kill()
        await asyncio.to_thread(scene.ledger.write, 10, seed=seed + 100)
    use("direct")
    with RelayProcess(scene.path) as relay:
        stored = await scene.settled(relay)
        assert len({item.id for item in stored}) == len(stored)
        await relay.streaming()
        await relay.stopped()


# --- giving the slot up, and warning before it dies


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G11")
async def test_a_slot_that_holds_too_much_is_given_up(scene18: Scene) -> None:
    scene18.configure(source={"max_retained_wal": "4MB"})
    await first_run(scene18)
    scene18.execute("CREATE TABLE ballast AS SELECT repeat('x', 1000) FROM generate_series(1, 12000)")
    scene18.ledger.write(20, seed=2)
    (before,) = scene18.query("SELECT pg_current_wal_lsn()::text")
    with RelayProcess(scene18.path) as relay:
        await relay.says("recovery.started", reason="max_retained_wal")
        await relay.says("slot.dropped", reason="max_retained_wal")
        await relay.says("recovery.done")
        scene18.ledger.write(20, seed=3)
        await scene18.settled(relay)
        assert scene18.query(
            "SELECT restart_lsn >= %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s", before, scene18.name
        ) == (True,)
        await relay.stopped()


@pytest.mark.guarantee("G10")
async def test_a_slot_near_its_limit_is_warned_of(
    start_postgres: Callable[..., PostgresServer], nats: Nats, prefix: str, tmp_path: Path
) -> None:
    server = start_postgres("18", settings={"max_slot_wal_keep_size": "64MB"})
    scene = await Scene(server.dsn(), nats.url, prefix, tmp_path, **QUICK).set_up()
    await first_run(scene)
    with psycopg.connect(server.dsn()) as old:  # keeps restart_lsn where it is
        old.execute("SELECT pg_current_xact_id()")
        scene.execute("CREATE TABLE ballast AS SELECT repeat('x', 1000) FROM generate_series(1, 62000)")
        with RelayProcess(scene.path) as relay:
            line = await relay.says("slot.endangered")
            assert "max_slot_wal_keep_size" in line["hint"] and line["name"] == prefix
            await relay.stopped()
