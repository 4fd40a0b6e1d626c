"""Never silently stuck: ready means that events are moving, or that there are none."""

from __future__ import annotations

import pytest

from relay.metrics import STATES
from relay.progress import Progress

pytestmark = pytest.mark.guarantee("G10")

NOW = 1000.0


def streaming(**values: object) -> Progress:
    progress = Progress(state="streaming", last_heard=NOW, sink_down_since=None)
    for name, value in values.items():
        setattr(progress, name, value)
    return progress


def test_an_idle_relay_is_ready() -> None:
    assert streaming().stalled(30, NOW) == ""


def test_events_in_flight_are_ready_as_long_as_they_are_young() -> None:
    assert streaming(oldest_in_flight=NOW - 29).stalled(30, NOW) == ""
    assert streaming(oldest_in_flight=NOW - 30).stalled(30, NOW) == ""


def test_an_old_event_in_flight_is_stalled_and_the_reason_is_told() -> None:
    reason = streaming(oldest_in_flight=NOW - 45, last_error="connection refused").stalled(30, NOW)
    assert "broker" in reason
    assert "45 s" in reason
    assert "connection refused" in reason


def test_a_broker_that_stays_away_is_stalled_even_without_events() -> None:
    assert streaming(sink_down_since=NOW - 29).stalled(30, NOW) == ""
    reason = streaming(sink_down_since=NOW - 45, last_error="connection refused").stalled(30, NOW)
    assert "broker" in reason
    assert "connection refused" in reason


def test_a_silent_postgres_is_stalled() -> None:
    reason = streaming(last_heard=NOW - 31).stalled(30, NOW)
    assert "Postgres" in reason
    assert "31 s" in reason


@pytest.mark.parametrize("state", ["polling", "recovering", "draining"])
def test_only_a_stream_must_be_heard(state: str) -> None:
    assert streaming(state=state, last_heard=NOW - 3600).stalled(30, NOW) == ""


@pytest.mark.parametrize("state", ["polling", "recovering", "draining"])
def test_an_old_event_stalls_every_way_of_reading(state: str) -> None:
    assert streaming(state=state, oldest_in_flight=NOW - 31).stalled(30, NOW)


@pytest.mark.parametrize("state", ["connecting", "parked", "stopped"])
def test_a_relay_that_does_not_read_is_not_ready_and_says_why(state: str) -> None:
    assert state in streaming(state=state).stalled(30, NOW)
    assert "no slot" in streaming(state=state, last_error="no slot").stalled(30, NOW)


def test_a_stand_by_is_not_ready_and_is_told_apart() -> None:
    assert "standing by" in streaming(state="standby").stalled(30, NOW)


def test_every_state_has_been_decided() -> None:
    assert {state for state in STATES if not streaming(state=state).stalled(30, NOW)} == {
        "streaming",
        "polling",
        "recovering",
        "draining",
    }


def test_entering_a_state_restarts_its_clock_once() -> None:
    progress = Progress()
    progress.state_since = 0.0
    assert progress.enter("streaming")
    since = progress.state_since
    assert since > 0
    assert not progress.enter("streaming")
    assert progress.state_since == since
