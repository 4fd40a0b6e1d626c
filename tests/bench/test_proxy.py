"""The proxy that makes a broker slow passes everything on, in order, and says when one side has ended."""

from __future__ import annotations

import asyncio
import sys

from relay.bench.process import Child
from relay.embedded.process import free_port


async def test_bytes_come_through_whole_and_in_order() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    port = free_port()
    sent = bytes(range(256)) * 4000
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        target = server.sockets[0].getsockname()[1]
        command = [sys.executable, "-m", "relay.bench.proxy", str(port), "127.0.0.1", str(target), "0.01"]
        with Child("proxy", command, ready="ready"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            got = await asyncio.wait_for(reader.readexactly(len(sent)), 60.0)
            assert got == sent
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 60.0) == b""
            writer.close()
