"""Fenced JetStream on real servers: exactly once and in order, with a dedupe window too short to help (G4, G6)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from nats.aio.client import Client
from nats.js.api import RetentionPolicy, StreamConfig, StreamSource

from relay.config import Stream
from relay.embedded import NatsServer
from relay.errors import SetupError, SinkUnavailable, TransientError
from relay.sink import UNCOUNTABLE
from relay.sink.jetstream import JetStreamSink
from relay.sink.nats_fence import FencedWindow
from tests.fenced import configured, events, opened, stored_once
from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.fix_proxy import Proxy
from tests.ledger import Ledger
from tests.relays import RelayProcess, eventually, prepare, settings
from tests.sinks import (
    ORIGIN,
    batch_of,
    batches_of,
    make_event,
    publish_as_pipeline,
    publish_overlapping,
    read_jetstream,
)


@pytest.fixture
async def client(nats: Nats) -> AsyncIterator[Client]:
    """Closed also when the test fails: what it leaves open would fail others."""
    made = Client()
    await made.connect(nats.url)
    yield made
    await made.close()


# --- the sink


async def test_fenced_is_the_default_for_streams_that_the_relay_made(nats: Nats, prefix: str) -> None:
    async with opened(configured(nats.url, prefix)) as sink:
        assert isinstance(sink._window, FencedWindow)
        assert sink.marks == {prefix: 0}
    async with opened(configured(nats.url, prefix, mode="shared")) as sink:
        assert not isinstance(sink._window, FencedWindow)
        assert sink.marks == {}


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("atomic", [False, True], ids=["", "atomic"])
async def test_network_cut_and_stalled(
    own_nats: NatsServer, prefix: str, proxy: Callable[[str], Any], atomic: bool
) -> None:
    way: Proxy = await proxy(own_nats.url)
    made = events((f"{prefix}.a",), 6000)
    async with opened(configured(way.url, prefix, ack_timeout=0.4, atomic=atomic), reach=700) as sink:
        rounds, call_later = 0, asyncio.get_running_loop().call_later
        async for _ in publish_as_pipeline(sink, batches_of(made, 50)):
            rounds += 1
            if rounds % 6 == 2:
                call_later(0.002, lambda: asyncio.ensure_future(way.cut()))
            elif rounds % 6 == 5:
                way.stall("down" if rounds % 4 else "both")
                call_later(0.6, lambda: asyncio.ensure_future(way.resume()))  # longer than `ack_timeout`
    await stored_once(own_nats.url, (prefix,), made)


@pytest.mark.guarantee("G4")
async def test_atomic_batches(nats: Nats, client: Client, prefix: str) -> None:
    """A batch to two streams, larger than the server takes at once, and one event that a stream does not take."""
    js = client.jetstream()
    names = a, b = f"{prefix}a", f"{prefix}b"
    config = configured(nats.url, a, b, atomic=True)
    async with opened(config) as sink:
        made = events((f"{a}.x", f"{b}.y", f"{a}.z"), 4000)
        assert not await sink.publish(batch_of(made))
        one = make_event(5000, topic=f"{a}.x", key=b"alone")
        assert not await sink.publish(batch_of([one]))
    await stored_once(nats.url, names, [*made, one])
    first, middle, last = [(await js.get_msg(a, seq)).headers or {} for seq in (1, 2, 1000)]
    assert first["Nats-Batch-Id"] == middle["Nats-Batch-Id"] == last["Nats-Batch-Id"]
    assert (first["Nats-Expected-Last-Sequence"], last["Nats-Batch-Commit"]) == ("0", "1")
    assert "Nats-Expected-Last-Sequence" not in middle

    changed = (await js.stream_info(b)).config
    await js.update_stream(dataclasses.replace(changed, max_msg_size=2000))
    async with opened(config, {a: 2668, b: 1333}) as sink:
        huge = make_event(6001, topic=f"{b}.y", key=b"huge", body=b"x" * 3000)
        more = [make_event(6000, topic=f"{b}.y", key=b"k"), huge, make_event(6002, topic=f"{b}.y", key=b"k")]
        rejected = [item async for part in publish_as_pipeline(sink, [batch_of(more)]) for item in part]
        assert [item.event.id for item in rejected] == [huge.id]
    await stored_once(nats.url, names, [*made, one, more[0], more[2]])


async def test_a_transport_that_is_closed_already(nats: Nats, prefix: str) -> None:
    """uvloop raises, where asyncio's own transport drops what is written to it after its end."""

    def write(_data: bytes) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    async with opened(configured(nats.url, prefix)) as sink:
        sink._connection._wire.write = write  # type: ignore[union-attr]
        with pytest.raises(SinkUnavailable, match="handler is closed"):
            await sink.publish(batch_of(events((f"{prefix}.a",), 10)))
        await sink.open()
        assert not await sink.publish(batch_of(events((f"{prefix}.a",), 10)))


