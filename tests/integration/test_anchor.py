"""Exact replays on real servers: the WAL again from the anchor slot, while the relay goes on; and who keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay import bookmark
from relay.check import check
from relay.embedded import PostgresServer
from relay.errors import ConfigError, SetupError
from relay.replay import Report, replay
from relay.setup import setup
from relay.status import status
from relay.wish import Wish
from tests.fix_kafka import Kafka
from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.relays import RelayProcess, config_of, create_topic, eventually, kafka, prepare, settings
from tests.scene import Scene
from tests.sinks import Stored, read_kafka


def quiet(_published: int, _total: int | None) -> None:
    """Nobody watches."""


async def ask(scene: Scene, **wish: Any) -> Report:
    return await replay(config_of(scene.sections), Wish(exact=True, **wish), quiet)


def anchored(name: str, **more: Any) -> dict[str, Any]:
    return {"anchor": {"slot": f"{name}_anchor", **more}}


def slot(scene: Scene, name: str) -> dict[str, Any] | None:
    with psycopg.connect(scene.dsn, autocommit=True) as connection:
        row = connection.execute(
            "SELECT to_jsonb(s) FROM pg_replication_slots s WHERE slot_name = %s", (name,)
        ).fetchone()
    return None if row is None else row[0]


async def anchor_is_there(scene: Scene, relay: RelayProcess) -> None:
    await eventually(lambda: slot(scene, f"{scene.name}_anchor"), "the anchor", context=lambda: relay.output)


def place(item: Stored) -> bytes:
    """Commit LSN and index: where the event was in the WAL."""
    return b":".join(item.headers["relay-position"].split(b":")[-2:])


def by_key(stored: list[Stored]) -> dict[bytes, list[tuple[bytes, bytes, bytes | None]]]:
    """What came, and in which order: shared streams keep it per key."""
    found: dict[bytes, list[tuple[bytes, bytes, bytes | None]]] = {}
    for item in stored:
        found.setdefault(item.headers["aggregate-id"], []).append((item.id, place(item), item.body))
    return found


def of_run(stored: list[Stored], run: str) -> list[Stored]:
    return [item for item in stored if item.headers.get("relay-replayed") == run.encode()]


def genuine(stored: list[Stored]) -> list[Stored]:
    return [item for item in stored if "relay-replayed" not in item.headers]


@pytest.fixture(params=["database15", "database"])
def make_scene(request: pytest.FixtureRequest, nats: Nats, prefix: str, tmp_path: Path) -> Callable[..., Scene]:
    def make(mode: str = "shared", **source: Any) -> Scene:
        found = request.getfixturevalue(request.param)
        checkpoint = {"interval": "100ms", "history_interval": "1ms"}
        scene = Scene(
            found.dsn, nats.url, prefix, tmp_path, checkpoint=checkpoint, source={**anchored(prefix), **source}
        )
        scene.sections["sink"]["jetstream"]["mode"] = mode
        return scene

    return make


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize(("mode", "plugin"), [("shared", "pgoutput"), ("fenced", "pgoutput"), ("shared", "wal2json")])
async def test_a_window_comes_again_exactly_while_the_relay_goes_on(
    database15: Database, nats: Nats, prefix: str, tmp_path: Path, mode: str, plugin: str
) -> None:
    checkpoint = {"interval": "100ms", "history_interval": "1ms"}
    scene = Scene(
        database15.dsn, nats.url, prefix, tmp_path, checkpoint=checkpoint, source={**anchored(prefix), "plugin": plugin}
    )
    scene.sections["sink"]["jetstream"]["mode"] = mode
    await scene.set_up()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        await anchor_is_there(scene, relay)
        scene.ledger.write(20, events=2)
        await scene.settled(relay)
        await scene.covered()
        (lsn, at) = scene.query("SELECT pg_current_wal_insert_lsn()::text, clock_timestamp()::text")
        await bookmark.add(config_of(scene.sections), "half")
        (old,) = scene.query("SELECT max(seq) FROM outbox_events")
        scene.ledger.write(20, events=2, seed=2)
        # What the table has lost meanwhile is in the WAL all the same.
        scene.execute(f"DELETE FROM outbox_events WHERE seq > {old} AND seq % 2 = 0")
        await scene.settled(relay)
        await scene.covered()
        anchor, main = slot(scene, f"{prefix}_anchor"), slot(scene, prefix)
        assert anchor and main

        for wish in ({"from_lsn": lsn}, {"since": at}, {"bookmark": "half"}):
            counted = await replay(config_of(scene.sections), Wish(exact=True, **wish), quiet, dry_run=True)
            report = await ask(scene, **wish)
            stored = await scene.read()
            wanted = [item for item in genuine(stored) if item.seq > old]
            found = of_run(stored, report.run)
            assert (report.state, report.published, counted.total) == ("done", len(wanted), len(wanted)), wish
            assert by_key(found) == by_key(wanted), wish
            assert all(f":replay:{report.run}:".encode() in item.headers["relay-position"] for item in found)

        first = place(wanted[0]).split(b":")[0].decode()
        report = await ask(scene, from_lsn=lsn, to_lsn=first)
        assert report.published == 0
        report = await ask(scene, from_lsn=first, key=wanted[0].headers["aggregate-id"].decode())
        assert report.published == len(
            [item for item in wanted if item.headers["aggregate-id"] == wanted[0].headers["aggregate-id"]]
        )
        report = await ask(scene, from_lsn=str(anchor["confirmed_flush_lsn"]), to_bookmark="half")
        assert len(of_run(await scene.read(), report.run)) == report.published == len(genuine(stored)) - len(wanted)

        again = slot(scene, f"{prefix}_anchor")
        assert again and again["confirmed_flush_lsn"] == anchor["confirmed_flush_lsn"]
        assert scene.query("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'relay_replay%%'") == (0,)
        scene.ledger.write(10, seed=3)
        scene.ledger.check(genuine(await scene.ledger.arrived(scene.read, relay)))
        assert len(relay.said("stream.started")) == 1
        assert relay.counter("duplicate_events") == 0
        await relay.stopped()


async def test_what_cannot_be_served_is_refused_with_the_earliest_point(make_scene: Callable[..., Scene]) -> None:
    scene = await make_scene().set_up()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        await anchor_is_there(scene, relay)
        scene.ledger.write(5)
        await scene.settled(relay)
        await scene.covered()
        anchor = slot(scene, f"{scene.name}_anchor")
        assert anchor
        for wish in ({"from_lsn": "0/1"}, {"since": "2001-01-01"}):
            with pytest.raises(SetupError, match=f"earliest point is {anchor['confirmed_flush_lsn']}"):
                await ask(scene, **wish)
        for wrong in ({"seq": 1}, {"key": "k1"}, {"ids": ("x",)}):
            with pytest.raises(ConfigError, match="--exact needs"):
                await ask(scene, **wrong)
        assert (await ask(scene, from_lsn=anchor["confirmed_flush_lsn"])).published == len(scene.ledger.journal)
        await relay.stopped()
    scene.query("SELECT pg_drop_replication_slot(%s)", f"{scene.name}_anchor")
    with pytest.raises(SetupError, match="does not exist"):
        await ask(scene, since="1s")
    scene.sections["source"].pop("anchor")
    with pytest.raises(ConfigError, match="no anchor slot"):
        await ask(scene, since="1s")


async def test_what_is_not_published_yet_is_left_alone(make_scene: Callable[..., Scene]) -> None:
    scene = await make_scene().set_up()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        await anchor_is_there(scene, relay)
        scene.ledger.write(5)
        await scene.settled(relay)
        await scene.covered()
        published = len(scene.ledger.journal)
        await relay.stopped()
    scene.ledger.write(5, seed=2)
    anchor = slot(scene, f"{scene.name}_anchor")
    assert anchor
    assert (await ask(scene, from_lsn=anchor["confirmed_flush_lsn"])).published == published


async def test_a_gap_in_the_stream_is_no_gap_in_the_wal(make_scene: Callable[..., Scene]) -> None:
    """The relay's slot is lost and made anew; what was recovered from the table is in the anchor's window too."""
    scene = await make_scene().set_up()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        await anchor_is_there(scene, relay)
        scene.ledger.write(5)
        await scene.settled(relay)
        await relay.stopped()
    scene.drop_slot()
    scene.ledger.write(5, seed=2)
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(5, seed=3)
        await scene.settled(relay)
        await scene.covered()
        anchor = slot(scene, f"{scene.name}_anchor")
        assert anchor
        report = await ask(scene, from_lsn=anchor["confirmed_flush_lsn"])
        found = of_run(await scene.read(), report.run)
        assert {item.id.decode() for item in found} == {entry.id for entry in scene.ledger.journal}
        assert len(found) == len(scene.ledger.journal)
        await relay.stopped()


# --- keeping it


async def test_setup_makes_it_beside_a_slot_and_check_and_status_show_it(make_scene: Callable[..., Scene]) -> None:
    scene = await make_scene().set_up()
    config = config_of(scene.sections)
    name = f"{scene.name}_anchor"
    assert slot(scene, name) is None  # there is no slot yet that it could be a copy of
    assert any("relay makes it" in each.message for each in await check(config, broker=False) if name in each.subject)
    scene.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", scene.name)
    steps = {step.subject: step.action for step in await setup(config, dry_run=True)}
    assert (steps[f"anchor slot {name}"], slot(scene, name)) == ("created", None)
    await setup(config)
    made = slot(scene, name)
    assert made and made["plugin"] == "pgoutput"
    assert {step.subject: step.action for step in await setup(config)}[f"anchor slot {name}"] == "present"
    assert [each.level for each in await check(config, broker=False) if name in each.subject] == ["ok"]
    assert (await status(config))["anchor"]["exists"]


async def test_it_follows_by_age_also_while_the_outbox_is_idle(make_scene: Callable[..., Scene]) -> None:
    scene = await make_scene(anchor={"slot": "", "retention": "1s"}).set_up()
    scene.configure(source={"anchor": {"slot": f"{scene.name}_anchor", "retention": "1s"}})
    scene.execute("CREATE TABLE neighbour (id bigint, pad text)")
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        await anchor_is_there(scene, relay)
        scene.execute("INSERT INTO neighbour SELECT i, repeat('x', 500) FROM generate_series(1, 10000) i")
        (end,) = scene.query("SELECT pg_current_wal_lsn()::text")

        def followed() -> bool:
            scene.execute("INSERT INTO neighbour SELECT i, repeat('x', 500) FROM generate_series(1, 1000) i")
            scene.execute("CHECKPOINT")
            return bool(
                scene.query(
                    "SELECT restart_lsn >= %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s",
                    end,
                    f"{scene.name}_anchor",
                )[0]
            )

        await eventually(followed, "the anchor follows", timeout=60, context=lambda: relay.output)
        await relay.stopped()


async def test_it_gives_way_by_size_and_polling_lets_it_go(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    scene.sections["source"]["anchor"] |= {"retention": "20s", "max_wal": "4MB"}  # looked at every second
    await scene.set_up()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        await anchor_is_there(scene, relay)
        scene.ledger.write(5)
        await scene.settled(relay)
        (end,) = scene.query("SELECT pg_current_wal_lsn()::text")
        scene.execute("CREATE TABLE ballast (pad text)")

        def moved() -> bool:
            scene.execute("INSERT INTO ballast SELECT repeat('x', 1000) FROM generate_series(1, 1000)")
            scene.execute("CHECKPOINT")
            return bool(
                scene.query(
                    "SELECT restart_lsn > %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s",
                    end,
                    f"{scene.name}_anchor",
                )[0]
            )

        await eventually(moved, "the anchor moves", timeout=60, context=lambda: relay.output)
        await relay.stopped()
    scene.configure(source={"mode": "poll"})
    with RelayProcess(scene.path) as relay:
        await relay.says("poll.started")
        await eventually(lambda: slot(scene, f"{scene.name}_anchor") is None, "no WAL is kept")
        await relay.stopped()


async def test_a_lost_anchor_is_made_anew_and_a_foreign_slot_is_left_alone(
    start_postgres: Callable[..., PostgresServer], nats: Nats, prefix: str, tmp_path: Path
) -> None:
    limits = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB", "wal_keep_size": "0"}
    server = start_postgres("18", settings=limits)
    source = anchored(prefix, retention="10s")
    scene = await Scene(server.dsn(), nats.url, prefix, tmp_path, source=source).set_up()
    name = f"{prefix}_anchor"
    scene.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", name)

    def lost() -> bool:
        scene.execute("SELECT pg_switch_wal(); CREATE TABLE IF NOT EXISTS x (); DROP TABLE x")
        scene.execute("CHECKPOINT")
        return (slot(scene, name) or {}).get("wal_status") == "lost"

    await eventually(lost, "the anchor is lost")
    found = [each for each in await check(config_of(scene.sections), broker=False) if name in each.subject]
    assert found[0].level == "warning" and "invalidated" in found[0].message
    with RelayProcess(scene.path) as relay:
        # By the state, not by the log: the end of the recovery may cancel who made it before it could say so.
        await eventually(lambda: (slot(scene, name) or {}).get("wal_status") == "reserved", "a new anchor")
        scene.ledger.write(5)
        await scene.settled(relay)
        await relay.stopped()
    scene.query("SELECT pg_drop_replication_slot(%s)", name)
    scene.query("SELECT pg_create_physical_replication_slot(%s)", name)
    with RelayProcess(scene.path) as relay:
        await relay.says("anchor.refused", slot=name)
        scene.ledger.write(5, seed=2)
        await scene.settled(relay)
        await relay.stopped()
    assert (slot(scene, name) or {})["slot_type"] == "physical"


async def test_into_kafka(database: Database, kafka_broker: Kafka, prefix: str, tmp_path: Path) -> None:
    create_topic(kafka_broker.bootstrap, prefix, partitions=1)
    sections = settings(database.dsn, kafka(kafka_broker.bootstrap), source={"slot": prefix, **anchored(prefix)})
    path = await prepare(tmp_path, sections)
    with RelayProcess(path) as relay:
        await relay.streaming()
        there = "SELECT FROM pg_replication_slots WHERE slot_name = %s"
        await eventually(lambda: database.query(there, f"{prefix}_anchor"), "the anchor", context=lambda: relay.output)
        ((lsn,),) = database.query("SELECT pg_current_wal_insert_lsn()::text")
        database.execute(
            f"INSERT INTO outbox_events (topic, aggregate_id, payload) SELECT '{prefix}', 'k', '{{}}'"
            " FROM generate_series(1, 2000)"
        )
        await relay.has_published(2000)
        await eventually(
            lambda: (
                database.query(
                    "SELECT count(*) FROM outbox_events, outbox_relay_checkpoint"
                    " WHERE NOT pg_visible_in_snapshot(xid, snap)"
                )
                == [(0,)]
            ),
            "the checkpoint covers it",
        )
        report = await replay(config_of(sections), Wish(exact=True, from_lsn=lsn), quiet)
        seen: list[int] = []
        held = Wish(exact=True, from_lsn=lsn, rate=400.0)
        await replay(config_of(sections), held, lambda published, _: seen.append(published))
        assert seen[-1] == 2000
        assert max(after - before for before, after in pairwise(seen)) <= 400  # never more at once than in a second
        await relay.stopped()
    stored = await asyncio.to_thread(read_kafka, kafka_broker.bootstrap, prefix)
    assert [item.id for item in of_run(stored, report.run)] == [item.id for item in genuine(stored)]
    assert report.published == 2000


@pytest.fixture
def kafka_broker(request: pytest.FixtureRequest) -> Kafka:
    found: Kafka = request.getfixturevalue("kafka")
    return found
