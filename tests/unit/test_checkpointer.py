"""The checkpointer: saved before confirmed, promoted only when the table agrees, and silent while nothing moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import relay.checkpointer
from relay.checkpoint import Sample, Snapshot, Unseen
from relay.checkpointer import Checkpointer
from relay.config import Checkpoint as CheckpointSection
from relay.config import Delivery, Outbox
from relay.errors import StreamIncomplete, Superseded
from relay.event import Batch
from relay.lsn import LSN
from relay.metrics import Metrics
from relay.outbox import mappings
from relay.pipeline import Pipeline
from relay.progress import Progress
from tests.fakes import FaultySink, ListSource, RecordingStore

TABLES = mappings([Outbox()])


def sample(lsn: int) -> Sample:
    return Sample(Snapshot(lsn, lsn), LSN(lsn))


class Saving:
    """A checkpointer, with everything around it in the test's hands."""

    def __init__(
        self, *samples: int, start: int = 100, snap: int = 100, audited: bool = False, unseen: Unseen | None = None
    ) -> None:
        self.journal: list[tuple[str, LSN]] = []
        self.store = RecordingStore([sample(lsn) for lsn in samples], self.journal)
        self.progress = Progress()
        metrics = Metrics(self.progress, relay_name="t", stalled_after=30.0)
        self.pipeline = Pipeline(FaultySink(), Delivery(), self.progress, metrics, LSN(start))
        journal = self.journal

        class Source(ListSource):
            async def confirm(self, lsn: LSN) -> None:
                journal.append(("confirm", lsn))

        self.checkpointer = Checkpointer(
            None,  # type: ignore[arg-type]  # the counting queries are replaced
            self.store,
            self.pipeline,
            Source([]),
            self.progress,
            CheckpointSection(history_interval=1e-9),
            audited=TABLES if audited else (),
            saved=(LSN(start), sample(snap), unseen or {}),
        )
        self.pipeline.begin(LSN(start), self.checkpointer.audit)

    async def tick(self, acknowledged: int, *, events: bool) -> None:
        self.pipeline.acknowledged = LSN(acknowledged)
        if events:
            self.pipeline.last_event_lsn = LSN(acknowledged)
        await self.checkpointer.tick()


@pytest.mark.guarantee("G1")
@given(st.lists(st.tuples(st.integers(0, 2**21), st.integers(-(2**20), 2**20), st.booleans()), max_size=30))
async def test_saved_before_confirmed_and_never_more_than_acknowledged(steps: list[tuple[int, int, bool]]) -> None:
    saving, acknowledged, sampled = Saving(100), 100, 100
    for step, ahead, events in steps:
        acknowledged += step
        sampled = max(sampled, acknowledged + ahead)  # the end of WAL never goes back
        saving.store.samples.clear()
        saving.store.samples.append(sample(sampled))
        before = len(saving.journal)
        await saving.tick(acknowledged, events=events and step > 0)
        new = [entry for entry in saving.journal[before:] if entry[0] != "remember"]
        assert new in ([], [("save", acknowledged), ("confirm", acknowledged)])
        if new:
            assert saving.store.saved[-1][1].lsn <= acknowledged  # only a covered snapshot is promoted
        assert saving.progress.confirmed_lsn <= acknowledged
    snapshots = [promoted.lsn for _, promoted in saving.store.saved]
    assert snapshots == sorted(snapshots)


@pytest.mark.guarantee("G7")
async def test_an_idle_outbox_writes_nothing_until_foreign_wal_adds_up() -> None:
    saving = Saving(*range(200, 100_200, 1000))
    for lsn in range(200, 100_000, 1000):
        await saving.tick(lsn, events=False)
    assert saving.journal == []
    await saving.tick(100 + (1 << 20), events=False)
    assert [what for what, _ in saving.journal] == ["save", "confirm"]


async def test_saves_again_until_the_snapshot_covers_the_last_event_and_then_rests() -> None:
    saving = Saving(150, 260, 270, 280, 290, 300, 310)
    await saving.tick(200, events=True)  # sample 150 is taken, not judged yet
    assert saving.store.saved == [(200, sample(100))]
    await saving.tick(200, events=False)  # 150 is covered, but not the event; 260 is taken
    assert saving.store.saved[1:] == [(200, sample(150))]
    await saving.tick(200, events=False)  # 260 waits for a keepalive
    assert len(saving.store.saved) == 2
    await saving.tick(275, events=False)
    assert saving.store.saved[2:] == [(275, sample(260))]
    for lsn in (285, 295, 305):
        await saving.tick(lsn, events=False)
    assert len(saving.store.saved) == 3


async def test_saves_again_until_the_snapshot_sees_what_was_committed_just_before_it() -> None:
    """A commit is in the WAL a moment before it is visible: the sample is behind it, and does not see it."""
    saving = Saving(250, 260, 270, 280, 290)
    saving.store.samples[0] = Sample(Snapshot(250, 251, frozenset({250})), LSN(250))
    saving.pipeline.audit.acknowledged([(200, 250, 3)])  # type: ignore[union-attr]
    await saving.tick(250, events=True)
    await saving.tick(265, events=False)
    assert saving.store.saved[-1][1].lsn == 250
    await saving.tick(275, events=False)
    assert saving.store.saved[-1][1].lsn == 260
    saves = len(saving.store.saved)
    for lsn in (285, 295):
        await saving.tick(lsn, events=False)
    assert len(saving.store.saved) == saves  # and then it rests


