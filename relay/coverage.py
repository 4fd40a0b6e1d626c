"""Coverage: how far what is acknowledged covers the broker's destinations, by the marks of a sink with a fence (G4).

A mark is the end of a destination: what it holds beyond is read back when the sink opens, and is not published again.
What is saved with an LSN must never cover more than the events before it, else a crash looks for stored events behind
their mark; and it must never be called settled while something may still come that the broker holds already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from relay.errors import RelayError, TransientError
from relay.lsn import LSN
from relay.sink import ROUTING, UNCOUNTABLE, Sink


class Coverage:
    """Lasts as long as the pipeline. Empty for a sink without marks, and then nothing here matters."""

    def __init__(self) -> None:
        self.marks: dict[str, int] = {}  # by all that is acknowledged
        self.whole: dict[str, int] = {}  # by what is before the acknowledged LSN: whole transactions
        self.origin = ""
        self.routing = 0  # its fingerprint
        self.same_order = False  # what comes after the marks comes as it came before: their successors can be counted
        self.settled = False  # everything has come by that the broker held beyond the marks when it was opened
        self.settled_at: LSN | None = None  # streaming: here it has
        self.horizon: int | None = None  # it is of transactions older than this
        self._last_commit = 0  # commit LSN of the last acknowledged event
        self._uncountable = 0  # what the sink itself says of its marks
        self._injecting = False
        self._opened_before = False

    def begin(self) -> None:
        """For a source that begins here: what is acknowledged is before it."""
        self.whole, self._last_commit = self.marks, 0

    def hand_to(self, sink: Sink) -> None:
        """Before the sink is opened."""
        self.settled, self.settled_at, self.horizon = False, None, None
        sink.resume(self.marks if self.same_order else {**self.marks, UNCOUNTABLE: 1}, self.origin)

    def opened(self, marks: Mapping[str, int]) -> None:
        """The sink says where its destinations are; it meets some for the first time."""
        met = self.marks.keys() - {UNCOUNTABLE, ROUTING} if self._opened_before else frozenset()
        self.marks, self._uncountable = {}, 0
        self.note({**marks, ROUTING: self.routing} if marks else {})
        said = {name: mark for name, mark in self.whole.items() if name not in (UNCOUNTABLE, ROUTING)}
        # What was first met within the transaction under way is not covered: the sink knows where it begins.
        whole = {n: said.get(n, mark) for n, mark in self.marks.items() if n in said or n not in met}
        self.whole = self.marks if whole == self.marks else whole
        self._opened_before = True

    def acknowledged(self, marks: Mapping[str, int], last_commit: int) -> None:
        """A batch of the source's is done, with an event of `last_commit` at its end."""
        self.note(marks)
        self._last_commit = last_commit

    def injected(self, marks: Mapping[str, int]) -> None:
        """A batch is done that is not the source's. It belongs to no transaction, so it is whole where all else is."""
        all_whole = self.whole is self.marks
        self.note(marks)
        if all_whole:
            self.whole = self.marks

    def advance(self, end: LSN) -> None:
        """Everything before `end` is acknowledged."""
        if end > self._last_commit:
            self.whole = self.marks

    def reached(self, acknowledged: LSN) -> None:
        """The stream is acknowledged up to here."""
        if self.settled_at is not None and acknowledged >= self.settled_at:
            self.settled, self.settled_at = True, None

    def settle(self, before: int) -> None:
        """The source has shown everything of transactions before this one: what the broker held has come by now.

        Not so while one that is older than the opening may still show rows: it waits for a standby, or the round was
        begun by another life.
        """
        if self.horizon is not None and before >= self.horizon:
            self.settled = True

    @contextmanager
    def injecting(self) -> Iterator[None]:
        """Meanwhile the marks say that what lies beyond them is not only the source's events in their order.

        On a regular end everything injected is covered by the marks; else they go on saying so, for the next life.
        """
        self._injecting = True
        self.note({})
        try:
            yield
        except RelayError as exc:
            if not isinstance(exc, TransientError):  # a page that was refused: it is over, too
                self._end_injecting()
            raise
        self._end_injecting()

    def _end_injecting(self) -> None:
        self._injecting = False
        if self.marks:
            self.marks[UNCOUNTABLE] = self._uncountable

    def note(self, marks: Mapping[str, int]) -> None:
        """What is acknowledged now covers this much."""
        self._uncountable = marks.get(UNCOUNTABLE, self._uncountable)
        if not marks and not (self._injecting and self.marks):
            return
        self.marks = {**self.marks, **marks}  # a new one: `whole` keeps the old
        if self._injecting and self.marks:
            self.marks[UNCOUNTABLE] = 1
