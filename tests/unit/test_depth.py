"""The depth of the window: enough for the broker's round trip, however far it is, and little more."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.config import Config
from relay.depth import LEAST, Depth, depth_of

MOST = 5_000
BATCH = 500


@dataclass
class Broker:
    """Stores `rate` events per second, unevenly; `distance` is the way to it and back, in seconds."""

    rate: float
    distance: float

    def drain(self, depth: Depth, seconds: float, start: float = 0.0) -> tuple[float, int]:
        """Give it all it takes for so long: the rate of the second half, and the deepest window in it."""
        chance = random.Random(1)
        in_flight: deque[tuple[float, float]] = deque()  # submitted, acknowledged
        now = free = start
        stored, deepest = 0, 0
        while now < start + seconds:
            while len(in_flight) * BATCH < depth.events:
                arrived = now + self.distance / 2
                free = max(free, arrived) + BATCH / self.rate * chance.uniform(0.4, 1.6)
                in_flight.append((now, free + self.distance / 2))
            submitted, now = in_flight.popleft()
            depth.answered(BATCH, now - submitted, now)
            if now > start + seconds / 2:
                stored += BATCH
                deepest = max(deepest, depth.events)
        return stored / (seconds / 2), deepest


@pytest.mark.parametrize("distance", [0.0, 0.001, 0.005])
def test_a_broker_next_door_needs_little(distance: float) -> None:
    depth = Depth(MOST, follows=True)
    rate, deepest = Broker(60_000, distance).drain(depth, 30.0)
    assert rate > 0.95 * 60_000
    assert deepest < 2 * LEAST


@pytest.mark.parametrize("distance", [0.02, 0.04, 0.06])
def test_a_far_broker_is_kept_busy(distance: float) -> None:
    rate, _ = Broker(60_000, distance).drain(Depth(MOST, follows=True), 10.0)
    best, _ = Broker(60_000, distance).drain(Depth(MOST), 10.0)
    assert rate > 0.9 * best


def test_it_deepens_when_the_broker_moves_away_and_returns_when_it_comes_back() -> None:
    depth = Depth(MOST, follows=True)
    near, far = Broker(60_000, 0.001), Broker(60_000, 0.04)
    near.drain(depth, 5.0)
    assert depth.events < 2 * LEAST
    far.drain(depth, 30.0, start=5.0)
    assert depth.events > 2 * LEAST
    near.drain(depth, 30.0, start=40.0)
    assert depth.events < 2 * LEAST


@pytest.mark.guarantee("G8")
@settings(max_examples=200)
@given(
    st.integers(1, 50_000),
    st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 100), st.floats(0, 20)), max_size=50),
)
def test_never_more_than_is_allowed_and_never_nothing(most: int, answers: list[tuple[int, float, float]]) -> None:
    depth, fixed, now = Depth(most, follows=True), Depth(most), 100.0
    for events, seconds, pause in answers:
        now += pause
        depth.answered(events, seconds, now)
        fixed.answered(events, seconds, now)
        assert min(most, LEAST) <= depth.events <= most
        assert fixed.events == most


@pytest.mark.parametrize(
    ("sink", "follows"),
    [
        ({"kind": "kafka"}, True),
        ({"kind": "kafka", "kafka": {"mode": "exactly-once"}}, False),
        ({"kind": "jetstream"}, False),
        ({"kind": "console"}, False),
    ],
)
def test_only_where_events_weigh_and_the_rate_does_not_depend_on_it(sink: dict[str, object], follows: bool) -> None:
    depth = depth_of(Config.model_validate({"sink": sink}))
    assert depth.events == (LEAST if follows else MOST)
