"""Postgres stops at once (G11), also when the broker is away or the sink hangs: the walsender is let go."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from relay.app import Relay
from relay.config import Config
from relay.embedded import NatsServer, PostgresServer
from relay.errors import SourceUnavailable
from relay.event import Batch, Rejected
from relay.setup import setup
from relay.source.replication import WalSender
from relay.source.session import connect
from tests.fix_postgres import Database
from tests.fix_proxy import Proxy
from tests.relays import RelayProcess, config_of, eventually, jetstream, settings
from tests.scene import Scene

MANY = (
    "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, topic, payload)"
    " SELECT 'order', 'k' || i %% 50, 'made', %s, jsonb_build_object('i', i) FROM generate_series(1, %s) i"
)
STOPS = 60.0  # a relay in the way would hold it for ever; its last checkpoint may have to share a slow disk


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize(("version", "broker"), [("15", "killed"), ("18", "frozen")])
async def test_while_the_broker_is_down(
    start_postgres: Callable[..., PostgresServer],
    own_nats: NatsServer,
    prefix: str,
    tmp_path: Path,
    version: str,
    broker: str,
) -> None:
    server = start_postgres(version)
    scene = await Scene(server.dsn(), own_nats.url, prefix, tmp_path).set_up()
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        await relay.says("sink.opened")
        if broker == "killed":
            own_nats.kill()
        else:
            own_nats.freeze()
        scene.execute(MANY, f"{prefix}.orders", 100_000)
        await eventually(lambda: relay.status["in_flight"]["events"] >= 1000, "the window is full")
        waits = "SELECT wait_event FROM pg_stat_activity WHERE backend_type = 'walsender'"
        await eventually(lambda: scene.query(waits) == ("WalSenderWriteData",), "the relay takes no more")
        await asyncio.to_thread(server.stop, STOPS, "fast")
        if broker == "killed":
            own_nats.start()
        else:
            own_nats.thaw()
        server.start()
        await relay.has_published(100_000)
        stored = await scene.read()
        assert len({item.id for item in stored}) == len(stored) == 100_000
        await relay.stopped()


class Stuck:
    """A sink that neither acknowledges nor hears that it is cancelled, until it is freed."""

    duplicates = 0
    marks: Mapping[str, int] = {}

    def __init__(self) -> None:
        self.freed = asyncio.Event()
        self.asked = 0

    def resume(self, marks: Mapping[str, int], origin: str) -> None: ...

    async def open(self) -> None: ...

    async def publish(self, batch: Batch) -> Sequence[Rejected]:
        self.asked += 1
        while not self.freed.is_set():
            with suppress(asyncio.CancelledError):
                await self.freed.wait()
        return ()

    async def close(self) -> None: ...


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize("first", ["the lock's", "another"])
async def test_whichever_session_hears_it_first(own_postgres: PostgresServer, prefix: str, first: str) -> None:
    """The rest of the relay cannot end: its sink is stuck. The walsender must not wait for it."""
    sections = settings(own_postgres.dsn(), jetstream("nats://127.0.0.1:1", prefix), source={"slot": prefix})
    config: Config = config_of(sections)
    await setup(config)
    sink = Stuck()
    async with Relay(config, sink=sink) as relay:
        try:
            await eventually(lambda: relay.progress.state == "streaming", "streaming")
            with psycopg.connect(own_postgres.dsn(), autocommit=True) as connection:
                connection.execute(MANY, (f"{prefix}.orders", 10))
                await eventually(lambda: sink.asked, "the sink is stuck")
                if first == "another":
                    ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = %s"
                    await eventually(
                        lambda: connection.execute(ended, ("outbox_relay requests",)).fetchone() == (1,), "it is ended"
                    )
                    streams = "SELECT count(*) FROM pg_stat_replication"
                    await eventually(lambda: connection.execute(streams).fetchone() == (0,), "the walsender is let go")
            await asyncio.to_thread(own_postgres.stop, STOPS, "fast")
        finally:
            sink.freed.set()


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize("how", ["session", "walsender"])
@pytest.mark.parametrize("end", ["given up", "cancelled"])
async def test_a_connection_that_did_not_come_about_is_closed(how: str, end: str) -> None:
    """Postgres waits for it, up to a minute. The error is kept, as errors are: that must not keep the socket."""
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            heard.put_nowait(data)
        heard.put_nowait(b"")
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    timeout = 1 if end == "given up" else 600
    database = config_of(
        {"database": {"dsn": f"postgresql://x@127.0.0.1:{port}/x", "connect_timeout": timeout}}
    ).database
    gc.disable()
    try:
        async with server:
            made = (
                connect(database, "test")
                if how == "session"
                else WalSender.connect(database, "test", timeout=60, lock_timeout=60)
            )
            attempt = asyncio.ensure_future(made)
            assert await asyncio.wait_for(heard.get(), 60)
            if end == "cancelled":
                attempt.cancel()
            (kept,) = await asyncio.gather(attempt, return_exceptions=True)
            assert isinstance(kept, SourceUnavailable if end == "given up" else asyncio.CancelledError)
            assert await asyncio.wait_for(heard.get(), 60) == b""
    finally:
        gc.enable()


async def test_a_walsender_whose_socket_libpq_has_closed(
    database: Database, prefix: str, proxy: Callable[[str], Awaitable[Proxy]]
) -> None:
    """Without a word of farewell from Postgres; the loop must have forgotten its number by then."""
    cable = await proxy(database.dsn)
    config = Config.model_validate({"database": {"dsn": cable.url}})
    wal = await WalSender.connect(config.database, "test", timeout=60, lock_timeout=60)
    start = await wal.create_slot(prefix, "pgoutput")
    await wal.start(prefix, start, {"proto_version": "1", "publication_names": "none"})
    wal.take(100, 1000)  # a first sign of life
    number = wal._pgconn.socket
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    cutting = asyncio.ensure_future(cable.cut())
    assert await wal.readable(600)
    with pytest.raises(SourceUnavailable):
        wal.take(1000, 1 << 20)
    assert not loop.remove_reader(number)
    wal.close()
    await cutting
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.add_reader(ours, heard.set)
        theirs.send(b"x")
        await asyncio.wait_for(heard.wait(), 30)
        loop.remove_reader(ours)


async def test_a_walsender_that_nobody_reads_leaves_the_loop_alone(database: Database, prefix: str) -> None:
    """Back-pressure: what waits in the socket must not wake the loop again and again. Reading, it is watched again."""
    config = Config.model_validate({"database": {"dsn": database.dsn}})
    wal = await WalSender.connect(config.database, "test", timeout=60, lock_timeout=60)
    start = await wal.create_slot(prefix, "pgoutput")
    await wal.start(prefix, start, {"proto_version": "1", "publication_names": "none"})
    for _ in range(2):
        wal.send_status(start, start, reply=True)
        assert await wal.readable(600)
        await eventually(lambda: wal._watched is None, "it is watched no more")
        while not wal.exhausted:
            wal.take(1000, 1 << 20)
        wal.exhausted = False
    assert not await wal.readable(0.1)  # silence; the timer of the waits before is still under way
    wal.close()


async def test_a_walsender_closed_while_somebody_waits_for_it(database: Database) -> None:
    """The number of its socket is free then: whoever gets it must be heard."""
    config = Config.model_validate({"database": {"dsn": database.dsn}})
    wal = await WalSender.connect(config.database, "test", timeout=60, lock_timeout=60)
    number = wal._pgconn.socket
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    waiting = asyncio.ensure_future(wal.readable(600))
    await asyncio.sleep(0)
    wal.close()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert number in {ours.fileno(), theirs.fileno()}
        ours, theirs = (ours, theirs) if ours.fileno() == number else (theirs, ours)
        loop.add_reader(ours, heard.set)
        assert await waiting
        theirs.send(b"x")
        await asyncio.wait_for(heard.wait(), 30)
        loop.remove_reader(ours)
    with pytest.raises(SourceUnavailable):
        wal.take(1, 1)
