"""The broker as the benchmark sees it: a destination of its own per round, and how much is stored there.

The count comes from the broker's own state, never from the tool under test.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

import nats
from confluent_kafka import OFFSET_END, Consumer, IsolationLevel, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewTopic
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import StreamInfo
from nats.js.errors import NotFoundError

from relay.bench.modes import Kind, Sink
from relay.bench.plan import PAYLOAD_BYTES, Plan
from relay.bench.process import BenchError, Child
from relay.embedded import KafkaServer, NatsServer
from relay.embedded.process import free_port

_PARTITIONS = 4
_WARM_UP = 300_000  # events until the JVM has compiled what it will compile
_REQUESTS = 60_000  # the same for the way of a single request: a thousand events a second are a thousand of them
_COLD = 45.0  # seconds of a paced load until the JVM has also compiled what only waiting clients need
_TIMEOUT = 30.0


class Broker(Protocol):
    """One broker for a whole run."""

    kind: Kind
    pid: int | None  # None: not ours, so its CPU is not visible
    address: str
    version: str
    cold: float  # seconds of a paced load that are still needed until it costs what it will cost

    async def create(self, name: str) -> None: ...
    async def exists(self, name: str) -> bool: ...
    async def stored(self, name: str) -> int: ...
    async def drop(self, name: str) -> None: ...

    async def ensure(self, name: str) -> None:
        """Make the destination, for a tool that does not do it by itself."""

    def slow(self, delay: float) -> contextlib.AbstractAsyncContextManager[Broker]:
        """The same broker at another address, behind which everything takes `delay` longer, each way."""
        ...

    def sink(self, name: str, sink: Sink) -> dict[str, Any]:
        """The relay's [sink] for the destination `name`."""
        ...


class JetStreamBroker:
    """Streams: one per round, R1 on file, created by the relay itself as users do."""

    kind: Kind = "jetstream"
    cold = 0.0

    def __init__(self, client: Client, address: str, pid: int | None) -> None:
        self._client = client
        self._js = client.jetstream(timeout=_TIMEOUT)
        self.address = address
        self.pid = pid
        self.version = f"nats-server {_plain(client.connected_server_version)}"

    async def create(self, name: str) -> None:
        """Nothing to do: the relay creates the stream at its first start."""

    async def ensure(self, name: str) -> None:
        await self._js.add_stream(name=name, subjects=[f"{name}.>"])

    async def exists(self, name: str) -> bool:
        return await self._info(name) is not None

    async def stored(self, name: str) -> int:
        info = await self._info(name)
        return int(info.state.messages) if info is not None else 0

    async def _info(self, name: str) -> StreamInfo | None:
        try:
            return await self._js.stream_info(name)
        except NotFoundError:
            return None
        except (NatsError, TimeoutError) as exc:
            raise BenchError(f"nats-server does not answer: {exc!r}") from exc

    async def drop(self, name: str) -> None:
        with contextlib.suppress(NatsError):
            await self._js.delete_stream(name)

    @contextlib.asynccontextmanager
    async def slow(self, delay: float) -> AsyncIterator[Broker]:
        parts = urlsplit(self.address)
        port = free_port()
        user, at, _ = parts.netloc.rpartition("@")
        with _proxy(port, parts.hostname or "127.0.0.1", parts.port or 4222, delay):
            yield self._at(parts._replace(netloc=f"{user}{at}127.0.0.1:{port}").geturl())

    def _at(self, address: str) -> Broker:
        other = copy.copy(self)
        other.address = address
        return other

    def sink(self, name: str, sink: Sink) -> dict[str, Any]:
        stream = {"name": name, "subjects": [f"{name}.>"], "create": True}
        return {"kind": "jetstream", "jetstream": {"servers": [self.address], "streams": [stream], **sink.config}}


