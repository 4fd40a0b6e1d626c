"""A durable JetStream consumer with manual acknowledgement that processes every event once.

    NATS_URL=nats://127.0.0.1:4222 DATABASE_URL=postgresql://… python examples/jetstream_consumer.py EVENTS billing

The changes and the event's id are committed together; only then is the message acknowledged. A crash in between makes
JetStream deliver it again, and the inbox says that it is known. The trace of the producer goes on in `handle`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import nats
import psycopg
from nats.js.api import AckPolicy, ConsumerConfig
from psycopg.rows import TupleRow

from relay.inbox import Inbox

RETRY_SECONDS = 5.0


async def handle(connection: psycopg.AsyncConnection[TupleRow], event: dict[str, Any], headers: dict[str, str]) -> None:
    """Your work, on the transaction of `connection`. `traceparent` continues the trace of whoever wrote the event."""
    print(event["event_type"], event["aggregate_id"], headers.get("traceparent", "no trace"), flush=True)


async def consume(stream: str, durable: str, stop: asyncio.Event) -> None:
    inbox = Inbox(durable)
    client = await nats.connect(os.environ.get("NATS_URL", "nats://127.0.0.1:4222"))
    connection = await psycopg.AsyncConnection.connect(os.environ["DATABASE_URL"], autocommit=True)
    try:
        await connection.execute(inbox.ddl)
        subscription = await client.jetstream().pull_subscribe(
            "",
            durable,
            stream=stream,
            config=ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=30, max_deliver=-1),
        )
        while not stop.is_set():
            try:
                messages = await subscription.fetch(100, timeout=1)
            except TimeoutError:  # nothing there
                continue
            for message in messages:
                headers = message.headers or {}
                try:
                    async with connection.transaction():
                        if await inbox.is_new(connection, headers["id"]):
                            await handle(connection, json.loads(message.data), headers)
                except psycopg.Error as exc:
                    print(f"event {headers.get('id')}: {exc}; it will be delivered again", file=sys.stderr)
                    await message.nak(delay=RETRY_SECONDS)
                else:
                    await message.ack()
    finally:
        await connection.close()
        await client.close()


async def main() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await consume(sys.argv[1], sys.argv[2], stop)


if __name__ == "__main__":
    asyncio.run(main())
