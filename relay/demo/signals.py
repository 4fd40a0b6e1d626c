"""SIGINT and SIGTERM during the demo: the first one ends it in good order, the second one at once.

An exception that a signal's handler raises may strike between the fork of a server and the note of its pid, and Python
drops it where it strikes a destructor. So while servers start the first signal is only noted, and acted on between two.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Noted from the start; `act()` between two steps; `interrupt()` when nothing is started any more."""

    def __init__(self) -> None:
        self._noted = False
        for number in _NUMBERS:
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._noted = True
        _interrupt()

    def act(self) -> None:
        """End it now, if a signal came."""
        if self._noted:
            raise KeyboardInterrupt

    def interrupt(self) -> None:
        """From now on the first one is Python's ordinary interrupt, too; so is one that came before."""
        _interrupt()
        self.act()


@asynccontextmanager
async def first_sets(stop: asyncio.Event) -> AsyncIterator[None]:
    """In a running loop: the first signal sets the event, the second one is Python's ordinary interrupt."""
    loop = asyncio.get_running_loop()

    def came() -> None:
        stop.set()
        for number in _NUMBERS:
            loop.remove_signal_handler(number)
        _interrupt()

    for number in _NUMBERS:
        loop.add_signal_handler(number, came)
    try:
        yield
    finally:
        if not stop.is_set():
            came()


def _interrupt() -> None:
    for number in _NUMBERS:
        signal.signal(number, signal.default_int_handler)
