"""Progress: what the relay is doing, in plain numbers that the pipeline bumps once per batch.

Metrics, `/readyz`, the status endpoint and the demo's view read it; nobody decides anything by it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from relay.errors import RelayError
from relay.lsn import LSN, NOWHERE

State = Literal["connecting", "standby", "streaming", "polling", "recovering", "parked", "draining", "stopped"]


@dataclass(slots=True)
class Progress:
    """Counters since start, and gauges of now. Times are monotonic unless they say otherwise."""

    state: State = "connecting"
    state_since: float = field(default_factory=time.monotonic)
    epoch: int = 0

    received_events: int = 0
    received_transactions: int = 0
    published_events: int = 0
    published_bytes: int = 0
    skipped_events: int = 0  # transactions that the checkpoint's snapshot already sees
    recovered_events: int = 0  # published from the table
    replayed_events: int = 0  # published again, on request
    duplicate_events: int = 0  # the broker said: already stored
    rejected_events: int = 0
    publish_attempts: int = 0
    publish_failures: int = 0
    source_reconnects: int = 0
    sink_reconnects: int = 0
    recoveries: int = 0
    audits: int = 0  # windows of the stream that were compared with the table
    audit_failures: int = 0  # … in which the stream lacked rows
    checkpoints: int = 0

    received_lsn: LSN = NOWHERE  # three stages, never one `lsn`
    acknowledged_lsn: LSN = NOWHERE
    confirmed_lsn: LSN = NOWHERE
    server_lsn: LSN = NOWHERE  # the end of WAL at the last sample

    in_flight_events: int = 0
    in_flight_bytes: int = 0
    oldest_in_flight: float | None = None  # when the oldest unacknowledged batch was received
    oldest_commit_at: float | None = None  # its first event's commit (Unix time)
    sink_down_since: float | None = field(default_factory=time.monotonic)  # None: the sink is open
    last_heard: float = field(default_factory=time.monotonic)  # when Postgres last sent anything
    last_error: str = ""  # until something is published again
    last_hint: str = ""
    stream_error: str = ""  # why the table is polled although it should be streamed; until it is streamed
    stream_hint: str = ""

    def unstreamed(self, error: RelayError | None) -> None:
        """It cannot stream because of the error; None: it can."""
        self.stream_error, self.stream_hint = (str(error), error.hint) if error else ("", "")

    def enter(self, state: State) -> bool:
        """Change the state; False if it is the same."""
        if state == self.state:
            return False
        self.state, self.state_since = state, time.monotonic()
        return True

    def stalled(self, after: float, now: float) -> str:
        """Why events are not moving, or "" if they are (or there are none). G10."""
        if self.state == "standby":
            return "standing by: another relay is active"
        if self.state not in ("streaming", "polling", "recovering", "draining"):
            return f"{self.state}: {self.last_error}" if self.last_error else self.state
        if self.sink_down_since is not None and now - self.sink_down_since > after:
            return f"the broker cannot be reached since {now - self.sink_down_since:.0f} s: {self.last_error}"
        if self.oldest_in_flight is not None and now - self.oldest_in_flight > after:
            age = now - self.oldest_in_flight
            return f"the oldest event waits for the broker since {age:.0f} s" + (
                f": {self.last_error}" if self.last_error else ""
            )
        if self.state == "streaming" and now - self.last_heard > after:
            return f"nothing heard from Postgres for {now - self.last_heard:.0f} s"
        return ""
