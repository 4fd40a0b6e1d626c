"""The checkpointer: sample, audit, promote, save, confirm; about once a second, on the session that holds the lock.

It is the only caller of `confirm`. The order is the promise: what is confirmed was saved before, what is saved was
acknowledged before, and a snapshot is promoted only when the table agrees that the stream brought everything it sees.
An idle outbox writes nothing, so that the checkpoint's own WAL does not keep it busy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog

from relay.audit import Audit, Window
from relay.checkpoint import EMPTY, CheckpointStore, Sample, Unseen
from relay.config import Checkpoint as CheckpointSection
from relay.errors import StreamIncomplete
from relay.lsn import LSN
from relay.outbox import Mapping
from relay.pipeline import Pipeline
from relay.progress import Progress
from relay.source import Source
from relay.source.census import count_by_xid, count_rows
from relay.source.session import Session
from relay.writeback import WriteBack

log = structlog.get_logger("relay.checkpointer")

_IDLE_WAL = 1 << 20
"""Without events the checkpoint is saved only after so much foreign WAL."""


class Checkpointer:
    """Keeps the checkpoint of one streaming session."""

    def __init__(
        self,
        session: Session,
        store: CheckpointStore,
        pipeline: Pipeline,
        source: Source,
        progress: Progress,
        settings: CheckpointSection,
        *,
        audited: Sequence[Mapping],
        saved: tuple[LSN, Sample, Unseen],
        write_back: WriteBack | None = None,
    ) -> None:
        """`audited`: the tables to compare with; none: their rows cannot be counted by transaction."""
        self._session = session
        self._store = store
        self._pipeline = pipeline
        self._source = source
        self._progress = progress
        self._settings = settings
        self._audited = audited
        self._write_back = write_back
        self._saved_lsn, self._promoted, unseen = saved
        self._saved_sample_lsn = self._promoted.lsn
        self._saved_unseen = bool(unseen)  # the saved snapshot does not see all that is acknowledged: save again
        self._saved_injections = pipeline.injections
        self._remembered_at = time.monotonic()
        self._remembered_events = progress.published_events
        self._readback: dict[str, int] | None = None  # how far the broker is covered by the promoted snapshot
        self._window_marks: dict[str, int] | None = None  # … by the one that ends the open window
        self.agreed = False  # a window with rows in it was found complete
        self.audit = Audit(self._promoted, unseen)

    async def begin(self) -> None:
        """Before anything comes: the first point of the history, so that later LSNs can be replayed from."""
        if self._promoted.snapshot != EMPTY:  # else nobody knows what was published before
            await self._store.begin_history(self._saved_lsn, self._promoted)

    async def tick(self) -> None:
        """Sample; promote what is acknowledged and agreed; save and confirm if anything of ours moved."""
        covered, waiting = dict(self._pipeline.coverage.whole), self.audit.waiting()
        sample = await self._store.sample()
        self._progress.server_lsn = sample.lsn
        window = self.audit.due(self._pipeline.acknowledged)
        if window is not None:
            await self._judge(window)
            self._promoted = self.audit.passed()
            self._readback = self._window_marks or self._readback
        if self.audit.sampled(sample):
            # What was acknowledged before the sample was taken is visible in it, but for what waits for a standby.
            sees, widen = sample.snapshot.sees, sample.snapshot.widen
            self._window_marks = covered if all(sees(widen(xid)) for xid in waiting) else None
        await self.save()

    async def _judge(self, window: Window) -> None:
        """Raise StreamIncomplete if the table holds rows that the stream did not bring."""
        until = window.until.snapshot
        # EMPTY: somebody else's slot was taken over, and what was published before is not known. Equal: nobody wrote.
        if not self._audited or window.blind or window.since in (EMPTY, until):
            return
        rows, xids = await count_rows(self._session, self._audited, window.since, until)
        self._progress.audits += 1
        if window.agrees(rows, xids):
            self.agreed |= rows > 0
            return
        missing = window.missing(await count_by_xid(self._session, self._audited, window.since, until))
        if missing == []:
            self.agreed |= rows > 0
            return  # counted a row twice, or rows were deleted meanwhile
        self._progress.audit_failures += 1
        await self._save()  # `since`, and what was counted, as the next life will read it
        raise StreamIncomplete(
            f"the table holds {rows} rows of transactions of which the stream brought {window.total}"
            + (f"; of {len(missing)} of them it lacks rows" if missing else ""),
            since=str(window.since),
            until=str(until),
            until_lsn=str(window.until.lsn),
            xids=missing,
            counted=window.total,
            hint="they are published from the table now; find out why the stream lacks them: `relay check` looks at "
            "the publication (dropped table, row filter, new partition)",
        )

    async def save(self) -> None:
        acknowledged, promoted = self._pipeline.acknowledged, self._promoted
        if self._pipeline.injections != self._saved_injections:  # they moved the marks, and nothing else
            await self._save()
            return
        events_unsaved = self._pipeline.last_event_lsn > min(self._saved_lsn, self._saved_sample_lsn)
        if not (events_unsaved or self._saved_unseen) and acknowledged - self._saved_lsn < _IDLE_WAL:
            return
        if acknowledged == self._saved_lsn and promoted.lsn == self._saved_sample_lsn:
            return
        await self._save()

    async def _save(self) -> None:
        # Together: a mark must not be newer than the LSN that it is saved with.
        pipeline = self._pipeline
        acknowledged, promoted, marks = pipeline.acknowledged, self._promoted, dict(pipeline.coverage.whole)
        injections, unseen = pipeline.injections, self.audit.unseen
        if self._write_back is not None:
            # What is behind the checkpoint never comes again to be marked; what is acknowledged meanwhile may not be.
            await self._write_back.caught_up()
        await self._store.save(acknowledged, promoted, unseen, marks=marks, readback=self._readback)
        self._saved_injections = injections
        self._saved_lsn, self._saved_sample_lsn, self._saved_unseen = acknowledged, promoted.lsn, bool(unseen)
        self._progress.checkpoints += 1
        await self._source.confirm(acknowledged)
        self._progress.confirmed_lsn = acknowledged
        await self._remember()

    async def _remember(self) -> None:
        now = time.monotonic()
        published = self._progress.published_events
        if published == self._remembered_events or now - self._remembered_at < self._settings.history_interval:
            return
        self._remembered_at, self._remembered_events = now, published
        await self._store.remember(self._saved_lsn, self._promoted, self._settings.history_retention)
