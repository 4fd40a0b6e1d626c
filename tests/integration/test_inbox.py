"""The consumer's side: an event is processed once, in the consumer's own transaction (G3 makes it possible)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client

from relay.embedded import KafkaServer, NatsServer
from relay.inbox import Inbox, MemoryInbox
from tests.fix_postgres import Database

EXAMPLES = Path(__file__).parents[2] / "examples"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_an_id_is_new_once_and_only_if_its_transaction_commits(database: Database) -> None:
    inbox = Inbox("billing")
    async with await psycopg.AsyncConnection.connect(database.dsn, autocommit=True) as connection:
        await connection.execute(inbox.ddl)
        await connection.execute(inbox.ddl)  # repeatable

        async with connection.transaction(force_rollback=True):  # the work failed: the id must not count
            assert await inbox.is_new(connection, "a")
        async with connection.transaction():
            assert await inbox.is_new(connection, "a")
        async with connection.transaction():
            assert not await inbox.is_new(connection, "a")
            assert await Inbox("shipping").is_new(connection, "a")  # another consumer's business


async def test_two_deliveries_at_once_are_one(database: Database) -> None:
    inbox = Inbox("billing")
    async with (
        await psycopg.AsyncConnection.connect(database.dsn, autocommit=True) as one,
        await psycopg.AsyncConnection.connect(database.dsn, autocommit=True) as two,
    ):
        await one.execute(inbox.ddl)

        async def second() -> bool:
            async with two.transaction():
                return await inbox.is_new(two, "a")

        async with one.transaction():
            assert await inbox.is_new(one, "a")
            waiting = asyncio.ensure_future(second())
            done, _ = await asyncio.wait((waiting,), timeout=0.2)
            assert not done  # it must not guess while the first is undecided
        assert not await waiting


async def test_pruning_forgets_only_what_is_old(database: Database) -> None:
    inbox = Inbox("billing", table="public.seen")
    async with await psycopg.AsyncConnection.connect(database.dsn, autocommit=True) as connection:
        await connection.execute(inbox.ddl)
        for event_id in ("old", "older", "new"):
            await inbox.is_new(connection, event_id)
        await connection.execute("UPDATE seen SET processed_at = now() - interval '2 days' WHERE event_id LIKE 'old%'")

        assert await inbox.prune(connection, keep_seconds=86400, batch=1) == 1
        assert await inbox.prune(connection, keep_seconds=86400) == 1
        assert await inbox.prune(connection, keep_seconds=86400) == 0
        assert not await inbox.is_new(connection, "new")


@given(st.lists(st.sampled_from("abcdef")), st.integers(1, 4))
def test_memory_never_calls_a_remembered_id_new_and_never_grows_beyond_its_capacity(ids: list[str], size: int) -> None:
    inbox, recent = MemoryInbox(size), list[str]()
    for event_id in ids:
        assert inbox.is_new(event_id) == (event_id not in recent)
        if event_id in recent:
            recent.remove(event_id)
        recent = [*recent, event_id][-size:]
        assert len(inbox) <= size
    if ids:
        inbox.forget(ids[-1])
        assert inbox.is_new(ids[-1])


def _body(number: int) -> bytes:
    return json.dumps({"event_id": f"id-{number}", "event_type": "paid", "aggregate_id": f"o{number}"}).encode()


async def _lines(process: asyncio.subprocess.Process, count: int) -> list[str]:
    assert process.stdout is not None
    return [(await asyncio.wait_for(process.stdout.readline(), 90)).decode().strip() for _ in range(count)]


@asynccontextmanager
async def _example(name: str, *arguments: str, **environ: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / name), *arguments, stdout=-1, env={**os.environ, **environ}
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@pytest.mark.guarantee("G3")
async def test_the_jetstream_example_handles_a_redelivered_event_once(database: Database, nats: NatsServer) -> None:
    client = await _connect(nats.url)
    try:
        stream = client.jetstream()
        await stream.add_stream(name="INBOX", subjects=["inbox.>"])
        for number in (1, 2, 1, 3):  # 1 comes twice, as after a relay's crash beyond the dedupe window
            await stream.publish("inbox.x", _body(number), headers={"id": f"id-{number}", "traceparent": TRACE})
        async with _example(
            "jetstream_consumer.py", "INBOX", "billing", NATS_URL=nats.url, DATABASE_URL=database.dsn
        ) as process:
            lines = await _lines(process, 3)
            process.terminate()
            assert await process.wait() == 0
        await stream.delete_stream("INBOX")
    finally:
        await client.close()

    assert lines == [f"paid o{number} {TRACE}" for number in (1, 2, 3)]
    assert database.query("SELECT count(*) FROM processed_events") == [(3,)]


@pytest.mark.guarantee("G3")
async def test_the_kafka_example_handles_a_redelivered_event_once(
    database: Database, kafka: KafkaServer, prefix: str
) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    for future in admin.create_topics([NewTopic(prefix, 1, 1)]).values():
        future.result()
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for number in (1, 2, 1, 3):
        headers: list[tuple[str, str | bytes | None]] = [
            ("id", f"id-{number}".encode()),
            ("traceparent", TRACE.encode()),
        ]
        producer.produce(prefix, _body(number), key=b"k", headers=headers)
    producer.flush()
    async with _example(
        "kafka_consumer.py", prefix, prefix, KAFKA=kafka.bootstrap, DATABASE_URL=database.dsn
    ) as process:
        lines = await _lines(process, 3)
        process.terminate()
        assert await process.wait() == 0
    assert lines == [f"paid o{number} {TRACE}" for number in (1, 2, 3)]


async def _connect(url: str) -> Client:
    client = Client()
    await client.connect(url)
    return client
