"""The pages of the admin server. Every one is read-only and says nothing of payloads, keys, headers or secrets.

/healthz   200: the process lives and its loop turns; nothing else is asked
/readyz    200: events are moving, or there are none; else 503 with state, reason and hint (G10)
/metrics   Prometheus or OpenMetrics, as the scraper asks
/status    the live counterpart of `relay status --json`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import orjson
from aiohttp import web
from prometheus_client.exposition import choose_encoder

from relay.admin.exposition import registry
from relay.admin.status import readiness, status
from relay.metrics import Metrics
from relay.progress import Progress

_FRESH = {"Cache-Control": "no-store"}


def application(progress: Progress, metrics: Metrics, stalled_after: float) -> web.Application:
    scraped = registry(metrics)

    async def healthz(_request: web.Request) -> web.Response:
        return _json({"alive": True})  # whoever gets this answer has seen the loop turn

    async def readyz(_request: web.Request) -> web.Response:
        answer = readiness(progress, stalled_after, now=time.monotonic())
        return _json(answer, 200 if answer["ready"] else 503)

    async def metrics_page(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(",".join(request.headers.getall("Accept", [])))
        page = cast(Callable[[Any], bytes], encode)(scraped)
        response = web.Response(body=page, headers={"Content-Type": content_type, **_FRESH})
        response.enable_compression()
        return response

    async def status_page(_request: web.Request) -> web.Response:
        return _json(status(metrics, stalled_after, now=time.monotonic(), clock=time.time()))

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics_page)
    app.router.add_get("/status", status_page)
    return app


def _json(answer: dict[str, Any], code: int = 200) -> web.Response:
    return web.Response(
        body=orjson.dumps(answer, option=orjson.OPT_APPEND_NEWLINE),
        status=code,
        content_type="application/json",
        headers=_FRESH,
    )