async def test_streams_without_atomic_batches(nats: Nats, client: Client, prefix: str) -> None:
    await client.jetstream().add_stream(StreamConfig(name=prefix, subjects=[f"{prefix}.>"]))
    with pytest.raises(SetupError, match="does not take atomic batches"):
        async with opened(configured(nats.url, prefix, mode="fenced", atomic=True)):
            pass


@pytest.mark.guarantee("G4")
async def test_a_successor_reads_back_what_the_checkpoint_does_not_cover(nats: Nats, prefix: str) -> None:
    """Ten thousand ids beyond the mark: those are read by a consumer, not one by one. Also in another order."""
    made = events((f"{prefix}.a",), 10_000)
    async with opened(configured(nats.url, prefix)) as sink:
        marks = dict(sink.marks)
        await publish_overlapping(sink, batches_of(made[:9000], 500))
    by_key = sorted(made, key=lambda event: (event.key, event.transaction.xid))
    async with opened(configured(nats.url, prefix), {**marks, UNCOUNTABLE: 1}, reach=100) as sink:
        batches = batches_of(by_key, 500)
        await publish_overlapping(sink, batches)
        assert batches[-1].marks[prefix] == 10_000
    await stored_once(nats.url, (prefix,), made)


@pytest.mark.guarantee("G4")
async def test_ids_with_spaces_at_their_ends_are_read_back_as_they_are(nats: Nats, client: Client, prefix: str) -> None:
    """As char(n) has them. The server remembers no ids by then."""
    made = [event._replace(id=b" %b  " % event.id) for event in events((f"{prefix}.a",), 10)]
    streams = (Stream(name=prefix, subjects=(f"{prefix}.>",), create=True, duplicate_window=0.1),)
    config = configured(nats.url, prefix, streams=streams)
    for _ in range(2):
        async with opened(config, {prefix: 0}) as sink:
            await publish_overlapping(sink, batches_of(made, 5))
        await asyncio.sleep(0.5)
    assert (await client.jetstream().stream_info(prefix)).state.messages == 10


@pytest.mark.guarantee("G4")
async def test_a_work_queue_that_was_consumed_meanwhile(nats: Nats, client: Client, prefix: str) -> None:
    """What consumers took is skipped by its place, if events come in the same order; else they come again."""
    js = client.jetstream()
    await js.add_stream(StreamConfig(name=prefix, subjects=[f"{prefix}.>"], retention=RetentionPolicy.WORK_QUEUE))
    made = events((f"{prefix}.a",), 50)
    config = configured(nats.url, prefix, mode="fenced")
    async with opened(config) as sink:
        await publish_overlapping(sink, batches_of(made[:30], 10))
    consumer = await js.pull_subscribe(f"{prefix}.>", "worker")
    seen: list[bytes] = []

    async def consume(count: int) -> None:
        while len(seen) < count:
            for message in await consumer.fetch(10, timeout=60):
                seen.append((message.headers or {})["id"].encode())
                await message.ack_sync()

    await consume(20)
    async with opened(config, {prefix: 0}) as sink:
        await publish_overlapping(sink, batches_of(made, 10))
    await consume(50)
    assert seen == [event.id for event in made]
    state = (await js.stream_info(prefix)).state
    assert (state.last_seq, state.messages) == (50, 0)


@pytest.mark.guarantee("G4")
async def test_a_foreign_writer_stops_the_relay_or_ends_the_fence(nats: Nats, client: Client, prefix: str) -> None:
    made = events((f"{prefix}.a",), 20)
    streams = (Stream(name=prefix, subjects=(f"{prefix}.>",), create=True),)  # shared mode dedupes by its window
    async with opened(configured(nats.url, streams=streams)) as sink:
        marks = dict(sink.marks)
        await sink.publish(batch_of(made[:10]))
        await client.jetstream().publish(f"{prefix}.a", b"not of a relay")
        with pytest.raises(TransientError, match="chain"):
            await sink.publish(batch_of(made[10:]))
        with pytest.raises(SetupError, match="another writer"):
            await sink.open()
    shared = JetStreamSink(configured(nats.url, streams=streams, foreign_writer="share"))
    shared.resume(marks, ORIGIN)
    with pytest.raises(TransientError, match="shared mode"):
        await shared.open()
    await shared.open()
    assert not isinstance(shared._window, FencedWindow) and shared.marks == {}
    await shared.publish(batch_of(made[10:]))
    await shared.close()
    assert (await client.jetstream().stream_info(prefix)).state.messages == 21


