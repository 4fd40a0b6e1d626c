"""The HTTP server of `admin.listen`. It never waits for Postgres or the broker, so it answers whatever they do.

    /healthz   200: the process lives and its loop turns; nothing else is asked
    /readyz    200: events are moving, or there are none; else 503 with state, reason and hint (G10)
    /metrics   Prometheus or OpenMetrics, as the scraper asks
    /status    the live counterpart of `relay status --json`

Every path is read-only and says nothing of payloads, keys, headers or secrets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import orjson
from aiohttp import web
from prometheus_client.exposition import choose_encoder

from relay.admin.status import readiness, status
from relay.errors import SetupError
from relay.metrics import Metrics
from relay.progress import Progress

_FRESH = {"Cache-Control": "no-store"}


class AdminServer:
    """Serves until stopped; `port` is the real one, also when 0 was asked for."""

    def __init__(self, listen: str, progress: Progress, metrics: Metrics, *, stalled_after: float) -> None:
        self._listen = listen
        self._progress = progress
        self._metrics = metrics
        self._stalled_after = stalled_after
        self._runner: web.AppRunner | None = None
        self.port: int | None = None

    def __repr__(self) -> str:
        return f"<AdminServer {self._listen} {'stopped' if self.port is None else f'on port {self.port}'}>"

    async def start(self) -> None:
        """Listen; an empty address means that nobody wants us. Raises SetupError when the address cannot be had."""
        if not self._listen:
            return
        host, _, port = self._listen.rpartition(":")
        app = web.Application()
        for path, handler in (
            ("/healthz", self._healthz),
            ("/readyz", self._readyz),
            ("/metrics", self._metrics_page),
            ("/status", self._status),
        ):
            app.router.add_get(path, handler)
        # An open request is cut off rather than waited for: stopping must not hang on a slow scraper.
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.2)
        await runner.setup()
        try:
            await web.TCPSite(runner, host.strip("[]") or None, int(port)).start()
        except (OSError, OverflowError) as exc:
            await runner.cleanup()
            reason = exc.strerror if isinstance(exc, OSError) else exc
            raise SetupError(
                f"cannot listen on {self._listen} for health and metrics: {reason}",
                hint='set admin.listen to a free address (or to "" to switch it off), or stop what uses this one',
            ) from exc
        self._runner = runner
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening; safe to call in any state, and more than once."""
        runner, self._runner, self.port = self._runner, None, None
        if runner is not None:
            await runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _json({"alive": True})  # whoever gets this answer has seen the loop turn

    async def _readyz(self, _request: web.Request) -> web.Response:
        answer = readiness(self._progress, self._stalled_after, now=time.monotonic())
        return _json(answer, 200 if answer["ready"] else 503)

    async def _metrics_page(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(",".join(request.headers.getall("Accept", [])))
        page = cast(Callable[[Any], bytes], encode)(self._metrics.registry)
        response = web.Response(body=page, headers={"Content-Type": content_type, **_FRESH})
        response.enable_compression()
        return response

    async def _status(self, _request: web.Request) -> web.Response:
        return _json(status(self._metrics, self._stalled_after, now=time.monotonic(), clock=time.time()))


def _json(answer: dict[str, Any], code: int = 200) -> web.Response:
    return web.Response(
        body=orjson.dumps(answer, option=orjson.OPT_APPEND_NEWLINE),
        status=code,
        content_type="application/json",
        headers=_FRESH,
    )
