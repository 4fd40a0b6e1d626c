"""The anchor without a server: when it moves, gives way, is made; which window of the WAL it can serve."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from relay.anchor import Bounds, Decision, decide, window
from relay.config import Anchor
from relay.errors import SetupError
from relay.event import Transaction
from relay.history import Known, Point
from relay.lsn import LSN
from relay.source.anchor import Chosen
from relay.source.selection import Selection
from relay.source.slot import ServerInfo, SlotInfo

SERVER = ServerInfo(
    version_num=180004,
    version="18.4",
    system_identifier="7",
    timeline=1,
    in_recovery=False,
    database="shop",
    user="relay",
    wal_level="logical",
    max_slot_wal_keep_size=None,
    max_replication_slots=10,
    max_wal_senders=10,
    wal_sender_timeout=60.0,
    idle_replication_slot_timeout=0.0,
    used_slots=2,
    used_wal_senders=1,
    wal_lsn=LSN(10_000),
)
MAIN = SlotInfo("main", database="shop", restart_lsn=LSN(9000), confirmed_flush_lsn=LSN(9500), wal_status="reserved")
OURS = SlotInfo("anchor", database="shop", restart_lsn=LSN(4000), confirmed_flush_lsn=LSN(4500), wal_status="reserved")
SETTINGS = Anchor(slot="anchor", max_wal=7000)


@pytest.mark.parametrize(
    ("anchor", "main", "aged", "max_wal", "keep", "decision"),
    [
        (None, MAIN, None, 7000, None, Decision("create")),
        (None, None, None, 7000, None, Decision("nothing")),  # nothing to copy from
        (None, replace(MAIN, wal_status="unreserved"), None, 7000, None, Decision("nothing")),
        (OURS, MAIN, None, 7000, None, Decision("advance", "", LSN(4500))),
        (OURS, MAIN, LSN(4000), 7000, None, Decision("advance", "", LSN(4500))),
        (OURS, MAIN, LSN(6000), 7000, None, Decision("advance", "age", LSN(6000))),
        (OURS, MAIN, LSN(6000), 3000, None, Decision("advance", "size", LSN(7000))),
        (OURS, MAIN, None, 7000, 4000, Decision("advance", "size", LSN(8000))),  # half of the server's limit
        (OURS, MAIN, None, 10, None, Decision("advance", "size", LSN(9500))),  # not ahead of the relay
        (OURS, None, None, 10, None, Decision("advance", "size", LSN(9990))),
        (replace(OURS, active=True), MAIN, LSN(6000), 7000, None, Decision("nothing")),
    ],
)
def test_decisions(
    anchor: SlotInfo | None, main: SlotInfo | None, aged: LSN | None, max_wal: int, keep: int | None, decision: Decision
) -> None:
    settings = Anchor(slot="anchor", max_wal=max_wal)
    assert decide(anchor, main, replace(SERVER, max_slot_wal_keep_size=keep), aged, settings) == decision


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ({"wal_status": "lost"}, "drop"),
        ({"wal_status": "unreserved"}, "drop"),
        ({"invalidation_reason": "idle_timeout"}, "drop"),
        ({"safe_wal_size": 100}, "drop"),  # less than a fifth is left
        ({"safe_wal_size": 5000}, "advance"),
        ({"database": "other"}, "refuse"),
        ({"slot_type": "physical"}, "refuse"),
    ],
)
def test_it_gives_way_and_touches_nobody_else(change: dict[str, object], action: str) -> None:
    found = decide(replace(OURS, **change), MAIN, SERVER, None, SETTINGS)  # type: ignore[arg-type]
    assert found.action == action
    assert found.reason or action == "advance"


NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)


def point(minute: int) -> Point:
    lsn = LSN(minute * 100)
    return Point(NOON + timedelta(minutes=minute), lsn, f"{minute}:{minute}:", lsn, LSN(minute * 100 + 50))


KNOWN = Known([point(minute) for minute in (10, 20, 30)], point(40))
HELD = LSN(1500)


def test_a_window_begins_where_the_history_dates_it() -> None:
    assert window(KNOWN, HELD, Bounds(lsn=LSN(1600))).begin == str(LSN(1600))
    assert window(KNOWN, HELD, Bounds(at=NOON + timedelta(minutes=25))).begin == str(LSN(2000))
    found = window(KNOWN, HELD, Bounds(mark=point(20)))
    assert (found.begin, found.seen) == (str(LSN(2000)), "20:20:")


def test_a_window_ends_with_what_is_published() -> None:
    assert window(KNOWN, HELD, Bounds(lsn=HELD)).stop == str(LSN(4000))
    assert window(KNOWN, HELD, Bounds(lsn=HELD, to_lsn=LSN(2222))).stop == str(LSN(2222))
    assert window(KNOWN, HELD, Bounds(lsn=HELD, until=NOON + timedelta(minutes=20))).stop == str(LSN(2050))
    assert window(KNOWN, HELD, Bounds(lsn=HELD, until=NOON + timedelta(minutes=35))).stop == str(LSN(4000))


@pytest.mark.parametrize("bounds", [Bounds(lsn=LSN(1499)), Bounds(at=NOON), Bounds(mark=point(10))])
def test_before_the_anchor_there_is_nothing(bounds: Bounds) -> None:
    """Minute 10 is in the history, but behind the anchor; the first row that is not is that of minute 20."""
    with pytest.raises(SetupError, match=r"earliest point is 0/5DC \(2026-11-16T12:20:00Z\)"):
        window(KNOWN, HELD, bounds)


def test_which_transactions_count() -> None:
    def at(lsn: int, xid: int, minute: float = 0) -> Transaction:
        return Transaction(xid, lsn, (NOON + timedelta(minutes=minute)).timestamp(), b"")

    published = Known([], Point(NOON, LSN(2000), "100:100:", LSN(2500)))
    plain = Chosen(window(published, HELD, Bounds(lsn=LSN(1600))))
    assert [plain.takes(each) for each in (at(1599, 5), at(1600, 5), at(1999, 500))] == [False, True, True]
    # Behind the LSN only what the snapshot sees: it was published from the table.
    assert [plain.takes(each) for each in (at(2000, 99), at(2000, 100))] == [True, False]
    marked = Chosen(window(published, HELD, Bounds(mark=Point(NOON, LSN(1600), "50:50:"), to_lsn=LSN(1800))))
    assert [marked.takes(each) for each in (at(1700, 49), at(1700, 50), at(1800, 50))] == [False, True, False]
    dated = Known([Point(NOON, LSN(1600), "1:1:")], published.now)
    timed = Chosen(window(dated, HELD, Bounds(at=NOON, until=NOON + timedelta(minutes=1))))
    assert [timed.takes(at(1700, 5, minute)) for minute in (-1, 0, 1, 2)] == [False, True, True, False]


def test_a_selection_goes_through_json() -> None:
    selection = Selection("9:9:", wal=window(KNOWN, HELD, Bounds(mark=point(20), to_lsn=LSN(3000))))
    assert Selection.of(selection.to_json()) == selection
