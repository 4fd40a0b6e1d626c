"""Keys that are blocked by a rejected event. Pure.

A rejected event blocks its key: nothing that comes behind it may be sent, or the key would lose its order. That lasts
until that very event (same id) is submitted again. Events without a key have no order, block nothing, and never wait.
"""

from __future__ import annotations

from relay.event import Event

Lane = tuple[str, bytes]  # topic and key: what has an order

Blocked = dict[Lane, bytes]  # keys behind a rejected event: its id


def block(blocked: Blocked, event: Event) -> None:
    if event.key is not None:
        blocked.setdefault((event.topic, event.key), event.id)


def behind(blocked: Blocked, event: Event) -> str | None:
    """Why the event is rejected, if its key is blocked; the culprit itself, submitted again, lifts the block."""
    if event.key is None:
        return None
    lane = event.topic, event.key
    culprit = blocked.get(lane)
    if culprit == event.id:
        del blocked[lane]
    elif culprit is not None:
        return f"behind rejected event {culprit.decode(errors='replace')} of the same key"
    return None
