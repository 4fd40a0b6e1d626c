"""The checkpointer: sample, audit, promote, save, confirm; about once a second, on the session that holds the lock.

It is the only caller of `confirm`. The order is the promise: what is confirmed was saved before, what is saved was
acknowledged before, and a snapshot is promoted only when the table agrees that the stream brought everything it sees.
An idle outbox writes nothing, so that the checkpoint's own WAL does not keep it busy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import structlog

from relay.audit import Audit, Window
from relay.checkpoint import EMPTY, CheckpointStore, Sample, with_snap_marks
from relay.config import Checkpoint as CheckpointSection
from relay.errors import StreamIncomplete
from relay.lsn import LSN
from relay.outbox import Mapping as Outbox
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
        audited: Sequence[Outbox],
        saved: tuple[LSN, Sample, int],
        snap_marks: Mapping[str, int],
        write_back: WriteBack | None = None,
    ) -> None:
        """`audited`: the tables to compare with; none: their rows cannot be counted by transaction.

        `snap_marks`: up to there the broker's destinations hold only events that the saved snapshot sees.
        """
        self._snap_marks = self._sampled_marks = snap_marks
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
        self._remembered_at = time.monotonic()
        self._remembered_events = progress.published_events
        self.audit = Audit(self._promoted, unseen)

    async def tick(self) -> None:
        """Sample; promote what is acknowledged and agreed; save and confirm if anything of ours moved."""
        marks = dict(self._pipeline.marks)
        sample = await self._store.sample()
        self._progress.server_lsn = sample.lsn
        window = self.audit.due(self._pipeline.acknowledged)
        if window is not None:
            await self._judge(window)
            self._promoted = self.audit.passed()
            if not self.audit.carries:  # else something is stored that a recovery from this snapshot shows again
                self._snap_marks = self._sampled_marks
        if not self.audit.open:
            self._sampled_marks = marks  # all of that was committed before the sample was taken
        self.audit.sampled(sample)
        await self.save()

    async def _judge(self, window: Window) -> None:
        """Raise StreamIncomplete if the table holds rows that the stream did not bring."""
        until, blind = window.until.snapshot, self.audit.blind
        # EMPTY: somebody else's slot was taken over, and what was published before is not known. Equal: nobody wrote.
        if not self._audited or blind or window.since in (EMPTY, until):
            return
        rows = await count_rows(self._session, self._audited, window.since, until)
        self._progress.audits += 1
        if rows <= window.total:
            return
        missing = window.missing(await count_by_xid(self._session, self._audited, window.since, until))
        if missing == []:
            return  # counted a row twice, or it was deleted meanwhile
        self._progress.audit_failures += 1
        await self.save()
        raise StreamIncomplete(
            f"the table holds {rows} rows of transactions of which the stream brought {window.total}",
            since=str(window.since),
            until=str(until),
            until_lsn=str(window.until.lsn),
            xids=missing,
            unseen=self.audit.unseen - window.total,
            hint="they are published from the table now; find out why the stream lacks them: `relay check` looks at "
            "the publication (dropped table, row filter, new partition)",
        )

    async def save(self) -> None:
        acknowledged, promoted, unseen = self._pipeline.acknowledged, self._promoted, self.audit.unseen
        marks = dict(self._pipeline.covered)  # together: a mark must not be newer than the LSN that it is saved with
        events_unsaved = self._pipeline.last_event_lsn > min(self._saved_lsn, self._saved_sample_lsn)
        if not events_unsaved and acknowledged - self._saved_lsn < _IDLE_WAL:
            return
        if acknowledged == self._saved_lsn and promoted.lsn == self._saved_sample_lsn:
            return
        if self._write_back is not None:
            await self._write_back.caught_up()  # what is behind the checkpoint is never delivered, and marked, again
        await self._store.save(acknowledged, promoted, unseen, marks=with_snap_marks(marks, self._snap_marks))
        self._saved_lsn, self._saved_sample_lsn = acknowledged, promoted.lsn
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
