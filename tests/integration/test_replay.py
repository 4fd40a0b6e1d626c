"""`relay replay` and `relay bookmark` on real servers: what comes again, under which ids, and who is not disturbed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay import bookmark
from relay.errors import ConfigError, ContractError, OperatorError, SetupError
from relay.replay import Report, replay
from relay.wish import Wish
from tests.fix_kafka import Kafka
from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.relays import RelayProcess, config_of, create_topic, eventually, kafka, prepare, settings
from tests.scene import Scene
from tests.sinks import Stored, read_kafka
from tests.zygote import zygote


def quiet(_published: int, _total: int | None) -> None:
    """Nobody watches."""


async def ask(scene: Scene, **wish: Any) -> Report:
    return await replay(config_of(scene.sections), Wish(**wish), quiet)


async def count(scene: Scene, **wish: Any) -> int:
    total = (await replay(config_of(scene.sections), Wish(**wish), quiet, dry_run=True)).total
    assert total is not None
    return total


def again(stored: list[Stored], run: str) -> list[str]:
    """The ids of a run's events by their seq, after a look at their order: it holds per key."""
    found = [item for item in stored if item.headers.get("relay-replayed") == run.encode()]
    keys = {item.headers.get("aggregate-id") for item in found if "seq" in item.headers}
    for key in keys:
        order = [item.seq for item in found if item.headers.get("aggregate-id") == key]
        assert order == sorted(order)
    return [item.id.decode() for item in (sorted(found, key=lambda item: item.seq) if keys else found)]


def genuine(stored: list[Stored]) -> list[Stored]:
    return [item for item in stored if "relay-replayed" not in item.headers]


def rows(dsn: str, where: str = "true") -> list[str]:
    """The ids of the table in their order."""
    with psycopg.connect(dsn) as connection:
        found = connection.execute(f"SELECT id::text FROM outbox_events WHERE {where} ORDER BY seq".encode())
        return [row[0] for row in found.fetchall()]


@pytest.fixture
def make_scene(database: Database, nats: Nats, prefix: str, tmp_path: Path) -> Callable[[str], Scene]:
    def make(mode: str, **sections: Any) -> Scene:
        # A row of history with every checkpoint: so a window is known to the second.
        checkpoint = {"interval": "100ms", "history_interval": "1ms"}
        scene = Scene(database.dsn, nats.url, prefix, tmp_path, checkpoint=checkpoint, **sections)
        scene.sections["sink"]["jetstream"]["mode"] = mode
        return scene

    return make


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("mode", ["shared", "fenced"])
async def test_a_window_comes_again_with_its_ids_while_the_relay_goes_on(
    make_scene: Callable[[str], Scene], mode: str
) -> None:
    scene = await make_scene(mode).set_up()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(20)
        await scene.settled(relay)
        await scene.covered()
        (old,) = scene.query("SELECT max(seq) FROM outbox_events")
        await bookmark.add(config_of(scene.sections), "half")
        scene.ledger.write(20, seed=2)
        await scene.settled(relay)
        await scene.covered()

        new = rows(scene.dsn, f"seq > {old}")
        assert await count(scene, bookmark="half") == len(new)
        report = await ask(scene, bookmark="half")

        assert (report.state, report.published, report.total) == ("done", len(new), len(new))
        assert (report.request is None) == (mode == "shared")
        scene.ledger.write(20, seed=3)
        await scene.ledger.arrived(scene.read, relay)
        stored = await scene.read()
        assert again(stored, report.run) == new
        scene.ledger.check(genuine(stored))
        copy = next(item for item in stored if "relay-replayed" in item.headers)
        original = next(item for item in genuine(stored) if item.id == copy.id)
        assert copy.headers["Nats-Msg-Id"] == copy.id + f":replay:{report.run}".encode()
        assert f":replay:{report.run}:".encode() in copy.headers["relay-position"]
        assert (copy.body, copy.topic) == (original.body, original.topic)

        first, until = rows(scene.dsn)[:2], "half"
        report = await ask(scene, seq=0, to_bookmark=until)
        assert again(await scene.read(), report.run) == rows(scene.dsn, f"seq <= {old}")
        report = await ask(scene, ids=tuple(first), topic=f"{scene.name}.elsewhere")
        stored = await scene.read()
        assert again(stored, report.run) == first
        assert {item.topic for item in stored if item.topic.endswith("elsewhere")} == {f"{scene.name}.elsewhere"}
        await relay.stopped()
    with RelayProcess(scene.path) as relay:  # what was replayed does not confuse the next start
        await relay.streaming()
        scene.ledger.write(5, seed=4)
        scene.ledger.check(genuine(await scene.ledger.arrived(scene.read, relay)))
        await relay.stopped()


