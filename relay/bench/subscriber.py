"""A consumer in a process of its own: notes when each event was written and when it arrived.

`python -m relay.bench.subscriber jetstream|kafka ADDRESS NAME OUT` prints "ready" once nothing can be missed. On
SIGTERM it waits until nothing more arrives, and writes its notes. In its own process, so that nothing else delays an
arrival.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from array import array
from pathlib import Path
from types import FrameType
from typing import Any

import orjson

_WRITTEN = re.compile(rb'"t": ?(\d+)')  # microseconds; bench_payload() puts them there
_QUIET = 0.5


class Notes:
    """Times of all arrivals, and the distinct event ids."""

    def __init__(self) -> None:
        self.written = array("q")
        self.arrived = array("q")
        self.ids: set[bytes] = set()
        self.stopping = False
        self.last = time.monotonic()

    def arrival(self, body: bytes, event_id: bytes) -> None:
        now = time.time_ns() // 1000
        found = _WRITTEN.search(body)
        self.written.append(int(found[1]) if found else 0)
        self.arrived.append(now)
        self.ids.add(event_id)
        self.last = time.monotonic()

    @property
    def done(self) -> bool:
        return self.stopping and time.monotonic() - self.last > _QUIET

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        self.stopping = True
        self.last = time.monotonic()

    def save(self, path: Path) -> None:
        path.write_bytes(
            orjson.dumps(
                {"written": self.written.tolist(), "arrived": self.arrived.tolist(), "distinct": len(self.ids)}
            )
        )


async def jetstream(address: str, name: str, notes: Notes) -> None:
    import nats  # noqa: PLC0415  one of the two clients is enough
    from nats.aio.msg import Msg  # noqa: PLC0415

    async def heard(message: Msg) -> None:
        notes.arrival(message.data, (message.headers or {}).get("id", "").encode())

    client = await nats.connect(address)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, notes.stop)
    await client.jetstream().subscribe(f"{name}.>", stream=name, ordered_consumer=True, cb=heard)
    print("ready", flush=True)
    while not notes.done:  # noqa: ASYNC110  done is a matter of time passing, not of an event
        await asyncio.sleep(0.05)
    await client.close()


def kafka(address: str, name: str, notes: Notes) -> None:
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition  # noqa: PLC0415

    from relay.bench.broker import topic  # noqa: PLC0415

    signal.signal(signal.SIGTERM, notes.stop)
    consumer = Consumer({"bootstrap.servers": address, "group.id": name, "enable.auto.commit": False})
    partitions = consumer.list_topics(topic(name), timeout=10.0).topics[topic(name)].partitions
    consumer.assign([TopicPartition(topic(name), number, OFFSET_BEGINNING) for number in partitions])
    consumer.poll(1.0)  # connects; the topic is empty
    print("ready", flush=True)
    while not notes.done:
        message = consumer.poll(0.1)
        if message is not None and not message.error():
            headers: Any = message.headers() or ()
            notes.arrival(message.value() or b"", dict(headers).get("id", b""))
    consumer.close()


def main() -> None:
    kind, address, name, out = sys.argv[1:]
    notes = Notes()
    if kind == "jetstream":
        asyncio.run(jetstream(address, name, notes))
    else:
        kafka(address, name, notes)
    notes.save(Path(out))


if __name__ == "__main__":
    main()