@pytest.mark.guarantee("G1")
async def test_what_is_acknowledged_while_rows_are_marked_is_not_saved_with_them() -> None:
    """It is not marked yet, and what is behind the checkpoint never is."""
    saving = Saving(150, 150, 150)

    class Marking:
        async def caught_up(self) -> bool:
            saving.pipeline.acknowledged = saving.pipeline.last_event_lsn = LSN(300)
            return True

    saving.checkpointer._write_back = Marking()  # type: ignore[assignment]
    await saving.tick(200, events=True)
    assert [lsn for lsn, _ in saving.store.saved] == [200]
    assert ("confirm", LSN(200)) in saving.journal


async def test_history_is_kept_only_while_events_move() -> None:
    saving = Saving(*range(150, 190, 10))
    saving.progress.published_events += 1
    await saving.tick(160, events=True)
    assert [what for what, _ in saving.journal] == ["save", "confirm", "remember"]
    await saving.tick(170, events=True)
    assert [what for what, _ in saving.journal].count("remember") == 1


@pytest.mark.guarantee("G6")
async def test_a_superseded_relay_confirms_nothing() -> None:
    saving = Saving(150)
    saving.store.failure = Superseded("epoch 2")
    with pytest.raises(Superseded):
        await saving.tick(160, events=True)
    assert saving.journal == []
    assert saving.progress.confirmed_lsn == 0


# --- the audit at the gate


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What the table holds: xid → rows. Visible is what the snapshots say."""
    rows: dict[int, int] = {}

    async def by_xid(session: Any, tables: Sequence[Any], since: Snapshot, until: Snapshot) -> dict[int, int]:
        return {xid: count for xid, count in rows.items() if until.sees(xid) and not since.sees(xid)}

    async def total(session: Any, tables: Sequence[Any], since: Snapshot, until: Snapshot) -> tuple[int, int]:
        found = await by_xid(session, tables, since, until)
        return sum(found.values()), sum(xid * count for xid, count in found.items())

    monkeypatch.setattr(relay.checkpointer, "count_by_xid", by_xid)
    monkeypatch.setattr(relay.checkpointer, "count_rows", total)
    return rows


def brought(saving: Saving, *transactions: tuple[int, int, int]) -> None:
    saving.pipeline._advance(Batch([], LSN(transactions[-1][0] + 1), transactions=list(transactions)))
    saving.pipeline.last_event_lsn = saving.pipeline.acknowledged


@pytest.mark.guarantee("G1")
async def test_a_snapshot_is_promoted_only_if_the_table_agrees(table: dict[int, int]) -> None:
    saving = Saving(150, 250, audited=True)
    await saving.checkpointer.tick()
    table.update({110: 2, 120: 1})
    brought(saving, (110, 110, 2), (120, 120, 1), (160, 160, 4))
    await saving.checkpointer.tick()
    assert (saving.progress.audits, saving.progress.audit_failures, saving.checkpointer.agreed) == (1, 0, True)
    assert saving.store.saved[-1] == (161, sample(150))
    assert saving.store.unseen[-1] == {0: 4}


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G5")
async def test_rows_that_the_stream_lacks_stop_it_before_the_snapshot_is_promoted(table: dict[int, int]) -> None:
    saving = Saving(150, 250, audited=True)
    await saving.checkpointer.tick()
    table.update({110: 2, 120: 1, 130: 5})
    brought(saving, (110, 110, 2), (130, 130, 3), (160, 160, 4))
    with pytest.raises(StreamIncomplete) as caught:
        await saving.checkpointer.tick()
    found = caught.value
    assert (found.xids, found.counted) == ((120, 130), 5)
    assert (found.since, found.until) == (str(sample(100).snapshot), str(sample(150).snapshot))
    assert found.hint and saving.progress.audit_failures == 1 and not saving.checkpointer.agreed
    # As the next life reads it: the window's beginning, and everything that was counted since.
    assert saving.store.saved[-1] == (161, sample(100))
    assert saving.store.unseen[-1] == {0: 5, 160: 4}


async def test_rows_that_are_gone_already_are_no_loss(table: dict[int, int]) -> None:
    saving = Saving(150, 250, audited=True)
    await saving.checkpointer.tick()
    table.update({110: 1})
    brought(saving, (110, 110, 2), (160, 160, 4))
    await saving.checkpointer.tick()
    assert saving.progress.audit_failures == 0


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G5")
async def test_rows_that_are_gone_do_not_hide_as_many_that_the_stream_lacks(table: dict[int, int]) -> None:
    saving = Saving(150, 250, audited=True)
    await saving.checkpointer.tick()
    table.update({120: 2})  # those of 110 were deleted
    brought(saving, (110, 110, 2), (160, 160, 4))
    with pytest.raises(StreamIncomplete) as caught:
        await saving.checkpointer.tick()
    assert caught.value.xids == (120,)


async def test_a_window_without_rows_proves_nothing(table: dict[int, int]) -> None:
    saving = Saving(150, 250, audited=True)
    await saving.tick(200, events=False)
    await saving.tick(200, events=False)
    assert (saving.progress.audits, saving.checkpointer.agreed) == (1, False)


async def test_without_tables_to_compare_with_nothing_is_judged(table: dict[int, int]) -> None:
    saving = Saving(150, 250)
    table.update({110: 2})
    await saving.tick(200, events=False)
    await saving.tick(200, events=False)
    assert saving.progress.audits == 0