@pytest.mark.parametrize("source", ["stream", "snapshot", "claim"])
async def test_an_lsn_noted_right_after_the_first_start_can_be_replayed_from(
    make_scene: Callable[[str], Scene], source: str
) -> None:
    scene = make_scene("shared")
    scene.configure(checkpoint={"history_interval": "1m"})
    if source != "stream":
        scene.configure(source={"mode": "poll"}, poll={"strategy": source, "min_interval": "20ms", "interval": "50ms"})
    await scene.set_up()
    with RelayProcess(scene.path) as relay:
        await relay.says("stream.started" if source == "stream" else "poll.started")
        await eventually(lambda: scene.query("SELECT count(*) > 0 FROM outbox_relay_history")[0], "history begins")
        (lsn, at) = scene.query("SELECT pg_current_wal_insert_lsn()::text, clock_timestamp()::text")
        scene.ledger.write(10)
        await scene.settled(relay)
        if source != "claim":  # there the table says what is published
            await scene.covered()
        for window in ({"from_lsn": lsn}, {"since": at}):
            report = await ask(scene, **window)
            assert again(await scene.read(), report.run) == rows(scene.dsn)
        await relay.stopped()


async def test_the_history_keeps_the_point_that_begins_what_is_kept(make_scene: Callable[[str], Scene]) -> None:
    """Of those that are too old the newest: nothing was published between it and the first that is not."""
    scene = await make_scene("shared").set_up()
    scene.configure(checkpoint={"interval": "100ms", "history_interval": "1ms", "history_retention": "1h"})
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(5)
        await scene.settled(relay)
        await scene.covered()
        await relay.stopped()
    scene.execute("UPDATE outbox_relay_history SET at = at - interval '1 day'")
    (newest,) = scene.query("SELECT max(at) FROM outbox_relay_history")
    (lsn, old) = scene.query("SELECT pg_current_wal_insert_lsn()::text, (SELECT max(seq) FROM outbox_events)")
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(5, seed=2)
        await scene.settled(relay)
        await scene.covered()
        await eventually(
            lambda: scene.query("SELECT min(at) = %s AND count(*) > 1 FROM outbox_relay_history", newest)[0], "history"
        )
        report = await ask(scene, from_lsn=lsn)
        assert set(rows(scene.dsn, f"seq > {old}")) <= set(again(await scene.read(), report.run))
        await relay.stopped()


async def test_lsn_and_time_go_through_the_history(make_scene: Callable[[str], Scene]) -> None:
    scene = await make_scene("shared").set_up()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        for seed in (1, 2, 3):
            scene.ledger.write(10, seed=seed)
            await scene.settled(relay)
            await scene.covered()
            scene.execute("SELECT pg_sleep(0.01)")
            if seed == 1:
                (lsn, at, old) = scene.query(
                    "SELECT pg_current_wal_insert_lsn()::text, now()::text, (SELECT max(seq) FROM outbox_events)"
                )
            if seed == 2:
                (to_lsn, to_at, middle) = scene.query(
                    "SELECT pg_current_wal_insert_lsn()::text, now()::text, (SELECT max(seq) FROM outbox_events)"
                )
        await eventually(lambda: scene.query("SELECT count(*) > 1 FROM outbox_relay_history")[0], "history")
        config = config_of(scene.sections)
        wanted = set(rows(scene.dsn, f"seq > {old} AND seq <= {middle}"))
        for window in ({"from_lsn": lsn, "to_lsn": to_lsn}, {"since": at, "until": to_at}):
            report = await ask(scene, **window)
            found = again(await scene.read(), report.run)
            assert wanted <= set(found)
            assert len(found) == len(set(found))
        mark = await bookmark.add(config, "then", lsn=lsn)
        assert await count(scene, bookmark=mark.name) >= len(wanted)

        with pytest.raises(SetupError, match=r"earliest point is [0-9A-F]+/[0-9A-F]+"):
            await ask(scene, from_lsn="0/1")
        with pytest.raises(SetupError, match="earliest point"):
            await ask(scene, since="2001-01-01")
        with pytest.raises(SetupError, match="no bookmark 'x'"):
            await ask(scene, bookmark="x")
        await relay.stopped()


