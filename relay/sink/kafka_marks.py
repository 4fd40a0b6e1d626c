"""How far each destination is known to hold what we published, and which events it holds beyond that. Pure.

A mark never goes back, and what the pipeline is told of it never passes an event that is stored and may still come.
"""

from __future__ import annotations

from collections.abc import Mapping

Held = dict[bytes, tuple[str, int]]
"""Ids that are stored, and where: destination and offset."""


class Marks:
    """Of one session; `known` begins with the checkpoint's."""

    def __init__(self, known: Mapping[str, int]) -> None:
        self.known = dict(known)  # after the opening: with the beginning of what is seen for the first time
        self.begins: dict[str, int] = {}  # where destinations begin, of those that were new to a session
        self.held: Held = {}  # what was stored when we opened, and did not come again yet
        self.duplicates = 0
        self._reached: dict[str, int] = {}  # marks for the pipeline, when the transaction is committed

    def first_seen(self, begins: Mapping[str, int]) -> None:
        self.known |= begins
        self.begins |= begins
        self._reached |= begins

    def reach(self, name: str, mark: int) -> None:
        self.known[name] = self._reached[name] = max(mark, self.known.get(name, 0))

    def is_held(self, event_id: bytes) -> bool:
        """Whether the event is stored; it is asked once, and counts as come again."""
        found = self.held.pop(event_id, None)
        if found is None:
            return False
        name, offset = found
        self.reach(name, offset + 1)
        self.duplicates += 1
        return True

    def settle(self) -> None:
        """What did not come again will not come any more."""
        self._reached |= {name: self.known[name] for name, _ in self.held.values()}
        self.held.clear()

    def take(self) -> dict[str, int]:
        """What was reached since the last call."""
        marks, self._reached = self._capped(self._reached), {}
        return marks

    def _capped(self, marks: dict[str, int]) -> dict[str, int]:
        """No mark passes an event that is stored and may still come: after a crash it must be found again."""
        for name, offset in self.held.values():
            if offset < marks.get(name, 0):
                marks[name] = offset
        return marks
