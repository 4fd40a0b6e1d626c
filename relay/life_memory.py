"""What one life leaves to the next: why it could not go on. It is lost with the process.

Whatever must survive a crash is in the checkpoint, never here: a relay that starts without it only learns it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from relay.errors import RelayError, SlotGivenUp, StreamIncomplete


@dataclass(slots=True)
class Memory:
    """What a life leaves to the next one."""

    lost: RelayError | None = None  # why streaming from the slot is not possible although it exists
    gave_up: bool = False  # the slot held too much WAL: catch up before making a new one
    incomplete: StreamIncomplete | None = None  # what the audit found
    failed_audits: int = 0  # in a row

    def learn(self, failure: RelayError) -> None:
        if isinstance(failure, StreamIncomplete):
            self.incomplete = failure
            self.failed_audits += 1
        elif isinstance(failure, SlotGivenUp):
            self.lost, self.gave_up = failure, True