async def test_by_key_and_rate_and_what_is_not_published_yet_is_left_alone(
    make_scene: Callable[[str], Scene],
) -> None:
    scene = await make_scene("shared").set_up()
    with pytest.raises(SetupError, match="nothing to replay"):
        await count(scene, seq=0)
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(30)
        await scene.settled(relay)
        await scene.covered()
        await relay.stopped()
    scene.ledger.write(10, seed=2)  # nobody publishes these now
    covered = rows(scene.dsn, "pg_visible_in_snapshot(xid, (SELECT snap FROM outbox_relay_checkpoint))")
    assert await count(scene, seq=0) == len(covered)
    key = scene.query("SELECT aggregate_id FROM outbox_events ORDER BY seq LIMIT 1")[0]
    report = await ask(scene, key=key, rate=1000.0)
    of_key = [each for each in rows(scene.dsn, f"aggregate_id = '{key}'") if each in covered]
    assert again(await scene.read(), report.run) == of_key
    with pytest.raises(ConfigError, match="one beginning"):
        await ask(scene, seq=0, since="1h")


async def test_a_relay_that_is_killed_goes_on_with_a_request(make_scene: Callable[[str], Scene]) -> None:
    scene = await make_scene("fenced").set_up()
    scene.execute(
        "INSERT INTO outbox_events (topic, aggregate_id, payload)"
        f" SELECT '{scene.name}.a', 'k' || n % 7, '{{}}' FROM generate_series(1, 3000) n"
    )
    with RelayProcess(scene.path) as relay:
        await relay.has_published(3000)
        await relay.streaming()
        await scene.covered()
        config = config_of(scene.sections)
        report = await replay(config, Wish(seq=0, rate=1000.0), quiet, detach=True)
        assert report.state == "requested"
        await eventually(
            lambda: scene.query("SELECT published >= 1000 FROM outbox_relay_requests")[0], "a page is replayed"
        )
        relay.kill()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.execute(
            f"INSERT INTO outbox_events (topic, aggregate_id, payload) VALUES ('{scene.name}.a', 'k', '{{}}')"
        )
        await relay.says("replay.done")
        await relay.stopped()
    assert scene.query("SELECT state, published, total FROM outbox_relay_requests") == ("done", 3000, 3000)
    stored = await scene.read()
    assert again(stored, report.run) == rows(scene.dsn)[:3000]
    assert sorted(item.id.decode() for item in genuine(stored)) == sorted(rows(scene.dsn))


async def test_a_request_that_cannot_be_served_fails_and_the_relay_goes_on(make_scene: Callable[[str], Scene]) -> None:
    scene = await make_scene("auto").set_up()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(10)
        await scene.settled(relay)
        await scene.covered()
        with pytest.raises(OperatorError, match=r"no configured stream has the subject nobody\.home"):
            await ask(scene, seq=0, topic="nobody.home")
        scene.ledger.write(10, seed=2)
        await scene.settled(relay)
        await relay.stopped()


async def test_a_table_without_order_is_replayed_by_id_and_key_only(
    make_scene: Callable[[str], Scene], database: Database
) -> None:
    scene = make_scene("shared")
    database.execute(
        "CREATE TABLE plain (id text PRIMARY KEY, aggregate_id text, topic text, payload jsonb, made timestamptz)"
    )
    columns = dict.fromkeys(("aggregate_type", "event_type", "partition_key", "headers"), "")
    scene.sections["outbox"] = [{"table": "plain", "columns": {**columns, "created_at": "made"}}]
    scene = await scene.set_up()
    with RelayProcess(scene.path, "--from-now") as relay:
        await relay.streaming()
        database.execute(
            f"INSERT INTO plain SELECT 'e' || n, 'k', '{scene.name}.a', '{{}}', now() FROM generate_series(1, 3) n"
        )
        await relay.has_published(3)
        report = await ask(scene, ids=("e2",))
        assert again(await scene.read(), report.run) == ["e2"]
        report = await ask(scene, key="k")
        assert sorted(again(await scene.read(), report.run)) == ["e1", "e2", "e3"]
        with pytest.raises(ContractError, match="--id or --key only"):
            await ask(scene, since="0s")
        await relay.stopped()


