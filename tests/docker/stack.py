"""The stack of docker/ as it runs: what the shop committed is what JetStream holds, also after the relay was killed.

Run by `make test-docker`, which builds the images and brings the stack up; not collected by a plain pytest. The tests
go in order: each leaves the stack running for the next one, until the last stops it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import nats
import psycopg
import pytest_asyncio
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import Error as JetStreamError

import relay

_PROJECT = os.environ["COMPOSE_PROJECT_NAME"]
_PATIENCE = 90.0


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def container(service: str) -> str:
    labels = (f"com.docker.compose.project={_PROJECT}", f"com.docker.compose.service={service}")
    return docker("ps", "-aq", *(f"--filter=label={label}" for label in labels))


def inspected(service: str) -> dict[str, Any]:
    (found,) = json.loads(docker("inspect", container(service)))
    return dict(found)


def healthy(service: str) -> bool:
    return bool(inspected(service)["State"]["Health"]["Status"] == "healthy")


def password(who: str) -> str:
    return (Path(os.environ["STACK_SECRETS"]) / f"{who}-password").read_text()


def database(dbname: str = "shop") -> psycopg.Connection[tuple[Any, ...]]:
    return psycopg.connect(
        host="127.0.0.1",
        port=os.environ["POSTGRES_PORT"],
        user="postgres",
        password=password("postgres"),
        dbname=dbname,
        autocommit=True,
    )


def committed() -> dict[str, tuple[str, int]]:
    """Event id → (key, place in the table): what the shop's transactions left behind."""
    with database() as connection:
        rows = connection.execute("SELECT id::text, aggregate_id, seq FROM outbox_events")
        return {id_: (key, seq) for id_, key, seq in rows}


async def eventually(condition: Callable[[], Any], what: str) -> Any:
    async with asyncio.timeout(_PATIENCE):
        while not (answer := condition()):
            await asyncio.sleep(0.2)
    assert answer, what
    return answer


@pytest_asyncio.fixture
async def jetstream() -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(f"nats://127.0.0.1:{os.environ['NATS_PORT']}")
    yield client.jetstream()
    await client.close()


async def stored(jetstream: JetStreamContext) -> list[str]:
    """The ids of all events in the stream, in its order."""
    count = (await jetstream.stream_info("EVENTS")).state.messages
    everything = ConsumerConfig(deliver_policy=DeliverPolicy.ALL, ack_policy=AckPolicy.NONE)
    subscription = await jetstream.subscribe("events.>", ordered_consumer=True, config=everything)
    ids = []
    for _ in range(count):
        event = await subscription.next_msg(timeout=_PATIENCE)
        assert event.headers is not None
        ids.append(event.headers["Nats-Msg-Id"])
    await subscription.unsubscribe()
    return ids


async def stored_at_least(jetstream: JetStreamContext, count: int) -> None:
    async with asyncio.timeout(_PATIENCE):
        while True:
            try:
                if (await jetstream.stream_info("EVENTS")).state.messages >= count:
                    return
            except JetStreamError:
                pass  # the relay has not created the stream yet
            await asyncio.sleep(0.2)


def test_the_relay_runs_without_rights() -> None:
    found = inspected("relay")
    assert found["Config"]["User"] == "10001:10001"
    assert found["HostConfig"]["ReadonlyRootfs"] is True
    assert found["HostConfig"]["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in found["HostConfig"]["SecurityOpt"]
    # It writes nothing; the engine itself puts the secret there.
    assert [line for line in docker("diff", container("relay")).splitlines() if "/run" not in line] == []
    assert docker("exec", container("relay"), "relay", "version") == f"relay {relay.__version__}"


def test_the_relay_has_the_least_rights_in_the_database() -> None:
    with database() as connection:
        row = connection.execute("SELECT rolsuper, rolreplication FROM pg_roles WHERE rolname = 'outbox_relay'")
        assert row.fetchone() == (False, True)


def test_no_password_is_in_the_environment_or_the_logs() -> None:
    for service in ("postgres", "setup", "relay", "shop"):
        logs = docker("logs", container(service))
        for who in ("postgres", "shop", "relay"):
            assert password(who) not in logs
            assert password(who) not in json.dumps(inspected(service)["Config"])


async def test_containers_become_healthy() -> None:
    for service in ("postgres", "nats", "relay"):
        await eventually(partial(healthy, service), service)


def test_postgres_allows_wal2json() -> None:
    with database("postgres") as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('probe', 'wal2json')")
        connection.execute("SELECT pg_drop_replication_slot('probe')")


async def test_events_arrive(jetstream: JetStreamContext) -> None:
    await stored_at_least(jetstream, 20)
    assert committed().keys() >= set(await stored(jetstream))


async def test_a_killed_relay_comes_back_and_nothing_is_lost(jetstream: JetStreamContext) -> None:
    before = inspected("relay")
    # From the host's namespace, as a crash would: after `docker kill` the engine would not restart it.
    pid = str(before["State"]["Pid"])
    image = before["Config"]["Image"]
    docker("run", "--rm", "--pid=host", "--user=0", "--entrypoint=sh", image, "-c", f"kill -9 {pid}")
    await eventually(lambda: inspected("relay")["RestartCount"] > before["RestartCount"], "no restart")
    await stored_at_least(jetstream, (await jetstream.stream_info("EVENTS")).state.messages + 20)

    docker("stop", container("shop"))
    expected = committed()
    await stored_at_least(jetstream, len(expected))
    found = await stored(jetstream)
    assert set(found) == set(expected)
    order = defaultdict(list)
    for id_ in dict.fromkeys(found):
        key, seq = expected[id_]
        order[key].append(seq)
    assert all(seqs == sorted(seqs) for seqs in order.values())


def test_a_stopped_relay_ends_cleanly() -> None:
    docker("stop", container("relay"))
    assert inspected("relay")["State"]["ExitCode"] == 0
