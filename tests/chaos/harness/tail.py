"""Watches events arrive in the broker, with the broker's own client, past the proxies: who came when.

This is the clock of the run (stalls, time to recover, "is everything there?"). The verdict is not taken from here but
from a second, complete reading at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import nats
import nats.errors
import nats.js.errors
from confluent_kafka import Consumer, TopicPartition
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, DeliverPolicy

from tests.chaos.harness.stage import STREAMS, TOPICS


class Arrivals:
    """Ids that were seen, and when something new came."""

    def __init__(self) -> None:
        self.seen: set[uuid.UUID] = set()
        self.times: list[float] = []  # at most one per 10 ms
        self.per_second: dict[int, int] = {}
        self.waiting: dict[uuid.UUID, list[Callable[[float], None]]] = {}

    def arrived(self, event_id: uuid.UUID) -> None:
        if event_id in self.seen:
            return
        now = time.monotonic()
        self.seen.add(event_id)
        self.per_second[int(now)] = self.per_second.get(int(now), 0) + 1
        if not self.times or now - self.times[-1] > 0.01:
            self.times.append(now)
        if self.waiting:
            for then in self.waiting.pop(event_id, ()):
                then(now)

    def tell(self, event_id: uuid.UUID, then: Callable[[float], None]) -> None:
        if event_id in self.seen:
            then(time.monotonic())
        else:
            self.waiting.setdefault(event_id, []).append(then)


def id_of(text: str | bytes) -> uuid.UUID | None:
    try:
        return uuid.UUID(text if isinstance(text, str) else text.decode())
    except ValueError:
        return None


async def tail_jetstream(url: str, arrivals: Arrivals) -> None:
    """Every stream, until cancelled; goes on where it was when the server comes back."""
    async with asyncio.TaskGroup() as group:
        for stream in STREAMS:
            group.create_task(_tail_stream(url, stream, arrivals))


async def _tail_stream(url: str, stream: str, arrivals: Arrivals) -> None:
    last = 0

    async def take(message: Msg) -> None:
        nonlocal last
        last = max(last, message.metadata.sequence.stream)
        found = id_of((message.headers or {}).get("id", ""))
        if found is not None:
            arrivals.arrived(found)

    while True:
        client = None
        try:
            client = await nats.connect(url, allow_reconnect=False, connect_timeout=2, error_cb=_quiet)
            # Taken by callback: a turn of the loop per message would be slower than the relay.
            after = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=last + 1)
            await client.jetstream().subscribe("", stream=stream, ordered_consumer=True, config=after, cb=take)
            while client.is_connected:
                await asyncio.sleep(0.1)
        except (OSError, nats.errors.Error, nats.js.errors.Error):
            await asyncio.sleep(0.1)
        finally:
            if client is not None:
                with contextlib.suppress(Exception):
                    await client.close()


async def _quiet(_error: Exception) -> None:
    """A server that is killed is what we are here for."""


_WHILE = 20.0


async def tail_kafka(bootstrap: str, arrivals: Arrivals) -> None:
    """Both topics, committed messages only, until cancelled."""
    loop, over = asyncio.get_running_loop(), threading.Event()

    def deliver(ids: list[uuid.UUID]) -> None:
        for event_id in ids:
            arrivals.arrived(event_id)

    places = {(topic, partition): 0 for topic in TOPICS for partition in range(3)}

    def poll() -> None:
        while not over.is_set():
            consumer = Consumer(consumer_options(bootstrap))
            try:
                consumer.assign([TopicPartition(*spot, place) for spot, place in places.items()])
                follow(consumer)
            finally:
                consumer.close()

    def follow(consumer: Consumer) -> None:
        """For a while only: a partition that met an error while the broker was away can stay silent for ever."""
        end = time.monotonic() + _WHILE
        while not over.is_set() and time.monotonic() < end:
            ids = []
            for message in consumer.consume(500, timeout=0.1):
                if message.error() is None:
                    places[message.topic() or "", message.partition() or 0] = (message.offset() or 0) + 1
                if (found := message_id(message)) is not None:
                    ids.append(found)
            if ids:
                loop.call_soon_threadsafe(deliver, ids)

    task = asyncio.ensure_future(asyncio.to_thread(poll))
    try:
        await asyncio.shield(task)
    finally:
        over.set()
        await task


def consumer_options(bootstrap: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": bootstrap,
        "group.id": "chaos",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "auto.offset.reset": "error",
        "fetch.wait.max.ms": 20,
        "enable.partition.eof": True,
        "reconnect.backoff.max.ms": 500,
        "log_level": 0,
    }


def message_id(message: Any) -> uuid.UUID | None:
    """The header `id` of a message; None for what is no event (end of a partition, an error in between)."""
    if message.error() is not None:
        return None
    return next((id_of(value) for name, value in message.headers() or [] if name == "id"), None)