class KafkaBroker:
    """Topics: one per round, four partitions. `far` are the ports of a listener that expects a proxy before it."""

    kind: Kind = "kafka"
    cold = 0.0

    def __init__(self, address: str, pid: int | None, far: tuple[int, int] | None = None, version: str = "") -> None:
        self._admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
        self.address = address
        self.pid = pid
        self.version = f"kafka {version}".rstrip()
        self._far = far

    async def ensure(self, name: str) -> None:
        """create() has made it."""

    async def create(self, name: str) -> None:
        # By hand, so that the number of partitions does not depend on the broker's default.
        futures = self._admin.create_topics([NewTopic(topic(name), _PARTITIONS)])
        await asyncio.to_thread(_result, futures[topic(name)])

    async def exists(self, name: str) -> bool:  # noqa: ARG002
        return True  # create() has returned

    async def stored(self, name: str) -> int:
        return await asyncio.to_thread(self._stored, topic(name))

    async def drop(self, name: str) -> None:
        for future in self._admin.delete_topics([topic(name), _positions(name)]).values():
            with contextlib.suppress(BenchError):  # only exactly-once makes the second
                await asyncio.to_thread(_result, future)

    @contextlib.asynccontextmanager
    async def slow(self, delay: float) -> AsyncIterator[Broker]:
        if self._far is None:
            raise BenchError("this Kafka has no listener to stand before")
        listens, advertised = self._far
        with _proxy(advertised, "127.0.0.1", listens, delay):
            other = copy.copy(self)
            other.address = f"127.0.0.1:{advertised}"
            yield other

    def sink(self, name: str, sink: Sink) -> dict[str, Any]:
        section = {"topics": [topic(name)], "options": {"bootstrap.servers": self.address}, **sink.config}
        if sink.transactions:
            section["position_topic"] = _positions(name)
        return {"kind": "kafka", "kafka": section}

    async def warm_up(self, part: float) -> None:
        """A JVM that was just started would be measured compiling itself."""
        name = f"relay_bench_warm_{secrets.token_hex(4)}"
        await self.create(name)
        await asyncio.to_thread(self._produce, topic(name), round(_WARM_UP * part), 10_000)
        consumer = self._consumer(name)
        await asyncio.to_thread(self._produce, topic(name), round(_REQUESTS * part), 4, consumer)
        consumer.close()
        await self.drop(name)

    def _consumer(self, name: str) -> Consumer:
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": name, "log_level": 0})
        consumer.assign([TopicPartition(topic(name), number, OFFSET_END) for number in range(_PARTITIONS)])
        return consumer

    def _produce(self, name: str, events: int, at_once: int, consumer: Consumer | None = None) -> None:
        """With few events at once, each is a request of its own; a consumer asks for each of them."""
        producer = Producer(
            {
                "bootstrap.servers": self.address,
                "enable.idempotence": True,
                "linger.ms": 1 if consumer is None else 0,
                "compression.type": "lz4",
                "log_level": 0,
            }
        )
        body = b"x" * PAYLOAD_BYTES
        for index in range(events):
            producer.produce(name, body, key=b"key-%d" % (index % 1000))
            while len(producer) > at_once:
                producer.poll(0.001)
            if consumer is not None:
                consumer.poll(0)
        if producer.flush(_TIMEOUT):
            raise BenchError("the warm-up of Kafka did not end")

    def _stored(self, name: str) -> int:
        # Nothing of our own topic is ever deleted, so every offset is an event, or, with transactions, a marker.
        ends: Any = OffsetSpec  # untyped
        asked = {TopicPartition(name, number): ends.latest() for number in range(_PARTITIONS)}
        futures = self._admin.list_offsets(
            asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=_TIMEOUT
        )
        return sum(_result(future).offset for future in futures.values())


def topic(name: str) -> str:
    """Where the rows of destination `name` go: they all have the same type."""
    return f"{name}.order.created"


def _positions(name: str) -> str:
    return f"{name}.positions"


def _proxy(port: int, host: str, target: int, delay: float) -> Child:
    command = [sys.executable, "-m", "relay.bench.proxy", str(port), host, str(target), str(delay)]
    return Child("proxy", command, ready="ready")


class _FarKafka(KafkaServer):
    """A second listener tells its clients to come to the port where a proxy stands."""

    def __init__(self) -> None:
        super().__init__(fast_start=False)
        self.far = free_port(), free_port()
        listens, advertised = self.far
        for name, value in {
            "listeners": f"FAR://127.0.0.1:{listens}",
            "advertised.listeners": f"FAR://127.0.0.1:{advertised}",
            "listener.security.protocol.map": "FAR:PLAINTEXT",
        }.items():
            self._properties[name] += f",{value}"

    @property
    def release(self) -> str:
        return next((jar.stem.rpartition("-")[2] for jar in self._jars.glob("kafka_2.13-*.jar")), "")


def _plain(version: object) -> str:
    found = re.search(r"\d+\.\d+\.\d+", str(version))
    return found[0] if found else ""


def _result(future: Any) -> Any:
    try:
        return future.result(_TIMEOUT)
    except (KafkaException, TimeoutError) as exc:
        raise BenchError(f"Kafka refuses or does not answer: {exc}") from exc


@contextlib.asynccontextmanager
async def _jetstream(plan: Plan, say: Callable[[str], None]) -> AsyncIterator[Broker]:
    with contextlib.ExitStack() as stack:
        pid, address = None, plan.broker
        if address is None:
            say("starting nats-server")
            server = stack.enter_context(NatsServer())
            pid, address = server.pid, server.url
        try:
            client = await nats.connect(address, allow_reconnect=False, connect_timeout=10)
        except (NatsError, OSError, TimeoutError) as exc:
            raise BenchError(f"nats-server cannot be reached: {exc!r}", hint="see --broker") from exc
        try:
            yield JetStreamBroker(client, address, pid)
        finally:
            await client.close()


@contextlib.asynccontextmanager
async def _kafka(plan: Plan, say: Callable[[str], None]) -> AsyncIterator[Broker]:
    with contextlib.ExitStack() as stack:
        if plan.broker is not None:
            yield KafkaBroker(plan.broker, None)
            return
        say("starting Kafka, and warming it up")
        server = stack.enter_context(_FarKafka())
        broker = KafkaBroker(server.bootstrap, server.pid, server.far, server.release)
        await broker.warm_up(0.3 if plan.quick else 1.0)
        broker.cold = 0.0 if plan.quick else _COLD
        yield broker


_Opener = Callable[[Plan, Callable[[str], None]], contextlib.AbstractAsyncContextManager[Broker]]
BROKERS: Mapping[str, _Opener] = {"jetstream": _jetstream, "kafka": _kafka}
