"""How the events of a batch are put on a fenced stream: in runs that one answer speaks for, or in waves. Pure.

A run are events that follow each other in one stream. While everything on the wire is ours, the last of them is stored
with the sequence that it must have only if all of them are; `nats_fence` says when that is so.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from relay.event import Event
from relay.sink.nats_chain import Chain
from relay.sink.nats_window import Flight

RUN = 100  # events at most: a server that is slow must be heard within `ack_timeout`

Ways = dict[str, tuple[bytes, Chain] | None]


class Asked:
    """Answers that are to come to one reply subject."""

    __slots__ = ("answers", "events", "flight", "seq")

    def __init__(self, flight: Flight, answers: int, *, events: int = 1, seq: int = 0) -> None:
        self.flight = flight
        self.answers = answers
        self.events = events  # that each of them speaks for
        self.seq = seq  # that it must name; 0: any


class Run(NamedTuple):
    """Of the places in a batch that are sent: from `start` up to `stop`."""

    start: int
    stop: int
    chain: Chain


def runs(events: Sequence[Event], places: Sequence[int], ways: Ways) -> Iterator[Run]:
    """The places of events that follow each other, have the same header names, and go to the same stream."""
    start = 0
    before: tuple[int, object, Chain] | None = None
    for at, place in enumerate(places):
        event = events[place]
        way = ways[event.topic]
        assert way is not None  # else it would not be sent
        if before is not None and (before != (place - 1, event.header_names, way[1]) or at - start == RUN):
            yield Run(start, at, before[2])
            start = at
        before = place, event.header_names, way[1]
    if before is not None:
        yield Run(start, len(places), before[2])


def waves(events: Sequence[Event]) -> deque[list[int]]:
    """The places of the events, so that those of a key are in different waves, in their order."""
    found: deque[list[int]] = deque()
    seen: Counter[str | bytes] = Counter()
    for place, event in enumerate(events):
        key = event.topic if event.key is None else event.key
        number = seen[key]
        seen[key] = number + 1
        if number == len(found):
            found.append([])
        found[number].append(place)
    return found
