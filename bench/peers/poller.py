"""A polling outbox worker as most teams write it: select, publish, mark, sleep.

python poller.py jetstream|kafka DSN ADDRESS TOPIC INTERVAL
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

import nats
import psycopg
from confluent_kafka import KafkaError, Message, Producer

BATCH = 500
SELECT = """
SELECT seq, id::text, aggregate_id, payload::text FROM outbox_events
WHERE published_at IS NULL ORDER BY seq LIMIT %s FOR UPDATE SKIP LOCKED
"""
UPDATE = "UPDATE outbox_events SET published_at = now() WHERE seq = ANY(%s)"

Row = tuple[int, str, str, str]
Publish = Callable[[Sequence[Row]], Awaitable[None]]


async def jetstream(address: str, subject: str) -> Publish:
    js = (await nats.connect(address)).jetstream()

    async def publish(rows: Sequence[Row]) -> None:
        sends = (js.publish(subject, row[3].encode(), headers={"Nats-Msg-Id": row[1], "key": row[2]}) for row in rows)
        await asyncio.gather(*sends)

    return publish


async def kafka(address: str, topic: str) -> Publish:
    producer = Producer({"bootstrap.servers": address, "acks": "all", "enable.idempotence": True})
    failed: list[KafkaError] = []

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            failed.append(error)

    async def publish(rows: Sequence[Row]) -> None:
        for row in rows:
            producer.produce(topic, row[3], key=row[2], headers={"id": row[1]}, on_delivery=delivered)
        producer.flush()
        if failed:
            raise RuntimeError(failed[0])

    return publish


async def main(kind: str, dsn: str, address: str, topic: str, interval: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    publish = await (jetstream if kind == "jetstream" else kafka)(address, topic)
    async with await psycopg.AsyncConnection[Row].connect(dsn, autocommit=True) as db:
        while not stop.is_set():
            async with db.transaction():
                rows = await (await db.execute(SELECT, (BATCH,))).fetchall()
                if rows:
                    await publish(rows)
                    await db.execute(UPDATE, ([row[0] for row in rows],))
            if len(rows) < BATCH:
                await asyncio.sleep(float(interval))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
