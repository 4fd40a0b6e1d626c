"""What a subscriber notes: times of all arrivals, and which rows they were, in one byte per row."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import orjson

_ROW = re.compile(rb'"t\\*": ?(\d+), ?\\*"item\\*": ?\\*"(\d+)')  # bench_payload() puts them there; maybe escaped
_WHOLE_ROW = re.compile(_ROW.pattern + rb'\\*"')  # where the data may be cut anywhere
_ROW_BYTES = 64  # at most, of what it finds
_QUIET = 0.5


class Notes:
    """Times of all arrivals, and which rows they were."""

    def __init__(self, *, live: bool) -> None:
        self.written = array("q")
        self.arrived = array("q")
        self.seen = bytearray()
        self.live = live
        self.stopping = False
        self.complete = False  # everything that was stored at the beginning has been read
        self.events = 0
        self.last = time.monotonic()

    def arrivals(self, bodies: Iterator[bytes]) -> None:
        """What came at once. The clock is read first: taking the pieces apart is our time, not the tool's."""
        now = time.time_ns() // 1000
        before = self.events
        for body in bodies:
            self.note(body, now if self.live else None)
        if self.events != before:
            self.last = time.monotonic()

    def stretch(self, data: bytes) -> bytes:
        """Events in a stretch of bytes; returns its end, where one may begin that is not complete."""
        now = time.time_ns() // 1000
        end = 0
        for found in _WHOLE_ROW.finditer(data):
            end = found.end()
            self.note(found[0], now)
        if end:
            self.last = time.monotonic()
        return data[max(end, len(data) - _ROW_BYTES) :]

    def note(self, body: bytes, arrived: int | None) -> None:
        """One event, and when it arrived (microseconds of Unix time), if that is known."""
        self.events += 1
        found = _ROW.search(body)
        if found is None:
            return
        item = int(found[2])
        if item >= len(self.seen):
            self.seen.extend(bytes(item + 1024 - len(self.seen)))
        self.seen[item] = 1
        if arrived is not None:
            self.written.append(int(found[1]))
            self.arrived.append(arrived)

    @property
    def done(self) -> bool:
        return self.complete or (self.stopping and time.monotonic() - self.last > _QUIET)

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        self.stopping = True
        self.last = time.monotonic()

    def save(self, path: Path) -> None:
        """Whole or not at all: whoever sees the file may read it."""
        partial = path.with_suffix(".partial")
        partial.write_bytes(
            orjson.dumps(
                {
                    "written": self.written.tolist(),
                    "arrived": self.arrived.tolist(),
                    "events": self.events,
                    "distinct": self.seen.count(1),
                }
            )
        )
        partial.rename(path)
