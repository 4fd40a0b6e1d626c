"""The console sink: one JSON line per event on stdout. For trying things out and for piping into other tools.

An event counts as durable once its line is flushed to the stream. Bytes that are no JSON or no UTF-8 are shown as
`{"base64": "…"}`; a body of `null` is a tombstone.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import orjson

from relay.errors import OperatorError
from relay.event import Batch, Event, Rejected


class ConsoleSink:
    """See the seam (`relay.sink.Sink`). Writes block: who reads slowly slows the relay down, and nothing is lost."""

    duplicates = 0  # a console never says so
    marks: Mapping[str, int] = {}  # no fence

    def resume(self, marks: Mapping[str, int], origin: str) -> None:
        """Without a fence there is nothing to resume."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self._stream = sys.stdout.buffer if stream is None else stream

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """The stream is not ours."""

    async def publish(self, batch: Batch) -> Sequence[Rejected]:
        if not batch.events:
            return ()
        try:
            self._stream.write(b"".join(map(line, batch.events)))
            self._stream.flush()
        except (OSError, ValueError) as exc:  # ValueError: the stream is closed
            self._abandon()
            raise OperatorError(
                f"nobody reads the console sink's output any more: {exc}",
                hint="keep the reader of the pipe running, or choose a broker in sink.kind",
            ) from None
        return ()

    def _abandon(self) -> None:
        """What is left in the buffer would make the interpreter complain at exit, after the error was said."""
        with contextlib.suppress(OSError, ValueError):
            if self._stream is sys.stdout.buffer:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


def line(event: Event) -> bytes:
    headers = {name: _text(value) for name, value in event.headers()}
    key = None if event.key is None else _text(event.key)
    shown = {"topic": event.topic, "key": key, "headers": headers, "body": _body(event.body)}
    return orjson.dumps(shown, option=orjson.OPT_APPEND_NEWLINE)


def _text(value: bytes) -> object:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return _base64(value)


def _body(body: bytes | None) -> object:
    """JSON goes through byte for byte: numbers keep their digits."""
    if body is None:
        return None
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return _base64(body)
    return orjson.Fragment(body.translate(None, b"\r\n"))  # in JSON a raw line break stands only between tokens


def _base64(value: bytes) -> dict[str, str]:
    return {"base64": base64.b64encode(value).decode()}
