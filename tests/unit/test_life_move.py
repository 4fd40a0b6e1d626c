"""When to look whether a window of events was published since the last checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.life_move import next_look


@pytest.mark.guarantee("G4")
@given(st.integers(1, 100_000), st.floats(1, 1e6))
def test_the_next_look_is_when_the_window_is_full(events: int, rate: float) -> None:
    """Later, and more events come twice after a crash than the window has."""
    wait = next_look(events, rate)
    assert 0.01 <= wait <= 0.1
    assert wait == 0.01 or wait * rate <= events * 1.001


def test_without_events_it_looks_seldom() -> None:
    assert next_look(5000, 0.0) == 0.1
