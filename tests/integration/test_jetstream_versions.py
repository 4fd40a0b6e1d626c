"""JetStream on the versions of nats-server that the relay promises to work with, from 2.9 on: alone and replicated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import nats
import pytest

from relay.embedded import NatsCluster, NatsServer
from relay.embedded.process import wait_until
from relay.errors import SetupError, TransientError
from relay.event import Event
from tests.fenced import configured, events, opened, publish_while, stored_once
from tests.relays import eventually
from tests.sinks import batch_of, batches_of, publish_as_pipeline, publish_overlapping

OLDEST = "2.9.10"
POISONING = ("2.10.26", "2.11.11")  # replicated, they remember the ids of messages that they refused

Start = Callable[..., NatsServer]


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("version", [OLDEST, *POISONING, "2.12.0", "2.12.1 atomic", "current", "current atomic"])
async def test_server_killed_again_and_again(start_nats: Start, version: str, prefix: str) -> None:
    """Afterwards a successor that knows of nothing finds everything in the stream."""
    number, _, way = version.partition(" ")
    server = start_nats(version=number)
    names = (f"{prefix}a", f"{prefix}b")
    made = events((f"{names[0]}.x", f"{names[1]}.y", f"{names[0]}.z"), 10_000)
    config = configured(server.url, *names, atomic=way == "atomic")

    async def break_it() -> None:
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.restart)

    async with opened(config) as sink:
        marks = dict(sink.marks)
        await publish_while(sink, batches_of(made, 100), break_it, range(3, 1000, 3))
    async with opened(config, marks) as successor:
        assert not await publish_overlapping(successor, batches_of(made, 1000))
    await stored_once(server.url, names, made)


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize(
    ("cluster_of", "atomic", "kills"),
    [
        *((version, False, 1) for version in (*POISONING, OLDEST)),
        ("2.12.1", True, 1),
        ("current", False, 2),
        ("current", True, 2),
    ],
    indirect=["cluster_of"],
    scope="module",
)
async def test_leader_of_a_replicated_stream_killed(
    cluster_of: NatsCluster, prefix: str, atomic: bool, kills: int
) -> None:
    made = events((f"{prefix}.a",), 6000)
    config = configured(cluster_of.urls, prefix, replicas=3, atomic=atomic, ack_timeout=3.0)

    async def break_it() -> None:
        leader = await eventually(lambda: cluster_of.leader_of(prefix), "a leader")
        await asyncio.to_thread(leader.kill)
        await asyncio.to_thread(leader.restart)

    async with opened(config) as sink:
        await publish_while(sink, batches_of(made, 50), break_it, (4, 10)[:kills])
    assert await asyncio.to_thread(wait_until, lambda: cluster_of.healthy, 90.0, 0.1)
    await stored_once(cluster_of.urls[0], (prefix,), made)


@pytest.mark.parametrize("cluster_of", [*POISONING, OLDEST, "2.12.1", "current"], indirect=True)
async def test_a_stream_made_while_a_server_comes_back(cluster_of: NatsCluster, prefix: str) -> None:
    """From 2.10 on the others do not count on it for a moment; that is not a fault of the configuration."""
    follower = next(node for node in cluster_of.nodes if node is not cluster_of.leader)
    follower.kill()
    follower.restart()
    made = events((f"{prefix}.a",), 10)
    async with opened(configured(cluster_of.urls, prefix, replicas=3)) as sink:
        async for rejected in publish_as_pipeline(sink, [batch_of(made)]):
            assert rejected == []
    assert await asyncio.to_thread(wait_until, lambda: cluster_of.healthy, 90.0, 0.1)
    await stored_once(cluster_of.urls[0], (prefix,), made)


async def poison(cluster: NatsCluster, event: Event) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the server says to the event in the wrong place, and then to its id alone."""
    client = await nats.connect(cluster.urls)
    headers = {"Nats-Msg-Id": event.id.decode()}
    wrong = await client.request(event.topic, timeout=10, headers=headers | {"Nats-Expected-Last-Sequence": "0"})
    again = await client.request(event.topic, timeout=10, headers=headers)
    await client.close()
    return json.loads(wrong.data), json.loads(again.data)


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("cluster_of", POISONING, indirect=True)
async def test_ids_that_the_server_poisoned(cluster_of: NatsCluster, prefix: str) -> None:
    """It takes them for duplicates, without having stored them, until the dedupe window is over."""
    made = events((f"{prefix}.a",), 40)
    config = configured(cluster_of.urls, prefix, replicas=3, duplicate_window=120.0)
    async with opened(config) as zombie, opened(config) as active:
        marks = dict(active.marks)
        assert not await active.publish(batch_of(made[:10]))
        refused, again = await poison(cluster_of, made[19])
        assert refused["error"]["err_code"] == 10071
        assert again.get("seq") == 0 or again["error"]["err_code"] == 10158, again
        with pytest.raises(TransientError, match="chain"):
            await zombie.publish(batch_of(made[10:19]))
        assert not await active.publish(batch_of(made[10:20]))
    async with opened(config, marks) as successor:
        assert not await successor.publish(batch_of(made))
    await stored_once(cluster_of.urls[0], (prefix,), made)


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("version", [OLDEST, "current"])
async def test_a_zombie_is_refused(start_nats: Start, version: str, prefix: str) -> None:
    server = start_nats(version=version)
    made = events((f"{prefix}.a",), 40)
    async with opened(configured(server.url, prefix)) as zombie, opened(configured(server.url, prefix)) as active:
        await active.publish(batch_of(made[:20]))
        with pytest.raises(TransientError, match=r"chain|already"):  # 2.9 looks at ids before it looks at sequences
            await zombie.publish(batch_of(made[:10]))
        await active.publish(batch_of(made[20:]))
    await stored_once(server.url, (prefix,), made)


@pytest.mark.parametrize("version", ["2.11.11", "2.12.0"])
async def test_atomic_batches_that_the_server_does_not_take(start_nats: Start, version: str, prefix: str) -> None:
    """2.11 would store the events of a batch one by one; 2.12.0 refuses batches with message ids."""
    server = start_nats(version=version)
    with pytest.raises(SetupError, match=rf"needs nats-server 2\.12\.1 or newer; this one is {version}") as caught:
        async with opened(configured(server.url, prefix, atomic=True)):
            pass
    assert "atomic = false" in caught.value.hint
    assert "update the server" in caught.value.hint


@pytest.mark.guarantee("G2")
@pytest.mark.guarantee("G3")
async def test_a_shared_stream_of_the_oldest_version(start_nats: Start, prefix: str) -> None:
    server = start_nats(version=OLDEST)
    made = events((f"{prefix}.a",), 2000)
    async with opened(configured(server.url, prefix, mode="shared", duplicate_window=120.0)) as sink:
        for _ in range(2):
            assert not await publish_overlapping(sink, batches_of(made, 100))
        assert sink.duplicates == len(made)
    await stored_once(server.url, (prefix,), made)
