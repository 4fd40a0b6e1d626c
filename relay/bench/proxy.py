"""A broker that is far away: a TCP proxy that holds everything back for a while, and nothing else.

`python -m relay.bench.proxy PORT TARGET_HOST TARGET_PORT SECONDS` prints "ready" once it listens. What came later
leaves later, but nothing waits for what came before: the distance grows, the bandwidth stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

_LONGEST = 1 << 18


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1000)

    async def deliver() -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()

    async with asyncio.TaskGroup() as group:
        group.create_task(deliver())
        while data := await reader.read(_LONGEST):
            await queue.put((loop.time() + delay, data))
        await queue.put((loop.time() + delay, b""))


async def serve(port: int, host: str, target: int, delay: float) -> None:
    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(host, target)
            # One side may break off while the other still has something to say.
            await asyncio.gather(_pump(reader, back, delay), _pump(there, writer, delay), return_exceptions=True)
            back.close()
        writer.close()

    async with await asyncio.start_server(link, "127.0.0.1", port) as server:
        print("ready", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    _port, _host, _target, _seconds = sys.argv[1:]
    asyncio.run(serve(int(_port), _host, int(_target), float(_seconds)))
