"""The hot path in C, where it was built: all of this is None elsewhere, and Python does it all.

Python is the reference; see _hot.c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from relay.event import Event, Transaction
from relay.outbox import Binding
from relay.routing import Recipe

_native: Any
try:
    from relay import _hot as _native  # type: ignore[attr-defined,no-redef,unused-ignore]  # not built everywhere
except ImportError:
    _native = None

NATIVE = _native is not None

Frames = Callable[..., tuple[int, bytes]]
frames: Frames | None = _native.frames if NATIVE else None
"""Chained frames for JetStream; its docstring says how it is called."""

Walk = Callable[..., tuple[int, Transaction | None, int, int | None, int | None]]
walk: Walk | None = _native.walk if NATIVE else None
"""From message to message of pgoutput, with the readers of its relations; likewise."""


class Reader(Protocol):
    """Makes the events of one table's rows."""

    def read(
        self,
        messages: Sequence[bytes],
        at: int,
        transaction: Transaction,
        stamp: bytes,
        ordinal: int,
        events: list[Event],
        /,
    ) -> int:
        """Append the events of wal2json's rows from `at` on; returns where it stopped, in front of an unusual one."""


def reader(oid: int, binding: Binding, recipe: Recipe | None) -> Reader | None:
    """Of pgoutput's relation `oid`; None where the table is not a usual one, or there is no C."""
    return _reader(oid, (), binding.slots, binding, recipe)


def json_reader(
    between: tuple[bytes, ...], slots: tuple[int, ...], binding: Binding, recipe: Recipe | None
) -> Reader | None:
    """Of wal2json's rows: the bytes before, between and behind their values, the place of each value; None likewise."""
    return _reader(0, between, slots, binding, recipe)


def _reader(
    oid: int, between: tuple[bytes, ...], slots: tuple[int, ...], binding: Binding, recipe: Recipe | None
) -> Reader | None:
    if _native is None or recipe is None:
        return None
    try:
        made: Reader = _native.Reader(Event, oid, between, slots, binding.width, *recipe)
    except ValueError:  # wider than it can take
        return None
    return made
