"""Fenced streams for tests, with a dedupe window too short to help: opening their sink, judging what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from relay.config import JetStream, Stream
from relay.event import Batch, Event
from relay.sink import Sink
from relay.sink.jetstream import JetStreamSink
from tests.sinks import ORIGIN, make_event, open_at_last, order_per_key, publish_as_pipeline, read_jetstream


def configured(servers: str | Iterable[str], *names: str, **changes: Any) -> JetStream:
    """Changes of the streams: `replicas`, `duplicate_window`; others are of the sink."""
    of_streams = {"duplicate_window": 0.1}
    of_streams |= {name: changes.pop(name) for name in ("replicas", "duplicate_window") if name in changes}
    streams = tuple(Stream(name=name, subjects=(f"{name}.>",), create=True, **of_streams) for name in names)
    servers = (servers,) if isinstance(servers, str) else tuple(servers)
    return JetStream(**{"servers": servers, "streams": streams, "ack_timeout": 10.0, **changes})


@asynccontextmanager
async def opened(
    config: JetStream, marks: dict[str, int] | None = None, **changes: Any
) -> AsyncIterator[JetStreamSink]:
    sink = JetStreamSink(config, **changes)
    sink.resume(marks or {}, ORIGIN)
    try:
        await open_at_last(sink)  # a cluster that has just started may not place a stream yet
        yield sink
    finally:
        await sink.close()


def events(topics: tuple[str, ...], count: int, keys: int = 20) -> list[Event]:
    return [
        make_event(seq, topic=topics[seq % len(topics)], key=b"k%d" % (seq % keys), body=b"%0200d" % seq)
        for seq in range(count)
    ]


async def publish_while(
    sink: Sink, batches: list[Batch], break_it: Callable[[], Coroutine[Any, Any, None]], at: Container[int]
) -> None:
    """As the pipeline does; in the rounds `at` something is broken under it, unless it is broken already."""
    rounds, breaking = 0, None
    async with asyncio.TaskGroup() as group:
        async for rejected in publish_as_pipeline(sink, batches):
            assert rejected == []
            rounds += 1
            if rounds in at and (breaking is None or breaking.done()):
                breaking = group.create_task(break_it())


async def stored_once(url: str, names: tuple[str, ...], made: list[Event]) -> None:
    """Every event once, and in order per key."""
    stored = [item for name in names for item in await read_jetstream(url, name)]
    assert len(stored) == len({item.id for item in stored}), "duplicates"
    assert {item.id for item in stored} == {event.id for event in made}
    for name in names:
        order = order_per_key(item for item in stored if item.topic.startswith(f"{name}."))
        assert all(numbers == sorted(numbers) for numbers in order.values()), "order"
