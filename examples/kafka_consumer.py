"""A Kafka consumer that processes every event once.

    KAFKA=127.0.0.1:9092 DATABASE_URL=postgresql://… python examples/kafka_consumer.py billing events.order.created …

`read_committed` hides what an aborted transaction of the relay left behind. The changes and the event's id are
committed together; the offset is committed afterwards. A crash in between delivers the event again, and the inbox says
that it is known. The trace of the producer goes on in `handle`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, cast

import psycopg
from confluent_kafka import Consumer, KafkaException
from psycopg.rows import TupleRow

from relay.inbox import Inbox


def handle(connection: psycopg.Connection[TupleRow], event: dict[str, Any], headers: dict[str, str]) -> None:
    """Your work, on the transaction of `connection`. `traceparent` continues the trace of whoever wrote the event."""
    print(event["event_type"], event["aggregate_id"], headers.get("traceparent", "no trace"), flush=True)


def consume(group: str, topics: list[str], stopped: list[bool]) -> None:
    inbox = Inbox(group)
    consumer = Consumer(
        {
            "bootstrap.servers": os.environ.get("KAFKA", "127.0.0.1:9092"),
            "group.id": group,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe(topics)
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        connection.execute(inbox.ddl)
        try:
            while not stopped:
                message = consumer.poll(1.0)
                if message is None:
                    continue
                if message.error():
                    raise KafkaException(message.error())
                pairs = cast("list[tuple[str, bytes | None]]", message.headers() or [])
                headers = {name: value.decode() for name, value in pairs if value is not None}
                with connection.transaction():
                    if inbox.is_new_sync(connection, headers["id"]):
                        handle(connection, json.loads(message.value() or b"null"), headers)
                consumer.commit(message=message, asynchronous=False)
        finally:
            consumer.close()


def main() -> None:
    stopped: list[bool] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.append(True))
    consume(sys.argv[1], sys.argv[2:], stopped)


if __name__ == "__main__":
    main()
