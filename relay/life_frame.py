"""The frame of a life: what all its phases share. The lock's session, checkpoint, tables, pipeline, positions.

It decides nothing: which phase comes is for life.py. Opening the sink may fence others off, so it is never opened again
before the checkpoint proved to be ours still; and nothing is published before it is saved where its destination begins.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from relay.checkpoint import Checkpoint, CheckpointStore, guard
from relay.config import Config
from relay.depth import depth_of
from relay.errors import RelayError
from relay.life_tables import Tables
from relay.lsn import NOWHERE
from relay.metrics import Metrics
from relay.pipeline import Pipeline
from relay.progress import Progress
from relay.recovery import drop_slot
from relay.sink import ROUTING, UNCOUNTABLE, Sink
from relay.source.replication import WalSender
from relay.source.session import Session, connect
from relay.source.slot import Identity, identity_of
from relay.writeback import WriteBack


class Frame:
    """Lasts as long as the life does. `session` is the lock's."""

    def __init__(
        self,
        config: Config,
        session: Session,
        sink: Sink,
        progress: Progress,
        metrics: Metrics,
        stopping: asyncio.Event,
        write_back: WriteBack | None,
    ) -> None:
        self.config = config
        self.session = session
        self.sink = sink
        self.progress = progress
        self.metrics = metrics
        self.stopping = stopping
        self.write_back = write_back
        self.store = CheckpointStore(session, config.relay.name)
        self.pipeline = Pipeline(
            sink,
            config.delivery,
            progress,
            metrics,
            NOWHERE,
            write_back,
            opened=self._sink_opened,
            opening=self._prove,
            depth=depth_of(config),
        )
        self.coverage = self.pipeline.coverage
        self.tables = Tables(config, write_back)
        self.identity = Identity("", 0, NOWHERE, "", 0)
        self.wal: WalSender | None = None  # the stream's
        self.opened_before = False  # the sink, by this life
        self._begun: set[str] = set()  # destinations whose beginning is saved
        self._rerouted = False  # the marks were made with another routing

    async def claim_checkpoint(self) -> Checkpoint:
        """Look at tables and server, then make the checkpoint ours (epoch + 1); raises if it is not of this server."""
        config, progress, store = self.config, self.progress, self.store
        await self.tables.look(self.session)
        identity = self.identity = await identity_of(self.session)
        checkpoint = await store.claim(identity.system_identifier, identity.timeline, config.source.slot)
        progress.epoch = checkpoint.epoch
        self._begun = set(checkpoint.marks)
        self.coverage.marks = dict(checkpoint.readback)
        self.coverage.origin = f"{config.relay.name}:{identity.system_identifier}-{identity.database_oid}"
        self.coverage.routing = _fingerprint(config)
        self._rerouted = bool(checkpoint.marks) and checkpoint.marks.get(ROUTING) != self.coverage.routing
        guard(checkpoint, identity.system_identifier, await store.sample())
        return checkpoint

    async def _prove(self) -> None:
        """Before the sink is opened again: see that nobody took over meanwhile. At first we have just claimed it."""
        if self.opened_before:
            self._begun |= self.coverage.marks.keys()  # met meanwhile: their marks are no beginnings any more
            try:
                async with self._clerk() as store:
                    await store.prove()
            except RelayError:
                if self.wal is not None:
                    self.wal.close()  # as in life_move._letting_go
                raise

    async def _sink_opened(self) -> None:
        """Before anything is published: note where new destinations begin."""
        marks = self.coverage.marks
        new = {name: mark for name, mark in marks.items() if name not in self._begun and name != UNCOUNTABLE}
        if self._rerouted:
            self._rerouted = False
            new[UNCOUNTABLE] = 1
        if marks:
            async with self._clerk() as store:
                if new:
                    self._begun |= new.keys()
                    await store.save_marks(new)
                # Whoever wrote to the broker before us had received it by now, so it was committed before this, …
                self.coverage.settled_at = (await store.sample()).lsn
                self.coverage.horizon = await store.burn()  # … but perhaps no snapshot sees it yet
        self.opened_before = True

    @asynccontextmanager
    async def _clerk(self) -> AsyncIterator[CheckpointStore]:
        """The checkpoint on a session of its own: the lock's one waits for notifications, up to a second at a time."""
        async with await connect(self.config.database, f"{self.config.relay.name} clerk") as session:
            yield self.store.on(session)

    async def walsender(self) -> WalSender:
        source = self.config.source
        return await WalSender.connect(
            self.config.database,
            f"{self.config.relay.name} stream",
            timeout=source.wal_sender_timeout,
            lock_timeout=source.wal_sender_timeout,
        )

    async def drop_slots(self, reason: str) -> None:
        """Let go of all WAL that is kept for us."""
        for name in (self.config.source.slot, self.config.source.anchor.slot):
            if name:
                await drop_slot(self.session, name, reason=reason)

    def stamp(self, phase: str, detail: str) -> bytes:
        """The part of `relay-position` that a whole phase shares: relay, system, epoch, phase, timeline or round."""
        name, epoch = self.config.relay.name, self.progress.epoch
        identity = self.identity
        return f"{name}:{identity.system_identifier}-{identity.database_oid}:{epoch}:{phase}:{detail}:".encode()


def _fingerprint(config: Config) -> int:
    """Of everything that decides which events go where."""
    parts = [config.routing, *config.outbox, *config.sink.jetstream.streams]
    return zlib.crc32("".join(part.model_dump_json() for part in parts).encode())
