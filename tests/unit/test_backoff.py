"""Backoff: grows to its cap, never past it, and starts over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relay.backoff import Backoff, retry_delay

CHANCE = st.floats(0, 1, exclude_max=True)
SECONDS = st.floats(1e-6, 3600)


@given(SECONDS, SECONDS, st.lists(CHANCE, min_size=1, max_size=80))
def test_waits_double_up_to_the_cap_with_jitter_in_the_upper_half(
    initial: float, maximum: float, chances: list[float]
) -> None:
    initial, maximum = sorted((initial, maximum))
    backoff = Backoff(initial, maximum)
    for attempt, chance in enumerate(chances):
        nominal = min(maximum, initial * 2**attempt)
        wait = backoff.next(chance)
        assert nominal / 2 <= wait <= nominal
    assert backoff.attempt == len(chances)


@given(SECONDS, st.integers(0, 50))
def test_a_healthy_spell_starts_over(initial: float, attempts: int) -> None:
    backoff = Backoff(initial, initial * 1000)
    for _ in range(attempts):
        backoff.next(0.5)
    backoff.reset()
    assert backoff.next(0.0) == initial / 2
    assert backoff.attempt == 1


def test_an_outage_may_last_for_weeks() -> None:
    backoff = Backoff(1.0, 60.0)
    waits = [backoff.next(0.999) for _ in range(10_000)]
    assert max(waits) < 60.0
    assert set(waits[6:]) == {waits[-1]}


@given(st.integers(1, 2000), SECONDS, SECONDS, CHANCE)
def test_a_rejected_row_waits_its_share_and_at_most_a_fifth_more(
    attempts: int, initial: float, maximum: float, chance: float
) -> None:
    initial, maximum = sorted((initial, maximum))
    nominal = min(maximum, initial * 2.0 ** min(attempts - 1, 1000))
    assert nominal <= retry_delay(attempts, initial, maximum, chance) <= nominal * 1.2
    assert retry_delay(1, initial, maximum, 0.0) == initial
