"""The HTTP server of `admin.listen`. It never waits for Postgres or the broker, so it answers whatever they do.

A wrong address is said before anything is published. aiohttp is loaded when somebody asks for the first time, who
waits that long in the queue of the socket: it would take a fifth of the time from the start of the process to its first
event, and a tenth of the memory of a relay that nobody asks.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
from typing import TYPE_CHECKING, Any

from relay.errors import SetupError
from relay.metrics import Metrics
from relay.progress import Progress

if TYPE_CHECKING:
    from aiohttp import web

_HIGHEST_PORT = 65_535


class AdminServer:
    """Serves until stopped; `port` is the real one, also when 0 was asked for."""

    def __init__(self, listen: str, progress: Progress, metrics: Metrics, *, stalled_after: float) -> None:
        self._listen = listen
        self._pages: tuple[Any, ...] = (progress, metrics, stalled_after)
        self._sockets: list[socket.socket] = []
        self._asked: asyncio.Task[None] | None = None  # begins with the first request
        self._runner: web.AppRunner | None = None
        self.port: int | None = None

    def __repr__(self) -> str:
        return f"<AdminServer {self._listen} {'stopped' if self.port is None else f'on port {self.port}'}>"

    async def start(self) -> None:
        """Listen; an empty address means that nobody wants us. Raises SetupError when the address cannot be had."""
        if not self._listen:
            return
        host, _, port = self._listen.rpartition(":")
        try:
            if int(port) > _HIGHEST_PORT:  # or it would be taken modulo 65536, or leave a socket open
                raise OverflowError(f"port must be 0-{_HIGHEST_PORT}")
            found = await asyncio.get_running_loop().getaddrinfo(
                host.strip("[]") or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, *_, address in dict.fromkeys(found):
                try:
                    self._sockets.append(socket.create_server((address[0], int(port)), family=family))
                except OSError:
                    # Names have addresses of both kinds, and a machine may have one of them only.
                    if family != socket.AF_INET6 or len(found) == 1:
                        raise
        except (OSError, OverflowError) as exc:
            await self.stop()
            reason = exc.strerror if isinstance(exc, OSError) else exc
            raise SetupError(
                f"cannot listen on {self._listen} for health and metrics: {reason}",
                hint='set admin.listen to a free address (or to "" to switch it off), or stop what uses this one',
            ) from exc
        self.port = self._sockets[0].getsockname()[1]
        for listening in self._sockets:
            listening.setblocking(False)
            asyncio.get_running_loop().add_reader(listening, self._wake)

    def _wake(self) -> None:
        """Somebody asks: aiohttp takes over."""
        self._fall_asleep()
        self._asked = asyncio.get_running_loop().create_task(self._answer(), name="relay-admin")

    async def _answer(self) -> None:
        pages = await asyncio.to_thread(importlib.import_module, "relay.admin.pages")
        from aiohttp import web  # noqa: PLC0415

        logging.getLogger("aiohttp.server").addFilter(_ours)
        # An open request is cut off rather than waited for: stopping must not hang on a slow scraper.
        runner = web.AppRunner(
            pages.application(*self._pages), access_log=None, handle_signals=False, shutdown_timeout=0.2
        )
        self._runner = runner
        await runner.setup()
        for listening in self._sockets:
            await web.SockSite(runner, listening).start()

    def _fall_asleep(self) -> None:
        loop = asyncio.get_running_loop()
        for listening in self._sockets:
            loop.remove_reader(listening)

    async def stop(self) -> None:
        """Stop listening; safe to call in any state, and more than once."""
        asked, self._asked = self._asked, None
        if asked is None:
            self._fall_asleep()
        else:
            asked.cancel()
            await asyncio.wait([asked])
        runner, self._runner, self.port = self._runner, None, None
        sockets, self._sockets = self._sockets, []
        if runner is not None:
            await runner.cleanup()
        for listening in sockets:
            listening.close()


def _ours(record: logging.LogRecord) -> bool:
    """Whether a line is about a fault of ours: what strangers send that is no HTTP has its answer, and is no news."""
    from aiohttp.http_exceptions import HttpProcessingError  # noqa: PLC0415

    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