async def test_streams_that_cannot_be_fenced(nats: Nats, client: Client, prefix: str) -> None:
    js = client.jetstream()
    await js.add_stream(StreamConfig(name=prefix, subjects=[f"{prefix}.>"]))
    await js.add_stream(StreamConfig(name=f"{prefix}s", subjects=[f"{prefix}s.>"], sources=[StreamSource(name=prefix)]))
    with pytest.raises(SetupError, match="cannot be fenced"):
        async with opened(configured(nats.url, f"{prefix}s", mode="fenced")):
            pass
    with pytest.raises(SetupError, match="ends at sequence 0"):
        async with opened(configured(nats.url, prefix, mode="fenced"), {prefix: 7}):
            pass
    async with opened(configured(nats.url, prefix)) as sink:
        assert not isinstance(sink._window, FencedWindow), "not made by a relay"


async def test_a_topic_that_moved_to_another_stream(own_nats: NatsServer) -> None:
    """What the old stream holds beyond the checkpoint is not published to the new one again."""
    url, made = own_nats.url, events(("one.a",), 10)
    both = configured(url, "one", "two")
    async with opened(both) as sink:
        await sink.publish(batch_of(made[:6]))
    moved = [event._replace(topic="two.a") for event in made]
    async with opened(both, {"one": 0, "two": 0, UNCOUNTABLE: 1}, reach=0) as sink:
        await sink.publish(batch_of(moved))
    assert [len(await read_jetstream(url, name)) for name in ("one", "two")] == [6, 4]


# --- the relay


def fenced(url: str, stream: str) -> dict[str, Any]:
    streams = [{"name": stream, "subjects": [f"{stream}.>"], "create": True, "duplicate_window": "100ms"}]
    return {"kind": "jetstream", "jetstream": {"servers": [url], "ack_timeout": "2s", "streams": streams}}


@pytest.mark.guarantee("G4")
@pytest.mark.guarantee("G5")
async def test_relay_and_server_killed_and_the_slot_dropped(
    database: Database, own_nats: NatsServer, prefix: str, tmp_path: Path
) -> None:
    path = await prepare(tmp_path, settings(database.dsn, fenced(own_nats.url, prefix), source={"slot": prefix}))
    ledger = Ledger(database.dsn, f"{prefix}.orders")

    def drop_slot() -> None:
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", (prefix,)
            )
            for _ in range(100):
                try:
                    connection.execute("SELECT pg_drop_replication_slot(%s)", (prefix,))
                    return
                except psycopg.errors.ObjectInUse:
                    connection.execute("SELECT pg_sleep(0.05)")

    recovered = 0
    with ledger.writing(writers=3, pause=0.005):
        for turn in range(5):
            with RelayProcess(path) as relay:
                await relay.has_published((1, 100, 250)[turn % 3])
                if turn == 1:
                    own_nats.kill()
                    await asyncio.to_thread(own_nats.restart)
                    await relay.has_published(300)
                relay.kill()
                recovered += len(relay.said("recovery.started", reason="slot"))
            if turn in {0, 2}:
                await asyncio.to_thread(drop_slot)
    with RelayProcess(path) as relay:
        stored = await ledger.arrived(lambda: read_jetstream(own_nats.url, prefix), relay)
        await relay.ready()
        await relay.stopped()
    ledger.check(stored)
    assert recovered == 2


@pytest.mark.guarantee("G6")
async def test_a_frozen_relay_wakes_up_beside_its_successor(
    database: Database, own_nats: NatsServer, prefix: str, tmp_path: Path
) -> None:
    path = await prepare(tmp_path, settings(database.dsn, fenced(own_nats.url, prefix), source={"slot": prefix}))
    ledger = Ledger(database.dsn, f"{prefix}.orders")
    with RelayProcess(path) as frozen, RelayProcess(path) as successor:
        await eventually(lambda: frozen.said("stream.started") or successor.said("stream.started"), "one streams")
        zombie, other = (frozen, successor) if frozen.said("stream.started") else (successor, frozen)
        with ledger.writing(writers=3, pause=0.002):
            await zombie.has_published(300)
            zombie.freeze()
            with psycopg.connect(database.dsn, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'outbox_relay%'"
                    " AND pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"
                    " UNION SELECT active_pid FROM pg_replication_slots)"
                )
            await other.says("stream.started")
            zombie.thaw()
            await other.has_published(300)
            await eventually(
                lambda: zombie.status.get("state") == "standby", "stands by", context=lambda: zombie.output
            )
        stored = await ledger.arrived(lambda: read_jetstream(own_nats.url, prefix), other)
        ledger.check(stored)
