"""Fenced publishing to a stream that is ours alone: exactly once and in order, through crashes of everybody (G4).

Every event carries `Nats-Expected-Last-Sequence`, so each is stored only directly behind its predecessor: a lost or
refused event refuses all that follow, and only the last event of a batch needs an acknowledgement, which then speaks
for all. A zombie relay writes with an outdated expectation and is refused by the server.

After any failure the truth is read from the stream: the ids that it holds beyond `mark`, the sequence up to which the
checkpoint covers it. An event whose id is among them is stored already and is skipped. That needs no dedupe window, no
trust in LSNs (after a restore they are issued again), and holds for streamed and for polled events alike.
"""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from relay.errors import RelayError, SetupError, SinkUnavailable
from relay.event import Event, HeaderNames, Rejected
from relay.sink import nats_acks, subjects
from relay.sink.nats_acks import REJECTED
from relay.sink.nats_connection import ApiError, NatsConnection
from relay.sink.nats_streams import StreamState
from relay.sink.nats_window import MAX_HEADER_BYTES, Flight, Key, Window, sendable

WRONG_SEQUENCE = frozenset({10071, 10164})
_NO_MESSAGE = 10037
_AT_ONCE = 256  # requests under way while reading back


@dataclass(slots=True, eq=False)
class Chain:
    """The end of one stream."""

    stream: str
    sent: int  # sequence of the last event that was sent, if everything that was sent is stored
    held: dict[bytes, int] = field(default_factory=dict)  # ids beyond the checkpoint's mark, and their sequences
    anonymous: int = 0  # messages beyond the mark that are gone (consumed, expired): their ids are not known
    with_ids: bool = True  # False: this server may have poisoned the ids of events that it refused


async def read_chain(
    connection: NatsConnection, prefix: str, stream: str, mark: int | None, origin: str
) -> tuple[Chain, list[str]]:
    """The chain as the stream is now, and the writers other than ours that are beyond the mark."""
    info = await connection.request(f"{prefix}.STREAM.INFO.{stream}")
    state, last = info["state"], int(info["state"]["last_seq"])
    if mark is None:
        return Chain(stream, last), []
    if last < mark:
        raise SetupError(
            f"stream {stream} ends at sequence {last}, but this relay has stored events up to {mark}",
            hint="the stream was restored, or deleted and made again: what it lost is not published again by itself. "
            "Remove its entry from the column sink of outbox_relay_checkpoint to go on from here",
        )
    chain, strangers = Chain(stream, last), []
    first = max(mark + 1, int(state["first_seq"]))
    chain.anonymous = first - (mark + 1)

    async def look(seq: int) -> None:
        try:
            answer = await connection.request(f"{prefix}.STREAM.MSG.GET.{stream}", {"seq": seq})
        except ApiError as exc:
            if exc.err_code != _NO_MESSAGE:
                raise SinkUnavailable(f"stream {stream} cannot be read back: {exc}") from None
            chain.anonymous += 1
            return
        headers = _headers(answer["message"].get("hdrs", ""))
        event_id = headers.get("nats-msg-id") or headers.get("id")
        if event_id is None or not headers.get("relay-position", "").startswith(f"{origin}:"):
            strangers.append(headers.get("relay-position", "") or f"an unknown writer (sequence {seq})")
        else:
            chain.held[event_id.encode()] = seq

    for start in range(first, last + 1, _AT_ONCE):
        await asyncio.gather(*(look(seq) for seq in range(start, min(start + _AT_ONCE, last + 1))))
    return chain, strangers


