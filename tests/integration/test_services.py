"""The tests' own ground: each service starts, answers, comes back with its data, and is gone afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import nats
import psutil
import psycopg
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from nats.js.api import StreamConfig

from relay.embedded import EmbeddedError, KafkaServer, NatsCluster, NatsServer, PostgresServer
from relay.embedded.process import Server, wait_until
from tests.fix_kafka import Kafka
from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.fix_proxy import Proxy


def assert_gone(server: Server, pid: int) -> None:
    assert not server.is_running
    assert not psutil.pid_exists(pid)
    assert not server.folder.exists()


class Stubborn(Server):
    """A process that does not hear the signal that ends it."""

    name = "stubborn"
    end_signal = signal.SIGTERM
    end_timeout = 0.2

    def _command(self) -> list[str]:
        deaf = "import pathlib, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        return [sys.executable, "-c", deaf + "pathlib.Path('ready').touch()\nwhile True: signal.pause()"]

    def _ready(self) -> bool:
        return (self.folder / "ready").exists()


class Restless(Server):
    """A process that has always just forked another one."""

    name = "restless"

    def _command(self) -> list[str]:
        fork = "    if os.fork() == 0:\n        time.sleep(1)\n        os._exit(0)\n"
        forks = f"import os, pathlib, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n{fork}"
        return [sys.executable, "-c", forks + "    pathlib.Path('ready').touch()\n    time.sleep(0.01)"]

    def _ready(self) -> bool:
        return (self.folder / "ready").exists()

    def processes(self, pid: int) -> list[psutil.Process]:
        """Of its session: those that lost their parent, too."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(process.pid) == pid:
                    found.append(process)
        return found


@pytest.mark.parametrize("version", ["18", "16", "15"])
def test_postgres_keeps_its_data_through_restarts_and_is_gone_after_close(version: str) -> None:
    with PostgresServer(version, durable=False) as server:
        dsn = server.create_database("shop")
        server.execute("CREATE TABLE t (n int); INSERT INTO t VALUES (1)", "shop")
        for end in (server.stop, partial(server.stop, mode="immediate"), server.kill):
            end()
            server.start()
            with psycopg.connect(dsn) as connection:
                assert connection.execute("SELECT n FROM t").fetchall() == [(1,)]
                assert connection.execute("SHOW wal_level").fetchone() == ("logical",)
                assert connection.info.server_version // 10000 == int(version)
        pid = server.pid
    assert_gone(server, pid)


def test_postgres_takes_settings_and_hba_lines(start_postgres: Callable[..., PostgresServer]) -> None:
    server = start_postgres(
        settings={"wal_level": "replica", "application_name": "it's"}, hba=["host all nosy 127.0.0.1/32 reject"]
    )
    server.execute("CREATE ROLE nosy LOGIN")
    with psycopg.connect(server.dsn()) as connection:
        assert connection.execute("SHOW wal_level").fetchone() == ("replica",)
    with pytest.raises(psycopg.OperationalError, match="rejects"):
        psycopg.connect(server.dsn(user="nosy"))


def test_postgres_that_does_not_start_says_why(start_postgres: Callable[..., PostgresServer]) -> None:
    server = PostgresServer(durable=False, settings={"no_such_parameter": 1})
    with pytest.raises(EmbeddedError) as caught, server:
        pass
    assert "no_such_parameter" in caught.value.hint
    assert not server.folder.exists()


def test_postgres_that_is_not_installed_names_the_remedy() -> None:
    with pytest.raises(EmbeddedError) as caught:
        PostgresServer("9.6")
    assert "apt-get install postgresql-9.6" in caught.value.hint


@pytest.mark.parametrize(("plugin", "name"), [("pgoutput", "database"), ("wal2json", "database15")])
def test_database_is_dropped_with_its_slots(plugin: str, name: str, request: pytest.FixtureRequest) -> None:
    from tests.fix_postgres import _database

    server = request.getfixturevalue(name).server
    with _database(server) as database:
        database.query("SELECT pg_create_logical_replication_slot(%s, %s)", database.name, plugin)
    with psycopg.connect(server.dsn()) as connection:
        count = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s"
        assert connection.execute(count, (database.name,)).fetchone() == (0,)


def test_a_server_that_does_not_end_is_killed_and_its_folder_is_gone() -> None:
    server = Stubborn().start()
    pid = server.pid
    with pytest.raises(EmbeddedError, match="did not stop"):
        server.close()
    assert_gone(server, pid)


def test_shared_database_answers(database: Database) -> None:
    database.execute("CREATE TABLE t (n int); INSERT INTO t VALUES (1)")
    assert database.query("SELECT n FROM t") == [(1,)]


