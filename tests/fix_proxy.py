"""A TCP proxy between the relay and a server, to break the network without breaking the server.

`cut()` resets every connection, `refuse()` also turns new ones away, `stall()` forwards nothing and closes nothing (a
cable pulled: no FIN, no RST), `resume()` makes everything normal again; what was stalled arrives then, as TCP would
have it. `delay` holds every piece back for so many seconds. `garble` are bytes that arrive wrong, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import pytest

from relay.embedded.process import free_port

Direction = Literal["both", "up", "down"]

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of zero seconds: closing sends RST


class Proxy:
    """Stands before `target` (`scheme://user@host:port/…` or `host:port`); `url` is the same with our port."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target if "://" in target else f"//{target}")
        self._host, self._target_port = parts.hostname or "127.0.0.1", parts.port
        self.port = free_port()
        user, at, _ = parts.netloc.rpartition("@")
        self.url = urlunsplit(parts._replace(netloc=f"{user}{at}127.0.0.1:{self.port}")).removeprefix("//")
        self.accepted = 0
        self.delay = 0.0
        self.garble = b""
        self._up, self._down = asyncio.Event(), asyncio.Event()
        self._links: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    async def resume(self) -> None:
        """Forward, and listen if we do not."""
        self._up.set()
        self._down.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._link, "127.0.0.1", self.port)

    def stall(self, direction: Direction = "both") -> None:
        """Stop forwarding to the server ("up"), from the server ("down") or both; connections stay open."""
        if direction in {"both", "up"}:
            self._up.clear()
        if direction in {"both", "down"}:
            self._down.clear()

    async def cut(self) -> None:
        """Reset every connection, on both sides; new ones are welcome."""
        links = list(self._links)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)
        await asyncio.sleep(0)  # the aborted transports close their sockets in the next round

    async def refuse(self) -> None:
        """Reset every connection and refuse new ones until `resume()`."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.cut()

    @property
    def connections(self) -> int:
        return len(self._links)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        self.accepted += 1
        writers = [writer]
        try:
            await self._up.wait()
            server_reader, server_writer = await asyncio.open_connection(self._host, self._target_port)
            writers.append(server_writer)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, server_writer, self._up))
                pumps.create_task(self._pump(server_reader, writer, self._down))
        except* (OSError, asyncio.CancelledError):
            for end in writers:
                with contextlib.suppress(OSError):  # closed already
                    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        finally:
            for end in writers:
                end.transport.abort()
            self._links.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
        while True:
            await flowing.wait()
            data = await reader.read(1 << 16)
            if self.delay:
                await asyncio.sleep(self.delay)
            if self.garble and self.garble in data:
                data, self.garble = data.replace(self.garble, b"?" * len(self.garble), 1), b""
            await flowing.wait()  # what was read when the cable was pulled has not passed it
            if not data:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


@pytest.fixture
async def proxy() -> AsyncIterator[Callable[[str], Awaitable[Proxy]]]:
    """`await proxy(dsn_or_url)` gives a Proxy that forwards; closed after the test."""
    made: list[Proxy] = []

    async def start(target: str) -> Proxy:
        made.append(Proxy(target))
        await made[-1].resume()
        return made[-1]

    yield start
    for one in made:
        await one.refuse()
