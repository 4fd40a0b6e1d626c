"""The audit's bookkeeping: for any history, a window counts exactly what the stream brought of its transactions.

So a complete stream never raises an alarm, and rows that it lacks are found at the first window that covers them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import relay.audit
from relay.audit import Audit, Window
from relay.checkpoint import Sample, Snapshot, Unseen
from relay.lsn import LSN

EPOCH = 1 << 32


@dataclass
class Writer:
    """One transaction: rows in the table, of which the stream brings some."""

    xid: int
    rows: int
    brought: int
    commit_lsn: int | None = None
    visible: bool = False


@dataclass
class World:
    """A server, a stream and a relay: commit record, visibility, acknowledgement and sample at any time of each."""

    xid: int
    end: int = 100
    writers: list[Writer] = field(default_factory=list)
    stream: list[Writer] = field(default_factory=list)  # in commit order
    acknowledged: int = 100
    windows: int = 0
    alarms: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.first = self.xid
        self.saved: tuple[int, Sample, Unseen] = (self.end, self.sample(), {})
        self.restart()

    def sample(self) -> Sample:
        running = frozenset(w.xid for w in self.writers if not w.visible)
        return Sample(Snapshot(min(running, default=self.xid), self.xid, running), LSN(self.end))

    def restart(self) -> None:
        self.acknowledged, self.promoted, unseen = self.saved
        self.audit = Audit(self.promoted, unseen)

    def begin(self, rows: int, lost: int) -> None:
        self.writers.append(Writer(self.xid, rows, rows - min(rows, lost)))
        self.xid += 1

    def commit(self, which: int) -> None:
        """The record is in the WAL: the stream brings it, and no snapshot sees it yet."""
        running = [w for w in self.writers if w.commit_lsn is None]
        if running:
            writer = running[which % len(running)]
            writer.commit_lsn = self.end
            self.stream.append(writer)
            self.end += 10

    def show(self, which: int) -> None:
        waiting = [w for w in self.stream if not w.visible]
        if waiting:
            waiting[which % len(waiting)].visible = True

    def acknowledge(self, many: int) -> None:
        for writer in self.stream:
            assert writer.commit_lsn is not None
            if writer.commit_lsn >= self.acknowledged and many:
                many -= 1
                if writer.brought:
                    self.audit.acknowledged([(writer.commit_lsn, writer.xid % EPOCH, writer.brought)])
                self.acknowledged = writer.commit_lsn + 10
        if many:
            self.acknowledged = self.end  # a keepalive

    def tick(self, save: bool) -> None:
        sample = self.sample()
        window = self.audit.due(LSN(self.acknowledged))
        if window is not None:
            self.judge(window)
            self.promoted = self.audit.passed()
        self.audit.sampled(sample)
        if save:
            self.saved = (self.acknowledged, self.promoted, self.audit.unseen)

    def judge(self, window: Window) -> None:
        mine = [w for w in self.writers if window.until.snapshot.sees(w.xid) and not window.since.sees(w.xid)]
        self.windows += 1
        assert not window.blind
        assert window.total == sum(w.brought for w in mine)
        if window.counts is not None:
            assert window.counts == {w.xid: w.brought for w in mine if w.brought}
            assert window.missing({w.xid: w.rows for w in mine}) == [w.xid for w in mine if w.brought < w.rows]
        if sum(w.rows for w in mine) > window.total:
            self.alarms |= {w.xid for w in mine if w.brought < w.rows}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(1, 3), st.sampled_from([0, 0, 0, 1, 2])),
        st.tuples(st.just("commit"), st.integers(0, 5)),
        st.tuples(st.just("show"), st.integers(0, 5)),
        st.tuples(st.just("acknowledge"), st.integers(0, 4)),
        st.tuples(st.just("tick"), st.booleans()),
        st.tuples(st.just("restart")),
    ),
    max_size=80,
)


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G5")
@settings(max_examples=400)
@given(STEPS, st.booleans(), st.sampled_from([700, EPOCH - 3, 3 * EPOCH - 1]))
@example(  # acknowledged and saved while it waits for a synchronous standby, through a restart and a window
    [("begin", 1, 0), ("commit", 0), ("acknowledge", 2), ("tick", True), ("restart",), ("tick", True),
     ("acknowledge", 1), ("tick", True), ("show", 0)],
    True,
    700,
)  # fmt: skip
def test_any_history(steps: list[tuple[object, ...]], complete: bool, first: int) -> None:
    world = World(first)
    for name, *arguments in steps:
        if name == "begin" and complete:
            arguments[1] = 0
        getattr(world, str(name))(*arguments)
    # In the end everything commits, is seen and acknowledged; two more windows cover it.
    for _ in list(world.writers):
        world.commit(0)
        world.show(0)
    for _ in range(3):
        world.tick(save=True)
        world.acknowledge(len(world.writers) + 1)
    assert world.windows >= 2
    assert world.alarms == {w.xid for w in world.writers if w.brought < w.rows}
    assert complete is False or not world.alarms
    assert world.audit.unseen == {}


def sample(xmax: int, lsn: int) -> Sample:
    return Sample(Snapshot(xmax, xmax), LSN(lsn))


@pytest.mark.guarantee("G8")
def test_memory_is_bounded_in_a_long_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay.audit, "_FEW", 10)
    audit = Audit(sample(100, 100), {})
    audit.sampled(sample(1000, 1000))
    for xid in range(100, 900):
        audit.acknowledged([(xid, xid, 2)])
    window = audit.due(LSN(1000))
    assert window is not None
    assert (window.total, window.counts) == (1600, None)
    assert window.missing({100: 3}) is None
    # Behind its end: too much to remember. The next window is not judged; the one after is.
    for xid in range(1000, 1900):
        audit.acknowledged([(xid, xid, 2)])
    assert len(audit._later) <= 40
    assert audit.unseen[0] >= 1600
    assert not window.blind
    audit.passed()
    audit.sampled(sample(2000, 2000))
    window = audit.due(LSN(2000))
    assert window is not None and window.blind and window.total == 1800
    audit.passed()
    audit.acknowledged([(2100, 2100, 1)])
    audit.sampled(sample(2200, 2200))
    window = audit.due(LSN(2200))
    assert window is not None and not window.blind and window.counts == {2100: 1}


def test_a_window_is_due_when_everything_before_its_end_is_acknowledged() -> None:
    audit = Audit(sample(100, 100), {})
    assert audit.due(LSN(10_000)) is None
    audit.sampled(sample(110, 110))
    audit.sampled(sample(120, 120))  # one at a time
    assert audit.due(LSN(109)) is None
    window = audit.due(LSN(110))
    assert window is not None and window.until == sample(110, 110)
    assert audit.passed() == sample(110, 110)