@pytest.mark.parametrize(
    ("id_type", "ids"), [("numeric", ("1.50", "abc")), ("timestamptz", ("2026-01-02 03:04:05+00", "x"))]
)
async def test_ids_of_types_that_cannot_be_any_text(
    make_scene: Callable[[str], Scene], database: Database, id_type: str, ids: tuple[str, ...]
) -> None:
    scene = make_scene("shared")
    database.execute(f"CREATE TABLE odd (id {id_type} PRIMARY KEY, aggregate_id text, topic text, payload jsonb)")
    columns = dict.fromkeys(("aggregate_type", "event_type", "partition_key", "headers", "created_at"), "")
    scene.sections["outbox"] = [{"table": "odd", "columns": columns}]
    scene = await scene.set_up()
    with RelayProcess(scene.path, "--from-now") as relay:
        await relay.streaming()
        database.execute(f"INSERT INTO odd VALUES ('{ids[0]}', 'k', '{scene.name}.a', '{{}}')")
        await relay.has_published(1)
        report = await ask(scene, ids=ids)
        assert (report.total, again(await scene.read(), report.run)) == (1, [ids[0]])
        with pytest.raises(ConfigError, match="--topic"):
            await ask(scene, ids=ids, topic="a..b")
        await relay.stopped()


@pytest.fixture
def kafka_broker(request: pytest.FixtureRequest) -> Kafka:
    found: Kafka = request.getfixturevalue("kafka")
    return found


@pytest.mark.parametrize("mode", ["idempotent", "exactly-once"])
async def test_into_kafka_beside_the_relay(
    database: Database, kafka_broker: Kafka, prefix: str, tmp_path: Path, mode: str
) -> None:
    create_topic(kafka_broker.bootstrap, prefix, partitions=1)
    section = kafka(kafka_broker.bootstrap, mode=mode, position_topic=f"{prefix}.positions")
    sections = settings(database.dsn, section, source={"slot": prefix})
    path = await prepare(tmp_path, sections)
    insert = (
        "INSERT INTO outbox_events (topic, aggregate_id, payload) SELECT '{}', 'k', '{{}}' FROM generate_series(1, 20)"
    )
    database.execute(insert.format(prefix))
    with RelayProcess(path) as relay:
        await relay.has_published(20)
        await relay.streaming()
        await eventually(
            lambda: (
                database.query(
                    "SELECT count(*) FROM outbox_events, outbox_relay_checkpoint"
                    " WHERE NOT pg_visible_in_snapshot(xid, snap)"
                )
                == [(0,)]
            ),
            "covered",
        )
        report = await replay(config_of(sections), Wish(seq=0), quiet)
        database.execute(insert.format(prefix))
        await relay.has_published(40)
        await relay.stopped()
    with RelayProcess(path) as relay:
        await relay.streaming()
        await relay.stopped()
    stored = read_kafka(kafka_broker.bootstrap, prefix)
    assert again(stored, report.run) == rows(database.dsn)[:20]
    assert [item.id.decode() for item in genuine(stored)] == rows(database.dsn)


async def test_bookmarks(make_scene: Callable[[str], Scene]) -> None:
    scene = await make_scene("shared").set_up()
    config = config_of(scene.sections)
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        await relay.stopped()
    mark = await bookmark.add(config, "a")
    assert await bookmark.listed(config) == [mark]
    with pytest.raises(ConfigError, match="already"):
        await bookmark.add(config, "a")
    await bookmark.remove(config, "a")
    assert await bookmark.listed(config) == []
    with pytest.raises(SetupError, match="no bookmark"):
        await bookmark.remove(config, "a")


async def test_the_command_line(make_scene: Callable[[str], Scene]) -> None:
    scene = await make_scene("shared").set_up()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        scene.ledger.write(5)
        await scene.settled(relay)
        await scene.covered()
        await relay.stopped()

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return zygote().run(*arguments, "--config", str(scene.path))

    assert json.loads(command("bookmark", "add", "here", "--json").stdout)["name"] == "here"
    assert "here" in command("bookmark", "list").stdout
    total = len(rows(scene.dsn))
    assert f"{total} events" in command("replay", "--seq", "0", "--dry-run").stdout
    report = json.loads(command("replay", "--seq", "0", "--json").stdout)
    assert (report["state"], report["published"]) == ("done", total)
    assert again(await scene.read(), report["run"]) == rows(scene.dsn)
    refused = command("replay", "--from-lsn", "0/1")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "earliest point" in refused.stderr
    assert command("replay").returncode == 2