class FencedWindow(Window):
    """A window of batches whose events are chained; see the module."""

    def __init__(
        self,
        connection: NatsConnection,
        find: Callable[[str], StreamState],
        chains: dict[str, Chain],
        *,
        ack_timeout: float,
        careful: bool,
    ) -> None:
        """`careful`: the first batch goes out event by event, to find out which one the stream does not take."""
        super().__init__(connection, find, strict=True, ack_timeout=ack_timeout)
        self._chains = chains
        self._ways: dict[str, tuple[bytes, Chain] | None] = {}
        self._waiting: dict[bytes, tuple[Flight, Chain, int]] = {}  # by token of a batch's last event in a stream
        self._careful = careful
        self._singles: deque[int] | None = None  # places in the careful batch that are not sent yet
        self._later: deque[Flight] = deque()  # batches behind the careful one
        self.suspicious = False  # the next window should be careful

    @property
    def on_the_wire(self) -> int:
        return len(self._waiting)

    def _way(self, topic: str) -> tuple[bytes, Chain] | None:
        """Beginning of the frame, and the chain; None if the topic is no subject."""
        try:
            return self._ways[topic]
        except KeyError:
            way = None
            if not subjects.fault(topic):
                way = (b"HPUB %b " % topic.encode(), self._chains[self._find(topic).name])
            self._ways[topic] = way
            return way

    def _send(self, flight: Flight) -> None:
        if self._careful:
            self._careful = False
            flight.remaining = len(flight.batch.events)
            self._singles = deque(range(len(flight.batch.events)))
            self._next_single(flight)
        elif self._singles is not None:
            self._later.append(flight)
        else:
            self._send_all(flight)
        if self._timer is None and self._flights:
            self._timer = self._loop.call_later(self._ack_timeout / 4, self._watch)

    def _send_all(self, flight: Flight) -> None:
        frames: list[list[bytes]] = []
        lasts: dict[Chain, int] = {}
        flight.remaining = 0
        for place, event in enumerate(flight.batch.events):
            frame = self._frame(flight, place, event)
            if frame is not None:
                lasts[frame[1]] = len(frames)
                frames.append(frame[0])
        for chain, place in lasts.items():
            self._expect(flight, chain, frames[place])
        flight.remaining = len(lasts)
        if frames:
            self._connection.send([tuple(frame) for frame in frames])
        if flight.remaining == 0:
            self._finish(flight)

    def _expect(self, flight: Flight, chain: Chain, frame: list[bytes]) -> None:
        token = b"%d" % self._next
        self._next += 1
        frame[1] = b"%b.%b " % (self._connection.inbox, token)
        self._waiting[token] = (flight, chain, chain.sent)

    def _frame(self, flight: Flight, place: int, event: Event) -> tuple[list[bytes], Chain] | None:
        """The event's frame with its place in the chain; None if it is stored already, or cannot be sent."""
        event_id, topic, key, names, values, body, _, _, _ = event
        if self._blocked and self._barred(flight, place, event, topic if key is None else key):
            return None
        way = self._way(topic)
        template, fixed = self._template(names)
        if template is None or way is None:
            self._refuse(flight, place, event, self._fault(event))
            return None
        prefix, chain = way
        if chain.held:
            seq = chain.held.pop(event_id, 0)
            if seq:
                flight.marks[chain.stream] = max(seq, flight.marks.get(chain.stream, 0))
                return None
        expected = b"%d" % chain.sent
        given = (expected, event_id, *values) if chain.with_ids else (expected, *values)
        text = b"".join(given)
        size = fixed + len(text)
        total = size + len(body or b"")
        if 10 in text or 13 in text or 0 in text or total > self._connection.max_payload or size > MAX_HEADER_BYTES:
            self._refuse(flight, place, event, self._misfit(size, total))
            return None
        chain.sent += 1
        return [prefix, b"", template % (size, total, *given), body or b"", b"\r\n"], chain

    def _template(self, names: HeaderNames) -> tuple[bytes | None, int]:
        try:
            return self._templates[names]
        except KeyError:
            with_ids = all(chain.with_ids for chain in self._chains.values())
            block = b"NATS/1.0\r\nNats-Expected-Last-Sequence: %b\r\n" + (b"Nats-Msg-Id: %b\r\n" if with_ids else b"")
            block += names.block + b"\r\n"
            fixed = len(block % ((b"",) * (len(names.names) + 1 + with_ids)))
            if len(self._templates) >= 2000:
                self._templates.clear()
            known = self._templates[names] = (b"%d %d\r\n" + block if sendable(names) else None, fixed)
            return known

    def on_acks(self, tokens: list[bytes]) -> None:
        if self.failure is not None:
            return
        for token in tokens:
            entry = self._waiting.pop(token, None)
            if entry is None:
                continue
            flight, chain, seq = entry
            flight.marks[chain.stream] = max(seq, flight.marks.get(chain.stream, 0))
            self._answered(flight)

    def on_reply(self, token: bytes, status: bytes, payload: bytes) -> None:
        entry = self._waiting.pop(token, None)
        if entry is None or self.failure is not None:
            return
        flight, chain, _ = entry
        try:
            ack = nats_acks.read(status, payload)
        except RelayError as exc:
            self.fail(exc)
            return
        alone = self._singles is not None
        if ack.code in WRONG_SEQUENCE:
            self.suspicious = not alone
            self.fail(SinkUnavailable(f"stream {chain.stream} refused the chain: {ack.error} ({ack.code})"))
        elif ack.code == 0 and ack.seq > 0 and ack.duplicate:
            self.duplicates += 1
            chain.sent -= 1  # it was stored before the chain began, and takes no place in it
            if alone:
                self._answered(flight)
            else:
                self.suspicious = True
                self.fail(SinkUnavailable(f"stream {chain.stream} holds an event of the batch already"))
        elif ack.code in REJECTED and alone:
            chain.sent -= 1
            place = flight.single
            self._refuse(flight, place, flight.batch.events[place], f"JetStream: {ack.error} ({ack.code})")
            self._answered(flight)
        else:
            self.suspicious = ack.code in REJECTED
            verdict = nats_acks.judge(ack, chain.stream)
            self.fail(
                SinkUnavailable(f"stream {chain.stream}: {ack.error} ({ack.code})")
                if verdict is None or isinstance(verdict, str)
                else verdict
            )

    def _answered(self, flight: Flight) -> None:
        flight.remaining -= 1
        if self._singles is not None:
            self._next_single(flight)
        elif flight.remaining == 0:
            self._finish(flight)

    def _next_single(self, flight: Flight) -> None:
        """Of the careful batch: the next event, alone on the wire; after the last one everything else follows."""
        while self._singles:
            place = self._singles.popleft()
            frame = self._frame(flight, place, flight.batch.events[place])
            if frame is not None:
                flight.single = place
                self._expect(flight, frame[1], frame[0])
                self._connection.send([tuple(frame[0])])
                return
            flight.remaining -= 1
        self._singles = None
        self._finish(flight)
        while self._later and self.failure is None:
            self._send_all(self._later.popleft())

    def _finish(self, flight: Flight) -> None:
        flight.batch.marks = flight.marks
        super()._finish(flight)

    def _refuse(self, flight: Flight, place: int, event: Event, reason: str) -> None:
        flight.rejected[place] = Rejected(event, reason)
        self._blocked.setdefault(event.topic if event.key is None else event.key, event.id)

    def _barred(self, flight: Flight, place: int, event: Event, key: Key) -> bool:
        """Behind a rejected event of its key, unless it is that event itself, submitted again."""
        culprit = self._blocked.get(key)
        if culprit is None:
            return False
        if culprit == event.id:
            del self._blocked[key]
            return False
        reason = f"behind rejected event {culprit.decode(errors='replace')} of the same key"
        flight.rejected[place] = Rejected(event, reason)
        return True


def _headers(encoded: str) -> dict[str, str]:
    """A stored message's headers, names in lower case; the first of a name counts."""
    found: dict[str, str] = {}
    for line in base64.b64decode(encoded).decode(errors="replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip().lower(), value.strip())
    return found
