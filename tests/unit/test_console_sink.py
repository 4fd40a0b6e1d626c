"""The console sink's lines can be read by programs, and a reader that goes away is said clearly."""

from __future__ import annotations

import io
import os

import orjson
import pytest

from relay.errors import OperatorError
from relay.event import Batch
from relay.lsn import LSN
from relay.sink.console import ConsoleSink
from tests.sinks import batch_of, make_event


async def test_a_line_per_event() -> None:
    stream = io.BytesIO()
    sink = ConsoleSink(stream)
    await sink.open()
    events = [
        make_event(1, topic="orders", key=b"k", body=b'{\n "price": 1.10,\r\n "note": "a\\nb"}'),
        make_event(2, topic="orders", key=None, body=None),
        make_event(3, topic="orders", key=b"\xff", body=b"\x00\x01"),
    ]
    assert await sink.publish(batch_of(events)) == ()
    await sink.close()

    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    shown = [orjson.loads(line) for line in lines]
    assert b'"price": 1.10' in lines[0], "numbers keep their digits"
    assert shown[0]["body"] == {"price": 1.1, "note": "a\nb"}
    assert shown[0]["topic"] == "orders"
    assert shown[0]["key"] == "k"
    assert shown[0]["headers"]["id"] == events[0].id.decode()
    assert shown[1]["key"] is None
    assert shown[1]["body"] is None
    assert shown[2]["key"] == {"base64": "/w=="}
    assert shown[2]["body"] == {"base64": "AAE="}


async def test_flushed_when_publish_returns() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "wb") as stream, os.fdopen(read, "rb") as reader:
        await ConsoleSink(stream).publish(batch_of([make_event(1)]))
        assert orjson.loads(reader.readline())["headers"]["id"]


async def test_an_empty_batch_writes_nothing() -> None:
    stream = io.BytesIO()
    assert await ConsoleSink(stream).publish(Batch([], LSN(1))) == ()
    assert stream.getvalue() == b""


async def test_broken_pipe_is_an_operators_business() -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "wb", buffering=0)
    batch = batch_of([make_event(1)])
    with pytest.raises(OperatorError, match="nobody reads") as caught:
        await ConsoleSink(stream).publish(batch)
    assert caught.value.hint
    assert len(batch.events) == 1
    stream.close()
