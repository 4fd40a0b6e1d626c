"""The end of a transactional session: nothing of its producer may be left that could take over from the next one."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from relay import config
from relay.errors import SinkUnavailable
from relay.sink import kafka_client
from relay.sink.kafka_client import GRACE
from relay.sink.kafka_exactly_once import ExactlyOnceKafkaSink

_LATE = KafkaError(KafkaError._TIMED_OUT, "no answer yet", retriable=True)


class Slow:
    """A producer whose broker answers the take-over after so many calls."""

    def __init__(self, answers: int) -> None:
        self.calls = 0
        self._answers = answers

    def init_transactions(self, _timeout: float) -> None:
        time.sleep(0.02)
        self.calls += 1
        if self.calls < self._answers:
            raise KafkaException(_LATE)

    def list_topics(self, *, timeout: float) -> Any:
        raise AssertionError(f"a session that shall end asks for topics ({timeout} s)")

    def poll(self, _timeout: float) -> int:
        return 0

    def purge(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """A producer that only the collector finds lives too long."""
    gc.disable()
    yield
    gc.enable()


def opening(monkeypatch: pytest.MonkeyPatch, producer: Slow) -> tuple[ExactlyOnceKafkaSink, asyncio.Future[None]]:
    made = [producer]
    monkeypatch.setattr(kafka_client, "make_producer", lambda *_: made.pop())
    sink = ExactlyOnceKafkaSink(config.Kafka(mode="exactly-once", connect_timeout=60.0))
    sink.resume({}, "tests:1")
    return sink, asyncio.ensure_future(sink.open())


async def given_up(task: asyncio.Future[None]) -> float:
    """How long it took to end."""
    await asyncio.sleep(0.03)
    begun = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return time.monotonic() - begun


async def test_an_opening_that_is_given_up_leaves_no_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka goes on with a take-over in the background, as long as the producer lives."""
    producer = Slow(1_000_000)
    alive = weakref.ref(producer)
    sink, task = opening(monkeypatch, producer)
    del producer
    assert await given_up(task) < 2 * GRACE  # a dead broker holds nobody up
    assert alive() is None
    await sink.close()


async def test_a_take_over_under_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked may reach the broker after what the next session asks, and would fence that one."""
    producer = Slow(5)
    _, task = opening(monkeypatch, producer)
    await given_up(task)
    assert producer.calls == 5


async def test_a_take_over_that_fails_leaves_no_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(Slow):
        def init_transactions(self, _timeout: float) -> None:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT, "away"))

    producer = Refused(0)
    alive = weakref.ref(producer)
    _, task = opening(monkeypatch, producer)
    del producer
    with pytest.raises(SinkUnavailable, match="away"):
        await task
    assert alive() is None


async def test_a_closing_that_is_cancelled_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next opening would not wait for the former producer's end."""
    producer = Slow(1_000_000)
    alive = weakref.ref(producer)
    sink, task = opening(monkeypatch, producer)
    del producer
    await asyncio.sleep(0.03)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.03)
    assert task.done() and alive() is not None
    await sink.close()
    assert alive() is None
