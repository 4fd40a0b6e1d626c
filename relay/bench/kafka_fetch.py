"""Fetches from Kafka on sockets of our own: when which offsets arrived. What is in them is read after the run.

A client library would cost three times as much CPU and two more threads to wake, of the cores that are measured. So
this knows one request of Kafka's protocol, Fetch 11 (brokers from 2.3 on), without TLS or logins, and of a batch of
events only which offsets it has: nothing is decompressed.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from struct import Struct
from typing import NamedTuple

_FETCH, _VERSION, _CLIENT = 1, 11, b"relay-bench"
_MAX_WAIT = 100  # ms that a broker waits for an event before it answers that there is none
_MAX_BYTES = 4 << 20
_READ_COMMITTED = 1

_SIZE = Struct(">i")
_HEAD = Struct(f">hhih{len(_CLIENT)}s")  # key, version, correlation, client
_ASK = Struct(">iiiibii")  # replica, wait, least bytes, most bytes, isolation, session, its epoch
_TOPICS = Struct(">ih")  # how many, bytes of the first one's name
_NONE = b"\0\0\0\0"
_PARTITION = Struct(">iiqqi")  # number, leader's epoch, offset, start of the log, most bytes
_ANSWER = Struct(">iihi")  # correlation, throttled for, error, session
_STATE = Struct(">ihqqqi")  # number, error, high watermark, last stable offset, start of the log, aborted transactions
_ABORTED = 16
_RECORDS = Struct(">ii")  # preferred replica, bytes
_BATCH = Struct(">qiibIhi")  # first offset, length, leader's epoch, magic, checksum, attributes, last offset delta
_LAST_EPOCH = (1 << 31) - 1
_FRAME = 12  # first offset and length are not in the length

# The topic was made a moment ago: not all brokers know it, or who leads its partitions.
_NOT_YET = frozenset({3, 5, 6, 74, 75, 100})


# The broker has forgotten the session, or never heard of it: a new one begins with all partitions.
_NO_SESSION = frozenset({70, 71})


class Span(NamedTuple):
    """Consecutive offsets that arrived together."""

    partition: int
    first: int
    end: int  # the one behind the last


class Leader:
    """The connection to one broker, for the partitions that it leads, and the fetch session there.

    In a session only what has changed is asked for and answered, as every consumer does: a request that names all
    partitions costs us and the broker a quarter more.
    """

    def __init__(self, address: tuple[str, int], topic: str, partitions: Sequence[int]) -> None:
        self._socket = socket.create_connection(address, timeout=10.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._topic = topic.encode()
        self._next = dict.fromkeys(partitions, 0)
        self._changed = dict(self._next)  # offsets that the broker does not know yet
        self._session = self._epoch = 0
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def ask(self) -> None:
        """For whatever comes next; a broker answers one request of a connection at a time."""
        body = request(self._topic, self._changed, self._session, self._epoch)
        self._socket.sendall(_SIZE.pack(len(body)) + body)

    def take(self) -> list[Span] | None:
        """What the socket has; None while the answer is not complete."""
        data = self._socket.recv(1 << 20)
        if not data:
            raise SystemExit("Kafka closed the connection")
        self._received += data
        if len(self._received) < 4 or len(self._received) < 4 + _SIZE.unpack_from(self._received)[0]:
            return None
        answer = bytes(self._received)[4:]
        self._received.clear()  # one request, one answer
        session = session_of(answer)
        if session is None:
            self._session, self._epoch, self._changed = 0, 0, dict(self._next)
            return []
        self._session, self._epoch = session, (self._epoch % _LAST_EPOCH) + 1 if session else 0
        spans = list(spans_of(answer))
        self._changed = {span.partition: span.end for span in spans}
        self._next |= self._changed
        if not session:  # the broker keeps none for us
            self._changed = dict(self._next)
        return spans

    def close(self) -> None:
        self._socket.close()


def fetched(leaders: Sequence[Leader], timeout: float) -> list[tuple[int, Span]]:
    """What arrived by now, or within `timeout` seconds, and when (microseconds of Unix time).

    Every leader has been asked, and is asked again. The clock is read first: the rest is our time, not the tool's.
    """
    found: list[tuple[int, Span]] = []
    ready, _, _ = select.select(leaders, (), (), timeout)
    now = time.time_ns() // 1000
    for leader in ready:
        spans = leader.take()
        if spans is not None:
            leader.ask()
            found += [(now, span) for span in spans]
    return found


def request(topic: bytes, offsets: Mapping[int, int], session: int = 0, epoch: int = 0) -> bytes:
    """Fetch, from these offsets of the topic's partitions on; in a session also from where the others are."""
    parts = [
        _HEAD.pack(_FETCH, _VERSION, 0, len(_CLIENT), _CLIENT),
        _ASK.pack(-1, _MAX_WAIT, 1, _MAX_BYTES, _READ_COMMITTED, session, epoch),
    ]
    if offsets:
        parts.append(_TOPICS.pack(1, len(topic)) + topic + _SIZE.pack(len(offsets)))
        parts += [_PARTITION.pack(number, -1, offset, -1, _MAX_BYTES) for number, offset in offsets.items()]
    else:
        parts.append(_NONE)
    parts.append(_NONE + b"\0\0")  # no topics to forget, no rack
    return b"".join(parts)


def session_of(answer: bytes) -> int | None:
    """The session that the broker keeps for us, 0: none; None: it does not know ours (any more)."""
    _, _, error, session = _ANSWER.unpack_from(answer)
    if error in _NO_SESSION:
        return None
    _refused(error)
    return int(session)


def spans_of(answer: bytes) -> Iterator[Span]:
    """The offsets in an answer to `request`."""
    at = _ANSWER.size
    (topics,) = _SIZE.unpack_from(answer, at)
    at += 4
    for _ in range(topics):
        at += 2 + int.from_bytes(answer[at : at + 2], "big")
        (partitions,) = _SIZE.unpack_from(answer, at)
        at += 4
        for _ in range(partitions):
            number, error, *_, aborted = _STATE.unpack_from(answer, at)
            _refused(error)
            at += _STATE.size + _ABORTED * max(aborted, 0)
            _, size = _RECORDS.unpack_from(answer, at)
            at += _RECORDS.size
            if size > 0:
                yield from _batches(number, answer, at, at + size)
                at += size


def _batches(partition: int, data: bytes, at: int, stop: int) -> Iterator[Span]:
    """A broker cuts the last one where the answer is full: it comes again."""
    while at + _BATCH.size <= stop:
        first, length, *_, delta = _BATCH.unpack_from(data, at)
        at += _FRAME + length
        if at <= stop:
            yield Span(partition, first, first + delta + 1)


def _refused(error: int) -> None:
    if error and error not in _NOT_YET:
        raise SystemExit(f"Kafka refused to be read: error {error}")
