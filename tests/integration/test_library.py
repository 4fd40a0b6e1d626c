"""The relay inside an application's own event loop: `async with Relay(config)`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relay import Relay
from relay.errors import SetupError
from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.ledger import Ledger
from tests.relays import config_of, eventually, jetstream, prepare, settings
from tests.sinks import read_jetstream


async def test_events_flow_while_the_application_runs(
    database: Database, nats: Nats, prefix: str, tmp_path: Path
) -> None:
    sections = settings(database.dsn, jetstream(nats.url, prefix), source={"slot": prefix})
    await prepare(tmp_path, sections)
    ledger = Ledger(database.dsn, f"{prefix}.orders")
    async with Relay(config_of(sections)) as relay:
        await eventually(lambda: relay.progress.state == "streaming", "streams")
        await asyncio.to_thread(ledger.write, 20)
        await eventually(lambda: relay.progress.published_events >= len(ledger.journal), "published")
    assert relay.progress.state == "stopped"
    ledger.check(await read_jetstream(nats.url, prefix))
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s"
    await eventually(lambda: database.query(sessions, "outbox_relay%") == [(0,)], "no session is left behind")


@pytest.mark.guarantee("G3")
async def test_leaving_the_block_drains(database: Database, nats: Nats, prefix: str, tmp_path: Path) -> None:
    sections = settings(database.dsn, jetstream(nats.url, prefix), source={"slot": prefix})
    await prepare(tmp_path, sections)
    ledger = Ledger(database.dsn, f"{prefix}.orders")
    async with Relay(config_of(sections)) as relay:
        await eventually(lambda: relay.progress.state == "streaming", "streams")
        await asyncio.to_thread(ledger.write, 300, 3)
        await eventually(lambda: relay.progress.received_events > 0, "received")
    assert relay.progress.in_flight_events == 0
    assert relay.progress.published_events == relay.progress.received_events
    async with Relay(config_of(sections)) as relay:
        await ledger.arrived(lambda: read_jetstream(nats.url, prefix))
        assert relay.progress.duplicate_events == 0
    ledger.check(await read_jetstream(nats.url, prefix))


async def test_what_only_a_person_can_cure_comes_out_of_wait(
    database: Database, nats: Nats, prefix: str, tmp_path: Path
) -> None:
    sections = settings(database.dsn, jetstream(nats.url, prefix), source={"slot": prefix})
    await prepare(tmp_path, sections)
    database.execute("DROP PUBLICATION outbox_relay")
    with pytest.raises(SetupError, match="does not exist") as raised:
        async with Relay(config_of(sections)) as relay:
            await relay.wait()
    assert "relay setup" in raised.value.hint


async def test_an_error_of_the_application_goes_through(
    database: Database, nats: Nats, prefix: str, tmp_path: Path
) -> None:
    sections = settings(database.dsn, jetstream(nats.url, prefix), source={"slot": prefix})
    await prepare(tmp_path, sections)
    relay = Relay(config_of(sections))

    async def application() -> None:
        async with relay:
            await eventually(lambda: relay.progress.state == "streaming", "streams")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await application()
    assert relay.progress.state == "stopped"


async def test_stop_ends_wait(database: Database, nats: Nats, prefix: str, tmp_path: Path) -> None:
    sections = settings(database.dsn, jetstream(nats.url, prefix), source={"slot": prefix})
    await prepare(tmp_path, sections)
    async with Relay(config_of(sections)) as relay:
        await eventually(lambda: relay.progress.state == "streaming", "streams")
        relay.stop()
        await relay.wait()
