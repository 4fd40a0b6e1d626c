"""poll.strategy = "claim" on real servers: order per key, crashes, workers beside it, retries that end, wake-ups."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import SecretStr

from relay import bookmark
from relay.app import Relay
from relay.check import check
from relay.config import Config
from relay.embedded import NatsServer
from relay.errors import ContractError
from relay.replay import replay
from relay.setup import setup
from relay.status import status
from relay.wish import Wish
from tests.fix_kafka import Kafka
from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.integration.test_presets import CASES, Case, create, event_id, ids, marked, write
from tests.relays import RelayProcess, config_of, create_topic, eventually, settings
from tests.relays import kafka as kafka_sink
from tests.scene import Scene
from tests.sinks import read_jetstream, read_kafka
from tests.tables import nats_sink, published

FAST = {
    "strategy": "claim",
    "min_interval": "20ms",
    "max_interval": "50ms",
    "retry_initial": "50ms",
    "retry_max": "100ms",
}
SERVED = [case for case in CASES if case.write_back]


@contextlib.asynccontextmanager
async def claiming(config: Config) -> AsyncIterator[Relay]:
    async with Relay(config) as relay:

        def polling() -> bool:
            if relay._task is not None and relay._task.done():
                relay._task.result()
            return relay.progress.state == "polling"

        await eventually(polling, "polling", context=lambda: str(relay.progress))
        yield relay


def configured(database: Database, case: Case, url: str, prefix: str, **poll: Any) -> Config:
    source = {"slot": prefix, "mode": "poll"}
    sections = settings(database.dsn, nats_sink(url, case.subjects), source=source, poll={**FAST, **poll})
    return config_of(sections | {"outbox": [{"preset": case.preset, "table": case.table}]})


@pytest.fixture
async def scene(database: Database, nats: Nats, prefix: str, tmp_path: Path) -> Scene:
    made = Scene(database.dsn, nats.url, prefix, tmp_path, poll=FAST, source={"mode": "poll"})
    return await made.set_up()


def unmarked(scene: Scene) -> int:
    return int(scene.query("SELECT count(*) FROM outbox_events WHERE published_at IS NULL")[0])


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.preset)
async def test_each_table_is_claimed_as_it_stands(
    database: Database, own_nats: NatsServer, prefix: str, case: Case
) -> None:
    create(database, case)
    config = configured(database, case, own_nats.url, prefix)
    await setup(config)
    write(database, case, 1, 2)
    async with claiming(config) as relay:
        await published(relay, 2)
        write(database, case, 3)
        await published(relay, 3)
        await marked(database, case, 3)
    async with claiming(config) as relay:  # what is marked does not come again
        write(database, case, 4)
        await published(relay, 1)
        await marked(database, case, 4)
        assert relay.progress.published_events == 1
    assert ids(await read_jetstream(own_nats.url, "EVENTS")) == [event_id(n) for n in (1, 2, 3, 4)]


async def test_a_table_that_says_nothing_of_its_rows_is_refused(database: Database, prefix: str) -> None:
    case = next(case for case in CASES if case.preset == "debezium")
    create(database, case)
    config = configured(database, case, "nats://127.0.0.1:1", prefix)
    await setup(config)
    with pytest.raises(ContractError, match="cannot be claimed"):
        async with Relay(config) as relay:
            await relay.wait()


async def test_the_role_gets_the_rights_that_claiming_needs(
    database: Database, own_nats: NatsServer, prefix: str
) -> None:
    case = next(case for case in CASES if case.preset == "event_outbox")
    create(database, case)
    config = configured(database, case, own_nats.url, prefix)
    await setup(config, role=prefix)
    try:
        assert {step.action for step in await setup(config, role=prefix)} == {"present"}
        dsn = config.database.model_copy(update={"dsn": SecretStr(database.dsn_for(prefix))})
        own = config.model_copy(update={"database": dsn})
        assert not [finding for finding in await check(own, broker=False) if finding.level == "error"]
        async with claiming(own) as relay:
            write(database, case, 1)
            await published(relay, 1)
            await marked(database, case, 1)
        database.execute(f"REVOKE UPDATE (retry_count) ON event_outbox FROM {prefix}")
        (finding,) = [finding for finding in await check(own, broker=False) if finding.level == "error"]
        assert "may not write back" in finding.message
    finally:
        database.execute(f"DROP OWNED BY {prefix}; DROP ROLE {prefix}")


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G2")
async def test_order_per_key_with_four_workers_killed_again_and_again(scene: Scene) -> None:
    scene.configure(poll={"workers": 4, "batch": 7})
    with scene.ledger.writing(writers=3, pause=0.01):
        for goal in (1, 40):
            with RelayProcess(scene.path) as relay:
                await relay.has_published(goal)
                relay.kill()
    with RelayProcess(scene.path) as relay:
        await scene.settled(relay, duplicates=0)  # the same ids: JetStream knows them
        await eventually(lambda: unmarked(scene) == 0, "all are marked")
        assert relay.status["state"] == "polling"
        await relay.ready()
        await relay.stopped()
    assert scene.slot is None


@pytest.mark.guarantee("G5")
async def test_switching_between_strategies_and_to_the_stream_republishes_nothing(scene: Scene) -> None:
    total = 0
    steps = [("poll", "snapshot"), ("poll", "claim"), ("auto", "claim"), ("poll", "claim"), ("poll", "snapshot")]
    for seed, (mode, strategy) in enumerate(steps, start=1):
        scene.configure(source={"mode": mode}, poll={"strategy": strategy, "interval": "50ms"})
        with RelayProcess(scene.path) as relay:
            await relay.says("stream.started" if mode == "auto" else "poll.started")
            scene.ledger.write(10, seed=seed)
            await scene.settled(relay)
            if strategy == "claim" and mode == "poll":
                await eventually(lambda: unmarked_since(scene) == 0, "all are marked")
            else:
                await scene.covered()
            total += relay.counter("published_events")
            assert relay.counter("duplicate_events") == 0
            await relay.stopped()
    assert total == len(scene.ledger.journal)


async def test_what_a_stream_published_before_claiming_is_part_of_a_replay(scene: Scene) -> None:
    """The table calls it unpublished: the stream marks nothing."""
    config = config_of(scene.sections)
    for seed, mode in enumerate(("auto", "poll"), start=1):
        scene.configure(source={"mode": mode})
        with RelayProcess(scene.path) as relay:
            await relay.says("stream.started" if mode == "auto" else "poll.started")
            if mode == "auto":
                await bookmark.add(config, "before")
            scene.ledger.write(10, seed=seed)
            await scene.settled(relay)
            if mode == "auto":
                await scene.covered()
            else:
                await eventually(lambda: unmarked_since(scene) == 0, "all are marked")
                scene.execute("INSERT INTO outbox_events (aggregate_id, topic, headers) VALUES ('k', 'x', '[1]')")
                report = await replay(config, Wish(bookmark="before"), lambda _published, _total: None, dry_run=True)
                assert report.total == len(scene.ledger.journal)
            await relay.stopped()


async def test_ids_of_a_fixed_length_are_marked(scene: Scene) -> None:
    """`character` without a length is one character long."""
    scene.execute("ALTER TABLE outbox_events ALTER id DROP DEFAULT, ALTER id TYPE char(40) USING id::text")
    scene.execute("ALTER TABLE outbox_events ALTER id SET DEFAULT gen_random_uuid()::text")
    with RelayProcess(scene.path) as relay:
        await relay.says("poll.started")
        scene.execute(
            "INSERT INTO outbox_events (aggregate_id, topic) SELECT g, %s FROM generate_series(1, 3) g",
            f"{scene.name}.x",
        )
        await relay.has_published(3)
        await eventually(lambda: unmarked_since(scene) == 0, "all are marked", context=lambda: relay.output)
        (event,) = scene.query("SELECT id FROM outbox_events LIMIT 1")
        report = await replay(
            config_of(scene.sections), Wish(ids=(event.strip(),)), lambda _published, _total: None, dry_run=True
        )
        assert report.total == 1
        assert relay.counter("published_events") == 3
        await relay.stopped()


@pytest.mark.parametrize(("workers", "known"), [(1, "empty"), (4, "empty"), (4, "full")])
async def test_a_batch_reads_nothing_of_those_before_it(scene: Scene, workers: int, known: str) -> None:
    """Also where Postgres knows the table from another time: when it was empty, or when all of its rows were open."""
    total = 20_000
    scene.configure(poll={"workers": workers, "batch": 100})
    scene.execute("ALTER TABLE outbox_events SET (autovacuum_enabled = off)")
    if known == "empty":
        scene.execute("ANALYZE outbox_events")
    else:
        fill(scene, total)
        scene.execute("VACUUM ANALYZE outbox_events")
    with RelayProcess(scene.path) as relay:
        if known == "empty":
            looked = "SELECT seq_scan + idx_scan > 50 FROM pg_stat_user_tables WHERE relname = 'outbox_events'"
            await eventually(lambda: scene.query(looked)[0], "it has looked often")
            fill(scene, total)
        await relay.has_published(total)
        await relay.stopped()  # and so its sessions have told what they did
    read = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'outbox_events'"
    assert scene.query(read)[0] < 40 * total  # with four workers each looks at the rows of all


def fill(scene: Scene, rows: int) -> None:
    scene.execute(
        "INSERT INTO outbox_events (aggregate_id, topic) SELECT g %% 1000, %s FROM generate_series(1, %s) g",
        f"{scene.name}.x",
        rows,
    )


def unmarked_since(scene: Scene) -> int:
    return int(
        scene.query(
            "SELECT count(*) FROM outbox_events, outbox_relay_checkpoint"
            " WHERE published_at IS NULL AND NOT pg_visible_in_snapshot(xid, snap)"
        )[0]
    )


async def test_beside_a_worker_of_the_application(scene: Scene) -> None:
    """Its rows are skipped, and so are later rows of the same key; other keys flow."""
    topic = scene.ledger.topic
    insert = "INSERT INTO outbox_events (aggregate_id, topic, payload) VALUES (%s, %s, '{}') RETURNING id::text"
    with psycopg.connect(scene.dsn, autocommit=True) as writer, psycopg.connect(scene.dsn) as other:
        made = [writer.execute(insert, (key, topic)).fetchone() for key in ("a", "a", "b")]
        first, second, third = [row[0] for row in made if row is not None]
        other.execute("SELECT FROM outbox_events WHERE id = %s FOR UPDATE SKIP LOCKED", (first,))
        with RelayProcess(scene.path) as relay:
            await relay.has_published(1)
            row = writer.execute(insert, ("b", topic)).fetchone()
            assert row is not None
            await relay.has_published(2)
            assert [item.id.decode() for item in await scene.read()] == [third, row[0]]
            other.execute("UPDATE outbox_events SET published_at = now() WHERE id = %s", (first,))  # it did it
            other.commit()
            await relay.has_published(3)
            assert [item.id.decode() for item in await scene.read()] == [third, row[0], second]
            await relay.stopped()


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.preset)
async def test_a_rejected_event_is_tried_again_then_left_and_the_others_flow(
    database: Database, own_nats: NatsServer, prefix: str, case: Case
) -> None:
    create(database, case)
    config = configured(database, case, own_nats.url, prefix, max_attempts=3)
    await setup(config)
    if case.section == "S3":
        spoil, fate = "UPDATE {} SET topic = 'payout.a b' WHERE id::text = '{}'", "NOT processed AND error IS NOT NULL"
    else:
        spoil = "UPDATE {} SET event_type = 'a b' WHERE id::text = '{}'"
        fate = {
            "S0": "status = 'failed' AND retry_count = 3 AND last_error IS NOT NULL AND next_retry_at IS NOT NULL",
            "S1": "status = 'failed' AND attempt_cnt = 3",
            "S4": "published_at IS NULL AND retry_count = 3",
        }[case.section]
    write(database, case, 1, 2, 4, 5)  # 1 and 4 have one key
    database.execute(spoil.format(case.table, event_id(1)))
    async with claiming(config) as relay:
        await published(relay, 3)
        await eventually(
            lambda: database.query(f"SELECT 1 FROM {case.table} WHERE {fate}"),
            "it failed",
            context=lambda: str(database.query(f"SELECT * FROM {case.table}")),
        )
        await marked(database, case, 3)
        assert relay.progress.rejected_events == 3
        seen = await status(config)
        assert (seen["dead_letters"], seen["pending"]) == (1, 0)
        write(database, case, 7)  # of the same key, too
        await published(relay, 4)
    stored = ids(await read_jetstream(own_nats.url, "EVENTS"))
    assert sorted(stored) == [event_id(n) for n in (2, 4, 5, 7)]


async def test_to_kafka_a_head_that_is_too_large_holds_back_its_key_until_it_is_left(
    database: Database, kafka: Kafka, prefix: str
) -> None:
    """The default table, which has no status: what was left stays unpublished, and a reset takes it up again."""
    create_topic(kafka.bootstrap, prefix)
    poll = {**FAST, "workers": 4, "max_attempts": 2, "retry_initial": "1h", "retry_max": "1h"}
    sink = kafka_sink(kafka.bootstrap)
    sink["kafka"]["options"]["message.max.bytes"] = 20_000
    config = config_of(settings(database.dsn, sink, source={"slot": prefix, "mode": "poll"}, poll=poll))
    await setup(config)

    def insert(key: str, size: int) -> None:
        with database.connect() as connection:
            connection.execute(
                "INSERT INTO outbox_events (aggregate_id, event_type, topic, payload)"
                " VALUES (%s, 'made', %s, to_jsonb(repeat('x', %s)))",
                (key, prefix, size),
            )

    insert("a", 50_000)
    for key in "abcdeabcde":
        insert(key, 10)
    async with claiming(config) as relay:
        await published(relay, 8)
        await eventually(lambda: relay.progress.rejected_events == 1, "it is rejected")
        query = "SELECT seq, attempts FROM outbox_events WHERE published_at IS NULL ORDER BY seq"
        assert database.query(query) == [(1, 1), (2, 0), (7, 0)]  # its key waits with it
        database.execute("UPDATE outbox_events SET next_attempt_at = now() WHERE seq = 1")
        await published(relay, 10)  # after the second time it is left
        assert database.query(query) == [(1, 2)]
        assert "large" in database.query("SELECT last_error FROM outbox_events WHERE seq = 1")[0][0].lower()
        database.execute("UPDATE outbox_events SET attempts = 0, next_attempt_at = NULL, payload = '1' WHERE seq = 1")
        await published(relay, 11)
    stored = read_kafka(kafka.bootstrap, prefix)
    order = {key: [each.seq for each in stored if each.key == key.encode()] for key in "abcde"}
    assert order == {"a": [2, 7, 1], "b": [3, 8], "c": [4, 9], "d": [5, 10], "e": [6, 11]}


async def test_an_outage_costs_no_attempt(database: Database, own_nats: NatsServer, prefix: str) -> None:
    case = next(case for case in CASES if case.preset == "event_outbox")
    create(database, case)
    config = configured(database, case, own_nats.url, prefix, max_attempts=1)
    await setup(config)
    async with claiming(config) as relay:
        write(database, case, 1)
        await published(relay, 1)
        own_nats.stop()
        write(database, case, 2, 3)
        await eventually(
            lambda: relay.progress.sink_reconnects > 2, "it tries again", context=lambda: str(relay.progress)
        )
        assert database.query(
            "SELECT DISTINCT status, retry_count, last_error FROM event_outbox WHERE id::text > %s", event_id(1)
        ) == [("pending", 0, None)]
        with psycopg.connect(database.dsn) as other:  # nor are rows locked meanwhile
            locked = other.execute("SELECT FROM event_outbox WHERE status = 'pending' FOR UPDATE NOWAIT").fetchall()
            assert len(locked) == 2
        own_nats.start()
        await published(relay, 3)
        await marked(database, case, 3)
    assert set(ids(await read_jetstream(own_nats.url, "EVENTS"))) == {event_id(n) for n in (1, 2, 3)}


async def test_the_interval_grows_while_nothing_comes_and_notify_ends_the_wait(scene: Scene) -> None:
    """With an hour between two looks, only a NOTIFY explains that events arrive."""
    for strategy in ("claim", "snapshot"):
        scene.configure(
            poll={"strategy": strategy, "min_interval": "1ms", "max_interval": "1h", "interval": "1h", "notify": "wake"}
        )
        with RelayProcess(scene.path) as relay:
            await relay.says("poll.started")
            before = relay.counter("published_events")
            if strategy == "claim":
                await eventually(lambda: not claims_soon(scene), "it looks less and less often")
            for seed in (1, 2):
                scene.ledger.write(5, seed=seed)
                scene.execute("NOTIFY wake")
                await relay.has_published(before + 5 * seed)
            await relay.stopped()


def claims_soon(scene: Scene) -> bool:
    """Whether the worker has looked within the last second: its intervals are 1, 2, 4 … ms."""
    return bool(
        scene.query(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s"
            " AND (query_start > now() - interval '1 s' OR query_start IS NULL)",
            "%claim 0",
        )[0]
    )


async def test_a_history_to_replay_from_and_how_long_delivery_took(scene: Scene) -> None:
    """What is open is not part of a replay; what was published after a point is, and a request is served meanwhile."""
    scene.configure(checkpoint={"history_interval": "50ms"})
    config = config_of(scene.sections)
    with RelayProcess(scene.path) as relay:
        await relay.says("poll.started")
        scene.ledger.write(10)
        await scene.settled(relay)
        first = len(scene.ledger.journal)
        covered = (
            "SELECT NOT EXISTS (SELECT FROM outbox_events e WHERE NOT EXISTS (SELECT FROM outbox_relay_history h"
            " WHERE pg_visible_in_snapshot(e.xid, h.snap)))"
        )
        await eventually(lambda: scene.query(covered)[0], "a point that sees all", context=lambda: relay.output)
        await bookmark.add(config, "half")
        (at, lsn) = scene.query("SELECT clock_timestamp()::text, pg_current_wal_insert_lsn()::text")
        scene.ledger.write(10, seed=2)
        await scene.settled(relay)
        second = {entry.id for entry in scene.ledger.journal[first:]}
        # One that nobody can publish: open, so not part of any replay.
        scene.execute("INSERT INTO outbox_events (aggregate_id, topic, headers) VALUES ('k', 'x', '[1]')")
        await eventually(lambda: relay.counter("rejected_events"), "it is rejected")
        for wish in ({"bookmark": "half"}, {"since": at}, {"from_lsn": lsn}):
            report = await replay(config, Wish(**wish), lambda _published, _total: None)
            assert (report.state, report.request is None) == ("done", False)
            stored = await scene.read()
            found = [item.id.decode() for item in stored if item.headers.get("relay-replayed") == report.run.encode()]
            assert set(found) == second and len(found) == len(second), wish
        scene.ledger.write(5, seed=3)
        stored = await scene.ledger.arrived(scene.read, relay)
        scene.ledger.check([item for item in stored if "relay-replayed" not in item.headers])
        _, metrics = relay.http("/metrics")
        assert "relay_delivery_seconds_count" in metrics
        assert 'relay_delivery_seconds_count{relay="outbox_relay",service="outbox_relay"} 0.0' not in metrics
        await relay.stopped()
