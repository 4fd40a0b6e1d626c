"""One life with Postgres: from the lock to whatever ends the session. It streams; when it cannot, it polls (G5).

    first start, slot lost, interrupted recovery  →  recover: poll until a slot is ready  →  stream
    the audit found rows that the stream lacked   →  heal: publish those from the table    →  stream
    source.mode = "poll"                          →  poll for ever, by snapshots or by claims

Here is which phase comes, and why; the phases are in life_recover.py, life_rounds.py, life_claim.py and life_stream.py,
what they share is in life_frame.py. It never streams from a slot that does not fit the checkpoint.
What one life learns for the next is in `Memory`; everything that must survive a crash is in the checkpoint.
"""

from __future__ import annotations

import asyncio

from relay.checkpoint import Checkpoint
from relay.config import Config
from relay.errors import RelayError, SetupError, SlotLost, decisive
from relay.life_claim import claim
from relay.life_frame import Frame
from relay.life_memory import Memory
from relay.life_recover import recover
from relay.life_rounds import heal, poll
from relay.life_stream import stream
from relay.metrics import Metrics
from relay.progress import Progress
from relay.recovery import check_publication
from relay.sink import ROUTING, Sink
from relay.source.session import Session
from relay.source.slot import slot_fault, slot_info
from relay.writeback import WriteBack


class Life:
    """Uses the lock's session until it ends. `stop` drains."""

    def __init__(
        self,
        config: Config,
        session: Session,
        sink: Sink,
        progress: Progress,
        metrics: Metrics,
        stopping: asyncio.Event,
        memory: Memory,
        write_back: WriteBack | None,
    ) -> None:
        self._frame = Frame(config, session, sink, progress, metrics, stopping, write_back)
        self._memory = memory

    def stop(self) -> None:
        self._frame.progress.enter("draining")
        self._frame.pipeline.stop()

    async def run(self, *, from_now: bool) -> None:
        frame, memory = self._frame, self._memory
        config, coverage = frame.config, frame.coverage
        checkpoint = await frame.claim_checkpoint()
        if config.source.mode == "poll":
            polling = claim if config.poll.strategy == "claim" else poll
            await polling(frame, checkpoint, from_now=from_now and checkpoint.phase == "new")
            return
        if memory.incomplete is not None:
            # Another relay may have been at work meanwhile, and have found the same.
            if checkpoint.phase == "stream" and str(checkpoint.snap) == memory.incomplete.since:
                checkpoint = await heal(frame, checkpoint, memory.incomplete)
            memory.incomplete = None
        else:
            coverage.same_order = checkpoint.marks.get(ROUTING) == coverage.routing
        if frame.stopping.is_set():
            return
        try:
            if (fault := await self._fault(checkpoint)) is not None:
                coverage.same_order = False
                checkpoint = await recover(
                    frame, memory, checkpoint, fault, from_now=from_now and checkpoint.phase == "new"
                )
        except (RelayError, BaseExceptionGroup) as exc:
            memory.learn(decisive(exc))
            raise
        if not frame.opened_before:  # straight to the stream: it goes on exactly where the LSN is
            coverage.marks = dict(checkpoint.marks)
        if not frame.stopping.is_set():
            identity = frame.identity
            await frame.store.adopt(identity.system_identifier, identity.timeline, config.source.slot)
            await stream(frame, memory, checkpoint)

    async def _fault(self, checkpoint: Checkpoint) -> SlotLost | None:
        """Why streaming cannot simply go on from the checkpoint, if recovery can cure it; raises what it cannot."""
        frame, config, memory = self._frame, self._frame.config, self._memory
        if checkpoint.phase == "new":
            await check_publication(frame.session, config)
            return SlotLost("this is the first start")
        slot = await slot_info(frame.session, config.source.slot)
        fault = slot_fault(
            slot,
            plugin=config.source.plugin,
            database=frame.identity.database,
            checkpoint_lsn=checkpoint.lsn if checkpoint.phase == "stream" else None,
            name=config.source.slot,
        )
        if config.source.mode == "stream" and checkpoint.phase == "stream":
            await check_publication(frame.session, config)
            if fault is not None:
                raise fault
            return None
        if isinstance(fault, SlotLost):
            return fault
        if isinstance(fault, SetupError) and slot is not None and slot.plugin != config.source.plugin:
            return SlotLost(f"the configuration asks for another plugin: {fault}")
        if fault is not None:
            raise fault
        if checkpoint.phase != "stream":
            return SlotLost(f"it was interrupted while in phase {checkpoint.phase!r}")
        if memory.lost is not None:
            return SlotLost(str(memory.lost), hint=memory.lost.hint)
        if memory.failed_audits >= 2:
            return SlotLost("the stream lacked rows twice in a row")
        try:
            await check_publication(frame.session, config)
        except SetupError as exc:
            return SlotLost(str(exc), hint=exc.hint)
        return None
