"""What the running relay knows of itself, as `/status` and `/readyz` answer it. Pure: time is passed in."""

from __future__ import annotations

from typing import Any

from relay import __version__
from relay.metrics import Metrics, lag_bytes, lag_seconds
from relay.progress import Progress

_COUNTERS = (
    "received_events",
    "received_transactions",
    "published_events",
    "published_bytes",
    "skipped_events",
    "recovered_events",
    "replayed_events",
    "duplicate_events",
    "rejected_events",
    "publish_attempts",
    "publish_failures",
    "source_reconnects",
    "sink_reconnects",
    "recoveries",
    "audits",
    "audit_failures",
    "checkpoints",
)


def readiness(progress: Progress, stalled_after: float, *, now: float) -> dict[str, Any]:
    """Ready means: events are moving, or there are none (G10). `now` is monotonic."""
    reason = progress.stalled(stalled_after, now)
    return {
        "ready": not reason,
        "state": progress.state,
        "reason": reason,
        "hint": progress.last_hint if reason and progress.state != "standby" else "",
    }


def status(metrics: Metrics, stalled_after: float, *, now: float, clock: float) -> dict[str, Any]:
    """The live counterpart of `relay status --json`: the same names where both know a thing. `clock` is Unix time."""
    progress, gauges = metrics.progress, metrics.gauges
    lag = lag_bytes(progress)
    ready = readiness(progress, stalled_after, now=now)
    return {
        "relay": metrics.relay_name,
        "version": __version__,
        "state": progress.state,
        "state_seconds": round(now - progress.state_since, 3),
        "ready": ready["ready"],
        "reason": ready["reason"],
        "epoch": progress.epoch,
        "received_lsn": _lsn(progress.received_lsn),
        "acknowledged_lsn": _lsn(progress.acknowledged_lsn),
        "confirmed_lsn": _lsn(progress.confirmed_lsn),
        "server_lsn": _lsn(progress.server_lsn),
        "lag_bytes": lag.get("confirmed"),
        "lag_seconds": round(lag_seconds(progress, gauges, clock), 3),
        "in_flight": {"events": progress.in_flight_events, "bytes": progress.in_flight_bytes},
        "pending": gauges.pending_events,
        "oldest_pending_age_seconds": gauges.oldest_pending_age_seconds,
        "dead_letters": gauges.dead_letters,
        "parked": gauges.parked_events,
        "slot": {
            "name": gauges.slot_name,
            "active": gauges.slot_active,
            "wal_status": gauges.slot_wal_status,
            "safe_wal_size": gauges.slot_safe_wal_bytes,
            "retained_bytes": gauges.slot_retained_bytes,
        },
        "counters": {name: getattr(progress, name) for name in _COUNTERS},
        "last_error": progress.last_error or progress.stream_error,
        "hint": progress.last_hint if progress.last_error else progress.stream_hint,
    }


def progress_line(metrics: Metrics, *, clock: float) -> dict[str, Any]:
    """The keys of the canonical log line: `log.info("relay.progress", **progress_line(...))`."""
    progress = metrics.progress
    return {
        "state": progress.state,
        "received_events": progress.received_events,
        "published_events": progress.published_events,
        "rejected_events": progress.rejected_events,
        "publish_failures": progress.publish_failures,
        "received_lsn": progress.received_lsn,
        "acknowledged_lsn": progress.acknowledged_lsn,
        "confirmed_lsn": progress.confirmed_lsn,
        "lag_bytes": lag_bytes(progress).get("confirmed"),
        "lag_seconds": round(lag_seconds(progress, metrics.gauges, clock), 3),
        "in_flight_events": progress.in_flight_events,
        "in_flight_bytes": progress.in_flight_bytes,
        "pending_events": metrics.gauges.pending_events,
    }


def _lsn(lsn: int) -> str | None:
    return str(lsn) if lsn else None
