"""Batches into librdkafka and acknowledgements out of it, in C: what can be seen without a broker."""

from __future__ import annotations

import gc
import select
import time
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer

from relay.event import Event, HeaderNames, Transaction
from relay.sink import kafka_tally

pytestmark = pytest.mark.skipif(kafka_tally.LIBRARY is None, reason="the C part was not built: there is no C compiler")

NAMES = HeaderNames.of(("id", "type"))
TRANSACTION = Transaction(7, 100, 0.0, b"r:0/64:")
PURGED = KafkaError._PURGE_QUEUE


def make_event(number: int, **changes: Any) -> Event:
    event = Event(
        b"id-%d" % number, "orders", b"k1", NAMES, (b"id-%d" % number, b"made"), b"{}", "t", TRANSACTION, number
    )
    return event._replace(**changes)


def counted_producer(**options: Any) -> tuple[kafka_tally.Tally, Producer]:
    """A producer without a broker: it keeps what it is given, until it is purged."""
    tally = kafka_tally.tally()
    assert tally is not None
    tally.arm()
    made = Producer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0, **options, **plugin()})
    assert tally.armed()
    return tally, made


def plugin() -> dict[str, Any]:
    return {"plugin.library.paths": kafka_tally.LIBRARY}


def produce(tally: kafka_tally.Tally, slot: int, events: list[Any], at: int = 0) -> tuple[int, int]:
    return tally.produce(slot, events, at, len(events), {"orders": None})


def is_readable(tally: kafka_tally.Tally, timeout: float = 0.0) -> bool:
    return bool(select.select([tally.fileno()], [], [], timeout)[0])


def drain(producer: Producer) -> None:
    deadline = time.monotonic() + 20
    while len(producer) and time.monotonic() < deadline:
        producer.poll(0.01)
    assert not len(producer)


def test_events_that_librdkafka_gives_up_are_named_one_by_one() -> None:
    tally, producer = counted_producer()
    first, second = tally.launch(), tally.launch()
    assert first != second
    events = [make_event(n) for n in range(5)]
    assert produce(tally, first, events) == (5, 0)
    assert tally.produce(second, events, 3, 4, {"orders": None}) == (4, 0)
    tally.seal(first)
    assert not is_readable(tally)
    assert tally.report(first) == (0, [])
    with pytest.raises(ValueError, match="not everything"):
        tally.clear(first)
    producer.purge()
    assert is_readable(tally, 20)
    drain(producer)
    assert set(tally.news()) <= {first, second}
    for slot, places in ((first, [0, 1, 2, 3, 4]), (second, [3])):
        acked, failures = tally.report(slot)
        assert (acked, sorted(failures)) == (0, [(place, PURGED) for place in places])
    assert tally.news() == []
    tally.seal(second)  # everything is reported: that is news
    assert tally.news() == [second]
    tally.clear(first)
    with pytest.raises(ValueError, match="no such slot"):
        tally.report(first)
    assert tally.launch() == first
    assert tally.report(first) == (0, [])


def test_news_are_told_once_and_wake_once() -> None:
    tally, producer = counted_producer()
    slot = tally.launch()
    produce(tally, slot, [make_event(n) for n in range(3)])
    producer.purge()
    drain(producer)
    assert is_readable(tally, 20)
    assert tally.news() == [slot]
    assert not is_readable(tally)
    assert tally.news() == []


@pytest.mark.parametrize(
    "unusual",
    [
        make_event(1, topic="payments"),  # not ready
        make_event(1, header_names=HeaderNames.of(("id", "ty\0pe"))),
        make_event(1, header_values=(b"x",)),
        make_event(1, header_values=(b"x", None)),
        make_event(1, key="text"),
        make_event(1, body="text"),
        make_event(1, topic=None),
        "not an event",
    ],
)
def test_what_is_not_ready_or_cannot_be_written_is_not_taken(unusual: Any) -> None:
    tally, producer = counted_producer()
    slot = tally.launch()
    events = [make_event(0), unusual, make_event(2)]
    assert produce(tally, slot, events) == (1, 0)
    assert produce(tally, slot, events, 1) == (1, 0)
    assert produce(tally, slot, events, 2) == (3, 0)
    producer.purge()
    drain(producer)
    assert sorted(tally.report(slot)[1]) == [(0, PURGED), (2, PURGED)]


