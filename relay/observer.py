"""The observer: looks at slot and table from outside every few seconds, for gauges that only a query can tell.

It has a session of its own, so that a slow count never delays a checkpoint, and it never decides anything.
"""

from __future__ import annotations

import asyncio
import time

from relay.config import Config
from relay.metrics import Metrics
from relay.source.session import connect
from relay.status import read

_INTERVAL = 10.0
_SHARE = 0.02  # of the time at most is spent on looking: counting a huge backlog costs Postgres something


async def observe(config: Config, metrics: Metrics) -> None:
    """Refresh the gauges until cancelled; raises when Postgres goes away, as the other sessions do."""
    name = f"{config.relay.name} observer"
    async with await connect(config.database, name, options="-c statement_timeout=10s") as session:
        while True:
            started = time.monotonic()
            seen = await read(session, config)
            gauges, slot = metrics.gauges, seen["slot"]
            gauges.pending_events = seen["pending"]
            gauges.oldest_pending_age_seconds = seen["lag_seconds"] if seen["pending"] else 0.0
            gauges.dead_letters = seen["dead_letters"]
            gauges.slot_name = slot["name"]
            gauges.slot_active = slot["active"]
            gauges.slot_wal_status = slot["wal_status"]
            gauges.slot_retained_bytes = slot["retained_bytes"]
            gauges.slot_safe_wal_bytes = slot["safe_wal_size"]
            await asyncio.sleep(max(_INTERVAL, (time.monotonic() - started) / _SHARE))
