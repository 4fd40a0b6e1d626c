"""Acks straight from the socket: between the transport and nats-py's reader, for whatever needs neither.

An ack that comes alone would wake nats-py's read loop, a task, only to be handed to our parser. What is not a run of
plain acks goes on to the reader, byte for byte, and so does everything behind it until nats-py has read it all: the
bytes keep their order.
"""

from __future__ import annotations

import asyncio

from relay.sink.nats_acks import AckParser


class Tap(asyncio.Protocol):
    """Stands before the protocol of the connection's reader, which had so many bytes when it began."""

    def __init__(self, inner: asyncio.Protocol, parser: AckParser, waiting: int) -> None:
        self._inner = inner
        self._parser = parser
        self._passed = parser.parsed + waiting

    def data_received(self, data: bytes) -> None:
        if self._passed == self._parser.parsed:
            data = self._parser.take(data)
            if not data:
                return
        self._passed += len(data)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
