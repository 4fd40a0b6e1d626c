"""Chained frames as atomic batches (ADR-50 of NATS, servers from 2.12.1 on): all events of a batch are stored, or none.

That pays where the server syncs what it stores before it answers (`sync_interval: always`): it syncs once for a batch
then, not once for an event. Everything else stays as it is in `nats_fence`: the first event says behind which sequence
the batch belongs, and so a refused batch refuses those behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from relay.sink.nats_connection import Frame

MOST = 1000  # events of one batch: the server's limit
OVERHEAD = 160  # bytes by which the headers grow, at most

# Not complete: one of its events was refused for itself, or the leader changed. Holds an id that is stored already.
SPOILT = frozenset({10176, 10201})


def apart(frames: Iterable[Frame], homes: Mapping[bytes, str]) -> list[list[Frame]]:
    """The frames of each stream; `homes`: the streams, by a frame's beginning."""
    streams: dict[str, list[Frame]] = {}
    for frame in frames:
        streams.setdefault(homes[frame[0]], []).append(frame)
    return list(streams.values())


def batched(frames: Iterable[Frame], name: bytes, reply: bytes) -> list[Frame]:
    """The chained frames of one stream as batches; the last frame of each asks for the answer.

    `name` is different for every call of a connection, and from those of other connections.
    """
    todo = list(frames)
    done: list[Frame] = []
    for start in range(0, len(todo), MOST):
        chunk = todo[start : start + MOST]
        done += _batch(chunk, b"%b.%d" % (name, start), reply)
    return done


def answers(count: int) -> int:
    """How many answers the frames of so many events of one stream get."""
    return -(-count // MOST)


def _batch(frames: list[Frame], name: bytes, reply: bytes) -> Iterator[Frame]:
    last = len(frames)
    if last == 1:
        yield (frames[0][0], reply, *frames[0][2:])
        return
    for number, (route, _, head, body, line_end) in enumerate(frames, 1):
        sizes, version, expected, rest = head.split(b"\r\n", 3)
        size, total = sizes.split()
        added = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n" % (name, number)
        if number == last:
            added += b"Nats-Batch-Commit: 1\r\n"
        grown = len(added)
        if number == 1:
            added = expected + b"\r\n" + added
        else:
            grown -= len(expected) + 2
        sizes = b"%d %d" % (int(size) + grown, int(total) + grown)
        yield route, reply if number == last else b"", b"\r\n".join((sizes, version, added + rest)), body, line_end
