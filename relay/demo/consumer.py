"""The consumers: what an application on the other side does. Each hands on what arrives, and acknowledges after that.

They do not dedupe; the ledger does, by id. They run until told to stop, or raise SinkUnavailable.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Protocol, cast

import nats
import orjson
from confluent_kafka import Consumer as KafkaClient
from confluent_kafka import KafkaException
from confluent_kafka import Message as KafkaMessage
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError

from relay.demo.ledger import Arrival
from relay.errors import SinkUnavailable

Receive = Callable[[Arrival], None]

_NAME = "shop"
_PULL = 500  # events asked for at once
_LINGER = 5.0  # seconds until the server answers a request that it cannot fill


class Consumer(Protocol):
    async def run(self, receive: Receive) -> None:
        """Until cancelled."""


class JetStreamConsumer:
    """A durable pull consumer with explicit acks.

    It asks by itself: the client library's `fetch` waits for a full batch, which would spoil every latency.
    """

    def __init__(self, url: str, stream: str) -> None:
        self._url = url
        self._stream = stream
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{_NAME}"
        self._request = orjson.dumps({"batch": _PULL, "expires": int(_LINGER * 1e9)})
        self._asked = 0  # events that are still to come for the last request

    async def run(self, receive: Receive) -> None:
        closed = asyncio.Event()

        async def on_closed() -> None:
            closed.set()

        async def on_message(message: Msg) -> None:
            self._asked -= 1
            if message.reply:
                receive(_from_jetstream(message))
                await message.ack()
            else:  # a status, not an event: the request is over
                self._asked = 0
            if not self._asked:
                await self._ask(client, inbox)

        try:
            client = await nats.connect(self._url, name="relay demo consumer", closed_cb=on_closed)
            try:
                await self._create(client)
                inbox = client.new_inbox()
                await client.subscribe(inbox, cb=on_message)
                await self._ask(client, inbox)
                await closed.wait()
                raise SinkUnavailable("the demo's consumer lost NATS")
            finally:
                await client.close()
        except (NatsError, OSError, TimeoutError) as exc:
            raise SinkUnavailable(f"the demo's consumer lost NATS: {exc}") from exc

    async def _create(self, client: NatsClient) -> None:
        wanted = ConsumerConfig(durable_name=_NAME, ack_policy=AckPolicy.EXPLICIT, max_ack_pending=10 * _PULL)
        while True:
            try:
                await client.jetstream().add_consumer(self._stream, wanted)
                return
            except NotFoundError:  # the relay makes the stream when it opens its sink
                await asyncio.sleep(0.05)

    async def _ask(self, client: NatsClient, inbox: str) -> None:
        self._asked = _PULL
        await client.publish(self._next, self._request, reply=inbox)


def _from_jetstream(message: Msg) -> Arrival:
    headers = message.headers or {}
    return Arrival(headers["id"], headers["type"], headers["aggregate-id"], time.monotonic())


class KafkaConsumer:
    """A consumer group of one, in a thread of its own because the client blocks."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._topic = topic
        self._options: dict[str, str | int | bool] = {
            "bootstrap.servers": bootstrap,
            "group.id": _NAME,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "topic.metadata.refresh.interval.ms": 500,  # the relay makes the topic when it opens its sink
            "allow.auto.create.topics": False,
            "log_level": 0,
        }

    async def run(self, receive: Receive) -> None:
        loop = asyncio.get_running_loop()
        stop = threading.Event()

        def hand_over(arrivals: list[Arrival]) -> None:
            for arrival in arrivals:
                receive(arrival)

        try:
            await asyncio.to_thread(self._consume, stop, lambda some: loop.call_soon_threadsafe(hand_over, some))
        except KafkaException as exc:
            raise SinkUnavailable(f"the demo's consumer lost Kafka: {exc.args[0]}") from exc
        finally:
            stop.set()

    def _consume(self, stop: threading.Event, hand_over: Callable[[list[Arrival]], object]) -> None:
        client = KafkaClient(self._options)
        try:
            client.subscribe([self._topic])
            while not stop.is_set():
                first = client.poll(0.2)
                if first is None:
                    continue
                # What is there already comes along; waiting to fill a batch would spoil every latency.
                messages = [first, *client.consume(_PULL, timeout=0)]
                arrivals = [_from_kafka(message) for message in messages if message.error() is None]
                if arrivals:
                    hand_over(arrivals)
                    client.commit(asynchronous=True)
        finally:
            client.close()


def _from_kafka(message: KafkaMessage) -> Arrival:
    headers = dict(cast("list[tuple[str, bytes]]", message.headers() or []))
    return Arrival(headers["id"].decode(), headers["type"].decode(), headers["aggregate-id"].decode(), time.monotonic())
