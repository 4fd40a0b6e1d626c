"""The real HTTP server, asked over HTTP."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from relay.admin import AdminServer
from relay.errors import SetupError
from relay.lsn import LSN
from relay.metrics import Metrics
from relay.progress import Progress


class Asked:
    """A running server, and a client for it."""

    def __init__(self, progress: Progress, metrics: Metrics, server: AdminServer, client: ClientSession) -> None:
        self.progress, self.metrics, self.server, self.client = progress, metrics, server, client

    async def get(self, path: str, **headers: str) -> tuple[int, str, str]:
        async with self.client.get(f"http://127.0.0.1:{self.server.port}{path}", headers=headers) as response:
            return response.status, response.headers["Content-Type"], await response.text()

    async def json(self, path: str) -> tuple[int, Any]:
        async with self.client.get(f"http://127.0.0.1:{self.server.port}{path}") as response:
            assert response.headers["Cache-Control"] == "no-store"
            return response.status, await response.json()


@asynccontextmanager
async def running(progress: Progress) -> AsyncIterator[Asked]:
    metrics = Metrics(progress, relay_name="shop_relay", service="shop")
    server = AdminServer("127.0.0.1:0", progress, metrics, stalled_after=30)
    await server.start()
    try:
        async with ClientSession() as client:
            yield Asked(progress, metrics, server, client)
    finally:
        await server.stop()


_UNASKED = """
import asyncio, sys, urllib.request
from relay.admin import AdminServer
from relay.metrics import Metrics
from relay.progress import Progress

async def main():
    progress = Progress()
    server = AdminServer("127.0.0.1:0", progress, Metrics(progress, relay_name="shop"), stalled_after=30)
    await server.start()
    before = "aiohttp" in sys.modules
    page = await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{server.port}/healthz")
    print(before, "aiohttp" in sys.modules, page.status)
    await server.stop()

