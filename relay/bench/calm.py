"""A round in which the hypervisor gave the machine's CPU to others is measured again, and put aside, never thrown away.

What decides is the stolen share alone, never a figure of the tool: a slow round on a calm machine stays.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from relay.bench.result import Measurement

TRIES = 10  # rounds in all


class Rounds(NamedTuple):
    kept: list[Measurement]
    aside: list[Measurement]


async def calmest(
    measure: Callable[[], Awaitable[Sequence[Measurement]]], most: float | None, say: Callable[[str], None]
) -> Rounds:
    """The first round in which at most that share was stolen; the calmest of TRIES where none was so calm.

    None: whatever the first round had.
    """
    rounds: list[Sequence[Measurement]] = [await measure()]
    while most is not None and _stolen(rounds[-1]) > most and len(rounds) < TRIES:
        say(f"{_stolen(rounds[-1]):.1%} of the CPU was stolen, measuring again")
        rounds.append(await measure())
    rounds.sort(key=_stolen)
    return Rounds(list(rounds[0]), [each for other in rounds[1:] for each in other])


def _stolen(found: Sequence[Measurement]) -> float:
    return max((each.stolen_share or 0.0 for each in found), default=0.0)
