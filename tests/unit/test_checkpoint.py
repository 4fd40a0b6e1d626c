"""Snapshots, and whose checkpoint it is. Pure parts; the store is tested on real servers, samples in test_audit.py."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.checkpoint import EMPTY, Checkpoint, Sample, Snapshot, guard
from relay.errors import SetupError
from relay.lsn import LSN

EPOCH = 1 << 32


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    xmin = draw(st.integers(3, 2**63))
    width = draw(st.integers(0, 40))
    if not width:
        return Snapshot(xmin, xmin)
    # The oldest running one is xmin, by definition.
    others = draw(st.sets(st.integers(xmin + 1, xmin + width - 1))) if width > 1 else set()
    return Snapshot(xmin, xmin + width, frozenset({xmin, *others}))


@given(snapshots())
def test_text_round_trip(snapshot: Snapshot) -> None:
    assert Snapshot.parse(str(snapshot)) == snapshot


@pytest.mark.parametrize(
    ("text", "snapshot"),
    [
        ("3:3:", EMPTY),
        ("10:20:10,14,15", Snapshot(10, 20, frozenset({10, 14, 15}))),
        ("4294967299:4294967300:4294967299", Snapshot(EPOCH + 3, EPOCH + 4, frozenset({EPOCH + 3}))),
    ],
)
def test_text_as_postgres_writes_it(text: str, snapshot: Snapshot) -> None:
    assert Snapshot.parse(text) == snapshot
    assert str(snapshot) == text


@pytest.mark.parametrize("text", ["", "3", "3:3", "3:3:x", "a:b:", "3:3::", "3:4:3:5"])
def test_what_is_not_a_snapshot_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a pg_snapshot"):
        Snapshot.parse(text)


@given(snapshots())
def test_sees_what_was_over(snapshot: Snapshot) -> None:
    """Against the definition: ids from xmax on did not exist, the listed ones were running, the rest was over."""
    for xid in range(max(3, snapshot.xmin - 5), snapshot.xmax + 5):
        over = xid < snapshot.xmax and xid not in snapshot.running
        assert snapshot.sees(xid) == over


def test_the_empty_snapshot_sees_nothing() -> None:
    assert not any(EMPTY.sees(xid) for xid in (3, 4, 700, EPOCH, 2**63))


@given(st.integers(3, 40 * EPOCH), st.integers(-(2**31) + 1, 2**31 - 1))
@settings(max_examples=200)
def test_widening_finds_every_id_within_two_thousand_million(xmax: int, distance: int) -> None:
    wide = xmax + distance
    if wide >= 3:
        assert Snapshot(xmax, xmax).widen(wide % EPOCH) == wide


def test_widening_around_the_epochs() -> None:
    for epoch in (1, 2, 7):
        for xmax in range(epoch * EPOCH - 4, epoch * EPOCH + 8):
            for wide in range(epoch * EPOCH - 50, epoch * EPOCH + 50):
                assert Snapshot(xmax, xmax).widen(wide % EPOCH) == wide


NOW = Sample(Snapshot(1000, 1000), LSN(5000))


def saved(**changes: object) -> Checkpoint:
    values: dict[str, object] = {
        "epoch": 1,
        "system_identifier": "7",
        "timeline": 1,
        "slot": "outbox_relay",
        "lsn": LSN(4000),
        "snap": Snapshot(900, 900),
        "snap_lsn": LSN(3900),
        "phase": "stream",
        "recovery": None,
        **changes,
    }
    return Checkpoint(**values)  # type: ignore[arg-type]


def test_a_checkpoint_of_this_server_is_taken() -> None:
    guard(saved(), "7", NOW)
    guard(saved(lsn=LSN(5000), snap=Snapshot(1000, 1000)), "7", NOW)
    guard(saved(phase="new", system_identifier="8", lsn=LSN(9999)), "7", NOW)


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize(
    "changes", [{"system_identifier": "8"}, {"lsn": LSN(5001)}, {"snap": Snapshot(900, 1001, frozenset({900}))}]
)
def test_a_checkpoint_of_another_server_or_of_the_future_is_refused(changes: dict[str, object]) -> None:
    """Postgres would skip silently up to an LSN that lies ahead of it."""
    with pytest.raises(SetupError) as caught:
        guard(saved(**changes), "7", NOW)
    assert "`relay adopt-timeline" in caught.value.hint
    assert not {"UPDATE", "delete"} & set(caught.value.hint.split())
