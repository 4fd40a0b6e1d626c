"""The seam to Postgres. A Source yields batches in commit order and tells Postgres what may be forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from relay.event import Batch
from relay.lsn import LSN


class Source(Protocol):
    """What the pipeline needs from Postgres."""

    def batches(self) -> AsyncIterator[Batch]:
        """Batches in commit order; a keepalive is an empty batch with a position. Not reading is back-pressure."""
        ...

    async def confirm(self, lsn: LSN) -> None:
        """Tell Postgres that everything before `lsn` may be forgotten. Only pipeline.py calls it."""
