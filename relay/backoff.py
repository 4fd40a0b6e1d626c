"""How long to wait before the next try. Pure: the chance is passed in."""

from __future__ import annotations


class Backoff:
    """Endless, exponential, capped, with jitter; starts over after a healthy spell."""

    def __init__(self, initial: float, maximum: float) -> None:
        self._initial = initial
        self._maximum = maximum
        self.attempt = 0

    def next(self, chance: float) -> float:
        """Seconds to wait now. `chance` in [0, 1) spreads relays that failed together over the upper half."""
        # The exponent is capped: 2.0**1024 is an OverflowError, and an outage may well last that many tries.
        wait = min(self._maximum, self._initial * 2.0 ** min(self.attempt, 64))
        self.attempt += 1
        return wait * (0.5 + chance / 2)

    def reset(self) -> None:
        self.attempt = 0


def retry_delay(attempts: int, initial: float, maximum: float, chance: float) -> float:
    """Seconds until a row is tried again that failed `attempts` times: min(initial · 2^(attempts-1), maximum) + jitter.

    `chance` in [0, 1) adds up to a fifth, so that rows that failed together do not come back together.
    """
    return min(maximum, initial * 2.0 ** min(max(attempts - 1, 0), 64)) * (1 + 0.2 * chance)
