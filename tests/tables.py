"""The outbox tables that people have (tests/fixtures/outbox_tables.sql), and the relay on them, inside the test."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from relay.app import Relay
from relay.config import Config
from tests.relays import eventually

FIXTURES = Path(__file__).parent / "fixtures"


def ddl(name: str) -> str:
    """One table's DDL as its owners wrote it: S0, S1, S3, S4 or D."""
    text = (FIXTURES / "outbox_tables.sql").read_text()
    parts = re.split(r"^-- (S\d|D): ", text, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    return f"-- {found[name]}"


def nats_sink(url: str, *subjects: str, stream: str = "EVENTS") -> dict[str, Any]:
    streams = [{"name": stream, "subjects": list(subjects), "create": True}]
    return {"kind": "jetstream", "jetstream": {"servers": [url], "ack_timeout": "5s", "streams": streams}}


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Relay]:
    """A relay that streams; what it fails with, the test fails with."""
    async with Relay(config) as relay:

        def streaming() -> bool:
            task = relay._task
            if task is not None and task.done():
                task.result()
            return relay.progress.state == "streaming"

        await eventually(streaming, "streaming", context=lambda: str(relay.progress))
        yield relay


async def published(relay: Relay, count: int) -> None:
    def enough() -> bool:
        if relay._task is not None and relay._task.done():
            relay._task.result()
        return relay.progress.published_events >= count

    await eventually(enough, f"{count} published", context=lambda: str(relay.progress))