asyncio.run(main())
"""


def test_what_nobody_asks_for_is_not_loaded() -> None:
    """aiohttp costs ten megabytes, and a fifth of the time to the first event."""
    done = subprocess.run([sys.executable, "-c", _UNASKED], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "True", "200"]


async def test_stopping_while_the_first_request_waits() -> None:
    progress = Progress()
    server = AdminServer("127.0.0.1:0", progress, Metrics(progress, relay_name="shop"), stalled_after=30)
    await server.start()
    with socket.create_connection(("127.0.0.1", server.port or 0)) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0)  # the loop may or may not have seen it
        await server.stop()
        assert server.port is None


async def test_alive_whatever_the_state() -> None:
    async with running(Progress(state="parked", last_error="slot lost")) as relay:
        assert await relay.json("/healthz") == (200, {"alive": True})


@pytest.mark.guarantee("G10")
async def test_ready_while_events_move_or_there_are_none() -> None:
    async with running(Progress(state="streaming")) as relay:
        code, answer = await relay.json("/readyz")
        assert (code, answer) == (200, {"ready": True, "state": "streaming", "reason": "", "hint": ""})


@pytest.mark.guarantee("G10")
async def test_unready_when_the_oldest_event_waits_too_long_and_ready_again_after() -> None:
    async with running(Progress(state="streaming")) as relay:
        relay.progress.oldest_in_flight = time.monotonic() - 60
        relay.progress.last_error, relay.progress.last_hint = "connection refused", "start the broker"
        code, answer = await relay.json("/readyz")
        assert code == 503
        assert answer["ready"] is False
        assert "connection refused" in answer["reason"]
        assert answer["hint"] == "start the broker"

        relay.progress.oldest_in_flight = None
        assert (await relay.json("/readyz"))[0] == 200


@pytest.mark.guarantee("G10")
async def test_unready_when_a_person_is_needed_with_the_remedy() -> None:
    progress = Progress(state="parked", last_error="the slot is gone", last_hint="run relay setup")
    async with running(progress) as relay:
        code, answer = await relay.json("/readyz")
        assert code == 503
        assert answer == {
            "ready": False,
            "state": "parked",
            "reason": "parked: the slot is gone",
            "hint": "run relay setup",
        }


async def test_a_stand_by_is_unready_but_can_be_told_apart() -> None:
    async with running(Progress(state="standby")) as relay:
        code, answer = await relay.json("/readyz")
        assert code == 503
        assert answer["state"] == "standby"
        assert "another relay is active" in answer["reason"]


async def test_metrics_speak_both_formats() -> None:
    async with running(Progress(state="streaming", published_events=42)) as relay:
        code, kind, page = await relay.get("/metrics")
        assert code == 200
        assert kind.startswith("text/plain")
        families = {family.name: family for family in parse_prometheus(page)}
        (sample,) = families["relay_events_published"].samples
        assert (sample.name, sample.value) == ("relay_events_published_total", 42)
        assert sample.labels == {"relay": "shop_relay", "service": "shop"}
        assert "process_cpu_seconds" in families

        code, kind, page = await relay.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert kind.startswith("application/openmetrics-text")
        assert page.endswith("# EOF\n")
        assert "relay_events_published" in {family.name for family in parse_openmetrics(page)}  # type: ignore[no-untyped-call]


async def test_a_scrape_reads_the_values_of_now() -> None:
    async with running(Progress()) as relay:
        assert 'relay_events_received_total{relay="shop_relay",service="shop"} 0.0' in (await relay.get("/metrics"))[2]
        relay.progress.received_events += 3
        assert 'relay_events_received_total{relay="shop_relay",service="shop"} 3.0' in (await relay.get("/metrics"))[2]


async def test_status_has_what_scripts_rely_on() -> None:
    progress = Progress(
        state="streaming",
        received_lsn=LSN.parse("0/16B3800"),
        acknowledged_lsn=LSN.parse("0/16B3780"),
        confirmed_lsn=LSN.parse("0/16B3748"),
        server_lsn=LSN.parse("0/16B3848"),
        oldest_commit_at=time.time() - 5,
        in_flight_events=2,
        in_flight_bytes=600,
        published_events=7,
        last_error="connection refused",
    )
    async with running(progress) as relay:
        relay.metrics.gauges.pending_events = 2
        relay.metrics.gauges.dead_letters = 1
        relay.metrics.gauges.slot_name = "outbox_relay"
        relay.metrics.gauges.slot_wal_status = "reserved"
        relay.metrics.gauges.slot_safe_wal_bytes = 1024
        code, answer = await relay.json("/status")
    assert code == 200
    assert answer["state"] == "streaming"
    assert answer["received_lsn"] == "0/16B3800"
    assert answer["acknowledged_lsn"] == "0/16B3780"
    assert answer["confirmed_lsn"] == "0/16B3748"
    assert answer["lag_bytes"] == 0x100
    assert answer["lag_seconds"] >= 5
    assert answer["in_flight"] == {"events": 2, "bytes": 600}
    assert (answer["pending"], answer["dead_letters"]) == (2, 1)
    assert answer["slot"]["name"] == "outbox_relay"
    assert answer["slot"]["wal_status"] == "reserved"
    assert answer["slot"]["safe_wal_size"] == 1024
    assert answer["counters"]["published_events"] == 7
    assert answer["last_error"] == "connection refused"


async def test_status_before_anything_is_known() -> None:
    async with running(Progress()) as relay:
        _, answer = await relay.json("/status")
    assert answer["confirmed_lsn"] is None
    assert answer["lag_bytes"] is None
    assert answer["pending"] is None


async def test_unknown_paths_and_methods_are_refused() -> None:
    async with running(Progress()) as relay:
        assert (await relay.get("/nothing"))[0] == 404
        async with relay.client.post(f"http://127.0.0.1:{relay.server.port}/status") as response:
            assert response.status == 405


async def test_what_is_no_http_is_answered_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with running(Progress()) as relay:
        for sent in (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", b"\x16\x03\x01 hello\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.server.port)
            writer.write(sent)
            assert (await reader.read(12)) == b"HTTP/1.0 400"
            writer.close()
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


async def test_a_port_in_use_names_the_address_and_the_setting() -> None:
    progress = Progress()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        server = AdminServer(address, progress, Metrics(progress, relay_name="shop"), stalled_after=30)
        with pytest.raises(SetupError, match=address) as refused:
            await server.start()
    assert "admin.listen" in refused.value.hint
    await server.stop()


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "192.0.2.1:0"])
async def test_an_impossible_address_is_a_setup_error(address: str) -> None:
    progress = Progress()
    server = AdminServer(address, progress, Metrics(progress, relay_name="shop"), stalled_after=30)
    with pytest.raises(SetupError, match="cannot listen on"):
        await server.start()


async def test_an_empty_address_switches_it_off() -> None:
    progress = Progress()
    server = AdminServer("", progress, Metrics(progress, relay_name="shop"), stalled_after=30)
    await server.start()
    assert server.port is None
    await server.stop()


async def test_stopping_does_not_wait_for_connections_that_stay_open() -> None:
    async with running(Progress()) as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.server.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /status HTT")  # one answered, one half asked
        assert b"200" in await reader.readline()
        async with asyncio.timeout(60):
            await relay.server.stop()
            await relay.server.stop()
            await reader.read()
        assert relay.server.port is None
        writer.close()