async def test_nats_keeps_its_streams_through_restarts_and_is_gone_after_close() -> None:
    with NatsServer("max_payload: 2MB") as server:
        client = await nats.connect(server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.05)
        assert client.max_payload == 2 * 1024 * 1024
        await client.jetstream().add_stream(StreamConfig(name="S", subjects=["s.>"]))
        await client.jetstream().publish("s.1", b"x")
        await client.close()
        for again in (server.restart, server.kill):
            again()
            server.start()
            client = await nats.connect(server.url)
            assert (await client.jetstream().stream_info("S")).state.messages == 1
            await client.close()
        pid = server.pid
    assert_gone(server, pid)


async def test_nats_cluster_survives_the_loss_of_its_leader(nats_cluster: NatsCluster) -> None:
    client = await nats.connect(nats_cluster.urls)
    await client.jetstream().add_stream(StreamConfig(name="S", subjects=["s.>"], num_replicas=3))
    await client.close()
    old = nats_cluster.leader
    assert old is not None
    old.kill()
    assert await asyncio.to_thread(wait_until, lambda: nats_cluster.leader not in {None, old}, 90.0)
    nats_cluster.start()


async def test_shared_nats_answers(nats: Nats, prefix: str) -> None:
    from nats import connect

    client = await connect(nats.url)
    await client.jetstream().add_stream(StreamConfig(name=prefix, subjects=[f"{prefix}.>"]))
    assert (await client.jetstream().publish(f"{prefix}.x", b"")).seq == 1
    await client.close()


def consume(bootstrap: str, topic: str) -> bytes | None:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    message = consumer.poll(30.0)
    consumer.close()
    return None if message is None else message.value()


def produce(bootstrap: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30.0)
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 0})
    producer.produce(topic, b"x")
    assert producer.flush(30.0) == 0


def test_kafka_keeps_its_data_through_restarts_and_is_gone_after_close() -> None:
    with KafkaServer({"num.partitions": "2"}) as server:
        produce(server.bootstrap, "t")
        server.restart()
        server.kill()
        server.start()
        assert consume(server.bootstrap, "t") == b"x"
        pid = server.pid
    assert_gone(server, pid)


def test_shared_kafka_answers(kafka: Kafka, prefix: str) -> None:
    produce(kafka.bootstrap, prefix)
    assert consume(kafka.bootstrap, prefix) == b"x"


def test_frozen_server_answers_again_after_thaw(own_postgres: PostgresServer) -> None:
    own_postgres.freeze()
    statuses = {child.status() for child in psutil.Process(own_postgres.pid).children()}
    assert statuses == {psutil.STATUS_STOPPED}
    own_postgres.thaw()
    own_postgres.execute("SELECT 1")


def test_a_server_is_frozen_and_killed_together_with_what_it_forks_meanwhile() -> None:
    with Restless() as server:
        pid = server.pid
        for _ in range(5):
            server.freeze()
            frozen = server.processes(pid)
            assert len(frozen) > 1
            assert {process.status() for process in frozen} == {psutil.STATUS_STOPPED}
            server.thaw()
        server.kill()
        assert server.processes(pid) == []


def test_servers_end_with_the_process_that_started_them() -> None:
    code = (
        "import os\n"
        "from relay.embedded import NatsServer, PostgresServer\n"
        "for server in (PostgresServer(durable=False).start(), NatsServer().start()):\n"
        "    print(server.pid, server.folder, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    started = [line.split() for line in done.stdout.splitlines()]
    assert len(started) == 2
    for pid, folder in started:
        assert wait_until(lambda pid=pid: not psutil.pid_exists(int(pid)), 90.0)  # type: ignore[misc]
        assert wait_until(lambda folder=folder: not Path(folder).exists(), 90.0)  # type: ignore[misc]


async def test_proxy_stalls_cuts_refuses_and_resumes(
    proxy: Callable[[str], Awaitable[Proxy]], own_nats: NatsServer
) -> None:
    link = await proxy(own_nats.url)
    host, _, port = link.url.removeprefix("nats://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    assert (await reader.readline()).startswith(b"INFO")

    writer.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
    assert await reader.readline() == b"PONG\r\n"
    link.stall("down")
    writer.write(b"PING\r\n")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readline(), 0.2)
    await link.resume()
    assert await reader.readline() == b"PONG\r\n"

    await link.cut()
    with pytest.raises(ConnectionResetError):
        await reader.readline()
    writer.close()
    await link.refuse()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))
    await link.resume()
    reader, writer = await asyncio.open_connection(host, int(port))
    assert (await reader.readline()).startswith(b"INFO")
    writer.close()
    await writer.wait_closed()