def test_what_librdkafka_refuses_is_said_and_not_counted() -> None:
    tally, producer = counted_producer(**{"message.max.bytes": 2000, "queue.buffering.max.messages": 3})
    slot = tally.launch()
    big = [make_event(0), make_event(1, body=b"x" * 3000), make_event(2)]
    assert produce(tally, slot, big) == (1, KafkaError.MSG_SIZE_TOO_LARGE)
    full = [make_event(n) for n in range(9)]
    assert produce(tally, slot, full, 1) == (3, KafkaError._QUEUE_FULL)
    producer.purge()
    drain(producer)
    assert sorted(at for at, _code in tally.report(slot)[1]) == [0, 1, 2]


def test_many_headers_are_taken() -> None:
    tally, producer = counted_producer()
    names = HeaderNames.of(tuple(f"h{n}" for n in range(500)))
    events = [make_event(0), make_event(1, header_names=names, header_values=(b"x",) * 500), make_event(2)]
    assert produce(tally, tally.launch(), events) == (3, 0)
    producer.purge()
    drain(producer)


def test_a_topic_may_be_ready_for_some_keys() -> None:
    tally, producer = counted_producer()
    slot = tally.launch()
    keys: list[bytes | None] = [b"a", None, b"b", b"a"]
    events = [make_event(n, key=key) for n, key in enumerate(keys)]
    ready: kafka_tally.Ready = {"orders": {b"a"}}
    assert tally.produce(slot, events, 0, 4, ready) == (1, 0)  # where one without a key goes, nobody knows
    assert tally.produce(slot, events, 2, 4, ready) == (2, 0)
    assert tally.produce(slot, events, 3, 4, ready) == (4, 0)
    ready["orders"] = set()
    assert tally.produce(slot, events, 0, 4, ready) == (0, 0)
    producer.purge()
    drain(producer)


def test_no_key_and_no_body_are_taken() -> None:
    tally, producer = counted_producer()
    slot = tally.launch()
    events = [make_event(0, key=None), make_event(1, body=None), make_event(2, key=b"", body=b"")]
    assert produce(tally, slot, events) == (3, 0)
    producer.purge()
    drain(producer)


def test_reports_of_pythons_own_events_reach_python_alone() -> None:
    tally, producer = counted_producer()
    slot = tally.launch()
    told: list[Any] = []
    producer.produce("orders", b"1", on_delivery=lambda error, _message: told.append(error))
    produce(tally, slot, [make_event(1)])
    producer.purge()
    drain(producer)
    assert [error.code() for error in told] == [PURGED]
    assert tally.report(slot) == (0, [(0, PURGED)])


def test_a_producer_that_nobody_counts_is_none_of_ours() -> None:
    tally = kafka_tally.tally()
    assert tally is not None
    tally.arm()
    other = Producer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})  # without the plugin
    assert not tally.armed()
    with pytest.raises(ValueError, match="no producer"):
        produce(tally, tally.launch(), [make_event(0)])
    uncounted = Producer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0, **plugin()})  # not armed any more
    for producer in (other, uncounted):
        producer.produce("orders", b"1")
        producer.purge()
        drain(producer)


def test_either_may_end_first() -> None:
    for keep_tally in (True, False):
        tally, producer = counted_producer()
        slot = tally.launch()
        produce(tally, slot, [make_event(n) for n in range(100)])
        if keep_tally:
            producer.purge()
            drain(producer)
            del producer
            gc.collect()
            assert len(tally.report(slot)[1]) == 100
            with pytest.raises(ValueError, match="no producer"):
                produce(tally, slot, [make_event(0)])
        else:
            del tally
            gc.collect()
            producer.purge()
            drain(producer)
            del producer


def test_bad_arguments_are_refused() -> None:
    tally, producer = counted_producer()
    slot = tally.launch()
    bad: list[tuple[Any, ...]] = [
        (),
        (slot, (), 0, set()),
        (slot, [], 0, []),
        (slot, [], -1, set()),
        (99, [], 0, set()),
    ]
    for arguments in bad:
        with pytest.raises((TypeError, ValueError)):
            tally.produce(*arguments)
    for call in (tally.seal, tally.report, tally.clear):
        for number in (99, -1, "x"):
            with pytest.raises((TypeError, ValueError)):
                call(number)  # type: ignore[arg-type]
    del producer
