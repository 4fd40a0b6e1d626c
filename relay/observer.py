"""The observer: looks at slot and table from outside every few seconds, for gauges that only a query can tell.

It has a session of its own, so that a slow count never delays a checkpoint. It warns before the slot dies, and gives
the slot up at the bound that the operator set; otherwise it decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog

from relay.config import Config
from relay.errors import SlotGivenUp
from relay.metrics import Gauges, Metrics
from relay.source.session import LASTING, connect
from relay.status import read

log = structlog.get_logger("relay.observer")

_INTERVAL = 10.0
_SHARE = 0.02  # of the time at most is spent on looking: counting a huge backlog costs Postgres something


async def observe(config: Config, metrics: Metrics) -> None:
    """Refresh the gauges until cancelled; raises when Postgres goes away, as the other sessions do."""
    name = f"{config.relay.name} observer"
    warned: dict[str, str] = {}
    try:
        async with await connect(config.database, name, options=f"{LASTING} -c statement_timeout=10s") as session:
            while True:
                started = time.monotonic()
                seen = await read(session, config)
                slot = seen["slot"]
                gauges = metrics.gauges
                gauges.pending_events = seen["pending"]
                gauges.oldest_pending_age_seconds = seen["lag_seconds"] if seen["pending"] else 0.0
                gauges.average_pending_age_seconds = seen["average_pending_age_seconds"]
                gauges.dead_letters = seen["dead_letters"]
                gauges.slot_name = slot["name"]
                gauges.slot_active = slot["active"]
                gauges.slot_wal_status = slot["wal_status"]
                gauges.slot_retained_bytes = slot["retained_bytes"]
                gauges.slot_safe_wal_bytes = slot["safe_wal_size"]
                anchor = seen["anchor"]
                gauges.anchor_retained_bytes = anchor["retained_bytes"] if anchor else None
                bound, retained = config.source.max_retained_wal, slot["retained_bytes"] or 0
                if config.source.mode == "auto" and 0 < bound < retained:
                    raise SlotGivenUp(
                        f"the slot holds {retained:,} bytes of WAL, more than source.max_retained_wal ({bound:,})",
                        hint="the slot is dropped and the table polled until it is caught up; find out what is slow",
                    )
                for each in (slot, anchor) if anchor else (slot,):
                    warning = danger(each)
                    if warning and warning != warned.get(each["name"]):
                        log.warning("slot.endangered", **{k: each[k] for k in _TOLD}, hint=warning)
                    warned[each["name"]] = warning
                await asyncio.sleep(max(_INTERVAL, (time.monotonic() - started) / _SHARE))
    finally:
        metrics.gauges = Gauges()  # a stand-by must not show what it saw while it was active


_TOLD = ("name", "wal_status", "safe_wal_size", "retained_bytes")


def danger(slot: dict[str, Any]) -> str:
    """Why the slot may die soon, and what to do; "" if it is well. Pure."""
    remedy = "see what keeps it: a slow or absent broker, or a long transaction; or raise max_slot_wal_keep_size"
    if slot["wal_status"] in ("unreserved", "lost"):
        return f"Postgres is about to remove WAL that the slot needs ({slot['wal_status']}): {remedy}"
    safe, retained = slot["safe_wal_size"], slot["retained_bytes"]
    if safe is not None and retained is not None and safe < (safe + retained) / 5:
        return f"less than a fifth of max_slot_wal_keep_size is left: {remedy}"
    return ""
