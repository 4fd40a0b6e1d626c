"""Hands batches to librdkafka and counts what it stored of them, in C: relay/_kafka.c, where it was built.

Python is the reference (`kafka_session`), and does it alone where there is no C, or a librdkafka that is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from confluent_kafka import cimpl

from relay.event import Event

_native: Any
try:
    from relay import _kafka as _native  # type: ignore[attr-defined,no-redef,unused-ignore]  # not built everywhere
except ImportError:
    _native = None

LIBRARY: str | None = None
if _native is not None and ";" not in _native.__file__ and _native.find(cimpl.__file__):  # ";" separates the paths
    LIBRARY = _native.__file__
"""What `plugin.library.paths` must name for a producer to be counted; None where nothing can count."""


Ready = dict[str, set[bytes] | None]
"""Topics, and which of their keys may be sent without more ado; None: all, and events without a key."""


class Tally(Protocol):
    """Of one producer. A batch has a slot from `launch` to `clear`."""

    def arm(self) -> None:
        """The next producer that this thread makes with the plugin is the one to count."""

    def armed(self) -> bool:
        """Whether the producer that was made is counted."""

    def fileno(self) -> int:
        """Readable when there are news."""

    def launch(self) -> int:
        """A slot."""

    def produce(
        self, slot: int, events: Sequence[Event], at: int, stop: int, ready: Ready, partition: int = -1, /
    ) -> tuple[int, int]:
        """Hand over the events from `at` up to `stop`, as long as they are ready; to this partition, if one is named.

        Returns where it stopped, and librdkafka's code if it does not take that event. 0: it is not ready, or cannot be
        written at all.
        """

    def seal(self, slot: int, /) -> None:
        """Nothing more comes: when everything is reported, that is news."""

    def news(self) -> list[int]:
        """Slots that are sealed and wholly reported, or of which an event failed, since the last call."""

    def report(self, slot: int, /) -> tuple[int, list[tuple[int, int]]]:
        """How many events were stored, and which were not: index and error code. The rest is not reported yet."""

    def clear(self, slot: int, /) -> None:
        """The slot is free again. Raises ValueError while something in it is not reported."""


def tally() -> Tally | None:
    if LIBRARY is None:
        return None
    made: Tally = _native.Tally()
    return made
